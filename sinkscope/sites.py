"""The places in a model where sinkscope reads or edits, and the only code that spells hook names.

A `Site` is a place by meaning (`q` of layer 3). A `SiteMap` says how one model spells it.
TransformerBridge and HookedTransformer agree on all names but one: what enters W_Q is at
`attn.hook_in` on the bridge, while HookedTransformer only has `ln1.hook_normalized`, which
lies before gain and bias; `ModelView.resolve` puts these on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from sinkscope.errors import InvalidInputError, NotApplicableError

MODEL_KINDS = ("embed", "pos_embed", "logits")
LAYER_KINDS = (
    "resid_pre",
    "resid_mid",
    "resid_post",
    "ln1",
    "attn_in",
    "q",
    "k",
    "v",
    "q_normed",
    "k_normed",
    "rotary_cos",
    "rotary_sin",
    "z",
    "attn_scores",
    "pattern",
    "attn_out",
    "mlp_out",
)


@dataclass(frozen=True, order=True)
class Site:
    """One place in a model: a kind, and a layer where the kind has one.

    Kinds: `embed`, `pos_embed` `[batch pos d_model]`; per layer `resid_pre`, `resid_mid`,
    `resid_post`, `ln1` (what the first norm gives), `attn_in` (what enters W_Q, W_K, W_V: the
    same, but for models whose norms lie behind the attention), `attn_out`, `mlp_out`
    `[batch pos d_model]`; `q`, `k`, `v` (with their biases), `z` `[batch pos head d_head]`;
    `q_normed`, `k_normed` where queries and keys have norms of their own (the model's own
    layout); `rotary_cos`, `rotary_sin` `[batch|1 pos d_rotary]`; `attn_scores`, `pattern`
    `[batch head query key]`. `logits` `[batch pos d_vocab]` is what the model gives back: no
    hook, so it can be read, not edited.
    """

    kind: str
    layer: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.kind, str) or self.kind not in MODEL_KINDS + LAYER_KINDS:
            raise InvalidInputError(
                "Unknown site",
                expected=", ".join(MODEL_KINDS + LAYER_KINDS),
                got=repr(self.kind),
                fix="use one of these kinds, or pass a hook name as a string",
            )
        fits = isinstance(self.layer, int) != (self.kind in MODEL_KINDS)
        if not fits or not isinstance(self.layer, int | None):
            raise InvalidInputError(
                f"Site {self.kind!r} and layer {self.layer!r} do not fit",
                expected="a layer for every kind but " + " and ".join(MODEL_KINDS),
                got=f"layer={self.layer!r}",
                fix="give the layer, as in Site('q', 3)",
            )

    def __str__(self) -> str:
        return self.kind if self.layer is None else f"{self.kind} of layer {self.layer}"


_COMMON = {
    "embed": "hook_embed",
    "pos_embed": "hook_pos_embed",
    "resid_pre": "blocks.{layer}.hook_resid_pre",
    "resid_mid": "blocks.{layer}.hook_resid_mid",
    "resid_post": "blocks.{layer}.hook_resid_post",
    "q": "blocks.{layer}.attn.hook_q",
    "k": "blocks.{layer}.attn.hook_k",
    "v": "blocks.{layer}.attn.hook_v",
    "q_normed": "blocks.{layer}.attn.hook_q_normed",
    "k_normed": "blocks.{layer}.attn.hook_k_normed",
    "rotary_cos": "blocks.{layer}.attn.hook_cos",
    "rotary_sin": "blocks.{layer}.attn.hook_sin",
    "z": "blocks.{layer}.attn.hook_z",
    "attn_scores": "blocks.{layer}.attn.hook_attn_scores",
    "pattern": "blocks.{layer}.attn.hook_pattern",
    "attn_out": "blocks.{layer}.hook_attn_out",
    "mlp_out": "blocks.{layer}.hook_mlp_out",
}
_LN1 = "blocks.{layer}.ln1.hook_out"
_LN1_BEFORE_GAIN = "blocks.{layer}.ln1.hook_normalized"
_ATTN_IN = "blocks.{layer}.attn.hook_in"
_EMBED = "embed.hook_out"
"""The token embedding alone; `hook_embed` of a bridge lies behind a norm where there is one."""


@dataclass(frozen=True)
class SiteMap:
    """How one model spells its sites.

    Attributes:
        names: kind -> hook name with `{layer}` in it.
        attn_in_before_gain: the hook of `attn_in` lies before the normalisation's gain and bias.
    """

    names: Mapping[str, str] = field(default_factory=dict)
    attn_in_before_gain: bool = False

    def hook_name(self, site: Site) -> str:
        """The hook name of `site`, e.g. `blocks.3.attn.hook_q`.

        Raises:
            NotApplicableError: the model has no such place.
        """
        template = self.names.get(site.kind)
        if template is None:
            raise NotApplicableError(
                f"This model has no hook for {site}",
                expected=f"a hook of kind {site.kind!r}",
                got=f"kinds {', '.join(sorted(self.names))}",
                fix="use a measure or ablation that does not need this place",
            )
        return template.format(layer=site.layer)


def site_map(has_hook: Callable[[str], bool]) -> SiteMap:
    """The map for a model of which only the question "is there a hook of this name" is known.

    Args:
        has_hook: tells whether the model has a hook of a given name.
    """
    names = {kind: name for kind, name in _COMMON.items() if has_hook(name.format(layer=0))}
    before_gain = not has_hook(_LN1.format(layer=0)) and has_hook(_LN1_BEFORE_GAIN.format(layer=0))
    if before_gain:
        names["ln1"] = names["attn_in"] = _LN1_BEFORE_GAIN
    elif has_hook(_LN1.format(layer=0)):
        names["ln1"] = names["attn_in"] = _LN1
    if has_hook(_ATTN_IN.format(layer=0)):
        names["attn_in"] = _ATTN_IN
    if has_hook(_EMBED):
        names["embed"] = _EMBED
    return SiteMap(names, before_gain)
