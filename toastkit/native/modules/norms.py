"""Norms of the last axis."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from toastkit.native import operations
from toastkit.native.functions import Native


class Norm(Native):
    """An RMS norm; one without a weight, too."""

    def __call__(self: Any, x: mx.array) -> mx.array:
        return operations.rms_norm(x, self.get("weight"), self.eps)


class CentredNorm(Native):
    """A layer norm."""

    def __call__(self: Any, x: mx.array) -> mx.array:
        return operations.layer_norm(x, self.get("weight"), self.get("bias"), self.eps)
