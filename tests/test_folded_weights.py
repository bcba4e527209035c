"""Folded and centred weights: what is defined on raw weights is refused, the rest agrees.

With n = gain u + beta the output of LN1, u its normalised input and C the centring over d_model
(`C u = u`), folding makes `W' = C gain W`, `b' = b + beta W`, and n' = u.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from models import hook, tiny_gpt2
from torch import Tensor
from transformers import GPT2LMHeadModel

import sinkscope as ss
from sinkscope.ablations import SwapEPE, ZeroKeyColumns
from sinkscope.errors import ProcessedWeightsError

CLOSE = 1e-6  # TransformerLens folds in float32, whatever the model's dtype
IDS = torch.randint(0, 50, (3, 8), generator=torch.Generator().manual_seed(1))
NOTHING = {
    "fold_ln": False,
    "center_writing_weights": False,
    "center_unembed": False,
    "fold_value_biases": False,
}
PROCESSING = {
    "folded and centred": NOTHING | {"fold_ln": True, "center_writing_weights": True},
    "folded": NOTHING | {"fold_ln": True},
    "centred": NOTHING | {"center_writing_weights": True},
}
NAMES = {
    "folded and centred": ("folded", "centred"),
    "folded": ("folded",),
    "centred": ("centred",),
}
processings = pytest.mark.parametrize("processing", PROCESSING)
halves = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


@cache
def raw(kind: str) -> Any:
    return hook(tiny_gpt2(), kind)


@cache
def processed(kind: str, processing: str = "folded and centred") -> Any:
    return hook(tiny_gpt2(), kind, **PROCESSING[processing])


def batch() -> ss.TokenBatch:
    return ss.token_batch(raw("bridge"), IDS)


def close(ours: Tensor, theirs: Tensor, atol: float = CLOSE) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=atol)


def gain_and_bias(layer: int) -> tuple[Tensor, Tensor]:
    """LN1's own, from transformers' weights."""
    ln1 = tiny_gpt2().transformer.h[layer].ln_1
    return ln1.weight.detach(), ln1.bias.detach()


def effective(which: str, layer: int) -> Tensor:
    """`b + beta W` of the raw model, `[head d_head]`."""
    view = ss.model_view(raw("bridge"))
    _, beta = gain_and_bias(layer)
    weight, bias = (view.W_Q, view.b_Q) if which == "q" else (view.W_K, view.b_K)
    return bias(layer) + torch.einsum("d,hde->he", beta, weight(layer))


# --- what is refused ----------------------------------------------------------------------

NEEDS_RAW: dict[str, Callable[[Any, ss.TokenBatch], Any]] = {
    "extract_epe": lambda m, b: ss.extract_epe(m),
    "extract_epe, ln": lambda m, b: ss.extract_epe(m, through_ln=True),
    "coordinate_alignment": lambda m, b: ss.coordinate_alignment(m),
    "epe_bias_alignment": lambda m, b: ss.epe_bias_alignment(m, n_positions=4),
    "query_bias": lambda m, b: ss.query_bias(m, kind="raw"),
    "shift, paper": ss.source_agnostic_shift,
    "shift, score": lambda m, b: ss.source_agnostic_shift(m, b, "score"),
    "shift_share": lambda m, b: ss.shift_share(m, b, [0]),
    "shift_by_coordinate": ss.shift_by_coordinate,
    "fidelity, mlp": ss.epe_fidelity,
    "fidelity, block": lambda m, b: ss.epe_fidelity(m, b, "block"),
    "fidelity, causal": lambda m, b: ss.epe_fidelity(m, b, "causal_block"),
    "swap": lambda m, b: ss.sink_score(m, b, SwapEPE()),
    "key columns": lambda m, b: ss.sink_score(m, b, ZeroKeyColumns(ss.TopK(3))),
    "reproduce": ss.reproduce,
}


@pytest.mark.parametrize("name", NEEDS_RAW)
def test_refused_with_a_way_to_load(kind: str, name: str) -> None:
    """The error names what was done, and two ways to load the same model without it."""
    NEEDS_RAW[name](raw(kind), batch())
    for processing, names in NAMES.items():
        with pytest.raises(ProcessedWeightsError) as caught:
            NEEDS_RAW[name](processed(kind, processing), batch())
        message = str(caught.value)
        assert " and ".join(names) in message
        assert "load_model" in message
        assert "from_pretrained_no_processing" in message


@processings
def test_parts_name_what_was_done(kind: str, processing: str) -> None:
    """`parts.processed` says which of the two, and `bias_kind` follows from folding alone."""
    view = ss.model_view(processed(kind, processing))
    assert view.parts.processed == NAMES[processing]
    assert view.bias_kind == ("effective" if "folded" in NAMES[processing] else "raw")
    assert dict(view.overview())["processed"] == ", ".join(NAMES[processing])


@halves
@processings
def test_half_precision_hides_nothing(kind: str, processing: str, dtype: torch.dtype) -> None:
    """Rounding leaves means of eps times a row's magnitude: small, but far above float32's."""
    model = hook(tiny_gpt2(dtype=dtype), kind, **PROCESSING[processing])
    assert ss.model_view(model).parts.processed == NAMES[processing]


def test_folded_by_hand(kind: str) -> None:
    """`W -> C gain W`, `b -> b + beta W` in transformers' own weights, with no flag to tell."""
    hf = tiny_gpt2()
    for block in hf.transformer.h:
        ln, attn = block.ln_1, block.attn.c_attn
        attn.bias.data += ln.bias.data @ attn.weight.data
        attn.weight.data *= ln.weight.data[:, None]
        attn.weight.data -= attn.weight.data.mean(0)
        ln.weight.data.fill_(1)
        ln.bias.data.zero_()
    model = hook(hf, kind)
    close(ss.patterns(model, batch()), ss.patterns(raw(kind), batch()))
    assert ss.model_view(model).parts.processed == ("folded",)


