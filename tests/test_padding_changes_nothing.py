"""Padding changes no number: a row's values in any batch are those of the row run alone.

`f(batch)[row, ..., own tokens] = f(row alone)[0]` for every measure and every ablation, with
padding on the right, on the left, between the tokens, and with any ids under the mask.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache

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
LONGEST = (20, 21, 22, 23, 24, 25, 26, 27, 28, 29)  # so that each of the others is padded
LAYERS = (0, 1)
LAYOUTS = ("right", "left", "scattered", "any ids")
TERMS = ("content", "query_bias", "key_bias", "bias_bias", "total")

Measure = Callable[..., Tensor]


@cache
def view(kind: str) -> ss.ModelView:
    return ss.model_view(hook(tiny_gpt2(n_layers=len(LAYERS)), kind))


@cache
def alone(kind: str, row: tuple[int, ...]) -> ss.TokenBatch:
    return ss.token_batch(view(kind), [row])


@cache
def padded(kind: str, layout: str, rows: Sequence[tuple[int, ...]] = ROWS) -> ss.TokenBatch:
    """The rows in one batch, and a longer one; the last two layouts pad between tokens too."""
    rows = (*rows, LONGEST)
    if layout in ("right", "left"):
        return ss.token_batch(view(kind), rows, padding=layout)
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(30, 50, (len(rows), len(LONGEST)), generator=generator)
    mask = torch.zeros_like(ids)
    for n, row in enumerate(rows):
        columns = torch.randperm(len(LONGEST), generator=generator)[: len(row)].sort().values
        ids[n, columns] = torch.tensor(row)
        mask[n, columns] = 1
    batch = ss.token_batch(view(kind), ids, mask=mask)
    # `token_batch` overwrites the ids under the mask; a batch made otherwise still has them.
    return replace(batch, ids=ids) if layout == "any ids" else batch


@cache
def every_layout(kind: str) -> ss.TokenBatch:
    """All four layouts under one another."""
    return joined([padded(kind, layout) for layout in LAYOUTS])


@cache
def one_of_each(kind: str) -> ss.TokenBatch:
    """Each row once, each in another layout."""
    return joined([padded(kind, layout).select([n]) for n, layout in enumerate(LAYOUTS)])


def joined(batches: Sequence[ss.TokenBatch]) -> ss.TokenBatch:
    return ss.TokenBatch(
        ids=torch.cat([b.ids for b in batches]),
        mask=torch.cat([b.mask for b in batches]),
        texts=sum((b.texts for b in batches), ()),
        corpora=sum((b.corpora for b in batches), ()),
        bos=sum((b.bos for b in batches), ()),
    )


def rows_of(batch: ss.TokenBatch) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Each row's number and own tokens, but for the longest row's."""
    for n, (ids, mask) in enumerate(zip(batch.ids, batch.mask, strict=True)):
        row = tuple(ids[mask].tolist())
        if row != LONGEST:
            yield n, row


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


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(kind: str, layout: str) -> None:
    """Each layout holds the same rows, each of them padded, and gives `P(row alone)`."""
    batch = padded(kind, layout)
    assert tuple(row for _, row in rows_of(batch)) == ROWS
    assert batch.lengths.tolist() == [2, 5, 8, 3, 10]
    assert batch.position_ids.max(1).values.tolist() == [1, 4, 7, 2, 9]
    if layout in ("right", "left"):
        assert batch.mask[:, 0 if layout == "right" else -1].all()
    else:
        assert not batch.mask[:4].all(0).any()
    assert len(batch.ids[~batch.mask].unique()) == 1 or layout == "any ids"
    patterns = ss.patterns(view(kind), batch)
    for n, row in rows_of(batch):
        close(at_tokens(patterns, batch, n, 2), ss.patterns(view(kind), alone(kind, row))[0])


# --- measures -----------------------------------------------------------------------------

MEASURES: dict[str, tuple[Measure, int]] = {
    "patterns": (ss.patterns, 2),
    "sink_score": (lambda m, b, a=None, **k: ss.sink_score(m, b, a, LAYERS, **k), 0),
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
    "fidelity, mlp, ln": (lambda m, b, **k: ss.epe_fidelity(m, b, through_ln=True, **k), 1),
    "fidelity, block": (lambda m, b, **k: ss.epe_fidelity(m, b, "block", **k), 1),
    "fidelity, causal": (lambda m, b, **k: ss.epe_fidelity(m, b, "causal_block", **k), 1),
}


