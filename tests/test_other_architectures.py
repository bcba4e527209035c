"""What a model lacks is said to be not applicable, in every measure and in a whole run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from architectures import IDS, attentions, transformers_model
from models import hook, tiny_gpt2

import sinkscope as ss
from sinkscope.ablations import Ablation, LiftCausalMask, SwapEPE, ZeroQueryBias
from sinkscope.errors import (
    EditError,
    IdentityError,
    InvalidInputError,
    NotApplicableError,
    SinkscopeError,
)
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
