"""Mitigations: what the literature does against sinks, as ablations that compose with the rest.

Each changes a trained model's forward pass through hooks. They say nothing of what the same
change would do to a model that is trained with it. A number so large that the model's dtype can't
compute with what it makes is an `EditError` in the run.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from sinkscope._types import Layers, Mask, Pattern, Residual
from sinkscope.ablations import (
    Ablation,
    Edit,
    EditContext,
    RowPositions,
    key_column_edits,
    key_coordinates,
    positions_of,
    query_bias_edits,
    unit_vector,
    within_range,
)
from sinkscope.capture import LayerReader, stream
from sinkscope.epe import extract_epe
from sinkscope.errors import EditError, InvalidInputError, NotApplicableError
from sinkscope.massive import Rule, TopK
from sinkscope.measures import sink_score
from sinkscope.metrics import position_ids
from sinkscope.model import ModelView, model_view, whole_numbers
from sinkscope.prompts import TokenBatch
from sinkscope.sites import Site

THREE = TopK(3)
"""The paper's choice of massive coordinates."""
_PER_SEED = 1_000_003
"""Seeds of a layer's draws are this times the seed plus the layer."""

# --- the query bias, key columns, the EPE: scaled -----------------------------------------


@dataclass(frozen=True)
class ScaleQueryBias(Ablation):
    """`b_Q -> factor b_Q`: with factor 0 this is `ZeroQueryBias`.

    `q -> q - (1 - factor) b_Q`. Parts of a composition that overlap multiply.

    Attributes:
        factor: what is left of b_Q, 1 for all of it.
        layers: all if None.
        heads: all if None, the same in every layer.
        positions: the queries it holds for, all if None.

    Source: the paper, "No Query Bias", with a dose.
    """

    factor: float = 0.0
    layers: Layers = None
    heads: Layers = None
    positions: Layers = None

    def edits(self, view: ModelView, context: EditContext) -> Sequence[Edit]:
        _require_finite("factor", self.factor)
        return query_bias_edits(view, context, self.factor, self.layers, self.heads, self.positions)


@dataclass(frozen=True)
class ShuffledQueryBias(Ablation):
    """`q -> q - (1 - factor) P b_Q`: as much as `ScaleQueryBias` takes off, in a random direction.

    P puts the entries of each layer's and head's b_Q in an order drawn from `seed`, so that what
    is taken off has the same entries, and so the same norm. It is the control of
    `ScaleQueryBias` and `ZeroQueryBias`.

    Attributes:
        factor: what `ScaleQueryBias` would leave of b_Q.
        seed: of the draws, the same for a layer and head whatever is chosen of them.
        layers: all if None.
        heads: all if None, the same in every layer.
        positions: the queries it holds for, all if None.
    """

    factor: float = 0.0
    seed: int = 0
    layers: Layers = None
    heads: Layers = None
    positions: Layers = None

    def edits(self, view: ModelView, context: EditContext) -> Sequence[Edit]:
        _require_finite("factor", self.factor)
        view.require_query_bias()
        view.require_raw_weights("Shuffling the query bias")
        at = positions_of(view, self.positions)
        heads = list(view.heads(self.heads))
        return [
            self._edit(self.shuffled(view, layer), heads, at, context, layer)
            for layer in view.layers(self.layers)
        ]

    def shuffled(self, view: ModelView, layer: int) -> Float[Tensor, "head d_head"]:
        """P b_Q of a layer."""
        _require_seed(self.seed)
        generator = torch.Generator().manual_seed(self.seed * _PER_SEED + layer)
        bias = view.b_Q(layer)
        orders = [torch.randperm(bias.shape[1], generator=generator) for _ in bias]
        return bias.gather(1, torch.stack(orders).to(bias.device))

    def _edit(
        self,
        shuffled: Float[Tensor, "head d_head"],
        heads: list[int],
        positions: tuple[int, ...] | None,
        context: EditContext,
        layer: int,
    ) -> Edit:
        taken = torch.zeros_like(shuffled)
        taken[heads] = (1 - self.factor) * shuffled[heads]

        def subtract(q: Tensor, hook: Any) -> Tensor:
            if positions is None:
                return q - taken
            return q - context.rows.selection(q, positions)[..., None, None] * taken

        return within_range(Edit(Site("q", layer), subtract), self.factor)


