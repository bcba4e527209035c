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

from sinkscope.attention import (
    HALF_PATTERN_FACTOR,
    TOLERANCE_FACTOR,
    at_least_single,
    eps_of,
    is_half,
    largest_error,
    pattern_errors,
    pattern_tolerance,
    score_tolerance,
    sees_any,
)
from sinkscope.errors import NotApplicableError
from sinkscope.model import ModelView
from sinkscope.prompts import TokenBatch
from sinkscope.sites import Site

NOT_IN_ALL_LAYERS = ("rotary_cos", "rotary_sin")
"""Kinds of sites that a layer without positions does not pass, in a model with rotary ones."""


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
        # Where sink logits take a share, sums don't tell of it.
        self._live = not layers or (view.scores_are_live() and not view.parts.sink_logits)
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
        needed = {"q", "k", *(other.kind for other in self._view.score_sites(site.layer))}
        if needed - set(NOT_IN_ALL_LAYERS) <= seen.keys():
            self._check_scores(site.layer, tensor, visible, seen, chunk)

    def _check_sums(self, layer: int, pattern: Tensor, visible: Tensor) -> None:
        total = pattern.sum(-1, dtype=torch.promote_types(pattern.dtype, torch.float32))
        loses_mass = self._view.parts.sink_logits
        off = total - 1 if loses_mass else (total - 1).abs()
        allowed = TOLERANCE_FACTOR * eps_of(torch.float32)
        if is_half(pattern.dtype):
            allowed = HALF_PATTERN_FACTOR * eps_of(pattern.dtype)
        largest_error(
            off.masked_fill(~sees_any(visible), 0).amax((0, 2)),
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
        if q.shape[1] != k.shape[1]:
            k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        q, k = rule.queries(q), rule.keys(k)
        errors, largest = pattern_errors(
            rule, lambda block: rule.scores(q, k, block), pattern, visible
        )
        if is_half(pattern.dtype):
            # What the hooks show of queries and keys is rounded, and large scores with it.
            of_scores, size = math.inf, largest
        else:
            sizes = q.norm(dim=-1).amax(-1) * k.norm(dim=-1).amax(-1)
            size = abs(rule.scale) * float(sizes.amax()) + rule.largest_bias()
            of_scores = score_tolerance(pattern.dtype, size, self._live and rule.exact)
        allowed = pattern_tolerance(of_scores, size, pattern, visible)
        largest_error(
            errors,
            allowed,
            layer,
            "the pattern is not softmax(scale q.k + mask)",
            "look for a scale or a mask that the configuration does not tell, or an attention "
            "that TransformerLens computes otherwise than the model's authors",
        )
