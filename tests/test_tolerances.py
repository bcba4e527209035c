"""How far numbers may be off before they are refused: the stated formulas, and nothing wider."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from architectures import VOCAB, Sizes, transformers_model
from models import hook, tiny_gpt2
from torch import Tensor

import sinkscope as ss
from sinkscope import guard, scores
from sinkscope.attention import gain_of_norm, largest_error, pattern_tolerance, score_tolerance
from sinkscope.errors import IdentityError, NotApplicableError
from sinkscope.guard import PatternGuard

EPS = {dtype: torch.finfo(dtype).eps for dtype in (torch.float64, torch.float32, torch.bfloat16)}


@pytest.mark.parametrize("size", [0.0, 0.5, 7.0])
def test_scores_hold_to_units_of_their_precision_times_their_size(size: float) -> None:
    def at(dtype: torch.dtype, live: bool = True) -> float:
        return score_tolerance(dtype, size, live)

    factor = max(1.0, size)
    assert at(torch.float64) == 64 * EPS[torch.float64] * factor
    assert at(torch.float32) == at(torch.float64, live=False) == 64 * EPS[torch.float32] * factor
    assert at(torch.bfloat16) == at(torch.bfloat16, live=False) == 4 * EPS[torch.bfloat16] * factor


def test_patterns_hold_to_what_their_scores_and_their_softmax_round() -> None:
    visible = torch.ones(1, 1, 5, 5, dtype=torch.bool).tril()
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(1, 2, 5, 5, generator=generator, dtype=torch.float64)
    pattern = scores.masked_fill(~visible, -math.inf).softmax(-1)
    single = pattern.float().double()
    coarse = 64 * EPS[torch.float32]
    assert pattern_tolerance(1e-13, 1.0, pattern, visible) == 1e-13
    assert pattern_tolerance(1e-13, 1.0, single, visible) == coarse
    assert pattern_tolerance(1.0, 1.0, single, visible) == 1.0
    # Rows that sum to 1 exactly are told by their digits, others by their sums.
    halves = torch.full((1, 1, 1, 2), 0.5, dtype=torch.float64)
    both = torch.ones(1, 1, 1, 2, dtype=torch.bool)
    assert pattern_tolerance(1e-13, 1.0, halves, both) == coarse
    thirds = torch.tensor([1 / 3, 2 / 3], dtype=torch.float64).view(1, 1, 1, 2)
    assert pattern_tolerance(1e-13, 1.0, thirds, both) == 1e-13
    assert pattern_tolerance(1e-13, 1.0, thirds * (1 - 1e-9), both) == coarse
    assert pattern_tolerance(1e-13, 1.0, thirds * (1 + 16 * EPS[torch.float64]), both) == 1e-13
    zeros = torch.tensor([1.0, 0.0], dtype=torch.float64).view(1, 1, 1, 2)
    assert pattern_tolerance(1e-13, 1.0, zeros, both) == 1e-13
    # Padding has no say.
    padded = torch.cat((thirds, thirds * 0.9), 2)
    assert pattern_tolerance(1e-13, 1.0, padded, both.repeat(1, 1, 2, 1)) == coarse
    first = torch.tensor([[True, True], [False, False]])[None, None]
    assert pattern_tolerance(1e-13, 1.0, padded, first) == 1e-13
    assert pattern_tolerance(1e-3, 1.0, pattern.float(), visible) == 1e-3
    assert pattern_tolerance(1e-3, 1.0, pattern.bfloat16(), visible) == 1e-3
    assert pattern_tolerance(9.0, 1.0, pattern.bfloat16(), visible) == 16 * EPS[torch.bfloat16]
    # What a softmax of another precision rounds grows with the scores.
    assert pattern_tolerance(9.0, 50.0, pattern.bfloat16(), visible) == 50 * EPS[torch.bfloat16]
    assert pattern_tolerance(1e-13, 640.0, single, visible) == 10 * coarse
    assert pattern_tolerance(1e-13, 640.0, pattern, visible) == 1e-13


def test_an_error_may_be_as_large_as_its_tolerance_and_no_larger() -> None:
    errors = torch.tensor([0.5, 2.0, 1.0])
    assert largest_error(errors, 2.0, 3, "it is off", "mend it") == 2.0
    with pytest.raises(IdentityError, match=r"layer 3, head 1, it is off.*1\.99.*Got: 2\.00e\+00"):
        largest_error(errors, 1.99, 3, "it is off", "mend it")
    with pytest.raises(IdentityError, match=r"head 2, .*Got: nan"):
        largest_error(torch.tensor([0.5, 2.0, math.nan]), 9.0, 3, "it is off", "mend it")


@pytest.mark.parametrize("padding", ["left", "right"])
def test_the_terms_tolerance_is_of_the_longest_query_and_key_of_one_prompt(
    kind: str, padding: str
) -> None:
    raw = tiny_gpt2()
    model = hook(raw, kind)
    batch = ss.token_batch(model, [[3, 1, 4, 1, 5, 9, 2], [6, 5, 3]], padding=padding)
    view = ss.model_view(model)
    for layer in range(view.n_layers):
        terms = ss.decompose_scores(model, batch, layers=layer)
        largest = 0.0
        for row, mask in zip(batch.ids, batch.mask, strict=True):
            alone = ss.token_batch(model, [row[mask].tolist()])
            n = _entering(model, alone, layer)
            sizes = [
                torch.einsum("pd,hde->hpe", n, W).norm(dim=-1) + b.norm(dim=-1)[:, None]
                for W, b in (
                    (view.W_Q(layer), view.b_Q(layer)),
                    (view.W_K(layer), view.b_K(layer)),
                )
            ]
            largest = max(largest, float(sizes[0].max() * sizes[1].max()))
        expected = 64 * EPS[torch.float64] * max(1.0, largest * view.d_head**-0.5)
        assert expected > 64 * EPS[torch.float64]
        assert terms.tolerance == pytest.approx(expected, rel=1e-6, abs=0)


def tolerances_asked(monkeypatch: pytest.MonkeyPatch, module: Any) -> list[tuple[float, float]]:
    """Fills with the `of_scores` and `largest` that a module asks `pattern_tolerance` with."""
    asked: list[tuple[float, float]] = []

    def noted(of_scores: float, largest: float, pattern: Tensor, visible: Tensor) -> float:
        asked.append((of_scores, largest))
        return pattern_tolerance(of_scores, largest, pattern, visible)

    monkeypatch.setattr(module, "pattern_tolerance", noted)
    return asked


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_terms_patterns_hold_to_the_size_of_their_scores(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of queries and keys; in half precision that of the scores that are seen."""
    sizes = tolerances_asked(monkeypatch, scores)
    model = hook(tiny_gpt2(dtype=dtype), "bridge")
    terms = ss.decompose_scores(model, ss.token_batch(model, [[3, 1, 4, 1, 5]]))
    assert len(sizes) == len(terms.layers)
    for layer, (of_scores, largest) in enumerate(sizes):
        if dtype == torch.bfloat16:
            seen = terms.total[:, layer].masked_fill(~terms.visible[:, layer, None], 0)
            assert largest == pytest.approx(float(seen.abs().max()))
        else:
            assert largest > 1
            assert of_scores == pytest.approx(64 * EPS[dtype] * largest, abs=0)


