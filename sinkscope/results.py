"""What experiments give back: frozen, comparable, and able to be saved and loaded.

A result holds numpy arrays, plain values and tuples of these. `save` writes `<kind>.json` and
`<kind>.npz` into a directory that several results may share; nothing is ever unpickled.
"""

from __future__ import annotations

import io
import json
import os
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from sinkscope.errors import LoadError, WriteError

if TYPE_CHECKING:
    import pandas as pd
    from typing_extensions import Self

SCHEMA_VERSION = 1


@dataclass(frozen=True, eq=False)
class Result(ABC):
    """Base of all results."""

    kind: ClassVar[str]

    @abstractmethod
    def to_dataframe(self) -> pd.DataFrame:
        """One row a measurement, with named columns."""

    @abstractmethod
    def summary(self) -> dict[str, Any]:
        """The numbers that go into results.json, as plain values."""

    def save(self, directory: str | os.PathLike[str]) -> Path:
        """Write the result into a directory, which is made if it is not there.

        Raises:
            WriteError: the directory or a file can't be written; what was there stays.
        """
        arrays, plain = {}, {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, np.ndarray):
                arrays[field.name] = value
            else:
                plain[field.name] = value
        buffer = io.BytesIO()
        np.savez_compressed(buffer, allow_pickle=False, **arrays)
        header = {"schema": SCHEMA_VERSION, "kind": self.kind, "values": plain}
        root = Path(directory)
        write_bytes(root / f"{self.kind}.npz", buffer.getvalue())
        write_text(root / f"{self.kind}.json", dump_json(header))
        return root

    @classmethod
    def load(cls, directory: str | os.PathLike[str]) -> Self:
        """Read a result back from a directory.

        Raises:
            LoadError: nothing there, damaged files, another kind, or a newer schema.
        """
        root = Path(directory)
        header = _read_header(root / f"{cls.kind}.json", cls.kind)
        path = root / f"{cls.kind}.npz"
        try:
            with np.load(path, allow_pickle=False) as stored:
                arrays = {name: stored[name] for name in stored.files}
        except Exception as error:  # zip, numpy and the system each have their own errors
            raise LoadError(
                f"The arrays in {str(path)!r} can't be read",
                expected="a file that this result's save() wrote",
                got=f"{type(error).__name__}: {str(error)[:200]}",
            ) from error
        values = {name: _tuples(value) for name, value in header["values"].items()}
        names = {field.name for field in fields(cls)}
        if names != set(values) | set(arrays):
            raise LoadError(
                f"The saved {cls.kind} in {str(root)!r} does not have the fields of this version",
                expected=", ".join(sorted(names)),
                got=", ".join(sorted(set(values) | set(arrays))),
            )
        return cls(**values, **arrays)

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return all(_same(getattr(self, f.name), getattr(other, f.name)) for f in fields(self))

    __hash__ = None  # type: ignore[assignment]


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        numeric = np.issubdtype(a.dtype, np.floating)
        return a.dtype == b.dtype and np.array_equal(a, b, equal_nan=numeric)
    return type(a) is type(b) and a == b


def _tuples(value: Any) -> Any:
    return tuple(_tuples(v) for v in value) if isinstance(value, list) else value


def _read_header(path: Path, kind: str) -> dict[str, Any]:
    try:
        header = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise LoadError(
            f"There is no readable {kind} at {str(path)!r}",
            expected="a file that this result's save() wrote",
            got=f"{type(error).__name__}: {str(error)[:200]}",
        ) from error
    ok = isinstance(header, dict) and isinstance(header.get("values"), dict)
    if not ok or header.get("kind") != kind or header.get("schema") != SCHEMA_VERSION:
        raise LoadError(
            f"{str(path)!r} is not a {kind} of this version",
            expected=f"kind {kind!r}, schema {SCHEMA_VERSION}",
            got=f"kind {header.get('kind')!r}, schema {header.get('schema')!r}"
            if ok
            else "something else",
        )
    return header


# --- writing ------------------------------------------------------------------------------


def write_text(path: Path, text: str) -> None:
    """Write a file in one step, see `write_bytes`."""
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file in one step: it has the whole new content or the old one, never a part.

    Raises:
        WriteError: the directory can't be made or the file can't be written.
    """
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except OSError as error:
        if temporary is not None and os.path.exists(temporary):
            os.unlink(temporary)
        raise WriteError(
            f"{str(path)!r} can't be written",
            expected="a directory with room that this user may write to",
            got=f"{type(error).__name__}: {error.strerror or error}",
            fix="choose another --out directory",
        ) from error


def require_writable(directory: Path) -> None:
    """Raise before a long run if its directory can't be written.

    Raises:
        WriteError: see `write_bytes`.
    """
    probe = directory / ".sinkscope-probe"
    write_bytes(probe, b"")
    probe.unlink(missing_ok=True)


def dump_json(value: Any) -> str:
    """JSON that any reader takes: arrays as lists, and null where a number is not finite."""
    return json.dumps(_plain(value), indent=1, allow_nan=False, ensure_ascii=False) + "\n"


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return value if np.isfinite(value) else None
    return value


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
