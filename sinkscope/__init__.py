"""sinkscope: find, explain and test attention sinks in hooked transformer models.

The way through: a model (`load_model`, `model_view`, `register_model_view`), prompts
(`token_batch`), weights (`extract_epe`, `coordinate_alignment`, `epe_bias_alignment`,
`query_bias`, `find_massive_coordinates`), runs (`decompose_scores`, `source_agnostic_shift`,
`epe_fidelity`, `patterns`, `sink_score`, `sink_rate`, `sink_position`, `value_norms`,
`residual_norms`), changes (`ablations`, `PAPER_CONDITIONS`), the paper's results
(`experiments`, `reproduce`), which circuit a model uses (`survey`), what a mitigation costs
(`mitigations`, `mitigation_bench`, `head_sweep`, `next_token_loss`), and figures of them
(`plots`).

Names are loaded on use, so that importing sinkscope stays light.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sinkscope import ablations as ablations
    from sinkscope import experiments as experiments
    from sinkscope import mitigations as mitigations
    from sinkscope import plots as plots
    from sinkscope.ablations import PAPER_CONDITIONS as PAPER_CONDITIONS
    from sinkscope.ablations import Ablation as Ablation
    from sinkscope.bench import MitigationBench as MitigationBench
    from sinkscope.bench import default_mitigations as default_mitigations
    from sinkscope.bench import mitigation_bench as mitigation_bench
    from sinkscope.circuits import Survey as Survey
    from sinkscope.circuits import survey as survey
    from sinkscope.controls import equal_budget_control as equal_budget_control
    from sinkscope.costs import attention_entropy as attention_entropy
    from sinkscope.costs import kl_to_untouched as kl_to_untouched
    from sinkscope.costs import next_token_loss as next_token_loss
    from sinkscope.costs import quantised_loss as quantised_loss
    from sinkscope.costs import residual_statistics as residual_statistics
    from sinkscope.costs import streaming_loss as streaming_loss
    from sinkscope.epe import EPE as EPE
    from sinkscope.epe import coordinate_alignment as coordinate_alignment
    from sinkscope.epe import epe_bias_alignment as epe_bias_alignment
    from sinkscope.epe import extract_epe as extract_epe
    from sinkscope.epe import query_bias as query_bias
    from sinkscope.errors import SinkscopeError as SinkscopeError
    from sinkscope.fidelity import epe_fidelity as epe_fidelity
    from sinkscope.loading import load_model as load_model
    from sinkscope.massive import MassiveCoordinates as MassiveCoordinates
    from sinkscope.massive import MeanStd as MeanStd
    from sinkscope.massive import MedianRatio as MedianRatio
    from sinkscope.massive import TopK as TopK
    from sinkscope.massive import find_massive_coordinates as find_massive_coordinates
    from sinkscope.measures import missing_mass as missing_mass
    from sinkscope.measures import patterns as patterns
    from sinkscope.measures import residual_norms as residual_norms
    from sinkscope.measures import sink_position as sink_position
    from sinkscope.measures import sink_rate as sink_rate
    from sinkscope.measures import sink_score as sink_score
    from sinkscope.measures import value_norms as value_norms
    from sinkscope.model import ModelView as ModelView
    from sinkscope.model import model_view as model_view
    from sinkscope.model import register_model_view as register_model_view
    from sinkscope.prompts import Prompts as Prompts
    from sinkscope.prompts import TokenBatch as TokenBatch
    from sinkscope.prompts import load_prompts as load_prompts
    from sinkscope.prompts import token_batch as token_batch
    from sinkscope.reproduction import load_summary as load_summary
    from sinkscope.reproduction import reproduce as reproduce
    from sinkscope.scores import ScoreTerms as ScoreTerms
    from sinkscope.scores import decompose_scores as decompose_scores
    from sinkscope.scores import shift_by_coordinate as shift_by_coordinate
    from sinkscope.scores import shift_share as shift_share
    from sinkscope.scores import source_agnostic_shift as source_agnostic_shift
    from sinkscope.sites import Site as Site
    from sinkscope.sweep import HeadSweep as HeadSweep
    from sinkscope.sweep import head_sweep as head_sweep

__version__ = "0.1.0"

_HOMES = {
    "ablations": ("Ablation", "PAPER_CONDITIONS"),
    "bench": ("MitigationBench", "default_mitigations", "mitigation_bench"),
    "controls": ("equal_budget_control",),
    "costs": (
        "attention_entropy",
        "kl_to_untouched",
        "next_token_loss",
        "quantised_loss",
        "residual_statistics",
        "streaming_loss",
    ),
    "circuits": ("Survey", "survey"),
    "epe": (
        "EPE",
        "coordinate_alignment",
        "epe_bias_alignment",
        "extract_epe",
        "query_bias",
    ),
    "errors": ("SinkscopeError",),
    "fidelity": ("epe_fidelity",),
    "loading": ("load_model",),
    "massive": (
        "MassiveCoordinates",
        "MeanStd",
        "MedianRatio",
        "TopK",
        "find_massive_coordinates",
    ),
    "measures": (
        "missing_mass",
        "patterns",
        "residual_norms",
        "sink_position",
        "sink_rate",
        "sink_score",
        "value_norms",
    ),
    "model": ("ModelView", "model_view", "register_model_view"),
    "prompts": ("Prompts", "TokenBatch", "load_prompts", "token_batch"),
    "reproduction": ("load_summary", "reproduce"),
    "scores": (
        "ScoreTerms",
        "decompose_scores",
        "shift_by_coordinate",
        "shift_share",
        "source_agnostic_shift",
    ),
    "sites": ("Site",),
    "sweep": ("HeadSweep", "head_sweep"),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}
_MODULES = ("ablations", "experiments", "metrics", "mitigations", "plots", "published", "testing")

__all__ = sorted([*_HOME_OF, "ablations", "experiments", "mitigations", "plots"])  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"sinkscope.{name}")
    if name in _HOME_OF:
        return getattr(importlib.import_module(f"sinkscope.{_HOME_OF[name]}"), name)
    raise AttributeError(f"module 'sinkscope' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
