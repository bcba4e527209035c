"""Situations 1 to 11: tokens and positions. `docs/situations.md` tells what each is about."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from byte_tokenizer import byte_tokenizer, ids_of
from models import hook, tiny_gpt2
from torch import Tensor

import sinkscope as ss
from sinkscope import metrics
from sinkscope.ablations import Ablation, ReplacePosition, ZeroPositions
from sinkscope.errors import BosWarning, InvalidInputError

ROWS = [[0, 4, 0], [7, 8, 9, 10, 11, 12], [0, 21, 22, 23]]
"""Id 0 is BOS, EOS and padding in one, as in GPT-2; it is also a token of two rows."""


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)


def _keep(seen: list[Tensor], tensor: Tensor, hook: Any) -> None:
    seen.append(tensor.clone())


def with_tokenizer(**options: bool) -> Any:
    return ss.load_model(tiny_gpt2(d_vocab=257), tokenizer=byte_tokenizer(**options))


def test_01_left_padding_gives_each_row_the_patterns_of_the_row_alone(kind: str) -> None:
    """`P(batch)[row, tokens] = P(row alone)`, though GPT-2's own positions ignore the mask."""
    model = hook(tiny_gpt2(), kind)
    batch = ss.token_batch(model, ROWS, padding="left")
    together = ss.patterns(model, batch)
    for n, row in enumerate(ROWS):
        own = slice(batch.ids.shape[1] - len(row), None)
        close(together[n][..., own, own], ss.patterns(model, ss.token_batch(model, [row]))[0])


