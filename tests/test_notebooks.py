"""Every example notebook runs offline, its assertions hold, and it prints what it shows."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))

from run_notebooks import code_cells, execute, read, source, stored_output  # noqa: E402

NAMES = (
    "quickstart",
    "circuit_step_by_step",
    "own_ablation",
    "own_model",
    "reproduce_paper",
    "mitigation",
)
NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?%?")
BADGE = re.compile(
    r"\[!\[Open in Colab\]\(https://colab\.research\.google\.com/assets/colab-badge\.svg\)\]"
    r"\(https://colab\.research\.google\.com/github/([\w.-]+/[\w.-]+)/blob/main/examples/(\w+)\.ipynb\)"
)


def same_but_for_rounding(printed: str, stored: str) -> bool:
    """Equal words, and numbers that differ by no more than other machines' rounding."""
    if NUMBER.sub("#", printed) != NUMBER.sub("#", stored):
        return False
    return all(
        a == b or _near(a, b)
        for a, b in zip(NUMBER.findall(printed), NUMBER.findall(stored), strict=True)
    )


def _near(a: str, b: str) -> bool:
    if a.endswith("%") and b.endswith("%"):
        return abs(float(a[:-1]) - float(b[:-1])) <= 1.01
    return "." in a + b and abs(float(a) - float(b)) <= 0.011 + 0.01 * abs(float(b))


def test_the_notebooks_are_the_ones_that_are_known() -> None:
    assert sorted(path.stem for path in EXAMPLES.glob("*.ipynb")) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_notebook_runs_and_prints_what_it_shows(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    notebook = read(EXAMPLES / f"{name}.ipynb")
    for cell, printed in zip(code_cells(notebook), execute(notebook, name), strict=True):
        assert same_but_for_rounding(printed, stored_output(cell)), (
            f"{name} prints\n{printed}\nand shows\n{stored_output(cell)}\n"
            "if that is right: python examples/run_notebooks.py --write"
        )
    assert not any(tmp_path.iterdir()), "a notebook leaves files behind"


@pytest.mark.parametrize("name", NAMES)
def test_notebook_states_findings_and_can_be_opened_elsewhere(name: str) -> None:
    notebook = read(EXAMPLES / f"{name}.ipynb")
    cells = notebook["cells"]
    assert sum(source(cell).count("assert ") for cell in code_cells(notebook)) >= 3
    badge = BADGE.search(source(cells[0]))
    assert cells[0]["cell_type"] == "markdown"
    assert badge is not None
    assert badge[2] == name
    assert cells[1]["metadata"] == {"tags": ["install"]}
    assert f"github.com/{badge[1]}" in source(cells[1])
    assert len(cells) - len(code_cells(notebook)) - 1 == sum(
        cell["cell_type"] == "markdown" for cell in cells
    )
    assert notebook["nbformat"] == 4
    assert len({cell["id"] for cell in cells}) == len(cells)


def test_all_notebooks_name_one_repository() -> None:
    badges = (BADGE.search(source(read(EXAMPLES / f"{name}.ipynb")["cells"][0])) for name in NAMES)
    assert len({badge[1] for badge in badges if badge}) == 1


def test_a_failing_assertion_fails_the_run() -> None:
    cell = {"cell_type": "code", "metadata": {}, "source": ["assert 1 == 2"], "outputs": []}
    with pytest.raises(AssertionError):
        execute({"cells": [cell]}, "broken")


@pytest.mark.parametrize(
    ("printed", "stored", "same"),
    [
        ("sink 0.360\n", "sink 0.362\n", True),
        ("sink 0.360\n", "sink 0.390\n", False),
        ("(17, 58, 101)\n", "(17, 58, 102)\n", False),
        ("42.5%, 58%\n", "42.7%, 57%\n", True),
        ("42.5%\n", "44.7%\n", False),
        ("a 1.0\n", "b 1.0\n", False),
    ],
)
def test_rounding_passes_and_other_findings_do_not(printed: str, stored: str, same: bool) -> None:
    assert same_but_for_rounding(printed, stored) is same
