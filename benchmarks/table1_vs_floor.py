"""Table 1 and the whole reproduction against their floor: bare forward passes.

The floor of a ten-condition table is ten forward passes of the same model over the same
batches: transformers with eager attention, no hooks, no output head, and no layer after the last
one that the table reads. Beside it stand the bare
pass of TransformerLens' hooked model, which sinkscope runs on, and the loop that users write
today: one prompt and one condition at a time, with everything cached.
"""

from __future__ import annotations

import argparse
import copy
import warnings
from collections.abc import Callable
from functools import partial

import timing
import torch

import sinkscope as ss
from sinkscope.errors import NoEffectWarning
from sinkscope.experiments import table1
from sinkscope.model import model_view

N_CONDITIONS = len(ss.PAPER_CONDITIONS)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=300)
    parser.add_argument("--length", type=int, default=40)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--only", nargs="*", help="names of what to run beside the floor")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    warnings.simplefilter("ignore", NoEffectWarning)

    bare = timing.gpt2(arguments.layers, getattr(torch, arguments.dtype))
    hooked = ss.load_model(copy.deepcopy(bare))
    view = model_view(hooked)
    batch = ss.token_batch(view, timing.prompts(arguments.prompts, arguments.length))
    size = arguments.batch_size
    end = view.mid_or_all_layers[-1] + 1
    bare.transformer.h = bare.transformer.h[:end]

    @torch.inference_mode()
    def floor(batch: ss.TokenBatch) -> None:
        for _ in range(N_CONDITIONS):
            for chunk in batch.chunks(size):
                bare.transformer(chunk.ids, use_cache=False)

    def bridge(batch: ss.TokenBatch) -> None:
        with view.measuring():
            for _ in range(N_CONDITIONS):
                for chunk in batch.chunks(size):
                    view.forward(chunk, end)

    def cached_loop(batch: ss.TokenBatch) -> None:
        for ablation in ss.PAPER_CONDITIONS.values():
            for n in range(len(batch)):
                with ablation.applied(hooked):
                    _, cache = hooked.run_with_cache(batch.ids[n : n + 1])
                for layer in range(view.n_layers):
                    pattern = cache[f"blocks.{layer}.attn.hook_pattern"]
                    pattern[0, :, arguments.length // 2 :, 0].mean()

    works: dict[str, Callable[[ss.TokenBatch], object]] = {
        "floor, ten bare passes": floor,
        "hooked model, ten bare passes": bridge,
        "table1": lambda batch: table1.run(view, batch, batch_size=size),
        "reproduce": lambda batch: ss.reproduce(view, batch, batch_size=size),
        "loop with cache": cached_loop,
    }
    asked = [*works] if not arguments.only else ["floor, ten bare passes", *arguments.only]
    few = ss.token_batch(view, batch.ids[: min(size, 8)])
    times = timing.measure(
        {name: partial(works[name], batch) for name in asked},
        arguments.rounds,
        {name: partial(works[name], few) for name in asked},
    )
    timing.show(
        f"GPT-2's shape with {arguments.layers} layers, {arguments.dtype}, "
        f"{arguments.prompts} prompts of {arguments.length}, batches of {size}",
        times,
    )


if __name__ == "__main__":
    main()
