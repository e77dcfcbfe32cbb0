"""The built library in this process: arrays of MLX in, a lazy array of MLX out.

library = Library(path)            a library that was built here (building)
y = library.multiply(x, weight)
"""

from __future__ import annotations

import atexit
import ctypes
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

import mlx.core as mx

from toastkit.native.interface import functions_in
from toastkit.native.machine import processors
from toastkit.native.operands import Choice, Operand, OperandPointers, Rotation

BITS = (2, 3, 4, 5, 6, 8)
GROUP_SIZES = (32, 64, 128)
FLOATS = (mx.float32, mx.float16, mx.bfloat16)
ACTIVATIONS = ("silu", "gelu", "sigmoid", "gelu_erf", "swiglu_oai", "finite", "relu2")
ALONE = 64  # flag in an activation: ungated, see glue/feed_forward.h
PAIRS, DIGITS, WIDE = 12, 16, 32  # activation bits with quantised weights, see kernels.h
NONE = ctypes.py_object()  # an absent array


class Library:
    """The library at a path. c: its functions. Raises as functions_in."""

    def __init__(self, path: str):
        self.c = functions_in(path)
        self.c.set_head(object.__basicsize__)
        self.set_threads(processors())
        self.instructions = self.c.instructions().decode()

    def set_threads(self, count: int) -> None:
        """Set the threads that compute, for all users of this library; more than processors are no
        gain."""
        self.c.set_threads(count)

    @property
    def threads(self) -> int:
        """Number of threads that compute."""
        return self.c.threads()

    def describe(self, array: mx.array) -> tuple[tuple[int, ...], int, int] | None:
        """Shape, item size and number of items that the library reads from an array (...) of any
        dtype; None if it finds no array there."""
        about = (ctypes.c_int64 * 16)()
        if not self.c.describe(array, about):
            return None
        axes, *rest = about
        return tuple(rest[:axes]), rest[axes], rest[axes + 1]

    def memory(self, rows: int, columns: int, at: int = 0, old: mx.array | None = None) -> mx.array:
        """Memory to read weights into, on huge pages if possible: uint8 (rows, columns), evaluated,
        uninitialised. It begins `at` bytes into a page. old: such an array of the same size, whose
        memory is reused. Raises MemoryError if there is none."""
        try:
            return _call(self.c.memory, rows, columns, at, _object(old))
        except ValueError as error:
            raise error if old is not None else MemoryError(*error.args) from error

    def operations(self, arrays: Sequence[mx.array]) -> Counter[str]:
        """The operations that are left to do for arrays (...) of any dtype, by name, as MLX prints
        them. Nothing is evaluated."""
        return Counter(self.c.operation_names(objects(*arrays), len(arrays)).decode().split())

    def settle(self, array: mx.array) -> None:
        """Move an evaluated array (...) of any dtype and at least 1 MiB onto huge pages, if
        possible; its content stays the same."""
        self.c.settle_array(array)

    def multiply(
        self,
        x: mx.array,
        weight: mx.array,
        scales: mx.array | None = None,
        biases: mx.array | None = None,
        experts: mx.array | None = None,
        bits: int = 0,
        group_size: int = 0,
        activation_bits: int = DIGITS,
        bias: mx.array | None = None,
    ) -> mx.array:
        """Products, lazy, of the dtype of x, or float32 if the matrix has another.

        x: (..., columns) float32, float16 or bfloat16. weight: (rows, columns) of such a dtype; or
        quantised, (rows, columns * bits / 32) uint32, with scales and biases (rows, columns / group
        size); or mxfp4, 4 bits in groups of 32, with uint8 scales and no biases. experts: for a
        stack (experts, rows, ...), the matrices to multiply x (..., m, columns) by, uint32 (...),
        broadcast; gives (..., m, rows). activation_bits: PAIRS, DIGITS or WIDE. bias: (rows,), with
        float32 x and no stack. Raises ValueError for arrays that do not fit together."""
        optional = [_object(array) for array in (scales, biases, bias, experts)]
        return _call(self.c.product, x, weight, *optional, bits, group_size, activation_bits)

    def feed_forward(
        self,
        x: mx.array,
        parts: Sequence[Operand],
        kind: int = 0,
        experts: mx.array | None = None,
        activation_bits: int = DIGITS,
        biases: Sequence[mx.array | None] = (None,) * 3,
    ) -> mx.array:
        """down(activation(gate(x)) * up(x)), lazy, float32 in between; of the dtype of x, or
        float32 if a matrix has another. x: (..., columns). parts: gate, up and down; fused gate-up
        and down; or up and down. kind: index in ACTIVATIONS, plus ALONE for up and down. experts:
        of stacks, the matrices for each vector, uint32 (..., k); gives (..., k, rows). biases: of
        the parts, float32 (rows,), of stacks (experts, rows). Raises ValueError, see `multiply`."""
        arrays = [array for part, bias in zip(parts, biases) for array in (*part[:3], bias)]
        given = OperandPointers(arrays, [n for part in parts for n in part[3:]], activation_bits)
        some = _object(experts)
        return _call(self.c.feed_forward, x, ctypes.byref(given), len(parts), some, kind)

    def rms_norm(
        self, x: mx.array, weight: mx.array | None, eps: float, plus: float = 0.0
    ) -> mx.array:
        """x / sqrt(mean(x^2) + eps) * (weight + plus) over the last axis, computed in float32, of
        the common dtype of x and weight; lazy. x: (..., n). weight: (n,), None for zeros. Raises
        ValueError for other shapes and dtypes, as do all methods below."""
        return _call(self.c.norm, x, _object(weight), NONE, False, plus, eps)

    def layer_norm(
        self, x: mx.array, weight: mx.array | None, bias: mx.array | None, eps: float
    ) -> mx.array:
        """(x - mean) / sqrt(variance + eps) * weight + bias, likewise. weight: None for ones,
        without a bias. bias: (n,), of the dtype of the weight, None for zeros."""
        return _call(self.c.norm, x, _object(weight), _object(bias), True, 0.0, eps)

    def rope(self, x: mx.array, offset: int | mx.array, how: Rotation) -> mx.array:
        """RoPE as mx.fast.rope, lazy. x: (batch, heads, length, n) or (batch, length, n). offset:
        position of the first token, an int or int32 () or (batch,)."""
        dims, frequencies, inverse, scale, factor, traditional = how
        offsets = (offset, 0) if isinstance(offset, mx.array) else (NONE, offset)
        some = dims, traditional, inverse, scale, factor
        return _call(self.c.rotate, x, frequencies.astype(mx.float32), *offsets, *some)

    def gate(self, gate: mx.array, x: mx.array | None, activation: str) -> mx.array:
        """activation(gate) * x, lazy. Both (..., n) of one dtype; x: None for ones. activation: of
        ACTIVATIONS, see kernels/rows.h; "gelu" is the tanh approximation, "swiglu_oai" that of
        gpt-oss. Raises ValueError if they differ."""
        return _call(self.c.gate, gate, _object(x), ACTIVATIONS.index(activation))

    def gated_delta(
        self,
        arrays: Sequence[mx.array | None],
        state: mx.array | None = None,
        mask: mx.array | None = None,
        rate_factor: float = 1.0,
    ) -> tuple[mx.array, mx.array]:
        """The gated delta rule, lazy: y (B, T, value heads, value size), and the new state.

        arrays: float32 q and k (B, T, key heads, key size), v (B, T, value heads, value size), a
        and b (B, T, value heads), a_log and bias (value heads,); or a and bias with a last axis of
        key size; or such decays in place of a, and None for a_log and bias. state: float32 (B,
        value heads, value size, key size), None for zeros. mask: bool (B, T). See
        kernels/recurrent.h."""
        y, after = called(
            2, self.c.gated_delta, objects(*map(_object, (*arrays, state, mask))), rate_factor
        )
        return y, after

    def scan(
        self,
        arrays: Sequence[mx.array | None],
        state: mx.array | None = None,
        mask: mx.array | None = None,
        limits: tuple[float, float] = (0.0, float("inf")),
    ) -> tuple[mx.array, mx.array]:
        """Mamba-2's scan, lazy: y, of the shape of x, and the new state.

        arrays: float32 x (B, T, heads, size), b and c (B, T, groups, state size), dt (B, T, heads),
        a_log, d and bias (heads,). state: float32 (B, heads, size, state size), None for zeros.
        mask: bool (B, T). limits: of dt. See kernels/recurrent.h.

        Or Mamba's selective scan: x and dt (B, T, channels), b and c (B, T, state size), a_log
        (channels, state size), d and bias (channels,) or None; a state of the shape of a_log."""
        y, after = called(2, self.c.scan, objects(*map(_object, (*arrays, state, mask))), *limits)
        return y, after

    def delta_layer(
        self,
        projections: Sequence[mx.array],
        parameters: tuple[mx.array, ...],
        heads: tuple[int, int, int, int],
        eps: float,
        before: mx.array | None = None,
        state: mx.array | None = None,
    ) -> tuple[mx.array, mx.array, mx.array]:
        """A gated delta net without its projections, lazy: y (B, T, values), the new convolution
        state (B, kernel - 1, channels), and the new state of the rule.

        All float32. projections: (B, T, n), either queries, keys, values and z of each key head,
        and b and a of each; or queries, keys and values; z; b; a. parameters: the convolution's
        weight (channels, kernel, 1), a_log and bias (value heads,), the norm's weight (value
        size,), which eps belongs to. heads: of keys and of values, then their sizes. before:
        convolution state, None for zeros. state: see `gated_delta`."""
        weight, *rest = parameters
        parts = [*projections, *[None] * (4 - len(projections))]
        given = objects(*map(_object, (*parts, weight, before, *rest, state)))
        y, last, after = called(3, self.c.delta_layer, given, *heads, eps)
        return y, last, after

    def convolve(
        self, x: mx.array, weight: mx.array, bias: mx.array | None = None, silu: bool = False
    ) -> mx.array:
        """A causal depthwise convolution, mx.conv1d with as many groups as channels, then SiLU on
        request; lazy, of the dtype of x. x: (B, T, channels). weight: (channels, kernel, 1), bias:
        (channels,), of one dtype."""
        return _call(self.c.convolve, x, weight, _object(bias), silu)

    def softmax(self, x: mx.array) -> mx.array:
        """Softmax of x (..., n) over the last axis, computed in float32, of the dtype of x;
        lazy."""
        return _call(self.c.softmax, x)

    def log_sum_exp(self, x: mx.array) -> mx.array:
        """Log-sum-exp of x (..., n) over the last axis: float32 (..., 1), lazy."""
        return _call(self.c.log_sum_exp, x)

    def distribution(self, x: mx.array) -> mx.array:
        """Of the softmax of x (..., n) over the last axis, float32 (..., 4), lazy: the maximum, log
        of the sum of exp(x - maximum), the entropy in nats, the first index of the maximum, exact
        below 2^24."""
        return _call(self.c.distribution, x)

    def largest(self, x: mx.array) -> mx.array:
        """Argmax of x (..., n) over the last axis, the first of equal ones: uint32 (...), lazy. NaN
        is ignored; of NaN alone it is 0."""
        return _call(self.c.largest, x)

    def partition(self, x: mx.array, kth: int) -> mx.array:
        """As mx.argpartition of x (..., n) over the last axis, kth from 0, lazy: uint32 (..., n).
        Of equal numbers the first is the smaller, NaN is larger than all."""
        return _call(self.c.partition, x, kth)

    def weighted_sum(self, x: mx.array, weights: mx.array) -> mx.array:
        """(x * weights[..., None]).sum(-2), in float32, lazy. x: (..., k, n). weights: float32
        (..., k)."""
        return _call(self.c.weighted_sum, x, weights)

    def route(
        self, logits: mx.array, choice: Choice, bias: mx.array | None = None
    ) -> tuple[mx.array, mx.array]:
        """The top-k experts for router logits (..., n), uint32 (..., k), and their weights, float32
        (..., k), lazy. bias: float32 (n,), added for the choice only."""
        some = logits, _object(bias), ctypes.byref(choice)
        which, shares = called(2, self.c.route, *some)
        return which, shares

    def blend(self, x: mx.array, weights: mx.array, more: mx.array, gates: mx.array) -> mx.array:
        """(x * weights[..., None]).sum(-2) + sigmoid(gates) * more, lazy, all float32. x: (..., k,
        n). weights: (..., k). more: (..., n). gates: (..., 1)."""
        return _call(self.c.blend, x, weights, more, gates)

    def append(
        self, caches: Sequence[mx.array], new: Sequence[mx.array], first: int, positions: int = 0
    ) -> tuple[mx.array, ...]:
        """Append keys and values to caches from position `first` on, lazy: both caches, in place if
        they are unshared, and both up to the last new position.

        caches: (B, heads, M, size), floats or as of `quantise`; a broadcast scalar is an empty
        cache, of which other positions are left uninitialised. new: (B, heads, N, size), floats,
        rounded to that dtype, beyond float16 to its largest number. positions: M from now on, if
        that is more. Raises ValueError if they do not fit."""
        return tuple(called(4, self.c.append, objects(*caches, *new), first, positions))

    def attend(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        scale: float,
        mask: mx.array | str | None = None,
        sinks: mx.array | None = None,
        cap: float = 0.0,
    ) -> mx.array:
        """Attention as mx.fast.scaled_dot_product_attention, lazy, (B, heads, N, value size), of
        the common dtype, or float32.

        queries: (B, heads, N, size). keys, values: (B, key heads, M, size), each float32, float16,
        bfloat16 or as of `quantise`, which counts as the dtype of queries. mask: "causal", bool or
        additive, such a dtype too, broadcast to (B, heads, N, M). sinks: float32 (heads,). cap:
        scores become cap * tanh(score / cap), before the mask; 0 for no cap. Raises ValueError for
        what does not fit together."""
        given, causal = (mask, False) if isinstance(mask, mx.array) else (NONE, mask == "causal")
        some = _object(sinks)
        return _call(self.c.attend, queries, keys, values, given, some, scale, cap, causal)

    def quantise(self, x: mx.array) -> mx.array:
        """Quantise rows x (..., n) to 8 bits, lazy: int8 (..., n + 4), the numbers, then four bytes
        that hold their float32 scale, the row's largest over 127. Beyond 3e38 counts as 3e38; a row
        with NaN becomes NaN."""
        return _call(self.c.quantise, x)

    def dequantise(self, rows: mx.array) -> mx.array:
        """The numbers of such rows (..., n + 4), float32 (..., n), lazy."""
        return _call(self.c.dequantise, rows)


