"""A model whose sink was built by hand, so that every answer about it is known beforehand.

Layer 0 has no attention output, and one MLP neuron that reads coordinate 0. Only p_0 has that
coordinate (60), so the neuron gives 30 at position 0 and exactly 0 elsewhere, and writes
`PLANTED` there. In layer 1, W_Q is 0 in heads 0, 1 and 3, so that their scores are
`b_Q.k_j / sqrt(d_head)`:

    head 0: b_Q along r, W_K reads the massive coordinates onto r       a sink at position 0
    head 1: the same W_K, b_Q = 0                                      uniform attention
    head 2: random W_Q and b_Q, W_K blind to the massive coordinates   no sink
    head 3: as head 0 with -b_Q                                        position 0 is shunned

The rows of W_K sum to 0, so that what LN1 subtracts (the mean) cancels: where a token has no
massive coordinate, its key in heads 0, 1 and 3 is exactly 0.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from models import hook, tiny_gpt2
from torch import Tensor

import sinkscope as ss
from sinkscope.ablations import (
    ReplacePosition,
    SkipMLP,
    SwapEPE,
    SwapPE,
    ZeroKeyColumns,
    ZeroPositions,
    ZeroQueryBias,
    ZeroRandomKeyColumns,
    ZeroToken,
)
from sinkscope.errors import NoEffectWarning

D_MODEL, N_HEADS, D_HEAD, N_CTX, LENGTH = 128, 4, 32, 16, 10
READ = 0  # the coordinate that the neuron reads
PLANTED = {17: 720.0, 64: -420.0, 101: -300.0}  # what it writes, 30 times its output weights
ROWS = {17: 1.0, 64: -420 / 720, 101: -300 / 720}  # W_K rows along r: they sum to 0
STRENGTH = 12.0
SINK, UNIFORM, BLIND, SHUN = range(4)
NOISE = 0.1


@pytest.fixture(scope="module")
def ids() -> Tensor:
    return torch.randint(0, 50, (3, LENGTH), generator=torch.Generator().manual_seed(0))


def direction() -> Tensor:
    r = torch.randn(D_HEAD, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return (r / r.norm()).float().double()


def planted() -> Any:
    """The model above, on top of a random GPT-2 of three layers."""
    hf = tiny_gpt2(3, N_HEADS, D_HEAD, N_CTX)
    transformer, special = hf.transformer, [READ, *PLANTED]
    signs = torch.randint(0, 2, (N_CTX, D_MODEL), generator=torch.Generator().manual_seed(1))
    transformer.wpe.weight.data = NOISE * (2.0 * signs - 1).double()
    transformer.wpe.weight.data[:, special] = 0
    transformer.wpe.weight.data[0, READ] = 60
    transformer.wte.weight.data[:, special] = 0

    first = transformer.h[0]
    first.attn.c_proj.weight.data.zero_()
    first.attn.c_proj.bias.data.zero_()
    first.ln_2.weight.data.fill_(1)
    first.ln_2.weight.data[READ] = 6
    first.ln_2.bias.data.zero_()
    first.mlp.c_fc.weight.data.zero_()
    first.mlp.c_fc.bias.data.fill_(-50)  # gelu_new(-50) is 0 to the last bit
    first.mlp.c_fc.weight.data[READ, 0] = 1
    first.mlp.c_fc.bias.data[0] = -30
    first.mlp.c_proj.weight.data.zero_()
    first.mlp.c_proj.bias.data.zero_()
    for d, value in PLANTED.items():
        first.mlp.c_proj.weight.data[0, d] = value / 30

    second = transformer.h[1]
    second.ln_1.weight.data[[*PLANTED]] = 1
    second.ln_1.bias.data[[*PLANTED]] = 0
    r, W, b = direction(), second.attn.c_attn.weight.data, second.attn.c_attn.bias.data
    for head in (SINK, UNIFORM, SHUN):
        q = slice(head * D_HEAD, (head + 1) * D_HEAD)
        k = slice(D_MODEL + head * D_HEAD, D_MODEL + (head + 1) * D_HEAD)
        W[:, q] = 0
        W[:, k] = 0
        b[q] = {SINK: STRENGTH, UNIFORM: 0.0, SHUN: -STRENGTH}[head] * r
        for d, share in ROWS.items():
            W[d, k] = share * r
    W[[*PLANTED], D_MODEL + BLIND * D_HEAD : D_MODEL + (BLIND + 1) * D_HEAD] = 0
    return hf


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    return {}


@pytest.fixture
def model(kind: str, models: dict[str, Any]) -> Any:
    if kind not in models:
        models[kind] = hook(planted(), kind)
    return models[kind]


@pytest.fixture
def batch(model: Any, ids: Tensor) -> ss.TokenBatch:
    return ss.token_batch(model, ids)


@pytest.fixture
def strength(ids: Tensor) -> Tensor:
    """`[batch]`, the score of position 0 in the sink head, by hand."""
    hf = planted()
    with torch.no_grad():
        x = hf.transformer.wte(ids[:, :1]) + hf.transformer.wpe.weight[:1]
        block = hf.transformer.h[0]
        n = hf.transformer.h[1].ln_1(x + block.mlp(block.ln_2(x)))[:, 0]
    key = sum(n[:, d] * share for d, share in ROWS.items())
    return STRENGTH * key * float(direction() @ direction()) / math.sqrt(D_HEAD)


UNIFORM_PATTERN = torch.ones(LENGTH, LENGTH, dtype=torch.float64).tril() / torch.arange(
    1, LENGTH + 1, dtype=torch.float64
).unsqueeze(1)


def close(ours: Tensor, theirs: Tensor, atol: float = 1e-9) -> None:
    torch.testing.assert_close(ours, theirs.expand_as(ours), rtol=0, atol=atol)


def second_layer(model: Any, batch: ss.TokenBatch, ablation: Any = None) -> Tensor:
    return ss.patterns(model, batch, ablation, layers=1)[:, 0]


# --- what the finders see -----------------------------------------------------------------


def test_epe_holds_what_was_written(model: Any) -> None:
    """`EPE_0 = p_0 + PLANTED`, and `EPE_i = p_i` elsewhere."""
    epe = ss.extract_epe(model)
    expected = epe.positions.clone()
    for d, value in PLANTED.items():
        expected[0, d] += value
    close(epe.vectors, expected, atol=1e-12)


@pytest.mark.parametrize(
    "rule",
    [
        ss.MeanStd(3.0),
        ss.TopK(3),
        ss.MedianRatio(),
        ss.MedianRatio(absolute=None),
        ss.MedianRatio(absolute=299.0, ratio=1.0),
    ],
    ids=repr,
)
def test_rules_find_exactly_the_planted_coordinates(model: Any, rule: Any) -> None:
    """Each rule finds the three coordinates with their signed values, in EPE_0 and only there."""
    epe = ss.extract_epe(model).vectors
    found = ss.find_massive_coordinates(epe[0], rule)
    assert found.indices.tolist() == list(PLANTED)
    assert found.values.tolist() == pytest.approx(list(PLANTED.values()))
    if not isinstance(rule, ss.TopK):
        for other in epe[1:]:
            assert len(ss.find_massive_coordinates(other, rule)) == 0


def test_gamma(model: Any) -> None:
    """`gamma_h[d] = b_Q.W_K[d]`: strength times share at the planted coordinates, else 0."""
    gamma = ss.coordinate_alignment(model, layers=1)[0]
    expected = torch.zeros(D_MODEL, dtype=torch.float64)
    for d, share in ROWS.items():
        expected[d] = STRENGTH * share
    close(gamma[SINK], expected, atol=1e-5)
    close(gamma[SHUN], -expected, atol=1e-5)
    close(gamma[UNIFORM], torch.zeros(D_MODEL, dtype=torch.float64))
    assert float(gamma[BLIND, list(PLANTED)].abs().max()) == 0
    assert float(gamma[BLIND].abs().max()) > 0.1


def test_alignment(model: Any) -> None:
    """`cos(b_Q, EPE_0 W_K)` is 1 in the sink head, -1 where shunned; without a bias, no number."""
    cosines = ss.epe_bias_alignment(model, n_positions=4, layers=1)[0]
    assert float(cosines[SINK, 0]) == pytest.approx(1, abs=1e-6)
    assert float(cosines[SHUN, 0]) == pytest.approx(-1, abs=1e-6)
    assert bool(cosines[UNIFORM].isnan().all())
    assert bool(cosines[SINK, 1:].isnan().all()), "keys of other positions are zero"
    assert float(cosines[BLIND].abs().max()) < 0.9


def test_delta_lies_in_the_planted_coordinates(model: Any, batch: ss.TokenBatch) -> None:
    """In the sink head the planted coordinates carry all of Delta, in the blind head none."""
    whole = ss.shift_by_coordinate(model, batch, layers=1).sum(-1)[:, 0]
    share = ss.shift_share(model, batch, list(PLANTED), layers=1)[:, 0]
    close(share[:, SINK], whole[:, SINK])
    close(share[:, SHUN], whole[:, SHUN])
    assert float(share[:, BLIND].abs().max()) == 0
    assert float(whole[:, BLIND].abs().max()) > 0.1
    delta = ss.source_agnostic_shift(model, batch, layers=1)[:, 0]
    assert bool((delta[:, SINK].argmax(-1) == 0).all())
    assert bool((delta[:, SHUN].argmin(-1) == 0).all())
    close(delta[:, SINK, 1:], torch.zeros(1, dtype=torch.float64), atol=1e-4)


# --- what the metrics see -----------------------------------------------------------------


def test_sink_in_closed_form(model: Any, batch: ss.TokenBatch, strength: Tensor) -> None:
    """`pattern[i, 0] = e^s / (e^s + i)` in the sink head, `e^-s / (e^-s + i)` where shunned."""
    pattern = second_layer(model, batch)
    i = torch.arange(LENGTH, dtype=torch.float64)
    for head, sign in ((SINK, 1), (SHUN, -1)):
        weight = (sign * strength).exp()[:, None]
        close(pattern[:, head, :, 0], weight / (weight + i), atol=1e-6)
    close(pattern[:, UNIFORM], UNIFORM_PATTERN)
    assert float(pattern[:, SINK, LENGTH // 2 :, 0].min()) > 0.95


def test_metrics(model: Any, batch: ss.TokenBatch) -> None:
    """Sink score, rate and position tell the four heads apart."""
    score = ss.sink_score(model, batch, layers=1)[:, 0]
    assert float(score[:, SINK].min()) > 0.95
    assert float(score[:, SHUN].max()) < 0.01
    by_hand = sum(1 / (i + 1) for i in range(LENGTH // 2, LENGTH)) / (LENGTH // 2)
    close(score[:, UNIFORM], torch.tensor(by_hand, dtype=torch.float64))
    rate = ss.sink_rate(model, batch, layers=1)[:, 0]
    # Uniform attention gives alpha_0 = mean over i of 1/(i+1) = .2929: beneath .3, above .29.
    assert rate[:, [SINK, UNIFORM, SHUN]].tolist() == [[1.0, 0.0, 0.0]] * 3
    assert ss.sink_rate(model, batch, layers=1, eps=0.29)[:, 0, UNIFORM].tolist() == [1.0] * 3
    assert ss.sink_position(model, batch, layers=1)[:, 0, SINK].tolist() == [0] * 3
    norms = ss.residual_norms(model, batch)
    assert norms[:, 1].argmax(-1).tolist() == [0] * 3
    assert float((norms[:, 1, 0] / norms[:, 1, 1:].amax(-1)).min()) > 20


# --- what each ablation does --------------------------------------------------------------


def test_zero_query_bias_kills_the_sink_in_its_head(model: Any, batch: ss.TokenBatch) -> None:
    """Without b_Q the sink head's scores are all 0: uniform attention; other heads stay."""
    before = second_layer(model, batch)
    after = second_layer(model, batch, ZeroQueryBias(layers=1, heads=SINK))
    close(after[:, SINK], UNIFORM_PATTERN, atol=1e-12)
    close(after[:, 1:], before[:, 1:], atol=0)
    close(second_layer(model, batch, ZeroQueryBias())[:, SHUN], UNIFORM_PATTERN, atol=1e-12)
    some = second_layer(model, batch, ZeroQueryBias(positions=[7]))
    close(some[:, SINK, 7], UNIFORM_PATTERN[7], atol=1e-12)
    close(some[:, SINK, :7], before[:, SINK, :7], atol=0)


