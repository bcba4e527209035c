"""The survey: parts, places, peaks, shares and verdicts, against planted truths and plain sums."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import CONFIGS, IDS, attentions, transformers_model
from models import tiny_gpt2

import sinkscope as ss
from sinkscope.capture import stream
from sinkscope.circuits import (
    JUMP_MLP,
    MASSIVE_KEYS,
    PEAK,
    SHARE_OF_COORDINATES,
    SurveyRow,
    _drain,
    _first_and_others,
    _Found,
    _LeadReader,
    _verdict,
    lead_weights,
)
from sinkscope.cli import main
from sinkscope.errors import IdentityError, InvalidInputError
from sinkscope.report import survey_html
from sinkscope.verdict import SINK_RATIO


def row_of(model: Any, prompts: Any, **options: Any) -> SurveyRow:
    (row,) = ss.survey(model, prompts, **options).rows
    return row


@pytest.fixture(scope="module")
def demo() -> SurveyRow:
    model = ss.load_model("demo")
    prompts = ss.load_prompts(model, "demo")
    return row_of(model, ss.token_batch(model, prompts.texts[:12], length=40))


def test_the_planted_circuit_is_found(demo: SurveyRow) -> None:
    """What the demo model's training script planted: three coordinates, written in layer 0."""
    assert demo.coordinates == demo.epe_coordinates == (17, 58, 101)
    assert demo.appear_after == demo.jump_layer == 0
    assert (demo.query_bias, demo.positions, demo.first_mlp) == ("yes", "learned", True)
    assert demo.sink_position == 0
    assert demo.verdict.startswith("A sink at position 0, carried by the paper's circuit.")
    shares = dict(demo.score_shares)
    assert shares["query_bias"] > 0.5
    assert shares["massive coordinates"] > 0.5
    left = dict(demo.ablations)
    assert left["No Query Bias"] < 0.6
    assert left[MASSIVE_KEYS] == pytest.approx(left["Zero Top-3 Wk"], abs=1e-6)
    assert demo.value_drain < 0.5
    assert demo.peak_entry > 3


def test_its_numbers_are_those_of_the_measures(demo: SurveyRow) -> None:
    model = ss.load_model("demo")
    batch = ss.token_batch(model, ss.load_prompts(model, "demo").texts[:12], length=40)
    everywhere = ss.sink_score(model, batch, layers=range(6))
    assert demo.sink_score == pytest.approx(float(ss.sink_score(model, batch).mean()))
    assert demo.sink_score_by_layer == pytest.approx(everywhere.mean((0, 2)).tolist())
    for eps, rate in ((0.3, demo.sink_rate_3), (0.8, demo.sink_rate_8)):
        assert rate == pytest.approx(float(ss.sink_rate(model, batch, eps=eps).mean()))
    positions = ss.sink_position(model, batch)
    assert demo.sink_position_share == pytest.approx(float((positions == 0).float().mean()))
    values = ss.value_norms(model, batch)[:, list(ss.model_view(model).mid_layers)]
    drain = values[..., 0] / values[..., 1:].median(-1).values
    assert demo.value_drain == pytest.approx(float(drain.mean()), rel=1e-5)
    layer, head, score = demo.strongest
    assert score == pytest.approx(float(everywhere.mean(0).max()))
    assert score == pytest.approx(float(everywhere[:, layer, head].mean()))
    norms = ss.residual_norms(model, batch)
    ratio = norms[..., 0].mean(0) / norms[..., 1:].median(-1).values.mean(0)
    assert demo.peak_by_layer[:6] == pytest.approx(ratio.tolist(), rel=1e-5)
    assert demo.peak == max(demo.peak_by_layer[1:]) > min(demo.peak_by_layer[1:])
    scores = ss.sink_score(model, batch, ss.PAPER_CONDITIONS["No Query Bias"]).mean()
    assert dict(demo.ablations)["No Query Bias"] == pytest.approx(float(scores) / demo.sink_score)


def test_progress_ends_where_it_was_told_to() -> None:
    told: list[int] = []
    done: list[int] = []
    model = ss.load_model("demo")
    batch = ss.token_batch(model, ss.load_prompts(model, "demo").texts[:2], length=12)
    row_of(model, batch, total=told.append, progress=done.append)
    assert told == [sum(done)]


