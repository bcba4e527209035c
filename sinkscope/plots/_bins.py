"""Histograms counted here, so that a figure holds bins and not every value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import plotly.graph_objects as go


@dataclass(frozen=True, eq=False)
class Bins:
    """Counts of one group.

    Attributes:
        edges: `[bin + 1]`.
        counts: `[bin]`.
        n: how many values the group has, also outside the edges.
    """

    edges: np.ndarray
    counts: np.ndarray
    n: int

    @property
    def percent(self) -> np.ndarray:
        """`[bin]`, per cent of all the group's values."""
        return 100 * self.counts / max(self.n, 1)

    @property
    def outside(self) -> float:
        """Per cent of the group's values that lie beyond the edges."""
        return 100 * (self.n - int(self.counts.sum())) / max(self.n, 1)


def finite(values: np.ndarray) -> np.ndarray:
    """The finite values, flat, as float64."""
    flat = np.asarray(values, dtype=np.float64).ravel()
    return flat[np.isfinite(flat)]


def edges_of(*groups: np.ndarray, bins: int = 60, within: tuple[float, float] | None = None) -> Any:
    """Equal bins over all groups' values, or over a given range."""
    joined = np.concatenate([finite(group) for group in groups])
    if within is not None:
        low, high = within
    elif joined.size:
        low, high = float(joined.min()), float(joined.max())
    else:
        low, high = 0.0, 1.0
    if not high > low:
        low, high = low - 0.5, high + 0.5
    return np.linspace(low, high, bins + 1)


def count(values: np.ndarray, edges: np.ndarray) -> Bins:
    """Count the finite values of one group; both ends belong to the bins."""
    kept = finite(values)
    return Bins(edges=edges, counts=np.histogram(kept, bins=edges)[0], n=kept.size)


def bars(bins: Bins, name: str, colour: str, *, legend: bool = True, **more: Any) -> go.Bar:
    """One group's bars: per cent of its values, with range and count on hover."""
    low, high = bins.edges[:-1], bins.edges[1:]
    return go.Bar(
        x=(low + high) / 2,
        y=np.round(bins.percent, 4),
        width=high - low,
        name=name,
        legendgroup=name,
        showlegend=legend,
        opacity=0.62,
        marker={"color": colour, "line": {"width": 0}},
        customdata=np.stack([low, high, bins.counts], axis=-1),
        hovertemplate="%{customdata[0]:.3g} to %{customdata[1]:.3g}<br>%{y:.2f} % of the values "
        "(%{customdata[2]:,.0f})",
        **more,
    )
