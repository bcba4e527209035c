"""Whatever a file of prompts or results holds: a value, or a `SinkscopeError`, and no other end.

`HYPOTHESIS_CASES=20000 pytest tests/test_hostile_input.py` draws so many cases.
"""

from __future__ import annotations

import io
import json
import os
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from byte_tokenizer import byte_tokenizer, tiny_directory
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from models import hook, tiny_gpt2

import sinkscope as ss
from sinkscope.cli import main
from sinkscope.errors import SinkscopeError
from sinkscope.experiments.table1 import Table1
from sinkscope.prompts import Prompts, _rows_of_ids, read_prompts
from sinkscope.results import misfit

CASES = int(os.environ.get("HYPOTHESIS_CASES", "150"))
fuzzed = settings(
    max_examples=CASES,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=CASES == 150,
    database=None,
)

SCRAPS = st.sampled_from(
    [
        *(
            b'"',
            b"'",
            b"\\",
            b",",
            b"\n",
            b"\r",
            b"\x00",
            b"\xff",
            b"\xef\xbb\xbf",
            b"\xed\xa0\x80",
        ),
        *(b"text", b"corpus", b'{"text": ', b'{"text": "a"}', b'"\\ud800"', b"NaN", b"1e999"),
        *(b"[" * 3000, b'{"a":' * 3000, b"9" * 5000, b"<script>", b"\x1b[2J", b"\xe2\x80\xae"),
    ]
)
FILES = st.lists(SCRAPS | st.binary(max_size=12), max_size=12).map(b"".join)


@pytest.fixture(scope="module")
def model() -> Any:
    return ss.load_model(tiny_gpt2(n_layers=1, n_ctx=64, d_vocab=257), tokenizer=byte_tokenizer())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("files")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = hook(tiny_gpt2(n_layers=2), "bridge")
    directory = tmp_path_factory.mktemp("run")
    ss.reproduce(model, ss.token_batch(model, [[1, 2, 3, 4]]), out=directory)
    return directory


def read_or_complain(path: Path) -> tuple[Prompts | None, str]:
    try:
        return read_prompts(path), ""
    except SinkscopeError as error:
        return None, str(error)


# --- prompts ------------------------------------------------------------------------------


@example(data=b'text\n"a\nb', suffix=".csv")
@example(data=b'{"text": "\\ud800"}', suffix=".jsonl")
@example(data=b"text\n" + b"x" * 200_000, suffix=".csv")
@fuzzed
@given(data=FILES, suffix=st.sampled_from([".txt", ".csv", ".jsonl"]))
def test_prompt_files(folder: Path, model: Any, data: bytes, suffix: str) -> None:
    """Prompts that are text of one token or more, or an error that says where."""
    path = folder / f"prompts{suffix}"
    path.write_bytes(data)
    prompts, complaint = read_or_complain(path)
    if prompts is None:
        assert all(part in complaint for part in ("Expected: ", "Got: ", "To fix it: "))
        assert len(complaint) < 2000
        return
    assert len(prompts.texts) == len(prompts.corpora) > 0
    assert all(isinstance(text, str) and text.strip() for text in prompts.texts)
    try:
        batch = ss.token_batch(model, prompts, length=4, padding="right")
    except SinkscopeError:
        return
    assert batch.ids.shape[1] <= 4


@fuzzed
@given(
    given=st.recursive(
        st.none() | st.integers() | st.floats() | st.text(max_size=5) | st.booleans(),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner),
        max_leaves=8,
    )
)
def test_things_given_as_prompts(model: Any, given: Any) -> None:
    """Behind the annotation, which is checked in tests alone."""
    try:
        rows, texts = _rows_of_ids(ss.model_view(model), given, None)
    except SinkscopeError:
        return
    assert len(rows) == len(texts) > 0
    assert all(type(i) is int for row in rows for i in row)
    assert all(rows)


@pytest.mark.parametrize("suffix", ["txt", "jsonl", "csv"])
def test_a_line_of_ten_megabytes(folder: Path, model: Any, suffix: str) -> None:
    """Read, and cut to `length`; or, in CSV, refused, because its reader has a limit."""
    line = "many words " * 1_000_000
    content = {"txt": line, "jsonl": json.dumps({"text": line}), "csv": f"text\n{line}"}[suffix]
    path = folder / f"long.{suffix}"
    path.write_text(content)
    prompts, complaint = read_or_complain(path)
    if prompts is None:
        assert suffix == "csv"
        assert len(complaint) < 500
        return
    assert len(prompts.texts[0]) > 10_000_000
    batch = ss.token_batch(model, [prompts.texts[0][:100_000]], length=8)
    assert batch.ids.shape == (1, 8)
    with pytest.raises(SinkscopeError, match="longer than the model's context"):
        ss.token_batch(model, [prompts.texts[0][:100_000]])


# --- results ------------------------------------------------------------------------------


@fuzzed
@given(
    cuts=st.lists(st.tuples(st.integers(0, 10**6), st.binary(max_size=3)), min_size=1, max_size=3),
    suffix=st.sampled_from(["json", "npz"]),
    until=st.none() | st.integers(0, 10**6),
)
def test_damaged_arrays(
    saved: Path, folder: Path, cuts: list[tuple[int, bytes]], suffix: str, until: int | None
) -> None:
    """Bytes replaced anywhere, and the end cut off anywhere."""
    whole = {s: (saved / "arrays" / f"table1.{s}").read_bytes() for s in ("json", "npz")}
    data = bytearray(whole[suffix])
    for anywhere, new in cuts:
        place = anywhere % len(data)
        data[place : place + len(new)] = new
    if until is not None:
        del data[until % (len(data) + 1) :]
    for name, content in whole.items():
        (folder / f"table1.{name}").write_bytes(bytes(data) if name == suffix else content)
    try:
        loaded = Table1.load(folder)
    except SinkscopeError:
        return
    assert suffix == "json" or bytes(data) == whole["npz"], "arrays have a checksum"
    assert isinstance(loaded, Table1)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=10,
)


