"""Does a view of a model give what sinkscope takes it for? For authors of a `ModelView`.

    sinkscope.testing.check_model_view(model).raise_for_failures()

Everything is checked against runs of the model itself.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from sinkscope._types import Ids, Mask
from sinkscope.attention import at_least_single, score_tolerance
from sinkscope.capture import stream
from sinkscope.display import HtmlTable
from sinkscope.errors import (
    ConformanceError,
    IdentityError,
    InvalidInputError,
    NotApplicableError,
    SinkscopeError,
)
from sinkscope.model import HookFn, ModelView, model_view
from sinkscope.prompts import TokenBatch, token_batch
from sinkscope.scores import IdentityReader
from sinkscope.sites import MODEL_KINDS, Site

if TYPE_CHECKING:
    import pandas as pd

HOLDS = "holds"
FAILS = "fails"
NOT_APPLICABLE = "not applicable"


class Check(NamedTuple):
    """One question, and what came out.

    Attributes:
        name: what was asked.
        status: "holds", "fails" or "not applicable".
        detail: what was compared; what is wrong, where and by how much; or why not asked.
    """

    name: str
    status: str
    detail: str


@dataclass(frozen=True)
class Conformance(HtmlTable):
    """What `check_model_view` found.

    Attributes:
        checks: all of them, in the order in which they ran.
        name: the view's name for its model.
    """

    checks: tuple[Check, ...]
    name: str

    @property
    def ok(self) -> bool:
        """Whether no check fails."""
        return not self.failures

    @property
    def failures(self) -> tuple[Check, ...]:
        """The checks that fail."""
        return tuple(check for check in self.checks if check.status == FAILS)

    def raise_for_failures(self) -> None:
        """Raise with every failure; do nothing where all is well.

        Raises:
            ConformanceError: a check fails.
        """
        if self.ok:
            return
        raise ConformanceError(
            f"The view of {self.name} does not give what it should",
            expected="every check to hold or not to be applicable",
            got="; ".join(f"{name}: {detail}" for name, _, detail in self.failures),
            fix="start with the first one, others may follow from it",
        )

    def to_dataframe(self) -> pd.DataFrame:
        """One row a check: name, status, detail."""
        import pandas as pd

        return pd.DataFrame(self.checks, columns=list(Check._fields))

    def overview(self) -> list[tuple[str, str]]:
        counts = Counter(check.status for check in self.checks)
        order = (FAILS, NOT_APPLICABLE, HOLDS)
        shown = sorted(self.checks, key=lambda check: order.index(check.status))
        return [
            ("model", self.name),
            ("checks", ", ".join(f"{counts[s]} {s}" for s in reversed(order) if counts[s])),
            *((name, f"{status}: {detail}") for name, status, detail in shown),
        ]

    def __str__(self) -> str:
        return "\n".join(f"{name}: {status}. {detail}" for name, status, detail in self.checks)


def check_model_view(view: Any, *, seed: int = 0, n_tokens: int = 8) -> Conformance:
    """Check every promise of the `ModelView` protocol on runs of the model itself.

    A check whose grounds fail is not asked, so that one mistake is one failure. Numbers have
    to agree to `64 eps max(1, largest value)`, in half precision `4 eps`, with eps that of
    the dtype; identities to the tolerance of `decompose_scores`.

    Args:
        view: a view, or a model that `model_view` knows.
        seed: of the tokens and of the edits; the global random state is not touched.
        n_tokens: the length of the prompts; take more than a sliding window holds to see it.

    Raises:
        InvalidInputError: a length that the model does not have, or fewer than 4 tokens.
    """
    view = model_view(view)
    if type(n_tokens) is not int or not 4 <= n_tokens <= view.n_ctx or type(seed) is not int:
        raise InvalidInputError(
            "The checks run on a few prompts of one length",
            expected=f"n_tokens from 4 to {view.n_ctx} and a seed, whole numbers",
            got=f"n_tokens={n_tokens!r}, seed={seed!r}",
            fix="leave both out, unless the model has a window that 8 tokens do not leave",
        )
    state = _State.of(view)
    trial = _Trial(view, seed, n_tokens)
    found: dict[str, Check] = {}
    roots: dict[str, list[str]] = {}
    for name, grounds, ask in _CHECKS:
        failing = [
            n
            for n, check in found.items()
            if check.status == FAILS
            and (n in grounds or any(n in roots.get(ground, ()) for ground in grounds))
        ]
        if failing:
            roots[name] = failing
            detail = f"not asked, since it builds on what fails: {', '.join(failing)}"
            found[name] = Check(name, NOT_APPLICABLE, detail)
            continue
        with view.measuring():
            found[name] = Check(name, *_answer(ask, trial))
    found["no trace"] = Check("no trace", *_answer(state.unchanged, trial))
    return Conformance(tuple(found.values()), view.name)


class _Failure(Exception):
    """A check fails, with the detail."""


def _answer(ask: Callable[[_Trial], str], trial: _Trial) -> tuple[str, str]:
    try:
        return HOLDS, ask(trial)
    except _Failure as failure:
        return FAILS, str(failure)
    except NotApplicableError as error:
        return NOT_APPLICABLE, str(error)
    except Exception as error:  # an author's code may raise anything
        return FAILS, f"raises {type(error).__name__}: {str(error)[:300]}"


def _tolerance(tensor: Tensor, live: bool = True) -> float:
    size = float(tensor.abs().amax()) if tensor.numel() else 0.0
    return score_tolerance(tensor.dtype, size, live)


def _require_close(what: str, ours: Tensor, run: Tensor, *, live: bool = True) -> float:
    """The largest difference, refused where it is over the tolerance."""
    if ours.shape != run.shape:
        raise _Failure(f"{what}: shape {list(ours.shape)}, in the run {list(run.shape)}")
    difference = (ours.to(run.device) - run).abs()
    worst = float(difference.amax()) if difference.numel() else 0.0
    allowed = _tolerance(run, live)
    if not worst <= allowed:
        place = [
            int(i) for i in (difference.nan_to_num(nan=math.inf) == worst).nonzero()[:1].ravel()
        ]
        at = f" at {place}" if place else ""
        raise _Failure(f"{what}: off by {worst:.2e}{at}, at most {allowed:.2e} allowed")
    return worst


@dataclass
class _Seen:
    """What one run showed."""

    output: Any
    tensors: dict[Site, Tensor]
    calls: list[Site]

    def __getitem__(self, site: Site) -> Tensor:
        if site not in self.tensors:
            raise NotApplicableError(f"Not applicable: the view maps no {site.kind}")
        return self.tensors[site]


@dataclass
class _Trial:
    """The view, the prompts, and the run that the checks look at."""

    view: ModelView
    seed: int
    n_tokens: int
    ids: Ids = field(init=False)
    seen: _Seen = field(init=False)
    missing: dict[Site, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._generator = torch.Generator().manual_seed(self.seed)
        self.ids = torch.randint(self.view.d_vocab, (2, self.n_tokens), generator=self._generator)

    @property
    def layers(self) -> range:
        return range(self.view.n_layers)

    def batch(
        self, rows: Sequence[Sequence[int]], side: Literal["none", "left", "right"] = "none"
    ) -> TokenBatch:
        return token_batch(self.view, rows, padding=side)

    def sites(self) -> list[Site]:
        """Every place that the view maps."""
        sites = []
        for kind in self.view.sites.names:
            places = [None] if kind in MODEL_KINDS else list(self.layers)
            sites += [Site(kind, layer) for layer in places]
        return sites

    def look(
        self,
        run: Callable[[], Any],
        edits: Sequence[tuple[Site, HookFn]] = (),
    ) -> _Seen:
        """Run with hooks at every place that has one, after the edits."""
        seen = _Seen(None, {}, [])

        def note(site: Site) -> HookFn:
            def hook_fn(tensor: Tensor, hook: Any) -> None:
                seen.calls.append(site)
                seen.tensors.setdefault(site, tensor.detach().clone())

            return hook_fn

        places = [site for site in self.sites() if site not in self.missing]
        with self.view.hooks([*edits, *((site, note(site)) for site in places)]):
            seen.output = run()
        return seen

    def run(
        self,
        mask: Mask | None = None,
        stop_at_layer: int | None = None,
        edits: Sequence[tuple[Site, HookFn]] = (),
    ) -> _Seen:
        ids = self.ids.to(self.view.device)
        return self.look(lambda: self.view.run(ids, mask, stop_at_layer), edits)

    def noise(self, tensor: Tensor) -> Tensor:
        """Of the size of the tensor itself."""
        generator = torch.Generator().manual_seed(self.seed + 1)
        noise = torch.randn(tensor.shape, generator=generator).to(tensor)
        return noise * at_least_single(tensor).std().clamp_min(0.1).to(tensor)


# --- sizes and sites ----------------------------------------------------------------------


def _sizes(trial: _Trial) -> str:
    view = trial.view
    if view.n_heads % view.n_key_value_heads:
        raise _Failure(f"{view.n_heads} heads share {view.n_key_value_heads} key heads")
    per_head = [view.n_heads, view.d_model, view.d_head]
    _require_shape("embedding", view.embedding, [view.d_vocab, view.d_model])
    if view.parts.learned_positions:
        _require_shape("W_pos", view.W_pos, [view.n_ctx, view.d_model])
    for layer in trial.layers:
        _require_shape(f"W_Q({layer})", view.W_Q(layer), per_head)
        _require_shape(f"W_K({layer})", view.W_K(layer), per_head)
        if view.parts.query_bias:
            _require_shape(f"b_Q({layer})", view.b_Q(layer), per_head[::2])
        b_K = view.b_K(layer)
        if (b_K is not None) != view.parts.key_bias:
            raise _Failure(f"b_K({layer}) is {type(b_K).__name__}, parts.key_bias says otherwise")
        if b_K is not None:
            _require_shape(f"b_K({layer})", b_K, per_head[::2])
        scale = view.attention_scale(layer)
        if not isinstance(scale, float) or not math.isfinite(scale):
            raise _Failure(f"attention_scale({layer}) is {scale!r}, a number is expected")
    return "weights have the shapes that the view's sizes say"


def _require_shape(what: str, tensor: Any, shape: list[int]) -> None:
    if not isinstance(tensor, Tensor) or list(tensor.shape) != shape:
        got = list(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
        raise _Failure(f"{what} is {got}, its shape should be {shape}")


def _run(trial: _Trial) -> str:
    for site in trial.sites():
        try:
            trial.view.hook_point(site)
        except SinkscopeError as error:
            trial.missing[site] = str(error)
    trial.seen = trial.run()
    output = trial.seen.output
    if not isinstance(output, Tensor):
        raise _Failure(f"run(ids) gives a {type(output).__name__}, a tensor is expected")
    if list(output.shape[:2]) != list(trial.ids.shape) or not bool(torch.isfinite(output).all()):
        raise _Failure(f"run(ids) gives shape {list(output.shape)}, or numbers that are not finite")
    return f"run(ids) gives {list(output.shape)}"


def _deterministic(trial: _Trial) -> str:
    first, second = trial.seen.output, trial.run().output
    if not torch.equal(first, second):
        worst = float((first - second).abs().amax())
        raise _Failure(f"two runs of the same tokens differ by {worst:.2e}")
    return "two runs give the same output bit for bit"


def _sites(trial: _Trial) -> str:
    if trial.missing:
        site, error = next(iter(trial.missing.items()))
        raise _Failure(f"{len(trial.missing)} places do not resolve, such as {site}: {error}")
    calls = Counter(trial.seen.calls)
    for site in trial.sites():
        times = calls[site]
        if times == 0 and site.kind.startswith("rotary"):
            continue  # a layer without positions
        repeats = site.kind in ("attn_in", "ln1") and trial.view.sites.attn_in_before_gain
        if times != 1 and not (times and repeats):
            raise _Failure(f"{site} is passed {times} times in one run, it should be once")
        shape, expected = list(trial.seen[site].shape), _shape_of(site, trial)
        if expected is not None and shape not in expected:
            raise _Failure(f"{site} is {shape}, its shape should be {expected[0]}")
    return f"{len(trial.sites())} places are passed once, each in its shape"


def _shape_of(site: Site, trial: _Trial) -> list[list[int]] | None:
    """The shapes that a site may have; None where the model's own layout is left to it."""
    view = trial.view
    rows, n = trial.ids.shape
    if site.kind in ("q", "z"):
        return [[rows, n, view.n_heads, view.d_head]]
    if site.kind in ("k", "v"):
        return [[rows, n, view.n_key_value_heads, view.d_head]]
    if site.kind in ("attn_scores", "pattern"):
        return [[rows, view.n_heads, n, n]]
    if site.kind.startswith(("rotary", "q_", "k_")):
        return None
    shapes = [[rows, n, view.d_model]]
    return [*shapes, [1, n, view.d_model]] if site.kind == "pos_embed" else shapes


