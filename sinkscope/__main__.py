"""`python -m sinkscope`."""

from sinkscope.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
