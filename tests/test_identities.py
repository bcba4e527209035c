"""Identities of scores, biases and encodings, against weights read from transformers by hand.

Everything is in float64 on random models with random biases, gains and shifts, so that a real
mistake keeps its size and rounding does not.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from models import hook, tiny_gpt2
from torch import Tensor

import sinkscope as ss
from sinkscope.capture import stream
from sinkscope.scores import IdentityReader

EXACT = 1e-10
few = settings(
    max_examples=5,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],  # no shrinking: sizes are small
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
sizes = st.fixed_dictionaries(
    {
        "n_layers": st.integers(1, 3),
        "n_heads": st.integers(1, 3),
        "d_head": st.integers(2, 5),
        "n_ctx": st.integers(8, 12),
        "seed": st.integers(0, 10**6),
    }
)
lengths = st.integers(1, 8)


class Raw:
    """A GPT-2 of transformers' own, its weights cut into heads by hand."""

    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.float64, **config: Any) -> None:
        self.hf = tiny_gpt2(seed=seed, dtype=dtype, **config)
        for parameter in self.hf.parameters():
            # HookedTransformer rounds norms and biases to float32 as it loads them.
            parameter.data = parameter.data.float().to(dtype)
        self.n_layers = self.hf.config.n_layer
        self.n_heads = self.hf.config.n_head
        self.d_model = self.hf.config.n_embd
        self.d_head = self.d_model // self.n_heads

    def model(self, kind: str, **processing: Any) -> Any:
        return hook(copy.deepcopy(self.hf), kind, **processing)

    def block(self, layer: int) -> Any:
        return self.hf.transformer.h[layer]

    def head(self, layer: int, head: int, which: str) -> tuple[Tensor, Tensor]:
        """W `[d_model d_head]` and b `[d_head]` of one head: columns in the order QQQ KKK VVV."""
        attn = self.block(layer).attn.c_attn
        start = "qkv".index(which) * self.d_model + head * self.d_head
        columns = slice(start, start + self.d_head)
        return attn.weight.detach()[:, columns], attn.bias.detach()[columns]

    @torch.no_grad()
    def run(self, ids: Tensor) -> tuple[Tensor, list[Tensor]]:
        """transformers' own patterns `[batch layer head query key]` and what enters each W_Q."""
        out = self.hf(ids, output_attentions=True, output_hidden_states=True)
        entering = [self.block(n).ln_1(out.hidden_states[n]) for n in range(self.n_layers)]
        return torch.stack(out.attentions, 1), entering


def random_ids(seed: int, length: int, rows: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 50, (rows, length), generator=generator)


def close(ours: Tensor, theirs: Tensor, atol: float = EXACT) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=atol)


def at_visible(values: Tensor) -> Tensor:
    return values * torch.ones(values.shape[-2:], dtype=values.dtype).tril()


# --- four terms ---------------------------------------------------------------------------


@few
@given(size=sizes, length=lengths)
def test_each_term_is_its_own_formula(kind: str, size: dict[str, int], length: int) -> None:
    """`s_ij = (q_i + b_Q).(k_j + b_K) / sqrt(d)` splits into four products, each by hand."""
    raw = Raw(**size)
    ids = random_ids(size["seed"], length)
    model = raw.model(kind)
    terms = ss.decompose_scores(model, ss.token_batch(model, ids))
    _, entering = raw.run(ids)
    scale = raw.d_head**-0.5
    for layer, n in enumerate(entering):
        for head in range(raw.n_heads):
            W_Q, b_Q = raw.head(layer, head, "q")
            W_K, b_K = raw.head(layer, head, "k")
            for row in range(len(ids)):
                q, k = n[row] @ W_Q, n[row] @ W_K
                ones = torch.ones(length, dtype=torch.float64)
                here = (row, layer, head)
                close(terms.content[here], scale * q @ k.T)
                close(terms.query_bias[here], scale * torch.outer(ones, k @ b_Q))
                close(terms.key_bias[here], scale * torch.outer(q @ b_K, ones))
                close(terms.bias_bias[here], scale * float(b_Q @ b_K) * torch.outer(ones, ones))
    assert terms.bias_kind == "raw"


