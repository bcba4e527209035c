"""gamma: which coordinates of a key add to the query-bias term, from the weights alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from sinkscope.capture import Progress
from sinkscope.display import number, numbers
from sinkscope.epe import coordinate_alignment, extract_epe
from sinkscope.experiments._engine import Request, to_numpy
from sinkscope.massive import MeanStd, Rule, find_massive_coordinates
from sinkscope.model import ModelView, model_view
from sinkscope.prompts import TokenBatch
from sinkscope.results import Result

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, eq=False)
class CoordinateAlignment(Result):
    """gamma of every layer, head and coordinate, and which coordinates are massive in EPE_0.

    Attributes:
        gamma: `[layer head d_model]`, `b_Q,h . W_K,h[d, :]`, signed, unscaled.
        massive: the massive coordinates of EPE_0, rising.
        rule: the rule that found them, in words.
    """

    kind: ClassVar[str] = "coordinate_alignment"

    gamma: np.ndarray
    massive: tuple[int, ...]
    rule: str

    @property
    def is_massive(self) -> np.ndarray:
        """`[d_model]`, true at massive coordinates."""
        flags = np.zeros(self.gamma.shape[-1], dtype=bool)
        flags[list(self.massive)] = True
        return flags

    @property
    def means(self) -> dict[str, float]:
        """Mean |gamma| at massive coordinates and at the others; NaN where there are none."""
        magnitude = np.abs(self.gamma.astype(np.float64))
        return {
            name: float(magnitude[..., keep].mean()) if keep.any() else float("nan")
            for name, keep in (("massive", self.is_massive), ("others", ~self.is_massive))
        }

    def to_dataframe(self) -> pd.DataFrame:
        """One row per layer, head and coordinate: gamma, and whether the coordinate is massive."""
        import pandas as pd

        layer, head, coordinate = np.indices(self.gamma.shape).reshape(3, -1)
        return pd.DataFrame(
            {
                "layer": layer,
                "head": head,
                "coordinate": coordinate,
                "gamma": self.gamma.ravel(),
                "massive": self.is_massive[coordinate],
            }
        )

    def overview(self) -> list[tuple[str, str]]:
        means = self.means
        return [
            ("massive coordinates of EPE_0", f"{numbers(self.massive)} by {self.rule}"),
            ("mean |gamma| there", number(means["massive"])),
            ("mean |gamma| elsewhere", number(means["others"])),
        ]

    def summary(self) -> dict[str, Any]:
        """Mean |gamma| at massive coordinates and at the others, and gamma at the massive ones."""
        return {
            "massive": self.massive,
            "rule": self.rule,
            "mean_abs_gamma": self.means,
            "gamma_at_massive": self.gamma[..., list(self.massive)],
        }


class CoordinateAlignmentExperiment:
    """Reads weights alone."""

    def __init__(self, view: ModelView, batch: TokenBatch | None, rule: Rule | None = None) -> None:
        rule = MeanStd() if rule is None else rule
        massive = find_massive_coordinates(extract_epe(view).vectors[0], rule)
        self._result = CoordinateAlignment(
            gamma=to_numpy(coordinate_alignment(view)),
            massive=massive.coordinates,
            rule=repr(rule),
        )

    def requests(self) -> Sequence[Request]:
        return []

    def result(self) -> CoordinateAlignment:
        return self._result


def run(
    model: Any,
    batch: TokenBatch | None = None,
    rule: Rule | None = None,
    *,
    batch_size: int | None = None,
    progress: Progress | None = None,
) -> CoordinateAlignment:
    """Gamma of all heads, and its size at the massive coordinates of EPE_0.

    Args:
        model: a hooked model or its view.
        batch: not needed; every experiment takes one.
        rule: which coordinates are massive, `MeanStd(3.0)` if None.
        batch_size: not needed.
        progress: not needed.

    Raises:
        NotApplicableError: no query bias, no learned positions or no first MLP.
        ProcessedWeightsError: the weights were folded or centred.
    """
    return CoordinateAlignmentExperiment(model_view(model), batch, rule).result()
