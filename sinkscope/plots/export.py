"""A figure as a file."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Literal

import plotly.graph_objects as go

from sinkscope.errors import InvalidInputError, WriteError
from sinkscope.plots._checks import require
from sinkscope.plots._style import HTML_CONFIG
from sinkscope.results import write_bytes, write_text

STATIC = ("png", "svg", "pdf")

# Runs apart from this process, since a browser that can't start may never come back.
_RENDER = """
import json, sys
import plotly.io
options = json.loads(sys.argv[1])
image = plotly.io.to_image(json.load(sys.stdin), validate=False, **options)
sys.stdout.buffer.write(image)
"""


def save_figure(
    figure: go.Figure,
    path: str | os.PathLike[str],
    *,
    plotlyjs: Literal["inline", "cdn"] = "inline",
    width: int | None = None,
    height: int | None = None,
    scale: float = 2.0,
    timeout: float = 120.0,
) -> Path:
    """Write a figure to a file: `.html` always, `.png`, `.svg` or `.pdf` with kaleido and Chrome.

    Args:
        figure: the figure.
        path: its ending says the format.
        plotlyjs: of HTML: "inline" works without a network (about 5 MB), "cdn" is small.
        width: of images, in pixels; the figure's own if None.
        height: of images, in pixels; the figure's own if None.
        scale: pixels of a PNG per pixel of the figure.
        timeout: seconds that an image may take.

    Returns:
        The path.

    Raises:
        InvalidInputError: not a figure, or an unknown ending or option.
        WriteError: the file can't be written; kaleido or Chrome is missing, fails, or takes
            longer than `timeout`.
    """
    figure = require(figure, go.Figure, "save_figure")
    target = Path(path)
    ending = target.suffix.lower().removeprefix(".")
    if ending not in ("html", *STATIC) or plotlyjs not in ("inline", "cdn"):
        raise InvalidInputError(
            "A figure can't be written like this",
            expected=f"a path that ends in .html, .{', .'.join(STATIC)}; plotlyjs inline or cdn",
            got=f"{target.name!r}, plotlyjs={plotlyjs!r}",
        )
    if ending == "html":
        write_text(
            target,
            figure.to_html(
                include_plotlyjs=True if plotlyjs == "inline" else "cdn",
                config=HTML_CONFIG,
                div_id="figure",  # not one drawn at random: the same figure, the same file
            ),
        )
    else:
        options = {"format": ending, "width": width, "height": height, "scale": scale}
        write_bytes(target, _image(figure, target, json.dumps(options), timeout))
    return target


def _image(figure: go.Figure, target: Path, options: str, timeout: float) -> bytes:
    fix = "pip install 'kaleido>=1', install Chrome or Chromium, or choose a path ending in .html"
    what = f"{str(target)!r} can't be drawn"
    if importlib.util.find_spec("kaleido") is None:
        raise WriteError(
            what, expected="the kaleido package and Chrome", got="no package kaleido", fix=fix
        )
    process = subprocess.Popen(
        [sys.executable, "-c", _RENDER, options],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)},
        start_new_session=True,
    )
    try:
        image, complaint = process.communicate(figure.to_json().encode("utf-8"), timeout=timeout)
    except subprocess.TimeoutExpired as error:
        raise WriteError(
            what,
            expected=f"an answer from kaleido and Chrome within {timeout:g} s",
            got="none",
            fix=fix,
        ) from error
    finally:
        _end(process)
    if process.returncode != 0 or not image:
        lines = [line.strip() for line in complaint.decode("utf-8", "replace").splitlines()]
        told = " ".join([line for line in lines if line][-6:])[-400:]
        raise WriteError(
            what,
            expected="an image from kaleido and Chrome",
            got=told or f"exit status {process.returncode}",
            fix=fix,
        )
    return image


def _end(process: subprocess.Popen[bytes]) -> None:
    """End what was started, and the browser with it where the system has process groups."""
    if process.poll() is not None:
        return
    if hasattr(os, "killpg"):
        os.killpg(process.pid, 9)
    else:
        process.kill()
    process.communicate()
