"""Texts and ids become batches as they are: nothing is re-encoded, moved or added in silence."""

from __future__ import annotations

import json
import random
import warnings
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from byte_tokenizer import BOS, byte_tokenizer, ids_of
from models import hook, tiny_gpt2

import sinkscope as ss
from sinkscope.errors import BosWarning, InvalidInputError, LoadError
from sinkscope.prompts import fold_whitespace, paper_prompts


def model_with(tokenizer: Any) -> Any:
    return hook(tiny_gpt2(n_ctx=64, d_vocab=257), "bridge", tokenizer=tokenizer)


@pytest.fixture(scope="module")
def model() -> Any:
    return model_with(byte_tokenizer())


# --- files --------------------------------------------------------------------------------


def written(tmp_path: Path, name: str, content: str | bytes) -> Path:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
    return path


def test_a_text_file_has_one_prompt_a_line(model: Any, tmp_path: Path) -> None:
    path = written(tmp_path, "p.txt", "first one\n\n  \nsecond\r\nthird\rfourth")
    prompts = ss.load_prompts(model, path)
    assert prompts.texts == ("first one", "second", "third", "fourth")
    assert prompts.corpora == ("prompts",) * 4
    assert prompts.source == str(path)


@pytest.mark.parametrize(
    "odd", ["\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\x85", "\u2028", "\u2029"]
)
def test_only_line_feeds_and_carriage_returns_end_a_line(
    model: Any, tmp_path: Path, odd: str
) -> None:
    prompts = ss.load_prompts(model, written(tmp_path, "p.txt", f"one{odd}still one\ntwo\n"))
    assert prompts.texts == (f"one{odd}still one", "two")


def test_csv_columns_may_stand_in_any_order(model: Any, tmp_path: Path) -> None:
    content = 'corpus,id,text\nmath,1,"one, ""two""\nand three"\n,2,plain\n'
    prompts = ss.load_prompts(model, written(tmp_path, "p.csv", content))
    assert prompts.texts == ('one, "two"\nand three', "plain")
    assert prompts.corpora == ("math", "prompts")


def test_jsonl_strings_may_hold_any_line_separator(model: Any, tmp_path: Path) -> None:
    lines = [
        '{"text": "a\u2028b\x85c", "corpus": "code"}',
        "",
        json.dumps({"text": "d\ne", "other": 1}),
    ]
    prompts = ss.load_prompts(model, written(tmp_path, "p.jsonl", "\r\n".join(lines)))
    assert prompts.texts == ("a\u2028b\x85c", "d\ne")
    assert prompts.corpora == ("code", "prompts")


@pytest.mark.parametrize(
    ("name", "content"),
    [("p.txt", "text"), ("p.csv", "text\ntext\n"), ("p.JSONL", '{"text": "text"}')],
)
def test_a_byte_order_mark_is_no_part_of_the_prompt(
    model: Any, tmp_path: Path, name: str, content: str
) -> None:
    prompts = ss.load_prompts(model, written(tmp_path, name, b"\xef\xbb\xbf" + content.encode()))
    assert prompts.texts == ("text",)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("empty.txt", ""),
        ("blank.txt", " \n\t\n"),
        ("latin.txt", "caf\xe9".encode("latin-1")),
        ("utf16.csv", "text\nhello\n".encode("utf-16")),
        ("binary.jsonl", bytes(range(256))),
        ("header.csv", "text,corpus\n"),
        ("column.csv", "prompt\nhello\n"),
        ("cell.csv", "text,corpus\n ,math\n"),
        ("quote.csv", 'text\n"never closed\n'),
        ("broken.jsonl", '{"text": "a"}\n{"text": \n'),
        ("list.jsonl", '["a"]\n'),
        ("number.jsonl", '{"text": 3}\n'),
        ("corpus.jsonl", '{"text": "a", "corpus": 3}\n'),
        ("missing.jsonl", '{"corpus": "math"}\n'),
        ("deep.jsonl", "[" * 100_000),
        ("surrogate.jsonl", '{"text": "half \\ud800 pair"}\n'),
        ("names.jsonl", '{"text": "a", "corpus": "\\udfff"}\n'),
        ("prompts.json", '["a"]'),
        ("prompts", "a"),
    ],
)
def test_unusable_files_are_refused(
    model: Any, tmp_path: Path, name: str, content: str | bytes
) -> None:
    path = written(tmp_path, name, content)
    with pytest.raises(LoadError) as caught:
        ss.load_prompts(model, path)
    message = str(caught.value)
    assert name in message
    assert all(part in message for part in ("Expected: ", "Got: ", "To fix it: "))


