"""How experiments share passes: each asks for readings, and equal ablations run once for all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

from sinkscope.ablations import Ablation, EditContext
from sinkscope.capture import Progress, Reader, stream
from sinkscope.errors import NotApplicableError
from sinkscope.model import ModelView, model_view
from sinkscope.prompts import TokenBatch
from sinkscope.results import Result

Request = tuple[Ablation, Reader]
Total = Callable[[int], None]


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
) -> None:
    """Serve the requests of several experiments, one pass for each distinct ablation.

    Args:
        model: a hooked model or its view.
        batch: the prompts.
        experiments: whose readers are to be filled.
        batch_size: rows per forward pass; all at once if None.
        total: told at the start how many prompts will run over all passes.
        progress: told how many prompts are done, after each chunk.
    """
    view = model_view(model)
    passes: list[tuple[Ablation, list[Reader]]] = []
    for experiment in experiments:
        for ablation, reader in experiment.requests():
            for known, readers in passes:
                if known == ablation:
                    readers.append(reader)
                    break
            else:
                passes.append((ablation, [reader]))
    if total is not None:
        total(len(passes) * len(batch))
    for ablation, readers in passes:
        stream(view, batch, readers, ablation, batch_size=batch_size, progress=progress)


def applicable(view: ModelView, ablation: Ablation, batch: TokenBatch) -> str | None:
    """None if the model has what the ablation needs, else the reason why not."""
    try:
        for edit in ablation.edits(view, EditContext.of(batch)):
            view.hook_point(edit.site)
    except NotApplicableError as error:
        return str(error)
    return None