@pytest.mark.parametrize("name", CONFIGS)
def test_every_architecture_has_a_row(name: str) -> None:
    model = ss.load_model(transformers_model(name))
    if name == "bert" and model.cfg.attention_dir != "bidirectional":
        with pytest.raises(IdentityError):
            ss.survey(model, IDS)
        return
    row = row_of(model, IDS)
    biased = {"gpt2", "distilgpt2", "opt", "pythia", "bloom", "qwen2", "phi", "gpt_oss", "bert"}
    assert (row.query_bias == "yes") == (name in biased)
    normed_in_front = {"gpt2", "distilgpt2", "opt", "gpt_neo", "pythia", "gptj", "bloom", "phi"}
    assert (row.effective_query_bias == "yes") == (name in normed_in_front)
    learned = {"gpt2", "distilgpt2", "opt", "gpt_neo", "bert"}
    assert (row.positions == "learned") == (name in learned)
    assert (row.epe_coordinates is None) == (name not in learned - {"bert"})
    assert ("QK-norm" in row.other_parts) == (name in ("qwen3", "gemma3"))
    assert ("sink logits" in row.other_parts) == (name == "gpt_oss")
    assert ("window 4" in row.other_parts) == (
        name in ("gpt_neo", "mistral", "gemma2", "gemma3", "gpt_oss")
    )
    assert "No Query Bias" in dict(row.ablations) or "No Query Bias" in dict(row.not_applicable)
    if name == "mistral":  # every layer's window hides position 0 from the second half
        assert "no query of a prompt's second half" in row.verdict
        assert row.score_shares == ()
        return
    assert "No sink at position 0" in row.verdict
    shares = dict(row.score_shares)
    assert sum(shares.values()) == pytest.approx(1, abs=1e-5)
    _, pattern_error, tolerance = row.identity_errors
    assert pattern_error <= tolerance
    own = attentions(transformers_model(name))
    assert (
        row.sink_score_by_layer[0] == pytest.approx(float(own[:, 0, :, 5:, 0].mean()), abs=1e-6)
        or "window 4" in row.other_parts
    )


