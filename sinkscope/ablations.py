"""Ablations: what the paper's interventions do, as parts that compose.

An ablation is a frozen description. It becomes hooks for one model and one batch, and acts
through them alone: weights stay as they are. `a + b` does a and then b at every place.

    with ss.ablations.ZeroQueryBias(layers=[3]).applied(model):
        logits = model(ids)

Positions count from each row's first unmasked one.
"""

from __future__ import annotations

import inspect
import random
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from sinkscope._types import Layers, Mask, Rows
from sinkscope.attention import at_least_single
from sinkscope.epe import EPE, extract_epe
from sinkscope.errors import EditError, InvalidInputError, NotApplicableError
from sinkscope.massive import Rule, TopK, find_massive_coordinates
from sinkscope.metrics import position_ids
from sinkscope.model import HookFn, ModelView, model_view, whole_numbers
from sinkscope.prompts import TokenBatch, require_batch
from sinkscope.sites import Site


@dataclass(frozen=True)
class Edit:
    """One hook of an ablation.

    Attributes:
        site: where it acts.
        fn: `fn(tensor, hook)`, gives a new tensor; None if it only looks.
        only_looks: it reads for a later edit and is not expected to change anything.
    """

    site: Site | str
    fn: HookFn
    only_looks: bool = False


@dataclass(frozen=True, eq=False)
class RowPositions:
    """Which column holds which position, in the batch that runs.

    Attributes:
        mask: `[batch pos]`, true where a token is; None if every column holds one.
    """

    mask: Mask | None = None
    _widths: set[int] = field(default_factory=set, repr=False)

    def columns(self, tensor: Float[Tensor, "batch pos ..."], position: int) -> Rows:
        """The column of a position in each row.

        Raises:
            EditError: a row too short to have it, or a batch other than the given one.
        """
        ids = position_ids(self.tokens(tensor))
        if bool((ids.amax(1) < position).any()):
            raise EditError(
                f"A prompt has no position {position}, which the ablation needs",
                expected=f"at least {position + 1} tokens in every prompt",
                got=int(ids.amax(1).min()) + 1,
                fix="leave short prompts out",
            )
        return (ids == position).long().argmax(1)

    def tokens(self, tensor: Float[Tensor, "batch pos ..."]) -> Mask:
        """`[batch pos]`, true where a token is."""
        if self.mask is None:
            self._refuse_cached_generation(tensor.shape[1])
            return torch.ones(tensor.shape[:2], dtype=torch.bool, device=tensor.device)
        if self.mask.shape != tensor.shape[:2]:
            raise EditError(
                "The ablation was made for another batch",
                expected=f"a tensor of [batch pos ...] = {list(self.mask.shape)}",
                got=list(tensor.shape[:2]),
                fix="pass the batch that runs, as in ablation.applied(model, batch)",
            )
        return self.mask.to(tensor.device)

    def _refuse_cached_generation(self, width: int) -> None:
        """With a cache the model sees one new token a time, which would pass for position 0."""
        self._widths.add(width)
        if width == 1 and max(self._widths) > 1:
            raise EditError(
                "An ablation of single positions can't tell where it is in cached generation",
                expected="whole prompts in each forward pass",
                got=f"one token after a pass of {max(self._widths)}",
                fix="generate with use_past_kv_cache=False, or run prompts of one token in a "
                "block of their own",
            )

    def selection(
        self, tensor: Float[Tensor, "batch pos ..."], positions: tuple[int, ...]
    ) -> Bool[Tensor, "batch pos"]:
        """True at the given positions of each row."""
        chosen = torch.zeros(tensor.shape[:2], dtype=torch.bool, device=tensor.device)
        rows = torch.arange(tensor.shape[0], device=tensor.device)
        for position in positions:
            chosen[rows, self.columns(tensor, position)] = True
        return chosen


