"""Each experiment gives the numbers of the measures it is made of, alone or in one run."""

from __future__ import annotations

import csv
import hashlib
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from models import hook, tiny_gpt2
from transformers import LlamaConfig, LlamaForCausalLM

import sinkscope as ss
from sinkscope.ablations import Composition
from sinkscope.errors import InvalidInputError, NotApplicableError, ProcessedWeightsError
from sinkscope.experiments import (
    attention_maps,
    coordinate_alignment,
    delta,
    epe_bias_alignment,
    epe_fidelity,
    massive_activations,
    score_terms,
    table1,
)
from sinkscope.published import applies_to, published

CORPORA = ["a", "b", "a", "b", "a"]
PROMPTS = torch.arange(5 * 8).reshape(5, 8) * 7 % 50


@pytest.fixture(scope="module")
def model() -> Any:
    return hook(tiny_gpt2(n_layers=5), "bridge")


@pytest.fixture(scope="module")
def batch(model: Any) -> ss.TokenBatch:
    return ss.token_batch(model, PROMPTS, corpora=CORPORA)


@pytest.fixture(scope="module")
def reproduction(model: Any, batch: ss.TokenBatch) -> Any:
    return ss.reproduce(model, batch)


def llama() -> Any:
    """No query bias, no learned positions."""
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=12,
        intermediate_size=16,
        num_hidden_layers=3,
        num_attention_heads=3,
        num_key_value_heads=3,
        max_position_embeddings=16,
    )
    return ss.load_model(LlamaForCausalLM(config).eval())


# --- Table 1 ------------------------------------------------------------------------------


def test_table1_against_the_measures(model: Any, batch: ss.TokenBatch) -> None:
    table = table1.run(model, batch)
    mid = slice(1, 4)  # five layers: without the first quarter and the last one
    assert table.mid_layers == (1, 2, 3)
    frame = table.to_dataframe()
    assert list(frame.columns) == [
        *("corpus", "condition", "n", "sink_score", "stderr", "relative", "all_layers")
    ]
    assert list(zip(frame["corpus"], frame["condition"], strict=True)) == [
        (corpus, name) for corpus in ("a", "b", "all") for name in ss.PAPER_CONDITIONS
    ]
    rows = {(r["corpus"], r["condition"]): r for r in frame.to_dict("records")}
    for n, (name, ablation) in enumerate(ss.PAPER_CONDITIONS.items()):
        scores = ss.sink_score(model, batch, ablation, layers=range(5)).numpy()
        np.testing.assert_allclose(table.scores[n], scores, atol=1e-12)
        for corpus, members in {"a": [0, 2, 4], "b": [1, 3], "all": [0, 1, 2, 3, 4]}.items():
            row = rows[corpus, name]
            per_prompt = [scores[p, mid].mean() for p in members]
            mean = sum(per_prompt) / len(members)
            variance = sum((x - mean) ** 2 for x in per_prompt) / (len(members) - 1)
            assert row["n"] == len(members)
            assert row["sink_score"] == pytest.approx(mean)
            assert row["stderr"] == pytest.approx(math.sqrt(variance / len(members)))
            assert row["relative"] == pytest.approx(mean / rows[corpus, "Baseline"]["sink_score"])
            assert row["all_layers"] == pytest.approx(scores[members].mean())


def test_table1_of_one_prompt_has_no_standard_error(model: Any, batch: ss.TokenBatch) -> None:
    frame = table1.run(model, batch.select([1]), {"Untouched": Composition()}).to_dataframe()
    assert list(frame["corpus"]) == ["b", "all"]
    assert frame["stderr"].isna().all()
    assert list(frame["relative"]) == [1.0, 1.0]


def test_a_corpus_named_all_is_not_counted_twice(model: Any, batch: ss.TokenBatch) -> None:
    for corpora in (("all",) * 5, ("x", "all", "x", "all", "x")):
        named = replace(batch, corpora=corpora)
        frame = table1.run(model, named, {"Untouched": Composition()}).to_dataframe()
        assert list(frame["corpus"]) == [*(["x"] if "x" in corpora else []), "all"]
        assert list(frame["n"])[-1] == 5


