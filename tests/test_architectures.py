"""Every architecture against transformers: patterns, scores, their terms, and ablations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from architectures import (
    CONFIGS,
    IDS,
    WINDOW,
    WINDOWED,
    attentions,
    layers_of,
    scores_by_transformers,
    spied,
    transformers_model,
)
from torch import Tensor
from transformers.models.gptj import modeling_gptj

import sinkscope as ss
from sinkscope import ablations as ab
from sinkscope.errors import NotApplicableError

BIASED = ("gpt2", "distilgpt2", "opt", "pythia", "bloom", "qwen2", "phi", "gpt_oss", "bert")
"""Which have b_Q and b_K, by their authors."""
SINGLE = {"gpt_neo", "gptj", "gpt_oss", "bloom", "pythia"}
"""Parts of these compute in float32 whatever the dtype of their weights."""
BIDIRECTIONAL = ("bert",)


@pytest.fixture(params=list(CONFIGS))
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def loaded(name: str, dtype: torch.dtype | None = None) -> Any:
    """A model, if this TransformerLens hooks it: 3 says that BERT is causal, see other tests."""
    model = ss.load_model(transformers_model(name, dtype=dtype))
    if name in BIDIRECTIONAL and model.cfg.attention_dir != "bidirectional":
        pytest.skip("this TransformerLens takes BERT for a causal model")
    return model


def visible_keys(name: str, layer: int) -> Tensor:
    """`[query key]`, by the papers of the architectures."""
    n = IDS.shape[1]
    if name in BIDIRECTIONAL:
        return torch.ones(n, n, dtype=torch.bool)
    causal = torch.ones(n, n, dtype=torch.bool).tril()
    windowed = name in WINDOWED and WINDOWED[name](layer)
    return causal & ~causal.tril(-WINDOW) if windowed else causal


def close(ours: Tensor, theirs: Tensor, name: str, atol: float = 2e-12) -> None:
    atol = 2e-5 if name in SINGLE else atol
    torch.testing.assert_close(ours.double(), theirs.double(), rtol=0, atol=atol)


def test_patterns_are_transformers_own(name: str) -> None:
    model = loaded(name)
    ours = ss.patterns(model, ss.token_batch(model, IDS))
    torch.testing.assert_close(ours, attentions(transformers_model(name)), rtol=0, atol=1e-6)


def test_visible_keys_are_those_of_the_architecture(name: str) -> None:
    model = loaded(name)
    view = ss.model_view(model)
    batch = ss.token_batch(model, IDS)
    for layer in range(view.n_layers):
        assert torch.equal(view.visible(layer, batch.mask)[0], visible_keys(name, layer))
    own = attentions(transformers_model(name))
    for layer in range(view.n_layers):
        assert torch.equal(own[:, layer].amax((0, 1)) > 0, visible_keys(name, layer))


def test_the_terms_add_up_to_transformers_scores(name: str) -> None:
    """In every visible pair, against the products that transformers' own attention makes."""
    model = loaded(name)
    terms = ss.decompose_scores(model, ss.token_batch(model, IDS))
    assert set(terms.terms) == {"content"} | (
        {"query_bias", "key_bias", "bias_bias"} if name in BIASED else set()
    ) | ({"position_bias"} if name == "bloom" else set()) | (
        {"soft_cap"} if name == "gemma2" else set()
    )
    assert terms.pattern_error <= terms.tolerance < 1e-3
    if name == "gptj" and not hasattr(modeling_gptj, "ALL_ATTENTION_FUNCTIONS"):
        pytest.skip("GPT-J of older transformers takes no attention function from others")
    for layer, scores in enumerate(scores_by_transformers(spied(name))):
        seen = visible_keys(name, layer)
        close(terms.total[:, layer][..., seen], scores[..., seen], name)


def test_the_bias_terms_are_what_zeroed_biases_take_away(name: str) -> None:
    """Transformers' scores without b_Q, without b_K and without both, layer by layer."""
    model = loaded(name)
    terms = ss.decompose_scores(model, ss.token_batch(model, IDS))
    if name not in BIASED:
        for missing in ("query_bias", "key_bias", "bias_bias"):
            with pytest.raises(NotApplicableError, match="this model has no"):
                getattr(terms, missing)
        return
    view = ss.model_view(model)
    for layer in range(view.n_layers):
        without = {}
        for which in ("q", "k", "qk"):
            other = spied(name)
            zero_biases(other, layer, which)
            without[which] = scores_by_transformers(other)[layer]
        seen = visible_keys(name, layer)
        full = terms.total[:, layer]
        expected = {
            "q": full - terms.query_bias[:, layer] - terms.bias_bias[:, layer],
            "k": full - terms.key_bias[:, layer] - terms.bias_bias[:, layer],
            "qk": terms.content[:, layer],
        }
        if name == "bloom":
            expected["qk"] = expected["qk"] + terms.position_bias[:, layer]
        for which, ours in expected.items():
            close(ours[..., seen], without[which][..., seen], name)
            assert (full - ours)[..., seen].abs().max() > 1e-2


