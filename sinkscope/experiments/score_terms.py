"""The four score terms of one query in every head, and how well they add up over all prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from sinkscope.ablations import Composition
from sinkscope.capture import Part, Progress
from sinkscope.display import number
from sinkscope.experiments._engine import Request, run_experiments, to_numpy, token_texts
from sinkscope.model import ModelView, model_view
from sinkscope.prompts import TokenBatch, require_batch
from sinkscope.results import Result
from sinkscope.scores import IdentityReader

if TYPE_CHECKING:
    import pandas as pd

TERMS = ("content", "query_bias", "key_bias", "bias_bias")


@dataclass(frozen=True, eq=False)
class QueryTerms(Result):
    """The terms of the last query of the first prompt; the errors are over all prompts.

    All terms have the score's scale in them and add up to the score, see `scores.ScoreTerms`.

    Attributes:
        content: `[layer head key]`.
        query_bias: `[layer head key]`.
        key_bias: `[layer head]`, the same for every key.
        bias_bias: `[layer head]`, the same for every key.
        query: the position of the query.
        tokens: what each key holds, as text.
        bias_kind: "raw" or "effective", see `scores.ScoreTerms`.
        max_error: largest |sum of terms - the model's own score|; NaN where it shows none.
        pattern_error: largest |softmax(sum of terms) - the model's own pattern|.
        tolerance: what both errors had to stay under.
    """

    kind: ClassVar[str] = "score_terms"

    content: np.ndarray
    query_bias: np.ndarray
    key_bias: np.ndarray
    bias_bias: np.ndarray
    query: int
    tokens: tuple[str, ...]
    bias_kind: str
    max_error: float
    pattern_error: float
    tolerance: float

    @property
    def total(self) -> np.ndarray:
        """`[layer head key]`, the scores before the softmax."""
        constant = self.key_bias + self.bias_bias
        return self.content + self.query_bias + constant[..., None]

    def to_dataframe(self) -> pd.DataFrame:
        """One row per layer, head, key and term: the term's part of the score."""
        import pandas as pd

        shape = self.content.shape
        layer, head, key = np.indices(shape).reshape(3, -1)
        frames = []
        for name in TERMS:
            term = getattr(self, name)
            term = np.broadcast_to(term if term.ndim == 3 else term[..., None], shape)
            frames.append(
                pd.DataFrame(
                    {"layer": layer, "head": head, "key": key, "term": name, "value": term.ravel()}
                )
            )
        return pd.concat(frames, ignore_index=True)

    def overview(self) -> list[tuple[str, str]]:
        return [
            ("query", f"{self.query} of {''.join(self.tokens)}"),
            ("query bias", self.bias_kind),
            ("largest error of the scores", number(self.max_error)),
            ("largest error of the patterns", number(self.pattern_error)),
            ("tolerance", number(self.tolerance)),
        ]

    def summary(self) -> dict[str, Any]:
        """The errors, and which query of which tokens; the terms are in the arrays."""
        return {
            "score_error": self.max_error,
            "pattern_error": self.pattern_error,
            "tolerance": self.tolerance,
            "bias_kind": self.bias_kind,
            "query": self.query,
            "tokens": self.tokens,
        }


class _QueryReader(IdentityReader):
    """Checks the identities and keeps the terms of one query of the first prompt."""

    def __init__(self, view: ModelView, column: int, keys: Tensor) -> None:
        super().__init__(view, tuple(range(view.n_layers)))
        self._column = column
        self._keys = keys
        self._now: dict[str, Tensor] = {}
        self.kept: Part = {}

    def _keep(self, layer: int, terms: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
        content, query_bias, key_bias, bias_bias = terms
        keys = self._keys.to(content.device)
        kept = (
            content[0, :, self._column][:, keys],
            query_bias[0, :, 0][:, keys],
            key_bias[0, :, self._column, 0],
            bias_bias[0, :, 0, 0],
        )
        for name, term in zip(TERMS, kept, strict=True):
            self._now[f"{name}.{layer}"] = term.clone()

    def take(self, start: int) -> Part:
        kept, self._now = self._now, {}
        return {**super().take(start), **(kept if start == 0 else {})}

    def add(self, start: int, part: Part) -> None:
        super().add(start, part)
        if start == 0:
            self.kept = part


class ScoreTermsExperiment:
    """Asks for what enters the scores, the scores and the patterns of the untouched model."""

    def __init__(self, view: ModelView, batch: TokenBatch) -> None:
        view.require_query_bias()
        require_batch(batch)
        self._view = view
        columns = batch.mask[0].nonzero()[:, 0]
        self._query = len(columns) - 1
        self._tokens = token_texts(view, batch, 0)
        self._reader = _QueryReader(view, int(columns[-1]), columns)

    def requests(self) -> Sequence[Request]:
        return [(Composition(), self._reader)]

    def result(self) -> QueryTerms:
        kept = self._reader.kept
        terms = {
            name: to_numpy(
                torch.stack([kept[f"{name}.{layer}"] for layer in range(self._view.n_layers)])
            )
            for name in TERMS
        }
        return QueryTerms(
            **terms,
            query=self._query,
            tokens=self._tokens,
            bias_kind=self._view.bias_kind,
            max_error=self._reader.max_error,
            pattern_error=self._reader.pattern_error,
            tolerance=self._reader.tolerance,
        )


def run(
    model: Any,
    batch: TokenBatch,
    *,
    batch_size: int | None = None,
    progress: Progress | None = None,
) -> QueryTerms:
    """The terms of the first prompt's last query, with both identities checked on all prompts.

    Args:
        model: a hooked model or its view.
        batch: the prompts.
        batch_size: rows per forward pass; all at once if None.
        progress: told how many prompts are done.

    Raises:
        IdentityError: the terms do not add up.
        NotApplicableError: the model has no query bias.
    """
    view = model_view(model)
    experiment = ScoreTermsExperiment(view, batch)
    run_experiments(view, batch, [experiment], batch_size=batch_size, progress=progress)
    return experiment.result()
