"""After any call, also one that raised: weights, hooks, flags and random state are as before."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from models import hook, tiny_gpt2

import sinkscope as ss
from sinkscope.ablations import Ablation, SwapEPE, ZeroPositions, ZeroQueryBias
from sinkscope.errors import SinkscopeError

IDS = torch.randint(1, 50, (3, 8), generator=torch.Generator().manual_seed(0))


class Boom(Exception):
    """Raised by a user's hook."""


def raising(tensor: torch.Tensor, hook: Any) -> None:
    raise Boom


def in_place(tensor: torch.Tensor, hook: Any) -> torch.Tensor:
    return tensor.mul_(0.5)


def state(model: Any) -> dict[str, Any]:
    view = ss.model_view(model)
    modules = list(model.modules())
    points = [m for m in modules if hasattr(m, "fwd_hooks")]
    return {
        "weights": view.weights_hash(),
        "hooks": [(len(p.fwd_hooks), len(p.bwd_hooks), len(p._forward_hooks)) for p in points],
        "training": [module.training for module in modules],
        "cfg": {k: v for k, v in vars(model.cfg).items() if isinstance(v, (bool, int, str))},
        "grad": torch.is_grad_enabled(),
        "requires_grad": [p.requires_grad for p in model.parameters()],
        "torch": torch.get_rng_state().tolist(),
        "numpy": [str(part) for part in np.random.get_state()],
    }


CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "extract_epe": lambda m, b: ss.extract_epe(m),
    "extract_epe_ln": lambda m, b: ss.extract_epe(m, through_ln=True),
    "fidelity_mlp": ss.epe_fidelity,
    "fidelity_block": lambda m, b: ss.epe_fidelity(m, b, "block"),
    "alignment": lambda m, b: ss.epe_bias_alignment(m, n_positions=8),
    "gamma": lambda m, b: ss.coordinate_alignment(m),
    "decompose": ss.decompose_scores,
    "delta": ss.source_agnostic_shift,
    "positions": ss.sink_position,
    "norms": lambda m, b: (ss.value_norms(m, b), ss.residual_norms(m, b)),
    "reproduce": ss.reproduce,
    **{
        f"condition {name}": lambda m, b, a=ablation: ss.patterns(m, b, a)
        for name, ablation in ss.PAPER_CONDITIONS.items()
    },
    "raises in a hook": lambda m, b: ss.patterns(
        m, b, SwapEPE() + Ablation.from_hook(ss.Site("mlp_out", 1), raising)
    ),
    "raises before it runs": lambda m, b: ss.patterns(m, b, ZeroQueryBias(layers=[99])),
    "user edits positions in place": lambda m, b: ss.patterns(
        m, b, Ablation.from_hook(ss.Site("resid_mid", 0), in_place)
    ),
}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", list(CALLS))
def test_a_call_leaves_no_trace(kind: str, name: str, training: bool) -> None:
    model = hook(tiny_gpt2(), kind)
    model.train(training)
    batch = ss.token_batch(model, IDS)
    fired = []
    model.add_hook(
        ss.model_view(model).hook_point(ss.Site("z", 0)).name, lambda z, hook: fired.append(1)
    )
    before = state(model)
    with suppress(SinkscopeError, Boom):
        CALLS[name](model, batch)
    after = state(model)
    assert [key for key in before if before[key] != after[key]] == []
    fired.clear()
    model(IDS)
    assert fired == [1]


def test_what_comes_back_shares_no_memory_with_the_weights(kind: str) -> None:
    """So that an edit of a result is no edit of the model."""
    model = hook(tiny_gpt2(), kind)
    batch = ss.token_batch(model, IDS)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    epe = ss.extract_epe(model)
    tensors = [epe.vectors, epe.positions, epe.mlp, ss.coordinate_alignment(model)]
    tensors += [ss.query_bias(model, bias) for bias in ("raw", "effective")]
    tensors += ss.decompose_scores(model, batch).terms.values()
    tensors += [ss.patterns(model, batch), ss.source_agnostic_shift(model, batch)]
    assert all(tensor.untyped_storage().data_ptr() not in weights for tensor in tensors)


