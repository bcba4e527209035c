"""Which circuit a model uses for its sink: one row a model, from parts to verdict."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from sinkscope import metrics
from sinkscope._types import Mask
from sinkscope.ablations import (
    PAPER_CONDITIONS,
    Ablation,
    SkipMLP,
    ZeroKeyColumns,
)
from sinkscope.attention import ScoreRule, at_least_single
from sinkscope.capture import (
    LayerReader,
    Part,
    Pass,
    Progress,
    Reader,
    Total,
    no_effect_is_fine,
    require_progress,
    run_passes,
)
from sinkscope.epe import epe_found_once, extract_epe
from sinkscope.errors import InvalidInputError, NotApplicableError
from sinkscope.experiments._engine import applicable
from sinkscope.massive import MeanStd, find_massive_coordinates
from sinkscope.measures import PatternReader, of_received, uniform_sink_score
from sinkscope.model import ModelView, model_view
from sinkscope.prompts import Prompts, TokenBatch, token_batch
from sinkscope.results import Result
from sinkscope.scores import TERMS, IdentityReader
from sinkscope.sites import Site
from sinkscope.verdict import HIDDEN, SINK_RATIO, circuit

if TYPE_CHECKING:
    import pandas as pd

Pairs = tuple[tuple[str, float], ...]

PEAK = 3.0
"""A residual peak has a norm or an entry this many times the other positions' median one."""
MASSIVE_KEYS = "Zero massive Wk"
JUMP_MLP = "No MLP where the norm jumps"
SHARE_OF_COORDINATES = "massive coordinates"
BEHIND = "norms behind attention"


@dataclass(frozen=True)
class SurveyRow:
    """What the survey found on one model.

    Attributes:
        model: its name.
        size: layers, heads, key heads, d_model.
        query_bias: "yes", "all zero" or "no".
        effective_query_bias: whether LN1's bias gives every query a constant: "yes", "no", or
            "norms behind attention" where no norm lies in front of W_Q.
        positions: "learned", or the model's other kind.
        first_mlp: whether layer 0 has an MLP.
        normalization: "LN", "RMS" or such.
        other_parts: of QK-norm, soft cap, sink logits, shared keys, sliding window.
        starts_with_bos: how many prompts start with the BOS token, or with [CLS] where the
            tokenizer has no BOS (BERT).
        n_prompts: how many there were.
        sink_score: the paper's, mean over mid layers, heads and prompts.
        uniform: what uniform attention over the keys that each query sees would give it.
        sink_score_by_layer: the same for every layer; NaN where a window hides the position.
        sink_rate_3: share of (prompt, layer, head) with `alpha > .3` (Gu et al.).
        sink_rate_8: the same for .8.
        sink_position: where most (prompt, layer, head) have their largest `alpha`.
        sink_position_share: the share of them that have it there.
        strongest: layer, head and its sink score.
        peak_by_layer: norm of the first position over the median of the others, in the
            residual stream entering each layer, and after the last.
        peak: the largest of these after the first layer.
        peak_entry: the same for the largest entry instead of the norm.
        jump_layer: the layer that adds most to the first position's norm, in units of the
            others' median norm after it; None where both peaks are below 3, and where norms
            behind the attention keep the norms of all positions alike.
        value_drain: `|v|` of the first position over the median of the others, mid layers.
        epe_coordinates: massive coordinates of EPE_0 by `MeanStd(3)`; None without an EPE.
        coordinates: massive coordinates by `MeanStd(3)` of the mean residual of the first
            position, after the layer where its largest entry stands out most against its
            median one; empty where both peaks are below 3.
        appear_after: the first layer after which these hold half of their largest size, -1 if
            the embeddings do; None without coordinates.
        score_shares: term -> the share it has in the sink's lead over the other keys of the
            same query, which sum to 1, and what the coordinates have in it; mid layers. Empty
            where scores are not decomposed.
        ablations: name -> sink score relative to the untouched model; says nothing where that
            has no sink. Under QK-norm, keys without some columns are normed anew, so that what
            is left of them counts for more. Without learned positions "Nullify BOS Token"
            leaves the first position nothing at all, and is no control.
        not_applicable: name -> why this model has no such number.
        identity_errors: largest errors of scores and patterns, and the tolerance; NaN where
            scores are not decomposed.
        verdict: in words.
    """

    model: str
    size: tuple[int, int, int, int]
    query_bias: str
    effective_query_bias: str
    positions: str
    first_mlp: bool
    normalization: str
    other_parts: tuple[str, ...]
    starts_with_bos: int
    n_prompts: int
    sink_score: float
    uniform: float
    sink_score_by_layer: tuple[float, ...]
    sink_rate_3: float
    sink_rate_8: float
    sink_position: int
    sink_position_share: float
    strongest: tuple[int, int, float]
    peak_by_layer: tuple[float, ...]
    peak: float
    peak_entry: float
    jump_layer: int | None
    value_drain: float
    epe_coordinates: tuple[int, ...] | None
    coordinates: tuple[int, ...]
    appear_after: int | None
    score_shares: Pairs
    ablations: Pairs
    not_applicable: tuple[tuple[str, str], ...]
    identity_errors: tuple[float, float, float]
    verdict: str