def test_conditions_of_ones_own(model: Any, batch: ss.TokenBatch) -> None:
    mine = {"half": ss.ablations.SkipMLP(layers=0), "untouched": Composition()}
    table = table1.run(model, batch, mine)
    assert table.conditions == ("half", "untouched")
    row = table.to_dataframe().set_index(["corpus", "condition"]).loc["all", "untouched"]
    assert row["relative"] == pytest.approx(
        table.scores[1][:, 1:4].mean() / table.scores[0][:, 1:4].mean()
    )


@pytest.mark.parametrize("run", [table1.run, attention_maps.run])
def test_no_condition_is_an_error(run: Any, model: Any, batch: ss.TokenBatch) -> None:
    with pytest.raises(InvalidInputError, match="at least one"):
        run(model, batch, {})
    with pytest.raises(NotApplicableError, match=r"None of the conditions.*query bias"):
        run(llama(), batch, {"No Query Bias": ss.ablations.ZeroQueryBias()})


# --- the others ---------------------------------------------------------------------------


def test_delta(model: Any, batch: ss.TokenBatch) -> None:
    result = delta.run(model, batch)
    expected = ss.source_agnostic_shift(model, batch).numpy()
    np.testing.assert_array_equal(result.values, expected)
    frame = result.to_dataframe()
    assert list(frame.columns) == ["layer", "position", "p10", "p50", "p90", "mean", "std"]
    assert len(frame) == 5 * 8
    row = frame.set_index(["layer", "position"]).loc[3, 2]
    pool = expected[:, 3, :, 2].ravel()
    numbers = [*np.percentile(pool, [10, 50, 90]), pool.mean(), pool.std()]
    assert list(row) == pytest.approx(numbers)
    scaled = delta.run(model, batch, "score")
    assert scaled.convention == "score"
    assert scaled != result


def test_layers_where_position_0_stands_apart(model: Any, batch: ss.TokenBatch) -> None:
    values = np.zeros((10, 3, 2, 4))
    values[:, 0, :, 0] = 5.0  # clearly apart
    values[:, 1, :, 0] = 5.0
    values[:, 1, :, 2] = np.linspace(0, 9, 10)[:, None]  # its p90 reaches above 5
    result = delta.Delta(values=values)
    assert result.separated_layers == (0,)
    assert result.summary()["separated_layers"] == (0,)
    single = delta.run(model, ss.token_batch(model, [[1], [2]]))
    assert single.separated_layers == ()
    assert (single.values == 0).all()


def test_fidelity(model: Any, batch: ss.TokenBatch) -> None:
    result = epe_fidelity.run(model, batch)
    frame = result.to_dataframe().set_index(["through", "position"])
    assert list(frame.columns) == ["p10", "p50", "p90", "mean", "std"]
    for form in ("mlp", "block", "causal_block"):
        expected = ss.epe_fidelity(model, batch, form).numpy()
        np.testing.assert_allclose(getattr(result, form), expected, atol=1e-12)
        column = expected[:, 6]
        numbers = [*np.percentile(column, [10, 50, 90]), column.mean(), column.std()]
        assert list(frame.loc[form, 6]) == pytest.approx(numbers)
        assert result.summary()[form]["median"] == pytest.approx(np.median(expected))
    assert len(frame) == 3 * 8


