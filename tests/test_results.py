"""Results come back from disk as they were, and a damaged or foreign file never does."""

from __future__ import annotations

import hashlib
import json
import math
import os
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from models import hook, tiny_gpt2

import sinkscope as ss
from sinkscope.errors import LoadError, WriteError
from sinkscope.experiments.delta import Delta
from sinkscope.experiments.massive_activations import MassiveActivations
from sinkscope.experiments.table1 import Table1
from sinkscope.results import Result, dump_json, require_writable, write_bytes, write_text

KINDS = (*ss.experiments.EXPERIMENTS,)


@pytest.fixture(scope="module")
def model() -> Any:
    return hook(tiny_gpt2(), "bridge")


@pytest.fixture(scope="module")
def results(model: Any) -> dict[str, Result]:
    """One result of every kind, from prompts of unequal length so that some hold NaN."""
    rows = [list(range(1, 9)), list(range(9, 14))]
    batch = ss.token_batch(model, rows, padding="left", corpora=["a", "b"])
    return ss.reproduce(model, batch).results


def changed(value: Any) -> Any:
    """Another value of the same type and shape."""
    if isinstance(value, np.ndarray):
        return np.where(np.isnan(value), 1.0, value) + 1.0
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + 1
    if isinstance(value, str):
        return value + "x"
    return (*value, value[-1]) if value else None


def test_every_experiment_is_covered(results: dict[str, Result]) -> None:
    assert set(results) == set(KINDS)
    assert {name: result.kind for name, result in results.items()} == {k: k for k in KINDS}


@pytest.mark.parametrize("kind", KINDS)
def test_a_result_comes_back_equal(kind: str, results: dict[str, Result], tmp_path: Path) -> None:
    result = results[kind]
    assert result.save(tmp_path / "made" / "here") == tmp_path / "made" / "here"
    loaded = type(result).load(tmp_path / "made" / "here")
    assert loaded == result
    assert dump_json(loaded.summary()) == dump_json(result.summary())
    assert loaded.to_dataframe().equals(result.to_dataframe())
    for field in fields(result):
        ours, theirs = getattr(result, field.name), getattr(loaded, field.name)
        assert type(ours) is type(theirs)
        other = changed(ours)
        if other is not None:
            assert replace(result, **{field.name: other}) != result, "equality sees each field"
        if isinstance(ours, np.ndarray):
            assert ours.dtype == theirs.dtype


def test_results_of_one_run_share_a_directory(results: dict[str, Result], tmp_path: Path) -> None:
    for result in results.values():
        result.save(tmp_path)
    assert len(list(tmp_path.iterdir())) == 2 * len(results)
    assert all(type(result).load(tmp_path) == result for result in results.values())


def test_values_that_json_has_no_word_for(model: Any, tmp_path: Path) -> None:
    rules = (ss.TopK(12), ss.MeanStd(math.inf), ss.MeanStd(math.nan))
    result = ss.experiments.massive_activations.run(model, rules=rules)
    assert result.thresholds[0] == -math.inf
    assert math.isnan(result.thresholds[2])
    result.save(tmp_path)
    loaded = MassiveActivations.load(tmp_path)
    assert loaded == result
    assert loaded.thresholds[:2] == (-math.inf, math.inf)
    assert math.isnan(loaded.thresholds[2])
    strict_json((tmp_path / "massive_activations.json").read_text())


def test_nan_is_equal_to_nan_alone(results: dict[str, Result]) -> None:
    delta = results["delta"]
    assert isinstance(delta, Delta)
    assert np.isnan(delta.values).any()
    assert replace(delta, values=delta.values.copy()) == delta
    assert replace(delta, values=np.nan_to_num(delta.values)) != delta
    assert delta != results["table1"]
    assert delta != "delta"


# --- what is not this result --------------------------------------------------------------


def refused(kind: type[Result], directory: Path) -> str:
    with pytest.raises(LoadError) as caught:
        kind.load(directory)
    message = str(caught.value)
    assert all(part in message for part in ("Expected: ", "Got: ", "To fix it: ")), message
    return message


@pytest.fixture
def saved(results: dict[str, Result], tmp_path: Path) -> Path:
    return results["table1"].save(tmp_path / "saved")


def edit_header(directory: Path, **changes: Any) -> None:
    path = directory / "table1.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize("suffix", ["json", "npz"])
