"""Train the demo model: a small GPT-2 with a known attention-sink circuit.

The circuit is planted at initialisation and then trained through, so the model is a known truth
to test measurements against. It is not evidence about models that were trained without a plant.

    python scripts/train_demo.py --out demo_model

Steps: read the Python standard library's own source text, train a byte-level BPE tokenizer on
it, build a GPT-2 with `plant_circuit` applied to its initial weights, train it on next-token
prediction, and write a directory that `AutoModelForCausalLM` and `AutoTokenizer` load offline.
The same Python version, package versions, seed and thread count give the same text and recipe.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import platform
import sysconfig
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path

import safetensors.torch
import tokenizers
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from tqdm import trange
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

SEPARATOR = "<|endoftext|>"
SKIPPED_DIRECTORIES = {
    "site-packages",
    "dist-packages",
    "__pycache__",
    # Not shipped by every distribution of Python, so leaving them out keeps the text the same.
    "test",
    "tests",
    "idle_test",
    # Tables of code points, not text.
    "encodings",
}


@dataclass(frozen=True)
class Plant:
    """Options of the planted circuit; see `plant_circuit` for what each one sets.

    Args:
        coordinates: residual coordinates that become massive at position 0.
        signs: sign of each coordinate's value at position 0.
        height: size of the values that the layer-0 neuron writes there.
        key_gain: size of the key rows at the coordinates, in units of |b_Q| = 1.
        neuron: index of the layer-0 MLP neuron that detects position 0.
    """

    coordinates: tuple[int, ...] = (17, 58, 101)
    signs: tuple[int, ...] = (1, -1, 1)
    height: float = 12.0
    key_gain: float = 1.2
    neuron: int = 0


@dataclass(frozen=True)
class Optimisation:
    """How a model is trained, whatever it is trained on."""

    batch_size: int = 128
    learning_rate: float = 2e-3
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.02
    warmup_steps: int = 100
    gradient_clip: float = 1.0


@dataclass(frozen=True)
class Recipe(Optimisation):
    """Everything that decides the trained weights, apart from the text and the seed."""

    plant: Plant = field(default_factory=Plant)
    d_model: int = 128
    n_layers: int = 6
    n_heads: int = 4
    n_ctx: int = 64
    vocab_size: int = 1024


# Models without a plant, on another task, are in train_variants.py beside this file.
RECIPES: dict[str, Recipe] = {"demo": Recipe()}


def source_files(root: Path) -> list[Path]:
    """The .py files under `root` outside SKIPPED_DIRECTORIES, sorted by relative POSIX path."""
    files = (
        path
        for path in root.rglob("*.py")
        if not SKIPPED_DIRECTORIES.intersection(path.relative_to(root).parts)
    )
    return sorted(files, key=lambda path: path.relative_to(root).as_posix())


def split_files(files: list[Path], every: int = 20) -> tuple[list[Path], list[Path]]:
    """Hold out one file of each `every`; returns (training files, validation files)."""
    held_out = files[every // 2 :: every]
    return [path for path in files if path not in set(held_out)], held_out


def read_texts(files: list[Path]) -> list[str]:
    return [path.read_text(encoding="utf-8", errors="ignore") for path in files]


def train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE tokenizer: every string encodes, and nothing is added to what is encoded."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[SEPARATOR],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode_texts(tokenizer: Tokenizer, texts: list[str]) -> Tensor:
    """All texts as one stream of token ids [n_tokens], a separator after each text."""
    separator = tokenizer.token_to_id(SEPARATOR)
    encodings = tokenizer.encode_batch(texts, add_special_tokens=False)
    return torch.tensor([i for encoding in encodings for i in (*encoding.ids, separator)])


def unit_direction(d_model: int, zero_at: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """A random unit vector [d_model], zero at the given coordinates and with mean zero.

    With mean zero and length sqrt(d_model) it is a fixed point of LayerNorm at gain 1, so a neuron
    that reads it sees the same value with and without the norm.
    """
    kept = torch.ones(d_model)
    kept[list(zero_at)] = 0
    vector = torch.randn(d_model, generator=generator) * kept
    vector = (vector - vector.sum() / kept.sum()) * kept
    return vector / vector.norm()


@torch.no_grad()
def plant_circuit(model: GPT2LMHeadModel, plant: Plant, generator: torch.Generator) -> None:
    """Write the sink circuit into the model's weights, in place.

    With D = d_model, u a random unit direction that is zero at `plant.coordinates`, c a planted
    coordinate and s_c its sign:

    - position: p_0 = sqrt(D) u;
    - neuron: input weight u, input bias -sqrt(D)/2, output s_c height / (sqrt(D)/2) at c and zero
      elsewhere, so at position 0 it writes s_c height and at other positions it stays shut;
    - every head of layers 1 and up: b_Q is a random unit vector, the row of W_K
      [d_model, d_head] at c is s_c key_gain b_Q, and the row of W_V at c is zero.

    Then b_Q . (W_K n_0) is positive for every query, whatever its token: the sink.
    """
    blocks = model.transformer.h
    coordinates = list(plant.coordinates)
    signs = torch.tensor(plant.signs, dtype=torch.float32)
    direction = unit_direction(model.config.n_embd, plant.coordinates, generator)
    plant_position(model.transformer.wpe.weight, direction)
    plant_neuron(blocks[0].mlp, plant.neuron, direction, coordinates, plant.height * signs)
    for block in blocks[1:]:
        plant_heads(block.attn, model.config.n_head, coordinates, plant.key_gain * signs, generator)


def plant_position(positions: Tensor, direction: Tensor) -> None:
    """p_0 = sqrt(d_model) direction; positions [n_ctx, d_model], direction [d_model]."""
    positions[0] = math.sqrt(len(direction)) * direction


def plant_neuron(
    mlp: torch.nn.Module, neuron: int, direction: Tensor, coordinates: list[int], values: Tensor
) -> None:
    """Make one neuron map sqrt(d_model) direction to `values` [coordinate] and most else to 0."""
    half = math.sqrt(len(direction)) / 2
    mlp.c_fc.weight[:, neuron] = direction
    mlp.c_fc.bias[neuron] = -half
    mlp.c_proj.weight[neuron] = 0
    mlp.c_proj.weight[neuron, coordinates] = values / half


def plant_heads(
    attention: torch.nn.Module,
    n_heads: int,
    coordinates: list[int],
    gains: Tensor,
    generator: torch.Generator,
) -> None:
    """Per head a random unit b_Q, W_K rows gains[c] b_Q and W_V rows 0 at the coordinates."""
    d_model = attention.c_attn.weight.shape[0]
    # c_attn holds query, key and value side by side: weight [d_model, 3 d_model].
    query_bias = attention.c_attn.bias[:d_model].view(n_heads, -1)
    weight = attention.c_attn.weight.view(d_model, 3, n_heads, -1)
    query_bias.normal_(generator=generator)
    query_bias /= query_bias.norm(dim=-1, keepdim=True)
    weight[coordinates, 1] = gains[:, None, None] * query_bias
    weight[coordinates, 2] = 0


def build_model(recipe: Recipe, separator: int, generator: torch.Generator) -> GPT2LMHeadModel:
    """The untrained model of the recipe, with its plant."""
    config = GPT2Config(
        vocab_size=recipe.vocab_size,
        n_positions=recipe.n_ctx,
        n_embd=recipe.d_model,
        n_layer=recipe.n_layers,
        n_head=recipe.n_heads,
        activation_function="gelu_pytorch_tanh",
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        resid_pdrop=0.0,
        bos_token_id=separator,
        eos_token_id=separator,
        # SDPA's backward pass is slower than the plain one on a CPU.
        attn_implementation="eager",
    )
    model = GPT2LMHeadModel(config)
    plant_circuit(model, recipe.plant, generator)
    return model


def random_windows(
    stream: Tensor, n_windows: int, length: int, generator: torch.Generator
) -> Tensor:
    """`n_windows` windows [window, length] at random starts: position 0 is an ordinary token."""
    starts = torch.randint(len(stream) - length, (n_windows,), generator=generator)
    return stream[starts[:, None] + torch.arange(length)]


def next_token_loss(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """Mean cross-entropy in nats of tokens[:, 1:] given what precedes; tokens [batch, pos]."""
    logits = model(tokens, use_cache=False).logits[:, :-1]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


@torch.no_grad()
def validation_loss(
    model: GPT2LMHeadModel, stream: Tensor, length: int, n_windows: int = 2048
) -> float:
    """Mean loss in float32 over `n_windows` evenly spaced windows of the held-out stream."""
    starts = torch.linspace(0, len(stream) - length, n_windows).long()
    windows = stream[starts[:, None] + torch.arange(length)]
    losses = [next_token_loss(model, batch).item() for batch in windows.split(128)]
    return sum(losses) / len(losses)


def learning_rate_factor(step: int, warmup: int, steps: int) -> float:
    """Linear warm-up to 1, then a cosine down to 0 at `steps`."""
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def autocast(precision: str) -> AbstractContextManager:
    return torch.autocast("cpu", dtype=torch.bfloat16) if precision == "bf16" else nullcontext()


def train(
    model: PreTrainedModel,
    draw: Callable[[], Tensor],
    *,
    recipe: Optimisation,
    steps: int,
    precision: str,
) -> Iterator[tuple[int, float]]:
    """Train in place on what `draw` gives, ids [batch, pos]; yields (steps done, training loss)."""
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=recipe.learning_rate,
        betas=recipe.betas,
        weight_decay=recipe.weight_decay,
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: learning_rate_factor(step, recipe.warmup_steps, steps)
    )
    for step in (progress := trange(1, steps + 1, mininterval=5)):
        tokens = draw()
        with autocast(precision):
            loss = next_token_loss(model, tokens)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.gradient_clip)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        value = loss.item()
        progress.set_postfix(loss=f"{value:.3f}", refresh=False)
        yield step, value


@torch.no_grad()
def round_weights(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Round every parameter to `dtype` in place, so that what is measured is what is shipped."""
    for parameter in model.parameters():
        parameter.copy_(parameter.to(dtype))