# --- what still holds ---------------------------------------------------------------------


@processings
def test_patterns_are_the_raw_models(kind: str, processing: str) -> None:
    """Processing changes weights, and neither patterns nor sink scores."""
    model = processed(kind, processing)
    close(ss.patterns(model, batch()), ss.patterns(raw(kind), batch()))
    close(ss.sink_score(model, batch()), ss.sink_score(raw(kind), batch()))


def test_effective_query_bias_is_the_folded_one(kind: str) -> None:
    """Folded `b_Q' = b_Q + beta W_Q`, and its `gamma' = C (gain W_K b_Q')`."""
    folded = processed(kind)
    layers = range(3)
    expected = torch.stack([effective("q", layer) for layer in layers])
    close(ss.query_bias(folded, "effective"), expected)
    close(ss.query_bias(raw(kind), "effective"), expected)
    assert (expected - ss.query_bias(raw(kind))).abs().max() > 0.1
    view = ss.model_view(raw(kind))
    gammas = ss.coordinate_alignment(folded, "effective")
    for layer in layers:
        gamma = torch.einsum("hde,he->hd", view.W_K(layer), expected[layer])
        gamma = gamma * gain_and_bias(layer)[0]
        close(gammas[layer], gamma - gamma.mean(-1, keepdim=True))


def test_terms_of_folded_weights(kind: str) -> None:
    """With `b_eff = b + beta W`, `b^Q` and `b^K` for queries and keys, and s the scale,

    `query_bias' = s b^Q_eff . (n_j W_K) - s b^Q_eff . (beta W_K)`: the effective bias on the raw
    model's keys, up to a constant per head, which the softmax does not see; likewise
    `key_bias' = s (n_i W_Q) . b^K_eff - s (beta W_Q) . b^K_eff`, `bias_bias' = s b^Q_eff .
    b^K_eff`, and all four sum to the raw model's score.
    """
    theirs = ss.decompose_scores(raw(kind), batch())
    ours = ss.decompose_scores(processed(kind), batch())
    assert (theirs.bias_kind, ours.bias_kind) == ("raw", "effective")
    assert ours.max_error <= ours.tolerance < 1e-12
    assert ours.pattern_error <= ours.tolerance
    hidden = ~theirs.visible[:, :, None]
    close(ours.total.masked_fill(hidden, 0), theirs.total.masked_fill(hidden, 0), 4 * CLOSE)

    view = ss.model_view(raw(kind))
    entering: dict[int, Tensor] = {}
    sites = [ss.Site("attn_in", layer) for layer in range(3)]
    with view.measuring(), view.hooks([(s, _keep_in(entering, s.layer)) for s in sites]):
        view.forward(batch())
    for layer, n in entering.items():
        scale = view.attention_scale(layer)
        _, beta = gain_and_bias(layer)
        b_Q, b_K = effective("q", layer), effective("k", layer)
        u = n - beta  # gain times the normalised input
        per_key = scale * torch.einsum("bjd,hde,he->bhj", u, view.W_K(layer), b_Q)
        per_query = scale * torch.einsum("bid,hde,he->bhi", u, view.W_Q(layer), b_K)
        constant = scale * (b_Q * b_K).sum(-1)
        shape = ours.content[:, layer]
        close(ours.query_bias[:, layer], per_key[:, :, None, :].expand_as(shape))
        close(ours.key_bias[:, layer], per_query[..., None].expand_as(shape))
        close(ours.bias_bias[:, layer], constant[None, :, None, None].expand_as(shape))

        # Against the raw keys, beta and all, only a constant per head is left.
        with_beta = scale * torch.einsum("bjd,hde,he->bhj", n, view.W_K(layer), b_Q)
        difference = with_beta - ours.query_bias[:, layer, :, 0]
        close(difference, difference[:, :, :1].expand_as(difference))
        close(difference[0], difference[1])
        assert difference.abs().max() > 0.01
        raw_difference = theirs.query_bias[:, layer, :, 0] - ours.query_bias[:, layer, :, 0]
        assert raw_difference.std(-1).min() > 1e-3, "no constant lies between raw and effective"


