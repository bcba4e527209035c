"""What a model lacks is said to be not applicable, in every measure and in a whole run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from architectures import IDS, attentions, random_model, transformers_model
from models import HAS_HOOKED_TRANSFORMER, ONLY_HOOKED, hook, tiny_gpt2
from torch import Tensor

import sinkscope as ss
from sinkscope.ablations import Ablation, LiftCausalMask, SwapEPE, ZeroQueryBias
from sinkscope.errors import (
    EditError,
    IdentityError,
    InvalidInputError,
    NotApplicableError,
    SinkscopeError,
)
from sinkscope.model import _hooked_rotation
from sinkscope.report import write_all

NAMES = ("gpt_neo", "opt", "pythia", "bloom", "mistral", "qwen2", "qwen3", "gemma2", "gpt_oss")


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def test_a_whole_run_lists_what_does_not_apply(name: str, tmp_path: Path) -> None:
    model = ss.load_model(transformers_model(name))
    result = ss.reproduce(model, ss.token_batch(model, IDS), out=tmp_path)
    view = ss.model_view(model)
    has = set(result.results)
    assert {"table1", "attention_maps"} <= has
    assert has | set(result.not_applicable) == {
        "table1",
        "attention_maps",
        "delta",
        "epe_fidelity",
        "coordinate_alignment",
        "epe_bias_alignment",
        "massive_activations",
        "score_terms",
    }
    missing = dict(result.table1.not_applicable)
    assert ("No Query Bias" in missing) == (not view.parts.query_bias)
    assert ("No PE" in missing) == (not view.parts.learned_positions)
    assert "No MLP" in result.table1.conditions
    assert "score_terms" in has
    assert ("delta" in has) == (name in ("opt", "bloom"))
    assert (tmp_path / "results.json").is_file()
    write_all(result, tmp_path, "cdn", None)
    page = (tmp_path / "report.html").read_text("utf-8")
    fidelity = result.epe_fidelity
    assert (fidelity is not None) == (name in ("opt", "gpt_neo"))
    assert ("epe_fidelity, block" in page) == (fidelity is not None)
    if fidelity is None:
        return
    assert fidelity.forms == ("mlp", "causal_block")
    assert set(fidelity.to_dataframe().through) == {"mlp", "causal_block"}
    assert "can't be edited" in fidelity.summary()["not_applicable"]["block"]
    for form in fidelity.forms:
        measured = ss.epe_fidelity(model, ss.token_batch(model, IDS), form).double().numpy()
        np.testing.assert_allclose(fidelity.of(form), measured, atol=1e-6)
    with pytest.raises(NotApplicableError, match=r"'block'.*mlp, causal_block.*can't be edited"):
        fidelity.of("block")
    with pytest.raises(NotApplicableError):
        ss.plots.fidelity_ribbon(fidelity, forms="block")
    assert type(fidelity).load(tmp_path / "arrays") == fidelity


def test_opt_decomposes_though_it_shows_no_scores() -> None:
    model = ss.load_model(transformers_model("opt"))
    terms = ss.decompose_scores(model, ss.token_batch(model, IDS))
    assert terms.max_error != terms.max_error  # NaN: there is nothing to compare with
    assert 0 < terms.pattern_error < 1e-5
    softmax = terms.total.masked_fill(~terms.visible[:, :, None], -torch.inf).softmax(-1)
    torch.testing.assert_close(softmax, attentions(transformers_model("opt")), rtol=0, atol=2e-6)


def test_edits_that_would_not_reach_the_output_are_refused() -> None:
    """OPT's attention is left to transformers: its score and pattern hooks fire afterwards."""
    model = ss.load_model(transformers_model("opt"))
    batch = ss.token_batch(model, IDS)
    late = Ablation.from_hook(ss.Site("pattern", 1), lambda pattern, hook: pattern * 0)
    for use in (
        lambda: ss.patterns(model, batch, late),
        lambda: late.fwd_hooks(model),
        lambda: late.applied(model).__enter__(),
    ):
        with pytest.raises(EditError, match=r"would not reach this model's output.*edit q, k"):
            use()
    with pytest.raises(NotApplicableError, match="Lifting the causal mask"):
        ss.patterns(model, batch, LiftCausalMask(0))


