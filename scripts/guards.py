"""The guards of the 39 situations, and how to take each one out; see `guards_out.py`."""

from __future__ import annotations

from dataclasses import dataclass

Edit = tuple[str, str, str]
"""File under the package, a text that is there exactly once, and what replaces it."""


@dataclass(frozen=True)
class Removal:
    """How to take out one guard.

    Attributes:
        number: of the situation.
        what: the guard.
        edits: what takes it out; several where one guard stands behind another.
        test: the test that must fail; the only one of its number if None.
    """

    number: int
    what: str
    edits: tuple[Edit, ...]
    test: str | None = None


def removal(number: int, what: str, *edits: Edit, test: str | None = None) -> Removal:
    """A removal, shorter to write."""
    return Removal(number, what, edits, test)


REMOVALS = (
    # --- tokens and positions -------------------------------------------------------------
    removal(
        1,
        "the mask goes along to the model",
        (
            "model.py",
            "mask = None if bool(batch.mask.all()) else batch.mask.to(self.device)",
            "mask = None",
        ),
    ),
    removal(
        1,
        "position ids follow from the mask",
        (
            "model.py",
            'kwargs["attention_mask"] = mask.long()',
            'kwargs["attention_mask"] = mask.long()\n'
            '            kwargs["position_ids"] = torch.arange(ids.shape[1]).expand_as(ids)',
        ),
    ),
    removal(
        2,
        "the first position is no pad",
        (
            "metrics.py",
            "return mask.long().argmax(dim=1)",
            "return torch.zeros_like(mask[:, 0], dtype=torch.long)",
        ),
    ),
    removal(
        2,
        "the first position is not found by a token id",
        (
            "prompts.py",
            "return first_positions(self.mask)",
            "return (self.ids != 0).long().argmax(dim=1)",
        ),
    ),
    removal(
        2,
        "T is the row's own length",
        (
            "metrics.py",
            "late = position_ids(mask) >= (lengths // 2)[:, None]",
            "late = torch.arange(mask.shape[1]).expand_as(mask) >= mask.shape[1] // 2",
        ),
    ),
    removal(
        3,
        "texts are encoded without special tokens",
        ("prompts.py", "add_special_tokens=False", "add_special_tokens=True"),
    ),
    removal(
        3,
        "rows tell whether they start with a BOS",
        (
            "prompts.py",
            "bos=tuple(bos_id is not None and row[0] == bos_id for row in rows),",
            "bos=(False,) * len(rows),",
        ),
    ),
    removal(
        4,
        "the warning of a second BOS",
        ("prompts.py", "if row and row[0] == bos_id:", "if False:"),
    ),
    removal(
        5,
        "an EOS is not taken for a BOS",
        (
            "prompts.py",
            'if bos_id is None or ("bos_token" in declared and declared["bos_token"] is None):',
            "if bos_id is None:",
        ),
    ),
    removal(
        5,
        "no BOS without a BOS",
        (
            "prompts.py",
            "    if bos_id is None:\n",
            "    if bos_id is None:\n        return row\n    if False:\n",
        ),
    ),
    removal(
        6,
        "ids are sliced, not encoded again",
        (
            "prompts.py",
            "rows = _cut(rows, length, padding)",
            "rows = _cut(rows, length, padding)\n"
            "        rows = [encode(view, view.tokenizer.decode(row)) for row in rows]",
        ),
    ),
    removal(
        7,
        "padding is no query",
        (
            "metrics.py",
            "return mask[:, None, :] & mask[:, :, None]",
            "return mask[:, None, :].expand(-1, mask.shape[1], -1)",
        ),
    ),
    removal(
        7,
        "padding is no key",
        (
            "metrics.py",
            "return mask[:, None, :] & mask[:, :, None]",
            "return mask[:, :, None].expand(-1, -1, mask.shape[1])",
        ),
    ),
    removal(
        7,
        "NaN at padding in Delta",
        ("scores.py", "        return delta.masked_fill(masked, NAN)", "        return delta"),
    ),
    removal(
        7,
        "Delta's minimum is over tokens",
        ("scores.py", "delta.masked_fill(masked, math.inf).amin(", "delta.amin("),
    ),
    removal(
        7,
        "NaN at padding in norms of values",
        (
            "measures.py",
            "return norms.masked_fill(~chunk.mask[:, None, :].to(norms.device), NAN)",
            "return norms",
        ),
    ),
    removal(
        7,
        "NaN at padding in norms of the residual stream",
        (
            "measures.py",
            "return norms.masked_fill(~chunk.mask.to(norms.device), NAN)",
            "return norms",
        ),
    ),
    removal(
        7,
        "NaN at padding in the missing mass",
        (
            "measures.py",
            "return (1 - total).masked_fill(~mask[:, None, :], NAN)",
            "return 1 - total",
        ),
    ),
    removal(
        8,
        "the length of prompts is checked",
        ("prompts.py", "if len(row) > view.n_ctx:", "if False:"),
    ),
    removal(
        8,
        "the length of batches is checked",
        ("capture.py", " or int(batch.lengths.max()) > view.n_ctx:", ":"),
    ),
    removal(
        8,
        "every check of lengths",
        ("prompts.py", "if len(row) > view.n_ctx:", "if False:"),
        ("capture.py", " or int(batch.lengths.max()) > view.n_ctx:", ":"),
    ),
    removal(
        9,
        "one token has no sink",
        ("metrics.py", "if bool((lengths < 2).any()):", "if False:"),
    ),
    removal(
        9,
        "no prompt is an error",
        ("prompts.py", "if not isinstance(given, Sequence) or not given:", "if False:"),
    ),
    removal(
        9,
        "no token is an error",
        ("prompts.py", "not isinstance(values, str) and len(values) > 0", "True"),
        ("prompts.py", "ids.ndim != 2 or ids.numel() == 0 or ", "ids.ndim != 2 or "),
        ("prompts.py", "        if not row:\n", "        if False:\n"),
    ),
    removal(
        10,
        "an edit of positions is along the axis of positions",
        (
            "ablations.py",
            "chosen[rows, self.columns(tensor, position)] = True",
            "chosen[self.columns(tensor, position).clamp_max(len(chosen) - 1)] = True",
        ),
    ),
    removal(
        10,
        "a position is replaced along the axis of positions",
        (
            "ablations.py",
            "out[index, target] = pos_embed[index, source]",
            "out[target[:1] % len(out)] = pos_embed[source[:1] % len(out)]",
        ),
    ),
    removal(
        10,
        "positions count from each row's first token",
        (
            "ablations.py",
            "return cls(RowPositions(mask))",
            "return cls(RowPositions(None))",
        ),
    ),
    removal(
        11,
        "the sink's position is looked for",
        (
            "metrics.py",
            "column = received.nan_to_num(nan=-1.0).argmax(-1)",
            "column = first_positions(mask)[:, None].expand(-1, received.shape[1])",
        ),
    ),
    # --- weights --------------------------------------------------------------------------
    removal(
        12,
        "processed weights are refused",
        ("model.py", "        if self.parts.processed:\n", "        if False:\n"),
    ),
    removal(
        12,
        "folding is recognised from the weights",
        (
            "parts.py",
            'folded = normalization.endswith("Pre") or told',
            "folded = flagged = False",
        ),
    ),
    removal(
        12,
        "centring is recognised from the weights",
        ("parts.py", 'done.append("centred")', "flagged = False"),
    ),
    removal(
        12,
        "the EPE is of raw weights",
        ("epe.py", 'view.require_raw_weights("The effective positional encoding")', "pass"),
    ),
    removal(
        12,
        "the raw query bias is of raw weights",
        ("epe.py", 'view.require_raw_weights("The raw query bias")', "pass"),
    ),
    removal(
        12,
        "the ablation of the query bias is on raw weights",
        (
            "ablations.py",
            "view.require_raw_weights(f\"{'Scaling' if factor else 'Zeroing'} the query bias\")",
            "pass",
        ),
    ),
    removal(
        13,
        "terms are compared with the model's own scores and patterns",
        (
            "scores.py",
            "largest_error(errors, self._tolerance, layer, what, _FIX)",
            "float(errors.max())",
        ),
        (
            "scores.py",
            "largest_error(errors, tolerance, layer, what, _FIX)",
            "float(errors.max())",
        ),
    ),
    removal(
        14,
        "W_Q comes first",
        ("model.py", 'return self._projection(layer, "W_Q")', "return self.W_K(layer)"),
    ),
    removal(
        14,
        "b_K comes second",
        (
            "model.py",
            'return self._per_query_head(self._projection(layer, "b_K"))',
            "return self.b_Q(layer)",
        ),
    ),
    removal(
        14,
        "weights are (in, out)",
        (
            "model.py",
            'return self._per_query_head(self._projection(layer, "W_K"))',
            'W_K = self._projection(layer, "W_K")\n'
            "        joint = W_K.transpose(0, 1).reshape(self.d_model, -1)\n"
            "        return joint.T.reshape(self.d_model, self.n_heads, -1).transpose(0, 1)",
        ),
    ),
    removal(
        15,
        "the table's last n_ctx rows",
        (
            "model.py",
            "return table[table.shape[0] - self.n_ctx :]",
            "return table[: self.n_ctx]",
        ),
    ),
    removal(
        16,
        "no query bias is an error",
        (
            "model.py",
            "        if not self.parts.query_bias:\n            raise",
            "        if False:\n            raise",
        ),
    ),
    removal(
        16,
        "whether there is a query bias is asked of the model",
        ("parts.py", 'projections and _has_bias(model, "q", "b_Q")', "True"),
    ),
    removal(
        16,
        "no query bias is not a bias of zeros",
        (
            "model.py",
            '        self.require_query_bias()\n        return self._projection(layer, "b_Q")',
            "        if not self.parts.query_bias:\n"
            "            return torch.zeros(self.n_heads, self.d_head)\n"
            '        return self._projection(layer, "b_Q")',
        ),
    ),
    removal(
        16,
        "no position table is an error",
        (
            "model.py",
            "        if not self.parts.learned_positions:\n            raise",
            "        if False:\n            raise",
        ),
    ),
    removal(
        16,
        "no position table is not a table of zeros",
        (
            "model.py",
            "        self.require_learned_positions()\n        table =",
            "        if not self.parts.learned_positions:\n"
            "            return torch.zeros(self.n_ctx, self.d_model)\n        table =",
        ),
    ),
    removal(
        17,
        "a token is nulled by a hook, not in W_E",
        (
            "ablations.py",
            'return [_zero(Site("embed"), context.rows, positions_of(view, (self.position,)))]',
            "def in_weights(embed: Tensor, hook: Any) -> Tensor:\n"
            "            for vector in embed[:, self.position]:\n"
            "                view.embedding.data[(view.embedding == vector).all(-1)] = 0\n"
            "            out = embed.clone()\n"
            "            out[:, self.position] = 0\n"
            "            return out\n\n"
            '        return [Edit(Site("embed"), in_weights)]',
        ),
    ),
    # --- hooks and ablations --------------------------------------------------------------
    removal(
        18,
        "a user's function gets a copy",
        ("ablations.py", "own = tensor.clone()", "own = tensor"),
    ),
    removal(
        18,
        "positions are replaced in a copy",
        ("ablations.py", "out = pos_embed.clone()", "out = pos_embed"),
    ),
    removal(
        18,
        "chosen positions are zeroed in a copy",
        ("ablations.py", "return tensor.masked_fill(", "return tensor.masked_fill_("),
    ),
    removal(
        18,
        "all positions are zeroed in a copy",
        ("ablations.py", "return torch.zeros_like(tensor)", "return tensor.zero_()"),
    ),
    removal(
        19,
        "hooks go after an exception too",
        (
            "model.py",
            "for point, handle in reversed(added):",
            'failed = isinstance(__import__("sys").exc_info()[1], Exception)\n'
            "            for point, handle in () if failed else reversed(added):",
        ),
    ),
    removal(
        20,
        "its own hooks and no other are removed",
        (
            "model.py",
            "                handle.hook.remove()\n"
            "                point.fwd_hooks[:] = [h for h in point.fwd_hooks if h is not handle]",
            "                point.remove_hooks()",
        ),
    ),
    removal(
        20,
        "the model is not reset",
        (
            "model.py",
            "                handle.hook.remove()\n"
            "                point.fwd_hooks[:] = [h for h in point.fwd_hooks if h is not handle]",
            "                self.model.reset_hooks()",
        ),
    ),
    removal(
        20,
        "silenced hooks come back",
        ("model.py", "point._forward_hooks.update(hooks)", "pass"),
    ),
    removal(
        21,
        "edits after the fact are refused",
        (
            "ablations.py",
            "if site is not None and not edit.only_looks and not view.scores_are_live():",
            "if False:",
        ),
    ),
    removal(
        21,
        "edits that never took place are an error",
        (
            "capture.py",
            "if not witness.fired and isinstance(site, Site) and (site.layer or 0) <= self._last:",
            "if False:",
        ),
    ),
    removal(
        21,
        "edits without effect are warned of",
        (
            "capture.py",
            "if ran and not witness.changed and not witness.edit.only_looks:",
            "if False:",
        ),
    ),
    removal(
        21,
        "edits by name that never took place are warned of",
        (
            "capture.py",
            "ran = witness.fired or not isinstance(site, Site)",
            "ran = witness.fired",
        ),
    ),
    removal(
        22,
        "z is in front of the output projection",
        ("sites.py", '"z": "blocks.{layer}.attn.hook_z"', '"z": "blocks.{layer}.hook_attn_out"'),
    ),
    removal(
        22,
        "one head's query bias",
        (
            "ablations.py",
            "_query_bias_edit(view, context, layer, factor, list(view.heads(heads)), at)",
            "_query_bias_edit(view, context, layer, factor, list(range(view.n_heads)), at)",
        ),
    ),
    removal(
        22,
        "one head's key columns",
        (
            "ablations.py",
            "chosen = range(W_K.shape[0]) if heads is None else view.heads(heads)",
            "chosen = range(W_K.shape[0])",
        ),
    ),
    removal(
        23,
        "an MLP is skipped where it writes, and resid_mid is not the rest of the block",
        (
            "ablations.py",
            '            _zero(Site("mlp_out", layer), context.rows, positions)\n'
            "            for layer in view.layers(self.layers)\n",
            "            edit\n"
            "            for layer in view.layers(self.layers)\n"
            "            for seen in [{}]\n"
            "            for edit in (\n"
            '                Edit(Site("resid_mid", layer), lambda x, hook, s=seen: '
            "s.update(mid=x), True),\n"
            '                Edit(Site("resid_post", layer), lambda x, hook, s=seen: s["mid"]),\n'
            "            )\n",
        ),
        test="test_23_no_sum_of_parts_stands_for_the_residual_stream",
    ),
    removal(
        23,
        "fidelity reads the block's output, not the MLP's",
        ("fidelity.py", 'return [Site("resid_post", 0)]', 'return [Site("mlp_out", 0)]'),
        (
            "fidelity.py",
            'super().__init__("resid_post", (0,), self._fidelity)',
            'super().__init__("mlp_out", (0,), self._fidelity)',
        ),
        test="test_23_block_fidelity_reads_the_blocks_own_output",
    ),
    # --- attention maths ------------------------------------------------------------------
    removal(
        24,
        "the scale is the model's own",
        (
            "model.py",
            "        if hf_config is None:\n            divisor",
            "        return self.d_head**-0.5\n        if hf_config is None:\n            divisor",
        ),
        test="test_24_scores_have_the_models_own_scale_or_are_refused",
    ),
    removal(
        24,
        "the scale's layer index",
        ("model.py", "return scale / (layer + 1) if inverse else scale", "return scale"),
        test="test_24_scores_have_the_models_own_scale_or_are_refused",
    ),
    removal(
        24,
        "GPT-Neo does not scale",
        (
            "model.py",
            'default = 1.0 if hf_config.model_type == "gpt_neo" else self.d_head**-0.5',
            "default = self.d_head**-0.5",
        ),
        test="test_24_scores_have_the_models_own_scale_or_are_refused",
    ),
    removal(
        24,
        "the scale of the attention's own module",
        ("model.py", "return default if own is None else float(own)", "return default"),
        test="test_24_scores_have_the_models_own_scale_or_are_refused",
    ),
    removal(
        24,
        "patterns that are not softmax(scale q.k + mask) are refused",
        ("guard.py", "self._check_scores(site.layer, tensor, visible, seen, chunk)", "pass"),
        test="test_24_scores_have_the_models_own_scale_or_are_refused",
    ),
    removal(
        24,
        "a wrong scale is refused on every run",
        ("guard.py", "self._check_scores(site.layer, tensor, visible, seen, chunk)", "pass"),
        test="test_24_a_wrong_scale_is_an_error_with_layer_head_and_size",
    ),
    removal(
        24,
        "a wrong scale is refused by the sum of terms",
        (
            "scores.py",
            "largest_error(errors, self._tolerance, layer, what, _FIX)",
            "float(errors.max())",
        ),
        (
            "scores.py",
            "largest_error(errors, tolerance, layer, what, _FIX)",
            "float(errors.max())",
        ),
        test="test_24_a_wrong_scale_is_an_error_with_layer_head_and_size",
    ),
    removal(
        25,
        "measures are taken in eval mode",
        ("model.py", "                    module.training = False", "                    pass"),
    ),
    removal(
        25,
        "train flags come back",
        ("model.py", "                module.training = training", "                pass"),
    ),
    removal(
        26,
        "attention is eager",
        ("loading.py", 'hf_model.set_attn_implementation("eager")', "pass"),
    ),
    removal(
        26,
        "a pattern that is never shown is an error",
        (
            "capture.py",
            "_refuse_unseen(self._view, self.readers, waiting - {LOGITS})",
            "pass",
        ),
    ),
    removal(
        27,
        "what is seen follows from positions",
        (
            "model.py",
            "return causal_visibility(mask, self.window(layer))",
            "return full_visibility(mask)",
        ),
    ),
    removal(
        27,
        "scores are compared where a key is seen",
        (
            "attention.py",
            "found.append(torch.where(block.of(visible), error, 0).amax((0, 2, 3)))",
            "found.append(error.amax((0, 2, 3)))",
        ),
    ),
    removal(
        28,
        "queries at padding are left out of what must not be seen",
        (
            "measures.py",
            "stray = (total - seen).masked_fill(~tokens[:, None], 0)",
            "stray = total - seen",
        ),
        (
            "measures.py",
            "hidden = (mask[:, :, None] & ~visible)[:, None]",
            "hidden = (~visible)[:, None]",
        ),
        test="test_28_rows_without_a_key_are_left_out_and_nan_at_tokens_is_an_error",
    ),
    removal(
        28,
        "patterns are compared where a key is seen",
        (
            "attention.py",
            "found.append(torch.where(block.of(visible), error, 0).amax((0, 2, 3)))",
            "found.append(error.amax((0, 2, 3)))",
        ),
        test="test_28_rows_without_a_key_are_left_out_and_nan_at_tokens_is_an_error",
    ),
    removal(
        28,
        "NaN in attention is looked for",
        ("measures.py", "    if count:\n", "    if False:\n"),
        (
            "measures.py",
            "        _refuse_stray_attention(pattern, mask, visible, layer)\n        return",
            "        return",
        ),
        ("attention.py", "    if not worst <= tolerance:", "    if worst > tolerance:"),
        test="test_28_rows_without_a_key_are_left_out_and_nan_at_tokens_is_an_error",
    ),
    removal(
        28,
        "cosines by each vector's own norm",
        (
            "metrics.py",
            "(a / a.norm(dim=-1, keepdim=True) * (b / b.norm(dim=-1, keepdim=True))).sum(-1)",
            "(a * b).sum(-1) / (a.norm(dim=-1) * b.norm(dim=-1))",
        ),
        test="test_28_cosines_and_rules_do_not_leave_half_precision_for_infinity",
    ),
    removal(
        28,
        "rules work in float32",
        ("massive.py", "        vector = vector.float()\n", "        pass\n"),
        test="test_28_cosines_and_rules_do_not_leave_half_precision_for_infinity",
    ),
    removal(
        29,
        "sliding windows are known",
        (
            "model.py",
            "return causal_visibility(mask, self.window(layer))",
            "return causal_visibility(mask)",
        ),
    ),
    removal(
        29,
        "the sink score is over queries that see the key",
        ("metrics.py", "queries = late & visible[rows, :, first]", "queries = late"),
    ),
    removal(
        29,
        "received attention is over queries that see the key",
        ("metrics.py", "seen = visible[:, None]", "seen = causal_visibility(mask)[:, None]"),
    ),
    removal(
        29,
        "NaN where no query sees the key",
        ("metrics.py", "keep.sum(-1).to(values.dtype)", "keep.sum(-1).clamp_min(1)"),
    ),
    removal(
        30,
        "soft caps are part of the score",
        ("model.py", "soft_cap=self.parts.soft_cap,", "soft_cap=None,"),
    ),
    removal(
        30,
        "norms on queries are part of the score",
        ("model.py", "query_gain=gains[0],", "query_gain=None,"),
    ),
    removal(
        30,
        "norms on keys are part of the score",
        ("model.py", "key_gain=gains[1],", "key_gain=None,"),
    ),
    removal(
        30,
        "the soft cap is a term, and the guard does not say it first",
        ("model.py", "soft_cap=self.parts.soft_cap,", "soft_cap=None,"),
        ("attention.py", "    if not worst <= tolerance:", "    if False:"),
    ),
    removal(
        31,
        "shared keys are repeated",
        (
            "model.py",
            "return weight.repeat_interleave(self.n_heads // weight.shape[0], dim=0)",
            "return weight",
        ),
    ),
    removal(
        31,
        "neighbours share keys",
        (
            "model.py",
            "return weight.repeat_interleave(self.n_heads // weight.shape[0], dim=0)",
            "return torch.cat([weight] * (self.n_heads // weight.shape[0]))",
        ),
    ),
    removal(
        31,
        "neighbours share keys in the guard",
        (
            "guard.py",
            "k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)",
            "k = torch.cat([k] * (q.shape[1] // k.shape[1]), dim=1)",
        ),
    ),
    removal(
        31,
        "an edit of one head's shared key is refused",
        ("ablations.py", "if heads is not None and W_K.shape[0] != view.n_heads:", "if False:"),
    ),
    removal(
        32,
        "ALiBi is part of the score",
        ("model.py", "position_bias=self._alibi(layer, mask),", "position_bias=None,"),
        test="test_32_alibi_is_no_term_of_its_own_and_sink_logits_take_their_mass",
    ),
    removal(
        32,
        "sink logits are part of the softmax",
        ("model.py", "sink_logits=self.sink_logits(layer),", "sink_logits=None,"),
        test="test_32_alibi_is_no_term_of_its_own_and_sink_logits_take_their_mass",
    ),
    removal(
        32,
        "rows beside sink logits may sum to less",
        (
            "guard.py",
            "off = total - 1 if loses_mass else (total - 1).abs()",
            "off = (total - 1).abs()",
        ),
        test="test_32_alibi_is_no_term_of_its_own_and_sink_logits_take_their_mass",
    ),
    removal(
        32,
        "the missing mass is reported",
        (
            "measures.py",
            "return (1 - total).masked_fill(~mask[:, None, :], NAN)",
            "return (0 * total).masked_fill(~mask[:, None, :], NAN)",
        ),
        test="test_32_alibi_is_no_term_of_its_own_and_sink_logits_take_their_mass",
    ),
    removal(
        32,
        "row sums are checked",
        ("guard.py", "self._check_sums(site.layer, tensor, visible)", "pass"),
        test="test_32_rows_that_lose_mass_for_no_reason_are_an_error",
    ),
    removal(
        32,
        "rows below 1 are checked where nothing takes attention",
        (
            "guard.py",
            "off = total - 1 if loses_mass else (total - 1).abs()",
            "off = total - 1",
        ),
        test="test_32_rows_that_lose_mass_for_no_reason_are_an_error",
    ),
    removal(
        33,
        "cached generation is refused",
        ("ablations.py", "if width == 1 and max(self._widths) > 1:", "if False:"),
    ),
    removal(
        34,
        "resid_post is in front of the final norm",
        (
            "sites.py",
            '"resid_post": "blocks.{layer}.hook_resid_post"',
            '"resid_post": "ln_final.hook_out"',
        ),
    ),
    # --- running --------------------------------------------------------------------------
    removal(
        35,
        "float32 unless asked",
        (
            "loading.py",
            'dtype=place.dtype,\n            attn_implementation="eager",',
            'dtype="auto",\n            attn_implementation="eager",',
        ),
    ),
    removal(
        35,
        "the dtype is recorded",
        (
            "reproduction.py",
            '"dtype": str(view.dtype).removeprefix("torch."),',
            '"dtype": "float32",',
        ),
    ),
    removal(
        35,
        "the device is recorded",
        ("reproduction.py", '"device": str(view.device),', '"device": "",'),
    ),
    removal(
        36,
        "no gradients",
        ("model.py", "            with torch.no_grad():", "            with torch.enable_grad():"),
    ),
    removal(
        36,
        "a stop after the last layer read",
        (
            "capture.py",
            "end = None if LOGITS in waiting else self._last + 1",
            "end = None",
        ),
    ),
    removal(
        36,
        "a stop where all has been read",
        ("capture.py", "if not waiting and (self._ran or not self._looks_on()):", "if False:"),
    ),
    removal(
        36,
        "one chunk at a time",
        (
            "capture.py",
            "for number, chunk in enumerate(batch.chunks(batch_size)):",
            "for number, chunk in enumerate([batch]):",
        ),
    ),
    removal(
        36,
        "reductions are kept, not patterns",
        (
            "capture.py",
            "self._now[str(site.layer)] = self._reduce(tensor, chunk, site.layer)",
            "self._now[str(site.layer)] = self._reduce(tensor, chunk, site.layer)\n"
            '            self._now[f"whole.{site.layer}"] = tensor',
        ),
    ),
    removal(
        37,
        "columns are drawn from a generator of their own",
        ("ablations.py", "rng = random.Random(self.seed)", "rng = random"),
    ),
    removal(
        37,
        "columns are drawn without setting Python's seed",
        (
            "ablations.py",
            "rng = random.Random(self.seed)",
            "random.seed(self.seed)\n        rng = random",
        ),
    ),
    removal(
        37,
        "columns are drawn without setting torch's seed",
        (
            "ablations.py",
            "rng = random.Random(self.seed)",
            "torch.manual_seed(self.seed)\n        rng = random.Random(self.seed)",
        ),
    ),
    removal(
        37,
        "the paper's prompts are shuffled without setting Python's seed",
        (
            "prompts.py",
            "rng = random.Random(PAPER_SEED)",
            "random.seed(PAPER_SEED)\n    rng = random",
        ),
    ),
    removal(
        38,
        "an image has a time limit",
        (
            "plots/export.py",
            'process.communicate(figure.to_json().encode("utf-8"), timeout=timeout)',
            'process.communicate(figure.to_json().encode("utf-8"))',
        ),
        test="test_38_an_image_without_a_browser_ends_and_html_needs_none",
    ),
    removal(
        38,
        "what drew an image is ended",
        ("plots/export.py", "        _end(process)\n", "        pass\n"),
        test="test_38_an_image_without_a_browser_ends_and_html_needs_none",
    ),
    removal(
        38,
        "the browser is ended too",
        (
            "plots/export.py",
            "        os.killpg(process.pid, 9)\n",
            "        process.kill()\n        return\n",
        ),
        test="test_38_an_image_without_a_browser_ends_and_html_needs_none",
    ),
    removal(
        38,
        "plotly.js is inline or linked by choice",
        (
            "plots/export.py",
            'include_plotlyjs=True if plotlyjs == "inline" else "cdn"',
            "include_plotlyjs=True",
        ),
        test="test_38_an_image_without_a_browser_ends_and_html_needs_none",
    ),
    removal(
        38,
        "pages choose a few layers",
        (
            "plots/attention.py",
            "chosen(_spread(maps.layers) if layers is None else layers, maps",
            "chosen(maps.layers if layers is None else layers, maps",
        ),
        test="test_38_attention_pages_are_capped",
    ),
    removal(
        38,
        "pages choose a few heads",
        (
            "plots/attention.py",
            "heads = _strongest(maps.patterns[0][rows_of])",
            'heads = ["mean", *range(n_heads)]',
        ),
        test="test_38_attention_pages_are_capped",
    ),
    removal(
        39,
        "pickles are refused with the reason",
        (
            "loading.py",
            "if any(map(has_file, _PICKLES)) and not any(map(has_file, _SAFETENSORS)):",
            "if False:",
        ),
    ),
    removal(
        39,
        "pickles are refused at all",
        (
            "loading.py",
            "if any(map(has_file, _PICKLES)) and not any(map(has_file, _SAFETENSORS)):",
            "if False:",
        ),
        (
            "loading.py",
            "use_safetensors=True if place.safetensors else None,",
            "use_safetensors=None,",
        ),
    ),
    removal(
        39,
        "prompts are read as plain files",
        (
            "prompts.py",
            '        text = path.read_text("utf-8-sig")\n',
            "        from datasets import load_dataset\n\n"
            '        rows = load_dataset("text", data_files=str(path))["train"]\n'
            '        text = "\\n".join(rows["text"])\n',
        ),
    ),
)
