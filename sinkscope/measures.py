"""The measures a notebook calls: patterns, sink metrics and norms of a model on a batch.

Each takes a model or view, a `TokenBatch`, an optional ablation, and layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from sinkscope import metrics
from sinkscope._types import LayerPatterns, Layers, PerHead, PerHeadInt, PerKey
from sinkscope.ablations import Ablation
from sinkscope.attention import at_least_single, blocks
from sinkscope.capture import LayerReader, Reduce, stream
from sinkscope.errors import IdentityError, InvalidInputError
from sinkscope.metrics import NAN
from sinkscope.model import ModelView, model_view
from sinkscope.prompts import TokenBatch, require_batch
from sinkscope.sites import Site

PatternMetric = Callable[[Tensor, Tensor, Tensor], Tensor]
"""`metric(pattern, mask, visible)`, one layer at a time."""

STRAY_ATTENTION = 1e-3
"""Attention on keys that a query can't see, above which the visibility must be wrong."""


class PatternReader(LayerReader):
    """Reduces each layer's pattern by a metric, over the keys that its queries can see.

    What a query can see comes from the model's configuration (causal mask, sliding windows);
    attention elsewhere is an error, since the metric would then be about another model.
    """

    def __init__(self, layers: Sequence[int], metric: PatternMetric) -> None:
        super().__init__("pattern", layers, self._checked)
        self._metric = metric
        self._view: ModelView | None = None

    def sites(self, view: ModelView) -> Sequence[Site]:
        self._view = view
        return super().sites(view)

    def _checked(self, pattern: Tensor, chunk: TokenBatch, layer: int) -> Tensor:
        if self._view is None:
            raise InvalidInputError("The reader has not been given a model")
        mask = chunk.mask.to(pattern.device)
        visible = self._view.visible(layer, mask)
        _refuse_stray_attention(pattern, mask, visible, layer)
        return self._metric(pattern, mask, visible)


def _refuse_nan(what: str, at_tokens: Tensor) -> None:
    count = int(torch.isnan(at_tokens).sum())
    if count:
        raise IdentityError(
            f"The model gives NaN in the {what} of tokens that are not padding",
            expected="numbers",
            got=f"{count} NaN",
            fix="look for overflow in this dtype, a fully masked row, or a hook that makes NaN; "
            "padding on the other side may help",
        )


def _refuse_stray_attention(pattern: Tensor, mask: Tensor, visible: Tensor, layer: int) -> None:
    if not _attention_is_sound(pattern, mask, visible):
        _name_stray_attention(pattern, mask, visible, layer)


def _attention_is_sound(pattern: Tensor, mask: Tensor, visible: Tensor) -> bool:
    """Whether nothing can be wrong with a pattern, from sums over keys alone; NaN is not sound.

    Sums are made over whole rows, so that what is refused here may still be in order (NaN in
    rows of padding, many strays that are each small enough): that is looked at pair by pair.
    """
    seen_by = visible[:, None]
    for block in blocks(seen_by, pattern.shape[1]):
        shares = at_least_single(pattern[block.rows, :, block.queries])
        sees, tokens = block.of(seen_by)[:, 0], mask[block.rows, block.queries]
        total = shares.sum(-1)
        seen = torch.einsum("bhqk,bqk->bhq", shares[..., block.keys], sees.to(shares))
        stray = (total - seen).masked_fill(~tokens[:, None], 0)
        # A share that no query gives away twice is at most 1; rounding is far below the allowance.
        sound = (shares.amin() >= 0) & (stray.amax() <= STRAY_ATTENTION)
        sound &= total.amax() <= 1 + STRAY_ATTENTION
        sound &= ~((total.sum(1) == 0) & tokens).any()
        if not sound:
            return False
    return True


def _name_stray_attention(pattern: Tensor, mask: Tensor, visible: Tensor, layer: int) -> None:
    _refuse_nan("attention", pattern.masked_fill(~visible[:, None], 0))
    hidden = (mask[:, :, None] & ~visible)[:, None]
    stray = float(pattern.masked_fill(~hidden, 0).amax())
    if not stray <= STRAY_ATTENTION:
        raise IdentityError(
            f"In layer {layer} queries attend to keys that they should not see",
            expected="no attention to later or masked keys, or outside the sliding window",
            got=f"a share of {stray:.2e}",
            fix="check the attention mask, the model's window, and what edits scores or pattern; "
            "under LiftCausalMask only patterns() can be read",
        )
    # HookedTransformer writes 0 where its softmax gave NaN, which would pass for "no sink".
    empty = (pattern.abs().sum((1, 3)) == 0) & visible.any(-1)
    if bool(empty.any()):
        raise IdentityError(
            f"In layer {layer} no head of {int(empty.sum())} queries attends to anything",
            expected="attention that sums to 1",
            got="0 in every head",
            fix="look for NaN in the model's activations, or leave this layer out",
        )
    total = float(pattern.sum(-1).masked_fill(~mask[:, None], 0).amax())
    if not total <= 1 + STRAY_ATTENTION or bool((pattern < 0).any()):
        raise IdentityError(
            f"In layer {layer} the attention of a query is no share",
            expected="probabilities that sum to at most 1",
            got=f"a sum of {total:.4g}, smallest {float(pattern.min()):.4g}",
            fix="check hooks and ablations on scores or pattern",
        )


