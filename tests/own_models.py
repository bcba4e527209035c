"""A small attention-only model with names of its own, its view, and how each can be broken."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformer_lens import HookedRootModule
from transformer_lens.hook_points import HookPoint

import sinkscope as ss
from sinkscope.model import Parts
from sinkscope.sites import SiteMap

D_MODEL, N_HEADS, N_KEYS, D_HEAD, N_CTX, VOCAB, N_LAYERS = 8, 4, 2, 8, 16, 20, 2
"""d_head equals d_model, so that a transposed matrix keeps its shape."""


class Layer(nn.Module):
    """Attention alone; `fault` names what is done wrong."""

    def __init__(self, model: Toy) -> None:
        super().__init__()
        self.root = [model]  # no submodule of its own layer
        self.query = nn.Parameter(torch.randn(N_HEADS, D_MODEL, D_HEAD) / 4)
        self.key = nn.Parameter(torch.randn(N_KEYS, D_MODEL, D_HEAD) / 4)
        self.query_shift = nn.Parameter(torch.randn(N_HEADS, D_HEAD))
        self.key_shift = nn.Parameter(torch.randn(N_KEYS, D_HEAD))
        self.value = nn.Parameter(torch.randn(N_HEADS, D_MODEL, D_HEAD))
        self.out = nn.Parameter(torch.randn(N_HEADS, D_HEAD, D_MODEL) / 4)
        self.hidden = nn.Linear(D_MODEL, D_MODEL)
        for name in ("enters", "q", "k", "scores", "shares", "gives", "middle", "adds", "leaves"):
            setattr(self, f"see_{name}", HookPoint())

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        fault = self.root[0].fault

        def project(n: Tensor, W: Tensor, b: Tensor) -> Tensor:
            return torch.einsum("bpd,hde->bphe", n, W) + b

        entered = self.see_enters(x)
        x = x if fault == "dead residual" else entered
        q = project(x, self.query, self.query_shift)
        q = self.see_q(q) if fault != "dead q" else (self.see_q(q), q)[1]
        k = project(x, self.key, self.key_shift)
        if fault != "silent hook":
            k = self.see_k(k)
        if fault == "loud hook":
            k = self.see_k(k)
        keys = k.repeat_interleave(N_HEADS // N_KEYS, 2)
        scores = torch.einsum("bqhe,bkhe->bhqk", q, keys) / D_HEAD**0.5
        scores = self.see_scores(scores.masked_fill(~seen[:, None], -1e30))
        shares = (scores * (2 if fault == "hot softmax" else 1)).softmax(-1)
        if fault == "no shares":
            shares = shares * 0.9
        shares = self.see_shares(shares) if fault != "dead pattern" else self.blind(shares)
        v = torch.einsum("bpd,hde->bphe", x, self.value)
        z = self.see_gives(torch.einsum("bhqk,bkhe->bqhe", shares, v))
        x = self.see_middle(x + torch.einsum("bqhe,hed->bqd", z, self.out))
        return self.see_leaves(x + self.see_adds(self.hidden(x).relu()))

    def blind(self, shares: Tensor) -> Tensor:
        self.see_shares(shares)
        return shares


class Toy(HookedRootModule):
    """A decoder without norms, whose keys are shared by two heads each."""

    def __init__(self, fault: str | None = None) -> None:
        super().__init__()
        self.fault = fault
        self.words, self.places = nn.Embedding(VOCAB, D_MODEL), nn.Embedding(N_CTX, D_MODEL)
        self.see_word, self.see_place = HookPoint(), HookPoint()
        self.stack = nn.ModuleList(Layer(self) for _ in range(N_LAYERS))
        self.setup()
        self.double().eval()

    def forward(self, ids: Tensor, tokens: Tensor | None = None, upto: int | None = None) -> Tensor:
        if self.fault == "no padding" or tokens is None:
            tokens = torch.ones_like(ids, dtype=torch.bool)
        positions = (tokens.long().cumsum(1) - 1).clamp_min(0)
        x = self.see_word(self.words(ids)) + self.see_place(self.places(positions))
        n = ids.shape[1]
        seen = tokens[:, None, :] & torch.ones(n, n, dtype=torch.bool).tril()
        if self.fault == "window":
            seen = seen & ~torch.ones(n, n, dtype=torch.bool).tril(-3)
        if self.fault == "dirty random state":
            torch.rand(1)
        if self.fault == "dirty weights":
            self.places.weight.data[-1] += 1e-9
        if self.fault == "dirty hooks":
            self.see_word.add_hook(lambda x, hook: None)
        if self.fault == "random":
            self.calls = getattr(self, "calls", 0) + 1
            x = x + 1e-3 * self.calls
        for layer in self.stack if self.fault == "no stop" else self.stack[:upto]:
            x = layer(x, seen)
        if upto is not None and self.fault == "wrong stop":
            return x + 1
        return x if upto is not None else x @ self.words.weight.T


class ToyView(ss.ModelView):
    """What a `Toy` answers otherwise than a model in TransformerLens' shape."""

    @property
    def embedding(self) -> Tensor:
        return self.model.words.weight

    @property
    def W_pos(self) -> Tensor:
        return self.model.places.weight.detach()

    def W_Q(self, layer: int) -> Tensor:
        return self.model.stack[layer].query.detach()

    def W_K(self, layer: int) -> Tensor:
        return self.model.stack[layer].key.detach().repeat_interleave(N_HEADS // N_KEYS, 0)

    def b_Q(self, layer: int) -> Tensor:
        return self.model.stack[layer].query_shift.detach()

    def b_K(self, layer: int) -> Tensor | None:
        return self.model.stack[layer].key_shift.detach().repeat_interleave(N_HEADS // N_KEYS, 0)

    def first_mlp(self, x: Tensor) -> Tensor:
        with self.measuring():
            return self.model.stack[0].hidden(x).relu()

    def run(self, ids: Tensor, mask: Tensor | None = None, stop_at_layer: int | None = None) -> Any:
        return self.model(ids, mask, stop_at_layer)


SITES = {
    "embed": "see_word",
    "pos_embed": "see_place",
    "resid_pre": "stack.{layer}.see_enters",
    "attn_in": "stack.{layer}.see_enters",
    "q": "stack.{layer}.see_q",
    "k": "stack.{layer}.see_k",
    "attn_scores": "stack.{layer}.see_scores",
    "pattern": "stack.{layer}.see_shares",
    "z": "stack.{layer}.see_gives",
    "resid_mid": "stack.{layer}.see_middle",
    "mlp_out": "stack.{layer}.see_adds",
    "resid_post": "stack.{layer}.see_leaves",
}


def toy(fault: str | None = None) -> Toy:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Toy(fault)


def toy_view(
    model: Toy,
    kind: type[ss.ModelView] = ToyView,
    sites: dict[str, str | None] | None = None,
    **sizes: Any,
) -> ss.ModelView:
    """A view of a toy; `sites` moves some of its sites, or takes them away (None)."""
    places = {name: place for name, place in (SITES | (sites or {})).items() if place}
    parts = Parts(
        query_bias=True,
        key_bias=True,
        learned_positions=True,
        positions="standard",
        first_mlp=True,
        normalization="none",
    )
    values: dict[str, Any] = {
        "model": model,
        "sites": SiteMap(places),
        "parts": parts,
        "n_layers": N_LAYERS,
        "n_heads": N_HEADS,
        "n_key_value_heads": N_KEYS,
        "d_model": D_MODEL,
        "d_head": D_HEAD,
        "d_vocab": VOCAB,
        "n_ctx": N_CTX,
        "name": "toy",
    }
    return kind(**values | sizes)
