"""The table of situations, the tests here, and the list of guards to take out agree."""

from __future__ import annotations

import re
from pathlib import Path

from guards import REMOVALS
from guards_out import by_number, times_found, without

HERE = Path(__file__).parent
TABLE = HERE.parents[1] / "docs" / "situations.md"
ROW = re.compile(r"^\| (\d+)( ★)? \| (.+?) \| (.+?) \| (.+?) \| (.+?) \|$", re.MULTILINE)
STARRED = [1, 2, 3, 12, 18, 21, 22, 24, 25, 34]


def test_every_situation_has_a_row_and_a_test() -> None:
    rows = ROW.findall(TABLE.read_text("utf-8"))
    assert [int(number) for number, *_ in rows] == list(range(1, 40))
    assert [int(number) for number, star, *_ in rows if star] == STARRED
    written = [
        name
        for path in sorted(HERE.glob("test_*.py"))
        for name in re.findall(r"^def (test_\d\d_\w+)", path.read_text("utf-8"), re.MULTILINE)
    ]
    named: list[str] = []
    for number, _, _, _, how, tests in rows:
        assert set(how.split(", ")) <= {"handles", "refuses", "reports"}, number
        names = re.findall(r"`(test_\w+)`", tests)
        assert names, number
        assert all(name.startswith(f"test_{int(number):02}_") for name in names)
        named += names
    assert sorted(named) == sorted(written)


def test_every_guard_is_where_the_list_of_them_has_it() -> None:
    """`scripts/guards_out.py` takes each one out; here only that there is what it takes."""
    for taken in REMOVALS:
        assert [times_found(edit) for edit in taken.edits] == [1] * len(taken.edits), taken
        for file, text in without(taken.edits).items():
            compile(text, file, "exec")


def test_every_test_of_a_situation_has_a_guard_to_take_out() -> None:
    expected: set[tuple[int, str]] = set()
    covered: set[tuple[int, str]] = set()
    for number, tests in by_number().items():
        names = [test.rpartition("::")[2] for test in tests]
        expected |= {(number, name) for name in names}
        for taken in REMOVALS:
            if taken.number == number:
                # With several tests, each removal says which of them it is about.
                assert taken.test in (names if len(names) > 1 else [None]), taken
                covered.add((number, taken.test or names[0]))
    assert covered == expected
    assert sorted({number for number, _ in covered}) == list(range(1, 40))