@dataclass(frozen=True)
class ScaleKeyColumns(Ablation):
    """Rows of W_K (in `[d_model, d_head]` form) times `factor`; 0 is `ZeroKeyColumns`.

    `k_j -> k_j - (1 - factor) sum_{d in coordinates} n_j[d] W_K[d]`, n what enters W_K.

    Attributes:
        coordinates: coordinates of d_model, or a rule that finds them in EPE_0.
        factor: what is left of these rows, 1 for all of it.
        layers: all if None.
        heads: all if None, the same in every layer.
        positions: the keys it holds for, all if None.

    Source: the paper, "Zero Top-3 Wk", with a dose.
    """

    coordinates: Sequence[int] | Rule = THREE
    factor: float = 0.0
    layers: Layers = None
    heads: Layers = None
    positions: Layers = None

    def edits(self, view: ModelView, context: EditContext) -> Sequence[Edit]:
        _require_finite("factor", self.factor)
        coordinates = key_coordinates(view, self.coordinates)
        per_layer = dict.fromkeys(view.layers(self.layers), coordinates)
        return key_column_edits(view, context, per_layer, self.factor, self.heads, self.positions)


@dataclass(frozen=True)
class ScaleEPE(Ablation):
    """The residual stream after layer 0 along the effective positional encoding, times `factor`.

    With x the output of layer 0, `u = EPE_i / |EPE_i|` and i the position:
    `x_i -> x_i - (1 - factor) (x_i . u) u`; 0 removes it. What lies across u stays, so that it
    is the position's whole trace only as far as the EPE stands for it (see `epe_fidelity`).

    Attributes:
        factor: what is left, 1 for all of it.
        positions: 0 if not given, all if None.

    Source: the directions of the paper's "Swap EPE", which swaps them in the MLP's output alone.
    """

    factor: float = 0.0
    positions: Layers = 0

    def edits(self, view: ModelView, context: EditContext) -> Sequence[Edit]:
        _require_finite("factor", self.factor)
        positions = positions_of(view, self.positions)
        vectors = extract_epe(view).vectors
        for i in positions or ():
            unit_vector(vectors[i], f"EPE_{i}")
        units = vectors / vectors.norm(dim=-1, keepdim=True)

        def scale(x: Tensor, hook: Any) -> Tensor:
            tokens = context.rows.tokens(x)
            where = tokens if positions is None else context.rows.selection(x, positions)
            unit = units[position_ids(tokens).clamp_min(0)]
            along = (x * unit).sum(-1, keepdim=True) * unit
            return x - (1 - self.factor) * along.masked_fill(~where[..., None], 0)

        return [within_range(Edit(Site("resid_post", 0), scale), self.factor)]


# --- massive activations ------------------------------------------------------------------


