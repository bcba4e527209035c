"""How time grows with the number of prompts, and with their length beside the model's own.

Table 1 on random weights of a small GPT-2's shape. The number of prompts should not change the
time per token; the length may, as much as it does for ten bare forward passes: of transformers'
model, which is the floor, and of the hooked one, which computes its attention in its own steps.
"""

from __future__ import annotations

import argparse
import copy
import time
import warnings
from collections.abc import Callable

import timing
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import sinkscope as ss
from sinkscope.errors import NoEffectWarning
from sinkscope.experiments import table1
from sinkscope.model import model_view


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, nargs="*", default=[100, 1_000, 10_000])
    parser.add_argument("--length", type=int, default=40, help="of those prompts")
    parser.add_argument("--lengths", type=int, nargs="*", default=[64, 128, 256, 512, 1024])
    parser.add_argument("--tokens", type=int, default=16_384, help="at each of these lengths")
    parser.add_argument("--batch-tokens", type=int, default=2_560)
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
        n_head=arguments.width // 32,
        attn_implementation="eager",
    )
    bare = GPT2LMHeadModel(config).eval()
    view = model_view(ss.load_model(copy.deepcopy(bare)))
    bare.transformer.h = bare.transformer.h[: view.mid_or_all_layers[-1] + 1]

    def seconds(n: int, length: int) -> list[float]:
        batch = ss.token_batch(view, timing.prompts(n, length))
        size = max(1, arguments.batch_tokens // length)

        def ten_times(forward: Callable[[ss.TokenBatch], object]) -> None:
            with view.measuring(), torch.inference_mode():
                for _ in range(len(ss.PAPER_CONDITIONS)):
                    for chunk in batch.chunks(size):
                        forward(chunk)

        took = []
        for run in (
            lambda: ten_times(lambda chunk: bare.transformer(chunk.ids, use_cache=False)),
            lambda: ten_times(lambda chunk: view.forward(chunk, len(bare.transformer.h))),
            lambda: table1.run(view, batch, batch_size=size),
        ):
            begin = time.process_time()
            run()
            took.append(time.process_time() - begin)
        return took

    seconds(8, arguments.length)
    print("CPU microseconds per token and condition")
    columns = ("prompts", "length", "floor", "hooked", "table 1", "/ floor", "/ hooked")
    print("".join(f"{name:>9}" for name in columns))
    sizes = [(n, arguments.length) for n in arguments.prompts]
    sizes += [(arguments.tokens // length, length) for length in arguments.lengths]
    for n, length in sizes:
        floor, hooked, ours = seconds(n, length)
        scale = 1e6 / (n * length * len(ss.PAPER_CONDITIONS))
        print(
            f"{n:9}{length:9}{floor * scale:9.1f}{hooked * scale:9.1f}{ours * scale:9.1f}"
            f"{ours / floor:9.2f}{ours / hooked:9.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
