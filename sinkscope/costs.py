"""What an ablation does to the model itself: losses, divergence, outliers, precision, streaming.

Each measure takes a model or view, a `TokenBatch` and an optional ablation. Losses are in nats
per token, the mean over the tokens that a prompt's own earlier tokens predict.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from sinkscope._types import Layers, Mask, Pattern, PerHead, Residual
from sinkscope.ablations import Ablation, Composition, Edit, EditContext
from sinkscope.capture import LOGITS, KeepingReader, LayerReader, Part, Pass, run_passes, stream
from sinkscope.display import HtmlTable, number
from sinkscope.errors import IdentityError, InvalidInputError, NotApplicableError
from sinkscope.measures import by_metric
from sinkscope.mitigations import WindowedAttention
from sinkscope.model import ModelView, model_view
from sinkscope.prompts import TokenBatch, require_batch
from sinkscope.sites import Site

SIGMAS = 6.0
"""An outlier is further from the mean than so many standard deviations."""

Logits = Float[Tensor, "batch pos d_vocab"]
PerPrompt = Float[Tensor, " batch"]

# --- next-token loss and divergence -------------------------------------------------------


def next_token_loss(
    model: Any,
    batch: TokenBatch,
    ablation: Ablation | None = None,
    *,
    batch_size: int | None = None,
) -> PerPrompt:
    """Cross entropy of each token given those before it, in nats per token.

    `mean over i < T - 1 of -log softmax(logits_i)[token_{i+1}]`, T the prompt's length. On rows
    without padding it is what transformers gives for `labels=input_ids`.

    Args:
        model: a hooked model or its view.
        batch: the prompts.
        ablation: the untouched model if None.
        batch_size: rows per forward pass; all at once if None.

    Returns:
        `[batch]`.

    Raises:
        InvalidInputError: a prompt of one token, which predicts nothing.
        NotApplicableError: the model is not causal, so that it sees what it should predict.
    """
    view = model_view(model)
    reader = LossReader(view)
    stream(view, batch, [reader], ablation, batch_size=batch_size)
    return reader.result()


def kl_to_untouched(
    model: Any,
    batch: TokenBatch,
    ablation: Ablation | None = None,
    *,
    batch_size: int | None = None,
) -> PerPrompt:
    """How far an ablation moves the model's predictions, in nats per token.

    `mean over i of sum_v p_i[v] (log p_i[v] - log q_i[v])`, p the untouched model's next-token
    distribution and q the ablated one's, over all tokens of the prompt.

    Args:
        model: a hooked model or its view.
        batch: the prompts.
        ablation: compared with the untouched model; None compares it with itself.
        batch_size: rows per forward pass; all at once if None. One chunk's logits are held.

    Returns:
        `[batch]`.
    """
    view = model_view(model)
    held = HeldLogits()
    reader = DivergenceReader(held)
    passes = [Pass(view, [held]), Pass(view, [reader], ablation)]
    run_passes(view, batch, passes, batch_size=batch_size)
    return reader.result()


class LossReader(KeepingReader):
    """Collects each prompt's loss; see `next_token_loss`."""

    def __init__(self, view: ModelView) -> None:
        two = torch.ones(1, 2, dtype=torch.bool)
        if any(bool(view.visible(layer, two)[0, 0, 1]) for layer in range(view.n_layers)):
            raise NotApplicableError(
                "Next-token loss is not applicable: this model sees the tokens to be predicted",
                expected="a causal model",
                got=f"{view.name}, which attends in both directions",
                fix="use sink metrics",
            )
        super().__init__()
        self._view = view

    def sites(self, view: ModelView) -> Sequence[Site]:
        return [LOGITS]

    def read(self, site: Site, tensor: Tensor, chunk: TokenBatch) -> None:
        _require_logits(self._view, tensor)
        self._now["loss"] = token_losses(tensor, chunk.ids, chunk.mask)

    def result(self) -> PerPrompt:
        """`[batch]`."""
        return self.joined("loss")