def test_norms_behind_the_attention() -> None:
    """BERT's positions pass a norm before its first block, so that no EPE stands for them."""
    model = ss.load_model(transformers_model("bert"))
    batch = ss.token_batch(model, IDS)
    for use in (
        lambda: ss.extract_epe(model),
        lambda: ss.query_bias(model, "effective"),
        lambda: ss.patterns(model, batch, SwapEPE()),
    ):
        with pytest.raises(NotApplicableError, match="the norm lies behind the attention"):
            use()
    if model.cfg.attention_dir != "bidirectional":  # TransformerLens 3 takes it for causal
        for measure in (ss.sink_score, ss.decompose_scores):
            with pytest.raises(IdentityError, match=r"should not see|not the model's own pattern"):
                measure(model, batch)


def test_uniform_attention_is_over_the_keys_that_are_seen() -> None:
    """12 tokens: all of them in BERT, the earlier ones in GPT-2."""
    uniform = {}
    for name in ("bert", "gpt2"):
        model = ss.load_model(transformers_model(name))
        if name == "bert" and model.cfg.attention_dir != "bidirectional":
            pytest.skip("TransformerLens 3 takes BERT for causal")
        ids = torch.arange(12)[None] % 7 + 1
        uniform[name] = ss.survey(model, ids).rows[0].uniform
    assert uniform["bert"] == pytest.approx(1 / 12)
    assert uniform["gpt2"] == pytest.approx(sum(1 / n for n in range(7, 13)) / 6)


def test_a_rotary_model_has_no_shift_that_depends_on_the_key_alone() -> None:
    model = ss.load_model(transformers_model("qwen2"))
    with pytest.raises(NotApplicableError, match="depends on the query too"):
        ss.source_agnostic_shift(model, ss.token_batch(model, IDS))


def test_opt_s_first_mlp_runs_by_itself() -> None:
    """OPT's layer holds its MLP's two maps itself: `fc2(relu(fc1(p)))`, positions from row 2."""
    hf_model = transformers_model("opt")
    layer = hf_model.model.decoder.layers[0]
    positions = hf_model.model.decoder.embed_positions.weight[2:].detach()
    with torch.no_grad():
        mlp = layer.fc2(torch.relu(layer.fc1(positions)))
    epe = ss.extract_epe(ss.load_model(hf_model))
    torch.testing.assert_close(epe.vectors, positions + mlp)


# --- GPT-2 in ways that could go wrong in silence -----------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_holds_to_its_own_tolerance(dtype: torch.dtype) -> None:
    """Below what a wrong term would make: the check can fail."""
    model = ss.load_model(tiny_gpt2(dtype=dtype))
    batch = ss.token_batch(model, IDS)
    terms = ss.decompose_scores(model, batch)
    assert 0 < terms.max_error < terms.tolerance
    assert 0 < terms.pattern_error <= 16 * torch.finfo(dtype).eps
    key = ss.Site("k", 1)
    ss.model_view(model).hook_point(key).add_hook(lambda k, hook: 3 * k)
    with pytest.raises(IdentityError, match="In layer 1"):
        ss.decompose_scores(model, batch)


def test_zeroing_the_bias_is_refused_where_folding_has_changed_it(kind: str) -> None:
    model = hook(tiny_gpt2(), kind, fold_ln=True, center_writing_weights=True)
    with pytest.raises(SinkscopeError, match=r"Zeroing the query bias is defined on raw weights"):
        ss.sink_score(model, ss.token_batch(model, IDS), ZeroQueryBias())


def test_a_hooked_model_is_not_hooked_twice(kind: str) -> None:
    model = hook(tiny_gpt2(), kind)
    with pytest.raises(InvalidInputError, match="hooked already"):
        ss.load_model(model)
    assert ss.sink_score(model, ss.token_batch(model, IDS)).isfinite().all()


