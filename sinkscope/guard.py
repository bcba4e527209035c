"""What every run that reads a pattern is held to: `softmax(scale q.k + mask) = pattern`.

q and k are the model's own, as its hooks show them, so that the check also holds under an
ablation of anything that comes before the scores. Rows sum to 1, or to less where the
architecture has sink logits that take the rest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from sinkscope.errors import IdentityError, NotApplicableError
from sinkscope.model import ModelView
from sinkscope.prompts import TokenBatch
from sinkscope.sites import Site

FACTOR = 64
"""Patterns hold to this many units of the dtype's precision, times `max(1, scale |q||k|)`."""
HALF_FACTOR = 16
"""In half precision to this many, or as many as the largest score is, whichever is more."""


class PatternGuard:
    """Checks the patterns of a run in the layers that somebody reads.

    The first identity needs plain scores (see `ModelView.require_plain_scores`) and a model
    that computes its pattern from the q and k that its hooks show; elsewhere only the sum of
    each row is checked.
    """

    def __init__(self, view: ModelView, layers: Sequence[int]) -> None:
        self._view = view
        self._layers = layers
        self._recomputes = bool(layers) and _shows_its_scores(view)
        self._loses_mass = any(n.endswith(".sinks") for n, _ in view.model.named_parameters())
        self._seen: dict[str, Tensor] = {}

    def sites(self, view: ModelView) -> Sequence[Site]:
        kinds = ("q", "k", "pattern") if self._recomputes else ("pattern",)
        return [Site(kind, layer) for layer in self._layers for kind in kinds]

    def read(self, site: Site, tensor: Tensor, chunk: TokenBatch) -> None:
        if site.layer is None:
            return
        if site.kind != "pattern":
            self._seen[site.kind] = tensor
            return
        mask = chunk.mask.to(tensor.device)
        visible = self._view.visible(site.layer, mask)[:, None]
        self._check_sums(site.layer, tensor, visible)
        if self._recomputes:
            self._check_scores(site.layer, tensor, visible)

    def _check_sums(self, layer: int, pattern: Tensor, visible: Tensor) -> None:
        total = pattern.float().sum(-1) if _is_half(pattern) else pattern.sum(-1)
        off = total - 1 if self._loses_mass else (total - 1).abs()
        eps = _eps(pattern.dtype)
        allowed = HALF_FACTOR * eps if _is_half(pattern) else FACTOR * _eps(torch.float32)
        _refuse(
            off.masked_fill(~visible.any(-1), 0).amax((0, 2)),
            allowed,
            layer,
            "the attention of a query does not sum to "
            + ("1 or less" if self._loses_mass else "1"),
            "look for dropout, a hook or a library that changes patterns after their softmax",
        )

    def _check_scores(self, layer: int, pattern: Tensor, visible: Tensor) -> None:
        scale = self._view.attention_scale(layer)
        q, k = (self._wide(self._seen.pop(name)).transpose(1, 2) for name in ("q", "k"))
        k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        scores = scale * q @ k.transpose(-1, -2)
        own = scores.masked_fill(~visible, -math.inf).softmax(-1)
        error = (own - pattern).abs().masked_fill(~visible, 0).amax((0, 2, 3))
        if _is_half(pattern):
            largest = float(scores.abs().masked_fill(~visible, 0).amax())
            allowed = _eps(pattern.dtype) * max(HALF_FACTOR, largest)
        else:
            size = abs(scale) * float((q.norm(dim=-1).amax(-1) * k.norm(dim=-1).amax(-1)).amax())
            allowed = FACTOR * self._softmax_eps(pattern, visible) * max(1.0, size)
        _refuse(
            error,
            allowed,
            layer,
            "the pattern is not softmax(scale q.k + mask)",
            "look for a scale or a mask that the configuration does not tell, or an attention "
            "that TransformerLens computes otherwise than the model's authors",
        )

    @staticmethod
    def _wide(tensor: Tensor) -> Tensor:
        return tensor.float() if _is_half(tensor) else tensor

    @staticmethod
    def _softmax_eps(pattern: Tensor, visible: Tensor) -> float:
        """Many models compute the softmax in float32 whatever their dtype; its sums tell."""
        eps = _eps(pattern.dtype)
        off = (pattern.sum(-1) - 1).abs().masked_fill(~visible.any(-1), 0).amax()
        return max(eps, _eps(torch.float32)) if float(off) > FACTOR * eps else eps


def _shows_its_scores(view: ModelView) -> bool:
    try:
        view.require_plain_scores()
    except NotApplicableError:
        return False
    return {"q", "k"} <= set(view.sites.names) and view.scores_are_live()


def _refuse(per_head: Tensor, allowed: float, layer: int, what: str, fix: str) -> None:
    worst = float(per_head.max())
    if not worst <= allowed:
        head = int(per_head.nan_to_num(nan=math.inf).argmax())
        raise IdentityError(
            f"In layer {layer}, head {head}, {what}",
            expected=f"a difference of at most {allowed:.2e}",
            got=f"{worst:.2e}",
            fix=fix,
        )


def _is_half(tensor: Tensor) -> bool:
    return _eps(tensor.dtype) > _eps(torch.float32)


def _eps(dtype: torch.dtype) -> float:
    return float(torch.finfo(dtype).eps)