class PassingReader:
    """Base of readers that keep nothing of a chunk for a result."""

    def take(self, start: int) -> Part:
        """Nothing."""
        return {}

    def add(self, start: int, part: Part) -> None:
        """Nothing."""


class HeldLogits(PassingReader):
    """Holds the log probabilities of the chunk that ran last, for others to compare with."""

    log_probabilities: Tensor | None = None
    _view: ModelView | None = None

    def sites(self, view: ModelView) -> Sequence[Site]:
        self._view = view
        return [LOGITS]

    def read(self, site: Site, tensor: Tensor, chunk: TokenBatch) -> None:
        _require_logits(self._view, tensor)
        self.log_probabilities = _log_probabilities(tensor)


class DivergenceReader(KeepingReader):
    """Collects KL(held || read); see `kl_to_untouched`."""

    def __init__(self, held: HeldLogits) -> None:
        super().__init__()
        self._held = held

    def sites(self, view: ModelView) -> Sequence[Site]:
        return [LOGITS]

    def read(self, site: Site, tensor: Tensor, chunk: TokenBatch) -> None:
        p = self._held.log_probabilities
        if p is None:
            raise InvalidInputError(
                "There are no logits to compare with",
                expected="a run of the untouched model before this one",
                got="none",
                fix="use kl_to_untouched",
            )
        q = _log_probabilities(tensor)
        per_token = (p.exp() * (p - q)).sum(-1)
        mask = chunk.mask.to(per_token.device)
        mean = per_token.masked_fill(~mask, 0).sum(1) / mask.sum(1)
        self._now["kl"] = _finite(mean, "logits")

    def result(self) -> PerPrompt:
        """`[batch]`."""
        return self.joined("kl")