@dataclass(frozen=True)
class SetActivations(Ablation):
    """Coordinates of the residual stream after a layer get fixed values at chosen positions.

    `x_i[d] -> values[d]` for d in `coordinates` and i in `positions`.

    Sun et al. set a massive activation to zero (the model collapses) or to its mean over
    prompts (nothing changes). The first is `values=0.0`, the second `SetActivations.to_mean`.

    Attributes:
        coordinates: coordinates of d_model, or a rule that finds them in EPE_0.
        layer: the layer whose output is edited.
        values: one number for all, or `d_model` of them, of which those at `coordinates` count.
        positions: 0 if not given, all if None.

    Source: Sun et al. 2024, "Massive Activations in Large Language Models", section 3.
    """

    coordinates: Sequence[int] | Rule = THREE
    layer: int = 0
    values: float | Sequence[float] = 0.0
    positions: Layers = 0

    @classmethod
    def to_mean(
        cls,
        model: Any,
        batch: TokenBatch,
        coordinates: Sequence[int] | Rule = THREE,
        layer: int = 0,
        position: int = 0,
        *,
        batch_size: int | None = None,
    ) -> SetActivations:
        """The ablation that sets activations to their mean over the prompts of a batch.

        Args:
            model: a hooked model or its view.
            batch: the prompts whose mean it is.
            coordinates: see the class.
            layer: see the class.
            position: where the mean is taken and set.
            batch_size: rows per forward pass; all at once if None.
        """
        view = model_view(model)
        at = positions_of(view, (position,)) or ()
        _one_layer(view, layer)

        def reduce(x: Tensor, chunk: TokenBatch, layer: int) -> Tensor:
            rows = RowPositions(chunk.mask)
            return x[rows.selection(x, at)].double()

        reader = LayerReader("resid_post", view.layers(layer), reduce)
        stream(view, batch, [reader], batch_size=batch_size)
        return cls(coordinates, layer, tuple(reader.result()[:, 0].mean(0).tolist()), position)

    def edits(self, view: ModelView, context: EditContext) -> Sequence[Edit]:
        layer = _one_layer(view, self.layer)
        coordinates = list(key_coordinates(view, self.coordinates))
        positions = positions_of(view, self.positions)
        values = _one_or_each("values", self.values, view.d_model, "coordinate of d_model")
        target = torch.tensor(values, dtype=torch.float64)

        def put(x: Tensor, hook: Any) -> Tensor:
            here = _coordinate_selection(x, context.rows, coordinates, positions)
            return torch.where(here, target.to(x.device, x.dtype), x)

        return [
            within_range(Edit(Site("resid_post", layer), put), *(values[c] for c in coordinates))
        ]


@dataclass(frozen=True)
class ClampActivations(Ablation):
    """Coordinates of the residual stream after a layer are kept within `+-limit`.

    `x_i[d] -> min(max(x_i[d], -limit), limit)`.

    Attributes:
        limit: the largest magnitude that is left.
        layer: the layer whose output is edited.
        coordinates: coordinates of d_model, or a rule that finds them in EPE_0; all if None.
        positions: all if None.

    Source: the clipping of outliers in quantisation, put on massive activations.
    """

    limit: float
    layer: int = 0
    coordinates: Sequence[int] | Rule | None = None
    positions: Layers = None

    def edits(self, view: ModelView, context: EditContext) -> Sequence[Edit]:
        layer = _one_layer(view, self.layer)
        _require_finite("limit", self.limit)
        if self.limit < 0:
            raise InvalidInputError(
                "A limit is a magnitude",
                expected="0 or more",
                got=self.limit,
                fix="pass the largest |x| that may stay",
            )
        everything = self.coordinates is None
        coordinates = list(range(view.d_model)) if everything else list(self._coordinates(view))
        positions = positions_of(view, self.positions)

        def clamp(x: Tensor, hook: Any) -> Tensor:
            here = _coordinate_selection(x, context.rows, coordinates, positions)
            limit = min(self.limit, torch.finfo(x.dtype).max)
            return torch.where(here, x.clamp(-limit, limit), x)

        return [Edit(Site("resid_post", layer), clamp)]

    def _coordinates(self, view: ModelView) -> tuple[int, ...]:
        return () if self.coordinates is None else key_coordinates(view, self.coordinates)


def _coordinate_selection(
    x: Residual, rows: RowPositions, coordinates: list[int], positions: tuple[int, ...] | None
) -> Bool[Tensor, "batch pos d_model"]:
    chosen = torch.zeros(x.shape[-1], dtype=torch.bool, device=x.device)
    chosen[coordinates] = True
    where = rows.tokens(x) if positions is None else rows.selection(x, positions)
    return where[..., None] & chosen


# --- the softmax --------------------------------------------------------------------------


