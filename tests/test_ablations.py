"""Ablations by hook against the same edit in the weights of a copy of the model, in float64."""

from __future__ import annotations

import copy
import dataclasses
import functools
import random
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from models import close, exact_gpt2, hook, shared_model
from torch import Tensor, nn

import sinkscope as ss
from sinkscope import ablations
from sinkscope.ablations import (
    Ablation,
    Composition,
    LiftCausalMask,
    ReplacePosition,
    SkipMLP,
    SwapEPE,
    SwapPE,
    ZeroKeyColumns,
    ZeroPositions,
    ZeroQueryBias,
    ZeroRandomKeyColumns,
    ZeroToken,
    _overflows,
    unit_vector,
    within_range,
)
from sinkscope.errors import EditError, InvalidInputError, NoEffectWarning
from sinkscope.mitigations import (
    CalibrateAttention,
    ClampActivations,
    OffByOneSoftmax,
    ScaleEPE,
    ScaleKeyColumns,
    ScaleQueryBias,
    SetActivations,
    ShuffledQueryBias,
    SinkLogit,
    SwitchOffHeads,
    WindowedAttention,
)

N_LAYERS, N_HEADS, D_HEAD, N_CTX, LENGTH = 3, 3, 4, 7, 6
D_MODEL = N_HEADS * D_HEAD

pytestmark = pytest.mark.filterwarnings("error::sinkscope.errors.NoEffectWarning")


