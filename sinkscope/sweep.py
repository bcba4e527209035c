"""Which heads and layers an ablation needs: its effect in each of them alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from sinkscope import metrics
from sinkscope.ablations import Ablation, Edit, EditContext
from sinkscope.capture import Progress, no_effect_is_fine, require_progress, stream
from sinkscope.costs import LossReader
from sinkscope.errors import EditError, InvalidInputError
from sinkscope.measures import PatternReader
from sinkscope.mitigations import SwitchOffHeads
from sinkscope.model import ModelView, model_view
from sinkscope.prompts import TokenBatch, require_batch
from sinkscope.results import Result

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, eq=False)
class HeadSweep(Result):
    """What an ablation does in one head, or in all heads of one layer.

    Attributes:
        sink: `[layer head prompt]`, change of the mean sink score of all heads in mid layers
            when the ablation acts in this head alone.
        loss: `[layer head prompt]`, change of the next-token loss, nats per token.
        layer_sink: `[layer prompt]`, the same for all heads of a layer at once.
        layer_loss: `[layer prompt]`.
        layers: the layers of the first axis.
        mid_layers: the layers that the sink score is about.
        ablation: what acted, as text.
    """

    kind: ClassVar[str] = "head_sweep"

    sink: np.ndarray
    loss: np.ndarray
    layer_sink: np.ndarray
    layer_loss: np.ndarray
    layers: tuple[int, ...]
    mid_layers: tuple[int, ...]
    ablation: str

    def to_dataframe(self) -> pd.DataFrame:
        """One row per head, and one per layer with head "all".

        Columns: layer, head, n (prompts), and means over prompts of sink_change and loss_change
        with their standard errors.
        """
        import pandas as pd

        rows = []
        for n, layer in enumerate(self.layers):
            heads = [(str(h), self.sink[n, h], self.loss[n, h]) for h in range(self.sink.shape[1])]
            for head, sink, loss in (*heads, ("all", self.layer_sink[n], self.layer_loss[n])):
                row: dict[str, Any] = {"layer": layer, "head": head, "n": len(sink)}
                for name, values in (("sink_change", sink), ("loss_change", loss)):
                    row[name] = float(values.mean())
                    several = len(values) > 1
                    row[f"{name}_stderr"] = (
                        float(values.std(ddof=1) / len(values) ** 0.5) if several else float("nan")
                    )
                rows.append(row)
        return pd.DataFrame(rows)

    def overview(self) -> list[tuple[str, str]]:
        sink, loss = self.sink.mean(-1), self.loss.mean(-1)
        return [
            ("ablation", self.ablation),
            ("largest sink change", self._extreme(sink)),
            ("largest loss change", self._extreme(loss)),
        ]

    def _extreme(self, change: np.ndarray) -> str:
        layer, head = np.unravel_index(int(np.abs(change).argmax()), change.shape)
        return f"{change[layer, head]:+.4f} in layer {self.layers[int(layer)]}, head {head}"

    def summary(self) -> dict[str, Any]:
        """Means over prompts by head and by layer."""
        return {
            "ablation": self.ablation,
            "layers": self.layers,
            "mid_layers": self.mid_layers,
            **{
                name: getattr(self, name).mean(-1)
                for name in ("sink", "loss", "layer_sink", "layer_loss")
            },
        }


def head_sweep(
    model: Any,
    batch: TokenBatch,
    ablation: Ablation | None = None,
    layers: Sequence[int] | None = None,
    *,
    side_by_side: bool = True,
    batch_size: int | None = None,
    progress: Progress | None = None,
) -> HeadSweep:
    """Apply an ablation in each head alone, and in each layer alone, and see what changes.

    The prompts run once a layer, repeated for every head and once more for all heads together;
    each repetition gets its own head's edits. That is exact, since rows of a batch do not see
    each other; `side_by_side=False` runs them one after the other instead.

    Args:
        model: a hooked model or its view.
        batch: the prompts.
        ablation: any with `layers` and `heads` to be restricted, such as `ZeroQueryBias()`, or
            `None` for heads switched off.
        layers: all if None.
        side_by_side: see above; needs `n_heads + 1` times the memory.
        batch_size: prompts per forward pass, before repetition; all at once if None.
        progress: told how many prompts are done, once a layer and chunk.

    Raises:
        InvalidInputError: the ablation has no `layers` and `heads`.
        NotApplicableError: the model lacks what the ablation needs.
    """
    view = model_view(model)
    require_batch(batch)
    require_progress(progress)
    chosen = view.layers(layers)
    heads = list(range(view.n_heads))
    readers = _readers(view)
    with no_effect_is_fine():
        stream(view, batch, readers, batch_size=batch_size)
        untouched = _per_prompt(view, readers)
        rows = []
        for layer in chosen:
            parts = [restricted(ablation, layer, [h]) for h in heads]
            parts.append(restricted(ablation, layer, heads))
            run = _together if side_by_side else _apart
            rows.append(run(view, batch, parts, batch_size, progress))
    changes = np.stack(rows) - untouched[:, None]
    return HeadSweep(
        sink=changes[:, 0, :-1],
        loss=changes[:, 1, :-1],
        layer_sink=changes[:, 0, -1],
        layer_loss=changes[:, 1, -1],
        layers=chosen,
        mid_layers=tuple(view.mid_or_all_layers),
        ablation="heads switched off" if ablation is None else repr(ablation),
    )


def restricted(ablation: Ablation | None, layer: int, heads: Sequence[int]) -> Ablation:
    """An ablation in some heads of one layer; heads switched off where it is None.

    Raises:
        InvalidInputError: the ablation has no `layers` and `heads`.
    """
    if ablation is None:
        return SwitchOffHeads(tuple((layer, head) for head in heads))
    names: set[str] = set()
    if dataclasses.is_dataclass(ablation) and isinstance(ablation, Ablation):
        names = {field.name for field in dataclasses.fields(ablation)}
    if not {"layers", "heads"} <= names:
        raise InvalidInputError(
            "A sweep restricts an ablation to single heads",
            expected="an ablation with layers= and heads=, such as ZeroQueryBias()",
            got=repr(ablation)[:120],
            fix="pass another, or None for heads switched off",
        )
    return dataclasses.replace(ablation, layers=[layer], heads=list(heads))  # type: ignore


@dataclass(frozen=True)
class SideBySide(Ablation):
    """Each part acts on its own stretch of the batch's rows, all stretches of equal length."""

    parts: tuple[Ablation, ...]

    def edits(self, view: ModelView, context: EditContext) -> Sequence[Edit]:
        edits: list[Edit] = []
        for n, part in enumerate(self.parts):
            own = _stretch_context(context, n, len(self.parts))
            edits += [self._on_stretch(edit, n) for edit in part.edits(view, own)]
        return edits

    def _on_stretch(self, edit: Edit, n: int) -> Edit:
        def act(tensor: Tensor, hook: Any) -> Tensor | None:
            stretch = _stretch(tensor.shape[0], n, len(self.parts))
            changed = edit.fn(tensor[stretch], hook=hook)
            if changed is None:
                return None
            out = tensor.clone()
            out[stretch] = changed
            return out

        return Edit(edit.site, act, edit.only_looks)


