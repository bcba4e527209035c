"""Situations 24 to 34: attention maths. `docs/situations.md` tells what each is about."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from families import WINDOW, attention_of, tiny_family
from models import hook, tiny_gpt2
from own_models import toy, toy_view
from torch import Tensor

import sinkscope as ss
from sinkscope import metrics
from sinkscope.ablations import Ablation, ZeroPositions, ZeroQueryBias
from sinkscope.errors import EditError, IdentityError, NotApplicableError
from sinkscope.model import ModelView

IDS = torch.randint(1, 40, (2, 8), generator=torch.Generator().manual_seed(3))


def close(ours: Tensor, theirs: Tensor, atol: float = 1e-10) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=atol)


SCALES = {
    "unscaled": {"scale_attn_weights": False},
    "by layer": {"scale_attn_by_inverse_layer_idx": True},
}

FAMILIES = ("gpt_neo", "gemma2")
"""GPT-Neo does not scale, and Gemma 2 scales by a number of its configuration."""


@pytest.mark.parametrize("name", [*SCALES, *FAMILIES])
def test_24_scores_have_the_models_own_scale_or_are_refused(kind: str, name: str) -> None:
    """`softmax(sum of terms) = pattern` by transformers, with other scales than 1/sqrt(d).

    TransformerBridge divides unscaled GPT-2's scores all the same: another model's patterns.
    """
    if name in FAMILIES and kind == "hooked":
        pytest.skip("other families are made as bridges")
    hf_model = tiny_family(name) if name in FAMILIES else tiny_gpt2(**SCALES[name])
    expected = attention_of(hf_model, IDS)
    model = ss.load_model(hf_model) if name in FAMILIES else hook(hf_model, kind)
    batch = ss.token_batch(model, IDS)
    if kind == "bridge" and name == "unscaled":
        for measure in (ss.decompose_scores, ss.patterns, ss.sink_rate):
            with pytest.raises(IdentityError, match=r"In layer 0, head \d"):
                measure(model, batch)
        return
    terms = ss.decompose_scores(model, batch)
    own = terms.total.masked_fill(~terms.visible[:, :, None], -math.inf).softmax(-1)
    close(own, expected, atol=1e-6)


@pytest.mark.parametrize("off", [1.01, 2.0])
def test_24_a_wrong_scale_is_an_error_with_layer_head_and_size(
    kind: str, off: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = hook(tiny_gpt2(), kind)
    batch = ss.token_batch(model, IDS)
    own = ModelView.attention_scale
    monkeypatch.setattr(ModelView, "attention_scale", lambda self, layer: off * own(self, layer))
    of_terms = r"In layer 0, head \d, the sum of the terms .*at most .*Got: \d\.\d+e"
    with pytest.raises(IdentityError, match=of_terms):
        ss.decompose_scores(model, batch)
    with pytest.raises(IdentityError, match=r"[Ii]n layer 0, head \d"):
        ss.sink_score(model, batch, layers=[0])


def test_25_dropout_of_train_mode_does_not_reach_a_pattern(kind: str) -> None:
    """Patterns in train mode are those in eval mode, and the model is in train mode again."""
    model = hook(tiny_gpt2(attn_pdrop=0.5, embd_pdrop=0.5, resid_pdrop=0.5), kind)
    batch = ss.token_batch(model, IDS)
    expected = ss.patterns(model, batch)
    model.train()
    close(ss.patterns(model, batch), expected)
    ss.decompose_scores(model, batch)
    assert model.training


@pytest.mark.parametrize("name", ["gpt2", "opt"])
def test_26_a_model_made_with_sdpa_gives_one_pattern_for_each_layer(name: str) -> None:
    """SDPA has no weights to give; the patterns must be those of eager attention.

    TransformerLens computes GPT-2's attention by itself, and leaves OPT's to transformers.
    """
    make = tiny_gpt2 if name == "gpt2" else lambda: tiny_family(name)
    expected = attention_of(make(), IDS)
    hf_model = make()
    hf_model.set_attn_implementation("sdpa")
    model = ss.load_model(hf_model)
    patterns = ss.patterns(model, ss.token_batch(model, IDS))
    assert patterns.shape[1] == ss.model_view(model).n_layers
    close(patterns, expected, atol=1e-6)

    never_shown = toy_view(toy("silent hook"), sites={"pattern": "stack.{layer}.see_k"})
    batch = ss.token_batch(never_shown, IDS % never_shown.d_vocab)
    for measure in (ss.patterns, ss.sink_rate, ss.decompose_scores):
        with pytest.raises(NotApplicableError, match="never shows its pattern of layer 0"):
            measure(never_shown, batch)


def test_27_what_a_query_sees_comes_from_positions_and_not_from_mask_values(kind: str) -> None:
    """The bridge writes finfo.min and HookedTransformer -inf where nothing is seen."""
    model = hook(tiny_gpt2(), kind)
    batch = ss.token_batch(model, [[1, 2, 3], [4, 5, 6, 7, 8]], padding="left")
    terms = ss.decompose_scores(model, batch)
    position = batch.position_ids
    expected = (position[:, :, None] >= position[:, None, :]) & (position[:, None, :] >= 0)
    assert torch.equal(terms.visible, expected[:, None].expand_as(terms.visible))
    assert terms.total.isfinite().all()
    assert terms.max_error < 1e-10
    seen: list[Tensor] = []
    view = ss.model_view(model)
    look = [(ss.Site("attn_scores", 0), lambda s, hook: seen.append(s.clone()))]
    with view.measuring(), view.hooks(look):
        view.forward(batch)
    assert float(seen[0].min()) < -1e30
    assert float(terms.total.abs().max()) < 1e3


def test_28_rows_without_a_key_are_left_out_and_nan_at_tokens_is_an_error(kind: str) -> None:
    """A left-padded row is masked throughout; float16 scores overflow; neither is a number."""
    for dtype in (torch.float16, torch.float32):
        model = hook(tiny_gpt2(dtype=dtype), kind)
        batch = ss.token_batch(model, [[1, 2, 3], [4, 5, 6, 7, 8]], padding="left")
        assert ss.sink_score(model, batch).isfinite().all()
    model = hook(tiny_gpt2(), kind)
    batch = ss.token_batch(model, IDS)
    broken = Ablation.from_hook(ss.Site("resid_pre", 1), lambda x, hook: x * math.nan)
    with pytest.raises(IdentityError, match=r"NaN|attends to anything"):
        ss.sink_score(model, batch, broken, layers=[1])
    large = tiny_gpt2(dtype=torch.float16)
    large.transformer.h[1].attn.c_attn.weight.data *= 500  # q.k is over 65504
    model = hook(large, kind)
    for measure in (ss.sink_score, ss.patterns):
        # HookedTransformer writes 0 where its softmax gave NaN.
        with pytest.raises(IdentityError, match=r"NaN|attends to anything|does not sum to 1"):
            measure(model, ss.token_batch(model, IDS), layers=[1])


def test_28_cosines_and_rules_do_not_leave_half_precision_for_infinity() -> None:
    """`|a| |b|` is over float16's 65504 here, and the cosine is 1 all the same."""
    a = torch.full((4,), 200.0, dtype=torch.float16)
    assert metrics.cosine(a, a).tolist() == pytest.approx(1, abs=2e-3)
    vector = torch.tensor([6e4, 1.0, 1.0, 1.0]).half()
    for rule in (ss.TopK(1), ss.MeanStd(1.0), ss.MedianRatio()):
        assert ss.find_massive_coordinates(vector, rule).coordinates == (0,)


