"""entropy-gear: annotate logits with entropy, its trend, and the gear for the next pass.

It only decides: decode shifts, if told to (`--gear auto`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from toastkit.frames import Frame, Head, Logits, Token
from toastkit.stages.follow import Follower, GearRules
from toastkit.stages.streams import ends_run, whole_runs, with_logits


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
