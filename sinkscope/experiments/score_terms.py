"""The score terms of one query in every head, and how well they add up over all prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from sinkscope._types import Mask
from sinkscope.ablations import Composition
from sinkscope.attention import ScoreRule
from sinkscope.capture import Part, Progress, stream
from sinkscope.display import number
from sinkscope.errors import NotApplicableError
from sinkscope.experiments._engine import Request, run_experiments, to_numpy, token_texts
from sinkscope.metrics import NAN
from sinkscope.model import ModelView, model_view
from sinkscope.prompts import TokenBatch, require_batch
from sinkscope.results import Result
from sinkscope.scores import TERMS, IdentityReader
from sinkscope.sites import Site

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, eq=False)
class QueryTerms(Result):
    """The terms of the last query of the first prompt; the errors are over all prompts.

    All terms have the score's scale in them and add up to the score, see `scores.ScoreTerms`.

    Attributes:
        terms: `[term layer head key]`.
        names: of the terms, those that the model has.
        attention: `[layer head key]`, the pattern that the terms make; NaN where a sliding
            window hides the key.
        query: the position of the query.
        tokens: what each key holds, as text.
        bias_kind: "raw" or "effective", see `scores.ScoreTerms`.
        max_error: largest |sum of terms - the model's own score|; NaN where it shows none.
        pattern_error: largest |softmax(sum of terms) - the model's own pattern|.
        tolerance: what both errors had to stay under.
    """

    kind: ClassVar[str] = "score_terms"

    terms: np.ndarray
    names: tuple[str, ...]
    attention: np.ndarray
    query: int
    tokens: tuple[str, ...]
    bias_kind: str
    max_error: float
    pattern_error: float
    tolerance: float

    @property
    def total(self) -> np.ndarray:
        """`[layer head key]`, the sum of all terms: the scores before the mask."""
        return self.terms.sum(0)

    def to_dataframe(self) -> pd.DataFrame:
        """One row per layer, head, key and term: the term's part of the score."""
        import pandas as pd

        shape = self.terms.shape
        term, layer, head, key = np.indices(shape).reshape(4, -1)
        names = np.array(self.names)[term]
        return pd.DataFrame(
            {"layer": layer, "head": head, "key": key, "term": names, "value": self.terms.ravel()}
        )

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
            "terms": self.names,
            "bias_kind": self.bias_kind,
            "query": self.query,
            "tokens": self.tokens,
        }


class _QueryReader(IdentityReader):
    """Checks the identities and keeps the terms of one query of the first prompt."""

    def __init__(self, view: ModelView, column: int, keys: Tensor, mask: Mask) -> None:
        super().__init__(view, tuple(range(view.n_layers)))
        self._column = column
        self._keys = keys
        self._visible = [view.visible(la, mask)[0, column, keys] for la in range(view.n_layers)]
        self._now: dict[str, Tensor] = {}
        self.kept: Part = {}

    def read(self, site: Site, tensor: Tensor, chunk: TokenBatch) -> None:
        with suppress(NotApplicableError):  # said in the end: other experiments read this run too
            super().read(site, tensor, chunk)

    def _keep(self, layer: int, terms: Mapping[str, Tensor], rule: ScoreRule) -> None:
        n = terms["content"].shape[-1]
        keys = self._keys.to(terms["content"].device)
        rows = {
            name: term[:1].expand(-1, -1, n, n)[0, :, self._column, keys].clone()
            for name, term in terms.items()
        }
        content, *others = rows.values()
        sees = self._visible[layer].to(keys.device)
        scores = sum(others, content)[None, :, None]
        attention = rule.pattern(scores, sees[None, None, None])[0, :, 0]
        rows["attention"] = attention.masked_fill(~sees, NAN)
        self._now |= {f"{name}.{layer}": row for name, row in rows.items()}

    def take(self, start: int) -> Part:
        kept, self._now = self._now, {}
        return {**super().take(start), **(kept if start == 0 else {})}

    def add(self, start: int, part: Part) -> None:
        super().add(start, part)
        if start == 0:
            self.kept = part

    def stacked(self, name: str) -> Tensor:
        """`[layer head key]`, a term or the attention."""
        layers = range(self._view.n_layers)
        return torch.stack([self.kept[f"{name}.{layer}"] for layer in layers])


class ScoreTermsExperiment:
    """Asks for what enters the scores, the scores and the patterns of the untouched model."""

    def __init__(self, view: ModelView, batch: TokenBatch) -> None:
        require_batch(batch)
        self._view = view
        self._first = batch.select([0])
        columns = batch.mask[0].nonzero()[:, 0]
        self._query = len(columns) - 1
        self._tokens = token_texts(view, batch, 0)
        self._reader = _QueryReader(view, int(columns[-1]), columns, batch.mask[:1])

    def requests(self) -> Sequence[Request]:
        return [(Composition(), self._reader)]

    def result(self) -> QueryTerms:
        """The terms that were read.

        Raises:
            NotApplicableError: the model computes its scores in a way that is not known here.
        """
        layers = tuple(range(self._view.n_layers))
        if any(f"content.{layer}" not in self._reader.kept for layer in layers):
            # A run that suppresses nothing says why.
            stream(self._view, self._first, [IdentityReader(self._view, layers)])
        names = tuple(name for name in TERMS if f"{name}.0" in self._reader.kept)
        return QueryTerms(
            terms=to_numpy(torch.stack([self._reader.stacked(name) for name in names])),
            names=names,
            attention=to_numpy(self._reader.stacked("attention")),
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
        NotApplicableError: the model computes its scores in a way that is not known here.
    """
    view = model_view(model)
    experiment = ScoreTermsExperiment(view, batch)
    run_experiments(view, batch, [experiment], batch_size=batch_size, progress=progress)
    return experiment.result()
