"""Run the example notebooks without Jupyter, and keep their printed output up to date.

    python examples/run_notebooks.py            # run all, fail where an assertion fails
    python examples/run_notebooks.py --write    # and store what each cell prints

Cells tagged "install" are left out. All other code cells run in order in one namespace.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).resolve().parent


def read(path: Path) -> dict[str, Any]:
    """A notebook as the JSON that it is."""
    return json.loads(path.read_text("utf-8"))


def source(cell: dict[str, Any]) -> str:
    """The text of a cell."""
    return "".join(cell["source"])


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    """The code cells that run here, in order."""
    return [
        cell
        for cell in notebook["cells"]
        if cell["cell_type"] == "code" and "install" not in cell["metadata"].get("tags", [])
    ]


def execute(notebook: dict[str, Any], name: str) -> list[str]:
    """Run a notebook; what each of its code cells prints.

    Args:
        notebook: its JSON.
        name: for tracebacks.
    """
    namespace: dict[str, Any] = {"__name__": "__main__"}
    printed = []
    for number, cell in enumerate(code_cells(notebook), 1):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile(source(cell), f"{name}, code cell {number}", "exec"), namespace)
        printed.append(out.getvalue())
    return printed


def stored_output(cell: dict[str, Any]) -> str:
    """What a cell printed when its output was stored."""
    return "".join(text for output in cell["outputs"] for text in output.get("text", []))


def store_output(cell: dict[str, Any], text: str) -> None:
    """Put printed text into a cell."""
    lines = text.splitlines(keepends=True)
    cell["outputs"] = [{"name": "stdout", "output_type": "stream", "text": lines}] if lines else []


def main() -> None:
    """Run all notebooks; with --write, store what they print."""
    for path in sorted(EXAMPLES.glob("*.ipynb")):
        notebook = read(path)
        printed = execute(notebook, path.name)
        if "--write" in sys.argv[1:]:
            for cell, text in zip(code_cells(notebook), printed, strict=True):
                store_output(cell, text)
            path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", "utf-8")
        print(f"{path.name}: {len(printed)} code cells")


if __name__ == "__main__":
    main()
