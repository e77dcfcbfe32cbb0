"""RoPE modules: they rotate queries and keys, and say how."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from toastkit.native import operations
from toastkit.native.functions import Native

ZERO_FREQUENCY = mx.array([0.0])


class Rotary(Native):
    """A module that rotates queries and keys."""

    def rope_arguments(self, size: int) -> dict[str, Any]:
        """The arguments of operations.rope for heads of `size` numbers."""
        raise NotImplementedError

    def rotation(self, size: int) -> operations.Rotation:
        """The same as the library takes it."""
        return operations.rotation(**self.rope_arguments(size))

    def __call__(self: Any, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        return operations.rope(x, offset=offset, **self.rope_arguments(x.shape[-1]))


class Rope(Rotary):
    """MLX's."""

    def rope_arguments(self: Any, size: int) -> dict[str, Any]:
        return {
            "dims": self.dims, "traditional": self.traditional, "base": self.base,
            "scale": self.scale,
        }  # fmt: skip


class FreqsRope(Rotary):
    """RoPE with given frequencies."""

    def rope_arguments(self: Any, size: int) -> dict[str, Any]:
        return {
            "dims": self.dims, "traditional": self.traditional, "base": None, "scale": 1.0,
            "freqs": self._freqs,
        }  # fmt: skip


class AlphaRope(FreqsRope):
    """Hunyuan's, which rotates the two halves of a head."""

    traditional = False


class LongRope(Rotary):
    """RoPE with given frequencies and a factor."""

    def rope_arguments(self: Any, size: int) -> dict[str, Any]:
        return {
            "dims": self.dim, "traditional": False, "base": None, "scale": 1.0,
            "freqs": self._freqs, "factor": self._scale,
        }  # fmt: skip


class YarnRope(FreqsRope):
    """RoPE with a factor, and its inverse."""

    def rope_arguments(self: Any, size: int) -> dict[str, Any]:
        return super().rope_arguments(size) | {"factor": self.mscale}

    def __call__(
        self: Any,
        x: mx.array,
        offset: int | mx.array = 0,
        scale: float = 1.0,
        inverse: bool = False,
    ) -> mx.array:
        arguments = self.rope_arguments(x.shape[-1]) | {"scale": scale}
        if inverse:
            arguments |= {"factor": 1 / self.mscale, "freqs": -self._freqs}
        return operations.rope(x, offset=offset, **arguments)


class DeepseekRope(Rotary):
    """RoPE of whole heads."""

    def rope_arguments(self: Any, size: int) -> dict[str, Any]:
        return {
            "dims": size, "traditional": True, "base": None, "scale": 1.0, "freqs": self._freqs,
            "factor": self.mscale,
        }  # fmt: skip


class NoRope(Rotary):
    """Leaves heads as they are (SmolLM3): for the library, one pair rotated by zero."""

    def rotation(self, size: int) -> operations.Rotation:
        return operations.Rotation(2, ZERO_FREQUENCY, False, 1.0, 1.0, False)

    def __call__(self: Any, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        return x


class _NoRopeModule(NoRope, nn.Module):
    """For attentions that have no such module."""


NO_ROPE = _NoRopeModule()


def is_rotary(module: Any) -> bool:
    """True for a module that does what its `rotation` says, and nothing else."""
    return type(module).__call__ in (Rotary.__call__, YarnRope.__call__, NoRope.__call__)
