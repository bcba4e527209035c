"""Attention scores, split into exact terms that check themselves against the model."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from sinkscope._types import LayerPatterns, Layers, Mask, PerKey, Residual
from sinkscope.ablations import Ablation
from sinkscope.attention import (
    ScoreRule,
    at_least_single,
    errors_by_head,
    largest_error,
    pattern_errors,
    pattern_tolerance,
    score_tolerance,
)
from sinkscope.capture import LayerReader, Part, stack_layers, stream
from sinkscope.display import HtmlTable, number, numbers
from sinkscope.epe import coordinate_alignment
from sinkscope.errors import IdentityError, InvalidInputError, NotApplicableError
from sinkscope.metrics import NAN
from sinkscope.model import ModelView, model_view, whole_numbers
from sinkscope.prompts import TokenBatch
from sinkscope.sites import Site

_FIX = (
    "look for a hook that edits q, k, scores or pattern, a scale that the configuration does not "
    "tell, or an attention that TransformerLens computes otherwise than the model's authors"
)

TERMS = ("content", "query_bias", "key_bias", "bias_bias", "position_bias", "soft_cap")
"""The names of all terms; a model has those whose parts it has."""


@dataclass(frozen=True, eq=False)
class ScoreTerms(HtmlTable):
    """The terms of every score, each with the score's scale in it.

    `s_ij = scale (n_i W_Q + b_Q) . (n_j W_K + b_K)`, n what enters W_Q and W_K. Queries and
    keys that are turned (rotary positions) or normed on the way take every part along: the
    turn is linear, and a norm's factor is held at its value in the run. ALiBi is a term of
    its own, and so is what a soft cap takes off the sum of the others. Terms that are constant
    along an axis are views that take no memory there.

    Attributes:
        terms: name -> `[batch layer head query key]`, for the terms that the model has.
        visible: `[batch layer query key]`, where the terms are scores at all.
        layers: the layers of the second axis.
        bias_kind: "raw", or "effective" where LN1's bias is part of b_Q: asked for, or merged
            into it by folding.
        max_error: largest |sum of terms - the model's own score| over visible pairs; NaN where
            the model does not show its scores.
        pattern_error: largest |softmax(sum of terms) - the model's own pattern| there.
        tolerance: what both errors had to stay under.
        sink_logits: `[layer head]`, a score that joins the softmax; None where none does.
    """

    terms: Mapping[str, LayerPatterns]
    visible: Bool[Tensor, "batch layer query key"]
    layers: tuple[int, ...]
    bias_kind: str
    max_error: float
    pattern_error: float
    tolerance: float
    sink_logits: Float[Tensor, "layer head"] | None = None

    def overview(self) -> list[tuple[str, str]]:
        batch, _, heads, queries, _ = self.content.shape
        return [
            ("scores", f"{batch} prompts, layers {numbers(self.layers)}, {heads} heads"),
            ("positions", str(queries)),
            ("terms", ", ".join(self.terms)),
            ("query bias", self.bias_kind if "query_bias" in self.terms else "none"),
            ("largest error of the scores", number(self.max_error)),
            ("largest error of the patterns", number(self.pattern_error)),
            ("tolerance", number(self.tolerance)),
        ]

    @property
    def content(self) -> LayerPatterns:
        """`(n_i W_Q) . (n_j W_K)`."""
        return self.terms["content"]

    @property
    def query_bias(self) -> LayerPatterns:
        """`b_Q . (n_j W_K)`; depends on the key alone where nothing turns queries and keys."""
        return self._term("query_bias", "no query bias b_Q")

    @property
    def key_bias(self) -> LayerPatterns:
        """`(n_i W_Q) . b_K`; where nothing turns them it is the query's alone, and cancels."""
        return self._term("key_bias", "no key bias b_K")

    @property
    def bias_bias(self) -> LayerPatterns:
        """`b_Q . b_K`; constant per head where nothing turns queries and keys."""
        return self._term("bias_bias", "no two biases b_Q and b_K")

    @property
    def position_bias(self) -> LayerPatterns:
        """ALiBi's term: a slope per head times the position."""
        return self._term("position_bias", "no ALiBi positions")

    @property
    def soft_cap(self) -> LayerPatterns:
        """What the soft cap m adds to the sum x of the other terms: `m tanh(x / m) - x`."""
        return self._term("soft_cap", "no soft cap on scores")

    def _term(self, name: str, lack: str) -> LayerPatterns:
        if name not in self.terms:
            raise NotApplicableError(
                f"Not applicable: this model has {lack}",
                expected=f"a model whose scores have a term {name}",
                got=f"the terms {', '.join(self.terms)}",
                fix="look at .terms for those that there are",
            )
        return self.terms[name]

    @property
    def total(self) -> LayerPatterns:
        """The sum of all terms: the model's own score before the mask."""
        content, *others = self.terms.values()
        return sum(others, content)


