"""Folded and centred weights: raw quantities are refused, the decomposition still holds.

Folding LN1 sends `W_Q -> g W_Q` and `b_Q -> b_Q + beta W_Q`, likewise for keys, and centres
both over d_model; what enters them is then the normalised n^ with `n = g n^ + beta`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import hook, tiny_gpt2
from torch import Tensor

import sinkscope as ss
from sinkscope.errors import ProcessedWeightsError

ROUNDING = 1e-5  # TransformerLens processes weights in float32
IDS = torch.randint(0, 50, (3, 7), generator=torch.Generator().manual_seed(0))
FOLDED = {
    "folded": {"fold_ln": True, "center_writing_weights": False},
    "both": {"fold_ln": True, "center_writing_weights": True},
}
CENTRED = {"centred": {"fold_ln": False, "center_writing_weights": True}}


@functools.cache
def processed(kind: str, name: str) -> Any:
    return hook(tiny_gpt2(), kind, **(FOLDED | CENTRED)[name])


@functools.cache
def raw(kind: str) -> Any:
    return hook(tiny_gpt2(), kind)


def batch(model: Any) -> ss.TokenBatch:
    return ss.token_batch(model, IDS)


def close(ours: Tensor, theirs: Tensor, atol: float = ROUNDING) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=atol)


REFUSED: dict[str, Callable[[Any], Any]] = {
    "extract_epe": ss.extract_epe,
    "epe_fidelity": lambda m: ss.epe_fidelity(m, batch(m)),
    "epe_bias_alignment": lambda m: ss.epe_bias_alignment(m, 5),
    "coordinate_alignment": ss.coordinate_alignment,
    "source_agnostic_shift": lambda m: ss.source_agnostic_shift(m, batch(m)),
    "shift_by_coordinate": lambda m: ss.shift_by_coordinate(m, batch(m)),
    "shift_share": lambda m: ss.shift_share(m, batch(m), [0]),
    "query_bias": ss.query_bias,
    "SwapEPE": lambda m: ss.patterns(m, batch(m), ss.ablations.SwapEPE()),
    "ZeroKeyColumns": lambda m: ss.patterns(m, batch(m), ss.ablations.ZeroKeyColumns(ss.TopK(3))),
}


@pytest.mark.parametrize("name", [*FOLDED, *CENTRED])
@pytest.mark.parametrize("measure", list(REFUSED))
def test_raw_quantities_are_refused(kind: str, name: str, measure: str) -> None:
    """What is defined on raw weights raises, says what was done and how to load the model."""
    done = {"folded": "folded", "both": "folded and centred", "centred": "centred"}[name]
    with pytest.raises(ProcessedWeightsError, match=rf"were {done}\.") as caught:
        REFUSED[measure](processed(kind, name))
    for way in ("sinkscope.load_model", "boot_transformers", "from_pretrained_no_processing"):
        assert way in str(caught.value)


def test_raw_weights_are_not_refused(kind: str) -> None:
    """The same calls give numbers on raw weights, also in compatibility mode."""
    for measure in REFUSED.values():
        measure(raw(kind))
    compatible = hook(tiny_gpt2(), "bridge", no_processing=True)
    assert ss.model_view(compatible).parts.processed == ()
    close(ss.coordinate_alignment(compatible), ss.coordinate_alignment(raw(kind)), 1e-6)


@pytest.mark.parametrize("name", [*FOLDED, *CENTRED])
def test_patterns_stay(kind: str, name: str) -> None:
    """Processing changes weights and no pattern, so sink metrics are free to use it."""
    model = processed(kind, name)
    close(ss.patterns(model, batch(model)), ss.patterns(raw(kind), batch(model)))
    close(ss.sink_score(model, batch(model)), ss.sink_score(raw(kind), batch(model)))


@pytest.mark.parametrize("name", [*FOLDED, *CENTRED])
def test_identities_hold(kind: str, name: str) -> None:
    """Sum of terms = scores and softmax = pattern on processed weights too."""
    model = processed(kind, name)
    terms = ss.decompose_scores(model, batch(model))
    assert max(terms.max_error, terms.pattern_error) < 1e-10
    whole = ss.decompose_scores(raw(kind), batch(model)).total
    visible = terms.visible[:, :, None]
    close(terms.total.masked_fill(~visible, 0), whole.masked_fill(~visible, 0))


@pytest.mark.parametrize("name", list(FOLDED))
def test_folded_query_bias_term(kind: str, name: str) -> None:
    """`query_bias(folded) = scale b_eff.(n_j W_K) - scale b_eff.(beta W_K)`.

    With `b_eff = b_Q + beta W_Q`. So it is the effective bias's term of the raw model, up to one
    constant per head that the softmax does not see: folding moves `beta W_K` into b_K. Centring
    W_K takes nothing away, since n^ has mean 0.
    """
    model = processed(kind, name)
    terms = ss.decompose_scores(model, batch(model))
    assert terms.bias_kind == "effective"
    view, scale = ss.model_view(raw(kind)), 0.5
    by_coordinate = ss.coordinate_alignment(view, "effective")
    n = entering(raw(kind))
    for layer in range(view.n_layers):
        effective = scale * torch.einsum("bpd,hd->bhp", n[layer], by_coordinate[layer])
        beta = view.ln1_bias(layer)
        constant = scale * torch.einsum("d,hd->h", beta, by_coordinate[layer])
        ours = terms.query_bias[:, layer, :, 0]
        close(ours, effective - constant[None, :, None])
        assert float(constant.abs().max()) > 0.01
        raw_bias = ss.decompose_scores(view, batch(view)).query_bias[:, layer, :, 0]
        spread = (ours - raw_bias).amax(-1) - (ours - raw_bias).amin(-1)
        assert float(spread.max()) > 0.01, "and it is not the raw bias's term"


def entering(model: Any) -> list[Tensor]:
    """n of each layer, by hand from the residual stream and LN1's weights."""
    hf = tiny_gpt2()
    with torch.no_grad():
        hidden = hf(IDS, output_hidden_states=True).hidden_states
        return [hf.transformer.h[n].ln_1(hidden[n]) for n in range(3)]


