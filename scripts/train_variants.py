"""Train the variants of the demo model: grown and planted sinks, each without one part.

All variants learn one task from one recipe and one seed. They differ in the part that is left out,
and in whether a circuit was planted at initialisation or the model was left to grow one:

    python scripts/train_variants.py --variant grown --out grown

The task, after Guo et al. 2024 (bigram-backcopy): a BOS token, then words of which each depends on
the one before it, but for those after a trigger word, which repeat what stood before the trigger.
A head that copies has nothing to do at all other words.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from train_demo import (
    Optimisation,
    Plant,
    plant_circuit,
    round_weights,
    save_model,
    save_tokenizer,
    train,
    versions,
)
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    PreTrainedModel,
)

BOS, UNKNOWN = "<bos>", "<unk>"
N_SPECIAL = 2
SINK = 0.3
"""Mean attention to position 0 above which a head is said to have a sink (Gu et al. 2025)."""


@dataclass(frozen=True)
class Variant:
    """What one variant has and lacks.

    Args:
        missing: what it lacks, in words; None if it has all.
        held_at_zero: parts of the weights that are zero from the start and stay so, see
            `hold_at_zero`.
        rotary: GPT-NeoX with rotary positions in place of GPT-2 with learned ones.
        bos: the BOS token at position 0 of every sequence; without it a random word is there.
        planted: the demo model's circuit is in the initial weights, but for what is held at zero.
    """

    missing: str | None = None
    held_at_zero: tuple[str, ...] = ()
    rotary: bool = False
    bos: bool = True
    planted: bool = False


QUERY_BIAS = "b_Q"
VARIANTS = {
    "grown": Variant(),
    "grown-no-query-bias": Variant("the query bias b_Q", (QUERY_BIAS,)),
    "grown-no-effective-query-bias": Variant(
        "the query bias b_Q, and the bias of LN1 that stands in for it", (QUERY_BIAS, ".ln_1.bias")
    ),
    "grown-rotary": Variant("learned positions; rotary ones in their place", rotary=True),
    "grown-no-first-mlp": Variant("the MLP of layer 0", (".h.0.mlp.",)),
    "grown-no-bos": Variant("a fixed token at position 0", bos=False),
    # Without a BOS, as the demo model, so that a sink on the token can't be taken for the plant's.
    "planted": Variant(planted=True, bos=False),
    "planted-no-query-bias": Variant("the query bias b_Q", (QUERY_BIAS,), planted=True, bos=False),
    "planted-no-first-mlp": Variant("the MLP of layer 0", (".h.0.mlp.",), planted=True, bos=False),
}


@dataclass(frozen=True)
class Recipe(Optimisation):
    """What all variants share.

    Args:
        plant: what the planted variants start from.
        n_words: different words of the task.
        n_triggers: how many of them are triggers, see `copying_task`.
        sharpness: spread of the transition table's logits; 0 would make all words alike.
    """

    d_model: int = 64
    n_layers: int = 3
    n_heads: int = 4
    n_ctx: int = 64
    batch_size: int = 32
    learning_rate: float = 4e-3
    plant: Plant = field(default_factory=lambda: Plant(coordinates=(9, 29, 50)))
    n_words: int = 64
    n_triggers: int = 8
    sharpness: float = 2.0


def transition_table(recipe: Recipe) -> Tensor:
    """Chances [word, next word] of the words that are no triggers; the same for every seed."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(recipe.n_words, recipe.n_words, generator=generator)
    return (recipe.sharpness * logits).softmax(-1)


