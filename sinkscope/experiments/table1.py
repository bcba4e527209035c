"""Table 1 of the paper: the sink score under ten conditions, per corpus and pooled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from sinkscope.ablations import PAPER_CONDITIONS, Ablation
from sinkscope.capture import Progress
from sinkscope.experiments._engine import Request, run_experiments, split_by_applicability
from sinkscope.measures import PatternReader, uniform_sink_score
from sinkscope.metrics import sink_score
from sinkscope.model import ModelView, model_view
from sinkscope.prompts import TokenBatch
from sinkscope.published import published
from sinkscope.results import Result

if TYPE_CHECKING:
    import pandas as pd

POOLED = "all"


@dataclass(frozen=True, eq=False)
class Table1(Result):
    """Sink scores of every prompt under every condition.

    Attributes:
        scores: `[condition prompt layer head]`, all layers, shares of attention.
        conditions: names along the first axis; the first is what `relative` relates to.
        corpora: the corpus of each prompt.
        mid_layers: the layers of the main columns, the paper's choice.
        uniform: what uniform attention would give position 0 in these layers, mean over prompts;
            see `measures.uniform_sink_score`.
        not_applicable: pairs of condition and reason, for what this model lacks.
        beside_published: whether the published numbers are about this model and prompts.
    """

    kind: ClassVar[str] = "table1"

    scores: np.ndarray
    conditions: tuple[str, ...]
    corpora: tuple[str, ...]
    mid_layers: tuple[int, ...]
    uniform: float
    not_applicable: tuple[tuple[str, str], ...] = ()
    beside_published: bool = False

    def to_dataframe(self) -> pd.DataFrame:
        """One row for each corpus ("all" pools them) and condition.

        Columns: corpus, condition, n (prompts), sink_score (mean over prompts, mid layers and
        heads), stderr (of the mean over prompts, n - 1 in the variance; NaN for one prompt),
        relative (to the first condition), all_layers (the mean over all layers); beside
        published numbers also published, published_stderr and difference.
        """
        import pandas as pd

        return pd.DataFrame(self._rows())

    def _rows(self) -> list[dict[str, Any]]:
        rows = []
        for corpus in self._corpora():
            keep = [corpus in (POOLED, c) for c in self.corpora]
            baseline = None
            for name, scores in zip(self.conditions, self.scores, strict=True):
                mid = scores[keep][:, list(self.mid_layers)].mean((1, 2), dtype=np.float64)
                mean = float(mid.mean())
                baseline = mean if baseline is None else baseline
                row: dict[str, Any] = {
                    "corpus": corpus,
                    "condition": name,
                    "n": len(mid),
                    "sink_score": mean,
                    "stderr": _stderr(mid),
                    "relative": mean / baseline if baseline > 0 else float("nan"),
                    "all_layers": float(scores[keep].mean(dtype=np.float64)),
                }
                rows.append(row | (self._beside(corpus, name, mean)))
        return rows

    def _beside(self, corpus: str, condition: str, mean: float) -> dict[str, float]:
        if not self.beside_published:
            return {}
        value, stderr = (
            published()["table1"].get(corpus, {}).get(condition, (float("nan"), float("nan")))
        )
        return {"published": value, "published_stderr": stderr, "difference": mean - value}

    def _corpora(self) -> list[str]:
        return [name for name in dict.fromkeys(self.corpora) if name != POOLED] + [POOLED]

    def overview(self) -> list[tuple[str, str]]:
        pooled = self._rows()[-len(self.conditions) :]
        plus_minus = "\N{PLUS-MINUS SIGN}"
        return [
            (row["condition"], f"{row['sink_score']:.4f} {plus_minus} {row['stderr']:.4f}")
            for row in pooled
        ]

    def summary(self) -> dict[str, Any]:
        """The rows of the table, the layers, every prompt's value, and what did not apply."""
        mid = self.scores[:, :, list(self.mid_layers)].mean((2, 3), dtype=np.float64)
        everything = self.scores.mean((2, 3), dtype=np.float64)
        return {
            "rows": self._rows(),
            "mid_layers": self.mid_layers,
            "uniform": self.uniform,
            "per_prompt": {
                name: {"mid": mid[n], "all": everything[n]}
                for n, name in enumerate(self.conditions)
            },
            "not_applicable": dict(self.not_applicable),
        }


def _stderr(values: np.ndarray) -> float:
    return float(values.std(ddof=1) / len(values) ** 0.5) if len(values) > 1 else float("nan")


class Table1Experiment:
    """Asks for sink scores under every condition that the model has the parts for."""

    def __init__(
        self,
        view: ModelView,
        batch: TokenBatch,
        conditions: Mapping[str, Ablation] | None = None,
        beside_published: bool = False,
    ) -> None:
        conditions = PAPER_CONDITIONS if conditions is None else conditions
        applied, self._not_applicable = split_by_applicability(view, batch, conditions)
        self._batch = batch
        self._mid_layers = tuple(view.mid_or_all_layers)
        self._uniform = uniform_sink_score(view, batch, self._mid_layers)
        self._beside_published = beside_published
        self._readers = {
            name: (ablation, PatternReader(range(view.n_layers), sink_score))
            for name, ablation in applied.items()
        }

    def requests(self) -> Sequence[Request]:
        return list(self._readers.values())

    def result(self) -> Table1:
        scores = [reader.result().cpu().double().numpy() for _, reader in self._readers.values()]
        return Table1(
            scores=np.stack(scores),
            conditions=tuple(self._readers),
            corpora=self._batch.corpora,
            mid_layers=self._mid_layers,
            uniform=self._uniform,
            not_applicable=self._not_applicable,
            beside_published=self._beside_published,
        )


def run(
    model: Any,
    batch: TokenBatch,
    conditions: Mapping[str, Ablation] | None = None,
    *,
    batch_size: int | None = None,
    progress: Progress | None = None,
) -> Table1:
    """The sink score under each condition, see `measures.sink_score`.

    Args:
        model: a hooked model or its view.
        batch: the prompts; `batch.corpora` gives the rows of the table.
        conditions: name -> ablation; the paper's ten if None.
        batch_size: rows per forward pass; all at once if None.
        progress: told how many prompts are done.
    """
    view = model_view(model)
    experiment = Table1Experiment(view, batch, conditions)
    run_experiments(view, batch, [experiment], batch_size=batch_size, progress=progress)
    return experiment.result()
