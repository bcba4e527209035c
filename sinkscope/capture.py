"""One streaming run: a view, a batch, an ablation, and readers that reduce what they see.

Every measure of sinkscope goes through `stream`. A reader names the sites it reads; each
chunk runs once for all readers and stops as soon as every one of them has read.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from sinkscope.ablations import (
    Ablation,
    Composition,
    Edit,
    EditContext,
    refuse_dead_edits,
    require_ablation,
)
from sinkscope.epe import epe_found_once
from sinkscope.errors import (
    EditError,
    InvalidInputError,
    LoadError,
    MemoryLimitError,
    NoEffectWarning,
    NotApplicableError,
    SmallerBatchWarning,
)
from sinkscope.guard import NOT_IN_ALL_LAYERS, PatternGuard
from sinkscope.model import HookFn, ModelView, Stopped, stop
from sinkscope.prompts import TokenBatch, require_batch
from sinkscope.sites import Site

LOGITS = Site("logits")
"""What the model gives back, the one site that is no hook."""

Progress = Callable[[int], None]
"""Called with the number of prompts that a chunk held, when the chunk is done."""

Total = Callable[[int], None]
"""Called at the start with the number of prompts that will run, counted over all passes."""

Part = Mapping[str, Tensor]
"""What a reader made of one chunk, by name: all that is kept, stored or sent of it."""

Piece = tuple[int, Sequence[Part]]
"""The number of the first prompt, and each reader's part; a chunk that fits has a single one."""

PASSING = "passing."
"""Names that begin so are of use only until all passes over a chunk are done."""

Reduce = Callable[[Tensor, TokenBatch, int], Tensor]
"""`reduce(tensor, chunk, layer)`, `[batch ...]`: what is kept of one site of one chunk."""


@runtime_checkable
class Reader(Protocol):
    """What a measure gives to `stream`.

    For each chunk the sites are read, `take` gives what was made of them, and `add` takes
    that in for the result. Parts may come to `add` in any order, also from another process or
    an earlier run; what a reader knows of other prompts it knows through `add` alone.
    """

    def sites(self, view: ModelView) -> Sequence[Site]:
        """The sites to read."""
        ...

    def read(self, site: Site, tensor: Tensor, chunk: TokenBatch) -> None:
        """Take in one site's tensor of one chunk; sites come in the order of the forward pass.

        The tensor is the model's own: reduce or clone, never change it.
        """
        ...

    def take(self, start: int) -> Part:
        """What was made of the chunk just read, whose first prompt has the number `start`."""
        ...

    def add(self, start: int, part: Part) -> None:
        """Take in the part of the chunk whose first prompt has the number `start`."""
        ...


class KeepingReader:
    """Keeps tensors `[batch ...]` of every chunk by name, and puts them together.

    Args:
        every: keeps the prompts whose number it divides; 1 for all.
    """

    def __init__(self, every: int = 1) -> None:
        self._every = every
        self._now: dict[str, Tensor] = {}
        self._parts: dict[int, Part] = {}

    def take(self, start: int) -> Part:
        part, self._now = self._now, {}
        if self._every == 1:
            return part
        first = -start % self._every
        return {name: kept[first :: self._every].clone() for name, kept in part.items()}

    def add(self, start: int, part: Part) -> None:
        self._parts[start] = part

    def joined(self, name: str) -> Tensor:
        """`[batch ...]`, what was kept under a name, in the order of the prompts."""
        return torch.cat([self._parts[start][name] for start in sorted(self._parts)])