@pytest.mark.parametrize("padding", ["left", "right"])
def test_02_the_first_position_is_the_first_unmasked_one_and_no_pad(
    kind: str, padding: Any
) -> None:
    """`first` from the mask, though pad = bos = eos and rows hold that id themselves."""
    model = hook(tiny_gpt2(), kind)
    batch = ss.token_batch(model, ROWS, padding=padding)
    starts = [6 - len(row) if padding == "left" else 0 for row in ROWS]
    assert batch.first.tolist() == starts
    assert (batch.ids == 0).sum() == 8
    pattern = ss.patterns(model, batch)
    score = ss.sink_score(model, batch, layers=[0, 1, 2])
    for n, (row, start) in enumerate(zip(ROWS, starts, strict=True)):
        late = slice(start + len(row) // 2, start + len(row))
        close(score[n], pattern[n, :, :, late, start].mean(-1))


@pytest.mark.filterwarnings("ignore:an edit at")  # the hook that only looks
def test_03_no_bos_is_added_in_silence_and_a_bos_is_reported(kind: str) -> None:
    """The model runs on the ids of the text, and `bos` says whether position 0 is a BOS."""
    for adds_bos in (False, True):
        tokenizer = byte_tokenizer(adds_bos=adds_bos)
        model = hook(tiny_gpt2(d_vocab=257), kind, tokenizer=tokenizer)
        if kind == "hooked":
            model.tokenizer = tokenizer
        seen: list[Tensor] = []
        look = Ablation.from_hook(ss.Site("embed"), partial(_keep, seen))
        plain = ss.token_batch(model, ["abc"])
        asked = ss.token_batch(model, ["abc"], bos="prepend")
        ss.residual_norms(model, plain, look)
        assert plain.ids.tolist() == [ids_of("abc")]
        assert asked.ids.tolist() == [[0, *ids_of("abc")]]
        assert (plain.bos, asked.bos) == ((False,), (True,))
        close(seen[0][0], ss.model_view(model).embedding[ids_of("abc")])


def test_04_a_second_bos_is_warned_of() -> None:
    model = with_tokenizer()
    with pytest.warns(BosWarning, match="already starts with the BOS"):
        batch = ss.token_batch(model, [[0, 5, 6]], bos="prepend")
    assert batch.ids.tolist() == [[0, 0, 5, 6]]


def test_05_a_tokenizer_without_bos_leaves_the_ids_alone() -> None:
    """Also where TransformerLens would take the EOS for a BOS."""
    model = with_tokenizer(has_bos=False)
    batch = ss.token_batch(model, ["abc"])
    assert (batch.ids.tolist(), batch.bos) == ([ids_of("abc")], (False,))
    with pytest.raises(InvalidInputError, match="no BOS token to put in front"):
        ss.token_batch(model, ["abc"], bos="prepend")


def test_06_ids_are_sliced_and_never_decoded_and_encoded_again() -> None:
    """`ids(text)[:n]`, also where the slice ends inside a character, which has no text."""
    model = with_tokenizer()
    text = "aé日z"
    whole = ss.token_batch(model, [text]).ids[0].tolist()
    assert len(whole) == 7
    for n in range(1, 8):
        assert ss.token_batch(model, [text], length=n).ids[0].tolist() == whole[:n]


@pytest.mark.parametrize("padding", ["left", "right"])
def test_07_padding_is_left_out_of_averages_as_query_and_as_key(kind: str, padding: Any) -> None:
    """Whatever stands at padding, a row has the numbers of the row alone, and NaN at padding."""
    model = hook(tiny_gpt2(), kind)
    batch = ss.token_batch(model, ROWS, padding=padding)
    pattern = ss.patterns(model, batch)[:, 1]
    both = batch.mask[:, :, None] & batch.mask[:, None, :]
    noisy = torch.where(both[:, None], pattern, 1e3)
    score, received = (
        m(noisy, batch.mask) for m in (metrics.sink_score, metrics.received_attention)
    )
    per_position = [
        measure(model, batch)
        for measure in (
            *(ss.source_agnostic_shift, ss.value_norms, ss.residual_norms, ss.missing_mass),
        )
    ]
    for n, row in enumerate(ROWS):
        own, alone = batch.mask[n], ss.token_batch(model, [row])
        expected = ss.patterns(model, alone)[:, 1]
        close(score[n], metrics.sink_score(expected, alone.mask)[0])
        close(received[n][:, own], metrics.received_attention(expected, alone.mask)[0])
        assert received[n][:, ~own].isnan().all()
        shift, values, residual, missing = (measured[n] for measured in per_position)
        close(shift[..., own], ss.source_agnostic_shift(model, alone)[0])
        close(values[..., own], ss.value_norms(model, alone)[0])
        close(residual[..., own], ss.residual_norms(model, alone)[0])
        close(missing[..., own], ss.missing_mass(model, alone)[0])
        for measured in (shift, values, residual, missing):
            assert measured[..., ~own].isnan().all()


def test_08_a_prompt_longer_than_the_context_is_refused_before_a_forward_pass(kind: str) -> None:
    model = hook(tiny_gpt2(n_ctx=8), kind)
    passes: list[int] = []
    model.add_hook(ss.model_view(model).hook_point(ss.Site("embed")).name, _counting(passes))
    long = [list(range(1, 10))]
    with pytest.raises(InvalidInputError, match=r"longer than the model's context.*n_ctx=8.*9"):
        ss.sink_score(model, ss.token_batch(model, long))
    of_another = ss.token_batch(hook(tiny_gpt2(), kind), long)
    with pytest.raises(InvalidInputError, match=r"does not fit the model.*at most 8 .*9 tokens"):
        ss.sink_score(model, of_another)
    assert passes == []


def _counting(calls: list[int]) -> Any:
    return lambda tensor, hook: calls.append(1)


@pytest.mark.parametrize("metric", [ss.sink_score, ss.sink_rate, ss.sink_position])
def test_09_no_token_or_one_has_no_sink_instead_of_a_full_one(kind: str, metric: Any) -> None:
    """One token attends to itself by 100%."""
    model = hook(tiny_gpt2(), kind)
    for nothing in ([], [[]], torch.zeros(1, 0, dtype=torch.long)):
        with pytest.raises(InvalidInputError):
            ss.token_batch(model, nothing)
    with pytest.raises(InvalidInputError, match="row 1 with 1"):
        metric(model, ss.token_batch(model, [[1, 2, 3], [4]], padding="right"))
    with pytest.raises(InvalidInputError, match="row 0 with 1"):
        metric(model, ss.token_batch(model, [[4]]))


@pytest.mark.filterwarnings("ignore:an edit at")  # the hook that only looks
@pytest.mark.parametrize("n_rows", [1, 3])
def test_10_an_edit_of_a_position_acts_on_the_position_and_not_on_the_row(
    kind: str, n_rows: int
) -> None:
    """With one row, `x[0]` and `x[:, 0]` look alike; with three, padded on the left, they don't."""
    model = hook(tiny_gpt2(), kind)
    rows = [[*range(1, 6)], [6, 7, 8], [9, 10, 11, 12]][:n_rows]
    batch = ss.token_batch(model, rows, padding="left")
    view, seen = ss.model_view(model), []
    look = Ablation.from_hook(ss.Site("pos_embed"), partial(_keep, seen))
    for edit in (ZeroPositions(positions=[1]), ReplacePosition(source=2, target=0)):
        ss.residual_norms(model, batch, edit + look)
    zeroed, replaced = view.W_pos[:5].clone(), view.W_pos[[2, 1, 2, 3, 4]]
    zeroed[1] = 0
    for n, row in enumerate(rows):
        close(seen[0][n, batch.mask[n]], zeroed[: len(row)])
        close(seen[1][n, batch.mask[n]], replaced[: len(row)])


def test_11_a_sink_elsewhere_is_reported_where_it_is(kind: str) -> None:
    """All attention on position 1: no sink at position 0 does not mean that there is none."""
    model = hook(tiny_gpt2(), kind)

    def to_position_1(pattern: Tensor, hook: Any) -> Tensor:
        moved = torch.zeros_like(pattern)
        moved[..., 0, 0] = 1
        moved[..., 1:, 1] = 1
        return moved

    batch = ss.token_batch(model, [[1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, 12]])
    moved = Ablation.from_hook(ss.Site("pattern", 1), to_position_1)
    assert (ss.sink_rate(model, batch, moved, layers=[1]) == 0).all()
    assert (ss.sink_position(model, batch, moved, layers=[1]) == 1).all()
