"""What kernels/rows.h does, through their C interface, with numpy: calls and oracles."""

from __future__ import annotations

import ctypes
import math
from typing import Any

import numpy as np

from tests.unit.native_kernels import KEPT_TYPES, TYPES, Kernels, stored

ACTIVATIONS = ("silu", "gelu", "sigmoid", "gelu_erf", "swiglu_oai", "finite", "relu2")


class Vectors(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p), ("count", ctypes.c_int64), ("stride", ctypes.c_int64),
        ("type", ctypes.c_int32),
    ]  # fmt: skip


class Heads(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("batch", "heads", "length", "size")),
        ("strides", ctypes.c_int64 * 3), ("type", ctypes.c_int32),
    ]  # fmt: skip


class Rotation(ctypes.Structure):
    _fields_ = [
        ("dims", ctypes.c_int64), ("frequencies", ctypes.c_void_p), ("inverse", ctypes.c_int32),
        ("offsets", ctypes.c_void_p), ("offset_count", ctypes.c_int64), ("scale", ctypes.c_float),
        ("factor", ctypes.c_float), ("traditional", ctypes.c_int32),
    ]  # fmt: skip


def pointer(array: np.ndarray | None) -> ctypes.c_void_p | None:
    return None if array is None else ctypes.c_void_p(array.ctypes.data)


