"""A run that was killed goes on from its pieces and ends with the same files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from models import hook, tiny_gpt2

import sinkscope as ss
from sinkscope.errors import InvalidInputError, LoadError
from sinkscope.model import ModelView
from sinkscope.partial import FOLDER

N_PROMPTS = 5
BATCH_SIZE = 2
RUN = """
import os, signal, sys
import torch
import sinkscope as ss
from sinkscope import partial, results
from sinkscope.cli import main

torch.set_num_threads(1)
limit, counted = int(sys.argv[1]), 0
write_bytes = results.write_bytes

def counting(path, data):
    global counted
    counted += 1
    if counted > limit:
        os.kill(os.getpid(), signal.SIGKILL)
    write_bytes(path, data)

partial.write_bytes = results.write_bytes = counting
sys.exit(main(sys.argv[2:]))
"""
"""The command, killed by the system where it is about to write its file number `limit + 1`."""


def command(out: Path, prompts: Path, limit: int = 10**6, size: int = BATCH_SIZE) -> int:
    arguments = ["reproduce", "--prompts", prompts, "--out", out, "--batch-size", size]
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(limit), *(str(a) for a in arguments), "--plotlyjs", "cdn"],
        check=False,
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode in (0, 1, -signal.SIGKILL), done.stderr
    return done.returncode


def files(root: Path) -> dict[str, bytes]:
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "few.txt"
    model = ss.load_model("demo")
    path.write_text("\n".join(ss.load_prompts(model, "demo").texts[:N_PROMPTS]), "utf-8")
    return path


def test_killed_at_several_moments_it_ends_with_the_same_files(
    tmp_path: Path, prompts: Path
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert command(whole, prompts) == 0
    assert not (whole / FOLDER).exists()
    seen = []
    # Before the first piece; within the first chunk; while chunks are put together; in the last;
    # and when the results themselves are being written.
    for limit in (1, 4, 14, 20, 30):
        assert command(killed, prompts, limit) == -signal.SIGKILL
        seen.append(sorted(files(killed / FOLDER)))
        assert not (killed / "report.html").exists()
    assert any(len(piece) > 0 for piece in seen[1:])
    assert command(killed, prompts) == 0
    assert files(killed) == files(whole)


def run(out: Path, **changes: object) -> None:
    seed, ids, size = (changes.get(n, d) for n, d in (("seed", 0), ("ids", 0), ("size", 2)))
    model = hook(tiny_gpt2(seed=int(str(seed))), "bridge")
    generator = torch.Generator().manual_seed(int(str(ids)))
    batch = ss.token_batch(model, torch.randint(50, (5, 8), generator=generator))
    ss.reproduce(model, batch, out=out, batch_size=int(str(size)))


def stopped_after(monkeypatch: pytest.MonkeyPatch, out: Path, runs: int) -> None:
    """Runs so many forward passes of the experiments, then fails."""
    forward = ModelView.forward
    left = runs

    def failing(self: ModelView, *arguments: object, **keywords: object) -> object:
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt
        return forward(self, *arguments, **keywords)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(ModelView, "forward", failing)
        with pytest.raises(KeyboardInterrupt):
            run(out)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole")
    run(out)
    return out


@pytest.mark.parametrize("runs", [0, 1, 12, 26])
def test_what_is_done_is_not_done_again(
    tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch, runs: int
) -> None:
    stopped_after(monkeypatch, tmp_path / "out", runs)
    forward = ModelView.forward
    again = 0

    def counting(self: ModelView, *arguments: object, **keywords: object) -> object:
        nonlocal again
        again += 1
        return forward(self, *arguments, **keywords)  # type: ignore[arg-type]

    monkeypatch.setattr(ModelView, "forward", counting)
    run(tmp_path / "out")
    assert again == 12 * 3 - runs, "twelve passes over three chunks in all"
    assert files(tmp_path / "out") == files(whole)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"seed": 1}, "weights_sha256"),
        ({"ids": 1}, "prompts_sha256"),
        ({"size": 3}, "batch_size 2"),
    ],
)
def test_pieces_of_another_run_are_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, int], named: str
) -> None:
    stopped_after(monkeypatch, tmp_path, 5)
    before = files(tmp_path)
    with pytest.raises(InvalidInputError, match=named):
        run(tmp_path, **change)
    assert files(tmp_path) == before
    run(tmp_path)
    assert not (tmp_path / FOLDER).exists()


def test_a_damaged_piece_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped_after(monkeypatch, tmp_path, 5)
    piece = sorted((tmp_path / FOLDER).glob("*.safetensors"))[0]
    piece.write_bytes(piece.read_bytes()[:20])
    with pytest.raises(LoadError, match=piece.name):
        run(tmp_path)
    piece.unlink()
    run(tmp_path)


def test_a_chunk_that_is_done_keeps_no_activations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only results by prompt stay: the first block's output goes when its chunk is done."""
    stopped_after(monkeypatch, tmp_path, 13)
    pieces = files(tmp_path / FOLDER)
    assert sorted(pieces) == ["000000000.safetensors", "000000002.000.safetensors", "run.json"]
    assert b"passing" in pieces["000000002.000.safetensors"]
    assert b"passing" not in pieces["000000000.safetensors"]
