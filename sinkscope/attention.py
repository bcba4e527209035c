"""How queries and keys become scores and patterns, beyond `scale q.k`: pure tensor arithmetic.

A `ScoreRule` holds what one layer of one model does with its queries and keys in one run. All
steps on a query or a key are linear, so that each part of it (content, bias) can take them alone
and the parts still add up.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from sinkscope._types import Pattern


@dataclass(frozen=True, eq=False)
class Rotation:
    """Rotary positions: pairs of coordinates turn by an angle that grows with the position.

    `x -> x cos + turned(x) sin` on the first coordinates, as many as `cos` has; the others
    stay. `turned` maps a pair `(a, b)` to `(-b, a)`.

    Attributes:
        cos: `[batch pos d_rotary]`, batch of size 1 where rows agree.
        sin: the same shape.
        adjacent: coordinates 2m and 2m + 1 are a pair (GPT-J); otherwise m and m + d_rotary/2.

    Source: Su et al. 2021, "RoFormer".
    """

    cos: Float[Tensor, "rows pos d_rotary"]
    sin: Float[Tensor, "rows pos d_rotary"]
    adjacent: bool = False

    def __call__(self, x: Float[Tensor, "batch head pos d_head"]) -> Tensor:
        """`[batch head pos d_head]`, every position turned by its own angle."""
        n = self.cos.shape[-1]
        cos, sin = (t.to(x)[:, None] for t in (self.cos, self.sin))
        turning, rest = x[..., :n], x[..., n:]
        if self.adjacent:
            turned = torch.stack((-turning[..., 1::2], turning[..., ::2]), -1).flatten(-2)
        else:
            turned = torch.cat((-turning[..., n // 2 :], turning[..., : n // 2]), -1)
        return torch.cat((turning * cos + turned * sin, rest), -1)


@dataclass(frozen=True, eq=False)
class ScoreRule:
    """What a layer does between its projections and its pattern.

    `s_ij = cap(scale R_i(a_i * q_i) . R_j(c_j * k_j) + bias_ij)`, `cap(x) = m tanh(x / m)`;
    `pattern = softmax(s)`, or its first columns where a sink logit joins the softmax.

    Attributes:
        scale: the factor on q.k.
        rotation: R, rotary positions.
        query_gain: a, what the norm on queries multiplied each entry by in this run,
            `[batch head pos d_head]`; None without such a norm.
        key_gain: c, the same for keys.
        position_bias: ALiBi's share of the score, `[batch head 1|query key]`.
        soft_cap: m; None where scores are not capped.
        sink_logits: `[head]`, a learned score of attending to nothing.
    """

    scale: float
    rotation: Rotation | None = None
    query_gain: Float[Tensor, "batch head pos d_head"] | None = None
    key_gain: Float[Tensor, "batch head pos d_head"] | None = None
    position_bias: Float[Tensor, "rows head query key"] | None = None
    soft_cap: float | None = None
    sink_logits: Float[Tensor, " head"] | None = None

    def queries(self, q: Float[Tensor, "batch head pos d_head"]) -> Tensor:
        """Queries, or a part of them, as they enter the dot product."""
        return self._carried(q, self.query_gain)

    def keys(self, k: Float[Tensor, "batch head pos d_head"]) -> Tensor:
        """Keys, or a part of them, as they enter the dot product."""
        return self._carried(k, self.key_gain)

    def _carried(self, x: Tensor, gain: Tensor | None) -> Tensor:
        if gain is not None:
            x = x * gain.to(x)
        return x if self.rotation is None else self.rotation(x)

    def capped(self, total: Tensor) -> Tensor:
        """The scores that enter the softmax, from the sum of all terms."""
        if self.soft_cap is None:
            return total
        return self.soft_cap * torch.tanh(total / self.soft_cap)

    def pattern(self, scores: Pattern, visible: Bool[Tensor, "batch one query key"]) -> Pattern:
        """The softmax over visible keys; rows sum to less than 1 beside a sink logit."""
        scores = scores.masked_fill(~visible, -math.inf)
        if self.sink_logits is None:
            return scores.softmax(-1)
        sink = self.sink_logits.to(scores)[None, :, None, None]
        sink = sink.expand(*scores.shape[:-1], 1)
        return torch.cat((scores, sink), -1).softmax(-1)[..., :-1]


def gain_of_norm(
    before: Float[Tensor, "batch pos head d_head"], after: Float[Tensor, "batch pos head d_head"]
) -> Float[Tensor, "batch head pos d_head"]:
    """What a norm multiplied every entry by: its scale and gain, held at the values of a run."""
    gain = torch.where(before == 0, 0, after / before.where(before != 0, torch.ones_like(before)))
    return gain.transpose(1, 2)


def eps_of(dtype: torch.dtype) -> float:
    """The unit of a dtype's precision."""
    return float(torch.finfo(dtype).eps)


def is_half(dtype: torch.dtype) -> bool:
    """Whether a dtype has 16 bits."""
    return eps_of(dtype) > eps_of(torch.float32)


def at_least_single(tensor: Tensor) -> Tensor:
    """Half precision as float32: our own sums should add no rounding to the model's."""
    return tensor.float() if is_half(tensor.dtype) else tensor


def is_single(pattern: Pattern, visible: Bool[Tensor, "batch one query key"]) -> bool:
    """Whether float32 holds all shares of a pattern exactly, as after a softmax in float32.

    Shares of 0 and 1 tell nothing.
    """
    if eps_of(pattern.dtype) >= eps_of(torch.float32):
        return True
    shares = pattern[visible.expand_as(pattern)]
    shares = shares[(shares > 0) & (shares < 1)]
    return bool(shares.numel()) and torch.equal(shares, shares.float().to(shares.dtype))
