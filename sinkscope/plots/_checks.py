"""Checks that the figures share; every one says what was expected."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import numpy as np

from sinkscope.errors import InvalidInputError
from sinkscope.plots._text import numbers

T = TypeVar("T")


def require(result: object, kind: type[T], figure: str) -> T:
    """The result, if it is of the kind that the figure draws.

    Raises:
        InvalidInputError: it is of another kind.
    """
    if not isinstance(result, kind):
        raise InvalidInputError(
            f"{figure} can't draw this",
            expected=f"a {kind.__name__} result",
            got=type(result).__name__,
        )
    return result


def as_array(values: Any, figure: str) -> np.ndarray:
    """Numbers from an array, a tensor or nested lists, floats as float64.

    Raises:
        InvalidInputError: not numbers.
    """
    if hasattr(values, "detach"):
        values = values.detach().cpu()
        values = values.double().numpy() if values.is_floating_point() else values.numpy()
    try:
        array = np.asarray(values)
    except ValueError as error:  # nested lists of mixed lengths
        raise InvalidInputError(
            f"{figure} needs an array", expected="rows of equal length", got=str(error)[:100]
        ) from error
    if array.dtype.kind not in "iufb":
        raise InvalidInputError(
            f"{figure} needs numbers", expected="an array of numbers", got=f"dtype {array.dtype}"
        )
    return array.astype(np.float64) if array.dtype.kind == "f" else array


def chosen(wanted: Any, present: Sequence[Any], what: str) -> list[Any]:
    """The wanted members of `present` in the order asked for; all of them if None.

    Raises:
        InvalidInputError: none, one twice, or one that is not there.
    """
    if wanted is None:
        return list(present)
    single = isinstance(wanted, (str, bytes)) or not isinstance(wanted, Iterable)
    several = [wanted] if single else list(wanted)
    unknown = [w for w in several if not any(_is(w, p) for p in present)]
    if not several or unknown or len(set(several)) < len(several):
        raise InvalidInputError(
            f"Unknown {what}",
            expected=f"one or more of {numbers(present)}, each once",
            got=numbers(several) or "none",
        )
    return several


def index_of(wanted: Any, present: Sequence[Any], what: str) -> int:
    """Where one member stands in `present`.

    Raises:
        InvalidInputError: it is not there.
    """
    for index, member in enumerate(present):
        if _is(wanted, member):
            return index
    raise InvalidInputError(
        f"Unknown {what}", expected=f"one of {numbers(present)}", got=repr(wanted)
    )


def _is(wanted: Any, member: Any) -> bool:
    """Equal, and a name or a whole number; true and 1 are not the same, nor are 1.0 and 1."""
    kind = str if isinstance(member, str) else (int, np.integer)
    return isinstance(wanted, kind) and not isinstance(wanted, bool) and bool(wanted == member)


def layer_names(layers: Sequence[int] | None, count: int) -> list[int]:
    """The numbers of an array's layers, 0 to `count` - 1 if None.

    Raises:
        InvalidInputError: not one number for each.
    """
    named = list(range(count)) if layers is None else [int(layer) for layer in layers]
    if len(named) != count or len(set(named)) < count:
        raise InvalidInputError(
            "Layer numbers do not fit the array",
            expected=f"{count} different numbers, one for each layer of the array",
            got=numbers(named),
        )
    return named
