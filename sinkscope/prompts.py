"""Prompts: from texts or ids to a `TokenBatch`, and the corpora that come with a name.

Ids are sliced, never decoded and encoded again; a BOS is put in front only on request.
"""

from __future__ import annotations

import csv
import io
import json
import random
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from sinkscope._types import Ids, Mask, Rows
from sinkscope.display import HtmlTable
from sinkscope.errors import BosWarning, InvalidInputError, LoadError
from sinkscope.loading import DEMO_VARIANTS, demo_directory
from sinkscope.metrics import first_positions, position_ids
from sinkscope.model import ModelView, model_view

CORPORA = ("natural_language", "math", "code")
PAPER_LENGTH = 40
PAPER_PER_CORPUS = 100
PAPER_SEED = 42


@dataclass(frozen=True, eq=False)
class TokenBatch(HtmlTable):
    """Prompts as ids.

    Attributes:
        ids: `[batch pos]`.
        mask: `[batch pos]`, true where a token is; false is padding.
        texts: the text behind each row, None for rows that were given as ids.
        corpora: the corpus of each row, "prompts" if none was named.
        bos: `[batch]`, whether a row's first token is the tokenizer's BOS, or its [CLS] where it
            has no BOS (BERT).
    """

    ids: Ids
    mask: Mask
    texts: tuple[str | None, ...]
    corpora: tuple[str, ...]
    bos: tuple[bool, ...]

    def __len__(self) -> int:
        return self.ids.shape[0]

    def overview(self) -> list[tuple[str, str]]:
        low, high = int(self.lengths.min()), int(self.lengths.max())
        names = dict.fromkeys(self.corpora)
        return [
            ("prompts", str(len(self))),
            ("tokens each", str(low) if low == high else f"{low} to {high}"),
            ("start with the BOS token", str(sum(self.bos))),
            *((f"from {name}", str(self.corpora.count(name))) for name in names),
        ]

    @property
    def first(self) -> Rows:
        """The column of each row's first unmasked position."""
        return first_positions(self.mask)

    @property
    def lengths(self) -> Rows:
        """How many tokens each row has."""
        return self.mask.sum(1)

    @property
    def position_ids(self) -> Ids:
        """The position of each token in its row, -1 at padding."""
        return position_ids(self.mask)

    def select(self, rows: Sequence[int] | slice) -> TokenBatch:
        """Some of the rows."""
        everything = range(len(self))
        try:
            chosen = everything[rows] if isinstance(rows, slice) else rows
            indices = [everything[i] for i in chosen]
        except (TypeError, IndexError) as error:
            raise InvalidInputError(
                "There are no such rows",
                expected=f"a slice, or numbers from 0 to {len(self) - 1}",
                got=repr(rows)[:80],
                fix="count rows from 0",
            ) from error
        if not indices:
            raise InvalidInputError(
                "A batch holds at least one prompt",
                expected=f"some of the {len(self)} rows",
                got=repr(rows)[:80],
                fix="choose rows that there are",
            )
        return TokenBatch(
            ids=self.ids[indices],
            mask=self.mask[indices],
            texts=tuple(self.texts[i] for i in indices),
            corpora=tuple(self.corpora[i] for i in indices),
            bos=tuple(self.bos[i] for i in indices),
        )

    def chunks(self, size: int | None) -> Iterator[TokenBatch]:
        """The batch in pieces of at most `size` rows, in order."""
        if size is not None and (type(size) is not int or size < 1):
            raise InvalidInputError(
                "A batch size is a whole number of prompts",
                expected="1 or more, or None for all at once",
                got=repr(size),
                fix="choose another batch size",
            )
        size = len(self) if size is None else size
        for start in range(0, len(self), size):
            yield self.select(slice(start, start + size))


