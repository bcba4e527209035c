"""The demo model has the circuit it says it has: the acceptance bars over all demo prompts."""

from __future__ import annotations

import json
import re
import sysconfig
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import sinkscope as ss
from sinkscope.prompts import fold_whitespace

DEMO = Path(ss.__file__).parent / "demo"
LENGTH = 40


@pytest.fixture(scope="module")
def model() -> Any:
    return ss.load_model("demo")


@pytest.fixture(scope="module")
def prompts(model: Any) -> ss.Prompts:
    return ss.load_prompts(model, "demo")


@pytest.fixture(scope="module")
def batch(model: Any, prompts: ss.Prompts) -> ss.TokenBatch:
    folded = replace(prompts, texts=tuple(fold_whitespace(text) for text in prompts.texts))
    return ss.token_batch(model, folded, length=LENGTH)


@pytest.fixture(scope="module")
def reproduction(model: Any, batch: ss.TokenBatch) -> Any:
    return ss.reproduce(model, batch, prompts_source="demo", batch_size=32)


@pytest.fixture(scope="module")
def training() -> dict[str, Any]:
    return json.loads((DEMO / "training.json").read_text("utf-8"))


# --- what is shipped ----------------------------------------------------------------------


def test_the_files_are_small_and_hold_no_pickle() -> None:
    files = [path for path in DEMO.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    assert {"config.json", "model.safetensors", "tokenizer.json", "prompts.jsonl"} <= {
        path.name for path in files
    }
    assert sum(path.stat().st_size for path in files) <= 8_000_000
    assert not [path.name for path in files if path.suffix in {".bin", ".pt", ".pkl", ".pth"}]


def test_the_readme_says_that_the_circuit_was_planted() -> None:
    text = (DEMO / "README.md").read_text("utf-8").lower()
    assert "planted" in text
    assert "evidence" in text


def test_prompts_of_three_corpora_long_enough_for_40_tokens(
    model: Any, prompts: ss.Prompts
) -> None:
    counts = Counter(prompts.corpora)
    assert set(counts) == {"natural_language", "math", "code"}
    assert min(counts.values()) >= 30
    assert len(set(prompts.texts)) == len(prompts)
    for text in prompts.texts:
        for form in (text, fold_whitespace(text)):
            assert ss.token_batch(model, [form], length=LENGTH).lengths.tolist() == [LENGTH]


def test_prompts_are_not_from_the_training_text(prompts: ss.Prompts) -> None:
    """Whitespace is folded on both sides, and a prompt's two halves are looked for by themselves.

    The training text is the standard library; another Python's is close enough to tell.
    """
    folded = [re.sub(r"\s+", " ", text) for text in prompts.texts]
    pieces = {half for text in folded for half in (text[: len(text) // 2], text[len(text) // 2 :])}
    assert min(map(len, pieces)) > 30
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings"}
    files = [p for p in root.rglob("*.py") if not skipped & set(p.relative_to(root).parts)]
    assert len(files) > 300
    library = "\0".join(
        re.sub(r"\s+", " ", path.read_text("utf-8", errors="ignore")) for path in files
    )
    assert "def namedtuple(typename, field_names" in library, "the search would find something"
    assert [piece for piece in pieces if piece in library] == []


# --- the circuit --------------------------------------------------------------------------


def test_epe_shows_the_planted_coordinates_and_no_other(
    model: Any, training: dict[str, Any]
) -> None:
    plant = training["plant"]
    epe = ss.extract_epe(model)
    assert not epe.through_ln
    massive = ss.find_massive_coordinates(epe.vectors[0], ss.MeanStd(3.0))
    assert massive.coordinates == tuple(sorted(plant["coordinates"]))
    signs = dict(zip(plant["coordinates"], plant["signs"], strict=True))
    found = dict(zip(massive.indices.tolist(), massive.values.tolist(), strict=True))
    assert {c: 1 if value > 0 else -1 for c, value in found.items()} == signs
    others = [ss.find_massive_coordinates(row, ss.MeanStd(3.0)) for row in epe.vectors[1:]]
    assert not any(set(signs) <= set(other.coordinates) for other in others)


def pooled(reproduction: Any) -> dict[str, float]:
    frame = reproduction.table1.to_dataframe()
    frame = frame[frame["corpus"] == "all"]
    assert set(frame["n"]) == {len(reproduction.table1.corpora)}
    return dict(zip(frame["condition"], frame["sink_score"], strict=True))


def test_there_is_a_sink(model: Any, batch: ss.TokenBatch, reproduction: Any) -> None:
    baseline = pooled(reproduction)["Baseline"]
    mid = list(ss.model_view(model).mid_layers)
    scores = ss.sink_score(model, batch, batch_size=32)
    assert scores.shape == (len(batch), len(mid), 4)
    assert float(scores.double().mean()) == pytest.approx(baseline, abs=1e-6)
    assert baseline >= 0.25
    positions = ss.sink_position(model, batch, layers=mid, batch_size=32)
    assert float((positions == 0).double().mean()) > 0.5


@pytest.mark.parametrize(
    ("condition", "lowest", "highest"),
    [
        ("No Query Bias", 0.0, 0.7),
        ("Zero Top-3 Wk", 0.0, 0.7),
        ("Remove First PE", 0.0, 0.5),
        ("Swap EPE", 0.0, 0.5),
        ("No MLP", 0.0, 0.5),
        ("No PE", 0.0, 0.5),
        ("Zero Random Wk", 0.9, 1.1),
        ("Nullify BOS Token", 0.9, 1.1),
        ("Swap PE", 0.9, 1.1),
    ],
)
def test_the_papers_interventions_do_what_the_paper_says(
    reproduction: Any, condition: str, lowest: float, highest: float
) -> None:
    scores = pooled(reproduction)
    assert lowest <= scores[condition] / scores["Baseline"] <= highest


def test_each_corpus_has_the_sink(reproduction: Any) -> None:
    frame = reproduction.table1.to_dataframe()
    baselines = frame[frame["condition"] == "Baseline"].set_index("corpus")["sink_score"]
    assert set(baselines.index) == {"natural_language", "math", "code", "all"}
    assert (baselines >= 0.2).all()


def test_the_massive_coordinates_carry_the_shift(
    model: Any, batch: ss.TokenBatch, reproduction: Any, training: dict[str, Any]
) -> None:
    means = reproduction.coordinate_alignment.means
    assert means["massive"] > 3 * means["others"]
    some = batch.select(range(0, len(batch), 12))
    share = ss.shift_share(model, some, training["plant"]["coordinates"])[..., 0]
    whole = ss.source_agnostic_shift(model, some, "score")[..., 0]
    scale = 1 / ss.model_view(model).d_head ** 0.5
    planted = slice(1, None)  # layer 0 has no plant
    assert float((share * scale)[:, planted].mean() / whole[:, planted].mean()) > 0.5
    assert len(reproduction.delta.separated_layers) >= 3


def test_identities_hold_over_all_prompts(reproduction: Any) -> None:
    terms = reproduction.score_terms
    assert 0 < terms.max_error <= terms.tolerance
    assert 0 < terms.pattern_error <= terms.tolerance
    assert terms.tolerance < 1e-3
    assert reproduction.not_applicable == {}
    assert all(
        np.isfinite(value).all()
        for result in reproduction.results.values()
        for value in vars(result).values()
        if isinstance(value, np.ndarray)
    )


def test_loading_leaves_no_trace_of_half_precision(model: Any) -> None:
    """The weights are stored in half precision and computed with in single."""
    view = ss.model_view(model)
    assert view.dtype == torch.float32
    for name, weight in model.original_model.named_parameters():
        torch.testing.assert_close(weight, weight.half().float(), rtol=0, atol=0, msg=name)