def test_terms_of_centred_weights(kind: str) -> None:
    """LN1 takes the mean off anyway, so that centring alone leaves each term as it is."""
    ours = ss.decompose_scores(processed(kind, "centred"), batch())
    theirs = ss.decompose_scores(raw(kind), batch())
    assert ours.bias_kind == "raw"
    for term in ("content", "query_bias", "key_bias", "bias_bias"):
        close(getattr(ours, term), getattr(theirs, term), 4 * CLOSE)


def _keep_in(entering: dict[int, Tensor], layer: int | None) -> Callable[..., None]:
    def keep(tensor: Tensor, hook: Any) -> None:
        if layer is not None:
            entering[layer] = tensor.clone()

    return keep


# --- what is not mistaken for processed ---------------------------------------------------


def test_compatibility_mode_without_processing() -> None:
    """`no_processing=True` changes names of hooks, and no number."""
    compatible = hook(tiny_gpt2(), "bridge", no_processing=True)
    assert ss.model_view(compatible).parts.processed == ()
    measures = {n: f for n, f in NEEDS_RAW.items() if n not in ("reproduce", "extract_epe, ln")}
    for measure in measures.values():
        ours, theirs = (measure(m, batch()) for m in (compatible, raw("bridge")))
        if isinstance(ours, ss.EPE):
            ours, theirs = ours.vectors, theirs.vectors
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    ours, theirs = (ss.decompose_scores(m, batch()) for m in (compatible, raw("bridge")))
    assert ours.bias_kind == "raw"
    torch.testing.assert_close(ours.query_bias, theirs.query_bias, rtol=0, atol=1e-12)


def fresh(seed: int, dtype: torch.dtype, biases: bool) -> GPT2LMHeadModel:
    """As transformers initialises it: every gain 1, every shift 0, and biases 0 if not asked."""
    model = tiny_gpt2(seed=seed, dtype=dtype)
    for name, parameter in model.named_parameters():
        if "ln_" in name or (name.endswith("bias") and not biases):
            parameter.data.fill_(float(name.endswith("weight")))
    return model


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("biases", [False, True])
def test_a_fresh_model_is_raw(kind: str, dtype: torch.dtype, biases: bool) -> None:
    """Gains 1 and shifts 0 are how training begins, and folded only with centred keys."""
    for seed in range(3):
        view = ss.model_view(hook(fresh(seed, dtype, biases), kind))
        beta = view.ln1_bias(0)
        assert beta is not None
        assert not beta.any()
        assert view.parts.processed == ()
        assert view.bias_kind == "raw"
        ss.extract_epe(view)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_random_embeddings_are_raw(kind: str, dtype: torch.dtype) -> None:
    """Means of random rows shrink with d_model, far from as fast as to look centred."""
    for d_head, n_ctx in ((1, 4), (4, 16), (128, 64)):
        view = ss.model_view(hook(tiny_gpt2(1, d_head=d_head, n_ctx=n_ctx, dtype=dtype), kind))
        assert view.parts.processed == ()


def test_one_centred_table_is_not_enough(kind: str) -> None:
    """Position vectors of mean zero may come from training; both tables do not."""
    hf = tiny_gpt2()
    hf.transformer.wpe.weight.data -= hf.transformer.wpe.weight.data.mean(-1, keepdim=True)
    assert ss.model_view(hook(hf, kind)).parts.processed == ()
    hf.transformer.wte.weight.data -= hf.transformer.wte.weight.data.mean(-1, keepdim=True)
    assert ss.model_view(hook(hf, kind)).parts.processed == ("centred",)
