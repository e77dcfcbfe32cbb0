"""Attention of the kernels through their C interface, with numpy: what tests ask for, and what it
should be."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from hypothesis import strategies as st

from tests.unit.native_kernels import KEPT_TYPES, TYPES, Kernels, read, stored

MASKS = {"all": 0, "causal": 1, "visible": 2, "added": 3}
LOWEST = {"f32": np.finfo(np.float32).min, "f16": np.finfo(np.float16).min, "bf16": -3.3895314e38}


class _Rows(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p), ("strides", ctypes.c_int64 * 3), ("type", ctypes.c_int32),
    ]  # fmt: skip


class _Attention(ctypes.Structure):
    _fields_ = [
        *((name, _Rows) for name in ("queries", "keys", "values")),
        *((name, ctypes.c_int64) for name in (
            "batch", "heads", "key_heads", "positions", "key_positions", "key_size", "value_size",
        )),
        ("scale", ctypes.c_float), ("masking", ctypes.c_int32), ("mask", ctypes.c_void_p),
        ("mask_strides", ctypes.c_int64 * 3), ("mask_type", ctypes.c_int32),
        ("sinks", ctypes.c_void_p), ("cap", ctypes.c_float),
    ]  # fmt: skip


def _strides(array: np.ndarray) -> tuple[int, ...]:
    """Of the first three axes, in numbers; 0 along those that are broadcast."""
    return tuple(0 if n == 1 else s // array.itemsize for n, s in zip(array.shape, array.strides))[
        :3
    ]


def _rows(array: np.ndarray, type_: str) -> _Rows:
    return _Rows(array.ctypes.data, (ctypes.c_int64 * 3)(*_strides(array)), KEPT_TYPES[type_])


class Asked(NamedTuple):
    """What is asked. queries: (B, heads, N, size); keys, values: (B, key heads, M, size), all as
    stored, of `types`. mask: None, "causal", bool or `mask_type` (B or 1, heads or 1, N or 1, M).
    sinks: float32 (heads,). cap: 0 for none."""

    queries: np.ndarray
    keys: np.ndarray
    values: np.ndarray
    types: tuple[str, str, str]
    scale: float
    mask: np.ndarray | str | None = None
    mask_type: str = "f32"
    sinks: np.ndarray | None = None
    cap: float = 0.0

    def of_batch(self, row: int, padding: int = 0) -> Asked:
        """One of its batch alone, without so many keys at the beginning."""
        mask = self.mask
        if isinstance(mask, np.ndarray):
            mask = mask[row if len(mask) > 1 else 0][None][..., padding:]
        return self._replace(
            queries=self.queries[row : row + 1], keys=self.keys[row : row + 1, :, padding:],
            values=self.values[row : row + 1, :, padding:], mask=mask,
        )  # fmt: skip


def _described(asked: Asked) -> _Attention:
    (batch, heads, positions, size), (_, key_heads, keys, _) = asked.queries.shape, asked.keys.shape
    mask, masking = asked.mask, 0
    if isinstance(mask, str):
        mask, masking = None, MASKS[mask]
    elif mask is not None:
        masking = MASKS["visible" if mask.dtype == bool else "added"]
    return _Attention(
        *(_rows(a, t) for a, t in zip(asked[:3], asked.types)), batch, heads, key_heads, positions,
        keys, size, _width(asked), asked.scale, masking,
        None if mask is None else mask.ctypes.data,
        (ctypes.c_int64 * 3)(*((0, 0, 0) if mask is None else _strides(mask))),
        TYPES[asked.mask_type], None if asked.sinks is None else asked.sinks.ctypes.data,
        asked.cap,
    )  # fmt: skip


def _width(asked: Asked) -> int:
    return asked.values.shape[-1] - 4 * (asked.types[2] == "i8")


def attend(kernels: Kernels, asked: Asked, out_type: str = "f32") -> np.ndarray:
    """Of out_type, (B, heads, N, value size), from memory that is (B, N, heads, value size).
    Raises ValueError where the kernels refuse."""
    [out] = attend_all(kernels, [asked], out_type, kernels.library.toast_attend)
    return out


def attend_all(
    kernels: Kernels, several: Sequence[Asked], out_type: str = "f32", alone: Any = None
) -> list[np.ndarray]:
    """Of each; they have the same queries and sizes. alone: the function, if it takes one."""
    batch, heads, positions, _ = several[0].queries.shape
    shape = (len(several), batch, positions, heads, _width(several[0]))
    outs = stored(np.full(shape, 7.0, np.float32), out_type).swapaxes(2, 3)
    strides = (ctypes.c_int64 * 3)(*(s // outs.itemsize for s in outs.strides[1:4]))
    calls = (_Attention * len(several))(*map(_described, several))
    to = (ctypes.c_void_p * len(several))(*(out.ctypes.data for out in outs))
    if alone is not None:
        code = alone(calls, ctypes.c_void_p(to[0]), strides, TYPES[out_type])
    else:
        code = kernels.library.toast_attend_all(calls, len(calls), to, strides, TYPES[out_type])
    if code:
        raise ValueError(code)
    return list(outs)


Wanted = tuple[np.ndarray, np.ndarray]


def wanted(asked: Asked) -> Wanted:
    """In float64: (B, heads, N, value size), and how large the values are that it is made of."""
    q, k, v = (read(array, type_) for array, type_ in zip(asked[:3], asked.types))
    (batch, heads, n, size), (_, key_heads, m, _) = q.shape, k.shape
    # The queries of heads that share their keys, one below the other: no key is copied for each.
    q = q.reshape(batch, key_heads, heads // key_heads * n, size)
    scores = (asked.scale * q @ k.swapaxes(-1, -2)).reshape(batch, heads, n, m)
    if asked.cap:
        scores = asked.cap * np.tanh(scores / asked.cap)
    mask = asked.mask
    if isinstance(mask, str):
        mask = np.arange(m) <= np.arange(n)[:, None] + max(m - n, 0)
    if mask is not None and mask.dtype == bool:
        scores = np.where(mask, scores, float(LOWEST["f32"]))
    elif mask is not None:
        scores = scores + read(mask, asked.mask_type)
    if asked.sinks is not None:
        sinks = np.broadcast_to(asked.sinks[:, None, None], (*scores.shape[:-1], 1))
        scores = np.concatenate([scores, sinks], -1)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights = (weights / weights.sum(-1, keepdims=True))[..., :m]
    weights = weights.reshape(batch, key_heads, heads // key_heads * n, m)
    shape = (batch, heads, n, v.shape[-1])
    return (weights @ v).reshape(shape), (weights @ abs(v)).reshape(shape)


def cached(seed: int, shape: tuple[int, ...], type_: str, layout: str) -> np.ndarray:
    """Random rows, (B, heads, positions, size), as a cache or a product leaves them in memory."""
    batch, heads, positions, size = shape
    values = np.random.default_rng(seed).normal(size=shape)
    if layout == "turned":  # (B, positions, heads, size)
        return stored(np.ascontiguousarray(values.swapaxes(1, 2)), type_).swapaxes(1, 2)
    rest = np.full((batch, heads, 5, size), np.nan, np.float32)
    return stored(np.concatenate([values, rest], 2), type_)[:, :, :positions]


def masked(
    seed: int, kind: str, shape: tuple[int, int, int, int], type_: str
) -> np.ndarray | str | None:
    """A mask of a kind, for scores of a shape (B, heads, N, M)."""
    batch, heads, n, m = shape
    if kind in ("none", "causal"):
        return None if kind == "none" else "causal"
    rng = np.random.default_rng(seed)
    sizes = [size if rng.random() < 0.5 else 1 for size in (batch, heads, n)]
    if kind == "window":
        behind = np.arange(n)[:, None] + m - n - np.arange(m)
        return ((behind >= 0) & (behind < rng.integers(1, m + 1)))[None, None]
    if kind == "padded":
        return np.arange(m) >= rng.integers(0, m, batch)[:, None, None, None]
    if kind == "holes":
        return rng.random((*sizes, m)) < rng.choice([0.02, 0.5, 0.9])
    added = stored(rng.normal(size=(*sizes, m)), type_)
    hidden = rng.random(added.shape) < 0.3
    added[hidden] = stored(np.array(LOWEST[type_] if rng.random() < 0.5 else -np.inf), type_)
    added[..., 0] = 0  # all hidden: see below
    return added


KINDS = ("none", "causal", "window", "padded", "holes", "added")
types = st.sampled_from(list(TYPES))


@st.composite
def asked(draw, kinds: tuple[str, ...] = KINDS, kept: tuple[str, ...] = tuple(KEPT_TYPES)) -> Asked:
    """Small shapes of every kind, and now and then more keys than one span has. kept: types that
    keys and values may have."""
    seed = draw(st.integers(0, 1 << 30))
    batch, key_heads, repeats = (draw(st.integers(1, most)) for most in (2, 3, 9))
    n = draw(st.one_of(st.just(1), st.integers(1, 24)))
    m = draw(st.one_of(st.integers(1, 70), st.integers(500, 1100)))
    size, width = (draw(st.one_of(st.integers(1, 10).map(lambda i: i * 8), st.integers(1, 40)))
                   for _ in "kv")  # fmt: skip
    kept_types = st.sampled_from(kept)
    of, mask_type = (draw(types), draw(kept_types), draw(kept_types)), draw(types)
    layouts = [draw(st.sampled_from(("cache", "turned"))) for _ in "qkv"]
    heads = key_heads * repeats
    shapes = ((heads, n, size), (key_heads, m, size), (key_heads, m, width))
    arrays = [
        cached(seed + i, (batch, *shape), type_, layout)
        for i, (shape, type_, layout) in enumerate(zip(shapes, of, layouts))
    ]
    mask = masked(seed, draw(st.sampled_from(kinds)), (batch, heads, n, m), mask_type)
    sinks = np.random.default_rng(seed).normal(size=heads).astype(np.float32) * 3
    return Asked(
        *arrays, types=of, scale=draw(st.sampled_from((0.3, 1.0, -2.0))), mask=mask,
        mask_type=mask_type, sinks=sinks if draw(st.booleans()) else None,
        cap=draw(st.sampled_from((0.0, 0.0, 2.0, 50.0))),
    )  # fmt: skip
