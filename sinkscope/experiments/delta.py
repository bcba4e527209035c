"""The source-agnostic shift per layer and position: how far position 0 stands out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from sinkscope.ablations import Composition
from sinkscope.capture import Progress
from sinkscope.display import number, numbers
from sinkscope.experiments._engine import Request, by_position, run_experiments, to_numpy
from sinkscope.model import ModelView, model_view
from sinkscope.prompts import TokenBatch, require_batch
from sinkscope.results import Result
from sinkscope.scores import ShiftReader

if TYPE_CHECKING:
    import pandas as pd

PERCENTILES = (10, 50, 90)
MAX_PROMPTS = 1024
"""Of more prompts than this, an evenly spaced sample is kept."""


@dataclass(frozen=True, eq=False)
class Delta(Result):
    """Delta of prompts, in every layer, head and position.

    Up to 1,024 prompts all are kept, and percentiles are exact. Of more, every k-th is kept, k
    the smallest number that leaves no more than 1,024: percentiles are then the sample's, and
    what is kept no longer grows. Within one head, a sample of m prompts places a percentile p
    with a standard error of `100 sqrt(p/100 (1 - p/100) / m)` points of rank, for m of 512 at
    most 2.2 points; percentiles over heads are more exact than that.

    Attributes:
        values: `[prompt layer head pos]`, positions from each prompt's first token, NaN after
            its last.
        convention: "paper" (unscaled, minimum over positions 0) or "score".
        every: `values` holds the prompts whose number this divides; 1 for all.
    """

    kind: ClassVar[str] = "delta"

    values: np.ndarray
    convention: str = "paper"
    every: int = 1

    @property
    def percentiles(self) -> np.ndarray:
        """`[percentile layer pos]`: p10, p50 and p90 over prompts and heads."""
        return np.nanpercentile(self.values.astype(np.float64), PERCENTILES, axis=(0, 2))

    @property
    def separated_layers(self) -> tuple[int, ...]:
        """Layers where position 0's p10 is above every other position's p90."""
        if self.values.shape[-1] == 1:
            return ()
        p10, _, p90 = self.percentiles
        return tuple(int(la) for la in np.nonzero(p10[:, 0] > p90[:, 1:].max(1))[0])

    def to_dataframe(self) -> pd.DataFrame:
        """One row per layer and position: p10, p50, p90, mean and std over prompts and heads."""
        import pandas as pd

        values = self.values.astype(np.float64)
        layers, positions = values.shape[1], values.shape[3]
        frame = {
            "layer": np.repeat(np.arange(layers), positions),
            "position": np.tile(np.arange(positions), layers),
        }
        for name, value in zip(("p10", "p50", "p90"), self.percentiles, strict=True):
            frame[name] = value.ravel()
        frame["mean"] = np.nanmean(values, axis=(0, 2)).ravel()
        frame["std"] = np.nanstd(values, axis=(0, 2)).ravel()
        return pd.DataFrame(frame)

    def overview(self) -> list[tuple[str, str]]:
        median = self.percentiles[1]
        others = median[:, 1:]
        return [
            ("convention", self.convention),
            ("prompts", f"{len(self.values)}, {self._sample}"),
            ("median at position 0, by layer", numbers([number(v) for v in median[:, 0]])),
            ("largest median elsewhere", number(others.max()) if others.size else "none"),
            ("layers where position 0 stands apart", numbers(self.separated_layers)),
        ]

    @property
    def _sample(self) -> str:
        return "all" if self.every == 1 else f"one in {self.every}"

    def summary(self) -> dict[str, Any]:
        """Percentiles by layer and position, and the layers where position 0 stands apart."""
        return {
            "convention": self.convention,
            "every": self.every,
            "percentiles": {f"p{p}": v for p, v in zip(PERCENTILES, self.percentiles, strict=True)},
            "separated_layers": self.separated_layers,
        }


class DeltaExperiment:
    """Asks for Delta on the untouched model."""

    def __init__(self, view: ModelView, batch: TokenBatch, convention: str = "paper") -> None:
        self._batch = batch
        self._convention = convention
        self._every = -(-len(require_batch(batch)) // MAX_PROMPTS)
        self._reader = ShiftReader(view, convention, tuple(range(view.n_layers)), self._every)

    def requests(self) -> Sequence[Request]:
        return [(Composition(), self._reader)]

    def result(self) -> Delta:
        sample = self._batch.select(slice(None, None, self._every))
        values = by_position(self._reader.result(), sample)
        return Delta(values=to_numpy(values), convention=self._convention, every=self._every)


def run(
    model: Any,
    batch: TokenBatch,
    convention: str = "paper",
    *,
    batch_size: int | None = None,
    progress: Progress | None = None,
) -> Delta:
    """Delta of a batch, see `scores.source_agnostic_shift`.

    Args:
        model: a hooked model or its view.
        batch: the prompts.
        convention: "paper" or "score".
        batch_size: rows per forward pass; all at once if None.
        progress: told how many prompts are done.

    Raises:
        NotApplicableError: the model has no query bias.
        ProcessedWeightsError: the weights were folded or centred.
    """
    view = model_view(model)
    experiment = DeltaExperiment(view, batch, convention)
    run_experiments(view, batch, [experiment], batch_size=batch_size, progress=progress)
    return experiment.result()
