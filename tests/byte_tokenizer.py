"""A tokenizer of single bytes, made without a download: one token for each ASCII character."""

from __future__ import annotations

from pathlib import Path

from models import tiny_gpt2
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

BOS = "<bos>"
VOCABULARY = [BOS, *sorted(pre_tokenizers.ByteLevel.alphabet())]


def byte_tokenizer(*, has_bos: bool = True, adds_bos: bool = False) -> PreTrainedTokenizerFast:
    """Ids 1 to 256 are bytes; id 0 is the BOS, which `adds_bos` puts before every text."""
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(VOCABULARY)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", special_tokens=[(BOS, 0)]
        )
    special = {"bos_token": BOS, "eos_token": BOS} if has_bos else {}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def ids_of(text: str) -> list[int]:
    """The ids of an ASCII text, by hand."""
    return [VOCABULARY.index({" ": "Ġ", "\n": "Ċ"}.get(c, c)) for c in text]


def tiny_directory(path: Path, **config: object) -> Path:
    """A directory with a tiny random GPT-2 and the byte tokenizer, as transformers saves them."""
    tiny_gpt2(n_ctx=64, d_vocab=len(VOCABULARY), **config).float().save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return path
