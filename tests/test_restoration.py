"""Sinkscope and the user's own hooks, flags and exceptions, in every order."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import hook, tiny_gpt2
from torch import Tensor

import sinkscope as ss
from sinkscope.ablations import Ablation, SwapEPE, ZeroPositions, ZeroQueryBias

IDS = torch.randint(1, 50, (3, 6), generator=torch.Generator().manual_seed(0))
EDIT = ZeroPositions([0]) + ZeroQueryBias(heads=[1])


class Stop(Exception):
    """Raised by a user's hook."""


@pytest.fixture
def model(kind: str) -> Any:
    return hook(tiny_gpt2(), kind)


@pytest.fixture
def batch(model: Any) -> ss.TokenBatch:
    return ss.token_batch(model, IDS)


def name_of(model: Any, kind: str, layer: int) -> str:
    return str(ss.model_view(model).hook_point(ss.Site(kind, layer)).name)


def hooks_of(model: Any) -> list[tuple[str, list[int], list[int]]]:
    """Each hook point's handles and functions, by identity and in order."""
    return [
        (name, [id(h) for h in m.fwd_hooks], list(m._forward_hooks))
        for name, m in model.named_modules()
        if hasattr(m, "fwd_hooks")
    ]


def flags_of(model: Any) -> list[bool]:
    roots = [model, getattr(model, "original_model", None) or model]
    return [m.training for root in roots for m in root.modules()]


def pattern_of(model: Any, ids: Tensor = IDS, layer: int = 2) -> Tensor:
    seen: list[Tensor] = []

    def look(pattern: Tensor, hook: Any) -> None:
        seen.append(pattern.clone())

    with torch.no_grad():
        model.run_with_hooks(ids, fwd_hooks=[(name_of(model, "pattern", layer), look)])
    assert len(seen) == 1
    return seen[0]


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


MEASURES: dict[str, Callable[..., Any]] = {
    "patterns": ss.patterns,
    "ablated": lambda m, b: ss.patterns(m, b, EDIT),
    "decompose": ss.decompose_scores,
    "fidelity": lambda m, b: ss.epe_fidelity(m, b, "block"),
    "delta": ss.source_agnostic_shift,
    "values": ss.value_norms,
}


@pytest.mark.parametrize("name", list(MEASURES))
@pytest.mark.parametrize("at", ["q", "attn_scores", "resid_mid"])
def test_a_users_hook_that_raises(model: Any, batch: ss.TokenBatch, name: str, at: str) -> None:
    """The user's exception comes through as it is, and nothing of sinkscope stays behind."""
    point = ss.model_view(model).hook_point(ss.Site(at, 0))
    before_user, expected = hooks_of(model), ss.patterns(model, batch)
    model.add_hook(str(point.name), _stop)
    before, flags = hooks_of(model), flags_of(model)
    assert before != before_user
    with pytest.raises(Stop):
        MEASURES[name](model, batch)
    assert hooks_of(model) == before
    assert flags_of(model) == flags
    assert torch.is_grad_enabled()
    with pytest.raises(Stop):  # still there
        model(IDS)
    model.reset_hooks()
    close(ss.patterns(model, batch), expected)


@pytest.mark.parametrize("name", list(MEASURES))
def test_a_users_hook_sees_the_users_batch_only(
    model: Any, batch: ss.TokenBatch, name: str
) -> None:
    """Each pass of a measure shows the batch to the user's hooks; no probe of other ids does."""
    shapes = []
    model.add_hook(name_of(model, "q", 0), lambda q, hook: shapes.append(tuple(q.shape[:2])))
    MEASURES[name](model, batch)
    assert shapes
    assert set(shapes) == {tuple(IDS.shape)}


def test_flags_of_each_module(model: Any, batch: ss.TokenBatch) -> None:
    """A mix of train and eval flags comes back module by module, also after an error."""
    rng = random.Random(0)
    for module in model.modules():
        module.training = rng.random() < 0.5
    flags = flags_of(model)
    assert {True, False} <= set(flags)
    expected = ss.patterns(hook(tiny_gpt2(), "bridge"), batch)
    torch.testing.assert_close(ss.patterns(model, batch), expected, rtol=0, atol=1e-6)
    assert flags_of(model) == flags
    ss.extract_epe(model, through_ln=True)
    assert flags_of(model) == flags
    with pytest.raises(Stop):
        ss.patterns(model, batch, Ablation.from_hook(ss.Site("q", 1), _stop))
    assert flags_of(model) == flags


def _stop(tensor: Tensor, hook: Any) -> None:
    raise Stop