@dataclass(frozen=True, eq=False)
class Survey(Result):
    """One row for each model, see `SurveyRow`."""

    kind: ClassVar[str] = "survey"

    values: tuple[tuple[Any, ...], ...]

    def __post_init__(self) -> None:
        if any(len(row) != len(fields(SurveyRow)) for row in self.values):
            raise InvalidInputError(
                "The rows of a survey have other columns",
                expected=", ".join(f.name for f in fields(SurveyRow)),
                got=", ".join(str(len(row)) for row in self.values) + " values",
                fix="run the survey again",
            )

    @property
    def rows(self) -> tuple[SurveyRow, ...]:
        """The rows, one a model."""
        return tuple(SurveyRow(*row) for row in self.values)

    def to_dataframe(self) -> pd.DataFrame:
        """One row a model; term shares and ablations have a column each, NaN where not there."""
        import pandas as pd

        flat = []
        for row in self.rows:
            cells = {f.name: getattr(row, f.name) for f in fields(row)}
            for name in ("score_shares", "ablations"):
                prefix = "share: " if name == "score_shares" else "relative: "
                cells |= {prefix + key: value for key, value in cells.pop(name)}
            cells["verdict"] = cells.pop("verdict")
            flat.append(cells)
        return pd.DataFrame(flat)

    def summary(self) -> dict[str, Any]:
        """Model -> its row as plain values."""
        pairs = ("score_shares", "ablations", "not_applicable")
        names = [row.model for row in self.rows]
        return {
            name if names.count(name) == 1 else f"{name} ({n})": {
                f.name: dict(getattr(row, f.name)) if f.name in pairs else getattr(row, f.name)
                for f in fields(row)
            }
            for n, (name, row) in enumerate(zip(names, self.rows, strict=True), start=1)
        }

    def overview(self) -> list[tuple[str, str]]:
        return [(row.model, f"{row.sink_score:.4f}; {row.verdict}") for row in self.rows]


def survey(
    models: Any,
    prompts: TokenBatch | Prompts | Sequence[Any] | str | Tensor,
    *,
    length: int | None = None,
    bos: Literal["none", "prepend"] = "none",
    batch_size: int | None = None,
    total: Total | None = None,
    progress: Progress | None = None,
) -> Survey:
    """Which parts a model has, where its sink is, and what carries it.

    Every model runs untouched twice (the second time to split its scores, with both identities
    checked) and once under each of the paper's conditions that it has the parts for; where the
    residual stream has a peak at the first position, also without the MLP of the layer where
    it jumps and without the keys' columns at its massive coordinates. Where there are no
    learned positions, that residual takes the place of the EPE.

    The sink's lead is, for a query of the second half of a prompt, the score of the first
    position minus the mean score of the other keys that the query sees; terms that are the
    same for all keys have no part in it. Shares are sums over prompts, heads and mid layers of
    a term's part, over the same sum of the whole.

    Args:
        models: a hooked model or its view, or several in a sequence.
        prompts: texts, ids, or a batch (for one model, or models that share their tokenizer).
        length: see `token_batch`.
        bos: see `token_batch`; many models only have a sink with their BOS in front.
        batch_size: prompts per pass; all at once if None.
        total: told at the start of each model how many prompts it will run at most.
        progress: told how many prompts are done.

    Raises:
        InvalidInputError: no model, or prompts that can't be read.
        IdentityError: a model's scores are not what its parts make them.
    """
    require_progress(progress, total)
    several = list(models) if isinstance(models, (list, tuple)) else [models]
    if not several:
        raise InvalidInputError(
            "A survey needs a model",
            expected="one model or more",
            got="none",
            fix="pass a model, or several in a list",
        )
    if isinstance(prompts, TokenBatch) and (length is not None or bos != "none"):
        raise InvalidInputError(
            "A batch has its length and its BOS already",
            expected="length and bos with texts or ids",
            got=f"length={length!r}, bos={bos!r} and a TokenBatch",
            fix="give them to token_batch",
        )
    rows = []
    for model in several:
        view = model_view(model)
        batch = (
            prompts
            if isinstance(prompts, TokenBatch)
            else token_batch(view, prompts, length=length, bos=bos)
        )
        rows.append(_row(_Runner(view, batch, batch_size, total, progress)))
    return Survey(tuple(astuple(row) for row in rows))


