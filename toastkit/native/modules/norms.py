"""RMS norms and layer norms."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from toastkit.native import operations
from toastkit.native.functions import Native


class Norm(Native):
    """An RMS norm, with or without a weight."""

    def __call__(self: Any, x: mx.array) -> mx.array:
        return operations.rms_norm(x, self.get("weight"), self.eps)


class LayerNorm(Native):
    """A layer norm."""

    def __call__(self: Any, x: mx.array) -> mx.array:
        return operations.layer_norm(x, self.get("weight"), self.get("bias"), self.eps)
