"""Device maps, half precision, and how little a run keeps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import IDS, transformers_model
from models import hook, tiny_gpt2
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef

import sinkscope as ss
from sinkscope.capture import stack_layers
from sinkscope.errors import InvalidInputError, LoadError


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for name in ("gpt2", "llama"):
        transformers_model(name, dtype=torch.float32).save_pretrained(root / name)
    return root


@pytest.mark.parametrize("device_map", ["auto", {"": "cpu"}, "cpu"])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_device_map_places_the_model(saved: Path, name: str, device_map: Any) -> None:
    placed = ss.load_model(saved / name, device_map=device_map)
    plain = ss.load_model(saved / name)
    batch = ss.token_batch(plain, IDS)
    ours = ss.patterns(placed, batch)
    torch.testing.assert_close(ours.cpu(), ss.patterns(plain, batch), rtol=0, atol=1e-5)
    assert ours.device == ss.model_view(placed).device


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_identities_hold_in_bfloat16(saved: Path, name: str) -> None:
    model = ss.load_model(saved / name, dtype="bfloat16", device_map="auto")
    assert ss.model_view(model).dtype == torch.bfloat16
    terms = ss.decompose_scores(model, ss.token_batch(model, IDS))
    eps = torch.finfo(torch.bfloat16).eps
    assert 1e-4 < terms.max_error <= terms.tolerance, "rounded to bfloat16, and no more"
    assert terms.pattern_error <= 16 * eps
    assert ss.testing.check_model_view(model).ok  # type: ignore[attr-defined]


def test_half_precision_identities_hold_however_a_model_is_hooked(kind: str) -> None:
    """HookedTransformer norms in float32 and rounds then: n is what W_Q gets."""
    model = hook(tiny_gpt2(dtype=torch.bfloat16), kind)
    terms = ss.decompose_scores(model, ss.token_batch(model, IDS))
    assert terms.max_error <= terms.tolerance < 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device_map": "auto", "device": "cpu"}, "one device or over several"),
        ({"device_map": "everywhere"}, "device can't be used"),
        ({"device_map": {}}, "no device map"),
    ],
)
def test_what_is_no_device_map_is_refused(
    saved: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidInputError, match=message):
        ss.load_model(saved / "gpt2", **options)


def test_a_model_object_stays_where_it_is() -> None:
    with pytest.raises(InvalidInputError, match="model object stays where it is"):
        ss.load_model(tiny_gpt2(), device_map="auto")


def test_weights_left_on_disk_are_refused(saved: Path, tmp_path: Path) -> None:
    parts = ["transformer.wte", "transformer.wpe", "transformer.ln_f", "lm_head"]
    device_map = dict.fromkeys(parts, "cpu") | {
        f"transformer.h.{n}": "disk" if n == 3 else "cpu" for n in range(4)
    }
    with pytest.raises(LoadError):
        ss.load_model(saved / "gpt2", device_map=device_map)


def test_layers_on_several_devices_come_together() -> None:
    """On pretended devices, where a sum over two of them raises as on real ones."""
    with FakeTensorMode():
        chunks = [[torch.empty(n, 3, device=d) for n in (2, 1)] for d in ("cuda:0", "cuda:1")]
        with pytest.raises(RuntimeError, match="device"):
            torch.stack([torch.cat(layer) for layer in chunks])
        together = stack_layers(chunks, torch.device("cuda:0"))
        assert together.shape == (3, 2, 3)
        assert together.device == torch.device("cuda:0")


MEASURES: dict[str, Callable[[Any, Any], Any]] = {
    "sink score": lambda m, b: ss.sink_score(m, b, layers=range(4)),
    "sink position": ss.sink_position,
    "identities": ss.experiments.score_terms.run,
}


@pytest.mark.parametrize("name", list(MEASURES))
def test_no_more_than_one_layers_pattern_is_kept(kind: str, name: str) -> None:
    """On LLaMA, since TransformerBridge itself keeps those of GPT-2 until the next run."""
    if kind == "bridge":
        model = ss.load_model(transformers_model("llama", dtype=torch.float32))
    else:
        model = hook(tiny_gpt2(n_layers=4), kind)
    view = ss.model_view(model)
    made: list[StorageWeakRef] = []
    alive: list[int] = []

    def look(pattern: torch.Tensor, hook: Any) -> None:
        alive.append(sum(not ref.expired() for ref in made))
        made.append(StorageWeakRef(pattern.untyped_storage()))

    batch = ss.token_batch(model, IDS)
    with view.hooks([(ss.Site("pattern", layer), look) for layer in range(view.n_layers)]):
        MEASURES[name](model, batch)
    assert len(made) >= 2
    assert max(alive) == 0


def test_a_pattern_that_is_kept_is_seen_by_that_test() -> None:
    model = ss.load_model(transformers_model("llama", dtype=torch.float32))
    made: list[StorageWeakRef] = []
    kept: list[torch.Tensor] = []

    def keep(pattern: torch.Tensor, hook: Any) -> None:
        kept.append(pattern)
        made.append(StorageWeakRef(pattern.untyped_storage()))

    with ss.model_view(model).hooks([(ss.Site("pattern", 0), keep)]):
        ss.sink_score(model, ss.token_batch(model, IDS))
    assert not made[0].expired()
