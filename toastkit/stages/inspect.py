"""`toast-frames` between reader and writer: select, slice, count, inline."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from toastkit.frames import (
    NAMES,
    End,
    Error,
    Frame,
    Head,
    Logits,
    Prefilled,
    Reference,
    Token,
    Unknown,
    dumps,
)


def kind_of(frame: Frame) -> str:
    """The name of a frame's kind."""
    return frame.k if isinstance(frame, Unknown) else NAMES[type(frame)]


def choose(
    frames: Iterable[Frame], kinds: frozenset[str] | None, start: int, stop: int | None
) -> Iterator[Frame]:
    """The frames of some kinds, from number `start` up to `stop`. Heads are not counted: a run
    keeps its head unless `kinds` leaves it out."""
    count = 0
    for frame in frames:
        if kinds is not None and kind_of(frame) not in kinds:
            continue
        if not isinstance(frame, Head):
            count += 1
            if count <= start or (stop is not None and count > stop):
                continue
        yield frame


def make_inline(frames: Iterable[Frame]) -> Iterator[Frame]:
    """Replace references by the arrays they point to, while the run still has them."""
    from toastkit.stages.arrays import LogitsReader, from_numpy

    reader = LogitsReader()
    for frame in reader.listen(frames):
        if isinstance(frame, (Logits, Prefilled)) and isinstance(frame.logits, Reference):
            frame.logits = from_numpy(reader.read(frame.logits))
        yield frame


@dataclass
class Statistics:
    """Counts over a stream. bytes: of all frames as on a pipe. seconds: of decode. Gears and
    entropies are those of logits or, if a sampler took these out, of the tokens."""

    frames: int = 0
    bytes: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    gears: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    seconds: float = 0.0
    entropy_sum: float = 0.0
    entropy_count: int = 0
    logprob_sum: float = 0.0
    logprob_count: int = 0
    _measured: int | None = field(default=None, repr=False)  # position of the preceding logits

    def add(self, frame: Frame) -> None:
        """Count one frame."""
        self.frames += 1
        self.bytes += len(dumps(frame))
        self.kinds[kind_of(frame)] += 1
        if isinstance(frame, Prefilled):
            self.prompt_tokens += frame.n_past
            self.cached_tokens += frame.n_cached
            self.seconds += frame.seconds
        elif isinstance(frame, Logits):
            self.seconds += frame.seconds or 0.0
            self._measure(frame)
            self._measured = None if frame.entropy is None else frame.pos
        elif isinstance(frame, Token):
            if frame.logprob is not None:
                self.logprob_sum += frame.logprob
                self.logprob_count += 1
            if frame.pos != self._measured:
                self._measure(frame)
            self._measured = None
        elif isinstance(frame, End):
            self.ends[frame.reason] += 1
        elif isinstance(frame, Error):
            self.ends["error"] += 1

    def _measure(self, frame: Logits | Token) -> None:
        """Count a step's gear and entropy."""
        if frame.gear is not None:
            self.gears[frame.gear] += 1
        if isinstance(frame.entropy, (int, float)):
            self.entropy_sum += frame.entropy
            self.entropy_count += 1

    def summary(self) -> dict:
        """The counts as plain data, with means where defined. None for what is not finite."""

        def mean(total: float, count: int = 1) -> float | None:
            return round(total / count, 6) if count and math.isfinite(total) else None

        left_out = ("_sum", "_count", "_measured")
        counts = {n: v for n, v in vars(self).items() if not n.endswith(left_out)}
        return {
            **counts,
            "seconds": mean(self.seconds),
            "mean_entropy_bits": mean(self.entropy_sum, self.entropy_count),
            "mean_logprob": mean(self.logprob_sum, self.logprob_count),
        }
