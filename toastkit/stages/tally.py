"""A summary line of a run's gears once it is over."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from toastkit.frames import GEARS, End, Frame, Head, Logits
from toastkit.text.exact_numbers import counted


def tallied(frames: Iterable[Frame], say: Callable[[str], None]) -> Iterator[Frame]:
    """Pass on frames annotated by entropy-gear; say one line at the end of each run."""
    gears: Counter[str] = Counter()
    entropies: list[float] = []
    shifts = 0
    for frame in frames:
        if isinstance(frame, Head):
            gears, entropies, shifts = Counter(), [], 0
        elif isinstance(frame, Logits) and frame.gear is not None and frame.entropy is not None:
            gears[frame.gear] += 1
            entropies.append(frame.entropy)
            shifts += bool(frame.shifted)
        elif isinstance(frame, End) and not entropies:
            say("gears: no tokens")
        elif isinstance(frame, End):
            spread = ", ".join(f"{gear} {gears[gear]}" for gear in GEARS)
            mean = math.fsum(entropies) / len(entropies)
            say(
                f"gears: {spread} of {counted(len(entropies), 'token')}; "
                f"{counted(shifts, 'shift')}; mean entropy {mean:.2f} bits"
            )
        yield frame