def _entering(model: Any, batch: ss.TokenBatch, layer: int) -> Tensor:
    """`[pos d_model]`, what enters W_Q of one prompt: LN1 of the residual stream."""
    _, cache = model.run_with_cache(batch.ids)
    x = cache[f"blocks.{layer}.hook_resid_pre"][0]
    norm = torch.nn.functional.layer_norm
    ln = tiny_gpt2().transformer.h[layer].ln_1
    return norm(x, x.shape[-1:], ln.weight, ln.bias, ln.eps).detach()


@pytest.mark.parametrize(("seen", "hidden", "allowed"), [(100.0, 0.0, True), (0.0, 100.0, False)])
def test_in_half_precision_a_pattern_may_be_off_by_what_visible_scores_round(
    seen: float, hidden: float, allowed: bool
) -> None:
    """A share of 0.3 in the wrong place: within bfloat16's rounding of scores of 100, not of 0."""
    view = ss.model_view(hook(tiny_gpt2(dtype=torch.bfloat16), "bridge"))
    batch = ss.token_batch(view, [[1, 2, 3]])
    causal = torch.ones(3, 3, dtype=torch.bool).tril()
    scores = torch.where(causal, seen, hidden) / view.attention_scale(0)
    q = torch.zeros(1, 3, view.n_heads, view.d_head)
    q[..., :3] = scores[None, :, None, :]
    k = torch.zeros_like(q)
    k[..., :3] = torch.eye(3)[None, :, None, :]
    pattern = (causal / causal.sum(-1, keepdim=True)).repeat(1, view.n_heads, 1, 1)
    pattern[0, 1, 2, :2] += torch.tensor([0.3, -0.3])
    guard = PatternGuard(view, [0])

    def show() -> None:
        for name, tensor in (("q", q), ("k", k), ("pattern", pattern)):
            guard.read(ss.Site(name, 0), tensor.bfloat16(), batch)

    if allowed:
        show()
        return
    with pytest.raises(IdentityError, match=r"head 1, the pattern is not softmax.*Got: 3\.0"):
        show()