@dataclass
class Remaining:
    """How much of a weight the ablations of one composition have left, 1 where untouched.

    Without it `ZeroQueryBias(layers=[0]) + ZeroQueryBias()` would take layer 0's bias off twice.

    Attributes:
        everywhere: the share left at every position without one of its own.
        at: the share left at single positions.
    """

    everywhere: Tensor
    at: dict[int, Tensor] = field(default_factory=dict)

    def scale(self, where: Any, factor: float, positions: tuple[int, ...] | None) -> Remaining:
        """Scale what is left at `where`, and say how much that took away."""
        if positions is None:
            taken = Remaining(_scaled(self.everywhere, where, factor))
            taken.at = {p: _scaled(left, where, factor) for p, left in self.at.items()}
            return taken
        taken = Remaining(torch.zeros_like(self.everywhere))
        for position in positions:
            left = self.at.setdefault(position, self.everywhere.clone())
            taken.at[position] = _scaled(left, where, factor)
        return taken

    def any(self) -> bool:
        """Whether there is any amount at all."""
        return any(bool(amount.any()) for amount in (self.everywhere, *self.at.values()))

    def per_token(self, tensor: Float[Tensor, "batch pos ..."], rows: RowPositions) -> Tensor:
        """The amounts for a tensor: one for all tokens, or `[batch pos ...]` where they differ."""
        if not self.at:
            return self.everywhere
        amounts = self.everywhere.expand(*tensor.shape[:2], *self.everywhere.shape).clone()
        index = torch.arange(tensor.shape[0], device=tensor.device)
        for position, amount in self.at.items():
            amounts[index, rows.columns(tensor, position)] = amount
        return amounts


def _scaled(left: Tensor, where: Any, factor: float) -> Tensor:
    """Scale `left[where]` in place; gives what was taken."""
    before = left.clone()
    left[where] *= factor
    return before - left


@dataclass(frozen=True)
class EditContext:
    """What the edits of one run share.

    Attributes:
        rows: which column holds which position.
        query_bias: per layer, the share of b_Q that is left, `[head]`.
        key_rows: per layer, the share of W_K that is left, `[key_head d_model]`.
    """

    rows: RowPositions = field(default_factory=RowPositions)
    query_bias: dict[int, Remaining] = field(default_factory=dict)
    key_rows: dict[int, Remaining] = field(default_factory=dict)

    @classmethod
    def of(cls, batch: TokenBatch | None) -> EditContext:
        """A fresh context for a batch."""
        if batch is not None:
            require_batch(batch)
        mask = None if batch is None or bool(batch.mask.all()) else batch.mask
        return cls(RowPositions(mask))


class Ablation(ABC):
    """A change to a model's forward pass, to be composed, restricted and applied.

    Three ways to use one: `with ablation.applied(model):`, `ablation.fwd_hooks(model)` for the
    model's own `run_with_hooks`, or as the `ablation` argument of any measure.
    """

    @abstractmethod
    def edits(self, view: ModelView, context: EditContext) -> Sequence[Edit]:
        """The hooks that carry this ablation out, in the order in which they act."""

    def __add__(self, other: Ablation) -> Ablation:
        if not isinstance(other, Ablation):
            return NotImplemented
        return Composition((*_parts_of(self), *_parts_of(other)))

    def fwd_hooks(self, model: Any, batch: TokenBatch | None = None) -> list[tuple[str, HookFn]]:
        """Pairs of hook name and function for `model.run_with_hooks(ids, fwd_hooks=...)`.

        The names are the hook points' own, not their aliases: in compatibility mode
        TransformerBridge calls a hook that was added under an alias twice.

        Args:
            model: a hooked model or its view.
            batch: the batch that will run; without it, rows are taken as unpadded.
        """
        view = model_view(model)
        edits = self.edits(view, EditContext.of(batch))
        refuse_dead_edits(view, edits)
        resolved = [view.resolve(edit.site, edit.fn) for edit in edits]
        return [(str(point.name), fn) for point, fn in resolved]

    @contextmanager
    def applied(self, model: Any, batch: TokenBatch | None = None) -> Iterator[None]:
        """The ablation for the time of a `with` block.

        What it is made of (an EPE, massive coordinates) is taken as the block begins: weights
        that change within do not change it.

        Args:
            model: a hooked model or its view.
            batch: the batch that will run; without it, rows are taken as unpadded.
        """
        view = model_view(model)
        edits = self.edits(view, EditContext.of(batch))
        refuse_dead_edits(view, edits)
        with view.hooks([(edit.site, edit.fn) for edit in edits]):
            yield

    @staticmethod
    def from_hook(site: Site | str, fn: HookFn, name: str | None = None) -> Ablation:
        """A hook function of the user's own as an ablation.

        Args:
            site: a `Site` or a hook name of the model.
            fn: `fn(tensor, hook)`; what it returns takes the tensor's place.
            name: for tables; the function's own name if not given.

        Raises:
            InvalidInputError: no function, or one that can't be called as `fn(tensor, hook=...)`.
        """
        if not _takes_a_hook(fn):
            raise InvalidInputError(
                "A hook is a function of a tensor and its hook",
                expected="fn(tensor, hook)",
                got=" ".join(repr(fn).split())[:80],
                fix="pass a function, or a lambda, whose second argument is called hook",
            )
        return FromHook(site, fn, name or str(getattr(fn, "__name__", "hook")))


