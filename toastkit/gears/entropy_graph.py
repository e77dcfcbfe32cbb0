"""The entropy of logits, and which is the largest, computed on the device."""

from __future__ import annotations

import math

import mlx.core as mx

from toastkit.native.library import in_use
from toastkit.native.operations import distribution, finite
from toastkit.sampling.draws import GUARD
from toastkit.session.ring import Summary

MOST_EXACT = 1 << 24  # ids that float32 has


def entropy_bits(logits: mx.array) -> mx.array:
    """Shannon entropy in bits of softmax(logits), a lazy float32 scalar (003, section 3.1).

    logits: (vocab,) of any float dtype. Non-finite logits are replaced as in section 10.1.
    """
    return distribution(finite(logits.astype(mx.float32)))[2] / math.log(2)


class NativeSummary:
    """The summary of logits, float32 (vocab,), which the device starts to compute at once. Without
    native operations nothing is computed: numpy is faster than MLX's own operations."""

    def __init__(self, logits: mx.array):
        library = in_use() if logits.size < MOST_EXACT else None
        self._limit = math.log2(logits.size)
        self._found = None if library is None else library.distribution(logits)
        if self._found is not None:
            mx.async_eval(self._found)

    def read(self) -> Summary | None:
        """Wait for the summary, the entropy as of EntropyMeter. None if it was not computed, or if
        logits may have to be replaced first, as they are not finite."""
        if self._found is None:
            return None
        largest, log_sum, entropy, likeliest = memoryview(self._found)  # type: ignore[arg-type]
        if not (math.isfinite(entropy) and largest > -GUARD):
            return None
        bits = min(max(entropy / math.log(2), 0.0), self._limit)
        return Summary(bits, -log_sum, int(likeliest))
