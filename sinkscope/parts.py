"""Which parts a model has, asked of the model itself and never of its class."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class Parts:
    """Which parts of the paper's circuit a model has at all.

    Attributes:
        query_bias: W_Q has a bias b_Q.
        key_bias: W_K has a bias b_K.
        learned_positions: a learned table of absolute positions is added to the embedding.
        positions: how positions enter, in TransformerLens' words ("standard", "rotary", ...).
        first_mlp: layer 0 has an MLP that adds to the residual stream.
        normalization: "LN", "RMS", "LNPre", "RMSPre" or "none".
        qk_norm: queries and keys pass a norm of their own before the score.
        soft_cap: scores are held below this size by a tanh; None where they are not.
        sink_logits: a learned score per head joins the softmax and attends to nothing.
        processed: what was done to the weights ("folded", "centred", or "processed" where only
            the model's own flag tells), empty if nothing.
        projections: a query and a key are each one projection of what enters the attention, and
            not compressed on the way (MLA).
    """

    query_bias: bool
    key_bias: bool
    learned_positions: bool
    positions: str
    first_mlp: bool
    normalization: str
    qk_norm: bool = False
    soft_cap: float | None = None
    sink_logits: bool = False
    processed: tuple[str, ...] = ()
    projections: bool = True


def weight_of(module: Any, name: str) -> Tensor:
    """The weight of an embedding, which HookedTransformer keeps under its own name."""
    value = getattr(module, "weight", None)
    return value if isinstance(value, Tensor) else getattr(module, name)


def find_parts(model: Any) -> Parts:
    """The parts of a model in TransformerLens' shape."""
    cfg = model.cfg
    attention = model.blocks[0].attn
    soft_cap = float(getattr(cfg, "attn_scores_soft_cap", None) or 0)
    positions = str(getattr(cfg, "positional_embedding_type", "none"))
    normalization = str(getattr(cfg, "normalization_type", None) or "none")
    projections = _projects(attention)
    return Parts(
        query_bias=projections and _has_bias(model, "q", "b_Q"),
        key_bias=projections and _has_bias(model, "k", "b_K"),
        learned_positions=positions == "standard" and hasattr(model, "pos_embed"),
        positions=positions,
        first_mlp=hasattr(model.blocks[0], "mlp"),
        normalization=normalization,
        qk_norm=getattr(attention, "q_norm", None) is not None,
        soft_cap=soft_cap if soft_cap > 0 else None,
        sink_logits=sink_logits_of(attention) is not None,
        processed=_processed(model, normalization, projections),
        projections=projections,
    )


def sink_logits_of(attention: Any) -> Float[Tensor, " head"] | None:
    """The learned scores of attending to nothing, None where the attention has none."""
    sinks = getattr(getattr(attention, "original_component", None), "sinks", None)
    return sinks.detach() if isinstance(sinks, Tensor) else None


def _has_bias(model: Any, projection: str, name: str) -> bool:
    """Whether a projection has a bias at all.

    On the bridge the projection is a module that has one or not. HookedTransformer keeps a
    tensor of zeros where an architecture has none, so there all zeros means none.
    """
    attentions = [block.attn for block in model.blocks if hasattr(block, "attn")]
    if all(hasattr(attention, projection) for attention in attentions):
        biases = [getattr(getattr(a, projection), "bias", None) for a in attentions]
        return all(isinstance(bias, Tensor) for bias in biases)
    return any(bool(getattr(a, name).detach().any()) for a in attentions if hasattr(a, name))


def _projects(attention: Any) -> bool:
    try:
        getattr(attention, "W_Q", None)
    except NotImplementedError:  # the bridge's word for compressed projections
        return False
    return True


def _processed(model: Any, normalization: str, projections: bool) -> tuple[str, ...]:
    """What was done to the weights, from the model's own flags and from the weights themselves."""
    flagged = bool(getattr(model, "_weights_processed", False))
    identity = _identity_norms(model)
    told = identity and (flagged or (projections and _centred_keys(model)))
    folded = normalization.endswith("Pre") or told
    done = ["folded"] if folded else []
    tables = [weight_of(model.embed, "W_E")]
    if hasattr(model, "pos_embed") and str(model.cfg.positional_embedding_type) == "standard":
        tables.append(weight_of(model.pos_embed, "W_pos"))
    if all(_is_centred(table) for table in tables):
        done.append("centred")
    return tuple(done) if done or not flagged else ("processed",)


def _is_centred(table: Float[Tensor, "... d_model"]) -> bool:
    """Whether every row has mean zero over d_model, which only centring brings about."""
    # Rounding to a dtype moves a row's mean by no more than eps times its mean magnitude.
    eps = torch.finfo(table.dtype).eps
    table = table.detach().float()
    scale = table.abs().amax()
    allowed = (eps * table.abs().mean(-1)).clamp_min(1e-6 * float(scale))
    return bool(scale > 0) and bool((table.mean(-1).abs() <= allowed).all())


def _identity_norms(model: Any) -> bool:
    """Folding leaves first norms with gain 1 and bias 0."""
    for block in model.blocks:
        ln1 = getattr(block, "ln1", None)
        gain, bias = (getattr(ln1, n, getattr(ln1, n[0], None)) for n in ("weight", "bias"))
        if not isinstance(gain, Tensor) or not bool((gain.detach() == 1).all()):
            return False
        if isinstance(bias, Tensor) and bool(bias.detach().any()):
            return False
    return True


def _centred_keys(model: Any) -> bool:
    """Folding also leaves reading weights centred over d_model."""
    attentions = [getattr(block, "attn", None) for block in model.blocks]
    return all(a is not None and _is_centred(a.W_K.detach().transpose(-1, -2)) for a in attentions)