def _takes_a_hook(fn: Any) -> bool:
    if not callable(fn):
        return False
    called = fn.forward if isinstance(fn, torch.nn.Module) else fn
    try:
        # Of a wrapper its own arguments count, not those of what it wraps.
        inspect.signature(called, follow_wrapped=False).bind(None, hook=None)
    except (TypeError, ValueError):  # ValueError: built-in functions that don't tell
        return False
    return True


@dataclass(frozen=True)
class Composition(Ablation):
    """Several ablations one after the other; none at all is the untouched model."""

    parts: tuple[Ablation, ...] = ()

    def edits(self, view: ModelView, context: EditContext) -> Sequence[Edit]:
        parts = self.parts if isinstance(self.parts, tuple) else (self.parts,)
        if not all(isinstance(part, Ablation) for part in parts):
            raise InvalidInputError(
                "A composition is made of ablations",
                expected="a tuple of ablations, as a + b makes it",
                got=repr(self.parts)[:120],
                fix="write a + b",
            )
        return [edit for part in parts for edit in part.edits(view, context)]


@dataclass(frozen=True)
class FromHook(Ablation):
    """A user's hook function, see `Ablation.from_hook`."""

    site: Site | str
    fn: HookFn
    name: str

    def edits(self, view: ModelView, context: EditContext) -> Sequence[Edit]:
        def on_a_copy(tensor: Tensor, hook: Any) -> Any:
            # A function that edits in place would else write into W_pos itself, of which the
            # position embedding may be a view.
            own = tensor.clone()
            after = self.fn(own, hook=hook)
            return own if after is None else after

        return [Edit(self.site, on_a_copy)]


@dataclass(frozen=True)
class ZeroQueryBias(Ablation):
    """`b_Q = 0`: the query bias is taken off again where queries are made.

    `q -> q - b_Q`, which in floating point differs from zeroing the weights by rounding alone.

    Attributes:
        layers: all if None.
        heads: all if None, the same in every layer.
        positions: the queries it holds for, all if None.

    Raises `ProcessedWeightsError` on folded weights, where b_Q also holds what LN1's bias adds.

    Source: the paper, "No Query Bias" (all layers and heads).
    """

    layers: Layers = None
    heads: Layers = None
    positions: Layers = None

    def edits(self, view: ModelView, context: EditContext) -> Sequence[Edit]:
        return query_bias_edits(view, context, 0.0, self.layers, self.heads, self.positions)


@dataclass(frozen=True)
class ReplacePosition(Ablation):
    """Position `target` gets the position embedding of position `source`.

    `p_target = p_source`, taken from the row itself, so that it sees what earlier ablations
    did to it.

    Source: the paper, "Remove First PE" (source 1, target 0).
    """

    source: int = 1
    target: int = 0

    def edits(self, view: ModelView, context: EditContext) -> Sequence[Edit]:
        view.require_learned_positions()
        positions_of(view, (self.source, self.target))

        def replace(pos_embed: Tensor, hook: Any) -> Tensor:
            index = torch.arange(pos_embed.shape[0], device=pos_embed.device)
            out = pos_embed.clone()
            source, target = (context.rows.columns(out, p) for p in (self.source, self.target))
            out[index, target] = pos_embed[index, source]
            return out

        return [Edit(Site("pos_embed"), replace)]


@dataclass(frozen=True)
class ZeroPositions(Ablation):
    """`p_i = 0`.

    Attributes:
        positions: all if None.

    Source: the paper, "No PE" (all positions).
    """

    positions: Layers = None

    def edits(self, view: ModelView, context: EditContext) -> Sequence[Edit]:
        view.require_learned_positions()
        return [_zero(Site("pos_embed"), context.rows, positions_of(view, self.positions))]


@dataclass(frozen=True)
class ZeroToken(Ablation):
    """`e_position = 0`: the token embedding is nulled, the position embedding stays.

    Source: the paper, "Nullify BOS Token" (position 0, whatever token is there).
    """

    position: int = 0

    def edits(self, view: ModelView, context: EditContext) -> Sequence[Edit]:
        return [_zero(Site("embed"), context.rows, positions_of(view, (self.position,)))]


