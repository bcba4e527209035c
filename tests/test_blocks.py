"""What is checked block by block is what the whole pattern would give."""

from __future__ import annotations

import pytest
import torch
from architectures import CONFIGS, IDS, transformers_model
from torch import Tensor

import sinkscope as ss
from sinkscope import attention
from sinkscope.attention import Block, ScoreRule, blocks, errors_by_head, sees_any
from sinkscope.errors import IdentityError
from sinkscope.measures import _attention_is_sound, _refuse_stray_attention
from sinkscope.metrics import causal_visibility, full_visibility

N = 9
HEADS = 3
MASK = torch.ones(4, N, dtype=torch.bool)
MASK[0, 5:] = False  # no row that stands for all comes first
MASK[1, :4] = False
SEEN = {
    "causal": causal_visibility(torch.ones_like(MASK)),
    "padded": causal_visibility(MASK),
    "window": causal_visibility(MASK, window=2),
    "both directions": full_visibility(MASK),
}


@pytest.fixture(params=[1, 60, 400, 10**6])
def most(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Entries of a block: from one query of a row to all there is."""
    monkeypatch.setattr(attention, "BLOCK_PAIRS", request.param)
    return request.param


@pytest.fixture(params=list(SEEN))
def visible(request: pytest.FixtureRequest) -> Tensor:
    """`[batch one query key]`."""
    return SEEN[request.param][:, None]


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_a_query_counts_that_sees_any_key(visible: Tensor) -> None:
    assert torch.equal(sees_any(visible), visible.any(-1))


def test_blocks_hold_each_visible_pair_once_and_no_more_than_they_may(
    most: int, visible: Tensor
) -> None:
    times = torch.zeros_like(visible, dtype=torch.long)
    sizes = []
    for block in blocks(visible, HEADS):
        piece = block.of(times)
        piece += 1
        sizes.append(HEADS * piece.numel())
    assert int(times[visible].min()) == int(times.max()) == 1
    assert max(sizes) <= max(most, HEADS * N)
    assert len(sizes) == 1 or min(sizes[:2]) > 0


def test_blocks_of_a_causal_model_leave_out_keys_that_none_of_their_queries_sees() -> None:
    long = torch.ones(1, 1, 600, 600, dtype=torch.bool).tril()
    held = sum(long[block.rows, :, block.queries, block.keys].numel() for block in blocks(long, 16))
    assert held < 0.6 * long.numel()


def test_errors_are_those_of_the_whole(most: int, visible: Tensor) -> None:
    made, shown = drawn(4, HEADS, N, N), drawn(4, HEADS, N, N).flip(0)
    whole = (made - shown).abs().masked_fill(~visible, 0).amax((0, 2, 3))
    assert torch.equal(errors_by_head(lambda block: block.of(made), shown, visible), whole)


def test_an_error_in_any_visible_pair_is_found_and_no_hidden_one(
    most: int, visible: Tensor
) -> None:
    shown = drawn(4, HEADS, N, N)
    for row, query, key in [(0, 8, 0), (0, 8, 8), (3, 0, 0), (1, 8, 8), (2, 4, 4), (0, 0, 8)]:
        for wrong in (1.0, float("nan")):
            made = shown.clone()
            made[row, 1, query, key] += wrong
            found = errors_by_head(lambda block, made=made: block.of(made), shown, visible)
            expected = wrong if visible[row, 0, query, key] else 0.0
            torch.testing.assert_close(
                found, torch.tensor([0, expected, 0]).double(), equal_nan=True
            )


def test_one_row_of_visible_keys_stands_for_all(most: int) -> None:
    shown = drawn(4, HEADS, N, N)
    made = shown.clone()
    made[3, 1, 8, 0] += 1
    first = SEEN["causal"][:1, None]
    found = errors_by_head(lambda block: block.of(made), shown, first)
    torch.testing.assert_close(found, torch.tensor([0.0, 1, 0]).double())


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("queries", [1, N])
def test_scores_of_blocks_are_the_scores_blocks(
    most: int, visible: Tensor, rows: int, queries: int
) -> None:
    q, k = drawn(4, HEADS, N, 5), drawn(4, HEADS, N, 5).flip(0)
    bias = drawn(rows, HEADS, queries, N)
    rule = ScoreRule(scale=0.3, position_bias=bias, soft_cap=2.0)
    whole = 2 * torch.tanh((0.3 * q @ k.transpose(-1, -2) + bias) / 2)
    for block in blocks(visible, HEADS):
        torch.testing.assert_close(rule.scores(q, k, block), block.of(whole))


def test_a_block_of_one_position_is_that_position() -> None:
    one = drawn(1, HEADS, 1, 1)
    (block,) = blocks(torch.ones(1, 1, 1, 1, dtype=torch.bool), HEADS)
    assert block == Block(block.rows, block.queries, slice(0, 1))
    assert torch.equal(block.of(one), one)


def test_attention_is_sound_in_all_blocks_or_not_at_all(most: int, visible: Tensor) -> None:
    scores = torch.where(visible, drawn(4, HEADS, N, N), -torch.inf)
    pattern = scores.softmax(-1).nan_to_num(0)
    seen = visible[:, 0]
    assert _attention_is_sound(pattern, MASK, seen)
    padding = torch.where(MASK[:, None, :, None], pattern, 1 / N)
    assert _attention_is_sound(padding, MASK, seen), "what padding attends to is nobody's"
    hidden = ~visible & MASK[:, None, :, None]
    for place in hidden.nonzero()[:: max(1, int(hidden.sum()) // 20)].tolist():
        row, _, query, key = place
        stray = 0.9 * pattern  # so that no row sums to more than 1
        stray[row, 2, query, key] += 0.01
        assert not _attention_is_sound(stray, MASK, seen), place
    for spoil in (float("nan"), -2.0, 0.5):
        wrong = pattern.clone()
        wrong[3, 1, 8, 8] += spoil
        assert not _attention_is_sound(wrong, MASK, seen), spoil
    empty = pattern.clone()
    empty[0, :, 4] = 0
    assert not _attention_is_sound(empty, MASK, seen)


def test_what_is_unsound_is_named_and_padding_may_hold_nan(visible: Tensor) -> None:
    seen = visible[:, 0]
    pattern = torch.where(visible, drawn(4, HEADS, N, N), -torch.inf).softmax(-1)
    pattern = pattern.masked_fill(~seen.any(-1)[:, None, :, None], torch.nan)
    _refuse_stray_attention(pattern, MASK, seen, 0)
    _refuse_stray_attention(torch.where(seen.any(-1)[:, None, :, None], pattern, 1), MASK, seen, 0)
    wrong = pattern.clone()
    wrong[3, 1, 8, 8] = torch.nan
    with pytest.raises(IdentityError, match=r"NaN in the attention of tokens.*Got: 1 NaN"):
        _refuse_stray_attention(wrong, MASK, seen, 3)
    hidden = (~visible & MASK[:, None, :, None]).nonzero()
    for row, _, query, key in hidden[:: max(1, len(hidden) // 5)].tolist():
        stray = 0.9 * pattern
        stray[row, 2, query, key] = 0.04
        with pytest.raises(IdentityError, match=r"In layer 3 .*should not see.*Got: .* 4\.00e-02"):
            _refuse_stray_attention(stray, MASK, seen, 3)


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "bert"])
def test_each_architecture_passes_block_by_block(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ss.load_model(transformers_model(name))
    batch = ss.token_batch(model, [IDS[0].tolist(), IDS[1].tolist()[:8]], padding="right")
    whole = ss.decompose_scores(model, batch)
    scores = ss.sink_score(model, batch, layers=0)
    monkeypatch.setattr(attention, "BLOCK_PAIRS", 20)
    pieces = ss.decompose_scores(model, batch)
    again = ss.sink_score(model, batch, layers=0)
    torch.testing.assert_close(again, scores, rtol=0, atol=0, equal_nan=True)
    assert (pieces.max_error, pieces.tolerance) == pytest.approx(
        (whole.max_error, whole.tolerance), rel=0, abs=0, nan_ok=True
    )
    assert pieces.pattern_error <= pieces.tolerance


@pytest.mark.parametrize("padding", ["left", "right"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_of_padding_alone_are_passed_over(
    padding: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ss.load_model(transformers_model("gpt2", dtype=dtype))
    rows = [IDS[0].tolist(), IDS[1].tolist()[:3]]
    short = ss.token_batch(model, rows, padding=padding).select([1])
    whole = ss.sink_score(model, short)
    monkeypatch.setattr(attention, "BLOCK_PAIRS", 1)
    assert torch.equal(ss.sink_score(model, short), whole)
    assert ss.decompose_scores(model, short).pattern_error < 0.1
