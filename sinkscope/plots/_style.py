"""What all figures look like: colours, fonts, header, menus."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from sinkscope.plots._text import safe

WIDTH = 1000
MARGIN_LEFT, MARGIN_RIGHT = 75, 30

# Okabe and Ito's palette, told apart with any colour vision and in grey print.
BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
YELLOW, BLUE, RED, PURPLE = "#F0E442", "#0072B2", "#D55E00", "#CC79A7"
GREY = "#8C8C8C"
CATEGORIES = (BLUE, ORANGE, GREEN, PURPLE, SKY, RED, YELLOW, BLACK)

FIRST, OTHERS = RED, BLUE
"""Position 0 (or what is massive) against the rest, the same in every figure."""

MAP_SCALE = "Cividis"
SHARE = "attention to position 0 (share)"

HTML_CONFIG = {"displaylogo": False, "showSendToCloud": False}
"""How figures are set into a page: without the button that sends them to a server."""

_NO_BUTTONS = ("sendChartToCloud", "select2d", "lasso2d")

_AXIS = {
    "showline": True,
    "linecolor": "#444444",
    "ticks": "outside",
    "tickcolor": "#444444",
    "gridcolor": "#E3E3E3",
    "zerolinecolor": "#BBBBBB",
    "zerolinewidth": 1,
    "title": {"standoff": 8, "font": {"size": 13}},
    "tickfont": {"size": 11},
}
TEMPLATE = go.layout.Template(
    layout={
        "font": {"family": "DejaVu Sans, Verdana, Arial, sans-serif", "size": 12, "color": "#222"},
        "paper_bgcolor": "white",
        "plot_bgcolor": "white",
        "colorway": list(CATEGORIES),
        "hoverlabel": {"font": {"size": 12}, "align": "left"},
        "xaxis": _AXIS,
        "yaxis": _AXIS,
        "annotationdefaults": {"font": {"size": 12}},
    }
)


def rgba(colour: str, alpha: float) -> str:
    """A `#RRGGBB` colour, partly transparent."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},{alpha})"


def finish(
    figure: go.Figure,
    title: str,
    *,
    model: str | None,
    subtitle: str = "",
    body: int = 400,
    bottom: int = 70,
    left: int = MARGIN_LEFT,
    right: int = MARGIN_RIGHT,
    menus: Sequence[Mapping[str, Any]] = (),
) -> go.Figure:
    """Give a figure its header (title, subtitle, legend, menus), margins and template.

    Args:
        figure: changed in place.
        title: what is shown; already safe.
        model: what it was measured on; made safe here.
        subtitle: the second line; already safe.
        body: height of the plotting area in pixels.
        bottom: margin for tick labels and axis title.
        left: margin for tick labels and axis title.
        right: margin, for a colour bar.
        menus: from `menu`, the first one to the right.
    """
    legend = _legend_height(figure, WIDTH - left - right)
    below_title = 62 + (14 if menus else 0)
    top = below_title + legend + 28
    height = top + body + bottom
    if model:
        subtitle = f"{safe(model)}. {subtitle}" if subtitle else safe(model)
    figure.update_layout(
        template=TEMPLATE,
        width=WIDTH,
        height=height,
        margin={"t": top, "b": bottom, "l": left, "r": right},
        title={
            "text": title,
            "subtitle": {"text": subtitle, "font": {"size": 12, "color": "#555555"}},
            "font": {"size": 18},
            "x": 0,
            "xref": "container",
            "xanchor": "left",
            "y": 1,
            "yref": "container",
            "yanchor": "top",
            "pad": {"t": 14, "l": 16},
        },
        showlegend=legend > 0,
        modebar={"remove": [*_NO_BUTTONS]},
        legend={
            "orientation": "h",
            "x": 0,
            "xanchor": "left",
            "y": 1 + (top - below_title) / body,
            "yanchor": "top",
            "font": {"size": 12},
            "bgcolor": "rgba(255,255,255,0)",
        },
    )
    if menus:
        plot_width = WIDTH - left - right
        placed, edge = [], 1 + (right - 12) / plot_width
        for entry in menus:
            # Opens downwards over the plot.
            placed.append(
                {
                    **entry,
                    "type": "dropdown",
                    "direction": "down",
                    "showactive": True,
                    "x": edge,
                    "xanchor": "right",
                    "y": 1 + (top - 36) / body,
                    "yanchor": "top",
                    "bgcolor": "white",
                    "bordercolor": "#888888",
                    "font": {"size": 12},
                }
            )
            widest = max(len(button["label"]) for button in entry["buttons"])
            edge -= (60 + 7.5 * widest) / plot_width
        figure.update_layout(updatemenus=placed)
    return figure


def _legend_height(figure: go.Figure, width: int) -> int:
    """In pixels; plotly sets the entries in columns once one line is too short for them."""
    names = [
        t.name
        for t in figure.data
        if t.name and t.showlegend is not False and t.visible is not False
    ]
    if not names:
        return 0
    widths = [40 + 6.3 * len(html.unescape(name)) for name in names]
    per_line = max(1, int(width // max(widths)))
    rows = 1 if sum(widths) <= width else -(-len(names) // per_line)
    return (20 if per_line == 1 else 27) * rows


def menu(buttons: Sequence[Mapping[str, Any]], active: int = 0) -> dict[str, Any]:
    """A drop-down menu for `finish`."""
    return {"buttons": [dict(button) for button in buttons], "active": active}


def position_axis(count: int) -> dict[str, Any]:
    """Ticks at whole positions only."""
    return {"dtick": next(s for s in (1, 2, 5, 10, 20, 50, 100, 10**6) if count / s <= 10)}


def row_gap(rows: int, gap: int, body: int) -> float:
    """A vertical gap in pixels as the share that make_subplots wants."""
    return gap / body if rows > 1 else 0.0


def legend_marker(name: str, colour: str, symbol: str = "square") -> go.Scatter:
    """A legend entry for a colour that no single trace stands for."""
    return go.Scatter(
        x=[None],
        y=[None],
        mode="markers",
        marker={"color": colour, "symbol": symbol, "size": 11},
        name=name,
        hoverinfo="skip",
    )