def _stretch(rows: int, n: int, of: int) -> slice:
    if rows % of:
        raise EditError(
            "The rows can't be shared out",
            expected=f"a multiple of {of} rows",
            got=rows,
            fix="repeat the prompts once for every part",
        )
    return slice(n * rows // of, (n + 1) * rows // of)


def _stretch_context(context: EditContext, n: int, of: int) -> EditContext:
    mask = context.rows.mask
    if mask is None:
        return EditContext()
    own = mask[_stretch(mask.shape[0], n, of)]
    return EditContext(dataclasses.replace(context.rows, mask=own))


def _readers(view: ModelView) -> tuple[PatternReader, LossReader]:
    return PatternReader(view.mid_or_all_layers, metrics.sink_score), LossReader(view)


def _per_prompt(view: ModelView, readers: tuple[PatternReader, LossReader]) -> np.ndarray:
    """`[2 row]`: sink score and loss."""
    sinks, losses = readers
    both = (sinks.result().mean((1, 2)), losses.result())
    return torch.stack([value.detach().double().cpu() for value in both]).numpy()


def _together(
    view: ModelView,
    batch: TokenBatch,
    parts: Sequence[Ablation],
    batch_size: int | None,
    progress: Progress | None,
) -> np.ndarray:
    """`[2 part prompt]`."""
    chunks = []
    for chunk in batch.chunks(batch_size):
        repeated = chunk.select(list(range(len(chunk))) * len(parts))
        readers = _readers(view)
        stream(view, repeated, readers, SideBySide(tuple(parts)))
        chunks.append(_per_prompt(view, readers).reshape(2, len(parts), len(chunk)))
        if progress is not None:
            progress(len(chunk))
    return np.concatenate(chunks, axis=-1)


def _apart(
    view: ModelView,
    batch: TokenBatch,
    parts: Sequence[Ablation],
    batch_size: int | None,
    progress: Progress | None,
) -> np.ndarray:
    """`[2 part prompt]`."""
    values = []
    for part in parts:
        readers = _readers(view)
        stream(view, batch, readers, part, batch_size=batch_size)
        values.append(_per_prompt(view, readers))
    if progress is not None:
        progress(len(batch))
    return np.stack(values, axis=1)
