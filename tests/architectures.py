"""Tiny random models of many architectures, and what transformers itself computes on them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers as hf
from torch import Tensor

WINDOW = 4
VOCAB = 40
SPECIAL = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}


@dataclass(frozen=True)
class Sizes:
    """What a tiny model is made of.

    Attributes:
        d_model: `n_heads * d_head` if None; only of architectures that leave d_head free.
        window: of the layers that have a sliding one, see `WINDOWED`.
        options: what else goes to the configuration, by transformers' names.
    """

    n_layers: int = 4
    n_heads: int = 4
    n_key_value_heads: int = 2
    d_head: int = 4
    d_model: int | None = None
    window: int = WINDOW
    d_vocab: int = VOCAB
    n_ctx: int = 32
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def width(self) -> int:
        """d_model."""
        return self.n_heads * self.d_head if self.d_model is None else self.d_model

    def alternating(self, *kinds: str) -> list[str]:
        """One of the kinds for each layer, in turn."""
        return [kinds[layer % len(kinds)] for layer in range(self.n_layers)]


def _plain(sizes: Sizes, *but: str) -> dict[str, Any]:
    """Most configurations' words for sizes."""
    words = {
        "vocab_size": sizes.d_vocab,
        "hidden_size": sizes.width,
        "num_hidden_layers": sizes.n_layers,
        "num_attention_heads": sizes.n_heads,
        "intermediate_size": 24,
        "max_position_embeddings": sizes.n_ctx,
    }
    return {word: size for word, size in words.items() if word not in but} | SPECIAL


def _grouped(sizes: Sizes) -> dict[str, Any]:
    """The same where heads may share keys."""
    return _plain(sizes) | {"num_key_value_heads": sizes.n_key_value_heads}


def _gpt2(sizes: Sizes) -> dict[str, Any]:
    """GPT-2's own words, and GPT-J's."""
    return SPECIAL | {
        "vocab_size": sizes.d_vocab,
        "n_positions": sizes.n_ctx,
        "n_embd": sizes.width,
        "n_layer": sizes.n_layers,
        "n_head": sizes.n_heads,
    }


CONFIGS: dict[str, tuple[Any, Callable[[Sizes], dict[str, Any]]]] = {
    "gpt2": (hf.GPT2Config, _gpt2),
    "distilgpt2": (hf.GPT2Config, lambda s: _gpt2(s) | {"n_layer": 2}),
    "opt": (
        hf.OPTConfig,
        lambda s: _plain(s, "intermediate_size") | {"word_embed_proj_dim": s.width, "ffn_dim": 24},
    ),
    "gpt_neo": (
        hf.GPTNeoConfig,
        lambda s: (
            SPECIAL
            | {
                "vocab_size": s.d_vocab,
                "hidden_size": s.width,
                "num_layers": s.n_layers,
                "num_heads": s.n_heads,
                "intermediate_size": 24,
                "max_position_embeddings": s.n_ctx,
                "window_size": s.window,
                "attention_types": [[[kind], 1] for kind in s.alternating("global", "local")],
            }
        ),
    ),
    "pythia": (hf.GPTNeoXConfig, lambda s: _plain(s) | {"rotary_pct": 0.5}),
    "gptj": (hf.GPTJConfig, lambda s: _gpt2(s) | {"rotary_dim": 4}),
    "bloom": (
        hf.BloomConfig,
        lambda s: (
            SPECIAL
            | {
                "vocab_size": s.d_vocab,
                "hidden_size": s.width,
                "n_layer": s.n_layers,
                "n_head": s.n_heads,
            }
        ),
    ),
    "llama": (hf.LlamaConfig, lambda s: _grouped(s) | {"head_dim": s.d_head}),
    "mistral": (
        hf.MistralConfig,
        lambda s: _grouped(s) | {"head_dim": s.d_head, "sliding_window": s.window},
    ),
    "qwen2": (hf.Qwen2Config, _grouped),
    "qwen3": (hf.Qwen3Config, lambda s: _grouped(s) | {"head_dim": s.d_head}),
    "gemma2": (
        hf.Gemma2Config,
        lambda s: (
            _grouped(s)
            | {
                "head_dim": s.d_head,
                "sliding_window": s.window,
                "query_pre_attn_scalar": 8,
                "attn_logit_softcapping": 2.0,  # low, so that the cap is felt
            }
        ),
    ),
    "gemma3": (
        hf.Gemma3TextConfig,
        lambda s: (
            _grouped(s)
            | {
                "head_dim": s.d_head,
                "sliding_window": s.window,
                "query_pre_attn_scalar": 8,
                "layer_types": s.alternating("sliding_attention", "full_attention"),
            }
        ),
    ),
    "phi": (hf.PhiConfig, lambda s: _plain(s) | {"partial_rotary_factor": 0.5}),
    "gpt_oss": (
        hf.GptOssConfig,
        lambda s: (
            _grouped(s)
            | {
                "head_dim": s.d_head,
                "sliding_window": s.window,
                "num_local_experts": 4,
                "num_experts_per_tok": 2,
            }
        ),
    ),
    "bert": (hf.BertConfig, _plain),
}
"""Name -> configuration class and its arguments, of ordinary shape but for its size."""

WINDOWED: dict[str, Callable[[int], bool]] = {
    "gpt_neo": lambda layer: layer % 2 == 1,
    "mistral": lambda layer: True,
    "gemma2": lambda layer: layer % 2 == 0,
    "gemma3": lambda layer: layer % 2 == 0,
    "gpt_oss": lambda layer: layer % 2 == 0,
}
"""Which layers see a sliding window, by the authors' papers and not by our code."""

IDS = torch.randint(1, VOCAB, (3, 10), generator=torch.Generator().manual_seed(3))


def config_of(name: str, sizes: Sizes) -> Any:
    """The transformers configuration of a model."""
    kind, arguments = CONFIGS[name]
    return kind(**arguments(sizes) | dict(sizes.options))


def transformers_model(
    name: str,
    attention: str = "eager",
    dtype: torch.dtype | None = None,
    sizes: Sizes | None = None,
) -> Any:
    """A model with random weights, biases, norms and sink logits of ordinary size."""
    config = config_of(name, Sizes() if sizes is None else sizes)
    # gpt-oss' experts have no arithmetic in float64.
    dtype = dtype or (torch.float32 if name == "gpt_oss" else torch.float64)
    return random_model(config, dtype, attention)


def random_model(config: Any, dtype: torch.dtype, attention: str = "eager") -> Any:
    """The model of a configuration, the same each time."""
    config._attn_implementation = attention
    auto = hf.AutoModelForMaskedLM if config.model_type == "bert" else hf.AutoModelForCausalLM
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = auto.from_config(config).eval()
        for parameter in model.parameters():
            parameter.data += 0.3 * torch.randn_like(parameter)
    return model.to(dtype)


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