def require_batch(batch: Any) -> TokenBatch:
    """The batch itself, if it is one.

    Raises:
        InvalidInputError: it is not.
    """
    if not isinstance(batch, TokenBatch):
        raise InvalidInputError(
            "This is not a batch of prompts",
            expected="a TokenBatch",
            got=type(batch).__name__,
            fix="make one with sinkscope.token_batch(model, texts_or_ids)",
        )
    return batch


@dataclass(frozen=True)
class Prompts:
    """Texts with the corpus that each is from.

    Attributes:
        texts: the prompts.
        corpora: the corpus of each.
        source: where they are from ("demo", "paper", or a path), for the record.
    """

    texts: tuple[str, ...]
    corpora: tuple[str, ...]
    source: str = "given"

    def __len__(self) -> int:
        return len(self.texts)

    def folded(self) -> Prompts:
        """The same prompts with every run of whitespace as one space (the paper's protocol)."""
        texts = tuple(fold_whitespace(text) for text in self.texts)
        return Prompts(texts, self.corpora, self.source)


def token_batch(
    model: Any,
    texts_or_token_ids: (
        str | Prompts | Sequence[str] | Sequence[int] | Sequence[Sequence[int]] | Tensor
    ),
    length: int | None = None,
    *,
    bos: Literal["none", "prepend"] = "none",
    padding: Literal["none", "left", "right"] = "none",
    mask: Tensor | None = None,
    corpora: Sequence[str] | None = None,
) -> TokenBatch:
    """Texts or ids as a batch that every function of sinkscope takes.

    Args:
        model: a hooked model or its view, for its tokenizer, vocabulary and `n_ctx`.
        texts_or_token_ids: texts, lists of ids, or an integer tensor `[batch pos]`; a single
            text or list is a batch of one.
        length: cut every row to its first `length` tokens; shorter rows are an error unless
            `padding` says otherwise.
        bos: "none" leaves the ids as the tokenizer gives them without special tokens;
            "prepend" puts its BOS in front (its [CLS] where it has no BOS), where `length`
            counts it.
        padding: what to do with rows of different lengths; "none" makes them an error.
        mask: `[batch pos]` for ids that are already padded, true or 1 where a token is.
        corpora: a name for each row, for results by corpus.

    Raises:
        InvalidInputError: no text, an empty text, ids out of range, rows longer than `n_ctx`,
            mixed lengths without padding or mask, or texts for a model without tokenizer.
    """
    view = model_view(model)
    if bos not in ("none", "prepend") or padding not in ("none", "left", "right"):
        raise InvalidInputError(
            "Unknown option",
            expected="bos 'none' or 'prepend', padding 'none', 'left' or 'right'",
            got=f"bos={bos!r}, padding={padding!r}",
            fix="choose one of these",
        )
    if isinstance(texts_or_token_ids, Prompts):
        corpora = texts_or_token_ids.corpora if corpora is None else corpora
        texts_or_token_ids = texts_or_token_ids.texts
    if mask is not None and (length is not None or bos != "none" or padding != "none"):
        raise InvalidInputError(
            "A mask goes with ids that stay as they are",
            expected="mask alone, without length, bos or padding",
            got=f"length={length!r}, bos={bos!r}, padding={padding!r}",
            fix="cut and pad the ids and the mask before, or pass lists of ids",
        )
    if mask is not None and not isinstance(mask, Tensor):
        raise InvalidInputError(
            "The mask is not a tensor",
            expected="a tensor [batch pos], true or 1 where a token is",
            got=type(mask).__name__,
            fix="pass torch.tensor(mask)",
        )
    rows, texts = _rows_of_ids(view, texts_or_token_ids, mask)
    if bos == "prepend":
        rows = [_with_bos(view, row) for row in rows]
    if length is not None:
        rows = _cut(rows, length, padding)
    _check_rows(view, rows)
    if mask is not None and isinstance(texts_or_token_ids, Tensor):
        filled = mask.bool().cpu()
        ids = torch.where(filled, texts_or_token_ids.cpu().long(), _pad_id(view))
    else:
        ids, filled = _rectangle(rows, padding, _pad_id(view))
    bos_id = _bos_id(view)
    return TokenBatch(
        ids=ids,
        mask=filled,
        texts=texts,
        corpora=_checked_corpora(corpora, len(rows)),
        bos=tuple(bos_id is not None and row[0] == bos_id for row in rows),
    )


