"""The entropy of logits, computed on the device."""

from __future__ import annotations

import math

import mlx.core as mx

from toastkit.native.library import in_use
from toastkit.native.operations import distribution, finite


def entropy_bits(logits: mx.array) -> mx.array:
    """Shannon entropy in bits of softmax(logits), a lazy float32 scalar (003, section 3.1).

    logits: (vocab,) of any float dtype. Non-finite logits are replaced as in section 10.1.
    """
    return distribution(finite(logits.astype(mx.float32)))[2] / math.log(2)


class NativeEntropy:
    """The entropy of logits, float32 (vocab,), which the device starts to compute at once. Without
    native operations nothing is computed: numpy is faster than MLX's own operations."""

    def __init__(self, logits: mx.array):
        library = in_use()
        self._limit = math.log2(logits.size)
        self._found = None if library is None else library.distribution(logits)
        if self._found is not None:
            mx.async_eval(self._found)

    def bits(self) -> float | None:
        """Wait for the entropy, as of EntropyMeter. None if it was not computed, or if logits are
        not finite: these have to be replaced first."""
        if self._found is None:
            return None
        bits = memoryview(self._found)[2] / math.log(2)  # type: ignore[arg-type]
        return min(max(bits, 0.0), self._limit) if math.isfinite(bits) else None
