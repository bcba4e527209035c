"""Cosine of the query bias with each position's key, from the weights alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from sinkscope.capture import Progress
from sinkscope.display import number
from sinkscope.epe import epe_bias_alignment
from sinkscope.experiments._engine import Request, to_numpy
from sinkscope.model import ModelView, model_view
from sinkscope.prompts import TokenBatch, require_batch
from sinkscope.results import Result

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, eq=False)
class EpeBiasAlignment(Result):
    """`cos(b_Q,h, EPE_j W_K,h)` of every layer, head and position.

    Attributes:
        cosines: `[layer head pos]`.
    """

    kind: ClassVar[str] = "epe_bias_alignment"

    cosines: np.ndarray

    def to_dataframe(self) -> pd.DataFrame:
        """One row per layer, head and position: the cosine."""
        import pandas as pd

        layer, head, position = np.indices(self.cosines.shape).reshape(3, -1)
        return pd.DataFrame(
            {
                "layer": layer,
                "head": head,
                "position": position,
                "cosine": self.cosines.ravel(),
            }
        )

    def overview(self) -> list[tuple[str, str]]:
        summary = self.summary()
        others = summary["median_others"]
        return [
            ("median cosine at position 0", number(summary["median_first"])),
            ("median cosine elsewhere", "none" if others is None else number(others)),
        ]

    def summary(self) -> dict[str, Any]:
        """Median over heads at position 0 and at the others, by layer and pooled."""
        cosines = self.cosines.astype(np.float64)
        first, others = cosines[..., :1], cosines[..., 1:]
        return {
            "n_positions": cosines.shape[-1],
            "median_first": float(np.nanmedian(first)),
            "median_others": float(np.nanmedian(others)) if others.size else None,
            "median_first_by_layer": np.nanmedian(first, axis=(1, 2)),
            "median_others_by_layer": np.nanmedian(others, axis=(1, 2)) if others.size else [],
        }


class EpeBiasAlignmentExperiment:
    """Reads weights alone, for as many positions as the prompts have."""

    def __init__(self, view: ModelView, batch: TokenBatch) -> None:
        self._result = run(view, batch)

    def requests(self) -> Sequence[Request]:
        return []

    def result(self) -> EpeBiasAlignment:
        return self._result


def run(
    model: Any,
    batch: TokenBatch | None = None,
    *,
    batch_size: int | None = None,
    progress: Progress | None = None,
) -> EpeBiasAlignment:
    """The cosines for as many positions as the prompts have, see `epe.epe_bias_alignment`.

    Args:
        model: a hooked model or its view.
        batch: gives the number of positions; 40 or the model's context if None.
        batch_size: not needed.
        progress: not needed.

    Raises:
        NotApplicableError: no query bias, no learned positions or no first MLP.
        ProcessedWeightsError: the weights were folded or centred.
    """
    view = model_view(model)
    n_positions = min(40, view.n_ctx)
    if batch is not None:
        n_positions = int(require_batch(batch).lengths.max())
    cosines = epe_bias_alignment(view, n_positions=n_positions)
    return EpeBiasAlignment(cosines=to_numpy(cosines))