@dataclass(frozen=True)
class SinkLogit(Ablation):
    """One more logit s in every softmax, whose value vector is zero.

    `p_ij = exp(s_ij) / (exp(s) + sum_k exp(s_ik)) = softmax(s_i)_j sigmoid(lse_i - s)`, with
    `lse_i` the log of the sum over the keys that query i sees. Rows sum to less than 1; what is
    missing went to the extra logit. Scores are taken as they are where this ablation stands
    in a composition, so put edits of scores before it.

    Attributes:
        logit: s, one number, or one for each head.
        layers: all if None.
        heads: all if None, the same in every layer.
        seed: None for the formula; a number deals each prompt's and head's factors
            `sigmoid(lse_i - s)` to its queries in an order drawn from this seed, so that as much
            attention is taken, but from random queries: the control.

    Source: the learned sink logits of gpt-oss (OpenAI 2025) and of StreamingLLM's appendix (Xiao
    et al. 2024), put on a model that was trained without them.
    """

    logit: float | Sequence[float] = 0.0
    layers: Layers = None
    heads: Layers = None
    seed: int | None = None

    def edits(self, view: ModelView, context: EditContext) -> Sequence[Edit]:
        view.require_live_scores("A sink logit")
        several = _one_or_each("logit", self.logit, view.n_heads, "head of a layer")
        logits = torch.tensor(several, dtype=torch.float64)
        heads = list(view.heads(self.heads))
        edits: list[Edit] = []
        for layer in view.layers(self.layers):
            draws = None if self.seed is None else _draws(view, self.seed, layer, heads)
            edits += self._pair(layer, heads, logits, draws, context.rows)
        return edits

    def _pair(
        self,
        layer: int,
        heads: list[int],
        logits: Tensor,
        draws: Tensor | None,
        rows: RowPositions,
    ) -> list[Edit]:
        seen: dict[str, Tensor] = {}

        def look(attn_scores: Tensor, hook: Any) -> None:
            scores = attn_scores[:, heads]
            kind = torch.promote_types(scores.dtype, torch.float32)
            seen["lse"] = scores.to(kind).logsumexp(-1, keepdim=True)

        def scale(pattern: Tensor, hook: Any) -> Tensor:
            lse = seen.pop("lse")
            logit = logits[heads].to(lse)[None, :, None, None]
            gate = (lse - logit).sigmoid()
            if draws is not None:
                gate = _dealt_to_queries(gate, rows.tokens(pattern[:, 0]), draws)
            out = pattern.clone()
            out[:, heads] = (pattern[:, heads] * gate).to(pattern.dtype)
            return out

        return [
            Edit(Site("attn_scores", layer), look, only_looks=True),
            Edit(Site("pattern", layer), scale),
        ]


def _draws(view: ModelView, seed: int, layer: int, heads: list[int]) -> Float[Tensor, "head n_ctx"]:
    """A random number for every head and position, the same whatever the batch."""
    _require_seed(seed)
    generator = torch.Generator().manual_seed(seed * _PER_SEED + layer)
    return torch.rand(view.n_heads, view.n_ctx, generator=generator)[heads].to(view.device)


def _by_column(draws: Float[Tensor, "head n_ctx"], tokens: Mask) -> Float[Tensor, "batch head pos"]:
    """Each column's draw, that of the position it holds; infinite at padding."""
    drawn = draws.to(tokens.device)[:, position_ids(tokens).clamp_min(0)].transpose(0, 1)
    return drawn.masked_fill(~tokens[:, None], math.inf)


def _dealt_to_queries(
    gate: Float[Tensor, "batch head query 1"], tokens: Mask, draws: Float[Tensor, "head n_ctx"]
) -> Float[Tensor, "batch head query 1"]:
    """Each row's and head's values in another order of its tokens."""
    order = _by_column(draws, tokens).argsort(dim=-1, stable=True)
    places = (~tokens).long().argsort(dim=-1, stable=True)[:, None].expand_as(order)
    dealt = torch.empty_like(gate[..., 0])
    return dealt.scatter(-1, places, gate[..., 0].gather(-1, order))[..., None]


