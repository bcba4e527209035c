"""Shape aliases. The axis names are the ones TransformerLens users know.

Annotations are checked at run time only where a test switches jaxtyping's import hook on.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

from jaxtyping import Bool, Float, Int
from torch import Tensor

Ids: TypeAlias = Int[Tensor, "batch pos"]
Mask: TypeAlias = Bool[Tensor, "batch pos"]
Rows: TypeAlias = Int[Tensor, " batch"]

Pattern: TypeAlias = Float[Tensor, "batch head query key"]
LayerPatterns: TypeAlias = Float[Tensor, "batch layer head query key"]
PerHead: TypeAlias = Float[Tensor, "batch layer head"]
PerHeadInt: TypeAlias = Int[Tensor, "batch layer head"]
PerKey: TypeAlias = Float[Tensor, "batch layer head pos"]
Residual: TypeAlias = Float[Tensor, "batch pos d_model"]
Heads: TypeAlias = Float[Tensor, "batch pos head d_head"]
Vector: TypeAlias = Float[Tensor, " d_model"]

Layers: TypeAlias = int | Iterable[int] | None
"""A layer, several layers, or None for the default that the function states."""
