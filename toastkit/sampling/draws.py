"""The result of a draw, and the scalars of its noise: all of sampling that needs no arrays.

Threefry-2x32 of Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011,
20 rounds. The same generator over arrays is in threefry.py.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from ..errors import DataError
from .sampling_options import SamplingOptions

Key = tuple[int, int]

LARGEST = float.fromhex("0x1.fffffep127")  # of float32
BELOW_ONE = 1 - 2.0**-24  # the float32 before 1
GUARD = 1e4
XTC_STREAM = 1
MASK = 0xFFFFFFFF
PARITY = 0x1BD11BDA
ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
GROUPS = 5


@dataclass(slots=True)
class Draw:
    """id: the token. logprob: natural logarithm, NaN when not asked for.
    top: [[id, logprob], ...], most likely first, lower ids first among equals; None when not
    asked for. Banned ids are never in it."""

    id: int
    logprob: float
    top: list[list] | None = None


def nothing_left() -> DataError:
    """Return the error for logits in which every id is banned."""
    return DataError("cannot draw a token: every id is banned")


def xtc_acts(options: SamplingOptions, position: int) -> bool:
    """True if XTC acts at a position: a Bernoulli draw that depends on seed and position alone."""
    if options.xtc_probability <= 0:
        return False
    return uniform_scalar(position_key(options.seed, position, XTC_STREAM)) <= (
        options.xtc_probability
    )


def position_key(seed: int, position: int, stream: int = 0) -> Key:
    """Return the key for the draw at a position. seed: 64 bits. stream: 0 the noise, 1 XTC's
    draw."""
    return threefry2x32((seed >> 32 & MASK, seed & MASK), position & MASK, stream & MASK)


def uniform_scalar(key: Key) -> float:
    """Return the one number of threefry.uniform(key, 1), without arrays."""
    bits, _ = threefry2x32(key, 0, 0)
    (rounded,) = struct.unpack("<f", struct.pack("<f", bits))
    return min(rounded * 2.0**-32, BELOW_ONE)


def threefry2x32(key: Key, counter0: int, counter1: int) -> tuple[int, int]:
    """Return two 32-bit words from a key and a counter of two words each."""
    schedule = (key[0], key[1], key[0] ^ key[1] ^ PARITY)
    x0 = counter0 + schedule[0] & MASK
    x1 = counter1 + schedule[1] & MASK
    for group in range(GROUPS):
        for turn in ROTATIONS[group % 2]:
            x0 = x0 + x1 & MASK
            x1 = (x1 << turn & MASK | x1 >> 32 - turn) ^ x0
        x0 = x0 + schedule[(group + 1) % 3] & MASK
        x1 = x1 + schedule[(group + 2) % 3] + group + 1 & MASK
    return x0, x1
