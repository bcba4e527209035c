"""Loading models through TransformerLens, unprocessed: the only module that imports it."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from sinkscope.errors import InvalidInputError, LoadError

DEMO_NAME = "sinkscope-demo"

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
) -> Any:
    """A model as a `TransformerBridge` with raw weights, ready for every function of sinkscope.

    Args:
        model: "demo" (shipped with sinkscope), a name on the Hugging Face hub ("gpt2"), a
            local directory in transformers' format, or a transformers model object. An
            object is wrapped in place, as TransformerLens does: it still computes the same,
            and its modules are now hooked.
        tokenizer: for a model object, which may also do without one and take ids.
        device: CPU if None; a model object stays where it is.
        device_map: of names and directories, instead of `device`: which part goes where, as
            transformers' `from_pretrained` takes it. "auto" spreads a model over all GPUs, or
            puts it on the CPU where there is none. All weights must fit: sinkscope reads them.
        dtype: of names and directories, float32 if not given; an object keeps its own.

    Raises:
        LoadError: nothing there, files that are not readable, or an architecture that
            TransformerLens does not know; weights left on disk by `device_map`.
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
        if str(model) == "demo":
            with resources.as_file(resources.files("sinkscope") / "demo") as path:
                return _from_directory(path, tokenizer, device, device_map, dtype, DEMO_NAME)
        if Path(model).is_dir():
            path = Path(model)
            return _from_directory(path, tokenizer, device, device_map, dtype, path.name)
        if isinstance(model, os.PathLike) or str(model).startswith((".", "/", "~")):
            raise LoadError(
                f"There is no directory {str(model)!r}",
                expected="a directory with config.json and model.safetensors",
                got="nothing there",
                fix="check the path",
            )
        return _from_hub(str(model), tokenizer, device, device_map, dtype)
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
            fix="use 'cpu'",
        ) from error
    return chosen


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


def _from_directory(
    path: Path,
    tokenizer: Any,
    device: torch.device,
    device_map: Any,
    dtype: torch.dtype,
    name: str,
) -> Any:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    hf_model: Any
    try:
        hf_model = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=dtype,
            attn_implementation="eager",
            local_files_only=True,
            use_safetensors=True,
            device_map=device_map,
        )
        if device_map is None:
            hf_model = hf_model.to(device)
        _refuse_offloaded(hf_model)
        if tokenizer is None and (path / "tokenizer.json").is_file():
            tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
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


def _from_hub(
    name: str, tokenizer: Any, device: torch.device, device_map: Any, dtype: torch.dtype
) -> Any:
    from transformer_lens.model_bridge import TransformerBridge

    place = {"device": str(device)} if device_map is None else {"device_map": device_map}
    try:
        bridge = TransformerBridge.boot_transformers(
            name, tokenizer=tokenizer, dtype=dtype, **place
        )
        _refuse_offloaded(bridge.original_model)
        return bridge
    except LoadError:
        raise
    except Exception as error:  # network, repository and architecture errors, of many kinds
        raise LoadError(
            f"The model {name!r} can't be loaded from the Hugging Face hub",
            expected="a name that TransformerLens knows, and access to the hub or its cache",
            got=f"{type(error).__name__}: {str(error)[:300]}",
            fix="check the name and the network, or pass a local directory",
        ) from error


def _wrap(hf_model: Any, tokenizer: Any, name: str) -> Any:
    from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module

    architectures = getattr(hf_model.config, "architectures", None) or [type(hf_model).__name__]
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