@few
@given(size=sizes, length=lengths)
def test_terms_sum_to_the_models_own_scores(kind: str, size: dict[str, int], length: int) -> None:
    """`content + query_bias + key_bias + bias_bias = hook_attn_scores` at visible pairs."""
    raw = Raw(**size)
    ids = random_ids(size["seed"], length)
    model = raw.model(kind)
    terms = ss.decompose_scores(model, ss.token_batch(model, ids))
    with torch.no_grad():
        _, cache = model.run_with_cache(ids)
    worst = 0.0
    for layer in range(raw.n_layers):
        own = cache[f"blocks.{layer}.attn.hook_attn_scores"]
        difference = at_visible((terms.total[:, layer] - own).nan_to_num(posinf=0, neginf=0))
        visible = torch.ones(length, length, dtype=torch.bool).tril()
        worst = max(worst, float(difference[..., visible].abs().max()))
    assert worst < EXACT
    assert terms.max_error == pytest.approx(worst, abs=1e-15)
    assert terms.tolerance < EXACT


@few
@given(size=sizes, length=lengths)
def test_content_and_query_bias_make_the_pattern(
    kind: str, size: dict[str, int], length: int
) -> None:
    """`softmax(content + query_bias) = pattern`, since the other two terms cancel."""
    raw = Raw(**size)
    ids = random_ids(size["seed"], length)
    model = raw.model(kind)
    terms = ss.decompose_scores(model, ss.token_batch(model, ids))
    hidden = ~torch.ones(length, length, dtype=torch.bool).tril()
    two = (terms.content + terms.query_bias).masked_fill(hidden, float("-inf")).softmax(-1)
    theirs, _ = raw.run(ids)
    close(two, theirs)
    assert terms.pattern_error < EXACT
    if length > 2:  # and the query bias is what it takes
        without = terms.content.masked_fill(hidden, float("-inf")).softmax(-1)
        assert float((without - theirs).abs().max()) > 1e-4


@few
@given(size=sizes, length=lengths)
def test_patterns_are_transformers_own(kind: str, size: dict[str, int], length: int) -> None:
    """`patterns = output_attentions` of transformers, with rows that sum to 1."""
    raw = Raw(**size)
    ids = random_ids(size["seed"], length)
    model = raw.model(kind)
    ours = ss.patterns(model, ss.token_batch(model, ids))
    close(ours, raw.run(ids)[0])
    close(ours.sum(-1), torch.ones_like(ours[..., 0]))
    assert float(ours.triu(1).abs().max()) == 0


@few
@given(size=sizes, length=st.integers(1, 8))
def test_identities_hold_in_float32(kind: str, size: dict[str, int], length: int) -> None:
    """The tolerance by dtype lets float32 rounding through, and little more."""
    raw = Raw(dtype=torch.float32, **size)
    model = raw.model(kind)
    terms = ss.decompose_scores(model, ss.token_batch(model, random_ids(size["seed"], length)))
    assert max(terms.max_error, terms.pattern_error) <= terms.tolerance < 1e-2


