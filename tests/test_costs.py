"""Costs against transformers and plain torch: losses, divergence, outliers, precision, windows."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from inspect import unwrap
from typing import Any

import numpy as np
import pytest
import torch
from models import EXACT, IDS, close, exact_gpt2, shared_model
from torch import Tensor
from transformers.pytorch_utils import Conv1D

import sinkscope as ss
from sinkscope.ablations import Ablation, Edit, SkipMLP, ZeroKeyColumns, ZeroQueryBias
from sinkscope.costs import fake_quantised
from sinkscope.errors import IdentityError, InvalidInputError, NoEffectWarning
from sinkscope.mitigations import OffByOneSoftmax, WindowedAttention

LENGTHS = (9, 6, 4)
N_LAYERS, N_HEADS, D_MODEL = 3, 3, 12


BASE = exact_gpt2()
ROWS = [
    torch.randint(1, 50, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in LENGTHS
]


def padded(model: Any, side: str) -> ss.TokenBatch:
    n = max(LENGTHS)
    ids, mask = torch.zeros(len(ROWS), n, dtype=torch.long), torch.zeros(len(ROWS), n)
    for i, row in enumerate(ROWS):
        where = slice(n - len(row), n) if side == "left" else slice(0, len(row))
        ids[i, where] = torch.tensor(row)
        mask[i, where] = 1
    return ss.token_batch(model, ids, mask=mask)


@torch.no_grad()
def losses(hf: Any, ids: Tensor, **kwargs: Any) -> Tensor:
    logits = hf(ids, **kwargs).logits
    per_token = torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="none"
    )
    return per_token.view(len(ids), -1).mean(1)


# --- loss and divergence ------------------------------------------------------------------


def test_the_loss_is_transformers_own(model: Any, batch: ss.TokenBatch) -> None:
    with torch.no_grad():
        own = [float(BASE(row[None], labels=row[None]).loss) for row in IDS]
    expected = losses(BASE, IDS)
    close(own, expected, atol=1e-6)  # transformers' is in float32
    close(ss.next_token_loss(model, batch), expected)
    close(ss.next_token_loss(model, batch, batch_size=2), expected)


def test_divergence_is_zero_from_itself_and_else_what_the_formula_says(
    model: Any, batch: ss.TokenBatch
) -> None:
    assert float(ss.kl_to_untouched(model, batch).abs().max()) == 0
    hf = copy.deepcopy(BASE)
    for block in hf.transformer.h:
        block.mlp.forward = torch.zeros_like
    with torch.no_grad():
        p, q = (m(IDS).logits.softmax(-1) for m in (BASE, hf))
    expected = (p * (p / q).log()).sum(-1).mean(-1)
    for size in (None, 2):
        close(ss.kl_to_untouched(model, batch, SkipMLP(), batch_size=size), expected)
    close(ss.next_token_loss(model, batch, SkipMLP()), losses(hf, IDS))


MEASURES: dict[str, Callable[..., Tensor]] = {
    "loss": ss.next_token_loss,
    "kl": ss.kl_to_untouched,
    "entropy": ss.attention_entropy,
    "window": lambda m, b, a: ss.streaming_loss(m, b, 3, 0, a),
    "window and first": lambda m, b, a: ss.streaming_loss(m, b, 2, 1, a),
    "outliers": lambda m, b, a: torch.stack(
        [getattr(ss.residual_statistics(m, b, a), n) for n in ("peak", "ratio", "kurtosis")], -1
    ),
}


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", MEASURES)
def test_padding_changes_nothing(model: Any, name: str, side: str) -> None:
    ablation = OffByOneSoftmax(layers=[1]) + ZeroQueryBias(heads=[0])
    together = MEASURES[name](model, padded(model, side), ablation)
    for i, row in enumerate(ROWS):
        alone = MEASURES[name](model, ss.token_batch(model, [row]), ablation)
        close(together[i], alone[0], atol=1e-8)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_no_quantised_number(model: Any, side: str) -> None:
    """All prompts together set the scales, so the same prompts must give the same numbers."""
    rows = [row[:4] for row in ROWS]
    tight = ss.quantised_loss(model, ss.token_batch(model, rows), bits=4)
    ids = torch.full((3, 7), 7)
    where = slice(3, 7) if side == "left" else slice(0, 4)
    mask = torch.zeros(3, 7)
    ids[:, where], mask[:, where] = torch.tensor(rows), 1
    loose = ss.token_batch(model, ids, mask=mask)
    for size in (None, 1):
        close(ss.quantised_loss(model, loose, bits=4, batch_size=size), tight, atol=1e-8)


# --- outliers and entropy -----------------------------------------------------------------


def test_outliers_are_those_of_transformers_hidden_states(model: Any, batch: ss.TokenBatch) -> None:
    got = ss.residual_statistics(model, batch, layers=[0, 2])
    with torch.no_grad():
        states = BASE(IDS, output_hidden_states=True).hidden_states
    for n, layer in enumerate((0, 2)):
        for i in range(len(IDS)):
            x = states[layer][i].numpy().ravel()
            centred = x - x.mean()
            lower_median = np.sort(np.abs(x))[(x.size - 1) // 2]
            assert float(got.peak[i, n]) == pytest.approx(np.abs(x).max(), abs=EXACT)
            assert float(got.ratio[i, n]) == pytest.approx(np.abs(x).max() / lower_median)
            kurtosis = (centred**4).mean() / (centred**2).mean() ** 2
            assert float(got.kurtosis[i, n]) == pytest.approx(kurtosis)


def test_outliers_of_a_planted_vector() -> None:
    from sinkscope.costs import outlier_statistics

    x = torch.zeros(1, 100, 10, dtype=torch.float64)
    x[0, ::2] = 1.0
    x[0, 1::2] = -1.0
    x[0, 0, 0] = 100.0
    mask = torch.ones(1, 100, dtype=torch.bool)
    peak, ratio, kurtosis, outliers = outlier_statistics(x, mask)[0].tolist()
    assert (peak, ratio, outliers) == (100.0, 100.0, 1 / 1000)
    assert kurtosis > 500
    _, _, flat, none = outlier_statistics(x.clamp(-1, 1), mask)[0].tolist()
    assert (flat, none) == (pytest.approx(1.0), 0.0)


def test_entropy_is_that_of_transformers_attentions(model: Any, batch: ss.TokenBatch) -> None:
    with torch.no_grad():
        attentions = torch.stack(BASE(IDS, output_attentions=True).attentions, 1)
    expected = torch.special.entr(attentions).sum(-1).mean(-1)
    close(ss.attention_entropy(model, batch), expected, atol=1e-9)


def test_what_a_sink_logit_takes_counts_as_a_key() -> None:
    from sinkscope.costs import entropy

    mask = torch.ones(1, 2, dtype=torch.bool)
    visible = torch.ones(1, 2, 2, dtype=torch.bool).tril()
    pattern = torch.tensor([[[[0.5, 0.0], [0.25, 0.25]]]], dtype=torch.float64)
    expected = (np.log(2) + 1.5 * np.log(2)) / 2
    assert float(entropy(pattern, mask, visible)) == pytest.approx(expected)


# --- windows ------------------------------------------------------------------------------


@pytest.mark.parametrize(("window", "kept"), [(1, 0), (3, 0), (3, 2), (2, 4)])
def test_a_window_is_that_mask_in_transformers(
    model: Any, batch: ss.TokenBatch, window: int, kept: int
) -> None:
    n = IDS.shape[1]
    i, j = torch.arange(n)[:, None], torch.arange(n)[None, :]
    seen = (j <= i) & ((i - j < window) | (j < kept))
    mask = torch.zeros(1, 1, n, n, dtype=torch.float64)
    mask.masked_fill_(~seen, torch.finfo(torch.float64).min)
    expected = losses(BASE, IDS, attention_mask=mask.expand(3, -1, -1, -1))
    close(ss.streaming_loss(model, batch, window, kept), expected)


def test_a_window_of_the_full_length_is_the_model(model: Any, batch: ss.TokenBatch) -> None:
    expected = ss.next_token_loss(model, batch)
    close(ss.streaming_loss(model, batch, IDS.shape[1]), expected, atol=0)
    with pytest.warns(NoEffectWarning):
        close(ss.next_token_loss(model, batch, WindowedAttention(8)), expected, atol=0)
    assert not torch.allclose(ss.streaming_loss(model, batch, 6), expected)


# --- quantisation -------------------------------------------------------------------------


class Quantised:
    """transformers' model with rounded weights and inputs, without hooks of sinkscope."""

    def __init__(self, bits: int, ids: Tensor) -> None:
        self.hf = copy.deepcopy(BASE)
        self.most = 2 ** (bits - 1) - 1
        linears = [m for m in self.hf.transformer.h.modules() if isinstance(m, Conv1D)]
        assert len(linears) == 4 * N_LAYERS
        peaks = {}
        handles = [
            m.register_forward_pre_hook(lambda m, x: peaks.__setitem__(m, x[0].abs().max()))
            for m in linears
        ]
        with torch.no_grad():
            self.hf(ids)
        for handle in handles:
            handle.remove()
        for m in linears:
            weight = m.weight.data
            m.weight.data = self.rounded(weight, weight.abs().amax(0, keepdim=True))
            m.register_forward_pre_hook(
                lambda m, x: (self.rounded(x[0], peaks[m]), *x[1:]), prepend=True
            )

    def rounded(self, x: Tensor, peak: Tensor) -> Tensor:
        step = peak / self.most
        return torch.clamp(torch.round(x / step), -self.most, self.most) * step


