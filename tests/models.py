"""Tiny random models whose biases and norms are random too, so that no mistake hides in zeros."""

from __future__ import annotations

import copy
import functools
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import sinkscope as ss

try:
    from transformer_lens import HookedTransformer, HookedTransformerConfig
    from transformer_lens.pretrained.weight_conversions import convert_gpt2_weights
except ImportError:
    HAS_HOOKED_TRANSFORMER = False
else:
    HAS_HOOKED_TRANSFORMER = True

ONLY_HOOKED = [
    pytest.mark.hooked,
    pytest.mark.skipif(
        not HAS_HOOKED_TRANSFORMER, reason="transformer-lens 4 has no HookedTransformer"
    ),
]


def tiny_gpt2(
    n_layers: int = 3,
    n_heads: int = 3,
    d_head: int = 4,
    n_ctx: int = 16,
    d_vocab: int = 50,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    **config: Any,
) -> GPT2LMHeadModel:
    """A GPT-2 with random weights, biases, gains and shifts of ordinary size."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=d_vocab,
                n_positions=n_ctx,
                n_embd=n_heads * d_head,
                n_layer=n_layers,
                n_head=n_heads,
                initializer_range=0.2,
                bos_token_id=0,
                eos_token_id=0,
                attn_implementation="eager",
                **config,
            )
        ).to(dtype)
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "ln_" in name:
                parameter.data += 0.3 * torch.randn_like(parameter)
    return model.eval()


@functools.cache
def exact_gpt2(**sizes: int) -> GPT2LMHeadModel:
    """A `tiny_gpt2` with weights that are the same however it is hooked; copy it to change it."""
    hf = tiny_gpt2(**sizes)
    for parameter in hf.parameters():
        # HookedTransformer rounds norms and biases to float32 as it loads them.
        parameter.data = parameter.data.float().double()
    return hf


@functools.cache
def shared_model(kind: str, **sizes: int) -> Any:
    """One hooked `exact_gpt2` for all tests: every call leaves it as it was (test_restoration)."""
    return hook(copy.deepcopy(exact_gpt2(**sizes)), kind)


IDS = torch.randint(1, 50, (3, 8), generator=torch.Generator().manual_seed(0))
"""Three prompts for it."""

EXACT = 1e-10


def close(ours: Any, theirs: Any, atol: float = EXACT) -> None:
    """Numbers of the same shape, in float64."""
    both = (torch.as_tensor(values, dtype=torch.float64) for values in (ours, theirs))
    torch.testing.assert_close(*both, rtol=0, atol=atol)


def hook(hf_model: GPT2LMHeadModel, kind: str, tokenizer: Any = None, **processing: Any) -> Any:
    """The model as a TransformerBridge ("bridge") or a HookedTransformer ("hooked")."""
    if kind == "bridge":
        bridge = ss.load_model(hf_model, tokenizer=tokenizer)
        if processing:
            bridge.enable_compatibility_mode(disable_warnings=True, **processing)
        return bridge
    return _hooked_transformer(hf_model, **processing)


def hooked_directory(path: Path, kind: str) -> Any:
    """A model from a directory, hooked in either way."""
    if kind == "bridge":
        return ss.load_model(path)
    return _hooked_transformer(GPT2LMHeadModel.from_pretrained(path))


def _hooked_transformer(hf_model: GPT2LMHeadModel, **processing: Any) -> Any:
    config = hf_model.config
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = HookedTransformer(
            HookedTransformerConfig(
                n_layers=config.n_layer,
                d_model=config.n_embd,
                n_ctx=config.n_positions,
                d_head=config.n_embd // config.n_head,
                n_heads=config.n_head,
                d_vocab=config.vocab_size,
                act_fn=config.activation_function,
                normalization_type="LNPre" if processing.get("fold_ln") else "LN",
                eps=config.layer_norm_epsilon,
                dtype=hf_model.dtype,
                use_attn_scale=config.scale_attn_weights,
                scale_attn_by_inverse_layer_idx=config.scale_attn_by_inverse_layer_idx,
            )
        )
    options = {
        "fold_ln": False,
        "center_writing_weights": False,
        "center_unembed": False,
        "fold_value_biases": False,
    } | processing
    model.load_and_process_state_dict(convert_gpt2_weights(hf_model, model.cfg), **options)
    return model.eval()