def test_the_line_of_a_broken_prompt_is_named(model: Any, tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"Line 3 of .*three\.jsonl"):
        ss.load_prompts(model, written(tmp_path, "three.jsonl", '{"text": "a"}\n\n{"text": }\n'))
    with pytest.raises(LoadError, match=r"row 3 of .*three\.csv"):
        ss.load_prompts(model, written(tmp_path, "three.csv", "text,corpus\na,b\n,c\n"))


@pytest.mark.parametrize("name", ["absent.txt", "folder.txt", "nul\0.txt"])
def test_what_is_no_file_is_refused(model: Any, tmp_path: Path, name: str) -> None:
    (tmp_path / "folder.txt").mkdir()
    with pytest.raises(LoadError, match="readable file in UTF-8"):
        ss.load_prompts(model, tmp_path / name)


def test_demo_prompts_need_no_file(model: Any) -> None:
    prompts = ss.load_prompts(model, "demo")
    assert prompts.source == "demo"
    assert set(prompts.corpora) == {"natural_language", "math", "code"}
    assert len(set(prompts.texts)) == len(prompts.texts) == len(prompts.corpora)


# --- the paper's prompts ------------------------------------------------------------------


def data_sets() -> dict[tuple[str, str | None, str], dict[str, list[str]]]:
    """Texts around the limit of 40 tokens, with whitespace to fold, 300 of each."""
    rng = random.Random(7)

    def texts() -> list[str]:
        words = ["".join(rng.choices("abcdefg", k=rng.randint(1, 9))) for _ in range(300 * 9)]
        rows = [words[9 * n : 9 * n + 9] for n in range(300)]
        gaps = (" ", "  ", "\n", "\t ", "\u00a0", "\r\n")
        return [rng.choice(gaps) + rng.choice(gaps).join(row) + rng.choice(gaps) for row in rows]

    return {
        ("stanfordnlp/sst2", None, "train"): {"sentence": ["", *texts()], "label": ["x"] * 301},
        ("openai/gsm8k", "main", "train"): {"question": texts(), "answer": ["x"] * 300},
        ("openai/openai_humaneval", None, "test"): {"prompt": texts(), "test": ["x"] * 300},
    }