@pytest.mark.parametrize("bits", [3, 4, 8])
def test_quantised_is_a_model_of_rounded_weights_and_inputs(
    model: Any, batch: ss.TokenBatch, bits: int
) -> None:
    expected = losses(Quantised(bits, IDS).hf, IDS)
    close(ss.quantised_loss(model, batch, bits=bits), expected, atol=1e-8)
    assert not torch.allclose(expected, ss.next_token_loss(model, batch), atol=1e-5)


def test_at_16_bits_the_quantised_model_is_the_model(model: Any, batch: ss.TokenBatch) -> None:
    for ablation in (None, ZeroKeyColumns([1, 5]), ZeroQueryBias() + SkipMLP(layers=0)):
        exact = ss.next_token_loss(model, batch, ablation)
        close(ss.quantised_loss(model, batch, ablation, bits=16), exact, atol=2e-3)
        eight = (ss.quantised_loss(model, batch, ablation) - exact).abs().max()
        sixteen = (ss.quantised_loss(model, batch, ablation, bits=16) - exact).abs().max()
        assert sixteen < eight / 20


@dataclasses.dataclass(frozen=True)
class Looks(Ablation):
    site: ss.Site
    fn: Callable[..., None]

    def edits(self, view: Any, context: Any) -> list[Edit]:
        return [Edit(self.site, self.fn, only_looks=True)]