@pytest.mark.parametrize("measure", [ss.sink_score, ss.sink_rate, ss.sink_position, ss.value_norms])
def test_nan_at_tokens_is_an_error(kind: str, measure: Any) -> None:
    """Also where HookedTransformer turns the NaN of its softmax into 0."""
    model = hook(tiny_gpt2(), kind)
    broken = Ablation.from_hook(ss.Site("resid_pre", 1), lambda x, hook: x * float("nan"))
    with pytest.raises(IdentityError, match=r"gives NaN in the|attends to anything"):
        measure(model, ss.token_batch(model, IDS), broken, layers=[1])
    measure(model, ss.token_batch(model, IDS), broken, layers=[0])


def test_nan_in_patterns_is_an_error() -> None:
    model = hook(tiny_gpt2(), "bridge")
    broken = Ablation.from_hook(ss.Site("resid_pre", 1), lambda x, hook: x * float("nan"))
    with pytest.raises(IdentityError, match="gives NaN in the attention"):
        ss.patterns(model, ss.token_batch(model, IDS), broken)


# --- families that differ in one thing, beside those of `CONFIGS` ---------------------------

SMALL = {
    "vocab_size": 40,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 32,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}


ADJACENT = {
    "Cohere": transformers.CohereConfig(**SMALL),
    "GLM": transformers.GlmConfig(**SMALL, head_dim=8),
    "ERNIE": transformers.Ernie4_5Config(**SMALL, head_dim=8),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ADJACENT)
def test_neighbours_that_turn_together(name: str, dtype: torch.dtype) -> None:
    """Or, where this TransformerLens turns others together, an error and no numbers."""
    model = random_model(ADJACENT[name], dtype)
    own = attentions(model)
    view = ss.model_view(ss.load_model(model))
    batch = ss.token_batch(view, IDS)
    if name == "Cohere" and HAS_HOOKED_TRANSFORMER:
        with pytest.raises(IdentityError, match="not turned as its angles are laid out"):
            ss.sink_score(view, batch)
        return
    torch.testing.assert_close(ss.patterns(view, batch), own, rtol=0, atol=1e-5)
    terms = ss.decompose_scores(view, batch)
    assert terms.max_error < 1e-5
    assert terms.pattern_error < 1e-6


def test_angles_of_another_layout_are_found_out() -> None:
    angles = torch.arange(4.0).view(1, 1, 4)
    halves, neighbours = torch.cat((angles, angles), -1), angles.repeat_interleave(2, -1)
    x = torch.randn(1, 1, 1, 8, generator=torch.Generator().manual_seed(0))
    moved = x.unflatten(-1, (4, 2)).transpose(-1, -2).flatten(-2)

    def turned(angles: Tensor, x: Tensor, **cfg: bool) -> Tensor:
        seen = {"rotary_cos": angles.cos(), "rotary_sin": angles.sin()}
        return _hooked_rotation(SimpleNamespace(**cfg), None, 8, seen)(x)

    by_halves = turned(halves, moved).unflatten(-1, (2, 4)).transpose(-1, -2).flatten(-2)
    pairs = torch.view_as_complex(x.unflatten(-1, (4, 2)))
    expected = torch.view_as_real(pairs * torch.polar(torch.ones(4), angles)).flatten(-2)
    torch.testing.assert_close(by_halves, expected)
    torch.testing.assert_close(turned(halves, x, rotary_adjacent_pairs=True), expected)
    torch.testing.assert_close(turned(neighbours, x, rotary_interleaved_cos_sin=True), expected)
    with pytest.raises(IdentityError, match="not turned as its angles are laid out"):
        turned(neighbours, x)