def encode(view: ModelView, text: str) -> list[int]:
    """The ids of a text, without special tokens.

    Raises:
        InvalidInputError: no tokenizer, or a text without any token.
    """
    if view.tokenizer is None:
        raise InvalidInputError(
            "This model has no tokenizer, so it takes ids, not texts",
            expected="lists of token ids",
            got=repr(text[:40]),
            fix="pass ids, or load the model with its tokenizer",
        )
    with warnings.catch_warnings():
        # Tokenizers warn about texts beyond n_ctx; `length` or the check on n_ctx deals with it.
        warnings.simplefilter("ignore")
        try:
            ids = view.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        except (TypeError, UnicodeError) as error:  # half a surrogate pair is no text
            raise InvalidInputError(
                "The tokenizer can't read a prompt",
                expected="text that UTF-8 can hold",
                got=f"{text[:40]!a} ({type(error).__name__})",
                fix="decode the text from its own encoding first",
            ) from error
    if not ids:
        raise InvalidInputError(
            "A prompt has no token",
            expected="at least one token in every text",
            got=repr(text[:40]),
            fix="leave empty prompts out",
        )
    return [int(i) for i in ids]


# --- corpora with a name ------------------------------------------------------------------


def fold_whitespace(text: str) -> str:
    """Every run of whitespace as one space, none at the ends (the paper's protocol)."""
    return " ".join(text.split())


def load_prompts(model: Any, source: str | Path) -> Prompts:
    """Prompts by name or from a file.

    Args:
        model: a hooked model or its view; "paper" counts tokens with its tokenizer.
        source: "demo" or one of `loading.DEMO_VARIANTS` (prompts that ship with the model of
            that name, whitespace folded), "paper" (SST-2, GSM8K and HumanEval through the
            `datasets` library), or the path of a .txt (one prompt a line), .csv (column
            `text`) or .jsonl file (field `text`); csv and jsonl may also have `corpus`.

    Raises:
        LoadError: the file or data set cannot be read, or holds no prompt.
    """
    if not isinstance(source, (str, Path)):
        raise InvalidInputError(
            "Prompts are named by a string or a path",
            expected="'demo', 'paper', or the path of a .txt, .csv or .jsonl file",
            got=repr(source)[:80],
            fix="pass texts and ids to token_batch instead",
        )
    if source == "demo" or source in DEMO_VARIANTS:
        shipped = demo_directory(str(source)) / "prompts.jsonl"
        return _prompts(_read_jsonl(shipped.read_text("utf-8"), source), source).folded()
    if source == "paper":
        return paper_prompts(model)
    return read_prompts(Path(source))


def read_prompts(path: Path) -> Prompts:
    """Prompts from a .txt, .csv or .jsonl file, see `load_prompts`.

    Raises:
        LoadError: no such file, not readable as UTF-8, another format, or no prompt in it.
    """
    readers = {".txt": _read_txt, ".csv": _read_csv, ".jsonl": _read_jsonl}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise LoadError(
            f"Prompts can't be read from {str(path)!r}",
            expected="'demo', 'paper', or a file that ends in .txt, .csv or .jsonl",
            got=path.suffix or "no suffix",
            fix="rename or convert the file",
        )
    try:
        text = path.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise LoadError(
            f"Prompts can't be read from {str(path)!r}",
            expected="a readable file in UTF-8",
            got=f"{type(error).__name__}: {error}",
            fix="check the path and the encoding",
        ) from error
    return _prompts(reader(text, str(path)), str(path))


