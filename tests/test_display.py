"""What notebooks show: small, right, and escaped."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

import sinkscope as ss
from sinkscope.display import MAX_CELL, MAX_ROWS, html_table, percent
from sinkscope.experiments.delta import Delta
from sinkscope.experiments.table1 import Table1


def cells(page: str) -> list[str]:
    return re.findall(r"<td>(.*?)</td>", page)


def test_everything_is_escaped() -> None:
    page = html_table("<b>caption", [("<script>", "a & b")], header=["<i>"])
    assert "<script>" not in page
    assert "<i>" not in page
    assert cells(page) == ["&lt;script&gt;", "a &amp; b"]
    assert "&lt;b&gt;caption" in page


def test_long_tables_and_cells_are_cut_and_say_so() -> None:
    page = html_table("t", [(n, "x" * 1000) for n in range(MAX_ROWS + 3)])
    assert "and 3 more" in page
    shown = cells(page)[1]
    assert len(shown) == MAX_CELL
    assert shown.endswith("\N{HORIZONTAL ELLIPSIS}")
    assert "more" not in html_table("t", [(n,) for n in range(MAX_ROWS)])


def test_a_share_that_rounds_to_nothing_has_no_sign() -> None:
    assert [percent(x) for x in (-0.0004, 0.0, -0.0006, 0.256)] == [
        "0.0%",
        "0.0%",
        "-0.1%",
        "25.6%",
    ]
    assert [percent(x, 0) for x in (-0.004, -0.1, float("nan"))] == ["0%", "-10%", "nan%"]


def test_massive_coordinates_show_index_and_value() -> None:
    found = ss.find_massive_coordinates(torch.tensor([0.0, 9.0, 0.1, -7.0]), ss.TopK(2))
    shown = cells(found._repr_html_())
    assert shown[-4:] == ["1", "+9", "3", "-7"]


def test_table_shows_the_pooled_rows() -> None:
    scores = np.zeros((2, 3, 4, 1))
    scores[0], scores[1] = 0.5, [[[0.1]], [[0.2]], [[0.3]]]
    table = Table1(scores, ("Baseline", "other"), ("a", "b", "b"), (1, 2), 0.03)
    shown = cells(table._repr_html_())
    assert shown[0] == "Baseline"
    assert shown[1].startswith("0.5000")
    assert shown[3].startswith("0.2000")
    assert shown[3].endswith(f"{0.1 / 3**0.5:.4f}")


def test_delta_says_where_position_0_stands_apart() -> None:
    values = np.ones((5, 2, 3, 4))
    values[:, 1, :, 0] = 8.0
    shown = dict(zip(*[iter(cells(Delta(values)._repr_html_()))] * 2, strict=True))
    assert shown["layers where position 0 stands apart"] == "1"
    assert shown["median at position 0, by layer"] == "1, 8"


@pytest.mark.parametrize("bias", [True, False])
def test_view_says_what_the_model_has(bias: bool) -> None:
    from models import tiny_gpt2
    from transformers import GPTNeoConfig, GPTNeoForCausalLM

    neo = GPTNeoConfig(
        vocab_size=20,
        hidden_size=8,
        num_layers=2,
        num_heads=2,
        max_position_embeddings=16,
        attention_types=[[["global", "local"], 1]],
        intermediate_size=16,
        window_size=4,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = ss.load_model(tiny_gpt2() if bias else GPTNeoForCausalLM(neo))
    shown = dict(zip(*[iter(cells(ss.model_view(model)._repr_html_()))] * 2, strict=True))
    assert shown["query bias b_Q"] == ("yes" if bias else "no")
    assert shown["processed"] == "no"
    assert shown["learned positions"] == "yes"
