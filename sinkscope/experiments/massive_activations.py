"""The massive activations of EPE_0, by every rule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from sinkscope.capture import Progress
from sinkscope.display import number, numbers
from sinkscope.epe import extract_epe
from sinkscope.errors import InvalidInputError
from sinkscope.experiments._engine import Request, to_numpy
from sinkscope.massive import MeanStd, MedianRatio, Rule, TopK, find_massive_coordinates
from sinkscope.model import ModelView, model_view
from sinkscope.prompts import TokenBatch
from sinkscope.results import Result

if TYPE_CHECKING:
    import pandas as pd

RULES: tuple[Rule, ...] = (
    MeanStd(3.0),
    TopK(3),
    MedianRatio(),
    MedianRatio(absolute=None, ratio=100.0),
)


@dataclass(frozen=True, eq=False)
class MassiveActivations(Result):
    """EPE of one position, coordinate by coordinate, and what each rule calls massive.

    Attributes:
        epe: `[d_model]`, EPE_position.
        position: which position.
        rules: the rules, in words.
        massive: for each rule, its coordinates, rising.
        thresholds: for each rule, its threshold on the magnitude.
        through_ln: the form of the EPE.
    """

    kind: ClassVar[str] = "massive_activations"

    epe: np.ndarray
    position: int
    rules: tuple[str, ...]
    massive: tuple[tuple[int, ...], ...]
    thresholds: tuple[float, ...]
    through_ln: bool = False

    def coordinates(self, rule: Rule | None = None) -> tuple[int, ...]:
        """The massive coordinates by a rule, the paper's `MeanStd(3.0)` if None."""
        rule = MeanStd() if rule is None else rule
        if repr(rule) in self.rules:
            return self.massive[self.rules.index(repr(rule))]
        return find_massive_coordinates(torch.from_numpy(self.epe), rule).coordinates

    def to_dataframe(self) -> pd.DataFrame:
        """One row per coordinate: its value, and a true-or-false column for each rule."""
        import pandas as pd

        index = np.arange(len(self.epe))
        frame: dict[str, Any] = {"coordinate": index, "value": self.epe}
        for rule, found in zip(self.rules, self.massive, strict=True):
            frame[rule] = np.isin(index, found)
        return pd.DataFrame(frame)

    def overview(self) -> list[tuple[str, str]]:
        found = zip(self.rules, self.massive, self.thresholds, strict=True)
        return [
            (rule, f"{numbers(massive)} (threshold {number(threshold)})")
            for rule, massive, threshold in found
        ]

    def summary(self) -> dict[str, Any]:
        """Coordinates, values and threshold of each rule, and the vector itself."""
        rules = {
            rule: {
                "coordinates": found,
                "values": self.epe[list(found)],
                "threshold": threshold,
            }
            for rule, found, threshold in zip(
                self.rules, self.massive, self.thresholds, strict=True
            )
        }
        return {
            "position": self.position,
            "through_ln": self.through_ln,
            "rules": rules,
            "epe": self.epe,
        }


class MassiveActivationsExperiment:
    """Reads weights alone."""

    def __init__(self, view: ModelView, batch: TokenBatch) -> None:
        self._result = run(view, batch)

    def requests(self) -> Sequence[Request]:
        return []

    def result(self) -> MassiveActivations:
        return self._result


def run(
    model: Any,
    batch: TokenBatch | None = None,
    rules: Sequence[Rule] = RULES,
    *,
    batch_size: int | None = None,
    progress: Progress | None = None,
) -> MassiveActivations:
    """EPE_0 and the coordinates that each rule calls massive.

    Args:
        model: a hooked model or its view.
        batch: not needed; every experiment takes one.
        rules: the rules to apply.
        batch_size: not needed.
        progress: not needed.

    Raises:
        NotApplicableError: no learned positions or no first MLP.
        ProcessedWeightsError: the weights were folded or centred.
    """
    if not isinstance(rules, Sequence):
        raise InvalidInputError(
            "Rules come as a list",
            expected="a sequence of rules, such as [MeanStd(3.0), TopK(3)]",
            got=repr(rules)[:80],
            fix="put brackets around a single rule",
        )
    epe = extract_epe(model_view(model))
    found = [find_massive_coordinates(epe.vectors[0], rule) for rule in rules]
    return MassiveActivations(
        epe=to_numpy(epe.vectors[0]),
        position=0,
        rules=tuple(repr(rule) for rule in rules),
        massive=tuple(f.coordinates for f in found),
        thresholds=tuple(f.threshold for f in found),
        through_ln=epe.through_ln,
    )
