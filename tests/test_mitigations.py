"""Mitigations against the same change made in transformers' model, and controls' budgets."""

from __future__ import annotations

import copy
import functools
import math
import warnings
from collections.abc import Callable
from inspect import unwrap
from typing import Any

import pytest
import torch
from models import IDS, close, exact_gpt2, hook, shared_model, tiny_gpt2
from torch import Tensor
from transformers.models.gpt2 import modeling_gpt2

import sinkscope as ss
from sinkscope.ablations import (
    Ablation,
    Composition,
    ReplacePosition,
    SkipMLP,
    ZeroKeyColumns,
    ZeroQueryBias,
    ZeroToken,
)
from sinkscope.controls import Budget, budget
from sinkscope.errors import EditError, InvalidInputError, NoEffectWarning, NotApplicableError
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
    massive_limit,
)

N_LAYERS, N_HEADS, D_HEAD, D_MODEL = 3, 3, 4, 12

pytestmark = pytest.mark.filterwarnings("error::sinkscope.errors.NoEffectWarning")


BASE = exact_gpt2()


def logits(model: Any, ablation: Ablation, batch: ss.TokenBatch | None = None) -> Tensor:
    ids = IDS if batch is None else batch.ids
    with torch.no_grad(), ablation.applied(model, batch):
        return model(ids)


@torch.no_grad()
def reference(edit: Callable[[Any], None]) -> Tensor:
    hf = copy.deepcopy(BASE)
    edit(hf)
    return hf(IDS).logits


# --- scaling ------------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [0.0, 0.3, 1.7])
def test_a_scaled_query_bias_is_one_in_the_weights(model: Any, factor: float) -> None:
    def edit(hf: Any) -> None:
        hf.transformer.h[1].attn.c_attn.bias.data[:D_MODEL] *= factor

    ablation = ScaleQueryBias(factor, layers=[1])
    close(logits(model, ablation), reference(edit))
    if factor == 0:
        close(logits(model, ablation), logits(model, ZeroQueryBias(layers=[1])), atol=0)


@pytest.mark.parametrize("factor", [0.0, 0.3, 1.7])
def test_scaled_key_columns_are_ones_in_the_weights(model: Any, factor: float) -> None:
    def edit(hf: Any) -> None:
        for block in hf.transformer.h:
            head_1 = slice(D_MODEL + D_HEAD, D_MODEL + 2 * D_HEAD)
            block.attn.c_attn.weight.data[[2, 7], head_1] *= factor

    close(logits(model, ScaleKeyColumns([2, 7], factor, heads=[1])), reference(edit))


def test_factors_of_overlapping_parts_multiply(model: Any) -> None:
    for part in (ScaleQueryBias, functools.partial(ScaleKeyColumns, (1, 4))):
        twice = part(factor=0.5) + part(factor=0.5)
        close(logits(model, twice), logits(model, part(factor=0.25)))


def test_a_factor_of_one_is_the_model(model: Any) -> None:
    plain = logits(model, Composition())
    close(logits(model, ScaleQueryBias(1.0)), plain, atol=0)
    close(logits(model, ScaleKeyColumns((1,), 1.0)), plain)
    close(logits(model, ScaleEPE(1.0)), plain)


@pytest.mark.parametrize("positions", [0, (0, 2), None])
def test_without_the_epe_nothing_is_left_along_it(
    model: Any, batch: ss.TokenBatch, positions: Any
) -> None:
    chosen = range(8) if positions is None else (0,) if positions == 0 else positions
    epe = ss.extract_epe(model).vectors
    seen: list[Tensor] = []
    look = Ablation.from_hook(ss.Site("resid_pre", 1), lambda x, hook: seen.append(x.clone()))
    for ablation in (Composition(), ScaleEPE(0.25, positions)):
        logits(model, ablation + look)
    before, after = seen
    for i in range(8):
        unit = epe[i] / epe[i].norm()
        left = 0.25 if i in chosen else 1.0
        close(after[:, i] @ unit, left * (before[:, i] @ unit))
        across = before[:, i] - (before[:, i] @ unit)[:, None] * unit
        close(after[:, i] - (after[:, i] @ unit)[:, None] * unit, across)


