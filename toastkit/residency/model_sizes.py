"""The size of a model on the device: outside its layers, per layer, in caches. Nothing is read."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

import mlx.core as mx

from toastkit.holdings.forms import ABSENT, Form
from toastkit.holdings.holdings import Holdings
from toastkit.native.kv_caches import leaves, nbytes_of
from toastkit.residency.sizing import WINDOW, Sizes
from toastkit.store.skeleton import MISFITS, cannot_run


def streamable(holdings: Holdings) -> dict[str, int]:
    """The modules that can be streamed with their layer: its index, by path. Modules shared by
    several layers stay resident, and so do expert slots, and layers of which an architecture runs
    the parts, not the whole."""
    seen: dict[int, int] = {}
    shared: set[int] = set()
    layers = holdings.store.model.layers
    for index, layer in enumerate(layers):
        for _, module in layer.named_modules():
            if seen.setdefault(id(module), index) != index:
                shared.add(id(module))
    return {
        path: holding.layer
        for path, holding in holdings.modules.items()
        if holding.layer is not None and id(holding.module) not in shared and not holding.slots
        if callable(layers[holding.layer])
    }


def sizes_of(holdings: Holdings) -> Sizes:
    """The sizes of a model of which nothing is loaded. Raises DataError if mlx_lm cannot run it."""
    layer_of = streamable(holdings)
    layers, outside = [0] * holdings.store.layer_count, 0
    for path in holdings.modules:
        size = holdings.loaded.module_bytes(path)
        if path in layer_of:
            layers[layer_of[path]] += size
        else:
            outside += size
    return Sizes(outside, tuple(layers), *_cache_bytes(holdings))


def sizes_in(
    forms: Collection[Form], holdings: Holdings, sizes: Sizes, paths: Iterable[str]
) -> Sizes:
    """The sizes with some matrices in whichever of the forms takes most. What a layer takes beyond
    that while it is packed counts as outside of layers, since any of them may be in the window."""
    loaded, layer_of = holdings.loaded, streamable(holdings)
    layers, reading = list(sizes.layers), list(sizes.layers)
    for path in paths:
        if path in layer_of:
            size = loaded.module_bytes(path)
            layers[layer_of[path]] += max(loaded.form_bytes(path, f) for f in forms) - size
            reading[layer_of[path]] += max(loaded.reading_bytes(path, f) for f in forms) - size
    more = min(WINDOW, len(layers)) * (max(reading, default=0) - max(layers, default=0))
    return replace(sizes, outside=sizes.outside + more, layers=tuple(layers))


def cache_holds(holdings: Holdings, resident: Collection[int], available: int) -> bool:
    """True if the page cache can hold what is read repeatedly: streamed layers, and experts without
    a slot. resident: the resident layers. available: bytes of memory."""
    store = holdings.store
    read = 0.0
    for holding in holdings.modules.values():
        size = sum(map(store.nbytes, holding.names))
        # Before loading, the planned slots.
        slots = holding.slots if holding.form == ABSENT else holding.form.slots
        if slots:
            read += size * max(0.0, 1 - slots / store.shape(holding.names[0])[0])
        elif holding.layer is not None and holding.layer not in resident:
            read += size
    return read < available // 2


def _cache_bytes(holdings: Holdings) -> tuple[float, int]:
    """Bytes that a token adds to the caches of all layers, and bytes that do not grow. Builds two
    passes over a token without computing them, which is enough for shapes. A full sliding window
    does not grow."""
    model, caches = holdings.store.model, holdings.new_caches()
    token, parts = mx.zeros((1, 1), mx.uint32), [p for p in leaves(caches) if p is not None]
    sizes = []
    try:
        with holdings.shapes_only():
            for part in parts:
                part.step = 1  # by default they grow by 256 positions
            for _ in range(2):
                model(token, cache=caches)
                sizes.append([nbytes_of(part) for part in parts])
    except MISFITS as error:
        raise cannot_run(holdings.store.files.name, error) from error
    growth = [after - before for before, after in zip(*sizes)]
    fixed = per_token = 0
    for part, after, grown in zip(parts, sizes[1], growth):
        window = getattr(part, "max_size", None)
        if grown and window is None:
            per_token, fixed = per_token + grown, fixed + after - 2 * grown
        else:
            fixed += after if not grown else grown * window
    return float(per_token), fixed