@torch.no_grad()
def zero_biases(model: Any, layer: int, which: str) -> None:
    """Zero b_Q and/or b_K of one layer in transformers' weights."""
    for name, module in layers_of(model)[layer].named_modules():
        last = name.rsplit(".", 1)[-1]
        if last in ("c_attn", "query_key_value"):
            heads = model.config.num_attention_heads
            # GPT-2 keeps all queries, then all keys; the others keep both head by head.
            shape = (3, -1) if last == "c_attn" else (heads, 3, -1)
            parts = module.bias.view(*shape)
            for letter in which:
                parts.select(0 if last == "c_attn" else 1, "qk".index(letter)).zero_()
        for letter in which:
            if last in (f"{letter}_proj", {"q": "query", "k": "key"}[letter]):
                module.bias.zero_()


def test_the_effective_bias_is_what_the_norm_gives_every_query(name: str) -> None:
    """`b_Q + beta W_Q`: the terms still add up, and the query bias moves by beta's share."""
    model = loaded(name)
    view = ss.model_view(model)
    batch = ss.token_batch(model, IDS)
    if name in BIDIRECTIONAL or view.parts.normalization == "RMS":
        with pytest.raises(NotApplicableError, match=r"effective query bias|gains nothing"):
            ss.decompose_scores(model, batch, bias="effective")
        return
    raw = ss.decompose_scores(model, batch)
    effective = ss.decompose_scores(model, batch, bias="effective")
    assert effective.bias_kind == "effective"
    close(effective.total, raw.total, name)
    if view.parts.positions == "rotary":
        return
    for layer in range(view.n_layers):
        bias = view.ln1_bias(layer) @ view.W_Q(layer)
        if name in BIASED:
            bias = bias + view.b_Q(layer)
        keys = torch.einsum("bpd,hde->bhpe", attn_in(model, layer), view.W_K(layer))
        expected = view.attention_scale(layer) * torch.einsum("he,bhke->bhk", bias, keys)
        close(effective.query_bias[:, layer, :, 0], expected, name)


def attn_in(model: Any, layer: int) -> Tensor:
    """What the first norm of a layer gives, from the norm's own module."""
    _, cache = model.run_with_cache(IDS)
    return cache[f"blocks.{layer}.ln1.hook_out"]


# --- ablations against edits of transformers' weights -------------------------------------


