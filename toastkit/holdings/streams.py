"""Layer streaming: layers are loaded before they run and dropped afterwards (paper 001, algorithm
1), while the next ones are read ahead.

A streamed layer changes its class, never its identity, like every module that changes its form; a
resident layer keeps the architecture's class, and costs nothing. A layer's output is evaluated
before its weights are dropped, so that their memory can be read into again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn

from toastkit.errors import ToastError
from toastkit.holdings.derived import extend, restore
from toastkit.holdings.holding import Holding
from toastkit.holdings.read_ahead import MAX_AHEAD, layers_ahead
from toastkit.holdings.weights import Reading, Weights
from toastkit.store.reader import AHEAD_BYTES
from toastkit.store.waiting import AHEAD

if TYPE_CHECKING:
    from toastkit.holdings.holdings import Holdings


@dataclass
class StreamTimes:
    """Totals of the streamed layers. layers: how many ran. wait, compute: seconds waiting for
    layers, and running them. by_layer: seconds of each layer's last run, by index. gap: the longest
    time, in seconds, between two of them in the last pass."""

    layers: int = 0
    wait: float = 0.0
    compute: float = 0.0
    by_layer: dict[int, float] = field(default_factory=dict)
    gap: float = 0.0


class Streams:
    """The streamed layers of a model. layers: their indices, ascending. spare_bytes: memory for
    reading more than one layer ahead; None for unlimited. most_ahead: the most layers to read
    ahead; with 0 each is read when it is to run. watch(index, ran): called before each layer with
    False, and after it with True; an exception ends the pass. Used by one thread at a time: the one
    that computes."""

    def __init__(self, holdings: Holdings, weights: Weights):
        self._holdings, self._weights = holdings, weights
        self._modules: Sequence[nn.Module] = holdings.store.model.layers
        self._parts: dict[int, list[Holding]] = {}
        self._readings: dict[int, Reading] = {}
        self._ended: float | None = None  # when the last one was dropped
        self._gap = 0.0
        self._largest = 0  # of the streamed layers, in bytes
        self.layers: list[int] = []
        self.spare_bytes: int | None = None
        self.most_ahead = MAX_AHEAD
        self.watch: Callable[[int, bool], None] = lambda index, ran: None
        self.times = StreamTimes()

    def follow(self) -> None:
        """Update the streamed layers after a change of forms."""
        parts: dict[int, list[Holding]] = {}
        for holding in self._holdings.modules.values():
            if holding.form.streamed and holding.layer is not None:
                parts.setdefault(holding.layer, []).append(holding)
        for index in set(self._parts).difference(parts):
            restore(self._modules[index])
        for index in set(parts).difference(self._parts):
            extend(self._modules[index], _Streamed, _streams=self, _index=index)
        self._parts, self.layers = parts, sorted(parts)
        for index in [i for i, r in self._readings.items() if r.moves != self._moves(i)]:
            self._readings.pop(index).cancel()
        loaded = self._holdings.loaded
        sizes = (sum(loaded.reading_bytes(h.path, h.form) for h in p) for p in parts.values())
        self._largest = max(sizes, default=0)
        if not parts:
            self._holdings.store.reader.ahead_bytes = AHEAD_BYTES
            self._holdings.store.reader.drop_spare()

    def _moves(self, index: int) -> list:
        return [(holding, holding.form.present) for holding in self._parts.get(index, ())]

    # ---------------------------------------------------------------------------------- one layer

    @contextmanager
    def present(self, index: int) -> Iterator[None]:
        """Context in which a layer is on the device, to run. Its output has to be evaluated before
        this is left. Raises DataError, IOFailure, NoInputError; after the last layer also if the
        files have changed since they were opened."""
        self.watch(index, False)
        forms = [(holding, holding.form) for holding in self._parts[index]]
        start = self._now_after_gap()
        reading = self._load(index)
        loaded = time.perf_counter()
        try:
            self._read_ahead(index, reading, running=True)
            yield
        except BaseException:
            self._holdings.drop(forms)
            raise
        self._holdings.drop(forms)
        self._ended = time.perf_counter()
        self._count(index, loaded - start, self._ended - loaded)
        self._read_ahead(index, reading)
        self.watch(index, True)

    def _load(self, index: int) -> Reading:
        """Load a layer, from its read-ahead if there is one; if that failed, read it again."""
        reading = self._readings.pop(index, None)
        if reading is not None:
            with suppress(ToastError):
                self._holdings.bring(reading)
                return reading
        reading = self._weights.request(self._moves(index))
        self._holdings.bring(reading)
        return reading

    def _now_after_gap(self) -> float:
        now = time.perf_counter()
        if self._ended is not None:
            self._gap = max(self._gap, now - self._ended)
        return now

    def _count(self, index: int, wait: float, compute: float) -> None:
        times = self.times
        times.layers, times.wait = times.layers + 1, times.wait + wait
        times.compute += compute
        times.by_layer[index] = compute
        if index == self.layers[-1]:  # the last streamed layer of the pass
            times.gap, self._gap = self._gap, 0.0
            self._holdings.store.check_files()  # before the result of the pass is used

    # -------------------------------------------------------------------------------- reading ahead

    def _read_ahead(self, index: int, reading: Reading, running: bool = False) -> None:
        """Start reading the layers after one, wrapping round to the first of the next pass.
        reading: that layer's. running: it is about to run, while the others are read; else it has
        run, and one more layer is read into its memory."""
        count = self.depth(reading.nbytes)
        if not running and count:
            count += 1
        reader = self._holdings.store.reader
        reader.ahead_bytes = self._largest * max(1, count)
        if not running:
            reading.give_back()
        place = self.layers.index(index) + 1
        for following in (self.layers[place:] + self.layers[:place])[:count]:
            if following not in self._readings and not (running and following == index):
                moves = self._moves(following)
                self._readings[following] = self._weights.request(moves, priority=AHEAD)

    def depth(self, size: int) -> int:
        """How many layers to read ahead, within memory. size: of a layer, in bytes."""
        reader, times = self._holdings.store.reader, self.times
        seconds = reader.busy_seconds * size / max(reader.device_bytes, 1)  # to read a layer
        computes = [times.by_layer[i] for i in self.layers if i in times.by_layer]
        wanted = layers_ahead(seconds, computes, times.gap) if computes else 1
        return min(wanted, self.allowed_ahead, len(self.layers))

    @property
    def allowed_ahead(self) -> int:
        """The most layers that may be read ahead, by `most_ahead` and by memory."""
        if self.spare_bytes is None:
            return self.most_ahead
        return min(self.most_ahead, 1 + self.spare_bytes // max(1, self._largest))

    def settle(self) -> None:
        """Wait for layers that are being read ahead, and drop them; their memory is reused."""
        for reading in self._readings.values():
            with suppress(ToastError):
                reading.wait()
            reading.give_back()
        self._readings.clear()

    def forget_ahead(self) -> None:
        """Cancel the layers read ahead, and free the memory for reading ahead."""
        for reading in self._readings.values():
            reading.cancel()
        self._readings.clear()
        self._holdings.store.reader.drop_spare()


class _Streamed:
    """Mixin for the class of a streamed layer: loads it, runs it and drops it."""

    _streams: Streams
    _index: int

    def __call__(self, *args: Any, **rest: Any) -> Any:
        mx.async_eval(arrays_in(args, rest))  # resident layers before it run while it is waited for
        with self._streams.present(self._index):
            out = super().__call__(*args, **rest)  # type: ignore[misc]
            # A cache may hold what the output does not depend on: a convolution's last rows, say.
            mx.eval(arrays_in(out, args, rest))
        return out


def arrays_in(*values: Any) -> list[mx.array]:
    """The arrays, (...) of any dtype, in a layer's arguments or results: in lists, dictionaries,
    caches and other objects, however deep."""
    found: dict[int, mx.array] = {}
    seen: set[int] = set()
    rest = list(values)
    while rest:
        value = rest.pop()
        if isinstance(value, mx.array):
            found[id(value)] = value
        elif isinstance(value, (list, tuple)):
            rest += value
        elif isinstance(value, dict):
            rest += value.values()
        elif _has_more(value) and id(value) not in seen:
            seen.add(id(value))
            rest += vars(value).values()
    return list(found.values())


def _has_more(value: Any) -> bool:
    return hasattr(value, "__dict__") and not isinstance(value, (nn.Module, type))
