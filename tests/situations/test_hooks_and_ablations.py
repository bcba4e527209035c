"""Situations 18 to 23: hooks and ablations. `docs/situations.md` tells what each is about."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import tiny_family
from models import hook, tiny_gpt2
from own_models import toy, toy_view
from torch import Tensor

import sinkscope as ss
from sinkscope.ablations import (
    Ablation,
    ReplacePosition,
    SkipMLP,
    SwapEPE,
    ZeroKeyColumns,
    ZeroPositions,
    ZeroQueryBias,
)
from sinkscope.errors import EditError, NoEffectWarning

IDS = torch.randint(1, 40, (2, 8), generator=torch.Generator().manual_seed(2))


class Stop(Exception):
    """Raised by a user's hook."""


def name_of(model: Any, kind: str, layer: int | None = None) -> str:
    return str(ss.model_view(model).hook_point(ss.Site(kind, layer)).name)


def zero_in_place(tensor: Tensor, hook: Any) -> None:
    tensor[:, 0] = 0


@pytest.mark.parametrize("n_rows", [1, 2])
@pytest.mark.parametrize("way", ["argument", "applied", "fwd_hooks"])
def test_18_an_in_place_edit_of_positions_never_reaches_w_pos(
    kind: str, n_rows: int, way: str
) -> None:
    """Neither sinkscope's own edits nor a user's that writes into the tensor it was given.

    HookedTransformer gives a view of W_pos itself. The bridge's tensor is no part of W_pos, but
    whoever kept it before the edit has it as it was.
    """
    model = hook(tiny_gpt2(), kind)
    view, batch = ss.model_view(model), ss.token_batch(model, IDS[:n_rows])
    before, table = view.weights_hash(), view.W_pos.clone()
    kept: list[Tensor] = []
    model.add_hook(name_of(model, "pos_embed"), lambda p, hook: kept.append(p))
    expected = ss.patterns(model, batch, ZeroPositions(positions=[0]))
    for edit in (
        Ablation.from_hook(ss.Site("pos_embed"), zero_in_place),
        ReplacePosition(source=1, target=0),
        ZeroPositions(positions=[0]),
        ZeroPositions(),
    ):
        kept.clear()
        if way == "argument":
            seen = ss.patterns(model, batch, edit)
            if edit not in (ReplacePosition(source=1, target=0), ZeroPositions()):
                torch.testing.assert_close(seen, expected, rtol=0, atol=1e-12)
        elif way == "applied":
            with torch.no_grad(), edit.applied(model):
                model(batch.ids)
        else:
            with torch.no_grad():
                model.run_with_hooks(batch.ids, fwd_hooks=edit.fwd_hooks(model))
        assert view.weights_hash() == before
        torch.testing.assert_close(view.W_pos, table, rtol=0, atol=0)
        torch.testing.assert_close(
            kept[0], table[: IDS.shape[1]].expand_as(kept[0]), rtol=0, atol=0
        )


def test_19_no_hook_stays_after_an_exception(kind: str) -> None:
    """The next run is the untouched model's, and the hook points hold what they held."""
    model = hook(tiny_gpt2(), kind)
    batch = ss.token_batch(model, IDS)
    expected = ss.patterns(model, batch)
    held = [len(point._forward_hooks) for point in model.hook_dict.values()]

    def stop(tensor: Tensor, hook: Any) -> None:
        raise Stop

    broken = SwapEPE() + Ablation.from_hook(ss.Site("resid_post", 1), stop)
    with pytest.raises(Stop):
        ss.patterns(model, batch, broken)
    with pytest.raises(Stop), broken.applied(model):
        model(IDS)
    assert [len(point._forward_hooks) for point in model.hook_dict.values()] == held
    assert [len(point.fwd_hooks) for point in model.hook_dict.values()] == [0] * len(held)
    torch.testing.assert_close(ss.patterns(model, batch), expected, rtol=0, atol=0)


@pytest.mark.parametrize("inside", [False, True])
def test_20_the_users_own_hooks_still_fire_after_a_call(kind: str, inside: bool) -> None:
    """Added before a call, or inside an open `applied`: both orders."""
    model = hook(tiny_gpt2(), kind)
    batch = ss.token_batch(model, IDS)
    fired: list[str] = []

    def own(q: Tensor, hook: Any) -> None:
        fired.append("own")

    if inside:
        with ZeroQueryBias().applied(model):
            model.add_hook(name_of(model, "q", 0), own)
    else:
        model.add_hook(name_of(model, "q", 0), own)
    ss.sink_score(model, batch, ZeroQueryBias())
    ss.decompose_scores(model, batch)
    ss.extract_epe(model)
    fired.clear()
    model(IDS)
    assert fired == ["own"]


