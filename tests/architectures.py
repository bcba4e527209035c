"""Tiny random models of many architectures, and what transformers itself computes on them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from torch import Tensor

WINDOW = 4
N_LAYERS = 4
VOCAB = 40
SPECIAL = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "num_hidden_layers": N_LAYERS,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "max_position_embeddings": 32,
}
GROUPED = SIZES | SPECIAL | {"num_key_value_heads": 2}
LOCAL_AND_GLOBAL = ["sliding_attention", "full_attention"] * (N_LAYERS // 2)
GPT2 = {"vocab_size": VOCAB, "n_positions": 32, "n_embd": 16, "n_layer": N_LAYERS, "n_head": 4}

CONFIGS: dict[str, Callable[[], Any]] = {
    "gpt2": lambda: hf.GPT2Config(**GPT2, **SPECIAL),
    "distilgpt2": lambda: hf.GPT2Config(**GPT2 | {"n_layer": 2}, **SPECIAL),
    "opt": lambda: hf.OPTConfig(
        **{k: v for k, v in SIZES.items() if k != "intermediate_size"},
        **SPECIAL,
        word_embed_proj_dim=16,
        ffn_dim=24,
    ),
    "gpt_neo": lambda: hf.GPTNeoConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        num_layers=N_LAYERS,
        num_heads=4,
        intermediate_size=24,
        max_position_embeddings=32,
        window_size=WINDOW,
        attention_types=[[["global", "local"], N_LAYERS // 2]],
        **SPECIAL,
    ),
    "pythia": lambda: hf.GPTNeoXConfig(**SIZES, **SPECIAL, rotary_pct=0.5),
    "gptj": lambda: hf.GPTJConfig(**GPT2, **SPECIAL, rotary_dim=2),
    "bloom": lambda: hf.BloomConfig(
        vocab_size=VOCAB, hidden_size=16, n_layer=N_LAYERS, n_head=4, **SPECIAL
    ),
    "llama": lambda: hf.LlamaConfig(**GROUPED),
    "mistral": lambda: hf.MistralConfig(**GROUPED, sliding_window=WINDOW),
    "qwen2": lambda: hf.Qwen2Config(**GROUPED),
    "qwen3": lambda: hf.Qwen3Config(**GROUPED, head_dim=4),
    "gemma2": lambda: hf.Gemma2Config(
        **GROUPED,
        head_dim=4,
        sliding_window=WINDOW,
        query_pre_attn_scalar=8,
        attn_logit_softcapping=2.0,  # low, so that the cap is felt
    ),
    "gemma3": lambda: hf.Gemma3TextConfig(
        **GROUPED,
        head_dim=4,
        sliding_window=WINDOW,
        query_pre_attn_scalar=8,
        layer_types=LOCAL_AND_GLOBAL,
    ),
    "phi": lambda: hf.PhiConfig(**SIZES, **SPECIAL, partial_rotary_factor=0.5),
    "gpt_oss": lambda: hf.GptOssConfig(
        **GROUPED,
        head_dim=4,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=WINDOW,
    ),
    "bert": lambda: hf.BertConfig(**SIZES, pad_token_id=0),
}
"""Name -> configuration, of ordinary shape but for its size."""

WINDOWED: dict[str, Callable[[int], bool]] = {
    "gpt_neo": lambda layer: layer % 2 == 1,
    "mistral": lambda layer: True,
    "gemma2": lambda layer: layer % 2 == 0,
    "gemma3": lambda layer: layer % 2 == 0,
    "gpt_oss": lambda layer: layer % 2 == 0,
}
"""Which layers see a sliding window, by the authors' papers and not by our code."""

IDS = torch.randint(1, VOCAB, (3, 10), generator=torch.Generator().manual_seed(3))


