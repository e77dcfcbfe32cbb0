"""Measures how long layers take to read and to run, in the memory of a model without resident
layers.

Runs passes of the real engine, first without prefetch, where reading and computing are separate,
then as usual, which shows how much the two slow each other down. A pass that would take long is
ended after a few layers of each size, and the others are assumed to be alike.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from statistics import median
from typing import NamedTuple

import mlx.core as mx

from toastkit.engine.engine import CHUNK, Engine
from toastkit.holdings.read_ahead import MAX_AHEAD
from toastkit.holdings.streams import arrays_in
from toastkit.residency.predict import Calibration, PassTime, Slowdown, Source, fitted_slowdown
from toastkit.residency.residency_options import ResidencyOptions

LITTLE_BYTES = 1 << 30  # on the device, of resident layers, to see what residency saves
WHOLE_SECONDS = 4.0  # a pass over a token that takes no longer is run whole
FEW_LAYERS = 8  # fewest layers of a pass that is ended early
CHUNK_LAYERS = 4  # the same for a pass over a chunk
# Each pass is repeated for this long or this often, and all again after all others: on a shared
# machine, load varies over time. The medians count.
ROUNDS_SECONDS, ROUNDS, SWEEPS = 1.5, 4, 2
# Tokens of the timed chunks: the shortest one, this many times as many, and so on while a pass
# takes little time.
SHORTEST, TIMES = {"cpu": 4, "gpu": 128}, 4
CHUNK_SECONDS = 1.5
MIN_RATE = 1.0  # bytes per second
# If reading takes a smaller share of the time of computing, or computing of reading, a pass does
# not show how much it is slowed down.
SEEN = 0.25


class _PassEnded(Exception):
    """A pass has run the layers that it was to run."""


class _Times(NamedTuple):
    """Seconds of a pass. waits, computes: of the layers that it ran. rest: neither waiting for a
    layer nor computing one."""

    waits: list[float]
    computes: list[float]
    rest: float

    @property
    def total(self) -> float:
        """Seconds of the whole pass."""
        return sum(self.waits) + sum(self.computes) + self.rest


class _WithPrefetch(NamedTuple):
    """Passes over a token and a chunk with prefetch. rate: bytes per second of reading alone."""

    token: _Times
    chunk: _Times
    rate: float


class _Sweep(NamedTuple):
    """Passes without prefetch: over a token, through all layers (whole), through the timed ones
    (token) and, from the disk, through some (token_cold); over a short and a long chunk (brief,
    chunk). And passes with prefetch, from the page cache and from the disk."""

    whole: _Times
    token: _Times
    token_cold: _Times
    brief: _Times
    chunk: _Times
    cached: _WithPrefetch
    cold: _WithPrefetch


def measure(
    opened: Callable[[ResidencyOptions], Engine], tell: Callable[[str], None] = lambda line: None
) -> Calibration:
    """Measure a model. opened(options): opens an engine of it with that residency. tell(line):
    reports progress. Raises DataError, IOFailure, NoInputError."""
    engine = opened(ResidencyOptions("layers", 0))
    try:
        few = _resident_count(engine)
        # First, while memory is new to the process: reused memory is in smaller pages.
        resident_times = _resident_times(opened, few, tell) if few else []
        found = _Measuring(engine, tell).calibration()
    finally:
        engine.close()
    if not few:
        return found
    usual = sum(found.token[:few]) / max(sum(found.token[few + 1 : 2 * few]), 1e-9)
    shares = [seconds / max(usual * streamed, 1e-9) for seconds, streamed in resident_times]
    return Calibration(**{**vars(found), "stays": min(1.0, median(shares))})


def _resident_times(
    opened: Callable[[ResidencyOptions], Engine], few: int, tell: Callable[[str], None]
) -> list[tuple[float, float]]:
    """Return seconds of a token through the first few layers, resident, and through all but the
    first of as many streamed layers after them, from the same passes."""
    tell("layers that stay")
    engine = opened(ResidencyOptions("layers", few, "first"))
    try:
        return _Measuring(engine, tell).resident_times(few)
    finally:
        engine.close()
        del engine
        gc.collect()  # reference cycle: modules and holdings
        mx.clear_cache()


def _resident_count(engine: Engine) -> int:
    """Return how many layers may be resident for a while: at most half, 0 if memory is short."""
    policy = engine.residency
    assert policy is not None
    sizes = policy.sizes.layers
    fitting = [count for count in range(len(sizes) // 2) if sum(sizes[:count]) <= LITTLE_BYTES]
    return fitting[-1] if len(fitting) > 1 else 0


class _Measuring:
    """Runs the passes of one engine."""

    def __init__(self, engine: Engine, tell: Callable[[str], None]):
        policy = engine.residency
        assert policy is not None
        self._engine, self._tell = engine, tell
        self._streams, self._store = engine.holdings.streams, engine.holdings.store
        self._sizes = policy.sizes.layers
        self._most, self._allowed = self._streams.most_ahead, self._streams.allowed_ahead
        self._found: dict[tuple, list[_Times]] = {}
        self._alone: dict[tuple, list[float]] = {}
        self._warm_for: int | None = None  # prefetch depth that memory is warm for

    def calibration(self) -> Calibration:
        """Measure all but what resident layers save."""
        store, streams, kept = self._store, self._streams, self._store.keeps_cached
        try:
            streams.most_ahead = 0
            self._tell("reading from the file, a token at a time")
            first = self._pass(1, len(self._sizes))
            lengths = self._lengths()
            for _ in range(SWEEPS):
                sweep = self._sweep(first, *lengths)
        finally:
            store.keeps_cached, streams.most_ahead = kept, self._most
        short, long = lengths
        costs = [
            _linear_cost(short, a, long, b)
            for a, b in zip(self._spread(sweep.brief.computes), self._spread(sweep.chunk.computes))
        ]
        return Calibration(
            token=tuple(self._spread(sweep.token.computes)),
            chunk_fixed=tuple(fixed for fixed, _ in costs),
            chunk_token=tuple(each for _, each in costs),
            outside_token=max(0.0, sweep.whole.rest),
            outside_chunk=max(0.0, sweep.chunk.rest),
            stays=1.0,
            cached=self._source(sweep.token, sweep.brief, sweep.cached),
            cold=self._source(sweep.token_cold, sweep.brief, sweep.cold, cold=True),
        )

    def _sweep(self, first: _Times, short: int, long: int) -> _Sweep:
        """Run all passes once more. first: the first one over a token. short, long: tokens of
        chunks."""
        few, more = (_layers_to_run(self._sizes, least) for least in (CHUNK_LAYERS, FEW_LAYERS))
        whole = first
        if first.total <= 2 * WHOLE_SECONDS:  # into memory that was new
            whole = self._passes_of(1, len(self._sizes))
        token = whole if whole.total <= WHOLE_SECONDS else self._passes_of(1, more)
        brief, chunk = (self._passes_of(length, few) for length in (short, long))
        token_cold = self._passes_of(1, more, cold=True)
        with self._ahead(self._most):
            cached = self._passes_with_prefetch(len(token.waits), short)
            self._tell("reading from the disk")
            cold = self._passes_with_prefetch(more, short, cold=True)
        return _Sweep(whole, token, token_cold, brief, chunk, cached, cold)

    def _passes_with_prefetch(self, layers: int, length: int, cold: bool = False) -> _WithPrefetch:
        """Run passes as usual, with prefetch: over a token through `layers` layers, and over
        `length` tokens."""
        few = _layers_to_run(self._sizes, CHUNK_LAYERS)
        token, chunk = self._passes_of(1, layers, cold), self._passes_of(length, few, cold)
        return _WithPrefetch(token, chunk, self._rate_alone(layers, cold))

    def _lengths(self) -> tuple[int, int]:
        """Return the two longest chunks, in tokens, whose passes are quick to run."""
        device = self._engine.device
        length, layers = TIMES * SHORTEST[device], _layers_to_run(self._sizes, CHUNK_LAYERS)
        self._pass(length, layers)
        while TIMES * length <= CHUNK[device] and self._pass(length, layers).total < CHUNK_SECONDS:
            length *= TIMES
        return length // TIMES, length

    def _source(
        self, token: _Times, chunk: _Times, prefetched: _WithPrefetch, cold: bool = False
    ) -> Source:
        """Model reading from the page cache or, cold, from the disk. token, chunk: passes without
        prefetch; the latter may have read from elsewhere: its compute time is the same."""
        both = (prefetched.token, prefetched.chunk)
        # Reading alone is no slower than beside computing.
        slowest = [self._rate(b.waits, self._reading_seconds(b, cold)) for b in both]
        rate = max(prefetched.rate, *slowest, MIN_RATE)
        slow = [
            self._slowdown(rate, token, prefetched.token, cold),
            self._slowdown(rate, chunk, prefetched.chunk, cold),
        ]
        return Source(
            rate, *_completed(slow, [self._costs(rate, times) for times in (token, chunk)])
        )

    def _costs(self, rate: float, times: _Times) -> tuple[float, float]:
        """Return seconds to read the layers of a pass at that rate, and to compute them."""
        return sum(self._sizes[: len(times.computes)]) / rate, sum(times.computes)

    def _rate(self, waits: Sequence[float], seconds: float) -> float:
        """Return bytes per second of the first len(waits) layers, read within so many seconds."""
        return sum(self._sizes[: len(waits)]) / max(seconds, 1e-9)

    def _rate_alone(self, layers: int, cold: bool) -> float:
        """Return bytes per second of the first layers, read in turn while nothing is computed: the
        median of all rounds so far."""
        found = self._alone.setdefault((layers, cold), [])
        end = time.perf_counter() + ROUNDS_SECONDS
        for _ in range(ROUNDS):
            self._streams.settle()
            self._begin(layers, cold)
            start = time.perf_counter()
            for index in self._streams.layers[:layers]:
                with self._streams.present(index):
                    pass
            found.append(sum(self._sizes[:layers]) / (time.perf_counter() - start))
            if time.perf_counter() > end:
                break
        self._streams.settle()
        return median(found)

    def _reading_seconds(self, prefetched: _Times, cold: bool) -> float:
        """Return an upper bound on the seconds in which all layers of a pass were read."""
        if self._wraps_around(len(prefetched.waits), cold):
            return prefetched.total
        return sum(prefetched.waits) + sum(prefetched.computes[:-1])

    def _slowdown(self, rate: float, separate: _Times, prefetched: _Times, cold: bool) -> Slowdown:
        """Fit the slowdown of reading at that rate and of computing. separate, prefetched: passes
        without and with prefetch."""
        reads = [size / rate for size in self._sizes[: len(separate.computes)]]
        waiting, computing = sum(prefetched.waits), sum(prefetched.computes)
        # Nothing is computed faster beside reading: a lower time means that the other was slow for
        # another reason.
        alone = list(map(min, separate.computes, prefetched.computes))
        if self._wraps_around(len(reads), cold):
            measured = PassTime(waiting, computing + prefetched.rest)
            rest = min(separate.rest, prefetched.rest)
            return fitted_slowdown(reads, alone, rest, measured, self._allowed)
        # Such a pass begins with nothing prefetched.
        measured = PassTime(waiting, computing)
        return fitted_slowdown(reads, alone, 0.0, measured, self._allowed, passes=1)

    def _wraps_around(self, layers: int, cold: bool) -> bool:
        """True if passes follow each other as in decoding: during one, layers are prefetched for
        the next."""
        return layers == len(self._sizes) and not cold

    @contextmanager
    def _ahead(self, layers: int):
        self._streams.most_ahead = layers
        try:
            yield
        finally:
            self._streams.most_ahead = 0

    # ----------------------------------------------------------------------------------- passes

    def resident_times(self, few: int) -> list[tuple[float, float]]:
        """See _resident_times."""
        found = []
        with self._ahead(0):
            self._pass(1, 2 * few)
            for _ in range(SWEEPS * ROUNDS):
                self._pass(1, few)  # after which no reads are pending
                seconds = self._pass(1, few).rest
                # The first streamed layer waits for the resident ones.
                found.append((seconds, sum(self._pass(1, 2 * few).computes[1:])))
        return found

    def _passes_of(self, tokens: int, layers: int, cold: bool = False) -> _Times:
        """Return the median of a few passes, including those of earlier sweeps. The first one with
        a new prefetch depth does not count: its memory is new to the process."""
        ahead = self._streams.most_ahead
        found = self._found.setdefault((tokens, layers, cold, ahead), [])
        self._streams.settle()
        if ahead != self._warm_for:
            self._pass(tokens, layers, cold)
            self._warm_for = ahead
        least, end = len(found) + 1, time.perf_counter() + ROUNDS_SECONDS
        while len(found) < least or len(found) < least + ROUNDS - 1 and time.perf_counter() < end:
            found.append(self._pass(tokens, layers, cold))
        columns = zip(*((times.waits, times.computes) for times in found))
        waits, computes = (list(map(median, zip(*column))) for column in columns)
        return _Times(waits, computes, median(times.rest for times in found))

    def _pass(self, tokens: int, layers: int, cold: bool = False) -> _Times:
        """Run one pass from the beginning of a text, as Engine.prefill or Engine.step would."""
        engine, times = self._engine, self._streams.times
        self._begin(layers, cold)
        waits: list[float] = []
        computes: list[float] = []
        left, waited = 0.0, times.wait  # when the previous layer ended

        def watch(index: int, ran: bool) -> None:
            nonlocal left, waited
            if ran:
                now, wait = time.perf_counter(), times.wait - waited
                waits.append(wait)
                # Includes what lies between it and the previous layer, which a resident layer's
                # time does not.
                computes.append(now - left - wait)
                left, waited = now, times.wait
            elif not waits:
                left = time.perf_counter()
            if index + ran >= layers and layers < len(self._sizes):
                mx.synchronize()  # with the resident ones
                raise _PassEnded

        self._streams.watch = watch
        cache = engine.new_cache()
        ids = [number % engine.vocab for number in range(1, tokens + 1)]
        start = time.perf_counter()
        try:
            if tokens == 1:
                logits = engine.step(ids[0], cache)
                mx.eval(logits, arrays_in(cache))
            else:
                engine.score(ids, cache)  # the logits are never computed
                mx.eval(arrays_in(cache))
        except _PassEnded:
            pass
        finally:
            self._streams.watch = lambda index, ran: None
        return _Times(waits, computes, time.perf_counter() - start - sum(waits) - sum(computes))

    def _begin(self, layers: int, cold: bool) -> None:
        """Prepare reading of the first layers: from the disk if cold."""
        if not self._wraps_around(layers, cold):
            self._streams.settle()
        self._store.keeps_cached = not cold
        if cold:
            for index in range(min(layers + MAX_AHEAD, len(self._sizes))):
                self._store.forget_cached(self._store.layer_names(index))

    def _spread(self, seconds: Sequence[float]) -> list[float]:
        """Extend measurements of the first layers to all: an unmeasured one gets its size's
        median."""
        by_size: dict[int, list[float]] = {}
        for size, value in zip(self._sizes, seconds):
            by_size.setdefault(size, []).append(value)
        measured = list(seconds)
        for size in self._sizes[len(measured) :]:
            measured.append(median(by_size.get(size) or seconds))
        return measured


def _completed(slow: Sequence[Slowdown], both: Sequence[tuple[float, float]]) -> Iterator[Slowdown]:
    """Return the slowdowns of two passes, taking from the other what one of them does not show.
    both: seconds of reading and of computing of each."""
    for this, other, (reading, computing) in zip(slow, reversed(slow), both):
        if reading < SEEN * computing:
            yield other
        elif computing < SEEN * reading:
            yield replace(this, reading=other.reading)
        else:
            yield this


def _layers_to_run(sizes: Sequence[int], least: int) -> int:
    """Return how many layers to run of a pass that would take long: through the first layer of the
    last new size, at least `least`."""
    return min(len(sizes), max(least, max(map(sizes.index, set(sizes))) + 1))


def _linear_cost(short: int, first: float, long: int, second: float) -> tuple[float, float]:
    """Return (fixed, per token) seconds of a chunk, from two lengths."""
    each = max(0.0, (second - first) / (long - short))
    return max(0.0, second - each * long), each
