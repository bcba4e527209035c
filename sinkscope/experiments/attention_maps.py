"""Per-head attention maps of one prompt under all conditions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from sinkscope.ablations import PAPER_CONDITIONS, Ablation
from sinkscope.capture import Progress
from sinkscope.display import number, numbers
from sinkscope.experiments._engine import (
    Request,
    run_experiments,
    split_by_applicability,
    to_numpy,
    token_texts,
)
from sinkscope.model import ModelView, model_view
from sinkscope.prompts import TokenBatch, require_batch
from sinkscope.results import Result
from sinkscope.sites import Site

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, eq=False)
class AttentionMaps(Result):
    """Attention of one prompt under several conditions.

    Attributes:
        patterns: `[condition layer head query key]`.
        conditions: names along the first axis.
        layers: the layers of the second axis.
        tokens: what each position holds, as text.
        not_applicable: pairs of condition and reason, for what this model lacks.
    """

    kind: ClassVar[str] = "attention_maps"

    patterns: np.ndarray
    conditions: tuple[str, ...]
    layers: tuple[int, ...]
    tokens: tuple[str, ...]
    not_applicable: tuple[tuple[str, str], ...] = ()

    def to_dataframe(self) -> pd.DataFrame:
        """One row per condition, layer, head, query and key at or before it."""
        import pandas as pd

        queries, keys = np.tril_indices(len(self.tokens))
        visible = self.patterns[..., queries, keys]
        condition, layer, head, pair = np.indices(visible.shape).reshape(4, -1)
        return pd.DataFrame(
            {
                "condition": np.array(self.conditions, dtype=object)[condition],
                "layer": np.array(self.layers)[layer],
                "head": head,
                "query": queries[pair],
                "key": keys[pair],
                "attention": visible.ravel(),
            }
        )

    def overview(self) -> list[tuple[str, str]]:
        sinks = self.summary()["sink_score_by_layer"]
        return [
            ("prompt", "".join(self.tokens)),
            ("maps", f"{len(self.conditions)} conditions, layers {numbers(self.layers)}"),
            *((name, number(float(scores.mean()))) for name, scores in sinks.items()),
        ]

    def summary(self) -> dict[str, Any]:
        """Tokens and mean attention to position 0 per condition and layer; not the maps."""
        late = self.patterns[..., len(self.tokens) // 2 :, 0].mean((2, 3), dtype=np.float64)
        return {
            "tokens": self.tokens,
            "layers": self.layers,
            "sink_score_by_layer": dict(zip(self.conditions, late, strict=True)),
            "not_applicable": dict(self.not_applicable),
        }


class _FirstPromptReader:
    """Keeps the patterns of the batch's first prompt, without its padding."""

    def __init__(self, layers: tuple[int, ...]) -> None:
        self._layers = layers
        self._seen: dict[int, Tensor] = {}

    def sites(self, view: ModelView) -> Sequence[Site]:
        return [Site("pattern", layer) for layer in self._layers]

    def read(self, site: Site, tensor: Tensor, chunk: TokenBatch) -> None:
        if site.layer is not None and site.layer not in self._seen:
            tokens = chunk.mask[0].to(tensor.device)
            self._seen[site.layer] = tensor[0][:, tokens][:, :, tokens].cpu().clone()

    def result(self) -> np.ndarray:
        return to_numpy(torch.stack([self._seen[layer] for layer in self._layers]))


class AttentionMapsExperiment:
    """Asks for the first prompt's patterns under every condition that applies."""

    def __init__(
        self,
        view: ModelView,
        batch: TokenBatch,
        conditions: Mapping[str, Ablation] | None = None,
        layers: tuple[int, ...] | None = None,
    ) -> None:
        conditions = PAPER_CONDITIONS if conditions is None else conditions
        self._layers = view.layers(layers)
        self._tokens = token_texts(view, batch, 0)
        applied, self._not_applicable = split_by_applicability(view, batch, conditions)
        self._readers = {
            name: (ablation, _FirstPromptReader(self._layers)) for name, ablation in applied.items()
        }

    def requests(self) -> Sequence[Request]:
        return list(self._readers.values())

    def result(self) -> AttentionMaps:
        return AttentionMaps(
            patterns=np.stack([reader.result() for _, reader in self._readers.values()]),
            conditions=tuple(self._readers),
            layers=self._layers,
            tokens=self._tokens,
            not_applicable=self._not_applicable,
        )


def run(
    model: Any,
    batch: TokenBatch,
    conditions: Mapping[str, Ablation] | None = None,
    layers: tuple[int, ...] | None = None,
    *,
    batch_size: int | None = None,
    progress: Progress | None = None,
) -> AttentionMaps:
    """The patterns of the batch's first prompt under each condition.

    Args:
        model: a hooked model or its view.
        batch: its first prompt is mapped.
        conditions: name -> ablation; the paper's ten if None.
        layers: all if None.
        batch_size: not needed, one prompt runs.
        progress: told how many prompts are done.
    """
    view = model_view(model)
    first = require_batch(batch).select([0])
    experiment = AttentionMapsExperiment(view, first, conditions, layers)
    run_experiments(view, first, [experiment], batch_size=batch_size, progress=progress)
    return experiment.result()
