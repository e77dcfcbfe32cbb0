"""mlx_lm's cache objects <-> stored layers, by the table of classes in layout.py.

A cache is its arrays and a few integers, as in `state` of mlx_lm.models.cache. Classes are matched
by name and module, never by isinstance: a subclass may hold more than its parent, and restoring
half of it would produce wrong text. mlx_lm itself is not imported here; restoring fills fresh
objects made by the caller's model.

All arrays are read and made on the calling thread's default stream; MLX streams belong to threads.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx

from toastkit.errors import DataError
from toastkit.native.kv_caches import SCALE_BYTES, as_kept, is_kept
from toastkit.session.blocks import LayerSource, Stored, TensorSource
from toastkit.session.layout import BLOCK_ROWS, KINDS, KV, Damaged, Layer, Tensor
from toastkit.session.mapped import DTYPES, read_in_place
from toastkit.store.dtypes import bytes_of

LARGE = 8 << 20  # bytes to save from which importing numpy, which is faster there, pays off
CACHE_MODULE = "mlx_lm.models.cache"
NAMES = {dtype: name for name, dtype in DTYPES.items()}

Arrays = dict[str, mx.array]
Settings = dict[str, int]
ATTRIBUTES = {"idx": "_idx"}  # settings whose attribute has another name


def _get_state(kind: str, cache: Any) -> tuple[Settings, Arrays]:
    """Settings and arrays of a cache by the names of layout.KINDS, without arrays that are None.
    Keys and values: (batch, heads, positions, size) of the activations' dtype, or packed to uint32
    with scales and biases; the contents of an ArraysCache depend on the architecture."""
    if kind == "ArraysCache":
        arrays = {str(i): entry for i, entry in enumerate(cache.cache)}
        arrays.update(left_padding=cache.left_padding, lengths=cache.lengths)
        present = {name: array for name, array in arrays.items() if array is not None}
        return {"size": len(cache.cache)}, present
    settings = {n: int(getattr(cache, ATTRIBUTES.get(n, n))) for n in KINDS[kind].settings}
    if cache.keys is None:
        return settings, {}
    packed = kind == "QuantizedKVCache"
    values = (*cache.keys, *cache.values) if packed else (cache.keys, cache.values)
    return settings, dict(zip(KINDS[kind].tensors, values, strict=True))


def _set_state(kind: str, cache: Any, settings: Settings, arrays: Arrays) -> None:
    """Set a fresh cache's state."""
    if kind == "ArraysCache":
        cache.cache = [arrays.get(str(i)) for i in range(settings["size"])]
        cache.left_padding, cache.lengths = arrays.get("left_padding"), arrays.get("lengths")
        return
    if kind == "ConcatenateKVCache":  # takes its offset from the shape: no room to grow
        arrays = {name: array[..., : settings["offset"], :] for name, array in arrays.items()}
    values = [arrays.get(name) for name in KINDS[kind].tensors]  # none at the start of a chunk
    if kind == "QuantizedKVCache":
        values = [tuple(values[:3]), tuple(values[3:])]  # type: ignore[list-item]
    cache.keys, cache.values = values
    for name, value in settings.items():
        setattr(cache, ATTRIBUTES.get(name, name), value)


def _kind(cache: Any) -> str:
    """The class's name if it is in the table. Raises DataError."""
    cls = type(cache)
    known = cls.__module__ == CACHE_MODULE and cls.__qualname__ in KINDS
    if not known:
        raise DataError(
            f"cannot save a cache of class {cls.__qualname__}",
            hint="run without --session to keep no state",
        )
    return cls.__qualname__


# ------------------------------------------------------------------------------------------- saving


def describe(caches: Sequence[Any]) -> list[LayerSource]:
    """Describe a model's list of caches for Session.commit_layers. Arrays are read only when
    written.
    Raises DataError for a class or a dtype that cannot be saved."""
    return [describe_one(cache) for cache in caches]


def describe_one(cache: Any) -> LayerSource:
    """Describe one cache, as `describe` does."""
    kind = _kind(cache)
    if kind == "CacheList":
        return LayerSource(kind, {}, [], describe(cache.caches))
    settings, arrays = _get_state(kind, cache)
    rows = None
    if KINDS[kind].grows:
        rows = settings["offset"] - settings.get("start_position", 0)
        arrays = arrays if rows else {}  # cut back to nothing: like an unused one
    return LayerSource(kind, settings, [_source(*item, rows) for item in arrays.items()])


def _dtype_name(array: mx.array) -> str:
    name = NAMES.get(array.dtype)
    if name is None:
        raise DataError(f"cannot save an array of dtype {array.dtype}")
    return name


def _numpy_is_here() -> bool:
    """True if numpy need not be imported, and sees arrays where they are."""
    return "numpy" in sys.modules and mx.default_device() == mx.cpu