@contextmanager
def outputs_set_to(modules: list[Any], value: float) -> Iterator[None]:
    def overwrite(module: Any, args: Any, out: Any) -> Any:
        first = out[0] if isinstance(out, tuple) else out
        new = torch.full_like(first, value)
        return (new, *out[1:]) if isinstance(out, tuple) else new

    handles = [module.register_forward_hook(overwrite) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def check(name: str, ablation: ab.Ablation, expected: Tensor) -> None:
    model = loaded(name)
    batch = ss.token_batch(model, IDS)
    changed = ss.patterns(model, batch, ablation)
    assert (changed - ss.patterns(model, batch)).abs().max() > 1e-3
    torch.testing.assert_close(changed.double(), expected.double(), rtol=0, atol=2e-6)


def test_zero_query_bias(name: str) -> None:
    if name not in BIASED:
        model = loaded(name)
        with pytest.raises(NotApplicableError, match="no query bias"):
            ss.patterns(model, ss.token_batch(model, IDS), ab.ZeroQueryBias())
        return
    other = transformers_model(name)
    for layer in range(other.config.num_hidden_layers):
        zero_biases(other, layer, "q")
    check(name, ab.ZeroQueryBias(), attentions(other))


def test_skip_mlp(name: str) -> None:
    """The MLP's last map gives 0 in transformers."""
    other = transformers_model(name)
    last = ("mlp.c_proj", "fc2", "dense_4h_to_h", "fc_out", "down_proj", "mlp.experts")
    if name == "gpt_neo":
        last = ("mlp.c_proj",)
    modules = [m for n, m in layers_of(other).named_modules() if n.endswith(last)]
    if name == "bert":
        modules = [layer.output.dense for layer in layers_of(other)]
    assert len(modules) == other.config.num_hidden_layers
    with outputs_set_to(modules, 0):
        expected = attentions(other)
    check(name, ab.SkipMLP(), expected)


def test_zero_token(name: str) -> None:
    """The first token's embedding is 0 in transformers."""
    other = transformers_model(name)
    embedding = other.get_input_embeddings()

    def zero_first(module: Any, args: Any, out: Tensor) -> Tensor:
        out = out.clone()
        out[:, 0] = 0
        return out

    with_handle = embedding.register_forward_hook(zero_first)
    expected = attentions(other)
    with_handle.remove()
    check(name, ab.ZeroToken(position=0), expected)


def test_zero_key_columns(name: str) -> None:
    """Columns of the key weights are 0 in transformers; keys that heads share lose them too."""
    coordinates = [1, 5, 11]
    other = transformers_model(name)
    with torch.no_grad():
        for n, module in layers_of(other).named_modules():
            last = n.rsplit(".", 1)[-1]
            if last in ("k_proj", "key"):
                module.weight[:, coordinates] = 0
            elif last == "c_attn":
                module.weight[coordinates, 16:32] = 0
            elif last == "query_key_value":
                module.weight.view(4, 3, -1, 16)[:, 1, :, coordinates] = 0
    check(name, ab.ZeroKeyColumns(coordinates), attentions(other))


@pytest.mark.parametrize("which", ["zero", "replace"])
def test_positions(name: str, which: str) -> None:
    ablation = ab.ZeroPositions() if which == "zero" else ab.ReplacePosition(source=1, target=0)
    if name not in ("gpt2", "distilgpt2", "opt", "gpt_neo", "bert"):
        model = loaded(name)
        with pytest.raises(NotApplicableError, match="no learned position"):
            ss.patterns(model, ss.token_batch(model, IDS), ablation)
        return
    other = transformers_model(name)
    tables = [p for n, p in other.named_parameters() if "wpe" in n or "position" in n]
    offset = 2 if name == "opt" else 0
    with torch.no_grad():
        if which == "zero":
            tables[0].zero_()
        else:
            tables[0][offset] = tables[0][offset + 1]
    check(name, ablation, attentions(other))


# --- metrics ------------------------------------------------------------------------------


def test_sink_score_leaves_out_queries_that_cannot_see_the_first_position(name: str) -> None:
    model = loaded(name)
    n_layers = ss.model_view(model).n_layers
    ours = ss.sink_score(model, ss.token_batch(model, IDS), layers=range(n_layers))
    own = attentions(transformers_model(name))
    n = IDS.shape[1]
    for layer in range(n_layers):
        seen = visible_keys(name, layer)[:, 0]
        late = [q for q in range(n // 2, n) if seen[q]]
        if late:
            expected = own[:, layer, :, late, 0].mean(-1)
            torch.testing.assert_close(ours[:, layer], expected, rtol=0, atol=2e-6)
        else:
            assert ours[:, layer].isnan().all()


def test_received_attention_counts_the_queries_that_can_see_a_key(name: str) -> None:
    model = loaded(name)
    own = attentions(transformers_model(name))
    ours = ss.sink_position(model, ss.token_batch(model, IDS))
    for layer in range(ss.model_view(model).n_layers):
        counts = visible_keys(name, layer).sum(0)
        expected = (own[:, layer].sum(2) / counts).argmax(-1)
        assert torch.equal(ours[:, layer], expected)


def test_left_padding_changes_nothing(name: str) -> None:
    model = loaded(name, torch.float32)
    rows = [IDS[0].tolist(), IDS[1, :7].tolist()]
    layers = range(ss.model_view(model).n_layers)
    padded = ss.token_batch(model, rows, padding="left")
    ours = ss.sink_score(model, padded, layers=layers)
    terms = ss.decompose_scores(model, padded)
    assert terms.pattern_error <= terms.tolerance < 1e-3
    for row, ids in enumerate(rows):
        alone = ss.sink_score(model, ss.token_batch(model, [ids]), layers=layers)
        torch.testing.assert_close(ours[row], alone[0], rtol=0, atol=1e-5, equal_nan=True)
