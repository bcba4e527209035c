"""How well the effective positional encoding stands for what positions do in the first block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxtyping import Float
from torch import Tensor

from sinkscope._types import Residual
from sinkscope.ablations import Ablation, Composition, LiftCausalMask, ZeroPositions
from sinkscope.capture import (
    PASSING,
    KeepingReader,
    LayerReader,
    Part,
    Pass,
    run_passes,
    stream,
)
from sinkscope.epe import EPE, extract_epe
from sinkscope.errors import InvalidInputError
from sinkscope.metrics import NAN, cosine
from sinkscope.model import ModelView, model_view
from sinkscope.prompts import TokenBatch
from sinkscope.sites import Site

BLOCK_FORMS: Mapping[str, tuple[Ablation, Ablation]] = {
    "block": (LiftCausalMask(0), LiftCausalMask(0) + ZeroPositions()),
    "causal_block": (Composition(), ZeroPositions()),
}
"""What runs for R and for O in each form that goes through the first block."""


def epe_fidelity(
    model: Any,
    batch: TokenBatch,
    through: str = "mlp",
    *,
    through_ln: bool = False,
    batch_size: int | None = None,
) -> Float[Tensor, "batch pos"]:
    """Cosine between EPE_i and what the position vector changes in the first block's output.

    `cos(EPE_i, R_i - O_i)` with e the token embedding and `x = e + p`. "mlp":
    `R = x + MLP_0(x)`, `O = e + MLP_0(e)`, without LN2 and attention. "block":
    `R = block_0(x)`, `O = block_0(e)` with the first block's attention not masked, so that
    every position sees the whole prompt. "causal_block": the same with the model's own causal
    mask.

    The paper's numbers for the block are those of "block": its code calls the block by itself,
    and transformers then applies no mask. "causal_block" is what the model computes.

    Args:
        model: a hooked model or its view.
        batch: the prompts.
        through: "mlp", "block" or "causal_block".
        through_ln: the form of the EPE, see `extract_epe`; the paper's is False.
        batch_size: rows per forward pass; all at once if None.

    Returns:
        `[batch pos]`, NaN at padding.

    Raises:
        NotApplicableError: no learned positions or no first MLP.
        ProcessedWeightsError: the weights were folded or centred.
    """
    view = model_view(model)
    epe = extract_epe(view, through_ln=through_ln)
    if through == "mlp":
        mlp = MlpFidelityReader(view, epe)
        stream(view, batch, [mlp], batch_size=batch_size)
        return mlp.result()
    if isinstance(through, str) and through in BLOCK_FORMS:
        with_positions, without = block_requests(epe, through)
        passes = [Pass(view, [reader], ablation) for ablation, reader in (with_positions, without)]
        run_passes(view, batch, passes, batch_size=batch_size)
        return without[1].result()
    raise InvalidInputError(
        "Unknown form of fidelity",
        expected="'mlp', 'block' or 'causal_block'",
        got=repr(through),
        fix="choose one of these",
    )


def block_fidelity(
    epe: EPE, batch: TokenBatch, with_positions: Residual, without_positions: Residual
) -> Float[Tensor, "batch pos"]:
    """`cos(EPE_i, R_i - O_i)` from the first block's outputs with and without positions."""
    rows = _epe_rows(epe, batch, with_positions)
    return _at_tokens(cosine(rows, with_positions - without_positions), batch)


class MlpFidelityReader(KeepingReader):
    """Computes the "mlp" form from the embeddings as they pass."""

    def __init__(self, view: ModelView, epe: EPE) -> None:
        super().__init__()
        self._view = view
        self._epe = epe
        self._embed: Tensor | None = None

    def sites(self, view: ModelView) -> Sequence[Site]:
        return [Site("embed"), Site("pos_embed")]

    def read(self, site: Site, tensor: Tensor, chunk: TokenBatch) -> None:
        if site.kind == "embed":
            self._embed = tensor.clone()
            return
        if self._embed is None:
            raise InvalidInputError("The position embedding came before the token embedding")
        e, x = self._embed, self._embed + tensor
        self._embed = None
        with_p = x + self._view.first_mlp(x)
        without_p = e + self._view.first_mlp(e)
        rows = _epe_rows(self._epe, chunk, x)
        self._now["mlp"] = _at_tokens(cosine(rows, with_p - without_p), chunk)

    def result(self) -> Float[Tensor, "batch pos"]:
        """`[batch pos]`, NaN at padding."""
        return self.joined("mlp")


class FirstBlockReader:
    """Hands the first block's output of one chunk on to a `BlockFidelityReader`.

    Its pass goes first; nothing is kept once the other's has run over the same chunk.
    """

    def __init__(self) -> None:
        self._now: Tensor | None = None
        self.output: Tensor | None = None

    def sites(self, view: ModelView) -> Sequence[Site]:
        return [Site("resid_post", 0)]

    def read(self, site: Site, tensor: Tensor, chunk: TokenBatch) -> None:
        self._now = tensor.clone()

    def take(self, start: int) -> Part:
        now, self._now = self._now, None
        return {} if now is None else {PASSING + "resid_post": now}

    def add(self, start: int, part: Part) -> None:
        self.output = part.get(PASSING + "resid_post")


class BlockFidelityReader(LayerReader):
    """Computes a "block" form: R from the other reader, O as it passes."""

    def __init__(self, epe: EPE, with_positions: FirstBlockReader) -> None:
        super().__init__("resid_post", (0,), self._fidelity)
        self._epe = epe
        self._with_positions = with_positions

    def _fidelity(self, without: Tensor, chunk: TokenBatch, layer: int) -> Tensor:
        with_positions, self._with_positions.output = self._with_positions.output, None
        if with_positions is None:
            raise InvalidInputError("The block with positions has to run before the one without")
        return block_fidelity(self._epe, chunk, with_positions.to(without.device), without)

    def result(self) -> Float[Tensor, "batch pos"]:
        """`[batch pos]`, NaN at padding."""
        return super().result()[:, 0]


def block_requests(
    epe: EPE, through: str
) -> tuple[tuple[Ablation, FirstBlockReader], tuple[Ablation, BlockFidelityReader]]:
    """What has to run for a "block" form, in this order; the second reader gives the result."""
    with_positions, without = BLOCK_FORMS[through]
    first = FirstBlockReader()
    return (with_positions, first), (without, BlockFidelityReader(epe, first))


def _epe_rows(epe: EPE, batch: TokenBatch, like: Tensor) -> Residual:
    return epe.vectors[batch.position_ids.clamp_min(0)].to(like.device)


def _at_tokens(values: Float[Tensor, "batch pos"], batch: TokenBatch) -> Float[Tensor, "batch pos"]:
    return values.masked_fill(~batch.mask.to(values.device), NAN)
