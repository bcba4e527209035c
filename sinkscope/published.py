"""What the paper published for GPT-2 124M on its 300 prompts."""

from __future__ import annotations

import json
from functools import cache
from importlib import resources
from typing import Any

from sinkscope.model import ModelView

_NAMES = {"gpt2", "gpt2-small", "openai-community/gpt2"}
_SHAPE = {"n_layers": 12, "n_heads": 12, "d_model": 768, "d_vocab": 50257}


@cache
def published() -> dict[str, Any]:
    """The published figures.

    `table1[corpus][condition]` is `[mean, standard error]` over the mid layers, corpus "all"
    for the pooled ones; `massive_coordinates`; `gamma_mean` of |gamma| at massive coordinates
    and at the others; `fidelity["mlp"|"block"][position]` and `delta[layer][position]` are
    percentiles `[p10, p50, p90]`, layers from 0.
    """
    text = (resources.files("sinkscope") / "published.json").read_text("utf-8")
    return json.loads(text)


def applies_to(view: ModelView, prompts_source: str) -> bool:
    """Whether the published numbers are about this model on these prompts."""
    same_shape = all(getattr(view, name) == size for name, size in _SHAPE.items())
    return prompts_source == "paper" and view.name in _NAMES and same_shape
