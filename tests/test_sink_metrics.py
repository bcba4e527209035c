"""Metrics against loops written from their definitions, on random patterns with padding."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sinkscope import metrics
from sinkscope.errors import InvalidInputError
from sinkscope.measures import of_received


def random_case(
    batch: int, width: int, seed: int, window: int | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pattern, mask and visibility of rows padded on either side, at least two tokens each."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.zeros(batch, width, dtype=torch.bool)
    for row in range(batch):
        length = int(torch.randint(2, width + 1, (), generator=generator))
        start = int(torch.randint(0, width - length + 1, (), generator=generator))
        mask[row, start : start + length] = True
    visible = torch.zeros(batch, width, width, dtype=torch.bool)
    for b in range(batch):
        for q in range(width):
            for k in range(q + 1):
                near = window is None or q - k < window
                visible[b, q, k] = bool(mask[b, q] and mask[b, k]) and near
    scores = 2 * torch.randn(batch, 3, width, width, generator=generator, dtype=torch.float64)
    pattern = scores.masked_fill(~visible[:, None], -torch.inf).softmax(-1)
    # What a model writes into rows of padding must not matter.
    return pattern.nan_to_num(nan=0.9), mask, visible


CASES = {
    "batch": st.integers(1, 4),
    "width": st.integers(2, 9),
    "seed": st.integers(0, 10_000),
    "window": st.none() | st.integers(1, 6),
}


@settings(max_examples=60, deadline=None)
@given(**CASES)
def test_visibility(batch: int, width: int, seed: int, window: int | None) -> None:
    _, mask, visible = random_case(batch, width, seed, window)
    assert torch.equal(metrics.causal_visibility(mask, window), visible)


@settings(max_examples=60, deadline=None)
@given(**CASES)
def test_sink_score(batch: int, width: int, seed: int, window: int | None) -> None:
    """Mean of pattern[i, first] over visible i >= T // 2, by loop."""
    pattern, mask, visible = random_case(batch, width, seed, window)
    ours = metrics.sink_score(pattern, mask, visible)
    for b in range(batch):
        columns = [c for c in range(width) if mask[b, c]]
        late = [c for i, c in enumerate(columns) if i >= len(columns) // 2]
        seen = [c for c in late if visible[b, c, columns[0]]]
        for head in range(3):
            values = [float(pattern[b, head, c, columns[0]]) for c in seen]
            if values:
                assert float(ours[b, head]) == pytest.approx(sum(values) / len(values), abs=1e-12)
            else:
                assert math.isnan(float(ours[b, head]))


@settings(max_examples=60, deadline=None)
@given(**CASES)
def test_received_attention_rate_and_position(
    batch: int, width: int, seed: int, window: int | None
) -> None:
    """alpha_k = mean over the queries that see k; the rate and the position follow from it."""
    pattern, mask, visible = random_case(batch, width, seed, window)
    alpha = metrics.received_attention(pattern, mask, visible)
    rate = metrics.sink_rate(alpha, mask, eps=0.3)
    position = metrics.sink_position(alpha, mask)
    for b in range(batch):
        columns = [c for c in range(width) if mask[b, c]]
        for head in range(3):
            expected = {}
            for k in range(width):
                queries = [q for q in range(width) if visible[b, q, k]]
                if queries:
                    values = [float(pattern[b, head, q, k]) for q in queries]
                    expected[k] = sum(values) / len(values)
                    assert float(alpha[b, head, k]) == pytest.approx(expected[k], abs=1e-12)
                else:
                    assert math.isnan(float(alpha[b, head, k]))
            assert float(rate[b, head]) == float(expected[columns[0]] > 0.3)
            best = max(expected, key=lambda k: expected[k])
            assert int(position[b, head]) == columns.index(best)


def test_a_sink_that_moved_is_found_where_it_went() -> None:
    """All attention on position 2 where it can be seen, with two columns of padding in front."""
    mask = torch.tensor([[False, False, True, True, True, True, True, True]])
    pattern = torch.zeros(1, 1, 8, 8)
    for q in range(2, 8):
        pattern[0, 0, q, min(q, 4)] = 1.0
    alpha = metrics.received_attention(pattern, mask)
    assert int(metrics.sink_position(alpha, mask)[0, 0]) == 2
    assert float(metrics.sink_score(pattern, mask)[0, 0]) == 0.0


def test_position_is_corrected_for_how_many_queries_see_a_key() -> None:
    """A late key that all its few queries attend to receives more than an early, half-used one."""
    pattern = torch.zeros(1, 1, 6, 6)
    pattern[0, 0, :, 0] = 0.5
    pattern[0, 0, 4:, 4] = 0.9
    pattern[0, 0, 4:, 0] = 0.1
    pattern[0, 0, 0, 0] = 1.0
    mask = torch.ones(1, 6, dtype=torch.bool)
    alpha = metrics.received_attention(pattern, mask)
    assert float(alpha[0, 0, 4]) == pytest.approx(0.9)
    assert int(metrics.sink_position(alpha, mask)[0, 0]) == 4


@pytest.mark.parametrize("metric", [metrics.sink_score, metrics.received_attention])
def test_one_token_is_refused(metric: object) -> None:
    mask = torch.tensor([[True, True], [True, False]])
    with pytest.raises(InvalidInputError, match=r"row 1 with 1.*leave short prompts out"):
        metric(torch.ones(2, 1, 2, 2), mask)  # type: ignore[operator]


def test_rate_refuses_a_threshold_that_is_no_share() -> None:
    with pytest.raises(InvalidInputError, match="eps from 0 to 1"):
        metrics.sink_rate(torch.ones(1, 1, 2), torch.ones(1, 2, dtype=torch.bool), eps=30.0)


def test_cosine_against_its_definition() -> None:
    a, b = torch.randn(2, 5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    a[3] = 0
    ours = metrics.cosine(a, b)
    for row in range(5):
        if row == 3:
            assert math.isnan(float(ours[row]))
            continue
        dot = sum(float(x) * float(y) for x, y in zip(a[row], b[row], strict=True))
        size = math.dist(a[row].tolist(), [0] * 7) * math.dist(b[row].tolist(), [0] * 7)
        assert float(ours[row]) == pytest.approx(dot / size, abs=1e-14)


def test_a_position_is_not_rounded_in_half_precision() -> None:
    n, sink = 300, 257  # no bfloat16
    pattern = torch.zeros(1, 1, n, n, dtype=torch.bfloat16)
    pattern[..., sink] = 1
    mask = torch.ones(1, n, dtype=torch.bool)
    both = of_received(metrics.sink_rate, metrics.sink_position)
    found = both(pattern, mask, metrics.full_visibility(mask))
    assert found.tolist() == [[[0.0, float(sink)]]]