@fuzzed
@given(name=st.sampled_from(["schema", "kind", "values", "arrays_sha256", "x"]), value=JSON)
def test_headers_with_other_values(saved: Path, folder: Path, name: str, value: Any) -> None:
    header = json.loads((saved / "arrays" / "table1.json").read_text())
    header[name] = value
    (folder / "table1.json").write_text(json.dumps(header))
    (folder / "table1.npz").write_bytes((saved / "arrays" / "table1.npz").read_bytes())
    with suppress(SinkscopeError):
        assert isinstance(Table1.load(folder), Table1)


@fuzzed
@given(data=st.data(), value=JSON)
def test_values_of_another_type(saved: Path, folder: Path, data: st.DataObject, value: Any) -> None:
    header = json.loads((saved / "arrays" / "table1.json").read_text())
    header["values"][data.draw(st.sampled_from(sorted(header["values"])))] = value
    (folder / "table1.json").write_text(json.dumps(header))
    (folder / "table1.npz").write_bytes((saved / "arrays" / "table1.npz").read_bytes())
    with suppress(SinkscopeError):
        assert isinstance(Table1.load(folder), Table1)


@fuzzed
@given(path=st.lists(st.integers(0, 30), max_size=4), value=JSON)
def test_results_json_from_elsewhere(
    saved: Path, folder: Path, path: list[int], value: Any
) -> None:
    """Any value anywhere in results.json: the summary, or a LoadError."""
    summary = json.loads((saved / "results.json").read_text())
    target: Any = summary
    for step in path:
        children = list(target) if isinstance(target, dict) else range(len(target))
        if not len(children):
            break
        key = children[step % len(children)]
        if not isinstance(target[key], (dict, list)):
            target[key] = value
            break
        target = target[key]
    (folder / "results.json").write_text(json.dumps(summary))
    with suppress(SinkscopeError):
        assert ss.load_summary(folder)["schema"] == 1


@fuzzed
@given(value=JSON)
def test_a_schema_never_takes_what_does_not_fit(value: Any) -> None:
    schema = {
        "type": "object",
        "required": ["a"],
        "properties": {"a": {"type": "array", "items": {"type": "integer"}}},
        "additionalProperties": {"type": "string"},
    }
    fits = (
        isinstance(value, dict)
        and isinstance(value.get("a"), list)
        and all(type(item) is int for item in value["a"])
        and all(isinstance(item, str) for key, item in value.items() if key != "a")
    )
    assert (misfit(value, schema) is None) == fits


def test_a_zip_bomb_is_not_unpacked_before_its_checksum(saved: Path, folder: Path) -> None:
    """An array of 2 GB of zeros packs into 2 MB; its checksum is not that of the header."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        header = io.BytesIO()
        shape = {"descr": "<f8", "fortran_order": False, "shape": (2**40,)}
        np.lib.format.write_array_header_1_0(header, shape)
        archive.writestr("scores.npy", header.getvalue())
    (folder / "table1.npz").write_bytes(buffer.getvalue())
    (folder / "table1.json").write_bytes((saved / "arrays" / "table1.json").read_bytes())
    with pytest.raises(SinkscopeError, match="does not belong to"):
        Table1.load(folder)


# --- names and paths ----------------------------------------------------------------------

NAMES = ["<b>&\"'</b>", "a\x1b[31mb", "..", "a/../b", "nul\0l", "x" * 300, "\u202e", " ", "-rf"]


@pytest.mark.parametrize("name", NAMES)
def test_tricks_in_out(name: str, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """`--out` is a path and nothing else: files land in it, or one line says why not."""
    tiny = str(tiny_directory(tmp_path / "model", n_layers=2))
    work = tmp_path / "work" / "inner"
    work.mkdir(parents=True)
    monkeypatch.chdir(work)
    (work / "p.txt").write_text("<script>alert(1)</script> and more\n")
    before = {path for path in tmp_path.rglob("*") if path.is_file()}
    argv = ["reproduce", "--model", tiny, "--prompts", "p.txt", "--length", "8", f"--out={name}"]
    capsys.readouterr()  # transformers has shown how it saves
    code = main([*argv, "--plotlyjs", "cdn"])
    told = capsys.readouterr()
    assert "Traceback" not in told.err
    assert "\x1b[31m" not in told.out + told.err
    new = {path for path in tmp_path.rglob("*") if path.is_file()} - before
    if code == 0:
        place = (work / name).resolve()
        assert new
        assert all(place in path.resolve().parents for path in new)
        assert "<script>alert" not in (place / "report.html").read_text()
    else:
        assert told.err.startswith("sinkscope: ")
        assert not new


def test_results_are_written_under_names_of_their_own(saved: Path) -> None:
    """No file's name comes from prompts, corpora or conditions."""
    hostile = {"../../evil": ss.ablations.Composition(), "a/b": ss.ablations.SkipMLP()}
    model = hook(tiny_gpt2(n_layers=2), "bridge")
    batch = ss.token_batch(model, [[1, 2, 3, 4]], corpora=["../../<img>"])
    result = ss.experiments.table1.run(model, batch, conditions=hostile)
    written = {path.name for path in result.save(saved / "hostile").iterdir()}
    assert written == {"table1.json", "table1.npz"}
    assert Table1.load(saved / "hostile") == result