# --- the softmax --------------------------------------------------------------------------


def with_extra_key(score: Tensor) -> Callable[..., Any]:
    """Attention with one more key of a given score and value 0, written out."""

    def attention(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **_: Any):
        n = query.shape[2]
        scores = query @ key.transpose(-1, -2) * D_HEAD**-0.5
        hidden = torch.ones(n, n, dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
        extra = score.view(1, -1, 1, 1).expand(scores.shape[0], N_HEADS, n, 1)
        pattern = torch.cat([scores, extra], -1).softmax(-1)
        values = torch.cat([value, torch.zeros_like(value[:, :, :1])], 2)
        return (pattern @ values).transpose(1, 2), pattern

    return attention


@pytest.mark.parametrize(
    ("ablation", "score"),
    [
        (OffByOneSoftmax(), [0.0, 0.0, 0.0]),
        (SinkLogit(1.5), [1.5, 1.5, 1.5]),
        (SinkLogit((0.5, -1.0, 2.0)), [0.5, -1.0, 2.0]),
        (OffByOneSoftmax(heads=[1]), [float("-inf"), 0.0, float("-inf")]),
    ],
)
def test_a_sink_logit_is_one_more_key_of_value_zero(
    model: Any, ablation: Ablation, score: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    got = logits(model, ablation)
    extra = with_extra_key(torch.tensor(score, dtype=torch.float64))
    monkeypatch.setattr(modeling_gpt2, "eager_attention_forward", extra)
    close(got, reference(lambda hf: None))


def test_rows_sum_below_one_by_what_the_logit_takes(model: Any, batch: ss.TokenBatch) -> None:
    total = ss.patterns(model, batch, SinkLogit(1.0)).sum(-1)
    assert float(total.max()) < 1
    gates = total[:, 0].sort(-1).values  # nothing differs before the first layer's softmax
    dealt = ss.patterns(model, batch, SinkLogit(1.0, seed=3)).sum(-1)[:, 0]
    assert not torch.allclose(dealt, total[:, 0])
    close(dealt.sort(-1).values, gates)


def test_calibration_by_the_formula(model: Any, batch: ss.TokenBatch) -> None:
    alpha, beta = 1.5, 0.4
    pattern = ss.patterns(model, batch, layers=[0])[:, 0]
    got = ss.patterns(model, batch, CalibrateAttention(alpha, beta, layers=[0]), layers=[0])[:, 0]
    n, moved = IDS.shape[1], 0
    for b in range(len(IDS)):
        for h in range(N_HEADS):
            p = pattern[b, h]
            sinks = [j for j in range(1, n) if float(p[:, j].sum()) / n > alpha / n]
            moved += len(sinks)
            for i in range(n):
                row = p[i].clone()
                others = [j for j in range(n) if j not in sinks]
                freed = (1 - beta) * sum(float(p[i, j]) for j in sinks)
                rest = sum(float(p[i, j]) for j in others)
                for j in range(n):
                    row[j] = beta * p[i, j] if j in sinks else p[i, j] * (1 + freed / rest)
                close(got[b, h, i], row)
    assert moved > 3
    close(got.sum(-1), torch.ones_like(got.sum(-1)))


def test_calibrating_position_0_too_takes_the_sink(model: Any, batch: ss.TokenBatch) -> None:
    spared = CalibrateAttention(alpha=1.0)
    both = CalibrateAttention(alpha=1.0, spare_first=False)
    assert float(ss.sink_score(model, batch, spared).mean()) > float(
        ss.sink_score(model, batch, both).mean()
    )


# --- activations and heads ----------------------------------------------------------------


def test_activations_are_set_where_they_are_told(model: Any, batch: ss.TokenBatch) -> None:
    seen: list[Tensor] = []
    look = Ablation.from_hook(ss.Site("resid_pre", 2), lambda x, hook: seen.append(x.clone()))
    mean = SetActivations.to_mean(model, batch, (3, 5), layer=1, position=2)
    one_by_one = SetActivations.to_mean(model, batch, (3, 5), 1, 2, batch_size=1)
    close(torch.tensor(mean.values), torch.tensor(one_by_one.values))
    limit = massive_limit(ss.model_view(model), 1, batch)
    clamped = ClampActivations(0.5, layer=1, coordinates=(3, 5), positions=(0, 1))
    for ablation in (Composition(), SetActivations((3, 5), 1, 0.0), mean, clamped):
        logits(model, ablation + look)
    plain, zero, at_mean, within = seen
    assert limit == float(plain[:, 1:].abs().max())
    expected = plain.clone()
    expected[:, 0, [3, 5]] = 0
    close(zero, expected, atol=0)
    expected = plain.clone()
    expected[:, 2, [3, 5]] = plain[:, 2, [3, 5]].mean(0)
    close(at_mean, expected)
    expected = plain.clone()
    expected[:, :2, [3, 5]] = plain[:, :2, [3, 5]].clamp(-0.5, 0.5)
    close(within, expected, atol=0)
    assert not torch.equal(within, plain)


def test_a_head_that_is_off_has_no_output_weights(model: Any) -> None:
    def edit(hf: Any) -> None:
        for layer, head in ((0, 2), (2, 0)):
            rows = slice(head * D_HEAD, (head + 1) * D_HEAD)
            hf.transformer.h[layer].attn.c_proj.weight.data[rows] = 0

    close(logits(model, SwitchOffHeads(((0, 2), (2, 0)))), reference(edit))


def test_heads_are_found_by_their_sink_score(model: Any, batch: ss.TokenBatch) -> None:
    scores = ss.sink_score(model, batch, layers=range(3)).mean(0)
    threshold = float(scores.flatten().sort().values[-3])
    found = SwitchOffHeads.above(model, batch, threshold)
    assert len(found.pairs) == 2
    assert all(scores[layer, head] > threshold for layer, head in found.pairs)
    with pytest.raises(NotApplicableError, match="No head"):
        SwitchOffHeads.above(model, batch, 0.999)


# --- padding ------------------------------------------------------------------------------

ALL: dict[str, Ablation] = {
    "query bias": ScaleQueryBias(0.5, positions=(0, 2)),
    "shuffled query bias": ShuffledQueryBias(0.5, 1, positions=(0, 2)),
    "key columns": ScaleKeyColumns((1, 2), 0.5, positions=0),
    "EPE": ScaleEPE(0.5),
    "EPE everywhere": ScaleEPE(0.5, None),
    "off by one": OffByOneSoftmax(),
    "dealt": SinkLogit(1.0, seed=1),
    "ACT": CalibrateAttention(1.2, spare_first=False),
    "ACT elsewhere": CalibrateAttention(1.2, seed=2),
    "set": SetActivations((1, 2), 1, 2.0),
    "clamp": ClampActivations(0.2, 1),
    "heads": SwitchOffHeads(((0, 1),)),
    "window": WindowedAttention(2, (0, 1)),
}


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ALL)
def test_padding_changes_nothing(model: Any, name: str, side: str) -> None:
    lengths = (9, 6, 4)
    ids, mask = torch.full((3, 9), 7), torch.zeros(3, 9)
    for i, n in enumerate(lengths):
        where = slice(9 - n, 9) if side == "left" else slice(0, n)
        ids[i, where] = torch.arange(5 * i + 1, 5 * i + 1 + n)
        mask[i, where] = 1
    batch = ss.token_batch(model, ids, mask=mask)
    got = ss.next_token_loss(model, batch, ALL[name])
    assert not torch.allclose(got, ss.next_token_loss(model, batch))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NoEffectWarning)  # a short row may have no sink
        for i in range(3):
            row = ss.token_batch(model, [batch.ids[i][batch.mask[i]].tolist()])
            close(got[i : i + 1], ss.next_token_loss(model, row, ALL[name]), atol=1e-8)


