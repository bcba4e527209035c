"""Which coordinates of a vector are massive: the rules of the literature, behind one finder."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinkscope._types import Vector
from sinkscope.display import HtmlTable, number
from sinkscope.errors import InvalidInputError


@runtime_checkable
class Rule(Protocol):
    """What a rule gives: the magnitude above which a coordinate of `vector` is massive."""

    def threshold(self, vector: Vector) -> float:
        """The smallest magnitude that is not massive."""
        ...


@dataclass(frozen=True)
class MeanStd:
    """`|v_d| > mean|v| + k std|v|`, with the population standard deviation.

    Source: the paper (k = 3).
    """

    k: float = 3.0

    def threshold(self, vector: Vector) -> float:
        """`mean|v| + k std|v|`."""
        _require_number("MeanStd", k=self.k)
        magnitude = vector.abs()
        return float(magnitude.mean() + self.k * magnitude.std(correction=0))


@dataclass(frozen=True)
class TopK:
    """The `k` coordinates of largest magnitude; ties go to the smaller index.

    Source: the paper's intervention "Zero Top-3 Wk" (k = 3).
    """

    k: int = 3

    def threshold(self, vector: Vector) -> float:
        """The largest magnitude that is left out (minus infinity if none is)."""
        if type(self.k) is not int or not 1 <= self.k <= vector.numel():
            raise InvalidInputError(
                "TopK asks for more or fewer coordinates than there are",
                expected=f"k from 1 to {vector.numel()}",
                got=f"k={self.k}",
                fix="choose a k in this range",
            )
        magnitude = vector.abs().sort(descending=True).values
        return float(magnitude[self.k]) if self.k < vector.numel() else float("-inf")


@dataclass(frozen=True)
class MedianRatio:
    """`|v_d| > absolute` and `|v_d| > ratio * median|v|`.

    Source: Sun et al. 2024, "Massive Activations in Large Language Models" (100 and 1000).
    They take the median over all of a layer's activations; a single vector given here takes
    its own. `absolute=None` drops the first condition, which depends on the model's scale.
    """

    absolute: float | None = 100.0
    ratio: float = 1000.0

    def threshold(self, vector: Vector) -> float:
        """`max(absolute, ratio * median|v|)`."""
        _require_number("MedianRatio", ratio=self.ratio)
        if self.absolute is not None:
            _require_number("MedianRatio", absolute=self.absolute)
        relative = self.ratio * float(vector.abs().quantile(0.5))
        return relative if self.absolute is None else max(self.absolute, relative)


@dataclass(frozen=True)
class MassiveCoordinates(HtmlTable):
    """Coordinates that a rule calls massive.

    Attributes:
        indices: `[n]` coordinates, by falling magnitude.
        values: `[n]` their signed values.
        threshold: the rule's threshold on the magnitude, in the vector's own units.
        rule: the rule.
        d_model: the length of the vector that was searched.
    """

    indices: Int[Tensor, " n"]
    values: Float[Tensor, " n"]
    threshold: float
    rule: Rule = field(default_factory=MeanStd)
    d_model: int = 0

    def __len__(self) -> int:
        return self.indices.numel()

    def overview(self) -> list[tuple[str, str]]:
        found = zip(self.indices.tolist(), self.values.tolist(), strict=True)
        rule = ("rule", f"{self.rule}, |v| > {number(self.threshold)}")
        return [rule, *((str(index), f"{value:+.4g}") for index, value in found)]

    @property
    def coordinates(self) -> tuple[int, ...]:
        """The indices in rising order, as plain integers."""
        return tuple(sorted(int(i) for i in self.indices))


def find_massive_coordinates(
    vector: Float[Tensor, " d_model"], rule: Rule | None = None
) -> MassiveCoordinates:
    """The coordinates of one vector (an EPE row, a residual) that a rule calls massive.

    Args:
        vector: `[d_model]`.
        rule: `MeanStd(3.0)` if not given.

    Raises:
        InvalidInputError: not one vector, or values that are not finite.
    """
    rule = MeanStd() if rule is None else rule
    if isinstance(rule, type) or not isinstance(rule, Rule):
        raise InvalidInputError(
            "This is not a rule",
            expected="MeanStd(k), TopK(k), MedianRatio(absolute, ratio), or an object with "
            "threshold(vector)",
            got=repr(rule),
            fix="pass one of these, or None for the paper's MeanStd(3.0)",
        )
    if not isinstance(vector, Tensor):
        raise InvalidInputError(
            "The vector is not a tensor",
            expected="a tensor of shape [d_model]",
            got=type(vector).__name__,
            fix="pass torch.tensor(vector)",
        )
    if vector.ndim != 1 or vector.numel() == 0:
        raise InvalidInputError(
            "Massive coordinates are looked for in one vector at a time",
            expected="shape [d_model]",
            got=f"shape {list(vector.shape)}",
            fix="index one row first, as in epe.vectors[0]",
        )
    vector = vector.detach()
    if not bool(torch.isfinite(vector).all()):
        raise InvalidInputError(
            "The vector holds values that are not finite",
            expected="finite values",
            got=f"{int((~torch.isfinite(vector)).sum())} of {vector.numel()} NaN or infinite",
            fix="look at the weights or the run that the vector is from",
        )
    if not vector.is_floating_point() or vector.dtype in (torch.float16, torch.bfloat16):
        vector = vector.float()
    threshold = rule.threshold(vector)
    order = vector.abs().argsort(descending=True, stable=True)
    indices = order[: rule.k] if isinstance(rule, TopK) else order[_above(vector, order, threshold)]
    return MassiveCoordinates(
        indices=indices,
        values=vector[indices],
        threshold=threshold,
        rule=rule,
        d_model=vector.numel(),
    )


def _require_number(rule: str, **values: object) -> None:
    for name, value in values.items():
        if not isinstance(value, (int, float)):
            raise InvalidInputError(
                f"{rule} compares with numbers",
                expected=f"a number for {name}",
                got=repr(value),
                fix=f"pass {rule}({name}=3.0), say",
            )


def _above(vector: Tensor, order: Tensor, threshold: float) -> Bool[Tensor, " d_model"]:
    return vector.abs()[order] > threshold
