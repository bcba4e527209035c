"""Padding changes no number: a row's values in any batch are those of the row run alone.

`f(batch)[row, ..., own tokens] = f(row alone)[0]` for every measure and every ablation, with
padding on the right, on the left, between the tokens, and with any ids under the mask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from models import hook, tiny_gpt2
from torch import Tensor

import sinkscope as ss
from sinkscope.ablations import (
    PAPER_CONDITIONS,
    Ablation,
    LiftCausalMask,
    ReplacePosition,
    SkipMLP,
    ZeroKeyColumns,
    ZeroPositions,
    ZeroQueryBias,
    ZeroToken,
)
from sinkscope.errors import EditError, InvalidInputError

EXACT = 1e-10
ROWS = ((3, 7), (1, 2, 3, 4, 5), (9, 8, 7, 6, 5, 4, 3, 2), (11, 12, 13))
ONE_TOKEN = ((1, 2, 3, 4, 5), (6,))
LAYERS = range(3)
WIDTH = 11
LAYOUTS = ("right", "left", "scattered", "any ids")
TERMS = ("content", "query_bias", "key_bias", "bias_bias", "total")

layouts = pytest.mark.parametrize("layout", LAYOUTS)
batch_sizes = pytest.mark.parametrize("batch_size", [1, None])


@cache
def model(kind: str) -> Any:
    return hook(tiny_gpt2(), kind)


def alone(kind: str, row: Sequence[int]) -> ss.TokenBatch:
    return ss.token_batch(model(kind), [row])


def padded(kind: str, layout: str, rows: Sequence[Sequence[int]] = ROWS) -> ss.TokenBatch:
    """The rows in one batch; "scattered" and "any ids" have padding between tokens too."""
    if layout in ("right", "left"):
        return ss.token_batch(model(kind), rows, padding=layout)
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(14, 50, (len(rows), WIDTH), generator=generator)
    mask = torch.zeros_like(ids)
    for n, row in enumerate(rows):
        columns = torch.randperm(WIDTH, generator=generator)[: len(row)].sort().values
        ids[n, columns] = torch.tensor(row)
        mask[n, columns] = 1
    batch = ss.token_batch(model(kind), ids, mask=mask)
    # `token_batch` overwrites the ids under the mask; a batch made otherwise still has them.
    return replace(batch, ids=ids) if layout == "any ids" else batch


def at_tokens(values: Tensor, batch: ss.TokenBatch, row: int, axes: int) -> Tensor:
    """A row's values, with its last 0, 1 or 2 axes, which are positions, at its own tokens."""
    columns = batch.mask[row].nonzero()[:, 0]
    if axes == 0:
        return values[row]
    return values[row][..., columns] if axes == 1 else values[row][..., columns[:, None], columns]


def close(ours: Tensor, theirs: Tensor) -> None:
    assert not ours.isnan().any()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=EXACT)


# --- layouts ------------------------------------------------------------------------------


@layouts
def test_layouts_hold_the_same_rows(layout: str) -> None:
    """Each layout has the tokens of `ROWS` under its mask, and padding in every short row."""
    batch = padded("bridge", layout)
    found = [tuple(i[m].tolist()) for i, m in zip(batch.ids, batch.mask, strict=True)]
    assert tuple(found) == ROWS
    assert batch.lengths.tolist() == [2, 5, 8, 3]
    under_the_mask = batch.ids[~batch.mask]
    assert len(under_the_mask) >= 14
    assert len(under_the_mask.unique()) > 10 if layout == "any ids" else 1
    first_is_padded = (~batch.mask[:, 0]).tolist()
    assert first_is_padded.count(True) == {"right": 0, "left": 3}.get(layout, 3)


# --- measures -----------------------------------------------------------------------------

Measure = Callable[..., Tensor]

MEASURES: dict[str, tuple[Measure, int]] = {
    "patterns": (ss.patterns, 2),
    "sink_score": (lambda m, b, **k: ss.sink_score(m, b, layers=LAYERS, **k), 0),
    "sink_rate": (lambda m, b, **k: ss.sink_rate(m, b, eps=0.4, **k), 0),
    "sink_position": (ss.sink_position, 0),
    "value_norms": (ss.value_norms, 1),
    "residual_norms": (ss.residual_norms, 1),
    "shift, paper": (ss.source_agnostic_shift, 1),
    "shift, score": (lambda m, b, **k: ss.source_agnostic_shift(m, b, "score", **k), 1),
    "shift_share": (lambda m, b, **k: ss.shift_share(m, b, [0, 5], **k), 1),
    "shift_by_coordinate": (
        lambda m, b, **k: ss.shift_by_coordinate(m, b, **k).transpose(-1, -2),
        1,
    ),
    "fidelity, mlp": (ss.epe_fidelity, 1),
    "fidelity, block": (lambda m, b, **k: ss.epe_fidelity(m, b, "block", **k), 1),
    "fidelity, causal": (lambda m, b, **k: ss.epe_fidelity(m, b, "causal_block", **k), 1),
    "fidelity, ln": (lambda m, b, **k: ss.epe_fidelity(m, b, through_ln=True, **k), 1),
}


