"""The paper's whole set of experiments on one model, in the fewest passes, with provenance."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import platform
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import sinkscope
from sinkscope.capture import Progress, Total, require_progress
from sinkscope.display import HtmlTable
from sinkscope.epe import epe_found_once
from sinkscope.errors import InvalidInputError, NotApplicableError
from sinkscope.experiments._engine import Experiment, run_experiments
from sinkscope.experiments.attention_maps import AttentionMaps, AttentionMapsExperiment
from sinkscope.experiments.coordinate_alignment import (
    CoordinateAlignment,
    CoordinateAlignmentExperiment,
)
from sinkscope.experiments.delta import Delta, DeltaExperiment
from sinkscope.experiments.epe_bias_alignment import EpeBiasAlignment, EpeBiasAlignmentExperiment
from sinkscope.experiments.epe_fidelity import EpeFidelity, EpeFidelityExperiment
from sinkscope.experiments.massive_activations import (
    MassiveActivations,
    MassiveActivationsExperiment,
)
from sinkscope.experiments.score_terms import QueryTerms, ScoreTermsExperiment
from sinkscope.experiments.table1 import Table1, Table1Experiment
from sinkscope.model import ModelView, model_view
from sinkscope.partial import FOLDER, Partial, Processes, discard
from sinkscope.prompts import PAPER_LENGTH, PAPER_SEED, TokenBatch, require_batch
from sinkscope.published import applies_to, published
from sinkscope.results import (
    Result,
    as_path,
    claimed,
    dump_json,
    read_json,
    require_writable,
    write_text,
)

SCHEMA_VERSION = 1
_PACKAGES = ("torch", "transformers", "transformer-lens", "numpy")


@dataclass(frozen=True, eq=False)
class Reproduction(HtmlTable):
    """All results of one run. A part that the model lacks leaves its result None.

    Attributes:
        provenance: model, weights hash, versions, dtype, prompts and the like.
        not_applicable: result name -> why this model has no such result.
    """

    provenance: Mapping[str, Any]
    table1: Table1
    attention_maps: AttentionMaps
    delta: Delta | None
    epe_fidelity: EpeFidelity | None
    coordinate_alignment: CoordinateAlignment | None
    epe_bias_alignment: EpeBiasAlignment | None
    massive_activations: MassiveActivations | None
    score_terms: QueryTerms | None
    not_applicable: Mapping[str, str]

    def overview(self) -> list[tuple[str, str]]:
        p = self.provenance
        ran = ("ran", f"{p['model']} on {p['n_prompts']} prompts from {p['prompts']}")
        return [ran, *self.table1.overview()]

    @property
    def results(self) -> dict[str, Result]:
        """The results that there are, by name."""
        named = {
            "table1": self.table1,
            "delta": self.delta,
            "epe_fidelity": self.epe_fidelity,
            "coordinate_alignment": self.coordinate_alignment,
            "epe_bias_alignment": self.epe_bias_alignment,
            "massive_activations": self.massive_activations,
            "score_terms": self.score_terms,
            "attention_maps": self.attention_maps,
        }
        return {name: result for name, result in named.items() if result is not None}

    def to_dict(self) -> dict[str, Any]:
        """Everything that goes into results.json."""
        content: dict[str, Any] = {
            "schema": SCHEMA_VERSION,
            "provenance": dict(self.provenance),
            "not_applicable": dict(self.not_applicable),
        }
        content |= {name: result.summary() for name, result in self.results.items()}
        if self.table1.beside_published:
            content["published"] = published()
            content["difference"] = self._differences()
        return content

    def _differences(self) -> dict[str, Any]:
        """Ours minus the published figures, where both are."""
        ours = published()
        difference: dict[str, Any] = {}
        if self.coordinate_alignment is not None:
            means = self.coordinate_alignment.means
            difference["gamma_mean"] = {k: means[k] - v for k, v in ours["gamma_mean"].items()}
        if self.epe_fidelity is not None:
            difference["fidelity"] = {
                form: self.epe_fidelity.percentiles(form).T - ours["fidelity"][form]
                for form in ours["fidelity"]
            }
        if self.delta is not None:
            difference["delta"] = self.delta.percentiles.transpose(1, 2, 0) - ours["delta"]
        return difference

    def save(self, directory: str | Path) -> Path:
        """Write results.json, table1.csv and the arrays behind them.

        Raises:
            WriteError: the directory or a file can't be written; files already there stay whole.
        """
        root = as_path(directory)
        with claimed(root, wait=True):  # two runs that end at once do not mix their files
            for result in self.results.values():
                result.save(root / "arrays")
            write_text(root / "table1.csv", self.table1.to_dataframe().to_csv(index=False))
            write_text(root / "results.json", dump_json(self.to_dict()))
        return root


def load_summary(path: str | Path) -> dict[str, Any]:
    """What a run's results.json says, as plain values; the arrays load by their own classes.

    Args:
        path: results.json, or the directory that it is in.

    Raises:
        LoadError: not there, not JSON, or not what this version writes (`results.schema.json`
            in the package is the JSON Schema); the file is read as data and never run.
    """
    file = as_path(path)
    with suppress(OSError):  # as of a name that is too long, of which reading will tell
        file = file / "results.json" if file.is_dir() else file
    text = (resources.files("sinkscope") / "results.schema.json").read_text("utf-8")
    return read_json(file, json.loads(text), "results.json")


@epe_found_once()
def reproduce(
    model: Any,
    batch: TokenBatch,
    *,
    prompts_source: str = "given",
    out: str | Path | None = None,
    batch_size: int | None = None,
    total: Total | None = None,
    progress: Progress | None = None,
    group: Processes | None = None,
    keep_partial: bool = False,
) -> Reproduction:
    """Run all of the paper's experiments; each distinct ablation runs once for all of them.

    The untouched model's pass also checks the score decomposition in every layer, head and
    pair. What the model lacks is left out with the reason.

    With `out`, each pass over each chunk is stored there as it ends, in `.partial`. A run that
    was stopped goes on from these pieces when it is started again with the same model, prompts
    and arguments, and gives the same files. They are removed at the end. Hooks that are on the
    model already act in the run as they do in any; whether they are the same again nobody can
    tell, so that a run with hooks is never taken up.

    Args:
        model: a hooked model or its view.
        batch: the prompts.
        prompts_source: where they are from, for the record; "paper" with GPT-2 124M sets the
            published numbers beside the run's own.
        out: a directory to save into; nothing is written if None.
        batch_size: rows per forward pass; all at once if None.
        total: told at the start how many prompts will run over all passes.
        progress: told how many prompts are done.
        group: the processes that share the work, from `partial.processes`; each needs the same
            `out`, gets the whole result, and the first alone writes it.
        keep_partial: leave the pieces, for `discard_partial` once all else is written.

    Raises:
        InvalidInputError: `out` holds pieces of another run; several processes without `out`.
        WriteError: `out` can't be written, or another run writes there; found out before
            anything runs.
        IdentityError: the decomposition does not add up on this model.
        ProcessedWeightsError: the weights were folded or centred.
    """
    view = model_view(model)
    require_batch(batch)
    require_progress(progress, total)
    view.require_raw_weights("The paper's set of experiments")
    group = Processes() if group is None else group
    if out is None and group.count > 1:
        raise InvalidInputError(
            "Processes share a run through its directory",
            expected="out, a directory that all of them see",
            got="None",
            fix="pass out=...",
        )
    if out is not None:
        require_writable(as_path(out))
    papers_length = bool((batch.lengths == PAPER_LENGTH).all())
    beside = papers_length and applies_to(view, prompts_source)
    not_applicable: dict[str, str] = {}
    made: dict[str, Experiment] = {
        "table1": Table1Experiment(view, batch, beside_published=beside),
        "attention_maps": AttentionMapsExperiment(view, batch),
    }
    optional: dict[str, Callable[[ModelView, TokenBatch], Experiment]] = {
        "delta": DeltaExperiment,
        "epe_fidelity": EpeFidelityExperiment,
        "coordinate_alignment": CoordinateAlignmentExperiment,
        "epe_bias_alignment": EpeBiasAlignmentExperiment,
        "massive_activations": MassiveActivationsExperiment,
        "score_terms": ScoreTermsExperiment,
    }
    for name, make in optional.items():
        try:
            made[name] = make(view, batch)
        except NotApplicableError as error:
            not_applicable[name] = str(error)
    record = provenance(view, batch, prompts_source, batch_size)
    hooks = view.own_hooks()
    identity = {**record, "parts": list(made), "device": view.device.type, "hooks": hooks}
    claim = claimed(as_path(out)) if out is not None and group.is_main else nullcontext()
    with claim:
        store = None
        if out is not None:
            store = Partial(as_path(out) / FOLDER, identity, group, resumable=not hooks)
        run_experiments(
            view,
            batch,
            list(made.values()),
            batch_size=batch_size,
            total=total,
            progress=progress,
            store=store,
        )
        results: dict[str, Any] = dict.fromkeys((*optional, *made))
        for name, experiment in made.items():
            try:
                results[name] = experiment.result()
            except NotApplicableError as error:
                if name not in optional:
                    raise
                not_applicable[name] = str(error)  # as only a run can tell
        reproduction = Reproduction(
            provenance=record,
            not_applicable=not_applicable,
            **results,
        )
        if out is not None and group.is_main:
            reproduction.save(out)
        if store is not None and not keep_partial:
            store.remove()
        return reproduction


def discard_partial(out: str | Path, group: Processes | None = None) -> None:
    """Remove the pieces of a run that is done, once every process is."""
    group = Processes() if group is None else group
    group.wait()
    if group.is_main:
        discard(as_path(out) / FOLDER)


def provenance(
    view: ModelView, batch: TokenBatch, prompts_source: str, batch_size: int | None
) -> dict[str, Any]:
    """What ran on what, so that a number can be traced and repeated."""
    ids = [row[keep].tolist() for row, keep in zip(batch.ids, batch.mask, strict=True)]
    return {
        "sinkscope": sinkscope.__version__,
        "model": view.name,
        "architecture": view.architecture,
        "weights_sha256": view.weights_hash(),
        "dtype": str(view.dtype).removeprefix("torch."),
        "device": str(view.device),
        "n_layers": view.n_layers,
        "n_heads": view.n_heads,
        "d_model": view.d_model,
        "n_ctx": view.n_ctx,
        "prompts": prompts_source,
        "n_prompts": len(batch),
        "prompt_lengths": [int(batch.lengths.min()), int(batch.lengths.max())],
        "lengths": batch.lengths.tolist(),
        "prompts_sha256": hashlib.sha256(json.dumps(ids).encode()).hexdigest(),
        "starts_with_bos": sum(batch.bos),
        "seed": PAPER_SEED,
        "batch_size": batch_size,
        "python": platform.python_version(),
        "packages": {name: importlib.metadata.version(name) for name in _PACKAGES},
    }
