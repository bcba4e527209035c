"""Every number that the paper's own code gives on the reference models, to 1e-4."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from models import hooked_directory

import sinkscope as ss

TOLERANCE = 1e-4
MODELS = {"random12": range(3, 11), "planted6": range(3, 6)}
ONE_AT_A_TIME, ALL_AT_ONCE = 1, None


class Reference:
    """A reference model, hooked, with its prompts and the expected numbers."""

    def __init__(self, path: Path, kind: str) -> None:
        self.model = hooked_directory(path, kind)
        self.batch = ss.token_batch(self.model, json.loads((path / "tokens.json").read_text()))
        self.expected = json.loads((path / "expected.json").read_text())
        self.arrays = np.load(path / "expected.npz")
        self.conditions: dict[str, Any] = {
            entry["name"]: (key, entry) for key, entry in self.expected["interventions"].items()
        }


@pytest.fixture(params=list(MODELS))
def ref(request: pytest.FixtureRequest, reference: Path, kind: str) -> Reference:
    return Reference(reference / request.param, kind)


@pytest.fixture(params=[ONE_AT_A_TIME, ALL_AT_ONCE], ids=["one", "all"])
def batch_size(request: pytest.FixtureRequest) -> int | None:
    return request.param


def close(ours: Any, theirs: Any) -> None:
    np.testing.assert_allclose(np.asarray(ours), np.asarray(theirs), rtol=0, atol=TOLERANCE)


def test_conditions_are_the_papers(ref: Reference) -> None:
    assert list(ss.PAPER_CONDITIONS) == list(ref.conditions)


def test_sink_scores_of_every_prompt(ref: Reference, batch_size: int | None) -> None:
    mid = range(*ref.expected["layer_range"])
    assert mid in MODELS.values()
    table = ss.experiments.table1.run(ref.model, ref.batch, batch_size=batch_size)
    for name, scores in zip(table.conditions, table.scores, strict=True):
        entry = ref.conditions[name][1]
        close(scores[:, list(mid)].mean((1, 2)), entry["mid"])
        close(scores.mean((1, 2)), entry["all"])


def test_patterns_of_the_first_prompt(ref: Reference, batch_size: int | None) -> None:
    for name, ablation in ss.PAPER_CONDITIONS.items():
        key = ref.conditions[name][0]
        ours = ss.patterns(ref.model, ref.batch, ablation, batch_size=batch_size)[0]
        close(ours, ref.arrays[f"pattern_{key}"])


def test_fidelity(ref: Reference, batch_size: int | None) -> None:
    result = ss.experiments.epe_fidelity.run(ref.model, ref.batch, batch_size=batch_size)
    close(result.mlp, ref.arrays["fidelity_mlp"])
    close(result.block, ref.arrays["fidelity_full"])
    for form, name in (("mlp", "mlp"), ("block", "full")):
        for ours, p in zip(result.percentiles(form), ("10", "50", "90"), strict=True):
            close(ours, ref.expected[f"epe_fidelity_{name}_p"][p])


def test_delta(ref: Reference, batch_size: int | None) -> None:
    result = ss.experiments.delta.run(ref.model, ref.batch, batch_size=batch_size)
    for ours, p in zip(result.percentiles, ("10", "50", "90"), strict=True):
        close(ours, ref.expected["bq_k_p"][p])
    by_coordinate = ss.shift_by_coordinate(ref.model, ref.batch.select([0]))
    close(by_coordinate.sum(-1)[0], ref.arrays["bq_k_raw0"])


def test_weights(ref: Reference) -> None:
    epe = ss.extract_epe(ref.model)
    close(epe.vectors, ref.arrays["epe"])
    close(ss.coordinate_alignment(ref.model).abs(), ref.arrays["gamma"])
    cosines = ref.arrays["epe_bias_cos"]
    close(ss.epe_bias_alignment(ref.model, n_positions=cosines.shape[-1]), cosines)
    massive = ss.find_massive_coordinates(epe.vectors[0], ss.MeanStd(3.0))
    assert list(massive.coordinates) == ref.expected["massive_mean3std_population"]
    top = ss.find_massive_coordinates(epe.vectors[0], ss.TopK(3))
    assert top.indices.tolist() == ref.expected["massive_top3"]
