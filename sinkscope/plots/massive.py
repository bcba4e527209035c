"""The figure of massive activations."""

from __future__ import annotations

import math

import numpy as np
import plotly.graph_objects as go

from sinkscope.errors import InvalidInputError
from sinkscope.experiments.massive_activations import MassiveActivations
from sinkscope.plots._checks import index_of, require
from sinkscope.plots._style import BLUE, CATEGORIES, FIRST, finish
from sinkscope.plots._text import safe

_LABELLED = 24
_DASHES = ("dash", "dot", "dashdot", "longdash")


def massive_line(
    activations: MassiveActivations, *, rule: object | None = None, model: str | None = None
) -> go.Figure:
    """EPE of one position, coordinate by coordinate, with its massive coordinates labelled.

    Dashed lines are the rules' thresholds on the magnitude, on both signs. A threshold far
    beyond the values is only named in the legend.

    Args:
        activations: the result.
        rule: whose coordinates are labelled: one of the result's rules, itself or in words;
            the first if None.
        model: what ran, for the subtitle.

    Raises:
        InvalidInputError: another result, or a rule that it does not hold.
    """
    activations = require(activations, MassiveActivations, "massive_line")
    if not activations.rules:
        raise InvalidInputError("The result holds no rule", expected="one rule or more", got="none")
    named = rule if isinstance(rule, str) else repr(rule)
    which = 0 if rule is None else index_of(named, activations.rules, "rule")
    epe = activations.epe.astype(np.float64)
    found = np.asarray(activations.massive[which], dtype=int)
    largest = _largest(epe)
    reach = 1.25 * largest
    figure = go.Figure(
        go.Scatter(
            x=np.arange(len(epe)),
            y=epe,
            mode="lines",
            line={"color": BLUE, "width": 1},
            name=f"EPE of position {activations.position}",
            hovertemplate="coordinate %{x}: %{y:.4g}<extra></extra>",
        )
    )
    colours = [c for c in CATEGORIES if c not in (BLUE, FIRST)]
    for n, (name, threshold) in enumerate(
        zip(activations.rules, activations.thresholds, strict=True)
    ):
        coordinates = len(activations.massive[n])
        label = f"{safe(name)}: {coordinates} found"
        if not math.isfinite(threshold):
            continue
        inside = abs(threshold) <= reach
        label += f", threshold {threshold:.3g}" + ("" if inside else " (beyond the axis)")
        size = [threshold, threshold, None, -threshold, -threshold] if inside else [None] * 5
        figure.add_trace(
            go.Scatter(
                x=[0, len(epe) - 1, None, 0, len(epe) - 1],
                y=size,
                mode="lines",
                line={
                    "color": colours[n % len(colours)],
                    "width": 1.6,
                    "dash": _DASHES[n % len(_DASHES)],
                },
                name=label,
                hovertemplate="threshold %{y:.4g}<extra></extra>",
            )
        )
    figure.add_trace(
        go.Scatter(
            x=found,
            y=epe[found],
            mode="markers",
            marker={"color": FIRST, "size": 8, "symbol": "diamond"},
            name=f"massive by {safe(activations.rules[which])}",
            hovertemplate="coordinate %{x}: %{y:.4g}<extra></extra>",
        )
    )
    _label(figure, found, epe)
    figure.update_xaxes(title_text="coordinate (of d_model)", range=[-0.5, len(epe) - 0.5])
    figure.update_yaxes(
        title_text=f"EPE of position {activations.position} (residual stream units)",
        range=[-reach, reach] if np.nanmin(epe, initial=0) < 0 else [0, reach],
    )
    form = "p + MLP(LN(p))" if activations.through_ln else "p + MLP(p)"
    return finish(
        figure,
        f"Massive coordinates of the EPE of position {activations.position}",
        subtitle=f"EPE = {form}",
        model=model,
        body=400,
    )


def _largest(epe: np.ndarray) -> float:
    """The largest finite magnitude; 1 if there is none but zeros."""
    return float(np.abs(epe[np.isfinite(epe)]).max(initial=0.0)) or 1.0


def _label(figure: go.Figure, found: np.ndarray, epe: np.ndarray) -> None:
    """The numbers of the largest found coordinates, those near each other set apart."""
    largest = found[np.argsort(-np.abs(epe[found]), kind="stable")][:_LABELLED]
    taken: list[tuple[float, float]] = []
    height = 2.5 * _largest(epe)
    for coordinate in largest:
        value = float(epe[coordinate])
        up = value >= 0
        lift = 16
        while any(
            abs(x - coordinate) < 0.035 * len(epe) and abs(y - value * 400 / height - lift) < 15
            for x, y in taken
        ):
            lift += 15
        taken.append((float(coordinate), value * 400 / height + lift))
        figure.add_annotation(
            x=int(coordinate),
            y=value,
            text=str(int(coordinate)),
            showarrow=lift > 16,
            arrowwidth=0.8,
            arrowhead=0,
            ax=0,
            ay=-lift if up else lift,
            yshift=0 if lift > 16 else (12 if up else -12),
            font={"size": 11, "color": FIRST},
        )
