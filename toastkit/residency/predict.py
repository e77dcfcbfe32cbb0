"""How fast a model with absent layers will be, before it is run so.

Paper 001, section 5.5, predicts 1 / (T_compute + N_streamed * T_io) tokens a second from bandwidths
and was 50% to 4,000% off. Its formula leaves out: that layers are read while others run; what
reading costs that is no bandwidth; that each streamed layer is waited for by itself, while those
that stay are computed in one go; what runs outside the layers; that reading and computing slow each
other down; and that layers differ. Here all of these are measured (`calibration`), and a pass is
played through as `holdings.streams` does it: layers are read one after another, a few ahead of the
one that runs, round to the next pass.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from toastkit.holdings.read_ahead import MOST_AHEAD, layers_ahead

PASSES = 12  # played through at most until one is as the one before


@dataclass(frozen=True)
class Source:
    """Where absent layers are read from. rate: bytes on the device that are there after a second of
    nothing but reading. token, chunk: the slowdown of reading and computing at a time, in a pass
    over one token and over many: how much longer both take together than side by side without each
    other, 0..1. 1: as long as one after the other."""

    rate: float
    token: float
    chunk: float


@dataclass(frozen=True)
class Calibration:
    """Seconds, measured on a device for one shape of model.

    token: of each layer, for one token, where it is streamed. chunk_fixed, chunk_token: of each
    layer for a chunk, and for each token of it. outside_token, outside_chunk: of a pass, what is
    outside the layers. stays: share of a layer's seconds for a token that it takes where it stays,
    so that nobody waits for it alone. cached, cold: reading from the system's cache of files, and
    from the disk.
    """

    token: tuple[float, ...]
    chunk_fixed: tuple[float, ...]
    chunk_token: tuple[float, ...]
    outside_token: float
    outside_chunk: float
    stays: float
    cached: Source
    cold: Source


@dataclass(frozen=True)
class Prediction:
    """Seconds. token: of a token that is decoded. prompt: of a prompt that is read. reading: of a
    token's, if there were nothing to compute. computing: if there were nothing to read."""

    token: float
    prompt: float
    reading: float
    computing: float


def predict(
    layers: Sequence[int],
    measured: Calibration,
    resident: Collection[int],
    *,
    cached: bool,
    prompt: int,
    chunk: int,
    along: bool = False,
    most: int = MOST_AHEAD,
) -> Prediction:
    """What a model with these layers on the device will take.

    layers: bytes of each. resident: indices of those that stay. cached: whether the system's cache
    of files holds what is streamed. prompt: tokens to be read, at least one, in chunks of so many;
    the last one is a pass by itself, or goes along with those before it, as in Engine.prefill.
    most: layers read ahead, as far as memory goes.
    """
    source = measured.cached if cached else measured.cold
    reads = [None if i in resident else size / source.rate for i, size in enumerate(layers)]
    token = [
        seconds * measured.stays if i in resident else seconds
        for i, seconds in enumerate(measured.token)
    ]
    one = pass_seconds(reads, token, measured.outside_token, source.token, most=most)
    along = along and prompt > 1
    total, rest = (0.0, prompt) if along else (one, max(0, prompt - 1))
    whole, last = divmod(rest, chunk)
    if along and last == 1:
        whole, last = whole - 1, chunk + 1
    for count, times in ((chunk, whole), (last, 1)):
        if count and times:
            long = [f + count * t for f, t in zip(measured.chunk_fixed, measured.chunk_token)]
            each = pass_seconds(reads, long, measured.outside_chunk, source.chunk, most=most)
            total += times * each
    return Prediction(one, total, sum(r or 0.0 for r in reads), sum(token) + measured.outside_token)


