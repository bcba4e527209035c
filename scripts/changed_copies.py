"""Run tests on changed copies of the package, each in a fork that has torch imported already."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "sinkscope"


@dataclass(frozen=True)
class Job:
    """Some tests on one changed copy.

    Attributes:
        changes: file under the package -> its whole new text.
        tests: files or test ids under `tests/`.
        options: of pytest, beside the usual ones.
        plugins: of pytest, in the fork.
    """

    changes: Mapping[str, str]
    tests: Sequence[str]
    options: Sequence[str] = ()
    plugins: Sequence[object] = ()


@dataclass(frozen=True)
class Outcome:
    """How a job ended: pytest's exit code (None if the time ran out) and what it wrote."""

    code: int | None
    log: str
    seconds: float

    @property
    def failed(self) -> list[str]:
        """The summary's lines on tests that failed or broke."""
        return [line for line in self.log.splitlines() if line.startswith(("FAILED", "ERROR"))]


def preload() -> None:
    """What the tests import and no change touches: forks then have it already."""
    import warnings

    warnings.simplefilter("ignore")
    import beartype  # noqa: F401
    import hypothesis  # noqa: F401
    import jaxtyping  # noqa: F401
    import pandas  # noqa: F401
    import plotly.graph_objects  # noqa: F401
    import pytest  # noqa: F401
    import torch
    import transformer_lens.model_bridge  # noqa: F401
    import transformers
    from transformers import AutoModelForCausalLM, GPT2LMHeadModel  # noqa: F401

    with suppress(ImportError):
        from transformer_lens import HookedTransformer  # noqa: F401
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()


def run(jobs: Sequence[Job], at_once: int, timeout: float) -> Iterator[tuple[int, Outcome]]:
    """Run jobs, some at a time; each one's number and outcome, in the order in which they end."""
    waiting = list(enumerate(jobs))
    running: dict[int, tuple[int, float, Path]] = {}
    with tempfile.TemporaryDirectory() as folder:
        while waiting or running:
            while waiting and len(running) < at_once:
                number, job = waiting.pop(0)
                log = Path(folder) / f"{number}.log"
                running[_start(job, log)] = (number, time.monotonic(), log)
            time.sleep(0.05)
            for child, (number, began, log) in list(running.items()):
                done, status = os.waitpid(child, os.WNOHANG)
                late = time.monotonic() - began > timeout
                if not done and not late:
                    continue
                if not done:
                    os.killpg(child, signal.SIGKILL)
                    os.waitpid(child, 0)
                code = None if not done else os.waitstatus_to_exitcode(status)
                text = log.read_text("utf-8", "replace")
                seconds = round(time.monotonic() - began, 1)
                del running[child]
                log.unlink(missing_ok=True)
                yield number, Outcome(code, text, seconds)


def _start(job: Job, log: Path) -> int:
    """Fork a child that runs a job; gives its id."""
    child = os.fork()
    if child:
        return child
    code = 3
    try:
        os.setsid()
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        place = Path(tempfile.mkdtemp(dir=log.parent))
        shutil.copytree(PACKAGE, place / "sinkscope", ignore=shutil.ignore_patterns("__pycache__"))
        for file, text in job.changes.items():
            (place / "sinkscope" / file).write_text(text, "utf-8")
        sys.dont_write_bytecode = True
        sys.path.insert(0, str(place))
        os.environ["PYTHONPATH"] = str(place)
        os.environ.setdefault("HYPOTHESIS_CASES", "60")
        os.chdir(ROOT)
        import pytest

        tests = [str(ROOT / "tests" / name) for name in job.tests]
        options = ["-q", "-n0", "-p", "no:cacheprovider", "--no-header", "--tb=line"]
        # Plugins of pytest that `preload` has imported already are no news.
        options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
        arguments = [*options, *job.options, *dict.fromkeys(tests)]
        code = int(pytest.main(arguments, plugins=list(job.plugins)))
        shutil.rmtree(place, ignore_errors=True)
    except BaseException as error:
        print(f"{type(error).__name__}: {error}")
    finally:
        sys.stdout.flush()
        os._exit(code)
