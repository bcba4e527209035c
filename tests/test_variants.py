"""The demo model's variants lack what they are said to lack, and the page about them is true."""

from __future__ import annotations

import json
import math
import re
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import measure_variants
import pytest
import torch
import train_demo
import train_variants
from safetensors.torch import load_file
from train_demo import Plant

import sinkscope as ss
from sinkscope.errors import LoadError
from sinkscope.loading import DEMO_VARIANTS

ROOT = Path(__file__).resolve().parents[1]
SHIPPED = Path(ss.__file__).parent / "demo" / "variants"
PAGE = (ROOT / "docs" / "dispensability.md").read_text("utf-8")
TINY = train_variants.Recipe(
    d_model=16,
    n_layers=2,
    n_heads=2,
    n_ctx=12,
    batch_size=4,
    n_words=20,
    warmup_steps=1,
    learning_rate=0.02,
    plant=Plant(coordinates=(3, 5, 7)),
)


def directory(name: str) -> Path:
    return SHIPPED / name.removeprefix("demo-")


@cache
def facts(name: str) -> dict[str, Any]:
    return json.loads((directory(name) / "training.json").read_text("utf-8"))


@cache
def model_of(name: str) -> Any:
    return ss.load_model(name)


@cache
def measured(name: str) -> measure_variants.Measured:
    return measure_variants.measure(name)


def read(model: Any, batch: ss.TokenBatch, site: ss.Site) -> torch.Tensor:
    """What one site held in a run of the whole batch."""
    seen: list[torch.Tensor] = []
    with ss.model_view(model).hooks(
        [(site, lambda tensor, hook: seen.append(tensor.detach().clone()))]
    ):
        model(batch.ids)
    return seen[0]


@pytest.fixture(params=DEMO_VARIANTS)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


# --- what is shipped ----------------------------------------------------------------------


def test_names_directories_and_recipes_are_the_same() -> None:
    names = {name.removeprefix("demo-") for name in DEMO_VARIANTS}
    assert names == set(train_variants.VARIANTS)
    assert names == {path.name for path in SHIPPED.iterdir() if path.is_dir()}


def test_the_files_are_small_and_all_are_package_data(name: str) -> None:
    files = [path for path in directory(name).rglob("*") if path.is_file()]
    assert {path.name for path in files} == {
        "config.json",
        "model.safetensors",
        "prompts.jsonl",
        "tokenizer.json",
        "tokenizer_config.json",
        "training.json",
    }
    assert sum(path.stat().st_size for path in files) <= 4_000_000
    settings = (ROOT / "pyproject.toml").read_text("utf-8")
    patterns = re.search(r"package-data\]\nsinkscope = \[(.*?)\]", settings, re.DOTALL)[1]  # type: ignore[index]
    packed = {
        path
        for pattern in re.findall(r'"(.*?)"', patterns)
        for path in Path(ss.__file__).parent.glob(pattern)
    }
    assert set(files) <= packed


def test_a_variant_loads_by_name_with_its_prompts(name: str) -> None:
    model = model_of(name)
    view = ss.model_view(model)
    assert view.name == f"sinkscope-{name}"
    assert view.dtype == torch.float32
    assert view.parts.processed == ()
    batch = ss.token_batch(model, ss.load_prompts(model, name))
    assert batch.ids.shape == (48, view.n_ctx)
    assert set(batch.bos) == {facts(name)["fixed_bos"]}
    assert not (batch.ids[:, 1:] < 2).any(), "a word that the tokenizer does not know, or a BOS"
    assert ss.token_batch(model, ["w3 w1"], bos="prepend").ids.tolist() == [[0, 5, 3]]


def test_a_name_that_is_none_of_them() -> None:
    with pytest.raises(LoadError, match="no demo model 'demo-grwon'") as caught:
        ss.load_model("demo-grwon")
    assert all(name in str(caught.value) for name in DEMO_VARIANTS)


# --- what is missing ----------------------------------------------------------------------


def test_the_query_bias_is_zero_where_it_is_said_to_be(name: str) -> None:
    raw = ss.query_bias(model_of(name))
    assert bool((raw == 0).all()) == ("query-bias" in name)
    effective = ss.query_bias(model_of(name), "effective")
    assert bool((effective == 0).all()) == ("no-effective-query-bias" in name)


