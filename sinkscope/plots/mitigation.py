"""Figures of the mitigation bench and of the sweep over heads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from sinkscope.bench import UNTOUCHED, MitigationBench
from sinkscope.errors import InvalidInputError
from sinkscope.plots._checks import chosen, require
from sinkscope.plots._style import BLACK, BLUE, GREY, ORANGE, finish
from sinkscope.plots._text import safe
from sinkscope.sweep import HeadSweep

if TYPE_CHECKING:
    import pandas as pd

LOSS = "loss added (nats per token)"
REMOVED = "share of the sink removed"
_WRITTEN = 20
_DIVERGING = ((0.0, BLUE), (0.5, "#F7F7F7"), (1.0, "#D55E00"))


def mitigation_tradeoff(bench: MitigationBench, *, model: str | None = None) -> go.Figure:
    """Sink removed against loss added, with random controls and the Pareto front.

    Error bars are 95 % bootstrap intervals over prompts; a control's are one standard deviation
    over seeds.

    Args:
        bench: the result.
        model: what ran, for the subtitle.

    Raises:
        InvalidInputError: another result.
    """
    bench = require(bench, MitigationBench, "mitigation_tradeoff")
    frame = bench.to_dataframe()
    figure = go.Figure()
    controlled = frame[frame["control_loss_added"].notna()]
    if len(controlled):
        figure.add_trace(
            go.Scatter(
                x=controlled["control_sink_removed"],
                y=controlled["control_loss_added"],
                error_x=_bar(controlled["control_sink_removed_std"]),
                error_y=_bar(controlled["control_loss_added_std"]),
                mode="markers",
                marker={"symbol": "circle-open", "size": 8, "color": ORANGE},
                name=f"random control (mean of {len(bench.seeds)})",
                customdata=[safe(name) for name in controlled["mitigation"]],
                hovertemplate="control of %{customdata}<br>%{x:.1%} of the sink<br>"
                "%{y:+.4f} nats<extra></extra>",
            )
        )
    front = frame.iloc[list(bench.pareto)]
    figure.add_trace(
        go.Scatter(
            x=front["sink_removed"],
            y=front["loss_added"],
            mode="lines",
            line={"color": BLACK, "width": 1.5, "dash": "dot"},
            name="Pareto front",
            hoverinfo="skip",
        )
    )
    labels = _labels(list(frame["mitigation"]), set(front["mitigation"]))
    figure.add_trace(
        go.Scatter(
            x=frame["sink_removed"],
            y=frame["loss_added"],
            error_x=_interval(frame, "sink_removed"),
            error_y=_interval(frame, "loss_added"),
            mode="markers+text",
            marker={"size": 9, "color": BLUE},
            text=labels,
            textposition="top center",
            textfont={"size": 10},
            name="mitigation (95 % interval over prompts)",
            customdata=[
                [safe(n), kl] for n, kl in zip(frame["mitigation"], frame["kl"], strict=True)
            ],
            hovertemplate="%{customdata[0]}<br>%{x:.1%} of the sink<br>%{y:+.4f} nats<br>"
            "KL %{customdata[1]:.4f}<extra></extra>",
        )
    )
    figure.update_xaxes(title_text=REMOVED, tickformat=".0%", zeroline=True)
    figure.update_yaxes(title_text=LOSS, zeroline=True)
    return finish(
        figure,
        "What removing the sink costs",
        subtitle=f"{bench.values.shape[1]} prompts; a point on the front is named",
        model=model,
        body=480,
    )


def dose_response(
    bench: MitigationBench,
    *,
    families: str | Sequence[str] | None = None,
    model: str | None = None,
) -> go.Figure:
    """Sink score and loss of the scaled mitigations against the dose.

    Args:
        bench: the result.
        families: of `bench.families`; those with two doses or more if None.
        model: what ran, for the subtitle.

    Raises:
        InvalidInputError: another result, an unknown family, or none of two doses.
    """
    bench = require(bench, MitigationBench, "dose_response")
    present = [f for f in dict.fromkeys(bench.families) if f and bench.families.count(f) > 1]
    if not present:
        raise InvalidInputError(
            "There is no dose-response curve in this bench",
            expected="a mitigation at two doses or more, such as ScaleQueryBias(0.0) and (0.5)",
            got=", ".join(bench.names)[:120],
        )
    kept = chosen(families, present, "family")
    figure = make_subplots(
        rows=2,
        cols=len(kept),
        shared_yaxes="rows",
        shared_xaxes="columns",
        subplot_titles=[safe(name) for name in kept],
        vertical_spacing=0.06,
        horizontal_spacing=0.03,
    )
    frame = bench.to_dataframe()
    score = bench.of("sink_score").mean(1)
    for column, family in enumerate(kept, start=1):
        rows = frame[frame["family"] == family].sort_values("dose")
        whole = 1.0 if "logit" not in family.lower() else None
        doses = [*rows["dose"], *([whole] if whole is not None else [])]
        sinks = [*rows["sink_score"], *([score[0]] if whole is not None else [])]
        added = [*rows["loss_added"], *([0.0] if whole is not None else [])]
        low = [*rows["loss_added_low"], *([0.0] if whole is not None else [])]
        high = [*rows["loss_added_high"], *([0.0] if whole is not None else [])]
        common = {"mode": "lines+markers", "showlegend": column == 1}
        figure.add_trace(
            go.Scatter(
                x=doses,
                y=sinks,
                name="sink score",
                line={"color": BLUE},
                marker={"color": BLUE},
                hovertemplate="dose %{x}: %{y:.4f}<extra></extra>",
                **common,
            ),
            row=1,
            col=column,
        )
        figure.add_trace(
            go.Scatter(
                x=doses,
                y=added,
                error_y={
                    "type": "data",
                    "symmetric": False,
                    "array": np.subtract(high, added),
                    "arrayminus": np.subtract(added, low),
                    "color": ORANGE,
                    "thickness": 1,
                },
                name="loss added (95 % interval over prompts)",
                line={"color": ORANGE},
                marker={"color": ORANGE},
                hovertemplate="dose %{x}: %{y:+.4f} nats<extra></extra>",
                **common,
            ),
            row=2,
            col=column,
        )
        controlled = rows[rows["control_loss_added"].notna()]
        if len(controlled):
            for row, name in ((1, "control_sink"), (2, "control_loss_added")):
                y = (
                    score[0] * (1 - controlled["control_sink_removed"])
                    if row == 1
                    else controlled[name]
                )
                figure.add_trace(
                    go.Scatter(
                        x=controlled["dose"],
                        y=y,
                        mode="markers",
                        marker={"symbol": "circle-open", "color": GREY, "size": 8},
                        name="random control",
                        showlegend=column == 1 and row == 1,
                        hovertemplate="control, dose %{x}: %{y:.4f}<extra></extra>",
                    ),
                    row=row,
                    col=column,
                )
        figure.update_xaxes(title_text="logit" if whole is None else "factor", row=2, col=column)
    figure.update_yaxes(title_text="sink score", rangemode="tozero", row=1, col=1)
    figure.update_yaxes(title_text=LOSS, row=2, col=1)
    return finish(
        figure,
        "Dose and response",
        subtitle="A factor of 1 is the untouched model",
        model=model,
        body=460,
    )


def head_sweep_map(sweep: HeadSweep, *, model: str | None = None) -> go.Figure:
    """What an ablation does in each head alone: change of the sink score, and of the loss.

    The last column is all heads of the layer at once.

    Args:
        sweep: the result.
        model: what ran, for the subtitle.

    Raises:
        InvalidInputError: another result.
    """
    sweep = require(sweep, HeadSweep, "head_sweep_map")
    figure = make_subplots(
        rows=1,
        cols=2,
        subplot_titles=("change of the sink score", "change of the loss"),
        horizontal_spacing=0.16,
    )
    n_layers, n_heads = sweep.sink.shape[:2]
    panels = (
        (sweep.sink, sweep.layer_sink, "sink score", "coloraxis"),
        (sweep.loss, sweep.layer_loss, "nats per token", "coloraxis2"),
    )
    for column, (heads, layers, unit, axis) in enumerate(panels, start=1):
        z = np.concatenate([heads.mean(-1), layers.mean(-1)[:, None]], axis=1)
        figure.add_trace(
            go.Heatmap(
                z=z,
                x=[*(str(h) for h in range(n_heads)), "all"],
                y=[str(layer) for layer in sweep.layers],
                coloraxis=axis,
                texttemplate="%{z:.3f}" if max(n_heads, n_layers) <= _WRITTEN // 2 else None,
                textfont={"size": 10},
                hovertemplate="layer %{y}, head %{x}: %{z:+.4f}<extra></extra>",
                showlegend=False,
                xgap=1,
                ygap=1,
            ),
            row=1,
            col=column,
        )
        size = float(np.abs(z).max()) or 1.0
        figure.update_layout(
            {
                axis: {
                    "colorscale": _DIVERGING,
                    "cmin": -size,
                    "cmax": size,
                    "colorbar": {
                        "title": {"text": unit, "side": "right"},
                        "thickness": 14,
                        "x": 0.435 if column == 1 else 1.01,
                    },
                }
            }
        )
    figure.update_xaxes(title_text="head", type="category")
    figure.update_yaxes(title_text="layer", type="category", autorange="reversed", col=1)
    figure.update_yaxes(type="category", autorange="reversed", col=2)
    return finish(
        figure,
        "Which heads matter",
        subtitle=safe(sweep.ablation),
        model=model,
        body=max(160, 34 * n_layers + 40),
        right=110,
    )


def _labels(names: Iterable[str], shown: set[str]) -> list[str]:
    return [safe(name) if name in shown and name != UNTOUCHED else "" for name in names]


def _bar(spread: pd.Series) -> dict[str, object]:
    return {"type": "data", "array": np.nan_to_num(spread), "color": ORANGE, "thickness": 1}


def _interval(frame: pd.DataFrame, name: str) -> dict[str, object]:
    values = frame[name]
    return {
        "type": "data",
        "symmetric": False,
        "array": frame[f"{name}_high"] - values,
        "arrayminus": values - frame[f"{name}_low"],
        "color": BLUE,
        "thickness": 1,
    }
