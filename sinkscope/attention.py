"""How queries and keys become scores and patterns, beyond `scale q.k`: pure tensor arithmetic.

A `ScoreRule` holds what one layer of one model does with its queries and keys in one run. All
steps on a query or a key are linear, so that each part of it (content, bias) can take them alone
and the parts still add up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from sinkscope._types import Pattern
from sinkscope.errors import IdentityError

TOLERANCE_FACTOR = 64
"""Identities hold to this many units of the dtype's precision, times the largest `scale |q||k|`."""
HALF_FACTOR = 4
"""The same for half precision, whose units are large: 64 of them would refuse nothing."""
HALF_PATTERN_FACTOR = 16
"""In half precision patterns hold to this many units: a share of attention is at most 1."""

BLOCK_PAIRS = 2**18
"""Entries of a block, a MiB in float32; on a GPU, which would rather have few large steps, more."""


@dataclass(frozen=True, eq=False)
class Rotation:
    """Rotary positions: pairs of coordinates turn by an angle that grows with the position.

    `x -> x cos + turned(x) sin` on the first coordinates, as many as `cos` has; the others
    stay. `turned` maps a pair `(a, b)` to `(-b, a)`.

    Attributes:
        cos: `[batch pos d_rotary]`, batch of size 1 where rows agree.
        sin: the same shape.
        adjacent: coordinates 2m and 2m + 1 are a pair (GPT-J); otherwise m and m + d_rotary/2.
        rounds: the model rounds queries and keys to float32 as it turns them.

    Source: Su et al. 2021, "RoFormer".
    """

    cos: Float[Tensor, "rows pos d_rotary"]
    sin: Float[Tensor, "rows pos d_rotary"]
    adjacent: bool = False
    rounds: bool = False

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

    @property
    def exact(self) -> bool:
        """Whether everything is computed in the model's own dtype."""
        return self.rotation is None or not self.rotation.rounds

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

    def scores(self, q: Tensor, k: Tensor, block: Block) -> Pattern:
        """The scores of a block, from what `queries` and `keys` gave of all positions."""
        q, k = q[block.rows, :, block.queries], k[block.rows, :, block.keys]
        total = (self.scale * q) @ k.transpose(-1, -2)
        if self.position_bias is not None:
            total = total + at_least_single(block.of(self.position_bias))
        return self.capped(total)

    def largest_bias(self) -> float:
        """The largest |position bias|: what it adds to the size of scores."""
        return 0.0 if self.position_bias is None else float(self.position_bias.abs().amax())

    def capped(self, total: Tensor) -> Tensor:
        """The scores that enter the softmax, from the sum of all terms."""
        if self.soft_cap is None:
            return total
        return self.soft_cap * torch.tanh(total / self.soft_cap)

    def pattern(self, scores: Pattern, visible: Bool[Tensor, "batch one query key"]) -> Pattern:
        """The softmax over visible keys; rows sum to less than 1 beside a sink logit."""
        # On CPUs twice as fast as masked_fill.
        scores = torch.where(visible, scores, -math.inf)
        if self.sink_logits is None:
            return scores.softmax(-1)
        sink = self.sink_logits.to(scores)[None, :, None, None]
        sink = sink.expand(*scores.shape[:-1], 1)
        return torch.cat((scores, sink), -1).softmax(-1)[..., :-1]


@dataclass(frozen=True)
class Block:
    """Pairs of queries and keys of some rows in all heads: a piece that a cache can hold.

    Attributes:
        rows: of the batch.
        queries: their columns.
        keys: columns from 0 to the last that any of these queries sees.
    """

    rows: slice
    queries: slice
    keys: slice

    def of(self, tensor: Shaped[Tensor, "rows head query key"]) -> Tensor:
        """The block of a tensor; its rows and queries stay as they are where there is but one."""
        batch, _, queries, _ = tensor.shape
        return tensor[
            self.rows if batch > 1 else slice(None),
            :,
            self.queries if queries > 1 else slice(None),
            self.keys,
        ]


def sees_any(visible: Bool[Tensor, "*batch query key"]) -> Bool[Tensor, "*batch query"]:
    """Whether a query sees a key; a maximum of bytes, far faster than `any` of booleans."""
    return visible.view(torch.uint8).amax(-1).bool()