def test_coordinate_alignment(model: Any) -> None:
    result = coordinate_alignment.run(model, rule=ss.TopK(2))
    gamma = ss.coordinate_alignment(model).numpy()
    found = ss.find_massive_coordinates(ss.extract_epe(model).vectors[0], ss.TopK(2)).coordinates
    assert result.massive == found
    frame = result.to_dataframe()
    assert list(frame.columns) == ["layer", "head", "coordinate", "gamma", "massive"]
    assert len(frame) == 5 * 3 * 12
    row = frame.set_index(["layer", "head", "coordinate"]).loc[4, 1, 7]
    assert row["gamma"] == gamma[4, 1, 7]
    assert set(frame["coordinate"][frame["massive"]]) == set(found)
    others = [d for d in range(12) if d not in found]
    assert result.means["massive"] == pytest.approx(np.abs(gamma[..., list(found)]).mean())
    assert result.means["others"] == pytest.approx(np.abs(gamma[..., others]).mean())


def test_no_massive_coordinate_has_no_mean(model: Any) -> None:
    result = coordinate_alignment.run(model, rule=ss.MeanStd(100.0))
    assert result.massive == ()
    assert math.isnan(result.means["massive"])
    assert result.means["others"] > 0


def test_epe_bias_alignment(model: Any, batch: ss.TokenBatch) -> None:
    result = epe_bias_alignment.run(model, batch)
    cosines = ss.epe_bias_alignment(model, n_positions=8).numpy()
    np.testing.assert_array_equal(result.cosines, cosines)
    frame = result.to_dataframe()
    assert list(frame.columns) == ["layer", "head", "position", "cosine"]
    row = frame.set_index(["layer", "head", "position"]).loc[(2, 1, 5)]
    assert row["cosine"] == cosines[2, 1, 5]
    assert result.summary()["median_others"] == pytest.approx(np.median(cosines[..., 1:]))
    assert epe_bias_alignment.run(model).cosines.shape[-1] == 16, "the whole context, under 40"


def test_massive_activations(model: Any) -> None:
    rules = (ss.TopK(2), ss.MeanStd(1.0))
    result = massive_activations.run(model, rules=rules)
    epe = ss.extract_epe(model).vectors[0]
    frame = result.to_dataframe()
    assert list(frame.columns) == ["coordinate", "value", "TopK(k=2)", "MeanStd(k=1.0)"]
    assert list(frame["value"]) == epe.tolist()
    for rule in rules:
        found = ss.find_massive_coordinates(epe, rule)
        assert tuple(frame["coordinate"][frame[repr(rule)]]) == found.coordinates
        assert result.coordinates(rule) == found.coordinates
        summary = result.summary()["rules"][repr(rule)]
        assert summary["threshold"] == found.threshold
        assert list(summary["values"]) == [float(epe[d]) for d in found.coordinates]
    assert result.coordinates(ss.TopK(4)) == (
        ss.find_massive_coordinates(epe, ss.TopK(4)).coordinates
    )


def test_attention_maps(model: Any, batch: ss.TokenBatch) -> None:
    chosen = {name: ss.PAPER_CONDITIONS[name] for name in ("No MLP", "Baseline")}
    result = attention_maps.run(model, batch, chosen, layers=(3, 1))
    for n, ablation in enumerate(chosen.values()):
        expected = ss.patterns(model, batch.select([0]), ablation, layers=[3, 1])[0].numpy()
        np.testing.assert_allclose(result.patterns[n], expected, atol=1e-12)
    frame = result.to_dataframe()
    assert list(frame.columns) == ["condition", "layer", "head", "query", "key", "attention"]
    assert len(frame) == 2 * 2 * 3 * 36
    assert (frame["key"] <= frame["query"]).all()
    row = frame.set_index(["condition", "layer", "head", "query", "key"])
    assert row.loc["Baseline", 1, 2, 5, 4]["attention"] == result.patterns[1, 1, 2, 5, 4]
    late = result.patterns[0, 0, :, 4:, 0].mean()
    assert result.summary()["sink_score_by_layer"]["No MLP"][0] == pytest.approx(late)
    assert result.tokens == tuple(str(i) for i in PROMPTS[0].tolist())