# --- running ------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Runner:
    """One model on its prompts."""

    view: ModelView
    batch: TokenBatch
    batch_size: int | None
    total: Total | None
    progress: Progress | None

    def run(self, readers: Sequence[Reader], ablation: Ablation | None = None) -> None:
        with no_effect_is_fine():  # it shows as 100 % of the sink
            run_passes(
                self.view,
                self.batch,
                [Pass(self.view, readers, ablation)],
                batch_size=self.batch_size,
                progress=self.progress,
            )

    def mid_score(self, ablation: Ablation) -> float:
        reader = PatternReader(self.view.mid_or_all_layers, metrics.sink_score)
        self.run([reader], ablation)
        return _mean(reader.result())


@epe_found_once()
def _row(runner: _Runner) -> SurveyRow:
    view, batch = runner.view, runner.batch
    conditions = {name: a for name, a in PAPER_CONDITIONS.items() if name != "Baseline"}
    missing = {name: applicable(view, a, batch) for name, a in conditions.items()}
    if runner.total is not None:
        applied = sum(reason is None for reason in missing.values())
        runner.total((applied + 4) * len(batch))

    sink = _SinkReaders(view)
    runner.run(sink.readers)
    found = sink.result(batch)
    jump, coordinates, appear = found.peak()
    if _effective(view) == BEHIND:
        jump = None

    extra: dict[str, Ablation] = {}
    if jump is not None and view.parts.first_mlp:
        extra[JUMP_MLP] = SkipMLP(layers=[jump])
    if coordinates:
        extra[MASSIVE_KEYS] = ZeroKeyColumns(coordinates)
    mid = list(view.mid_or_all_layers)
    baseline = _mean(found.scores[:, mid])
    kept = []
    for name, ablation in (conditions | extra).items():
        reason = missing.setdefault(name, applicable(view, ablation, batch))
        if name == "No Query Bias" and _query_bias(view) == "all zero":
            reason = missing[name] = "Not applicable: the query bias b_Q is all zero."
        if reason is None:
            left = runner.mid_score(ablation) / baseline if baseline > 0 else metrics.NAN
            kept.append((name, left))
    if "v" not in view.sites.names:
        missing["value drain"] = "Not applicable: this model has no hook for values."
    refused = {name: reason for name, reason in missing.items() if reason is not None}
    shares, errors = _shares(runner, coordinates, refused)

    uniform = uniform_sink_score(view, batch, mid)
    position, share = found.position()
    layer, head = divmod(int(found.scores.nanmean(0).nan_to_num(-1).argmax()), view.n_heads)
    return SurveyRow(
        model=view.name,
        size=(view.n_layers, view.n_heads, view.n_key_value_heads, view.d_model),
        query_bias=_query_bias(view),
        effective_query_bias=_effective(view),
        positions="learned" if view.parts.learned_positions else view.parts.positions,
        first_mlp=view.parts.first_mlp,
        normalization=view.parts.normalization,
        other_parts=_other_parts(view),
        starts_with_bos=sum(batch.bos),
        n_prompts=len(batch),
        sink_score=baseline,
        uniform=uniform,
        sink_score_by_layer=tuple(_mean(found.scores[:, n]) for n in range(view.n_layers)),
        sink_rate_3=float(found.rates[..., 0].mean()),
        sink_rate_8=float(found.rates[..., 1].mean()),
        sink_position=position,
        sink_position_share=share,
        strongest=(layer, head, _mean(found.scores[:, layer, head])),
        peak_by_layer=tuple(found.ratios.tolist()),
        peak=float(found.ratios[1:].max()),
        peak_entry=float(found.entries[1:].max()),
        jump_layer=jump,
        value_drain=metrics.NAN if found.drain is None else _mean(found.drain[:, mid]),
        epe_coordinates=_epe_coordinates(view, refused),
        coordinates=coordinates,
        appear_after=appear,
        score_shares=shares,
        ablations=tuple(kept),
        not_applicable=tuple(refused.items()),
        identity_errors=errors,
        verdict=_verdict(baseline, uniform, dict(kept), refused, jump, view.parts.qk_norm),
    )


