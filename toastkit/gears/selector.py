"""The gear of the next pass: the monitor's reading, and the rules on top of it.

Paper 003 sections 3.5, 10.2 and 11. The gear of the prompt's difficulty holds until the monitor's
window is full; from then on the observed entropy decides. A gear is held for a minimum number of
tokens, so that neighbouring entries of the KV cache have one precision; only a catastrophe shifts
at once. Hysteresis applies to the gear that really runs, which may differ from the monitor's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from toastkit.errors import DataError, UsageError
from toastkit.frames import GEARS
from toastkit.gears.classifier import Difficulty, short
from toastkit.gears.monitor import EntropyMonitor, MonitorOptions, Reading, check_whole

LONGEST_DURATION = 1 << 20


@dataclass(frozen=True)
class SelectorOptions:
    """monitor: options of the EntropyMonitor. min_duration: the fewest tokens that a gear is held
    (section 10.2, which gives no default); with 1 every step may shift."""

    monitor: MonitorOptions = MonitorOptions()
    min_duration: int = 4

    def validate(self) -> None:
        """Raise a UsageError that names an invalid option, its value and the valid ones."""
        self.monitor.validate()
        check_whole("minimum duration", self.min_duration, 1, LONGEST_DURATION)


class GearSelector:
    """Decides the gear of every pass of one answer. Deterministic; O(window) per step.

    vocab: ids. start: the difficulty of the prompt, if known. monitor: follows the entropy. last:
    the last decision, None before the first. Raises UsageError.
    """

    def __init__(
        self, vocab: int, options: SelectorOptions | None = None, start: Difficulty | None = None
    ):
        self.options = options or SelectorOptions()
        self.options.validate()
        self.monitor = EntropyMonitor(vocab, self.options.monitor)
        self.last: Reading | None = None
        self._start = start
        self._held = 0  # passes in the current gear, including the last decision's

    @property
    def gear(self) -> str | None:
        """The gear of the last decision; None before the first."""
        return None if self.last is None else self.last.gear

    def goes_on_as(self, other: GearSelector) -> bool:
        """True if the other has the same rules and vocabulary, so that this one may replace it.
        Neither their entropies nor their starts are compared."""
        return self.monitor.vocab == other.monitor.vocab and self.options == other.options

    def update(self, entropy: float) -> Reading:
        """The gear of the pass that consumes the token drawn from logits of this entropy (bits).
        Raises DataError when it is not finite."""
        reading = self.monitor.update(entropy)
        wanted, reason = self._wanted(reading)
        gear = self.gear or wanted
        shifted = wanted != gear
        if shifted and not reading.catastrophic and self._held < self.options.min_duration:
            wanted, shifted = gear, False
            reason = f"held: {self._held} of {self.options.min_duration} tokens"
        self._held = 1 if shifted else self._held + 1
        reading.gear, reading.shifted, reading.reason = wanted, shifted, reason
        self.last = reading
        return reading

    def _wanted(self, reading: Reading) -> tuple[str, str]:
        """Gear and reason, before the minimum duration is applied."""
        if reading.catastrophic:
            self._start = None  # the prompt looked easier than it is: ignore its score from now on
            return "high", reading.reason
        if self._start is not None and not self.monitor.filled:
            score, gear = short(self._start.score), self._start.gear
            return gear, f"prompt score {score} -> {gear}"
        return self.monitor.classify(reading.mean, self.gear)

    def state(self) -> dict[str, Any]:
        """Everything that the next decision depends on, as plain data for msgpack or JSON."""
        return {
            "monitor": self.monitor.state(),
            "min_duration": self.options.min_duration,
            "last": None if self.last is None else asdict(self.last),
            "held": self._held,
            "start": None if self._start is None else self._start._asdict(),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> GearSelector:
        """The selector that `state()` described. Raises DataError when it is not such a state."""
        try:
            monitor = EntropyMonitor.from_state(state["monitor"])
            last, held, start = state["last"], state["held"], state["start"]
            options = SelectorOptions(monitor.options, state["min_duration"])
            difficulty = Difficulty.from_map(start)
            selector = cls(monitor.vocab, options, difficulty)
            decision = None if last is None else Reading(**last)
        except (KeyError, TypeError) as error:
            raise DataError("cannot restore the gear selector: its state is malformed") from error
        except UsageError as error:
            raise DataError(f"cannot restore the gear selector: {error}") from error
        begun = monitor.state()["gear"] is not None
        counted = type(held) is int and (held >= 1 if begun else held == 0)
        whole = decision is not None and _is_sound(decision) if begun else decision is None
        if not counted or not whole or (difficulty is None) != (start is None):
            raise DataError("cannot restore the gear selector: its state is malformed")
        selector.monitor, selector.last, selector._held = monitor, decision, held
        return selector


def _is_sound(decision: Reading) -> bool:
    """True if a restored decision has valid fields."""
    numbers = (decision.entropy, decision.mean, decision.slope, decision.forecast)
    return (
        all(type(x) in (int, float) and -math.inf < x < math.inf for x in numbers)
        and decision.gear in GEARS
        and decision.expected in GEARS
        and type(decision.shifted) is bool
        and type(decision.reason) is str
    )