def decompose_scores(
    model: Any,
    batch: TokenBatch,
    layers: Layers = None,
    *,
    bias: str = "raw",
    ablation: Ablation | None = None,
    batch_size: int | None = None,
) -> ScoreTerms:
    """Split the attention scores of a batch into exact terms, and check that they add up.

    Both identities are checked in every layer, head and visible pair: the sum of the terms
    against the model's own score, and `softmax(sum + mask)` against its own pattern. The
    tolerance is `64 eps max(1, scale |q||k|)`, eps of the dtype in which the model computes
    its scores, ALiBi's largest value added to the size; in half precision the factor is 4, and
    patterns hold to `eps max(16, largest |score|)`.

    Terms of parts that a model lacks are not there, see `ScoreTerms.terms`. Works on
    processed weights as well; there `bias_kind` says "effective".

    Args:
        model: a hooked model or its view.
        batch: the prompts.
        layers: all if None.
        bias: which query bias splits the score. "raw": b_Q as it stands in the weights.
            "effective": `b_Q + beta W_Q`, beta the bias of LN1, which is then taken out of the
            content of queries; what each query adds of its own is left there.
        ablation: the untouched model if None. Only such as act on what enters the attention:
            an edit of queries, keys or scores breaks the identities and is refused by them.
        batch_size: rows per forward pass; all at once if None.

    Raises:
        IdentityError: a check is over its tolerance; names layer, head and size.
        NotApplicableError: the model computes its scores in a way that is not known here, or
            has no effective query bias where that is asked for.
    """
    view = model_view(model)
    reader = _TermsReader(view, view.layers(layers), bias)
    stream(view, batch, [reader], ablation, batch_size=batch_size)
    return reader.result(batch)


def source_agnostic_shift(
    model: Any,
    batch: TokenBatch,
    convention: str = "paper",
    layers: Layers = None,
    *,
    batch_size: int | None = None,
) -> PerKey:
    """Delta, the share of every score that depends on the key alone: `b_Q . (n_j W_K)`.

    Two conventions. "paper": without the score's scale, and shifted for every prompt, layer
    and head so that its minimum over positions is 0. "score": with the scale and not shifted,
    as the term enters the score. Neither holds b_K.

    Args:
        model: a hooked model or its view.
        batch: the prompts.
        convention: "paper" or "score".
        layers: all if None.
        batch_size: rows per forward pass; all at once if None.

    Returns:
        `[batch layer head pos]`, NaN at padding.

    Raises:
        NotApplicableError: the model has no query bias.
        ProcessedWeightsError: the weights were folded or centred.
    """
    view = model_view(model)
    reader = ShiftReader(view, convention, view.layers(layers))
    stream(view, batch, [reader], batch_size=batch_size)
    return reader.result()


def shift_by_coordinate(
    model: Any, batch: TokenBatch, layers: Layers = None, *, batch_size: int | None = None
) -> Float[Tensor, "batch layer head pos d_model"]:
    """Delta, split by coordinate: `gamma_h[d] n_j[d]`, which sums over d to Delta.

    Without scale and shift, so the sum is Delta in the paper's units before its shift. Memory
    grows with d_model; `shift_share` gives the share of a few coordinates without it.

    Args:
        model: a hooked model or its view.
        batch: the prompts.
        layers: all if None.
        batch_size: rows per forward pass; all at once if None.
    """
    view = model_view(model)
    chosen = view.layers(layers)
    gamma = coordinate_alignment(view, layers=chosen)
    reader = _attn_in_reader(chosen)
    stream(view, batch, [reader], batch_size=batch_size)
    split = torch.einsum("blpd,lhd->blhpd", reader.result(), gamma)
    return split.masked_fill(~batch.mask[:, None, None, :, None].to(split.device), NAN)