def blocks(visible: Bool[Tensor, "batch one query key"], n_heads: int) -> Iterator[Block]:
    """All pairs that a pattern can hold attention at, a block at a time.

    What is made anew of a pattern takes several steps. For all of a long pattern at once each of
    them would wait for memory, and half of the pairs of a causal model are hidden.
    """
    n_rows, _, n_queries, n_keys = visible.shape
    most = BLOCK_PAIRS if visible.device.type == "cpu" else 256 * BLOCK_PAIRS
    rows = max(1, most // (n_heads * n_queries * n_keys))
    queries = n_queries if rows > 1 else max(1, most // (n_heads * n_keys))
    columns = torch.arange(1, n_keys + 1, dtype=torch.int32, device=visible.device)
    ends = (visible.view(torch.uint8).amax(0)[0] * columns).amax(-1).tolist()
    for row in range(0, n_rows, rows):
        for query in range(0, n_queries, queries):
            yield Block(
                slice(row, row + rows),
                slice(query, query + queries),
                slice(0, max(ends[query : query + queries])),
            )


def gain_of_norm(
    before: Float[Tensor, "batch pos head d_head"], after: Float[Tensor, "batch pos head d_head"]
) -> Float[Tensor, "batch head pos d_head"]:
    """What a norm multiplied every entry by: its scale and gain, held at the values of a run."""
    gain = torch.where(before == 0, 0, after / before)
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


# --- what is held against a model ---------------------------------------------------------


def score_tolerance(dtype: torch.dtype, size: float, exact: bool) -> float:
    """How far scores made anew may be off the model's: `factor eps max(1, size)`.

    Args:
        dtype: of the model.
        size: the largest `scale |q||k|`.
        exact: false where a part may be computed in float32, as in attention that is left to
            transformers.
    """
    eps = eps_of(dtype) if exact else max(eps_of(dtype), eps_of(torch.float32))
    return (HALF_FACTOR if is_half(dtype) else TOLERANCE_FACTOR) * eps * max(1.0, size)


def pattern_tolerance(
    of_scores: float,
    largest: float,
    pattern: Pattern,
    visible: Bool[Tensor, "batch one query key"],
) -> float:
    """A pattern is off by no more than its scores are, and by what its softmax rounds.

    Many models compute the softmax in float32 whatever their dtype: their row sums tell, or, in
    short rows that may sum to 1 by chance, their digits.

    Args:
        of_scores: see `score_tolerance`.
        largest: no visible score has a larger absolute value; a softmax in another precision
            begins by rounding the scores.
        pattern: the model's own.
        visible: where it holds attention.
    """
    eps = eps_of(pattern.dtype)
    if is_half(pattern.dtype):
        return min(of_scores, max(HALF_PATTERN_FACTOR, largest) * eps)
    if pattern.dtype != torch.float64:
        return of_scores
    off = (pattern.sum(-1) - 1).abs().masked_fill(~sees_any(visible), 0)
    single = bool(off.max() > TOLERANCE_FACTOR * eps) or _is_single(pattern, visible)
    rounding = max(TOLERANCE_FACTOR, largest) * eps_of(torch.float32)
    return max(of_scores, rounding if single else 0.0)


def _is_single(pattern: Pattern, visible: Bool[Tensor, "batch one query key"]) -> bool:
    """Whether float32 holds all shares exactly; shares of 0 and 1 tell nothing."""
    shares = pattern[visible.expand_as(pattern)]
    shares = shares[(shares > 0) & (shares < 1)]
    return bool(shares.numel()) and torch.equal(shares, shares.float().to(shares.dtype))


def errors_by_head(
    made: Callable[[Block], Tensor],
    shown: Pattern,
    visible: Bool[Tensor, "rows one query key"],
) -> Float[Tensor, " head"]:
    """The largest |made - shown| over visible pairs; NaN where one of them is.

    Args:
        made: gives its values of a block.
        shown: `[batch head query key]`, the model's own.
        visible: which pairs count; of one row where all rows agree.
    """
    visible = visible.expand(shown.shape[0], -1, -1, -1)
    found = [shown.new_zeros(shown.shape[1])]
    for block in blocks(visible, shown.shape[1]):
        if block.keys.stop:  # otherwise these queries are all padding
            error = (made(block) - block.of(shown)).abs_()
            found.append(torch.where(block.of(visible), error, 0).amax((0, 2, 3)))
    return torch.stack(found).amax(0)


def pattern_errors(
    rule: ScoreRule,
    scores: Callable[[Block], Tensor],
    shown: Pattern,
    visible: Bool[Tensor, "rows one query key"],
) -> tuple[Float[Tensor, " head"], float]:
    """The largest |softmax(scores) - pattern| of each head, and the largest visible |score|.

    The latter in half precision alone, where it is needed and takes no more than its share of
    time; 0 otherwise.
    """
    largest = 0.0

    def made(block: Block) -> Tensor:
        nonlocal largest
        found, sees = scores(block), block.of(visible)
        if is_half(shown.dtype):
            largest = max(largest, float(torch.where(sees, found.abs(), 0).amax()))
        return rule.pattern(found, sees)

    return errors_by_head(made, shown, visible), largest


def largest_error(
    per_head: Float[Tensor, " head"], tolerance: float, layer: int, what: str, fix: str
) -> float:
    """The largest of the errors of a layer's heads.

    Raises:
        IdentityError: it is over the tolerance, or NaN; names layer, head and size.
    """
    worst = float(per_head.max())
    if not worst <= tolerance:
        head = int(per_head.nan_to_num(nan=math.inf).argmax())
        raise IdentityError(
            f"In layer {layer}, head {head}, {what}",
            expected=f"a difference of at most {tolerance:.2e}",
            got=f"{worst:.2e}",
            fix=fix,
        )
    return worst