_BEFORE = (
    ("resid_pre", "attn_in"),
    ("attn_in", "q"),
    ("attn_in", "k"),
    ("q", "attn_scores"),
    ("k", "attn_scores"),
    ("q", "pattern"),
    ("k", "pattern"),
    ("q_normed", "pattern"),
    ("k_normed", "pattern"),
    ("rotary_cos", "pattern"),
    ("rotary_sin", "pattern"),
    ("pattern", "resid_post"),
    ("resid_pre", "resid_post"),
    ("mlp_out", "resid_post"),
)
"""Which place of a layer comes before which, wherever a model has both."""


def _order(trial: _Trial) -> str:
    view = trial.view
    position: dict[Site, int] = {}
    for n, site in enumerate(trial.seen.calls):
        position.setdefault(site, n)

    def require(first: Site, then: Site) -> None:
        if first in position and then in position and position[first] > position[then]:
            raise _Failure(f"{first} is passed after {then}, it should come before")

    pairs = [*_BEFORE]
    if view.scores_are_live():
        pairs += [("attn_scores", "pattern"), ("pattern", "z")]
    require(Site("embed"), Site("resid_pre", 0))
    require(Site("pos_embed"), Site("resid_pre", 0))
    require(Site("embed"), Site("pos_embed"))
    for layer in trial.layers:
        for first, then in pairs:
            require(Site(first, layer), Site(then, layer))
        for kind in ("attn_in", "q", "pattern", "resid_pre", "resid_post"):
            if layer:
                require(Site(kind, layer - 1), Site(kind, layer))
    return "places come in the order of a forward pass"


