"""Situations 35 to 39: running. `docs/situations.md` tells what each is about."""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go
import pytest
import torch
from byte_tokenizer import byte_tokenizer, tiny_directory
from models import hook, tiny_gpt2
from torch import Tensor
from transformers import AutoModelForCausalLM

import sinkscope as ss
from sinkscope import prompts
from sinkscope.capture import KeepingReader, Part
from sinkscope.errors import LoadError, WriteError
from sinkscope.plots import export
from sinkscope.prompts import Prompts

IDS = torch.randint(1, 40, (3, 8), generator=torch.Generator().manual_seed(5))


def test_35_float32_on_the_cpu_unless_asked_and_both_are_recorded(tmp_path: Path) -> None:
    """Whatever dtype the file is in."""
    directory = tiny_directory(tmp_path / "tiny")
    AutoModelForCausalLM.from_pretrained(directory).half().save_pretrained(directory)
    for options, dtype in (({}, "float32"), ({"dtype": "bfloat16"}, "bfloat16")):
        model = ss.load_model(directory, **options)
        batch = ss.token_batch(model, IDS)
        provenance = ss.reproduce(model, batch, out=tmp_path / dtype).provenance
        assert (provenance["dtype"], provenance["device"]) == (dtype, "cpu")
        written = json.loads((tmp_path / dtype / "results.json").read_text())
        assert written["provenance"] == provenance


def test_36_nothing_runs_or_is_kept_that_was_not_asked_for(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No gradients, no layer after the last one read, one chunk at a time, and no pattern kept."""
    model = hook(tiny_gpt2(), kind)
    view, batch = ss.model_view(model), ss.token_batch(model, IDS)
    rows: dict[int, list[int]] = {layer: [] for layer in range(3)}
    grads: list[bool] = []
    for layer, seen in rows.items():

        def count(z: Tensor, hook: Any, seen: list[int] = seen) -> None:
            seen.append(len(z))
            grads.append(z.requires_grad)

        model.add_hook(str(view.hook_point(ss.Site("z", layer)).name), count)
    held: list[int] = []

    def add(self: KeepingReader, start: int, part: Part) -> None:
        held.append(sum(kept.untyped_storage().nbytes() for kept in part.values()))
        own_add(self, start, part)

    own_add = KeepingReader.add
    monkeypatch.setattr(KeepingReader, "add", add)
    score = ss.sink_score(model, batch, layers=[1], batch_size=2)
    # The first chunk runs to the end of the layer; later ones end where all has been read.
    assert rows == {0: [2, 1], 1: [2], 2: []}
    assert not any(grads)
    assert not score.requires_grad
    assert held == [rows * view.n_heads * score.element_size() for rows in (2, 1)]


def own_draws(draw: Callable[[], Any]) -> None:
    """Python's random state neither decides on what is drawn nor is set by drawing.

    It can't be compared as a whole, since the type checker of these tests draws from it.
    """
    drawn, after = [], []
    for seed in (1, 2):
        random.seed(seed)
        drawn.append(draw())
        after.append(random.random())
    assert drawn[0] == drawn[1]
    assert after[0] != after[1]


@pytest.mark.parametrize("seeded", [ss.ablations.ZeroRandomKeyColumns(), None])
def test_37_the_global_random_state_is_left_alone(
    kind: str, seeded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by the ablation that draws, and by the order of a data set."""
    model = hook(tiny_gpt2(), kind)
    batch = ss.token_batch(model, IDS)
    torch.manual_seed(11)
    np.random.seed(11)
    before = (torch.get_rng_state(), str(np.random.get_state()))
    ss.sink_score(model, batch, seeded)
    if seeded is None:
        ss.reproduce(model, batch)
    else:
        own_draws(lambda: seeded.draws(ss.model_view(model)))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert str(np.random.get_state()) == before[1]
    texts = [f"{number} {'z' * 40}" for number in range(20)]
    monkeypatch.setattr(prompts, "_load_column", lambda *column: texts)
    reader = ss.load_model(tiny_gpt2(d_vocab=257), tokenizer=byte_tokenizer())
    own_draws(lambda: prompts.paper_prompts(reader, per_corpus=3).texts)


HANGS = """
import fcntl, subprocess, sys, time
lock = open({!r}, "w")
fcntl.flock(lock, fcntl.LOCK_EX)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(40)"], pass_fds=[lock.fileno()])
time.sleep(40)
"""
"""A renderer with a browser: both hold a lock as long as they live, and neither answers."""


def test_38_an_image_without_a_browser_ends_and_html_needs_none(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A renderer that never answers is ended; pages have plotly.js inline or linked by choice."""
    fcntl = pytest.importorskip("fcntl")
    figure = go.Figure(go.Heatmap(z=[[1.0, 2.0]]))
    held = tmp_path_factory.mktemp("held") / "lock"
    with monkeypatch.context() as patched:
        patched.setattr(export, "_RENDER", HANGS.format(str(held)))
        patched.setattr(export.importlib.util, "find_spec", lambda name: object())
        with pytest.raises(WriteError, match=r"within 2 s.*path ending in \.html"):
            ss.plots.save_figure(figure, tmp_path / "a.png", timeout=2.0)
    assert list(tmp_path.iterdir()) == []
    with held.open("w") as lock:
        for _ in range(200):  # a process that was killed may take a moment to go
            with suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            time.sleep(0.05)
        else:
            pytest.fail("the renderer or its browser is still there")
    sizes = {}
    for plotlyjs in ("inline", "cdn"):
        page = ss.plots.save_figure(figure, tmp_path / f"{plotlyjs}.html", plotlyjs=plotlyjs)
        sizes[plotlyjs] = page.stat().st_size
    assert sizes["cdn"] < 50_000
    assert sizes["inline"] > 1_000_000


def test_38_attention_pages_are_capped(tmp_path: Path) -> None:
    """Figures of many layers, heads and tokens choose a few, and stay a few megabytes."""
    hf_model = tiny_gpt2(n_layers=8, n_heads=8, n_ctx=64)
    model = ss.load_model(hf_model)
    batch = ss.token_batch(model, torch.randint(1, 40, (1, 64)))
    figure = ss.plots.attention_maps(ss.experiments.attention_maps.run(model, batch))
    page = ss.plots.save_figure(figure, tmp_path / "maps.html", plotlyjs="cdn")
    every = 8 * 8 * 64 * 64 * len(ss.PAPER_CONDITIONS) * 8
    assert page.stat().st_size < every / 4


def test_39_prompts_are_plain_lists_and_files_and_weights_are_safetensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No data set script, no pickle: a pickle is refused with the reason, and never opened."""
    monkeypatch.setitem(sys.modules, "datasets", None)  # importing it would raise
    directory = tiny_directory(tmp_path / "tiny")
    model = ss.load_model(directory)
    (tmp_path / "p.txt").write_text("one prompt\nanother one")
    from_file = ss.token_batch(model, ss.load_prompts(model, tmp_path / "p.txt"), length=10)
    from_list = ss.token_batch(model, ["one prompt", "another one"], length=10)
    assert torch.equal(from_file.ids, from_list.ids)
    assert isinstance(ss.load_prompts(model, tmp_path / "p.txt"), Prompts)

    marker = tmp_path / "ran"

    class Runs:
        def __reduce__(self) -> Any:
            return (Path.touch, (marker,))

    (directory / "model.safetensors").unlink()
    torch.save({"wte": Runs()}, directory / "pytorch_model.bin")
    with pytest.raises(LoadError, match=r"pickle.*runs code"):
        ss.load_model(directory)
    assert not marker.exists()
