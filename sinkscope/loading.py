"""Loading models through TransformerLens, unprocessed: the only module that imports it."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from sinkscope.errors import InvalidInputError, LoadError

DEMO_NAME = "sinkscope-demo"
DEMO_VARIANTS = (
    "demo-grown",
    "demo-grown-no-query-bias",
    "demo-grown-no-effective-query-bias",
    "demo-grown-rotary",
    "demo-grown-no-first-mlp",
    "demo-grown-no-bos",
    "demo-planted",
    "demo-planted-no-query-bias",
    "demo-planted-no-first-mlp",
)
"""Small models that ship beside the demo model; docs/dispensability.md says what each lacks."""

_SAFETENSORS = ("model.safetensors", "model.safetensors.index.json")
_PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")

SPREADS = ("auto", "balanced", "balanced_low_0", "sequential")
"""The device maps that transformers makes itself."""

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


def load_model(
    model: Any,
    *,
    tokenizer: Any = None,
    device: str | torch.device | None = None,
    device_map: str | dict[str, Any] | None = None,
    dtype: str | torch.dtype = torch.float32,
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
) -> Any:
    """A model as a `TransformerBridge` with raw weights, ready for every function of sinkscope.

    Args:
        model: "demo" or one of `DEMO_VARIANTS` (shipped with sinkscope), a name on the
            Hugging Face hub ("gpt2"), a local directory in transformers' format, or a
            transformers model object. An object is wrapped in place, as TransformerLens
            does: it still computes the same, and its modules are now hooked and in eval mode.
            Its attention is set to transformers' "eager", which alone shows its weights.
        tokenizer: for a model object, which may also do without one and take ids.
        device: CPU if None; a model object stays where it is.
        device_map: of names and directories, instead of `device`: which part goes where, as
            transformers' `from_pretrained` takes it. "auto" spreads a model over all GPUs, or
            puts it on the CPU where there is none. All weights must fit: sinkscope reads them.
        dtype: of names and directories, float32 if not given; an object keeps its own.
        allow_pickle: also take weights that are only there as a pickle, which can run code of
            whoever wrote it when it is read.
        trust_remote_code: run the model code that a name or directory brings along.

    Raises:
        LoadError: nothing there, files that are not readable, weights that are only there as
            a pickle, or an architecture that TransformerLens does not know; weights left on
            disk by `device_map`.
        InvalidInputError: an unknown dtype, `device` and `device_map` at once, a `device_map`
            for a model object, or an object that is no transformers model.
    """
    dtype = _dtype(dtype)
    if device_map is not None:
        _check_device_map(device_map, device, model)
    device = _device(device)
    if tokenizer is not None and not _is_tokenizer(tokenizer):
        raise InvalidInputError(
            "This is not a tokenizer",
            expected="a transformers tokenizer, or None",
            got=repr(tokenizer)[:80],
            fix="load it with transformers.AutoTokenizer.from_pretrained(...)",
        )
    if isinstance(model, (str, os.PathLike)):
        place = _Place(device, device_map, dtype, not allow_pickle, trust_remote_code)
        if str(model) in ("demo", *DEMO_VARIANTS):
            with resources.as_file(demo_directory(str(model))) as path:
                return _from_directory(path, tokenizer, place, f"sinkscope-{model}")
        if Path(model).is_dir():
            if not allow_pickle:
                _refuse_pickle(str(model), lambda name: (Path(model) / name).is_file())
            return _from_directory(Path(model), tokenizer, place, Path(model).name)
        if str(model).startswith("demo-"):
            raise LoadError(
                f"There is no demo model {str(model)!r}",
                expected=", ".join(("demo", *DEMO_VARIANTS)),
                got="neither one of these nor a directory",
                fix="use one of these names as it is spelt here",
            )
        if isinstance(model, os.PathLike) or str(model).startswith((".", "/", "~")):
            raise LoadError(
                f"There is no directory {str(model)!r}",
                expected="a directory with config.json and model.safetensors",
                got="nothing there",
                fix="check the path",
            )
        if not allow_pickle:
            _refuse_pickle(str(model), lambda name: _is_on_hub(str(model), name))
        return _from_hub(str(model), tokenizer, place)
    if hasattr(model, "hook_dict"):
        raise InvalidInputError(
            "This model is hooked already",
            expected="a name, a directory, or a transformers model object",
            got=type(model).__name__,
            fix="pass it to sinkscope's functions as it is",
        )
    if not hasattr(model, "config") or not isinstance(model, torch.nn.Module):
        raise InvalidInputError(
            "This can't be loaded as a model",
            expected="'demo', a name on the hub, a directory, or a transformers model object",
            got=type(model).__name__,
            fix="a model that is hooked already needs no loading: pass it as it is",
        )
    return _wrap(model, tokenizer, str(getattr(model.config, "name_or_path", "")) or "model")


def demo_directory(name: str) -> Any:
    """The `Traversable` with the files of a shipped model: "demo", or one of `DEMO_VARIANTS`."""
    demo = resources.files("sinkscope") / "demo"
    return demo if name == "demo" else demo / "variants" / name.removeprefix("demo-")


def _is_tokenizer(tokenizer: Any) -> bool:
    from transformers import PreTrainedTokenizerBase

    return isinstance(tokenizer, PreTrainedTokenizerBase)


def _dtype(dtype: str | torch.dtype) -> torch.dtype:
    if isinstance(dtype, str) and dtype in DTYPES:
        return DTYPES[dtype]
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise InvalidInputError(
            "Unknown dtype",
            expected=", ".join(DTYPES),
            got=repr(dtype),
            fix="choose one of these, or the torch.dtype of that name",
        )
    return dtype


def _device(device: str | torch.device | None) -> torch.device:
    try:
        chosen = torch.device("cpu" if device is None else device)
        torch.empty(0, device=chosen)
    except (RuntimeError, TypeError, AssertionError) as error:
        raise InvalidInputError(
            "This device can't be used here",
            expected="a device of this machine, as torch names it, such as 'cpu' or 'cuda:0'",
            got=f"{device!r} ({str(error)[:200]})",
            fix="use 'cpu'; a device_map may also be 'auto', 'balanced', 'balanced_low_0' or "
            "'sequential'",
        ) from error
    return chosen


def _refuse_pickle(where: str, has_file: Callable[[str], bool]) -> None:
    if any(map(has_file, _PICKLES)) and not any(map(has_file, _SAFETENSORS)):
        raise LoadError(
            f"The weights of {where!r} are a pickle, which runs code of its author when it is read",
            expected=_SAFETENSORS[0],
            got=next(name for name in _PICKLES if has_file(name)),
            fix="save the model anew with save_pretrained(directory), or pass allow_pickle=True "
            "if you trust its author",
        )


def _is_on_hub(model: str, file: str) -> bool:
    """Whether a file is in the hub's cache or on the hub; False where nobody can tell."""
    from huggingface_hub import file_exists, try_to_load_from_cache

    try:
        return isinstance(try_to_load_from_cache(model, file), str) or file_exists(model, file)
    except Exception:  # no network, no such name: the loading itself says so better
        return False