def test_score_terms(model: Any, batch: ss.TokenBatch) -> None:
    result = score_terms.run(model, batch)
    terms = ss.decompose_scores(model, batch)
    assert result.query == 7
    np.testing.assert_allclose(result.total, terms.total[0, :, :, 7].numpy(), atol=1e-12)
    frame = result.to_dataframe().set_index(["layer", "head", "key", "term"])
    assert list(frame.columns) == ["value"]
    for name in ("content", "query_bias", "key_bias", "bias_bias"):
        value = float(getattr(terms, name)[0, 2, 1, 7, 3])
        assert frame.loc[2, 1, 3, name]["value"] == pytest.approx(value)
    assert result.max_error == pytest.approx(terms.max_error, abs=1e-14)
    assert result.pattern_error <= result.tolerance


# --- padding, precision, passes -----------------------------------------------------------


@pytest.mark.parametrize("padding", ["left", "right"])
def test_padding_changes_no_number(padding: Any) -> None:
    model = hook(tiny_gpt2(), "bridge")
    rows = [PROMPTS[n, :size].tolist() for n, size in enumerate((8, 5))]
    padded = ss.reproduce(model, ss.token_batch(model, rows, padding=padding))
    for n, row in enumerate(rows):
        alone = ss.reproduce(model, ss.token_batch(model, [row]))
        size = len(row)
        pairs = [
            (padded.table1.scores[:, [n]], alone.table1.scores),
            (padded.delta.values[[n], ..., :size], alone.delta.values),
            *(
                (getattr(padded.epe_fidelity, f)[[n], :size], getattr(alone.epe_fidelity, f))
                for f in ("mlp", "block", "causal_block")
            ),
        ]
        for together, single in pairs:
            np.testing.assert_allclose(together, single, atol=1e-10)
        assert np.isnan(padded.delta.values[n, ..., size:]).all()
    short_first = ss.token_batch(model, rows[::-1], padding=padding)
    maps = attention_maps.run(model, short_first)
    np.testing.assert_allclose(maps.patterns, alone.attention_maps.patterns, atol=1e-10)
    assert maps.tokens == tuple(str(i) for i in rows[1])


def test_a_run_of_all_equals_each_alone(
    model: Any, batch: ss.TokenBatch, reproduction: Any
) -> None:
    runs = {name: getattr(ss.experiments, name).run for name in ss.experiments.EXPERIMENTS}
    assert list(reproduction.results) == list(dict.fromkeys(reproduction.results))
    assert set(reproduction.results) == set(runs)
    for name, together in reproduction.results.items():
        alone = runs[name](model, batch)
        for field, value in vars(together).items():
            if isinstance(value, np.ndarray):  # a map's single prompt runs alone: other rounding
                np.testing.assert_allclose(getattr(alone, field), value, atol=1e-12, err_msg=name)
            elif not isinstance(value, float):
                assert getattr(alone, field) == value, name


@pytest.mark.parametrize("batch_size", [2])
def test_chunks_change_no_number(
    model: Any, batch: ss.TokenBatch, reproduction: Any, batch_size: int
) -> None:
    chunked = ss.reproduce(model, batch, batch_size=batch_size)
    for name, whole in reproduction.results.items():
        for field, value in vars(whole).items():
            if isinstance(value, np.ndarray):
                np.testing.assert_allclose(
                    getattr(chunked.results[name], field), value, atol=1e-12, err_msg=name
                )


