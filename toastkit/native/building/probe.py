"""Check in a process of its own, which may crash, that a library just built can be trusted.

python -m toastkit.native.building.probe PATH
"""

from __future__ import annotations

import struct
import sys
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from toastkit.native.library import BITS, PAIRS, Library
from toastkit.native.operands import NORMED, Choice, Operand, Rotation
from toastkit.native.regions import Region


def trustworthy(library: Library) -> bool:
    """True if it finds arrays where they are, and computes as MLX does."""
    arrays = [
        mx.zeros((3, 5)), mx.array(7, mx.uint32), mx.ones((2, 3, 4), mx.bfloat16)[:, 1:],
        mx.zeros((0, 6), mx.uint8), mx.arange(10) * 2,
    ]  # fmt: skip
    for array in arrays:
        if library.describe(array) != (array.shape, array.itemsize, array.size):
            return False
    memory: Any = library.memory(3, 1 << 20)
    memoryview(memory).cast("B")[:] = bytes(range(256)) * (3 << 12)
    if mx.sum(memory.astype(mx.uint32)).item() != 3 * (1 << 19) * 255:
        return False
    region = Region(library, 1 << 16)
    region.room(0, region.nbytes)
    whole: Any = region.array(0, mx.uint16, (1 << 15,))
    memoryview(whole).cast("B")[:] = struct.pack(f"{1 << 15}H", *range(1 << 15))
    if region.array(1 << 12, mx.uint16, (2, 3)).flatten().tolist() != [*range(2048, 2054)]:
        return False
    mx.random.seed(1)
    weight, x = mx.random.normal((96, 256)), mx.random.normal((3, 7, 256))  # enough for tiles
    pairs = [*_products(library, weight, x), *_products(library, weight, x[0, :1])]
    stack, chosen = mx.random.normal((4, 8, 64)), mx.array([[3, 0], [1, 3]], mx.uint32)
    vectors = mx.random.normal((2, 1, 1, 64))
    theirs = mx.gather_mm(vectors, stack.swapaxes(-1, -2), rhs_indices=chosen)
    pairs.append((library.multiply(vectors, stack, experts=chosen), theirs))
    pairs += _operations(library) + _networks(library) + _attention(library)
    return all(
        ours.shape == theirs.shape
        and ours.dtype == theirs.dtype
        and mx.allclose(ours, theirs, rtol=1e-3, atol=1e-2).item()
        for ours, theirs in pairs
    )


def _products(library: Library, weight: mx.array, x: mx.array) -> list[tuple[mx.array, mx.array]]:
    """Of weights stored in every way, by the library and by MLX."""
    pairs = [(library.multiply(x, weight), x @ weight.T)]
    for bits in BITS:
        rows = mx.quantize(weight, group_size=64, bits=bits)
        ours = library.multiply(x * 2, *rows, bits=bits, group_size=64)
        theirs = mx.quantized_matmul(x * 2, *rows, transpose=True, group_size=64, bits=bits)
        pairs.append((ours + 1, theirs + 1))
    rows = mx.quantize(weight, group_size=64, bits=4)
    ours = library.multiply(x, *rows, bits=4, group_size=64, activation_bits=PAIRS)
    theirs = mx.quantized_matmul(x, *rows, transpose=True, group_size=64, bits=4)
    pairs.append((ours / 8, theirs / 8))  # fewer bits: a larger error
    rows = mx.quantize(weight, mode="mxfp4")
    ours = library.multiply(x, *rows, bits=4, group_size=32)
    return [*pairs, (ours, mx.quantized_matmul(x, *rows, transpose=True, mode="mxfp4"))]