class LayerReader(KeepingReader):
    """Reads one kind of site in chosen layers and keeps what `reduce` makes of it.

    Args:
        kind: of the sites.
        layers: 0-based.
        reduce: see `Reduce`; what it gives is a tensor of its own, no view of the model's.
        every: keeps the prompts whose number it divides; 1 for all.
    """

    def __init__(self, kind: str, layers: Sequence[int], reduce: Reduce, every: int = 1) -> None:
        super().__init__(every)
        self._kind = kind
        self._layers = tuple(layers)
        self._reduce = reduce
        self._device = torch.device("cpu")

    def sites(self, view: ModelView) -> Sequence[Site]:
        self._device = view.device
        return [Site(self._kind, layer) for layer in self._layers]

    def read(self, site: Site, tensor: Tensor, chunk: TokenBatch) -> None:
        if site.layer is not None:
            self._now[str(site.layer)] = self._reduce(tensor, chunk, site.layer)

    def result(self) -> Tensor:
        """`[batch layer ...]`, layers in the order they were chosen."""
        return stack_layers(([self.joined(str(layer))] for layer in self._layers), self._device)


def require_progress(progress: Any, total: Any = None) -> None:
    """Raise unless these are functions, or None.

    Called before anything runs by all that report how far they are.
    """
    for name, given in (("progress", progress), ("total", total)):
        if given is not None and not callable(given):
            raise InvalidInputError(
                f"{name} is not a function",
                expected=f"{name}(number of prompts), or None",
                got=repr(given)[:80],
                fix="pass a function such as lambda n: bar.update(n)",
            )