def transformers_model(
    name: str, attention: str = "eager", dtype: torch.dtype | None = None
) -> Any:
    """A model with random weights, biases, norms and sink logits of ordinary size."""
    config = CONFIGS[name]()
    config._attn_implementation = attention
    with torch.random.fork_rng():
        torch.manual_seed(0)
        auto = hf.AutoModelForMaskedLM if name == "bert" else hf.AutoModelForCausalLM
        model = auto.from_config(config).eval()
        for parameter in model.parameters():
            parameter.data += 0.3 * torch.randn_like(parameter)
    # gpt-oss' experts have no arithmetic in float64.
    return model.to(dtype or (torch.float32 if name == "gpt_oss" else torch.float64))


def attentions(model: Any, ids: Tensor = IDS, **kwargs: Any) -> Tensor:
    """`[batch layer head query key]`, from transformers alone."""
    with torch.no_grad():
        output = model(ids, output_attentions=True, **kwargs)
    return torch.stack(output.attentions, dim=1)


def layers_of(model: Any) -> Any:
    """The list of a transformers model's layers."""
    lists = (m for m in model.modules() if isinstance(m, torch.nn.ModuleList))
    return next(m for m in lists if len(m) == model.config.num_hidden_layers)


# --- scores, recomputed by transformers' own attention ------------------------------------


def scores_by_transformers(model: Any, ids: Tensor = IDS) -> list[Tensor]:
    """Per layer the scores before the mask `[batch head query key]`, without TransformerLens.

    The model is to be built with `attention="spy"` (see `spied`), but for GPT-Neo and BLOOM,
    which compute their attention themselves and are read at their projections.
    """
    kind = model.config.model_type
    if kind not in ("gpt_neo", "bloom"):
        seen: list[Tensor] = []
        _SPIES.append(seen)
        try:
            with torch.no_grad():
                model(ids)
        finally:
            _SPIES.remove(seen)
        return seen
    outputs: dict[str, Tensor] = {}
    names = ("query_key_value",) if kind == "bloom" else ("q_proj", "k_proj")
    handles = [
        module.register_forward_hook(lambda _, __, out, name=name: outputs.update({name: out}))
        for name, module in model.named_modules()
        if name.endswith(names)
    ]
    with torch.no_grad():
        model(ids)
    for handle in handles:
        handle.remove()
    found = list(outputs.values())
    if kind == "bloom":
        return [_bloom_scores(joint, model.config.n_head) for joint in found]
    heads = model.config.num_heads
    pairs = [
        [t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in found[n : n + 2]]
        for n in range(0, len(found), 2)
    ]
    # GPT-Neo registers k_proj before q_proj; hooks fire in the order of the forward pass.
    return [q @ k.transpose(-1, -2) for q, k in pairs]


def _bloom_scores(joint: Tensor, heads: int) -> Tensor:
    q, k, _ = joint.unflatten(-1, (heads, 3, -1)).unbind(-2)
    slopes = torch.tensor([2.0 ** (-8 * (h + 1) / heads) for h in range(heads)])
    alibi = slopes[:, None, None] * torch.arange(joint.shape[1])
    return torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5 + alibi


_SPIES: list[list[Tensor]] = []


def _spy(module: Any, query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Any:
    """transformers' own eager attention, with the scores noted on the way."""
    keys = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    scaling = kwargs.get("scaling")
    scores = query @ keys.transpose(-1, -2) * (scaling or query.shape[-1] ** -0.5)
    cap = kwargs.get("softcap")
    for seen in _SPIES:
        seen.append(scores if cap is None else cap * torch.tanh(scores / cap))
    eager = sys.modules[type(module).__module__].eager_attention_forward
    return eager(module, query, key, *args, **kwargs)


def spied(name: str) -> Any:
    """`transformers_model(name)` whose attention notes its scores."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask

    AttentionInterface.register("spy", _spy)
    AttentionMaskInterface.register("spy", eager_mask)
    own = name in ("gpt_neo", "bloom")
    return transformers_model(name, "eager" if own else "spy")