def test_shares_are_each_term_s_part_in_the_lead() -> None:
    """Against plain loops over queries and keys."""
    model = ss.load_model(tiny_gpt2())
    batch = ss.token_batch(model, [[1, 2, 3, 4, 5, 6, 7], [5, 4, 3, 2, 1]], padding="left")
    view = ss.model_view(model)
    layers = list(view.mid_layers)
    terms = ss.decompose_scores(model, batch, layers=layers)
    sums = dict.fromkeys(terms.terms, 0.0)
    for b, length in enumerate((7, 5)):
        start = 7 - length
        queries = range(start + length // 2, 7)
        for name, term in terms.terms.items():
            for q in queries:
                lead = term[b, :, :, q, start] - term[b, :, :, q, start + 1 : q + 1].mean(-1)
                sums[name] += float(lead.sum()) / len(queries)
    whole = sum(sums.values())
    shares = dict(row_of(model, batch).score_shares)
    for name in sums:
        assert shares[name] == pytest.approx(sums[name] / whole, abs=1e-6)
    reader = _LeadReader(view, tuple(layers), ())
    stream(view, batch, [reader], batch_size=1)
    assert reader.parts == pytest.approx(sums, abs=1e-6)
    assert reader.whole == pytest.approx(whole, abs=1e-6)


def test_nothing_is_left_of_a_score_of_0() -> None:
    """Position 0's score is so far below the others' that its share of attention is 0."""
    hf_model = tiny_gpt2(n_layers=1, dtype=torch.float32)
    attn = hf_model.transformer.h[0].attn.c_attn
    attn.weight.data[:, :24] = attn.bias.data[:24] = 0
    attn.weight.data[0, 12:24:4] = 1  # keys are n[0], ...
    attn.bias.data[0:12:4] = -1e4  # ... which queries dislike
    hf_model.transformer.wpe.weight.data[:, 0] = -100
    hf_model.transformer.wpe.weight.data[0, 0] = 100
    row = row_of(ss.load_model(hf_model), IDS)
    assert row.sink_score == 0
    left = dict(row.ablations)
    assert "No Query Bias" in left
    assert all(math.isnan(share) for share in left.values())


def test_heads_that_share_keys_are_told() -> None:
    for name, told in (("gpt2", False), ("llama", True)):
        row = row_of(ss.load_model(transformers_model(name)), IDS)
        assert ("2 key heads for 4" in row.other_parts) == told
        assert told or row.other_parts == ()


def test_lead_weights_leave_out_queries_that_see_nothing_else() -> None:
    mask = torch.ones(1, 4, dtype=torch.bool)
    visible = torch.eye(4, dtype=torch.bool)[None]
    visible[0, 2, 0] = visible[0, 3, 0] = visible[0, 3, 1] = True
    weights = lead_weights(mask, visible)[0]
    expected = torch.zeros(4, 4)
    expected[2, [0, 2]] = torch.tensor([0.5, -0.5])
    expected[3, [0, 1, 3]] = torch.tensor([0.5, -0.25, -0.25])
    torch.testing.assert_close(weights, expected)
    visible[0, 2, 2] = False
    expected[2], expected[3] = 0, 2 * expected[3]
    torch.testing.assert_close(lead_weights(mask, visible)[0], expected)


def test_the_coordinates_share_is_what_the_keys_have_of_them() -> None:
    """With all coordinates it is the whole, up to the part of b_K."""
    for hf_model in (tiny_gpt2(), transformers_model("qwen3"), transformers_model("qwen2")):
        view = ss.model_view(ss.load_model(hf_model))
        batch = ss.token_batch(view, IDS)
        reader = _LeadReader(view, (1,), tuple(range(view.d_model)))
        stream(view, batch, [reader])
        parts = dict(reader.parts)
        ours = parts.pop(SHARE_OF_COORDINATES)
        with_b_K = parts.get("key_bias", 0.0) + parts.get("bias_bias", 0.0)
        assert ours == pytest.approx(reader.whole - with_b_K, abs=1e-5)


def found(**numbers: Any) -> _Found:
    """Four places of a model of three layers, whose first position stands out nowhere."""
    values: dict[str, Any] = {
        name: torch.zeros(1) for name in ("scores", "rates", "positions", "drain")
    }
    values |= {name: torch.ones(4) for name in ("firsts", "others", "entries")}
    return _Found(**values | {"vectors": torch.ones(4, 20)} | numbers)


def planted_vectors() -> torch.Tensor:
    """Each place has one large coordinate of its own; that after layer 1 stands out most."""
    vectors = torch.ones(4, 20)
    for place, (coordinate, size) in enumerate([(9, 900.0), (3, 20.0), (5, 200.0), (7, 90.0)]):
        vectors[place, coordinate] = size
    vectors[3, 5] = -120.0
    return vectors


def test_the_peak_is_where_the_first_position_grows_and_its_coordinates_stand_out_most() -> None:
    firsts = torch.tensor([3.0, 4.0, 4.0 + PEAK, 5.0 + PEAK])
    others = torch.tensor([1.0, 1.0, 1.0, 0.5])
    vectors = planted_vectors()
    assert found(firsts=firsts, others=others, vectors=vectors).peak() == (1, (5,), 1)
    vectors[1, 5] = 100.0
    assert found(firsts=firsts, others=others, vectors=vectors).peak() == (1, (5,), 0)
    vectors[1, 5] = 99.0
    assert found(firsts=firsts, others=others, vectors=vectors).peak() == (1, (5,), 1)
    louder = planted_vectors()
    louder[3, 5] = 1.0
    louder[3] *= 9.0  # all of it is larger, and stands out no more
    assert found(firsts=firsts, vectors=louder).peak()[1] == (5,)
    others[2] = 9.0  # in layer 1 all positions grow
    assert found(firsts=firsts, others=others, vectors=vectors).peak()[0] == 2
    level = torch.ones(4, 20)
    assert found(firsts=firsts, vectors=level).peak() == (1, (), None)


def test_there_is_a_peak_where_the_norm_or_one_entry_stands_out_after_some_layer() -> None:
    for name in ("firsts", "entries"):
        enough, early = torch.ones(4), torch.ones(4)
        enough[2] = PEAK
        early[0] = 100 * PEAK  # in the embedding, which no layer made
        assert found(**{name: enough}, vectors=planted_vectors()).peak()[1] == (5,)
        assert found(**{name: enough * 0.99}).peak() == (None, (), None)
        assert found(**{name: early}).peak() == (None, (), None)
    assert found(firsts=torch.full((4,), torch.nan)).peak() == (None, (), None)


def test_the_first_position_is_held_against_the_median_of_the_others() -> None:
    ids = torch.tensor([[0, 0, 5, 6, 7], [1, 2, 3, 4, 5]])
    mask = torch.tensor([[False, False, True, True, True], [True] * 5])
    model = ss.load_model(transformers_model("gpt2"))
    batch = ss.token_batch(model, ids, mask=mask)
    x = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ours = _first_and_others(x, batch, 0)
    for row, first in ((0, 2), (1, 0)):
        at, others = x[row, first], x[row, first + 1 :]
        expected = [at.norm(), others.norm(dim=1).median(), at.abs().max()]
        expected.append(others.abs().amax(1).median())
        torch.testing.assert_close(ours[row, :4], torch.stack(expected))
        assert torch.equal(ours[row, 4:], at)
    values = torch.stack([x, 2 * x.flip(1), x.flip(2)], 2)
    expected = []
    for row, first in ((0, 2), (1, 0)):
        norms = values[row, first:].norm(dim=-1)
        expected.append((norms[0] / norms[1:].median(0).values).mean())
    torch.testing.assert_close(_drain(values, batch, 0), torch.stack(expected))


def test_the_verdict_says_what_is_left_and_what_a_norm_makes_of_it() -> None:
    kept = {MASSIVE_KEYS: 0.25, JUMP_MLP: 0.5}
    words = _verdict(0.6, 0.1, kept, {}, 3, False)
    assert "jumps in layer 3; without that layer's MLP 50% of the sink stays." in words
    assert words.endswith("Without the key columns at its massive coordinates 25% stays.")
    assert _verdict(0.6, 0.1, kept, {}, 3, True).endswith("25% stays, with keys normed anew.")
    assert "jumps" not in _verdict(0.6, 0.1, kept, {}, None, False)
    assert _verdict(0.1, 0.1, kept, {}, 3, False).startswith("No sink at position 0.")
    assert _verdict(0.25 * SINK_RATIO, 0.25, kept, {}, 3, False).startswith("A sink at position 0")
    for uniform in (0.9, 1 / SINK_RATIO):
        words = _verdict(0.9, uniform, kept, {}, 3, False)
        assert words.startswith("The prompts are too short to tell.")


def test_length_and_bos_go_with_texts_or_ids_alone() -> None:
    model = ss.load_model(transformers_model("gpt2"))
    rows = [[1, 2, 3, 4, 5, 6], [7, 8, 9, 1, 2, 3, 4]]
    cut = row_of(model, rows, length=5)
    assert cut.sink_score == row_of(model, [row[:5] for row in rows]).sink_score
    batch = ss.token_batch(model, [row[:5] for row in rows])
    for options in ({"length": 5}, {"bos": "prepend"}):
        with pytest.raises(InvalidInputError, match="has its length and its BOS already"):
            ss.survey(model, batch, **options)


def test_a_bias_of_zeros_is_said_to_be_one() -> None:
    hf_model = tiny_gpt2()
    for block in hf_model.transformer.h:
        block.attn.c_attn.bias.data[:12] = 0
    row = row_of(ss.load_model(hf_model), IDS)
    assert row.query_bias == "all zero"
    assert "all zero" in dict(row.not_applicable)["No Query Bias"]


def test_a_bias_may_have_a_zero() -> None:
    hf_model = tiny_gpt2()
    for block in hf_model.transformer.h:
        block.attn.c_attn.bias.data[0] = block.ln_1.bias.data[0] = 0
    row = row_of(ss.load_model(hf_model), IDS)
    assert row.query_bias == row.effective_query_bias == "yes"


def test_several_models_save_load_and_the_table(tmp_path: Path) -> None:
    models = [ss.load_model(transformers_model(name)) for name in ("gpt2", "llama")]
    result = ss.survey(models, IDS)
    assert ss.Survey.load(result.save(tmp_path)) == result
    frame = result.to_dataframe()
    assert len(frame) == 2
    assert frame["relative: No Query Bias"].isna().tolist() == [False, True]
    assert frame["share: content"].notna().all()
    with pytest.raises(InvalidInputError, match="needs a model"):
        ss.survey([], IDS)
    page = survey_html(result)
    assert page.count("survey_map") > 1
    assert "carried" in page or "No sink" in page


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text(
        "def add(x, y): return x + y\nfor number in range(10): print(number)\n", "utf-8"
    )
    names = ["demo", "demo-grown-no-query-bias"]
    out = tmp_path / "out"
    options = ["--prompts", str(prompts), "--length", "4", "--out", str(out)]
    assert main(["survey", *names, *options]) == 0
    said = capsys.readouterr().out
    content = json.loads((out / "survey.json").read_text("utf-8"))
    assert len(content) == 2
    for name, row in content.items():
        assert f"{name}: {row['verdict']}" in said
    assert len((out / "survey.csv").read_text("utf-8").splitlines()) == 3
    assert "Which circuit" in (out / "survey.html").read_text("utf-8")
