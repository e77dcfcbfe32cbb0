"""How a run spent its tokens: a line on its gears once it is over."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from toastkit.frames import End, Frame, Head, Logits
from toastkit.gears.monitor import GEARS


class Tally:
    """Counts the steps of one run by their gears, as entropy-gear has annotated them."""

    def __init__(self) -> None:
        self._gears: Counter[str] = Counter()
        self._shifts = 0
        self._entropies: list[float] = []

    def add(self, frame: Logits) -> None:
        """Counts a step in."""
        if frame.gear is not None and frame.entropy is not None:
            self._gears[frame.gear] += 1
            self._shifts += bool(frame.shifted)
            self._entropies.append(frame.entropy)

    def line(self) -> str:
        """What was counted."""
        count = len(self._entropies)
        if not count:
            return "gears: no tokens"
        spread = ", ".join(f"{gear} {self._gears[gear]}" for gear in GEARS)
        return (
            f"gears: {spread} of {counted(count, 'token')}; {counted(self._shifts, 'shift')}; "
            f"mean entropy {math.fsum(self._entropies) / count:.2f} bits"
        )


def tallied(frames: Iterable[Frame], say: Callable[[str], None]) -> Iterator[Frame]:
    """The frames; a line is said at the end of each run."""
    tally = Tally()
    for frame in frames:
        if isinstance(frame, Head):
            tally = Tally()
        elif isinstance(frame, Logits):
            tally.add(frame)
        elif isinstance(frame, End):
            say(tally.line())
        yield frame


def counted(number: int, thing: str) -> str:
    """1 token, 2 tokens."""
    return f"{number} {thing}{'' if number == 1 else 's'}"