@pytest.mark.parametrize("name", MEASURES)
def test_measures(kind: str, name: str) -> None:
    """`f(batch)[row, ..., tokens] = f(row alone)[0]`; f is NaN at padding, and nowhere else.

    Patterns are the exception: rows of padding are as the model computes them.
    """
    measure, axes = MEASURES[name]
    singly = {row: measure(view(kind), alone(kind, row))[0] for row in ROWS}
    every = torch.cat([one.flatten() for one in singly.values()])
    assert len(every.unique()) > 1, "values that are all alike would show no mistake"
    for batch, size in ((every_layout(kind), None), (one_of_each(kind), 1)):
        together = measure(view(kind), batch, batch_size=size)
        for n, row in rows_of(batch):
            close(at_tokens(together, batch, n, axes), singly[row])
            if axes == 1:
                assert together[n][..., ~batch.mask[n]].isnan().all()


def test_score_terms(kind: str) -> None:
    """`term(batch)[row] = term(row alone)` at visible pairs, which are the row's own.

    The errors and their tolerance are over the rows' tokens: padding adds nothing to them.
    """
    singly = {row: ss.decompose_scores(view(kind), alone(kind, row)) for row in ROWS}
    longest = ss.decompose_scores(view(kind), alone(kind, LONGEST))
    for batch, size in ((every_layout(kind), None), (one_of_each(kind), 1)):
        together = ss.decompose_scores(view(kind), batch, batch_size=size)
        pairs = sum(int(n) * (int(n) + 1) // 2 for n in batch.lengths)
        assert int(together.visible.sum()) == pairs * len(LAYERS)
        tolerances = [longest.tolerance] if size is None else []
        for n, row in rows_of(batch):
            visible = at_tokens(together.visible, batch, n, 2)
            assert torch.equal(visible, torch.ones_like(visible).tril())
            assert torch.equal(visible, singly[row].visible[0])
            tolerances.append(singly[row].tolerance)
            for term in TERMS:
                ours = at_tokens(getattr(together, term), batch, n, 2)
                close(ours, getattr(singly[row], term)[0])
        assert together.max_error < EXACT
        assert together.pattern_error < EXACT
        assert together.tolerance == pytest.approx(max(tolerances), rel=1e-9, abs=0)


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
    "no causal mask": LiftCausalMask(),
}
ABLATIONS = {**PAPER_CONDITIONS, **RESTRICTED}
WITHOUT_EFFECT = ("Baseline", "b_Q at 0")  # the first query has one key to attend to


@cache
def untouched(kind: str, row: tuple[int, ...]) -> Tensor:
    return ss.patterns(view(kind), alone(kind, row))[0]


@pytest.mark.parametrize("name", ABLATIONS)
def test_ablations(kind: str, name: str) -> None:
    """An edited row's patterns and sink score are those of the same edit on the row alone.

    Every row shows a difference to the untouched model, so that equal numbers mean an edit in
    the right place, and not one that does nothing.
    """
    measures = ["patterns"] if name == "no causal mask" else ["patterns", "sink_score"]
    for which in measures:
        measure, axes = MEASURES[which]
        singly = {row: measure(view(kind), alone(kind, row), ABLATIONS[name])[0] for row in ROWS}
        if which == "patterns":
            for row, one in singly.items():
                moved = float((one - untouched(kind, row)).abs().max())
                assert (moved == 0) if name in WITHOUT_EFFECT else (moved > 1e-3)
        batches = [(every_layout(kind), None), (one_of_each(kind), 1)]
        for batch, size in batches if which == "patterns" else batches[:1]:
            together = measure(view(kind), batch, ABLATIONS[name], batch_size=size)
            for n, row in rows_of(batch):
                close(at_tokens(together, batch, n, axes), singly[row])


