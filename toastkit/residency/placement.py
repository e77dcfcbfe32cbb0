"""Which layers stay, once it is known how many (paper 001, section 3.3)."""

from __future__ import annotations

from collections.abc import Sequence


def placed(count: int, layers: Sequence[int], placement: str) -> frozenset[int]:
    """The layers that stay on the device.

    count: how many; more than there are is all of them. layers: indices of the decoder layers in
    the order in which they run. placement: "first" and "last" are nested, so that one more or one
    fewer moves one layer. "interleaved" spreads them: any two stretches of as many layers, taken
    round from the last to the first, hold as many that stay, give or take one. So do they of those
    that are absent, and none is read while there is nothing else to compute.
    """
    total = len(layers)
    count = max(0, min(count, total))
    if placement == "first":
        return frozenset(layers[:count])
    if placement == "last":
        return frozenset(layers[total - count :])
    # Bresenham's line. It begins with a layer that stays: during that the first one is read.
    return frozenset(layer for i, layer in enumerate(layers) if i * count % total < count)
