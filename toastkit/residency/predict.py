"""Predicts the speed of a model with streamed layers.

Paper 001, section 5.5, predicts 1 / (T_compute + N_streamed * T_io) tokens a second from bandwidths
and was 50% to 4,000% off. Its formula leaves out: that layers are read while others run; the costs
of reading other than bandwidth; that the host waits for each streamed layer, while resident ones
are computed in one go; what runs outside the layers; how much reading slows down computing, and the
reverse; and that layers differ. Here all of these are measured (`calibration`), and a pass is
simulated as `holdings.streams` runs it: layers are read one after another, a few ahead of the one
that runs, wrapping round to the next pass.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from toastkit.holdings.read_ahead import MAX_AHEAD, layers_ahead

PASSES = 12  # simulated at most, until a pass repeats the one before
MAX_SLOWDOWN = 4.0
COARSE, FINE = 0.125, 0.01  # steps of the search for slowdowns


@dataclass(frozen=True)
class Slowdown:
    """How much longer reading takes during computing, and computing during reading, relative to
    each alone, 0..MAX_SLOWDOWN. They differ: threads that copy from the page cache take CPU time
    from those that compute, and hardly lose any to them; threads that wait for a disk take none."""

    reading: float
    computing: float


@dataclass(frozen=True)
class Source:
    """A source of streamed layers. rate: bytes on the device per second of reading alone. token,
    chunk: the slowdowns in a pass over one token and over many."""

    rate: float
    token: Slowdown
    chunk: Slowdown


@dataclass(frozen=True)
class Calibration:
    """Seconds, measured on a device for one shape of model.

    token: of each layer, streamed, for one token. chunk_fixed, chunk_token: of each layer per
    chunk, and per token of it. outside_token, outside_chunk: per pass, outside the layers. stays:
    the share of a layer's seconds per token that it takes if resident, as it is not waited for
    alone. cached, cold: reading from the page cache, and from the disk.
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
    """Seconds. token: per decode step. prompt: of prefill. reading: of a step, if there were
    nothing to compute. computing: of a step, if there were nothing to read."""

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
    most: int = MAX_AHEAD,
) -> Prediction:
    """Predict the times of a model with these resident layers.

    layers: bytes of each. resident: indices of the resident ones. cached: the page cache holds the
    streamed ones. prompt: its tokens, at least one. chunk: tokens per prefill chunk. along: the
    last token goes along with those before it; else it is a pass by itself, as in Engine.prefill.
    most: layers read ahead, as far as memory allows.
    """
    source = measured.cached if cached else measured.cold
    reads = [None if i in resident else size / source.rate for i, size in enumerate(layers)]
    token = [
        seconds * measured.stays if i in resident else seconds
        for i, seconds in enumerate(measured.token)
    ]
    one = simulate(reads, token, measured.outside_token, source.token, most=most).seconds
    along = along and prompt > 1
    total, rest = (0.0, prompt) if along else (one, max(0, prompt - 1))
    whole, last = divmod(rest, chunk)
    if along and last == 1:
        whole, last = whole - 1, chunk + 1
    for count, times in ((chunk, whole), (last, 1)):
        if count and times:
            computes = [f + count * t for f, t in zip(measured.chunk_fixed, measured.chunk_token)]
            each = simulate(
                reads, computes, measured.outside_chunk, source.chunk, most=most
            ).seconds
            total += times * each
    return Prediction(one, total, sum(r or 0.0 for r in reads), sum(token) + measured.outside_token)


class PassTime(NamedTuple):
    """Seconds of a simulated or measured pass: waiting for a layer without computing, and the
    rest."""

    waiting: float
    computing: float

    @property
    def seconds(self) -> float:
        """Seconds of the whole pass."""
        return self.waiting + self.computing


def simulate(
    reads: Sequence[float | None],
    computes: Sequence[float],
    outside: float,
    slowdown: Slowdown,
    most: int = MAX_AHEAD,
    passes: int = PASSES,
) -> PassTime:
    """Simulate a pass in the steady state, or the last of `passes`, the first of which begins with
    nothing read.

    reads, computes: seconds of each layer; reads is None for a resident one. outside: seconds after
    the last layer, during which reading goes on. slowdown: of each by the other. most: layers read
    ahead, at most. Resident layers are computed while the streamed one after them is waited for.
    """
    phases, tail = _phases(reads, computes, outside)
    if not phases:
        return PassTime(0.0, tail)
    ahead = min(depth([(read, before + own) for read, before, own in phases], tail), most)
    reader = _Reader([read for read, _, _ in phases], slowdown)
    last: tuple[float, float] | None = None
    time = PassTime(0.0, 0.0)
    for number in range(passes):
        reader.begin()
        for place, (_, before, own) in enumerate(phases):
            this = number * len(phases) + place
            reader.compute(before)
            reader.await_read(this)
            # A running layer is not read for the next pass meanwhile. Once it has run, one more
            # layer is read into its memory.
            reader.request(min(this + ahead, this + len(phases) - 1))
            reader.compute(own)
            reader.request(this + min(ahead + 1, len(phases)) if ahead else this)
        reader.compute(tail)
        time = PassTime(reader.waited, reader.computed)
        state = reader.state(number + 1)
        if last is not None and math.dist(last, state) < 1e-9:
            break
        last = state
    return time


