"""Killed, out of room, out of memory, or two at once: a clear end, and nothing written is lost."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from byte_tokenizer import tiny_directory
from models import hook, tiny_gpt2

import sinkscope as ss
from sinkscope.cli import main
from sinkscope.errors import LoadError, MemoryLimitError, SmallerBatchWarning, WriteError
from sinkscope.results import Result, claimed, write_text

KINDS = [
    kind
    for name in ss.experiments.EXPERIMENTS
    for kind in vars(getattr(ss.experiments, name)).values()
    if isinstance(kind, type) and issubclass(kind, Result) and kind.__module__.endswith(name)
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_directory(tmp_path_factory.mktemp("models") / "tiny", n_layers=2))


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    path = tmp_path / "prompts.txt"
    path.write_text("some text of some length\nand another text of some length\n")
    return str(path)


def arguments(tiny: str, prompts: str, out: Path) -> list[str]:
    return [
        *("reproduce", "--model", tiny, "--prompts", prompts, "--length", "8"),
        *("--out", str(out), "--plotlyjs", "cdn"),
    ]


def whole(directory: Path, may_be_torn: bool = False) -> dict[str, bytes]:
    """Every file of a run, each of which must be whole; hidden ones are half-written."""
    files = {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file() and not path.name.startswith(".")
    }
    if "results.json" in files:
        ss.load_summary(directory)
    for kind in KINDS:
        if f"arrays/{kind.kind}.json" in files and torn(directory, kind):
            assert may_be_torn
    return files


def torn(directory: Path, kind: type[Result]) -> bool:
    """Whether a kill fell between a result's two files: each is whole, and this is told."""
    try:
        kind.load(directory / "arrays")
    except LoadError:
        return True
    return False


# --- killed -------------------------------------------------------------------------------

SAVES = """
import pickle, sys
from pathlib import Path
import sinkscope.results
run = pickle.loads(sys.stdin.buffer.read())
print("go", flush=True)
while True:
    run.save(Path(sys.argv[1]))
"""


def test_killed_at_any_moment_leaves_files_whole(tmp_path: Path) -> None:
    """A process that writes and writes is killed again and again; no file is ever a part."""
    import pickle

    model = hook(tiny_gpt2(n_layers=2), "bridge")
    run = ss.reproduce(model, ss.token_batch(model, [[1, 2, 3, 4]]))
    rng = random.Random(0)
    expected: set[str] = set()
    for _ in range(4):
        process = subprocess.Popen(
            [sys.executable, "-c", SAVES, str(tmp_path / "out")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": str(Path(ss.__file__).parents[1])},
        )
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(pickle.dumps(run))
        process.stdin.close()
        assert process.stdout.readline() == b"go\n"
        time.sleep(0.05 + 0.3 * rng.random())
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        files = set(whole(tmp_path / "out", may_be_torn=True))
        assert expected <= files, "nothing that was written is lost"
        expected = files
    run.save(tmp_path / "out")  # a claim of the killed is no obstacle
    assert len(whole(tmp_path / "out")) == 2 * len(run.results) + 2


# --- no room, no right --------------------------------------------------------------------


def limited(size: int) -> Any:
    """In the child: no file may grow beyond `size` bytes, as on a full disk."""

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))

    return limit


def test_a_full_disk_ends_in_one_line_and_loses_nothing(
    tiny: str, prompts: str, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert main(arguments(tiny, prompts, out)) == 0
    before = whole(out)
    done = subprocess.run(
        [sys.executable, "-m", "sinkscope", *arguments(tiny, prompts, out)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(ss.__file__).parents[1]), "HF_HUB_OFFLINE": "1"},
        preexec_fn=limited(1000),
        check=False,
        timeout=300,
    )
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("sinkscope: ")
    assert "can't be written" in last
    assert "Traceback" not in done.stderr
    after = whole(out)
    # What was finished before the disk was full stays, for the next run to go on from.
    assert {name for name in after if not name.startswith(".partial/")} == set(before)
    assert after["results.json"] == before["results.json"]
    assert {path.name for path in out.rglob(".*")} <= {".partial"}


def test_a_read_only_place_is_told_before_anything_runs(
    tiny: str, prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def read_only(*args: Any, **kwargs: Any) -> Any:
        raise OSError(30, "Read-only file system")

    def never(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr("tempfile.mkstemp", read_only)
    monkeypatch.setattr("sinkscope.loading.load_model", never)
    assert main(arguments(tiny, prompts, tmp_path / "out")) == 1
    assert "Read-only file system" in capsys.readouterr().err


# --- two runs -----------------------------------------------------------------------------

HOLDS = """
import sys
from sinkscope.results import claimed
with claimed(sys.argv[1]):
    print("mine", flush=True)
    sys.stdin.read()
"""


def test_two_runs_into_one_directory(tiny: str, prompts: str, tmp_path: Path, capsys: Any) -> None:
    """The second ends at once and says why; when the first is gone, however, it may run."""
    out = tmp_path / "out"
    other = subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(out)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(Path(ss.__file__).parents[1])},
    )
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == b"mine\n"
        assert main(arguments(tiny, prompts, out)) == 1
        message = capsys.readouterr().err
        assert "Another run is writing to" in message
        assert "To fix it: wait for its end" in message
        assert list(out.iterdir()) == []
    finally:
        other.kill()
        other.communicate()
    assert main(arguments(tiny, prompts, out)) == 0
    assert "results.json" in whole(out)