def test_the_first_mlp_gives_zero_where_it_is_said_to_be_missing(name: str) -> None:
    model = model_of(name)
    batch = measure_variants.prompts_of(model, name)
    first = read(model, batch, ss.Site("mlp_out", 0))
    assert bool((first == 0).all()) == ("no-first-mlp" in name)
    assert not (read(model, batch, ss.Site("mlp_out", 1)) == 0).all()


def test_learned_positions_are_missing_where_they_are_said_to_be(name: str) -> None:
    parts = ss.model_view(model_of(name)).parts
    assert parts.learned_positions == ("rotary" not in name)
    assert (parts.positions == "rotary") == ("rotary" in name)


def test_the_record_says_what_is_planted(name: str) -> None:
    record = facts(name)
    assert record["planted"] == ("planted" in name)
    assert (record["plant"] is not None) == record["planted"]
    assert (record["missing"] is None) == (name in ("demo-grown", "demo-planted"))
    assert record["fixed_bos"] == ("grown" in name and "no-bos" not in name)


def test_all_were_trained_alike() -> None:
    records = [facts(name) for name in DEMO_VARIANTS]
    for key in ("settings", "steps", "tokens", "seed", "task", "versions"):
        assert all(record[key] == records[0][key] for record in records), key


# --- what was measured --------------------------------------------------------------------


