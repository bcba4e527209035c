"""What every run that reads a pattern is held to: softmax of the scores = the model's pattern.

Scores are made of the queries and keys that the model's own hooks show, so that the check also
holds under an ablation of anything that comes before the scores. Rows sum to 1, or to less
where the architecture has sink logits that take the rest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from sinkscope.attention import at_least_single, eps_of, is_half, is_single
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

    `pattern = softmax(cap(scale q.k + position bias))` over visible keys, with queries and
    keys turned and normed as the model's `ScoreRule` says. Where the model does something that
    no rule knows, only the sum of each row is checked.
    """

    def __init__(self, view: ModelView, layers: Sequence[int]) -> None:
        self._view = view
        self._layers = layers
        self._recomputes = {"q", "k"} <= set(view.sites.names)
        # Attention that is left to transformers may be computed in float32.
        self._single = bool(layers) and not view.scores_are_live()
        self._seen: dict[str, Tensor] = {}

    def sites(self, view: ModelView) -> Sequence[Site]:
        """What it reads: in each layer the pattern, and before it what the pattern is made of."""
        sites: list[Site] = []
        for layer in self._layers:
            if self._recomputes:
                sites += dict.fromkeys(
                    (Site("q", layer), Site("k", layer), *view.score_sites(layer))
                )
            sites.append(Site("pattern", layer))
        return sites

    def read(self, site: Site, tensor: Tensor, chunk: TokenBatch) -> None:
        """Keep what comes before a pattern, and check the pattern."""
        if site.layer is None:
            return
        if site.kind != "pattern":
            self._seen[site.kind] = tensor
            return
        mask = chunk.mask.to(tensor.device)
        visible = self._view.visible(site.layer, mask)[:, None]
        self._check_sums(site.layer, tensor, visible)
        seen, self._seen = self._seen, {}
        if self._recomputes:
            self._check_scores(site.layer, tensor, visible, seen, chunk)

    def _check_sums(self, layer: int, pattern: Tensor, visible: Tensor) -> None:
        total = pattern.float().sum(-1) if is_half(pattern.dtype) else pattern.sum(-1)
        loses_mass = self._view.parts.sink_logits
        off = total - 1 if loses_mass else (total - 1).abs()
        half = is_half(pattern.dtype)
        allowed = HALF_FACTOR * eps_of(pattern.dtype) if half else FACTOR * eps_of(torch.float32)
        _refuse(
            off.masked_fill(~visible.any(-1), 0).amax((0, 2)),
            allowed,
            layer,
            "the attention of a query does not sum to " + ("1 or less" if loses_mass else "1"),
            "look for dropout, a hook or a library that changes patterns after their softmax",
        )

    def _check_scores(
        self,
        layer: int,
        pattern: Tensor,
        visible: Tensor,
        seen: dict[str, Tensor],
        chunk: TokenBatch,
    ) -> None:
        try:
            rule = self._view.score_rule(layer, seen, chunk.mask.to(pattern.device))
        except NotApplicableError:
            return
        q, k = (at_least_single(seen[name]).transpose(1, 2) for name in ("q", "k"))
        k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        q, k = rule.queries(q), rule.keys(k)
        scores = rule.scale * q @ k.transpose(-1, -2)
        if rule.position_bias is not None:
            scores = scores + at_least_single(rule.position_bias)
        scores = rule.capped(scores)
        error = (rule.pattern(scores, visible) - pattern).abs()
        if is_half(pattern.dtype):
            largest = float(scores.abs().masked_fill(~visible, 0).amax())
            allowed = eps_of(pattern.dtype) * max(HALF_FACTOR, largest)
        else:
            size = abs(rule.scale) * float(
                (q.norm(dim=-1).amax(-1) * k.norm(dim=-1).amax(-1)).amax()
            )
            allowed = FACTOR * self._softmax_eps(pattern, visible) * max(1.0, size)
        _refuse(
            error.masked_fill(~visible, 0).amax((0, 2, 3)),
            allowed,
            layer,
            "the pattern is not softmax(scale q.k + mask)",
            "look for a scale or a mask that the configuration does not tell, or an attention "
            "that TransformerLens computes otherwise than the model's authors",
        )

    def _softmax_eps(self, pattern: Tensor, visible: Tensor) -> float:
        """Many models compute the softmax in float32 whatever their dtype; sums or digits tell."""
        eps = eps_of(pattern.dtype)
        single = self._single or self._view.parts.sink_logits
        if not single:
            off = (pattern.sum(-1) - 1).abs().masked_fill(~visible.any(-1), 0).amax()
            single = float(off) > FACTOR * eps or is_single(pattern, visible)
        return max(eps, eps_of(torch.float32)) if single else eps


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
