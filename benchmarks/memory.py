"""Peak memory beyond the model: prompts in growing numbers, and long prompts layer by layer.

Each measurement is a process of its own: the peak of its resident memory less what it had once
the model was loaded and had run on two tokens.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
from pathlib import Path

MIB = 2**20


def resident() -> int:
    """Bytes of resident memory now (Linux)."""
    pages = int(Path("/proc/self/statm").read_text("ascii").split()[1])
    return pages * resource.getpagesize()


def measure(work: str, n: int, length: int, layers: int) -> None:
    """Run one work and print its peak beyond the model, in MiB."""
    import timing

    import sinkscope as ss
    from sinkscope.experiments import delta, score_terms, table1
    from sinkscope.model import model_view

    view = model_view(ss.load_model(timing.gpt2(layers)))
    batch = ss.token_batch(view, timing.prompts(n, length))
    works = {
        "decompose": lambda: [
            ss.decompose_scores(view, batch, layers=layer).max_error for layer in range(layers)
        ],
        "score_terms": lambda: score_terms.run(view, batch, batch_size=1),
        "table1": lambda: table1.run(view, batch, batch_size=16),
        "delta": lambda: delta.run(view, batch, batch_size=16),
        "reproduce": lambda: ss.reproduce(view, batch, batch_size=16),
    }
    ss.sink_score(view, batch.select([0]), layers=0)
    before = resident()
    works[work]()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(f"{work}, {n} prompts of {length}, {layers} layers: {(peak - before) / MIB:.0f} MiB")


def main() -> None:
    """Measure what is named, or all, each in its own process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", nargs="*", metavar="WORK PROMPTS LENGTH LAYERS")
    arguments = parser.parse_args()
    if arguments.work:
        work, *sizes = arguments.work
        measure(work, *(int(size) for size in sizes))
        return
    for work in ("decompose", "score_terms"):
        subprocess.run([sys.executable, __file__, work, "1", "1024", "12"], check=True)
    for work in ("table1", "delta", "reproduce"):
        for n in (100, 1000, 10000):
            subprocess.run([sys.executable, __file__, work, str(n), "40", "2"], check=True)


if __name__ == "__main__":
    main()