def test_layers_come_in_the_order_asked(kind: str) -> None:
    """`decompose(layers=[2, 0])[l] = decompose()[2, 0][l]`, and so for every measure."""
    raw = Raw()
    model = raw.model(kind)
    batch = ss.token_batch(model, random_ids(1, 6))
    terms, some = ss.decompose_scores(model, batch), ss.decompose_scores(model, batch, [2, 0])
    assert some.layers == (2, 0)
    for name in ("content", "query_bias", "key_bias", "bias_bias"):
        close(getattr(some, name), getattr(terms, name)[:, [2, 0]], atol=0)
    for measure in (ss.patterns, ss.sink_score, ss.value_norms, ss.residual_norms):
        whole = measure(model, batch, layers=range(3))
        close(measure(model, batch, layers=[2, 0]), whole[:, [2, 0]])
    shift = ss.source_agnostic_shift
    close(shift(model, batch, layers=[2, 0]), shift(model, batch)[:, [2, 0]])
    close(ss.coordinate_alignment(model, layers=[2, 0]), ss.coordinate_alignment(model)[[2, 0]])
    close(ss.epe_bias_alignment(model, 5, [2, 0]), ss.epe_bias_alignment(model, 5)[[2, 0]])


@pytest.mark.parametrize("batch_size", [1, 2])
def test_chunks_change_nothing(kind: str, batch_size: int) -> None:
    """`f(batch, batch_size=n) = f(batch)` for every measure, rows in order."""
    raw = Raw()
    model = raw.model(kind)
    batch = ss.token_batch(model, random_ids(2, 7, rows=3))
    for measure in (
        ss.patterns,
        ss.sink_score,
        ss.sink_rate,
        ss.sink_position,
        ss.value_norms,
        ss.residual_norms,
        ss.source_agnostic_shift,
        ss.shift_by_coordinate,
        ss.epe_fidelity,
    ):
        close(measure(model, batch, batch_size=batch_size), measure(model, batch))
    for form in ("block", "causal_block"):
        in_chunks = ss.epe_fidelity(model, batch, form, batch_size=batch_size)
        close(in_chunks, ss.epe_fidelity(model, batch, form))
    in_chunks = ss.decompose_scores(model, batch, batch_size=batch_size)
    close(in_chunks.total, ss.decompose_scores(model, batch).total)


# --- Delta and gamma ----------------------------------------------------------------------


@few
@given(size=sizes, length=lengths)
def test_gamma_splits_delta(kind: str, size: dict[str, int], length: int) -> None:
    """`sum_d gamma[d] n_j[d] = b_Q.(n_j W_K) = Delta_j`, and each summand by itself."""
    raw = Raw(**size)
    ids = random_ids(size["seed"], length)
    model = raw.model(kind)
    batch = ss.token_batch(model, ids)
    gamma = ss.coordinate_alignment(model)
    split = ss.shift_by_coordinate(model, batch)
    paper = ss.source_agnostic_shift(model, batch)
    score = ss.source_agnostic_shift(model, batch, "score")
    chosen = [raw.d_model - 1, 0]
    share = ss.shift_share(model, batch, chosen)
    _, entering = raw.run(ids)
    for layer, n in enumerate(entering):
        for head in range(raw.n_heads):
            b_Q, W_K = raw.head(layer, head, "q")[1], raw.head(layer, head, "k")[0]
            by_hand = torch.stack([b_Q @ W_K[d] for d in range(raw.d_model)])
            close(gamma[layer, head], by_hand)
            close(split[:, layer, head], n * by_hand)
            close(share[:, layer, head], n[..., chosen] @ by_hand[chosen])
            delta = (n @ W_K) @ b_Q
            close(split[:, layer, head].sum(-1), delta)
            close(paper[:, layer, head], delta - delta.min(1, keepdim=True).values)
            close(score[:, layer, head], delta * raw.d_head**-0.5)


def test_delta_is_the_query_bias_term(kind: str) -> None:
    """`Delta ("score") = query_bias` of the decomposition, at any query."""
    raw = Raw()
    model = raw.model(kind)
    batch = ss.token_batch(model, random_ids(3, 7))
    terms = ss.decompose_scores(model, batch)
    shift = ss.source_agnostic_shift(model, batch, "score")
    close(terms.query_bias[:, :, :, 0], shift)
    close(terms.query_bias[:, :, :, 4], shift)


