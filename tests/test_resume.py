"""A run that was killed goes on from its pieces and ends with the same files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from models import hook, tiny_gpt2
from safetensors.torch import save

import sinkscope as ss
from sinkscope.errors import InvalidInputError, LoadError, WriteError
from sinkscope.model import ModelView
from sinkscope.partial import FOLDER, Processes

RUN = """
import os, signal, sys
import torch
import sinkscope as ss
from models import hook, tiny_gpt2
from sinkscope import partial, results

torch.set_num_threads(1)
model = hook(tiny_gpt2(), "bridge")
batch = ss.token_batch(model, torch.arange(40).reshape(5, 8))
write_bytes = results.write_bytes
left = int(sys.argv[2])

def counting(path, data):
    global left
    left -= 1
    if left < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    write_bytes(path, data)

partial.write_bytes = results.write_bytes = counting
ss.reproduce(model, batch, out=sys.argv[1], batch_size=2)
"""
"""A run that is killed by the system where it is about to write its file number `limit + 1`."""


def killed_at(out: Path, limit: int) -> int:
    """The exit code of a run in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(out), str(limit)],
        check=False,
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return done.returncode


def files(root: Path) -> dict[str, bytes]:
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


def test_killed_at_several_moments_it_ends_with_the_same_files(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert killed_at(whole, 10**6) == 0
    assert not (whole / FOLDER).exists()
    # Within the first chunk; before its pieces are put together; and, with all pieces there,
    # between the files of the results.
    for limit in (6, 12, 33):
        assert killed_at(killed, limit) == -signal.SIGKILL
        assert (killed / FOLDER / "run.json").is_file()
    assert any(name.endswith(".npz") for name in files(killed))
    assert not (killed / "results.json").exists()
    assert killed_at(killed, 10**6) == 0
    assert files(killed) == files(whole)


def run(out: Path, hooked: Any = None, **changes: object) -> None:
    seed, ids, size = (changes.get(n, d) for n, d in (("seed", 0), ("ids", 0), ("size", 2)))
    model = hook(tiny_gpt2(seed=int(str(seed))), "bridge")
    if hooked is not None:
        model.add_hook("blocks.0.hook_resid_post", hooked)
    generator = torch.Generator().manual_seed(int(str(ids)))
    batch = ss.token_batch(model, torch.randint(50, (5, 8), generator=generator))
    ss.reproduce(model, batch, out=out, batch_size=int(str(size)))


def stopped_after(
    monkeypatch: pytest.MonkeyPatch, out: Path, runs: int, hooked: Any = None
) -> None:
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
            run(out, hooked)


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


def halved(tensor: torch.Tensor, hook: Any) -> torch.Tensor:
    return tensor / 2


def test_a_run_with_hooks_is_neither_taken_up_nor_goes_on_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a hook does nobody can tell, so that no piece says whether it still holds."""
    stopped_after(monkeypatch, tmp_path / "plain", 5)
    stopped_after(monkeypatch, tmp_path / "hooked", 5, halved)
    for out, hooked in (("plain", halved), ("hooked", halved), ("hooked", None)):
        before = files(tmp_path / out)
        with pytest.raises(InvalidInputError, match="hooks"):
            run(tmp_path / out, hooked)
        assert files(tmp_path / out) == before
    run(tmp_path / "whole", halved)
    assert not (tmp_path / "whole" / FOLDER).exists()


def test_pieces_without_a_name_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped_after(monkeypatch, tmp_path, 5)
    identity = tmp_path / FOLDER / "run.json"
    for text in ("[" * 5000, "[]", ""):
        identity.write_text(text)
        with pytest.raises(LoadError, match="of which run"):
            run(tmp_path)
    identity.unlink()
    with pytest.raises(InvalidInputError, match="can't be told from another"):
        run(tmp_path)


def test_two_runs_do_not_share_a_directory(tmp_path: Path) -> None:
    code = "import sys, time\nfrom sinkscope.results import claimed\n"
    code += "with claimed(sys.argv[1]): print('here', flush=True); time.sleep(600)"
    other = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == b"here\n"
        with pytest.raises(WriteError, match="Another run"):
            run(tmp_path)
    finally:
        other.kill()
        other.communicate()
    run(tmp_path)


def test_a_damaged_piece_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped_after(monkeypatch, tmp_path, 5)
    piece = sorted((tmp_path / FOLDER).glob("*.safetensors"))[0]
    for damaged in (piece.read_bytes()[:20], save({"a": torch.zeros(1)})):
        piece.write_bytes(damaged)
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


def let_fit(model: Any, n: int) -> None:
    """Let a model run out of memory where more than n prompts pass at once."""

    def refuse_more(module: Any, given: Any, z: torch.Tensor) -> None:
        if len(z) > n:
            raise MemoryError

    ss.model_view(model).hook_point(ss.Site("z", 1)).register_forward_hook(refuse_more)


class Interrupted(Exception):
    """Raised where the run is to end."""


@pytest.mark.filterwarnings("ignore:.* prompts at once did not fit")
def test_a_chunk_that_ran_in_pieces_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = hook(tiny_gpt2(), "bridge")
    batch = ss.token_batch(model, torch.randint(50, (9, 8)))
    expected = ss.reproduce(model, batch)

    def in_the_second_chunk(n: int) -> None:
        done.append(n)
        if sum(done) > 12 * 4:
            raise Interrupted

    done: list[int] = []
    let_fit(model, 2)
    with pytest.raises(Interrupted):
        ss.reproduce(model, batch, out=tmp_path, batch_size=4, progress=in_the_second_chunk)
    pieces = files(tmp_path / FOLDER)
    assert sorted(pieces) == ["000000000.safetensors", "000000004.000.safetensors", "run.json"]
    assert b"passing" not in pieces["000000000.safetensors"]
    forward, ran = ModelView.forward, set()

    def noted(self: ModelView, chunk: ss.TokenBatch, *arguments: object) -> object:
        ran.update(tuple(row) for row in chunk.ids.tolist())
        return forward(self, chunk, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(ModelView, "forward", noted)
    again = ss.reproduce(model, batch, out=tmp_path, batch_size=4)
    assert ran == {tuple(row) for row in batch.ids[4:].tolist()}
    assert_same(again, expected)


@pytest.mark.filterwarnings("ignore:.* prompts at once did not fit")
def test_processes_share_chunks_that_ran_in_pieces(tmp_path: Path) -> None:
    model = hook(tiny_gpt2(), "bridge")
    batch = ss.token_batch(model, torch.randint(50, (8, 8)))
    expected = ss.reproduce(model, batch)

    let_fit(model, 1)
    with pytest.raises(LoadError, match="Another process left nothing"):
        ss.reproduce(model, batch, batch_size=4, out=tmp_path, group=Processes(1, 2))
    halves = ss.reproduce(model, batch, batch_size=4, out=tmp_path, group=Processes(0, 2))
    assert_same(halves, expected)


def assert_same(ours: Any, theirs: Any) -> None:
    """The same results, up to what the number of prompts at a time rounds."""
    assert ours.results.keys() == theirs.results.keys()
    for name, result in theirs.results.items():
        for field, value in vars(result).items():
            if isinstance(value, np.ndarray):
                got = getattr(ours.results[name], field)
                np.testing.assert_allclose(got, value, rtol=0, atol=1e-9, err_msg=f"{name} {field}")
