"""The library that was built, in this process: arrays of MLX in, a lazy array of MLX out.

library = Library(path)            a library that was built here (building)
y = library.multiply(x, weight)
"""

from __future__ import annotations

import atexit
import ctypes
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

import mlx.core as mx

from toastkit.native.machine import processors
from toastkit.native.operands import Choice, Given, Operand

BITS = (2, 3, 4, 5, 6, 8)
GROUP_SIZES = (32, 64, 128)
FLOATS = (mx.float32, mx.float16, mx.bfloat16)
ACTIVATIONS = ("silu", "gelu", "sigmoid", "gelu_erf", "swiglu_oai", "finite", "relu2")
ALONE = 64  # added to one: the network has no gate, see glue/feed_forward.h
PAIRS, DIGITS, WIDE = 12, 16, 32  # bits of activations that packed weights meet, see kernels.h
NONE = ctypes.py_object()  # an array that is not given


class Library:
    """A library that was built, in this process. Raises OSError for a file that is none."""

    def __init__(self, path: str):
        loaded = ctypes.PyDLL(path)  # with Python's lock: the arrays are Python's
        loaded.toast_set_head(ctypes.c_int64(object.__basicsize__))
        self.loaded = loaded  # for bindings that stand beside what uses them
        self.set_threads(processors())
        loaded.toast_instructions.restype = ctypes.c_char_p
        self.instructions = loaded.toast_instructions().decode()
        self._describe = loaded.toast_describe
        self._describe.argtypes = [ctypes.py_object, ctypes.c_void_p]

        array, whole, number = ctypes.py_object, ctypes.c_int, ctypes.c_float
        place, function = ctypes.c_void_p, self.function
        self._memory = function("memory", array, *[ctypes.c_int64] * 3, array)
        self._settle = loaded.toast_settle_array
        self._settle.restype, self._settle.argtypes = None, [array]
        self._product = function("product", *[array] * 7, *[whole] * 3)
        self._feed_forward = function("feed_forward", array, array, place, whole, array, whole)
        self._convolve = function("convolve", *[array] * 4, whole)
        self._gated_delta = function("gated_delta", array, array, array * 9, number)
        self._scan = function("scan", array, array, array * 9, number, number)
        self._delta_layer = function("delta_layer", *[array] * 3, array * 10, *[whole] * 4, number)
        self._norm = function("norm", *[array] * 4, whole, number, number)
        self._rotate = function("rotate", *[array] * 4, *[whole] * 4, number, number)
        self._gate = function("gate", *[array] * 3, whole)
        self._softmax = function("softmax", array, array)
        self._log_sum_exp = function("log_sum_exp", array, array)
        self._distribution = function("distribution", array, array)
        self._largest = function("largest", array, array)
        self._partition = function("partition", array, array, whole)
        self._weighted_sum = function("weighted_sum", *[array] * 3)
        self._route = function("route", *[array] * 4, place)
        self._blend = function("blend", *[array] * 5)
        self._append = function("append", array * 4, array * 4, whole)
        self._attend = function("attend", *[array] * 6, number, number, whole)
        self._quantise = function("quantise", array, array)
        self._dequantise = function("dequantise", array, array)

    def function(self, name: str, *types: Any) -> Callable:
        """One of the library: it makes its first array what it gives, and returns what is wrong."""
        one = self.loaded[f"toast_{name}_array"]
        one.restype, one.argtypes = ctypes.c_char_p, types
        return one

    def set_threads(self, count: int) -> None:
        """How many compute, of all that use this library; more than processors are no gain."""
        self.loaded.toast_set_threads(count)

    @property
    def threads(self) -> int:
        """How many compute."""
        return self.loaded.toast_threads()

    def describe(self, array: mx.array) -> tuple[tuple[int, ...], int, int] | None:
        """What the library finds where it looks for an array (...) of any dtype: shape, bytes of a
        number, count; None where there is none."""
        about = (ctypes.c_int64 * 16)()
        if not self._describe(array, about):
            return None
        axes, *rest = about
        return tuple(rest[:axes]), rest[axes], rest[axes + 1]

    def memory(self, rows: int, columns: int, at: int = 0, old: mx.array | None = None) -> mx.array:
        """Memory of its own to read weights into, on large pages where the system has them: uint8
        (rows, columns), evaluated; nobody has written anything there. It begins where a page of a
        file has byte `at`. old: such an array of that size, whose memory is to be used again.
        Raises MemoryError where there is none."""
        try:
            return _made(self._memory, rows, columns, at, _given(old))
        except ValueError as error:
            raise error if old is not None else MemoryError(*error.args) from error

    def settle(self, array: mx.array) -> None:
        """Has an array (...) of any dtype, evaluated and of a MiB at least, lie on large pages from
        now on, where the system has them and will; what it holds stays as it is."""
        self._settle(array)

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
        """Products, lazy, of the dtype of x, or float32 where the matrix has another.

        x: (..., columns) float32, float16 or bfloat16. weight: (rows, columns) of such a dtype; or
        packed, (rows, columns * bits / 32) uint32, with scales and biases, (rows, columns / group
        size); or mxfp4, 4 bits in groups of 32, with uint8 scales and no biases.
        experts: of a stack, (experts, rows, ...), the ones to multiply x (..., m, columns) with,
        uint32 (...), broadcast; gives (..., m, rows). activation_bits: PAIRS, DIGITS or WIDE.
        bias: (rows,), with x in float32 and no stack. Raises ValueError for arrays that do not fit
        together.
        """
        some = [_given(array) for array in (scales, biases, bias, experts)]
        return _made(self._product, x, weight, *some, bits, group_size, activation_bits)

    def feed_forward(
        self,
        x: mx.array,
        parts: Sequence[Operand],
        kind: int = 0,
        experts: mx.array | None = None,
        activation_bits: int = DIGITS,
        biases: Sequence[mx.array | None] = (None,) * 3,
    ) -> mx.array:
        """down(activation(gate(x)) * up(x)), lazy, between them in float32; of the dtype of x, or
        float32 where a matrix has another. x: (..., columns). parts: gate, up and down; or the
        rows of gate and then of up in one matrix, and down; or up and down. kind: the activation's
        place in ACTIVATIONS, and ALONE for the last. experts: of stacks, the ones for each vector,
        uint32 (..., k); gives (..., k, rows). biases: of the parts, float32 (rows,), of stacks
        (experts, rows). Raises ValueError, see `multiply`."""
        arrays = [array for part, bias in zip(parts, biases) for array in (*part[:3], bias)]
        given = Given(arrays, [number for part in parts for number in part[3:]], activation_bits)
        return _made(self._feed_forward, x, ctypes.byref(given), len(parts), _given(experts), kind)

    def rms_norm(
        self, x: mx.array, weight: mx.array | None, eps: float, plus: float = 0.0
    ) -> mx.array:
        """x / sqrt(mean(x^2) + eps) * (weight + plus) over the last axis, computed in float32, of
        the dtype that x and the weight have in common; lazy. x: (..., n). weight: (n,), None for
        zeros. Raises ValueError for other shapes and dtypes, as all that follows."""
        return _made(self._norm, x, _given(weight), NONE, False, plus, eps)

    def layer_norm(
        self, x: mx.array, weight: mx.array | None, bias: mx.array | None, eps: float
    ) -> mx.array:
        """(x - mean) / sqrt(variance + eps) * weight + bias likewise. weight: None for ones, and no
        bias. bias: (n,), of the dtype of the weight, None for zeros."""
        return _made(self._norm, x, _given(weight), _given(bias), True, 0.0, eps)

    def rope(
        self,
        x: mx.array,
        dims: int,
        frequencies: mx.array,
        offset: int | mx.array,
        *,
        inverse: bool = False,
        scale: float = 1.0,
        factor: float = 1.0,
        traditional: bool = False,
    ) -> mx.array:
        """As mx.fast.rope, lazy. x: (batch, heads, length, n) or (batch, length, n). frequencies:
        float32 (dims / 2,), in radians a position; inverse: 1 over them. offset: a number, or int32
        () or (batch,). factor: that the rotated numbers are multiplied by."""
        given = isinstance(offset, mx.array)
        return _made(
            self._rotate, x, frequencies, offset if given else NONE, 0 if given else offset, dims,
            traditional, inverse, scale, factor,
        )  # fmt: skip

    def gate(self, gate: mx.array, x: mx.array | None, activation: str) -> mx.array:
        """activation(gate) * x, lazy. Both (..., n) of one dtype; x: None for ones. activation: of
        ACTIVATIONS, see kernels/rows.h; "gelu" is the one by tanh, "swiglu_oai" that of gpt-oss.
        Raises ValueError where they differ."""
        return _made(self._gate, gate, _given(x), ACTIVATIONS.index(activation))

    def gated_delta(
        self,
        arrays: Sequence[mx.array | None],
        state: mx.array | None = None,
        mask: mx.array | None = None,
        rate_factor: float = 1.0,
    ) -> tuple[mx.array, mx.array]:
        """The gated delta rule, lazy: y (B, T, value heads, value size), and the state after it.

        arrays: float32 q and k (B, T, key heads, key size), v (B, T, value heads, value size), a
        and b (B, T, value heads), a_log and bias (value heads,); or a and bias with key size
        behind; or decays so in place of a, and None for a_log and bias. state: float32 (B, value
        heads, value size, key size), None for zeros. mask: bool (B, T). See kernels/recurrent.h."""
        y, after = mx.array(0), mx.array(0)
        given: list[Any] = [_given(one) for one in (*arrays, state, mask)]
        need(self._gated_delta(y, after, (ctypes.py_object * 9)(*given), rate_factor))
        return y, after

    def scan(
        self,
        arrays: Sequence[mx.array | None],
        state: mx.array | None = None,
        mask: mx.array | None = None,
        limits: tuple[float, float] = (0.0, float("inf")),
    ) -> tuple[mx.array, mx.array]:
        """Mamba-2's scan, lazy: y, of the shape of x, and the state after it.

        arrays: float32 x (B, T, heads, size), b and c (B, T, groups, state size), dt (B, T, heads),
        a_log, d and bias (heads,). state: float32 (B, heads, size, state size), None for zeros.
        mask: bool (B, T). limits: of dt. See kernels/recurrent.h.

        Or Mamba's selective scan: x and dt (B, T, channels), b and c (B, T, state size), a_log
        (channels, state size), d (channels,), as bias, or None; a state of the shape of a_log."""
        y, after = mx.array(0), mx.array(0)
        given: list[Any] = [_given(one) for one in (*arrays, state, mask)]
        need(self._scan(y, after, (ctypes.py_object * 9)(*given), *limits))
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
        """All of a layer of gated delta rules but its products, lazy: y (B, T, values), the last
        rows (B, kernel - 1, channels) of what was convolved, and the state after it.

        All float32. projections: (B, T, n), queries, keys, values and z of each key head, and b and
        a of each; or queries, keys and values, z, b, a. parameters: the convolution's weight
        (channels, kernel, 1), a_log and bias (value heads,), the norm's weight (value size,), of
        which eps is. heads: of keys and of values, sizes of each. before: such rows, None for
        zeros. state: see `gated_delta`."""
        y, last, after = mx.array(0), mx.array(0), mx.array(0)
        weight, *rest = parameters
        parts = [*projections, *[NONE] * (4 - len(projections))]
        given = [*parts, weight, _given(before), *rest, _given(state)]
        need(self._delta_layer(y, last, after, (ctypes.py_object * 10)(*given), *heads, eps))
        return y, last, after

    def convolve(
        self, x: mx.array, weight: mx.array, bias: mx.array | None = None, silu: bool = False
    ) -> mx.array:
        """As mx.conv1d with as many groups as channels, and SiLU after it; lazy, of the dtype of x.
        x: (B, T, channels). weight: (channels, kernel, 1), bias: (channels,), of one dtype."""
        return _made(self._convolve, x, weight, _given(bias), silu)

    def softmax(self, x: mx.array) -> mx.array:
        """Of x (..., n) over the last axis, computed in float32, of the dtype of x; lazy."""
        return _made(self._softmax, x)

    def log_sum_exp(self, x: mx.array) -> mx.array:
        """Of x (..., n) over the last axis: float32 (..., 1), lazy."""
        return _made(self._log_sum_exp, x)

    def distribution(self, x: mx.array) -> mx.array:
        """Of the softmax of x (..., n) over the last axis, float32 (..., 3), lazy: the largest
        number, the logarithm of the sum of exp(x - the largest), the entropy in nats."""
        return _made(self._distribution, x)

    def largest(self, x: mx.array) -> mx.array:
        """The first place of the largest of x (..., n) over the last axis, uint32 (...), lazy. NaN
        counts for nothing; of nothing else the place is 0."""
        return _made(self._largest, x)

    def partition(self, x: mx.array, kth: int) -> mx.array:
        """As mx.argpartition of x (..., n) over the last axis, kth from 0 on, lazy: uint32 (...,
        n). Of equal numbers the first is the smaller, NaN is larger than all."""
        return _made(self._partition, x, kth)

    def weighted_sum(self, x: mx.array, weights: mx.array) -> mx.array:
        """(x * weights[..., None]).sum(-2), in float32, lazy. x: (..., k, n). weights: float32
        (..., k)."""
        return _made(self._weighted_sum, x, weights)

    def route(
        self, logits: mx.array, choice: Choice, bias: mx.array | None = None
    ) -> tuple[mx.array, mx.array]:
        """The experts that logits (..., n) choose, uint32 (..., k), and their shares, float32 (...,
        k), lazy. bias: float32 (n,), that is added to what is chosen by."""
        which, shares = mx.array(0), mx.array(0)
        need(self._route(which, shares, logits, _given(bias), ctypes.byref(choice)))
        return which, shares

    def blend(self, x: mx.array, weights: mx.array, more: mx.array, gates: mx.array) -> mx.array:
        """(x * weights[..., None]).sum(-2) + sigmoid(gates) * more, lazy, all float32. x: (..., k,
        n). weights: (..., k). more: (..., n). gates: (..., 1)."""
        return _made(self._blend, x, weights, more, gates)

    def append(
        self, caches: Sequence[mx.array], new: Sequence[mx.array], first: int
    ) -> tuple[mx.array, ...]:
        """Keys and values of new positions, from `first` on, into caches, lazy: both caches, in
        their memory if nobody else has them, and both up to the last of these positions.

        caches: (B, heads, M, size), floats or as of `quantise`; one number, broadcast, holds
        nothing, and leaves anything around what is new: (B, heads, N, size), floats, rounded to
        that dtype, beyond float16 to its largest. Raises ValueError where they do not fit."""
        made: list[Any] = [mx.array(0) for _ in range(4)]
        given: list[Any] = [*caches, *new]
        arrays = ctypes.py_object * 4
        need(self._append(arrays(*made), arrays(*given), first))
        return tuple(made)

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
        """Attention as of mx.fast.scaled_dot_product_attention, lazy, (B, heads, N, value size), of
        the dtype of all three or float32.

        queries: (B, heads, N, size). keys, values: (B, key heads, M, size), float32, float16 or
        bfloat16 each, or what `quantise` gave, which counts as of the dtype of queries. mask:
        "causal", bool or added, such a dtype too, broadcast to (B, heads, N, M). sinks: float32
        (heads,). cap: scores are cap * tanh(score / cap), before the mask; 0 for as they are.
        Raises ValueError for what does not fit together.
        """
        given, causal = (mask, False) if isinstance(mask, mx.array) else (NONE, mask == "causal")
        some = _given(sinks)
        return _made(self._attend, queries, keys, values, given, some, scale, cap, causal)

    def quantise(self, x: mx.array) -> mx.array:
        """Rows x (..., n) in 8 bits, lazy: int8 (..., n + 4), the numbers and then, in four bytes,
        the float32 that they are multiplied by, the row's largest over 127. What is beyond 3e38
        counts as that; a row with NaN is NaN."""
        return _made(self._quantise, x)

    def dequantise(self, rows: mx.array) -> mx.array:
        """What such rows (..., n + 4) stand for, float32 (..., n), lazy."""
        return _made(self._dequantise, rows)


def _given(array: mx.array | None) -> Any:
    return NONE if array is None else array


def _made(function: Callable, *arguments: Any) -> mx.array:
    out = mx.array(0)
    need(function(out, *arguments))
    return out


def need(wrong: bytes | None) -> None:
    """Raises ValueError with what a function of the library says is wrong; None: nothing is."""
    if wrong is not None:
        raise ValueError(wrong.decode())


_in_use: Library | None = None


def use(library: Library | None) -> None:
    """What all native modules of this process compute with."""
    global _in_use
    _in_use = library


def in_use() -> Library | None:
    """The library that modules of this process compute with; None without one."""
    return _in_use


@cache
def load(path: str) -> Library:
    """The library of a path, once. Raises OSError."""
    atexit.register(_leave, library := Library(path))
    return library


def _leave(library: Library) -> None:
    """Where the process ends: what is awaited is not waited for any more, but steps that are under
    way are, or memory would be taken from under them, at which glibc ends the process."""
    library.loaded.toast_leave()
    with suppress(KeyboardInterrupt, RuntimeError):  # of a process that may have no more threads
        mx.synchronize()
