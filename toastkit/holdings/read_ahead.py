"""How many layers to read ahead, from measured seconds: used by `streams`, and simulated by
`residency.predict`. Imports no MLX."""

from __future__ import annotations

import math
from collections.abc import Sequence

MAX_AHEAD = 4  # layers, where memory allows


def layers_ahead(read: float, computes: Sequence[float], gap: float) -> int:
    """How many layers to read ahead: one if reading a layer is much faster than computing it. Else
    reading must not pause: as many as can be read in the longest time in which none is requested.
    Resident layers run with the streamed one after them, so that its time is long, which says
    nothing about the others.

    read: seconds to read a layer. computes: seconds of each streamed layer. gap: seconds in which
    none of them runs.
    """
    from statistics import median  # here, as the import takes 3 ms

    if 2 * read <= median(computes):  # if they are nearly equal, either may be the slower
        return 1
    return 1 + math.ceil(max(gap, *computes) / read)
