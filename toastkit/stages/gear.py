"""entropy-gear: annotate logits with entropy, its trend, and the gear for the next pass.

It only decides: decode shifts, if told to (`--gear auto`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from toastkit.frames import GEARS, End, Frame, Head, Logits, Token
from toastkit.stages.follow import Follower, GearRules
from toastkit.stages.streams import ends_run, whole_runs, with_logits
from toastkit.text.exact_numbers import counted


def gear(frames: Iterable[Frame], rules: GearRules) -> Iterator[Frame]:
    """Fill entropy, mean, slope, gear, shifted, reason and expected of every logits frame."""
    from toastkit.stages.arrays import LogitsReader

    follower, reader = Follower(rules), LogitsReader()
    hint = "toast-entropy-gear goes before toast-sample"
    whole = with_logits(whole_runs(frames, ends_run), hint)
    for frame in whole:
        if isinstance(frame, Logits):
            follower.annotate(frame, reader.entropy(frame.logits))
        else:
            if isinstance(frame, Head):
                reader.begin(frame)
            follower.learn(frame)
        yield frame


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


def followed(frames: Iterable[Frame], follower: Follower) -> Iterator[Frame]:
    """Pass frames on; the follower learns where runs begin and end."""
    for frame in frames:
        follower.learn(frame)
        yield frame


def entropy_on_device(frames: Iterable[Frame]) -> Iterator[Frame]:
    """Add the entropy of each step to its graph, unevaluated (003, section 3.6)."""
    from toastkit.gears.entropy_graph import entropy_bits

    for frame in frames:
        if isinstance(frame, Logits):
            frame.entropy = entropy_bits(frame.logits)
        yield frame


def measured(frames: Iterable[Frame]) -> Iterator[Frame]:
    """Fill the entropy of every logits frame, and no gear."""
    from toastkit.stages.arrays import LogitsReader

    reader = LogitsReader()
    for frame in reader.listen(frames):
        if isinstance(frame, Logits):
            frame.entropy = round(reader.entropy(frame.logits), 6)
        yield frame


def in_gear(frames: Iterable[Frame], gear: str) -> Iterator[Frame]:
    """Write the model's fixed gear into every token frame."""
    for frame in frames:
        if isinstance(frame, Token):
            frame.gear = gear
        yield frame