def vectors(x: np.ndarray, type_: str) -> Any:
    return ctypes.byref(Vectors(x.ctypes.data, len(x), x.strides[0] // x.itemsize, TYPES[type_]))


def room(shape: tuple[int, ...], type_: str) -> np.ndarray:
    return stored(np.full(shape, 7.0, np.float32), type_)


def numbers(seed: int, shape: tuple[int, ...], type_: str, gap: int = 0) -> np.ndarray:
    """Random ones of very different sizes, with a gap after each row."""
    rng = np.random.default_rng(seed)
    values = rng.normal(size=(*shape[:-1], shape[-1] + gap)) * 4
    return stored(values, type_)[..., : shape[-1]]


def check(code: int) -> None:
    if code:
        raise ValueError(code)


def normed(
    kernels: Kernels,
    x: np.ndarray,
    weight: np.ndarray | None,
    kinds: tuple,
    plus: float = 0,
    eps: float = 1e-5,
) -> np.ndarray:
    out = room(x.shape, kinds[2])
    check(kernels.library.toast_rms_norm(
        vectors(x, kinds[0]), ctypes.c_int64(x.shape[-1]), pointer(weight), TYPES[kinds[1]],
        ctypes.c_float(plus), ctypes.c_float(eps), pointer(out), TYPES[kinds[2]],
    ))  # fmt: skip
    return out


def centred(
    kernels: Kernels,
    x: np.ndarray,
    weight: np.ndarray | None,
    bias: np.ndarray | None,
    kinds: tuple,
    eps: float = 1e-5,
) -> np.ndarray:
    out = room(x.shape, kinds[2])
    check(kernels.library.toast_layer_norm(
        vectors(x, kinds[0]), ctypes.c_int64(x.shape[-1]), pointer(weight), pointer(bias),
        TYPES[kinds[1]], ctypes.c_float(eps), pointer(out), TYPES[kinds[2]],
    ))  # fmt: skip
    return out


def rotated(
    kernels: Kernels,
    x: np.ndarray,
    type_: str,
    frequencies: np.ndarray,
    offsets: np.ndarray,
    inverse: bool = False,
    scale: float = 1.0,
    factor: float = 1.0,
    traditional: bool = False,
) -> np.ndarray:
    """x: (batch, heads, length, size), the last contiguous. offsets: int32 (batch,) or (1,)."""
    out = room(x.shape, type_)
    strides = [n // x.itemsize for n in x.strides[:3]]
    heads = Heads(x.ctypes.data, *x.shape, (ctypes.c_int64 * 3)(*strides), TYPES[type_])
    rotation = Rotation(
        2 * len(frequencies), frequencies.ctypes.data, inverse, offsets.ctypes.data, len(offsets),
        scale, factor, traditional,
    )  # fmt: skip
    check(kernels.library.toast_rotate(
        ctypes.byref(heads), ctypes.byref(rotation), pointer(out)
    ))  # fmt: skip
    return out


def appended(
    kernels: Kernels, x: np.ndarray, type_: str, cache: np.ndarray, out_type: str, first: int
) -> np.ndarray:
    """A copy of a cache (batch, heads, positions, size), stored as out_type has it, as it lies in
    memory, with x (batch, heads, length, size), from position `first` on. The last axis of both is
    contiguous."""
    out = cache.copy(order="K")
    strides = [n // x.itemsize for n in x.strides[:3]]
    heads = Heads(x.ctypes.data, *x.shape, (ctypes.c_int64 * 3)(*strides), TYPES[type_])
    check(kernels.library.toast_append(
        ctypes.byref(heads), ctypes.c_int64(cache.shape[2]), ctypes.c_int64(first),
        ctypes.c_void_p(out.ctypes.data),
        (ctypes.c_int64 * 3)(*(n // out.itemsize for n in out.strides[:3])), KEPT_TYPES[out_type],
    ))  # fmt: skip
    return out


def gated(
    kernels: Kernels, gate: np.ndarray, x: np.ndarray | None, type_: str, kind: str
) -> np.ndarray:
    out = room(gate.shape, type_)
    check(kernels.library.toast_gate(
        pointer(gate), pointer(x), ctypes.c_int64(gate.size), TYPES[type_],
        ACTIVATIONS.index(kind), pointer(out),
    ))  # fmt: skip
    return out


def rows_added(
    kernels: Kernels, x: np.ndarray, rows: np.ndarray, which: np.ndarray | None
) -> np.ndarray:
    """x: float32 (count, n). rows: float32 (stack, n). which: uint32 (count,)."""
    out = x.copy()
    check(kernels.library.toast_add_rows(
        pointer(out), ctypes.c_int64(len(x)), ctypes.c_int64(x.shape[-1]), pointer(rows),
        ctypes.c_int64(len(rows)), pointer(which),
    ))  # fmt: skip
    return out


def softmax(kernels: Kernels, x: np.ndarray, kinds: tuple) -> np.ndarray:
    out = room(x.shape, kinds[1])
    check(kernels.library.toast_softmax(
        vectors(x, kinds[0]), ctypes.c_int64(x.shape[-1]), pointer(out), TYPES[kinds[1]]
    ))  # fmt: skip
    return out


def log_sum_exp(kernels: Kernels, x: np.ndarray, type_: str) -> np.ndarray:
    out = room(x.shape[:1], "f32")
    check(kernels.library.toast_log_sum_exp(
        vectors(x, type_), ctypes.c_int64(x.shape[-1]), pointer(out)
    ))  # fmt: skip
    return out


def distribution(kernels: Kernels, x: np.ndarray, type_: str) -> np.ndarray:
    out = room((len(x), 3), "f32")
    check(kernels.library.toast_distribution(
        vectors(x, type_), ctypes.c_int64(x.shape[-1]), pointer(out)
    ))  # fmt: skip
    return out


def largest(kernels: Kernels, x: np.ndarray, type_: str) -> np.ndarray:
    out = np.full(len(x), 7, np.uint32)
    size = ctypes.c_int64(x.shape[-1])
    check(kernels.library.toast_largest(vectors(x, type_), size, pointer(out)))
    return out


def partition(kernels: Kernels, x: np.ndarray, type_: str, kth: int) -> np.ndarray:
    out = np.full(x.shape, 7, np.uint32)
    size = ctypes.c_int64(x.shape[-1])
    check(kernels.library.toast_partition(
        vectors(x, type_), size, ctypes.c_int64(kth), pointer(out)
    ))  # fmt: skip
    return out


class Choice(ctypes.Structure):
    """toast_choice, see kernels/rows.h."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("chosen", "how", "groups", "kept")),
        ("eps", ctypes.c_float), ("factor", ctypes.c_float),
    )  # fmt: skip


def routed(
    kernels: Kernels, x: np.ndarray, type_: str, choice: Choice, bias: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """x: (count, n). bias: float32 (n,). Gives uint32 and float32 (count, chosen)."""
    shape = len(x), choice.chosen
    which, shares = np.full(shape, 7, np.uint32), room(shape, "f32")
    check(kernels.library.toast_route(
        vectors(x, type_), ctypes.c_int64(x.shape[-1]), ctypes.byref(choice),
        None if bias is None else pointer(bias), pointer(which), pointer(shares),
    ))  # fmt: skip
    return which, shares


def blended(
    kernels: Kernels, x: np.ndarray, weights: np.ndarray, more: np.ndarray, gates: np.ndarray,
    type_: str,
) -> np.ndarray:  # fmt: skip
    """x: (groups * group, n) of a type. float32: weights (groups * group,), more (groups, n), gates
    (groups,)."""
    out, group = room(more.shape, "f32"), len(x) // max(1, len(more))
    check(kernels.library.toast_blend(
        vectors(x, type_), ctypes.c_int64(x.shape[-1]), ctypes.c_int64(max(1, group)),
        *map(pointer, (weights, more, gates, out)),
    ))  # fmt: skip
    return out


def quantised_rows(kernels: Kernels, x: np.ndarray, type_: str) -> tuple[np.ndarray, np.ndarray]:
    """x: (count, n). Gives int8 (count, n + 4), and what that stands for, float32 (count, n)."""
    rows = np.full((len(x), x.shape[-1] + 4), 7, np.int8)
    wide, size = room(x.shape, "f32"), ctypes.c_int64(x.shape[-1])
    check(kernels.library.toast_quantise(vectors(x, type_), size, pointer(rows)))
    count = ctypes.c_int64(len(x))
    check(kernels.library.toast_dequantise(pointer(rows), count, size, pointer(wide)))
    return rows, wide


def weighted_sums(
    kernels: Kernels, x: np.ndarray, weights: np.ndarray, kinds: tuple, group: int
) -> np.ndarray:
    """x: (groups * group, n). weights: float32 (groups * group,)."""
    out = room((len(x) // group, x.shape[-1]), kinds[1])
    check(kernels.library.toast_weighted_sums(
        vectors(x, kinds[0]), ctypes.c_int64(x.shape[-1]), ctypes.c_int64(group),
        pointer(weights), pointer(out), TYPES[kinds[1]],
    ))  # fmt: skip
    return out


def activated(x: np.ndarray, kind: str) -> np.ndarray:
    """Of ACTIVATIONS, in numpy."""
    with np.errstate(over="ignore"):
        if kind == "gelu_erf":
            return x * (1 + np.vectorize(math.erf, otypes=[float])(x / np.sqrt(2))) / 2
        if kind == "finite":
            return x
        if kind == "relu2":
            return np.maximum(x, 0) ** 2
        if kind == "swiglu_oai":
            x = np.minimum(x, 7)
            return x / (1 + np.exp(-1.702 * x))
        if kind == "gelu":
            return x / (1 + np.exp(-2 * np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
        return (1 if kind == "sigmoid" else x) / (1 + np.exp(-x))