def _check_device_map(device_map: Any, device: Any, model: Any) -> None:
    if device is not None:
        raise InvalidInputError(
            "A model goes to one device or over several",
            expected="device or device_map, not both",
            got=f"device={device!r} and device_map={device_map!r:.80}",
            fix="leave one of them out",
        )
    if not isinstance(model, (str, os.PathLike)):
        raise InvalidInputError(
            "A model object stays where it is, so device_map has nothing to place",
            expected="device_map with a name or a directory",
            got=type(model).__name__,
            fix="pass device_map to transformers' from_pretrained, and the model without it here",
        )
    if isinstance(device_map, str) and device_map not in SPREADS:
        _device(device_map)
    elif not isinstance(device_map, (str, Mapping)) or not device_map:
        raise InvalidInputError(
            "This is no device map",
            expected=f"one of {', '.join(SPREADS)}, a device, or a dict of module names to devices",
            got=repr(device_map)[:80],
            fix="use 'auto'",
        )


def _refuse_offloaded(hf_model: Any) -> None:
    """Weights that lie elsewhere until their layer runs can't be read beside a run."""
    absent = [name for name, weight in hf_model.named_parameters() if weight.is_meta]
    if absent:
        raise LoadError(
            "The devices have no room for the whole model, or its device map leaves parts out",
            expected="all weights on devices that compute",
            got=f"{len(absent)} weights elsewhere, such as {absent[0]}",
            fix="use dtype='bfloat16', a smaller model, or a device_map without 'disk' and without "
            "'cpu' beside GPUs",
        )


