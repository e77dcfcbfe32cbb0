"""Measures how long layers take to read and to run, in the memory that one needs with none of them
staying.

Passes of the real engine, first with nothing read ahead, where reading and computing are apart from
each other, then as it always runs, which shows how much the two slow each other down. A pass that
would take long is ended after a few layers of each size, and the others are taken to be alike.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from statistics import median
from typing import NamedTuple

import mlx.core as mx

from toastkit.engine.engine import Engine
from toastkit.residency.predict import Calibration, Source, fitted_slowdown

LITTLE_BYTES = 1 << 30  # on the device; a pass that reads no more is run whole
FEW_LAYERS = 8  # a pass that is ended early runs so many at least
STAYING = 4  # layers that stay, to see what that spares
SHORT_SECONDS, ROUNDS = 0.5, 3  # a pass that is this short is run so often, and the median kept
CHUNK_LAYERS = 4  # likewise of a pass over a chunk
CHUNKS = {"cpu": (4, 16), "gpu": (128, 512)}  # tokens of the chunks whose seconds are measured
LEAST_RATE = 1.0  # bytes a second


class _Enough(Exception):
    """A pass has run the layers that it was to run."""


class _Times(NamedTuple):
    """Seconds of a pass. total: of all of it. waits, computes: of the layers that it ran."""

    total: float
    waits: list[float]
    computes: list[float]

    @property
    def rest(self) -> float:
        """Neither waiting for a layer nor computing one."""
        return self.total - sum(self.waits) - sum(self.computes)


def measure(
    opened: Callable[[int], Engine], tell: Callable[[str], None] = lambda line: None
) -> Calibration:
    """Measures a model. opened(count): an engine of it in which so many of the first layers stay.
    tell(line): is told what is being done. Raises DataError, IOFailure, NoInputError."""
    engine = opened(0)
    try:
        found = _Measuring(engine, tell).calibration()
        few, computes = _few_that_stay(engine), found.token
    finally:
        engine.close()
    del engine  # with all that it holds
    mx.clear_cache()
    if not few:
        return found
    tell("layers that stay")
    engine = opened(few)
    try:
        some = _Measuring(engine, tell)
        times = some.passes(1, few + 1)
    finally:
        engine.close()
    # Of the few, everything but the one streamed layer after them.
    seconds = times.total - sum(times.waits) - computes[few]
    share = max(0.0, min(1.0, seconds / max(sum(computes[:few]), 1e-9)))
    return Calibration(**{**vars(found), "stays": share})


def _few_that_stay(engine: Engine) -> int:
    """How many layers may stay for a while: 0 where memory is short."""
    policy = engine.residency
    assert policy is not None
    sizes = policy.sizes.layers
    return min(STAYING, len(sizes) - 1) if sum(sizes[:STAYING]) < LITTLE_BYTES else 0


class _Measuring:
    """The passes of one engine."""

    def __init__(self, engine: Engine, tell: Callable[[str], None]):
        policy = engine.residency
        assert policy is not None
        self._engine, self._tell = engine, tell
        self._streams, self._store = engine.holdings.streams, engine.holdings.store
        self._sizes = policy.sizes.layers
        whole = sum(self._sizes) <= LITTLE_BYTES
        self._count = len(self._sizes) if whole else _enough(self._sizes, FEW_LAYERS)
        self._most = self._streams.most_ahead

    def calibration(self) -> Calibration:
        """All but what layers spare that stay."""
        store, streams, kept = self._store, self._streams, self._store.keeps_cached
        short, long = CHUNKS[self._engine.device]
        few = _enough(self._sizes, CHUNK_LAYERS)
        try:
            self._tell("reading from the file, a token at a time")
            store.keeps_cached = True
            streams.most_ahead = 0
            whole = self._whole_passes()
            token = self._passes_of(1, self._count) if self._count < len(self._sizes) else whole
            chunk = [self._passes_of(length, few) for length in (short, long)]
            cached = self._source(token, chunk[1], long, few)
            self._tell("reading from the disk")
            store.keeps_cached = False
            cold = self._source(None, chunk[1], long, few)
        finally:
            store.keeps_cached, streams.most_ahead = kept, self._most
        costs = [
            _line(short, a, long, b)
            for a, b in zip(*(self._spread(times.computes) for times in chunk))
        ]
        return Calibration(
            token=tuple(self._spread(token.computes)),
            chunk_fixed=tuple(fixed for fixed, _ in costs),
            chunk_token=tuple(each for _, each in costs),
            outside_token=max(0.0, whole.rest),
            outside_chunk=max(0.0, chunk[1].rest),
            stays=1.0,
            cached=cached,
            cold=cold,
        )

    def _whole_passes(self) -> _Times:
        """Of a token through all layers, which the embedding and the head are part of."""
        first = self._pass(1, len(self._sizes))
        long = first.total > 10 * SHORT_SECONDS
        return first if long else self._passes_of(1, len(self._sizes))

    def _source(self, serial: _Times | None, chunk: _Times, length: int, few: int) -> Source:
        """Reading from where it reads now. serial: the passes over a token with nothing read ahead;
        None where they are to be run, from the disk. chunk: the same over a chunk of some tokens,
        of a few layers; what it takes to compute is the same from anywhere."""
        cold = serial is None
        with self._ahead(0):
            serial = serial or self._passes_of(1, self._count, cold)
        passes = [(1, serial, self._count), (length, chunk, few)]
        with self._ahead(self._most):
            together = [self._passes_of(tokens, layers, cold) for tokens, _, layers in passes]
        # What is read ahead is read without a pause; what is computed meanwhile may slow it.
        rates = [self._rate(serial.waits)]
        rates += [self._rate(times.waits, times.computes) for times in together]
        rate = max(*rates, LEAST_RATE)
        slow = []
        for (_, apart, layers), times in zip(passes, together):
            # The first layer is waited for, as nothing has been read when a pass begins.
            first, *others = [size / rate for size in self._sizes[:layers]]
            _, *works = apart.computes
            seconds = sum(times.waits[1:]) + sum(times.computes[1:])
            slow.append(
                fitted_slowdown([*others], works, first, seconds + first, 1) if works else 0.0
            )
        return Source(rate, *slow)

    def _rate(self, waits: Sequence[float], computes: Sequence[float] = ()) -> float:
        """Bytes a second, at least, of the first layers, which were waited for so long and
        computed meanwhile, the last one excepted."""
        return sum(self._sizes[: len(waits)]) / max(sum(waits) + sum(computes[:-1]), 1e-9)

    @contextmanager
    def _ahead(self, layers: int):
        self._streams.most_ahead = layers
        try:
            yield
        finally:
            self._streams.most_ahead = 0

    # ----------------------------------------------------------------------------------- passes

    def passes(self, tokens: int, layers: int) -> _Times:
        """The median pass over some tokens that ends after so many layers, nothing read ahead."""
        with self._ahead(0):
            return self._passes_of(tokens, layers)

    def _passes_of(self, tokens: int, layers: int, cold: bool = False) -> _Times:
        """The median of a few passes, or of one after another that was not counted: pages are new
        to the process in the first one."""
        self._pass(tokens, layers, cold)
        found = [self._pass(tokens, layers, cold)]
        while len(found) < ROUNDS and found[0].total < SHORT_SECONDS:
            found.append(self._pass(tokens, layers, cold))
        columns = [list(map(median, zip(*c))) for c in zip(*((f.waits, f.computes) for f in found))]
        return _Times(median(f.total for f in found), *columns)

    def _pass(self, tokens: int, layers: int, cold: bool = False) -> _Times:
        """One pass from the beginning of a text, as Engine.prefill or Engine.step would have it."""
        engine, times = self._engine, self._streams.times
        self._streams.forget_ahead()
        if cold:
            self._forget_files(layers)
        waits: list[float] = []
        computes: list[float] = []
        before = times.wait

        def watch(index: int) -> None:
            nonlocal before
            waits.append(times.wait - before)
            computes.append(times.by_layer[index])
            before = times.wait
            if index + 1 >= layers and layers < len(self._sizes):
                raise _Enough

        self._streams.watch = watch
        cache = engine.new_cache()
        ids = [number % engine.vocab for number in range(1, tokens + 1)]
        start = time.perf_counter()
        try:
            if tokens == 1:
                logits = engine.step(ids[0], cache)
                mx.eval(logits, [layer.state for layer in cache])
            else:
                engine.score(ids, cache)  # the logits are never computed
                mx.eval([layer.state for layer in cache])
        except _Enough:
            pass
        finally:
            self._streams.watch = lambda index: None
        return _Times(time.perf_counter() - start, waits, computes)

    def _forget_files(self, layers: int) -> None:
        """Has the system forget what it keeps of the files of the first layers."""
        if not hasattr(os, "posix_fadvise"):
            return  # what reads from now on goes past that anyway: F_NOCACHE
        spans: dict[object, list[tuple[int, int]]] = {}
        for index in range(layers):
            for name in self._store.layer_names(index):
                place = self._store.source(name)
                if place is not None:
                    file, entry = place
                    spans.setdefault(file, []).append((entry.start, entry.stop - entry.start))
        for path, ranges in spans.items():
            fd = os.open(str(path), os.O_RDONLY | os.O_CLOEXEC)
            try:
                for start, size in ranges:
                    os.posix_fadvise(fd, start, size, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)

    def _spread(self, seconds: Sequence[float]) -> list[float]:
        """Of all layers, what was measured of the first: one that was not is like the median of its
        size."""
        by_size: dict[int, list[float]] = {}
        for size, value in zip(self._sizes, seconds):
            by_size.setdefault(size, []).append(value)
        measured = list(seconds)
        for size in self._sizes[len(measured) :]:
            measured.append(median(by_size.get(size) or seconds))
        return measured


def _enough(sizes: Sequence[int], least: int) -> int:
    """How many layers are run of a pass that would take long: up to the first of the last size that
    there is."""
    return min(len(sizes), max(least, max(map(sizes.index, set(sizes))) + 1))


def _line(short: int, first: float, long: int, second: float) -> tuple[float, float]:
    """(fixed, for each token) seconds of a chunk, by two lengths."""
    each = max(0.0, (second - first) / (long - short))
    return max(0.0, second - each * long), each
