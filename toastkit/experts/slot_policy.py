"""Expert slots: a policy that decides how many experts of each layer the device holds (paper 002,
section II-B). The others stay in the file and are fetched on demand.

It gives stacks of experts the form of slots, in the precision that earlier policies want: a slot in
low gear is a quarter of the size, so that the same bytes hold more of them. If all experts fit, the
stacks stay whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from toastkit.errors import UsageError
from toastkit.experts.experts_options import SlotOptions
from toastkit.experts.slot_sizes import Room, SlotSizes
from toastkit.holdings.forms import Form
from toastkit.holdings.holdings import Holdings
from toastkit.holdings.policy import Policy, Wish
from toastkit.holdings.pressure import Checks, Pressure
from toastkit.text.exact_numbers import counted


class SlotPolicy(Policy):
    """See holdings.policy.Policy. room(holdings): the memory for slots, if the options do not say.
    notify: called with a warning if fetching an expert takes reading all of its layer's."""

    name = "slots"
    variant = ""  # the results are those of a wholly resident model, to the bit
    changes_forms = True

    def __init__(
        self,
        options: SlotOptions,
        room: Callable[[Holdings], Room],
        notify: Callable[[str], None] | None = None,
    ):
        self.options = options
        self._notify = notify
        self.paths: list[str] = []
        self._room_of = room
        self._applied: int | None = None  # the amount that the current slots were made for
        self._warned = False
        self._checks = Checks()
        self._pressures: dict[int, Pressure] = {}  # by bits
        self._bits = self._initial = 0

    def attach(self, holdings: Holdings) -> None:
        """Attach to a model. Raises UsageError for one without experts, and for fewer slots than a
        token chooses experts."""
        self._holdings = holdings
        self.sizes = SlotSizes(holdings)
        self.paths = list(self.sizes.of)
        self._amount = self.options.amount
        self._room = self._room_of(holdings)
        if self.options.kind == "auto":
            self._amount = self._room.size()
        self._check()
        if self.options.prefetch != "off":
            self._set_up_prefetch()
        self.sizes.set_slots(self._count(0))
        if self._room.with_layers:  # layers with all their experts are the residency policy's
            self.paths = [path for path in self.paths if holdings.modules[path].slots]

    def _set_up_prefetch(self) -> None:
        foresight, depth = self._holdings.slots.foresight, self.options.prefetch
        if not foresight.can_ask:
            raise UsageError(
                f"--expert-prefetch: the routers of {self._holdings.store.files.name} "
                "cannot be asked ahead"
            )
        foresight.depth = depth if depth == "auto" else int(depth)
        foresight.watch()

    def _check(self) -> None:
        name, least = self._holdings.store.files.name, self.sizes.least
        slots = counted(least, "slot")
        if self.options.kind == "slots" and self._amount < least:
            raise UsageError(
                f"--expert-slots {self._amount}: {name} needs {slots} a layer at least",
                hint="as many as a token chooses experts",
            )
        size = least * self.sizes.slot_bytes()
        if self.options.kind == "bytes" and self._amount < size:
            raise UsageError(
                f"--expert-slots {self.options}: {name} needs {-(-size // (1 << 20))}M at least",
                hint=f"that is {slots} in each of {counted(len(self.sizes.switches), 'layer')}",
            )

    def _count(self, bits: int) -> int:
        """Slots per layer, in a gear of that many bits."""
        if self.options.kind == "slots":
            return max(self._amount, self.sizes.least)
        count = self.sizes.within(self._amount, bits)
        known = self._pressures.get(bits)
        return count if known is None else min(count, known.ceiling)

    # ------------------------------------------------------------------------------------- deciding

    def decide(self, wish: Wish) -> bool:
        """True if the number of slots changes: when the model is loaded, and, with "auto", as
        memory comes and goes."""
        if self._applied is None:
            self._choose_cache()  # before loading; with streamed layers the other policy does too
            return True
        if self._warned:
            self._warned = False
            self._pressure.emergency(self._resident)
            self._amount = 0
        elif self.options.kind == "auto" and (free := self._room.available) and self._checks.due():
            self._adapt(free())
        return self._amount != self._applied

    def _adapt(self, available: int) -> None:
        """Adapt the slots to memory, of which that many bytes are available."""
        before, size = self._resident, self.sizes.slot_bytes(self._bits)
        count = self._pressure.update(available, before, self._room.size() // size)
        if count != before:
            # 0 for the least, which is the same in any gear.
            self._amount = count * size if count > self.sizes.least else 0

    @property
    def _resident(self) -> int:
        """Slots per layer in use, in the current gear."""
        return min(self._count(self._bits), self.sizes.experts)

    @property
    def _pressure(self) -> Pressure:
        """The controller of the current gear, as slots differ in size between gears. Once a layer
        has slots it keeps them: it never has all of its experts again."""
        if self._bits not in self._pressures:
            most = max(self._resident, self.sizes.experts - 1)
            self._pressures[self._bits] = Pressure(most, self.sizes.least)
        return self._pressures[self._bits]

    def form(self, path: str, form: Form) -> Form:
        """The form with slots, or whole if all experts fit. If there are slots of the same gear it
        is never whole: the stack would be read anew beside them."""
        self._bits = form.bits
        count, experts = self._count(form.bits), self.sizes.of[path].experts
        now = self._holdings.modules[path].form
        if now.slots and now.bits == form.bits:
            count = min(count, experts - 1)
        return form._replace(slots=count) if count < experts else form

    def changed(self, seconds: float, made: int) -> None:
        """Called when the slots are there: empty, or with the experts kept from earlier ones."""
        if self._applied is None:
            self._initial = self._slots
        self._applied = self._amount
        self._choose_cache()
        if self._notify and any(layer.memory.reads_all for layer in self._holdings.slots.layers):
            self._notify(
                f"warning: {self._holdings.store.files.name} holds its experts in a way in which "
                "one is fetched with all others of its layer (toast-model bake makes a file in "
                "which it is not)"
            )
            self._notify = None

    def _choose_cache(self) -> None:
        """Choose whether reads use the page cache, as in ResidencyPolicy: both look at the same
        reads, so that it does not matter which of them is last."""
        self._holdings.store.keeps_cached = self._room.caches()

    def failed(self) -> None:
        """Called when the slots could not be changed: they are as before."""
        if self._applied is not None:
            self._amount = self._applied

    def memory_warning(self) -> None:
        """Shed all slots but the least before the next pass."""
        self._warned = True

    # ------------------------------------------------------------------------------------- counting

    def begin_run(self) -> None:
        """Reset the counts, and the pressure: what was too much in one run may not be in the
        next."""
        super().begin_run()
        self._initial = self._slots
        self._pressures = {}

    def count_step(self) -> None:
        self._checks.count_step()

    def _counts(self) -> dict[str, Any]:
        return self._holdings.slots.counts.as_map()

    @property
    def _slots(self) -> int:
        """Current slots per layer."""
        layers = self._holdings.slots.layers
        return max((layer.table.slots for layer in layers), default=self.sizes.experts)

    def _report_of(self, counts: dict[str, Any]) -> dict[str, Any]:
        """Slots per layer, of how many experts, and how many slots when the last run began; and
        SlotCounts."""
        there = {"slots": self._slots, "experts": self.sizes.experts, "initial": self._initial}
        return {**there, **counts}
