"""The paper's experiments, one module each.

Every module has `run(model, batch, ...)`, which gives a frozen result. Each also has an
experiment class that asks for its readings; `run_experiments` serves several in the fewest
passes, one for each distinct ablation.
"""

from __future__ import annotations

import importlib
from typing import Any

EXPERIMENTS = (
    "table1",
    "delta",
    "epe_fidelity",
    "coordinate_alignment",
    "epe_bias_alignment",
    "massive_activations",
    "score_terms",
    "attention_maps",
)

__all__ = ["EXPERIMENTS", *EXPERIMENTS]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name in EXPERIMENTS:
        return importlib.import_module(f"sinkscope.experiments.{name}")
    raise AttributeError(f"module 'sinkscope.experiments' has no attribute {name!r}")
