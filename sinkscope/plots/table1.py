"""The figure of Table 1."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go

from sinkscope.experiments.table1 import POOLED, Table1
from sinkscope.plots._checks import chosen, require
from sinkscope.plots._style import BLACK, CATEGORIES, SHARE, finish
from sinkscope.plots._text import safe, wrapped

_PATTERNS = ("", "/", "x", ".")


def table1_bars(
    table: Table1, *, corpora: str | Sequence[str] | None = None, model: str | None = None
) -> go.Figure:
    """Sink score of every condition, a bar per corpus and one for all prompts pooled.

    Error bars are one standard error of the mean over prompts. Where the result stands beside
    published numbers these are diamonds, with their own standard errors.

    Args:
        table: the result.
        corpora: the corpora to draw, "all" for the pooled prompts; all of them if None,
            without the pooled ones where there is but one corpus.
        model: what ran, for the subtitle.

    Raises:
        InvalidInputError: another result or an unknown corpus.
    """
    table = require(table, Table1, "table1_bars")
    frame = table.to_dataframe()
    present = list(dict.fromkeys(frame["corpus"]))
    if corpora is None and len(present) == 2:  # one corpus and the same prompts pooled
        corpora = present[0]
    kept = chosen(corpora, present, "corpus")
    places = np.arange(len(table.conditions))
    width = 0.82 / len(kept)
    figure = go.Figure()
    diamonds = []
    for number, corpus in enumerate(kept):
        rows = frame[frame["corpus"] == corpus].set_index("condition").loc[list(table.conditions)]
        x = places + (number - (len(kept) - 1) / 2) * width
        scores, errors = rows["sink_score"].to_numpy(), rows["stderr"].to_numpy()
        label = "all prompts pooled" if corpus == POOLED else safe(corpus)
        names = [safe(name) for name in table.conditions]
        figure.add_trace(
            go.Bar(
                x=x,
                y=scores,
                width=width * 0.94,
                error_y=_errors(errors, "#333333"),
                name=f"{label} (n = {int(rows['n'].iloc[0])})",
                marker={
                    "color": CATEGORIES[number % len(CATEGORIES)],
                    "pattern": {
                        "shape": _PATTERNS[number // len(CATEGORIES) % len(_PATTERNS)],
                        "fillmode": "overlay",
                    },
                },
                customdata=[
                    [name, "" if np.isnan(e) else f" ± {e:.4f}", r]
                    for name, e, r in zip(names, errors, rows["relative"], strict=True)
                ],
                hovertemplate="%{customdata[0]}<br>%{y:.4f}%{customdata[1]}<br>"
                "%{customdata[2]:.1%} of the first condition",
            )
        )
        if table.beside_published and np.isfinite(rows["published"]).any():
            diamonds.append((x, rows["published"].to_numpy(), rows["published_stderr"].to_numpy()))
    for number, (x, values, errors) in enumerate(diamonds):
        figure.add_trace(
            go.Scatter(
                x=x,
                y=values,
                error_y=_errors(errors, BLACK),
                mode="markers",
                marker={
                    "symbol": "diamond",
                    "color": "white",
                    "size": 7,
                    "line": {"color": BLACK, "width": 1.3},
                },
                name="published",
                legendgroup="published",
                showlegend=number == 0,
                hovertemplate="published %{y:.4f}<extra></extra>",
            )
        )
    figure.update_xaxes(
        title_text="condition",
        tickmode="array",
        tickvals=places,
        ticktext=[wrapped(name) for name in table.conditions],
        tickangle=0 if len(places) <= 12 else None,
        range=[-0.6, len(places) - 0.4],
        showgrid=False,
    )
    figure.update_yaxes(title_text=SHARE, rangemode="tozero")
    figure.update_layout(barmode="overlay")
    layers = ", ".join(str(layer) for layer in table.mid_layers)
    subtitle = f"Mean over the second half's queries, heads and layers {layers}; bars: 1 std. error"
    missing = ", ".join(safe(name) for name, _ in table.not_applicable)
    if missing:
        subtitle += f". Not applicable: {missing}"
    return finish(
        figure,
        "Sink score under each condition",
        subtitle=subtitle,
        model=model,
        body=400,
        bottom=105,
    )


def _errors(errors: np.ndarray, colour: str) -> dict[str, object] | None:
    if not np.isfinite(errors).any():
        return None
    return {"type": "data", "array": errors, "color": colour, "thickness": 1.2, "width": 2}