@dataclass(frozen=True)
class SkipMLP(Ablation):
    """The MLP's output, with its bias, is 0 before it is added to the residual stream.

    Attributes:
        layers: all if None.
        positions: all if None.

    Source: the paper, "No MLP" (all layers).
    """

    layers: Layers = None
    positions: Layers = None

    def edits(self, view: ModelView, context: EditContext) -> Sequence[Edit]:
        positions = positions_of(view, self.positions)
        return [
            _zero(Site("mlp_out", layer), context.rows, positions)
            for layer in view.layers(self.layers)
        ]


@dataclass(frozen=True)
class _SwapDirections(Ablation):
    """Position 0's share along a unit vector u_0 changes places with position 1's u_1.

    With m the output of layer 0's MLP before the residual add and `a = m_0 . u_0`:
    `m_0 += a (u_1 - u_0)`, `m_1 += a (u_0 - u_1)`.
    """

    def edits(self, view: ModelView, context: EditContext) -> Sequence[Edit]:
        directions = self._directions(extract_epe(view))

        def swap(mlp_out: Tensor, hook: Any) -> Tensor:
            index = torch.arange(mlp_out.shape[0], device=mlp_out.device)
            out = mlp_out.clone()
            u_0, u_1 = (u.to(out.device) for u in directions)
            zero, one = context.rows.columns(out, 0), context.rows.columns(out, 1)
            amount = (mlp_out[index, zero] @ u_0)[:, None]
            out[index, zero] += amount * (u_1 - u_0)
            out[index, one] += amount * (u_0 - u_1)
            return out

        return [Edit(Site("mlp_out", 0), swap)]

    @abstractmethod
    def _directions(self, epe: EPE) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True)
class SwapEPE(_SwapDirections):
    """Swap along the effective positional encodings: `u_i = EPE_i / |EPE_i|`.

    With m the output of layer 0's MLP before the residual add and `a = m_0 . u_0`:
    `m_0 += a (u_1 - u_0)`, `m_1 += a (u_0 - u_1)`. Needs prompts of at least two tokens.

    Source: the paper, "Swap EPE".
    """

    def _directions(self, epe: EPE) -> tuple[Tensor, Tensor]:
        return unit_vector(epe.vectors[0], "EPE_0"), unit_vector(epe.vectors[1], "EPE_1")


@dataclass(frozen=True)
class SwapPE(_SwapDirections):
    """Swap along the raw position vectors: `u_i = p_i / |p_i|`, otherwise as `SwapEPE`.

    Source: the paper, "Swap PE".
    """

    def _directions(self, epe: EPE) -> tuple[Tensor, Tensor]:
        return unit_vector(epe.positions[0], "p_0"), unit_vector(epe.positions[1], "p_1")


@dataclass(frozen=True)
class ZeroKeyColumns(Ablation):
    """Rows of W_K (in `[d_model, d_head]` form) are 0: keys no longer see these coordinates.

    `k_j -> k_j - sum_{d in coordinates} n_j[d] W_K[d]`, n what enters W_K.

    Attributes:
        coordinates: coordinates of d_model, or a rule that finds them in EPE_0.
        layers: all if None.
        heads: all if None, the same in every layer.
        positions: the keys it holds for, all if None.

    Source: the paper, "Zero Top-3 Wk" (`TopK(3)` of EPE_0, all layers and heads).
    """

    coordinates: Sequence[int] | Rule
    layers: Layers = None
    heads: Layers = None
    positions: Layers = None

    def edits(self, view: ModelView, context: EditContext) -> Sequence[Edit]:
        coordinates = key_coordinates(view, self.coordinates)
        per_layer = dict.fromkeys(view.layers(self.layers), coordinates)
        return key_column_edits(view, context, per_layer, 0.0, self.heads, self.positions)


