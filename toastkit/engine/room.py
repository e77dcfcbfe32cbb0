"""How much of the device's memory the slots of experts can have, where nobody says: what the
policies for layers and for experts leave each other."""

from __future__ import annotations

from collections.abc import Callable

from toastkit.holdings.holdings import Holdings
from toastkit.residency.memory import available_memory
from toastkit.residency.model_sizes import sizes_of
from toastkit.residency.residency_options import ResidencyOptions
from toastkit.residency.sizing import RUNTIME, SAFETY, USUAL_CONTEXT, cache_reserve


def room_for_experts(
    residency: ResidencyOptions | None, available: Callable[[], int] = available_memory
) -> Callable[[Holdings], int]:
    """Bytes, of a model of which nothing is loaded. All that is not experts comes first: a token
    takes every byte of it, of the experts a few. residency: which layers stay; a budget of bytes is
    for the experts too. available(): bytes that are free."""
    options = residency or ResidencyOptions()

    def room(holdings: Holdings) -> int:
        sizes = sizes_of(holdings)
        context = options.context or holdings.store.config.context or USUAL_CONTEXT
        stacks = (stack for switch in holdings.slots.switches for stack in switch.stacks)
        experts = sum(holdings.stack_bytes(stack.path) for stack in stacks)
        taken = sizes.outside + sum(sizes.layers) - experts
        taken += cache_reserve(sizes, options.priority, context)
        if options.kind == "bytes":
            return max(0, int(options.amount) - taken)
        return max(0, int(SAFETY * (available() - RUNTIME - taken)))

    return room