def test_key_columns_are_gone_from_the_quantised_model_too(
    model: Any, batch: ss.TokenBatch
) -> None:
    """What is taken off a key is what the rounded input and weight put there, to the last bit."""
    ablation = ZeroKeyColumns([1, 5])
    seen: list[Tensor] = []
    name = ss.model_view(model).hook_point(ss.Site("k", 0)).name
    model.add_hook(name, lambda k, hook: seen.append(k.clone()))
    look = Looks(ss.Site("k", 0), lambda k, hook: seen.append(k.clone()))
    try:
        ss.quantised_loss(model, batch, ablation + look, bits=3)
    finally:
        model.reset_hooks()
    before, after = seen[-2:]
    reference = Quantised(3, IDS)
    block = reference.hf.transformer.h[0]
    with torch.no_grad():
        x = block.ln_1(reference.hf.transformer.wte(IDS) + reference.hf.transformer.wpe.weight[:8])
        inputs = reference.rounded(x, x.abs().max())
        W_K = block.attn.c_attn.weight[:, D_MODEL : 2 * D_MODEL].clone()
        W_K[[1, 5]] = 0
        expected = inputs @ W_K + block.attn.c_attn.bias[D_MODEL : 2 * D_MODEL]
    close(after.flatten(2), expected)
    assert not torch.allclose(before, after)