def test_the_record_of_the_training_is_what_the_shipped_weights_give(name: str) -> None:
    """Rounding to half precision is all that came after the last look."""
    last = torch.tensor(facts(name)["curve"][-1]["attention_to_first"])
    torch.testing.assert_close(measured(name).scores, last, rtol=0, atol=0.01)

    model, triggers = model_of(name), facts(name)["settings"]["n_triggers"]
    ids = measure_variants.prompts_of(model, name).ids
    with torch.no_grad():
        losses = -model(ids)[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    copied = ids[:, 2:-1] < 2 + triggers  # the word before is a trigger
    assert 0.1 < float(copied.double().mean()) < 0.5
    assert (ids[:, 3:] == ids[:, 1:-2])[copied].all()
    loss = float(losses[:, 2:][copied].mean())
    assert loss == pytest.approx(facts(name)["final_loss_on_copies"], abs=0.002)


def test_the_step_at_which_a_sink_appeared_is_in_the_curve(name: str) -> None:
    curve = facts(name)["curve"]
    assert curve[0]["step"] == 0
    assert all(a["step"] < b["step"] for a, b in pairwise(curve))
    highest = {entry["step"]: max(map(max, entry["attention_to_first"])) for entry in curve}
    steps = [step for step, value in highest.items() if value >= 0.3]
    assert facts(name)["first_step_with_a_sink"] == (steps[0] if steps else None)


def tables() -> list[dict[str, list[str]]]:
    """The page's tables, each as cells by the name in the first column."""
    blocks = re.findall(r"(?:^\|.*\|\n)+", PAGE, flags=re.MULTILINE)
    found = []
    for block in blocks:
        lines = block.strip().split("\n")
        rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
        found.append({row[0]: row[1:] for row in rows})
    return found


@pytest.mark.parametrize("name", ["demo", *DEMO_VARIANTS])
def test_the_tables_of_the_page_are_what_is_measured_now(name: str) -> None:
    """To within 0.02, twice the rounding of a cell and some for other versions of torch."""
    expected = measure_variants.rows([measured(name)])
    headers = (measure_variants.FACTS, measure_variants.RESULTS)
    assert len(tables()) >= 2
    for table, header, (row,) in zip(tables(), headers, expected, strict=False):
        assert tuple(table["model"]) == header[1:]
        assert set(table) == {"model", "---", "demo", *DEMO_VARIANTS}
        for column, shown, now in zip(header[1:], table[name], row[1:], strict=True):
            if re.fullmatch(r"\d+\.\d+", now):
                assert float(shown) == pytest.approx(float(now), abs=0.02), column
            else:
                assert shown == now, column


def test_another_first_token_changes_nothing_else() -> None:
    model = model_of("demo-grown")
    batch = measure_variants.prompts_of(model, "demo-grown")
    other = measure_variants.another_first_token(batch)
    assert torch.equal(other.ids[:, 1:], batch.ids[:, 1:])
    assert (other.ids[:, 0] != batch.ids[:, 0]).all()
    assert batch.bos[0]
    assert not any(other.bos)


def test_without_mean_query_leaves_no_mean() -> None:
    model = model_of("demo-grown")
    batch = measure_variants.prompts_of(model, "demo-grown")
    q = read(model, batch, ss.Site("q", 1))
    with measure_variants.without_mean_query([1]).applied(model):
        centred = read(model, batch, ss.Site("q", 1))
    assert float(q[:, 1:].mean((0, 1)).norm()) > 0.1
    assert float(centred[:, 1:].mean((0, 1)).norm()) < 1e-4


def test_no_sink_head_gives_no_number() -> None:
    assert math.isnan(measure_variants._mean_over(torch.zeros(2, 2), []))
    assert measure_variants._mean_over(torch.eye(2), [(0, 0), (0, 1)]) == 0.5


# --- the script ---------------------------------------------------------------------------


def states(path: Path) -> dict[str, torch.Tensor]:
    return load_file(path / "model.safetensors")


@pytest.mark.parametrize("variant", list(train_variants.VARIANTS))
def test_two_steps_of_training_hold_what_is_missing_and_move_the_rest(
    variant: str, tmp_path: Path
) -> None:
    record = train_variants.run(variant, tmp_path / "two", steps=2, recipe=TINY, look_every=1)
    assert [entry["step"] for entry in record["curve"]] == [0, 1, 2]
    assert json.loads((tmp_path / "two" / "training.json").read_text()) == json.loads(
        json.dumps(record)
    )
    train_variants.run(variant, tmp_path / "one", steps=1, recipe=TINY)
    one, two = states(tmp_path / "one"), states(tmp_path / "two")
    held = train_variants.VARIANTS[variant].held_at_zero
    for key, weight in two.items():
        if any(part in key for part in held):
            assert (weight == 0).all(), key
        elif not ("no-first-mlp" in variant and "h.0.ln_2" in key):  # read by that MLP alone
            assert not torch.equal(weight, one[key]), key
        if key.endswith("c_attn.bias"):
            query = weight[: len(weight) // 3]
            assert bool((query == 0).all()) == (train_variants.QUERY_BIAS in held)


def test_the_same_seed_gives_the_same_weights(tmp_path: Path) -> None:
    for run in ("a", "b"):
        train_variants.run("planted", tmp_path / run, steps=2, recipe=TINY)
    train_variants.run("planted", tmp_path / "c", steps=2, recipe=TINY, seed=1)
    a, b, c = ((tmp_path / run / "model.safetensors").read_bytes() for run in "abc")
    assert a == b
    assert a != c


def test_the_demo_script_shares_the_training_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = train_demo.Recipe(
        plant=TINY.plant, d_model=16, n_layers=2, n_heads=2, n_ctx=12, vocab_size=300, batch_size=4
    )
    monkeypatch.setitem(train_demo.RECIPES, "demo", recipe)
    files = train_demo.source_files(Path(json.__file__).parent)
    monkeypatch.setattr(train_demo, "source_files", lambda root: files * 10)
    monkeypatch.setattr(train_demo, "text_facts", lambda *args: {})
    words = ["train_demo.py", "--out", str(tmp_path), "--steps", "2", "--threads", "1"]
    monkeypatch.setattr("sys.argv", words)
    record = train_demo.run(train_demo.parse_arguments())
    assert record["steps"] == 2
    assert record["final_validation_loss"] == pytest.approx(math.log(300), rel=0.1)
    model = ss.load_model(tmp_path)
    assert ss.token_batch(model, ["def run(self)"]).ids.shape[1] > 3
    assert float(ss.query_bias(model)[1].norm(dim=-1).mean()) == pytest.approx(1, abs=0.05)


def test_what_can_not_be_held_is_refused() -> None:
    model = train_variants.build_model(
        TINY, train_variants.VARIANTS["grown-rotary"], torch.Generator()
    )
    with pytest.raises(ValueError, match="no parameter"):
        train_variants.hold_at_zero(model, train_variants.QUERY_BIAS)


def test_the_task_copies_after_triggers_and_nowhere_from_the_first_position() -> None:
    generator = torch.Generator().manual_seed(3)
    recipe = train_variants.Recipe()
    ids, copied = train_variants.copying_task(200, recipe, bos=True, generator=generator)
    assert (ids[:, 0] == 0).all()
    assert (ids[:, 1:] >= 2).all()
    assert int(ids.max()) == 1 + recipe.n_words
    assert not copied[:, :3].any()
    triggered = ids[:, 2:-1] < 2 + recipe.n_triggers
    assert torch.equal(copied[:, 3:], triggered)
    assert (ids[:, 3:] == ids[:, 1:-2])[triggered].all()
    assert (ids[:, 3:] == ids[:, 1:-2])[~triggered].double().mean() < 0.2
