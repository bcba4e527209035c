"""What experiments give back: frozen, comparable, and able to be saved and loaded.

A result holds numpy arrays, plain values and tuples of these. `save` writes `<kind>.json` and
`<kind>.npz` into a directory that several results may share; nothing is ever unpickled.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, ClassVar, get_args, get_origin, get_type_hints

import numpy as np

from sinkscope.display import HtmlTable
from sinkscope.errors import InvalidInputError, LoadError, WriteError

if TYPE_CHECKING:
    import pandas as pd
    from typing_extensions import Self

SCHEMA_VERSION = 1
_CLAIMS: set[Path] = set()
_RUN_AGAIN = "run the experiment again and save it anew"


@dataclass(frozen=True, eq=False)
class Result(HtmlTable, ABC):
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
                plain[field.name] = _spelled(value)
        buffer = io.BytesIO()
        np.savez_compressed(buffer, **arrays)  # type: ignore[arg-type]
        header = {
            "schema": SCHEMA_VERSION,
            "kind": self.kind,
            "values": plain,
            "arrays_sha256": hashlib.sha256(buffer.getvalue()).hexdigest(),
        }
        root = as_path(directory)
        write_bytes(root / f"{self.kind}.npz", buffer.getvalue())
        write_text(root / f"{self.kind}.json", dump_json(header))
        return root

    @classmethod
    def load(cls, directory: str | os.PathLike[str]) -> Self:
        """Read a result back from a directory.

        Raises:
            LoadError: nothing there, damaged files, another kind, or a newer schema.
        """
        root = as_path(directory)
        header = _read_header(root / f"{cls.kind}.json", cls.kind)
        path = root / f"{cls.kind}.npz"
        try:
            data = path.read_bytes()
        except OSError as error:
            raise _unreadable_arrays(path, error) from error
        if hashlib.sha256(data).hexdigest() != header.get("arrays_sha256"):
            raise LoadError(  # before anything is unpacked
                f"{str(path)!r} does not belong to the {cls.kind}.json beside it",
                expected="two files from one save()",
                got="arrays of another save(), or damaged ones",
                fix=_RUN_AGAIN,
            )
        try:
            with np.load(io.BytesIO(data), allow_pickle=False) as stored:
                arrays = {name: stored[name] for name in stored.files}
        except Exception as error:  # zip, numpy and the system each have their own errors
            raise _unreadable_arrays(path, error) from error
        values = {name: _read_back(value) for name, value in header["values"].items()}
        names = {field.name for field in fields(cls)}
        if names != set(values) | set(arrays):
            raise LoadError(
                f"The saved {cls.kind} in {str(root)!r} does not have the fields of this version",
                expected=", ".join(sorted(names)),
                got=", ".join(sorted(set(values) | set(arrays))),
                fix=_RUN_AGAIN,
            )
        hints = get_type_hints(cls)
        for name, value in (values | arrays).items():
            if not _is_of(value, hints[name]):
                raise LoadError(
                    f"In the saved {cls.kind} in {str(root)!r}, {name} is of another type",
                    expected=str(getattr(hints[name], "__name__", hints[name])),
                    got=repr(value)[:80],
                    fix=_RUN_AGAIN,
                )
        return cls(**values, **arrays)

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return all(_same(getattr(self, f.name), getattr(other, f.name)) for f in fields(self))

    __hash__ = None  # type: ignore[assignment]


def _unreadable_arrays(path: Path, error: Exception) -> LoadError:
    return LoadError(
        f"The arrays in {str(path)!r} can't be read",
        expected="a file that this result's save() wrote",
        got=f"{type(error).__name__}: {str(error)[:200]}",
        fix=_RUN_AGAIN,
    )


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        numeric = np.issubdtype(a.dtype, np.floating)
        return a.dtype == b.dtype and np.array_equal(a, b, equal_nan=numeric)
    return type(a) is type(b) and _spelled(a) == _spelled(b)


def _spelled(value: Any) -> Any:
    """A plain value with NaN and infinities as words, for JSON has none."""
    if isinstance(value, tuple):
        return [_spelled(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    return value


def _read_back(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_read_back(v) for v in value)
    if isinstance(value, dict) and value.get("float") in ("nan", "inf", "-inf"):
        return float(value["float"])
    return value


def _is_of(value: Any, hint: Any) -> bool:
    """Whether a value that was read is of a field's type, of those that results have."""
    arguments, origin = get_args(hint), get_origin(hint)
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        each = arguments[:1] * len(value) if arguments[-1] is Ellipsis else arguments
        return len(value) == len(each) and all(map(_is_of, value, each))
    if hint is Any:
        return True
    if origin is not None:  # of all others only unions are told apart
        return origin is not UnionType or any(_is_of(value, one) for one in arguments)
    return type(value) is hint if hint in (bool, int) else isinstance(value, hint)


def _read_header(path: Path, kind: str) -> dict[str, Any]:
    header = json_at(
        path,
        f"There is no readable {kind} at {str(path)!r}",
        expected="a file that this result's save() wrote",
        fix=f"check the directory, or {_RUN_AGAIN}",
    )
    ok = isinstance(header, dict) and isinstance(header.get("values"), dict)
    if not ok or header.get("kind") != kind or header.get("schema") != SCHEMA_VERSION:
        raise LoadError(
            f"{str(path)!r} is not a {kind} of this version",
            expected=f"kind {kind!r}, schema {SCHEMA_VERSION}",
            got=f"kind {header.get('kind')!r}, schema {header.get('schema')!r}"
            if ok
            else "something else",
            fix=_RUN_AGAIN,
        )
    return header


