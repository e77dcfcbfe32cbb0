"""What kernels/rows.h does, through their C interface, with numpy: calls and oracles."""

from __future__ import annotations

import ctypes
import math
from typing import Any

import numpy as np

from tests.unit.native_kernels import KEPT_TYPES, TYPES, Kernels, stored, vectors

ACTIVATIONS = ("silu", "gelu", "sigmoid", "gelu_erf", "swiglu_oai", "finite", "relu2")


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


def room(shape: tuple[int, ...], type_: str) -> np.ndarray:
    return stored(np.full(shape, 7.0, np.float32), type_)


def numbers(seed: int, shape: tuple[int, ...], type_: str, gap: int = 0) -> np.ndarray:
    """Random ones of very different sizes, with a gap after each row."""
    rng = np.random.default_rng(seed)
    values = rng.normal(size=(*shape[:-1], shape[-1] + gap)) * 4
    return stored(values, type_)[..., : shape[-1]]


def call(kernels: Kernels, name: str, *given: Any) -> None:
    """Calls toast_NAME. Arrays and structures are given by their address, floats as float32, whole
    numbers in 64 bits, of which a function may take half. Raises ValueError for its code."""
    some = []
    for one in given:
        if isinstance(one, np.ndarray):
            one = ctypes.c_void_p(one.ctypes.data)
        elif isinstance(one, ctypes.Structure):
            one = ctypes.byref(one)
        elif isinstance(one, (int, float)):
            one = ctypes.c_int64(one) if isinstance(one, int) else ctypes.c_float(one)
        some.append(one)
    if code := kernels.library[f"toast_{name}"](*some):
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
    types = [TYPES[kind] for kind in kinds]
    rows, some = vectors(x, kinds[0]), (float(plus), eps)
    call(kernels, "rms_norm", rows, x.shape[-1], weight, types[1], *some, out, types[2])
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
    types, rows = [TYPES[kind] for kind in kinds], vectors(x, kinds[0])
    call(kernels, "layer_norm", rows, x.shape[-1], weight, bias, types[1], eps, out, types[2])
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
    call(kernels, "rotate", heads, rotation, out)
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
    to = (ctypes.c_int64 * 3)(*(n // out.itemsize for n in out.strides[:3]))
    some = heads, cache.shape[2], first
    call(kernels, "append", *some, out, to, KEPT_TYPES[out_type])
    return out


def gated(
    kernels: Kernels, gate: np.ndarray, x: np.ndarray | None, type_: str, kind: str
) -> np.ndarray:
    out = room(gate.shape, type_)
    call(kernels, "gate", gate, x, gate.size, TYPES[type_], ACTIVATIONS.index(kind), out)
    return out


def rows_added(
    kernels: Kernels, x: np.ndarray, rows: np.ndarray, which: np.ndarray | None
) -> np.ndarray:
    """x: float32 (count, n). rows: float32 (stack, n). which: uint32 (count,)."""
    out = x.copy()
    call(kernels, "add_rows", out, len(x), x.shape[-1], rows, len(rows), which)
    return out


def softmax(kernels: Kernels, x: np.ndarray, kinds: tuple) -> np.ndarray:
    out = room(x.shape, kinds[1])
    call(kernels, "softmax", vectors(x, kinds[0]), x.shape[-1], out, TYPES[kinds[1]])
    return out


def log_sum_exp(kernels: Kernels, x: np.ndarray, type_: str) -> np.ndarray:
    out = room(x.shape[:1], "f32")
    call(kernels, "log_sum_exp", vectors(x, type_), x.shape[-1], out)
    return out


def distribution(kernels: Kernels, x: np.ndarray, type_: str) -> np.ndarray:
    out = room((len(x), 4), "f32")
    call(kernels, "distribution", vectors(x, type_), x.shape[-1], out)
    return out


def largest(kernels: Kernels, x: np.ndarray, type_: str) -> np.ndarray:
    out = np.full(len(x), 7, np.uint32)
    call(kernels, "largest", vectors(x, type_), x.shape[-1], out)
    return out


def partition(kernels: Kernels, x: np.ndarray, type_: str, kth: int) -> np.ndarray:
    out = np.full(x.shape, 7, np.uint32)
    call(kernels, "partition", vectors(x, type_), x.shape[-1], kth, out)
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
    some = vectors(x, type_), x.shape[-1], choice
    call(kernels, "route", *some, bias, which, shares)
    return which, shares


def blended(
    kernels: Kernels, x: np.ndarray, weights: np.ndarray, more: np.ndarray, gates: np.ndarray,
    type_: str,
) -> np.ndarray:  # fmt: skip
    """x: (groups * group, n) of a type. float32: weights (groups * group,), more (groups, n), gates
    (groups,)."""
    out, group = room(more.shape, "f32"), len(x) // max(1, len(more))
    arrays = weights, more, gates, out
    call(kernels, "blend", vectors(x, type_), x.shape[-1], max(1, group), *arrays)
    return out


def quantised_rows(kernels: Kernels, x: np.ndarray, type_: str) -> tuple[np.ndarray, np.ndarray]:
    """x: (count, n). Gives int8 (count, n + 4), and what that stands for, float32 (count, n)."""
    rows = np.full((len(x), x.shape[-1] + 4), 7, np.int8)
    wide, size = room(x.shape, "f32"), x.shape[-1]
    call(kernels, "quantise", vectors(x, type_), size, rows)
    call(kernels, "dequantise", rows, len(x), size, wide)
    return rows, wide


def weighted_sums(
    kernels: Kernels, x: np.ndarray, weights: np.ndarray, kinds: tuple, group: int
) -> np.ndarray:
    """x: (groups * group, n). weights: float32 (groups * group,)."""
    out = room((len(x) // group, x.shape[-1]), kinds[1])
    rows = vectors(x, kinds[0])
    call(kernels, "weighted_sums", rows, x.shape[-1], group, weights, out, TYPES[kinds[1]])
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
