"""Attention scores, split into four exact terms that check themselves against the model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from sinkscope._types import LayerPatterns, Layers, Mask, PerKey, Residual
from sinkscope.capture import LayerReader, Part, stream
from sinkscope.display import HtmlTable, number, numbers
from sinkscope.epe import coordinate_alignment
from sinkscope.errors import IdentityError, InvalidInputError
from sinkscope.metrics import NAN
from sinkscope.model import ModelView, model_view, whole_numbers
from sinkscope.prompts import TokenBatch
from sinkscope.sites import Site

TOLERANCE_FACTOR = 64
"""Identities hold to this many units of the dtype's precision, times the largest `scale |q||k|`."""
HALF_FACTOR = 4
"""The same for half precision, whose units are large: 64 of them would refuse nothing."""
HALF_PATTERN_FACTOR = 16
"""In half precision patterns hold to this many units: a share of attention is at most 1."""


@dataclass(frozen=True, eq=False)
class ScoreTerms(HtmlTable):
    """The four terms of every score, each with the score's scale in it.

    `s_ij = scale (n_i W_Q + b_Q) . (n_j W_K + b_K)`, n the output of LN1. Terms that are
    constant along an axis are views that take no memory there. Scores where the model lacks
    a bias have no such term, and it is zero here because the product is.

    Attributes:
        content: `[batch layer head query key]`, `(n_i W_Q) . (n_j W_K)`.
        query_bias: the same shape, `b_Q . (n_j W_K)`; depends on the key alone.
        key_bias: the same shape, `(n_i W_Q) . b_K`; depends on the query alone, so that the
            softmax does not see it.
        bias_bias: the same shape, `b_Q . b_K`; constant per head.
        visible: `[batch layer query key]`, where the terms are scores at all.
        layers: the layers of the second axis.
        bias_kind: "raw", or "effective" where folding has merged LN1's bias into b_Q.
        max_error: largest |sum of terms - the model's own score| over visible pairs; NaN where
            the model does not show its scores.
        pattern_error: largest |softmax(sum of terms) - the model's own pattern| there.
        tolerance: what both errors had to stay under.
    """

    content: LayerPatterns
    query_bias: LayerPatterns
    key_bias: LayerPatterns
    bias_bias: LayerPatterns
    visible: Bool[Tensor, "batch layer query key"]
    layers: tuple[int, ...]
    bias_kind: str
    max_error: float
    pattern_error: float
    tolerance: float

    def overview(self) -> list[tuple[str, str]]:
        batch, _, heads, queries, _ = self.content.shape
        return [
            ("scores", f"{batch} prompts, layers {numbers(self.layers)}, {heads} heads"),
            ("positions", str(queries)),
            ("query bias", self.bias_kind),
            ("largest error of the scores", number(self.max_error)),
            ("largest error of the patterns", number(self.pattern_error)),
            ("tolerance", number(self.tolerance)),
        ]

    @property
    def total(self) -> LayerPatterns:
        """The sum of the four terms: the model's own score before the mask."""
        return self.content + self.query_bias + self.key_bias + self.bias_bias


