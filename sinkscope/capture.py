"""One streaming run: a view, a batch, an ablation, and readers that reduce what they see.

Every measure of sinkscope goes through `stream`. A reader names the sites it reads; each
chunk runs once for all readers and stops after the last layer that one of them reads.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from sinkscope.ablations import (
    Ablation,
    Composition,
    Edit,
    EditContext,
    refuse_dead_edits,
)
from sinkscope.errors import EditError, InvalidInputError, NoEffectWarning
from sinkscope.model import HookFn, ModelView
from sinkscope.prompts import TokenBatch, require_batch
from sinkscope.sites import Site

Progress = Callable[[int], None]
"""Called with the number of prompts that a chunk held, when the chunk is done."""


@runtime_checkable
class Reader(Protocol):
    """What a measure gives to `stream`."""

    def sites(self, view: ModelView) -> Sequence[Site]:
        """The sites to read."""
        ...

    def read(self, site: Site, tensor: Tensor, chunk: TokenBatch) -> None:
        """Take in one site's tensor of one chunk; sites come in the order of the forward pass.

        The tensor is the model's own: reduce or clone, never change it.
        """
        ...


def stream(
    view: ModelView,
    batch: TokenBatch,
    readers: Sequence[Reader],
    ablation: Ablation | None = None,
    *,
    batch_size: int | None = None,
    progress: Progress | None = None,
) -> None:
    """Run a batch once and let every reader see its sites.

    Edits act after the user's own hooks and before the readers. The model runs in eval mode
    without gradients; hooks and flags are as before at the end, also after an error.

    Args:
        view: the model.
        batch: the prompts.
        readers: who reads what.
        ablation: the untouched model if None.
        batch_size: rows per forward pass; all at once if None.
        progress: told how many prompts are done.

    Raises:
        InvalidInputError: the ablation is not one.
        EditError: an edit's place was never reached.

    Warns:
        NoEffectWarning: an edit left every tensor as it was.
    """
    require_batch(batch)
    ablation = Composition() if ablation is None else ablation
    if not isinstance(ablation, Ablation):
        raise InvalidInputError(
            "This is not an ablation",
            expected="one of sinkscope.ablations, a sum of them, or Ablation.from_hook(site, fn)",
            got=repr(ablation),
            fix="look conditions up by name with sinkscope.ablations.condition(name)",
        )
    if not readers:
        return
    stop = _stop_at(view, readers)
    witnesses: dict[int, _Witness] = {}
    with view.measuring():
        for chunk in batch.chunks(batch_size):
            edits = ablation.edits(view, EditContext.of(chunk))
            if not witnesses:
                refuse_dead_edits(view, edits)
            for n, edit in enumerate(edits):
                witnesses.setdefault(n, _Witness(edit)).edit = edit
            hooks: list[tuple[Site | str, HookFn]] = [
                (witness.edit.site, witness.hook) for witness in witnesses.values()
            ]
            hooks += _reading_hooks(view, readers, chunk)
            with view.hooks(hooks):
                view.forward(chunk, stop_at_layer=stop)
            if progress is not None:
                progress(len(chunk))
    _report(view, witnesses.values(), stop)


def stack_layers(layers: Iterable[Sequence[Tensor]], device: torch.device) -> Tensor:
    """`[batch layer ...]` from each layer's chunks.

    Layers of a model that is split over devices come from several; all go to `device`, the
    one of the token embedding.
    """
    return torch.stack([torch.cat(list(chunks)).to(device) for chunks in layers], dim=1)


@dataclass
class _Witness:
    """An edit, and what is known of its effect over the chunks so far."""

    edit: Edit
    fired: bool = False
    changed: bool = field(default=False)

    def hook(self, tensor: Tensor, hook: Any) -> Tensor | None:
        self.fired = True
        if self.edit.only_looks:
            return self.edit.fn(tensor, hook=hook)
        # A user's hook may edit in place, which only a copy can tell.
        before = tensor.clone() if not self.changed else tensor
        after = self.edit.fn(tensor, hook=hook)
        _refuse_misfit(self.edit.site, before, after)
        if not self.changed:
            self.changed = not torch.equal(before, tensor if after is None else after)
        return after


def _refuse_misfit(site: Site | str, before: Tensor, after: Any) -> None:
    fits = isinstance(after, Tensor) and after.shape == before.shape and after.dtype == before.dtype
    if after is not None and not fits:
        got = type(after).__name__
        if isinstance(after, Tensor):
            got = f"{after.dtype} of shape {list(after.shape)}"
        raise EditError(
            f"A hook at {site} gave back what the model can't go on with",
            expected=f"{before.dtype} of shape {list(before.shape)}, or None",
            got=got,
            fix="return a tensor like the one that came",
        )


def _reading_hooks(
    view: ModelView, readers: Sequence[Reader], chunk: TokenBatch
) -> list[tuple[Site | str, HookFn]]:
    at: dict[Site, list[Reader]] = {}
    for reader in readers:
        for site in reader.sites(view):
            at.setdefault(site, []).append(reader)

    def hook_for(site: Site, interested: list[Reader]) -> HookFn:
        calls = 0

        def read(tensor: Tensor, hook: Any) -> None:
            nonlocal calls
            calls += 1
            if calls > 1:
                _refuse_repeats(view, site)
                return
            for reader in interested:
                reader.read(site, tensor, chunk)

        return read

    return [(site, hook_for(site, interested)) for site, interested in at.items()]


def _refuse_repeats(view: ModelView, site: Site) -> None:
    """A site passed twice has two values. HookedTransformer runs ln1 for q, k and v alike."""
    if not (site.kind == "attn_in" and view.sites.attn_in_before_gain):
        raise EditError(
            f"The model passed {site} more than once in one forward pass",
            expected="one value per layer",
            got="a second call of the hook",
            fix="sinkscope can't read models that run a layer several times",
        )


def _stop_at(view: ModelView, readers: Sequence[Reader]) -> int:
    """The first layer that nobody reads any more; 1 at least, so that the embeddings are read."""
    layers = [s.layer for reader in readers for s in reader.sites(view) if s.layer is not None]
    return max(layers, default=0) + 1


def _report(view: ModelView, witnesses: Any, stop: int) -> None:
    for witness in witnesses:
        site = witness.edit.site
        if not witness.fired and isinstance(site, Site) and (site.layer or 0) < stop:
            raise EditError(
                f"An edit at {site} never took place",
                expected="the model to pass through this hook",
                got="no call",
                fix="check that the hook fires in this model, e.g. with run_with_cache",
            )
        if witness.fired and not witness.changed and not witness.edit.only_looks:
            warnings.warn(
                f"an edit at {site} changed nothing in {view.name}", NoEffectWarning, stacklevel=4
            )
