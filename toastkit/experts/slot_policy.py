"""How many of each layer's experts are on the device: a policy over the holdings (paper 002,
section II-B). The others stay in the file and are fetched when a token wants them.

It gives stacks of experts the form of slots, in whatever precision the policy before it wants: a
slot of a low gear is a quarter as large, so that the same bytes hold more of them. With every
expert in a slot of its own there is nothing to decide, and the stacks stay whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from toastkit.errors import UsageError
from toastkit.experts.slot_options import SlotOptions
from toastkit.experts.slot_sizes import SlotSizes
from toastkit.holdings.forms import Form, slotted
from toastkit.holdings.holdings import Holdings
from toastkit.holdings.policy import Wish


class SlotPolicy:
    """See holdings.policy.Policy. room(holdings): bytes of the device that slots can have, where
    the options do not say. notify: is told a line where experts have to be computed as they are
    fetched."""

    name = "slots"
    variant = ""  # the results are those of a model that is whole, to the bit
    steps_together = True

    def __init__(
        self,
        options: SlotOptions,
        room: Callable[[Holdings], int],
        notify: Callable[[str], None] | None = None,
    ):
        self.options = options
        self._notify = notify
        self.paths: list[str] = []
        self._room = room
        self._loaded = False
        self._before: dict[str, Any] = {}

    def attach(self, holdings: Holdings) -> None:
        """Takes on a model. Raises UsageError for one without experts, and for fewer slots than a
        token takes."""
        self._holdings = holdings
        self.sizes = SlotSizes(holdings)
        self.paths = list(self.sizes.of)
        self._amount = self.options.amount
        if self.options.kind == "auto":
            self._amount = self._room(holdings)
        self._check()
        if self.options.prefetch != "off":
            self._foresee()
        self.sizes.set_slots(self._count(0))

    def _foresee(self) -> None:
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
        if self.options.kind == "slots" and self._amount < least:
            raise UsageError(
                f"--expert-slots {self._amount}: {name} needs {least} slots a layer at least",
                hint="as many as a token chooses experts",
            )
        size = least * self.sizes.slot_bytes()
        if self.options.kind == "bytes" and self._amount < size:
            raise UsageError(
                f"--expert-slots {self.options}: {name} needs {-(-size // (1 << 20))}M at least",
                hint=f"that is {least} slots in each of {len(self.sizes.switches)} layers",
            )

    def _count(self, bits: int) -> int:
        """Slots of a layer."""
        if self.options.kind == "slots":
            return self._amount
        return self.sizes.within(self._amount, bits)

    # ------------------------------------------------------------------------------------- deciding

    def decide(self, wish: Wish) -> bool:
        """Once, when the model is loaded."""
        return not self._loaded

    def form(self, path: str, form: Form) -> Form:
        """Slots of that form, or all of it."""
        count = self._count(form.bits)
        return slotted(form, count) if count < self.sizes.of[path].experts else form

    def expect(self, wish: Wish) -> Mapping[str, Form]:
        """Nothing: experts are fetched by themselves."""
        return {}

    def changed(self, seconds: float, made: int) -> None:
        """The slots are there, and empty."""
        self._loaded = True
        made = any(layer.memory.is_made for layer in self._holdings.slots.layers)
        if made and self._notify is not None:
            self._notify(
                f"warning: {self._holdings.store.files.name} does not hold its experts as they are "
                "computed with: fetching one takes long (toast-model bake makes a file that does)"
            )
            self._notify = None

    def failed(self) -> None:
        """They are not."""

    # ------------------------------------------------------------------------------------- counting

    def begin_run(self) -> None:
        """Counts from here on."""
        self._before = self._holdings.slots.counts.as_map()

    def count_step(self) -> None:
        """Nothing: the slots count."""

    def run_report(self) -> dict[str, Any]:
        """Of the run since `begin_run`: see `report`."""
        now = self._holdings.slots.counts.as_map()
        return self._about({name: now[name] - self._before.get(name, 0) for name in now})

    def report(self) -> dict[str, Any]:
        """Of all runs: slots of a layer, of how many experts; what SlotCounts has."""
        return self._about(self._holdings.slots.counts.as_map())

    def _about(self, counts: dict[str, Any]) -> dict[str, Any]:
        experts = self.sizes.experts
        layers = self._holdings.slots.layers
        slots = max((layer.table.slots for layer in layers), default=experts)
        return {"slots": slots, "experts": experts, **counts, "wait": round(counts["wait"], 6)}
