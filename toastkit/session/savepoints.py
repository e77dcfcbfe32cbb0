"""Where a stored state can be resumed: at its end, wherever that can be cut back to, at savepoints.

Attention caches can be cut back to any earlier position. A recurrent state, or a window that has
begun to slide, can only be resumed where it was saved. So a session holds, besides its end,
savepoints: positions with a copy of each layer that cannot be cut back to them. The other layers
are cut back from the end, at no cost.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:  # not needed by a state without a session
    from toastkit.session.layout import Header, Layer, Part, SavepointRecord, Tensor

# Classes that can always be cut back.
ALWAYS_TRIMMABLE = ("KVCache", "ConcatenateKVCache", "QuantizedKVCache")


class Savepoint(NamedTuple):
    """An earlier position at which a state can be resumed.

    count: tokens read there, more than 0 and fewer than the state has read. layers: one per layer
    of the model: an mlx_lm cache object that has read `count` tokens, or None if the layer can be
    cut back from the end. A CacheList is given, and comes back, whole; on disk it is only what
    cannot be cut back. (For commit_layers: LayerSources instead of cache objects.)
    """

    count: int  # type: ignore[assignment]  # a tuple has a method of that name
    layers: list[Any | None]


def can_trim(layer: Layer, count: int, n: int) -> bool:
    """True if a layer of a state that has read `count` tokens can be cut back to the first n.

    Recurrent states cannot; a rotating buffer cannot once it has wrapped round; a chunked cache can
    while it still has every row of the chunk that position n falls in.
    """
    if n == count:
        return True
    if layer.kind == "CacheList":
        return all(can_trim(part, count, n) for part in layer.parts)
    if layer.kind == "ArraysCache":
        return False
    settings = layer.settings
    if not layer.tensors and not settings["offset"]:
        return True  # unused
    if settings["offset"] != count:
        return False
    if layer.kind == "RotatingKVCache":
        return count < settings["max_size"]
    if layer.kind == "ChunkedKVCache":
        chunk = settings["chunk_size"]
        return layer.start <= n // chunk * chunk
    return True


def cut(layer: Layer, count: int, n: int) -> Layer:
    """Cut a layer of a state that has read `count` tokens back to the first n: the same ranges, of
    which fewer rows are used. Only if can_trim."""
    from toastkit.session.layout import Layer

    if n == count:
        return layer
    settings, tensors = dict(layer.settings), layer.tensors
    if settings.get("offset") == count:
        settings["offset"] = n
        if "idx" in settings:
            settings["idx"] -= count - n
        tensors = [_cut_rows(tensor, n - layer.start) for tensor in tensors]
    return Layer(layer.kind, settings, tensors, [cut(part, count, n) for part in layer.parts])


def _cut_rows(tensor: Tensor, rows: int) -> Tensor:
    if tensor.axis is None:
        return tensor
    shape = (*tensor.shape[: tensor.axis], rows, *tensor.shape[tensor.axis + 1 :])
    return replace(tensor, shape=shape)


def layers_at(header: Header, n: int) -> list[Layer] | None:
    """The stored layers as they were after the first n tokens, or None if they cannot be had: those
    at the end cut back, otherwise those of the nearest savepoint, at n or past it."""
    from toastkit.session.layout import SavepointRecord

    end = SavepointRecord(header.count, [None] * len(header.layers or ()))
    for point in (end, *header.savepoints):
        layers = _layers_from(header, point, n) if point.count >= n else None
        if layers is not None:
            return layers
    return None


def _layers_from(header: Header, point: SavepointRecord, n: int) -> list[Layer] | None:
    """The layers of a savepoint, and those at the end that it has no copy of, cut back to the first
    n tokens; None if one of them cannot be."""
    return _all(
        _cut_part(part, point.count, end, header.count, n)
        for part, end in zip(point.layers, header.layers or ())
    )


def _cut_part(part: Part, there: int, end: Layer, count: int, n: int) -> Layer | None:
    """One layer after n tokens. there: the tokens that `part` has read; count: those of `end`."""
    if isinstance(part, list):
        pairs = zip(part, end.parts)
        parts = _all(_cut_part(item, there, inner, count, n) for item, inner in pairs)
        return None if parts is None else replace(end, parts=parts)
    layer, read = (end, count) if part is None else (part, there)
    return cut(layer, read, n) if can_trim(layer, read, n) else None


def _all(layers: Iterable[Layer | None]) -> list[Layer] | None:
    """All of them, or None if one is missing."""
    found = list(layers)
    return None if any(layer is None for layer in found) else found  # type: ignore[return-value]


def stored_layers(header: Header, n: int) -> list[tuple[int, list[Layer | None]]]:
    """The savepoints before position n that can be resumed: counts and layers, None for a layer
    without a copy, which is cut back from the end."""
    found = []
    for point in header.savepoints:
        layers = _layers_from(header, point, point.count) if point.count < n else None
        if layers is not None:
            pairs = zip(point.layers, layers)
            held = [layer if part is not None else None for part, layer in pairs]
            found.append((point.count, held))
    return found
