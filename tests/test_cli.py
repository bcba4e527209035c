"""The command line: what it prints and writes, and one line on stderr where it can't."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from byte_tokenizer import tiny_directory

import sinkscope as ss
from sinkscope import loading
from sinkscope.cli import main
from sinkscope.errors import LoadError

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_directory(tmp_path_factory.mktemp("models") / "tiny"))


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the command in this process: exit code, stdout, stderr."""

    def run(*argv: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(argv)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def prompt_file(path: Path, rows: list[dict[str, str]]) -> str:
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return str(path)


def demo_rows(per_corpus: int) -> list[dict[str, str]]:
    prompts = ss.load_prompts(None, "demo")
    rows = list(zip(prompts.texts, prompts.corpora, strict=True))
    corpora = dict.fromkeys(prompts.corpora)
    return [
        {"text": text, "corpus": corpus}
        for name in corpora
        for text, corpus in [row for row in rows if row[1] == name][:per_corpus]
    ]


# --- reproduce ----------------------------------------------------------------------------


def test_reproduce_on_the_demo_model(tmp_path: Path, run: Run) -> None:
    out = tmp_path / "made" / "here"
    file = prompt_file(tmp_path / "some.jsonl", demo_rows(per_corpus=2))
    code, stdout, stderr = run("reproduce", "--prompts", file, "--out", str(out))
    assert code == 0, stderr
    assert "Traceback" not in stderr

    with (out / "table1.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    names = ["natural_language", "math", "code", "all"]
    assert [(row["corpus"], row["condition"]) for row in rows] == [
        (corpus, condition) for corpus in names for condition in ss.PAPER_CONDITIONS
    ]
    assert [row["n"] for row in rows] == ["2"] * 30 + ["6"] * 10

    lines = stdout.splitlines()
    printed = {(row["corpus"], row["condition"]): f"{float(row['sink_score']):.4f}" for row in rows}
    for (corpus, condition), score in printed.items():
        line = next(li for li in lines if li.startswith(corpus) and f" {condition} " in li)
        assert score in line

    content = json.loads((out / "results.json").read_text())
    assert content["provenance"]["model"] == "sinkscope-demo"
    assert content["provenance"]["prompts"] == file
    assert content["provenance"]["n_prompts"] == 6
    assert content["not_applicable"] == {}
    assert "published" not in content
    report = (out / "report.html").read_text()
    assert "sinkscope-demo" in report
    assert ss.experiments.table1.Table1.load(out / "arrays").scores.shape == (10, 6, 6, 4)
    assert not [path.name for path in out.rglob(".*")], "no temporary file is left"


def test_reproduce_folds_whitespace_and_cuts(tmp_path: Path, run: Run, tiny: str) -> None:
    text = "one  two\tthree four five"
    file = prompt_file(tmp_path / "p.jsonl", [{"text": text}, {"text": " ".join(text.split())}])
    code, _, stderr = run(
        *("reproduce", "--model", tiny, "--prompts", file, "--length", "12"),
        *("--batch-size", "1", "--out", str(tmp_path / "out"), "--dtype", "float64"),
    )
    assert code == 0, stderr
    provenance = json.loads((tmp_path / "out" / "results.json").read_text())["provenance"]
    assert provenance["prompt_lengths"] == [12, 12]
    assert provenance["batch_size"] == 1
    assert provenance["dtype"] == "float64"
    scores = ss.experiments.table1.Table1.load(tmp_path / "out" / "arrays").scores
    assert (scores[:, 0] == scores[:, 1]).all(), "both rows hold the same tokens"


# --- mitigate -----------------------------------------------------------------------------


def test_mitigate_prints_what_it_writes(tmp_path: Path, run: Run, tiny: str) -> None:
    text = "one  two\tthree four five"
    file = prompt_file(tmp_path / "p.jsonl", [{"text": text}, {"text": text[::-1]}])
    out = tmp_path / "out"
    code, stdout, stderr = run(
        *("mitigate", "--model", tiny, "--prompts", file, "--length", "10", "--seeds", "2"),
        *("--bits", "6", "--window", "3", "--keep-first", "1", "--out", str(out)),
    )
    assert code == 0, stderr
    with (out / "mitigation.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    lines = stdout.splitlines()
    for row in rows:
        line = next(li for li in lines if li.startswith(row["mitigation"] + "  "))
        assert f"{float(row['sink_score']):.4f}" in line
        assert f"{float(row['loss_added']):+.4f}" in line
    content = json.loads((out / "mitigation.json").read_text())
    bench = ss.MitigationBench.load(out / "arrays")
    assert (bench.bits, bench.window, bench.keep_first, bench.seeds) == (6, 3, 1, (0, 1))
    assert [row["mitigation"] for row in rows] == list(bench.names)
    assert content["provenance"]["n_prompts"] == 2
    assert len(content["mitigation_bench"]["per_prompt"]["Untouched"]["loss"]) == 2
    page = (out / "mitigation.html").read_text()
    assert "nats per token" in page
    assert rows[1]["mitigation"] in page
    assert sorted(path.name for path in out.iterdir()) == [
        *("arrays", "mitigation.csv", "mitigation.html", "mitigation.json"),
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--seeds", "0"), "--seeds of 1 or more"),
        (("--bits", "1"), "from 2 to 16"),
        (("--window", "0"), "1 or more"),
        (("--keep-first", "-1"), "0 or more"),
        (("--length", "1"), "--length of 2 or more"),
    ],
)
def test_mitigate_refuses_unusable_numbers(
    tmp_path: Path, run: Run, tiny: str, options: tuple[str, ...], message: str
) -> None:
    file = prompt_file(tmp_path / "p.jsonl", [{"text": "some text that is long enough"}])
    code, _, stderr = run(
        *("mitigate", "--model", tiny, "--prompts", file, "--length", "10", *options),
        *("--out", str(tmp_path / "out")),
    )
    assert code == 1
    assert message in stderr


NASTY = ["\x1b[31mred\x1b[0m", "a\nb", "c\rd", "<b>bold</b> &amp; [bold]", "\u202etfel", "日本"]


def test_hostile_names_do_not_break_the_table(tmp_path: Path, run: Run, tiny: str) -> None:
    rows = [{"text": "some text that is long enough", "corpus": name} for name in NASTY]
    rows[0]["text"] = "<script>alert('x')</script> \x1b[2J and more"
    file = prompt_file(tmp_path / "p.jsonl", rows)
    out = tmp_path / "out"
    code, stdout, stderr = run(
        "reproduce", "--model", tiny, "--prompts", file, "--length", "10", "--out", str(out)
    )
    assert code == 0, stderr
    assert not [c for c in stdout if not c.isprintable() and c != "\n"]
    table = stdout.splitlines()[1:]
    assert len([line for line in table if " Baseline " in line]) == len(NASTY) + 1
    assert any(line.startswith("\\x1b[31mred\\x1b[0m") for line in table)
    assert any(line.startswith("<b>bold</b> &amp; [bold]") for line in table), "no markup is lost"
    assert "<script>alert" not in (out / "report.html").read_text()


# --- epe and decompose --------------------------------------------------------------------


def test_epe(run: Run, tiny: str) -> None:
    code, stdout, stderr = run("epe", "--model", tiny)
    assert (code, stderr) == (0, "")
    epe = ss.extract_epe(ss.load_model(tiny))
    top = ss.find_massive_coordinates(epe.vectors[0], ss.TopK(3))
    lines = stdout.splitlines()
    assert "p + MLP_0(p)" in lines[0]
    assert f"|EPE_0| = {float(epe.vectors[0].norm()):.3f}" in lines[1]
    shown = [line.split()[:2] for line in lines[4:7]]
    assert shown == [
        [str(i), f"{v:+.3f}"]
        for i, v in zip(top.indices.tolist(), top.values.tolist(), strict=True)
    ]
    through = run("epe", "--model", tiny, "--through-ln")[1]
    assert "p + MLP_0(LN2_0(p))" in through
    assert f"{float(ss.extract_epe(ss.load_model(tiny), True).vectors[0].norm()):.3f}" in through


def test_decompose(run: Run, tiny: str) -> None:
    options = ("--layer", "2", "--head", "1", "--query", "3")
    code, stdout, stderr = run("decompose", "<b>\x1b &", "--model", tiny, *options)
    assert (code, stderr) == (0, "")
    model = ss.load_model(tiny)
    batch = ss.token_batch(model, ["<b>\x1b &"])
    terms = ss.decompose_scores(model, batch, layers=2)
    pattern = ss.patterns(model, batch, layers=2)[0, 0, 1, 3]
    rows = [line.rsplit(maxsplit=6) for line in stdout.splitlines()[2:6]]
    for key, row in enumerate(rows):
        named = (terms.content, terms.query_bias, terms.key_bias, terms.bias_bias, terms.total)
        expected = [float(term[0, 0, 1, 3, key]) for term in named]
        assert [float(cell) for cell in row[1:6]] == pytest.approx(expected, abs=6e-4)
        assert float(row[6]) == pytest.approx(float(pattern[key]), abs=6e-4)
    assert [row[0].split()[1] for row in rows] == ["'<'", "'b'", "'>'", "'\\x1b'"]


def test_decompose_picks_the_head_with_most_sink(run: Run, tiny: str) -> None:
    model = ss.load_model(tiny)
    batch = ss.token_batch(model, ["some words"])
    scores = ss.sink_score(model, batch, layers=1)[0, 0]
    stdout = run("decompose", "some words", "--model", tiny)[1]
    assert f"layer 1, head {int(scores.argmax())}, query 9" in stdout


# --- refusals -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("epe", "--model", "./absent"), "There is no directory"),
        (("epe", "--model", "no-one/no-such-model"), "Hugging Face hub"),
        (("epe", "--model", "TINY", "--device", "nonsense"), "nonsense"),
        (("epe", "--model", "TINY", "--device-map", "nonsense"), "nonsense"),
        (("epe", "--model", "TINY", "--device-map", ""), "must not be empty"),
        (("decompose", "", "--model", "TINY"), "no token"),
        (("decompose", "a", "--model", "TINY"), "two tokens"),
        (("decompose", "half \udc80 pair", "--model", "TINY"), "UTF-8"),
        (("decompose", "x" * 65, "--model", "TINY"), "n_ctx=64"),
        (("decompose", "some text", "--model", "TINY", "--layer", "3"), "layers from 0 to 2"),
        (("decompose", "some text", "--model", "TINY", "--layer", "-1"), "layers from 0 to 2"),
        (("decompose", "some text", "--model", "TINY", "--head", "3"), "heads from 0 to 2"),
        (("decompose", "some text", "--model", "TINY", "--query", "9"), "0 to 8"),
        (("reproduce", "--model", "TINY", "--length", "1"), "--length 1"),
        (("reproduce", "--model", "TINY", "--length", "0"), "--length 0"),
        (("reproduce", "--model", "TINY", "--length", "65"), "65"),
        (("reproduce", "--model", "TINY", "--batch-size", "0"), "--batch-size 0"),
        (("reproduce", "--model", "TINY", "--batch-size", "-3"), "--batch-size -3"),
        (("reproduce", "--model", "TINY", "--prompts", "absent.txt"), "absent.txt"),
        (("reproduce", "--model", "TINY", "--prompts", "FOLDER"), ".jsonl"),
        (("reproduce", "--model", "TINY", "--prompts", "TWO LINES.csv"), "not valid CSV"),
        (("reproduce", "--model", "TINY", "--out", "FILE"), "can't be written"),
        (("reproduce", "--model", "TINY", "--out", "FILE/below"), "can't be written"),
    ],
)
def test_errors_are_one_line_and_exit_code_1(
    run: Run,
    tiny: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    argv: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("FOLDER").mkdir()
    Path("FILE").write_text("mine")
    Path("TWO LINES.csv").write_text('text\n"a\nb')
    code, stdout, stderr = run(*[tiny if word == "TINY" else word for word in argv])
    assert code == 1
    assert message in stderr
    assert stderr.startswith("sinkscope: ")
    assert stderr.endswith("\n")
    assert len(stderr.splitlines()) == 1
    assert "Traceback" not in stderr
    assert stdout == ""
    assert Path("FILE").read_text() == "mine"


def test_an_error_of_several_lines_is_printed_in_one(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise ss.SinkscopeError("first\n  second \x1b[2J", got="a\r\nb")

    monkeypatch.setattr("sinkscope.loading.load_model", fail)
    code, _, stderr = run("epe")
    assert code == 1
    assert stderr == "sinkscope: first second \\x1b[2J. Got: a b.\n"


def test_an_interrupt_is_no_traceback(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: Any, **kwargs: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("sinkscope.loading.load_model", interrupt)
    assert run("epe")[0] == 130


def test_a_failed_run_leaves_earlier_results_alone(
    run: Run, tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "results.json").write_text("earlier")
    assert run("reproduce", "--model", tiny, "--length", "65", "--out", str(out))[0] == 1
    assert [path.name for path in out.iterdir()] == ["results.json"]
    assert (out / "results.json").read_text() == "earlier"


@pytest.mark.parametrize(
    "argv",
    [
        (),
        ("unknown",),
        ("epe", "--dtype", "float8"),
        ("reproduce", "--length", "many"),
        ("decompose",),
    ],
)
def test_misuse_is_explained(
    run: Run, argv: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2
    assert "usage: sinkscope" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["epe", "decompose"])
def test_a_model_that_a_map_places_gives_the_same(run: Run, tiny: str, command: str) -> None:
    arguments = (command, "--model", tiny, *(["some words"] if command == "decompose" else []))
    assert run(*arguments, "--device-map", "cpu") == run(*arguments)


def test_every_command_takes_a_device_map(
    run: Run, tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def noted(model: Any, **options: Any) -> Any:
        raise LoadError(f"map {options['device_map']!r}, device {options['device']!r}")

    monkeypatch.setattr(loading, "load_model", noted)
    out = ("--out", str(tmp_path / "out"))
    for argv in (
        ("reproduce", "--model", tiny, *out),
        ("survey", tiny, *out),
        ("mitigate", "--model", tiny, *out),
        ("epe", "--model", tiny),
        ("decompose", "some words", "--model", tiny),
    ):
        code, _, stderr = run(*argv, "--device-map", "auto")
        assert (code, stderr) == (1, "sinkscope: map 'auto', device None.\n"), argv[0]
        assert "map None, device 'cpu'" in run(*argv, "--device", "cpu")[2]


def test_a_device_and_a_device_map_exclude_each_other(
    tiny: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["epe", "--model", tiny, "--device", "cpu", "--device-map", "auto"])
    assert caught.value.code == 2
    assert "not allowed with argument --device" in capsys.readouterr().err


def test_help_names_every_command_and_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    overview = capsys.readouterr().out
    assert all(command in overview for command in ("reproduce", "epe", "decompose"))
    with pytest.raises(SystemExit):
        main(["reproduce", "--help"])
    details = capsys.readouterr().out
    options = ("--model", "--prompts", "--out", "--batch-size", "--device", "--dtype", "--length")
    options += ("--device-map",)
    assert all(option in details for option in options)


def as_a_module(*argv: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "sinkscope", *argv],
        capture_output=True,
        encoding="utf-8",
        env={**os.environ, "HF_HUB_OFFLINE": "1", **environment},
        check=False,
        timeout=300,
    )


def test_a_run_as_a_module_shows_nothing_but_its_result(tiny: str) -> None:
    letters = "añ日"  # that the terminal can't show
    done = as_a_module("decompose", letters, "--model", tiny, PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert done.stdout.startswith("tiny, layer 1, head ")
    assert done.stdout.isascii()
    assert "'a'" in done.stdout


def test_an_error_as_a_module_is_one_line() -> None:
    done = as_a_module("epe", "--model", "./absent")
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("sinkscope: There is no directory './absent'")
    assert done.stderr.count("\n") == 1