def test_one_pass_for_each_distinct_ablation(model: Any, batch: ss.TokenBatch) -> None:
    calls, told, done = [], [], []

    def count(tensor: torch.Tensor, hook: Any) -> None:
        calls.append(tensor.shape[0])

    view = ss.model_view(model)
    with view.hooks([(ss.Site("embed"), count)]):
        ss.reproduce(model, batch, batch_size=2, total=told.append, progress=done.append)
    # Over each chunk ten conditions, and the first block without its mask, with positions and
    # without.
    assert calls == [2] * 24 + [1] * 12
    assert told == [12 * 5]
    assert done == calls


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_runs_and_saves(dtype: torch.dtype, tmp_path: Path) -> None:
    model = hook(tiny_gpt2(dtype=dtype), "bridge")
    exact = hook(tiny_gpt2(dtype=dtype).double(), "bridge")
    batch = ss.token_batch(model, PROMPTS[:2])
    result = ss.reproduce(model, batch, out=tmp_path)
    expected = ss.reproduce(exact, batch)
    assert result.provenance["dtype"] == str(dtype).removeprefix("torch.")
    np.testing.assert_allclose(result.table1.scores, expected.table1.scores, atol=0.02)
    np.testing.assert_allclose(
        result.coordinate_alignment.gamma, expected.coordinate_alignment.gamma, atol=0.05
    )
    for saved in result.results.values():
        assert type(saved).load(tmp_path / "arrays") == saved


# --- what is written ----------------------------------------------------------------------


def strict_json(path: Path) -> Any:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    return json.loads(path.read_text("utf-8"), parse_constant=refuse)


def test_results_json_and_table1_csv(
    model: Any, batch: ss.TokenBatch, reproduction: Any, tmp_path: Path
) -> None:
    ss.reproduce(model, batch.select([0]), out=tmp_path / "one")  # standard errors are NaN
    one = strict_json(tmp_path / "one" / "results.json")
    assert {row["stderr"] for row in one["table1"]["rows"]} == {None}

    reproduction.save(tmp_path)
    content = strict_json(tmp_path / "results.json")
    assert set(content) == {"schema", "provenance", "not_applicable", *reproduction.results}
    rows = content["table1"]["rows"]
    text = (tmp_path / "table1.csv").read_text()
    assert text.startswith("corpus,condition,n,sink_score,stderr,relative,all_layers\n")
    read = list(csv.DictReader(text.splitlines()))
    assert len(read) == len(rows) == 30
    for written, row in zip(read, rows, strict=True):
        assert list(row) == list(written)
        assert all(str(value) == written[name] for name, value in row.items())
    per_prompt = content["table1"]["per_prompt"]["No PE"]
    assert per_prompt["mid"] == pytest.approx(reproduction.table1.scores[7, :, 1:4].mean((1, 2)))
    assert content["score_terms"]["score_error"] <= content["score_terms"]["tolerance"]
    assert content["delta"]["percentiles"]["p50"][2][3] == pytest.approx(
        np.median(reproduction.delta.values[:, 2, :, 3])
    )


def test_provenance(model: Any, batch: ss.TokenBatch, reproduction: Any) -> None:
    import importlib.metadata
    import platform

    record = reproduction.provenance
    view = ss.model_view(model)
    ids = json.dumps(PROMPTS.tolist()).encode()
    expected = {
        "sinkscope": ss.__version__,
        "model": view.name,
        "architecture": "GPT2LMHeadModel",
        "weights_sha256": view.weights_hash(),
        "dtype": "float64",
        "device": "cpu",
        "n_layers": 5,
        "n_heads": 3,
        "d_model": 12,
        "n_ctx": 16,
        "prompts": "given",
        "n_prompts": 5,
        "prompt_lengths": [8, 8],
        "prompts_sha256": hashlib.sha256(ids).hexdigest(),
        "starts_with_bos": 0,
        "seed": 42,
        "batch_size": None,
        "python": platform.python_version(),
        "packages": {
            name: importlib.metadata.version(name)
            for name in ("torch", "transformers", "transformer-lens", "numpy")
        },
    }
    assert {name: record[name] for name in expected} == expected
    other = ss.reproduce(hook(tiny_gpt2(n_layers=5, seed=1), "bridge"), batch.select([0]))
    assert other.provenance["weights_sha256"] != record["weights_sha256"]
    assert other.provenance["prompts_sha256"] != record["prompts_sha256"]


