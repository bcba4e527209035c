"""Two processes give what one gives, bit for bit."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from models import hook, tiny_gpt2

import sinkscope as ss
from sinkscope.errors import InvalidInputError, LoadError
from sinkscope.partial import FOLDER, Processes

ARGUMENTS = ("reproduce", "--batch-size", "2", "--plotlyjs", "cdn")


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *command],
        check=False,
        capture_output=True,
        text=True,
        timeout=600,
        env=environment(),
    )


def test_two_processes_write_what_one_writes(tmp_path: Path) -> None:
    prompts = tmp_path / "few.txt"
    prompts.write_text("\n".join(ss.load_prompts(None, "demo").texts[:5]), "utf-8")
    rest = [*ARGUMENTS, "--prompts", str(prompts), "--out"]
    one = run(["sinkscope", *rest, str(tmp_path / "one")])
    assert one.returncode == 0, one.stderr
    launcher = [
        "accelerate.commands.launch",
        "--cpu",
        "--num_processes",
        "2",
        "--num_machines",
        "1",
    ]
    launcher += ["--mixed_precision", "no", "--dynamo_backend", "no"]
    launcher += ["--main_process_port", str(free_port()), "-m", "sinkscope"]
    two = run([*launcher, *rest, str(tmp_path / "two")])
    assert two.returncode == 0, two.stderr
    assert two.stdout.count("Written to") == two.stdout.count("Table 1") == 1
    for name in ("results.json", "table1.csv", "arrays/delta.npz", "arrays/epe_fidelity.npz"):
        assert (tmp_path / "two" / name).read_bytes() == (tmp_path / "one" / name).read_bytes()
    assert not (tmp_path / "two" / FOLDER).exists()


def test_each_process_runs_its_own_chunks_and_gets_the_whole(tmp_path: Path) -> None:
    """Two processes one after the other, in one: the second finds what the first left."""
    model = hook(tiny_gpt2(), "bridge")
    batch = ss.token_batch(model, torch.randint(50, (5, 8)))
    whole = ss.reproduce(model, batch, batch_size=2)
    with pytest.raises(LoadError, match="Another process left nothing"):
        ss.reproduce(model, batch, batch_size=2, out=tmp_path, group=Processes(1, 2))
    assert [path.name for path in sorted((tmp_path / FOLDER).iterdir())] == [
        "000000002.safetensors",
        "run.json",
    ]
    halves = ss.reproduce(model, batch, batch_size=2, out=tmp_path, group=Processes(0, 2))
    assert halves.results.keys() == whole.results.keys()
    for name, result in whole.results.items():
        assert halves.results[name] == result, name


def test_processes_without_a_directory_are_refused() -> None:
    model = hook(tiny_gpt2(), "bridge")
    batch = ss.token_batch(model, torch.randint(50, (2, 8)))
    with pytest.raises(InvalidInputError, match="out, a directory that all of them see"):
        ss.reproduce(model, batch, group=Processes(0, 2))