@dataclass(frozen=True)
class OffByOneSoftmax(Ablation):
    """`p_ij = exp(s_ij) / (1 + sum_k exp(s_ik))`: a head may attend to nothing.

    The same as `SinkLogit(0.0)`, and as one more key of score 0 and value 0.

    Attributes:
        layers: all if None.
        heads: all if None, the same in every layer.

    Source: Miller 2023, "Attention Is Off By One".
    """

    layers: Layers = None
    heads: Layers = None

    def edits(self, view: ModelView, context: EditContext) -> Sequence[Edit]:
        return SinkLogit(0.0, self.layers, self.heads).edits(view, context)


@dataclass(frozen=True)
class CalibrateAttention(Ablation):
    """ACT: attention to sinks is scaled by `beta`, and other keys of the query get the rest.

    Per prompt, layer and head, with N the tokens of the prompt and `a_j = 1/N sum_i p_ij`: the
    sinks are `S = {j : a_j > alpha / N}`, and for every query i
    `p_ij -> beta p_ij` for j in S, `p_ij -> p_ij (1 + (1 - beta) P_i / (1 - P_i))` for the
    others, where `P_i` is what query i gave to S. A query that sees sinks alone stays as it is.

    Attributes:
        alpha: 5 in the source.
        beta: 0.4 in the source.
        spare_first: position 0 is never in S, as in the source; False calibrates it too, which
            is what takes the usual sink away.
        layers: all if None.
        heads: all if None, the same in every layer.
        seed: None for the sinks themselves; a number calibrates as many other keys of each
            prompt and head instead, drawn from this seed: the control.

    Source: Yu et al. 2024, "Unveiling and Harnessing Hidden Attention Sinks". They calibrate
    heads chosen on validation data; here it is the heads that are named.
    """

    alpha: float = 5.0
    beta: float = 0.4
    spare_first: bool = True
    layers: Layers = None
    heads: Layers = None
    seed: int | None = None

    def edits(self, view: ModelView, context: EditContext) -> Sequence[Edit]:
        view.require_live_scores("Calibrating attention")
        _require_finite("alpha and beta", self.alpha, self.beta)
        if self.alpha <= 0:
            raise InvalidInputError(
                "alpha is a multiple of the uniform share",
                expected="a number above 0",
                got=self.alpha,
                fix="use 5, the source's",
            )
        if not 0 <= self.beta <= 1:
            raise InvalidInputError(
                "beta is what is left of the attention to a sink",
                expected="a share from 0 to 1",
                got=self.beta,
                fix="use 0.4, the source's",
            )
        heads = list(view.heads(self.heads))
        return [self._edit(view, context, layer, heads) for layer in view.layers(self.layers)]

    def _edit(self, view: ModelView, context: EditContext, layer: int, heads: list[int]) -> Edit:
        draws = None if self.seed is None else _draws(view, self.seed, layer, heads)

        def calibrate(pattern: Tensor, hook: Any) -> Tensor:
            tokens = context.rows.tokens(pattern[:, 0])
            mine = pattern[:, heads] * tokens[:, None, :, None]
            sinks = self._sinks(mine, tokens)
            if draws is not None:
                sinks = _dealt_anew(sinks, tokens, draws)
            out = pattern.clone()
            out[:, heads] = _moved(pattern[:, heads], sinks, self.beta)
            return out

        return Edit(Site("pattern", layer), calibrate)

    def _sinks(self, pattern: Pattern, tokens: Mask) -> Bool[Tensor, "batch head key"]:
        lengths = tokens.sum(1)[:, None, None]
        received = pattern.sum(2) / lengths
        ids = position_ids(tokens)[:, None]
        allowed = (ids > 0) if self.spare_first else (ids >= 0)
        return (received > self.alpha / lengths) & allowed


def _dealt_anew(
    sinks: Bool[Tensor, "batch head key"], tokens: Mask, draws: Float[Tensor, "head n_ctx"]
) -> Bool[Tensor, "batch head key"]:
    """As many keys of each row and head, none of them a sink nor position 0, while there are."""
    first = position_ids(tokens)[:, None] == 0
    draw = _by_column(draws, tokens).masked_fill(sinks | first, math.inf)
    rank = draw.argsort(-1).argsort(-1)
    return (rank < sinks.sum(-1, keepdim=True)) & draw.isfinite()


