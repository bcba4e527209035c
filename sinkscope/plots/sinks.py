"""Maps by layer and head: how strong the sinks are, and where."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from sinkscope.errors import InvalidInputError
from sinkscope.experiments.table1 import Table1
from sinkscope.plots._checks import as_array, chosen, layer_names
from sinkscope.plots._style import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    MAP_SCALE,
    ORANGE,
    PURPLE,
    SHARE,
    SKY,
    finish,
    legend_marker,
    menu,
)
from sinkscope.plots._text import safe

_POSITION_COLOURS = (BLUE, ORANGE, GREEN, PURPLE, SKY)
_WRITTEN = 20


def sink_score_map(
    scores: Table1 | Any,
    *,
    conditions: str | Sequence[str] | None = None,
    layers: Sequence[int] | None = None,
    model: str | None = None,
) -> go.Figure:
    """Sink score of every layer and head, on a colour scale from 0 to 1.

    Of a `Table1` the mean over all prompts, its conditions to be chosen by a menu.

    Args:
        scores: a `Table1`, or an array `[layer head]` or `[batch layer head]`, of which the
            mean over the batch is drawn.
        conditions: the table's conditions to offer; all if None.
        layers: the numbers of the array's layers if it does not hold all.
        model: what ran, for the subtitle.

    Raises:
        InvalidInputError: another shape, an unknown condition, or numbers that do not fit.
    """
    if isinstance(scores, Table1):
        kept = chosen(conditions, scores.conditions, "condition")
        maps = {c: scores.scores[scores.conditions.index(c)] for c in kept}
    elif conditions is not None:
        raise InvalidInputError(
            "An array has no conditions", expected="a Table1", got=type(scores).__name__
        )
    else:
        maps = {"": as_array(scores, "sink_score_map").astype(np.float64)}
        if maps[""].ndim not in (2, 3):
            raise InvalidInputError(
                "A map has layers and heads",
                expected="a Table1, [layer head] or [batch layer head]",
                got=f"shape {list(maps[''].shape)}",
            )
    means = {name: _mean(values) for name, values in maps.items()}
    n_layers, n_heads = next(iter(means.values())).shape
    numbers = layer_names(layers, n_layers)
    figure = go.Figure()
    for number, (name, mean) in enumerate(means.items()):
        figure.add_trace(
            go.Heatmap(
                z=mean,
                x=[str(h) for h in range(n_heads)],
                y=[str(la) for la in numbers],
                coloraxis="coloraxis",
                visible=number == 0,
                name=safe(name),
                texttemplate="%{z:.2f}" if max(n_heads, n_layers) <= _WRITTEN else None,
                textfont={"size": 11},
                hovertemplate="layer %{y}, head %{x}: %{z:.4f}<extra></extra>",
                showlegend=False,
                xgap=1,
                ygap=1,
            )
        )
    _axes(figure)
    figure.update_layout(
        coloraxis={
            "colorscale": MAP_SCALE,
            "cmin": 0,
            "cmax": 1,
            "colorbar": {"title": {"text": SHARE, "side": "right"}, "thickness": 16},
        }
    )
    title = "Sink score by layer and head"
    titles = [f"{title}: {safe(name)}" if name else title for name in means]
    buttons = [
        {
            "label": safe(name),
            "method": "update",
            "args": [{"visible": [n == m for m in range(len(means))]}, {"title.text": titles[n]}],
        }
        for n, name in enumerate(means)
    ]
    return finish(
        figure,
        titles[0],
        subtitle="Mean attention to position 0 from the second half of the prompt",
        model=model,
        body=_height(n_layers),
        right=110,
        menus=[menu(buttons)] if len(means) > 1 else [],
    )


def sink_positions(
    before: Any,
    after: Any,
    *,
    names: tuple[str, str] = ("before", "after"),
    layers: Sequence[int] | None = None,
    model: str | None = None,
) -> go.Figure:
    """The sink's position in every layer and head, before and after an ablation.

    Of a batch the position that most prompts have (the smaller of two equal ones); hovering
    tells for which share of them. On the right, positions that changed are bold.

    Args:
        before: integers `[layer head]` or `[batch layer head]`, from `sink_position`.
        after: the same under the ablation, of the same shape.
        names: titles of the two panels.
        layers: the numbers of the arrays' layers if they do not hold all.
        model: what ran, for the subtitle.

    Raises:
        InvalidInputError: not two integer arrays of one shape, or numbers that do not fit.
    """
    pair = [as_array(values, "sink_positions") for values in (before, after)]
    if (
        pair[0].shape != pair[1].shape
        or pair[0].ndim not in (2, 3)
        or not pair[0].size
        or any(values.dtype.kind not in "iu" for values in pair)
    ):
        raise InvalidInputError(
            "Sink positions are whole numbers, before and after of one shape",
            expected="two integer arrays [layer head] or [batch layer head]",
            got=" and ".join(f"{v.dtype} {list(v.shape)}" for v in pair),
        )
    if len(names) != 2:
        raise InvalidInputError("Two panels have two names", expected="2 names", got=len(names))
    (old, old_share), (new, new_share) = (_most_frequent(values) for values in pair)
    n_layers, n_heads = old.shape
    numbers = layer_names(layers, n_layers)
    frequent, how_often = np.unique(np.concatenate([old, new]), return_counts=True)
    order = np.argsort(-how_often, kind="stable")[: len(_POSITION_COLOURS)]
    coloured = sorted(int(p) for p in frequent[order])
    colours = [*_POSITION_COLOURS[: len(coloured)], GREY]
    figure = make_subplots(
        rows=1, cols=2, subplot_titles=[safe(n) for n in names], horizontal_spacing=0.06
    )
    moved = old != new
    for column, (positions, share) in enumerate(((old, old_share), (new, new_share)), start=1):
        bold = moved & (column == 2)
        figure.add_trace(
            go.Heatmap(
                z=_category(positions, coloured),
                x=[str(h) for h in range(n_heads)],
                y=[str(la) for la in numbers],
                zmin=-0.5,
                zmax=len(colours) - 0.5,
                colorscale=_steps(colours),
                showscale=False,
                text=[
                    [f"<b>{p}</b>" if b else str(p) for p, b in zip(*line, strict=True)]
                    for line in zip(positions.tolist(), bold.tolist(), strict=True)
                ],
                texttemplate="%{text}" if max(n_heads, n_layers) <= _WRITTEN else None,
                textfont={"size": 12},
                customdata=share,
                hovertemplate="layer %{y}, head %{x}: position %{text}, "
                "in %{customdata:.0%} of the prompts<extra></extra>",
                xgap=1,
                ygap=1,
                showlegend=False,
            ),
            row=1,
            col=column,
        )
    others = set(frequent.tolist()) - set(coloured)
    for position, colour in zip(coloured, colours, strict=False):
        figure.add_trace(legend_marker(f"position {position}", colour))
    if others:
        figure.add_trace(legend_marker("another position", colours[-1]))
    _axes(figure)
    figure.update_annotations(font_size=13)
    figure.update_yaxes(title_text="", col=2)
    return finish(
        figure,
        f"Where the sinks are: {int(moved.sum())} of {moved.size} heads moved",
        subtitle="Position that receives most attention in each head"
        + (", of most prompts" if pair[0].ndim == 3 else ""),
        model=model,
        body=_height(n_layers),
    )


def _mean(values: np.ndarray) -> np.ndarray:
    """`[layer head]`; prompts without a value (NaN) are left out."""
    if values.ndim == 2:
        return values.astype(np.float64)
    seen = np.isfinite(values)
    total = np.where(seen, values, 0).sum(0, dtype=np.float64)
    return np.divide(total, seen.sum(0), out=np.full(total.shape, np.nan), where=seen.any(0))


def _most_frequent(positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`[layer head]` the position of most prompts, and for which share of them it is."""
    rows = positions[None] if positions.ndim == 2 else positions
    best = np.zeros(rows.shape[1:], dtype=np.int64)
    often = np.zeros(rows.shape[1:], dtype=np.int64)
    for position in np.unique(rows):
        counted = (rows == position).sum(0)
        best = np.where(counted > often, position, best)
        often = np.maximum(often, counted)
    return best, often / len(rows)


def _category(positions: np.ndarray, coloured: Sequence[int]) -> np.ndarray:
    """Each position's number among the coloured ones, the number after them for the others."""
    category = np.full(positions.shape, len(coloured))
    for number, position in enumerate(coloured):
        category[positions == position] = number
    return category


def _steps(colours: Sequence[str]) -> list[list[object]]:
    """A colour scale of equal steps."""
    n = len(colours)
    return [[edge, colour] for i, colour in enumerate(colours) for edge in (i / n, (i + 1) / n)]


def _axes(figure: go.Figure) -> None:
    figure.update_xaxes(title_text="head", type="category", showgrid=False, linecolor=BLACK)
    figure.update_yaxes(
        title_text="layer (from 0)", type="category", autorange="reversed", showgrid=False
    )


def _height(n_layers: int) -> int:
    return min(max(30 * n_layers, 220), 900)