@pytest.mark.parametrize("coordinates", [list(PLANTED), ss.TopK(3), ss.MeanStd(3.0)], ids=repr)
def test_zero_key_columns_kill_the_sink(model: Any, batch: ss.TokenBatch, coordinates: Any) -> None:
    """Without the planted rows of W_K keys are 0: uniform; the blind head does not notice."""
    before = second_layer(model, batch)
    after = second_layer(model, batch, ZeroKeyColumns(coordinates, layers=1))
    for head in (SINK, UNIFORM, SHUN):
        close(after[:, head], UNIFORM_PATTERN, atol=1e-9)
    close(after[:, BLIND], before[:, BLIND], atol=0)
    only_first = second_layer(model, batch, ZeroKeyColumns(coordinates, layers=1, positions=[0]))
    close(only_first[:, SINK], UNIFORM_PATTERN, atol=1e-6)


def test_random_key_columns_do_not_touch_it(model: Any, batch: ss.TokenBatch) -> None:
    """Other rows of W_K are 0 in the sink head: taking them off changes the blind head alone."""
    view = ss.model_view(model)
    assert not set(ZeroRandomKeyColumns().draws(view)[1]) & set(PLANTED)
    before = second_layer(model, batch)
    after = second_layer(model, batch, ZeroRandomKeyColumns(layers=1))
    close(after[:, [SINK, UNIFORM, SHUN]], before[:, [SINK, UNIFORM, SHUN]], atol=0)
    assert float((after[:, BLIND] - before[:, BLIND]).abs().max()) > 1e-4