@dataclass(frozen=True)
class ZeroRandomKeyColumns(Ablation):
    """Random rows of W_K are 0, as a control of `ZeroKeyColumns`.

    One stream `random.Random(seed)` gives n draws `randint(0, d_model - 1)` for each layer in
    order, with replacement, so that a layer may lose fewer than n. Every prompt gets the same.

    Attributes:
        n: draws per layer.
        seed: of the stream; the layers' draws do not depend on `layers`.
        layers: all if None.
        heads: all if None, the same in every layer.
        positions: the keys it holds for, all if None.

    Source: the paper, "Zero Random Wk" (n 3, seed 42).
    """

    n: int = 3
    seed: int = 42
    layers: Layers = None
    heads: Layers = None
    positions: Layers = None

    def draws(self, view: ModelView) -> tuple[tuple[int, ...], ...]:
        """The coordinates of each layer, repeats and all."""
        whole = all(type(number) is int for number in (self.n, self.seed))
        if not whole or self.n < 1:
            raise InvalidInputError(
                "Columns are drawn by two whole numbers",
                expected="n of 1 or more, and a seed",
                got=f"n={self.n!r}, seed={self.seed!r}",
                fix="use the paper's n=3 and seed=42",
            )
        rng = random.Random(self.seed)
        return tuple(
            tuple(rng.randint(0, view.d_model - 1) for _ in range(self.n))
            for _ in range(view.n_layers)
        )

    def edits(self, view: ModelView, context: EditContext) -> Sequence[Edit]:
        draws = self.draws(view)
        per_layer = {layer: draws[layer] for layer in view.layers(self.layers)}
        return key_column_edits(view, context, per_layer, 0.0, self.heads, self.positions)


@dataclass(frozen=True)
class LiftCausalMask(Ablation):
    """Every query attends to every token of its row: `pattern = softmax(scale q.k)`.

    No condition of the paper's Table 1; its "block" form of EPE fidelity runs the first block
    this way, because it calls the block without a mask.

    Attributes:
        layers: all if None.
    """

    layers: Layers = None

    def edits(self, view: ModelView, context: EditContext) -> Sequence[Edit]:
        view.require_live_scores("Lifting the causal mask")
        view.require_dot_product_scores("Lifting the causal mask")
        edits: list[Edit] = []
        for layer in view.layers(self.layers):
            edits += _full_attention(view, context.rows, layer)
        return edits


PAPER_CONDITIONS: Mapping[str, Ablation] = MappingProxyType(
    {
        "Baseline": Composition(),
        "No Query Bias": ZeroQueryBias(),
        "Remove First PE": ReplacePosition(source=1, target=0),
        "Swap EPE": SwapEPE(),
        "Swap PE": SwapPE(),
        "Nullify BOS Token": ZeroToken(position=0),
        "No MLP": SkipMLP(),
        "No PE": ZeroPositions(),
        "Zero Top-3 Wk": ZeroKeyColumns(TopK(3)),
        "Zero Random Wk": ZeroRandomKeyColumns(n=3, seed=42),
    }
)
"""The ten conditions of the paper's Table 1, in its order."""


def condition(name: str) -> Ablation:
    """One of the paper's conditions by its name.

    Raises:
        InvalidInputError: no such condition.
    """
    if not isinstance(name, str) or name not in PAPER_CONDITIONS:
        raise InvalidInputError(
            "Unknown condition",
            expected=", ".join(PAPER_CONDITIONS),
            got=repr(name),
            fix="use one of these names as it is spelt here",
        )
    return PAPER_CONDITIONS[name]


# --- shared mechanics ---------------------------------------------------------------------


def require_ablation(ablation: Any) -> Ablation:
    """The ablation itself, if it is one.

    Raises:
        InvalidInputError: it is not.
    """
    if not isinstance(ablation, Ablation):
        raise InvalidInputError(
            "This is not an ablation",
            expected="one of sinkscope.ablations, a sum of them, or Ablation.from_hook(site, fn)",
            got=repr(ablation)[:120],
            fix="look conditions up by name with sinkscope.ablations.condition(name)",
        )
    return ablation


def refuse_dead_edits(view: ModelView, edits: Sequence[Edit]) -> None:
    """An edit after the fact changes what is read and not what the model does."""
    late = {Site(k, n) for k in ("attn_scores", "pattern") for n in range(view.n_layers)}
    points = {id(view.hook_point(site)): site for site in late if site.kind in view.sites.names}
    for edit in edits:
        site = points.get(id(view.hook_point(edit.site)))
        if site is not None and not edit.only_looks and not view.scores_are_live():
            raise EditError(
                f"An edit at {site} would not reach this model's output",
                expected="a model that computes on with what the hook gives back",
                got=f"{view.name}, whose attention is left to transformers and hooked afterwards",
                fix="edit q, k, v or z instead",
            )