def save_model(model: PreTrainedModel, directory: Path, dtype: torch.dtype) -> None:
    """Write model.safetensors in `dtype` and config.json; loading gives float32 weights."""
    state = {
        name: tensor.to(dtype).contiguous()
        for name, tensor in model.state_dict().items()
        if name not in (model.all_tied_weights_keys or {})  # tied to the token embedding
    }
    safetensors.torch.save_file(state, directory / "model.safetensors", {"format": "pt"})
    model.config.architectures = [type(model).__name__]
    model.config.dtype = "float32"
    model.config.save_pretrained(directory)


def save_tokenizer(
    tokenizer: Tokenizer,
    directory: Path,
    n_ctx: int,
    *,
    bos: str = SEPARATOR,
    unknown: str = SEPARATOR,
) -> None:
    """Write tokenizer.json and tokenizer_config.json, for `AutoTokenizer` of any recent version."""
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": bos,
        "eos_token": bos,
        "pad_token": bos,
        "unk_token": unknown,
        "model_max_length": n_ctx,
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def text_facts(train_texts: list[str], held_out: list[Path], root: Path) -> dict:
    """What the text was: sizes, the held-out files, and a hash to compare a rerun by."""
    joined = "\0".join(train_texts).encode()
    return {
        "source": "the .py files of the Python standard library",
        "skipped_directories": sorted(SKIPPED_DIRECTORIES),
        "training_files": len(train_texts),
        "training_bytes": len(joined),
        "training_sha256": hashlib.sha256(joined).hexdigest(),
        "validation_files": [path.relative_to(root).as_posix() for path in held_out],
    }