def paper_prompts(model: Any, per_corpus: int = PAPER_PER_CORPUS) -> Prompts:
    """The paper's 300 prompts: 100 each of SST-2, GSM8K and HumanEval.

    Whitespace is folded, texts with fewer than 40 tokens are left out, and one
    `random.Random(42)` shuffles the three corpora one after the other. Rows are cut to 40
    tokens by `token_batch(..., length=40)`.

    Args:
        model: a hooked model or its view with a tokenizer.
        per_corpus: how many of each.

    Raises:
        LoadError: a data set cannot be loaded or holds too few texts.
    """
    view = model_view(model)
    rng = random.Random(PAPER_SEED)
    rows: list[tuple[str, str]] = []
    for corpus, path, config, split, column in (
        ("natural_language", "stanfordnlp/sst2", None, "train", "sentence"),
        ("math", "openai/gsm8k", "main", "train", "question"),
        ("code", "openai/openai_humaneval", None, "test", "prompt"),
    ):
        texts = [fold_whitespace(text) for text in _load_column(path, config, split, column)]
        long = [t for t in texts if t and len(encode(view, t)) >= PAPER_LENGTH]
        if len(long) < per_corpus:
            raise LoadError(
                f"{path} holds too few texts of {PAPER_LENGTH} tokens",
                expected=per_corpus,
                got=len(long),
                fix="ask for fewer prompts, or use another tokenizer's model",
            )
        rng.shuffle(long)
        rows += [(text, corpus) for text in long[:per_corpus]]
    return _prompts(rows, "paper")


def _load_column(path: str, config: str | None, split: str, column: str) -> list[str]:
    try:
        from datasets import load_dataset  # heavy, and only this source needs it

        return list(load_dataset(path, config, split=split)[column])
    except Exception as error:  # the library raises many kinds, all of them mean "not loaded"
        raise LoadError(
            f"The data set {path} can't be loaded",
            expected="access to the Hugging Face hub, or a copy in its cache",
            got=f"{type(error).__name__}: {str(error)[:200]}",
            fix="go online once, or use --prompts demo or a file of your own",
        ) from error


def _prompts(rows: Sequence[tuple[str, str]], source: str) -> Prompts:
    if not rows:
        raise LoadError(
            f"There is no prompt in {source!r}",
            expected="at least one text",
            got="none",
            fix="put one prompt on each line or row",
        )
    return Prompts(tuple(r[0] for r in rows), tuple(r[1] for r in rows), source)


def _read_txt(text: str, source: str) -> list[tuple[str, str]]:
    # Not splitlines(), which also splits at form feeds, U+0085, U+2028 and the like.
    return [(line, "prompts") for line in text.split("\n") if line.strip()]


def _read_csv(text: str, source: str) -> list[tuple[str, str]]:
    try:
        reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
        rows = list(reader)
    except csv.Error as error:
        raise LoadError(
            f"{source!r} is not valid CSV",
            expected="a header with a column text, and quotes that are closed",
            got=str(error),
            fix="write the file anew with a CSV library",
        ) from error
    return [_row(row, f"row {n}", source) for n, row in enumerate(rows, 2)]


def _read_jsonl(text: str, source: str) -> list[tuple[str, str]]:
    rows = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise LoadError(
                f"Line {number} of {source!r} is not JSON",
                expected="one JSON object a line",
                got=str(error)[:200],
                fix="write the file anew with a JSON library",
            ) from error
        rows.append(_row(row, f"line {number}", source))
    return rows


