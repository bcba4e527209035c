"""Situations 35 to 39: running. `docs/situations.md` tells what each is about."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go
import pytest
import torch
from byte_tokenizer import tiny_directory
from models import hook, tiny_gpt2
from torch import Tensor

import sinkscope as ss
from sinkscope.errors import LoadError, WriteError
from sinkscope.plots import export
from sinkscope.prompts import Prompts

IDS = torch.randint(1, 40, (3, 8), generator=torch.Generator().manual_seed(5))


def test_35_float32_on_the_cpu_unless_asked_and_both_are_recorded(tmp_path: Path) -> None:
    directory = tiny_directory(tmp_path / "tiny")
    for options, dtype in (({}, "float32"), ({"dtype": "bfloat16"}, "bfloat16")):
        model = ss.load_model(directory, **options)
        batch = ss.token_batch(model, IDS)
        provenance = ss.reproduce(model, batch, out=tmp_path / dtype).provenance
        assert (provenance["dtype"], provenance["device"]) == (dtype, "cpu")
        written = json.loads((tmp_path / dtype / "results.json").read_text())
        assert written["provenance"] == provenance


def test_36_nothing_runs_or_is_kept_that_was_not_asked_for(kind: str) -> None:
    """No gradients, no layer after the last one read, and one chunk at a time."""
    model = hook(tiny_gpt2(), kind)
    view, batch = ss.model_view(model), ss.token_batch(model, IDS)
    rows: dict[int, list[int]] = {layer: [] for layer in range(3)}
    grads: list[bool] = []
    for layer, seen in rows.items():

        def count(z: Tensor, hook: Any, seen: list[int] = seen) -> None:
            seen.append(len(z))
            grads.append(z.requires_grad)

        model.add_hook(str(view.hook_point(ss.Site("z", layer)).name), count)
    score = ss.sink_score(model, batch, layers=[1], batch_size=2)
    # The first chunk runs to the end of the layer; later ones end where all has been read.
    assert rows == {0: [2, 1], 1: [2], 2: []}
    assert not any(grads)
    assert not score.requires_grad
    assert score.untyped_storage().nbytes() == score.numel() * score.element_size()


@pytest.mark.parametrize("seeded", [ss.ablations.ZeroRandomKeyColumns(), None])
def test_37_the_global_random_state_is_left_alone(kind: str, seeded: Any) -> None:
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
        draws = []
        for seed in (1, 2):
            random.seed(seed)
            draws.append(seeded.draws(ss.model_view(model)))
        assert draws[0] == draws[1]
    assert torch.equal(torch.get_rng_state(), before[0])
    assert str(np.random.get_state()) == before[1]


def test_38_an_image_without_a_browser_ends_and_html_needs_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A renderer that never answers is ended; pages have plotly.js inline or linked by choice."""
    figure = go.Figure(go.Heatmap(z=[[1.0, 2.0]]))
    with monkeypatch.context() as patched:
        patched.setattr(export, "_RENDER", "import time; time.sleep(600)")
        patched.setattr(export.importlib.util, "find_spec", lambda name: object())
        with pytest.raises(WriteError, match=r"within 1 s.*path ending in \.html"):
            ss.plots.save_figure(figure, tmp_path / "a.png", timeout=1.0)
    assert list(tmp_path.iterdir()) == []
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
