"""Random models, batches and ablations; the identities are the oracle, in float64.

`HYPOTHESIS_CASES=20000 pytest tests/test_random_models.py` draws so many cases instead of 500.
Models are made once for each architecture and reused, so that a case costs a few passes.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from models import hook, tiny_gpt2
from torch import Tensor

import sinkscope as ss
from sinkscope import metrics
from sinkscope.ablations import (
    Ablation,
    Composition,
    ReplacePosition,
    SkipMLP,
    SwapEPE,
    SwapPE,
    ZeroKeyColumns,
    ZeroPositions,
    ZeroQueryBias,
    ZeroRandomKeyColumns,
    ZeroToken,
)

CASES = int(os.environ.get("HYPOTHESIS_CASES", "500"))
EXACT = 1e-9
D_VOCAB = 20
N_CTX = 12


@dataclass(frozen=True)
class Shape:
    """One architecture's sizes, by which its model is kept."""

    n_layers: int
    n_heads: int
    d_head: int
    seed: int
    options: tuple[tuple[str, Any], ...] = ()


def gpt2(shape: Shape) -> Any:
    """A GPT-2 in float64, all of its weights random."""
    return tiny_gpt2(
        shape.n_layers,
        shape.n_heads,
        shape.d_head,
        N_CTX,
        D_VOCAB,
        seed=shape.seed,
        **dict(shape.options),
    )


BUILDERS: dict[str, Callable[[Shape], Any]] = {"gpt2": gpt2}
"""From a shape to a transformers model; a family added here gets every property below."""

SHAPES = [
    Shape(2, 2, 3, 0),
    Shape(1, 1, 4, 1),
    Shape(2, 3, 1, 2),
    Shape(3, 2, 2, 3, (("scale_attn_by_inverse_layer_idx", True),)),
    Shape(2, 2, 3, 4, (("activation_function", "relu"),)),
]


@cache
def view_of(family: str, shape: Shape, kind: str) -> ss.ModelView:
    return ss.model_view(hook(BUILDERS[family](shape), kind))


@dataclass(frozen=True)
class Case:
    """What one case runs: a model, rows of ids, how they are padded, and an ablation."""

    family: str
    shape: Shape
    rows: tuple[tuple[int, ...], ...]
    padding: str
    ablation: Ablation

    def view(self, kind: str) -> ss.ModelView:
        return view_of(self.family, self.shape, kind)

    def batch(self, kind: str) -> ss.TokenBatch:
        return ss.token_batch(self.view(kind), self.rows, padding=self.padding)


def some(n: int) -> st.SearchStrategy[Any]:
    """None, or some numbers from 0 to n - 1, each once."""
    return st.none() | st.lists(st.integers(0, n - 1), min_size=1, max_size=n, unique=True)


def parts(shape: Shape, length: int) -> st.SearchStrategy[Ablation]:
    """Single ablations that every row of at least `length` tokens takes."""
    d_model = shape.n_heads * shape.d_head
    layers, heads, positions = some(shape.n_layers), some(shape.n_heads), some(length)
    columns = st.lists(st.integers(0, d_model - 1), min_size=1, max_size=d_model)
    return st.one_of(
        st.builds(ZeroQueryBias, layers, heads, positions),
        st.builds(ZeroKeyColumns, columns.map(tuple), layers, heads, positions),
        st.builds(ZeroRandomKeyColumns, st.integers(1, 3), st.integers(0, 9), layers, heads),
        st.builds(SkipMLP, layers, positions),
        st.builds(ZeroPositions, positions),
        st.builds(ZeroToken, st.integers(0, length - 1)),
        st.builds(ReplacePosition, st.integers(0, length - 1), st.integers(0, length - 1)),
        st.sampled_from([SwapEPE(), SwapPE()]),
    )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    family, shape = draw(st.sampled_from(sorted(BUILDERS))), draw(st.sampled_from(SHAPES))
    ids = st.integers(0, D_VOCAB - 1)
    same = draw(st.booleans())
    padding = "none" if same else draw(st.sampled_from(["left", "right"]))
    lengths = draw(st.lists(st.integers(2, N_CTX), min_size=1, max_size=3))
    lengths = [lengths[0]] * len(lengths) if same else lengths
    rows = tuple(tuple(draw(st.lists(ids, min_size=n, max_size=n))) for n in lengths)
    chosen = draw(st.lists(parts(shape, min(lengths)), max_size=3))
    return Case(family, shape, rows, padding, Composition(tuple(chosen)))


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=EXACT, equal_nan=True)


