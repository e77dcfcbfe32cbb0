"""How many layers fit, and which: equations 1 and 2 of paper 001, for layers that differ in size,
and the placements of its section 3.3.

Memory is divided into what is always there, the resident layers, the window through which the
others are streamed, and room for caches. The window is two layers, where the paper has one: while
one runs, the next is read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from toastkit.holdings.pressure import LOW
from toastkit.residency.residency_options import RESERVED_TOKENS

RUNTIME = 150 << 20  # bytes; R_runtime of equation 2: activations, the allocator's slack
SAFETY = 0.9  # of equation 2
WINDOW = 2  # layers: one runs, one is read
CACHE_STEP = 256  # tokens by which mlx_lm's caches grow
USUAL_CONTEXT = 4096  # tokens, if a model does not say how many it can read


@dataclass(frozen=True)
class Sizes:
    """Bytes on the device of a model's parts. outside: what is always there: embeddings, norms,
    head. layers: each decoder layer. cache_per_token: keys and values of a token, over all layers.
    cache_fixed: states that do not grow with tokens."""

    outside: int
    layers: tuple[int, ...]
    cache_per_token: float
    cache_fixed: int


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


def _window(layers: Iterable[int]) -> int:
    """Bytes of the window for these streamed layers: its largest possible contents."""
    return sum(sorted(layers)[-WINDOW:])


def minimum(sizes: Sizes) -> int:
    """Bytes below which the model cannot run: all layers streamed, no token in the caches."""
    return sizes.outside + _window(sizes.layers) + sizes.cache_fixed


def least_budget(sizes: Sizes, tokens: int = CACHE_STEP) -> int:
    """Bytes of the smallest budget for a context of that many tokens, or of the caches' initial
    size. A model of few layers may be smallest with all of them resident, without a window."""
    whole = sizes.outside + sum(sizes.layers) + sizes.cache_fixed
    growing = math.ceil(sizes.cache_per_token * max(tokens, CACHE_STEP))
    return min(minimum(sizes), whole) + growing


def needed(sizes: Sizes, count: int, placement: str) -> int:
    """Bytes of the model with count resident layers, without caches: what is outside the layers,
    the resident ones, and the window. With no more than WINDOW streamed layers, all of these are in
    the window, so that as much is needed as with none."""
    stay = placed(count, range(len(sizes.layers)), placement)
    absent = (size for i, size in enumerate(sizes.layers) if i not in stay)
    return sizes.outside + sum(sizes.layers[i] for i in stay) + _window(absent)


def fitting(
    sizes: Sizes, budget: int, reserve: int, placement: str, most: int | None = None
) -> int:
    """Equation 1: the largest number of resident layers, 0..most, within a budget.

    budget: bytes for everything. reserve: bytes of it for caches (`cache_reserve`). most: None for
    all layers. Sums over the layers that the placement picks, not averages. Also 0 if not even that
    fits: see `minimum`. If layers differ, a larger number may need less memory, as other layers are
    in the window, so the search is from above.
    """
    for count in range(len(sizes.layers) if most is None else most, 0, -1):
        if needed(sizes, count, placement) + reserve <= budget:
            return count
    return 0


def adaptive(sizes: Sizes, available: int, reserve: int, placement: str) -> int:
    """Equation 2: the initial number of resident layers, 0..L, for the available memory.

        floor(0.9 * (available - outside - w - 150 MB - reserve) / w), w the average layer

    available: bytes, before anything of the model is in memory. reserve: bytes for caches. The
    paper's equation has a window of one layer, and spares a tenth of the resident layers: with few
    large layers that is less than the window's second layer, and a placement does not pick average
    layers. So the result is capped at what fits exactly beside the 150 MB.
    """
    total = len(sizes.layers)
    average = sum(sizes.layers) / total if total else 0.0
    if average <= 0:
        return total
    room = available - sizes.outside - average - RUNTIME - reserve
    count = max(0, min(total, math.floor(SAFETY * room / average)))
    return fitting(sizes, available - RUNTIME, reserve, placement, count)


def first_count(sizes: Sizes, memory: int, given: bool, reserve: int, placement: str) -> int:
    """The initial number of resident layers, 0..L, of a run and of its plan.

    memory: bytes; given: it is a budget, else what is available before anything of the model is in
    memory. reserve: bytes for caches. `LOW` bytes of available memory are left free: otherwise
    layers would be shed at once.
    """
    if given:
        return fitting(sizes, memory, reserve, placement)
    most = fitting(sizes, memory - LOW, reserve, placement)
    return min(most, adaptive(sizes, memory, reserve, placement))


def cache_reserve(sizes: Sizes, priority: str, context: int) -> int:
    """Bytes to reserve for caches (section 3.4). priority: "max-tps" reserves 512 tokens,
    "balanced" 1,024, "max-context" all of the context. context: tokens that are expected, or that
    the model can read; if shorter, it is what is reserved."""
    reserved = RESERVED_TOKENS[priority]
    tokens = context if reserved is None else min(reserved, context)
    return sizes.cache_fixed + math.ceil(sizes.cache_per_token * max(0, tokens))
