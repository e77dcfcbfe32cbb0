"""The gears of a model: a policy that changes the precision of its matrices (paper 003, section 6).

Nothing is quantised before a gear is first entered. A shift down drops the originals, so that
device memory falls; a shift up reads them from the store again, bit for bit.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from toastkit.errors import UsageError
from toastkit.frames import GEARS
from toastkit.gears.discovery import discover
from toastkit.gears.gear_options import GearOptions
from toastkit.holdings.forms import ORIGINAL, Form, packed
from toastkit.holdings.holdings import Holdings
from toastkit.holdings.packed import PathCounts
from toastkit.holdings.policy import Policy, Wish
from toastkit.store.store import Store


@dataclass
class ShiftTimes:
    """Seconds of each shift into a gear. first: its matrices had to be made or read. again: they
    were cached."""

    first: list[float]
    again: list[float]


class GearPolicy(Policy):
    """Chooses the gear of each pass: high for prefill (section 7.2), else the fixed one, the one
    wished for, or the current one. See holdings.policy.Policy.

    gear: the current one. tokens: steps run, by gear. times: of shifts, by gear.
    """

    name = "gears"
    changes_forms = True

    def __init__(self, options: GearOptions):
        low, mid = options.bits
        self.variant = f"{options.mode}-{options.scope}-{low}-{mid}"
        self.options = options
        self.gear = "high"
        self.tokens: Counter[str] = Counter()
        self.times = {gear: ShiftTimes([], []) for gear in GEARS}
        self.paths: list[str] = []
        self.steps_together = options.mode != "auto"
        self._wanted = self.gear

    def attach(self, holdings: Holdings) -> None:
        """Find the matrices in scope. Raises UsageError if there are none."""
        store, scope = holdings.store, self.options.scope
        found = {id(one.module) for one in discover(store.model, scope)}
        self._holdings = holdings
        self.paths = [p for p, holding in holdings.modules.items() if id(holding.module) in found]
        if not self.paths:
            hint = "--gear-scope all looks for others than those of attention"
            raise UsageError(
                f"{store.files.name} has no matrix for gears in scope {scope}",
                hint=hint if scope == "attention" else None,
            )

    # ------------------------------------------------------------------------------------- deciding

    def decide(self, wish: Wish) -> bool:
        chosen = self.options.fixed or wish.gear or self.gear
        self._wanted = "high" if wish.prompt else chosen
        return self._wanted != self.gear

    def form(self, path: str, form: Form) -> Form:
        """The form of a managed matrix in the gear that was decided on."""
        return self.form_of(self._wanted)

    def form_of(self, gear: str) -> Form:
        """The form of managed matrices in a gear."""
        bits = self.options.bits_of(gear)
        return ORIGINAL if bits is None else packed(bits, self.options.path == "fused")

    def step_forms(self) -> tuple[list[str], set[Form]]:
        """The managed matrices, and the forms that they may have in steps."""
        fixed = self.options.fixed
        return self.paths, {self.form_of(gear) for gear in ([fixed] if fixed else GEARS)}

    def expect(self, wish: Wish) -> Mapping[str, Form]:
        """The forms of the gear that is expected next (section 3.5)."""
        if wish.expected in (None, self.gear) or self.options.fixed is not None:
            return {}
        return dict.fromkeys(self.paths, self.form_of(wish.expected))

    def changed(self, seconds: float, made: int) -> None:
        """Called when the model is in the gear that was decided on."""
        self.gear = self._wanted
        times = self.times[self.gear]
        (times.first if made else times.again).append(seconds)

    def failed(self) -> None:
        """Called when the shift failed: the gear is the old one."""
        self._wanted = self.gear

    # ------------------------------------------------------------------------------------- counting

    def count_step(self) -> None:
        self.tokens[self.gear] += 1

    def uncount_step(self) -> None:
        self.tokens[self.gear] -= 1

    def report(self) -> dict[str, Any]:
        """A report of all runs: mode and scope, and as `run_report`."""
        return {"mode": self.options.mode, "scope": self.options.scope, **super().report()}

    def _report_of(self, counts: dict[str, Any]) -> dict[str, Any]:
        """The counts; bytes of the managed matrices on the device now; matmuls of all runs by
        path."""
        return {**counts, "bytes": self.device_bytes, "paths": asdict(self.counts)}

    def _counts(self) -> dict[str, Any]:
        """Steps by gear, shifts, and their seconds."""
        every = [s for times in self.times.values() for s in (*times.first, *times.again)]
        steps = {gear: self.tokens[gear] for gear in GEARS}
        return {**steps, "shifts": len(every), "seconds": round(math.fsum(every), 6)}

    # ------------------------------------------------------------------------------------ sizes

    @property
    def counts(self) -> PathCounts:
        """Matmuls of packed matrices, by path."""
        return self._holdings.counts

    @property
    def bits(self) -> dict[str, float]:
        """Bits per weight by gear; in high, the file's mean."""
        low, mid = self.options.bits
        store, original = self._holdings.store, self._holdings.loaded.matrix_bytes
        weights = [(store.dtype(f"{p}.weight").size, original(p)) for p in self.paths]
        mean = sum(size * weight for size, weight in weights) / self.originals_bytes
        return {"low": low, "mid": mid, "high": 8 * mean}

    @property
    def originals_bytes(self) -> int:
        """Bytes of the managed matrices as loaded, in high gear."""
        return sum(map(self._holdings.loaded.matrix_bytes, self.paths))

    @property
    def device_bytes(self) -> int:
        """Bytes of the managed matrices on the device now, in all gears."""
        return self._holdings.matrix_bytes(self.paths)


def gear_policy(
    store: Store, options: GearOptions, notify: Callable[[str], None] | None
) -> GearPolicy | None:
    """The gear policy of a model; None if gears are off, or the checkpoint is quantised: then gears
    are at best shown (section 12.2). Raises UsageError if they would have to shift nevertheless."""
    if not options.on:
        return None
    if store.quantization is None:
        return GearPolicy(options)
    name = store.files.name
    if options.fixed in ("low", "mid"):
        raise UsageError(
            f"--gear {options.fixed}: {name} is quantised already",
            hint="--gear auto shows what its gears would do",
        )
    if notify is not None and options.mode == "auto":
        notify(f"{name} is quantised already: gears are shown and not shifted")
    return None