# --- writing ------------------------------------------------------------------------------


def as_path(directory: str | os.PathLike[str]) -> Path:
    """A directory's path.

    Raises:
        InvalidInputError: this is no path.
    """
    try:
        return Path(directory)
    except TypeError as error:
        raise InvalidInputError(
            "A directory is named by a string or a path",
            expected="str or os.PathLike",
            got=repr(directory)[:80],
            fix="pass its path",
        ) from error


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
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        raise WriteError(
            f"{str(path)!r} can't be written",
            expected="a directory with room that this user may write to",
            got=f"{type(error).__name__}: {getattr(error, 'strerror', None) or error}",
            fix="choose another directory",
        ) from error
    finally:
        if temporary is not None:
            with suppress(OSError):
                os.unlink(temporary)  # gone already if all went well


@contextmanager
def claimed(directory: str | os.PathLike[str], *, wait: bool = False) -> Iterator[None]:
    """A directory for the time of a `with` block, which no other process may then claim.

    The claim lies on the directory itself, so that nothing is left behind by a run that was
    killed. Within one process claims nest. Systems without such locks (Windows) have none.

    Args:
        directory: made if it is not there.
        wait: for another's claim to end, rather than to raise.

    Raises:
        WriteError: another process has it, or it can't be made.
    """
    path = as_path(directory)
    require_writable(path)
    key: Path | None = path.resolve()
    try:
        import fcntl
    except ImportError:
        key = None
    if key is None or key in _CLAIMS:
        yield
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError as error:
            raise WriteError(
                f"Another run is writing to {str(path)!r}",
                expected="a directory for each run",
                got="one that another process has claimed",
                fix="wait for its end, or choose another directory",
            ) from error
        except OSError:  # a file system without locks
            pass
        _CLAIMS.add(key)
        yield
    finally:
        _CLAIMS.discard(key)
        os.close(descriptor)


def require_writable(directory: Path) -> None:
    """Raise before a long run if its directory can't be written.

    Raises:
        WriteError: see `write_bytes`.
    """
    probe = directory / ".sinkscope-probe"
    write_bytes(probe, b"")
    probe.unlink(missing_ok=True)


def json_at(path: Path, what: str, *, expected: str, fix: str, kind: type = object) -> Any:
    """What a JSON file holds, as data.

    Args:
        path: the file.
        what: is wrong where it can't be read, for the error.
        expected: for the error.
        fix: for the error.
        kind: of what it holds.

    Raises:
        LoadError: not there, not JSON, nested too deep, or of another kind.
    """
    try:
        value = json.loads(path.read_text("utf-8"))
        if not isinstance(value, kind):
            raise ValueError(f"not a {kind.__name__}")
    except (OSError, ValueError, RecursionError) as error:
        got = f"{type(error).__name__}: {str(error)[:200]}"
        raise LoadError(what, expected=expected, got=got, fix=fix) from error
    return value


def read_json(path: Path, schema: Mapping[str, Any], what: str) -> dict[str, Any]:
    """A JSON file that fits a schema; it is read as data and never run.

    Args:
        path: the file.
        schema: of JSON Schema the words that `misfit` knows.
        what: what the file should be, for errors.

    Raises:
        LoadError: not there, not JSON, or not of this schema; says where.
    """
    value = json_at(
        path,
        f"There is no readable {what} at {str(path)!r}",
        expected="a JSON file that sinkscope wrote",
        fix=f"check the path, or {_RUN_AGAIN}",
    )
    try:
        found = misfit(value, schema)
    except RecursionError:
        found = "it is nested too deep"
    if found is not None:
        version = value.get("schema") if isinstance(value, dict) else None
        raise LoadError(
            f"{str(path)!r} is no {what} of this version",
            expected=f"schema {schema['properties']['schema']['const']}",
            got=f"schema {str(version)[:40]!r}; {found}",
            fix=f"use the sinkscope that wrote it, or {_RUN_AGAIN}",
        )
    return value


def misfit(value: Any, schema: Mapping[str, Any], where: str = "the file") -> str | None:
    """Where a value does not fit a schema, in words; None if it does.

    Knows `type`, `const`, `required`, `properties`, `additionalProperties` and `items`.
    """
    if "const" in schema and (value != schema["const"] or type(value) is not type(schema["const"])):
        return f"{where} is not {schema['const']!r}"
    kinds: dict[str, tuple[type, ...]] = {
        "object": (dict,),
        "array": (list,),
        "string": (str,),
        "integer": (int,),
    }
    wanted = schema.get("type")
    if wanted is not None and (not isinstance(value, kinds[wanted]) or isinstance(value, bool)):
        return f"{where} is no {wanted}"
    if isinstance(value, dict):
        missing = [name for name in schema.get("required", ()) if name not in value]
        if missing:
            return f"{where} has no {missing[0]!r}"
        known, others = schema.get("properties", {}), schema.get("additionalProperties", {})
        children = ((f"{k[:40]!r}", v, known.get(k, others)) for k, v in value.items())
    elif isinstance(value, list):
        children = ((f"item {n}", v, schema.get("items", {})) for n, v in enumerate(value))
    else:
        return None
    found = (misfit(child, part, f"{name} of {where}") for name, child, part in children)
    return next((words for words in found if words is not None), None)


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
