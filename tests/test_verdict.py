"""The verdict says what the table says: planted tables, known words."""

from __future__ import annotations

import numpy as np
import pytest

from sinkscope.ablations import PAPER_CONDITIONS
from sinkscope.experiments.table1 import Table1
from sinkscope.verdict import uniform_sink_score, verdict

N_PROMPTS, N_LAYERS, N_HEADS = 2, 4, 2
LENGTHS = [40, 40]


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
        **more,  # type: ignore[arg-type]
    )


WHOLE = {"No Query Bias": 0.4, "Remove First PE": 0.1, "Swap EPE": 0.1, "Zero Top-3 Wk": 0.2}


def test_uniform_attention_is_the_mean_of_one_over_i() -> None:
    expected = np.mean([1 / (i + 1) for i in range(20, 40)])
    assert uniform_sink_score([40]) == pytest.approx(expected)
    mixed = uniform_sink_score([2, 40])
    assert mixed == pytest.approx((0.5 + expected) / 2)


def test_the_whole_circuit() -> None:
    words = verdict(table(0.4, WHOLE), LENGTHS)
    assert "carried by the paper's circuit" in words.headline
    assert "40.0%" in words.headline
    assert "layers 1 to 2" in words.headline
    assert "No Query Bias: taking away the query bias b_Q removes 60% of the sink." in (
        words.sentences
    )
    assert any("Swap PE" in s and "as a control should" in s for s in words.sentences)


def test_a_part_that_does_nothing_is_named() -> None:
    words = verdict(table(0.4, WHOLE | {"No Query Bias": 0.95}), LENGTHS)
    assert "part of the paper's circuit" in words.headline
    assert "not by the query bias b_Q" in words.headline


def test_a_part_the_model_lacks_is_not_said_to_do_nothing() -> None:
    relative: dict[str, float] = WHOLE | {"No Query Bias": None}  # type: ignore[dict-item]
    words = verdict(
        table(0.4, relative, not_applicable=(("No Query Bias", "it has none"),)), LENGTHS
    )
    assert "not by" not in words.headline
    assert "No Query Bias: not applicable. it has none" in words.sentences


def test_another_circuit() -> None:
    words = verdict(table(0.4, {"No MLP": 0.1}), LENGTHS)
    assert "something other than the paper's circuit" in words.headline


def test_a_control_that_moves_the_sink_is_said() -> None:
    words = verdict(table(0.4, WHOLE | {"Zero Random Wk": 0.3}), LENGTHS)
    assert "A control moves it too" in words.headline
    assert any("more than a control should" in s for s in words.sentences)


def test_no_sink() -> None:
    words = verdict(table(0.05, WHOLE), LENGTHS)
    assert words.headline.startswith("No sink at position 0.")
    assert "5.0%" in words.headline
    assert words.sentences == ()


def test_a_nulled_token_is_no_control_where_positions_leave_no_mark() -> None:
    """Without learned positions a nulled first token is a row of zeros: the sink's own cause."""
    rotary = dict.fromkeys(("Remove First PE", "Swap EPE", "Swap PE", "No PE", "Zero Top-3 Wk"))
    lacking = tuple((name, "no positions") for name in rotary)
    for left, said in ((0.03, "carried by the token there"), (1.0, "something other")):
        relative = rotary | {"Nullify BOS Token": left}
        words = verdict(table(0.4, relative, not_applicable=lacking), LENGTHS)  # type: ignore
        assert said in words.headline
        (sentence,) = (s for s in words.sentences if s.startswith("Nullify"))
        assert "control" not in sentence