def _parts_of(ablation: Ablation) -> tuple[Ablation, ...]:
    return ablation.parts if isinstance(ablation, Composition) else (ablation,)


def positions_of(view: ModelView, positions: Layers) -> tuple[int, ...] | None:
    """The chosen positions, checked against the context; None stands for all."""
    if positions is None:
        return None
    chosen = whole_numbers(positions)
    if not chosen or any(not 0 <= p < view.n_ctx for p in chosen):
        raise InvalidInputError(
            "Positions count from each prompt's first token",
            expected=f"from 0 to {view.n_ctx - 1}, and at least one",
            got=repr(positions)[:80],
            fix="choose a position that the prompts have",
        )
    return chosen


def within_range(edit: Edit, *numbers: float) -> Edit:
    """An edit by numbers of the caller's, refused in the run where it leaves the dtype's range.

    Norms and scores square what they are given, in float32 where the model is in half precision,
    so that a sum of squares that overflows is refused as well. Numbers up to 1 in size can't do
    this, and such an edit is given back as it is.
    """
    if all(abs(number) <= 1 for number in numbers):
        return edit

    def checked(tensor: Tensor, hook: Any) -> Tensor | None:
        after = edit.fn(tensor, hook=hook)
        if after is not None and _overflows(after) and not _overflows(tensor):
            raise EditError(
                f"An edit at {edit.site} makes numbers that {tensor.dtype} can't compute with",
                expected="finite numbers with a finite sum of squares",
                got=f"from {', '.join(dict.fromkeys(f'{n:.4g}' for n in numbers))}"[:80],
                fix="use smaller numbers, or a dtype of more range",
            )
        return after

    return Edit(edit.site, checked, edit.only_looks)


def _overflows(x: Tensor) -> bool:
    return not bool(at_least_single(x).square().sum(-1).isfinite().all())


def _zero(site: Site, rows: RowPositions, positions: tuple[int, ...] | None) -> Edit:
    def zero(tensor: Tensor, hook: Any) -> Tensor:
        if positions is None:
            return torch.zeros_like(tensor)
        return tensor.masked_fill(rows.selection(tensor, positions)[..., None], 0)

    return Edit(site, zero)


def key_coordinates(view: ModelView, coordinates: Sequence[int] | Rule) -> tuple[int, ...]:
    """Coordinates of d_model as they are named, or as a rule finds them in EPE_0.

    Raises:
        EditError: the rule finds none.
        InvalidInputError: no coordinates of this model.
    """
    if isinstance(coordinates, Rule):
        found = find_massive_coordinates(extract_epe(view).vectors[0], coordinates)
        if not len(found):
            raise EditError(
                f"{found.rule} finds no coordinate in EPE_0, so there is no column to remove",
                expected=f"a coordinate with |v| > {found.threshold:.4g}",
                got="none",
                fix="use TopK(3) or another rule, or name the coordinates",
            )
        return found.coordinates
    chosen = whole_numbers(coordinates)
    if not chosen or any(not 0 <= c < view.d_model for c in chosen):
        raise InvalidInputError(
            "Coordinates are numbers of d_model",
            expected=f"from 0 to {view.d_model - 1}, and at least one",
            got=repr(coordinates)[:80],
            fix="choose coordinates, or pass a rule such as TopK(3)",
        )
    return chosen


def query_bias_edits(
    view: ModelView,
    context: EditContext,
    factor: float,
    layers: Layers,
    heads: Layers,
    positions: Layers,
) -> list[Edit]:
    """`b_Q -> factor b_Q`, counting what earlier parts of the composition have left of it."""
    view.require_query_bias()
    view.require_raw_weights(f"{'Scaling' if factor else 'Zeroing'} the query bias")
    at = positions_of(view, positions)
    edits = [
        _query_bias_edit(view, context, layer, factor, list(view.heads(heads)), at)
        for layer in view.layers(layers)
    ]
    return [edit for edit in edits if edit is not None]


def _query_bias_edit(
    view: ModelView,
    context: EditContext,
    layer: int,
    factor: float,
    heads: list[int],
    positions: tuple[int, ...] | None,
) -> Edit | None:
    bias = view.b_Q(layer)
    left = context.query_bias.setdefault(layer, Remaining(bias.new_ones(view.n_heads)))
    taken = left.scale(heads, factor, positions)
    if not taken.any():
        return None

    def subtract(q: Tensor, hook: Any) -> Tensor:
        return q - taken.per_token(q, context.rows)[..., None] * bias

    return within_range(Edit(Site("q", layer), subtract), factor)


