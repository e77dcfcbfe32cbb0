"""mlx_lm's cache objects <-> stored layers: one codec a class, found by an explicit table.

A cache is its arrays and a few integers, as `state` of mlx_lm.models.cache has them. Classes are
told by name and module, never through a subclass test: a subclass may hold more than its parent,
and saving half of it would come back as wrong text. mlx_lm itself is not imported here; restoring
fills the fresh objects that the caller's model makes.

All arrays are read and made on the calling thread's default stream; MLX streams belong to threads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from toastkit.errors import DataError
from toastkit.session.blocks import LayerSource, TensorSource
from toastkit.session.layout import (
    BLOCK_ROWS,
    ITEM_BYTES,
    KINDS,
    Damaged,
    Layer,
    Tensor,
)
from toastkit.session.savepoints import Load, Savepoint

CACHE_MODULE = "mlx_lm.models.cache"
DTYPES = {name: getattr(mx, "bool_" if name == "bool" else name) for name in ITEM_BYTES}
NAMES = {dtype: name for name, dtype in DTYPES.items()}

# By the names of layout.KINDS; an array that is None is left out. Keys and values: (batch, heads,
# positions, size) of the activations' dtype, or packed to uint32 with scales and biases; what
# ArraysCache holds has the shapes and dtypes of its architecture.
Arrays = dict[str, mx.array]


class Codec(NamedTuple):
    """take(cache) -> (settings, arrays); put(cache, settings, arrays) sets a fresh one's state.
    fixed: settings that a fresh cache has too and that must agree."""

    take: Callable[[Any], tuple[dict[str, int], Arrays]]
    put: Callable[[Any, dict[str, int], Arrays], None]
    fixed: tuple[str, ...] = ()


# ------------------------------------------------------------------------------------- the classes


def _key_values(cache: Any) -> Arrays:
    return {} if cache.keys is None else {"keys": cache.keys, "values": cache.values}


def _take_kv(cache: Any) -> tuple[dict[str, int], Arrays]:
    return {"offset": cache.offset}, _key_values(cache)


def _put_kv(cache: Any, settings: dict[str, int], arrays: Arrays) -> None:
    cache.keys, cache.values = arrays["keys"], arrays["values"]
    cache.offset = settings["offset"]


def _put_concatenated(cache: Any, settings: dict[str, int], arrays: Arrays) -> None:
    rows = settings["offset"]  # the class takes its offset from the shape: no room to grow
    cache.keys, cache.values = arrays["keys"][..., :rows, :], arrays["values"][..., :rows, :]
    cache.offset = rows


def _take_quantized(cache: Any) -> tuple[dict[str, int], Arrays]:
    settings = {"offset": cache.offset, "group_size": cache.group_size, "bits": cache.bits}
    if cache.keys is None:
        return settings, {}
    names = KINDS["QuantizedKVCache"].tensors
    return settings, dict(zip(names, (*cache.keys, *cache.values), strict=True))


def _put_quantized(cache: Any, settings: dict[str, int], arrays: Arrays) -> None:
    cache.keys, cache.values = (
        tuple(arrays[f"{side}.{part}"] for part in ("weight", "scales", "biases"))
        for side in ("keys", "values")
    )
    for name in ("offset", "group_size", "bits"):
        setattr(cache, name, settings[name])


def _take_chunked(cache: Any) -> tuple[dict[str, int], Arrays]:
    names = ("offset", "chunk_size", "start_position")
    return {name: getattr(cache, name) for name in names}, _key_values(cache)


def _put_chunked(cache: Any, settings: dict[str, int], arrays: Arrays) -> None:
    cache.keys, cache.values = arrays.get("keys"), arrays.get("values")  # none where a chunk begins
    for name in ("offset", "chunk_size", "start_position"):
        setattr(cache, name, settings[name])


def _take_rotating(cache: Any) -> tuple[dict[str, int], Arrays]:
    settings = {name: getattr(cache, name) for name in ("offset", "keep", "max_size")}
    return {**settings, "idx": cache._idx}, _key_values(cache)


def _put_rotating(cache: Any, settings: dict[str, int], arrays: Arrays) -> None:
    cache.keys, cache.values = arrays["keys"], arrays["values"]
    cache._idx = settings["idx"]
    for name in ("offset", "keep", "max_size"):
        setattr(cache, name, settings[name])


def _take_arrays(cache: Any) -> tuple[dict[str, int], Arrays]:
    arrays = {str(i): entry for i, entry in enumerate(cache.cache)}
    arrays.update(left_padding=cache.left_padding, lengths=cache.lengths)
    present = {name: array for name, array in arrays.items() if array is not None}
    return {"size": len(cache.cache)}, present


def _put_arrays(cache: Any, settings: dict[str, int], arrays: Arrays) -> None:
    cache.cache = [arrays.get(str(i)) for i in range(settings["size"])]
    cache.left_padding, cache.lengths = arrays.get("left_padding"), arrays.get("lengths")


CODECS = {
    "KVCache": Codec(_take_kv, _put_kv),
    "ConcatenateKVCache": Codec(_take_kv, _put_concatenated),
    "QuantizedKVCache": Codec(_take_quantized, _put_quantized, ("group_size", "bits")),
    "ChunkedKVCache": Codec(_take_chunked, _put_chunked, ("chunk_size",)),
    "RotatingKVCache": Codec(_take_rotating, _put_rotating, ("keep", "max_size")),
    "ArraysCache": Codec(_take_arrays, _put_arrays, ("size",)),
}


def _kind(cache: Any) -> str:
    """The class's name if it is one of the table. Raises DataError."""
    cls = type(cache)
    known = cls.__module__ == CACHE_MODULE and cls.__qualname__ in KINDS
    if not known:
        raise DataError(
            f"cannot save a cache of class {cls.__qualname__}",
            hint="run without --session to keep no state",
        )
    return cls.__qualname__


