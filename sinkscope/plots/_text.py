"""Text that comes from outside, made safe and visible for plotly's labels."""

from __future__ import annotations

import html
import unicodedata

_VISIBLE = {" ": "␣", "\n": "↵", "\r": "␍", "\t": "⇥"}
_HIDDEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp", "Zs"}


def safe(text: object) -> str:
    """Text as it is, without being taken for plotly's markup or for TeX.

    Control characters are written as escapes, line breaks as spaces.
    """
    one_line = " ".join(str(text).split())
    shown = "".join(c if c == " " else _visible(c) for c in one_line)
    return _escape(shown)


def token_label(text: object, longest: int = 12) -> str:
    """A token with its spaces, breaks and control characters visible, cut to `longest`."""
    shown = "".join(_VISIBLE.get(c) or _visible(c) for c in str(text))
    if len(shown) > longest:
        shown = shown[: longest - 1] + "…"
    return _escape(shown) or "(empty)"


def wrapped(label: object, width: int = 12) -> str:
    """A safe label on several lines, broken at spaces."""
    lines: list[str] = []
    for word in str(label).split():
        if lines and len(lines[-1]) + 1 + len(word) <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return "<br>".join(safe(line) for line in lines)


def numbers(values: object) -> str:
    """Numbers for a message or a subtitle: at most eight, then dots."""
    listed = [str(v) for v in values]  # type: ignore[attr-defined]
    return ", ".join(listed[:8]) + (", ..." if len(listed) > 8 else "")


def _visible(character: str) -> str:
    """A character that has a shape of its own, else its code."""
    if character != " " and unicodedata.category(character) in _HIDDEN:
        code = ord(character)
        return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
    return character


def _escape(text: str) -> str:
    """Quotes stay: plotly knows no entity for them; a dollar sign would start TeX."""
    return html.escape(text, quote=False).replace("$", "&#36;")
