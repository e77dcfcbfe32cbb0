"""How many layers to read ahead, as a rule over seconds: what `streams` does, and what
`residency.predict` plays through. Imports no MLX."""

from __future__ import annotations

import math
from collections.abc import Sequence

MOST_AHEAD = 4  # layers, where memory allows


def layers_ahead(read: float, computes: Sequence[float], gap: float) -> int:
    """One, where reading is much the faster by layer. Else it must not pause: as many as can be
    read in the longest time in which none is asked for. Layers that stay run with the streamed one
    after them, which makes that one long, and says nothing of the others.

    read: seconds of a layer's reading. computes: seconds of each streamed layer. gap: seconds in
    which none of them runs.
    """
    from statistics import median  # where layers are streamed: its import takes 3 ms

    if 2 * read <= median(computes):  # where they are alike now one is late and now the other
        return 1
    return 1 + math.ceil(max(gap, *computes) / read)
