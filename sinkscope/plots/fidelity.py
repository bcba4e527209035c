"""The figure of the EPE's fidelity."""

from __future__ import annotations

import warnings

import numpy as np
import plotly.graph_objects as go

from sinkscope.errors import InvalidInputError
from sinkscope.experiments.epe_fidelity import FORMS, EpeFidelity
from sinkscope.plots._checks import chosen, require
from sinkscope.plots._style import BLACK, BLUE, GREEN, RED, finish, position_axis, rgba
from sinkscope.published import published as published_numbers

_LABELS = {
    "mlp": ("mlp: the first MLP alone", BLUE, "circle"),
    "block": ("block: the first block, unmasked (the paper's)", RED, "square"),
    "causal_block": ("causal_block: the first block as it runs", GREEN, "diamond"),
}


def fidelity_ribbon(
    fidelity: EpeFidelity,
    *,
    forms: str | tuple[str, ...] | None = None,
    published: bool = False,
    model: str | None = None,
) -> go.Figure:
    """Cosine between the EPE and the position's real effect, by position, in every form.

    Lines are medians over prompts, bands run from p10 to p90.

    Args:
        fidelity: the result.
        forms: of "mlp", "block", "causal_block"; all that there are if None.
        published: also the paper's medians of "mlp" and "block", for its model and prompts.
        model: what ran, for the subtitle.

    Raises:
        InvalidInputError: another result, an unknown form, or published numbers of another
            length.
        NotApplicableError: a form that the model does not have.
    """
    fidelity = require(fidelity, EpeFidelity, "fidelity_ribbon")
    figure = go.Figure()
    kept = chosen(fidelity.forms if forms is None else forms, FORMS, "form")
    n_positions = fidelity.mlp.shape[1]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # positions without a value
        percentiles = {form: fidelity.percentiles(form) for form in kept}
    for form, (p10, p50, p90) in percentiles.items():
        label, colour, _ = _LABELS[form]
        seen = np.nonzero(np.isfinite(p50))[0]
        figure.add_trace(
            go.Scatter(
                x=np.concatenate([seen, seen[::-1]]),
                y=np.concatenate([p90[seen], p10[seen][::-1]]),
                fill="toself",
                fillcolor=rgba(colour, 0.2),
                mode="lines",
                line={"width": 0, "color": colour},
                name=f"{form}: p10 to p90",
                legendgroup=form,
                showlegend=False,
                hoverinfo="skip",
            )
        )
        figure.add_trace(
            go.Scatter(
                x=np.arange(n_positions),
                y=p50,
                mode="lines+markers",
                line={"color": colour, "width": 2},
                marker={"symbol": _LABELS[form][2], "size": 5},
                name=label,
                legendgroup=form,
                customdata=np.stack([p10, p90], axis=-1),
                hovertemplate="position %{x}<br>p50 %{y:.4f} (p10 %{customdata[0]:.4f}, "
                "p90 %{customdata[1]:.4f})<extra>" + form + "</extra>",
            )
        )
    if published:
        for form, dash in (("mlp", "dash"), ("block", "dot")):
            if form in kept:
                figure.add_trace(_published(form, dash, n_positions))
    figure.update_xaxes(
        title_text="position (tokens from 0)", range=[-0.5, n_positions - 0.5], zeroline=False
    )
    figure.update_xaxes(position_axis(n_positions))
    figure.update_yaxes(title_text="cosine with the EPE (1 = same direction)")
    form = "p + MLP(LN(p))" if fidelity.through_ln else "p + MLP(p)"
    return finish(
        figure,
        "How well the EPE stands for what positions change",
        subtitle=f"Lines: median over prompts; bands: p10 to p90. EPE = {form}",
        model=model,
        body=420,
    )


def _published(form: str, dash: str, n_positions: int) -> go.Scatter:
    medians = np.asarray(published_numbers()["fidelity"][form], dtype=np.float64)[:, 1]
    if len(medians) != n_positions:
        raise InvalidInputError(
            "The published fidelity is of another length",
            expected=f"{len(medians)} positions",
            got=f"{n_positions} positions",
            fix="leave published=False for other models and prompts",
        )
    return go.Scatter(
        x=np.arange(n_positions),
        y=medians,
        mode="lines",
        line={"color": BLACK, "width": 1.5, "dash": dash},
        name=f"{form}: published median",
        hovertemplate="position %{x}<br>published %{y:.4f}<extra></extra>",
    )