def test_dropout_does_not_reach_a_measure(model: Any, batch: ss.TokenBatch) -> None:
    """`patterns` in train mode = `patterns` in eval mode, and twice the same."""
    expected = ss.patterns(model, batch)
    model.train()
    close(ss.patterns(model, batch), expected)
    assert model.training


def test_applied_around_the_users_runs(model: Any, batch: ss.TokenBatch) -> None:
    """The user's run_with_hooks and run_with_cache leave an open `applied` in place."""
    plain, edited = ss.patterns(model, batch)[:, 2], ss.patterns(model, batch, EDIT)[:, 2]
    assert float((plain - edited).abs().max()) > 1e-3
    fired: list[str] = []
    model.add_hook(name_of(model, "z", 1), lambda z, hook: fired.append("own"))
    before = hooks_of(model)
    with EDIT.applied(model):
        close(pattern_of(model), edited)
        _, cache = model.run_with_cache(IDS)
        close(cache[name_of(model, "pattern", 2)], edited)
        with pytest.raises(Stop):
            model.run_with_hooks(IDS, fwd_hooks=[(name_of(model, "q", 0), _stop)])
        close(pattern_of(model), edited)
        # A measure inside sees the model as it is now, and takes nothing away.
        close(ss.patterns(model, batch)[:, 2], edited)
        close(pattern_of(model), edited)
    assert hooks_of(model) == before
    close(pattern_of(model), plain)
    assert set(fired) == {"own"}
    fired.clear()
    model(IDS)
    assert fired == ["own"]


def test_applied_inside_the_users_hooks_context(model: Any, batch: ss.TokenBatch) -> None:
    """`with model.hooks(...)` outside and `applied` inside: both act, each ends alone."""
    edited = ss.patterns(model, batch, EDIT)[:, 2]
    halve = Ablation.from_hook(ss.Site("resid_mid", 1), lambda x, hook: x / 2)
    halved, both = (ss.patterns(model, batch, a)[:, 2] for a in (halve, EDIT + halve))
    own = [(name_of(model, "resid_mid", 1), lambda x, hook: x / 2)]
    before = hooks_of(model)
    with model.hooks(fwd_hooks=own):
        with EDIT.applied(model):
            close(pattern_of(model), both)
        close(pattern_of(model), halved)
        close(ss.patterns(model, batch, EDIT)[:, 2], both)
        close(pattern_of(model), halved)
    with EDIT.applied(model):
        with model.hooks(fwd_hooks=own):
            close(pattern_of(model), both)
        close(pattern_of(model), edited)
    assert hooks_of(model) == before


def test_an_exception_inside_applied(model: Any) -> None:
    """An exception in the `with` block passes through, and the edit ends with it."""
    plain, before = pattern_of(model), hooks_of(model)
    with pytest.raises(Stop), EDIT.applied(model):
        _stop(plain, None)
    assert hooks_of(model) == before
    close(pattern_of(model), plain)


def test_a_user_who_clears_all_hooks_inside(model: Any) -> None:
    """`model.reset_hooks()` within the block ends the edit early and breaks nothing."""
    plain, before = pattern_of(model), hooks_of(model)
    with EDIT.applied(model):
        model.reset_hooks()
        close(pattern_of(model), plain)
    assert hooks_of(model) == before
    close(pattern_of(model), plain)


def test_hooks_that_cannot_all_be_added(model: Any) -> None:
    """When one hook of several does not exist, those added before it go too."""
    before = hooks_of(model)
    broken = SwapEPE() + Ablation.from_hook("blocks.0.nowhere", lambda x, hook: x)
    with pytest.raises(ss.errors.InvalidInputError), broken.applied(model):
        pass
    with pytest.raises(ss.errors.InvalidInputError):
        ss.patterns(model, ss.token_batch(model, IDS), broken)
    assert hooks_of(model) == before


def test_users_edits_are_measured_before_sinkscopes(model: Any, batch: ss.TokenBatch) -> None:
    """User's hooks act first: `user(x)` and then the ablation, as in a sum in that order."""
    first = Ablation.from_hook(ss.Site("embed"), lambda e, hook: e + 1)
    then = Ablation.from_hook(ss.Site("embed"), lambda e, hook: e * e)
    expected, other = (
        ss.patterns(model, batch, first + then),
        ss.patterns(model, batch, then + first),
    )
    assert float((expected - other).abs().max()) > 1e-3
    model.add_hook(
        str(ss.model_view(model).hook_point(ss.Site("embed")).name), lambda e, hook: e + 1
    )
    close(ss.patterns(model, batch, then), expected)