@pytest.mark.parametrize("name", ["mistral", "gpt_neo"])
def test_29_averages_are_over_queries_that_a_sliding_window_lets_see(name: str) -> None:
    """`alpha_0` is over the first WINDOW queries; late ones that see nothing of 0 give NaN."""
    hf_model = tiny_family(name)
    expected = attention_of(hf_model, IDS)
    model = ss.load_model(hf_model)
    batch = ss.token_batch(model, IDS)
    layer = 1  # GPT-Neo's local one
    alpha = expected[:, layer, :, :WINDOW, 0].mean(-1)
    for eps in (0.2, 0.3, 0.4):
        rate = ss.sink_rate(model, batch, layers=[layer], eps=eps)
        close(rate[:, 0], (alpha > eps).float())
    assert ss.sink_score(model, batch, layers=[layer]).isnan().all()
    short = ss.token_batch(model, IDS[:, : WINDOW + 2])
    late = expected[:, layer, :, 3:WINDOW, 0].mean(-1)
    close(ss.sink_score(model, short, layers=[layer])[:, 0], late, atol=2e-6)


@pytest.mark.parametrize("name", ["gemma2", "qwen3"])
def test_30_soft_caps_and_qk_norms_are_never_taken_for_plain_scores(name: str) -> None:
    """Terms that add up to the pattern, or a refusal; and the pattern is transformers' own."""
    hf_model = tiny_family(name)
    expected = attention_of(hf_model, IDS)
    model = ss.load_model(hf_model)
    batch = ss.token_batch(model, IDS)
    close(ss.patterns(model, batch), expected, atol=2e-6)
    adds_up_or_refuses(model, batch, expected)


def adds_up_or_refuses(model: Any, batch: ss.TokenBatch, expected: Tensor) -> None:
    """No third way: the softmax of the terms is the pattern, or there are no terms."""
    try:
        terms = ss.decompose_scores(model, batch)
    except NotApplicableError:
        return
    own = terms.total.masked_fill(~terms.visible[:, :, None], -math.inf).softmax(-1)
    close(own, expected, atol=1e-5)


