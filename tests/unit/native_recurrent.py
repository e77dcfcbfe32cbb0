"""What kernels/recurrent.h does, and the convolution of kernels/rows.h, through their C interface,
with numpy: calls, inputs and oracles."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from tests.unit.native_kernels import TYPES, Kernels
from tests.unit.native_rows import call, room

Fields = list[tuple[str, Any]]


def _pointers(*names: str) -> Fields:
    return [(name, ctypes.c_void_p) for name in names]


def _sizes(*names: str) -> Fields:
    return [(name, ctypes.c_int64) for name in names]


class _Delta(ctypes.Structure):
    _fields_ = [
        *_sizes("batch", "length", "key_heads", "value_heads", "key_size", "value_size"),
        *_pointers("q", "k", "v", "a", "b", "a_log", "bias"), ("rate_factor", ctypes.c_float),
        ("columns", ctypes.c_int32), *_pointers("mask", "state"),
    ]  # fmt: skip


class _Projection(ctypes.Structure):
    _fields_ = [*_pointers("data"), *_sizes("step", "head")]


class _Layer(ctypes.Structure):
    _fields_ = [
        *_sizes("batch", "length", "key_heads", "value_heads", "key_size", "value_size"),
        *((name, _Projection) for name in ("q", "k", "v", "z", "a", "b")), *_sizes("kernel"),
        *_pointers("weight", "before", "a_log", "bias", "norm"), ("eps", ctypes.c_float),
        *_pointers("state"),
    ]  # fmt: skip


class _Scan(ctypes.Structure):
    _fields_ = [
        *_sizes("batch", "length", "heads", "size", "groups", "state_size"),
        *_pointers("x", "b", "c", "dt", "a_log", "d", "bias"),
        ("least", ctypes.c_float), ("most", ctypes.c_float), ("selective", ctypes.c_int32),
        *_pointers("mask", "state"),
    ]  # fmt: skip


class _Wkv(ctypes.Structure):
    _fields_ = [
        *_sizes("batch", "length", "heads", "size"), *_pointers(*"rwkvab", "state"),
    ]  # fmt: skip


class _Linear(ctypes.Structure):
    _fields_ = [*_sizes("batch", "length", "channels"), *_pointers("decays", "x", "state")]


class _Convolution(ctypes.Structure):
    _fields_ = [
        *_sizes("batch", "length", "channels", "kernel"), *_pointers("x"),
        ("strides", ctypes.c_int64 * 2), *_pointers("before"),
        ("before_strides", ctypes.c_int64 * 2), ("type", ctypes.c_int32),
        *_pointers("weight", "bias"), ("weight_type", ctypes.c_int32), ("silu", ctypes.c_int32),
        *_sizes("out_step"),
    ]  # fmt: skip


def _of(*arrays: np.ndarray | None) -> list[int | None]:
    return [None if one is None else one.ctypes.data for one in arrays]


def _after(shape: tuple[int, ...], state: np.ndarray | None, in_place: bool) -> np.ndarray:
    return room(shape, "f32") if state is None or not in_place else state


def delta(
    kernels: Kernels,
    arrays: list,
    state: np.ndarray | None,
    mask: np.ndarray | None = None,
    factor: float = 1.0,
    in_place: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """y and the state after it. arrays: as toast_delta has them."""
    batch, length, key_heads, key_size = arrays[1].shape
    _, _, value_heads, value_size = arrays[2].shape
    sizes = (batch, length, key_heads, value_heads, key_size, value_size)
    of = _Delta(*sizes, *_of(*arrays), factor, arrays[3].ndim == 4, *_of(mask, state))
    y = room(arrays[2].shape, "f32")
    after = _after((batch, value_heads, value_size, key_size), state, in_place)
    call(kernels, "gated_delta", of, y, after)
    return y, after


def scanned(
    kernels: Kernels,
    arrays: list[np.ndarray],
    state: np.ndarray | None,
    mask: np.ndarray | None = None,
    limits: tuple[float, float] = (0.0, np.inf),
    in_place: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """Likewise. arrays: as toast_scan has them, of a selective one too."""
    batch, length, heads, size = arrays[0].shape
    groups, state_size = arrays[1].shape[2:]
    sizes = (batch, length, heads, size, groups, state_size)
    of = _Scan(*sizes, *_of(*arrays), *limits, arrays[3].ndim == 4, *_of(mask, state))
    y, after = (
        room(arrays[0].shape, "f32"),
        _after((batch, heads, size, state_size), state, in_place),
    )
    call(kernels, "scan_steps", of, y, after)
    return y, after


def wkv(
    kernels: Kernels, arrays: list[np.ndarray], state: np.ndarray | None, in_place: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Likewise. arrays: r, w, k, v, a, b."""
    batch, _, heads, size = shape = arrays[0].shape
    of = _Wkv(*shape, *_of(*arrays, state))
    y, after = room(shape, "f32"), _after((batch, heads, size, size), state, in_place)
    call(kernels, "wkv_steps", of, y, after)
    return y, after


def linear(
    kernels: Kernels, decays: np.ndarray, x: np.ndarray, state: np.ndarray | None
) -> np.ndarray:
    """The states after each step."""
    of = _Linear(*x.shape, *_of(decays, x, state))
    h = room(x.shape, "f32")
    kernels.library.toast_linear_steps(ctypes.byref(of), ctypes.c_void_p(h.ctypes.data))
    return h