def _row(row: Any, where: str, source: str) -> tuple[str, str]:
    text = row.get("text") if isinstance(row, dict) else None
    corpus = row.get("corpus") or "prompts" if isinstance(row, dict) else None
    if not isinstance(text, str) or not text.strip() or not isinstance(corpus, str):
        raise LoadError(
            f"There is no prompt at {where} of {source!r}",
            expected="a non-empty string named text, and perhaps a string named corpus",
            got=repr(row)[:120],
            fix="fill it in, or leave it out",
        )
    try:
        (text + corpus).encode("utf-8")
    except UnicodeEncodeError as error:
        raise LoadError(
            f"The prompt at {where} of {source!r} holds half a surrogate pair",
            expected="text that UTF-8 can hold",
            got=ascii(text)[:120],
            fix="write the file anew from the original text",
        ) from error
    return text, corpus


# --- ids ----------------------------------------------------------------------------------


def _rows_of_ids(
    view: ModelView, given: Any, mask: Tensor | None
) -> tuple[list[list[int]], tuple[str | None, ...]]:
    if isinstance(given, str):
        given = [given]
    if isinstance(given, Tensor):
        return _rows_of_tensor(given, mask)
    if mask is not None:
        raise InvalidInputError(
            "A mask goes with a tensor of ids",
            expected="ids as a tensor [batch pos]",
            got=type(given).__name__,
            fix="leave the mask out, and choose padding='left' or 'right'",
        )
    if not isinstance(given, Sequence) or not given:
        raise InvalidInputError(
            "There is no prompt",
            expected="texts, lists of ids, or a tensor of ids [batch pos]",
            got=repr(given)[:80],
            fix="pass at least one prompt",
        )
    if all(isinstance(text, str) for text in given):
        return [encode(view, text) for text in given], tuple(given)
    if all(isinstance(i, int) and not isinstance(i, bool) for i in given):
        given = [given]
    rows = [_row_of_ids(row) for row in given]
    return rows, (None,) * len(rows)


def _row_of_ids(row: Any) -> list[int]:
    values = row.tolist() if isinstance(row, Tensor) else row
    ok = isinstance(values, Sequence) and not isinstance(values, str) and len(values) > 0
    if not ok or not all(isinstance(i, int) and not isinstance(i, bool) for i in values):
        raise InvalidInputError(
            "Prompts are texts, or lists of whole-number ids, and not a mix",
            expected="list[str] or list[list[int]], none empty",
            got=repr(row)[:80],
            fix="turn texts into ids, or leave the empty ones out",
        )
    return list(values)


def _rows_of_tensor(
    ids: Tensor, mask: Tensor | None
) -> tuple[list[list[int]], tuple[str | None, ...]]:
    ids = ids[None] if ids.ndim == 1 and mask is None else ids
    if ids.ndim != 2 or ids.numel() == 0 or ids.is_floating_point() or ids.dtype == torch.bool:
        raise InvalidInputError(
            "Ids are whole numbers of shape [batch pos]",
            expected="an integer tensor with at least one row and one column",
            got=f"{ids.dtype} of shape {list(ids.shape)}",
            fix="pass one row of ids for each prompt",
        )
    if mask is None:
        return ids.tolist(), (None,) * len(ids)
    if mask.shape != ids.shape or not bool(((mask == 0) | (mask == 1)).all()):
        raise InvalidInputError(
            "The mask does not fit the ids",
            expected=f"shape {list(ids.shape)}, true or 1 where a token is",
            got=f"shape {list(mask.shape)}, values {mask.unique().tolist()[:5]}",
            fix="pass the attention mask that came with these ids",
        )
    rows = [row[keep.bool()].tolist() for row, keep in zip(ids, mask, strict=True)]
    return rows, (None,) * len(rows)


def _bos_id(view: ModelView) -> int | None:
    """The tokenizer's BOS, its [CLS] where it has none, None where it has neither.

    TransformerLens takes the EOS for a BOS where there is none; what a tokenizer was made with
    tells.
    """
    declared = getattr(view.tokenizer, "init_kwargs", None) or {}
    bos_id = getattr(view.tokenizer, "bos_token_id", None)
    if bos_id is None or ("bos_token" in declared and declared["bos_token"] is None):
        return getattr(view.tokenizer, "cls_token_id", None)
    return bos_id