def _phases(
    reads: Sequence[float | None], computes: Sequence[float], outside: float
) -> tuple[list[tuple[float, float, float]], float]:
    """For each streamed layer, the seconds to read it, to compute the resident ones before it, and
    to compute it; and the seconds after the last."""
    phases, pending = [], 0.0
    for read, compute in zip(reads, computes, strict=True):
        if read is None:
            pending += compute
        else:
            phases.append((read, pending, compute))
            pending = 0.0
    return phases, pending + outside


def depth(phases: Sequence[tuple[float, float]], tail: float) -> int:
    """How many layers are read ahead: Streams.depth, from times without slowdown. phases: seconds
    of reading and of computing, which includes the resident layers."""
    wanted = layers_ahead(max(read for read, _ in phases), [work for _, work in phases], tail)
    return min(wanted, MAX_AHEAD, len(phases))


class _Reader:
    """Simulates a reader that reads layers in turn, pass after pass, concurrently with computing.
    reads: seconds of each. waited, computed: seconds since `begin`."""

    def __init__(self, reads: list[float], slowdown: Slowdown):
        self._reads = reads
        self._read_slower, self._compute_slower = 1 + slowdown.reading, 1 + slowdown.computing
        self._requested = self._done = 0  # layers, over all passes
        self._left = reads[0]  # seconds of the next one

    def begin(self) -> None:
        """Start a pass."""
        self.waited = self.computed = 0.0

    def state(self, passes: int) -> tuple[float, float]:
        """How far reading is ahead after that many passes: layers, and seconds of the next."""
        return self._done - passes * len(self._reads), self._left

    def request(self, number: int) -> None:
        """Request layers up to this one."""
        self._requested = max(self._requested, number + 1)

    def await_read(self, number: int) -> None:
        """Wait, without computing, until that layer has been read."""
        while self._done <= number:
            self.waited += self._left
            self._next()

    def compute(self, work: float) -> None:
        """Compute for that many seconds of work, slowed down while reading goes on."""
        while work > 0:
            if self._done >= self._requested:
                self.computed += work
                return
            work_end, read_end = work * self._compute_slower, self._left * self._read_slower
            if work_end < read_end:
                self.computed += work_end
                self._left -= work_end / self._read_slower
                return
            self.computed += read_end
            work -= read_end / self._compute_slower
            self._next()

    def _next(self) -> None:
        self._done += 1
        self._left = self._reads[self._done % len(self._reads)]


def fitted_slowdown(
    reads: Sequence[float | None],
    computes: Sequence[float],
    outside: float,
    measured: PassTime,
    most: int = MAX_AHEAD,
    passes: int = PASSES,
) -> Slowdown:
    """The slowdown with which `simulate` comes nearest to what was measured; the least among
    equals: if nothing is waited for, the time of reading cannot be seen."""

    def error(place: tuple[float, float]) -> float:
        found = simulate(reads, computes, outside, Slowdown(*place), most=most, passes=passes)
        off = sum(abs(a - b) for a, b in zip(found, measured))
        return off / measured.seconds + 1e-4 * math.hypot(*place)

    if measured.seconds <= 0:
        return Slowdown(0.0, 0.0)
    step = COARSE
    values = [step * number for number in range(int(MAX_SLOWDOWN / step) + 1)]
    places = [(x, y) for x in values for y in values]
    best = min(places, key=error)
    while step > FINE:
        around = [
            (_bounded(best[0] + x), _bounded(best[1] + y))
            for x in (0.0, -step, step)
            for y in (0.0, -step, step)
        ]
        nearest = min(around, key=error)
        step, best = step / 2 if nearest == best else step, nearest
    return Slowdown(*best)


def _bounded(slowdown: float) -> float:
    return min(max(slowdown, 0.0), MAX_SLOWDOWN)