def versions() -> dict[str, str]:
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "tokenizers": tokenizers.__version__,
        "safetensors": safetensors.__version__,
    }


def run(args: argparse.Namespace) -> dict:
    """Train as `args` say, write the model directory, and return what training.json holds."""
    recipe = RECIPES[args.recipe]
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    generator = torch.Generator().manual_seed(args.seed)
    weight_dtype = {"fp16": torch.float16, "fp32": torch.float32}[args.weights]

    root = Path(sysconfig.get_paths()["stdlib"])
    train_files, held_out = split_files(source_files(root))
    train_texts = read_texts(train_files)
    tokenizer = train_tokenizer(train_texts, recipe.vocab_size)
    train_stream = encode_texts(tokenizer, train_texts)
    validation_stream = encode_texts(tokenizer, read_texts(held_out))

    model = build_model(recipe, tokenizer.token_to_id(SEPARATOR), generator)
    curve, started = [], time.perf_counter()
    training = train(
        model,
        lambda: random_windows(train_stream, recipe.batch_size, recipe.n_ctx, generator),
        recipe=recipe,
        steps=args.steps,
        precision=args.precision,
    )
    for step, loss in training:
        if step % args.validate_every == 0 or step == args.steps:
            held_out_loss = validation_loss(model, validation_stream, recipe.n_ctx)
            curve.append({"step": step, "training": loss, "validation": held_out_loss})
    minutes = (time.perf_counter() - started) / 60

    round_weights(model, weight_dtype)
    settings = asdict(recipe)
    facts = {
        "recipe": args.recipe,
        "seed": args.seed,
        "steps": args.steps,
        "tokens": args.steps * recipe.batch_size * recipe.n_ctx,
        "final_validation_loss": validation_loss(model, validation_stream, recipe.n_ctx),
        "losses": curve,
        "plant": settings.pop("plant"),
        "settings": settings,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "precision": args.precision,
        "weights": args.weights,
        "threads": args.threads,
        "minutes": round(minutes, 1),
        "stream_tokens": {"training": len(train_stream), "validation": len(validation_stream)},
        "text": text_facts(train_texts, held_out, root),
        "versions": versions(),
    }
    args.out.mkdir(parents=True, exist_ok=True)
    save_model(model, args.out, weight_dtype)
    save_tokenizer(tokenizer, args.out, recipe.n_ctx)
    (args.out / "training.json").write_text(json.dumps(facts, indent=2) + "\n")
    return facts


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--out", type=Path, required=True, help="directory to write")
    parser.add_argument("--recipe", choices=sorted(RECIPES), default="demo")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--precision",
        choices=["bf16", "fp32"],
        default="fp32",
        help="bf16 autocast is faster only on a CPU with bf16 arithmetic, and far slower on others",
    )
    parser.add_argument("--weights", choices=["fp16", "fp32"], default="fp16", help="stored as")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--validate-every", type=int, default=500)
    return parser.parse_args()


def main() -> None:
    facts = run(parse_arguments())
    print(f"final validation loss {facts['final_validation_loss']:.4f} nats per token")


if __name__ == "__main__":
    main()