def patterns(
    model: Any,
    batch: TokenBatch,
    ablation: Ablation | None = None,
    layers: Layers = None,
    *,
    batch_size: int | None = None,
) -> LayerPatterns:
    """The attention probabilities, rows of padding included as the model computes them.

    Args:
        model: a hooked model or its view.
        batch: the prompts.
        ablation: the untouched model if None.
        layers: all if None.
        batch_size: rows per forward pass; all at once if None.

    Returns:
        `[batch layer head query key]`.
    """
    return _per_layer(model, batch, ablation, layers, None, batch_size, "pattern", _whole_pattern)


def sink_score(
    model: Any,
    batch: TokenBatch,
    ablation: Ablation | None = None,
    layers: Layers = None,
    *,
    batch_size: int | None = None,
) -> PerHead:
    """The paper's sink score: attention to the first position from each prompt's second half.

    `mean over i >= T//2 of pattern[i, first]`, T the prompt's length. The mean over layers and
    heads is the number of Table 1.

    Args:
        model: a hooked model or its view.
        batch: the prompts.
        ablation: the untouched model if None.
        layers: `view.mid_layers` if None: without the first quarter and the last one.
        batch_size: rows per forward pass; all at once if None.

    Returns:
        `[batch layer head]`, shares of attention.

    Raises:
        InvalidInputError: a prompt of fewer than two tokens.
    """
    view = model_view(model)
    chosen = view.layers(layers, view.mid_layers)
    return by_metric(view, batch, ablation, chosen, metrics.sink_score, batch_size)


def uniform_sink_score(model: Any, batch: TokenBatch, layers: Layers = None) -> float:
    """The sink score of a model that gives every key that a query sees the same attention.

    `mean over i >= T//2 of 1 / (number of keys that query i sees)`, the mean over prompts and
    layers. In a causal model that is `1 / (i + 1)`, in one that attends in both directions `1/T`,
    under a window more. Queries that do not see the first position are left out, as in
    `sink_score`.

    Args:
        model: a hooked model or its view.
        batch: the prompts.
        layers: `view.mid_layers` if None.

    Returns:
        A share of attention; NaN where no query sees the first position.
    """
    view = model_view(model)
    masks, counts = require_batch(batch).mask.unique(dim=0, return_counts=True)
    scores = []
    for layer in view.layers(layers, view.mid_layers):
        for mask, count in zip(masks.split(64), counts.split(64), strict=True):
            visible = view.visible(layer, mask)
            even = visible / visible.sum(-1, keepdim=True).clamp_min(1)
            score = metrics.sink_score(even[:, None], mask, visible)[:, 0]
            scores.append(score.repeat_interleave(count))
    return float(torch.cat(scores).double().nanmean())


def sink_rate(
    model: Any,
    batch: TokenBatch,
    ablation: Ablation | None = None,
    layers: Layers = None,
    *,
    eps: float = 0.3,
    batch_size: int | None = None,
) -> PerHead:
    """1 where a head attends to the first position by more than `eps` on average, else 0.

    `alpha = mean over all queries i of pattern[i, first]`; the mean of the result over
    prompts, layers and heads is the sink rate of Gu et al. 2025 (eps 0.3).

    Args:
        model: a hooked model or its view.
        batch: the prompts.
        ablation: the untouched model if None.
        layers: all if None.
        eps: the threshold.
        batch_size: rows per forward pass; all at once if None.

    Returns:
        `[batch layer head]`, 0 or 1.
    """

    def rate(received: Tensor, mask: Tensor) -> Tensor:
        return metrics.sink_rate(received, mask, eps)

    return by_metric(model, batch, ablation, layers, of_received(rate), batch_size)[..., 0]


def sink_position(
    model: Any,
    batch: TokenBatch,
    ablation: Ablation | None = None,
    layers: Layers = None,
    *,
    batch_size: int | None = None,
) -> PerHeadInt:
    """The position that receives most attention from the queries that can see it.

    `argmax_k mean over i >= k of pattern[i, k]`, counted from each prompt's first token: a
    sink that an ablation moved is seen as moved, not as gone.

    Args:
        model: a hooked model or its view.
        batch: the prompts.
        ablation: the untouched model if None.
        layers: all if None.
        batch_size: rows per forward pass; all at once if None.

    Returns:
        `[batch layer head]`, positions.
    """
    position = of_received(metrics.sink_position)
    return by_metric(model, batch, ablation, layers, position, batch_size)[..., 0].long()


