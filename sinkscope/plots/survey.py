"""The figure of a survey."""

from __future__ import annotations

import numpy as np
import plotly.graph_objects as go

from sinkscope.circuits import Survey
from sinkscope.errors import InvalidInputError
from sinkscope.plots._checks import require
from sinkscope.plots._style import finish
from sinkscope.plots._text import safe, wrapped

_ROW = 44


def survey_map(survey: Survey, *, model: str | None = None) -> go.Figure:
    """What each ablation leaves of each model's sink, a row a model and a column an ablation.

    Colours and numbers are sink scores relative to the untouched model, cut off at 0 and 1 in
    colour alone. Cells of what a model has no part for are empty.

    Args:
        survey: the result.
        model: what ran, for the subtitle.

    Raises:
        InvalidInputError: another result.
    """
    rows = require(survey, Survey, "survey_map").rows
    if not rows:
        raise InvalidInputError(
            "survey_map can't draw this", expected="a survey of a model or more", got="no row"
        )
    names = list(dict.fromkeys(name for row in rows for name, _ in row.ablations))
    left = np.full((len(rows), len(names)), np.nan)
    for n, row in enumerate(rows):
        for name, value in row.ablations:
            left[n, names.index(name)] = value
    figure = go.Figure(
        go.Heatmap(
            z=left,
            x=np.arange(len(names)),
            y=np.arange(len(rows)),
            coloraxis="coloraxis",
            text=[["" if np.isnan(v) else f"{v:.0%}" for v in line] for line in left],
            texttemplate="%{text}",
            customdata=[[[safe(row.model), safe(name)] for name in names] for row in rows],
            hovertemplate="%{customdata[0]}<br>%{customdata[1]}: %{z:.1%}<extra></extra>",
            xgap=2,
            ygap=2,
        )
    )
    figure.update_layout(
        coloraxis={
            "cmin": 0,
            "cmax": 1,
            "colorscale": "Viridis",
            "colorbar": {"title": {"text": "of the sink"}, "tickformat": ".0%"},
        }
    )
    labels = [f"{safe(row.model)} (sink score {row.sink_score:.2f})" for row in rows]
    figure.update_xaxes(
        title_text="ablation",
        tickmode="array",
        tickvals=np.arange(len(names)),
        ticktext=[wrapped(name) for name in names],
        showgrid=False,
    )
    figure.update_yaxes(
        title_text="model",
        tickmode="array",
        tickvals=np.arange(len(rows)),
        ticktext=labels,
        autorange="reversed",
        showgrid=False,
    )
    return finish(
        figure,
        "What each ablation leaves of the sink",
        subtitle="Sink score relative to the untouched model; empty where a model lacks the part",
        model=model,
        body=max(120, _ROW * len(rows)),
        bottom=130,
        left=max(90, 40 + 6 * max(len(f"{row.model} (sink score 0.00)") for row in rows)),
        right=110,
    )
