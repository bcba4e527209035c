"""Sink metrics at their edges: by hand, with windows, with NaN at padding, at extreme lengths."""

from __future__ import annotations

import math

import pytest
import torch

from sinkscope import metrics

NAN = float("nan")


def test_positions() -> None:
    """Positions count 0, 1, 2 from the first token of each row; -1 at padding."""
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 0, 0, 0], [0, 1, 1, 1, 0]]).bool()
    assert metrics.position_ids(mask).tolist() == [
        [-1, -1, 0, 1, 2],
        [0, 1, -1, -1, -1],
        [-1, 0, 1, 2, -1],
    ]
    assert metrics.first_positions(mask).tolist() == [2, 0, 1]


def test_sink_score_by_hand() -> None:
    """Five tokens: queries 2, 3, 4 count, so the score is (.1 + .2 + .6) / 3."""
    pattern = torch.zeros(1, 1, 5, 5, dtype=torch.float64)
    pattern[0, 0, :, 0] = torch.tensor([1.0, 0.9, 0.1, 0.2, 0.6])
    mask = torch.ones(1, 5, dtype=torch.bool)
    assert float(metrics.sink_score(pattern, mask)) == pytest.approx(0.3)
    window = metrics.causal_visibility(mask, 4)  # query 4 no longer sees position 0
    assert float(metrics.sink_score(pattern, mask, window)) == pytest.approx(0.15)
    blind = metrics.causal_visibility(mask, 2)
    assert math.isnan(float(metrics.sink_score(pattern, mask, blind)))


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_may_hold_anything(side: str) -> None:
    """NaN in a pattern's rows and columns of padding reaches no metric."""
    generator = torch.Generator().manual_seed(0)
    pattern = torch.rand(2, 3, 6, 6, dtype=torch.float64, generator=generator)
    mask = torch.ones(2, 6, dtype=torch.bool)
    mask[1, :2] = False
    mask = mask if side == "left" else mask.flip(1)
    visible = metrics.causal_visibility(mask)[:, None]
    clean, dirty = (pattern.masked_fill(~visible, value) for value in (0.0, NAN))
    received = metrics.received_attention(clean, mask)
    torch.testing.assert_close(
        metrics.received_attention(dirty, mask), received, rtol=0, atol=0, equal_nan=True
    )
    assert received.isnan().any(1).tolist() == (~mask).tolist()
    score = metrics.sink_score(dirty, mask)
    assert torch.equal(score, metrics.sink_score(clean, mask))
    assert not bool(score.isnan().any())


@pytest.mark.parametrize("size", [600.0, 1e-3])
def test_cosine_does_not_depend_on_length(size: float) -> None:
    """`cos(s a, s b) = cos(a, b)` in float16 too, where `|a| |b|` would be infinite or 0."""
    a = torch.tensor([[3.0, 4.0, 0.0], [0.0, 1.0, 0.0]], dtype=torch.float16) * size
    b = torch.tensor([[4.0, 3.0, 0.0], [0.0, -2.0, 0.0]], dtype=torch.float16) * size
    assert metrics.cosine(a, b).tolist() == pytest.approx([0.96, -1.0], abs=3e-3)
    assert bool(metrics.cosine(a, 0 * b).isnan().all())


def test_a_rate_counts_what_is_above_its_threshold() -> None:
    received = torch.tensor([[[0.25, 0.9], [0.5, 0.9]]])
    mask = torch.ones(1, 2, dtype=torch.bool)
    assert metrics.sink_rate(received, mask, eps=0.25).tolist() == [[0.0, 1.0]]