@few
@given(size=sizes)
def test_query_bias_raw_and_effective(kind: str, size: dict[str, int]) -> None:
    """`effective = b_Q + beta W_Q`: what a zero LN output before the shift makes of a query."""
    raw = Raw(**size)
    model = raw.model(kind)
    plain, effective = ss.query_bias(model), ss.query_bias(model, "effective")
    gamma = ss.coordinate_alignment(model, "effective")
    for layer in range(raw.n_layers):
        beta = raw.block(layer).ln_1.bias.detach()
        for head in range(raw.n_heads):
            W_Q, b_Q = raw.head(layer, head, "q")
            close(plain[layer, head], b_Q)
            close(effective[layer, head], b_Q + beta @ W_Q)
            close(gamma[layer, head], raw.head(layer, head, "k")[0] @ (b_Q + beta @ W_Q))


# --- effective positional encodings -------------------------------------------------------


@few
@given(size=sizes, through_ln=st.booleans())
def test_epe(kind: str, size: dict[str, int], through_ln: bool) -> None:
    """`EPE_i = p_i + MLP_0(p_i)`, or `p_i + MLP_0(LN2_0(p_i))` where asked."""
    raw = Raw(**size)
    model = raw.model(kind)
    epe = ss.extract_epe(model, through_ln=through_ln)
    block = raw.block(0)
    for i, p in enumerate(raw.hf.transformer.wpe.weight.detach()):
        with torch.no_grad():
            mlp = block.mlp((block.ln_2(p) if through_ln else p)[None])[0]
        close(epe.positions[i], p)
        close(epe.mlp[i], mlp)
        close(epe.vectors[i], p + mlp)
    assert epe.through_ln is through_ln


@few
@given(size=sizes, through_ln=st.booleans())
def test_epe_bias_alignment(kind: str, size: dict[str, int], through_ln: bool) -> None:
    """`cos(b_Q, EPE_j W_K)` for every layer, head and position, one by one."""
    raw = Raw(**size)
    model = raw.model(kind)
    ours = ss.epe_bias_alignment(model, n_positions=5, through_ln=through_ln)
    epe = ss.extract_epe(model, through_ln=through_ln).vectors
    assert ours.shape == (raw.n_layers, raw.n_heads, 5)
    for layer in range(raw.n_layers):
        for head in range(raw.n_heads):
            b_Q, W_K = raw.head(layer, head, "q")[1], raw.head(layer, head, "k")[0]
            for j in range(5):
                key = epe[j] @ W_K
                cosine = float(b_Q @ key) / float(b_Q.norm() * key.norm())
                assert float(ours[layer, head, j]) == pytest.approx(cosine, abs=EXACT)


@few
@given(size=sizes, length=st.integers(2, 8), through_ln=st.booleans())
def test_fidelity(kind: str, size: dict[str, int], length: int, through_ln: bool) -> None:
    """`cos(EPE_i, R_i - O_i)`: MLP_0 alone, block_0 without a mask, block_0 with its own."""
    raw = Raw(**size)
    ids = random_ids(size["seed"], length)
    model = raw.model(kind)
    batch = ss.token_batch(model, ids)
    epe = ss.extract_epe(model, through_ln=through_ln).vectors[:length]
    block, e = raw.block(0), raw.hf.transformer.wte(ids).detach()
    x = e + raw.hf.transformer.wpe.weight.detach()[:length]
    causal = torch.zeros(length, length, dtype=torch.float64)
    causal.masked_fill_(~torch.ones_like(causal, dtype=torch.bool).tril(), float("-inf"))

    def through_block(inputs: Tensor, mask: Tensor | None) -> Tensor:
        out = block(inputs, attention_mask=mask)
        return out[0] if isinstance(out, tuple) else out

    with torch.no_grad():
        changes = {
            "mlp": x + block.mlp(x) - e - block.mlp(e),
            "block": through_block(x, None) - through_block(e, None),
            "causal_block": through_block(x, causal[None, None])
            - through_block(e, causal[None, None]),
        }
    for form, change in changes.items():
        ours = ss.epe_fidelity(model, batch, form, through_ln=through_ln)
        for row in range(len(ids)):
            for i in range(length):
                cosine = float(epe[i] @ change[row, i]) / float(
                    epe[i].norm() * change[row, i].norm()
                )
                assert float(ours[row, i]) == pytest.approx(cosine, abs=1e-9), form