def test_three_ways_to_run_one_agree(model: Any, batch: ss.TokenBatch) -> None:
    ablation = ScaleQueryBias(0.5) + OffByOneSoftmax() + SwitchOffHeads(((1, 1),))
    expected = logits(model, ablation)
    with torch.no_grad():
        by_hooks = model.run_with_hooks(IDS, fwd_hooks=ablation.fwd_hooks(model))
    close(by_hooks, expected, atol=1e-12)
    assert not torch.allclose(expected, logits(model, Composition()))


# --- controls -----------------------------------------------------------------------------

CONTROLLED: dict[str, tuple[Ablation, Budget]] = {
    "columns": (ScaleKeyColumns((1, 4), 0.5), Budget(2, 3, 3, None)),
    "columns by rule": (ZeroKeyColumns(ss.TopK(3)), Budget(3, 3, 3, None)),
    "columns of one head": (ZeroKeyColumns((1,), layers=1, heads=2), Budget(1, 1, 1, None)),
    "heads": (OffByOneSoftmax(heads=[1]), Budget(None, 3, 1, None)),
    "layers": (OffByOneSoftmax(layers=2), Budget(None, 1, 3, None)),
    "pairs": (SwitchOffHeads(((0, 1), (2, 2))), Budget(heads=2)),
    "position": (ScaleEPE(0.5), Budget(positions=1)),
    "positions": (ScaleQueryBias(0.0, positions=(0, 1)), Budget(None, 3, 3, 2)),
    "one token": (ZeroToken(0), Budget(positions=1)),
    "two positions": (ReplacePosition(1, 0), Budget(positions=2)),
    "query bias": (ZeroQueryBias(), Budget(None, 3, 3, None)),
    "calibration": (CalibrateAttention(1.2), Budget(None, 3, 3, None)),
    "activations": (SetActivations((3, 5), 0), Budget(2, None, None, 1)),
    "softmax": (SinkLogit(0.5), Budget(None, 3, 3, None)),
    "kept keys": (WindowedAttention(2, range(3)), Budget(None, 3, None, 3)),
}


