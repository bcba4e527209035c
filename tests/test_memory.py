"""What is kept of a run, in bytes: results by prompt, and nothing that grows besides."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from models import hook, tiny_gpt2

import sinkscope as ss
from sinkscope.experiments import delta, epe_fidelity
from sinkscope.experiments.attention_maps import AttentionMapsExperiment
from sinkscope.experiments.delta import DeltaExperiment
from sinkscope.experiments.epe_fidelity import EpeFidelityExperiment
from sinkscope.experiments.score_terms import ScoreTermsExperiment
from sinkscope.experiments.table1 import Table1Experiment

LENGTH = 8
N_LAYERS, N_HEADS = 3, 3


@pytest.fixture(scope="module")
def model() -> Any:
    return hook(tiny_gpt2(n_layers=N_LAYERS, n_heads=N_HEADS), "bridge")


def batch_of(model: Any, n: int) -> ss.TokenBatch:
    generator = torch.Generator().manual_seed(0)
    return ss.token_batch(model, torch.randint(50, (n, LENGTH), generator=generator))


def tensors(value: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    """The tensors that an object holds, weights and models left out."""
    if id(value) in seen or isinstance(value, (ss.ModelView, torch.nn.Module, ss.EPE)):
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors(item, seen)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors(item, seen)
    elif hasattr(value, "__dict__") and not isinstance(value, (type, ss.TokenBatch)):
        yield from tensors(vars(value), seen)


def kept_bytes(experiment: Any) -> int:
    """Of the memory behind the tensors: a small view of a large tensor counts as the large one."""
    held = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for _, reader in experiment.requests()
        for tensor in tensors(reader, set())
    }
    return sum(held.values())


def growth(model: Any, make: Any) -> float:
    """Bytes by prompt that an experiment keeps, from two runs of different size."""
    sizes = {}
    for n in (4, 12):
        batch = batch_of(model, n)
        experiment = make(ss.model_view(model), batch)
        ss.experiments._engine.run_experiments(model, batch, [experiment], batch_size=2)
        sizes[n] = kept_bytes(experiment)
    return (sizes[12] - sizes[4]) / 8


@pytest.mark.parametrize(
    ("make", "numbers"),
    [
        (Table1Experiment, 10 * N_LAYERS * N_HEADS),
        (DeltaExperiment, N_LAYERS * N_HEADS * LENGTH),
        (EpeFidelityExperiment, 3 * LENGTH),
        (AttentionMapsExperiment, 0),
        (ScoreTermsExperiment, 0),
    ],
)
def test_an_experiment_keeps_its_results_alone(model: Any, make: Any, numbers: int) -> None:
    assert growth(model, make) == numbers * 8, "float64"


def test_delta_stops_growing(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta, "MAX_PROMPTS", 4)
    assert growth(model, DeltaExperiment) == 0


@pytest.mark.parametrize(("n", "every"), [(4, 1), (5, 2), (8, 2), (9, 3), (11, 3)])
@pytest.mark.parametrize("batch_size", [1, 2, 3, None])
def test_the_sample_of_delta_is_every_kth_prompt(
    model: Any, monkeypatch: pytest.MonkeyPatch, n: int, every: int, batch_size: int | None
) -> None:
    batch = batch_of(model, n)
    whole = delta.run(model, batch, batch_size=batch_size)
    monkeypatch.setattr(delta, "MAX_PROMPTS", 4)
    sample = delta.run(model, batch, batch_size=batch_size)
    assert (whole.every, sample.every) == (1, every)
    assert np.array_equal(sample.values, whole.values[::every])
    assert sample.summary()["every"] == every


def test_the_block_forms_in_chunks_are_those_of_the_whole(model: Any) -> None:
    batch = batch_of(model, 5)
    in_chunks = epe_fidelity.run(model, batch, batch_size=2)
    for form in ("block", "causal_block"):
        whole = ss.epe_fidelity(model, batch, form)
        torch.testing.assert_close(torch.from_numpy(getattr(in_chunks, form)), whole)
        torch.testing.assert_close(ss.epe_fidelity(model, batch, form, batch_size=3), whole)