@dataclass(frozen=True)
class _Place:
    """Where a model goes, in what precision, and what may be read of it."""

    device: torch.device
    device_map: Any
    dtype: torch.dtype
    safetensors: bool
    remote_code: bool


def _from_directory(path: Path, tokenizer: Any, place: _Place, name: str) -> Any:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    hf_model: Any
    try:
        hf_model = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=place.dtype,
            attn_implementation="eager",
            local_files_only=True,
            use_safetensors=True if place.safetensors else None,
            trust_remote_code=place.remote_code,
            device_map=place.device_map,
        )
        if place.device_map is None:
            hf_model = hf_model.to(place.device)
        _refuse_offloaded(hf_model)
        if tokenizer is None and (path / "tokenizer.json").is_file():
            tokenizer = AutoTokenizer.from_pretrained(
                path, local_files_only=True, trust_remote_code=place.remote_code
            )
    except LoadError:
        raise
    except Exception as error:  # readers of damaged files raise anything
        raise LoadError(
            f"The model in {str(path)!r} can't be loaded",
            expected="config.json and model.safetensors as transformers saves them",
            got=f"{type(error).__name__}: {str(error)[:300]}",
            fix="save the model anew with save_pretrained(directory)",
        ) from error
    return _wrap(hf_model, tokenizer, name)


def _from_hub(name: str, tokenizer: Any, place: _Place) -> Any:
    from transformer_lens.model_bridge import TransformerBridge

    where: dict[str, Any] = {"device_map": place.device_map}
    if place.device_map is None:
        where = {"device": str(place.device)}
    try:
        bridge = TransformerBridge.boot_transformers(
            name,
            tokenizer=tokenizer,
            dtype=place.dtype,
            trust_remote_code=place.remote_code,
            **where,
        )
        _refuse_offloaded(bridge.original_model)
    except LoadError:
        raise
    except Exception as error:  # network, repository and architecture errors, of many kinds
        raise LoadError(
            f"The model {name!r} can't be loaded from the Hugging Face hub",
            expected="a name that TransformerLens knows, and access to the hub or its cache",
            got=f"{type(error).__name__}: {str(error)[:300]}",
            fix="check the name and the network, or pass a local directory",
        ) from error
    return bridge


def _wrap(hf_model: Any, tokenizer: Any, name: str) -> Any:
    from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module

    architectures = getattr(hf_model.config, "architectures", None) or [type(hf_model).__name__]
    # Where attention is left to transformers, no other implementation shows its weights. A model
    # of others' code that can't be set is found out where its patterns are read.
    with suppress(Exception):
        hf_model.set_attn_implementation("eager")
    try:
        bridge = build_bridge_from_module(
            hf_model,
            architectures[0],
            hf_config=hf_model.config,
            tokenizer=None if tokenizer is None else _as_it_is(tokenizer),
            model_name=name,
        )
    except Exception as error:  # adapters fail in their own ways on models they don't fit
        raise LoadError(
            f"TransformerLens can't hook a {architectures[0]}",
            expected="an architecture that this TransformerLens has an adapter for",
            got=f"{type(error).__name__}: {str(error)[:300]}",
            fix="try a newer TransformerLens, or a model of another architecture",
        ) from error
    bridge.eval()
    return bridge


def _as_it_is(tokenizer: Any) -> Any:
    """A copy of a tokenizer that says which BOS it has, and that TransformerLens takes as it is.

    TransformerLens changes the tokenizer it gets: it loads it anew by its name, with a BOS put
    in front of every text, and takes the EOS for a BOS where there is none.
    """
    own = copy.deepcopy(tokenizer)
    own.init_kwargs = {
        "name_or_path": str(tokenizer.name_or_path),
        **tokenizer.init_kwargs,
        "add_bos_token": True,
        "bos_token": tokenizer.bos_token,
    }
    return own
