"""Sink metrics at their edges: numbers by hand, windows, padding that holds NaN, extreme lengths."""

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


@pytest.mark.parametrize(
    ("size", "dtype"), [(600.0, torch.float16), (1e-3, torch.float16), (1e25, torch.float32)]
)
def test_cosine_of_large_and_small_vectors(size: float, dtype: torch.dtype) -> None:
    """The cosine does not depend on length, even where the product of two norms has no room."""
    a = size * torch.tensor([3.0, 4.0, 0.0], dtype=dtype)
    b = size * torch.tensor([4.0, 3.0, 0.0], dtype=dtype)
    assert float(metrics.cosine(a, b)) == pytest.approx(0.96, abs=2e-3)