def token_losses(logits: Logits, ids: Tensor, mask: Mask) -> PerPrompt:
    """The mean over each row's predicted tokens of their cross entropy, as a pure function.

    Args:
        logits: `[batch pos d_vocab]`.
        ids: `[batch pos]`.
        mask: `[batch pos]`, true where a token is.
    """
    if bool((mask.sum(1) < 2).any()):
        raise InvalidInputError(
            "A prompt of one token predicts nothing",
            expected="2 or more tokens in every prompt",
            got=f"{int(mask.sum(1).min())}",
            fix="leave short prompts out",
        )
    ids, mask = ids.to(logits.device), mask.to(logits.device)
    predicted = _log_probabilities(logits)[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
    counted = mask[:, :-1] & mask[:, 1:]
    losses = -predicted.masked_fill(~counted, 0).sum(1) / counted.sum(1)
    return _finite(losses, "logits")


def _require_logits(view: ModelView | None, out: Any) -> None:
    fits = isinstance(out, Tensor) and out.ndim == 3 and view is not None
    if not fits or view is None or out.shape[-1] != view.d_vocab:
        raise NotApplicableError(
            "Not applicable: this model gives back no logits",
            expected="an output of [batch pos d_vocab]"
            + ("" if view is None else f", d_vocab {view.d_vocab}"),
            got=f"shape {list(out.shape)}" if isinstance(out, Tensor) else type(out).__name__,
            fix="use measures of attention, or let the view's run() give logits",
        )


def _log_probabilities(logits: Logits) -> Logits:
    kind = torch.promote_types(logits.dtype, torch.float32)
    return logits.to(kind).log_softmax(-1)


def _finite(values: Tensor, what: str) -> Tensor:
    if not bool(torch.isfinite(values).all()):
        raise IdentityError(
            f"The model gives {what} that are not finite",
            expected="finite numbers",
            got=f"{int((~torch.isfinite(values)).sum())} of {values.numel()} prompts without one",
            fix="look for overflow in this dtype, or a hook that makes NaN",
        )
    return values


# --- outliers of the residual stream ------------------------------------------------------


@dataclass(frozen=True)
class ResidualStatistics(HtmlTable):
    """How far the residual stream that enters each layer is from a normal distribution.

    All over the entries `x_i[d]` of a prompt's tokens i and coordinates d, together.

    Attributes:
        peak: `[batch layer]`, `max |x|`.
        ratio: `[batch layer]`, `max |x| / median |x|` (of an even count the lower median).
        kurtosis: `[batch layer]`, `mean (x - m)^4 / (mean (x - m)^2)^2`, 3 for a normal one.
        outliers: `[batch layer]`, the share with `|x - m|` over six standard deviations.
        layers: the layers.
    """

    peak: Float[Tensor, "batch layer"]
    ratio: Float[Tensor, "batch layer"]
    kurtosis: Float[Tensor, "batch layer"]
    outliers: Float[Tensor, "batch layer"]
    layers: tuple[int, ...]

    def overview(self) -> list[tuple[str, str]]:
        names = ("peak", "ratio", "kurtosis", "outliers")
        means = {name: getattr(self, name).mean(0).tolist() for name in names}
        return [
            (f"layer {layer}", ", ".join(f"{n} {number(means[n][i])}" for n in names))
            for i, layer in enumerate(self.layers)
        ]


def residual_statistics(
    model: Any,
    batch: TokenBatch,
    ablation: Ablation | None = None,
    layers: Layers = None,
    *,
    batch_size: int | None = None,
) -> ResidualStatistics:
    """Peak, kurtosis and outliers of the residual stream entering each layer.

    Args:
        model: a hooked model or its view.
        batch: the prompts.
        ablation: the untouched model if None.
        layers: all if None.
        batch_size: rows per forward pass; all at once if None.

    Source: kurtosis and the share above six sigma as measures of outliers in Bondarenko et al.
    2023, "Quantizable Transformers", who take outputs of attention; the ratio to the median in
    Sun et al. 2024.
    """
    view = model_view(model)
    chosen = view.layers(layers)
    reader = residual_reader(chosen)
    stream(view, batch, [reader], ablation, batch_size=batch_size)
    peak, ratio, kurtosis, outliers = _finite(reader.result(), "residuals").unbind(-1)
    return ResidualStatistics(peak, ratio, kurtosis, outliers, chosen)


def residual_reader(layers: Sequence[int]) -> LayerReader:
    """A reader that gives `[batch layer 4]`, the fields of `ResidualStatistics` in order."""
    return LayerReader("resid_pre", layers, lambda x, chunk, _: outlier_statistics(x, chunk.mask))


def outlier_statistics(x: Residual, mask: Mask) -> Float[Tensor, "batch 4"]:
    """Peak, ratio, kurtosis and share of outliers of each row, as a pure function.

    Args:
        x: `[batch pos d_model]`.
        mask: `[batch pos]`, true where a token is.
    """
    kind = torch.promote_types(x.dtype, torch.float32)
    rows = []
    for row, keep in zip(x, mask.to(x.device), strict=True):
        values = row[keep].to(kind).flatten()
        size = values.abs()
        centred = values - values.mean()
        variance = centred.square().mean()
        rows.append(
            torch.stack(
                [
                    size.amax(),
                    size.amax() / size.median(),
                    centred.pow(4).mean() / variance.square(),
                    (centred.abs() > SIGMAS * variance.sqrt()).to(kind).mean(),
                ]
            )
        )
    return torch.stack(rows)


# --- attention entropy --------------------------------------------------------------------


def attention_entropy(
    model: Any,
    batch: TokenBatch,
    ablation: Ablation | None = None,
    layers: Layers = None,
    *,
    batch_size: int | None = None,
) -> PerHead:
    """How spread attention is, in nats: mean over queries of `-sum_j p_ij log p_ij`.

    Where rows sum to less than 1 (a sink logit), what is missing counts as one more key.

    Args:
        model: a hooked model or its view.
        batch: the prompts.
        ablation: the untouched model if None.
        layers: all if None.
        batch_size: rows per forward pass; all at once if None.

    Returns:
        `[batch layer head]`.
    """
    return by_metric(model, batch, ablation, layers, entropy, batch_size)


def entropy(
    pattern: Pattern, mask: Mask, visible: Bool[Tensor, "batch query key"]
) -> Float[Tensor, "batch head"]:
    """See `attention_entropy`, as a pure function."""
    pattern = pattern.to(torch.promote_types(pattern.dtype, torch.float32))
    pattern = pattern.masked_fill(~visible[:, None], 0)
    eps = torch.finfo(pattern.dtype).eps * pattern.shape[-1]
    rest = 1 - pattern.sum(-1, keepdim=True)
    every = torch.cat([pattern, rest.masked_fill(rest < eps, 0)], -1)
    per_query = torch.special.entr(every).sum(-1)
    return per_query.masked_fill(~mask[:, None], 0).sum(-1) / mask.sum(1)[:, None]


# --- streaming ----------------------------------------------------------------------------


def streaming_loss(
    model: Any,
    batch: TokenBatch,
    window: int,
    keep_first: int = 0,
    ablation: Ablation | None = None,
    *,
    batch_size: int | None = None,
) -> PerPrompt:
    """Next-token loss where queries see the last `window` keys and the first `keep_first` ones.

    StreamingLLM's comparison: without the first keys the loss of a model with a sink rises as
    soon as the sink leaves the window, with them it does not. Unlike there, positions keep their
    numbers in the prompt, see `mitigations.WindowedAttention`.

    Args:
        model: a hooked model or its view.
        batch: the prompts.
        window: how many keys, the query's own among them.
        keep_first: how many first positions stay in view.
        ablation: the untouched model if None; it acts after the window.
        batch_size: rows per forward pass; all at once if None.

    Returns:
        `[batch]`, nats per token.

    Raises:
        NotApplicableError: the model's scores can't be edited.

    Source: Xiao et al. 2024, "Efficient Streaming Language Models with Attention Sinks".
    """
    require_window(window, keep_first)
    windowed: Ablation = WindowedAttention(window, tuple(range(keep_first)) or None)
    if window >= int(require_batch(batch).lengths.max()):
        model_view(model).require_live_scores("A window on attention")
        windowed = Composition()  # it hides nothing
    both = windowed if ablation is None else windowed + ablation
    return next_token_loss(model, batch, both, batch_size=batch_size)


def require_window(window: Any, keep_first: Any) -> None:
    """Raise unless these are numbers of keys."""
    if type(window) is not int or window < 1:
        raise InvalidInputError(
            "A window is a number of keys",
            expected="a whole number of 1 or more",
            got=repr(window),
            fix="a query always sees itself, which is a window of 1",
        )
    if type(keep_first) is not int or keep_first < 0:
        raise InvalidInputError(
            "The first keys to keep are counted",
            expected="a whole number of 0 or more",
            got=repr(keep_first),
            fix="use 4, StreamingLLM's, or 0 for none",
        )


# --- simulated quantisation ---------------------------------------------------------------


def quantised_loss(
    model: Any,
    batch: TokenBatch,
    ablation: Ablation | None = None,
    bits: int = 8,
    *,
    batch_size: int | None = None,
) -> PerPrompt:
    """Next-token loss with every linear layer of the blocks quantised, simulated.

    `x -> s clamp(round(x / s), -m, m)` with `m = 2^(bits - 1) - 1`: weights symmetric with one
    scale per output channel, `s = max |W| / m`; the inputs of the layers symmetric with one scale
    per tensor, `s = max |x| / m`. The maximum is taken over all tokens of the batch in a first
    pass of the float model under the same ablation (static calibration on the prompts
    themselves), so that neither padding nor the batch size changes a number. Biases, norms,
    softmax, embeddings and the unembedding stay as they are.

    Weights are exchanged for the time of the run and are bit for bit the same objects
    afterwards, also after an exception. An ablation that reads weights reads the quantised ones.

    Args:
        model: a hooked model or its view.
        batch: the prompts.
        ablation: the untouched model if None.
        bits: of weights and inputs, 2 to 16; 8 is W8A8.
        batch_size: rows per forward pass; all at once if None.

    Returns:
        `[batch]`, nats per token.

    Raises:
        InvalidInputError: an unusable number of bits.
        NotApplicableError: the blocks hold no linear layers that can be found.

    Source: static per-tensor activations and per-channel weights are the W8A8 baseline of Xiao
    et al. 2023, "SmoothQuant". Here it is simulated in floating point.
    """
    require_bits(bits)
    view = model_view(model)
    linears = _Linears(view, bits)
    with linears.hooked(linears.watch):
        stream(view, batch, [linears], ablation, batch_size=batch_size)
    linears.require_seen(view)
    reader = LossReader(view)
    with linears.hooked(linears.quantise), linears.quantised_weights():
        edited = None if ablation is None else _SeesQuantised(ablation, linears)
        stream(view, batch, [reader, linears], edited, batch_size=batch_size)
    return reader.result()


def require_bits(bits: Any) -> None:
    """Raise unless weights and inputs can be rounded to so many bits."""
    if type(bits) is not int or not 2 <= bits <= 16:
        raise InvalidInputError(
            "Bits of quantisation",
            expected="a whole number from 2 to 16",
            got=repr(bits),
            fix="use 8 for W8A8",
        )


def fake_quantised(x: Tensor, peak: Tensor, bits: int) -> Tensor:
    """`s clamp(round(x / s), -m, m)`, `s = peak / m`, `m = 2^(bits - 1) - 1`.

    Args:
        x: values.
        peak: the magnitude that gets the largest integer, broadcast against x.
        bits: of the integers.
    """
    most = 2 ** (bits - 1) - 1
    scale = torch.where(peak > 0, peak / most, torch.ones_like(peak))
    return (x / scale).round().clamp(-most, most) * scale


_HOOKED_TRANSFORMER_WEIGHTS = {
    **dict.fromkeys(("W_Q", "W_K", "W_V", "_W_K", "_W_V"), (1,)),
    "W_O": (0, 1),
    **dict.fromkeys(("W_in", "W_gate", "W_out"), (0,)),
}
"""Names of weights that are no module of their own, and the axes of their inputs."""


class _Linears(PassingReader):
    """The linear layers of the blocks: their weights, and what enters them.

    A reader too: it notes when the model's own forward pass runs, and with which mask.
    """

    def __init__(self, view: ModelView, bits: int) -> None:
        self._bits = bits
        self._layers = range(view.n_layers)
        self._blocks = [_points(view.block(layer)) for layer in self._layers]
        self._weights = {
            id(weight): (weight, axes)
            for layer in self._layers
            for weight, axes in _weights(view.block(layer))
        }
        self._peaks: dict[tuple[int, str], Tensor] = {}
        self._attn_in: dict[int, Tensor] = {}
        self._mask: Mask | None = None

    def sites(self, view: ModelView) -> Sequence[Site]:
        return [Site("embed"), *(Site("attn_in", layer) for layer in self._layers), LOGITS]

    def read(self, site: Site, tensor: Tensor, chunk: TokenBatch) -> None:
        if site.kind == "embed":
            self._mask = chunk.mask
        elif site == LOGITS:
            self._mask = None
        elif site.layer is not None:
            peak = _peak(tensor, chunk.mask)
            known = self._attn_in.setdefault(site.layer, peak)
            self._attn_in[site.layer] = torch.maximum(known, peak)

    def require_seen(self, view: ModelView) -> None:
        """Raise where a block ran without its linear layers being called."""
        seen = {module for module, _ in self._peaks}
        if not all(any(id(point) in seen for point in points) for points in self._blocks):
            raise NotApplicableError(
                "Simulated quantisation is not applicable: the linear layers are not called",
                expected="torch.nn.Linear or Conv1D modules in every block",
                got=view.name,
                fix="load the model with sinkscope.load_model(...)",
            )

    @contextmanager
    def hooked(self, change: Callable[[int, str, Tensor], Tensor]) -> Iterator[None]:
        """`change(module, name, input)` on every input, for the time of a `with` block."""

        def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
            if self._mask is None:  # a measure calls a part of the model by itself
                return None
            if args:
                return (change(id(module), "", args[0]), *args[1:]), kwargs
            named = {n: change(id(module), n, x) for n, x in kwargs.items() if _is_input(x)}
            return args, {**kwargs, **named}

        points = [point for points in self._blocks for point in points]
        handles = [p.register_forward_pre_hook(before, with_kwargs=True) for p in points]
        try:
            yield
        finally:
            self._mask = None
            for handle in handles:
                handle.remove()

    def watch(self, module: int, name: str, x: Tensor) -> Tensor:
        """Learn an input's peak."""
        peak = _peak(x, self._mask)
        known = self._peaks.setdefault((module, name), peak)
        self._peaks[module, name] = torch.maximum(known, peak)
        return x

    def quantise(self, module: int, name: str, x: Tensor) -> Tensor:
        """An input, quantised by its peak; by its own where none was learnt (another expert)."""
        peak = self._peaks.get((module, name))
        return fake_quantised(x, x.abs().amax() if peak is None else peak, self._bits)

    def quantise_attn_in(self, layer: int, x: Tensor) -> Tensor:
        """What enters W_Q, W_K and W_V, quantised as their input is."""
        return fake_quantised(x, self._attn_in[layer], self._bits)

    @contextmanager
    def quantised_weights(self) -> Iterator[None]:
        """Quantised weights in the place of the model's own, for the time of a `with` block."""
        saved = [(weight, weight.data) for weight, _ in self._weights.values()]
        try:
            for weight, axes in self._weights.values():
                peak = weight.data.abs().amax(axes, keepdim=True)
                weight.data = fake_quantised(weight.data, peak, self._bits)
            yield
        finally:
            for weight, data in saved:
                weight.data = data


@dataclass(frozen=True)
class _SeesQuantised(Ablation):
    """An ablation that looks at what enters W_K sees it quantised, as W_K itself does."""

    ablation: Ablation
    linears: _Linears

    def edits(self, view: ModelView, context: EditContext) -> Sequence[Edit]:
        return [self._seeing(edit) for edit in self.ablation.edits(view, context)]

    def _seeing(self, edit: Edit) -> Edit:
        site = edit.site
        looks = isinstance(site, Site) and site.kind == "attn_in" and edit.only_looks
        if not looks or not isinstance(site, Site) or site.layer is None:
            return edit
        layer = site.layer

        def look(attn_in: Tensor, hook: Any) -> None:
            edit.fn(self.linears.quantise_attn_in(layer, attn_in), hook=hook)

        return Edit(site, look, only_looks=True)


def _points(block: nn.Module) -> list[nn.Module]:
    """The modules of a block that take the input of a linear layer."""
    modules = {id(module): module for module in block.modules()}.values()
    found = [module for module in modules if _axes(module) is not None]
    for module in modules:
        own = dict(module.named_parameters(recurse=False))
        if "W_Q" in own:
            found += [module, module.hook_z]  # type: ignore[list-item]
        if "W_in" in own:
            found += [module, module.hook_post]  # type: ignore[list-item]
    return found


def _weights(block: nn.Module) -> Iterator[tuple[nn.Parameter, tuple[int, ...]]]:
    for module in block.modules():
        axes = _axes(module)
        for name, parameter in module.named_parameters(recurse=False):
            if name == "weight" and axes is not None:
                yield parameter, axes
            elif name in _HOOKED_TRANSFORMER_WEIGHTS:
                yield parameter, _HOOKED_TRANSFORMER_WEIGHTS[name]


def _axes(module: nn.Module) -> tuple[int, ...] | None:
    """The input axes of a linear module's weight, None for other modules."""
    from transformers.pytorch_utils import Conv1D

    if isinstance(module, nn.Linear):
        return (1,)
    return (0,) if isinstance(module, Conv1D) else None


def _is_input(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def _peak(x: Tensor, mask: Mask | None) -> Tensor:
    """The largest magnitude at tokens; at all entries where the tokens can't be told."""
    if mask is not None:
        keep = mask.to(x.device)
        if x.shape[: keep.ndim] == keep.shape:
            x = x[keep]
        elif x.shape[0] == keep.numel():
            x = x[keep.flatten()]
    return x.abs().amax()