def convolved(
    kernels: Kernels,
    x: np.ndarray,
    weight: np.ndarray,
    bias: np.ndarray | None = None,
    before: np.ndarray | None = None,
    kinds: tuple[str, str, str] = ("f32", "f32", "f32"),
    silu: bool = False,
) -> np.ndarray:
    """x: (batch, length, channels), the last contiguous. before: (batch, kernel - 1, channels).
    weight: (channels, kernel). kinds: of x, of the weight, of what comes out."""
    strides = [
        (ctypes.c_int64 * 2)(*(n // x.itemsize for n in some.strides[:2]))
        for some in (x, x if before is None else before)
    ]
    of = _Convolution(
        *x.shape, weight.shape[1], *_of(x), strides[0], *_of(before), strides[1], TYPES[kinds[0]],
        *_of(weight, bias), TYPES[kinds[1]], silu, x.shape[2],
    )  # fmt: skip
    out = room(x.shape, kinds[2])
    call(kernels, "convolve", of, out, TYPES[kinds[2]])
    return out


def layer(
    kernels: Kernels,
    projections: dict[str, np.ndarray],
    parameters: dict[str, np.ndarray],
    before: np.ndarray | None,
    state: np.ndarray | None,
    eps: float,
    in_place: bool = False,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """y, the rows that stay for the next convolution, the state after it. projections: q, k, v, z,
    a and b, each (batch, length, key heads, n), the last contiguous. parameters: weight (channels,
    kernel), a_log, bias, norm."""
    batch, length, key_heads, key_size = projections["k"].shape
    value_heads, (value_size,) = len(parameters["bias"]), parameters["norm"].shape
    channels, kernel = parameters["weight"].shape
    parts = [
        _Projection(one.ctypes.data, one.strides[1] // 4, one.strides[2] // 4)
        for one in (projections[name] for name in "qkvzab")
    ]
    of = _Layer(
        batch, length, key_heads, value_heads, key_size, value_size, *parts, kernel,
        *_of(parameters["weight"], before, *(parameters[n] for n in ("a_log", "bias", "norm"))),
        eps, *_of(state),
    )  # fmt: skip
    y, last = (
        room((batch, length, value_heads, value_size), "f32"),
        room((batch, kernel - 1, channels), "f32"),
    )
    after = _after((batch, value_heads, value_size, key_size), state, in_place)
    call(kernels, "delta_layer_steps", of, y, last, after)
    return y, last, after


def of_heads(seed: int, batch: int, length: int, heads: tuple, sizes: tuple) -> list:
    """What the rule takes, keys of length 1."""
    rng = np.random.default_rng(seed)
    keys, gates = (batch, length, heads[0], sizes[0]), (batch, length, heads[1])
    shapes = [keys, keys, (*gates, sizes[1]), gates, gates, heads[1:], heads[1:]]
    arrays = [rng.normal(size=shape).astype(np.float32) for shape in shapes]
    for array in arrays[:2]:
        array /= np.sqrt((array**2).sum(-1, keepdims=True))
    return arrays


def of_layer(seed: int, batch: int, length: int, heads: tuple, sizes: tuple, kernel: int) -> tuple:
    """The projections of a layer of gated delta rules, as Qwen3-Next has them side by side for each
    key head, and its parameters."""
    rng = np.random.default_rng(seed)
    each, values = heads[1] // heads[0], heads[1] // heads[0] * sizes[1]

    def parts(names: str, *widths: int) -> dict[str, np.ndarray]:
        array = rng.normal(size=(batch, length, heads[0], sum(widths))).astype(np.float32)
        return dict(zip(names, np.split(array, np.cumsum(widths)[:-1], -1)))

    projections = {**parts("qkvz", sizes[0], sizes[0], values, values), **parts("ba", each, each)}
    channels = 2 * heads[0] * sizes[0] + heads[1] * sizes[1]
    shapes = {"weight": (channels, kernel), "a_log": heads[1:], "bias": heads[1:],
              "norm": sizes[1:]}  # fmt: skip
    return projections, {n: rng.normal(size=s).astype(np.float32) for n, s in shapes.items()}


def flat(steps: np.ndarray) -> np.ndarray:
    """(batch, length, heads, n) -> (batch, length, heads * n)."""
    return steps.reshape(*steps.shape[:2], steps.shape[2] * steps.shape[3])


def mixed(projections: dict[str, np.ndarray]) -> np.ndarray:
    """Queries, keys and values as they are convolved: (batch, length, channels)."""
    return np.concatenate([flat(projections[name]) for name in "qkv"], -1)


def of_scan(seed: int, batch: int, length: int, heads: tuple, sizes: tuple) -> list[np.ndarray]:
    """What Mamba-2's scan takes. heads: and groups of them. sizes: of a head, of its state."""
    rng = np.random.default_rng(seed)
    steps, groups = (batch, length, heads[0]), (batch, length, heads[1], sizes[1])
    shapes = [(*steps, sizes[0]), groups, groups, steps, heads[:1], heads[:1], heads[:1]]
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


def of_selective_scan(seed: int, batch: int, length: int, sizes: tuple) -> list:
    """What Mamba's takes: of one head, of so many channels and such a state."""
    rng = np.random.default_rng(seed)
    steps, group, own = (batch, length, 1, sizes[0]), (batch, length, 1, sizes[1]), (1, sizes[0])
    shapes = [steps, group, group, steps, (1, *sizes), own, own]
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


def of_wkv(seed: int, batch: int, length: int, heads: int, size: int) -> list[np.ndarray]:
    """What RWKV-7's rule takes: as there, b is the key that is replaced, times a rate."""
    rng = np.random.default_rng(seed)
    r, k, v, a = (rng.normal(size=(batch, length, heads, size)) for _ in range(4))
    a /= np.sqrt((a**2).sum(-1, keepdims=True))
    w, rate = rng.uniform(0.5, 1, a.shape), rng.random(a.shape)
    return [one.astype(np.float32) for one in (r, w, k, v, a, -a * rate)]