def shift_share(
    model: Any,
    batch: TokenBatch,
    coordinates: Sequence[int],
    layers: Layers = None,
    *,
    batch_size: int | None = None,
) -> PerKey:
    """What some coordinates alone give to Delta: `sum_{d in coordinates} gamma_h[d] n_j[d]`.

    In Delta's units without scale and shift; divide by Delta in the same form for a share.

    Args:
        model: a hooked model or its view.
        batch: the prompts.
        coordinates: coordinates of d_model, each once.
        layers: all if None.
        batch_size: rows per forward pass; all at once if None.
    """
    view = model_view(model)
    chosen = view.layers(layers)
    columns = list(whole_numbers(coordinates) or ())
    if (
        not columns
        or len(set(columns)) < len(columns)
        or not set(columns) <= set(range(view.d_model))
    ):
        raise InvalidInputError(
            "Coordinates are numbers of d_model, each once",
            expected=f"from 0 to {view.d_model - 1}, and at least one",
            got=repr(coordinates)[:80],
            fix="choose coordinates of the residual stream",
        )
    gamma = coordinate_alignment(view, layers=chosen)[..., columns]
    reader = _attn_in_reader(chosen, columns)
    stream(view, batch, [reader], batch_size=batch_size)
    share = torch.einsum("blpc,lhc->blhp", reader.result(), gamma)
    return share.masked_fill(~batch.mask[:, None, None, :].to(share.device), NAN)


def _attn_in_reader(layers: tuple[int, ...], coordinates: list[int] | None = None) -> LayerReader:
    """Keeps what enters W_Q and W_K, n, of chosen coordinates: `[batch layer pos d]`."""

    def reduce(attn_in: Tensor, chunk: TokenBatch, layer: int) -> Tensor:
        return attn_in.clone() if coordinates is None else attn_in[..., coordinates]

    return LayerReader("attn_in", layers, reduce)


class ShiftReader(LayerReader):
    """Keeps Delta, `[batch layer head pos]`; see `source_agnostic_shift`."""

    def __init__(
        self, view: ModelView, convention: str, layers: tuple[int, ...], every: int = 1
    ) -> None:
        if convention not in ("paper", "score"):
            raise InvalidInputError(
                "Unknown convention for Delta",
                expected="'paper' or 'score'",
                got=repr(convention),
                fix="choose one of these",
            )
        super().__init__("attn_in", layers, self._shift, every)
        self._gamma = dict(zip(layers, coordinate_alignment(view, layers=layers), strict=True))
        self._scales = {layer: view.attention_scale(layer) for layer in layers}
        self._convention = convention

    def _shift(self, attn_in: Tensor, chunk: TokenBatch, layer: int) -> Tensor:
        delta = torch.einsum("bpd,hd->bhp", attn_in, self._gamma[layer].to(attn_in.device))
        masked = ~chunk.mask[:, None, :].to(delta.device)
        if self._convention == "score":
            delta = delta * self._scales[layer]
        else:
            delta = delta - delta.masked_fill(masked, math.inf).amin(-1, keepdim=True)
        return delta.masked_fill(masked, NAN)


