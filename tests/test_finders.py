"""Each rule against its formula, on planted vectors."""

from __future__ import annotations

import statistics

import pytest
import torch

import sinkscope as ss
from sinkscope.errors import InvalidInputError


def planted(d_model: int = 64, at: dict[int, float] | None = None) -> torch.Tensor:
    """Small noise with known large values."""
    vector = 0.1 * torch.randn(d_model, generator=torch.Generator().manual_seed(0))
    for index, value in (at or {5: 9.0, 17: -12.0, 40: 7.0}).items():
        vector[index] = value
    return vector


@pytest.mark.parametrize(
    "rule",
    [
        ss.MeanStd(3.0),
        ss.TopK(3),
        ss.MedianRatio(absolute=5.0, ratio=20.0),
        ss.MedianRatio(absolute=None, ratio=20.0),
    ],
)
def test_planted_coordinates_are_found_by_falling_magnitude(rule: object) -> None:
    found = ss.find_massive_coordinates(planted(), rule)  # type: ignore[arg-type]
    assert found.indices.tolist() == [17, 5, 40]
    assert found.values.tolist() == [-12.0, 9.0, 7.0]
    assert found.coordinates == (5, 17, 40)
    assert len(found) == 3
    assert found.rule == rule


def test_mean_std_takes_the_population_deviation() -> None:
    vector = planted()
    magnitudes = vector.abs().tolist()
    expected = statistics.fmean(magnitudes) + 3 * statistics.pstdev(magnitudes)
    sample = statistics.fmean(magnitudes) + 3 * statistics.stdev(magnitudes)
    threshold = ss.find_massive_coordinates(vector).threshold
    assert threshold == pytest.approx(expected, rel=1e-6)
    assert abs(threshold - sample) > 1e-3


def test_a_coordinate_between_population_and_sample_threshold_is_massive() -> None:
    """With four zeros and one value v, |v| = mean + 2 population std exactly; k just below 2 finds
    it and the sample deviation would not."""
    vector = torch.tensor([0.0, 0.0, 0.0, 0.0, 1.0])
    assert ss.find_massive_coordinates(vector, ss.MeanStd(1.99)).indices.tolist() == [4]
    assert len(ss.find_massive_coordinates(vector, ss.MeanStd(2.01))) == 0


def test_top_k_breaks_ties_by_index_and_takes_exactly_k() -> None:
    vector = torch.tensor([1.0, -2.0, 2.0, 2.0, 0.5])
    assert ss.find_massive_coordinates(vector, ss.TopK(2)).indices.tolist() == [1, 2]
    assert ss.find_massive_coordinates(vector, ss.TopK(5)).indices.tolist() == [1, 2, 3, 0, 4]


def test_median_ratio_needs_both_conditions_unless_told() -> None:
    vector = torch.tensor([0.01, 0.01, 0.01, 50.0, 150.0])
    assert ss.find_massive_coordinates(vector, ss.MedianRatio()).indices.tolist() == [4]
    ratio_only = ss.MedianRatio(absolute=None, ratio=1000.0)
    assert ss.find_massive_coordinates(vector, ratio_only).indices.tolist() == [4, 3]
    flat = torch.full((5,), 200.0)
    assert len(ss.find_massive_coordinates(flat, ss.MedianRatio())) == 0


def test_half_precision_gives_what_single_gives() -> None:
    vector = planted().half()
    assert (
        ss.find_massive_coordinates(vector).coordinates
        == ss.find_massive_coordinates(vector.float()).coordinates
        == (5, 17, 40)
    )


def test_the_vector_is_left_alone() -> None:
    vector = planted()
    before = vector.clone()
    ss.find_massive_coordinates(vector, ss.TopK(4))
    assert torch.equal(vector, before)


@pytest.mark.parametrize(
    ("vector", "rule", "says"),
    [
        (torch.tensor([1.0, float("nan")]), None, "1 of 2 NaN or infinite"),
        (torch.tensor([1.0, float("inf")]), None, "1 of 2 NaN or infinite"),
        (torch.tensor([1.0, 2.0]), ss.TopK(3), "k from 1 to 2"),
        (torch.tensor([1.0, 2.0]), ss.TopK(0), "k from 1 to 2"),
    ],
)
def test_bad_values_are_refused(vector: torch.Tensor, rule: object, says: str) -> None:
    with pytest.raises(InvalidInputError, match=says):
        ss.find_massive_coordinates(vector, rule)  # type: ignore[arg-type]