@batch_sizes
@layouts
@pytest.mark.parametrize("name", MEASURES)
def test_measures(kind: str, name: str, layout: str, batch_size: int | None) -> None:
    """`f(batch)[row, ..., tokens] = f(row alone)[0]`; f is NaN at padding, and nowhere else.

    Patterns are the exception: rows of padding are as the model computes them.
    """
    measure, axes = MEASURES[name]
    batch = padded(kind, layout)
    together = measure(model(kind), batch, batch_size=batch_size)
    singly = [measure(model(kind), alone(kind, row)) for row in ROWS]
    for n, one in enumerate(singly):
        close(at_tokens(together, batch, n, axes), one[0])
        if axes == 1:
            assert together[n][..., ~batch.mask[n]].isnan().all()
    every = torch.cat([one.flatten() for one in singly])
    assert len(every.unique()) > 1, "values that are all alike would show no mistake"


@batch_sizes
@layouts
def test_score_terms(kind: str, layout: str, batch_size: int | None) -> None:
    """`term(batch)[row] = term(row alone)` at visible pairs, which are the row's own.

    The errors and their tolerance are over the rows, so that padding adds nothing to them.
    """
    batch = padded(kind, layout)
    together = ss.decompose_scores(model(kind), batch, batch_size=batch_size)
    singly = [ss.decompose_scores(model(kind), alone(kind, row)) for row in ROWS]
    pairs = sum(len(row) * (len(row) + 1) // 2 for row in ROWS)
    assert int(together.visible.sum()) == pairs * len(LAYERS)
    for n, one in enumerate(singly):
        visible = at_tokens(together.visible, batch, n, 2)
        assert torch.equal(visible, one.visible[0])
        assert torch.equal(visible, torch.ones_like(visible).tril())
        for term in TERMS:
            ours = at_tokens(getattr(together, term), batch, n, 2)
            close(ours, getattr(one, term)[0])
    assert together.max_error < EXACT
    assert together.pattern_error < EXACT
    expected = max(one.tolerance for one in singly)
    assert together.tolerance == pytest.approx(expected, rel=1e-9, abs=0)


# --- ablations ----------------------------------------------------------------------------

RESTRICTED: dict[str, Ablation] = {
    "p_0 = p_1 = 0": ZeroPositions(positions=[0, 1]),
    "b_Q at 0": ZeroQueryBias(positions=[0]),
    "b_Q at 1": ZeroQueryBias(positions=[1]),
    "keys at 0": ZeroKeyColumns([1, 2], positions=[0]),
    "keys at 1, then all": ZeroKeyColumns([1, 2], positions=[1]) + ZeroKeyColumns([2, 3]),
    "e_1 = 0": ZeroToken(position=1),
    "MLP at 0": SkipMLP(layers=[0], positions=[0]),
    "p_1 = p_0": ReplacePosition(source=0, target=1),
}
ABLATIONS = {**PAPER_CONDITIONS, **RESTRICTED}
ABLATED: dict[str, tuple[Measure, int]] = {
    "patterns": (ss.patterns, 2),
    "sink_score": (lambda m, b, a, **k: ss.sink_score(m, b, a, layers=LAYERS, **k), 0),
    "value_norms": (ss.value_norms, 1),
    "residual_norms": (ss.residual_norms, 1),
}


@batch_sizes
@layouts
@pytest.mark.parametrize("name", ABLATIONS)
@pytest.mark.filterwarnings("ignore:an edit at")  # batches that begin with a row it leaves alone
def test_ablations(kind: str, name: str, layout: str, batch_size: int | None) -> None:
    """An edited row's numbers are those of the same edit on the row alone."""
    batch = padded(kind, layout)
    for measure, axes in ABLATED.values():
        together = measure(model(kind), batch, ABLATIONS[name], batch_size=batch_size)
        for n, row in enumerate(ROWS):
            one = measure(model(kind), alone(kind, row), ABLATIONS[name])
            close(at_tokens(together, batch, n, axes), one[0])


@pytest.mark.parametrize("name", [n for n in ABLATIONS if n != "Baseline"])
def test_each_ablation_matters_on_each_row(kind: str, name: str) -> None:
    """So that two equal patterns mean an edit in the right place, not one that does nothing."""
    for row in ROWS:
        batch = alone(kind, row)
        edited = ss.patterns(model(kind), batch, ABLATIONS[name])
        untouched = ss.patterns(model(kind), batch)
        # A query of b_Q alone matters where it is not the first, which has one key to attend to.
        if name != "b_Q at 0":
            assert (edited - untouched).abs().max() > 1e-3
        else:
            assert torch.equal(edited, untouched)


@layouts
def test_lifted_mask(kind: str, layout: str) -> None:
    """Without the causal mask a query attends to every token of its row, and to no padding."""
    batch = padded(kind, layout)
    together = ss.patterns(model(kind), batch, LiftCausalMask())
    for n, row in enumerate(ROWS):
        one = ss.patterns(model(kind), alone(kind, row), LiftCausalMask())
        close(at_tokens(together, batch, n, 2), one[0])
        assert one[0].triu(1).sum() > 0.1
        to_padding = together[n][:, :, batch.mask[n]][..., ~batch.mask[n]]
        assert not to_padding.any()


@layouts
@pytest.mark.parametrize("name", ABLATIONS)
def test_ablations_around_the_models_own_call(kind: str, name: str, layout: str) -> None:
    """`ablation.applied(model, batch)` and `fwd_hooks(model, batch)` find each row's positions."""
    batch = padded(kind, layout)
    ablation = ABLATIONS[name]
    mask = batch.mask.long()
    with torch.no_grad(), ablation.applied(model(kind), batch):
        applied = model(kind)(batch.ids, attention_mask=mask)
    with torch.no_grad():
        hooked = model(kind).run_with_hooks(
            batch.ids, attention_mask=mask, fwd_hooks=ablation.fwd_hooks(model(kind), batch)
        )
    for n, row in enumerate(ROWS):
        ids = alone(kind, row)
        with torch.no_grad(), ablation.applied(model(kind), ids):
            one = model(kind)(ids.ids)
        for logits in (applied, hooked):
            close(logits[n, batch.mask[n]], one[0])


# --- rows of one token --------------------------------------------------------------------

NEEDS_POSITION_1 = (
    "Remove First PE",
    "Swap EPE",
    "Swap PE",
    "p_0 = p_1 = 0",
    "b_Q at 1",
    "keys at 1, then all",
    "e_1 = 0",
    "p_1 = p_0",
)


@layouts
@pytest.mark.parametrize("name", ["sink_score", "sink_rate", "sink_position"])
def test_one_token_has_no_sink(kind: str, name: str, layout: str) -> None:
    """One token attends to itself alone: refused by row, whatever padding surrounds it."""
    measure, _ = MEASURES[name]
    with pytest.raises(InvalidInputError, match="row 1 with 1"):
        measure(model(kind), padded(kind, layout, ONE_TOKEN))
    with pytest.raises(InvalidInputError, match="row 0 with 1"):
        measure(model(kind), alone(kind, ONE_TOKEN[1]))


@layouts
@pytest.mark.parametrize("name", NEEDS_POSITION_1)
def test_one_token_has_no_position_1(kind: str, name: str, layout: str) -> None:
    """Padding is no position: an edit at position 1 is refused, not made at a pad."""
    for batch in (padded(kind, layout, ONE_TOKEN), alone(kind, ONE_TOKEN[1])):
        with pytest.raises(EditError, match="no position 1") as caught:
            ss.patterns(model(kind), batch, ABLATIONS[name])
        assert "Got: 1." in str(caught.value)


@layouts
@pytest.mark.filterwarnings("ignore:an edit at")  # one token without its p_0 has no p to lose
@pytest.mark.parametrize("name", [n for n in ABLATIONS if n not in NEEDS_POSITION_1])
def test_one_token_takes_the_other_ablations(kind: str, name: str, layout: str) -> None:
    """`|x|` and `|v|` of a lone token are those of the row alone, pattern 1."""
    batch = padded(kind, layout, ONE_TOKEN)
    for measure in ("patterns", "residual_norms", "value_norms"):
        f, axes = ABLATED[measure]
        together = f(model(kind), batch, ABLATIONS[name])
        for n, row in enumerate(ONE_TOKEN):
            one = f(model(kind), alone(kind, row), ABLATIONS[name])
            close(at_tokens(together, batch, n, axes), one[0])
    lone = at_tokens(ss.patterns(model(kind), batch, ABLATIONS[name]), batch, 1, 2)
    assert torch.equal(lone, torch.ones_like(lone))
