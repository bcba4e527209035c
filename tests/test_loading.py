"""Models from a directory, an object or by name: raw weights, no network, clear refusals."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from byte_tokenizer import byte_tokenizer, ids_of, tiny_directory
from models import hook, tiny_gpt2
from transformers import AutoModelForCausalLM, GPT2LMHeadModel

import sinkscope as ss
from sinkscope.errors import InvalidInputError, LoadError

IDS = torch.arange(8)[None]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_directory(tmp_path_factory.mktemp("models") / "tiny-one")


@pytest.fixture
def directory(saved: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(saved, tmp_path / "model"))


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("something opened a connection")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.mark.usefixtures("no_network")
def test_a_directory_gives_the_models_own_logits(saved: Path) -> None:
    model = ss.load_model(saved)
    with torch.no_grad():
        own = GPT2LMHeadModel.from_pretrained(saved, attn_implementation="eager")(IDS).logits
        torch.testing.assert_close(model(IDS), own)
    view = ss.model_view(model)
    assert view.name == "tiny-one"
    assert view.dtype == torch.float32
    assert view.parts.processed == ()
    assert not model.training
    assert ss.token_batch(model, ["abc"]).ids.tolist() == [ids_of("abc")]
    assert ss.model_view(ss.load_model(str(saved))).weights_hash() == view.weights_hash()


@pytest.mark.parametrize("dtype", ["float64", torch.float64, "bfloat16", torch.float16])
def test_dtype(saved: Path, dtype: Any) -> None:
    expected = {"float64": torch.float64, "bfloat16": torch.bfloat16}.get(dtype, dtype)
    assert ss.model_view(ss.load_model(saved, dtype=dtype)).dtype == expected


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_an_object_is_wrapped_in_place_and_computes_the_same(attention: str) -> None:
    hf_model = tiny_gpt2()
    hf_model.set_attn_implementation(attention)
    with torch.no_grad():
        before = hf_model(IDS).logits.clone()
        model = ss.load_model(hf_model)
        torch.testing.assert_close(model(IDS), before)
        torch.testing.assert_close(hf_model(IDS).logits, before)
    view = ss.model_view(model)
    assert view.dtype == torch.float64, "an object keeps its dtype"
    assert view.tokenizer is None
    assert view.embedding.data_ptr() == hf_model.transformer.wte.weight.data_ptr()
    pattern = ss.patterns(model, ss.token_batch(model, IDS))
    torch.testing.assert_close(pattern.sum(-1), torch.ones(1, 3, 3, 8, dtype=torch.float64))


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize("has_bos", [True, False])
def test_a_tokenizer_is_taken_as_it_is(has_bos: bool) -> None:
    tokenizer = byte_tokenizer(has_bos=has_bos)
    special = dict(tokenizer.special_tokens_map)
    model = ss.load_model(tiny_gpt2(d_vocab=257), tokenizer=tokenizer)
    assert ss.token_batch(model, ["abc"]).ids.tolist() == [ids_of("abc")]
    assert dict(tokenizer.special_tokens_map) == special
    assert tokenizer.padding_side == byte_tokenizer().padding_side
    assert model.to_tokens("ab", prepend_bos=False).tolist() == [ids_of("ab")]


def test_demo_is_found_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_network: None
) -> None:
    monkeypatch.chdir(tmp_path)
    model = ss.load_model("demo")
    view = ss.model_view(model)
    assert view.name == "sinkscope-demo"
    assert view.parts.processed == ()
    assert ss.token_batch(model, ["one two"]).ids.shape[1] >= 2


# --- refusals -----------------------------------------------------------------------------


def parts_of(error: pytest.ExceptionInfo[Any]) -> str:
    message = str(error.value)
    assert all(part in message for part in ("Expected: ", "Got: ", "To fix it: ")), message
    return message


def without(name: str) -> Callable[[Path], None]:
    return lambda path: (path / name).unlink()


def truncated(path: Path) -> None:
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:2000])


def garbage(path: Path) -> None:
    (path / "model.safetensors").write_bytes(b"\xff" * 5000)


def broken_config(path: Path) -> None:
    (path / "config.json").write_text('{"model_type": "gpt2", ')


def unknown_architecture(path: Path) -> None:
    (path / "config.json").write_text(json.dumps({"model_type": "nothing-of-the-kind"}))


def pickle_only(path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(path)
    (path / "model.safetensors").unlink()
    torch.save(model.state_dict(), path / "pytorch_model.bin")


def other_shape(path: Path) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "n_embd": 24}))


def broken_tokenizer(path: Path) -> None:
    (path / "tokenizer.json").write_text("{")


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize(
    "damage",
    [
        without("config.json"),
        without("model.safetensors"),
        truncated,
        garbage,
        broken_config,
        unknown_architecture,
        pickle_only,
        other_shape,
        broken_tokenizer,
    ],
)
def test_a_damaged_directory_is_refused(directory: Path, damage: Callable[[Path], None]) -> None:
    ss.load_model(directory)
    damage(directory)
    with pytest.raises(LoadError) as caught:
        ss.load_model(directory)
    assert repr(str(directory)) in parts_of(caught)


def test_a_pickle_is_taken_by_name_only(directory: Path) -> None:
    expected = ss.model_view(ss.load_model(directory)).weights_hash()
    pickle_only(directory)
    with pytest.raises(LoadError, match=r"pickle, which runs code.*allow_pickle=True") as caught:
        ss.load_model(directory)
    assert "pytorch_model.bin" in parts_of(caught)
    assert ss.model_view(ss.load_model(directory, allow_pickle=True)).weights_hash() == expected


def test_a_pickle_on_the_hub_is_refused_before_it_is_fetched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sinkscope.loading._from_hub", lambda *args: "loaded")
    for files, refused in (
        ({"pytorch_model.bin"}, True),
        ({"pytorch_model.bin", "model.safetensors"}, False),
        ({"pytorch_model.bin.index.json"}, True),
        (set(), False),
    ):
        monkeypatch.setattr("sinkscope.loading._is_on_hub", lambda m, f, have=files: f in have)
        if refused:
            with pytest.raises(LoadError, match="pickle"):
                ss.load_model("someone/something")
        else:
            assert ss.load_model("someone/something") == "loaded"
        assert ss.load_model("someone/something", allow_pickle=True) == "loaded"


def test_code_that_a_directory_brings_along_runs_by_name_only(directory: Path) -> None:
    """`auto_map` names a module beside the weights, which transformers would import."""
    marker = directory / "ran"
    (directory / "own.py").write_text(
        f"open({str(marker)!r}, 'w').close()\n"
        "from transformers import GPT2Config, GPT2LMHeadModel\n"
        "class Config(GPT2Config): pass\n"
        "class Model(GPT2LMHeadModel): pass\n"
    )
    config = json.loads((directory / "config.json").read_text())
    config["model_type"] = "something-of-its-own"
    config["auto_map"] = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(LoadError, match="can't be loaded"):
        ss.load_model(directory)
    assert not marker.exists()
    with suppress(LoadError):  # what it does then is its author's affair
        ss.load_model(directory, trust_remote_code=True)
    assert marker.exists()


def test_a_directory_without_tokenizer_takes_ids(directory: Path) -> None:
    (directory / "tokenizer.json").unlink()
    (directory / "tokenizer_config.json").unlink(missing_ok=True)
    model = ss.load_model(directory)
    assert ss.token_batch(model, [[1, 2]]).ids.tolist() == [[1, 2]]
    with pytest.raises(InvalidInputError, match="no tokenizer"):
        ss.token_batch(model, ["text"])
    given = ss.load_model(directory, tokenizer=byte_tokenizer())
    assert ss.token_batch(given, ["abc"]).ids.tolist() == [ids_of("abc")]


def test_paths_that_lead_nowhere(tmp_path: Path) -> None:
    for missing in (tmp_path / "absent", str(tmp_path / "absent"), "./absent"):
        with pytest.raises(LoadError, match="There is no directory") as caught:
            ss.load_model(missing)
        parts_of(caught)


def test_a_name_without_the_hub() -> None:
    with pytest.raises(LoadError, match="from the Hugging Face hub") as caught:
        ss.load_model("no-one/no-such-model")
    assert "local directory" in parts_of(caught)


@pytest.mark.parametrize("dtype", ["float8", "int64", "", torch.int64])
def test_unknown_dtypes(saved: Path, dtype: Any) -> None:
    with pytest.raises(InvalidInputError, match="Unknown dtype") as caught:
        ss.load_model(saved, dtype=dtype)
    assert "float32" in parts_of(caught)


@pytest.mark.parametrize("device", ["nonsense", "cpu:x", "cuda:99"])
def test_unusable_devices(saved: Path, device: str) -> None:
    with pytest.raises(InvalidInputError, match="device") as caught:
        ss.load_model(saved, device=device)
    assert device in parts_of(caught)


def test_a_model_that_transformer_lens_can_not_hook() -> None:
    hf_model = tiny_gpt2()
    hf_model.config.architectures = ["NothingOfTheKind"]
    with pytest.raises(LoadError, match="can't hook a NothingOfTheKind") as caught:
        ss.load_model(hf_model)
    parts_of(caught)


def test_what_is_no_model() -> None:
    for thing in (3, None, {}, torch.nn.Linear(2, 2)):
        with pytest.raises(InvalidInputError, match="can't be loaded as a model") as caught:
            ss.load_model(thing)
        parts_of(caught)


def test_what_is_no_tokenizer(saved: Path) -> None:
    with pytest.raises(InvalidInputError, match="not a tokenizer") as caught:
        ss.load_model(saved, tokenizer="gpt2")
    parts_of(caught)


def test_an_unhooked_model_is_no_view() -> None:
    with pytest.raises(InvalidInputError, match="load_model") as caught:
        ss.model_view(tiny_gpt2())
    parts_of(caught)


def test_a_view_has_the_models_name_or_else_its_class() -> None:
    model = hook(tiny_gpt2(), "bridge")
    model.cfg.model_name = "mine"
    assert ss.model_view(model).name == "mine"
    model.cfg.model_name = ""
    assert ss.model_view(model).name == "TransformerBridge"
