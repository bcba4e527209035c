"""What a model lacks is said to be not applicable, in every measure and in a whole run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from models import hook, tiny_gpt2

import sinkscope as ss
from sinkscope.ablations import Ablation, LiftCausalMask, ZeroKeyColumns, ZeroQueryBias
from sinkscope.errors import (
    EditError,
    IdentityError,
    InvalidInputError,
    NotApplicableError,
    SinkscopeError,
)

WINDOW = 4
SIZES = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "max_position_embeddings": 32,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
GROUPED = SIZES | {"num_key_value_heads": 2}
CONFIGS: dict[str, Any] = {
    "gpt_neo": lambda: hf.GPTNeoConfig(
        vocab_size=40,
        hidden_size=16,
        num_layers=4,
        num_heads=4,
        intermediate_size=24,
        max_position_embeddings=32,
        window_size=WINDOW,
        attention_types=[[["global", "local"], 2]],
        bos_token_id=0,
        eos_token_id=0,
    ),
    "opt": lambda: hf.OPTConfig(
        vocab_size=40,
        hidden_size=16,
        word_embed_proj_dim=16,
        num_hidden_layers=4,
        num_attention_heads=4,
        ffn_dim=24,
        max_position_embeddings=32,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    ),
    "pythia": lambda: hf.GPTNeoXConfig(**SIZES),
    "bloom": lambda: hf.BloomConfig(
        vocab_size=40, hidden_size=16, n_layer=4, n_head=4, bos_token_id=0, eos_token_id=0
    ),
    "mistral": lambda: hf.MistralConfig(**GROUPED, sliding_window=WINDOW),
    "qwen2": lambda: hf.Qwen2Config(**GROUPED),
    "qwen3": lambda: hf.Qwen3Config(**GROUPED, head_dim=4),
}
IDS = torch.randint(1, 40, (3, 10), generator=torch.Generator().manual_seed(3))


def transformers_model(name: str) -> Any:
    config = CONFIGS[name]()
    config._attn_implementation = "eager"
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = hf.AutoModelForCausalLM.from_config(config).eval()
        for parameter in model.parameters():
            parameter.data += 0.2 * torch.randn_like(parameter)
    return model


def expected_attention(name: str) -> torch.Tensor:
    """`[batch layer head query key]`, from transformers alone."""
    with torch.no_grad():
        output = transformers_model(name)(IDS, output_attentions=True)
    return torch.stack(output.attentions, dim=1)


@pytest.fixture(params=list(CONFIGS))
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def test_patterns_are_transformers_own(name: str) -> None:
    model = ss.load_model(transformers_model(name))
    batch = ss.token_batch(model, IDS)
    expected = expected_attention(name)
    torch.testing.assert_close(ss.patterns(model, batch), expected, rtol=0, atol=2e-6)


def test_sink_score_leaves_out_queries_that_cannot_see_the_first_position(name: str) -> None:
    """Mean over late queries whose attention to position 0 is not cut off by a window."""
    model = ss.load_model(transformers_model(name))
    batch = ss.token_batch(model, IDS)
    attention = expected_attention(name)
    n = IDS.shape[1]
    ours = ss.sink_score(model, batch, layers=range(4))
    for layer in range(4):
        windowed = name == "mistral" or (name == "gpt_neo" and layer % 2 == 1)
        late = [q for q in range(n // 2, n) if not windowed or q < WINDOW]
        if late:
            values = attention[:, layer, :, late, 0].mean(-1)
            torch.testing.assert_close(ours[:, layer], values, rtol=0, atol=2e-6)
        else:
            assert ours[:, layer].isnan().all()


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
    assert ("score_terms" in has) == (name == "opt")
    assert ("delta" in has) == (name in ("opt", "bloom"))
    assert (tmp_path / "results.json").is_file()


@pytest.mark.parametrize(
    ("name", "feature"),
    [
        ("pythia", "positions of type 'rotary'"),
        ("qwen2", "positions of type 'rotary'"),
        ("bloom", "positions of type 'alibi'"),
    ],
)
def test_scores_that_do_not_split_say_which_feature_is_in_the_way(name: str, feature: str) -> None:
    model = ss.load_model(transformers_model(name))
    with pytest.raises(NotApplicableError, match=feature):
        ss.decompose_scores(model, ss.token_batch(model, IDS))


def test_opt_decomposes_though_it_shows_no_scores() -> None:
    model = ss.load_model(transformers_model("opt"))
    terms = ss.decompose_scores(model, ss.token_batch(model, IDS))
    assert terms.max_error != terms.max_error  # NaN: there is nothing to compare with
    assert 0 < terms.pattern_error < 1e-5
    softmax = terms.total.masked_fill(~terms.visible[:, :, None], -torch.inf).softmax(-1)
    torch.testing.assert_close(softmax, expected_attention("opt"), rtol=0, atol=2e-6)


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
    """In BERT what enters W_K is no norm's output, so no measure may take it for one."""
    config = hf.BertConfig(**{k: v for k, v in SIZES.items() if "os_" not in k})
    config._attn_implementation = "eager"
    model = ss.load_model(hf.BertForMaskedLM(config).eval())
    batch = ss.token_batch(model, IDS)
    with pytest.raises(NotApplicableError, match="norms behind the attention"):
        ss.decompose_scores(model, batch)
    with pytest.raises(NotApplicableError, match="the norm lies behind the attention"):
        ss.source_agnostic_shift(model, batch)
    with pytest.raises(EditError, match="post-LN"):
        ss.patterns(model, batch, ZeroKeyColumns([1]))
    if model.cfg.attention_dir == "bidirectional":  # TransformerLens 3 says causal, and is refused
        assert ss.sink_score(model, batch).isfinite().all()


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
