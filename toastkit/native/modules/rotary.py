"""RoPE modules: they rotate queries and keys, and say how."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from toastkit.native import operations
from toastkit.native.functions import Native
from toastkit.native.operands import Rotation

ZERO_FREQUENCY = mx.array([0.0])


class Rotary(Native):
    """A module that rotates queries and keys."""

    def rotation(self, size: int) -> Rotation:
        """What it does with heads of `size` numbers."""
        raise NotImplementedError

    def __call__(self: Any, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        y = operations.rotated(x, offset, self.rotation(x.shape[-1]))
        return super().__call__(x, offset) if y is None else y  # type: ignore[misc]


class Rope(Rotary):
    """MLX's."""

    def rotation(self: Any, size: int) -> Rotation:
        frequencies = operations.frequencies(self.base, self.dims)
        return Rotation(self.dims, frequencies, False, self.scale, traditional=self.traditional)


class FreqsRope(Rotary):
    """RoPE with given frequencies."""

    def rotation(self: Any, size: int) -> Rotation:
        return Rotation(self.dims, self._freqs, True, traditional=self.traditional)


class AlphaRope(FreqsRope):
    """Hunyuan's, which rotates the two halves of a head."""

    traditional = False


class LongRope(Rotary):
    """RoPE with given frequencies and a factor."""

    def rotation(self: Any, size: int) -> Rotation:
        return Rotation(self.dim, self._freqs, True, factor=self._scale)


class YarnRope(FreqsRope):
    """RoPE with a factor, and its inverse."""

    def rotation(self: Any, size: int) -> Rotation:
        return super().rotation(size)._replace(factor=self.mscale)

    def __call__(
        self: Any,
        x: mx.array,
        offset: int | mx.array = 0,
        scale: float = 1.0,
        inverse: bool = False,
    ) -> mx.array:
        how = self.rotation(x.shape[-1])._replace(scale=scale)
        if inverse:
            how = how._replace(factor=1 / self.mscale, frequencies=-self._freqs)
        y = operations.rotated(x, offset, how)
        upstream: Any = super(Rotary, self).__call__  # type: ignore[misc]
        return upstream(x, offset, scale, inverse) if y is None else y


class DeepseekRope(Rotary):
    """RoPE of whole heads."""

    def rotation(self: Any, size: int) -> Rotation:
        return Rotation(size, self._freqs, True, factor=self.mscale, traditional=True)


class NoRope(Rotary):
    """Leaves heads as they are (SmolLM3): for the library, one pair rotated by zero."""

    def rotation(self, size: int) -> Rotation:
        return Rotation(2, ZERO_FREQUENCY)

    def __call__(self: Any, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        return x


class _NoRopeModule(NoRope, nn.Module):
    """For attentions that have no such module."""


NO_ROPE = _NoRopeModule()


def is_rotary(module: Any) -> bool:
    """True for a module that does what its `rotation` says, and nothing else."""
    return type(module).__call__ in (Rotary.__call__, YarnRope.__call__, NoRope.__call__)
