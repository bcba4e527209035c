"""Figures of what the query bias is aligned with: positions' keys, and single coordinates."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from sinkscope.experiments.coordinate_alignment import CoordinateAlignment
from sinkscope.experiments.epe_bias_alignment import EpeBiasAlignment
from sinkscope.plots._bins import bars, count, edges_of, finite
from sinkscope.plots._checks import chosen, require
from sinkscope.plots._style import BLACK, FIRST, OTHERS, finish, row_gap
from sinkscope.plots._text import safe
from sinkscope.published import published as published_numbers


def epe_bias_histogram(
    alignment: EpeBiasAlignment,
    *,
    layers: int | Sequence[int] | None = None,
    bins: int = 50,
    model: str | None = None,
) -> go.Figure:
    """Cosine of each head's query bias with each position's key: position 0 against the others.

    The upper panel pools the layers, the small ones are one layer each. Bars are per cent of a
    group's values.

    Args:
        alignment: the result.
        layers: the layers to pool and to draw; all if None.
        bins: bars per group in the pooled panel; the small ones have half of them.
        model: what ran, for the subtitle.

    Raises:
        InvalidInputError: another result or an unknown layer.
    """
    alignment = require(alignment, EpeBiasAlignment, "epe_bias_histogram")
    cosines = alignment.cosines
    kept = chosen(layers, range(cosines.shape[0]), "layer")
    columns = min(4, len(kept))
    small = -(-len(kept) // columns)
    body = 300 + 185 * small
    figure = make_subplots(
        rows=1 + small,
        cols=columns,
        specs=[[{"colspan": columns}, *[None] * (columns - 1)], *[[{}] * columns] * small],
        row_heights=[250, *[115] * small],
        subplot_titles=[
            f"{len(kept)} layers pooled",
            *(f"layer {layer}" for layer in kept),
        ],
        horizontal_spacing=0.05 if columns > 1 else 0,
        vertical_spacing=row_gap(1 + small, 78, body),
    )
    panels = [(cosines[kept], 1, 1, bins)]
    panels += [
        (cosines[[layer]], 2 + n // columns, 1 + n % columns, max(bins // 2, 1))
        for n, layer in enumerate(kept)
    ]
    for values, row, column, n_bins in panels:
        groups = (
            (values[..., 1:], "all other positions", OTHERS),
            (values[..., :1], "position 0", FIRST),
        )
        edges = edges_of(cosines[kept], bins=n_bins)
        for group, label, colour in groups:
            trace = bars(count(group, edges), label, colour, legend=row == 1)
            figure.add_trace(trace, row=row, col=column)
        if column == 1:
            figure.update_yaxes(title_text="values (%)", row=row, col=column)
        if row == 1 or (row - 2) * columns + column - 1 + columns >= len(kept):
            title = "cosine of query bias and key (from -1 to 1)" if row == 1 else "cosine"
            figure.update_xaxes(title_text=title, row=row, col=column)
    figure.update_xaxes(matches="x")
    figure.update_yaxes(rangemode="tozero")
    figure.update_annotations(font_size=12)
    figure.update_layout(barmode="overlay", bargap=0)
    return finish(
        figure,
        "Alignment of the query bias with the keys that positions alone would make",
        subtitle=f"From the weights; {cosines.shape[2]} positions, {cosines.shape[1]} heads",
        model=model,
        body=body,
    )


def coordinate_histogram(
    alignment: CoordinateAlignment,
    *,
    bins: int = 60,
    published: bool = False,
    model: str | None = None,
) -> go.Figure:
    """|gamma| at the massive coordinates of EPE_0 against all others, over layers and heads.

    Bars are per cent of a group's values, vertical lines the groups' means.

    Args:
        alignment: the result.
        bins: bars per group.
        published: also the paper's means, for its model.
        model: what ran, for the subtitle.

    Raises:
        InvalidInputError: another result.
    """
    alignment = require(alignment, CoordinateAlignment, "coordinate_histogram")
    magnitude = np.abs(alignment.gamma.astype(np.float64))
    flags = alignment.is_massive
    groups = {
        "others": ("other coordinates", magnitude[..., ~flags], OTHERS),
        "massive": ("massive coordinates", magnitude[..., flags], FIRST),
    }
    edges = edges_of(magnitude, bins=bins, within=(0.0, float(finite(magnitude).max(initial=0))))
    figure = go.Figure()
    tops = [0.0]
    for name, values, colour in groups.values():
        counted = count(values, edges)
        if counted.n:
            figure.add_trace(bars(counted, name, colour))
            tops.append(float(counted.percent.max()))
    means = {k: float(finite(v).mean()) for k, (_, v, _) in groups.items() if finite(v).size}
    lines = [
        (f"mean of {groups[k][0]}: {m:.4f}", m, groups[k][2], "dash") for k, m in means.items()
    ]
    if published:
        theirs = published_numbers()["gamma_mean"]
        lines += [
            (f"published mean of {groups[k][0]}: {theirs[k]:.4f}", theirs[k], BLACK, dash)
            for k, dash in (("others", "dot"), ("massive", "dashdot"))
        ]
    for name, at, colour, dash in lines:
        figure.add_trace(
            go.Scatter(
                x=[at, at],
                y=[0, max(tops)],
                mode="lines",
                line={"color": colour, "dash": dash, "width": 2},
                name=name,
                hovertemplate="%{x:.4f}",
            )
        )
    figure.update_xaxes(title_text="|gamma| (unscaled score units per unit of the coordinate)")
    figure.update_yaxes(title_text="values of the group (%)", rangemode="tozero")
    figure.update_layout(barmode="overlay", bargap=0)
    named = ", ".join(str(c) for c in alignment.massive[:12]) or "none"
    more = f" and {len(alignment.massive) - 12} more" if len(alignment.massive) > 12 else ""
    return finish(
        figure,
        "Which coordinates the query bias reads: |gamma|, massive against others",
        subtitle=f"Massive by {safe(alignment.rule)}: {named}{more}; over all layers and heads",
        model=model,
        body=400,
    )
