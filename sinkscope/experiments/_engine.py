"""How experiments share passes: each asks for readings, and equal ablations run once for all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from sinkscope.ablations import Ablation, EditContext
from sinkscope.capture import Pass, Progress, Reader, Store, Total, require_progress, run_passes
from sinkscope.errors import InvalidInputError, NotApplicableError
from sinkscope.fidelity import FirstBlockReader
from sinkscope.model import ModelView, model_view
from sinkscope.prompts import TokenBatch, require_batch
from sinkscope.results import Result

Request = tuple[Ablation, Reader]


@runtime_checkable
class Experiment(Protocol):
    """What an experiment gives to the engine; made for one view and one batch."""

    def requests(self) -> Sequence[Request]:
        """Under which ablation which reader is to read; none for weights-only experiments."""
        ...

    def result(self) -> Result:
        """The result, once all requests have been served."""
        ...


ExperimentType = Callable[[ModelView, TokenBatch], Experiment]


def run_experiments(
    model: Any,
    batch: TokenBatch,
    experiments: Sequence[Experiment],
    *,
    batch_size: int | None = None,
    total: Total | None = None,
    progress: Progress | None = None,
    store: Store | None = None,
) -> None:
    """Serve the requests of several experiments, one pass for each distinct ablation.

    Args:
        model: a hooked model or its view.
        batch: the prompts.
        experiments: whose readers are to be filled.
        batch_size: rows per forward pass; all at once if None.
        total: told at the start how many prompts will run over all passes.
        progress: told how many prompts are done, after each chunk.
        store: what is there already is not run again.
    """
    view = model_view(model)
    require_batch(batch)
    require_progress(progress, total)
    requests = [request for experiment in experiments for request in experiment.requests()]
    # A block's output with positions has to be there when the one without passes.
    requests.sort(key=lambda request: not isinstance(request[1], FirstBlockReader))
    passes: list[tuple[Ablation, list[Reader]]] = []
    for ablation, reader in requests:
        for known, readers in passes:
            if known == ablation:
                readers.append(reader)
                break
        else:
            passes.append((ablation, [reader]))
    if total is not None:
        total(len(passes) * len(batch))
    run_passes(
        view,
        batch,
        [Pass(view, readers, ablation) for ablation, readers in passes],
        batch_size=batch_size,
        progress=progress,
        store=store,
    )


def split_by_applicability(
    view: ModelView, batch: TokenBatch, conditions: Mapping[str, Ablation]
) -> tuple[dict[str, Ablation], tuple[tuple[str, str], ...]]:
    """The conditions that the model has the parts for, and pairs of the others and the reason.

    Raises:
        InvalidInputError: no condition, or something that is not an ablation.
        NotApplicableError: none of the conditions applies.
    """
    require_batch(batch)
    named = conditions.items() if isinstance(conditions, Mapping) else ()
    if not named or any(
        not isinstance(ablation, Ablation) or not isinstance(name, str) or not name
        for name, ablation in named
    ):
        raise InvalidInputError(
            "Conditions are ablations with a name",
            expected="a mapping of names to ablations, at least one",
            got=repr(conditions)[:120],
            fix="pass some of sinkscope.PAPER_CONDITIONS, or None for the default ones",
        )
    reasons = {name: applicable(view, ablation, batch) for name, ablation in named}
    refused = tuple((name, reason) for name, reason in reasons.items() if reason is not None)
    if len(refused) == len(reasons):
        raise NotApplicableError(
            "None of the conditions applies to this model",
            expected="at least one condition that the model has the parts for",
            got="; ".join(f"{name}: {reason}" for name, reason in refused)[:400],
            fix="add the untouched model, ablations.Composition()",
        )
    return {name: a for name, a in named if reasons[name] is None}, refused


def to_numpy(values: Tensor) -> np.ndarray:
    """The values as an array; bfloat16, which numpy does not have, as float32."""
    values = values.cpu()
    return (values.float() if values.dtype == torch.bfloat16 else values).numpy()


def by_position(values: Tensor, batch: TokenBatch) -> Tensor:
    """Columns of `[batch ... pos]` in the order of each row's positions, padding at the end.

    Rows of a left-padded batch hold position 0 in different columns; numbers per position
    are taken over rows after this.
    """
    order = (~batch.mask).long().argsort(dim=1, stable=True)[:, : int(batch.lengths.max())]
    index = order.to(values.device).reshape(len(order), *[1] * (values.ndim - 2), -1)
    return values.gather(-1, index.expand(*values.shape[:-1], -1))


def applicable(view: ModelView, ablation: Ablation, batch: TokenBatch) -> str | None:
    """None if the model has what the ablation needs, else the reason why not."""
    try:
        for edit in ablation.edits(view, EditContext.of(batch)):
            view.hook_point(edit.site)
    except NotApplicableError as error:
        return str(error)
    return None


def token_texts(view: ModelView, batch: TokenBatch, row: int) -> tuple[str, ...]:
    """What each position of a row holds, as text; ids where there is no tokenizer."""
    ids = batch.ids[row][batch.mask[row]].tolist()
    if view.tokenizer is None:
        return tuple(str(i) for i in ids)
    return tuple(view.tokenizer.decode([i]) for i in ids)