def missing_mass(
    model: Any,
    batch: TokenBatch,
    ablation: Ablation | None = None,
    layers: Layers = None,
    *,
    batch_size: int | None = None,
) -> Float[Tensor, "batch layer head query"]:
    """The share of attention that goes to no key: `1 - sum over keys of pattern[query, key]`.

    0 up to rounding, but where sink logits (gpt-oss) or an edit of the pattern take some: a
    sink without a token, which the sink score does not see.

    Args:
        model: a hooked model or its view.
        batch: the prompts.
        ablation: the untouched model if None.
        layers: all if None.
        batch_size: rows per forward pass; all at once if None.

    Returns:
        `[batch layer head query]`, NaN at padding.
    """

    def missing(pattern: Tensor, mask: Tensor, visible: Tensor) -> Tensor:
        total = pattern.masked_fill(~visible[:, None], 0).sum(-1)
        return (1 - total).masked_fill(~mask[:, None, :], NAN)

    return by_metric(model, batch, ablation, layers, missing, batch_size)


def value_norms(
    model: Any,
    batch: TokenBatch,
    ablation: Ablation | None = None,
    layers: Layers = None,
    *,
    batch_size: int | None = None,
) -> PerKey:
    """`|v_j|` per head, with the value bias: a sink's is small (value drain).

    Args:
        model: a hooked model or its view.
        batch: the prompts.
        ablation: the untouched model if None.
        layers: all if None.
        batch_size: rows per forward pass; all at once if None.

    Returns:
        `[batch layer head pos]`, NaN at padding; head counts key heads where they are shared.
    """

    def reduce(v: Tensor, chunk: TokenBatch, layer: int) -> Tensor:
        norms = v.norm(dim=-1).transpose(1, 2)
        _refuse_nan("values", norms.transpose(1, 2)[chunk.mask.to(norms.device)])
        return norms.masked_fill(~chunk.mask[:, None, :].to(norms.device), NAN)

    return _per_layer(model, batch, ablation, layers, None, batch_size, "v", reduce)


def residual_norms(
    model: Any,
    batch: TokenBatch,
    ablation: Ablation | None = None,
    layers: Layers = None,
    *,
    batch_size: int | None = None,
) -> Tensor:
    """`|x_j|` of the residual stream entering each layer: a sink's is large (residual peak).

    Args:
        model: a hooked model or its view.
        batch: the prompts.
        ablation: the untouched model if None.
        layers: all if None.
        batch_size: rows per forward pass; all at once if None.

    Returns:
        `[batch layer pos]`, NaN at padding.
    """

    def reduce(x: Tensor, chunk: TokenBatch, layer: int) -> Tensor:
        norms = x.norm(dim=-1)
        _refuse_nan("residual stream", norms[chunk.mask.to(norms.device)])
        return norms.masked_fill(~chunk.mask.to(norms.device), NAN)

    return _per_layer(model, batch, ablation, layers, None, batch_size, "resid_pre", reduce)


def of_received(*reductions: Callable[[Tensor, Tensor], Tensor]) -> PatternMetric:
    """A metric `[batch head n]` of n functions of the attention that keys receive and the mask."""

    def metric(pattern: Tensor, mask: Tensor, visible: Tensor) -> Tensor:
        received = metrics.received_attention(pattern, mask, visible)
        found = [reduce(received, mask) for reduce in reductions]
        # In half precision a position would be rounded.
        kind = torch.promote_types(received.dtype, torch.float32)
        return torch.stack([values.to(kind) for values in found], -1)

    return metric


def by_metric(
    model: Any,
    batch: TokenBatch,
    ablation: Ablation | None,
    layers: Layers,
    metric: PatternMetric,
    batch_size: int | None,
) -> Tensor:
    """`[batch layer ...]`, what a metric makes of the patterns of the layers; all if None."""
    view = model_view(model)
    reader = PatternReader(view.layers(layers), metric)
    stream(view, batch, [reader], ablation, batch_size=batch_size)
    return reader.result()


def _whole_pattern(pattern: Tensor, chunk: TokenBatch, layer: int) -> Tensor:
    rows = pattern.transpose(1, 2)[chunk.mask.to(pattern.device)]
    _refuse_nan("attention", rows)
    return pattern.clone()


def _per_layer(
    model: Any,
    batch: TokenBatch,
    ablation: Ablation | None,
    layers: Layers,
    default: Sequence[int] | None,
    batch_size: int | None,
    kind: str,
    reduce: Reduce,
) -> Tensor:
    view = model_view(model)
    reader = LayerReader(kind, view.layers(layers, default), reduce)
    stream(view, batch, [reader], ablation, batch_size=batch_size)
    return reader.result()