def test_21_an_edit_that_can_not_take_hold_is_refused_or_warned_of(kind: str) -> None:
    """Patterns that are hooked after the fact, sites never passed, and edits without effect."""
    after_the_fact = ss.load_model(tiny_family("opt"))
    nothing = Ablation.from_hook(ss.Site("pattern", 0), lambda pattern, hook: pattern * 0)
    with pytest.raises(EditError, match="would not reach this model's output"):
        ss.sink_score(after_the_fact, ss.token_batch(after_the_fact, IDS), nothing, layers=[1])

    model = hook(tiny_gpt2(), kind)
    batch = ss.token_batch(model, IDS)
    same = Ablation.from_hook(ss.Site("q", 0), lambda q, hook: q * 1)
    with pytest.warns(NoEffectWarning, match="q of layer 0 changed nothing"):
        ss.patterns(model, batch, same)

    never_passed = toy_view(toy("silent hook"))
    batch = ss.token_batch(never_passed, IDS % never_passed.d_vocab)
    nothing = Ablation.from_hook(ss.Site("k", 0), lambda k, hook: k * 0)
    with pytest.raises(EditError, match="k of layer 0 never took place"):
        ss.residual_norms(never_passed, batch, nothing)
    by_name = Ablation.from_hook(name_of(never_passed, "k", 0), lambda k, hook: k * 0)
    with pytest.warns(NoEffectWarning, match=r"stack\.0\.see_k was never reached"):
        ss.residual_norms(never_passed, batch, by_name)


def test_22_a_head_is_edited_before_heads_are_mixed(kind: str) -> None:
    """z_h = 0 is W_O's rows of head h = 0: the same logits, and no other head moves."""
    head, layer = 1, 1
    hf_model = tiny_gpt2()
    model = hook(hf_model, kind)
    batch, view = ss.token_batch(model, IDS), ss.model_view(model)

    def without_head(z: Tensor, hook: Any) -> Tensor:
        assert z.shape == (*IDS.shape, view.n_heads, view.d_head)
        z = z.clone()
        z[:, :, head] = 0
        return z

    with torch.no_grad(), Ablation.from_hook(ss.Site("z", layer), without_head).applied(model):
        ours = model(IDS)
    other = tiny_gpt2()
    rows = slice(head * view.d_head, (head + 1) * view.d_head)
    other.transformer.h[layer].attn.c_proj.weight.data[rows] = 0
    with torch.no_grad():
        torch.testing.assert_close(ours, other(IDS).logits, rtol=0, atol=1e-6)
    plain = ss.patterns(model, batch, layers=[0])
    for edit in (ZeroQueryBias(heads=[head]), ZeroKeyColumns([0, 5], heads=[head])):
        moved = (ss.patterns(model, batch, edit, layers=[0]) - plain).abs().amax((0, 1, 3, 4))
        assert moved[head] > 1e-3
        assert moved[[h for h in range(view.n_heads) if h != head]].max() == 0


@pytest.mark.parametrize("name", ["gpt2", "pythia", "bloom"])
def test_23_no_sum_of_parts_stands_for_the_residual_stream(name: str) -> None:
    """In parallel blocks and in BLOOM too, SkipMLP is the model whose MLP writes nothing."""
    make = tiny_gpt2 if name == "gpt2" else lambda: tiny_family(name)
    hf_model = make()
    for module_name, module in hf_model.named_modules():
        if module_name.endswith(("mlp.dense_4h_to_h", "mlp.c_proj")):
            module.weight.data.zero_()
            module.bias.data.zero_()
    silent, model = ss.load_model(hf_model), ss.load_model(make())
    expected = ss.residual_norms(silent, ss.token_batch(silent, IDS))
    batch = ss.token_batch(model, IDS)
    ours = ss.residual_norms(model, batch, SkipMLP())
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
    assert float((ours - ss.residual_norms(model, batch)).abs().max()) > 0.1


def test_23_block_fidelity_reads_the_blocks_own_output(kind: str) -> None:
    """`R - O` of the first block is a difference of its outputs, and not of parts of it."""
    hf_model = tiny_gpt2()
    with torch.no_grad():
        e = hf_model.transformer.wte(IDS)
        x = e + hf_model.transformer.wpe.weight[: IDS.shape[1]]
        mask = torch.full((IDS.shape[1], IDS.shape[1]), -torch.inf, dtype=x.dtype).triu(1)
        block = hf_model.transformer.h[0]
        outputs = [block(value, attention_mask=mask[None, None]) for value in (x, e)]
        R, O = (o[0] if isinstance(o, tuple) else o for o in outputs)  # noqa: E741
    model = hook(hf_model, kind)
    epe = ss.extract_epe(model).vectors[: IDS.shape[1]]
    expected = torch.nn.functional.cosine_similarity(epe[None], R - O, dim=-1)
    ours = ss.epe_fidelity(model, ss.token_batch(model, IDS), "causal_block")
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-6)