def _moved(pattern: Pattern, sinks: Bool[Tensor, "batch head key"], beta: float) -> Pattern:
    """Attention to `sinks` times beta, the rest of it spread over the other keys in proportion."""
    here = sinks[:, :, None, :]
    to_sinks = pattern.masked_fill(~here, 0).sum(-1, keepdim=True)
    others = pattern.masked_fill(here, 0).sum(-1, keepdim=True)
    more = 1 + (1 - beta) * to_sinks / others
    moved = torch.where(here, beta * pattern, more * pattern)
    return torch.where(others > 0, moved, pattern)


@dataclass(frozen=True)
class WindowedAttention(Ablation):
    """A query sees the last `window` keys, itself among them, and some positions for good.

    Key j is hidden from query i where `i - j >= window`, unless j is in `positions`. Keys and
    values are those of a model that always ran so, as in StreamingLLM's cache. Positions keep
    their numbers in the prompt, where StreamingLLM numbers them anew within its cache.

    Attributes:
        window: how many keys, at least 1.
        positions: seen whatever the distance; none if None. `range(4)` is StreamingLLM's choice.
        layers: all if None.

    Source: Xiao et al. 2024, "Efficient Streaming Language Models with Attention Sinks".
    """

    window: int
    positions: Layers = None
    layers: Layers = None

    def edits(self, view: ModelView, context: EditContext) -> Sequence[Edit]:
        view.require_live_scores("A window on attention")
        if type(self.window) is not int or self.window < 1:
            raise InvalidInputError(
                "A window is a number of keys",
                expected="a whole number of 1 or more",
                got=repr(self.window),
                fix="a query always sees itself, which is a window of 1",
            )
        kept = positions_of(view, self.positions) or ()

        def hide(attn_scores: Tensor, hook: Any) -> Tensor:
            ids = position_ids(context.rows.tokens(attn_scores[:, 0]))
            far = ids[:, :, None] - ids[:, None, :] >= self.window
            for position in kept:
                far &= (ids != position)[:, None, :]
            lowest = torch.finfo(attn_scores.dtype).min
            return attn_scores.masked_fill(far[:, None], lowest)

        return [Edit(Site("attn_scores", layer), hide) for layer in view.layers(self.layers)]


# --- whole heads --------------------------------------------------------------------------


@dataclass(frozen=True)
class SwitchOffHeads(Ablation):
    """Heads give nothing: `z = 0` before W_O, so that only the output bias stays.

    Their patterns are still computed, and so still count in sink metrics.

    Attributes:
        pairs: the (layer, head) pairs.

    Source: dormant heads, whose attention sits on the sink, can be removed (Guo et al. 2024,
    "Active-Dormant Attention Heads"); `above` finds them by a threshold on the sink score.
    """

    pairs: tuple[tuple[int, int], ...]

    @classmethod
    def above(
        cls,
        model: Any,
        batch: TokenBatch,
        threshold: float = 0.5,
        *,
        batch_size: int | None = None,
    ) -> SwitchOffHeads:
        """The heads whose sink score, averaged over a batch, is above a threshold.

        Args:
            model: a hooked model or its view.
            batch: the prompts.
            threshold: a share of attention.
            batch_size: rows per forward pass; all at once if None.

        Raises:
            NotApplicableError: no head is above it.
        """
        view = model_view(model)
        scores = sink_score(view, batch, layers=range(view.n_layers), batch_size=batch_size)
        means = scores.nanmean(0)
        pairs = tuple((int(la), int(h)) for la, h in (means > threshold).nonzero())
        if not pairs:
            raise NotApplicableError(
                "No head has a sink score above the threshold",
                expected=f"a head above {threshold}",
                got=f"{float(means.nan_to_num().max()):.3f} at most",
                fix="choose a lower threshold",
            )
        return cls(pairs)

    def edits(self, view: ModelView, context: EditContext) -> Sequence[Edit]:
        per_layer: dict[int, list[int]] = {}
        for layer, head in head_pairs(view, self.pairs):
            per_layer.setdefault(layer, []).append(head)
        return [_heads_off(layer, heads) for layer, heads in sorted(per_layer.items())]


