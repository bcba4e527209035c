"""The verdict says what the table says: planted tables, known words."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from architectures import IDS, transformers_model

import sinkscope as ss
from sinkscope.ablations import PAPER_CONDITIONS
from sinkscope.experiments.table1 import Table1
from sinkscope.measures import uniform_sink_score
from sinkscope.verdict import verdict

N_PROMPTS, N_LAYERS, N_HEADS = 2, 4, 2
UNIFORM = 0.034


def table(baseline: float, relative: dict[str, float], **more: object) -> Table1:
    """A table where every condition has one value; those not named keep the baseline's."""
    names = [name for name in PAPER_CONDITIONS if relative.get(name, 1.0) is not None]
    values = np.array([baseline * relative.get(name, 1.0) for name in names])
    shape = (len(names), N_PROMPTS, N_LAYERS, N_HEADS)
    return Table1(
        scores=np.broadcast_to(values[:, None, None, None], shape).copy(),
        conditions=tuple(names),
        corpora=("prompts",) * N_PROMPTS,
        mid_layers=(1, 2),
        **{"uniform": UNIFORM, **more},  # type: ignore[arg-type]
    )


WHOLE = {"No Query Bias": 0.4, "Remove First PE": 0.1, "Swap EPE": 0.1, "Zero Top-3 Wk": 0.2}


def even_sink_score(model: Any, batch: ss.TokenBatch) -> float:
    """From patterns of the model's own, made even by hand, prompt by prompt."""
    even = (ss.patterns(model, batch) > 0).double()
    even = even / even.sum(-1, keepdim=True)
    shares = []
    for pattern, mask in zip(even, batch.mask, strict=True):
        tokens = mask.nonzero()[:, 0]
        to_first = pattern[:, 0, tokens[len(tokens) // 2 :], tokens[0]]
        shares += [float(layer[layer > 0].mean()) for layer in to_first if bool((layer > 0).any())]
    return float(np.mean(shares))


@pytest.mark.parametrize(
    ("name", "side"),
    [
        *((name, side) for name in ("gpt2", "bert") for side in ("none", "left", "right")),
        *(("mistral", side) for side in ("none", "right")),  # transformers' own gives NaN at left
    ],
)
def test_uniform_attention_is_over_the_keys_that_a_query_sees(name: str, side: str) -> None:
    model = ss.load_model(transformers_model(name))
    if name == "bert" and model.cfg.attention_dir != "bidirectional":
        pytest.skip("this TransformerLens takes BERT for a causal model")
    # Within five tokens some late query sees the first one through a window of four.
    rows = [row[: 5 if side == "none" else 3 + n] for n, row in enumerate(IDS.tolist())]
    batch = ss.token_batch(model, rows, padding=side)
    everywhere = range(ss.model_view(model).n_layers)
    uniform = uniform_sink_score(model, batch, everywhere)
    assert uniform == pytest.approx(even_sink_score(model, batch), rel=1e-6)
    if name == "bert":
        assert uniform == pytest.approx(float((1 / batch.lengths).mean()))


def test_uniform_attention_of_a_causal_model_is_the_mean_of_one_over_i() -> None:
    expected = np.mean([1 / (i + 1) for i in range(20, 40)])
    model = ss.load_model("demo")
    batch = ss.token_batch(model, torch.ones(3, 40, dtype=torch.long))
    assert uniform_sink_score(model, batch) == pytest.approx(expected)
    table1 = ss.experiments.table1.run(model, batch, {"Baseline": ss.PAPER_CONDITIONS["Baseline"]})
    assert table1.uniform == table1.summary()["uniform"] == pytest.approx(expected)
    assert f"uniform attention would give it {expected:.1%}" in verdict(table1).headline


def test_a_bidirectional_model_is_held_to_its_own_uniform_share() -> None:
    """At 40 tokens 0.09 is three times 1/40, and not three times the mean of 1/(i + 1)."""
    assert verdict(table(0.09, WHOLE, uniform=1 / 40)).headline.startswith("A sink at position 0")
    assert verdict(table(0.09, WHOLE)).headline.startswith("No sink at position 0.")


def test_a_first_position_that_nobody_sees_has_no_verdict() -> None:
    assert "no query" in verdict(table(float("nan"), WHOLE)).headline


def test_the_whole_circuit() -> None:
    words = verdict(table(0.4, WHOLE))
    assert "carried by the paper's circuit" in words.headline
    assert "40.0%" in words.headline
    assert "layers 1 to 2" in words.headline
    assert "No Query Bias: taking away the query bias b_Q removes 60% of the sink." in (
        words.sentences
    )
    assert any("Swap PE" in s and "as a control should" in s for s in words.sentences)


def test_a_part_that_does_nothing_is_named() -> None:
    words = verdict(table(0.4, WHOLE | {"No Query Bias": 0.95}))
    assert "part of the paper's circuit" in words.headline
    assert "not by the query bias b_Q" in words.headline


def test_a_part_the_model_lacks_is_not_said_to_do_nothing() -> None:
    relative: dict[str, float] = WHOLE | {"No Query Bias": None}  # type: ignore[dict-item]
    words = verdict(table(0.4, relative, not_applicable=(("No Query Bias", "it has none"),)))
    assert "not by" not in words.headline
    assert "No Query Bias: not applicable. it has none" in words.sentences


def test_another_circuit() -> None:
    words = verdict(table(0.4, {"No MLP": 0.1}))
    assert "something other than the paper's circuit" in words.headline


def test_a_control_that_moves_the_sink_is_said() -> None:
    words = verdict(table(0.4, WHOLE | {"Zero Random Wk": 0.3}))
    assert "A control moves it too" in words.headline
    assert any("more than a control should" in s for s in words.sentences)


def test_no_sink() -> None:
    words = verdict(table(0.05, WHOLE))
    assert words.headline.startswith("No sink at position 0.")
    assert "5.0%" in words.headline
    assert words.sentences == ()


def test_a_nulled_token_is_no_control_where_positions_leave_no_mark() -> None:
    """Without learned positions a nulled first token is a row of zeros: the sink's own cause."""
    rotary = dict.fromkeys(("Remove First PE", "Swap EPE", "Swap PE", "No PE", "Zero Top-3 Wk"))
    lacking = tuple((name, "no positions") for name in rotary)
    for left, said in ((0.03, "carried by the token there"), (1.0, "something other")):
        relative = rotary | {"Nullify BOS Token": left}
        words = verdict(table(0.4, relative, not_applicable=lacking))  # type: ignore
        assert said in words.headline
        (sentence,) = (s for s in words.sentences if s.startswith("Nullify"))
        assert "control" not in sentence