def _with_bos(view: ModelView, row: list[int]) -> list[int]:
    bos_id = _bos_id(view)
    if bos_id is None:
        raise InvalidInputError(
            "There is no BOS token to put in front",
            expected="a tokenizer with a bos_token or a cls_token",
            got="none",
            fix="use bos='none', or put the id in front yourself",
        )
    if row and row[0] == bos_id:
        warnings.warn(
            "a prompt already starts with the BOS token; a second one is put in front",
            BosWarning,
            stacklevel=3,
        )
    return [int(bos_id), *row]


def _cut(rows: list[list[int]], length: int, padding: str) -> list[list[int]]:
    if not isinstance(length, int) or length < 1:
        raise InvalidInputError(
            "A length is a whole number of tokens",
            expected="1 or more",
            got=repr(length),
            fix="choose another length, or None for whole prompts",
        )
    short = [n for n, row in enumerate(rows) if len(row) < length]
    if short and padding == "none":
        raise InvalidInputError(
            f"Some prompts are shorter than length={length}",
            expected=f"at least {length} tokens in every prompt",
            got=f"prompt {short[0]} with {len(rows[short[0]])}, {len(short)} such prompts in all",
            fix="leave them out, choose a smaller length, or pass padding='right'",
        )
    return [row[:length] for row in rows]


def _check_rows(view: ModelView, rows: list[list[int]]) -> None:
    for number, row in enumerate(rows):
        if not row:
            raise InvalidInputError(
                f"Prompt {number} has no token",
                expected="one or more",
                got="a row that is masked throughout",
                fix="leave it out",
            )
        if len(row) > view.n_ctx:
            raise InvalidInputError(
                f"Prompt {number} is longer than the model's context",
                expected=f"at most n_ctx={view.n_ctx} tokens",
                got=f"{len(row)}",
                fix=f"pass length={view.n_ctx} or less",
            )
        bad = [i for i in row if not 0 <= i < view.d_vocab]
        if bad:
            raise InvalidInputError(
                f"Prompt {number} has ids that the model does not know",
                expected=f"ids from 0 to {view.d_vocab - 1}",
                got=bad[0],
                fix="use the tokenizer that belongs to the model",
            )


def _rectangle(rows: list[list[int]], padding: str, pad_id: int) -> tuple[Tensor, Tensor]:
    width = max(len(row) for row in rows)
    if padding == "none" and any(len(row) != width for row in rows):
        lengths = sorted({len(row) for row in rows})
        raise InvalidInputError(
            "The prompts have different lengths",
            expected="one length, or padding='right' or 'left', or ids with a mask",
            got=f"lengths from {lengths[0]} to {lengths[-1]}",
            fix="pass length=..., padding='right', or one prompt at a time",
        )
    ids = torch.full((len(rows), width), pad_id, dtype=torch.long)
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    for n, row in enumerate(rows):
        place = slice(width - len(row), width) if padding == "left" else slice(0, len(row))
        ids[n, place] = torch.tensor(row)
        mask[n, place] = True
    return ids, mask


def _pad_id(view: ModelView) -> int:
    pad_id = getattr(view.tokenizer, "pad_token_id", None)
    return int(pad_id) if pad_id is not None and 0 <= int(pad_id) < view.d_vocab else 0


def _checked_corpora(corpora: Sequence[str] | None, n: int) -> tuple[str, ...]:
    if corpora is None:
        return ("prompts",) * n
    names = tuple(corpora) if isinstance(corpora, Sequence) else ()
    if isinstance(corpora, str) or len(names) != n or any(not isinstance(c, str) for c in names):
        raise InvalidInputError(
            "Corpora are one name for each prompt",
            expected=f"{n} names",
            got=repr(corpora)[:80],
            fix="pass a list of strings, or None",
        )
    return names