def _operations(library: Library) -> list[tuple[mx.array, mx.array]]:
    """Operations on rows, by the library and by MLX."""
    x, y = mx.random.normal((2, 5, 3, 70)), mx.random.normal((2, 3, 5, 70))
    heads, row, offsets = x.swapaxes(1, 2), x[0, 0, 0], mx.array([2, 1000])
    speeds, sigmoid = 1 / mx.arange(1.0, 17.0), mx.sigmoid(y)
    turned = mx.fast.rope(
        heads, 32, traditional=False, base=None, scale=1.0, offset=offsets, freqs=1 / speeds
    )
    return [
        (library.rms_norm(heads, row, 1e-5), mx.fast.rms_norm(heads, row, 1e-5)),
        (library.rms_norm(heads, None, 1e-5, 1.0), mx.fast.rms_norm(heads, None, 1e-5)),
        (
            library.layer_norm(heads, row, row * 2, 1e-5),
            mx.fast.layer_norm(heads, row, row * 2, 1e-5),
        ),
        (library.rope(heads, offsets, Rotation(32, speeds)), turned),
        (library.gate(y, heads, "silu"), y * sigmoid * heads),
        (library.gate(y, None, "sigmoid"), sigmoid),
        (library.softmax(heads), mx.softmax(heads, -1)),
        (library.log_sum_exp(heads), mx.logsumexp(heads, -1, keepdims=True)),
        (library.distribution(heads).sum(-1, keepdims=True), _distribution(heads)),
        (mx.take_along_axis(y, library.partition(y, 69), -1)[..., 69], y.max(-1)),
        (library.largest(heads) + 1, mx.argmax(heads, -1) + 1),
        (library.weighted_sum(y, heads[..., 0]), (y * heads[..., :1]).sum(-2)),
        (
            library.blend(
                y, heads[..., 0], y[..., 0, :], row[:2, None, None] + mx.zeros((2, 3, 1))
            ),
            (y * heads[..., :1]).sum(-2) + mx.sigmoid(row[:2, None, None]) * y[..., 0, :],
        ),
        (library.route(y, Choice(3))[1].max(-1), mx.softmax(y, -1).max(-1)),
        (
            mx.take_along_axis(y, library.route(y, Choice(3, NORMED))[0], -1).min(-1),
            mx.sort(y)[..., -3],
        ),
        *_recurrence(library),
    ]


def _distribution(x: mx.array) -> mx.array:
    """The sum of its four numbers."""
    log_sum = mx.logsumexp(x, -1, keepdims=True)
    surprise = (mx.softmax(x, -1) * x).sum(-1, keepdims=True)
    return 2 * log_sum - surprise + mx.argmax(x, -1, keepdims=True)


def _attention(library: Library) -> list[tuple[mx.array, mx.array]]:
    q, kv = mx.random.normal((2, 4, 3, 64)), mx.random.normal((2, 2, 300, 64))[:, :, :270]
    mask, sinks = mx.arange(270) >= mx.array([[[[0]]], [[[9]]]]), mx.ones(4)
    caches, new = (kv[:, :, :9] + 0, kv[:, :, 9:20] + 0), (q[:, :2], q[:, 2:])
    appended = library.append(caches, new, 4)
    wanted = [mx.concatenate([c[:, :, :4], x, c[:, :, 7:]], 2) for c, x in zip(caches, new)]
    pairs = [*zip(appended, wanted), *zip(appended[2:], (w[:, :, :7] for w in wanted))]
    for more in ({}, {"mask": "causal"}, {"mask": mask, "sinks": sinks}):
        ours = library.attend(q, kv, kv * 2, 0.125, **more)
        theirs = mx.fast.scaled_dot_product_attention(q, kv, kv * 2, scale=0.125, **more)
        both = (x.transpose(0, 2, 1, 3).flatten(2) for x in (ours, theirs))
        pairs.append((next(both), next(both)))
    rows = library.quantise(kv)
    wide = library.dequantise(rows)
    theirs = mx.fast.scaled_dot_product_attention(q, wide, wide, scale=0.125)
    return [*pairs, (wide / 4, kv / 4), (library.attend(q, rows, rows, 0.125) + 0, theirs)]


def _recurrence(library: Library) -> list[tuple[mx.array, mx.array]]:
    """The gated delta rule: two steps of one head from a zero state."""
    q, k, v = (mx.random.normal((1, 2, 1, n)) / 4 for n in (20, 20, 3))
    a, b, a_log, bias = (mx.random.normal(shape) for shape in ((1, 2, 1), (1, 2, 1), (1,), (1,)))
    kept = mx.exp(-mx.exp(a_log) * mx.logaddexp(a + bias, 0.0))[0]
    state, wanted = mx.zeros((3, 20)), []
    for t in range(2):
        state = state * kept[t]
        change = (v[0, t, 0] - state @ k[0, t, 0]) * mx.sigmoid(b)[0, t]
        state = state + change[:, None] * k[0, t, 0]
        wanted.append(state @ q[0, t, 0])
    y, after = library.gated_delta((q, k, v, a, b, a_log, bias))
    return [
        (y * 8, 8 * mx.stack(wanted)[None, :, None]), (after * 8, 8 * state[None, None]),
        *_scan(library, (v, k, q, a, a_log, b[0, 0], bias)),
        *_selective_scan(library, v[:, :, 0], k[:, :, 0], q[:, :, 0]),
        *_delta_layer(library, (a, b, a_log, bias)),
    ]  # fmt: skip


