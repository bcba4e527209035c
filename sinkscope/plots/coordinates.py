"""The figure of the query-bias term, split by coordinate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import plotly.graph_objects as go

from sinkscope.display import percent
from sinkscope.errors import InvalidInputError
from sinkscope.experiments.coordinate_alignment import CoordinateAlignment
from sinkscope.plots._checks import as_array, index_of, layer_names
from sinkscope.plots._style import FIRST, OTHERS, finish


@dataclass(frozen=True, eq=False)
class _Split:
    """What is drawn: for each group of bars its values `[d_model]` and colour.

    The first group's bars carry their shares as text; coordinates come by falling `weight`.
    """

    groups: dict[str, tuple[np.ndarray, str]]
    weight: np.ndarray
    massive: Sequence[int]
    axis: str
    subtitle: str


def shift_share_bars(
    source: CoordinateAlignment | Any,
    layer: int,
    head: int,
    *,
    position: int = 0,
    top: int = 10,
    massive: Sequence[int] | None = None,
    layers: Sequence[int] | None = None,
    model: str | None = None,
) -> go.Figure:
    """What single coordinates give to a head's query-bias term, and what is left to the rest.

    From contributions `[batch layer head pos d_model]` (see `shift_by_coordinate`): two bars
    per coordinate, at one position and on average at the others, means over prompts, in
    unscaled score units; the coordinates where they differ most come first. From a
    `CoordinateAlignment`: one bar, |gamma|, from the weights alone. The text at a bar is its
    share of the sum over all coordinates, left out where positive and negative parts cancel.

    Args:
        source: contributions as an array or tensor, or the result.
        layer: the layer's number.
        head: the head.
        position: the position that stands against the others; not used with a result.
        top: how many coordinates are shown; the last bar sums the rest.
        massive: coordinates to mark; the result's own if None.
        layers: the numbers of the array's layers if it does not hold all.
        model: what ran, for the subtitle.

    Raises:
        InvalidInputError: another source or shape, or an unknown layer, head or position.
    """
    if top < 1:
        raise InvalidInputError("At least one coordinate is shown", expected="top >= 1", got=top)
    if isinstance(source, CoordinateAlignment):
        split = _from_weights(source, layer, head, massive)
    else:
        split = _from_contributions(source, layer, head, position, massive or (), layers)
    best = np.argsort(-np.nan_to_num(split.weight), kind="stable")[:top]
    rest = len(split.weight) - len(best)
    marked = {int(coordinate) for coordinate in split.massive}
    names = [f"{c}<br>(massive)" if int(c) in marked else str(c) for c in best]
    names += [f"the other<br>{rest}"] if rest else []
    figure = go.Figure()
    for number, (name, (values, colour)) in enumerate(split.groups.items()):
        total = float(np.nansum(values))
        shown = [float(value) for value in values[best]]
        shown += [total - float(np.nansum(values[best]))] if rest else []
        shares = _shares(shown, total)
        figure.add_trace(
            go.Bar(
                x=names,
                y=shown,
                name=f"{name}: sum {total:.3g}",
                marker={"color": colour, "line": {"width": 0}},
                text=["" if number or np.isnan(s) else percent(s, 0) for s in shares],
                textposition="outside",
                textfont={"size": 11},
                cliponaxis=False,
                customdata=["" if np.isnan(share) else f" ({percent(share)})" for share in shares],
                hovertemplate="%{x}: %{y:.4g}%{customdata}",
            )
        )
    figure.update_xaxes(
        title_text="coordinate of the key (of d_model)",
        type="category",
        tickangle=0 if len(names) <= 14 else None,
    )
    figure.update_yaxes(title_text=split.axis)
    return finish(
        figure,
        f"The query-bias term by coordinate: layer {layer}, head {head}",
        subtitle=split.subtitle,
        model=model,
        body=400,
        bottom=85 if len(names) <= 14 else 120,
        left=90,
    )


def _from_weights(
    result: CoordinateAlignment, layer: int, head: int, massive: Sequence[int] | None
) -> _Split:
    gamma = result.gamma.astype(np.float64)
    at = index_of(layer, range(gamma.shape[0]), "layer")
    size = np.abs(gamma[at, index_of(head, range(gamma.shape[1]), "head")])
    return _Split(
        groups={"|gamma|": (size, OTHERS)},
        weight=size,
        massive=result.massive if massive is None else massive,
        axis="|gamma| (unscaled score units per unit)",
        subtitle="From the weights alone; text: share of the sum of |gamma|",
    )


def _from_contributions(
    source: Any,
    layer: int,
    head: int,
    position: int,
    massive: Sequence[int],
    layers: Sequence[int] | None,
) -> _Split:
    values = as_array(source, "shift_share_bars").astype(np.float64)
    if values.ndim != 5:
        raise InvalidInputError(
            "Contributions have five axes",
            expected="a CoordinateAlignment, or [batch layer head pos d_model]",
            got=f"shape {list(values.shape)}",
        )
    at = index_of(layer, layer_names(layers, values.shape[1]), "layer")
    of_head = values[:, at, index_of(head, range(values.shape[2]), "head")]
    index = index_of(position, range(of_head.shape[1]), "position")
    here = _mean(of_head[:, index])
    groups, weight = {f"position {position}": (here, FIRST)}, np.abs(here)
    if of_head.shape[1] > 1:
        elsewhere = _mean(np.delete(of_head, index, axis=1).reshape(-1, of_head.shape[2]))
        groups["mean of the other positions"] = (elsewhere, OTHERS)
        weight = np.abs(here - elsewhere)
    return _Split(
        groups=groups,
        weight=weight,
        massive=massive,
        axis="contribution to b_Q . k (unscaled score units)",
        subtitle=f"Mean over prompts; text: share of the sum at position {position}",
    )


def _shares(shown: Sequence[float], total: float) -> list[float]:
    """Of the total, NaN where the parts cancel to almost nothing."""
    meant = abs(total) > 0.05 * sum(abs(v) for v in shown)
    return [v / total if meant else float("nan") for v in shown]


def _mean(values: np.ndarray) -> np.ndarray:
    """`[row d_model]` to `[d_model]`, rows of padding (NaN) left out."""
    kept = values[np.isfinite(values).all(axis=1)]
    return kept.mean(axis=0) if len(kept) else np.full(values.shape[1], np.nan)
