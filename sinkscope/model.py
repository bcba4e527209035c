"""One view on every hooked model: sizes, parts, weights, and how to run it.

The view asks the model what it has (a query bias, a table of positions), never which class it
is. Everything after this module sees models through `ModelView` alone.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from sinkscope._types import Ids, Layers, Mask, Residual
from sinkscope.attention import Rotation, ScoreRule, gain_of_norm
from sinkscope.display import HtmlTable
from sinkscope.errors import (
    IdentityError,
    InvalidInputError,
    NotApplicableError,
    ProcessedWeightsError,
    SinkscopeError,
)
from sinkscope.metrics import causal_visibility, full_visibility, position_ids
from sinkscope.parts import Parts, find_parts, sink_logits_of, weight_of
from sinkscope.sites import Site, SiteMap, site_map

if TYPE_CHECKING:
    from typing_extensions import Self

    from sinkscope.prompts import TokenBatch

HookFn = Callable[..., Tensor | None]
"""A TransformerLens hook function: `fn(tensor, hook)` gives a new tensor, or None to leave it."""

Predicate = Callable[[Any], bool]
Builder = Callable[[Any], "ModelView"]

_HOW_TO_LOAD_RAW = (
    "load without weight processing: sinkscope.load_model(name), "
    "TransformerBridge.boot_transformers(name) without enable_compatibility_mode() (or with "
    "no_processing=True), or HookedTransformer.from_pretrained_no_processing(name)"
)


@dataclass(frozen=True, eq=False)
class ModelView(HtmlTable):
    """A hooked model, seen through the few questions that sinkscope asks.

    Made by `model_view`; every function of sinkscope accepts a model or its view. Everything
    else reads models through these methods alone. A model that is not in TransformerLens'
    shape gets a subclass that overrides those that it answers otherwise, see
    `register_model_view` and `sinkscope.testing.check_model_view`.

    Attributes:
        model: the hooked model itself; the view holds no copy of its weights.
        sites: how this model spells its hook names.
        parts: which parts it has.
    """

    model: Any
    sites: SiteMap
    parts: Parts
    n_layers: int
    n_heads: int
    n_key_value_heads: int
    d_model: int
    d_head: int
    d_vocab: int
    n_ctx: int
    name: str
    tokenizer: Any = field(default=None, repr=False)

    @classmethod
    def of(cls, model: Any) -> Self:
        """The view on a model in TransformerLens' shape: `cfg`, `blocks`, `embed`, `hook_dict`.

        A subclass that only changes a method or two is its own builder, as in
        `register_model_view(is_mine, MyView.of)`.

        Raises:
            InvalidInputError: the object is not a hooked model in TransformerLens' shape.
        """
        cfg = getattr(model, "cfg", None)
        missing = [n for n in ("blocks", "hook_dict", "embed") if not hasattr(model, n)]
        if cfg is None or missing:
            raise InvalidInputError(
                "This is not a hooked model that sinkscope can read",
                expected="a TransformerBridge or HookedTransformer (cfg, blocks, embed, hook_dict)",
                got=type(model).__name__,
                fix="wrap a transformers model or a name with sinkscope.load_model(...), or tell "
                "how to read your own kind with sinkscope.register_model_view(...)",
            )
        n_heads = int(cfg.n_heads)
        parts = find_parts(model)
        sites = site_map(lambda name: _hook_point(model, name) is not None)
        # Hooks that are there, but never called, or show tensors of another shape.
        others = set() if parts.learned_positions else {"pos_embed"}
        others |= set() if parts.projections else {"q", "k", "v"}
        known = {kind: name for kind, name in sites.names.items() if kind not in others}
        sites = replace(sites, names=known)
        return cls(
            model=model,
            sites=sites,
            parts=parts,
            n_layers=len(model.blocks),
            n_heads=n_heads,
            n_key_value_heads=int(getattr(cfg, "n_key_value_heads", None) or n_heads),
            d_model=int(cfg.d_model),
            d_head=int(cfg.d_head),
            d_vocab=int(weight_of(model.embed, "W_E").shape[0]),
            n_ctx=int(cfg.n_ctx),
            name=str(getattr(cfg, "model_name", None) or type(model).__name__),
            tokenizer=getattr(model, "tokenizer", None),
        )

    def overview(self) -> list[tuple[str, str]]:
        size = f"{self.n_layers} layers, {self.n_heads} heads, d_model {self.d_model}"
        parts = self.parts
        return [
            ("model", self.name),
            ("size", f"{size}, n_ctx {self.n_ctx}"),
            ("weights", f"{self.dtype} on {self.device}"),
            ("processed", ", ".join(parts.processed) or "no"),
            ("query bias b_Q", "yes" if parts.query_bias else "no"),
            ("learned positions", "yes" if parts.learned_positions else f"no, {parts.positions}"),
            ("first MLP", "yes" if parts.first_mlp else "no"),
            ("normalization", parts.normalization),
        ]

    # --- where and in what precision -------------------------------------------------------

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the token embedding, taken for the model's."""
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        """Where the token embedding lies, and so where ids must go."""
        return self.embedding.device

    @property
    def embedding(self) -> Float[Tensor, "d_vocab d_model"]:
        """The token embedding W_E."""
        return weight_of(self.model.embed, "W_E")

    # --- weights ---------------------------------------------------------------------------

    def block(self, layer: int) -> Any:
        """The block of a layer, 0-based.

        Raises:
            NotApplicableError: the model has no list of blocks.
        """
        if not hasattr(self.model, "blocks"):
            raise NotApplicableError(
                "Not applicable: this model shows no blocks",
                expected="a model with a list `blocks`, or a view that overrides what needs them",
                got=self.name,
                fix="use measures that need no modules of a layer",
            )
        return self.model.blocks[layer]

    def W_Q(self, layer: int) -> Float[Tensor, "head d_model d_head"]:
        """The query weights of a layer, without the score's scale."""
        return self._projection(layer, "W_Q")

    def W_K(self, layer: int) -> Float[Tensor, "head d_model d_head"]:
        """The key weights of a layer; heads that share keys get the same matrix each."""
        return self._per_query_head(self._projection(layer, "W_K"))

    def key_weights(self, layer: int) -> Float[Tensor, "kv_head d_model d_head"]:
        """`W_K` with one matrix for each key head, as the hook of `k` has them."""
        return self.W_K(layer)[:: self.n_heads // self.n_key_value_heads]

    def b_Q(self, layer: int) -> Float[Tensor, "head d_head"]:
        """The query bias as it stands in the weights.

        Raises:
            NotApplicableError: the model has no query bias.
        """
        self.require_query_bias()
        return self._projection(layer, "b_Q")

    def b_K(self, layer: int) -> Float[Tensor, "head d_head"] | None:
        """The key bias, or None where the model has none (its terms are then not there)."""
        if not self.parts.key_bias:
            return None
        return self._per_query_head(self._projection(layer, "b_K"))

    def _projection(self, layer: int, name: str) -> Tensor:
        if not self.parts.projections:
            raise NotApplicableError(
                f"Not applicable: this model's attention has no {name}",
                expected="queries and keys that are projections of what enters the attention",
                got=self.name,
                fix="use measures of the pattern",
            )
        return getattr(self.block(layer).attn, name).detach()

    def _per_query_head(self, weight: Float[Tensor, "kv_head ..."]) -> Float[Tensor, "head ..."]:
        return weight.repeat_interleave(self.n_heads // weight.shape[0], dim=0)

    @property
    def W_pos(self) -> Float[Tensor, "n_ctx d_model"]:
        """The learned position vectors p_i, row i for position i.

        Raises:
            NotApplicableError: positions do not enter through a learned table.
        """
        self.require_learned_positions()
        table = weight_of(self.model.pos_embed, "W_pos").detach()
        return table[table.shape[0] - self.n_ctx :]

    def query_bias(self, layer: int, kind: str = "raw") -> Float[Tensor, "head d_head"] | None:
        """The query bias, or what LN1's bias makes of it; None where there is none.

        Args:
            layer: 0-based.
            kind: "raw", `b_Q`; or "effective", `b_Q + beta W_Q` with beta the bias of LN1.
        """
        raw = self.b_Q(layer) if self.parts.query_bias else None
        beta = None if kind == "raw" else self.ln1_bias(layer)
        if beta is None:
            return raw
        from_ln1 = torch.einsum("d,hde->he", beta, self.W_Q(layer))
        return from_ln1 if raw is None else from_ln1 + raw

    def ln1_bias(self, layer: int) -> Float[Tensor, " d_model"] | None:
        """The bias beta of the first normalisation, or None where it has none."""
        if self.parts.normalization == "none":
            return None
        ln1 = self.block(layer).ln1
        bias = getattr(ln1, "bias", None) if hasattr(ln1, "weight") else getattr(ln1, "b", None)
        return bias.detach() if isinstance(bias, Tensor) else None

    def attention_scale(self, layer: int) -> float:
        """The factor on q.k, from the model's own attention and configuration.

        `1/sqrt(d_head)` where nothing is said of it, 1 where the model does not scale, and
        divided by `layer + 1` where it scales by the inverse layer index.
        """
        hf_config = self._hf_config
        cfg = self._cfg
        if hf_config is None:
            divisor = float(getattr(cfg, "attn_scale", self.d_head**0.5))
            scale = 1.0 / divisor if getattr(cfg, "use_attn_scale", True) else 1.0
            inverse = getattr(cfg, "scale_attn_by_inverse_layer_idx", False)
        elif hasattr(hf_config, "scale_attn_weights"):
            scale = self.d_head**-0.5 if hf_config.scale_attn_weights else 1.0
            inverse = getattr(hf_config, "scale_attn_by_inverse_layer_idx", False)
        else:
            own = getattr(self._hf_attention(layer), "scaling", None)
            # Neither its configuration nor its modules say that GPT-Neo does not scale.
            default = 1.0 if hf_config.model_type == "gpt_neo" else self.d_head**-0.5
            return default if own is None else float(own)
        return scale / (layer + 1) if inverse else scale

    @property
    def _cfg(self) -> Any | None:
        """TransformerLens' configuration; None on a model of another shape."""
        return getattr(self.model, "cfg", None)

    @property
    def _hf_config(self) -> Any | None:
        """The transformers configuration of the text model, None on a HookedTransformer."""
        config = getattr(getattr(self.model, "original_model", None), "config", None)
        return getattr(config, "text_config", None) or config

    @property
    def _hf_modules(self) -> Iterable[nn.Module]:
        """The modules of transformers' own model, none on a HookedTransformer."""
        owner = getattr(self.model, "original_model", None)
        return () if owner is None else owner.modules()

    def _hf_attention(self, layer: int) -> Any | None:
        return getattr(self.block(layer).attn, "original_component", None)

    # --- from queries and keys to a pattern ------------------------------------------------

    def score_sites(self, layer: int) -> tuple[Site, ...]:
        """What `score_rule` needs to see of a run."""
        kinds: tuple[str, ...] = ()
        if self.parts.qk_norm:
            kinds += ("q", "k", "q_normed", "k_normed")
        if "rotary_cos" in self.sites.names:
            kinds += ("rotary_cos", "rotary_sin")
        return tuple(Site(kind, layer) for kind in kinds)

    def score_rule(self, layer: int, seen: Mapping[str, Tensor], mask: Mask) -> ScoreRule:
        """What a layer does between its projections and its pattern, in one run.

        Args:
            layer: 0-based.
            seen: what the run showed at `score_sites(layer)`, by kind.
            mask: `[batch pos]`, true where a token is.

        Raises:
            NotApplicableError: the model does something that a `ScoreRule` does not know.
        """
        gains = [self._norm_gain(seen, kind) for kind in ("q", "k")]
        return ScoreRule(
            scale=self.attention_scale(layer),
            rotation=self._rotation(layer, seen, mask),
            query_gain=gains[0],
            key_gain=gains[1],
            position_bias=self._alibi(layer, mask),
            soft_cap=self.parts.soft_cap,
            sink_logits=self.sink_logits(layer),
        )

    def sink_logits(self, layer: int) -> Float[Tensor, " head"] | None:
        """The learned scores of attending to nothing, None where there are none."""
        return sink_logits_of(self.block(layer).attn) if self.parts.sink_logits else None

    def _norm_gain(self, seen: Mapping[str, Tensor], kind: str) -> Tensor | None:
        if not self.parts.qk_norm:
            return None
        if getattr(self._cfg, "qk_norm_after_rope", False):
            raise NotApplicableError(
                "Not applicable: this model norms queries and keys after turning them",
                expected="norms in front of the rotary positions",
                got=self.name,
                fix="use measures of the pattern",
            )
        before, after = seen[kind], seen[f"{kind}_normed"]
        # Norms per head run on [batch head pos d_head], norms over all heads on flat vectors.
        single = after.ndim == 4
        after = after.transpose(1, 2) if single else after.reshape(before.shape)
        gain = gain_of_norm(before, after)
        self._require_rms(before, gain, (-1,) if single else (-2, -1))
        return gain.repeat_interleave(self.n_heads // gain.shape[1], dim=1)

    def _require_rms(self, before: Tensor, gain: Tensor, dims: tuple[int, ...]) -> None:
        """A norm that centres is no factor on each entry; of an RMS norm gain x RMS is fixed."""
        rms = before.float().pow(2).mean(dims, keepdim=True).sqrt().transpose(1, 2)
        fixed = gain.float() * rms
        typical = fixed.abs().amax((0, 2), keepdim=True)
        spread = (fixed - fixed.median(2, keepdim=True).values).abs()
        if bool((spread.median(2).values > 0.05 * typical.amax(2)).any()):
            raise NotApplicableError(
                "Not applicable: the norms on queries and keys are no RMS norms",
                expected="norms that multiply every entry by a factor",
                got=self.name,
                fix="use measures of the pattern",
            )

    def _rotation(self, layer: int, seen: Mapping[str, Tensor], mask: Mask) -> Rotation | None:
        if self.parts.positions != "rotary":
            return None
        cfg = self._cfg
        if "rotary_cos" in self.sites.names:
            if "rotary_cos" not in seen:
                return None  # a layer without positions in a model with rotary ones
            return _hooked_rotation(cfg, self._hf_config, self.d_head, seen)
        positions = position_ids(mask).clamp_min(0)
        attention = self.block(layer).attn
        if hasattr(attention, "rotary_cos"):
            tables = (attention.rotary_cos, attention.rotary_sin)
            cos, sin = (table[positions.to(table.device)] for table in tables)
            return Rotation(cos, sin, bool(getattr(cfg, "rotary_adjacent_pairs", False)))
        # GPT-J keeps sines beside cosines in one table, one column for each pair.
        found = (getattr(module, "embed_positions", None) for module in self._hf_modules)
        table = next((t for t in found if isinstance(t, Tensor)), None)
        if table is None:
            raise NotApplicableError(
                "Not applicable: this model does not show its rotary positions",
                expected="hooks or tables of their cosines and sines",
                got=self.name,
                fix="use measures of the pattern",
            )
        sin, cos = table[positions.to(table.device)].repeat_interleave(2, -1).chunk(2, -1)
        return Rotation(cos, sin, adjacent=True)

    def _alibi(self, layer: int, mask: Mask) -> Tensor | None:
        if self.parts.positions != "alibi":
            return None
        makers = (getattr(module, "build_alibi_tensor", None) for module in self._hf_modules)
        build = next((maker for maker in makers if maker is not None), None)
        if build is not None:
            flat = build(mask.to(self.device).long(), self.n_heads, dtype=self.dtype)
            return flat.reshape(mask.shape[0], self.n_heads, -1, mask.shape[1])
        create = getattr(self.block(layer).attn, "create_alibi_bias", None)
        if create is not None:
            return create(self.n_heads, mask.shape[1], self.device)[None].to(self.dtype)
        raise NotApplicableError(
            "Not applicable: this model does not show its ALiBi term",
            expected="a model that builds the term in a function of its own",
            got=self.name,
            fix="use measures of the pattern",
        )

    # --- the first MLP ---------------------------------------------------------------------

    def first_mlp(self, x: Residual) -> Residual:
        """`MLP_0(x)`, the first layer's MLP alone: no normalisation before it, no residual.

        The user's hooks inside that MLP are kept from firing: the value is one of the weights.

        Raises:
            NotApplicableError: layer 0 has no MLP.
        """
        if not self.parts.first_mlp:
            raise NotApplicableError(
                "The first layer of this model has no MLP",
                fix="use a measure that does not need the effective positional encoding",
            )
        if getattr(self.block(0), "ln2_post", None) is not None:
            raise NotApplicableError(
                "Not applicable: a norm lies behind the first MLP, so it adds something else",
                expected="an MLP whose output is added to the residual stream",
                got=self.name,
                fix="read the mlp_out of a run",
            )
        mlp = self.block(0).mlp
        activation = getattr(self.block(0), "original_component", None)
        activation = getattr(activation, "activation_fn", None)
        with self.measuring(), _hooks_silenced(mlp):
            if (
                activation is not None
                and mlp.original_component is self.block(0).original_component
            ):
                # An OPT layer holds its MLP's two maps itself: there is no module to call.
                return mlp.out(activation(getattr(mlp, "in")(x))).to(x.device)
            try:
                out = mlp(x)
            except (RuntimeError, TypeError) as error:
                # The bridge's own refusal where MLPs have no module; BLOOM's takes the residual.
                raise NotApplicableError(
                    "The first MLP of this model can't be run by itself",
                    got=str(error)[:200],
                ) from error
        return (out[0] if isinstance(out, tuple) else out).to(x.device)

    def first_ln2(self, x: Residual) -> Residual:
        """`LN2_0(x)`, the normalisation in front of the first layer's MLP."""
        ln2 = getattr(self.block(0), "ln2", None)
        if ln2 is None:
            raise NotApplicableError("The first layer of this model has no LN2")
        with self.measuring(), _hooks_silenced(ln2):
            return ln2(x).to(x.device)

    @property
    def architecture(self) -> str:
        """The architecture's name, "unknown" where the model does not tell."""
        return str(getattr(self._cfg, "architecture", None) or "unknown")

    def weights_hash(self) -> str:
        """SHA-256 over the model's parameters in the order of their names."""
        digest = hashlib.sha256()
        for name, parameter in sorted(self.model.named_parameters(), key=lambda item: item[0]):
            digest.update(name.encode())
            data = parameter.detach().cpu().contiguous()
            digest.update(str(data.dtype).encode())
            digest.update(data.view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    # --- who sees whom ---------------------------------------------------------------------

    def window(self, layer: int) -> int | None:
        """The sliding window of a layer in tokens, None where every earlier key is seen."""
        config = self._hf_config
        if config is None:
            cfg = self._cfg
            if cfg is None or not getattr(cfg, "use_local_attn", False):
                return None
            return int(cfg.window_size) if cfg.attn_types[layer] == "local" else None
        kinds = getattr(config, "layer_types", None) or getattr(config, "attention_layers", None)
        size = getattr(config, "sliding_window", None) or getattr(config, "window_size", None)
        if size is None or (kinds and kinds[layer] not in ("sliding_attention", "local")):
            return None
        return int(size)

    def visible(self, layer: int, mask: Mask) -> Bool[Tensor, "batch query key"]:
        """Which key each query may attend to in a layer, from the model's own configuration.

        Args:
            layer: 0-based.
            mask: `[batch pos]`, true where a token is.
        """
        if getattr(self._cfg, "attention_dir", "causal") == "bidirectional":
            return full_visibility(mask)
        return causal_visibility(mask, self.window(layer))

    # --- what must hold before a measure ---------------------------------------------------

    def require_query_bias(self) -> None:
        """Raise unless the model has a query bias."""
        if not self.parts.query_bias:
            raise NotApplicableError(
                "Not applicable: this model has no query bias b_Q",
                expected="a model whose W_Q has a bias that is not all zero",
                got=self.name,
                fix="use measures of the pattern, or the effective query bias from ln1",
            )

    def require_effective_query_bias(self) -> None:
        """Raise unless LN1 has a bias, which W_Q makes into a constant of every query."""
        if self.ln1_bias(0) is None:
            raise NotApplicableError(
                "Not applicable: this model's first norm has no bias, so b_Q gains nothing",
                expected="a LayerNorm with a bias in front of W_Q",
                got=f"{self.name} with {self.parts.normalization} norms",
                fix="use the raw query bias",
            )

    def require_learned_positions(self) -> None:
        """Raise unless positions enter through a learned table."""
        if not self.parts.learned_positions:
            raise NotApplicableError(
                "Not applicable: this model has no learned position embeddings",
                expected="a table W_pos added to the token embedding",
                got=f"{self.name} with positions of type {self.parts.positions!r}",
                fix="use measures that need no position vectors",
            )

    def require_raw_weights(self, what: str) -> None:
        """Raise if the weights were folded or centred, since `what` is not defined on them."""
        if self.parts.processed:
            raise ProcessedWeightsError(
                f"{what} is defined on raw weights, and this model's were "
                + " and ".join(self.parts.processed),
                expected="a model without weight processing",
                got=f"{self.name} ({', '.join(self.parts.processed)})",
                fix=_HOW_TO_LOAD_RAW,
            )

    def require_live_scores(self, what: str) -> None:
        """Raise unless the model computes on with edited scores."""
        if not self.scores_are_live():
            raise NotApplicableError(
                f"{what} is not applicable: this model's scores can't be edited",
                expected="a model that computes on with what the hook of its scores gives back",
                got=f"{self.name}, whose attention is left to transformers and hooked afterwards",
                fix="use measures and ablations that do not edit scores",
            )

    def require_dot_product_scores(self, what: str) -> None:
        """Raise unless a score is `scale q.k` and nothing else."""
        parts = self.parts
        found = [] if parts.positions in ("standard", "none") else [f"{parts.positions} positions"]
        found += ["norms on queries and keys"] if parts.qk_norm else []
        found += ["a soft cap on scores"] if parts.soft_cap is not None else []
        found += ["learned sink logits"] if parts.sink_logits else []
        if found:
            raise NotApplicableError(
                f"{what} is not applicable: this model's scores are more than scale q.k",
                expected="scores that are scale q.k",
                got=f"{self.name} with {' and '.join(found)}",
                fix="use measures of the pattern",
            )

    def require_norm_in_front(self, what: str) -> None:
        """Raise unless a normalisation lies in front of the attention."""
        if self.parts.normalization != "none" and not self._runs_in_order("ln1", "q"):
            raise NotApplicableError(
                f"{what} is not applicable: the norm lies behind the attention",
                expected="a normalisation in front of W_Q and W_K",
                got=self.name,
                fix="use measures of the pattern",
            )

    def require_key_only_shift(self) -> None:
        """Raise unless the query-bias term of a score depends on the key alone."""
        if self.parts.positions == "rotary" or self.parts.qk_norm:
            raise NotApplicableError(
                "Not applicable: in this model the query-bias term depends on the query too",
                expected="scores that are scale q.k, without rotary positions or QK-norm",
                got=f"{self.name} with positions of type {self.parts.positions!r}",
                fix="use measures of the pattern",
            )

    def layers(self, layers: Layers, default: Iterable[int] | None = None) -> tuple[int, ...]:
        """The chosen layers as a tuple of 0-based numbers, each checked.

        Args:
            layers: one layer, several, or None for the default.
            default: what None stands for; all layers if that is None too.
        """
        return _indices(layers, default, self.n_layers, "layer")

    def heads(self, heads: Layers) -> tuple[int, ...]:
        """The chosen heads as a tuple of 0-based numbers, each checked."""
        return _indices(heads, None, self.n_heads, "head")

    @property
    def bias_kind(self) -> str:
        """What b_Q holds: "effective" where folding has merged LN1's bias into it, else "raw"."""
        return "effective" if "folded" in self.parts.processed else "raw"

    @property
    def mid_layers(self) -> range:
        """The paper's layers: without the first quarter and the last one (3..10 of 12)."""
        return range(self.n_layers // 4, self.n_layers - 1)

    @property
    def mid_or_all_layers(self) -> range:
        """The paper's layers, or all of a model of one layer, which has none in the middle."""
        return self.mid_layers or range(self.n_layers)

    # --- running ---------------------------------------------------------------------------

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Eval mode without gradients; every module's own train flag comes back at the end."""
        roots = [self.model, getattr(self.model, "original_model", None)]
        modules = {id(m): m for root in roots if root is not None for m in root.modules()}
        flags = [(module, module.training) for module in modules.values()]
        try:
            for module, training in flags:
                if training:
                    module.training = False
            with torch.no_grad():
                yield
        finally:
            for module, training in flags:
                module.training = training

    def hook_point(self, site: Site | str) -> Any:
        """The model's hook point at a site or of a hook name.

        Raises:
            InvalidInputError: a hook name that the model does not have.
        """
        if isinstance(site, Site):
            if site.layer is not None:
                _indices(site.layer, None, self.n_layers, "layer")
            name = self.sites.hook_name(site)
        else:
            name = site
        point = _hook_point(self.model, name)
        if point is None:
            raise InvalidInputError(
                f"This model has no hook named {name!r}",
                expected="a key of model.hook_dict",
                got=repr(name),
                fix="look at model.hook_dict, or use sinkscope.Site",
            )
        return point

    def scores_are_live(self) -> bool:
        """Whether the model computes on with what its score and pattern hooks give back.

        Where TransformerBridge leaves attention to transformers it fires both hooks after the
        fact, and with the pattern at both: scores can't be read there and neither be edited.
        """
        kinds = ("attn_scores", "pattern", "z")
        return self._runs_in_order(*(kind for kind in kinds if kind in self.sites.names))

    def _runs_in_order(self, *kinds: str) -> bool:
        """Whether the first layer passes these sites in this order, seen on two tokens.

        The user's hooks do not see them.
        """
        order: list[str] = []

        def note(kind: str) -> HookFn:
            def hook_fn(tensor: Tensor, hook: Any) -> None:
                order.append(kind)

            return hook_fn

        ids = torch.zeros(1, min(2, self.n_ctx), dtype=torch.long, device=self.device)
        probe = [(Site(kind, 0), note(kind)) for kind in kinds]
        with self.measuring(), _hooks_silenced(self.model), self.hooks(probe):
            self.run(ids, stop_at_layer=1)
        return tuple(dict.fromkeys(order)) == kinds

    def resolve(self, site: Site | str, fn: HookFn) -> tuple[Any, HookFn]:
        """The hook point of a site, and the function to hang there.

        Where the model has no hook after LN1's gain and bias, they are put on the tensor that
        a function at `attn_in` sees, and the function can't edit it.
        """
        point = self.hook_point(site)
        if not (self.sites.attn_in_before_gain and isinstance(site, Site)):
            return point, fn
        if site.kind not in ("ln1", "attn_in") or site.layer is None:
            return point, fn
        ln1 = self.block(site.layer).ln1
        gain, bias = getattr(ln1, "w", None), getattr(ln1, "b", None)

        def with_gain(tensor: Tensor, hook: Any) -> None:
            tensor = tensor.to(self.dtype)  # half precision is normed in float32
            tensor = tensor if gain is None else tensor * gain
            if fn(tensor if bias is None else tensor + bias, hook=hook) is not None:
                raise NotApplicableError(
                    f"This model has no hook that could edit {site}",
                    expected="a function that only reads",
                    got="a function that returned a tensor",
                    fix="edit q, k or v, or load the model as a TransformerBridge",
                )

        return point, with_gain

    @contextmanager
    def hooks(self, fwd_hooks: Sequence[tuple[Site | str, HookFn]]) -> Iterator[None]:
        """Hooks for the time of a `with` block; only these are removed at its end.

        They fire after hooks that the user attached before, and in the order given.
        """
        added: list[tuple[Any, Any]] = []
        try:
            for site, fn in fwd_hooks:
                point, resolved = self.resolve(site, fn)
                known = {id(handle) for handle in point.fwd_hooks}
                point.add_hook(resolved)
                added += [(point, h) for h in point.fwd_hooks if id(h) not in known]
            yield
        finally:
            for point, handle in reversed(added):
                handle.hook.remove()
                point.fwd_hooks[:] = [h for h in point.fwd_hooks if h is not handle]

    def own_hooks(self) -> list[str]:
        """Names of the hook points that have hooks now: the user's own."""
        return [name for name, m in self.model.named_modules() if getattr(m, "fwd_hooks", None)]

    def forward(self, batch: TokenBatch, stop_at_layer: int | None = None) -> Any:
        """Run the model on a batch; logits, or None where it is told to stop.

        The mask goes along only where something is masked, so that an unpadded batch runs as
        the user's own call would.

        Args:
            batch: the prompts.
            stop_at_layer: neither this layer nor any later one runs, nor the output head.
        """
        mask = None if bool(batch.mask.all()) else batch.mask.to(self.device)
        ends: list[tuple[Site | str, HookFn]] = []
        if stop_at_layer is not None and "resid_post" in self.sites.names:
            # Models that stop at a layer by themselves can't stop in front of the output head.
            ends = [(Site("resid_post", stop_at_layer - 1), lambda tensor, hook: stop())]
            stop_at_layer = None
        elif stop_at_layer is not None and stop_at_layer >= self.n_layers:
            stop_at_layer = None
        with suppress(Stopped), self.hooks(ends):
            return self.run(batch.ids.to(self.device), mask, stop_at_layer)
        return None

    def run(self, ids: Ids, mask: Mask | None = None, stop_at_layer: int | None = None) -> Any:
        """Call the model: the only place where that is done.

        Args:
            ids: `[batch pos]`, on the view's device.
            mask: `[batch pos]`, true where a token is; None where every place holds one.
                Positions count from each row's first token, and nobody sees a masked key.
            stop_at_layer: the first layer that does not run; all run if None.

        Returns:
            The output, logits in most models; or the residual stream `[batch pos d_model]`
            entering `stop_at_layer`.

        Raises:
            NotApplicableError: (an override's) a mask on a model that takes none.
        """
        kwargs: dict[str, Any] = {}
        if stop_at_layer is not None:
            kwargs = {"stop_at_layer": stop_at_layer, "return_type": None}
        if mask is not None:
            kwargs["attention_mask"] = mask.long()
        return self.model(ids, **kwargs)


class Stopped(BaseException):
    """Ends a forward pass from within; not an `Exception`, which a model's own code may catch."""


def stop() -> None:
    """End the forward pass from within a hook: all that was asked for has been seen."""
    raise Stopped


def model_view(model: Any) -> ModelView:
    """The view on a hooked model; a view is given back as it is.

    Args:
        model: a `TransformerBridge`, a `HookedTransformer`, a `ModelView`, or a model of a
            kind that `register_model_view` was told of.

    Raises:
        InvalidInputError: the object is none of these.
    """
    if isinstance(model, ModelView):
        return model
    for registration in _REGISTRATIONS:
        if registration.takes(model):
            return registration.build(model)
    return ModelView.of(model)


@dataclass(frozen=True, eq=False)
class _Registration:
    """For which models a builder makes the view."""

    predicate: Predicate
    builder: Builder

    def takes(self, model: Any) -> bool:
        try:
            return bool(self.predicate(model))
        except Exception as error:  # an author's function may raise anything
            raise InvalidInputError(
                f"A registered predicate fails on a {type(model).__name__}",
                expected="True or False for any object",
                got=f"{type(error).__name__}: {str(error)[:200]}",
                fix="let it ask no more than isinstance(model, ...) or hasattr(model, ...)",
            ) from error

    def build(self, model: Any) -> ModelView:
        try:
            view = self.builder(model)
        except SinkscopeError:
            raise
        except Exception as error:
            raise InvalidInputError(
                f"The registered builder fails on this {type(model).__name__}",
                expected="a ModelView",
                got=f"{type(error).__name__}: {str(error)[:200]}",
                fix="check the builder, or the predicate that sent this model to it",
            ) from error
        if not isinstance(view, ModelView):
            raise InvalidInputError(
                f"The registered builder made no view of this {type(model).__name__}",
                expected="a ModelView, or an object of a subclass",
                got=type(view).__name__,
                fix="return MyView(...) from the builder",
            )
        return view


_REGISTRATIONS: list[_Registration] = []
"""The latest first."""


def register_model_view(predicate: Predicate, builder: Builder) -> Callable[[], None]:
    """Teach `model_view`, and so every function of sinkscope, to read models of your own.

    The latest registration is asked first, and all of them before what sinkscope knows of
    TransformerLens. Registering a predicate again replaces what it stood for.

    Args:
        predicate: `predicate(model)`, true for the models that the builder is for.
        builder: `builder(model)` gives a `ModelView`; it is called for each measure, so it
            should do no more than read sizes. `MyView.of` will do for a model in
            TransformerLens' shape.

    Returns:
        A function that takes the registration back.

    Raises:
        InvalidInputError: not two functions. On use: a predicate or builder that fails, or a
            builder that gives something else than a view.
    """
    if not callable(predicate) or not callable(builder):
        raise InvalidInputError(
            "A view is registered by two functions",
            expected="predicate(model) -> bool and builder(model) -> ModelView",
            got=f"{predicate!r:.60} and {builder!r:.60}",
            fix="pass functions, such as lambda model: isinstance(model, MyModel) and MyView.of",
        )
    registration = _Registration(predicate, builder)
    _REGISTRATIONS[:] = [r for r in _REGISTRATIONS if r.predicate != predicate]
    _REGISTRATIONS.insert(0, registration)

    def unregister() -> None:
        _REGISTRATIONS[:] = [r for r in _REGISTRATIONS if r is not registration]

    return unregister


# --- checks of arguments ------------------------------------------------------------------


def _hooked_rotation(cfg: Any, hf_config: Any, d_head: int, seen: Mapping[str, Tensor]) -> Rotation:
    """The rotation of a bridge that hooks cosines and sines, in the layout the bridge reads.

    It rounds queries and keys of adjacent pairs to float32.

    Raises:
        IdentityError: the bridge reads them in another layout than the model's.
    """
    cos, sin = seen["rotary_cos"], seen["rotary_sin"]
    if getattr(cfg, "rotary_interleaved_cos_sin", False):
        return Rotation(cos, sin, adjacent=True, rounds=True)
    if getattr(cfg, "rotary_adjacent_pairs", False):
        half = cos.shape[-1] // 2
        cos, sin = (t[..., :half].repeat_interleave(2, -1) for t in (cos, sin))
        return Rotation(cos, sin, adjacent=True, rounds=True)
    rope = getattr(hf_config, "rope_parameters", None) or {}
    share = rope.get("partial_rotary_factor", getattr(hf_config, "rotary_pct", 1.0))
    if 2 * cos.shape[-1] == d_head and share == 1.0:  # gpt-oss: one column for each pair
        cos, sin = (torch.cat((t, t), -1) for t in (cos, sin))
    first, second = cos.tensor_split(2, -1)
    if not torch.equal(first, second):
        raise IdentityError(
            "This model's queries are not turned as its angles are laid out",
            expected="one angle for both coordinates of each pair, m and m + d_rotary/2",
            got="angles of another order, as for pairs of neighbours",
            fix="take a transformer-lens that knows this model's rotary positions: this one runs "
            "another model than the authors'",
        )
    return Rotation(cos, sin)


def whole_numbers(values: Any) -> tuple[int, ...] | None:
    """One whole number or several as a tuple; None if they are anything else."""
    try:
        numbers = tuple(values) if isinstance(values, Iterable) else (values,)
        if any(isinstance(n, (bool, str)) for n in numbers):
            return None
        return tuple(operator.index(n) for n in numbers)
    except TypeError:
        return None


def _indices(
    chosen: Layers, default: Iterable[int] | None, size: int, what: str
) -> tuple[int, ...]:
    if chosen is None:
        indices = tuple(range(size)) if default is None else tuple(default)
        if not indices:
            raise InvalidInputError(
                f"This model is too small for the default {what}s",
                expected=f"a default with at least one {what}",
                got=f"{size} {what}s in all",
                fix=f"say which, as in {what}s=[0]",
            )
        return indices
    indices = whole_numbers(chosen) or ()
    if not indices or any(not 0 <= i < size for i in indices) or len(set(indices)) != len(indices):
        raise InvalidInputError(
            f"Unknown {what} in {repr(chosen)[:80]}",
            expected=f"{what}s from 0 to {size - 1}, each at most once, and at least one",
            got=repr(chosen)[:80],
            fix=f"count {what}s from 0; None stands for the default",
        )
    return indices


@contextmanager
def _hooks_silenced(module: nn.Module) -> Iterator[None]:
    """Keep hook functions inside a module from firing, and put every one back."""
    points = [m for m in module.modules() if hasattr(m, "fwd_hooks") and hasattr(m, "add_hook")]
    saved = [(point, dict(point._forward_hooks)) for point in points]
    try:
        for point, _ in saved:
            point._forward_hooks.clear()
        yield
    finally:
        for point, hooks in saved:
            point._forward_hooks.update(hooks)


def _hook_point(model: Any, name: str) -> Any | None:
    get = getattr(model, "get_hook_point", None)  # the bridge also knows the legacy names
    return get(name) if get is not None else model.hook_dict.get(name)