def test_pythons_random_state_is_left_alone() -> None:
    """Apart, since the tests' own check of types draws from it."""
    code = (
        "import random, torch, sinkscope as ss; from models import hook, tiny_gpt2\n"
        "model = hook(tiny_gpt2(), 'bridge'); batch = ss.token_batch(model, [[1, 2, 3, 4]])\n"
        "before = random.getstate(); ss.reproduce(model, batch)\n"
        "assert random.getstate() == before"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parent)


@pytest.mark.parametrize("name", ["extract_epe", "fidelity_mlp", "gamma"])
def test_weights_only_measures_do_not_see_the_users_hooks(kind: str, name: str) -> None:
    """MLP_0(p) is a number of the weights: a user's hook inside the MLP neither fires nor acts."""
    model = hook(tiny_gpt2(), kind)
    batch = ss.token_batch(model, IDS)
    expected = CALLS[name](model, batch)
    inner = next(
        n
        for n in model.hook_dict
        if (n.startswith("blocks.0.mlp") and "out" in n) or n == "blocks.0.mlp.hook_post"
    )
    model.add_hook(inner, lambda x, hook: 0 * x)
    seen = CALLS[name](model, batch)
    for one, other in zip(_tensors(expected), _tensors(seen), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def _tensors(value: Any) -> list[torch.Tensor]:
    return [value] if isinstance(value, torch.Tensor) else [value.vectors, value.mlp]


def pattern_of(model: Any, layer: int = 2) -> tuple[list[torch.Tensor], Callable[..., None]]:
    seen: list[torch.Tensor] = []
    return seen, lambda pattern, hook: seen.append(pattern.clone())


def test_three_ways_to_run_an_ablation_agree(kind: str) -> None:
    model = hook(tiny_gpt2(), kind)
    batch = ss.token_batch(model, IDS)
    ablation = ZeroQueryBias(heads=[1]) + ZeroPositions(positions=[0, 3]) + SwapEPE()
    expected = ss.patterns(model, batch, ablation)[:, 2]
    assert not torch.allclose(expected, ss.patterns(model, batch)[:, 2])
    name = ss.model_view(model).hook_point(ss.Site("pattern", 2)).name

    seen, look = pattern_of(model)
    with ablation.applied(model):
        model.run_with_hooks(IDS, fwd_hooks=[(name, look)])
        model.run_with_hooks(IDS, fwd_hooks=[(name, look)])
        _, cache = model.run_with_cache(IDS)
        model.run_with_hooks(IDS, fwd_hooks=[(name, look)])
    model.run_with_hooks(IDS, fwd_hooks=[*ablation.fwd_hooks(model), (name, look)])
    assert len(seen) == 4
    for pattern in (*seen, cache[name]):
        torch.testing.assert_close(pattern, expected, rtol=0, atol=1e-12)

    _, cache = model.run_with_cache(IDS)
    torch.testing.assert_close(cache[name], ss.patterns(model, batch)[:, 2], rtol=0, atol=1e-12)


def test_hooks_fire_once_in_compatibility_mode() -> None:
    """A hook added under an alias is called twice there; zeroing b_Q twice would negate it."""
    plain = hook(tiny_gpt2(), "bridge")
    compatible = hook(tiny_gpt2(), "bridge", no_processing=True)
    batch = ss.token_batch(plain, IDS)
    expected = ss.patterns(plain, batch, ZeroQueryBias())[:, 1]
    assert not torch.allclose(expected, ss.patterns(plain, batch)[:, 1])
    seen, look = pattern_of(compatible)
    hooks = ZeroQueryBias().fwd_hooks(compatible)
    compatible.run_with_hooks(IDS, fwd_hooks=[*hooks, ("blocks.1.attn.hook_pattern", look)])
    torch.testing.assert_close(seen[0], expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(
        ss.patterns(compatible, batch, ZeroQueryBias())[:, 1], expected, rtol=0, atol=1e-12
    )


def test_a_users_hook_acts_on_what_sinkscope_measures(kind: str) -> None:
    """The model as the user left it is what is measured, hooks and all."""
    model = hook(tiny_gpt2(), kind)
    batch = ss.token_batch(model, IDS)
    name = ss.model_view(model).hook_point(ss.Site("resid_post", 0)).name
    halved = Ablation.from_hook(ss.Site("resid_post", 0), lambda x, hook: x / 2)
    expected = ss.patterns(model, batch, halved)
    model.add_hook(name, lambda x, hook: x / 2)
    torch.testing.assert_close(ss.patterns(model, batch), expected, rtol=0, atol=0)