def copying_task(
    n_rows: int, recipe: Recipe, *, bos: bool, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Sequences of the task.

    After a trigger, one of the first `n_triggers` words, comes the word that stood before the
    trigger; after any other word one that is drawn from that word's row of the transition table.

    Returns:
        ids [row, pos], and copied [row, pos]: true where a token repeats the one before a trigger.
    """
    words = torch.randint(recipe.n_words, (n_rows, recipe.n_ctx), generator=generator)
    copied = torch.zeros(n_rows, recipe.n_ctx, dtype=torch.bool)
    table = transition_table(recipe)
    # Nothing is copied from position 0: where there is a BOS, it is the only one of its row.
    for position in range(2, recipe.n_ctx):
        last = words[:, position - 1]
        drawn = torch.multinomial(table[last], 1, generator=generator)[:, 0]
        if position > 2:
            copied[:, position] = last < recipe.n_triggers
        words[:, position] = torch.where(copied[:, position], words[:, position - 2], drawn)
    ids = words + N_SPECIAL
    if bos:
        ids[:, 0] = 0
    return ids, copied


def build_tokenizer(n_words: int) -> Tokenizer:
    """Words w0, w1, ... with spaces between them; anything else is unknown."""
    words = (BOS, UNKNOWN, *(f"w{n}" for n in range(n_words)))
    tokenizer = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=UNKNOWN)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([BOS, UNKNOWN])
    return tokenizer


def build_model(recipe: Recipe, variant: Variant, generator: torch.Generator) -> PreTrainedModel:
    """The untrained model, with its plant, and then with what the variant lacks at zero."""
    vocab_size = N_SPECIAL + recipe.n_words
    # SDPA's backward pass is slower than the plain one on a CPU.
    shared = {"bos_token_id": 0, "eos_token_id": 0, "attn_implementation": "eager"}
    model: PreTrainedModel
    if variant.rotary:
        model = GPTNeoXForCausalLM(
            GPTNeoXConfig(
                vocab_size=vocab_size,
                hidden_size=recipe.d_model,
                num_hidden_layers=recipe.n_layers,
                num_attention_heads=recipe.n_heads,
                intermediate_size=4 * recipe.d_model,
                max_position_embeddings=recipe.n_ctx,
                hidden_act="gelu_pytorch_tanh",
                rope_parameters={
                    "rope_type": "default",
                    "rope_theta": 10000.0,
                    "partial_rotary_factor": 1.0,
                },
                use_parallel_residual=False,
                tie_word_embeddings=True,
                **shared,
            )
        )
    else:
        model = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=vocab_size,
                n_positions=recipe.n_ctx,
                n_embd=recipe.d_model,
                n_layer=recipe.n_layers,
                n_head=recipe.n_heads,
                activation_function="gelu_pytorch_tanh",
                embd_pdrop=0.0,
                attn_pdrop=0.0,
                resid_pdrop=0.0,
                **shared,
            )
        )
        if variant.planted:
            plant_circuit(model, recipe.plant, generator)
    for part in variant.held_at_zero:
        hold_at_zero(model, part)
    return model


@torch.no_grad()
def hold_at_zero(model: PreTrainedModel, part: str) -> None:
    """Set a part of a GPT-2's weights to zero, and its gradient whenever there is one.

    AdamW then leaves it there: there is no momentum, and zero decays to zero.

    Args:
        model: the model.
        part: QUERY_BIAS, or what the names of the parameters have in common.
    """
    found = 0
    for name, parameter in model.named_parameters():
        keep = torch.ones_like(parameter)
        if part == QUERY_BIAS and name.endswith("attn.c_attn.bias"):
            keep[: len(keep) // 3] = 0  # query, key and value side by side
        elif part in name:
            keep[:] = 0
        else:
            continue
        found += 1
        parameter.mul_(keep)
        parameter.register_hook(keep.mul)
    if not found:
        raise ValueError(f"no parameter of this model is a part of {part!r}")


@torch.no_grad()
def look(model: PreTrainedModel, ids: Tensor, copied: Tensor) -> dict:
    """Held-out loss where tokens can be copied, and each head's attention to position 0.

    The attention is the mean over rows and queries of the second half, as in the sink score.
    """
    output = model(ids, use_cache=False, output_attentions=True)
    losses = torch.nn.functional.cross_entropy(
        output.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="none"
    )
    late = ids.shape[1] // 2
    heads = [layer[:, :, late:, 0].mean((0, 2)).tolist() for layer in output.attentions]
    return {
        "loss_on_copies": round(losses[copied[:, 1:].flatten()].mean().item(), 4),
        "attention_to_first": [[round(value, 4) for value in layer] for layer in heads],
    }


def first_step_with_a_sink(curve: list[dict]) -> int | None:
    for entry in curve:
        if max(map(max, entry["attention_to_first"])) >= SINK:
            return entry["step"]
    return None


def save_prompts(ids: Tensor, tokenizer: Tokenizer, directory: Path) -> None:
    """Write prompts.jsonl: held-out sequences as text, with the BOS token in the text."""
    words = {i: word for word, i in tokenizer.get_vocab().items()}
    lines = [
        json.dumps({"corpus": "copying", "text": " ".join(words[i] for i in row)})
        for row in ids.tolist()
    ]
    (directory / "prompts.jsonl").write_text("\n".join(lines) + "\n")


def run(
    name: str,
    out: Path,
    *,
    steps: int,
    seed: int = 0,
    recipe: Recipe | None = None,
    look_every: int = 25,
    report: Callable[[dict], None] = lambda entry: None,
) -> dict:
    """Train one variant, write its directory, and return what training.json holds."""
    recipe = Recipe() if recipe is None else recipe
    variant = VARIANTS[name]
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    # Same rows for every variant, but for what is at position 0; a stream of its own.
    held_out = copying_task(
        48, recipe, bos=variant.bos, generator=torch.Generator().manual_seed(seed + 1)
    )
    model = build_model(recipe, variant, generator)
    curve, started = [{"step": 0, **look(model, *held_out)}], time.perf_counter()
    training = train(
        model,
        lambda: copying_task(recipe.batch_size, recipe, bos=variant.bos, generator=generator)[0],
        recipe=recipe,
        steps=steps,
        precision="fp32",
    )
    for step, loss in training:
        if step % look_every == 0 or step == steps:
            curve.append({"step": step, "training_loss": round(loss, 4), **look(model, *held_out)})
            report(curve[-1])
    minutes = (time.perf_counter() - started) / 60
    round_weights(model, torch.float16)
    settings = asdict(recipe)
    plant = settings.pop("plant")
    facts = {
        "variant": name,
        "planted": variant.planted,
        "missing": variant.missing,
        "held_at_zero": list(variant.held_at_zero),
        "fixed_bos": variant.bos,
        "architecture": type(model).__name__,
        "task": "bigram-backcopy: after a trigger word, the word that stood before it",
        "seed": seed,
        "steps": steps,
        "tokens": steps * recipe.batch_size * recipe.n_ctx,
        "plant": plant if variant.planted else None,
        "settings": settings,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "first_step_with_a_sink": first_step_with_a_sink(curve),
        "final_loss_on_copies": look(model, *held_out)["loss_on_copies"],
        "curve": curve,
        "minutes": round(minutes, 1),
        "versions": versions(),
    }
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer(recipe.n_words)
    save_model(model, out, torch.float16)
    save_tokenizer(tokenizer, out, recipe.n_ctx, bos=BOS, unknown=UNKNOWN)
    save_prompts(held_out[0], tokenizer, out)
    (out / "training.json").write_text(dumps(facts) + "\n")
    return facts


def dumps(facts: dict) -> str:
    """JSON with one line for each entry of the curve."""
    curve = ",\n".join(f"    {json.dumps(entry)}" for entry in facts["curve"])
    return json.dumps({**facts, "curve": "CURVE"}, indent=2).replace('"CURVE"', f"[\n{curve}\n  ]")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--variant", choices=sorted(VARIANTS), required=True)
    parser.add_argument("--out", type=Path, required=True, help="directory to write")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    facts = run(
        args.variant,
        args.out,
        steps=args.steps,
        seed=args.seed,
        report=lambda entry: print(json.dumps(entry), flush=True),
    )
    print(f"first step with a sink: {facts['first_step_with_a_sink']}")


if __name__ == "__main__":
    main()
