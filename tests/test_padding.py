"""Padding on either side changes no number: each row gives exactly what it gives alone."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import hook, tiny_gpt2
from torch import Tensor

import sinkscope as ss
from sinkscope.ablations import (
    ReplacePosition,
    SkipMLP,
    SwapEPE,
    ZeroKeyColumns,
    ZeroPositions,
    ZeroQueryBias,
    ZeroToken,
)

# The second row begins with the id that pads and the third ends with it.
ROWS = [[7, 3], [0, 5, 6, 2, 11, 30, 12], [4, 8, 9, 9, 0]]
FIRST = {"left": [5, 0, 2], "right": [0, 0, 0]}
EXACT = 1e-10
SIDES = ["left", "right"]


@functools.cache
def shared_model(kind: str) -> Any:
    return hook(tiny_gpt2(), kind)


@pytest.fixture
def model(kind: str) -> Any:
    return shared_model(kind)


def alone(model: Any) -> list[ss.TokenBatch]:
    return [ss.token_batch(model, [row]) for row in ROWS]


def same(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=EXACT)


def cut(row: Tensor, mask: Tensor, axes: int) -> Tensor:
    """A row's numbers at its tokens, along its last `axes` axes."""
    for axis in range(-axes, 0):
        row = row.index_select(axis, mask.nonzero()[:, 0])
    return row


Measure = Callable[..., Tensor]
# A measure, and how many of its last axes are positions.
PER_ABLATION: dict[str, tuple[Measure, int]] = {
    "patterns": (ss.patterns, 2),
    "sink_score": (ss.sink_score, 0),
    "sink_rate": (ss.sink_rate, 0),
    "sink_position": (ss.sink_position, 0),
    "value_norms": (ss.value_norms, 1),
    "residual_norms": (ss.residual_norms, 1),
}
OF_THE_MODEL: dict[str, tuple[Measure, int]] = {
    "delta": (ss.source_agnostic_shift, 1),
    "delta score": (lambda m, b: ss.source_agnostic_shift(m, b, "score"), 1),
    "share": (lambda m, b: ss.shift_share(m, b, [1, 5]), 1),
    "by coordinate": (lambda m, b: ss.shift_by_coordinate(m, b).transpose(-1, -2), 1),
    "fidelity mlp": (ss.epe_fidelity, 1),
    "fidelity block": (lambda m, b: ss.epe_fidelity(m, b, "block"), 1),
    "fidelity causal": (lambda m, b: ss.epe_fidelity(m, b, "causal_block"), 1),
    **{
        f"term {name}": (lambda m, b, n=name: getattr(ss.decompose_scores(m, b), n), 2)
        for name in ("content", "query_bias", "key_bias", "bias_bias")
    },
}
RESTRICTED = {
    "bias at 1": ZeroQueryBias(positions=[1]),
    "keys at 0": ZeroKeyColumns([1, 5, 6], positions=[0]),
    "mlp at 0": SkipMLP(layers=[0, 1], positions=[0]),
    "p_1 = p_0": ReplacePosition(source=0, target=1),
    "p_0 = 0": ZeroPositions(positions=[0]),
    "e_1 = 0": ZeroToken(position=1),
    "several": SwapEPE() + ZeroKeyColumns([2], positions=[0, 1]) + ZeroQueryBias(heads=[1]),
}
ABLATIONS = {**ss.PAPER_CONDITIONS, **RESTRICTED}


def check(model: Any, sides: list[Any], measure: Measure, axes: int, *ablation: Any) -> None:
    expected = [measure(model, single, *ablation)[0] for single in alone(model)]
    for side in sides:
        check_side(model, side, expected, measure, axes, *ablation)


def check_side(
    model: Any, side: Any, expected: list[Tensor], measure: Measure, axes: int, *ablation: Any
) -> None:
    padded = ss.token_batch(model, ROWS, padding=side)
    assert padded.first.tolist() == FIRST[side]
    together = measure(model, padded, *ablation)
    for n, single in enumerate(expected):
        same(cut(together[n], padded.mask[n], axes), single)
        if axes == 1:
            beyond = together[n][..., ~padded.mask[n]]
            assert bool(beyond.isnan().all()), "no number at padding"