def key_column_edits(
    view: ModelView,
    context: EditContext,
    per_layer: Mapping[int, tuple[int, ...]],
    factor: float,
    heads: Layers,
    positions: Layers,
) -> list[Edit]:
    """Rows of W_K times a factor, counting what earlier parts of the composition have left."""
    at = positions_of(view, positions)
    edits: list[Edit] = []
    for layer, coordinates in per_layer.items():
        chosen = sorted(set(coordinates))
        edits += _key_column_pair(view, context, layer, chosen, factor, heads, at)
    return edits


def _key_column_pair(
    view: ModelView,
    context: EditContext,
    layer: int,
    coordinates: list[int],
    factor: float,
    heads: Layers,
    positions: tuple[int, ...] | None,
) -> tuple[Edit, Edit]:
    """Look at what enters W_K, then take these coordinates' share off the keys."""
    W_K = view.key_weights(layer)
    if heads is not None and W_K.shape[0] != view.n_heads:
        raise NotApplicableError(
            "Key columns can't be removed for single heads: this model's heads share keys",
            expected=f"{view.n_heads} key heads",
            got=W_K.shape[0],
            fix="leave heads out",
        )
    chosen = range(W_K.shape[0]) if heads is None else view.heads(heads)
    where = (torch.tensor(list(chosen))[:, None], torch.tensor(coordinates)[None, :])
    left = context.key_rows.setdefault(layer, Remaining(W_K.new_ones(W_K.shape[:2])))
    taken = left.scale(where, factor, positions)
    taken = Remaining(
        taken.everywhere[:, coordinates], {p: t[:, coordinates] for p, t in taken.at.items()}
    )
    columns = W_K[:, coordinates]
    seen: dict[str, Tensor] = {}

    def look(attn_in: Tensor, hook: Any) -> None:
        seen["coordinates"] = attn_in[..., coordinates]

    def subtract(k: Tensor, hook: Any) -> Tensor:
        if "coordinates" not in seen:
            raise EditError(
                f"In layer {layer} keys were made before what enters W_K was seen",
                expected="a normalisation in front of the attention",
                got="one behind it (a post-LN model)",
                fix="use an ablation that does not need what enters W_K",
            )
        removed = taken.per_token(k, context.rows) * seen.pop("coordinates")[..., None, :]
        return k - torch.einsum("bphc,hce->bphe", removed, columns)

    return (
        Edit(Site("attn_in", layer), look, only_looks=True),
        within_range(Edit(Site("k", layer), subtract), factor),
    )


def _full_attention(view: ModelView, rows: RowPositions, layer: int) -> list[Edit]:
    seen: dict[str, Tensor] = {}
    scale = view.attention_scale(layer)
    groups = view.n_heads // view.n_key_value_heads

    def look_at(name: str) -> HookFn:
        def look(tensor: Tensor, hook: Any) -> None:
            seen[name] = tensor

        return look

    def replace(attn_scores: Tensor, hook: Any) -> Tensor:
        keys = seen.pop("k").repeat_interleave(groups, dim=2)
        scores = scale * torch.einsum("bqhe,bkhe->bhqk", seen.pop("q"), keys)
        hidden = ~rows.tokens(keys)[:, None, None, :]
        return scores.masked_fill(hidden, torch.finfo(scores.dtype).min)

    return [
        Edit(Site("q", layer), look_at("q"), only_looks=True),
        Edit(Site("k", layer), look_at("k"), only_looks=True),
        Edit(Site("attn_scores", layer), replace),
    ]


def unit_vector(vector: Float[Tensor, " d_model"], what: str) -> Float[Tensor, " d_model"]:
    norm = vector.norm()
    if not bool(norm > 0):
        raise EditError(f"{what} is zero and has no direction to swap along", got=float(norm))
    return vector / norm


__all__ = [
    "Ablation",
    "Composition",
    "Edit",
    "FromHook",
    "LiftCausalMask",
    "PAPER_CONDITIONS",
    "ReplacePosition",
    "RowPositions",
    "SkipMLP",
    "SwapEPE",
    "SwapPE",
    "ZeroKeyColumns",
    "ZeroPositions",
    "ZeroQueryBias",
    "ZeroRandomKeyColumns",
    "ZeroToken",
    "condition",
]
