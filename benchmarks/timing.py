"""How the benchmarks measure: ratios within one process, in both orders, medians of rounds."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

Work = Callable[[], Any]


def measure(
    works: Mapping[str, Work], rounds: int, warm_ups: Mapping[str, Work] | None = None
) -> dict[str, dict[str, float]]:
    """Time each work against the first; one warm-up, then rounds forwards and backwards.

    Args:
        works: what to time, by name.
        rounds: how often.
        warm_ups: smaller works that touch the same code; the works themselves if None.

    Returns:
        for each name the median seconds (wall, cpu) and the median over rounds of its ratio to
        the first in the same round. CPU time leaves out what others on the machine took.
    """
    for work in (works if warm_ups is None else warm_ups).values():
        work()
    wall: dict[str, list[float]] = {name: [] for name in works}
    cpu: dict[str, list[float]] = {name: [] for name in works}
    for n in range(rounds):
        for name in list(works)[:: -1 if n % 2 else 1]:
            wall_start, cpu_start = time.perf_counter(), time.process_time()
            works[name]()
            cpu[name].append(time.process_time() - cpu_start)
            wall[name].append(time.perf_counter() - wall_start)
    floor = next(iter(works))
    return {
        name: {
            "wall": statistics.median(wall[name]),
            "cpu": statistics.median(cpu[name]),
            "wall_ratio": _median_ratio(wall[name], wall[floor]),
            "cpu_ratio": _median_ratio(cpu[name], cpu[floor]),
        }
        for name in works
    }


def _median_ratio(times: list[float], floor: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(times, floor, strict=True))


def show(title: str, times: Mapping[str, Mapping[str, float]]) -> None:
    """Print a table of what `measure` gave."""
    print(f"{title} ({platform.machine()}, {torch.get_num_threads()} threads)")
    print(f"{'':34}{'wall s':>9}{'cpu s':>9}{'wall':>8}{'cpu':>8}  times the floor")
    for name, t in times.items():
        print(
            f"{name:34}{t['wall']:9.2f}{t['cpu']:9.2f}{t['wall_ratio']:8.3f}{t['cpu_ratio']:8.3f}"
        )


def gpt2(n_layers: int = 12, dtype: torch.dtype = torch.float32) -> GPT2LMHeadModel:
    """GPT-2 124M's shape with random weights and biases."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=n_layers, attn_implementation="eager")).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data += 0.02 * torch.randn_like(parameter)
    return model.to(dtype)


def prompts(n: int, length: int, seed: int = 0) -> torch.Tensor:
    """Random ids `[n length]`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 50257, (n, length), generator=generator)