BASE = exact_gpt2(n_ctx=N_CTX)
IDS = torch.randint(0, 50, (3, LENGTH), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def model(kind: str) -> Any:
    return shared_model(kind, n_ctx=N_CTX)


@pytest.fixture
def batch(model: Any) -> ss.TokenBatch:
    return ss.token_batch(model, IDS)


class PerPosition(nn.Module):
    """Copies of a module, one for each position, so that weights can be edited at one alone."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.copies = nn.ModuleList(copy.deepcopy(module) for _ in range(N_CTX))

    def forward(self, x: Tensor) -> Tensor:
        parts = [self.copies[i](x[:, i : i + 1]) for i in range(x.shape[1])]
        return torch.cat(parts, dim=1)


class Edited:
    """A copy of the transformers model, whose weights the methods edit."""

    def __init__(self) -> None:
        self.hf = copy.deepcopy(BASE)
        self.transformer = self.hf.transformer
        for block in self.transformer.h:
            block.attn.c_attn = PerPosition(block.attn.c_attn)
            block.mlp = PerPosition(block.mlp)

    @torch.no_grad()
    def patterns(self, ids: Tensor = IDS) -> Tensor:
        return torch.stack(self.hf(ids, output_attentions=True).attentions, 1)

    def _c_attn(self, layers: Any, positions: Any) -> Iterable[Any]:
        for layer in range(N_LAYERS) if layers is None else layers:
            for i in range(N_CTX) if positions is None else positions:
                yield layer, self.transformer.h[layer].attn.c_attn.copies[i]

    @staticmethod
    def _columns(which: str, head: int) -> slice:
        start = "qkv".index(which) * D_MODEL + head * D_HEAD
        return slice(start, start + D_HEAD)

    def query_bias(self, layers: Any = None, heads: Any = None, positions: Any = None) -> None:
        for _, c_attn in self._c_attn(layers, positions):
            for head in range(N_HEADS) if heads is None else heads:
                c_attn.bias.data[self._columns("q", head)] = 0

    def key_columns(
        self,
        coordinates: Any,
        layers: Any = None,
        heads: Any = None,
        positions: Any = None,
    ) -> None:
        for layer, c_attn in self._c_attn(layers, positions):
            rows = coordinates[layer] if isinstance(coordinates, dict) else coordinates
            for head in range(N_HEADS) if heads is None else heads:
                for d in rows:
                    c_attn.weight.data[d, self._columns("k", head)] = 0

    def skip_mlp(self, layers: Any = None, positions: Any = None) -> None:
        for layer in range(N_LAYERS) if layers is None else layers:
            for i in range(N_CTX) if positions is None else positions:
                c_proj = self.transformer.h[layer].mlp.copies[i].c_proj
                c_proj.weight.data.zero_()
                c_proj.bias.data.zero_()

    def replace_position(self, source: int, target: int) -> None:
        W_pos = self.transformer.wpe.weight.data
        W_pos[target] = W_pos[source].clone()

    def zero_positions(self, positions: Any = None) -> None:
        W_pos = self.transformer.wpe.weight.data
        for i in range(N_CTX) if positions is None else positions:
            W_pos[i] = 0

    def zero_token(self, position: int) -> None:
        def null(module: nn.Module, inputs: Any, out: Tensor) -> Tensor:
            out = out.clone()
            out[:, position] = 0
            return out

        self.transformer.wte.register_forward_hook(null)

    def swap(self, through_mlp: bool) -> None:
        """`m_0 += a (u_1 - u_0)`, `m_1 += a (u_0 - u_1)`, `a = m_0.u_0`, row by row."""
        p = BASE.transformer.wpe.weight.detach()[:2]
        if through_mlp:
            with torch.no_grad():
                p = p + BASE.transformer.h[0].mlp(p[None])[0]
        u = [row / float((row * row).sum()) ** 0.5 for row in p]

        def exchange(module: nn.Module, inputs: Any, m: Tensor) -> Tensor:
            out = m.clone()
            for row in range(len(m)):
                a = sum(float(x) * float(y) for x, y in zip(m[row, 0], u[0], strict=True))
                out[row, 0] = m[row, 0] + a * u[1] - a * u[0]
                out[row, 1] = m[row, 1] + a * u[0] - a * u[1]
            return out

        self.transformer.h[0].mlp.register_forward_hook(exchange)


def top3() -> list[int]:
    p = BASE.transformer.wpe.weight.detach()[:1]
    with torch.no_grad():
        epe = (p + BASE.transformer.h[0].mlp(p[None])[0])[0]
    return sorted(range(D_MODEL), key=lambda d: -abs(float(epe[d])))[:3]


def drawn(n: int, seed: int) -> dict[int, list[int]]:
    rng = random.Random(seed)
    return {layer: [rng.randint(0, D_MODEL - 1) for _ in range(n)] for layer in range(N_LAYERS)}


Edit = Callable[[Edited], object]
PAPER: dict[str, Edit] = {
    "No Query Bias": lambda e: e.query_bias(),
    "Remove First PE": lambda e: e.replace_position(1, 0),
    "Swap EPE": lambda e: e.swap(through_mlp=True),
    "Swap PE": lambda e: e.swap(through_mlp=False),
    "Nullify BOS Token": lambda e: e.zero_token(0),
    "No MLP": lambda e: e.skip_mlp(),
    "No PE": lambda e: e.zero_positions(),
    "Zero Top-3 Wk": lambda e: e.key_columns(top3()),
    "Zero Random Wk": lambda e: e.key_columns(drawn(3, 42)),
}
RESTRICTED: list[tuple[Ablation, Edit]] = [
    (ZeroQueryBias(layers=1), lambda e: e.query_bias([1])),
    (ZeroQueryBias(layers=[2, 0], heads=[1]), lambda e: e.query_bias([0, 2], [1])),
    (ZeroQueryBias(heads=[0, 2]), lambda e: e.query_bias(heads=[0, 2])),
    (ZeroQueryBias(positions=[0, 3]), lambda e: e.query_bias(positions=[0, 3])),
    (ZeroQueryBias([1], [2], [4]), lambda e: e.query_bias([1], [2], [4])),
    (ReplacePosition(source=4, target=2), lambda e: e.replace_position(4, 2)),
    (ZeroPositions(positions=[1, 5]), lambda e: e.zero_positions([1, 5])),
    (ZeroToken(position=2), lambda e: e.zero_token(2)),
    (SkipMLP(layers=[0]), lambda e: e.skip_mlp([0])),
    (SkipMLP(positions=[0]), lambda e: e.skip_mlp(None, [0])),
    (SkipMLP(layers=[0, 1], positions=[2, 0]), lambda e: e.skip_mlp([0, 1], [0, 2])),
    (ZeroKeyColumns([3, 7, 11]), lambda e: e.key_columns([3, 7, 11])),
    (ZeroKeyColumns([3], layers=[1, 2]), lambda e: e.key_columns([3], [1, 2])),
    (ZeroKeyColumns([5, 5, 0], heads=[1]), lambda e: e.key_columns([0, 5], None, [1])),
    (ZeroKeyColumns([5, 2], positions=[0]), lambda e: e.key_columns([5, 2], None, None, [0])),
    (ZeroKeyColumns([9, 1], 2, 0, [1, 3]), lambda e: e.key_columns([9, 1], [2], [0], [1, 3])),
    (ZeroKeyColumns(ss.TopK(1)), lambda e: e.key_columns(top3()[:1])),
    (ZeroRandomKeyColumns(5, 7), lambda e: e.key_columns(drawn(5, 7))),
    (ZeroRandomKeyColumns(layers=[2]), lambda e: e.key_columns(drawn(3, 42), [2])),
    (
        ZeroRandomKeyColumns(2, 3, [1], [0, 1], [0]),
        lambda e: e.key_columns(drawn(2, 3), [1], [0, 1], [0]),
    ),
]


def weights_patterns(*edits: Edit) -> Tensor:
    edited = Edited()
    for edit in edits:
        edit(edited)
    return edited.patterns()


UNTOUCHED = weights_patterns()


def name_of(ablation: Any) -> str:
    """The class and what differs from its defaults, for the names of tests."""
    if isinstance(ablation, Composition):
        return " + ".join(map(name_of, ablation.parts)) or "nothing"
    given = [
        f"{f.name}={getattr(ablation, f.name)}"
        for f in dataclasses.fields(ablation)
        if getattr(ablation, f.name) != f.default
    ]
    return f"{type(ablation).__name__}({', '.join(given)})"


def matches(ours: Tensor, *edits: Edit) -> None:
    """Ours are the patterns of the edited weights, and these differ from the untouched ones."""
    theirs = weights_patterns(*edits)
    assert float((theirs - UNTOUCHED).abs().max()) > 1e-5
    close(ours, theirs)


# --- one ablation -------------------------------------------------------------------------


def test_no_ablation_is_the_untouched_model(model: Any, batch: ss.TokenBatch) -> None:
    """`patterns(model) = patterns(model, Composition()) = transformers' own`, bit for bit."""
    ours = ss.patterns(model, batch)
    close(ours, UNTOUCHED)
    close(ss.patterns(model, batch, Composition()), ours, atol=0)
    close(ss.patterns(model, batch, ss.PAPER_CONDITIONS["Baseline"]), ours, atol=0)


@pytest.mark.parametrize("name", list(PAPER))
def test_paper_conditions(model: Any, batch: ss.TokenBatch, name: str) -> None:
    """`patterns(hooks) = patterns(edited weights)` for each of the paper's conditions."""
    assert list(ss.PAPER_CONDITIONS) == ["Baseline", *PAPER]
    matches(ss.patterns(model, batch, ss.ablations.condition(name)), PAPER[name])


@pytest.mark.parametrize(("ablation", "edit"), RESTRICTED, ids=[name_of(a) for a, _ in RESTRICTED])
def test_restricted(model: Any, batch: ss.TokenBatch, ablation: Ablation, edit: Edit) -> None:
    """`patterns(hooks) = patterns(edited weights)` for single layers, heads and positions."""
    matches(ss.patterns(model, batch, ablation), edit)


def test_lifted_mask(model: Any, batch: ss.TokenBatch) -> None:
    """`LiftCausalMask: pattern = softmax(scale (q + b_Q).(k + b_K))` over the whole row."""
    ours = ss.patterns(model, batch, LiftCausalMask(layers=[0]), layers=[0])[:, 0]
    block = BASE.transformer.h[0]
    with torch.no_grad():
        x = BASE.transformer.wte(IDS) + BASE.transformer.wpe.weight[:LENGTH]
        q, k, _ = block.attn.c_attn(block.ln_1(x)).split(D_MODEL, dim=-1)
    for head in range(N_HEADS):
        columns = slice(head * D_HEAD, (head + 1) * D_HEAD)
        scores = q[..., columns] @ k[..., columns].mT / D_HEAD**0.5
        close(ours[:, head], scores.softmax(-1))


def test_other_heads_stay_bit_for_bit(model: Any, batch: ss.TokenBatch) -> None:
    """An edit of one head leaves the others of its layer exactly as they were."""
    before = ss.patterns(model, batch, layers=0)[:, 0]
    for ablation in (
        ZeroQueryBias(layers=[0], heads=[1]),
        ZeroKeyColumns([4], layers=[0], heads=[1]),
    ):
        after = ss.patterns(model, batch, ablation, layers=0)[:, 0]
        assert float((after[:, 1] - before[:, 1]).abs().max()) > 1e-4
        close(after[:, [0, 2]], before[:, [0, 2]], atol=0)


def test_queries_outside_the_positions_stay_bit_for_bit(model: Any, batch: ss.TokenBatch) -> None:
    """`ZeroQueryBias(positions=[3])` changes the attention of query 3 and of no other."""
    before = ss.patterns(model, batch, layers=0)[:, 0]
    after = ss.patterns(model, batch, ZeroQueryBias([0], positions=[3]), layers=0)[:, 0]
    changed = (after != before).any(-1)
    assert bool(changed[:, :, 3].all())
    assert not bool(changed[:, :, [0, 1, 2, 4, 5]].any())


@pytest.mark.parametrize("name", list(PAPER))
def test_chunks(model: Any, batch: ss.TokenBatch, name: str) -> None:
    """An ablated run in chunks gives each row what the whole batch does."""
    ablation = ss.PAPER_CONDITIONS[name]
    close(ss.patterns(model, batch, ablation, batch_size=2), ss.patterns(model, batch, ablation))


# --- compositions -------------------------------------------------------------------------

P = ss.PAPER_CONDITIONS
PAIRS: list[tuple[Ablation, Ablation, Edit, Edit]] = [
    (P["No Query Bias"], P["Zero Top-3 Wk"], PAPER["No Query Bias"], PAPER["Zero Top-3 Wk"]),
    (P["Swap EPE"], P["No Query Bias"], PAPER["Swap EPE"], PAPER["No Query Bias"]),
    (
        P["Remove First PE"],
        P["Nullify BOS Token"],
        PAPER["Remove First PE"],
        PAPER["Nullify BOS Token"],
    ),
    (P["No PE"], P["Swap EPE"], PAPER["No PE"], PAPER["Swap EPE"]),
    (P["No MLP"], P["Zero Random Wk"], PAPER["No MLP"], PAPER["Zero Random Wk"]),
    # the same bias taken off twice
    (ZeroQueryBias(layers=[0]), ZeroQueryBias(), lambda e: e.query_bias(), lambda e: None),
    (
        ZeroQueryBias(heads=[1]),
        ZeroQueryBias(heads=[1, 2]),
        lambda e: e.query_bias(None, [1, 2]),
        lambda e: None,
    ),
    (
        ZeroQueryBias(positions=[0, 2]),
        ZeroQueryBias(positions=[2, 3], heads=[0]),
        lambda e: e.query_bias(None, None, [0, 2]),
        lambda e: e.query_bias(None, [0], [3]),
    ),
    (ZeroQueryBias(positions=[2]), ZeroQueryBias(), lambda e: e.query_bias(), lambda e: None),
    # the same rows of W_K taken off twice
    (
        ZeroKeyColumns([1, 2]),
        ZeroKeyColumns([2, 3]),
        lambda e: e.key_columns([1, 2, 3]),
        lambda e: None,
    ),
    (
        ZeroKeyColumns([1, 2], positions=[0]),
        ZeroKeyColumns([2, 3], heads=[0]),
        lambda e: e.key_columns([1, 2], None, None, [0]),
        lambda e: e.key_columns([2, 3], None, [0]),
    ),
    (
        ZeroKeyColumns([2, 3], heads=[0]),
        ZeroKeyColumns([1, 2], positions=[0, 4]),
        lambda e: e.key_columns([2, 3], None, [0]),
        lambda e: e.key_columns([1, 2], None, None, [0, 4]),
    ),
    (
        ZeroRandomKeyColumns(4),
        ZeroKeyColumns(range(8)),
        lambda e: e.key_columns(drawn(4, 42)),
        lambda e: e.key_columns(range(8)),
    ),
    # order matters
    (
        ReplacePosition(source=1, target=0),
        ZeroPositions(positions=[1]),
        lambda e: e.replace_position(1, 0),
        lambda e: e.zero_positions([1]),
    ),
    (
        ZeroPositions(positions=[1]),
        ReplacePosition(source=1, target=0),
        lambda e: e.zero_positions([1]),
        lambda e: e.replace_position(1, 0),
    ),
    (
        ReplacePosition(source=1, target=0),
        ReplacePosition(source=0, target=1),
        lambda e: e.replace_position(1, 0),
        lambda e: None,
    ),
    (SwapPE(), SwapEPE(), PAPER["Swap PE"], PAPER["Swap EPE"]),
    (SwapEPE(), SwapPE(), PAPER["Swap EPE"], PAPER["Swap PE"]),
    (
        SkipMLP(layers=[0], positions=[1]),
        SwapEPE(),
        lambda e: e.skip_mlp([0], [1]),
        PAPER["Swap EPE"],
    ),
]


@pytest.mark.parametrize(
    ("a", "b", "edit_a", "edit_b"), PAIRS, ids=[name_of(a + b) for a, b, _, _ in PAIRS]
)
def test_sum_is_both_edits(
    model: Any, batch: ss.TokenBatch, a: Ablation, b: Ablation, edit_a: Edit, edit_b: Edit
) -> None:
    """`patterns(a + b) = patterns(weights with edit a, then edit b)`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # where the first has left nothing to the second
        ours = ss.patterns(model, batch, a + b)
    matches(ours, edit_a, edit_b)


def test_order_sensitive_sums_differ() -> None:
    """`Replace(1 -> 0) + Zero(1)` keeps p_1 at 0; `Zero(1) + Replace(1 -> 0)` does not."""
    (_, _, replace, zero) = PAIRS[13]
    first, second = weights_patterns(replace, zero), weights_patterns(zero, replace)
    assert float((first - second).abs().max()) > 1e-3


def test_sums_are_flat_and_associative() -> None:
    """`(a + b) + c = a + (b + c)`, and the empty sum is neutral."""
    a, b, c = ZeroQueryBias(), SkipMLP(0), ZeroToken()
    assert (a + b) + c == a + (b + c) == Composition((a, b, c))
    assert a + Composition() == Composition((a,)) == Composition() + a
    with pytest.raises(TypeError):
        a + 1  # type: ignore[operator]


@pytest.mark.parametrize("site", [ss.Site("q", 1), "blocks.1.attn.hook_q"], ids=repr)
def test_from_hook_composes(model: Any, batch: ss.TokenBatch, site: Any) -> None:
    """A user's function at q that takes b_Q off, in a sum, is the weights edit of both."""
    b_Q = BASE.transformer.h[1].attn.c_attn.bias.detach()[:D_MODEL].view(N_HEADS, D_HEAD)

    def without_bias(q: Tensor, hook: Any) -> Tensor:
        return q - b_Q

    ablation = Ablation.from_hook(site, without_bias)
    total = ZeroKeyColumns([2]) + ablation + ZeroPositions([1])
    matches(
        ss.patterns(model, batch, total),
        lambda e: e.key_columns([2]),
        lambda e: e.query_bias([1]),
        lambda e: e.zero_positions([1]),
    )
    assert ablation.name == "without_bias"


def test_from_hook_asks_for_a_hook_of_the_function_that_will_be_called(
    model: Any, batch: ss.TokenBatch
) -> None:
    """A decorator's wrapper takes the hook, whatever it wraps; a module's forward does."""

    def as_hook(plain: Any) -> Any:
        @functools.wraps(plain)
        def wrapper(tensor: Tensor, hook: Any) -> Tensor:
            return plain(tensor)

        return wrapper

    class Halved(nn.Module):
        def forward(self, tensor: Tensor, hook: Any) -> Tensor:
            return tensor / 2

    def halved(tensor: Tensor) -> Tensor:
        return tensor / 2

    kept = functools.partial(lambda tensor, hook, by: tensor / by, by=2)
    site = ss.Site("resid_post", 0)
    patterns = [
        ss.patterns(model, batch, Ablation.from_hook(site, fn))
        for fn in (as_hook(halved), Halved(), kept)
    ]
    assert torch.equal(patterns[0], patterns[1])
    assert torch.equal(patterns[0], patterns[2])
    assert not torch.equal(patterns[0], ss.patterns(model, batch))
    with pytest.raises(InvalidInputError, match="A hook is a function"):
        Ablation.from_hook(site, functools.wraps(as_hook(halved))(lambda tensor: tensor))


def test_from_hook_in_place(model: Any, batch: ss.TokenBatch) -> None:
    """A function that edits in place and returns None is an edit too, and W_pos stays."""

    def null(embed: Tensor, hook: Any) -> None:
        embed[:, 2] = 0

    before = ss.model_view(model).weights_hash()
    matches(
        ss.patterns(model, batch, Ablation.from_hook(ss.Site("embed"), null)),
        lambda e: e.zero_token(2),
    )
    assert ss.model_view(model).weights_hash() == before


# --- three ways to run one ----------------------------------------------------------------

WAYS = [
    *ss.PAPER_CONDITIONS.values(),
    ZeroQueryBias([1], [2], [4]) + ZeroKeyColumns([1, 2], positions=[0]),
    LiftCausalMask(1),
]
MITIGATIONS: list[Ablation] = [
    ScaleQueryBias(0.5, [1], [2]),
    ShuffledQueryBias(1.0),
    ScaleKeyColumns((1, 2), 0.5, heads=[0]),
    ScaleEPE(0.5),
    SetActivations((1,), 1, 3.0),
    ClampActivations(0.1, 0),
    SwitchOffHeads(((0, 1),)),
    SinkLogit(0.5, heads=[1]),
    OffByOneSoftmax(),
    CalibrateAttention(2.0, 0.3),
    WindowedAttention(2),
]


@functools.cache
def compatible_bridge() -> Any:
    bridge = hook(copy.deepcopy(BASE), "bridge")
    bridge.enable_compatibility_mode(disable_warnings=True, no_processing=True)
    return bridge


def cached_patterns(model: Any, **hooks: Any) -> Tensor:
    seen: dict[int, Tensor] = {}

    def keep(pattern: Tensor, hook: Any) -> None:
        seen[len(seen)] = pattern.clone()

    names = [
        str(ss.model_view(model).hook_point(ss.Site("pattern", n)).name) for n in range(N_LAYERS)
    ]
    fwd_hooks = [*hooks.get("fwd_hooks", []), *((name, keep) for name in names)]
    with torch.no_grad():
        model.run_with_hooks(IDS, fwd_hooks=fwd_hooks)
    assert len(seen) == N_LAYERS, "each pattern once"
    return torch.stack(list(seen.values()), 1)


@pytest.mark.parametrize("way", WAYS, ids=name_of)
def test_three_ways_give_the_same(model: Any, batch: ss.TokenBatch, way: Ablation) -> None:
    """`applied`, `fwd_hooks` with run_with_hooks, and the argument give the same patterns."""
    argument = ss.patterns(model, batch, way)
    close(cached_patterns(model, fwd_hooks=way.fwd_hooks(model)), argument, atol=0)
    with way.applied(model):
        close(cached_patterns(model), argument, atol=0)
    with way.applied(model, batch):
        close(cached_patterns(model), argument, atol=0)
    close(cached_patterns(model), ss.patterns(model, batch), atol=0)


@pytest.mark.parametrize("name", list(PAPER))
def test_three_ways_in_compatibility_mode(name: str) -> None:
    """In compatibility mode an alias fires twice; a sinkscope edit acts once all the same."""
    model = compatible_bridge()
    batch = ss.token_batch(model, IDS)
    way, edited = ss.PAPER_CONDITIONS[name], weights_patterns(PAPER[name])
    close(ss.patterns(model, batch, way), edited)
    close(cached_patterns(model, fwd_hooks=way.fwd_hooks(model)), edited)
    with way.applied(model):
        close(cached_patterns(model), edited)


@pytest.mark.parametrize("way", [*WAYS, *MITIGATIONS], ids=name_of)
def test_an_edit_leaves_what_hooks_saw_before_it(
    model: Any, batch: ss.TokenBatch, way: Ablation
) -> None:
    """A cache of the user's, which keeps tensors and no copies, holds what was there."""
    view = ss.model_view(model)
    seen: list[tuple[str, Tensor, Tensor]] = []

    def look(tensor: Tensor, hook: Any) -> None:
        seen.append((hook.name, tensor, tensor.clone()))

    kinds = ("attn_in", "q", "k", "v", "attn_scores", "pattern", "z", "mlp_out", "resid_post")
    sites = [ss.Site(kind, layer) for kind in kinds for layer in range(N_LAYERS)]
    sites += [ss.Site("embed"), ss.Site("pos_embed")]
    looks = [(str(view.hook_point(site).name), look) for site in sites]
    with torch.no_grad():
        model.run_with_hooks(batch.ids, fwd_hooks=[*looks, *way.fwd_hooks(view, batch)])
    assert len({name for name, _, _ in seen}) == len(sites)
    assert all(torch.equal(kept, copied) for _, kept, copied in seen)


def test_nested_applied_is_the_sum(model: Any) -> None:
    """`with a: with b:` is `a + b` where they do not overlap, and each ends alone."""
    a, b = ZeroPositions([1]), ZeroToken(2)
    with a.applied(model):
        with b.applied(model):
            both = cached_patterns(model)
        only_a = cached_patterns(model)
    matches(both, lambda e: e.zero_positions([1]), lambda e: e.zero_token(2))
    matches(only_a, lambda e: e.zero_positions([1]))


# --- what is reported ---------------------------------------------------------------------


def test_numbers_are_refused_where_a_vector_of_them_has_no_finite_size(model: Any) -> None:
    """`sum over d of x[d]^2` overflows; 1 and less can't, and their edits stay as they are."""
    half = torch.finfo(torch.float32).max ** 0.5 * 0.8
    x = torch.zeros(1, 2, 3)
    x[0, :, 0] = half
    assert not _overflows(x)
    x[0, 0, 1] = half
    assert _overflows(x)
    edit = ablations.Edit(ss.Site("mlp_out", 0), lambda tensor, hook: tensor)
    assert within_range(edit, 1.0, -1.0) is edit
    assert within_range(edit, 0.5, 1.01) is not edit


def test_a_vector_of_zeros_has_no_direction() -> None:
    assert unit_vector(torch.tensor([0.0, 2.0]), "it").tolist() == [0.0, 1.0]
    for vector in (torch.zeros(2), torch.tensor([1.0, torch.nan])):
        with pytest.raises(EditError, match="it is zero and has no direction"):
            unit_vector(vector, "it")


def test_an_edit_without_effect_is_reported(model: Any, batch: ss.TokenBatch) -> None:
    """An edit that leaves its tensor bit for bit as it was warns; no other edit does."""
    for ablation in (
        Ablation.from_hook(ss.Site("q", 1), lambda q, hook: q),
        Ablation.from_hook(ss.Site("q", 1), lambda q, hook: None),
        ZeroPositions() + ZeroPositions(positions=[2]),
        ReplacePosition(source=3, target=3),
    ):
        with pytest.warns(NoEffectWarning, match="changed nothing"):
            ss.patterns(model, batch, ablation)


def test_effect_in_one_chunk_is_effect(model: Any, batch: ss.TokenBatch) -> None:
    """An edit that changes one row of many does not warn, whatever the chunks."""

    def only_row_of_first_id(embed: Tensor, hook: Any) -> Tensor:
        hit = (embed[:, 0] == BASE.transformer.wte.weight[IDS[1, 0]]).all(-1)
        return embed * torch.where(hit, 2.0, 1.0).double()[:, None, None]

    assert len(set(IDS[:, 0].tolist())) == 3
    ablation = Ablation.from_hook(ss.Site("embed"), only_row_of_first_id)
    in_chunks = ss.patterns(model, batch, ablation, batch_size=1)
    baseline = ss.patterns(model, batch)
    close(in_chunks[[0, 2]], baseline[[0, 2]])
    assert float((in_chunks[1] - baseline[1]).abs().max()) > 1e-4


def test_a_prompt_without_the_position_is_an_error(model: Any, batch: ss.TokenBatch) -> None:
    """A position beyond the prompt can't be edited: EditError, not a silent no-op."""
    for ablation in (
        ZeroToken(position=LENGTH),
        SkipMLP(positions=[LENGTH]),
        ReplacePosition(source=LENGTH, target=0),
        ZeroQueryBias(positions=[LENGTH]),
        ZeroKeyColumns([1], positions=[LENGTH]),
    ):
        with pytest.raises(EditError, match=f"position {LENGTH}"):
            ss.patterns(model, batch, ablation)


def test_swap_needs_two_tokens(model: Any) -> None:
    """`SwapEPE` on a prompt of one token is an error."""
    with pytest.raises(EditError, match="position 1"):
        ss.patterns(model, ss.token_batch(model, [[7]]), SwapEPE())


def test_another_batch_than_given_is_an_error(model: Any) -> None:
    """`applied(model, batch)` with padding refuses a run on other shapes."""
    padded = ss.token_batch(model, [[1, 2, 3], [4, 5]], padding="left")
    with ZeroToken().applied(model, padded), pytest.raises(EditError, match="another batch"):
        model(IDS)


BAD = [
    ZeroQueryBias(layers=[N_LAYERS]),
    ZeroQueryBias(heads=[-1]),
    ZeroQueryBias(heads=[]),
    ZeroKeyColumns([]),
    ZeroKeyColumns([D_MODEL]),
    ZeroKeyColumns(ss.TopK(D_MODEL + 1)),
    ZeroRandomKeyColumns(n=0),
    ZeroPositions(positions=[N_CTX]),
    ZeroPositions(positions=[]),
    ReplacePosition(source=-1),
    ZeroToken(position=N_CTX),
    Ablation.from_hook("blocks.0.attn.hook_qq", lambda q, hook: q),
    Ablation.from_hook(ss.Site("q", 9), lambda q, hook: q),
]


def test_bad_values_are_refused(model: Any, batch: ss.TokenBatch) -> None:
    """Layers, heads, positions, coordinates and hooks that do not exist: InvalidInputError."""
    for ablation in BAD:
        with pytest.raises(InvalidInputError, match="Got: "):
            ss.patterns(model, batch, ablation)
        with pytest.raises(InvalidInputError):
            ablation.fwd_hooks(model)
        with pytest.raises(InvalidInputError), ablation.applied(model):
            pass
    close(ss.patterns(model, batch), UNTOUCHED)


def test_unknown_condition() -> None:
    """A misspelt name is an error that lists the ten."""
    with pytest.raises(InvalidInputError, match="Zero Top-3 Wk"):
        ss.ablations.condition("Zero Top 3")


def test_an_edit_that_needs_what_the_model_lacks(kind: str) -> None:
    """A direction of length zero can't be swapped along."""
    hf = copy.deepcopy(BASE)
    hf.transformer.wpe.weight.data[1] = 0
    model = hook(hf, kind)
    with pytest.raises(EditError, match="p_1 is zero"):
        ss.patterns(model, ss.token_batch(model, IDS), SwapPE())