@pytest.mark.parametrize("name", CONTROLLED)
def test_a_control_has_the_budget_and_nothing_in_common(name: str, batch_model: Any) -> None:
    ablation, expected = CONTROLLED[name]
    assert budget(batch_model, ablation) == (expected,)
    twins = [
        ss.equal_budget_control(batch_model, ablation, seed, n_positions=8) for seed in range(6)
    ]
    for twin in twins:
        assert budget(batch_model, twin) == (expected,)
        assert twin != ablation
    assert len({repr(twin) for twin in twins}) > 1 or name in ("layers",)
    again = [ss.equal_budget_control(batch_model, ablation, s, n_positions=8) for s in range(6)]
    assert again == twins
    for field in ("coordinates", "pairs"):
        mine = getattr(ablation, field, None)
        if isinstance(mine, tuple):
            assert all(not set(mine) & set(getattr(twin, field)) for twin in twins)


@pytest.fixture
def batch_model() -> Any:
    return shared_model("bridge")


def test_a_control_of_a_sum_is_a_sum_of_controls(batch_model: Any) -> None:
    both = ZeroKeyColumns((1, 4)) + SwitchOffHeads(((0, 0),))
    twin = ss.equal_budget_control(batch_model, both, 0)
    assert isinstance(twin, Composition)
    assert budget(batch_model, twin) == budget(batch_model, both)


def test_the_shuffled_bias_has_the_same_entries(batch_model: Any) -> None:
    view = ss.model_view(batch_model)
    twin = ss.equal_budget_control(view, ScaleQueryBias(0.25), 3)
    assert isinstance(twin, ShuffledQueryBias)
    assert twin.factor == 0.25
    orders = set()
    for layer in range(3):
        shuffled, bias = twin.shuffled(view, layer), view.b_Q(layer)
        close(shuffled.sort(-1).values, bias.sort(-1).values, atol=0)
        close(shuffled.norm(dim=-1), bias.norm(dim=-1))
        orders.add(repr((shuffled[:, :, None] == bias[:, None, :]).long().argmax(-1).tolist()))
    assert len(orders) == 3


