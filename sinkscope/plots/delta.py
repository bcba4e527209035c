"""Figures of Delta, the source-agnostic shift."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from sinkscope.errors import InvalidInputError
from sinkscope.experiments.delta import Delta
from sinkscope.plots._bins import bars, count, edges_of, finite
from sinkscope.plots._checks import chosen, require
from sinkscope.plots._style import (
    FIRST,
    GREEN,
    OTHERS,
    finish,
    menu,
    position_axis,
    rgba,
    row_gap,
)
from sinkscope.published import published as published_numbers

_UNITS = {
    "paper": "Delta (unscaled score units, minimum over positions is 0)",
    "score": "Delta (score units)",
}
_PANEL = {"paper": "Delta (unscaled)", "score": "Delta (score units)"}
_SHORT = {"paper": "Delta (unscaled score units)", "score": "Delta (score units)"}


def delta_histogram(
    delta: Delta,
    truncated: float = 0.99,
    *,
    layers: int | Sequence[int] | None = None,
    bins: int = 60,
    model: str | None = None,
) -> go.Figure:
    """Delta at position 0 against all other positions, over prompts, layers and heads.

    Two panels: every value, and a truncated range in which the bulk can be seen. Both count in
    per cent of a group's values, so that the few values of position 0 compare with the many
    of the others. A menu shows one layer alone.

    Args:
        delta: the result.
        truncated: the lower panel holds at least this share of each group's values, counted
            from the smallest on.
        layers: the layers to pool and to offer; all if None.
        bins: bars per group and panel.
        model: what ran, for the subtitle.

    Raises:
        InvalidInputError: another result, an unknown layer, or a share that is none.
    """
    delta = require(delta, Delta, "delta_histogram")
    if not 0 < truncated <= 1:
        raise InvalidInputError(
            "The truncated panel holds a share of the values",
            expected="truncated above 0 and at most 1",
            got=truncated,
        )
    kept = chosen(layers, range(delta.values.shape[1]), "layer")
    choices = {f"layer {layer}": [layer] for layer in kept}
    if len(kept) > 1:
        pooled_name = "all layers" if layers is None else f"{len(kept)} layers pooled"
        choices = {pooled_name: kept} | choices
    figure = make_subplots(
        rows=2, cols=1, vertical_spacing=0.2, subplot_titles=("full", "truncated")
    )
    notes: list[tuple[str, str]] = []
    for name, pooled in choices.items():
        values = delta.values[:, pooled]
        first, others = finite(values[..., 0]), finite(values[..., 1:])
        low, high = _bulk(first, others, truncated)
        full = edges_of(first, others, bins=bins, within=_bulk(first, others, 1.0))
        bulk = edges_of(first, others, bins=bins, within=(low, high))
        for row, edges in ((1, full), (2, bulk)):
            for group, label, colour in (
                (others, "all other positions", OTHERS),
                (first, "position 0", FIRST),
            ):
                trace = bars(count(group, edges), label, colour, legend=row == 1, visible=not notes)
                figure.add_trace(trace, row=row, col=1)
        notes.append(
            (
                f"All values ({name}: {first.size:,} at position 0, {others.size:,} elsewhere)",
                f"Truncated: {low:.3g} to {high:.3g}; beyond it lie "
                f"{count(first, bulk).outside:.1f} % of position 0's values and "
                f"{count(others, bulk).outside:.1f} % of the others'",
            )
        )
    buttons = [
        {
            "label": name,
            "method": "update",
            "args": [
                {"visible": [n // 4 == number for n in range(4 * len(choices))]},
                {"annotations[0].text": note[0], "annotations[1].text": note[1]},
            ],
        }
        for number, (name, note) in enumerate(zip(choices, notes, strict=True))
    ]
    figure.update_xaxes(title_text=_UNITS[delta.convention])
    figure.update_yaxes(title_text="values of the group (%)", rangemode="tozero")
    figure.update_annotations(font_size=12.5)
    figure.update_layout(barmode="overlay", bargap=0)
    finish(
        figure,
        "Delta of the query bias: position 0 against the others",
        subtitle="Over prompts, layers and heads",
        model=model,
        body=560,
        menus=[menu(buttons)] if len(kept) > 1 else [],
    )
    for annotation, text in zip(figure.layout.annotations, notes[0], strict=True):
        annotation.text = text
    return figure


def delta_ribbon(
    delta: Delta,
    *,
    layers: int | Sequence[int] | None = None,
    published: bool = False,
    model: str | None = None,
) -> go.Figure:
    """Delta by position, one panel per layer: median and p10 to p90 over prompts and heads.

    Position 0 is drawn as a point with a bar from p10 to p90, next to a dotted line at the
    highest p90 of any other position. Each panel has its own scale.

    Args:
        delta: the result.
        layers: the layers to draw; all if None.
        published: also the paper's medians, for its model and prompt length.
        model: what ran, for the subtitle.

    Raises:
        InvalidInputError: another result, an unknown layer, or published numbers of another
            shape.
    """
    delta = require(delta, Delta, "delta_ribbon")
    kept = chosen(layers, range(delta.values.shape[1]), "layer")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # positions without a value
        percentiles = delta.percentiles
        apart = set(delta.separated_layers) if delta.values.shape[3] > 1 else set()
    theirs = _published_medians(percentiles) if published else None
    columns = min(3 if len(kept) <= 9 else 4, len(kept))
    rows = -(-len(kept) // columns)
    body = max(185 * rows, 320)
    names = [f"layer {la}" + (" (0 stands apart)" if la in apart else "") for la in kept]
    figure = make_subplots(
        rows=rows,
        cols=columns,
        subplot_titles=names,
        horizontal_spacing=0.05 if columns > 1 else 0,
        vertical_spacing=row_gap(rows, 52, body),
    )
    for number, layer in enumerate(kept):
        where = {"row": number // columns + 1, "col": number % columns + 1}
        median = theirs[layer] if theirs is not None else None
        for trace in _layer_traces(percentiles[:, layer], median, legend=number == 0):
            figure.add_trace(trace, **where)
        positions = percentiles.shape[2]
        figure.update_xaxes(position_axis(positions), range=[-1.5, positions - 0.5], **where)
        if number % columns == 0:
            figure.update_yaxes(title_text=_PANEL[delta.convention], **where)
        if number + columns >= len(kept):
            figure.update_xaxes(title_text="key position (tokens)", **where)
    figure.update_annotations(font_size=12)
    return finish(
        figure,
        f"{_SHORT[delta.convention]} by position and layer",
        subtitle="Percentiles over prompts and heads; each panel has its own scale",
        model=model,
        body=body,
    )


def _bulk(first: np.ndarray, others: np.ndarray, share: float) -> tuple[float, float]:
    """From the smallest value to where both groups have at least `share` of theirs."""
    groups = [group for group in (first, others) if group.size]
    if not groups:
        return 0.0, 1.0
    low = min(float(group.min()) for group in groups)
    low = 0.0 if low >= 0 else low  # Delta in the paper's form starts at 0 by definition
    return low, max(float(np.quantile(group, share)) for group in groups)


def _layer_traces(
    percentiles: np.ndarray, theirs: np.ndarray | None, *, legend: bool
) -> list[go.Scatter]:
    """Band, median, point at 0 and the highest p90, of `[percentile pos]`."""
    p10, p50, p90 = percentiles
    later = np.arange(1, len(p50))
    seen = later[np.isfinite(p50[1:])]
    hover = "position %{x}<br>p50 %{y:.3g} (p10 %{customdata[0]:.3g}, p90 %{customdata[1]:.3g})"
    traces = [
        go.Scatter(
            x=np.concatenate([seen, seen[::-1]]),
            y=np.concatenate([p90[seen], p10[seen][::-1]]),
            fill="toself",
            fillcolor=rgba(OTHERS, 0.25),
            mode="lines",
            line={"width": 0, "color": OTHERS},
            name="p10 to p90",
            legendgroup="band",
            hoverinfo="skip",
            showlegend=legend,
        ),
        go.Scatter(
            x=later,
            y=p50[1:],
            mode="lines",
            line={"color": OTHERS, "width": 1.8},
            name="median",
            legendgroup="median",
            customdata=np.stack([p10[1:], p90[1:]], axis=-1),
            hovertemplate=hover + "<extra></extra>",
            showlegend=legend,
        ),
        go.Scatter(
            x=[0],
            y=p50[:1],
            error_y={
                "type": "data",
                "symmetric": False,
                "array": p90[:1] - p50[:1],
                "arrayminus": p50[:1] - p10[:1],
                "thickness": 1.8,
                "width": 4,
            },
            mode="markers",
            marker={"color": FIRST, "size": 7},
            name="position 0 (median, p10 to p90)",
            legendgroup="first",
            customdata=np.stack([p10[:1], p90[:1]], axis=-1),
            hovertemplate=hover + "<extra></extra>",
            showlegend=legend,
        ),
    ]
    if seen.size:
        traces.append(
            go.Scatter(
                x=[0, int(seen[-1])],
                y=[float(p90[seen].max())] * 2,
                mode="lines",
                line={"color": FIRST, "width": 1.2, "dash": "dot"},
                name="highest p90 of the other positions",
                legendgroup="highest",
                hovertemplate="highest p90 elsewhere %{y:.3g}<extra></extra>",
                showlegend=legend,
            )
        )
    if theirs is not None:
        traces.append(
            go.Scatter(
                x=np.arange(len(theirs)),
                y=theirs,
                mode="lines",
                line={"color": GREEN, "width": 1.6, "dash": "dash"},
                name="published median",
                legendgroup="published",
                hovertemplate="position %{x}<br>published p50 %{y:.3g}<extra></extra>",
                showlegend=legend,
            )
        )
    return traces


def _published_medians(ours: np.ndarray) -> np.ndarray:
    """`[layer pos]`."""
    theirs = np.asarray(published_numbers()["delta"], dtype=np.float64)[..., 1]
    if theirs.shape != ours.shape[1:]:
        raise InvalidInputError(
            "The published Delta is of another shape",
            expected=f"{theirs.shape[0]} layers and {theirs.shape[1]} positions",
            got=f"{ours.shape[1]} layers and {ours.shape[2]} positions",
            fix="leave published=False for other models and prompts",
        )
    return theirs