@pytest.mark.parametrize(
    "damage",
    [
        lambda data: None,
        lambda data: b"",
        lambda data: data[: len(data) // 2],
        lambda data: b"\xff" * 100,
        lambda data: b"[" * 100_000,
    ],
    ids=["absent", "empty", "half", "noise", "deep"],
)
def test_damaged_files(saved: Path, suffix: str, damage: Any) -> None:
    path = saved / f"table1.{suffix}"
    data = damage(path.read_bytes())
    path.unlink() if data is None else path.write_bytes(data)
    assert str(path) in refused(Table1, saved)


def test_a_single_changed_byte(saved: Path) -> None:
    path = saved / "table1.npz"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    refused(Table1, saved)


def test_halves_of_two_results(saved: Path, results: dict[str, Result], tmp_path: Path) -> None:
    table = results["table1"]
    assert isinstance(table, Table1)
    other = replace(table, scores=table.scores / 2).save(tmp_path / "other")
    (saved / "table1.npz").write_bytes((other / "table1.npz").read_bytes())
    assert "does not belong to the table1.json" in refused(Table1, saved)


def test_files_of_another_kind_or_version(saved: Path) -> None:
    assert "no readable delta" in refused(Delta, saved)
    for suffix in ("json", "npz"):
        (saved / f"delta.{suffix}").write_bytes((saved / f"table1.{suffix}").read_bytes())
    assert "kind 'table1'" in refused(Delta, saved)
    edit_header(saved, schema=2)
    assert "schema 2" in refused(Table1, saved)
    for foreign in ("[]", '"table1"', '{"kind": "table1", "schema": 1}'):
        (saved / "table1.json").write_text(foreign)
        assert "something else" in refused(Table1, saved)


@pytest.mark.parametrize("change", ["more", "fewer"])
def test_other_fields(saved: Path, change: str) -> None:
    values = json.loads((saved / "table1.json").read_text())["values"]
    values["later_idea"] = 3
    if change == "fewer":
        del values["later_idea"], values["corpora"]
    edit_header(saved, values=values)
    assert "fields of this version" in refused(Table1, saved)


def test_a_pickle_is_never_opened(saved: Path) -> None:
    path = saved / "table1.npz"
    np.savez(path, scores=np.array([{"any": "object"}], dtype=object))
    edit_header(saved, arrays_sha256=hashlib.sha256(path.read_bytes()).hexdigest())
    assert "can't be read" in refused(Table1, saved)


# --- writing ------------------------------------------------------------------------------


def strict_json(text: str) -> Any:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_json_is_plain_and_strict() -> None:
    value = {
        "nan": math.nan,
        "inf": [-math.inf, 1.5],
        "array": np.array([[1.0, np.nan]], dtype=np.float32),
        "numbers": (np.int64(3), np.bool_(True), np.float16(0.5)),
        5: "é\u2028\x1b",
    }
    assert strict_json(dump_json(value)) == {
        "nan": None,
        "inf": [None, 1.5],
        "array": [[1.0, None]],
        "numbers": [3, True, 0.5],
        "5": "é\u2028\x1b",
    }


@pytest.mark.parametrize("step", ["write", "replace", "chmod"])
def test_a_failing_write_leaves_the_old_file_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    path = tmp_path / "file"
    write_text(path, "the old content")

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        if step == "write":
            patched.setattr(os, "fdopen", fail)
        else:
            patched.setattr(os, step, fail)
        with pytest.raises(WriteError, match="No space left on device"):
            write_bytes(path, b"new")
    assert path.read_text() == "the old content"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_an_interrupted_write_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_text(tmp_path / "file", "new")
    assert list(tmp_path.iterdir()) == []


def test_files_get_the_usual_permissions(tmp_path: Path) -> None:
    write_text(tmp_path / "ours", "x")
    (tmp_path / "usual").write_text("x")
    assert (tmp_path / "ours").stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_directories_that_can_not_be_written(results: dict[str, Result], tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    for bad in (file, file / "below", tmp_path / "nul\0"):
        for write in (results["table1"].save, require_writable):
            with pytest.raises(WriteError) as caught:
                write(bad)
            message = str(caught.value)
            assert all(part in message for part in ("Expected: ", "Got: ", "To fix it: "))
    assert file.read_text() == "mine"
    (tmp_path / "taken" / "table1.json").mkdir(parents=True)
    with pytest.raises(WriteError, match=r"table1\.json"):
        results["table1"].save(tmp_path / "taken")


def test_a_probe_leaves_no_trace(tmp_path: Path) -> None:
    require_writable(tmp_path / "new")
    assert list((tmp_path / "new").iterdir()) == []


def test_results_are_frozen(results: dict[str, Result]) -> None:
    for result in results.values():
        with pytest.raises(AttributeError):
            result.extra = 1  # type: ignore[attr-defined]
        with pytest.raises(TypeError):
            hash(result)


def test_nothing_but_the_last_axis_is_padded(results: dict[str, Result]) -> None:
    """The fixture does hold NaN where, and only where, the short prompt has no token."""
    delta = results["delta"]
    assert isinstance(delta, Delta)
    expected = torch.zeros(2, 3, 3, 8, dtype=torch.bool)
    expected[1, ..., 5:] = True
    assert (np.isnan(delta.values) == expected.numpy()).all()