def decompose_scores(
    model: Any,
    batch: TokenBatch,
    layers: Layers = None,
    *,
    batch_size: int | None = None,
) -> ScoreTerms:
    """Split the attention scores of a batch into four terms, and check that they add up.

    Both identities are checked in every layer, head and visible pair: the sum of the terms
    against the model's own score, and `softmax(sum + mask)` against its own pattern. The
    tolerance is `64 eps max(1, scale |q||k|)`, eps of the model's dtype; in half precision the
    factor is 4, and patterns hold to `16 eps`.

    Works on processed weights as well; there `bias_kind` says "effective".

    Args:
        model: a hooked model or its view.
        batch: the prompts.
        layers: all if None.
        batch_size: rows per forward pass; all at once if None.

    Raises:
        IdentityError: a check is over its tolerance; names layer, head and size.
        NotApplicableError: the model has no query bias at all.
    """
    view = model_view(model)
    view.require_query_bias()
    reader = _TermsReader(view, view.layers(layers))
    stream(view, batch, [reader], batch_size=batch_size)
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
    view.require_norm_in_front("Delta")
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
    view.require_norm_in_front("Delta")
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
        view.require_norm_in_front("Delta")
        self._scales = {layer: view.attention_scale(layer) for layer in layers}
        self._convention = convention

    def _shift(self, attn_in: Tensor, chunk: TokenBatch, layer: int) -> Tensor:
        delta = torch.einsum("bpd,hd->bhp", attn_in, self._gamma[layer])
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

    def __init__(self, view: ModelView, layers: tuple[int, ...]) -> None:
        view.require_plain_scores()
        self._view = view
        self._layers = layers
        self._kinds = ("attn_scores", "pattern") if view.scores_are_live() else ("pattern",)
        self._total: Tensor | None = None
        self._tolerance = 0.0
        self.max_error = 0.0 if "attn_scores" in self._kinds else NAN
        self.pattern_error = 0.0
        self.tolerance = 0.0

    def sites(self, view: ModelView) -> Sequence[Site]:
        return [Site(kind, la) for la in self._layers for kind in ("attn_in", *self._kinds)]

    def read(self, site: Site, tensor: Tensor, chunk: TokenBatch) -> None:
        layer = _layer(site)
        if site.kind == "attn_in":
            terms, size = score_terms(self._view, layer, tensor, chunk.mask)
            self._keep(layer, terms)
            content, query_bias, key_bias, bias_bias = terms
            self._total = content + query_bias + key_bias + bias_bias
            self._tolerance = _factor(tensor.dtype) * _eps(tensor.dtype) * max(1.0, size)
            self.tolerance = max(self.tolerance, self._tolerance)
            return
        if self._total is None:
            raise IdentityError(
                f"The model computed {site} before what enters W_Q was seen",
                fix="check the site map of this model",
            )
        visible = self._view.visible(layer, chunk.mask).to(tensor.device)[:, None]
        if site.kind == "attn_scores":
            error = (self._total - tensor).abs()
            what = "the sum of the four terms is not the model's own score"
            worst = _largest(error, visible, self._tolerance, layer, what)
            self.max_error = max(self.max_error, worst)
        else:
            own = self._total.masked_fill(~visible, -math.inf).softmax(-1)
            error = (own - tensor).abs()
            what = "softmax of the sum of the four terms is not the model's own pattern"
            tolerance = _pattern_tolerance(self._tolerance, tensor, visible)
            self.tolerance = max(self.tolerance, tolerance)
            worst = _largest(error, visible, tolerance, layer, what)
            self.pattern_error = max(self.pattern_error, worst)
            self._total = None

    def take(self, start: int) -> Part:
        """The three errors so far."""
        found = [self.max_error, self.pattern_error, self.tolerance]
        return {"errors": torch.tensor(found, dtype=torch.float64)}

    def add(self, start: int, part: Part) -> None:
        found = part["errors"].tolist()
        self.max_error = max(self.max_error, found[0])
        self.pattern_error = max(self.pattern_error, found[1])
        self.tolerance = max(self.tolerance, found[2])

    def _keep(self, layer: int, terms: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
        """Nothing is kept; a subclass may."""


class _TermsReader(IdentityReader):
    """Checks the identities and keeps the terms."""

    def __init__(self, view: ModelView, layers: tuple[int, ...]) -> None:
        super().__init__(view, layers)
        self._terms: dict[int, list[tuple[Tensor, Tensor, Tensor, Tensor]]] = {
            layer: [] for layer in layers
        }

    def _keep(self, layer: int, terms: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
        self._terms[layer].append(terms)

    def result(self, batch: TokenBatch) -> ScoreTerms:
        """All layers and chunks put together."""
        n = batch.ids.shape[1]
        stacked = []
        for term in range(4):
            per_layer = [torch.cat([c[term] for c in self._terms[la]]) for la in self._layers]
            stacked.append(torch.stack(per_layer, dim=1).expand(-1, -1, -1, n, n))
        content, query_bias, key_bias, bias_bias = stacked
        return ScoreTerms(
            content=content,
            query_bias=query_bias,
            key_bias=key_bias,
            bias_bias=bias_bias,
            visible=torch.stack([self._view.visible(la, batch.mask) for la in self._layers], 1),
            layers=self._layers,
            bias_kind=self._view.bias_kind,
            max_error=self.max_error,
            pattern_error=self.pattern_error,
            tolerance=self.tolerance,
        )


def score_terms(
    view: ModelView, layer: int, attn_in: Residual, mask: Mask
) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], float]:
    """The four terms of one layer from what enters W_Q and W_K.

    Args:
        view: the model.
        layer: 0-based.
        attn_in: `[batch pos d_model]`, n.
        mask: `[batch pos]`, true where a token is.

    Returns:
        content `[batch head query key]`, query_bias `[batch head 1 key]`, key_bias
        `[batch head query 1]`, bias_bias `[batch head 1 1]`, and the largest `scale |q||k|` of
        tokens in the same prompt.
    """
    scale = view.attention_scale(layer)
    attn_in = at_least_single(attn_in)
    b_Q, bias = at_least_single(view.b_Q(layer)), view.b_K(layer)
    b_K = torch.zeros_like(b_Q) if bias is None else at_least_single(bias)
    q = torch.einsum("bpd,hde->bhpe", attn_in, at_least_single(view.W_Q(layer)))
    k = torch.einsum("bpd,hde->bhpe", attn_in, at_least_single(view.W_K(layer)))
    content = scale * q @ k.transpose(-1, -2)
    query_bias = scale * torch.einsum("he,bhke->bhk", b_Q, k)[:, :, None, :]
    key_bias = scale * torch.einsum("bhqe,he->bhq", q, b_K)[..., None]
    constant = scale * (b_Q * b_K).sum(-1)
    bias_bias = constant[None, :, None, None].expand(attn_in.shape[0], -1, -1, -1)
    padding = ~mask.to(attn_in.device)[:, None, :]
    q_size, k_size = (
        x.norm(dim=-1).masked_fill(padding, 0).amax((1, 2)) + bias.norm(dim=-1).amax()
        for x, bias in ((q, b_Q), (k, b_K))
    )
    size = abs(scale) * float((q_size * k_size).amax())
    return (content, query_bias, key_bias, bias_bias), size