def pass_seconds(
    reads: Sequence[float | None],
    computes: Sequence[float],
    outside: float,
    slowdown: float,
    ahead: int | None = None,
    most: int = MOST_AHEAD,
    passes: int = PASSES,
) -> float:
    """Seconds of a pass among many like it, or of the last of so many, the first of which begins
    with nothing read.

    reads, computes: seconds of each layer, reads None for one that stays. outside: seconds after
    the last layer, during which reading goes on. slowdown: see Source. ahead: layers read ahead;
    None for as many as Streams.depth has, at most so many. Layers that stay are
    computed when the next streamed one is there: nobody waits for them by themselves.
    """
    phases, tail = _phases(reads, computes, outside)
    if not phases:
        return tail
    if ahead is None:
        ahead = min(depth(phases, tail), most)
    pipe = _Pipe([read for read, _ in phases], slowdown)
    before: tuple[float, float] | None = None
    seconds = 0.0
    for number in range(passes):
        start = pipe.clock
        for place, (_, work) in enumerate(phases):
            this = number * len(phases) + place
            pipe.await_read(this)
            # A layer that runs is not read for the next pass meanwhile. Once it has, one more is
            # read into its memory.
            pipe.ask(min(this + ahead, this + len(phases) - 1))
            pipe.compute(work)
            pipe.ask(this + min(ahead + 1, len(phases)) if ahead else this)
        pipe.compute(tail)
        seconds = pipe.clock - start
        state = pipe.state(number + 1)
        if before is not None and math.dist(before, state) < 1e-9:
            break
        before = state
    return seconds


def _phases(
    reads: Sequence[float | None], computes: Sequence[float], outside: float
) -> tuple[list[tuple[float, float]], float]:
    """(seconds of reading, of computing) of each streamed layer and those before it that stay, and
    the seconds after the last."""
    phases, pending = [], 0.0
    for read, compute in zip(reads, computes, strict=True):
        pending += compute
        if read is not None:
            phases.append((read, pending))
            pending = 0.0
    return phases, pending + outside


def depth(phases: Sequence[tuple[float, float]], tail: float) -> int:
    """How many layers are read ahead: Streams.depth, on times that do not disturb each other."""
    wanted = layers_ahead(max(read for read, _ in phases), [work for _, work in phases], tail)
    return min(wanted, MOST_AHEAD, len(phases))


class _Pipe:
    """A reader that reads layers in turn, pass after pass, beside one who computes. reads: seconds
    of each. clock: seconds since the beginning."""

    def __init__(self, reads: list[float], slowdown: float):
        self._reads = reads
        self._speed = 1 / (1 + slowdown)
        self._asked = self._done = 0  # layers, over all passes
        self._left = reads[0]  # seconds of the next one
        self.clock = 0.0

    def state(self, passes: int) -> tuple[float, float]:
        """How far reading is ahead of so many passes."""
        return self._done - passes * len(self._reads), self._left

    def ask(self, number: int) -> None:
        """Layers up to this one are to be read."""
        self._asked = max(self._asked, number + 1)

    def await_read(self, number: int) -> None:
        """Nothing is computed until that one has been read."""
        self.ask(number)
        while self._done <= number:
            self.clock += self._left
            self._next()

    def compute(self, work: float) -> None:
        """So many seconds' work, beside which there may be something to read."""
        while work > 0:
            if self._done >= self._asked:
                self.clock += work
                return
            step = min(work, self._left)  # of either, at the speed of two
            self.clock += step / self._speed
            work -= step
            self._left -= step
            if self._left <= 0:
                self._next()

    def _next(self) -> None:
        self._done += 1
        self._left = self._reads[self._done % len(self._reads)]


def fitted_slowdown(
    reads: Sequence[float | None],
    computes: Sequence[float],
    outside: float,
    seconds: float,
    ahead: int | None = None,
    passes: int = PASSES,
) -> float:
    """The slowdown with which `pass_seconds` gives what was measured; 0 or 1 where none does."""
    low, high = 0.0, 1.0
    for _ in range(30):
        middle = (low + high) / 2
        if pass_seconds(reads, computes, outside, middle, ahead, passes=passes) < seconds:
            low = middle
        else:
            high = middle
    return low if low == 0.0 else high