LATENT = {
    "moe_intermediate_size": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
UNKNOWN: dict[str, tuple[Any, str]] = {
    "DeepSeek": (
        transformers.DeepseekV3Config(**SMALL | {"num_key_value_heads": 4}, **LATENT),
        "no W_Q",
    ),
    "HunYuan": (
        transformers.HunYuanDenseV1Config(**SMALL, head_dim=8),
        "norms queries and keys after turning them",
    ),
    "MPT": (
        transformers.MptConfig(vocab_size=40, d_model=32, n_layers=2, n_heads=4, max_seq_len=32),
        "does not show its ALiBi term",
    ),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_scores_of_an_unknown_kind_are_left_out_and_patterns_are_read(name: str) -> None:
    config, reason = UNKNOWN[name]
    model = random_model(config, torch.float32)
    own = attentions(model)
    view = ss.model_view(ss.load_model(model))
    batch = ss.token_batch(view, IDS)
    if name == "HunYuan" and HAS_HOOKED_TRANSFORMER:
        pytest.skip("TransformerLens 3 norms its queries before it turns them")
    torch.testing.assert_close(ss.patterns(view, batch), own, rtol=0, atol=1e-5)
    with pytest.raises(NotApplicableError, match=reason):
        ss.decompose_scores(view, batch)
    shown = {"q", "k", "v"} & view.sites.names.keys()
    assert shown == (set() if name == "DeepSeek" else {"q", "k", "v"})
    result = ss.reproduce(view, batch)
    assert reason in result.not_applicable["score_terms"]
    assert result.score_terms is None
    assert result.table1 is not None
    (row,) = ss.survey(view, batch).rows
    assert reason in dict(row.not_applicable)["score shares"]


def test_compressed_projections_behind_norms_without_a_gain() -> None:
    """As in a model that was never trained: folding would leave such norms too."""
    config, _ = UNKNOWN["DeepSeek"]
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    view = ss.model_view(ss.load_model(model))
    assert view.parts.processed == ()
    assert bool(ss.sink_score(view, ss.token_batch(view, IDS), layers=1).isfinite().all())


def test_as_many_positions_as_key_heads() -> None:
    """Axes of one size are not one axis."""
    model = transformers_model("llama")
    short = IDS[:, : model.config.num_key_value_heads]
    view = ss.model_view(ss.load_model(transformers_model("llama")))
    ours = ss.patterns(view, ss.token_batch(view, short))
    torch.testing.assert_close(ours, attentions(model, short), rtol=0, atol=1e-6)


def test_a_first_mlp_that_gives_more_than_its_output() -> None:
    """gpt-oss' gives the scores of its router as well."""
    model = transformers_model("gpt_oss")
    x = torch.randn(1, 3, model.config.hidden_size, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected, _ = model.model.layers[0].mlp(x)
    view = ss.model_view(ss.load_model(transformers_model("gpt_oss")))
    torch.testing.assert_close(view.first_mlp(x), expected)


# --- HookedTransformer's own -----------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(
            {
                "use_local_attn": True,
                "window_size": 3,
                "attn_types": ["global", "local"],
            },
            marks=ONLY_HOOKED,
        ),
        pytest.param({"positional_embedding_type": "alibi"}, marks=ONLY_HOOKED),
    ],
    ids=["local", "alibi"],
)
def test_windows_and_alibi_of_a_hooked_transformer(options: dict[str, Any]) -> None:
    from transformer_lens import HookedTransformer, HookedTransformerConfig

    config = HookedTransformerConfig(
        n_layers=2, d_model=12, n_ctx=16, d_head=4, n_heads=3, d_vocab=40, act_fn="gelu", **options
    )
    model = HookedTransformer(config).eval()
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
    view = ss.model_view(model)
    batch = ss.token_batch(view, IDS)
    _, cache = model.run_with_cache(batch.ids)
    causal = torch.ones(IDS.shape[1], IDS.shape[1], dtype=torch.bool).tril()
    window = causal & ~causal.tril(-3) if "window_size" in options else causal
    terms = ss.decompose_scores(view, batch)
    assert terms.max_error < 1e-4
    for layer, seen in enumerate((causal, window)):
        pattern = cache[f"blocks.{layer}.attn.hook_pattern"]
        assert torch.equal(terms.visible[0, layer], seen)
        assert torch.equal((pattern > 0).all(0).all(0), seen)
        scores = cache[f"blocks.{layer}.attn.hook_attn_scores"]
        difference = (terms.total[:, layer] - scores).masked_fill(~seen, 0)
        assert float(difference.abs().max()) < 1e-4
    assert ("position_bias" in terms.terms) == ("window_size" not in options)