# ------------------------------------------------------------------------------------------- saving


def describe(cache: Sequence[Any]) -> list[LayerSource]:
    """What Session.commit_layers takes, from a model's list of caches. Arrays are read only when
    they are written. Raises DataError for a class or a dtype that cannot be saved."""
    return [_describe_one(layer) for layer in cache]


def describe_savepoint(point: Savepoint) -> Savepoint:
    """The same for a savepoint's layers, of which some may be None."""
    return Savepoint(
        point.count, [None if layer is None else _describe_one(layer) for layer in point.layers]
    )


def _describe_one(cache: Any) -> LayerSource:
    kind = _kind(cache)
    if kind == "CacheList":
        return LayerSource(kind, {}, [], describe(cache.caches))
    settings, arrays = CODECS[kind].take(cache)
    settings = {name: int(value) for name, value in settings.items()}
    if not KINDS[kind].grows:
        return LayerSource(kind, settings, [_whole(*item) for item in arrays.items()])
    rows = settings["offset"] - settings.get("start_position", 0)
    if not rows:
        arrays = {}  # cut back to nothing: the same as never used
    return LayerSource(kind, settings, [_growing(*item, rows) for item in arrays.items()])


def _dtype_name(array: mx.array) -> str:
    name = NAMES.get(array.dtype)
    if name is None:
        raise DataError(f"cannot save an array of dtype {array.dtype}")
    return name


def _whole(name: str, array: mx.array) -> TensorSource:
    return TensorSource(
        name, _dtype_name(array), array.shape, None, lambda first, last: _bytes(array)
    )


def _growing(name: str, array: mx.array, rows: int) -> TensorSource:
    """array: (B, H, at least `rows`, D)."""

    def read(first: int, last: int) -> memoryview:
        return _bytes(mx.moveaxis(array[:, :, first:last], 2, 0))

    batch, heads, _, size = array.shape
    return TensorSource(name, _dtype_name(array), (batch, heads, rows, size), 2, read)


def _bytes(array: mx.array) -> memoryview:
    """The array's bytes in C order."""
    flat = mx.contiguous(array).reshape(-1).view(mx.uint8)
    mx.eval(flat)
    return memoryview(flat)  # type: ignore[arg-type]


# ---------------------------------------------------------------------------------------- restoring


def fill(caches: Sequence[Any], layers: Sequence[Layer | None], load: Load) -> list[Any | None]:
    """Sets fresh caches to what the stored layers say, and returns them, with None in the place of
    those that are not stored.

    load: see blocks.load_tensor. Arrays come back in the stored shape and dtype; growing ones get
    room for whole blocks of 256 positions, as the classes themselves allocate. Raises Damaged, also
    if the model's caches are others.
    """
    if len(caches) != len(layers):
        raise Damaged(f"it has {len(layers)} layers, the model {len(caches)}")
    for index, (cache, layer) in enumerate(zip(caches, layers)):
        try:
            if layer is not None:
                _fill_one(cache, layer, load)
        except Damaged as error:
            raise Damaged(f"layer {index}: {error}") from error
    return [None if layer is None else cache for cache, layer in zip(caches, layers)]


def _fill_one(cache: Any, layer: Layer, load: Load) -> None:
    kind = _kind(cache)
    if kind != layer.kind:
        raise Damaged(f"it is a {layer.kind}, the model's a {kind}")
    if kind == "CacheList":
        if len(cache.caches) != len(layer.parts):
            raise Damaged(f"it has {len(layer.parts)} parts, the model's {len(cache.caches)}")
        for part, stored in zip(cache.caches, layer.parts):
            _fill_one(part, stored, load)
        return
    codec = CODECS[kind]
    fresh, _ = codec.take(cache)
    for name in codec.fixed:
        if fresh[name] != layer.settings[name]:
            raise Damaged(f"{name} is {layer.settings[name]}, the model's {fresh[name]}")
    rows = layer.settings["offset"] - layer.start if KINDS[kind].grows else 1
    arrays = {t.name: _array(t, load(t)) for t in layer.tensors} if rows else {}
    if not arrays and kind not in ("ArraysCache", "ChunkedKVCache"):
        return  # it was never used: a fresh one is the same
    mx.eval(list(arrays.values()))
    codec.put(cache, layer.settings, arrays)


def _array(tensor: Tensor, buffer: bytearray) -> mx.array:
    """The MLX array of stored bytes; a growing one with its axis back in place."""
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
