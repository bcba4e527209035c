"""Situations 12 to 17: weights. `docs/situations.md` tells what each is about."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import attention_of, tiny_family
from models import hook, tiny_gpt2

import sinkscope as ss
from sinkscope.ablations import ZeroToken
from sinkscope.errors import IdentityError, NotApplicableError, ProcessedWeightsError
from sinkscope.model import ModelView

IDS = torch.randint(1, 40, (2, 8), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    "processing", [{"fold_ln": True}, {"center_writing_weights": True}], ids=["folded", "centred"]
)
def test_12_folded_and_centred_weights_are_refused(kind: str, processing: dict[str, bool]) -> None:
    """b_Q, W_pos and EPE change while the logits stay, so that nothing else would show it."""
    processing = {
        "fold_ln": False,
        "center_writing_weights": False,
        "center_unembed": False,
        "fold_value_biases": False,
    } | processing
    raw, processed = hook(tiny_gpt2(), kind), hook(tiny_gpt2(), kind, **processing)
    batch = ss.token_batch(raw, IDS)
    with torch.no_grad():
        torch.testing.assert_close(
            processed(IDS).log_softmax(-1), raw(IDS).log_softmax(-1), rtol=0, atol=1e-6
        )
    refused = (
        lambda: ss.extract_epe(processed),
        lambda: ss.query_bias(processed),
        lambda: ss.coordinate_alignment(processed),
        lambda: ss.epe_fidelity(processed, batch),
        lambda: ss.sink_score(processed, batch, ss.PAPER_CONDITIONS["No Query Bias"]),
        lambda: ss.sink_score(processed, batch, ss.PAPER_CONDITIONS["Swap EPE"]),
    )
    for call in refused:
        with pytest.raises(ProcessedWeightsError, match="load without weight processing"):
            call()


def test_13_weights_that_are_not_those_that_ran_are_found_out(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stale copy of W_Q, as after a change to the joint QKV matrix: scores are recomputed."""
    model = hook(tiny_gpt2(), kind)
    batch = ss.token_batch(model, IDS)
    fresh = ModelView.W_Q

    def stale(view: ModelView, layer: int) -> torch.Tensor:
        W_Q = fresh(view, layer).clone()
        if layer == 1:
            W_Q[2] *= 1.01
        return W_Q

    ss.decompose_scores(model, batch)
    monkeypatch.setattr(ModelView, "W_Q", stale)
    with pytest.raises(IdentityError, match=r"In layer 1, head 2, .*Got: \d\.\d+e-0\d"):
        ss.decompose_scores(model, batch)


def test_14_conv1d_weights_are_taken_as_in_by_out_in_the_order_q_k_v(kind: str) -> None:
    """`q = x c_attn[:, :d]`, `k = x c_attn[:, d:2d]`, by head, with biases alike."""
    hf_model = tiny_gpt2()
    joint, bias = (
        tensor.detach().clone()
        for tensor in (
            hf_model.transformer.h[1].attn.c_attn.weight,
            hf_model.transformer.h[1].attn.c_attn.bias,
        )
    )
    view = ss.model_view(hook(hf_model, kind))
    d, heads = view.d_model, view.n_heads
    W_Q, W_K, _ = (w.reshape(d, heads, view.d_head).transpose(0, 1) for w in joint.split(d, 1))
    b_Q, b_K, _ = (b.reshape(heads, view.d_head) for b in bias.split(d))
    for ours, theirs in (
        (view.W_Q(1), W_Q),
        (view.W_K(1), W_K),
        (view.b_Q(1), b_Q),
        (view.b_K(1), b_K),
    ):
        assert ours is not None
        # TransformerLens passes through float32 when it converts.
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-7)


def test_15_opts_two_extra_position_rows_are_left_out() -> None:
    """Position 0 is row 2 of OPT's table: `p_i = W_pos[i]` is what the model adds."""
    hf_model = tiny_family("opt")
    table = hf_model.model.decoder.embed_positions.weight.detach().clone()
    model = ss.load_model(hf_model)
    view = ss.model_view(model)
    assert len(table) == view.n_ctx + 2
    torch.testing.assert_close(view.W_pos, table[2:], rtol=0, atol=0)
    seen: list[torch.Tensor] = []
    name = view.hook_point(ss.Site("pos_embed")).name
    with torch.no_grad():
        model.run_with_hooks(IDS, fwd_hooks=[(name, lambda p, hook: seen.append(p.clone()))])
    torch.testing.assert_close(seen[0][0], view.W_pos[: IDS.shape[1]], rtol=0, atol=0)


@pytest.mark.parametrize("name", ["llama", "pythia"])
def test_16_what_a_model_lacks_is_not_applicable_and_never_zeros(name: str) -> None:
    """No position table where positions are rotary, and no query bias where W_Q has none."""
    model = ss.load_model(tiny_family(name))
    view, batch = ss.model_view(model), ss.token_batch(model, IDS)
    calls: list[Any] = [
        lambda: view.W_pos,
        lambda: ss.extract_epe(model),
        lambda: ss.patterns(model, batch, ss.ablations.ZeroPositions()),
        lambda: ss.patterns(model, batch, ss.ablations.SwapEPE()),
    ]
    if name == "llama":
        calls += [
            lambda: view.b_Q(0),
            lambda: ss.query_bias(model),
            lambda: ss.coordinate_alignment(model),
            lambda: ss.patterns(model, batch, ss.ablations.ZeroQueryBias()),
        ]
    for call in calls:
        with pytest.raises(NotApplicableError):
            call()


def test_17_an_edit_of_the_embedding_leaves_the_tied_unembedding_alone(kind: str) -> None:
    """`ZeroToken` is the model fed with e_0 = 0, its W_U as it was: logits by transformers."""
    hf_model = tiny_gpt2()
    assert hf_model.lm_head.weight.data_ptr() == hf_model.transformer.wte.weight.data_ptr()
    with torch.no_grad():
        embeds = hf_model.transformer.wte(IDS).clone()
        embeds[:, 0] = 0
        expected = hf_model(inputs_embeds=embeds).logits.clone()
    model = hook(hf_model, kind)
    before = ss.model_view(model).weights_hash()
    with torch.no_grad(), ZeroToken().applied(model):
        torch.testing.assert_close(model(IDS), expected, rtol=0, atol=1e-6)
    assert ss.model_view(model).weights_hash() == before


def test_families_are_transformers_own() -> None:
    """What these tests stand on: the patterns of a hooked model are those of transformers."""
    ids = IDS[:, :4]
    for name in ("opt", "llama"):
        expected = attention_of(tiny_family(name), ids)
        model = ss.load_model(tiny_family(name))
        ours = ss.patterns(model, ss.token_batch(model, ids))
        torch.testing.assert_close(ours, expected, rtol=0, atol=2e-6)
