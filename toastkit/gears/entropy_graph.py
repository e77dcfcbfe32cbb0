"""The entropy of logits as part of the step's graph on the device."""

from __future__ import annotations

import math

import mlx.core as mx

from toastkit.native.operations import distribution, finite


def entropy_bits(logits: mx.array) -> mx.array:
    """Shannon entropy in bits of softmax(logits), a lazy float32 scalar (003, section 3.1).

    logits: (vocab,) of any float dtype. Non-finite logits are replaced as in section 10.1.
    """
    return distribution(finite(logits.astype(mx.float32)))[2] / math.log(2)
