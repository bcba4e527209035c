"""How time grows with the number of prompts, and with their length beside the model's own.

Table 1 on random weights of a small GPT-2's shape. The number of prompts should not change the
time per token; the length may, as much as it does for ten bare forward passes: of transformers'
model, which is the floor, and of the hooked one, which computes its attention in its own steps.
Neither goes past the last layer's attention, of which the table reads the pattern.
"""

from __future__ import annotations

import argparse
import copy
import warnings
from collections.abc import Callable
from functools import partial

import timing
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import sinkscope as ss
from sinkscope.errors import NoEffectWarning
from sinkscope.experiments import table1
from sinkscope.model import model_view, stop


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, nargs="*", default=[100, 1_000, 10_000])
    parser.add_argument("--length", type=int, default=40, help="of those prompts")
    parser.add_argument("--lengths", type=int, nargs="*", default=[64, 128, 256, 512, 1024])
    parser.add_argument("--tokens", type=int, default=16_384, help="at each of these lengths")
    parser.add_argument("--batch-tokens", type=int, default=2_560)
    parser.add_argument("--rounds", type=int, default=2, help="at each of these lengths")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    warnings.simplefilter("ignore", NoEffectWarning)
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=arguments.layers,
        n_embd=arguments.width,
        n_head=max(1, arguments.width // 64),
        attn_implementation="eager",
    )
    bare = GPT2LMHeadModel(config).eval()
    view = model_view(ss.load_model(copy.deepcopy(bare)))
    bare.transformer.h[-1].mlp = torch.nn.Identity()
    last = ss.Site("pattern", view.n_layers - 1)

    def hooked(chunk: ss.TokenBatch) -> None:
        with view.hooks([(last, lambda tensor, hook: stop())]):
            view.forward(chunk, view.n_layers)

    def measure(n: int, length: int, rounds: int) -> None:
        batch = ss.token_batch(view, timing.prompts(n, length))
        size = max(1, arguments.batch_tokens // length)

        def ten_times(forward: Callable[[ss.TokenBatch], object], batch: ss.TokenBatch) -> None:
            with view.measuring(), torch.inference_mode():
                for _ in range(len(ss.PAPER_CONDITIONS)):
                    for chunk in batch.chunks(size):
                        forward(chunk)

        works: dict[str, Callable[[ss.TokenBatch], object]] = {
            "floor": partial(ten_times, lambda chunk: bare.transformer(chunk.ids, use_cache=False)),
            "hooked": partial(ten_times, hooked),
            "table1": lambda batch: table1.run(view, batch, batch_size=size),
        }
        few = batch.select(slice(0, min(n, 2)))
        times = timing.measure(
            {name: partial(work, batch) for name, work in works.items()},
            rounds,
            {name: partial(work, few) for name, work in works.items()},
        )
        scale = 1e6 / (n * length * len(ss.PAPER_CONDITIONS))
        cpu = "".join(f"{t['cpu'] * scale:9.1f}" for t in times.values())
        ratio = times["table1"]["cpu_ratio"]
        print(f"{n:9}{length:9}{cpu}{ratio:9.2f}", flush=True)

    print("CPU microseconds per token and condition")
    columns = ("prompts", "length", "floor", "hooked", "table 1", "/ floor")
    print("".join(f"{name:>9}" for name in columns))
    for n in arguments.prompts:
        measure(n, arguments.length, 1)
    for length in arguments.lengths:
        measure(arguments.tokens // length, length, arguments.rounds)


if __name__ == "__main__":
    main()
