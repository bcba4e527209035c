"""How well the EPE stands for the positions' effect in the first block, per position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from sinkscope.capture import Progress
from sinkscope.display import number
from sinkscope.epe import extract_epe
from sinkscope.errors import InvalidInputError, NotApplicableError
from sinkscope.experiments._engine import (
    Request,
    applicable,
    by_position,
    run_experiments,
    to_numpy,
)
from sinkscope.fidelity import BLOCK_FORMS, MlpFidelityReader, block_requests
from sinkscope.model import ModelView, model_view
from sinkscope.prompts import TokenBatch
from sinkscope.results import Result

if TYPE_CHECKING:
    import pandas as pd

PERCENTILES = (10, 50, 90)
FORMS = ("mlp", *BLOCK_FORMS)


@dataclass(frozen=True, eq=False)
class EpeFidelity(Result):
    """Cosines of every prompt and position, in three forms; see `fidelity.epe_fidelity`.

    Attributes:
        mlp: `[prompt pos]`, through the MLP alone; positions from each prompt's first token,
            NaN after its last, here and below.
        block: `[prompt pos]`, through the first block without a causal mask (the paper's); None
            where the model's mask can't be lifted.
        causal_block: `[prompt pos]`, through the first block as the model runs it.
        through_ln: the form of the EPE.
        not_applicable: pairs of form and reason.
    """

    kind: ClassVar[str] = "epe_fidelity"

    mlp: np.ndarray
    block: np.ndarray | None
    causal_block: np.ndarray | None
    through_ln: bool = False
    not_applicable: tuple[tuple[str, str], ...] = ()

    @property
    def forms(self) -> tuple[str, ...]:
        """The forms that there are."""
        return tuple(form for form in FORMS if getattr(self, form) is not None)

    def of(self, form: str) -> np.ndarray:
        """`[prompt pos]`, one form.

        Raises:
            InvalidInputError: no such form.
            NotApplicableError: this model does not have it.
        """
        if form not in FORMS:
            raise InvalidInputError(
                "Unknown form of fidelity",
                expected=", ".join(FORMS),
                got=repr(form),
                fix="choose one of these",
            )
        values = getattr(self, form)
        if values is None:
            raise NotApplicableError(
                f"The {form!r} form of fidelity is not applicable",
                expected=", ".join(self.forms),
                got=dict(self.not_applicable).get(form, "no values"),
                fix="use another form",
            )
        return values.astype(np.float64)

    def percentiles(self, form: str) -> np.ndarray:
        """`[percentile pos]`: p10, p50 and p90 over prompts of one form."""
        return np.nanpercentile(self.of(form), PERCENTILES, axis=0)

    def to_dataframe(self) -> pd.DataFrame:
        """One row per form and position: p10, p50, p90, mean and std over prompts."""
        import pandas as pd

        rows = []
        for form in self.forms:
            values = self.of(form)
            for position, (p10, p50, p90) in enumerate(self.percentiles(form).T):
                column = values[:, position]
                rows.append(
                    {
                        "through": form,
                        "position": position,
                        "p10": p10,
                        "p50": p50,
                        "p90": p90,
                        "mean": np.nanmean(column),
                        "std": np.nanstd(column),
                    }
                )
        return pd.DataFrame(rows)

    def overview(self) -> list[tuple[str, str]]:
        summary = self.summary()
        medians = [
            (f"median through {form}", number(summary[form]["median"])) for form in self.forms
        ]
        return [("EPE through LN2", str(self.through_ln)), *medians]

    def summary(self) -> dict[str, Any]:
        """Percentiles by position and the median over all positions, of each form there is."""
        forms = {}
        for form in self.forms:
            named = zip(PERCENTILES, self.percentiles(form), strict=True)
            forms[form] = {f"p{p}": values for p, values in named}
            forms[form]["median"] = float(np.nanmedian(self.of(form)))
        missing = {"not_applicable": dict(self.not_applicable)} if self.not_applicable else {}
        return {"through_ln": self.through_ln, **forms, **missing}


class EpeFidelityExperiment:
    """Asks for embeddings, and for the first block's output with and without positions."""

    def __init__(self, view: ModelView, batch: TokenBatch) -> None:
        self._batch = batch
        self._epe = extract_epe(view)
        self._mlp = MlpFidelityReader(view, self._epe)
        reasons = {
            form: next(filter(None, (applicable(view, run, batch) for run in runs)), None)
            for form, runs in BLOCK_FORMS.items()
        }
        self._not_applicable = tuple((f, reason) for f, reason in reasons.items() if reason)
        self._blocks = {
            form: block_requests(self._epe, form) for form, reason in reasons.items() if not reason
        }

    def requests(self) -> Sequence[Request]:
        blocks = [request for requests in self._blocks.values() for request in requests]
        untouched = BLOCK_FORMS["causal_block"][0]
        return [(untouched, self._mlp), *blocks]

    def result(self) -> EpeFidelity:
        cosines = {form: reader.result() for form, (_, (_, reader)) in self._blocks.items()}
        cosines["mlp"] = self._mlp.result()
        aligned = {form: to_numpy(by_position(c, self._batch)) for form, c in cosines.items()}
        return EpeFidelity(
            mlp=aligned["mlp"],
            block=aligned.get("block"),
            causal_block=aligned.get("causal_block"),
            through_ln=self._epe.through_ln,
            not_applicable=self._not_applicable,
        )


def run(
    model: Any,
    batch: TokenBatch,
    *,
    batch_size: int | None = None,
    progress: Progress | None = None,
) -> EpeFidelity:
    """The fidelity of the EPE in all forms that the model allows, see `fidelity.epe_fidelity`.

    Args:
        model: a hooked model or its view.
        batch: the prompts.
        batch_size: rows per forward pass; all at once if None.
        progress: told how many prompts are done.

    Raises:
        NotApplicableError: no learned positions or no first MLP.
        ProcessedWeightsError: the weights were folded or centred.
    """
    view = model_view(model)
    experiment = EpeFidelityExperiment(view, batch)
    run_experiments(view, batch, [experiment], batch_size=batch_size, progress=progress)
    return experiment.result()