class IdentityReader:
    """Checks both identities layer by layer as the model computes its own scores.

    Attributes:
        max_error: largest |sum of terms - the model's own score| so far; NaN where the model
            does not show its scores, so that only patterns can be compared.
        pattern_error: largest |softmax(sum of terms) - the model's own pattern| so far.
        tolerance: the largest tolerance that applied.
    """

    def __init__(self, view: ModelView, layers: tuple[int, ...], bias: str = "raw") -> None:
        if bias not in ("raw", "effective"):
            raise InvalidInputError(
                "Unknown kind of query bias",
                expected="'raw' or 'effective'",
                got=repr(bias),
                fix="choose one of these; the paper's is 'raw'",
            )
        if bias == "effective":
            view.require_norm_in_front("The effective query bias")
            view.require_effective_query_bias()
        self._view = view
        self._layers = layers
        self._bias = bias
        self._live = "attn_scores" in view.sites.names and view.scores_are_live()
        self._seen: dict[str, Tensor] = {}
        self._rule: ScoreRule | None = None
        self._total: Tensor | None = None
        self._size = 0.0
        self._tolerance = 0.0
        self.max_error = 0.0 if self._live else NAN
        self.pattern_error = 0.0
        self.tolerance = 0.0

    def sites(self, view: ModelView) -> Sequence[Site]:
        own = ("attn_scores", "pattern") if self._live else ("pattern",)
        sites: list[Site] = []
        for layer in self._layers:
            sites += [Site("attn_in", layer), *view.score_sites(layer)]
            sites += [Site(kind, layer) for kind in own]
        return sites

    def read(self, site: Site, tensor: Tensor, chunk: TokenBatch) -> None:
        layer = _layer(site)
        if site.kind == "attn_in":
            self._seen = {}
            self._total = None
        if site.kind not in ("attn_scores", "pattern"):
            self._seen[site.kind] = tensor
            return
        if self._total is None:
            self._add_up(site, chunk)
        total, rule = self._total, self._rule
        if total is None or rule is None:
            return
        visible = self._view.visible(layer, chunk.mask).to(tensor.device)[:, None]
        if site.kind == "attn_scores":
            errors = errors_by_head(lambda block: block.of(total), tensor, visible)
            what = "the sum of the terms is not the model's own score"
            worst = largest_error(errors, self._tolerance, layer, what, _FIX)
            self.max_error = max(self.max_error, worst)
            return

        errors, largest = pattern_errors(rule, lambda block: block.of(total), tensor, visible)
        what = "softmax of the sum of the terms is not the model's own pattern"
        tolerance = self._tolerance
        if rule.sink_logits is None:
            tolerance = pattern_tolerance(tolerance, largest or self._size, tensor, visible)
        self.tolerance = max(self.tolerance, tolerance)
        worst = largest_error(errors, tolerance, layer, what, _FIX)
        self.pattern_error = max(self.pattern_error, worst)
        self._seen = {}
        self._total = self._rule = None

    def _add_up(self, site: Site, chunk: TokenBatch) -> None:
        """The sum of the terms, once everything that they are made of was seen."""
        layer = _layer(site)
        attn_in = self._seen.get("attn_in")
        if attn_in is None:
            raise IdentityError(
                f"The model computed {site} before what enters W_Q was seen",
                fix="check the site map of this model",
            )
        self._rule = self._view.score_rule(layer, self._seen, chunk.mask.to(attn_in.device))
        terms, size = score_terms(
            self._view, layer, attn_in, chunk.mask, rule=self._rule, bias=self._bias
        )
        self._keep(layer, terms, self._rule)
        content, *others = terms.values()
        self._total = sum(others, content)
        self._size = size
        exact = self._live and self._rule.exact
        self._tolerance = score_tolerance(attn_in.dtype, size, exact)
        self.tolerance = max(self.tolerance, self._tolerance)

    def take(self, start: int) -> Part:
        """The three errors so far."""
        found = [self.max_error, self.pattern_error, self.tolerance]
        return {"errors": torch.tensor(found, dtype=torch.float64)}

    def add(self, start: int, part: Part) -> None:
        found = part["errors"].tolist()
        self.max_error = max(self.max_error, found[0])
        self.pattern_error = max(self.pattern_error, found[1])
        self.tolerance = max(self.tolerance, found[2])

    def _keep(self, layer: int, terms: Mapping[str, Tensor], rule: ScoreRule) -> None:
        """Nothing is kept; a subclass may."""


class _TermsReader(IdentityReader):
    """Checks the identities and keeps the terms."""

    def __init__(self, view: ModelView, layers: tuple[int, ...], bias: str = "raw") -> None:
        super().__init__(view, layers, bias)
        self._now: dict[str, Tensor] = {}
        self._parts: dict[int, Part] = {}
        self._sinks: dict[int, Tensor] = {}

    def _keep(self, layer: int, terms: Mapping[str, Tensor], rule: ScoreRule) -> None:
        self._now |= {f"{name}.{layer}": term for name, term in terms.items()}
        if rule.sink_logits is not None:
            self._sinks[layer] = rule.sink_logits

    def take(self, start: int) -> Part:
        kept, self._now = self._now, {}
        return {**super().take(start), **kept}

    def add(self, start: int, part: Part) -> None:
        super().add(start, part)
        self._parts[start] = part

    def result(self, batch: TokenBatch) -> ScoreTerms:
        """All layers and chunks put together."""
        n = batch.ids.shape[1]
        chunks = [self._parts[start] for start in sorted(self._parts)]
        stacked = {}
        for name in (n for n in TERMS if f"{n}.{self._layers[0]}" in chunks[0]):
            per_layer = ([c[f"{name}.{la}"] for c in chunks] for la in self._layers)
            together = stack_layers(per_layer, self._view.device)
            stacked[name] = together.expand(-1, -1, -1, n, n)
        return ScoreTerms(
            terms=MappingProxyType(stacked),
            visible=torch.stack([self._view.visible(la, batch.mask) for la in self._layers], 1),
            layers=self._layers,
            bias_kind="effective" if self._bias == "effective" else self._view.bias_kind,
            max_error=self.max_error,
            pattern_error=self.pattern_error,
            tolerance=self.tolerance,
            sink_logits=torch.stack([sinks.to(self._view.device) for sinks in self._sinks.values()])
            if self._sinks
            else None,
        )