# --- weights against the run --------------------------------------------------------------


def _positions(trial: _Trial) -> str:
    view = trial.view
    view.require_learned_positions()
    seen = trial.seen[Site("pos_embed")]
    rows = view.W_pos[: trial.n_tokens].to(seen.device)[None].expand(seen.shape)
    _require_close("W_pos against the run's pos_embed", rows, seen)
    return "W_pos is what the run adds"


def _queries(trial: _Trial) -> str:
    view, worst = trial.view, 0.0
    for layer in trial.layers:
        bias = view.b_Q(layer) if view.parts.query_bias else None
        ours = _projected(trial.seen[Site("attn_in", layer)], view.W_Q(layer), bias)
        run = at_least_single(trial.seen[Site("q", layer)])
        worst = max(
            worst, _require_projection(f"attn_in W_Q + b_Q in layer {layer}", ours, run, view)
        )
    return f"attn_in W_Q + b_Q is the run's q to {worst:.1e}"


def _keys(trial: _Trial) -> str:
    view, worst = trial.view, 0.0
    each = view.n_heads // view.n_key_value_heads
    for layer in trial.layers:
        b_K = view.b_K(layer)
        n = trial.seen[Site("attn_in", layer)]
        ours = _projected(n, view.W_K(layer), b_K)
        run = at_least_single(trial.seen[Site("k", layer)]).repeat_interleave(each, dim=2)
        what = f"attn_in W_K + b_K in layer {layer}"
        worst = max(worst, _require_projection(what, ours, run, view))
        shared = _projected(n, view.key_weights(layer), None if b_K is None else b_K[::each])
        _require_projection(f"key_weights in layer {layer}", shared, run[:, :, ::each], view)
    return f"attn_in W_K + b_K is the run's k to {worst:.1e}"