def test_paper_prompts_follow_the_papers_protocol(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    stored = data_sets()
    asked = []

    def load_dataset(path: str, name: str | None = None, *, split: str) -> Any:
        asked.append((path, name, split))
        return stored[path, name, split]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    prompts = ss.load_prompts(model, "paper")

    expected = []
    shuffler = random.Random(42)
    for key, column in zip(stored, ("sentence", "question", "prompt"), strict=True):
        folded = [" ".join(text.split()) for text in stored[key][column]]
        kept = [text for text in folded if len(text) >= 40]  # a token is one character
        assert 100 < len(kept) < len(folded), "both sides of the limit occur"
        shuffler.shuffle(kept)
        expected += kept[:100]
    assert asked == list(stored)
    assert list(prompts.texts) == expected
    assert prompts.corpora == ("natural_language",) * 100 + ("math",) * 100 + ("code",) * 100
    assert prompts.source == "paper"
    batch = ss.token_batch(model, prompts, length=40)
    assert batch.ids.tolist() == [ids_of(text[:40]) for text in expected]


def test_paper_prompts_keep_texts_of_exactly_40_tokens(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    rows = {"a" * 39, "b" * 40, "c" * 41}
    column = dict.fromkeys(("sentence", "question", "prompt"), sorted(rows))
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: column)
    assert set(paper_prompts(model, per_corpus=2).texts) == rows - {"a" * 39}
    with pytest.raises(LoadError, match=r"too few .*Expected: 3. Got: 2"):
        paper_prompts(model, per_corpus=3)


def test_paper_prompts_without_the_hub(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def unreachable(*args: Any, **kwargs: Any) -> Any:
        raise ConnectionError("the network is down")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(LoadError, match=r"stanfordnlp/sst2 .*the network is down.*--prompts demo"):
        ss.load_prompts(model, "paper")


def test_paper_prompts_without_the_datasets_library(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(LoadError, match="ModuleNotFoundError"):
        ss.load_prompts(model, "paper")


def test_whitespace_is_folded() -> None:
    assert fold_whitespace("\n a \t\u00a0b\u2028c  ") == "a b c"


# --- batches ------------------------------------------------------------------------------


class ForwardOnly:
    """A tokenizer whose ids can't be turned back into text."""

    bos_token_id = None
    cls_token_id = None
    pad_token_id = None
    init_kwargs: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        self.texts: list[str] = []

    def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
        self.texts.append(text)
        return {"input_ids": [ord(c) % 50 for c in text]}

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"the tokenizer was asked for {name}")


def test_ids_are_sliced_and_never_decoded(model: Any) -> None:
    tokenizer = ForwardOnly()
    tokenizer_model = ss.model_view(hook(tiny_gpt2(), "bridge"))
    view = type(tokenizer_model)(**{**vars(tokenizer_model), "tokenizer": tokenizer})
    batch = ss.token_batch(view, ["hello there", "goodbye now"], length=5)
    assert batch.ids.tolist() == [[ord(c) % 50 for c in t] for t in ("hello", "goodb")]
    assert tokenizer.texts == ["hello there", "goodbye now"]
    assert batch.texts == ("hello there", "goodbye now")


def test_a_slice_may_end_inside_a_character(model: Any) -> None:
    batch = ss.token_batch(model, ["aé"], length=2)  # é has two bytes
    assert batch.ids.tolist() == [ss.token_batch(model, ["aé"]).ids[0, :2].tolist()]
    assert model.tokenizer(model.tokenizer.decode(batch.ids[0])).input_ids != batch.ids[0].tolist()


def test_lists_and_tensors_stay_as_they_are(model: Any) -> None:
    rows = [[5, 0, 7], [8, 9, 256]]
    for given in (rows, torch.tensor(rows), torch.tensor(rows, dtype=torch.int32), tuple(rows)):
        batch = ss.token_batch(model, given)
        assert batch.ids.tolist() == rows
        assert batch.ids.dtype == torch.int64
        assert bool(batch.mask.all())
        assert batch.texts == (None, None)
        assert batch.bos == (False, False)
    assert ss.token_batch(model, rows[0]).ids.tolist() == rows[:1]
    assert ss.token_batch(model, torch.tensor(rows[0])).ids.tolist() == rows[:1]


def test_one_text_is_a_batch_of_one(model: Any) -> None:
    assert ss.token_batch(model, "abc").ids.tolist() == [ids_of("abc")]


@pytest.mark.parametrize("adds_bos", [False, True])
def test_no_bos_unless_asked_for(adds_bos: bool) -> None:
    tokenizer = byte_tokenizer(adds_bos=adds_bos)
    assert (tokenizer("ab").input_ids == ids_of("ab")) is not adds_bos
    model = model_with(tokenizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error", BosWarning)
        plain = ss.token_batch(model, ["abcd", "efgh"])
        prepended = ss.token_batch(model, ["abcd", "efgh"], bos="prepend", length=4)
    assert plain.ids.tolist() == [ids_of("abcd"), ids_of("efgh")]
    assert plain.bos == (False, False)
    assert prepended.ids.tolist() == [[0, *ids_of("abc")], [0, *ids_of("efg")]]
    assert prepended.bos == (True, True)


def test_a_bos_in_the_text_is_reported_and_a_second_one_warned_of(model: Any) -> None:
    batch = ss.token_batch(model, [BOS + "a", "bc"])
    assert batch.ids.tolist() == [[0, *ids_of("a")], ids_of("bc")]
    assert batch.bos == (True, False)
    with pytest.warns(BosWarning, match="second"):
        doubled = ss.token_batch(model, [[0, 5]], bos="prepend")
    assert doubled.ids.tolist() == [[0, 0, 5]]


@pytest.mark.parametrize("has_bos", [False, True])
def test_cls_is_the_bos_of_a_tokenizer_that_has_none(has_bos: bool) -> None:
    tokenizer = byte_tokenizer(has_bos=has_bos)
    tokenizer.cls_token = "A"
    model = model_with(tokenizer)
    batch = ss.token_batch(model, ["Abc", BOS + "A", "bcd"], padding="right")
    assert batch.bos == ((False, True, False) if has_bos else (True, False, False))
    assert sum(batch.bos) == ss.survey(model, batch).rows[0].starts_with_bos
    first = 0 if has_bos else ids_of("A")[0]
    prepended = ss.token_batch(model, ["bc"], bos="prepend")
    assert prepended.ids.tolist() == [[first, *ids_of("bc")]]
    assert prepended.bos == (True,)


def test_a_tokenizer_without_bos_refuses_to_prepend() -> None:
    model = model_with(byte_tokenizer(has_bos=False))
    assert ss.token_batch(model, ["ab"]).bos == (False,)
    with pytest.raises(InvalidInputError, match="no BOS token"):
        ss.token_batch(model, ["ab"], bos="prepend")
    with pytest.raises(InvalidInputError, match="no BOS token"):
        ss.token_batch(hook(tiny_gpt2(), "bridge"), [[1, 2]], bos="prepend")


@pytest.mark.parametrize(
    ("padding", "mask", "first"),
    [("right", [[1, 1, 0], [1, 1, 1]], [0, 0]), ("left", [[0, 1, 1], [1, 1, 1]], [1, 0])],
)
def test_padding(model: Any, padding: Any, mask: list[list[int]], first: list[int]) -> None:
    rows = [[5, 6], [7, 8, 9]]
    batch = ss.token_batch(model, rows, padding=padding)
    assert batch.mask.long().tolist() == mask
    assert [row[keep].tolist() for row, keep in zip(batch.ids, batch.mask, strict=True)] == rows
    assert batch.first.tolist() == first
    assert batch.lengths.tolist() == [2, 3]
    positions = [p[keep].tolist() for p, keep in zip(batch.position_ids, batch.mask, strict=True)]
    assert positions == [[0, 1], [0, 1, 2]]
    assert set(batch.position_ids[~batch.mask].tolist()) == {-1}
    given = ss.token_batch(model, batch.ids, mask=torch.tensor(mask))
    assert torch.equal(given.ids, batch.ids)
    assert torch.equal(given.mask, batch.mask)


def test_length_with_padding_keeps_short_prompts(model: Any) -> None:
    batch = ss.token_batch(model, ["ab", "cdef"], length=3, padding="right")
    assert batch.lengths.tolist() == [2, 3]
    with pytest.raises(InvalidInputError, match=r"prompt 0 with 2, 1 such"):
        ss.token_batch(model, ["ab", "cdef"], length=3)


def test_what_a_mask_hides_need_not_be_an_id(model: Any) -> None:
    ids, mask = torch.tensor([[-100, 4, 5]]), torch.tensor([[False, True, True]])
    batch = ss.token_batch(model, ids, mask=mask)
    assert batch.ids[0, 1:].tolist() == [4, 5]
    assert 0 <= int(batch.ids[0, 0]) < 257
    assert ids.tolist() == [[-100, 4, 5]], "the caller's tensor stays as it is"


def test_corpora_are_the_prompts_own_or_given(model: Any) -> None:
    prompts = ss.Prompts(("ab", "cd", "ef"), ("x", "y", "x"))
    assert ss.token_batch(model, prompts).corpora == ("x", "y", "x")
    assert ss.token_batch(model, prompts, corpora=["p", "q", "r"]).corpora == ("p", "q", "r")
    assert ss.token_batch(model, ["ab"]).corpora == ("prompts",)
    for wrong in (["p"], ["p"] * 4, "pqr"):
        with pytest.raises(InvalidInputError, match="3 names"):
            ss.token_batch(model, prompts, corpora=wrong)


def test_rows_stay_together_in_selections_and_chunks(model: Any) -> None:
    prompts = ss.Prompts(("abc", "de", "f"), ("x", "y", "z"))
    batch = ss.token_batch(model, prompts, padding="left")
    picked = batch.select([2, 0])
    assert picked.texts == ("f", "abc")
    assert picked.corpora == ("z", "x")
    assert picked.lengths.tolist() == [1, 3]
    assert picked.ids[1].tolist() == ids_of("abc")
    assert [chunk.texts for chunk in batch.chunks(2)] == [("abc", "de"), ("f",)]
    assert [chunk.texts for chunk in batch.chunks(None)] == [("abc", "de", "f")]
    assert batch.select(slice(1, None)).corpora == ("y", "z")