def test_31_shared_key_heads_are_repeated() -> None:
    """Heads 0 and 1 see key head 0, heads 2 and 3 key head 1; b_K alike."""
    hf_model = tiny_family("qwen2")
    expected = attention_of(hf_model, IDS)
    attention = hf_model.model.layers[1].self_attn
    W_K = attention.k_proj.weight.detach().clone().reshape(2, 4, 16).transpose(1, 2)
    b_K = attention.k_proj.bias.detach().clone().reshape(2, 4)
    view = ss.model_view(ss.load_model(hf_model))
    assert (view.n_heads, view.n_key_value_heads) == (4, 2)
    close(view.W_K(1), W_K[[0, 0, 1, 1]])
    ours = view.b_K(1)
    assert ours is not None
    close(ours, b_K[[0, 0, 1, 1]])
    batch = ss.token_batch(view, IDS)
    close(ss.patterns(view, batch), expected, atol=2e-6)
    adds_up_or_refuses(view, batch, expected)
    with pytest.raises(NotApplicableError, match="heads share keys"):
        ss.patterns(view, batch, ss.ablations.ZeroKeyColumns([1], heads=[0]))


def test_32_alibi_is_no_term_of_its_own_and_sink_logits_take_their_mass() -> None:
    """BLOOM's bias is not lost in silence; gpt-oss' rows sum below 1, GPT-2's may not."""
    bloom = tiny_family("bloom")
    expected = attention_of(bloom, IDS)
    model = ss.load_model(bloom)
    adds_up_or_refuses(model, ss.token_batch(model, IDS), expected)

    oss = tiny_family("gpt_oss")
    short = IDS[:, :WINDOW]
    expected = attention_of(oss, short)
    assert float(expected.sum(-1).max()) < 0.999
    model = ss.load_model(oss)
    batch = ss.token_batch(model, short)
    close(ss.patterns(model, batch), expected, atol=2e-6)
    missing = ss.missing_mass(model, batch)
    close(missing, 1 - expected.sum(-1), atol=2e-6)
    close(ss.sink_score(model, batch, layers=[0, 1]), expected[..., 2:, 0].mean(-1), atol=2e-6)


def test_32_rows_that_lose_mass_for_no_reason_are_an_error(kind: str) -> None:
    """GPT-2 has nothing that takes attention, so that a row of .9 is a mistake."""
    model = hook(tiny_gpt2(), kind)
    batch = ss.token_batch(model, IDS)
    point = ss.model_view(model).hook_point(ss.Site("pattern", 1))
    point.register_forward_hook(lambda module, inputs, pattern: 0.9 * pattern)
    for measure in (ss.patterns, ss.sink_rate, ss.missing_mass):
        with pytest.raises(IdentityError, match=r"layer 1, head \d.* sum to 1.*Got: 1\.00e-01"):
            measure(model, batch)
    means_to = Ablation.from_hook(ss.Site("pattern", 0), lambda pattern, hook: 0.7 * pattern)
    missing = ss.missing_mass(model, batch, means_to, layers=[0])
    close(missing, torch.full_like(missing, 0.3))


def test_33_cached_generation_is_refused_where_positions_count(kind: str) -> None:
    """With a cache the model gets one new token, whose column is not its position."""
    if kind == "hooked":
        pytest.skip("HookedTransformer 3.9 raises by itself where it generates with a cache")
    model = hook(tiny_gpt2(), kind)
    options = {"do_sample": False, "stop_at_eos": False, "verbose": False, "max_new_tokens": 3}
    with (
        torch.no_grad(),
        ZeroPositions(positions=[0]).applied(model),
        pytest.raises(EditError, match="cached generation"),
    ):
        model.generate(IDS[:1], use_past_kv_cache=True, **options)
    with torch.no_grad(), ZeroPositions(positions=[0]).applied(model):
        whole = model.generate(IDS[:1], use_past_kv_cache=False, **options)
    assert whole.shape[1] == IDS.shape[1] + 3
    with torch.no_grad(), ZeroQueryBias().applied(model):  # the same at every position
        cached = model.generate(IDS[:1], use_past_kv_cache=True, **options)
        again = model.generate(IDS[:1], use_past_kv_cache=False, **options)
    assert torch.equal(cached, again)


def test_34_what_a_layer_puts_out_is_read_before_the_final_norm(kind: str) -> None:
    """`ln_f(resid_post of the last layer) = hidden_states[-1]`, which is not the residual."""
    hf_model = tiny_gpt2(n_layers=1)
    with torch.no_grad():
        after_norm = hf_model(IDS, output_hidden_states=True).hidden_states[-1].clone()
    ln_f = tiny_gpt2(n_layers=1).transformer.ln_f
    model = hook(hf_model, kind)
    view, batch = ss.model_view(model), ss.token_batch(model, IDS)
    seen: list[Tensor] = []
    with view.measuring():
        with view.hooks([(ss.Site("resid_post", 0), lambda x, hook: seen.append(x.clone()))]):
            view.forward(batch)
        close(ln_f(seen[0]), after_norm, atol=1e-6)
    assert float((seen[0] - after_norm).abs().max()) > 0.1