def _projected(attn_in: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    weight = at_least_single(weight).to(attn_in.device)
    out = torch.einsum("bpd,hde->bphe", at_least_single(attn_in), weight)
    return out if bias is None else out + at_least_single(bias).to(out.device)


def _require_projection(what: str, ours: Tensor, run: Tensor, view: ModelView) -> float:
    """In half precision the run's values are rounded, which is known by the view's dtype."""
    half = view.dtype in (torch.float16, torch.bfloat16)
    return _require_close(
        what, ours.to(view.dtype) if half else ours, run.to(view.dtype) if half else run
    )


# --- patterns and scores ------------------------------------------------------------------


def _visible(trial: _Trial) -> str:
    view = trial.view
    mask = torch.ones_like(trial.ids, dtype=torch.bool)
    # Shares that round to 0 are none of the mask's; without queries all visible keys share.
    zero = [
        (site, lambda q, hook: torch.zeros_like(q))
        for site in (Site("q", layer) for layer in trial.layers)
        if site in trial.seen.tensors
    ]
    level = trial.run(edits=zero)
    for layer in trial.layers:
        site = Site("pattern", layer)
        pattern = torch.cat((trial.seen[site], level[site]), 1).to("cpu").float()
        visible = view.visible(layer, mask).to("cpu")
        if visible.shape != (len(mask), trial.n_tokens, trial.n_tokens):
            raise _Failure(f"visible({layer}) is {list(visible.shape)}, not [batch query key]")
        most = pattern.amax(1)
        hidden = most.masked_fill(visible, 0)
        if bool((hidden > 0).any()):
            row, query, key = (hidden == hidden.max()).nonzero()[0].tolist()
            raise _Failure(
                f"in layer {layer} query {query} gives {float(hidden.max()):.2e} to key {key}, "
                "which visible() hides"
            )
        unseen = visible & (most == 0)
        if bool(unseen.any()):
            row, query, key = unseen.nonzero()[0].tolist()
            raise _Failure(
                f"in layer {layer} query {query} gives nothing to key {key} in any head "
                f"(prompt {row}), which visible() shows"
            )
    return "queries attend to the keys that visible() shows, and to no others"


def _row_sums(trial: _Trial) -> str:
    for layer in trial.layers:
        pattern = trial.seen[Site("pattern", layer)]
        sums = at_least_single(pattern).sum(-1)
        ones = torch.ones_like(sums).to(pattern.dtype)
        what = f"rows of the pattern in layer {layer}"
        if bool((pattern < 0).any()):
            raise _Failure(f"{what}: smallest share {float(pattern.min()):.2e}")
        if trial.view.parts.sink_logits:
            if bool((sums > 1 + _tolerance(ones, live=False)).any()):
                raise _Failure(f"{what}: a sum of {float(sums.max()):.4g}, at most 1 expected")
        else:
            _require_close(f"{what} sum to 1", sums.to(pattern.dtype), ones, live=False)
    return "rows are shares" + (" beside a sink logit" if trial.view.parts.sink_logits else "")


class _Identities(IdentityReader):
    """Knows at which place it is, and so which identity fails."""

    at: str | None = None

    def read(self, site: Site, tensor: Tensor, chunk: TokenBatch) -> None:
        self.at = site.kind
        super().read(site, tensor, chunk)


def _identities(trial: _Trial) -> tuple[_Identities, IdentityError | None]:
    reader = _Identities(trial.view, tuple(trial.layers))
    try:
        stream(trial.view, trial.batch(trial.ids.tolist()), [reader])
    except IdentityError as error:
        return reader, error
    return reader, None


def _scores(trial: _Trial) -> str:
    reader, error = _identities(trial)
    if math.isnan(reader.max_error):
        raise NotApplicableError("Not applicable: the model does not show its scores")
    if error is not None and reader.at == "attn_scores":
        raise _Failure(str(error))
    return f"the terms add up to the model's scores, to {reader.max_error:.1e}"


def _patterns(trial: _Trial) -> str:
    reader, error = _identities(trial)
    if error is not None:
        raise _Failure(str(error))
    return f"softmax of the terms is the model's pattern, to {reader.pattern_error:.1e}"


# --- edits, early stops, padding ----------------------------------------------------------


def _require_reach(trial: _Trial, site: Site, edit: Callable[[Tensor], Tensor]) -> None:
    edited = trial.run(edits=[(site, lambda tensor, hook: edit(tensor))])
    later = [s for s in (Site("pattern", site.layer),) if site.kind == "q"]
    for other in (s for s in later if s in trial.seen.tensors):
        if torch.equal(edited[other], trial.seen[other]):
            raise _Failure(f"an edit of {site} leaves {other} as it was")
    if torch.equal(edited.output, trial.seen.output):
        raise _Failure(f"an edit of {site} leaves the output as it was")


def _edit_q(trial: _Trial) -> str:
    for layer in trial.layers:
        trial.seen[Site("q", layer)]
        _require_reach(trial, Site("q", layer), lambda q: q + trial.noise(q))
    return "edits of q in every layer reach pattern and output"


def _edit_pattern(trial: _Trial) -> str:
    mask = torch.ones_like(trial.ids, dtype=torch.bool)
    trial.view.require_live_scores("An edit of the pattern")
    for layer in trial.layers:
        trial.seen[Site("pattern", layer)]
        visible = trial.view.visible(layer, mask)[:, None]

        def even(pattern: Tensor, visible: Tensor = visible) -> Tensor:
            shares = (visible / visible.sum(-1, keepdim=True)).to(pattern)
            return shares.expand_as(pattern).contiguous()

        _require_reach(trial, Site("pattern", layer), even)
    return "edits of the pattern in every layer reach the output"


def _edit_residual(trial: _Trial) -> str:
    for layer in trial.layers:
        trial.seen[Site("resid_pre", layer)]
        _require_reach(trial, Site("resid_pre", layer), lambda x: x + trial.noise(x))
    return "edits of the residual stream entering every layer reach the output"


def _early_stop(trial: _Trial) -> str:
    last = trial.view.n_layers - 1
    if not last:
        raise NotApplicableError("Not applicable: the model has a single layer")
    for layer in sorted({1, (last + 1) // 2, last}):
        stopped = trial.run(stop_at_layer=layer)
        # What lies in front of the layer's first weights may still be passed.
        entry = [Site(kind, layer) for kind in ("resid_pre", "ln1", "attn_in")]
        later = [s for s in stopped.calls if s.layer is not None and s.layer >= layer]
        beyond = [site for site in later if site not in entry]
        if beyond:
            raise _Failure(f"run(ids, stop_at_layer={layer}) still passes {beyond[0]}")
        if not isinstance(stopped.output, Tensor):
            got = type(stopped.output).__name__
            raise _Failure(f"run(ids, stop_at_layer={layer}) gives a {got}, not the residual")
        if "resid_pre" in trial.view.sites.names:
            what = f"run(ids, stop_at_layer={layer}) against resid_pre of layer {layer}"
            _require_close(what, stopped.output, trial.seen[Site("resid_pre", layer)])
    return "an early stop gives the residual entering that layer"


def _padded(trial: _Trial, side: Literal["left", "right"]) -> str:
    rows = [trial.ids[0].tolist(), trial.ids[1, :-3].tolist()]
    together = trial.batch(rows, side)
    seen = trial.look(lambda: trial.view.forward(together))
    for row, ids in enumerate(rows):
        alone_batch = trial.batch([ids])
        alone = trial.look(lambda batch=alone_batch: trial.view.forward(batch))  # type: ignore[misc]
        tokens = together.mask[row]
        for layer in trial.layers:
            pattern = seen[Site("pattern", layer)][row]
            kept = pattern[:, tokens.to(pattern.device)][:, :, tokens.to(pattern.device)]
            what = f"the pattern of prompt {row} in layer {layer}, padded on the {side}"
            _require_close(what, kept, alone[Site("pattern", layer)][0], live=False)
    return f"padding on the {side} leaves the patterns of tokens as they are"


def _first_mlp(trial: _Trial) -> str:
    view = trial.view
    if not view.parts.first_mlp:
        raise NotApplicableError("Not applicable: layer 0 has no MLP")
    into = trial.seen[Site("resid_mid", 0)]
    run = trial.seen[Site("mlp_out", 0)]
    if view.parts.normalization != "none":
        into = view.first_ln2(into)
    worst = _require_close("first_mlp(first_ln2(resid_mid)) in layer 0", view.first_mlp(into), run)
    return f"MLP_0(LN2_0(resid_mid)) is the run's mlp_out to {worst:.1e}"


# --- what is left behind ------------------------------------------------------------------


@dataclass(frozen=True)
class _State:
    """What a run must leave as it was, by name."""

    values: dict[str, Any]

    @classmethod
    def of(cls, view: ModelView) -> _State:
        import numpy as np

        modules = list(view.model.modules())
        points = [m for m in modules if hasattr(m, "fwd_hooks")]
        # Not Python's own random state: run-time type checkers draw from it.
        return cls(
            {
                "weights": view.weights_hash(),
                "hooks": [
                    (len(p.fwd_hooks), len(p.bwd_hooks), len(p._forward_hooks)) for p in points
                ],
                "training flags": [module.training for module in modules],
                "requires_grad": [p.requires_grad for p in view.model.parameters()],
                "gradient mode": torch.is_grad_enabled(),
                "torch's random state": torch.get_rng_state().tolist(),
                "numpy's random state": [str(part) for part in np.random.get_state()],
            }
        )

    def unchanged(self, trial: _Trial) -> str:
        now = _State.of(trial.view).values
        changed = [name for name, value in self.values.items() if now[name] != value]
        if changed:
            raise _Failure(f"runs changed {', '.join(changed)}")
        return "weights, hooks, flags and random states are as before"


_READS = ("sizes", "run", "deterministic", "sites", "order")
_CHECKS: tuple[tuple[str, tuple[str, ...], Callable[[_Trial], str]], ...] = (
    ("sizes", (), _sizes),
    ("run", (), _run),
    ("deterministic", ("run",), _deterministic),
    ("sites", ("run",), _sites),
    ("order", ("sites",), _order),
    ("positions", _READS, _positions),
    ("queries", _READS, _queries),
    ("keys", _READS, _keys),
    ("visible keys", _READS, _visible),
    ("row sums", _READS, _row_sums),
    ("scores", (*_READS, "queries", "keys", "visible keys", "row sums"), _scores),
    ("patterns", (*_READS, "scores"), _patterns),
    ("edit of q", _READS, _edit_q),
    ("edit of pattern", _READS, _edit_pattern),
    ("edit of residual", _READS, _edit_residual),
    ("early stop", _READS, _early_stop),
    ("left padding", (*_READS, "visible keys"), lambda trial: _padded(trial, "left")),
    ("right padding", (*_READS, "visible keys"), lambda trial: _padded(trial, "right")),
    ("first MLP", _READS, _first_mlp),
)
"""Name, the checks that it builds on, and how it is asked."""
