"""Print the tables of docs/dispensability.md: which demo models have a sink, and what it needs.

python scripts/measure_variants.py
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import sinkscope as ss
from sinkscope.ablations import (
    Ablation,
    Composition,
    ReplacePosition,
    SkipMLP,
    ZeroKeyColumns,
    ZeroQueryBias,
    ZeroToken,
)
from sinkscope.capture import stream
from sinkscope.errors import NoEffectWarning
from sinkscope.loading import DEMO_VARIANTS, demo_directory
from sinkscope.measures import LayerReader

SINK = 0.3
"""A head has a sink where its sink score is at least this."""

FACTS = (
    "model",
    "sink is",
    "missing",
    "BOS",
    "sink score",
    "sink rate",
    "sink heads",
    "step",
    "copies",
)
PARTS = (
    "b_Q",
    "mean query",
    "other word",
    "no token",
    "position",
    "other word, position",
    "MLP 0",
    "coordinates",
)
RESULTS = ("model", "sink is", "baseline", *PARTS)


@dataclass(frozen=True)
class Measured:
    """What is measured of one model.

    Args:
        name: as `load_model` takes it.
        facts: its training.json.
        scores: sink score by layer and head, mean over prompts.
        sink_rate: mean over prompts, layers and heads.
        norms: mean |residual| at position 0 and elsewhere, entering the last layer.
        massive: coordinates of the mean residual at position 0 there, by MeanStd(3).
        without: mean sink score over the sink heads, without each of PARTS; NaN where the model
            has no such part, or there are no sink heads.
    """

    name: str
    facts: dict[str, Any]
    scores: Tensor
    sink_rate: float
    norms: tuple[float, float]
    massive: tuple[int, ...]
    without: dict[str, float]

    @property
    def sink_heads(self) -> list[tuple[int, int]]:
        """Layer and head of each head that has a sink."""
        return [(layer, head) for layer, head in (self.scores >= SINK).nonzero().tolist()]

    @property
    def kind(self) -> str:
        """How the sink came about; where a part of the plant is missing, it is no planted sink."""
        planted = self.facts.get("planted", True)  # the demo model's record is older than the word
        if not self.sink_heads:
            return "none, part planted" if planted else "none, nothing planted"
        if not planted:
            return "grown"
        return "grown on part of a plant" if self.facts.get("missing") else "planted"

    @property
    def baseline(self) -> float:
        """Mean sink score over the sink heads."""
        return _mean_over(self.scores, self.sink_heads)


def without_mean_query(layers: Sequence[int]) -> Ablation:
    """Take from each head's queries their mean over prompts and positions (but the first).

    The mean is what all queries share, wherever it comes from: b_Q, LN1's bias, or a direction
    that is in every residual.
    """

    def centre(q: Tensor, hook: Any) -> Tensor:
        return q - q[:, 1:].mean((0, 1))

    parts = [Ablation.from_hook(ss.Site("q", layer), centre) for layer in layers]
    return Composition(tuple(parts))


def another_first_token(batch: ss.TokenBatch) -> ss.TokenBatch:
    """The prompts with the second prompt's last token, and so on, in the place of their first."""
    ids = batch.ids.clone()
    ids[:, 0] = batch.ids[:, -1].roll(1)
    return replace(batch, ids=ids, bos=(False,) * len(batch))


def prompts_of(model: Any, name: str) -> ss.TokenBatch:
    """The prompts that ship with a demo model: 48 of 64 tokens, of the demo model 96 of 40."""
    return ss.token_batch(model, ss.load_prompts(model, name), length=40 if name == "demo" else 64)


def measure(name: str) -> Measured:
    """Measure one of the demo models on its own prompts."""
    model = ss.load_model(name)
    view = ss.model_view(model)
    batch = prompts_of(model, name)
    layers = range(view.n_layers)

    def scores(batch: ss.TokenBatch, ablation: Ablation | None = None) -> Tensor:
        with warnings.catch_warnings():
            # Taking away what is zero already is no mistake here.
            warnings.simplefilter("ignore", NoEffectWarning)
            return ss.sink_score(model, batch, ablation, layers).mean(0)

    residual = LayerReader("resid_pre", [view.n_layers - 1], lambda x, *_: x.clone())
    stream(view, batch, [residual])
    at_first = residual.result()[:, 0, 0].mean(0)
    massive = ss.find_massive_coordinates(at_first).coordinates
    norms = residual.result()[:, 0].norm(dim=-1)

    other = another_first_token(batch)
    baseline = scores(batch)
    without = {
        "b_Q": scores(batch, ZeroQueryBias()),
        "mean query": scores(batch, without_mean_query(layers)),
        "other word": scores(other),
        "no token": scores(batch, ZeroToken(0)),
        "MLP 0": scores(batch, SkipMLP([0])),
    }
    if massive:
        without["coordinates"] = scores(batch, ZeroKeyColumns(massive))
    if view.parts.learned_positions:
        without["position"] = scores(batch, ReplacePosition(1, 0))
        without["other word, position"] = scores(other, ReplacePosition(1, 0))
    heads = [(layer, head) for layer, head in (baseline >= SINK).nonzero().tolist()]
    return Measured(
        name=name,
        facts=json.loads((demo_directory(name) / "training.json").read_text("utf-8")),
        scores=baseline,
        sink_rate=float(ss.sink_rate(model, batch).mean()),
        norms=(float(norms[:, 0].mean()), float(norms[:, 1:].mean())),
        massive=massive,
        without={
            part: _mean_over(without[part], heads) if part in without else math.nan
            for part in PARTS
        },
    )


def _mean_over(scores: Tensor, heads: Sequence[tuple[int, int]]) -> float:
    if not heads:
        return math.nan
    return float(torch.stack([scores[layer, head] for layer, head in heads]).mean())


def rows(measured: Sequence[Measured]) -> tuple[list[list[str]], list[list[str]]]:
    """The cells of the two tables: what each model is, and what its sink needs."""
    first, second = [], []
    for m in measured:
        step = m.facts.get("first_step_with_a_sink")
        first.append(
            [
                m.name,
                m.kind,
                m.facts.get("missing") or "nothing",
                "yes" if m.facts.get("fixed_bos") else "no",
                f"{float(m.scores.mean()):.2f}",
                f"{m.sink_rate:.2f}",
                f"{len(m.sink_heads)} of {m.scores.numel()}",
                "-" if step is None else str(step),
                _cell(m.facts.get("final_loss_on_copies", math.nan)),
            ]
        )
        values = [_cell(m.without[part]) for part in PARTS]
        second.append([m.name, m.kind, _cell(m.baseline), *values])
    return first, second


def _cell(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.2f}"


def markdown(header: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *cells]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> None:
    measured = [measure(name) for name in ("demo", *DEMO_VARIANTS)]
    first, second = rows(measured)
    print(markdown(FACTS, first), end="\n\n")
    print(markdown(RESULTS, second), end="\n\n")
    for m in measured:
        layers = sorted({layer for layer, _ in m.sink_heads})
        print(f"{m.name}: sink heads in layers {layers}, {m.sink_heads}")
        print(f"  |residual| {m.norms[0]:.1f} against {m.norms[1]:.1f}, massive {m.massive}")
        print(f"  first step with a sink {m.facts.get('first_step_with_a_sink')}")


if __name__ == "__main__":
    main()
