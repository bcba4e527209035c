"""Shapes are checked on every call in the tests; small random models and where to find more."""

from __future__ import annotations

from jaxtyping import install_import_hook

install_import_hook("sinkscope", "beartype.beartype")

import os  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import pytest  # noqa: E402
import torch  # noqa: E402

os.environ.setdefault("HF_HUB_OFFLINE", "1")
torch.set_num_threads(1)  # tiny models lose more to threads than they gain

from models import IDS, ONLY_HOOKED, shared_model  # noqa: E402

import sinkscope as ss  # noqa: E402

KINDS = ["bridge", pytest.param("hooked", marks=ONLY_HOOKED)]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """How a model is hooked: each test that takes this runs on both, where both exist."""
    return request.param


@pytest.fixture
def model(kind: str) -> Any:
    """A small random model in float64, hooked in either way; modules may have their own."""
    return shared_model(kind)


@pytest.fixture
def batch(model: Any) -> ss.TokenBatch:
    """Three prompts of eight tokens."""
    return ss.token_batch(model, IDS)


@pytest.fixture(scope="session")
def reference() -> Path:
    """The folder with the paper's own numbers."""
    path = Path(__file__).resolve().parents[2] / "shared" / "reference"
    if not path.is_dir():
        pytest.skip("no reference data beside the checkout")
    return path
