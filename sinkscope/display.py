"""How results and parts show themselves in a notebook: a small table, never a dump."""

from __future__ import annotations

import html
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

MAX_ROWS = 12
MAX_CELL = 120


class HtmlTable:
    """Base of what has something to show in a notebook."""

    @abstractmethod
    def overview(self) -> list[tuple[str, str]]:
        """What a reader wants to know first, as pairs of name and value."""

    def _repr_html_(self) -> str:
        return html_table(type(self).__name__, self.overview())


def html_table(
    caption: str, rows: Sequence[Sequence[object]], header: Sequence[str] | None = None
) -> str:
    """A table with everything in it escaped; long cells and tables are cut, and say so.

    Args:
        caption: above the table.
        rows: cells, row by row.
        header: names of the columns.
    """
    head = "" if header is None else f"<thead>{_row(header, 'th')}</thead>"
    shown = "".join(_row(row, "td") for row in rows[:MAX_ROWS])
    left = len(rows) - MAX_ROWS
    more = f"<tfoot><tr><td>and {left} more</td></tr></tfoot>" if left > 0 else ""
    title = f"<caption><b>{html.escape(caption)}</b></caption>"
    return f"<table>{title}{head}<tbody>{shown}</tbody>{more}</table>"


def _row(cells: Sequence[object], tag: str) -> str:
    return "<tr>" + "".join(f"<{tag}>{_cell(cell)}</{tag}>" for cell in cells) + "</tr>"


def _cell(value: Any) -> str:
    text = str(value)
    if len(text) > MAX_CELL:
        text = text[: MAX_CELL - 1] + "\N{HORIZONTAL ELLIPSIS}"
    return html.escape(text)


def number(value: float) -> str:
    """A number with four significant digits."""
    return f"{value:.4g}"


def percent(value: float, digits: int = 1) -> str:
    """A share in percent; what rounds to zero has no sign."""
    text = f"{value:.{digits}%}"
    return text.lstrip("-") if float(text[:-1]) == 0 else text


def numbers(values: Sequence[object]) -> str:
    """A few values side by side; "none" for none."""
    return ", ".join(str(v) for v in values) or "none"
