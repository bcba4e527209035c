"""What the README shows runs, and runs on what it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text("utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def test_python_examples_run_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    examples = blocks("python")
    assert len(examples) >= 2
    namespace: dict[str, object] = {}
    for example in examples:
        exec(compile(example, "README.md", "exec"), namespace)
    printed = capsys.readouterr().out
    assert "Zero Top-3 Wk" in printed
    error = float(re.search(r"own scores: (\S+)", printed)[1])  # type: ignore[index]
    assert 0 <= error < 1e-3


def test_the_two_commands_are_the_ones_ci_knows() -> None:
    commands = [line for block in blocks("bash") for line in block.strip().splitlines()]
    assert commands == [
        "pip install -c constraints.txt . && sinkscope reproduce",
        'pip install -c constraints.txt ".[test]" && pytest',
    ]
    assert 'pip install -c constraints.txt ".[test]" && pytest' in (ROOT / ".ci/run").read_text()