def head_pairs(view: ModelView, given: Any) -> tuple[tuple[int, int], ...]:
    """Pairs of layer and head, each once, checked against the model."""
    named = given if isinstance(given, Sequence) else ()
    pairs = tuple(dict.fromkeys(whole_numbers(pair) or () for pair in named))
    fits = all(
        len(p) == 2 and 0 <= p[0] < view.n_layers and 0 <= p[1] < view.n_heads for p in pairs
    )
    if not pairs or not fits:
        raise InvalidInputError(
            "Heads are named by pairs of layer and head",
            expected=f"layers from 0 to {view.n_layers - 1}, heads from 0 to "
            f"{view.n_heads - 1}, and at least one pair",
            got=repr(given)[:80],
            fix="pass ((layer, head), ...)",
        )
    return pairs  # type: ignore[return-value]


def _one_layer(view: ModelView, layer: Any) -> int:
    if type(layer) is not int:
        raise InvalidInputError(
            "This ablation acts after one layer",
            expected=f"a layer from 0 to {view.n_layers - 1}",
            got=repr(layer)[:80],
            fix="add several ablations, one a layer",
        )
    return view.layers(layer)[0]


def _heads_off(layer: int, heads: list[int]) -> Edit:
    def off(z: Tensor, hook: Any) -> Tensor:
        out = z.clone()
        out[:, :, heads] = 0
        return out

    return Edit(Site("z", layer), off)


_LARGEST = sys.float_info.max


def _require_seed(seed: Any) -> None:
    if type(seed) is not int or not 0 <= seed < 2**32:
        raise InvalidInputError(
            "A seed is a whole number",
            expected="from 0 to 2**32 - 1",
            got=repr(seed)[:80],
            fix="use 0",
        )


def _one_or_each(what: str, given: Any, size: int, each: str) -> tuple[float, ...]:
    """As many numbers as there are places, from one for all of them or one for each."""
    listed = isinstance(given, Sequence) and not isinstance(given, str)
    values = tuple(given) if listed else (given,) * size
    if len(values) != size or not all(map(_is_finite, values)):
        raise InvalidInputError(
            f"{what} is one number, or one for each {each}",
            expected=f"a finite number, or {size} of them",
            got=" ".join(repr(given).split())[:80],
            fix=f"give one for every {each}, or one for all",
        )
    return values


def _is_finite(value: Any) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and -_LARGEST <= value <= _LARGEST


def _require_finite(what: str, *values: float) -> None:
    if not all(map(_is_finite, values)):
        raise InvalidInputError(
            f"{what} must be a finite number",
            expected="a finite number",
            got=", ".join(map(repr, values))[:80],
            fix="0 takes all away and 1 leaves all, for factors",
        )


def massive_limit(
    view: ModelView, layer: int, batch: TokenBatch, batch_size: int | None = None
) -> float:
    """The largest |x| after a layer at any position but the first: what is ordinary there.

    Raises:
        EditError: prompts of one token.
    """
    if int(batch.lengths.max()) < 2:
        raise EditError("Prompts of one token have no other position", got="one token")

    def reduce(x: Tensor, chunk: TokenBatch, layer: int) -> Tensor:
        later = (chunk.position_ids > 0).to(x.device)
        return x.abs().amax(-1).masked_fill(~later, 0).amax(1)

    reader = LayerReader("resid_post", view.layers(layer), reduce)
    stream(view, batch, [reader], batch_size=batch_size)
    return float(reader.result().max())


__all__ = [
    "CalibrateAttention",
    "ClampActivations",
    "OffByOneSoftmax",
    "ScaleEPE",
    "ScaleKeyColumns",
    "ScaleQueryBias",
    "SetActivations",
    "ShuffledQueryBias",
    "SinkLogit",
    "SwitchOffHeads",
    "WindowedAttention",
]