def score_terms(
    view: ModelView,
    layer: int,
    attn_in: Residual,
    mask: Mask,
    *,
    rule: ScoreRule,
    bias: str = "raw",
) -> tuple[dict[str, Tensor], float]:
    """The terms of one layer from what enters W_Q and W_K.

    Args:
        view: the model.
        layer: 0-based.
        attn_in: `[batch pos d_model]`, n.
        mask: `[batch pos]`, true where a token is.
        rule: what the layer does with queries and keys in this run.
        bias: "raw" or "effective", see `decompose_scores`.

    Returns:
        The terms that the model has, by name, and the largest `scale |q||k|` of tokens in the
        same prompt. Where nothing turns or norms queries and keys, query_bias is
        `[batch head 1 key]`, key_bias `[batch head query 1]` and bias_bias `[batch head 1 1]`;
        every other term is `[batch head query key]`.
    """
    attn_in = at_least_single(attn_in)
    W_Q, W_K = (at_least_single(weight(layer)) for weight in (view.W_Q, view.W_K))
    b_Q, b_K = view.query_bias(layer, bias), view.b_K(layer)
    beta = None if bias == "raw" else view.ln1_bias(layer)
    own = attn_in if beta is None else attn_in - at_least_single(beta)
    q = rule.queries(torch.einsum("bpd,hde->bhpe", own, W_Q))
    k = rule.keys(torch.einsum("bpd,hde->bhpe", attn_in, W_K))
    moves = rule.rotation is not None or rule.query_gain is not None

    def spread(constant: Tensor, carried: Callable[[Tensor], Tensor]) -> Tensor:
        """A bias at every position where these differ, else `[batch head 1 d_head]`."""
        n = attn_in.shape[1] if moves else 1
        rows = at_least_single(constant)[None, :, None, :]
        rows = rows.expand(attn_in.shape[0], -1, n, -1)
        return carried(rows) if moves else rows

    terms = {"content": rule.scale * q @ k.transpose(-1, -2)}
    sizes = [x.norm(dim=-1) for x in (q, k)]
    if b_Q is not None:
        from_bias = spread(b_Q, rule.queries)
        terms["query_bias"] = rule.scale * from_bias @ k.transpose(-1, -2)
        sizes[0] = sizes[0] + from_bias.norm(dim=-1)
    if b_K is not None:
        to_bias = spread(b_K, rule.keys)
        terms["key_bias"] = rule.scale * q @ to_bias.transpose(-1, -2)
        sizes[1] = sizes[1] + to_bias.norm(dim=-1)
        if b_Q is not None:
            terms["bias_bias"] = rule.scale * from_bias @ to_bias.transpose(-1, -2)
    padding = ~mask.to(attn_in.device)[:, None, :]
    q_size, k_size = (size.masked_fill(padding, 0).amax((1, 2)) for size in sizes)
    size = abs(rule.scale) * float((q_size * k_size).amax())
    if rule.position_bias is not None:
        bias_rows = at_least_single(rule.position_bias).to(attn_in.device)
        terms["position_bias"] = bias_rows.expand(attn_in.shape[0], -1, -1, -1)
        size += rule.largest_bias()
    if rule.soft_cap is not None:
        content, *others = terms.values()
        total = sum(others, content)
        terms["soft_cap"] = rule.capped(total) - total
    return terms, size


def _layer(site: Site) -> int:
    if site.layer is None:
        raise InvalidInputError(f"{site} has no layer")
    return site.layer
