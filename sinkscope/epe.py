"""The effective positional encoding, and how the weights line it up with the query bias."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from sinkscope._types import Layers
from sinkscope.display import HtmlTable, number
from sinkscope.errors import InvalidInputError
from sinkscope.metrics import cosine
from sinkscope.model import ModelView, model_view

_FOUND: ContextVar[dict[tuple[int, bool], tuple[ModelView, EPE]] | None] = ContextVar(
    "found", default=None
)
"""By the id of a view, which is kept so that no other gets its id."""


@dataclass(frozen=True)
class EPE(HtmlTable):
    """Effective positional encodings of a model.

    Attributes:
        vectors: `[n_ctx d_model]`, `EPE_i = p_i + MLP_0(p_i)`.
        positions: `[n_ctx d_model]`, the position vectors p_i.
        mlp: `[n_ctx d_model]`, what the first MLP makes of them.
        through_ln: whether LN2 of layer 0 came before the MLP.
    """

    vectors: Float[Tensor, "n_ctx d_model"]
    positions: Float[Tensor, "n_ctx d_model"]
    mlp: Float[Tensor, "n_ctx d_model"]
    through_ln: bool

    def overview(self) -> list[tuple[str, str]]:
        norms = self.vectors.norm(dim=-1)
        n, d = self.vectors.shape
        return [
            ("form", "p + MLP_0(LN2_0(p))" if self.through_ln else "p + MLP_0(p)"),
            ("positions", f"{n} of d_model {d}"),
            ("|EPE_0|", number(float(norms[0]))),
            ("median |EPE| of the others", number(float(norms[1:].median())) if n > 1 else "none"),
        ]


@contextmanager
def epe_found_once() -> Iterator[None]:
    """Within the block the EPE of a view is computed once, and forgotten at its end.

    For one call that asks for it again and again and in which no weight changes. Blocks nest; the
    outermost ends it.
    """
    if _FOUND.get() is not None:
        yield
        return
    token = _FOUND.set({})
    try:
        yield
    finally:
        _FOUND.reset(token)


def extract_epe(model: Any, through_ln: bool = False) -> EPE:
    """The effective positional encoding of every position, from the weights alone.

    `EPE_i = p_i + MLP_0(p_i)`: the raw position vector goes into the first MLP, without LN2
    and without attention, as the paper has it. With `through_ln=True` it is
    `p_i + MLP_0(LN2_0(p_i))`, which is what the block itself would do with a lone p_i.

    Args:
        model: a hooked model or its view.
        through_ln: see above; the result carries it.

    Raises:
        NotApplicableError: the model has no learned positions, or no MLP in layer 0.
        ProcessedWeightsError: the weights were folded or centred.
    """
    view, found = model_view(model), _FOUND.get()
    if found is None:
        return _extracted(view, through_ln)
    if (id(view), through_ln) not in found:
        found[id(view), through_ln] = view, _extracted(view, through_ln)
    return found[id(view), through_ln][1]


def _extracted(view: ModelView, through_ln: bool) -> EPE:
    view.require_learned_positions()
    view.require_norm_in_front("The effective positional encoding")
    view.require_raw_weights("The effective positional encoding")
    positions = view.W_pos.clone()
    into_mlp = positions[None]
    if through_ln:
        into_mlp = view.first_ln2(into_mlp)
    mlp = view.first_mlp(into_mlp)[0].clone()
    return EPE(vectors=positions + mlp, positions=positions, mlp=mlp, through_ln=through_ln)


def query_bias(
    model: Any, kind: str = "raw", layers: Layers = None
) -> Float[Tensor, "layer head d_head"]:
    """The query bias, as it stands or with what LN1's bias adds to it.

    raw: `b_Q`. effective: `b_Q + beta W_Q`, with beta the bias of LN1, which gives every
    query the same constant. `fold_ln` merges the two for good, so that folded weights only
    have an effective one.

    Args:
        model: a hooked model or its view.
        kind: "raw" (the paper's) or "effective".
        layers: all if None.

    Raises:
        NotApplicableError: no query bias (raw), or neither a query bias nor an LN1 bias.
        ProcessedWeightsError: raw on processed weights.
    """
    view = model_view(model)
    chosen = view.layers(layers)
    if kind not in ("raw", "effective"):
        raise InvalidInputError(
            "Unknown kind of query bias",
            expected="'raw' or 'effective'",
            got=repr(kind),
            fix="choose one of these; the paper's is 'raw'",
        )
    if kind == "raw":
        view.require_raw_weights("The raw query bias")
        return torch.stack([view.b_Q(layer).to(view.device) for layer in chosen])
    view.require_norm_in_front("The effective query bias")
    biases = [view.query_bias(layer, kind) for layer in chosen]
    if any(bias is None for bias in biases):
        view.require_query_bias()
    return torch.stack([bias.to(view.device) for bias in biases if bias is not None])


def coordinate_alignment(
    model: Any, kind: str = "raw", layers: Layers = None
) -> Float[Tensor, "layer head d_model"]:
    """gamma, the weight with which each coordinate of a key adds to the query-bias term.

    `gamma_h[d] = b_Q,h . W_K,h[d, :]`, signed and without the score's scale, so that
    `Delta_j = sum_d gamma_h[d] n_j[d]`. The paper plots its magnitude.

    Args:
        model: a hooked model or its view.
        kind: which query bias, "raw" (the paper's) or "effective".
        layers: all if None.

    Raises:
        NotApplicableError: the model has no query bias.
        ProcessedWeightsError: the weights were folded or centred (raw only).
    """
    view = model_view(model)
    chosen = view.layers(layers)
    view.require_key_only_shift()
    biases = query_bias(view, kind, chosen)
    return torch.stack(
        [
            torch.einsum("hde,he->hd", view.W_K(layer).to(bias.device), bias)
            for layer, bias in zip(chosen, biases, strict=True)
        ]
    )


def epe_bias_alignment(
    model: Any,
    n_positions: int | None = 40,
    layers: Layers = None,
    through_ln: bool = False,
) -> Float[Tensor, "layer head pos"]:
    """Cosine of the query bias with each position's key, from the weights alone.

    `cos(b_Q,h, EPE_j W_K,h)`, without LN1 and without b_K, as the paper has it.

    Args:
        model: a hooked model or its view.
        n_positions: the first so many positions (40 in the paper); None for all.
        layers: all if None.
        through_ln: the form of the EPE, see `extract_epe`.

    Raises:
        NotApplicableError: no query bias, no learned positions or no first MLP.
        ProcessedWeightsError: the weights were folded or centred.
        InvalidInputError: more positions than the model has.
    """
    view = model_view(model)
    view.require_query_bias()
    n_positions = view.n_ctx if n_positions is None else n_positions
    if not isinstance(n_positions, int) or not 1 <= n_positions <= view.n_ctx:
        raise InvalidInputError(
            "The model does not have that many positions",
            expected=f"n_positions from 1 to {view.n_ctx}",
            got=n_positions,
            fix="ask for fewer, or pass None for all",
        )
    epe = extract_epe(view, through_ln=through_ln).vectors[:n_positions]
    cosines = []
    for layer in view.layers(layers):
        keys = torch.einsum("pd,hde->hpe", epe, view.W_K(layer).to(epe.device))
        bias = view.b_Q(layer).to(epe.device)[:, None, :].expand_as(keys)
        cosines.append(cosine(keys, bias))
    return torch.stack(cosines)
