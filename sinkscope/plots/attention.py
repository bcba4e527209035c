"""The figure of attention maps under all conditions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from sinkscope.errors import InvalidInputError
from sinkscope.experiments.attention_maps import AttentionMaps
from sinkscope.plots._checks import chosen, require
from sinkscope.plots._style import MAP_SCALE, WIDTH, finish, menu, row_gap
from sinkscope.plots._text import safe, token_label

Head = int | Literal["mean"]

_DECIMALS = 4
_LABEL_PIXELS = 9.5
_LEFT, _RIGHT = 105, 95


def attention_maps(
    maps: AttentionMaps,
    *,
    layers: int | Sequence[int] | None = None,
    heads: Head | Sequence[Head] | None = None,
    conditions: str | Sequence[str] | None = None,
    model: str | None = None,
) -> go.Figure:
    """Attention of one prompt, one panel per condition, on one colour scale from 0 to 1.

    Rows are queries, columns keys, both named by their tokens; pairs that no mask lets see
    each other stay white. Menus choose the layer and the head among those embedded.

    Args:
        maps: the result.
        layers: the layers to embed; three spread over the depth if None.
        heads: the heads to embed, "mean" for the mean over heads; the mean and the three with
            the strongest sink at position 0 under the first condition if None.
        conditions: the conditions to draw; all if None.
        model: what ran, for the subtitle.

    Raises:
        InvalidInputError: another result, or an unknown layer, head or condition.
    """
    maps = require(maps, AttentionMaps, "attention_maps")
    n_heads, n_tokens = maps.patterns.shape[2], maps.patterns.shape[3]
    if n_tokens != len(maps.tokens):
        raise InvalidInputError(
            "Tokens and patterns do not fit", expected=f"{n_tokens} tokens", got=len(maps.tokens)
        )
    kept = chosen(_spread(maps.layers) if layers is None else layers, maps.layers, "layer")
    rows_of = [maps.layers.index(layer) for layer in kept]
    if heads is None:
        heads = _strongest(maps.patterns[0][rows_of])
    kept_heads = chosen(heads, ["mean", *range(n_heads)], "head")
    names = chosen(conditions, maps.conditions, "condition")
    first_layer = len(kept) // 2

    columns = min(2 if n_tokens > 24 else 3, len(names))
    rows = -(-len(names) // columns)
    panel = (WIDTH - _LEFT - _RIGHT) * (1 - 0.04 * (columns - 1)) / columns
    side = min(panel, max(180.0, 14.0 * n_tokens))
    body = int(rows * side + (rows - 1) * 105)
    figure = make_subplots(
        rows=rows,
        cols=columns,
        subplot_titles=[safe(name) for name in names],
        horizontal_spacing=0.04 if columns > 1 else 0,
        vertical_spacing=row_gap(rows, 105, body),
    )
    drawn: list[tuple[int, int]] = []
    for panel_number, name in enumerate(names):
        patterns = maps.patterns[maps.conditions.index(name)]
        for n_layer, row in enumerate(rows_of):
            for n_head, head in enumerate(kept_heads):
                trace = go.Heatmap(
                    z=_visible(patterns[row], head),
                    coloraxis="coloraxis",
                    name=safe(name),
                    visible=n_layer == first_layer,
                    opacity=1 if n_head == 0 else 0,
                    hoverinfo="all" if n_head == 0 else "skip",
                    hovertemplate="query %{y}<br>key %{x}<br>attention %{z:.4f}",
                    meta={"layer": kept[n_layer], "head": head, "condition": safe(name)},
                    showlegend=False,
                )
                drawn.append((n_layer, n_head))
                figure.add_trace(
                    trace, row=panel_number // columns + 1, col=panel_number % columns + 1
                )
    _label_axes(figure, maps.tokens, side, columns, len(names))
    figure.update_layout(
        coloraxis={
            "colorscale": MAP_SCALE,
            "cmin": 0,
            "cmax": 1,
            "colorbar": {
                "title": {"text": "attention<br>(share)", "font": {"size": 12}},
                "thickness": 16,
                "lenmode": "pixels",
                "len": min(300, body),
                "y": 1,
                "yanchor": "top",
            },
        }
    )
    figure.update_annotations(font_size=12)
    return finish(
        figure,
        "Attention maps of one prompt under each condition",
        subtitle="Rows: queries; columns: keys; one colour scale for all panels",
        model=model,
        body=body,
        bottom=125,
        left=_LEFT,
        right=_RIGHT,
        menus=_menus(kept, kept_heads, drawn, first_layer),
    )


def _menus(
    layers: Sequence[int],
    heads: Sequence[Head],
    drawn: Sequence[tuple[int, int]],
    first_layer: int,
) -> list[dict[str, Any]]:
    """Two menus that do not know of each other: `visible` is the layer's, opacity the head's."""
    by_head = [
        {
            "label": "mean over heads" if head == "mean" else f"head {head}",
            "method": "restyle",
            "args": [
                {
                    "opacity": [float(h == number) for _, h in drawn],
                    "hoverinfo": ["all" if h == number else "skip" for _, h in drawn],
                }
            ],
        }
        for number, head in enumerate(heads)
    ]
    by_layer = [
        {
            "label": f"layer {layer}",
            "method": "restyle",
            "args": [{"visible": [la == number for la, _ in drawn]}],
        }
        for number, layer in enumerate(layers)
    ]
    return [menu(by_head), menu(by_layer, active=first_layer)]


def _visible(patterns: np.ndarray, head: Head) -> np.ndarray:
    """`[query key]` of one head or of the mean, rounded, NaN where a later key got nothing."""
    one = patterns.astype(np.float64).mean(0) if head == "mean" else patterns[head]
    hidden = np.triu(one == 0, k=1)
    return np.where(hidden, np.nan, one.round(_DECIMALS)).astype(np.float32)


def _label_axes(
    figure: go.Figure, tokens: Sequence[str], side: float, columns: int, panels: int
) -> None:
    step = max(1, int(np.ceil(len(tokens) * _LABEL_PIXELS / side)))
    places = list(range(0, len(tokens), step))
    labels = {
        "tickmode": "array",
        "tickvals": places,
        "ticktext": [token_label(tokens[p]) for p in places],
        "tickfont": {"size": 9},
        "ticks": "",
        "showgrid": False,
        "zeroline": False,
        "showline": False,
    }
    n = len(tokens)
    figure.update_xaxes(labels, tickangle=-90, range=[-0.5, n - 0.5], matches="x")
    figure.update_yaxes(labels, range=[n - 0.5, -0.5], matches="y")
    for panel in range(panels):
        where = {"row": panel // columns + 1, "col": panel % columns + 1}
        if panel % columns == 0:
            figure.update_yaxes(title_text="query token", **where)
        else:
            figure.update_yaxes(showticklabels=False, **where)
        if panel + columns >= panels:
            figure.update_xaxes(title_text="key token", **where)


def _spread(layers: Sequence[int]) -> list[int]:
    """Three layers a quarter, a half and most of the way up, fewer of a shallow model."""
    n = len(layers)
    return [layers[i] for i in sorted({min(i, n - 1) for i in (n // 4, n // 2, max(n - 2, 0))})]


def _strongest(patterns: np.ndarray) -> list[Head]:
    """The mean, and the three heads that attend to position 0 most, of `[layer head query key]`."""
    late = patterns[..., patterns.shape[2] // 2 :, 0].mean((0, 2), dtype=np.float64)
    return ["mean", *sorted(int(h) for h in np.argsort(-late, kind="stable")[:3])]
