"""Residency plan: what fits into memory, before anything of a model is read: the layers that
`--resident SIZE` or `--resident auto` would keep, and the least memory that the model runs in."""

from __future__ import annotations

import math
from dataclasses import dataclass

from toastkit.errors import UsageError
from toastkit.holdings.read_ahead import MAX_AHEAD
from toastkit.residency.residency_options import RESERVED_TOKENS
from toastkit.residency.sizing import (
    WINDOW,
    Sizes,
    cache_reserve,
    first_count,
    least_budget,
    needed,
    placed,
)
from toastkit.text.exact_numbers import counted, exact_size


@dataclass(frozen=True)
class Memory:
    """The memory to plan for. size: bytes. given: by the user, as the budget of --resident SIZE;
    else it is what is available now, as for --resident auto."""

    size: int
    given: bool


@dataclass(frozen=True)
class ResidencyPlan:
    """Sizes in bytes. memory, given: see Memory. context: tokens. outside: of what is outside the
    layers. layers, layers_size: their number, and total size. cache: caches for that context.
    reserve: kept for caches to begin with. least: what the model runs in, with such caches.
    resident: resident layers to begin with; filled: once the context is full. placement, priority:
    of ResidencyOptions. weights: on the device, with the streaming window. ahead: the most layers
    that can be read ahead in that memory."""

    memory: int
    given: bool
    context: int
    priority: str
    placement: str
    outside: int
    layers: int
    layers_size: int
    cache: int
    reserve: int
    least: int
    resident: int
    filled: int
    weights: int
    ahead: int

    @property
    def staying(self) -> frozenset[int]:
        """Indices of the resident layers."""
        return placed(self.resident, range(self.layers), self.placement)


def plan_residency(
    name: str,
    sizes: Sizes,
    memory: Memory,
    *,
    longest: int,
    context: int | None = None,
    priority: str = "balanced",
    placement: str = "interleaved",
) -> ResidencyPlan:
    """Plan a model's residency. name: for errors. longest: tokens that the model can read. context:
    tokens that are expected and must fit; None for those that the priority reserves. Raises
    UsageError, with the number that would do, if the model does not fit."""
    reserved = RESERVED_TOKENS[priority]
    tokens = context or min(reserved or longest, longest)
    # As a run: only "max-context" uses the user's context; the others reserve by priority alone.
    expected = context if context and reserved is None else longest
    reserve = cache_reserve(sizes, priority, expected)
    cache = sizes.cache_fixed + math.ceil(sizes.cache_per_token * tokens)
    least = least_budget(sizes, tokens)
    if memory.size < least:
        raise _refusal(name, memory, least, tokens)
    count, filled = (
        first_count(sizes, memory.size, memory.given, room, placement)
        for room in (reserve, max(reserve, cache))
    )
    weights = needed(sizes, count, placement)
    spare = max(0, memory.size - weights - reserve)
    return ResidencyPlan(
        memory=memory.size, given=memory.given, context=tokens, priority=priority,
        placement=placement, outside=sizes.outside, layers=len(sizes.layers),
        layers_size=sum(sizes.layers), cache=cache, reserve=reserve, least=least, resident=count,
        filled=min(count, filled), weights=weights,
        ahead=WINDOW - 1 + spare // max(1, *sizes.layers) if memory.given else MAX_AHEAD,
    )  # fmt: skip


def _refusal(name: str, memory: Memory, least: int, tokens: int) -> UsageError:
    up = -(-least // (1 << 20))
    what = f"{memory.size >> 20}M of memory are available"
    if memory.given:
        what = f"--mem {exact_size(memory.size)}"
    return UsageError(
        f"{what}: {name} needs {up}M at least, with {counted(tokens, 'token', ',')} of context",
        hint="that is what lies outside its layers, two of them, and caches",
    )
