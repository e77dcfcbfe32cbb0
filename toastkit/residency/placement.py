"""Placement: which layers are resident, given their number (paper 001, section 3.3)."""

from __future__ import annotations

from collections.abc import Sequence


def placed(count: int, layers: Sequence[int], placement: str) -> frozenset[int]:
    """The layers that are resident.

    count: how many; capped at the number of layers. layers: indices of the decoder layers in the
    order in which they run. placement: "first" and "last" are nested, so that one more or one fewer
    moves one layer. "interleaved" spreads them evenly: any two runs of layers of equal length,
    wrapping round from last to first, differ by at most one in their resident layers. So they do in
    streamed ones, and none is read while there is nothing else to compute.
    """
    total = len(layers)
    count = max(0, min(count, total))
    if placement == "first":
        return frozenset(layers[:count])
    if placement == "last":
        return frozenset(layers[total - count :])
    # Bresenham's line. The first layer is resident: the first streamed one is read meanwhile.
    return frozenset(layer for i, layer in enumerate(layers) if i * count % total < count)