def test_claims_nest_and_end(tmp_path: Path) -> None:
    with claimed(tmp_path), claimed(tmp_path, wait=True):
        write_text(tmp_path / "file", "x")
    with pytest.raises(ZeroDivisionError), claimed(tmp_path):
        raise ZeroDivisionError
    with claimed(tmp_path):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    with pytest.raises(WriteError), claimed(tmp_path / "file"):
        pass


# --- results.json from elsewhere ----------------------------------------------------------


def test_results_json_comes_back_or_says_why_not(tmp_path: Path) -> None:
    model = hook(tiny_gpt2(n_layers=2), "bridge")
    run = ss.reproduce(model, ss.token_batch(model, [[1, 2, 3, 4]]), out=tmp_path)
    path = tmp_path / "results.json"
    summary = ss.load_summary(path)
    assert summary == ss.load_summary(tmp_path) == json.loads(path.read_text())
    assert summary["provenance"]["weights_sha256"] == run.provenance["weights_sha256"]
    for change, words in (
        ({"schema": 0}, "schema '0'"),
        ({"schema": 2}, "schema '2'"),
        ({"schema": True}, "is not 1"),
        ({"schema": None}, "is not 1"),
        ({"table1": []}, "'table1' of the file is no object"),
        ({"not_applicable": {"delta": 3}}, "'delta' of 'not_applicable' of the file is no string"),
        ({"provenance": {}}, "has no 'sinkscope'"),
        ({"provenance": summary["provenance"] | {"lengths": [1, "2"]}}, "item 1"),
        ({"provenance": summary["provenance"] | {"n_heads": True}}, "no integer"),
    ):
        path.write_text(json.dumps(summary | change))
        with pytest.raises(LoadError) as caught:
            ss.load_summary(path)
        assert words in str(caught.value)
    deep = json.dumps(summary).removesuffix("}") + ', "x": ' + "[" * 900 + "]" * 900 + "}"
    path.write_text(deep)
    with pytest.raises(LoadError):
        ss.load_summary(path)
    with pytest.raises(LoadError, match=r"no readable results\.json"):
        ss.load_summary("a" * 5000)
    del summary["table1"]
    path.write_text(json.dumps(summary))
    with pytest.raises(LoadError, match="has no 'table1'"):
        ss.load_summary(path)
    with pytest.raises(LoadError, match=r"no readable results\.json"):
        ss.load_summary(tmp_path / "absent")


# --- out of memory ------------------------------------------------------------------------

ROWS = [list(range(n, n + 6)) for n in range(1, 12)]
NO_MEMORY = {
    "cuda": lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
    "cpu": lambda: RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to"),
    "python": MemoryError,
}


@pytest.mark.filterwarnings("ignore:.* prompts at once did not fit")
@pytest.mark.parametrize("name", NO_MEMORY)
def test_a_batch_that_does_not_fit_is_halved_and_nothing_is_read_twice(
    kind: str, name: str
) -> None:
    """It fails in the last layer, when readers have seen the others already."""
    model = hook(tiny_gpt2(), kind)
    batch = ss.token_batch(model, ROWS)
    expected = ss.reproduce(model, batch)
    terms = ss.decompose_scores(model, batch)
    sizes: list[int] = []

    def fits_four(z: torch.Tensor, hook: Any) -> None:
        sizes.append(len(z))
        if len(z) > 4:
            raise NO_MEMORY[name]()

    model.add_hook(str(ss.model_view(model).hook_point(ss.Site("z", 1)).name), fits_four)
    with pytest.warns(SmallerBatchWarning, match=r"10 prompts at once.* goes on with 5"):
        patterns = ss.patterns(model, batch, batch_size=10)
    assert sizes == [10, 5, 2, 2, 1, 2, 2, 1, 1]
    torch.testing.assert_close(patterns, ss.patterns(model, batch, batch_size=1))
    with pytest.warns(SmallerBatchWarning, match="11 prompts at once"):
        again = ss.reproduce(model, batch)
    for key, result in expected.results.items():
        for field, value in vars(result).items():
            ours = getattr(again.results[key], field)
            if isinstance(value, np.ndarray):
                np.testing.assert_allclose(ours, value, rtol=0, atol=1e-9, err_msg=f"{key} {field}")
    with pytest.warns(SmallerBatchWarning):
        torch.testing.assert_close(ss.decompose_scores(model, batch).total, terms.total)


@pytest.mark.filterwarnings("ignore:.* prompts at once did not fit")
def test_a_prompt_that_does_not_fit_is_an_error(kind: str) -> None:
    model = hook(tiny_gpt2(), kind)
    batch, view = ss.token_batch(model, ROWS), ss.model_view(model)

    def never(z: torch.Tensor, hook: Any) -> None:
        raise MemoryError

    held = [len(point._forward_hooks) for point in model.hook_dict.values()]
    edit = ss.Ablation.from_hook(ss.Site("z", 0), never)
    with (
        pytest.warns(SmallerBatchWarning),
        pytest.raises(MemoryLimitError, match=r"single prompt.*one prompt of 6 tokens"),
    ):
        ss.sink_score(model, batch, edit)
    assert [len(point._forward_hooks) for point in model.hook_dict.values()] == held
    assert view.parts.query_bias


def test_another_error_is_no_lack_of_memory(kind: str) -> None:
    model = hook(tiny_gpt2(), kind)

    def broken(z: torch.Tensor, hook: Any) -> None:
        raise RuntimeError("something else")

    with pytest.raises(RuntimeError, match="something else"):
        ss.patterns(
            model, ss.token_batch(model, ROWS), ss.Ablation.from_hook(ss.Site("z", 0), broken)
        )
