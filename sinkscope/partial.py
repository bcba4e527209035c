"""Finished pieces of a long run, on disk: a killed run goes on from them, processes share them.

A run is cut into chunks of prompts, and each chunk into passes, one for each ablation. What a
pass made of a chunk is one file, written in one step; when all passes over a chunk are done
they become one file. A chunk that ran in pieces for want of memory becomes one file at once.
`run.json` says which run the pieces are of.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sinkscope.capture import PASSING, Part, Piece
from sinkscope.errors import InvalidInputError, LoadError
from sinkscope.results import dump_json, json_at, write_bytes, write_text

FOLDER = ".partial"


@dataclass(frozen=True)
class Processes:
    """The processes of one run, all of which see the same files.

    Attributes:
        index: of this process.
        count: of all.
        wait: returns when every process has called it.
    """

    index: int = 0
    count: int = 1
    wait: Callable[[], None] = lambda: None

    @property
    def is_main(self) -> bool:
        """Whether this process prints and writes for all."""
        return self.index == 0


def processes(device: str = "cpu") -> Processes:
    """The processes that `accelerate launch` (or torchrun) started; one where nothing did.

    Args:
        device: "cpu" makes processes talk over gloo, without asking for an accelerator.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) <= 1:
        return Processes()
    from accelerate import PartialState

    state = PartialState(cpu=device.startswith("cpu"))
    return Processes(state.process_index, state.num_processes, state.wait_for_everyone)


class Partial:
    """The pieces of one run in a directory of its own; a `Store` for `run_passes`.

    Args:
        directory: of the pieces alone; it is removed at the end.
        identity: what must agree for pieces to belong to one run, by name, as plain values.
        group: the processes among which chunks are dealt out, in turn.
        resumable: false where something that no identity can tell, as hooks, shapes the run.

    Raises:
        InvalidInputError: the directory holds pieces of another run, or of one that can't be
            told from another; names what differs.
        WriteError: it can't be written.
    """

    def __init__(
        self,
        directory: Path,
        identity: Mapping[str, Any],
        group: Processes | None = None,
        *,
        resumable: bool = True,
    ) -> None:
        self._root = directory
        self._group = Processes() if group is None else group
        ours = json.loads(dump_json(identity))
        path = directory / "run.json"
        if path.is_file():
            _refuse_to_mix(_read_identity(path), ours, directory)
        if not resumable or not path.is_file():
            _refuse_unknown(directory)
        self._group.wait()
        write_text(path, dump_json(ours))
        self._group.wait()

    def mine(self, chunk: int) -> bool:
        """Whether this process runs a chunk."""
        return chunk % self._group.count == self._group.index

    def load(self, run: int, start: int, readers: int) -> list[Piece] | None:
        """The pieces of a pass over the chunk that begins at `start`, if they are there."""
        for path in (self._whole(start), self._single(run, start)):
            if path.is_file():
                with _opened(path) as file:
                    return [
                        (at, [_tensors(file, f"{run}.{at}.{reader}.") for reader in range(readers)])
                        for at in file.get_tensor(f"{run}.begins").tolist()
                    ]
        return None

    def save(self, run: int, start: int, parts: Sequence[Part]) -> None:
        """Write the parts of a pass over a whole chunk as one file."""
        _write(self._single(run, start), _named(run, [(start, parts)]))

    def save_pieces(self, start: int, passes: Sequence[Sequence[Piece]]) -> None:
        """Write what all passes made of a chunk that ran in pieces as one file."""
        named: dict[str, Tensor] = {}
        for run, pieces in enumerate(passes):
            named |= _named(run, pieces)
        _write(self._whole(start), named)

    def close(self, start: int) -> None:
        """Put the files of a chunk together into one, without what is of no more use."""
        singles = sorted(self._root.glob(f"{start:09d}.*.safetensors"))
        if not self._whole(start).is_file():
            kept: dict[str, Tensor] = {}
            for path in singles:
                with _opened(path) as file:
                    kept |= _tensors(file)
            lasting = {n: t for n, t in kept.items() if f".{PASSING}" not in n}
            _write(self._whole(start), lasting)
        for path in singles:
            path.unlink(missing_ok=True)

    def wait(self) -> None:
        """Wait for all processes to come here."""
        self._group.wait()

    def remove(self) -> None:
        """Remove the pieces, once every process is done with them."""
        self._group.wait()
        if self._group.is_main:
            discard(self._root)

    def _single(self, run: int, start: int) -> Path:
        return self._root / f"{start:09d}.{run:03d}.safetensors"

    def _whole(self, start: int) -> Path:
        return self._root / f"{start:09d}.safetensors"


def discard(directory: Path) -> None:
    """Remove a directory of pieces, `run.json` last, so that what is left stays named."""
    if not directory.is_dir():
        return
    for path in sorted(directory.iterdir(), key=lambda path: path.name == "run.json"):
        with suppress(OSError):
            path.unlink()
    shutil.rmtree(directory, ignore_errors=True)


def _named(run: int, pieces: Sequence[Piece]) -> dict[str, Tensor]:
    """The tensors of a pass by run, first prompt, reader and name, and where its pieces begin."""
    named = {f"{run}.begins": torch.tensor([at for at, _ in pieces])}
    for at, parts in pieces:
        for reader, part in enumerate(parts):
            named |= {f"{run}.{at}.{reader}.{n}": kept.contiguous() for n, kept in part.items()}
    return named


def _write(path: Path, tensors: dict[str, Tensor]) -> None:
    from safetensors.torch import save

    write_bytes(path, save(tensors))


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """A piece to be read from; whatever fails meanwhile is a fault of the file."""
    from safetensors import safe_open

    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except Exception as error:  # the format's own errors and the system's
        raise LoadError(
            f"A piece of an earlier run can't be read: {str(path)!r}",
            expected="a file that sinkscope wrote",
            got=f"{type(error).__name__}: {str(error)[:200]}",
            fix="delete this file; what it held will run again",
        ) from error


def _tensors(file: Any, prefix: str = "") -> dict[str, Tensor]:
    """The tensors whose names begin with a prefix, without it."""
    names = [name for name in file.keys() if name.startswith(prefix)]  # noqa: SIM118
    return {name.removeprefix(prefix): file.get_tensor(name) for name in names}


def _read_identity(path: Path) -> dict[str, Any]:
    return json_at(
        path,
        f"{str(path)!r} does not say of which run the pieces beside it are",
        expected="the JSON that sinkscope wrote",
        fix=f"delete {str(path.parent)!r} and start again",
        kind=dict,
    )


def _refuse_unknown(directory: Path) -> None:
    """Pieces without a name, or of hooks that no name can tell, may be of any run."""
    if any(directory.glob("*.safetensors")):
        raise InvalidInputError(
            f"{str(directory)!r} holds pieces of a run that can't be told from another",
            expected="pieces beside their run.json, made and taken up without hooks on the model",
            got=", ".join(sorted(path.name for path in directory.iterdir()))[:80],
            fix="delete this directory, write elsewhere, or remove the hooks",
        )


def _refuse_to_mix(theirs: Mapping[str, Any], ours: Mapping[str, Any], directory: Path) -> None:
    names = [n for n in {**ours, **theirs} if ours.get(n) != theirs.get(n)]
    if names:
        raise InvalidInputError(
            f"{str(directory)!r} holds the beginning of another run",
            expected="; ".join(f"{n} {_short(theirs.get(n))}" for n in names),
            got="; ".join(f"{n} {_short(ours.get(n))}" for n in names),
            fix="start that run again as it was, write elsewhere, or delete this directory",
        )


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