class _SinkReaders:
    """What the first pass over the untouched model reads."""

    def __init__(self, view: ModelView) -> None:
        layers = range(view.n_layers)
        self.scores = PatternReader(layers, metrics.sink_score)
        rates = [partial(metrics.sink_rate, eps=eps) for eps in (0.3, 0.8)]
        self.alphas = PatternReader(layers, of_received(*rates, metrics.sink_position))
        self.residual = LayerReader("resid_pre", layers, _first_and_others)
        self.last = LayerReader("resid_post", [view.n_layers - 1], _first_and_others)
        self.drain = LayerReader("v", layers, _drain) if "v" in view.sites.names else None

    @property
    def readers(self) -> list[Reader]:
        readers: list[Reader] = [self.scores, self.alphas, self.residual, self.last]
        return readers if self.drain is None else [*readers, self.drain]

    def result(self, batch: TokenBatch) -> _Found:
        residual = torch.cat([self.residual.result(), self.last.result()], dim=1)
        alphas = self.alphas.result()
        return _Found(
            scores=self.scores.result(),
            rates=alphas[..., :2],
            positions=alphas[..., 2].long(),
            vectors=residual[..., 4:].mean(0),
            firsts=residual[..., 0].mean(0),
            others=residual[..., 1].mean(0),
            entries=residual[..., 2].mean(0) / residual[..., 3].mean(0),
            drain=None if self.drain is None else self.drain.result(),
        )


@dataclass(frozen=True)
class _Found:
    """Numbers of the untouched model.

    Attributes:
        scores: `[batch layer head]`, sink scores.
        rates: `[batch layer head 2]`, 1 where alpha is above .3 and .8.
        positions: `[batch layer head]`.
        vectors: `[layer + 1, d_model]`, mean residual of the first position.
        firsts: `[layer + 1]`, mean norm of the first position.
        others: `[layer + 1]`, mean over prompts of the other positions' median norm.
        entries: `[layer + 1]`, largest entry of the first position over the others' median.
        drain: `[batch layer]`; None without values to read.
    """

    scores: Tensor
    rates: Tensor
    positions: Tensor
    vectors: Tensor
    firsts: Tensor
    others: Tensor
    entries: Tensor
    drain: Tensor | None

    @property
    def ratios(self) -> Tensor:
        """`[layer + 1]`, how far the first position's norm stands out."""
        return self.firsts / self.others

    def position(self) -> tuple[int, float]:
        """The commonest sink position, and its share."""
        values, counts = self.positions.unique(return_counts=True)
        return int(values[counts.argmax()]), float(counts.max() / counts.sum())

    def peak(self) -> tuple[int | None, tuple[int, ...], int | None]:
        """The layer that makes the peak, its massive coordinates, and where these appear."""
        if not float(torch.stack([self.ratios, self.entries])[:, 1:].max()) >= PEAK:
            return None, (), None
        jump = int((self.firsts.diff() / self.others[1:]).argmax())
        sizes = self.vectors[1:].abs()
        at = 1 + int((sizes.amax(1) / sizes.median(1).values).argmax())
        coordinates = find_massive_coordinates(self.vectors[at], MeanStd(3.0)).coordinates
        if not coordinates:
            return jump, (), None
        size = self.vectors[:, list(coordinates)].abs().mean(1)
        return jump, coordinates, int((size >= size.max() / 2).nonzero()[0]) - 1