@pytest.mark.filterwarnings("ignore:an edit at")  # the hook that only looks
def test_edits_at_position_0_go_where_it_is(kind: str) -> None:
    """`q_0 -> q_0 - b_Q` moves no pattern, but the scores; only of each row's own position 0."""
    batch = every_layout(kind)
    seen: list[Tensor] = []
    look = Ablation.from_hook(ss.Site("q", 1), lambda q, hook: seen.append(q.clone()))
    for ablation in (look, ZeroQueryBias(positions=[0], layers=[1]) + look):
        ss.patterns(view(kind), batch, ablation)
    taken = seen[0] - seen[1]
    at_zero = batch.position_ids == 0
    assert int(at_zero.sum()) == len(batch)
    close(taken[at_zero], view(kind).b_Q(1).expand_as(taken[at_zero]))
    assert not taken[~at_zero].any()


def test_no_query_attends_to_padding_without_the_causal_mask(kind: str) -> None:
    """`P[i, j] = 0` for every token i and every masked j, also where j lies before i."""
    batch = every_layout(kind)
    patterns = ss.patterns(view(kind), batch, LiftCausalMask())
    to_padding = batch.mask[:, :, None] & ~batch.mask[:, None, :]
    assert not (patterns * to_padding[:, None, None]).any()
    assert patterns.triu(1).sum() > 1


@pytest.mark.parametrize("name", ["Swap EPE", "keys at 1, then all", "b_Q at 1", "p_1 = p_0"])
def test_ablations_around_the_models_own_call(kind: str, name: str) -> None:
    """`applied(model, batch)` and `fwd_hooks(model, batch)` find each row's positions."""
    model, batch, ablation = view(kind).model, every_layout(kind), ABLATIONS[name]
    mask = batch.mask.long()
    with torch.no_grad(), ablation.applied(model, batch):
        applied = model(batch.ids, attention_mask=mask)
    with torch.no_grad():
        hooks = ablation.fwd_hooks(model, batch)
        hooked = model.run_with_hooks(batch.ids, attention_mask=mask, fwd_hooks=hooks)
    singly = {}
    for row in ROWS:
        with torch.no_grad(), ablation.applied(model):
            singly[row] = model(alone(kind, row).ids)[0]
    for n, row in rows_of(batch):
        for logits in (applied, hooked):
            close(logits[n, batch.mask[n]], singly[row])


# --- rows of one token --------------------------------------------------------------------

ONE_TOKEN = (1, 2, 3, 4, 5), (6,)
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


@pytest.mark.parametrize("name", ["sink_score", "sink_rate", "sink_position"])
def test_one_token_has_no_sink(kind: str, name: str) -> None:
    """One token attends to itself alone: refused by row, whatever padding surrounds it."""
    measure, _ = MEASURES[name]
    for layout in LAYOUTS:
        with pytest.raises(InvalidInputError, match="row 1 with 1"):
            measure(view(kind), padded(kind, layout, ONE_TOKEN))
    with pytest.raises(InvalidInputError, match="row 0 with 1"):
        measure(view(kind), alone(kind, ONE_TOKEN[1]))


@pytest.mark.parametrize("name", NEEDS_POSITION_1)
def test_one_token_has_no_position_1(kind: str, name: str) -> None:
    """Padding is no position: an edit at position 1 is refused, and not made at a pad."""
    batches = [padded(kind, layout, ONE_TOKEN) for layout in LAYOUTS]
    for batch in (*batches, alone(kind, ONE_TOKEN[1])):
        with pytest.raises(EditError, match=r"no position 1.* Got: 1\."):
            ss.patterns(view(kind), batch, ABLATIONS[name])


@pytest.mark.parametrize("name", [n for n in ABLATIONS if n not in NEEDS_POSITION_1])
@pytest.mark.filterwarnings("ignore:an edit at")  # one token has no mask to lift
def test_one_token_takes_the_other_ablations(kind: str, name: str) -> None:
    """`|x|` of a lone token, padded or not, is that of the row alone under the same edit."""
    batch = joined([padded(kind, layout, ONE_TOKEN) for layout in LAYOUTS])
    together = ss.residual_norms(view(kind), batch, ABLATIONS[name])
    one = ss.residual_norms(view(kind), alone(kind, ONE_TOKEN[1]), ABLATIONS[name])[0]
    lone = [n for n, row in rows_of(batch) if row == ONE_TOKEN[1]]
    assert len(lone) == len(LAYOUTS)
    for n in lone:
        close(at_tokens(together, batch, n, 1), one)