def at_tokens(patterns: Tensor, batch: ss.TokenBatch) -> Tensor:
    """Patterns with 0 in rows and columns of padding, which are as the model computes them."""
    tokens = batch.mask[:, :, None] & batch.mask[:, None, :]
    return patterns.masked_fill(
        ~tokens.reshape(len(batch), *[1] * (patterns.ndim - 3), *tokens.shape[1:]), 0
    )


drawn = settings(
    max_examples=math.ceil(CASES / 3),
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=CASES == 500,
    database=None,
)
no_effect_is_fine = pytest.mark.filterwarnings("ignore:an edit at")
SWAPPED = Case("gpt2", SHAPES[0], ((1, 2), (3, 4, 5)), "left", SwapEPE() + ZeroQueryBias())


@no_effect_is_fine
@example(SWAPPED)
@drawn
@given(case=cases())
def test_three_ways_to_run_an_ablation_agree(kind: str, case: Case) -> None:
    """As an argument, `applied` and `fwd_hooks`; the guard checks softmax(scale q.k) besides."""
    view, batch = case.view(kind), case.batch(kind)
    before = view.weights_hash()
    last = view.n_layers - 1
    expected = at_tokens(ss.patterns(view, batch, case.ablation, layers=[last])[:, 0], batch)
    name = view.hook_point(ss.Site("pattern", last)).name
    seen: list[Tensor] = []
    look = [(name, lambda pattern, hook: seen.append(pattern.clone()))]
    mask = {} if case.padding == "none" else {"attention_mask": batch.mask.long()}
    with torch.no_grad():
        with case.ablation.applied(view, batch):
            view.model.run_with_hooks(batch.ids, fwd_hooks=look, **mask)
        hooks = [*case.ablation.fwd_hooks(view, batch), *look]
        view.model.run_with_hooks(batch.ids, fwd_hooks=hooks, **mask)
    assert len(seen) == 2
    for pattern in seen:
        close(at_tokens(pattern, batch), expected)
    assert view.weights_hash() == before


@no_effect_is_fine
@example(SWAPPED, 0)
@drawn
@given(case=cases(), n=st.integers(0, 2))
def test_a_row_in_a_batch_is_the_row_alone(kind: str, case: Case, n: int) -> None:
    """Whatever is padded on which side, and whatever is ablated at whatever positions."""
    view, batch = case.view(kind), case.batch(kind)
    n %= len(case.rows)
    alone = ss.token_batch(view, [case.rows[n]])
    own = batch.mask[n].nonzero()[:, 0]
    together = ss.patterns(view, batch, case.ablation, batch_size=2)[n]
    single = ss.patterns(view, alone, case.ablation)[0]
    close(together[..., own[:, None], own], single)
    scores = [
        metrics.sink_score(pattern, b.mask)
        for pattern, b in ((together, batch.select([n])), (single, alone))
        for pattern in [pattern.reshape(1, -1, *pattern.shape[-2:])]
    ]
    close(*scores)


@drawn
@given(case=cases())
def test_the_terms_are_the_models_own_scores_and_pattern(kind: str, case: Case) -> None:
    """`softmax(sum of terms) = pattern`, key_bias drops out, and Delta is the query-bias term."""
    view, batch = case.view(kind), case.batch(kind)
    layer = view.n_layers - 1
    terms = ss.decompose_scores(view, batch, layers=[layer])
    assert terms.max_error <= terms.tolerance < EXACT
    visible = terms.visible[:, :, None]
    pattern = at_tokens(ss.patterns(view, batch, layers=[layer]), batch)
    for total in (terms.total, terms.content + terms.query_bias):
        own = total.masked_fill(~visible, -math.inf).softmax(-1)
        close(own.nan_to_num(0.0), pattern)
    delta = ss.source_agnostic_shift(view, batch, "score", layers=[layer])
    hidden = ~batch.mask[:, None, None, :]
    close(delta, terms.query_bias[..., 0, :].masked_fill(hidden, math.nan))
