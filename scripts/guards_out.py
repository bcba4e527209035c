"""Take out the guards of each of the 39 situations, one at a time, and see whether its test fails.

    python scripts/guards_out.py --jobs 2
    python scripts/guards_out.py --number 24 --number 34

`docs/situations.md` says which tests are about which situation. Each removal is made in a copy of
the package, on which all tests of its number run. It is found if the tests that it names fail (any,
where it names none), and fail of themselves: code that doesn't run proves nothing. Exits with 1
if a removal survives, 2 if a text is not found exactly once or a test fails without any removal.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Sequence

from changed_copies import PACKAGE, ROOT, Job, Outcome, preload, run
from guards import REMOVALS, Edit, Removal

SITUATIONS = ROOT / "tests" / "situations"
TEST = re.compile(r"^def (test_(\d\d)_\w+)", re.MULTILINE)
BROKEN = re.compile(r"\b(NameError|UnboundLocalError|SyntaxError|ImportError|IndentationError)\b")
"""What says that a replacement is no code, and not that a guard is missing."""


def by_number() -> dict[int, list[str]]:
    """Situation -> ids of its tests under `tests/`."""
    found: dict[int, list[str]] = {}
    for path in sorted(SITUATIONS.glob("test_*.py")):
        for name, number in TEST.findall(path.read_text("utf-8")):
            found.setdefault(int(number), []).append(f"situations/{path.name}::{name}")
    return found


def times_found(edit: Edit) -> int:
    """How often the text of an edit is in its file."""
    file, before, _ = edit
    return (PACKAGE / file).read_text("utf-8").count(before)


def without(edits: Sequence[Edit]) -> dict[str, str]:
    """File under the package -> its text after some edits."""
    texts: dict[str, str] = {}
    for file, before, after in edits:
        text = texts.get(file) or (PACKAGE / file).read_text("utf-8")
        texts[file] = text.replace(before, after)
    return texts


def verdict(taken: Removal, outcome: Outcome) -> str:
    """Whether a removal was found, has SURVIVED, or is BROKEN: the copy itself is at fault."""
    if outcome.code is None:
        return "TIMEOUT"
    failed = [line for line in outcome.failed if taken.test is None or f"::{taken.test}" in line]
    if any(BROKEN.search(line) for line in outcome.failed) or outcome.code not in (0, 1):
        return "BROKEN"
    return "found" if failed else "SURVIVED"


def names(outcome: Outcome) -> list[str]:
    """The tests that failed, with their parameters, and the start of the reason."""
    return [line.partition("::")[2] for line in outcome.failed] or outcome.log.splitlines()[-1:]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--number", type=int, action="append", help="some situations")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=300, help="seconds for one removal")
    parser.add_argument("--reasons", action="store_true", help="print why tests failed")
    arguments = parser.parse_args()
    chosen = [r for r in REMOVALS if not arguments.number or r.number in arguments.number]
    stale = [(r, e) for r in chosen for e in r.edits if times_found(e) != 1]
    for taken, edit in stale:
        print(f"{taken.number}, {taken.what}: found {times_found(edit)} times in {edit[0]}:")
        print(edit[1])
    if stale:
        return 2

    os.environ["COLUMNS"] = "200"  # room for the reasons in pytest's summary
    preload()
    tests = by_number()
    numbers = sorted({taken.number for taken in chosen})
    jobs = [Job({}, [test for number in numbers for test in tests[number]])]
    jobs += [Job(without(taken.edits), tests[taken.number]) for taken in chosen]
    verdicts = []
    print("| | guard taken out | verdict | tests that failed |\n|---|---|---|---|")
    ((_, untouched),) = run(jobs[:1], 1, 10 * arguments.timeout)
    if untouched.code:
        print(f"Tests fail without any removal:\n{untouched.log[-2000:]}")
        return 2
    for number, outcome in run(jobs[1:], arguments.jobs, arguments.timeout):
        taken = chosen[number]
        verdicts.append(verdict(taken, outcome))
        short = dict.fromkeys(re.split(r"\[| - ", name)[0] for name in names(outcome))
        shown = ", ".join(f"`{name}`" for name in short)
        print(f"| {taken.number} | {taken.what} | {verdicts[-1]} | {shown} |", flush=True)
        if arguments.reasons or verdicts[-1] != "found":
            print("\n".join(f"    {name}" for name in names(outcome)), flush=True)
    print(f"{verdicts.count('found')} of {len(verdicts)} removals are found by their tests")
    return 0 if set(verdicts) == {"found"} else 1


if __name__ == "__main__":
    raise SystemExit(main())