@few
@given(size=sizes, length=lengths)
def test_norms(kind: str, size: dict[str, int], length: int) -> None:
    """`value_norms = |n_j W_V + b_V|` and `residual_norms = |x_j|` entering each layer."""
    raw = Raw(**size)
    ids = random_ids(size["seed"], length)
    model = raw.model(kind)
    batch = ss.token_batch(model, ids)
    values, residuals = ss.value_norms(model, batch), ss.residual_norms(model, batch)
    with torch.no_grad():
        hidden = raw.hf(ids, output_hidden_states=True).hidden_states
    _, entering = raw.run(ids)
    for layer, n in enumerate(entering):
        close(residuals[:, layer], hidden[layer].norm(dim=-1))
        for head in range(raw.n_heads):
            W_V, b_V = raw.head(layer, head, "v")
            close(values[:, layer, head], (n @ W_V + b_V).norm(dim=-1))


# --- the checks refuse --------------------------------------------------------------------


@pytest.mark.parametrize("name", ["attn_scores", "pattern", "q", "k"])
def test_a_model_that_computes_otherwise_is_refused(kind: str, name: str) -> None:
    """A model whose scores or pattern are not `scale (q + b_Q).(k + b_K)` is an error."""
    model = Raw().model(kind)
    batch = ss.token_batch(model, random_ids(4, 6))

    def meddle(tensor: Tensor, hook: Any) -> Tensor:
        out = tensor.clone()
        if name in ("q", "k"):
            out[2, 3, 2] += 1e-6
        else:  # a shift between two keys, so that rows of the pattern still sum to 1
            out[2, 2, 4, 1] += 1e-6
            out[2, 2, 4, 2] -= 1e-6
        return out

    model.add_hook(f"blocks.1.attn.hook_{name}", meddle)
    with pytest.raises(ss.errors.IdentityError, match=r"layer 1, head 2"):
        ss.decompose_scores(model, batch)
    assert ss.decompose_scores(model, batch, layers=[0]).max_error < EXACT


def test_unscaled_attention(kind: str) -> None:
    """`scale_attn_weights=False`: scale 1 where the library honours it, an error where not.

    TransformerBridge computes GPT-2's scores with 1/sqrt(d_head) all the same, so its patterns
    are not the model's; HookedTransformer does as the model does.
    """
    raw = Raw(scale_attn_weights=False)
    ids = random_ids(5, 6)
    model = raw.model(kind)
    batch = ss.token_batch(model, ids)
    assert ss.model_view(model).attention_scale(1) == 1.0
    if kind == "bridge":
        with pytest.raises(ss.errors.IdentityError, match=r"layer 0, head \d+, the sum"):
            ss.decompose_scores(model, batch)
        return
    terms = ss.decompose_scores(model, batch)
    theirs, entering = raw.run(ids)
    close(ss.patterns(model, batch), theirs)
    q, k = entering[1] @ raw.head(1, 2, "q")[0], entering[1] @ raw.head(1, 2, "k")[0]
    close(terms.content[:, 1, 2], q @ k.transpose(1, 2))