@pytest.mark.parametrize(
    ("name", "total", "message"),
    [
        ("gpt2", 0.8, r"layer 1, head 2, .* does not sum to 1\. .*Got: 2\.00e-01"),
        ("gpt2", 1.2, r"does not sum to 1\. .*Got: 2\.00e-01"),
        ("gpt_oss", 1.2, r"layer 1, head 2, .* does not sum to 1 or less\. .*Got: 2\.00e-01"),
        ("gpt_oss", 0.8, None),
    ],
)
def test_rows_sum_to_1_or_less_where_something_takes_the_rest(
    name: str, total: float, message: str | None
) -> None:
    view = ss.model_view(ss.load_model(transformers_model(name)))
    batch = ss.token_batch(view, [[1, 2]])
    pattern = torch.tensor([[1.0, 0.0], [0.5, 0.5]]).repeat(1, view.n_heads, 1, 1)
    pattern[0, 2, 1] *= total
    guard = PatternGuard(view, [1])
    if message is None:
        guard.read(ss.Site("pattern", 1), pattern, batch)
        return
    with pytest.raises(IdentityError, match=message):
        guard.read(ss.Site("pattern", 1), pattern, batch)


@pytest.mark.parametrize(
    ("dtype", "units"), [(torch.float64, 2**35), (torch.float32, 64), (torch.bfloat16, 16)]
)
def test_sums_of_rows_hold_to_units_of_their_precision(dtype: torch.dtype, units: int) -> None:
    """float64 to those of float32, in which many models compute their softmax."""
    view = ss.model_view(ss.load_model(transformers_model("gpt2", dtype=dtype)))
    batch = ss.token_batch(view, [[1, 2]])
    for share, passes in ((0.5, True), (2, False)):
        pattern = torch.tensor([[1.0, 0.0], [0.5, 0.5]], dtype=dtype).repeat(1, view.n_heads, 1, 1)
        pattern[0, 0, 0, 0] += share * units * torch.finfo(dtype).eps
        guard = PatternGuard(view, [0])
        if passes:
            guard.read(ss.Site("pattern", 0), pattern, batch)
            continue
        with pytest.raises(IdentityError, match="does not sum to 1"):
            guard.read(ss.Site("pattern", 0), pattern, batch)


@pytest.mark.parametrize("share", [5.0, torch.nan])
def test_what_padding_attends_to_is_no_error(share: float) -> None:
    view = ss.model_view(ss.load_model(transformers_model("gpt2")))
    batch = ss.token_batch(view, [[1, 2], [3]], padding="left")
    pattern = torch.tensor([[[1.0, 0.0], [0.5, 0.5]], [[share, 0.0], [0.0, 1.0]]])
    pattern = pattern[:, None].repeat(1, view.n_heads, 1, 1).double()
    PatternGuard(view, [0]).read(ss.Site("pattern", 0), pattern, batch)
    pattern[1, 2, 1, 1] = share
    with pytest.raises(IdentityError, match=r"layer 0, head 2, .* does not sum to 1"):
        PatternGuard(view, [0]).read(ss.Site("pattern", 0), pattern, batch)