def _first_and_others(x: Tensor, chunk: TokenBatch, layer: int) -> Tensor:
    """`[batch 4 + d_model]`: norm, the others' median norm, the same of entries, the vector."""
    x = at_least_single(x)
    rows = torch.arange(x.shape[0], device=x.device)
    sizes = [_first_and_median(size, chunk) for size in (x.norm(dim=-1), x.abs().amax(-1))]
    return torch.cat([*sizes, x[rows, chunk.first.to(x.device)]], -1)


def _drain(v: Tensor, chunk: TokenBatch, layer: int) -> Tensor:
    """`[batch]`, the mean over heads of the first position's norm over the others' median."""
    pairs = [_first_and_median(n, chunk) for n in at_least_single(v).norm(dim=-1).unbind(2)]
    return torch.stack([pair[:, 0] / pair[:, 1] for pair in pairs], -1).mean(-1)


def _first_and_median(
    norms: Float[Tensor, "batch pos"], chunk: TokenBatch
) -> Float[Tensor, "batch 2"]:
    rows = torch.arange(norms.shape[0], device=norms.device)
    first = chunk.first.to(norms.device)
    others = norms.masked_fill(~chunk.mask.to(norms.device), metrics.NAN)
    others[rows, first] = metrics.NAN
    return torch.stack([norms[rows, first], others.nanmedian(1).values], -1)


# --- what carries the score ---------------------------------------------------------------


class _LeadReader(IdentityReader):
    """Checks the identities, and keeps each term's part in the sink's lead."""

    def __init__(
        self, view: ModelView, layers: tuple[int, ...], coordinates: tuple[int, ...]
    ) -> None:
        super().__init__(view, layers)
        self._coordinates = list(coordinates)
        self._chunk: TokenBatch | None = None
        self._now: dict[str, float] = {}
        self._parts: dict[int, Part] = {}

    @property
    def parts(self) -> dict[str, float]:
        """Each term's sum over prompts, heads and layers, and that of the coordinates."""
        sums: dict[str, float] = {}
        for part in self._parts.values():
            for name in (n for n in (*TERMS, SHARE_OF_COORDINATES) if n in part):
                sums[name] = sums.get(name, 0.0) + float(part[name])
        return sums

    @property
    def whole(self) -> float:
        """The lead itself: the sum over the terms."""
        return sum(part for name, part in self.parts.items() if name != SHARE_OF_COORDINATES)

    def read(self, site: Site, tensor: Tensor, chunk: TokenBatch) -> None:
        self._chunk = chunk
        super().read(site, tensor, chunk)

    def take(self, start: int) -> Part:
        sums, self._now = self._now, {}
        parts = {name: torch.tensor(value, dtype=torch.float64) for name, value in sums.items()}
        return {**super().take(start), **parts}

    def add(self, start: int, part: Part) -> None:
        super().add(start, part)
        self._parts[start] = part

    def _keep(self, layer: int, terms: Mapping[str, Tensor], rule: ScoreRule) -> None:
        if self._chunk is None:
            return
        mask = self._chunk.mask
        content = terms["content"]
        weights = lead_weights(mask, self._view.visible(layer, mask)).to(content)
        parts = dict(terms)
        if self._coordinates:
            parts[SHARE_OF_COORDINATES] = self._through_coordinates(layer, rule)
        for name, term in parts.items():
            part = torch.einsum("bhqk,bqk->", term.expand_as(content), weights)
            self._now[name] = self._now.get(name, 0.0) + float(part)

    def _through_coordinates(self, layer: int, rule: ScoreRule) -> Tensor:
        """`q . (n[C] W_K[C])`, what a score has from the massive coordinates of the keys."""
        view, chosen = self._view, self._coordinates
        n = at_least_single(self._seen["attn_in"])
        W_Q, W_K = (at_least_single(weight(layer)) for weight in (view.W_Q, view.W_K))
        q = torch.einsum("bpd,hde->bhpe", n, W_Q)
        if view.parts.query_bias:
            q = q + at_least_single(view.b_Q(layer))[None, :, None, :]
        k = torch.einsum("bpc,hce->bhpe", n[..., chosen], W_K[:, chosen])
        return rule.scale * rule.queries(q) @ rule.keys(k).transpose(-1, -2)


