"""Rotary positions: modules that turn queries and keys, and say how they do."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from toastkit.native import operations
from toastkit.native.functions import Native

STILL = mx.array([0.0])


class Rotary(Native):
    """Turns queries and keys."""

    def how(self, size: int) -> dict[str, Any]:
        """Heads of so many numbers: what operations.rope is called with."""
        raise NotImplementedError

    def rotation(self, size: int) -> operations.Rotation:
        """The same, for the library."""
        return operations.rotation(**self.how(size))

    def __call__(self: Any, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        return operations.rope(x, offset=offset, **self.how(x.shape[-1]))


class Rope(Rotary):
    """MLX's."""

    def how(self: Any, size: int) -> dict[str, Any]:
        return {
            "dims": self.dims, "traditional": self.traditional, "base": self.base,
            "scale": self.scale,
        }  # fmt: skip


class FreqsRope(Rotary):
    """Whose frequencies are its own."""

    def how(self: Any, size: int) -> dict[str, Any]:
        return {
            "dims": self.dims, "traditional": self.traditional, "base": None, "scale": 1.0,
            "freqs": self._freqs,
        }  # fmt: skip


class AlphaRope(FreqsRope):
    """Hunyuan's, which takes a head's halves together."""

    traditional = False


class LongRope(Rotary):
    """With frequencies and a factor."""

    def how(self: Any, size: int) -> dict[str, Any]:
        return {
            "dims": self.dim, "traditional": False, "base": None, "scale": 1.0,
            "freqs": self._freqs, "factor": self._scale,
        }  # fmt: skip


class YarnRope(FreqsRope):
    """With a factor, and back again (inverse)."""

    def how(self: Any, size: int) -> dict[str, Any]:
        return super().how(size) | {"factor": self.mscale}

    def __call__(
        self: Any,
        x: mx.array,
        offset: int | mx.array = 0,
        scale: float = 1.0,
        inverse: bool = False,
    ) -> mx.array:
        how = self.how(x.shape[-1]) | {"scale": scale}
        if inverse:
            how |= {"factor": 1 / self.mscale, "freqs": -self._freqs}
        return operations.rope(x, offset=offset, **how)


class DeepseekRope(Rotary):
    """Of whole heads."""

    def how(self: Any, size: int) -> dict[str, Any]:
        return {
            "dims": size, "traditional": True, "base": None, "scale": 1.0, "freqs": self._freqs,
            "factor": self.mscale,
        }  # fmt: skip


class Unturned(Rotary):
    """Leaves heads as they are (SmolLM3): a pair of their numbers is turned by nothing."""

    def rotation(self, size: int) -> operations.Rotation:
        return operations.Rotation(2, STILL, False, 1.0, 1.0, False)

    def __call__(self: Any, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        return x


class _Still(Unturned, nn.Module):
    """For attentions that have none to leave them so."""


UNTURNED = _Still()


def is_rotary(module: Any) -> bool:
    """Whether a module turns queries and keys as its `rotation` says, and does nothing else."""
    return type(module).__call__ in (Rotary.__call__, YarnRope.__call__, Unturned.__call__)