def test_as_many_other_keys_are_calibrated(model: Any, batch: ss.TokenBatch) -> None:
    plain = ss.patterns(model, batch, layers=[0])
    changed = []
    for seed in (None, 0, 1):
        ablation = CalibrateAttention(1.1, 0.4, layers=[0], seed=seed)
        ratio = ss.patterns(model, batch, ablation, layers=[0])[:, 0] / plain[:, 0]
        last = ratio[:, :, -1]  # the last query sees all keys
        changed.append((last - 0.4).abs() < 1e-9)
    real, *others = changed
    assert int(real.sum()) > 2
    for other in others:
        free = (7 - real.sum(-1)).clamp_max(real.sum(-1))
        assert torch.equal(other.sum(-1), free)
        assert not bool((other & real).any())
        assert not bool(other[:, :, 0].any())
    assert not torch.equal(*others)


@pytest.mark.parametrize(
    ("ablation", "reason"),
    [
        (Composition(), "changes nothing"),
        (SkipMLP(), "every head and layer"),
        (ZeroKeyColumns(tuple(range(8))), "only 4 others"),
        (Ablation.from_hook("hook_embed", lambda x, hook: x), "no columns"),
    ],
)
def test_where_there_is_nothing_to_draw_from_it_says_so(
    batch_model: Any, ablation: Ablation, reason: str
) -> None:
    with pytest.raises(NotApplicableError, match=reason):
        ss.equal_budget_control(batch_model, ablation, 0)


def test_a_class_of_ones_own_gives_its_own_control(batch_model: Any) -> None:
    class Own(Ablation):
        def edits(self, view: Any, context: Any) -> list[Any]:
            return []

        def control(self, view: Any, seed: int) -> Ablation:
            return ZeroToken(seed % 2 + 1)

    assert isinstance(ss.equal_budget_control(batch_model, Own(), 5), ZeroToken)


# --- refusals -----------------------------------------------------------------------------

