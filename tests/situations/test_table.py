"""The table of situations in the documentation and the tests here agree, one row for each."""

from __future__ import annotations

import re
from pathlib import Path

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