def test_weights_are_back_also_after_an_exception(model: Any, batch: ss.TokenBatch) -> None:
    view = ss.model_view(model)
    before = view.weights_hash()
    places = [p.data_ptr() for p in model.parameters()]
    hooks = [len(m._forward_pre_hooks) for m in model.modules()]
    ss.quantised_loss(model, batch, bits=2)
    calls: list[int] = []

    def boom(x: Tensor, hook: Any) -> None:
        calls.append(1)
        if len(calls) > 1:
            assert view.weights_hash() != before, "the second pass runs on rounded weights"
            raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        ss.quantised_loss(model, batch, Looks(ss.Site("resid_post", 1), boom))
    assert len(calls) == 2
    assert view.weights_hash() == before
    assert [p.data_ptr() for p in model.parameters()] == places
    assert [len(m._forward_pre_hooks) for m in model.modules()] == hooks


def test_a_rounded_number_is_the_nearest_on_its_grid() -> None:
    x = torch.tensor([-3.0, -0.5, 0.0, 0.24, 0.26, 1.0, 9.0])
    got = fake_quantised(x, torch.tensor(1.5), bits=3)
    close(got, torch.tensor([-1.5, -0.5, 0.0, 0.0, 0.5, 1.0, 1.5]), atol=1e-7)
    close(fake_quantised(torch.zeros(2), torch.tensor(0.0), 8), torch.zeros(2))


# --- refusals -----------------------------------------------------------------------------

BAD: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "one token": (lambda m, b: ss.next_token_loss(m, ss.token_batch(m, [[3]])), "one token"),
    "bits": (lambda m, b: ss.quantised_loss(m, b, bits=1), "from 2 to 16"),
    "bits of another kind": (lambda m, b: unwrap(ss.quantised_loss)(m, b, bits=8.0), "8.0"),
    "window": (lambda m, b: ss.streaming_loss(m, b, 0), "1 or more"),
    "kept keys": (lambda m, b: ss.streaming_loss(m, b, 2, -1), "0 or more"),
    "no batch": (lambda m, b: unwrap(ss.streaming_loss)(m, [[1, 2]], 2), "TokenBatch"),
    "layer": (lambda m, b: ss.residual_statistics(m, b, layers=7), "layers from 0 to 2"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_values_say_what_is_right(name: str) -> None:
    model = shared_model("bridge")
    call, message = BAD[name]
    with pytest.raises(InvalidInputError, match=message):
        call(model, ss.token_batch(model, IDS))


def test_logits_that_are_not_finite_are_no_loss(model: Any, batch: ss.TokenBatch) -> None:
    nan = Ablation.from_hook(ss.Site("resid_post", 2), lambda x, hook: x * float("nan"))
    with pytest.raises(IdentityError, match="not finite"):
        ss.next_token_loss(model, batch, nan)


def test_logits_can_be_read_and_not_edited(model: Any, batch: ss.TokenBatch) -> None:
    edit = Ablation.from_hook(ss.Site("logits"), lambda x, hook: 0 * x)
    with pytest.raises(ss.SinkscopeError, match="no hook for logits"):
        ss.next_token_loss(model, batch, edit)