@pytest.mark.parametrize("name", list(FOLDED))
def test_effective_bias_of_folded_weights(kind: str, name: str) -> None:
    """`query_bias("effective")` is the same before and after folding: `b_Q + beta W_Q`."""
    model = processed(kind, name)
    before = ss.query_bias(raw(kind), "effective")
    close(ss.query_bias(model, "effective"), before)
    assert float((ss.query_bias(raw(kind)) - before).abs().max()) > 0.1


def test_centred_only(kind: str) -> None:
    """Centring alone leaves b_Q raw: its term is the raw model's, and is called so."""
    model = processed(kind, "centred")
    assert ss.model_view(model).parts.processed == ("centred",)
    terms, before = (ss.decompose_scores(m, batch(m)) for m in (model, raw(kind)))
    assert terms.bias_kind == before.bias_kind == "raw"
    for term in ("content", "query_bias", "key_bias", "bias_bias"):
        close(getattr(terms, term), getattr(before, term))


def test_processing_that_leaves_no_trace_in_the_weights() -> None:
    """The bridge's own flag is enough to refuse, where the weights do not tell what was done."""
    model = hook(tiny_gpt2(), "bridge", fold_ln=False, center_writing_weights=False)
    assert ss.model_view(model).parts.processed == ("processed",)
    with pytest.raises(ProcessedWeightsError, match="were processed"):
        ss.extract_epe(model)
    assert ss.decompose_scores(model, batch(model)).bias_kind == "raw"


def test_identity_norms_are_not_taken_for_folded(kind: str) -> None:
    """A model at its initialisation has gains of 1 and no shift, and its weights are raw."""
    hf = tiny_gpt2()
    for block in hf.transformer.h:
        block.ln_1.weight.data.fill_(1)
        block.ln_1.bias.data.zero_()
    model = hook(hf, kind)
    assert ss.model_view(model).parts.processed == ()
    close(ss.query_bias(model), ss.query_bias(model, "effective"), 1e-12)
