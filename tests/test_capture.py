"""A run computes what was asked for and no more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from models import hook, tiny_gpt2

import sinkscope as ss
from sinkscope.ablations import Ablation, Edit, EditContext, SkipMLP, ZeroQueryBias
from sinkscope.measures import _attention_is_sound, _name_stray_attention
from sinkscope.metrics import causal_visibility
from sinkscope.model import ModelView

N_LAYERS = 3


@pytest.fixture
def view(kind: str) -> ModelView:
    return ss.model_view(hook(tiny_gpt2(n_layers=N_LAYERS), kind))


def batch_of(view: ModelView, n: int = 4) -> ss.TokenBatch:
    generator = torch.Generator().manual_seed(0)
    return ss.token_batch(view, torch.randint(50, (n, 8), generator=generator))


def calls_of(view: ModelView, batch: ss.TokenBatch, site: ss.Site, layers: Sequence[int]) -> int:
    """How often a site is passed while sink scores are read, one prompt at a time."""
    calls = []
    with view.hooks([(site, lambda tensor, hook: calls.append(1))]):
        ss.sink_score(view, batch, layers=layers, batch_size=1)
    return len(calls)


def test_no_logits_are_made(view: ModelView) -> None:
    calls = []
    handle = view.model.unembed.register_forward_hook(lambda *_: calls.append(1))
    ss.sink_score(view, batch_of(view), layers=range(N_LAYERS))
    assert not calls
    logits = view.forward(batch_of(view))
    assert len(calls) == 1
    assert logits.shape[-1] == 50
    handle.remove()


def test_later_chunks_end_where_all_has_been_read(view: ModelView) -> None:
    batch = batch_of(view, 4)
    last = N_LAYERS - 1
    assert calls_of(view, batch, ss.Site("pattern", last), range(N_LAYERS)) == 4
    assert calls_of(view, batch, ss.Site("mlp_out", last), range(N_LAYERS)) == 1
    assert calls_of(view, batch, ss.Site("mlp_out", 0), [0, 1]) == 4
    assert calls_of(view, batch, ss.Site("resid_pre", 2), [0, 1]) == 0


def test_an_edit_behind_the_last_site_is_no_error(view: ModelView) -> None:
    batch = batch_of(view)
    skipped = ss.sink_score(view, batch, SkipMLP(N_LAYERS - 1), layers=[2], batch_size=1)
    assert torch.equal(skipped, ss.sink_score(view, batch, layers=[2], batch_size=1))


@dataclass(frozen=True)
class Counted(Ablation):
    """No query bias, and a note of each time that its edits are made."""

    made: list[int]

    def edits(self, view: ModelView, context: EditContext) -> Sequence[Edit]:
        self.made.append(1)
        return ZeroQueryBias().edits(view, context)


def test_edits_are_made_once_unless_padding_differs(view: ModelView) -> None:
    batch, made = batch_of(view, 4), []
    several = ss.sink_score(view, batch, Counted(made), batch_size=1)
    assert len(made) == 1
    torch.testing.assert_close(several, ss.sink_score(view, batch, ZeroQueryBias()))
    mixed = ss.token_batch(view, [[1, 2, 3, 4], [5, 6, 7], [8, 9]], padding="right")
    made.clear()
    several = ss.sink_score(view, mixed, Counted(made), batch_size=1)
    assert len(made) == 3
    torch.testing.assert_close(several, ss.sink_score(view, mixed, ZeroQueryBias()))


def spoilt(name: str, pattern: torch.Tensor) -> torch.Tensor:
    pattern = pattern.clone()
    if name == "later key":
        pattern[1, 0, 2, 3] = 0.1
    elif name == "negative":
        pattern[1, 0, 3, :2] += torch.tensor([0.9, -0.9])
    elif name == "above one":
        pattern[0, 1, 4] *= 1.5
    elif name == "not a number":
        pattern[0, 1, 4, 0] = float("nan")
    elif name == "empty":
        pattern[0, :, 4] = 0
    return pattern


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    "name", ["sound", "later key", "negative", "above one", "not a number", "empty"]
)
def test_the_short_check_of_attention_refuses_what_the_long_one_names(
    name: str, dtype: torch.dtype
) -> None:
    mask = torch.ones(2, 6, dtype=torch.bool)
    visible = causal_visibility(mask)
    scores = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(0))
    scores = scores.masked_fill(~visible[:, None], -torch.inf)
    arguments: Any = (spoilt(name, scores.softmax(-1)).to(dtype), mask, visible)
    if name == "sound":
        _name_stray_attention(*arguments, layer=0)
        assert _attention_is_sound(*arguments) or dtype == torch.bfloat16
        return
    assert not _attention_is_sound(*arguments)
    with pytest.raises(ss.SinkscopeError):
        _name_stray_attention(*arguments, layer=0)