BAD: dict[str, tuple[Ablation, str]] = {
    "factor": (ScaleQueryBias(float("nan")), "finite"),
    "factor of keys": (ScaleKeyColumns((1,), float("inf")), "finite"),
    "logits": (SinkLogit((0.0, 1.0)), "3 of them"),
    "a list of logits": (SinkLogit([0.0]), "one for each head.*3 of them"),
    "a logit among others": (SinkLogit([0.0, float("nan"), 0.0]), "a finite number, or 3"),
    "head": (SinkLogit(0.0, heads=[7]), "heads from 0 to 2"),
    "beta": (CalibrateAttention(beta=2.0), "from 0 to 1"),
    "limit": (ClampActivations(-1.0), "0 or more"),
    "values": (SetActivations((1,), 0, (0.0, 1.0)), "12 of them"),
    "layer": (SetActivations((1,), 5), "layers from 0 to 2"),
    "pairs": (SwitchOffHeads(((0, 3),)), "heads from 0 to 2"),
    "no pairs": (SwitchOffHeads(()), "at least one pair"),
    "window": (WindowedAttention(0), "1 or more"),
    "position": (ScaleEPE(0.0, 99), "from 0 to 15"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_values_say_what_is_right(name: str, batch_model: Any) -> None:
    ablation, message = BAD[name]
    with pytest.raises(InvalidInputError, match=message):
        ss.next_token_loss(batch_model, ss.token_batch(batch_model, IDS), ablation)


TOO_LARGE = {
    "values": lambda n: SetActivations((1,), 0, n),
    "one value": lambda n: SetActivations((1,), 0, [n if d == 1 else 0.0 for d in range(D_MODEL)]),
    "query bias": ScaleQueryBias,
    "shuffled": ShuffledQueryBias,
    "key columns": lambda n: ScaleKeyColumns((1, 2), n),
    "EPE": ScaleEPE,
}


@pytest.mark.parametrize("name", TOO_LARGE)
@pytest.mark.parametrize(
    ("dtype", "number", "within"),
    [
        (torch.float16, 1e6, 1e3),
        (torch.bfloat16, 1e30, 1e9),
        (torch.float32, 1e30, 1e9),
        (torch.float64, 1e200, 1e30),
    ],
)
def test_numbers_that_a_dtype_does_not_hold_are_refused(
    name: str, dtype: torch.dtype, number: float, within: float
) -> None:
    """By any way to run an ablation; 1e30 is a float32, but what a norm makes of it is not."""
    model = hook(tiny_gpt2(dtype=dtype), "bridge")
    batch = ss.token_batch(model, IDS)
    make = TOO_LARGE[name]
    with pytest.raises(EditError, match=f"can't compute with.*{number:.4g}".replace("+", r"\+")):
        ss.residual_norms(model, batch, make(number))
    with pytest.raises(EditError, match=str(dtype)), make(number).applied(model):
        model(IDS)
    with make(within).applied(model), torch.no_grad():
        model(IDS)


def test_what_had_no_end_before_an_edit_is_not_laid_to_it(model: Any) -> None:
    endless = Ablation.from_hook("blocks.0.hook_resid_post", lambda x, hook: x * math.inf)
    with (endless + SetActivations((1,), 0, 2.0)).applied(model):
        model(IDS)


def test_a_limit_beyond_the_dtype_leaves_all() -> None:
    model = hook(tiny_gpt2(dtype=torch.float16), "bridge")
    close(logits(model, ClampActivations(1e30)), logits(model, Composition()), atol=0)


def test_numbers_for_each_head_come_in_any_sequence(model: Any, batch: ss.TokenBatch) -> None:
    given = [0.1, -1.0, 2.0]
    listed = ss.patterns(model, batch, SinkLogit(given))
    close(listed, ss.patterns(model, batch, SinkLogit((*given,))), atol=0)
    one_each = [SinkLogit(number, heads=[head]) for head, number in enumerate(given)]
    close(listed, ss.patterns(model, batch, Composition(tuple(one_each))))
    exact = torch.tensor(given, dtype=torch.float64).exp()[None, :, None]
    scores = ss.decompose_scores(model, batch, layers=[0])
    seen = scores.total[:, 0].exp().masked_fill(~scores.visible[:, 0, None], 0).sum(-1)
    close(listed[:, 0].sum(-1), seen / (seen + exact), atol=1e-12)


@pytest.mark.parametrize(
    ("ablation", "message"),
    [
        (ZeroQueryBias(heads=[7]), "heads from 0 to 2"),
        (ZeroQueryBias(layers=[0, 9]), "layers from 0 to 2"),
        (SwitchOffHeads(((0, 0), (1, 3))), "heads from 0 to 2"),
        (SwitchOffHeads(()), "at least one pair"),
        (CalibrateAttention(heads=[3]), "heads from 0 to 2"),
        (OffByOneSoftmax(layers=3), "layers from 0 to 2"),
        (ZeroKeyColumns((1,), heads=[5]), "heads from 0 to 2"),
        (ReplacePosition(1, 99), "from 0 to 15"),
        (SetActivations(layer=77), "layers from 0 to 2"),
        (ZeroToken(0) + ScaleQueryBias(0.5, heads=[-1]), "heads from 0 to 2"),
    ],
)
def test_a_control_of_what_the_model_lacks_is_refused(
    batch_model: Any, ablation: Ablation, message: str
) -> None:
    with pytest.raises(InvalidInputError, match=message):
        ss.equal_budget_control(batch_model, ablation, 0)
    with pytest.raises(InvalidInputError, match=message):
        budget(batch_model, ablation)


def test_a_seed_is_a_whole_number(batch_model: Any) -> None:
    with pytest.raises(InvalidInputError, match="whole number"):
        unwrap(ss.equal_budget_control)(batch_model, ZeroToken(0), 1.5)