def test_attention_scaled_by_inverse_layer(kind: str) -> None:
    """`scale_attn_by_inverse_layer_idx`: scale `1 / (sqrt(d_head) (layer + 1))`."""
    raw = Raw(scale_attn_by_inverse_layer_idx=True)
    ids = random_ids(6, 6)
    model = raw.model(kind)
    batch = ss.token_batch(model, ids)
    terms = ss.decompose_scores(model, batch)
    theirs, entering = raw.run(ids)
    close(ss.patterns(model, batch), theirs)
    shift = ss.source_agnostic_shift(model, batch, "score")
    for layer, n in enumerate(entering):
        scale = 0.5 / (layer + 1)
        k = n @ raw.head(layer, 2, "k")[0]
        close(terms.content[:, layer, 2], scale * n @ raw.head(layer, 2, "q")[0] @ k.mT)
        close(shift[:, layer, 2], scale * k @ raw.head(layer, 2, "q")[1])


def test_default_layers_of_a_model_without_middle(kind: str) -> None:
    """`range(n_layers // 4, n_layers - 1)` is empty for one layer: an error that says so."""
    model = Raw(n_layers=1).model(kind)
    batch = ss.token_batch(model, random_ids(7, 5))
    with pytest.raises(ss.errors.InvalidInputError, match="layers="):
        ss.sink_score(model, batch)
    assert ss.model_view(Raw(n_layers=3).model(kind)).mid_layers == range(2)
    assert 0 < float(ss.sink_score(model, batch, layers=0).min()) < 1


@pytest.mark.parametrize(
    "call",
    [
        lambda m, b: ss.decompose_scores(m, b, layers=[3]),
        lambda m, b: ss.patterns(m, b, layers=[0, 0]),
        lambda m, b: ss.patterns(m, b, layers=-1),
        lambda m, b: ss.patterns(m, b, layers=[]),
        lambda m, b: ss.patterns(m, b, batch_size=0),
        lambda m, b: ss.source_agnostic_shift(m, b, "unscaled"),
        lambda m, b: ss.query_bias(m, "both"),
        lambda m, b: ss.epe_fidelity(m, b, "attention"),
        lambda m, b: ss.epe_bias_alignment(m, 17),
        lambda m, b: ss.epe_bias_alignment(m, 0),
        lambda m, b: ss.shift_share(m, b, [12]),
        lambda m, b: ss.shift_share(m, b, [1, 1]),
        lambda m, b: ss.shift_share(m, b, []),
        lambda m, b: ss.sink_rate(m, b, eps=1.5),
    ],
)
def test_bad_values_are_refused(call: Any) -> None:
    """Values that no model could satisfy raise InvalidInputError with what was expected."""
    model = Raw().model("bridge")
    batch = ss.token_batch(model, random_ids(8, 5))
    with pytest.raises(ss.errors.InvalidInputError, match="Expected: "):
        call(model, batch)


def test_missing_mass_is_refused_and_its_tolerance_told(kind: str) -> None:
    """A row that sums to 0.999 is no softmax; one off by float32 rounding passes, and is told."""
    model = Raw().model(kind)
    batch = ss.token_batch(model, random_ids(9, 6))
    share = 1e-3
    model.add_hook("blocks.0.attn.hook_pattern", lambda pattern, hook: pattern * (1 - share))
    with pytest.raises(ss.errors.IdentityError, match=r"layer 0, head \d, softmax"):
        ss.decompose_scores(model, batch)
    share = 1e-7
    terms = ss.decompose_scores(model, batch)
    assert 1e-8 < terms.pattern_error <= terms.tolerance < 1e-4
    assert terms.max_error < EXACT


def test_errors_that_were_stored_are_taken_up_as_they_were() -> None:
    view = ss.model_view(hook(tiny_gpt2(), "bridge"))
    reader, again = (IdentityReader(view, (0, 1)) for _ in range(2))
    stream(view, ss.token_batch(view, [[1, 2, 3, 4, 5]]), [reader])
    again.add(0, reader.take(0))
    errors = [(r.max_error, r.pattern_error, r.tolerance) for r in (reader, again)]
    assert errors[0] == errors[1]
    assert len(set(errors[0])) == 3
