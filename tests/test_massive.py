"""Rules for massive coordinates against numpy, on drawn vectors, and at their edges."""

from __future__ import annotations

from dataclasses import dataclass
from inspect import unwrap

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import sinkscope as ss
from sinkscope.errors import InvalidInputError

several = settings(max_examples=25, deadline=None, derandomize=True)
vectors = st.lists(st.floats(-100, 100, width=32), min_size=2, max_size=20)


def vector(*values: float, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor(values, dtype=dtype)


@several
@given(values=vectors, k=st.floats(0, 4, width=16))
def test_mean_std_is_the_population_rule(values: list[float], k: float) -> None:
    """`|v_d| > mean|v| + k std|v|`, std over n and not over n - 1."""
    magnitude = np.abs(np.asarray(values))
    threshold = magnitude.mean() + k * magnitude.std(ddof=0)
    found = ss.find_massive_coordinates(vector(*values), ss.MeanStd(k))
    assert found.threshold == pytest.approx(threshold, rel=1e-12, abs=1e-12)
    clear = np.abs(magnitude - threshold) > 1e-9
    expected = {d for d in range(len(values)) if magnitude[d] > threshold and clear[d]}
    assert expected == {d for d in found.coordinates if clear[d]}


def test_default_rule_is_the_papers() -> None:
    """No rule given is `MeanStd(3.0)`: one of 20 equal-but-one coordinates is massive."""
    values = vector(*[1.0] * 7, -30.0, *[1.0] * 12)
    found = ss.find_massive_coordinates(values)
    assert found.rule == ss.MeanStd(3.0)
    assert found.coordinates == (7,)
    assert found.values.tolist() == [-30.0]
    assert found.d_model == 20


def test_threshold_is_not_massive_itself() -> None:
    """`>`, not `>=`: a vector of equal magnitudes has none at k = 0."""
    assert len(ss.find_massive_coordinates(vector(2, -2, 2, -2), ss.MeanStd(0.0))) == 0
    at_threshold = ss.MedianRatio(absolute=None, ratio=3.0)
    assert ss.find_massive_coordinates(vector(1, -1, 1, 3, -3.5), at_threshold).coordinates == (4,)


@several
@given(values=vectors, data=st.data())
def test_top_k(values: list[float], data: st.DataObject) -> None:
    """The k largest magnitudes, larger first, of equal ones the smaller index first."""
    k = data.draw(st.integers(1, len(values)))
    found = ss.find_massive_coordinates(vector(*values), ss.TopK(k))
    order = sorted(range(len(values)), key=lambda d: (-abs(values[d]), d))
    assert found.indices.tolist() == order[:k]
    assert found.values.tolist() == [values[d] for d in order[:k]]
    left_out = abs(values[order[k]]) if k < len(values) else float("-inf")
    assert found.threshold == left_out
    assert list(found.coordinates) == sorted(order[:k])


def test_top_k_ties() -> None:
    """Of five equal magnitudes TopK takes the first ones, whatever their signs."""
    found = ss.find_massive_coordinates(vector(1, -5, 5, -5, 5, 5), ss.TopK(3))
    assert found.indices.tolist() == [1, 2, 3]
    assert found.values.tolist() == [-5, 5, -5]
    assert found.threshold == 5
    many = torch.ones(300, dtype=torch.float64)  # beyond the length where sorts become unstable
    assert ss.find_massive_coordinates(many, ss.TopK(4)).indices.tolist() == [0, 1, 2, 3]


@several
@given(values=vectors, ratio=st.floats(1, 50), absolute=st.floats(1, 80))
def test_median_ratio(values: list[float], ratio: float, absolute: float) -> None:
    """`|v_d| > absolute` and `|v_d| > ratio median|v|`, or the second alone."""
    magnitude = np.abs(np.asarray(values))
    median = float(np.median(magnitude))
    both = ss.find_massive_coordinates(vector(*values), ss.MedianRatio(absolute, ratio))
    alone = ss.find_massive_coordinates(vector(*values), ss.MedianRatio(None, ratio))
    clear = [d for d in range(len(values)) if abs(magnitude[d] - ratio * median) > 1e-9]
    relative = {d for d in clear if magnitude[d] > ratio * median}
    assert {d for d in alone.coordinates if d in clear} == relative
    assert {d for d in both.coordinates if d in clear} == {
        d for d in relative if magnitude[d] > absolute
    }
    assert alone.threshold == pytest.approx(ratio * median)


def test_median_ratio_defaults_are_sun_et_al() -> None:
    """100 and 1000: 150 is massive beside a median of .1, 90 is not, nor is 150 beside .2."""
    small = [0.1] * 9
    found = ss.find_massive_coordinates(vector(*small, 150, -120, 90), ss.MedianRatio())
    assert found.coordinates == (9, 10)
    assert found.values.tolist() == [150, -120]
    assert found.threshold == pytest.approx(100)
    large = vector(*[0.2] * 9, 150, -210)
    assert ss.find_massive_coordinates(large, ss.MedianRatio()).coordinates == (10,)
    scaled = vector(*small, 90) / 50
    assert len(ss.find_massive_coordinates(scaled, ss.MedianRatio(ratio=500.0))) == 0
    free = ss.MedianRatio(absolute=None, ratio=500.0)
    assert ss.find_massive_coordinates(scaled, free).coordinates == (9,)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "rule", [ss.MeanStd(3.0), ss.TopK(2), ss.MedianRatio(absolute=None)], ids=repr
)
def test_short_floats(dtype: torch.dtype, rule: ss.MeanStd) -> None:
    """float16 sums would overflow here (300 values of 256); the rules work in float32."""
    values = torch.full((300,), 0.25, dtype=dtype)
    values[[5, 250]] = torch.tensor([-60000.0, 50000.0], dtype=dtype)
    found = ss.find_massive_coordinates(values, rule)
    assert found.indices.tolist() == [5, 250]
    assert found.values.tolist() == values[[5, 250]].tolist()
    assert np.isfinite(found.threshold)


def test_a_rule_of_ones_own() -> None:
    """Any object with `threshold(vector)` is a rule, and the vector is not changed."""

    @dataclass(frozen=True)
    class AboveTwo:
        def threshold(self, vector: Tensor) -> float:
            return 2.0

    values = vector(1, -3, 2, 5)
    found = ss.find_massive_coordinates(values, AboveTwo())
    assert found.indices.tolist() == [3, 1]
    assert values.tolist() == [1, -3, 2, 5]


@pytest.mark.parametrize("shape", [(2, 5), (0,), ()])
def test_one_vector_at_a_time(shape: tuple[int, ...]) -> None:
    with pytest.raises(InvalidInputError, match="one vector at a time"):
        unwrap(ss.find_massive_coordinates)(torch.ones(shape))
