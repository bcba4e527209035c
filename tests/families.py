"""Tiny random models of other families, from transformers' configurations alone."""

from __future__ import annotations

from typing import Any

import torch
import transformers as hf

WINDOW = 4
D_VOCAB = 40
_SIZES = {
    "vocab_size": D_VOCAB,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
_MLP = _SIZES | {"intermediate_size": 24}
_GROUPED = _MLP | {"num_key_value_heads": 2, "head_dim": 4}
CONFIGS: dict[str, Any] = {
    "opt": lambda: hf.OPTConfig(**_SIZES, word_embed_proj_dim=16, ffn_dim=24),
    "gpt_neo": lambda: hf.GPTNeoConfig(
        vocab_size=D_VOCAB,
        hidden_size=16,
        num_layers=2,
        num_heads=4,
        intermediate_size=24,
        max_position_embeddings=32,
        window_size=WINDOW,
        attention_types=[[["global", "local"], 1]],
        bos_token_id=0,
        eos_token_id=0,
    ),
    "pythia": lambda: hf.GPTNeoXConfig(**_MLP),
    "bloom": lambda: hf.BloomConfig(
        vocab_size=D_VOCAB, hidden_size=16, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
    ),
    "llama": lambda: hf.LlamaConfig(**_GROUPED),
    "mistral": lambda: hf.MistralConfig(**_GROUPED, sliding_window=WINDOW),
    "qwen2": lambda: hf.Qwen2Config(
        **{key: value for key, value in _GROUPED.items() if key != "head_dim"}
    ),
    "qwen3": lambda: hf.Qwen3Config(**_GROUPED),
    "gemma2": lambda: hf.Gemma2Config(**_GROUPED, attn_logit_softcapping=1.0),
    "gpt_oss": lambda: hf.GptOssConfig(
        **_GROUPED, num_local_experts=2, num_experts_per_tok=1, sliding_window=WINDOW
    ),
}


def tiny_family(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """A transformers model of a family, all of its weights random."""
    config = CONFIGS[name]()
    config._attn_implementation = "eager"
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = hf.AutoModelForCausalLM.from_config(config).to(dtype).eval()
        for parameter in model.parameters():
            parameter.data += 0.2 * torch.randn_like(parameter)
    return model


def attention_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """`[batch layer head query key]`, as transformers itself gives it."""
    with torch.no_grad():
        return torch.stack(model(ids, output_attentions=True).attentions, dim=1)