def at_least_single(tensor: Tensor) -> Tensor:
    """Half precision as float32: our own sums should add no rounding to the model's."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _largest(error: Tensor, visible: Tensor, tolerance: float, layer: int, what: str) -> float:
    """The largest error over visible pairs, refused where it is over the tolerance or NaN."""
    per_head = error.masked_fill(~visible, 0).amax((0, 2, 3))
    worst = float(per_head.max())
    if not worst <= tolerance:
        head = int(per_head.nan_to_num(nan=math.inf).argmax())
        raise IdentityError(
            f"In layer {layer}, head {head}, {what}",
            expected=f"a difference of at most {tolerance:.2e}",
            got=f"{worst:.2e}",
            fix="look for a hook that edits q, k, scores or pattern, a scale that the "
            "configuration does not tell, or an attention that TransformerLens computes "
            "otherwise than the model's authors",
        )
    return worst


def _pattern_tolerance(of_scores: float, pattern: Tensor, visible: Tensor) -> float:
    """A pattern is off by no more than its scores are, and by what its softmax rounds.

    Many models compute the softmax in float32 whatever their dtype; their row sums tell.
    """
    eps = _eps(pattern.dtype)
    if eps > _eps(torch.float32):
        return min(of_scores, HALF_PATTERN_FACTOR * eps)
    off = (pattern.sum(-1) - 1).abs().masked_fill(~visible.any(-1), 0)
    single = bool(off.max() > TOLERANCE_FACTOR * eps)
    return max(of_scores, TOLERANCE_FACTOR * _eps(torch.float32) if single else 0.0)


def _factor(dtype: torch.dtype) -> int:
    return HALF_FACTOR if _eps(dtype) > _eps(torch.float32) else TOLERANCE_FACTOR


def _eps(dtype: torch.dtype) -> float:
    return float(torch.finfo(dtype).eps)


def _layer(site: Site) -> int:
    if site.layer is None:
        raise InvalidInputError(f"{site} has no layer")
    return site.layer