def _scan(library: Library, arrays: tuple[mx.array, ...]) -> list[tuple[mx.array, mx.array]]:
    """Mamba-2's scan, of the same steps and head."""
    x, b, c, dt, a_log, d, bias = arrays
    state, wanted, dt = mx.zeros((3, 20)), [], mx.logaddexp(dt + bias, 0.0)
    for t in range(2):
        state = mx.exp(-mx.exp(a_log) * dt[0, t]) * state
        state = state + (dt[0, t] * x[0, t, 0])[:, None] * b[0, t, 0]
        wanted.append(state @ c[0, t, 0] + d * x[0, t, 0])
    y, after = library.scan(arrays)
    return [(y * 8, 8 * mx.stack(wanted)[None, :, None]), (after * 8, 8 * state[None, None])]


def _selective_scan(library: Library, *steps: mx.array) -> list[tuple[mx.array, mx.array]]:
    """Mamba's, of the same steps and three channels."""
    (x, b, c), a_log, d = steps, mx.random.normal((3, 20)), mx.random.normal((3,))
    state, wanted, dt = mx.zeros((3, 20)), [], mx.logaddexp(x, 0.0)[0, ..., None]
    for t in range(2):
        state = mx.exp(-mx.exp(a_log) * dt[t]) * state + dt[t] * x[0, t, :, None] * b[0, t]
        wanted.append(state @ c[0, t] + d * x[0, t])
    y, after = library.scan((x, b, c, x, a_log, d, None))
    return [(y * 8, 8 * mx.stack(wanted)[None]), (after * 8, 8 * state[None])]


def _delta_layer(library: Library, gates: tuple[mx.array, ...]) -> list[tuple[mx.array, mx.array]]:
    """A convolution; and a gated delta net, against its parts."""
    (a, b, *rest), z, norm = gates, mx.random.normal((1, 2, 3)), mx.random.normal((3,))
    x, weight = mx.random.normal((1, 5, 43)), mx.random.normal((43, 4, 1))
    rows = library.convolve(x, weight, silu=True)
    q, k, v = mx.split(rows[:, :, None], [20, 40], axis=-1)
    q, k = library.rms_norm(q, None, 5e-8, 0.05), library.rms_norm(k, None, 5e-8, 20**-0.5)
    rule, state = library.gated_delta((q, k, v, a, b, *rest))
    wanted = library.gate(z, library.rms_norm(rule[:, :, 0], norm, 1e-5), "silu")
    parts, own = (x[:, 3:], z, b, a), (weight, *rest, norm)
    y, last, after = library.delta_layer(parts, own, (1, 1, 20, 3), 1e-5, x[:, :3])
    return [
        (rows, nn.silu(mx.conv1d(x, weight, groups=43))), (y, wanted), (last, x[:, 2:]),
        (after * 8, state * 8),
    ]  # fmt: skip


def _networks(library: Library) -> list[tuple[mx.array, mx.array]]:
    """Networks with and without quantised weights, single and of chosen experts."""
    gate, up = mx.random.normal((2, 4, 48, 64)) / 8
    down, x = mx.random.normal((4, 64, 48)), mx.random.normal((3, 64))
    rows = [mx.quantize(w[0], group_size=32, bits=4) for w in (gate, up)]
    packed = [Operand(*three, 4, 32) for three in rows]
    wide = [mx.dequantize(*three, group_size=32, bits=4) for three in rows]
    chosen = [[3, 0], [1, 3], [2, 2]]
    some = [[_network(x[n], gate[e], up[e], down[e]) for e in chosen[n]] for n in range(3)]
    stacks = [Operand(w) for w in (gate, up, down)]
    experts = mx.array(chosen, mx.uint32)
    return [
        (library.feed_forward(x, [*packed, Operand(down[0])]),
         _network(x, wide[0], wide[1], down[0])),
        (library.feed_forward(x, stacks, experts=experts),
         mx.stack([mx.stack(each) for each in some])),
    ]  # fmt: skip


def _network(x: mx.array, gate: mx.array, up: mx.array, down: mx.array) -> mx.array:
    y = x @ gate.T
    return (y * mx.sigmoid(y) * (x @ up.T)) @ down.T


def main() -> int:
    """Exit with 0 for a library that can be trusted."""
    mx.set_default_device(mx.cpu)
    mx.disable_compile()
    return 0 if trustworthy(Library(sys.argv[1])) else 1


if __name__ == "__main__":
    sys.exit(main())
