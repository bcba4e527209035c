"""Models of one's own: registered views, and a conformance suite that finds each planted fault."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from architectures import transformers_model
from models import hook, tiny_gpt2
from own_models import D_HEAD, N_HEADS, N_KEYS, VOCAB, Toy, ToyView, toy, toy_view
from torch import Tensor

import sinkscope as ss
from sinkscope import ablations as ab
from sinkscope import testing
from sinkscope.errors import ConformanceError, InvalidInputError, NotApplicableError
from sinkscope.testing import check_model_view

IDS = torch.randint(VOCAB, (3, 9), generator=torch.Generator().manual_seed(5))


def is_toy(model: Any) -> bool:
    return isinstance(model, Toy)


@pytest.fixture
def registered() -> Iterator[None]:
    unregister = ss.register_model_view(is_toy, toy_view)
    yield
    unregister()


# --- registration -------------------------------------------------------------------------


@pytest.mark.usefixtures("registered")
def test_a_registered_model_goes_into_every_function() -> None:
    model = toy()
    batch = ss.token_batch(model, IDS)
    assert isinstance(ss.model_view(model), ToyView)
    run = ss.reproduce(model, batch)
    assert not run.not_applicable
    assert len(run.results) == 8
    assert run.provenance["architecture"] == "unknown"


@pytest.mark.usefixtures("registered")
def test_what_is_measured_on_it_is_what_plain_torch_computes() -> None:
    """Patterns, Delta and ablations of the toy, written down once more without its hooks."""
    model = toy()
    batch = ss.token_batch(model, IDS)

    def pattern(shift: float, coordinates: list[int]) -> Tensor:
        x = model.words.weight[IDS] + model.places.weight[: IDS.shape[1]]
        out = []
        for layer in model.stack:
            key = layer.key.clone()
            key[:, coordinates] = 0
            q = torch.einsum("bpd,hde->bhpe", x, layer.query) + shift * layer.query_shift[:, None]
            k = torch.einsum("bpd,hde->bhpe", x, key) + layer.key_shift[:, None]
            k = k.repeat_interleave(N_HEADS // N_KEYS, 1)
            scores = q @ k.transpose(-1, -2) / D_HEAD**0.5
            later = torch.ones(9, 9, dtype=torch.bool).triu(1)
            out.append(scores.masked_fill(later, -torch.inf).softmax(-1))
            v = torch.einsum("bpd,hde->bhpe", x, layer.value)
            x = x + torch.einsum("bhpe,hed->bpd", out[-1] @ v, layer.out)
            x = x + layer.hidden(x).relu()
        return torch.stack(out, 1)

    with torch.no_grad():
        expected = [pattern(1, []), pattern(0, []), pattern(1, [2, 5])]
    measured = [
        ss.patterns(model, batch),
        ss.patterns(model, batch, ab.ZeroQueryBias()),
        ss.patterns(model, batch, ab.ZeroKeyColumns([2, 5])),
    ]
    for ours, theirs in zip(measured, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    assert not torch.allclose(expected[0], expected[1])
    assert not torch.allclose(expected[0], expected[2])
    with pytest.raises(NotApplicableError, match="share keys"):
        ss.patterns(model, batch, ab.ZeroKeyColumns([2], heads=[1]))


def test_the_latest_registration_comes_first_and_can_be_taken_back() -> None:
    model = toy()
    with pytest.raises(InvalidInputError, match="register_model_view"):
        ss.model_view(model)
    first = ss.register_model_view(is_toy, lambda m: toy_view(m, name="first"))
    second = ss.register_model_view(lambda m: type(m) is Toy, lambda m: toy_view(m, name="second"))
    try:
        assert ss.model_view(model).name == "second"
        again = ss.register_model_view(is_toy, lambda m: toy_view(m, name="again"))
        assert ss.model_view(model).name == "again"
        first()  # replaced already: takes nothing back
        assert ss.model_view(model).name == "again"
        again()
        again()
        assert ss.model_view(model).name == "second"
        view = ss.model_view(hook(tiny_gpt2(), "bridge"))
        assert type(view) is ss.ModelView
    finally:
        first()
        second()
    with pytest.raises(InvalidInputError, match="register_model_view"):
        ss.model_view(model)


def test_a_subclass_is_its_own_builder_for_a_known_shape(kind: str) -> None:
    class Halved(ss.ModelView):
        def attention_scale(self, layer: int) -> float:
            return super().attention_scale(layer) / 2

    model = hook(tiny_gpt2(), kind)
    unregister = ss.register_model_view(lambda m: m is model, Halved.of)
    try:
        view = ss.model_view(model)
        assert isinstance(view, Halved)
        found = check_model_view(model)
        assert [check.name for check in found.failures] == ["scores"]
    finally:
        unregister()
    assert check_model_view(model).ok


def boom(model: Any) -> Any:
    raise RuntimeError("boom")


@pytest.mark.parametrize(
    ("predicate", "builder", "message"),
    [
        (boom, toy_view, "predicate fails on a Toy.*RuntimeError: boom"),
        (is_toy, boom, "builder fails on this Toy.*RuntimeError: boom"),
        (is_toy, lambda m: m, "made no view of this Toy.*Got: Toy"),
        (is_toy, lambda m: None, "made no view of this Toy.*Got: NoneType"),
        (lambda m: torch.zeros(2), toy_view, "predicate fails on a Toy"),
    ],
)
def test_broken_registrations_say_so(predicate: Any, builder: Any, message: str) -> None:
    unregister = ss.register_model_view(predicate, builder)
    try:
        with pytest.raises(InvalidInputError, match=message):
            ss.sink_score(toy(), ss.token_batch(toy_view(toy()), IDS))
    finally:
        unregister()


def test_a_builders_own_refusal_comes_through() -> None:
    def refuse(model: Any) -> Any:
        raise NotApplicableError("mine is too old")

    unregister = ss.register_model_view(is_toy, refuse)
    try:
        with pytest.raises(NotApplicableError, match="mine is too old"):
            ss.model_view(toy())
    finally:
        unregister()


def test_only_functions_are_registered() -> None:
    """Without the tests' own checks of types, which refuse it first."""
    code = (
        "import sinkscope as ss\n"
        "for arguments in ((1, print), (print, None)):\n"
        "    try:\n"
        "        ss.register_model_view(*arguments)\n"
        "    except ss.SinkscopeError as error:\n"
        "        assert 'registered by two functions' in str(error)\n"
        "    else:\n"
        "        raise AssertionError(arguments)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# --- the conformance suite ----------------------------------------------------------------


def statuses(found: testing.Conformance) -> dict[str, str]:
    return {check.name: check.status for check in found.checks}


def test_a_right_view_passes_every_check() -> None:
    found = check_model_view(toy_view(toy()))
    assert found.ok, found.failures
    assert set(statuses(found).values()) == {"holds"}
    found.raise_for_failures()


@pytest.mark.parametrize("name", ["gpt2", "pythia", "llama", "qwen3", "opt"])
def test_bridges_pass(name: str) -> None:
    model = ss.load_model(transformers_model(name, dtype=torch.float32))
    found = check_model_view(model)
    assert found.ok, found.failures
    parts = ss.model_view(model).parts
    apart = {"positions"} if not parts.learned_positions else set()
    # OPT leaves attention to transformers; Pythia's MLP reads what enters the block.
    apart |= {"opt": {"scores", "edit of pattern"}, "pythia": {"first MLP"}}.get(name, set())
    assert {n for n, status in statuses(found).items() if status != "holds"} == apart


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_gpt2_passes_however_it_is_hooked(kind: str, dtype: torch.dtype) -> None:
    found = check_model_view(hook(tiny_gpt2(dtype=dtype), kind))
    assert found.ok, found.failures
    assert set(statuses(found).values()) == {"holds"}


class WrongScale(ToyView):
    def attention_scale(self, layer: int) -> float:
        return 1.0


class TransposedKeys(ToyView):
    def W_K(self, layer: int) -> Tensor:
        return super().W_K(layer).transpose(-1, -2)


class UnsharedKeys(ToyView):
    """Repeats key heads as 0 1 0 1 and not as 0 0 1 1."""

    def W_K(self, layer: int) -> Tensor:
        return self.model.stack[layer].key.detach().repeat(N_HEADS // N_KEYS, 1, 1)


class FlatQueries(ToyView):
    def W_Q(self, layer: int) -> Tensor:
        return super().W_Q(layer).flatten(1)


class NoQueryBias(ToyView):
    def b_Q(self, layer: int) -> Tensor:
        return torch.zeros_like(super().b_Q(layer))


class NoKeyBias(ToyView):
    def b_K(self, layer: int) -> Tensor | None:
        return None


class Window(ToyView):
    def window(self, layer: int) -> int | None:
        return 4 if layer == 1 else None


class OtherPositions(ToyView):
    @property
    def W_pos(self) -> Tensor:
        return super().W_pos.roll(1, 0)


class OtherMLP(ToyView):
    def first_mlp(self, x: Tensor) -> Tensor:
        return super().first_mlp(x) * 1.01


class Logits(ToyView):
    def run(self, ids: Tensor, mask: Tensor | None = None, stop_at_layer: int | None = None) -> Any:
        return (super().run(ids, mask, stop_at_layer),)


VIEWS: dict[str, tuple[type[ss.ModelView], str, str]] = {
    "wrong scale": (WrongScale, "scores", r"layer 0, head \d, the sum of the terms.*Got: \d"),
    "transposed W_K": (TransposedKeys, "keys", r"W_K \+ b_K in layer 0: off by \d.*at most"),
    "key heads in another order": (UnsharedKeys, "keys", r"in layer 0: off by"),
    "shape of W_Q": (FlatQueries, "sizes", r"W_Q\(0\) is \[4, 64\].*\[4, 8, 8\]"),
    "missing query bias": (NoQueryBias, "queries", r"W_Q \+ b_Q in layer 0: off by \d"),
    "missing key bias": (NoKeyBias, "sizes", r"b_K\(0\) is NoneType"),
    "window": (
        Window,
        "visible keys",
        r"in layer 1 query \d gives \S+ to key 0.*visible\(\) hides",
    ),
    "positions": (OtherPositions, "positions", r"W_pos against the run's pos_embed: off by \d"),
    "first MLP": (OtherMLP, "first MLP", r"in layer 0: off by \d"),
    "no tensor": (Logits, "run", "gives a tuple"),
}


@pytest.mark.parametrize("fault", list(VIEWS))
def test_a_fault_of_the_view_fails_its_check_alone(fault: str) -> None:
    kind, name, detail = VIEWS[fault]
    expect_alone(check_model_view(toy_view(toy(), kind)), name, detail)


MODELS = {
    "loud hook": ("sites", "k of layer 0 is passed 2 times in one run"),
    "silent hook": ("sites", "k of layer 0 is passed 0 times in one run"),
    "window": ("visible keys", r"query \d gives nothing to key 0 in any head .*visible\(\) shows"),
    "no shares": ("row sums", r"layer 0 sum to 1: off by 1.00e-01"),
    "hot softmax": ("patterns", "layer 0, head .*softmax of the sum"),
    "dead q": ("edit of q", "an edit of q of layer 0 leaves pattern of layer 0 as it was"),
    "dead pattern": ("edit of pattern", "pattern of layer 0 leaves the output as it was"),
    "dead residual": ("edit of residual", "resid_pre of layer 0 leaves the output as it was"),
    "no stop": ("early stop", "stop_at_layer=1.* still passes .* of layer 1"),
    "wrong stop": ("early stop", r"against resid_pre of layer 1: off by 1\.00e\+00"),
    "random": ("deterministic", r"two runs of the same tokens differ by \d"),
    "dirty random state": ("no trace", "runs changed torch's random state"),
    "dirty weights": ("no trace", "runs changed weights"),
    "dirty hooks": ("no trace", "runs changed hooks"),
}


@pytest.mark.parametrize("fault", list(MODELS))
def test_a_fault_of_the_model_fails_its_check_alone(fault: str) -> None:
    name, detail = MODELS[fault]
    expect_alone(check_model_view(toy_view(toy(fault))), name, detail)


def expect_alone(found: testing.Conformance, name: str, detail: str) -> None:
    assert [check.name for check in found.failures] == [name], found.failures
    assert re.search(detail, found.failures[0].detail), found.failures[0].detail
    for check in found.checks:
        if check.status == "not applicable":
            assert f"builds on what fails: {name}" in check.detail
    with pytest.raises(ConformanceError, match=name):
        found.raise_for_failures()


SITES: dict[str, tuple[dict[str, str], str, str]] = {
    "no such hook": ({"v": "stack.{layer}.see_v"}, "sites", "2 places do not resolve.* v of layer"),
    "wrong shape": ({"v": "stack.{layer}.see_gives"}, "sites", r"v of layer 0 is \[2, 8, 4, 8\]"),
    "wrong place": (
        {"attn_in": "stack.{layer}.see_middle"},
        "order",
        "attn_in of layer 0 is passed after",
    ),
}


@pytest.mark.parametrize("fault", list(SITES))
def test_a_fault_of_the_map_fails_its_check_alone(fault: str) -> None:
    sites, name, detail = SITES[fault]
    expect_alone(check_model_view(toy_view(toy(), sites=sites)), name, detail)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_that_is_ignored_fails(side: str) -> None:
    """A model that counts padding as tokens; causal rows padded on the right do not notice."""
    found = check_model_view(toy_view(toy("no padding")))
    failed = statuses(found)[f"{side} padding"] == "fails"
    assert failed == (side == "left")
    assert {check.name for check in found.failures} == {"left padding"}


def test_a_view_that_takes_no_padding_says_so() -> None:
    class Unpadded(ToyView):
        def run(
            self, ids: Tensor, mask: Tensor | None = None, stop_at_layer: int | None = None
        ) -> Any:
            if mask is not None:
                raise NotApplicableError("this model takes whole rows")
            return super().run(ids, mask, stop_at_layer)

    found = check_model_view(toy_view(toy(), Unpadded))
    assert found.ok
    for side in ("left", "right"):
        assert statuses(found)[f"{side} padding"] == "not applicable"


def test_right_padding_can_fail() -> None:
    class Mean(ToyView):
        """Takes the row's mean off, padding and all."""

        def run(
            self, ids: Tensor, mask: Tensor | None = None, stop_at_layer: int | None = None
        ) -> Any:
            shift = (ids[:, -1:] % 2) if mask is not None else 0
            return super().run((ids + shift) % VOCAB, mask, stop_at_layer)

    batch = ss.token_batch(toy_view(toy()), [[1] * 8, [2] * 5], padding="right")
    odd_pad = bool((batch.ids[0, -1] % 2).any())
    assert odd_pad
    found = check_model_view(toy_view(toy(), Mean), seed=2)
    assert "right padding" in [check.name for check in found.failures]


def test_a_model_that_stops_by_itself_is_not_told_to_stop_behind_its_last_layer() -> None:
    told = []

    class Telling(ToyView):
        def run(
            self, ids: Tensor, mask: Tensor | None = None, stop_at_layer: int | None = None
        ) -> Any:
            told.append(stop_at_layer)
            return super().run(ids, mask, stop_at_layer)

    view = toy_view(toy(), Telling, {"resid_post": None})
    batch = ss.token_batch(view, [[1, 2, 3]])
    assert view.forward(batch, view.n_layers - 1).shape[-1] == view.d_model
    assert view.forward(batch, view.n_layers).shape[-1] == view.d_vocab
    assert told == [view.n_layers - 1, None]


def test_a_run_that_raises_is_one_failure() -> None:
    class Broken(ToyView):
        def run(
            self, ids: Tensor, mask: Tensor | None = None, stop_at_layer: int | None = None
        ) -> Any:
            raise RuntimeError("no luck")

    found = check_model_view(toy_view(toy(), Broken))
    assert [(check.name, check.detail) for check in found.failures] == [
        ("run", "raises RuntimeError: no luck")
    ]


def test_every_check_was_seen_to_fail() -> None:
    planted = {name for _, name, _ in VIEWS.values()} | {name for name, _ in MODELS.values()}
    planted |= {name for _, name, _ in SITES.values()} | {"left padding", "right padding"}
    assert planted == set(statuses(check_model_view(toy_view(toy()))))


def test_a_model_without_scores_or_residual_hooks_is_still_checked() -> None:
    view = toy_view(toy())
    names = dict(view.sites.names)
    for kind in ("attn_scores", "resid_pre", "resid_mid"):
        del names[kind]
    view = replace(view, sites=replace(view.sites, names=names))
    found = statuses(check_model_view(view))
    apart = {"scores", "edit of residual", "first MLP"}
    assert {name for name, status in found.items() if status != "holds"} == apart
    assert {found[name] for name in apart} == {"not applicable"}
    terms = ss.decompose_scores(view, ss.token_batch(view, IDS))
    assert terms.max_error != terms.max_error
    assert terms.pattern_error < 1e-12


@pytest.mark.parametrize("kind", ["q", "k"])
def test_patterns_that_can_t_be_made_anew_are_read_all_the_same(kind: str) -> None:
    view = toy_view(toy())
    names = {name: hook for name, hook in view.sites.names.items() if name != kind}
    less = replace(view, sites=replace(view.sites, names=names))
    batch = ss.token_batch(view, IDS)
    assert torch.equal(ss.patterns(less, batch), ss.patterns(view, batch))


def test_what_it_gives_back() -> None:
    found = check_model_view(toy_view(toy(), WrongScale))
    frame = found.to_dataframe()
    assert list(frame.columns) == ["name", "status", "detail"]
    assert list(frame["status"]).count("fails") == 1
    assert "1 fails" in found._repr_html_()
    assert "scores: fails. In layer 0" in str(found)
    assert testing.check_model_view is ss.testing.check_model_view  # type: ignore[attr-defined]


@pytest.mark.parametrize("options", [{"n_tokens": 3}, {"n_tokens": 17}, {"n_tokens": True}])
def test_lengths_that_the_model_does_not_have(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError, match="n_tokens from 4 to 16"):
        check_model_view(toy_view(toy()), **options)


def test_the_suite_leaves_the_users_hooks_and_random_state() -> None:
    model = toy()
    calls: list[int] = []
    model.see_word.add_hook(lambda x, hook: calls.append(1))
    model.train()
    before = torch.get_rng_state()
    assert check_model_view(toy_view(model)).ok
    assert torch.equal(before, torch.get_rng_state())
    assert all(module.training for module in model.modules())
    calls.clear()
    model(IDS)
    assert calls == [1]
