"""Default device memory for expert slots: what the policies for layers and for experts leave each
other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from toastkit.errors import UsageError
from toastkit.experts.slot_sizes import Room, SlotPlan, SlotSizes
from toastkit.holdings.holdings import Holdings
from toastkit.holdings.pressure import LOW
from toastkit.residency.memory import available_memory
from toastkit.residency.model_sizes import cache_holds, sizes_of
from toastkit.residency.residency_options import ResidencyOptions
from toastkit.residency.residency_plan import ResidencyPlan
from toastkit.residency.sizing import (
    RUNTIME,
    SAFETY,
    USUAL_CONTEXT,
    Sizes,
    cache_reserve,
    least_budget,
)
from toastkit.store.ledger import CACHE, SESSIONS
from toastkit.text.exact_numbers import counted


def room_for_experts(
    residency: ResidencyOptions | None, available: Callable[[], int] = available_memory
) -> Callable[[Holdings], Room]:
    """Return a function that sizes the slots of a model before anything is loaded. All other
    weights come first: a token reads every byte of them, but only a few experts. residency: which
    layers stay; a budget of bytes includes the experts. available(): bytes that are free."""
    options = residency or ResidencyOptions()
    budget = options.kind == "bytes"

    def room(holdings: Holdings) -> Room:
        sizes, ledger = sizes_of(holdings), holdings.ledger
        context = options.context or holdings.store.config.context or USUAL_CONTEXT
        reserve = cache_reserve(sizes, options.priority, context)
        stacks = (stack for switch in holdings.slots.switches for stack in switch.stacks)
        experts = sum(holdings.loaded.stack_bytes(stack.path) for stack in stacks)
        others = sizes.outside + sum(sizes.layers) - experts

        def size() -> int:
            if budget:
                return max(0, int(options.amount) - others - reserve)
            # What is on the device would be available without this model. Leave enough that the
            # first slots are not evicted at once.
            caches = max(reserve, ledger.of(CACHE) + ledger.of(SESSIONS))
            left = available() + ledger.total() - others - caches
            return max(0, min(int(SAFETY * (left - RUNTIME)), left - LOW))

        def caches() -> bool:
            resident = set(range(len(sizes.layers))).difference(holdings.streams.layers)
            return cache_holds(holdings, resident, available())

        return Room(size, None if budget else available, options.on, caches)

    return room


class Fitted(NamedTuple):
    """What fits. plan: which layers stay. sizes: of the model, with slots for the experts that have
    them. slots, slot_sizes: None if experts are streamed with their layers."""

    plan: ResidencyPlan
    sizes: Sizes
    slots: SlotPlan | None = None
    slot_sizes: SlotSizes | None = None


def fitted(
    holdings: Holdings, sizes: Sizes, room: int, plan: Callable[[Sizes], ResidencyPlan]
) -> Fitted:
    """Plan what fits of a model before anything is loaded: all layers, else as many as do beside
    expert slots, of which a token needs a few in each layer; with too little memory for the minimum
    of slots, layers alone. sizes: without slots. room: bytes for experts, as from
    `room_for_experts`. plan(sizes): which layers stay, given those sizes; raises UsageError if none
    can, as this does, for whichever plan needs less. The holdings keep the planned slots."""
    refused: list[tuple[int, UsageError]] = []
    layers = None
    try:
        layers = Fitted(plan(sizes), sizes)
    except UsageError as error:
        refused.append((least_budget(sizes), error))
    if holdings.slots.switches and (layers is None or layers.plan.resident < layers.plan.layers):
        slots = SlotSizes(holdings)
        planned = slots.plan(room)
        slots.set_slots(planned.slots)
        slotted = sizes_of(holdings)
        fewest = slotted.outside - slots.held(planned.slots) + slots.held(slots.least)
        try:
            least = plan(replace(slotted, outside=fewest)).least
            return Fitted(replace(plan(slotted), least=least), slotted, planned, slots)
        except UsageError as error:
            slots.set_slots(planned.experts)
            hint = f"that is with {counted(planned.slots, 'slot')} for experts in each layer"
            refused.append((least_budget(slotted), UsageError(error.message, hint)))
    if layers is None:
        raise min(refused, key=lambda one: one[0])[1]
    return layers