@pytest.mark.parametrize(("dtype", "length"), [(torch.bfloat16, 400), (torch.float64, 1800)])
def test_large_position_biases_round_and_are_no_error(dtype: torch.dtype, length: int) -> None:
    """ALiBi's scores grow with the prompt, and with them what BLOOM's own softmax rounds."""
    sizes = Sizes(n_layers=1, n_heads=6, d_head=4)
    model = ss.load_model(transformers_model("bloom", dtype=dtype, sizes=sizes))
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, VOCAB, (1, length), generator=generator)
    batch = ss.token_batch(model, ids)
    terms = ss.decompose_scores(model, batch)
    narrow = 16 * EPS[torch.bfloat16] if dtype == torch.bfloat16 else 64 * EPS[torch.float32]
    assert narrow / 100 < terms.pattern_error <= terms.tolerance
    assert bool(ss.sink_score(model, batch, layers=0).isfinite().all())


def test_the_guard_adds_the_largest_position_bias_to_the_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    found = tolerances_asked(monkeypatch, guard)
    model = ss.load_model(transformers_model("bloom"))
    view = ss.model_view(model)
    batch = ss.token_batch(model, [list(range(1, 9))])
    ss.patterns(model, batch, layers=0)
    _, cache = model.run_with_cache(batch.ids)
    sizes = [cache[view.sites.hook_name(ss.Site(kind, 0))].norm(dim=-1).amax(1) for kind in "qk"]
    of_products = float((sizes[0] * sizes[1]).max()) * view.d_head**-0.5
    bias = build_alibi_tensor(batch.mask.long(), view.n_heads, torch.float64)
    assert float(bias.abs().max()) > 0.1
    expected = of_products + float(bias.abs().max())
    assert [largest for _, largest in found] == [pytest.approx(expected, abs=0)]


@pytest.mark.parametrize("size", [0.01, 1.0, 30.0])
def test_a_norm_that_takes_the_mean_off_is_no_factor_whatever_its_gain(size: float) -> None:
    view = ss.model_view(ss.load_model(transformers_model("qwen3")))
    generator = torch.Generator().manual_seed(0)
    before = torch.randn(2, 30, 4, 16, generator=generator) + 1
    before[0, 3, :, ::2] = 0  # what is 0 stays so under every factor
    gain = size * (1 + torch.rand(16, generator=generator))
    by_rms = before / before.pow(2).mean(-1, keepdim=True).sqrt() * gain
    by_std = torch.nn.functional.layer_norm(before, (16,), gain)
    rounded = by_rms * (1 + 0.02 * torch.randn(by_rms.shape, generator=generator))
    for after in (by_rms, rounded, 0 * by_rms):
        view._require_rms(before, gain_of_norm(before, after), (-1,))
    with pytest.raises(NotApplicableError, match="no RMS norms"):
        view._require_rms(before, gain_of_norm(before, by_std), (-1,))


@pytest.mark.parametrize(("error", "passes"), [(0.9, True), (1.1, False)])
def test_the_guard_holds_patterns_to_the_size_of_their_scores(error: float, passes: bool) -> None:
    """The longest query and key of a head are at different positions of one prompt."""
    view = ss.model_view(hook(tiny_gpt2(), "bridge"))
    batch = ss.token_batch(view, [[1, 2, 3], [4, 5, 6]])
    q = torch.full((2, 3, view.n_heads, view.d_head), 0.1, dtype=torch.float64)
    k = q.clone()
    q[1, 0, 1], k[1, 2, 1] = 30.0, -20.0
    q[0, 2, 1] = 40.0  # in another prompt, where keys are short
    size = view.attention_scale(0) * 30 * 20 * view.d_head
    scores = view.attention_scale(0) * torch.einsum("bqhd,bkhd->bhqk", q, k)
    causal = torch.ones(3, 3, dtype=torch.bool).tril()
    pattern = scores.masked_fill(~causal, -math.inf).softmax(-1)
    off = error * 64 * EPS[torch.float64] * size
    pattern[0, 2, 1, :2] += torch.tensor([off, -off])
    guard = PatternGuard(view, [0])

    def show() -> None:
        for name, tensor in (("q", q), ("k", k), ("pattern", pattern)):
            guard.read(ss.Site(name, 0), tensor, batch)

    if passes:
        show()
        return
    with pytest.raises(IdentityError, match="head 2, the pattern is not softmax"):
        show()