def stream(
    view: ModelView,
    batch: TokenBatch,
    readers: Sequence[Reader],
    ablation: Ablation | None = None,
    *,
    batch_size: int | None = None,
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

    Raises:
        InvalidInputError: the ablation is not one.
        EditError: an edit's place was never reached.

    Warns:
        NoEffectWarning: an edit left every tensor as it was.
    """
    run_passes(view, batch, [Pass(view, readers, ablation)], batch_size=batch_size)


@runtime_checkable
class Store(Protocol):
    """Where parts are kept while a long run goes on, see `sinkscope.partial`."""

    def mine(self, chunk: int) -> bool:
        """Whether this process runs the chunk of this number."""
        ...

    def load(self, run: int, start: int, readers: int) -> list[Piece] | None:
        """The pieces of a pass over the chunk that begins at `start`, if they are there."""
        ...

    def save(self, run: int, start: int, parts: Sequence[Part]) -> None:
        """Keep the parts of a pass over a whole chunk."""
        ...

    def save_pieces(self, start: int, passes: Sequence[Sequence[Piece]]) -> None:
        """Keep, in one step, what all passes made of a chunk that ran in pieces."""
        ...

    def close(self, start: int) -> None:
        """All passes over a chunk are done: forget what only these had to know."""
        ...

    def wait(self) -> None:
        """Wait until all processes have run their chunks."""
        ...


def run_passes(
    view: ModelView,
    batch: TokenBatch,
    passes: Sequence[Pass],
    *,
    batch_size: int | None = None,
    progress: Progress | None = None,
    store: Store | None = None,
) -> None:
    """Run several passes over a batch, chunk by chunk: all passes over one, then the next.

    Args:
        view: the model.
        batch: the prompts.
        passes: in the order in which they run over each chunk.
        batch_size: rows per forward pass; all at once if None.
        progress: told how many prompts are done, after each pass over a chunk.
        store: what is there already is not run again.
    """
    require_progress(progress)
    _require_fit(view, batch)
    for run in passes[:1]:
        run.runs_on = True
    others: list[tuple[int, int]] = []
    done = 0
    with view.measuring(), epe_found_once():
        for number, chunk in enumerate(batch.chunks(batch_size)):
            start, done = done, done + len(chunk)
            if store is not None and not store.mine(number):
                others.append((start, len(chunk)))
                continue
            _run_chunk(passes, chunk, start, store, progress)
            if store is not None:
                store.close(start)
    if store is not None:
        store.wait()
        for start, size in others:
            _add_from_another(passes, start, store)
            if progress is not None:
                progress(size * len(passes))
    for run in passes:
        run.report()


def _require_fit(view: ModelView, batch: TokenBatch) -> None:
    """Raise for ids or lengths that this model can't have, as of a batch made for another."""
    ids = require_batch(batch).ids
    if int(ids.max()) >= view.d_vocab or int(batch.lengths.max()) > view.n_ctx:
        raise InvalidInputError(
            "This batch does not fit the model; it may have been made for another",
            expected=f"ids below {view.d_vocab}, at most {view.n_ctx} tokens",
            got=f"ids up to {int(ids.max())}, {int(batch.lengths.max())} tokens",
            fix="make it with sinkscope.token_batch(model, ...)",
        )


def _run_chunk(
    passes: Sequence[Pass],
    chunk: TokenBatch,
    start: int,
    store: Store | None,
    progress: Progress | None,
) -> None:
    """All passes over a chunk; in pieces where it does not fit in memory.

    Readers then get the pieces' parts over those that earlier passes made of the whole chunk:
    parts count by their first prompt, and the pieces begin where the chunk does.
    """
    for index, run in enumerate(passes):
        pieces = None if store is None else store.load(index, start, len(run.readers))
        if pieces is None:
            ran = run.over(chunk, start)
            if ran is None:
                made = _in_pieces(passes, chunk, start)
                if store is not None:
                    on_cpu = [[(at, _on_cpu(parts)) for at, parts in pieces] for pieces in made]
                    store.save_pieces(start, on_cpu)
                if progress is not None:
                    progress(len(chunk) * (len(passes) - index))
                return
            if store is not None:
                ran = _on_cpu(ran)
                store.save(index, start, ran)
            pieces = [(start, ran)]
        for at, parts in pieces:
            run.add(at, parts)
        if progress is not None:
            progress(len(chunk))


def _in_pieces(passes: Sequence[Pass], chunk: TokenBatch, start: int) -> list[list[Piece]]:
    """All passes over one half of a chunk, then over the other; the lasting parts of each pass."""
    made: list[list[Piece]] = [[] for _ in passes]
    for piece in chunk.chunks(max(1, len(chunk) // 2)):
        for pieces, more in zip(made, _over_piece(passes, piece, start), strict=True):
            pieces.extend(more)
        start += len(piece)
    return made


def _over_piece(passes: Sequence[Pass], piece: TokenBatch, start: int) -> list[list[Piece]]:
    made: list[list[Piece]] = []
    for run in passes:
        parts = run.over(piece, start)
        if parts is None:
            return _in_pieces(passes, piece, start)
        run.add(start, parts)
        lasting = [
            {name: kept for name, kept in part.items() if not name.startswith(PASSING)}
            for part in parts
        ]
        made.append([(start, lasting)])
    return made


def _on_cpu(parts: Sequence[Part]) -> list[Part]:
    return [{name: kept.cpu() for name, kept in part.items()} for part in parts]


def _add_from_another(passes: Sequence[Pass], start: int, store: Store) -> None:
    for index, run in enumerate(passes):
        pieces = store.load(index, start, len(run.readers))
        if pieces is None:
            raise LoadError(
                f"Another process left nothing of the prompts from number {start} on",
                expected="processes that write to one directory and run to their end",
                got="no file",
                fix="start them on one machine, or write to a file system that all share",
            )
        for at, parts in pieces:
            run.add(at, parts)


class Pass:
    """One ablation and all who read under it, to be run over chunks.

    Raises:
        InvalidInputError: the ablation is not one.
    """

    def __init__(
        self, view: ModelView, readers: Sequence[Reader], ablation: Ablation | None = None
    ) -> None:
        self.readers = readers
        self.ablation = require_ablation(Composition() if ablation is None else ablation)
        self._view = view
        self._last = _last_layer(view, readers)
        self._witnesses: list[_Witness] = []
        self._edits_fit_any_chunk = False
        self._guard: PatternGuard | None = None
        self._most: int | None = None
        self._ran = False
        self.runs_on = False
        """Whether the first chunk runs to the end, to see that the model passes no site twice."""

    def over(self, chunk: TokenBatch, start: int) -> list[Part] | None:
        """Run the model over one chunk, within `view.measuring()`; each reader's part of it.

        None where the chunk does not fit in memory: it is to come again in two pieces.

        Args:
            chunk: the prompts.
            start: the number of the first of them.

        Raises:
            MemoryLimitError: a single prompt does not fit.
        """
        if self._most is not None and len(chunk) > self._most:
            return None
        try:
            self._run(chunk)
        except (MemoryError, RuntimeError) as error:
            if not _is_out_of_memory(error):
                raise
            for reader in self.readers:
                reader.take(start)  # what it read before memory ran out
            self._smaller(chunk, error)
            return None
        return [reader.take(start) for reader in self.readers]

    def _smaller(self, chunk: TokenBatch, error: BaseException) -> None:
        if len(chunk) == 1:
            raise MemoryLimitError(
                "Memory does not suffice for a single prompt",
                expected=f"room for one prompt of {chunk.ids.shape[1]} tokens",
                got=str(error)[:200] or type(error).__name__,
                fix="use shorter prompts, a smaller dtype, fewer layers, or another device",
            ) from error
        self._most = len(chunk) // 2
        warnings.warn(
            f"{len(chunk)} prompts at once did not fit in memory; {self._view.name} goes on with "
            f"{self._most} at a time",
            SmallerBatchWarning,
            stacklevel=5,
        )
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _run(self, chunk: TokenBatch) -> None:
        self._prepare(chunk)
        readers = self._all_readers
        waiting = {site for reader in readers for site in reader.sites(self._view)}
        hooks: list[tuple[Site | str, HookFn]] = [(w.edit.site, w.hook) for w in self._witnesses]
        hooks += self._reading_hooks(chunk, waiting)
        end = None if LOGITS in waiting else self._last + 1
        with suppress(Stopped), self._view.hooks(hooks):
            out = self._view.forward(chunk, end)
            for reader in self.readers:
                if LOGITS in reader.sites(self._view):
                    reader.read(LOGITS, out, chunk)
        _refuse_unseen(self._view, self.readers, waiting - {LOGITS})
        self._ran = True

    @property
    def _all_readers(self) -> list[Reader | PatternGuard]:
        return [*self.readers, *([] if self._guard is None else [self._guard])]

    def add(self, start: int, parts: Sequence[Part]) -> None:
        """Give each reader its part of a chunk."""
        for reader, part in zip(self.readers, parts, strict=True):
            reader.add(start, part)

    def _prepare(self, chunk: TokenBatch) -> None:
        """Edits are made anew only where they depend on the chunk, which is through its mask."""
        unpadded = bool(chunk.mask.all())
        if self._edits_fit_any_chunk and unpadded:
            return
        edits = self.ablation.edits(self._view, EditContext.of(chunk))
        if self._guard is None:
            refuse_dead_edits(self._view, edits)
            self._guard = _guard(self._view, self.readers, edits)
            self._witnesses = [_Witness(edit) for edit in edits]
        for witness, edit in zip(self._witnesses, edits, strict=True):
            witness.edit = edit
        self._edits_fit_any_chunk = unpadded

    def _reading_hooks(
        self, chunk: TokenBatch, waiting: set[Site]
    ) -> list[tuple[Site | str, HookFn]]:
        at: dict[Site, list[Reader | PatternGuard]] = {}
        for reader in self._all_readers:
            for site in reader.sites(self._view):
                if site != LOGITS:
                    at.setdefault(site, []).append(reader)

        def hook_for(site: Site, interested: list[Reader | PatternGuard]) -> HookFn:
            def read(tensor: Tensor, hook: Any) -> None:
                if site not in waiting:
                    _refuse_repeats(self._view, site)
                    return
                for reader in interested:
                    reader.read(site, tensor, chunk)
                waiting.remove(site)
                if not waiting and (self._ran or not self._looks_on()):
                    stop()

            return read

        return [(site, hook_for(site, interested)) for site, interested in at.items()]

    def _looks_on(self) -> bool:
        """An edit may come after all that is read, where it changes nothing but takes place."""
        return self.runs_on or not all(witness.fired for witness in self._witnesses)

    def report(self) -> None:
        """Say which edits did nothing, once all chunks have run; nothing if none has.

        Raises:
            EditError: an edit's place was never reached.

        Warns:
            NoEffectWarning: an edit left every tensor as it was.
        """
        for witness in self._witnesses if self._ran else ():
            site = witness.edit.site
            if not witness.fired and isinstance(site, Site) and (site.layer or 0) <= self._last:
                raise EditError(
                    f"An edit at {site} never took place",
                    expected="the model to pass through this hook",
                    got="no call",
                    fix="check that the hook fires in this model, e.g. with run_with_cache",
                )
            # A hook name does not tell whether its layer comes after the last that is read.
            ran = witness.fired or not isinstance(site, Site)
            if ran and not witness.changed and not witness.edit.only_looks:
                what = "changed nothing" if witness.fired else "was never reached before the end"
                warnings.warn(
                    f"an edit at {site} {what} in {self._view.name}", NoEffectWarning, stacklevel=4
                )


@contextmanager
def no_effect_is_fine() -> Iterator[None]:
    """Without warnings of edits that changed nothing, where that is a finding.

    Of edits that were never reached it is still warned: their numbers say nothing.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*changed nothing", NoEffectWarning)
        yield


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
    changed: bool = False

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


def _refuse_repeats(view: ModelView, site: Site) -> None:
    """A site passed twice has two values. HookedTransformer runs ln1 for q, k and v alike."""
    if not (site.kind in ("ln1", "attn_in") and view.sites.attn_in_before_gain):
        raise EditError(
            f"The model passed {site} more than once in one forward pass",
            expected="one value per layer",
            got="a second call of the hook",
            fix="sinkscope can't read models that run a layer several times",
        )


def _refuse_unseen(view: ModelView, readers: Sequence[Reader], waiting: set[Site]) -> None:
    """A hook that never fires, as of attention that returns no weights, has nothing to read."""
    for site in (site for reader in readers for site in reader.sites(view)):
        if site in waiting and site.kind not in NOT_IN_ALL_LAYERS:
            raise NotApplicableError(
                f"Not applicable: {view.name} never shows its {site}",
                expected="a call of this hook in each forward pass",
                got="none",
                fix="use measures that do not read this place, or, of a transformers model, set "
                "attn_implementation='eager'",
            )


def _guard(view: ModelView, readers: Sequence[Reader], edits: Sequence[Edit]) -> PatternGuard:
    """A guard of the layers whose patterns are read, but where an edit means to change them.

    Edits are this run's, or hooks that are there already: the user's own.
    """
    asked = {s.layer for r in readers for s in r.sites(view) if s.kind == "pattern"}
    edited = {id(view.hook_point(edit.site)) for edit in edits if not edit.only_looks}
    kinds = [kind for kind in ("attn_scores", "pattern") if kind in view.sites.names]

    def meant(layer: int) -> bool:
        points = [view.hook_point(Site(kind, layer)) for kind in kinds]
        return any(id(point) in edited or point.fwd_hooks for point in points)

    layers = sorted(layer for layer in asked if layer is not None)
    return PatternGuard(view, [layer for layer in layers if not meant(layer)])


def _is_out_of_memory(error: BaseException) -> bool:
    """CUDA's own error, Python's, or what torch's CPU allocator raises, a plain RuntimeError."""
    said = str(error)
    return (
        isinstance(error, (MemoryError, torch.OutOfMemoryError))
        or "can't allocate memory" in said
        or "out of memory" in said
    )


def _last_layer(view: ModelView, readers: Sequence[Reader]) -> int:
    """The last layer that anybody reads; 0 at least, so that the embeddings are read."""
    sites = [site for reader in readers for site in reader.sites(view)]
    if LOGITS in sites:
        return view.n_layers - 1
    return max((site.layer for site in sites if site.layer is not None), default=0)
