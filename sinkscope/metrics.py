"""Sink metrics as pure functions on tensors: no model, no hooks.

Positions here count from the first unmasked position of each row, so padding on either side
changes nothing. `visible[b, q, k]` says whether query q may attend to key k.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinkscope._types import Mask, Pattern, Rows
from sinkscope.errors import InvalidInputError

NAN = float("nan")


def cosine(a: Float[Tensor, "*batch d"], b: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch"]:
    """`a.b / (|a| |b|)` over the last axis; NaN where a vector is zero."""
    # Each by its own norm: the product of two norms leaves float16 for vectors that do not.
    return (a / a.norm(dim=-1, keepdim=True) * (b / b.norm(dim=-1, keepdim=True))).sum(-1)


def position_ids(mask: Mask) -> Int[Tensor, "batch pos"]:
    """0 at each row's first unmasked column, rising by one; -1 where masked."""
    return torch.where(mask, mask.long().cumsum(1) - 1, -1)


def first_positions(mask: Mask) -> Rows:
    """The column of the first unmasked position of each row."""
    return mask.long().argmax(dim=1)


def causal_visibility(mask: Mask, window: int | None = None) -> Bool[Tensor, "batch query key"]:
    """Which key each query may attend to: no later one, and nothing masked on either side.

    Args:
        mask: `[batch pos]`, true where a token is.
        window: a sliding window lets a query see itself and the `window - 1` keys before it.
    """
    n = mask.shape[1]
    allowed = torch.ones(n, n, dtype=torch.bool, device=mask.device).tril()
    if window is not None:
        allowed &= ~allowed.tril(-window)
    return allowed & full_visibility(mask)


def full_visibility(mask: Mask) -> Bool[Tensor, "batch query key"]:
    """Every query may attend to every key, but for masked ones (bidirectional models)."""
    return mask[:, None, :] & mask[:, :, None]


def sink_score(
    pattern: Pattern, mask: Mask, visible: Bool[Tensor, "batch query key"] | None = None
) -> Float[Tensor, "batch head"]:
    """Mean attention to the first position, over the queries of each row's second half.

    `mean over i >= T//2 of pattern[i, first]`, T the row's unmasked length; queries that
    cannot see the first position (a sliding window) are left out.

    Args:
        pattern: `[batch head query key]`, probabilities.
        mask: `[batch pos]`, true where a token is.
        visible: causal visibility if not given.

    Raises:
        InvalidInputError: a row of fewer than two tokens, where the score would always be 1.

    Source: the paper's BOS attention.
    """
    lengths = _lengths(mask)
    visible = causal_visibility(mask) if visible is None else visible
    first = first_positions(mask)
    late = position_ids(mask) >= (lengths // 2)[:, None]
    rows = torch.arange(mask.shape[0], device=mask.device)
    queries = late & visible[rows, :, first]
    to_first = pattern[rows, :, :, first]
    return _masked_mean(to_first, queries[:, None, :])


def received_attention(
    pattern: Pattern, mask: Mask, visible: Bool[Tensor, "batch query key"] | None = None
) -> Float[Tensor, "batch head key"]:
    """Mean attention that each key receives from the queries that can see it.

    `alpha_k = mean over visible i of pattern[i, k]`; for a causal model these are the queries
    `i >= k`. NaN where no query can see the key (padding).

    Source: Gu et al. 2025, "When Attention Sink Emerges", for every k.
    """
    _lengths(mask)
    visible = causal_visibility(mask) if visible is None else visible
    seen = visible[:, None]
    return pattern.masked_fill(~seen, 0).sum(2) / seen.sum(2).to(pattern.dtype)  # 0 / 0 is NaN


def sink_rate(
    received: Float[Tensor, "batch head key"], mask: Mask, eps: float = 0.3
) -> Float[Tensor, "batch head"]:
    """1 where a head's `alpha` at the first position is above `eps`, else 0.

    Its mean over prompts, layers and heads is the sink rate.

    Source: Gu et al. 2025 (eps 0.3).
    """
    if not isinstance(eps, (int, float)) or not 0 <= eps <= 1:
        raise InvalidInputError(
            "The threshold of the sink rate is a share of attention",
            expected="eps from 0 to 1",
            got=eps,
            fix="use 0.3, the source's, or another share",
        )
    rows = torch.arange(mask.shape[0], device=mask.device)
    return (received[rows, :, first_positions(mask)] > eps).to(received.dtype)


def sink_position(
    received: Float[Tensor, "batch head key"], mask: Mask
) -> Int[Tensor, "batch head"]:
    """The position that receives most, counted from each row's first unmasked one.

    `argmax_k alpha_k`. A sink that an ablation moved elsewhere is found there.
    """
    column = received.nan_to_num(nan=-1.0).argmax(-1)
    return (
        position_ids(mask)[:, None]
        .expand(-1, column.shape[1], -1)
        .gather(2, column[..., None])[..., 0]
    )


def _masked_mean(
    values: Float[Tensor, "batch head pos"], keep: Bool[Tensor, "batch one pos"]
) -> Float[Tensor, "batch head"]:
    """Mean over kept positions, NaN (0 / 0) where none is kept."""
    return values.masked_fill(~keep, 0).sum(-1) / keep.sum(-1).to(values.dtype)


def _lengths(mask: Mask) -> Rows:
    lengths = mask.sum(1)
    if bool((lengths < 2).any()):
        row = int((lengths < 2).nonzero()[0])
        raise InvalidInputError(
            "A sink needs at least two tokens: one token attends to itself alone",
            expected="2 or more tokens in every row",
            got=f"row {row} with {int(lengths[row])}",
            fix="leave short prompts out",
        )
    return lengths