def _object(array: mx.array | None) -> Any:
    return NONE if array is None else array


def objects(*arrays: Any) -> ctypes.Array[ctypes.py_object]:
    """Arrays as functions of the library take several; NONE for those that are absent."""
    return (ctypes.py_object * len(arrays))(*arrays)


def unshared(x: Any, count: int) -> list[Any]:
    """Copies of an array object for the library to set; cheaper than new arrays."""
    return [x.__copy__() for _ in range(count)]


def called(count: int, function: Callable, *arguments: Any) -> list[mx.array]:
    """Call a function of the library that sets so many arrays (...) of any dtype, and return
    them."""
    outs = [mx.array(0) for _ in range(count)]
    function(objects(*outs), *arguments)
    return outs


def _call(function: Callable, *arguments: Any) -> mx.array:
    out = mx.array(0)
    function(out, *arguments)
    return out


_in_use: Library | None = None


def use(library: Library | None) -> None:
    """Set the library of all native modules of this process."""
    global _in_use
    _in_use = library


def in_use() -> Library | None:
    """Return the library that modules of this process compute with, or None."""
    return _in_use


@cache
def load(path: str) -> Library:
    """Load the library at a path, once. Raises OSError."""
    atexit.register(_at_exit, library := Library(path))
    return library


def _at_exit(library: Library) -> None:
    """At exit, stop waiting for awaited tokens, but finish steps in progress: their memory would be
    freed under them, at which glibc aborts the process."""
    library.c.leave()
    with suppress(KeyboardInterrupt, RuntimeError):  # threads may be gone already
        mx.synchronize()