def test_nothing_is_written_unless_asked(
    model: Any, batch: ss.TokenBatch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ss.reproduce(model, batch.select([0]))
    assert list(tmp_path.iterdir()) == []


def test_what_a_model_lacks_is_named(batch: ss.TokenBatch, tmp_path: Path) -> None:
    result = ss.reproduce(llama(), batch, out=tmp_path)
    applied = ("Baseline", "Nullify BOS Token", "No MLP", "Zero Random Wk")
    assert result.table1.conditions == applied
    reasons = dict(result.table1.not_applicable)
    assert set(reasons) == set(ss.PAPER_CONDITIONS) - set(applied)
    assert "query bias" in reasons["No Query Bias"]
    assert "position embeddings" in reasons["Swap EPE"]
    assert set(result.results) == {"table1", "attention_maps", "score_terms"}
    assert result.score_terms.names == ("content",)
    content = strict_json(tmp_path / "results.json")
    assert set(content["not_applicable"]) == set(ss.experiments.EXPERIMENTS) - set(result.results)
    assert all("Not applicable" in reason for reason in content["not_applicable"].values())
    assert content["table1"]["not_applicable"] == reasons


def test_folded_weights_are_refused() -> None:
    folded = hook(tiny_gpt2(), "bridge", fold_ln=True)
    batch = ss.token_batch(folded, PROMPTS)
    with pytest.raises(ProcessedWeightsError, match=r"Expected: .*Got: .*To fix it: .*load_model"):
        ss.reproduce(folded, batch)
    for name in ("delta", "epe_fidelity", "coordinate_alignment", "epe_bias_alignment"):
        with pytest.raises(ProcessedWeightsError):
            getattr(ss.experiments, name).run(folded, batch)


# --- beside the published numbers ---------------------------------------------------------


def test_published_numbers_are_about_one_model_and_its_prompts(model: Any) -> None:
    sizes = {"n_layers": 12, "n_heads": 12, "d_model": 768, "d_vocab": 50257}
    gpt2 = replace(ss.model_view(model), name="gpt2", **sizes)
    assert applies_to(gpt2, "paper")
    assert not applies_to(gpt2, "demo")
    assert not applies_to(replace(gpt2, name="distilgpt2"), "paper")
    for name, size in sizes.items():
        assert not applies_to(replace(gpt2, **{name: size + 1}), "paper")


@pytest.fixture(scope="module")
def stand_in() -> tuple[Any, ss.TokenBatch]:
    """As many layers and positions as the paper's figures have."""
    model = hook(tiny_gpt2(n_layers=12, n_heads=2, n_ctx=40, dtype=torch.float32), "bridge")
    corpora = ["natural_language", "math", "code"]
    ids = torch.arange(120).reshape(3, 40) * 11 % 50
    return model, ss.token_batch(model, ids, corpora=corpora)


def test_published_numbers_beside_the_runs_own(
    stand_in: tuple[Any, ss.TokenBatch], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model, batch = stand_in
    asked = []
    monkeypatch.setattr(
        "sinkscope.reproduction.applies_to",
        lambda view, source: asked.append((view.name, source)) or True,
    )
    result = ss.reproduce(model, batch, prompts_source="paper", out=tmp_path)
    assert asked == [(ss.model_view(model).name, "paper")]
    theirs = published()
    frame = result.table1.to_dataframe()
    assert list(frame.columns)[7:] == ["published", "published_stderr", "difference"]
    assert len(frame) == 40
    for row in frame.to_dict("records"):
        mean, stderr = theirs["table1"][row["corpus"]][row["condition"]]
        assert (row["published"], row["published_stderr"]) == (mean, stderr)
        assert row["difference"] == pytest.approx(row["sink_score"] - mean)
    content = strict_json(tmp_path / "results.json")
    assert content["published"] == theirs
    difference = content["difference"]
    means = result.coordinate_alignment.means
    for name, mean in theirs["gamma_mean"].items():
        ours = None if math.isnan(means[name]) else pytest.approx(means[name] - mean)
        assert difference["gamma_mean"][name] == ours
    for form in ("mlp", "block"):
        median = np.median(getattr(result.epe_fidelity, form)[:, 5])
        expected = median - theirs["fidelity"][form][5][1]
        assert difference["fidelity"][form][5][1] == pytest.approx(expected, abs=1e-6)
    p90 = np.percentile(result.delta.values[:, 10, :, 3], 90)
    assert difference["delta"][10][3][2] == pytest.approx(p90 - theirs["delta"][10][3][2], abs=1e-6)


def test_other_lengths_stand_alone(
    stand_in: tuple[Any, ss.TokenBatch], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch = stand_in
    monkeypatch.setattr("sinkscope.reproduction.applies_to", lambda view, source: True)
    short = ss.token_batch(model, batch.ids[:, :20], corpora=batch.corpora)
    result = ss.reproduce(model, short, prompts_source="paper")
    assert not result.table1.beside_published
    assert "published" not in result.to_dict()
    assert list(result.table1.to_dataframe().columns)[-1] == "all_layers"


def test_the_published_table_is_the_papers(reference: Path) -> None:
    corpora = {
        "all_datasets": "all",
        "sst2": "natural_language",
        "gsm8k": "math",
        "humaneval": "code",
    }
    theirs: dict[str, dict[str, list[float]]] = {}
    for name in ("overall", "by_dataset"):
        text = (reference / "paper" / f"bos_attention_stats_{name}.csv").read_text()
        for row in csv.DictReader(text.splitlines()):
            numbers = [float(row["mean_bos_attention"]), float(row["stderr"])]
            theirs.setdefault(corpora[row["dataset"]], {})[row["description"]] = numbers
    assert published()["table1"] == theirs
    assert all(list(rows) == list(ss.PAPER_CONDITIONS) for rows in theirs.values())


# --- the EPE is found once ----------------------------------------------------------------


@pytest.fixture
def extractions(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """What went into the first MLP for an EPE: all positions of the table as one row."""
    into: list[torch.Tensor] = []
    plain = ss.ModelView.first_mlp

    def noted(view: ss.ModelView, x: torch.Tensor) -> torch.Tensor:
        if x.shape[:2] == (1, view.n_ctx):
            into.append(x.clone())
        return plain(view, x)

    monkeypatch.setattr(ss.ModelView, "first_mlp", noted)
    return into


def test_one_call_finds_the_epe_once(
    model: Any, batch: ss.TokenBatch, extractions: list[torch.Tensor]
) -> None:
    calls = {
        "reproduce": lambda: ss.reproduce(model, batch, batch_size=2),
        "survey": lambda: ss.survey(model, batch),
        "padded": lambda: ss.sink_score(
            model,
            ss.token_batch(model, [[1, 2, 3], [4, 5], [6, 7]], padding="left"),
            ss.ablations.SwapEPE() + ss.ablations.ZeroKeyColumns(ss.TopK(2)),
            batch_size=1,
        ),
    }
    for name, call in calls.items():
        extractions.clear()
        call()
        assert len(extractions) == 1, name


def test_the_epe_is_not_kept_from_one_call_to_the_next(
    batch: ss.TokenBatch, extractions: list[torch.Tensor]
) -> None:
    changing, fresh = (hook(tiny_gpt2(n_layers=5), "bridge") for _ in range(2))
    view = ss.model_view(changing)
    before = ss.reproduce(view, batch)
    for one in (view, ss.model_view(fresh)):
        one.model.pos_embed.weight.data *= 1.5  # through .data, of which torch keeps no count
    after = ss.reproduce(view, batch)
    assert not torch.equal(extractions[0], extractions[1])
    expected = ss.reproduce(fresh, batch)
    for name, result in expected.results.items():
        assert after.results[name] == result, name
    assert after.results["table1"] != before.results["table1"]

    def fail(n: int) -> None:
        raise KeyError

    with pytest.raises(KeyError):
        ss.reproduce(view, batch, progress=fail)
    extractions.clear()
    for _ in range(2):
        ss.extract_epe(view)
    assert len(extractions) == 2