def lead_weights(
    mask: Mask, visible: Bool[Tensor, "batch query key"]
) -> Float[Tensor, "batch query key"]:
    """Weights whose sum with scores is the first position's mean lead over the other keys.

    For each query of a row's second half that sees the first position and another key: 1 at
    the first position and `-1/m` at each of the m others that it sees, over the number of such
    queries.
    """
    rows = torch.arange(mask.shape[0], device=mask.device)
    first = metrics.first_positions(mask)
    late = metrics.position_ids(mask) >= (mask.sum(1) // 2)[:, None]
    others = visible.clone()
    others[rows, :, first] = False
    count = others.sum(-1)
    queries = late & visible[rows, :, first] & (count > 0)
    weights = -others.float() / count.clamp_min(1)[..., None]
    weights[rows, :, first] = 1.0
    weights = weights * queries[..., None]
    return weights / queries.sum(1).clamp_min(1)[:, None, None]


def _shares(
    runner: _Runner, coordinates: tuple[int, ...], refused: dict[str, str]
) -> tuple[Pairs, tuple[float, float, float]]:
    view = runner.view
    layers = tuple(view.mid_or_all_layers)
    try:
        reader = _LeadReader(view, layers, coordinates)
        runner.run([reader])
    except NotApplicableError as error:
        refused["score shares"] = str(error)
        return (), (metrics.NAN, metrics.NAN, metrics.NAN)
    if reader.whole == 0:
        refused["score shares"] = HIDDEN
        return (), (reader.max_error, reader.pattern_error, reader.tolerance)
    shares = tuple((name, part / reader.whole) for name, part in reader.parts.items())
    return shares, (reader.max_error, reader.pattern_error, reader.tolerance)


# --- words --------------------------------------------------------------------------------


def _query_bias(view: ModelView) -> str:
    if not view.parts.query_bias:
        return "no"
    any_at_all = any(bool(view.b_Q(layer).any()) for layer in range(view.n_layers))
    return "yes" if any_at_all else "all zero"


def _effective(view: ModelView) -> str:
    try:
        view.require_norm_in_front("The effective query bias")
    except NotApplicableError:
        return BEHIND
    beta = view.ln1_bias(0)
    return "yes" if beta is not None and bool(beta.any()) else "no"


def _other_parts(view: ModelView) -> tuple[str, ...]:
    parts = view.parts
    found = ["QK-norm"] if parts.qk_norm else []
    found += [f"soft cap {parts.soft_cap:g}"] if parts.soft_cap is not None else []
    found += ["sink logits"] if parts.sink_logits else []
    if view.n_key_value_heads != view.n_heads:
        found.append(f"{view.n_key_value_heads} key heads for {view.n_heads}")
    windows = sorted({w for n in range(view.n_layers) if (w := view.window(n)) is not None})
    found += [f"window {', '.join(map(str, windows))}"] if windows else []
    return tuple(found)


def _epe_coordinates(view: ModelView, refused: dict[str, str]) -> tuple[int, ...] | None:
    try:
        return find_massive_coordinates(extract_epe(view).vectors[0], MeanStd(3.0)).coordinates
    except NotApplicableError as error:
        refused["EPE"] = str(error)
        return None


def _verdict(
    score: float,
    uniform: float,
    kept: dict[str, float],
    missing: dict[str, str],
    jump: int | None,
    qk_norm: bool,
) -> str:
    if math.isnan(score):
        return HIDDEN
    share = f"Position 0 receives {score:.1%} of attention, {uniform:.1%} if it were uniform"
    if SINK_RATIO * uniform >= 1:
        return f"The prompts are too short to tell. {share}."
    if not score >= SINK_RATIO * uniform:
        return f"No sink at position 0. {share}."
    words = [circuit(kept, missing), f"{share}."]
    if jump is not None and JUMP_MLP in kept:
        words.append(
            f"Its residual norm jumps in layer {jump}; without that layer's MLP "
            f"{kept[JUMP_MLP]:.0%} of the sink stays."
        )
    if MASSIVE_KEYS in kept:
        left = f"{kept[MASSIVE_KEYS]:.0%} stays" + (", with keys normed anew" if qk_norm else "")
        words.append(f"Without the key columns at its massive coordinates {left}.")
    return " ".join(words)


def _mean(values: Tensor) -> float:
    return float(values.double().nanmean())
