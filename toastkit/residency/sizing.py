"""How many layers can stay: equations 1 and 2 of paper 001, for layers that differ in size.

Memory is what is always there, the layers that stay, the window through which the absent ones go,
and room for caches. The window is two layers, where the paper's is one: while one runs, the next is
being read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from toastkit.holdings.pressure import LOW
from toastkit.residency.placement import placed
from toastkit.residency.residency_options import RESERVED_TOKENS

RUNTIME = 150 << 20  # bytes; R_runtime of equation 2: activations, the allocator's slack
SAFETY = 0.9  # of equation 2
WINDOW = 2  # layers: one runs, one is being read
CACHE_STEP = 256  # tokens by which mlx_lm's caches grow
USUAL_CONTEXT = 4096  # tokens, where a model does not say how many it can read


@dataclass(frozen=True)
class Sizes:
    """Bytes on the device of a model's parts. outside: what is always there, embeddings, norms,
    head. layers: each decoder layer. cache_per_token: keys and values of a token, over all layers.
    cache_fixed: states whose size does not grow with tokens."""

    outside: int
    layers: tuple[int, ...]
    cache_per_token: float
    cache_fixed: int


def _window(layers: Iterable[int]) -> int:
    """Bytes of the largest of these absent layers, as many as are there at a time."""
    return sum(sorted(layers)[-WINDOW:])


def minimum(sizes: Sizes) -> int:
    """Bytes below which nothing can run: all layers absent, and not a token in the caches."""
    return sizes.outside + _window(sizes.layers) + sizes.cache_fixed


def least_budget(sizes: Sizes, tokens: int = CACHE_STEP) -> int:
    """Bytes of the smallest budget for a context of so many tokens, or as many as caches begin
    with: with few layers and all of them there, there is no window."""
    whole = sizes.outside + sum(sizes.layers) + sizes.cache_fixed
    growing = math.ceil(sizes.cache_per_token * max(tokens, CACHE_STEP))
    return min(minimum(sizes), whole) + growing


def needed(sizes: Sizes, count: int, placement: str) -> int:
    """Bytes of the model while so many of its layers stay, without caches: what is outside the
    layers, those that stay, and the window. The last WINDOW layers to be absent are all in the
    window: with so few absent as much is needed as with none."""
    stay = placed(count, range(len(sizes.layers)), placement)
    absent = (size for i, size in enumerate(sizes.layers) if i not in stay)
    return sizes.outside + sum(sizes.layers[i] for i in stay) + _window(absent)


def fitting(sizes: Sizes, budget: int, reserve: int, placement: str) -> int:
    """Equation 1: the largest number of layers, 0..L, that can stay within a budget.

    budget: bytes for everything. reserve: bytes of it for caches (`cache_reserve`). Sums over the
    layers that the placement picks, not averages. 0 as well where not even that fits: `minimum`
    tells. Where layers differ, a larger number may need less memory (other layers are then in the
    window), so the search is from above.
    """
    return _fitting(sizes, budget - reserve, len(sizes.layers), placement)


def _fitting(sizes: Sizes, room: int, most: int, placement: str) -> int:
    """The largest number of layers, 0..most, with which no more than room is needed."""
    for count in range(most, 0, -1):
        if needed(sizes, count, placement) <= room:
            return count
    return 0


def adaptive(sizes: Sizes, available: int, reserve: int, placement: str) -> int:
    """Equation 2: how many layers, 0..L, to begin with in the memory that is available.

        floor(0.9 * (available - outside - w - 150 MB - reserve) / w), w the average layer

    available: bytes, with nothing of the model in memory yet. reserve: bytes for caches. The
    paper's equation has room for one layer on its way, and spares a tenth of the layers that stay:
    of a few large layers that is less than the second one in the window, and average layers are not
    those that a placement picks. So it is never more than what fits exactly beside the 150 MB.
    """
    total = len(sizes.layers)
    average = sum(sizes.layers) / total if total else 0.0
    if average <= 0:
        return total
    room = available - sizes.outside - average - RUNTIME - reserve
    count = max(0, min(total, math.floor(SAFETY * room / average)))
    return _fitting(sizes, available - RUNTIME - reserve, count, placement)


def first_count(sizes: Sizes, memory: int, given: bool, reserve: int, placement: str) -> int:
    """How many layers, 0..L, stay to begin with, of a run and of its plan.

    memory: bytes; given: as a budget, else what is available with nothing of the model in memory
    yet. reserve: bytes for caches. Of what is available no more than leaves `LOW` bytes: the first
    of them would be given up at once else.
    """
    if given:
        return fitting(sizes, memory, reserve, placement)
    most = fitting(sizes, memory - LOW, reserve, placement)
    return min(most, adaptive(sizes, memory, reserve, placement))


def cache_reserve(sizes: Sizes, priority: str, context: int) -> int:
    """Bytes to keep for caches (section 3.4). priority: "max-tps" reserves 512 tokens, "balanced"
    1,024, "max-context" all of the context. context: tokens that are expected, or that the model
    can read; a shorter one is all that is reserved."""
    reserved = RESERVED_TOKENS[priority]
    tokens = context if reserved is None else min(reserved, context)
    return sizes.cache_fixed + math.ceil(sizes.cache_per_token * max(0, tokens))
