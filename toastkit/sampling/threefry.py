"""Threefry-2x32 in numpy: the noise of a draw as a function of seed and position.

Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011, 20 rounds.
A counter-based generator has no state: the number at index i under a key is computed from i and
the key alone. Any position can be drawn again in any order, and for a few surviving tokens only
their numbers are computed. The layout of counters is that of `mx.random.uniform`, so numpy on the
host and MLX on the device see the same bits:

    h = ceil(n / 2);  counter pair j is (j, j + h), except (h - 1, 0) as the last one of an odd n
    first words of all pairs, then second words, cut to n;  u = float32(bits) * 2^-32, below 1
"""

from __future__ import annotations

import numpy as np

from .draws import BELOW_ONE, GROUPS, MASK, PARITY, ROTATIONS, Key

Words = np.ndarray

# Shifts as 0-d arrays: a ufunc takes them without converting a Python int each time.
_SHIFTS = {
    turn: (np.array(turn, np.uint32), np.array(32 - turn, np.uint32))
    for turns in ROTATIONS
    for turn in turns
}
# Counter pairs per block: three buffers of 64 KiB stay in a second-level cache, and the cost of a
# hundred ufunc calls is spread over enough elements.
_BLOCK = 16384
# Cache sets repeat from page to page; buffers offset by a few lines do not evict one another.
_SKEW = 48
_SCALE = np.float32(2.0**-32)
_GUMBEL_FLOOR = np.float32(1e-20)
# No Gumbel number exceeds -log(-log(1 - 2^-24)) = 16.6355.
GUMBEL_MAX = 16.65


def uniform(key: Key, n: int) -> np.ndarray:
    """Return n numbers in [0, 1), float32 (n,): bit for bit mx.random.uniform(shape=(n,),
    key=key)."""
    half = n - n // 2
    block = min(half, _BLOCK)
    first, second, scratch = _buffers(block)
    result = np.empty(n, np.float32)
    for start in range(0, half, block):
        stop = min(start + block, half)
        size = stop - start
        a, b = first[:size], second[:size]
        a[:] = np.arange(start, stop, dtype=np.uint32)
        np.add(a, np.uint32(half), out=b)
        if stop + half > n:
            b[-1] = 0
        _encrypt(key, a, b, scratch[:size])
        result[start:stop] = a
        tail = result[half + start : half + stop]
        tail[:] = b[: len(tail)]
    return _to_unit(result)


def uniform_at(key: Key, n: int, indices: np.ndarray) -> np.ndarray:
    """Return uniform(key, n)[indices] without computing the others: float32 (len(indices),).

    indices: integers in [0, n), shape (m,).
    """
    half = n - n // 2
    bits = np.empty(len(indices), np.float32)
    for start in range(0, len(indices), _BLOCK):
        chunk = np.asarray(indices[start : start + _BLOCK])
        first, second, scratch = _buffers(len(chunk))
        upper = chunk >= half
        np.subtract(chunk, upper * half, out=first, casting="unsafe")
        np.add(first, np.uint32(half), out=second)
        second[second == n] = 0
        _encrypt(key, first, second, scratch)
        bits[start : start + len(chunk)] = np.where(upper, second, first)
    return _to_unit(bits)


def gumbel(u: np.ndarray) -> np.ndarray:
    """Turn uniform numbers into standard Gumbel noise, -log(-log(u + 1e-20)): paper 003 section
    10.1.

    u: float32 (n,), overwritten with the result, which is also returned.
    """
    np.add(u, _GUMBEL_FLOOR, out=u)
    np.log(u, out=u)
    np.negative(u, out=u)
    np.log(u, out=u)
    return np.negative(u, out=u)


def _encrypt(key: Key, x0: Words, x1: Words, scratch: Words) -> None:
    """Run the vectorised generator in place. x0, x1, scratch: uint32 of one shape."""
    schedule = (key[0], key[1], key[0] ^ key[1] ^ PARITY)
    np.add(x0, np.uint32(schedule[0]), out=x0)
    np.add(x1, np.uint32(schedule[1]), out=x1)
    add, left, right = np.add, np.left_shift, np.right_shift
    either, differ = np.bitwise_or, np.bitwise_xor
    for group in range(GROUPS):
        for turn in ROTATIONS[group % 2]:
            up, down = _SHIFTS[turn]
            add(x0, x1, x0)
            left(x1, up, scratch)
            right(x1, down, x1)
            either(x1, scratch, x1)
            differ(x1, x0, x1)
        add(x0, np.uint32(schedule[(group + 1) % 3]), x0)
        add(x1, np.uint32(schedule[(group + 2) % 3] + group + 1 & MASK), x1)


def _buffers(size: int) -> tuple[Words, Words, Words]:
    stride = size + _SKEW
    memory = np.empty(3 * stride, np.uint32)
    return memory[:size], memory[stride : stride + size], memory[2 * stride : 2 * stride + size]


def _to_unit(bits: np.ndarray) -> np.ndarray:
    np.multiply(bits, _SCALE, out=bits)
    return np.minimum(bits, BELOW_ONE, out=bits)