@pytest.mark.parametrize("condition", list(ss.PAPER_CONDITIONS))
def test_each_row_as_if_alone(model: Any, condition: str) -> None:
    """`f(padded, ablation)[row] = f(row, ablation)` for every measure and paper condition."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for measure, axes in PER_ABLATION.values():
            check(model, SIDES, measure, axes, ABLATIONS[condition])


@pytest.mark.parametrize("condition", list(RESTRICTED))
def test_each_row_as_if_alone_restricted(model: Any, condition: str) -> None:
    """`patterns(padded, ablation)[row] = patterns(row, ablation)` for single positions."""
    check(model, SIDES, ss.patterns, 2, ABLATIONS[condition])


@pytest.mark.parametrize("name", list(OF_THE_MODEL))
def test_each_row_as_if_alone_without_ablation(model: Any, name: str) -> None:
    """`f(padded)[row] = f(row)` for Delta, its parts, the four terms and the fidelity."""
    check(model, SIDES, *OF_THE_MODEL[name])


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("condition", ["Baseline", "Swap EPE", "keys at 0", "several"])
def test_chunks_with_and_without_padding(model: Any, side: Any, condition: str) -> None:
    """In chunks of one no row is all alone in being padded, and each gives the same."""
    padded = ss.token_batch(model, ROWS, padding=side)
    whole = ss.patterns(model, padded, ABLATIONS[condition])
    pieces = ss.patterns(model, padded, ABLATIONS[condition], batch_size=1)
    for n, mask in enumerate(padded.mask):
        same(cut(pieces[n], mask, 2), cut(whole[n], mask, 2))


def test_what_stands_at_padding_does_not_matter(model: Any) -> None:
    """Ids under the mask are not read, whatever they are."""
    padded = ss.token_batch(model, ROWS, padding="left")
    garbage = torch.where(padded.mask, padded.ids, 49)
    again = ss.token_batch(model, garbage, mask=padded.mask)
    same(ss.sink_score(model, again), ss.sink_score(model, padded))
    by_hand = ss.TokenBatch(garbage, padded.mask, padded.texts, padded.corpora, padded.bos)
    same(ss.sink_score(model, by_hand), ss.sink_score(model, padded))
    same(ss.sink_score(model, by_hand, SwapEPE()), ss.sink_score(model, padded, SwapEPE()))


@pytest.mark.parametrize("side", SIDES)
def test_identities_hold_under_padding(model: Any, side: Any) -> None:
    """Sum of terms = scores and softmax = pattern at every visible pair, none at padding."""
    padded = ss.token_batch(model, ROWS, padding=side)
    terms = ss.decompose_scores(model, padded)
    assert terms.max_error < EXACT
    assert terms.pattern_error < EXACT
    for n, length in enumerate(map(len, ROWS)):
        assert int(terms.visible[n, 0].sum()) == length * (length + 1) // 2


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("condition", ["Remove First PE", "Swap EPE", "e_1 = 0", "keys at 0"])
def test_applied_with_its_batch(model: Any, side: Any, condition: str) -> None:
    """`ablation.applied(model, batch)` finds each row's own first position."""
    padded = ss.token_batch(model, ROWS, padding=side)
    ablation = ABLATIONS[condition]
    expected = ss.patterns(model, padded, ablation)
    with ablation.applied(model, padded):
        ours = ss.patterns(model, padded)
    for n, mask in enumerate(padded.mask):
        same(cut(ours[n], mask, 2), cut(expected[n], mask, 2))
    assert float((expected - ss.patterns(model, padded)).abs().max()) > 1e-5


@pytest.mark.parametrize("side", SIDES)
def test_positions_that_a_short_row_lacks(model: Any, side: Any) -> None:
    """A position beyond the shortest row is an error, though the padded width has it."""
    padded = ss.token_batch(model, ROWS, padding=side)
    with pytest.raises(ss.errors.EditError, match="position 2"):
        ss.patterns(model, padded, ZeroToken(position=2))


@pytest.mark.parametrize("side", SIDES)
def test_a_row_of_one_token(model: Any, side: Any) -> None:
    """Padding does not hide that a row has one token: no sink score, and no silent 1.0."""
    padded = ss.token_batch(model, [*ROWS, [5]], padding=side)
    for measure in (ss.sink_score, ss.sink_rate, ss.sink_position):
        with pytest.raises(ss.errors.InvalidInputError, match="row 3 with 1"):
            measure(model, padded)