def _source(name: str, array: mx.array, rows: int | None) -> TensorSource:
    """rows: how many of (B, H, at least `rows`, D) to save; None saves the array whole."""

    def read(first: int, last: int) -> memoryview:
        if rows is None:
            return bytes_of(array)
        # All that follows is asked for, if in pieces.
        if array.nbytes // array.shape[2] * (rows - first) < LARGE and not _numpy_is_here():
            return bytes_of(mx.moveaxis(array[:, :, first:last], 2, 0))
        import numpy as np

        # numpy has no bfloat16. It copies on this thread, without handing over to MLX's.
        there = array.view(mx.uint16) if array.dtype == mx.bfloat16 else array
        part = np.array(there, copy=False)[:, :, first:last]
        return np.ascontiguousarray(part.transpose(2, 0, 1, 3)).data.cast("B")

    shape = array.shape if rows is None else (*array.shape[:2], rows, *array.shape[3:])
    return TensorSource(name, _dtype_name(array), shape, None if rows is None else 2, read)


# ---------------------------------------------------------------------------------------- restoring


def fill(caches: Sequence[Any], layers: Sequence[Layer | None], load: Stored) -> list[Any | None]:
    """Set fresh caches to the stored layers, and return them, with None for layers that are not
    stored.

    load: the file that has them. Arrays come back in the stored shape and dtype, except keys and
    values that the caches keep in another dtype; growing ones get room for whole blocks of 256
    positions, as the classes themselves allocate, and some more if they are read in place.
    Raises Damaged, also if the model's caches are of other classes.
    """
    if len(caches) != len(layers):
        raise Damaged(f"it has {len(layers)} layers, the model {len(caches)}")
    pairs = [(cache, layer) for cache, layer in zip(caches, layers) if layer is not None]
    in_place = read_in_place(load, [x for pair in pairs for x in _kept_as_stored(*pair)])
    for index, (cache, layer) in enumerate(zip(caches, layers)):
        try:
            if layer is not None:
                _fill_one(cache, layer, load, in_place)
        except Damaged as error:
            raise Damaged(f"layer {index}: {error}") from error
    return [None if layer is None else cache for cache, layer in zip(caches, layers)]


def _kept_as_stored(cache: Any, layer: Layer) -> Iterator[Sequence[Tensor]]:
    """What a cache, and each one nested in it, keeps in the stored dtype: keys and values, or
    recurrent states."""
    for pair in zip(getattr(cache, "caches", ()), layer.parts):
        yield from _kept_as_stored(*pair)
    dtype = getattr(cache, "kv_dtype", None)
    if layer.kind == "ArraysCache":
        yield layer.tensors
    if layer.kind == "KVCache" and dtype is not None:
        own = [tensor for tensor in layer.tensors if is_kept(DTYPES[tensor.dtype], dtype)]
        yield own if len(own) == len(layer.tensors) else []


def _fill_one(cache: Any, layer: Layer, load: Stored, in_place: dict[int, mx.array]) -> None:
    kind = _kind(cache)
    if kind != layer.kind:
        raise Damaged(f"it is a {layer.kind}, the model's a {kind}")
    if kind == "CacheList":
        if len(cache.caches) != len(layer.parts):
            raise Damaged(f"it has {len(layer.parts)} parts, the model's {len(cache.caches)}")
        for part, stored in zip(cache.caches, layer.parts):
            _fill_one(part, stored, load, in_place)
        return
    fresh, _ = _get_state(kind, cache)
    for name, value in layer.fixed.items():
        if fresh[name] != value:
            raise Damaged(f"{name} is {value}, the model's {fresh[name]}")
    rows = layer.settings["offset"] - layer.start if KINDS[kind].grows else 1
    arrays = {}
    for tensor in layer.tensors if rows else ():
        there = in_place.get(id(tensor))
        arrays[tensor.name] = _array(tensor, load(tensor)) if there is None else there
    if not arrays and kind not in ("ArraysCache", "ChunkedKVCache"):
        return  # unused: a fresh one is the same
    if KINDS[kind].tensors == KV:
        arrays = {name: _kept(array, cache) for name, array in arrays.items()}
    mx.eval(list(arrays.values()))
    _set_state(kind, cache, layer.settings, arrays)


def _kept(array: mx.array, cache: Any) -> mx.array:
    """Stored keys or values, in the cache's dtype. 8-bit ones become float32 for a cache that keeps
    whatever it gets."""
    dtype = getattr(cache, "kv_dtype", mx.float32 if array.dtype == mx.int8 else array.dtype)
    if array.dtype == mx.int8 and 0 < array.shape[-1] <= SCALE_BYTES:
        raise Damaged("keys or values in 8 bits have no numbers beside their scale")
    return as_kept(array, dtype)


def _array(tensor: Tensor, buffer: bytearray) -> mx.array:
    """The MLX array of stored bytes; a growing one with its axis moved back."""
    shape = list(tensor.shape)
    if tensor.axis is not None:
        room = -(-tensor.rows // BLOCK_ROWS) * BLOCK_ROWS
        shape = [room, *shape[: tensor.axis], *shape[tensor.axis + 1 :]]
    dtype = DTYPES[tensor.dtype]
    if not math.prod(shape):
        array = mx.zeros(shape, dtype)
    else:
        data = mx.array(memoryview(buffer))  # type: ignore[arg-type]
        array = data.view(dtype).reshape(shape)
    if tensor.axis is None:
        return array
    return mx.contiguous(mx.moveaxis(array, 0, tensor.axis))