def test_swap_epe_moves_the_sink(model: Any, batch: ss.TokenBatch) -> None:
    """The massive coordinates change to position 1, and so does the sink."""
    after = second_layer(model, batch, SwapEPE())
    assert float(after[:, SINK, 1:, 1].min()) > 0.9
    assert ss.sink_position(model, batch, SwapEPE(), layers=1)[:, 0, SINK].tolist() == [1] * 3
    assert float(ss.sink_score(model, batch, SwapEPE(), layers=1)[:, 0, SINK].max()) < 0.1
    received = ss.metrics.received_attention(after, batch.mask)
    assert float(received[:, SINK, 1].min()) > 0.9


def test_swap_pe_does_nothing_here(model: Any, batch: ss.TokenBatch) -> None:
    """p_0 is orthogonal to what the MLP writes: `a = m_0.u_0 = 0`, and the edit says so."""
    with pytest.warns(NoEffectWarning, match="mlp_out of layer 0"):
        after = second_layer(model, batch, SwapPE())
    close(after, second_layer(model, batch), atol=0)


@pytest.mark.parametrize(
    "ablation",
    [ReplacePosition(1, 0), ZeroPositions(), ZeroPositions([0]), SkipMLP(), SkipMLP(0, [0])],
    ids=repr,
)
def test_without_position_or_mlp_there_is_no_sink(
    model: Any, batch: ss.TokenBatch, ablation: Any
) -> None:
    """No p_0, or no MLP_0: nothing is massive, keys are 0, attention is uniform."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", NoEffectWarning)
        after = second_layer(model, batch, ablation)
    close(after[:, SINK], UNIFORM_PATTERN, atol=1e-5)


def test_the_token_at_position_0_does_not_matter(model: Any, batch: ss.TokenBatch) -> None:
    """The sink hangs on p_0: nulling e_0 keeps it, and no other position's p or MLP matters."""
    for ablation in (ZeroToken(0), ZeroPositions([1, 2, 3]), SkipMLP(2)):
        after = ss.sink_score(model, batch, ablation, layers=1)[:, 0]
        assert float(after[:, SINK].min()) > 0.95
    with pytest.warns(NoEffectWarning):  # the neuron is silent there
        ss.sink_score(model, batch, SkipMLP(0, [4]), layers=1)


def test_moved_neuron_moves_the_sink(kind: str, ids: Tensor) -> None:
    """With p_0 and p_3 exchanged in the weights, the sink sits at 3 and is found there."""
    hf = planted()
    W_pos = hf.transformer.wpe.weight.data
    W_pos[[0, 3]] = W_pos[[3, 0]].clone()
    model = hook(hf, kind)
    batch = ss.token_batch(model, ids)
    assert ss.sink_position(model, batch, layers=1)[:, 0, SINK].tolist() == [3] * 3
    assert ss.sink_rate(model, batch, layers=1)[:, 0, SINK].tolist() == [0.0] * 3
    assert float(ss.sink_score(model, batch, layers=1)[:, 0, SINK].max()) < 0.1
    epe = ss.extract_epe(model).vectors
    assert set(ss.find_massive_coordinates(epe[3]).coordinates) == set(PLANTED)
    assert len(ss.find_massive_coordinates(epe[0])) == 0
