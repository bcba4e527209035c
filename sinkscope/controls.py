"""Equal-budget random controls: the same ablation on as many other columns, heads or positions.

One mechanism for all ablations: what an ablation selects is exchanged for a random selection of
the same size that has nothing in common with it.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from sinkscope.ablations import (
    Ablation,
    Composition,
    ReplacePosition,
    ZeroQueryBias,
    ZeroToken,
    key_coordinates,
    positions_of,
    require_ablation,
)
from sinkscope.errors import InvalidInputError, NotApplicableError
from sinkscope.mitigations import (
    CalibrateAttention,
    OffByOneSoftmax,
    ScaleQueryBias,
    ShuffledQueryBias,
    SinkLogit,
    SwitchOffHeads,
    head_pairs,
)
from sinkscope.model import ModelView, model_view, whole_numbers


@dataclass(frozen=True)
class Budget:
    """How much an ablation touches; None where it does not choose among these.

    Attributes:
        coordinates: coordinates of d_model.
        layers: layers.
        heads: heads of each layer, or (layer, head) pairs where these are named.
        positions: positions of each prompt, None for all.
    """

    coordinates: int | None = None
    layers: int | None = None
    heads: int | None = None
    positions: int | None = None


def budget(model: Any, ablation: Ablation) -> tuple[Budget, ...]:
    """What each part of an ablation touches, counted.

    Args:
        model: a hooked model or its view.
        ablation: built in, or of one's own with fields of the same names.

    Raises:
        InvalidInputError: it is none, or names what the model lacks.
    """
    view = model_view(model)
    require_ablation(ablation)
    parts = ablation.parts if isinstance(ablation, Composition) else (ablation,)
    return tuple(_budget(view, part) for part in parts)


def _budget(view: ModelView, ablation: Ablation) -> Budget:
    names = _field_names(ablation)
    if "pairs" in names:
        return Budget(heads=len(head_pairs(view, ablation.pairs)))  # type: ignore[attr-defined]
    if "layer" in names:
        view.layers(ablation.layer)  # type: ignore[attr-defined]
    coordinates = getattr(ablation, "coordinates", None)
    positions = positions_of(view, _positions(ablation))
    return Budget(
        coordinates=None if coordinates is None else len(set(key_coordinates(view, coordinates))),
        layers=len(view.layers(ablation.layers)) if "layers" in names else None,  # type: ignore[attr-defined]
        heads=len(view.heads(ablation.heads)) if "heads" in names else None,  # type: ignore[attr-defined]
        positions=None if positions is None else len(set(positions)),
    )


def equal_budget_control(
    model: Any, ablation: Ablation, seed: int, *, n_positions: int | None = None
) -> Ablation:
    """A random twin of an ablation, of the same budget.

    What is exchanged is the first of these that the ablation chooses: (layer, head) pairs,
    coordinates of d_model, positions, heads, layers (no more than half of them). Where an
    ablation takes all of these, the query bias is exchanged for itself with its entries shuffled
    (`ShuffledQueryBias`), the sinks of `CalibrateAttention` for as many other keys, and the gates
    of `SinkLogit` are dealt to other queries. A composition's parts are each exchanged, with draws
    of their own. A selection that is drawn has nothing in common with what it stands in for.

    An ablation class of one's own takes part through fields of these names, or through a method
    `control(view, seed)`.

    Args:
        model: a hooked model or its view.
        ablation: what is to be controlled for.
        seed: of the draws.
        n_positions: positions are drawn below this, as a rule the length of the shortest
            prompt; `n_ctx` if None.

    Raises:
        InvalidInputError: no ablation, or one that names layers, heads, positions or coordinates
            that the model lacks.
        NotApplicableError: the ablation takes everything there is, or says not what it takes.
    """
    view = model_view(model)
    require_ablation(ablation)
    if type(seed) is not int or seed < 0:
        raise InvalidInputError(
            "A control is drawn by a seed",
            expected="a whole number of 0 or more",
            got=repr(seed),
            fix="use 0, 1, 2, ...",
        )
    size = view.n_ctx if n_positions is None else n_positions
    if type(size) is not int or not 1 <= size <= view.n_ctx:
        raise InvalidInputError(
            "A control draws positions below a number of positions",
            expected=f"n_positions from 1 to {view.n_ctx}",
            got=repr(n_positions)[:80],
            fix="pass the length of the shortest prompt",
        )
    if isinstance(ablation, Composition):
        if not ablation.parts:
            raise _no_budget(ablation, "the untouched model changes nothing")
        twins = [
            _control(view, part, random.Random(f"{seed}:{n}"), size)
            for n, part in enumerate(ablation.parts)
        ]
        return Composition(tuple(twins))
    return _control(view, ablation, random.Random(f"{seed}:0"), size)


def _control(view: ModelView, ablation: Ablation, rng: random.Random, n_positions: int) -> Ablation:
    own = getattr(ablation, "control", None)
    if own is not None:
        return own(view, rng.randrange(2**31))
    _budget(view, ablation)  # whatever it names has to be there
    names = _field_names(ablation)
    if isinstance(ablation, SwitchOffHeads):
        every = [(la, h) for la in range(view.n_layers) for h in range(view.n_heads)]
        return SwitchOffHeads(tuple(_others(every, set(ablation.pairs), rng, ablation, "heads")))
    if getattr(ablation, "coordinates", None) is not None:
        taken = set(key_coordinates(view, ablation.coordinates))  # type: ignore[attr-defined]
        drawn = _others(range(view.d_model), taken, rng, ablation, "coordinates")
        return _with(ablation, coordinates=tuple(drawn))
    if isinstance(ablation, ReplacePosition):
        places = {ablation.source, ablation.target}
        source, target = _others(range(n_positions), places, rng, ablation, "positions")
        return ReplacePosition(source, target)
    positions = positions_of(view, _positions(ablation))
    if positions is not None:
        drawn = _others(range(n_positions), set(positions), rng, ablation, "positions")
        if isinstance(ablation, ZeroToken):
            return ZeroToken(drawn[0])
        return _with(ablation, positions=tuple(drawn))
    for name, size in (("heads", view.n_heads), ("layers", view.n_layers)):
        chosen = getattr(ablation, name, None) if name in names else None
        taken = set(whole_numbers(chosen) or ()) if chosen is not None else set()
        if taken and 2 * len(taken) <= size:
            drawn = _others(range(size), taken, rng, ablation, name)
            return _with(ablation, **{name: tuple(drawn)})
    if isinstance(ablation, (ScaleQueryBias, ZeroQueryBias)):
        factor, of = getattr(ablation, "factor", 0.0), rng.randrange(2**31)
        return ShuffledQueryBias(factor, of, ablation.layers, ablation.heads)
    if isinstance(ablation, OffByOneSoftmax):
        ablation = SinkLogit(0.0, ablation.layers, ablation.heads)
    if isinstance(ablation, (CalibrateAttention, SinkLogit)):
        return _with(ablation, seed=rng.randrange(2**31))
    reason = (
        "it takes every head and layer, which leaves none to draw from"
        if {"heads", "layers"} & names
        else "it has no columns, heads, layers or positions to be exchanged"
    )
    raise _no_budget(ablation, reason)


def _others(
    everything: Sequence[Any], taken: set[Any], rng: random.Random, ablation: Ablation, what: str
) -> list[Any]:
    free = [one for one in everything if one not in taken]
    if len(free) < len(taken):
        raise _no_budget(
            ablation, f"it takes {len(taken)} {what}, and only {len(free)} others are left"
        )
    return sorted(rng.sample(free, len(taken)))


def _no_budget(ablation: Ablation, reason: str) -> NotApplicableError:
    return NotApplicableError(
        f"There is no equal-budget control of {type(ablation).__name__}: {reason}",
        expected="an ablation that takes some of several columns, heads, layers or positions",
        got=repr(ablation)[:120],
        fix="restrict it with layers= or heads=, or give its class a method control(view, seed)",
    )


def _with(ablation: Ablation, **changes: Any) -> Ablation:
    return dataclasses.replace(ablation, **changes)  # type: ignore[type-var]


def _field_names(ablation: Ablation) -> set[str]:
    return {f.name for f in fields(ablation)} if dataclasses.is_dataclass(ablation) else set()


def _positions(ablation: Ablation) -> Any:
    if isinstance(ablation, ReplacePosition):
        return (ablation.source, ablation.target)
    names = _field_names(ablation)
    return next((getattr(ablation, n) for n in ("positions", "position") if n in names), None)
