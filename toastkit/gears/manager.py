"""Which gear a model is in: its matrices are replaced in the module tree, one set at a time.

Paper 003, section 6. Nothing is quantised before a gear is first entered. The originals leave the
device with the shift (so device memory falls) and are read again from the store with the shift up,
bit for bit. Sets that are not in use are kept within a budget, the most recently used ones.

    manager = PrecisionManager(store, dtype, ledger, options)
    manager.shift("low")
"""

from __future__ import annotations

import math
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from toastkit.errors import UsageError
from toastkit.gears.cost import row_bytes
from toastkit.gears.options import GearOptions
from toastkit.gears.packed import PathCounts, fused_is_exact, packed_module
from toastkit.gears.sources import Place, Sources, places_of
from toastkit.store.ledger import GEARS, Ledger
from toastkit.store.store import Store

PREPARE_STEPS = 2  # a gear that is seen coming is made in so many parts: the forecast's two steps


@dataclass
class ShiftTimes:
    """Seconds of the shifts into a gear. first: while its set had to be made or read. again: while
    it was kept."""

    first: list[float]
    again: list[float]


class PrecisionManager:
    """The gears of one model.

    store: of the loaded checkpoint, with its model; it has to stay open. dtype: that the weights
    were cast to, None for their own. ledger: is told what the gears keep. notify: is told a line
    when the weights seem to have been quantised before. Raises UsageError where there is no matrix
    to manage.
    gear: the one the model is in. tokens: steps run, by gear. counts: products by path. times: of
    shifts, by gear.
    """

    def __init__(
        self,
        store: Store,
        dtype: mx.Dtype | None,
        ledger: Ledger,
        options: GearOptions,
        notify: Callable[[str], None] | None = None,
    ):
        self.options = options
        self.gear = "high"
        self.tokens: Counter[str] = Counter()
        self.counts = PathCounts()
        self.times = {gear: ShiftTimes([], []) for gear in ("low", "mid", "high")}
        self._ledger = ledger
        self._sources = Sources(store, dtype, notify)
        self._places = places_of(store, options.scope)
        if not self._places:
            hint = "--gear-scope all looks for others than those of attention"
            raise UsageError(
                f"{store.files.name} has no matrix for gears in scope {options.scope}",
                hint=hint if options.scope == "attention" else None,
            )
        self.originals_bytes = sum(place.nbytes for place in self._places)
        # Without a budget, what was packed stays and the originals never do.
        packed = self.packed_bytes("low") + self.packed_bytes("mid")
        self.budget = packed if options.cache_bytes is None else options.cache_bytes
        # What is on the device beside the gear in use, the last used last. A set: a module a place.
        self._kept: OrderedDict[str, list[Any]] = OrderedDict()
        self._set: list[Any] = [place.shell for place in self._places]
        self._coming: tuple[str, list[Any]] | None = None
        self._shifts_before = (0, 0.0)

    # -------------------------------------------------------------------------------- what is where

    @property
    def paths(self) -> list[str]:
        """The managed modules, by layer."""
        return [place.path for place in self._places]

    @property
    def bits(self) -> dict[str, float]:
        """Bits a weight by gear; in high those of the file, on average."""
        low, mid = self.options.bits
        sizes = [self._sources.stored_dtype(place).size for place in self._places]
        weights = [place.nbytes for place in self._places]
        mean = sum(size * weight for size, weight in zip(sizes, weights)) / sum(weights)
        return {"low": low, "mid": mid, "high": 8 * mean}

    @property
    def device_bytes(self) -> int:
        """Bytes that the managed matrices take on the device now, in whatever gears."""
        sets = [self._set, *self._kept.values()]
        if self._coming is not None:
            sets.append(self._coming[1])
        return sum(map(_set_bytes, sets))

    @property
    def kept(self) -> tuple[str, ...]:
        """Gears that are kept beside the one in use, the last used last."""
        return tuple(self._kept)

    def begin_run(self) -> None:
        """Counts steps and shifts from here on."""
        self.tokens.clear()
        self._shifts_before = self._shifts()

    def step(self, gear: str | None) -> None:
        """Before a step is run, in that gear (None: as before): shifts, and counts it."""
        shifted = gear is not None and self.shift(gear)
        if self.counts.miss and not shifted:
            self._enter_into_ledger()  # the last step may have dequantised
        self.tokens[self.gear] += 1

    def run_report(self) -> dict[str, Any]:
        """Of the run since `begin_run`: steps by gear, shifts, seconds that these took; bytes of
        the managed matrices on the device now; products of all runs by path."""
        count, seconds = self._shifts()
        return {
            **{gear: self.tokens[gear] for gear in ("low", "mid", "high")},
            "shifts": count - self._shifts_before[0],
            "seconds": round(seconds - self._shifts_before[1], 6),
            "bytes": self.device_bytes,
            "paths": self.counts.as_map(),
        }

    def _shifts(self) -> tuple[int, float]:
        """Number and seconds of all shifts."""
        every = [s for times in self.times.values() for s in (*times.first, *times.again)]
        return len(every), math.fsum(every)

    def _enter_into_ledger(self) -> None:
        """The gears' bytes; the originals stay under their layers' names."""
        sets = [(self.gear, self._set), *self._kept.items()]
        if self._coming is not None:
            sets.append(self._coming)
        self._ledger.put_bytes(GEARS, sum(_set_bytes(s) for gear, s in sets if gear != "high"))

    # ------------------------------------------------------------------------------------- shifting

    def shift(self, gear: str) -> bool:
        """Puts the model into a gear; False where it is in it already.

        Raises DataError, IOFailure, NoInputError where the originals cannot be read again; the
        model is then in the gear that it was in.
        """
        if gear == self.gear:
            return False
        start = time.perf_counter()
        known = gear in self._kept
        modules = self._kept.pop(gear) if known else self._completed(gear)
        for place, module in zip(self._places, modules):
            place.put(module)
        for module in self._set:
            _forget_dense(module)
        left, self._kept[self.gear] = self.gear, self._set
        self._set, self.gear = modules, gear
        self._sources.forget_ahead()
        self._drop_what_is_over(left)
        self._enter_into_ledger()
        times = self.times[gear]
        (times.again if known else times.first).append(time.perf_counter() - start)
        return True

    def prepare(self, gear: str) -> None:
        """Begins with what a shift to that gear will need (section 3.5): a part of it with every
        call. Does nothing where there would be no room to keep it."""
        if gear in (self.gear, *self._kept):
            return
        if gear == "high":
            self._sources.read_ahead(self._places)
            return
        self._sources.forget_ahead()
        if self._coming is not None and self._coming[0] != gear:
            self._coming = None
        done = [] if self._coming is None else self._coming[1]
        size = -(-len(self._places) // PREPARE_STEPS)
        room = self.budget - sum(map(_set_bytes, self._kept.values()))
        if len(done) == len(self._places) or self.packed_bytes(gear) > room:
            return
        done += self._packed(gear, self._places[len(done) : len(done) + size])
        self._coming = (gear, done)
        self._enter_into_ledger()

    def _completed(self, gear: str) -> list[Any]:
        """The modules of a gear that is not kept, from what was prepared of it."""
        done: list[Any] = []
        if self._coming is not None and self._coming[0] == gear:
            done = self._coming[1]
        self._coming = None  # made for nothing, where it was another gear
        if gear == "high":
            self._return_originals()
            return [place.shell for place in self._places]
        return done + self._packed(gear, self._places[len(done) :])

    def _drop_what_is_over(self, left: str) -> None:
        """Lets sets go, down to the budget: the one just left if it is too large by itself, then
        those that were not used for longest."""
        before = len(self._kept)
        originals = left == "high" and self.options.cache_bytes is None
        if originals or _set_bytes(self._kept[left]) > self.budget:
            self._drop(left)
        while sum(map(_set_bytes, self._kept.values())) > self.budget:
            self._drop(next(iter(self._kept)))
        if len(self._kept) < before:
            mx.clear_cache()  # or MLX would keep the memory for itself

    def _drop(self, gear: str) -> None:
        """Lets a set that is not in use go."""
        del self._kept[gear]
        if gear == "high":
            for place in self._places:
                self._ledger.add(place.owner, -place.nbytes)
                del place.shell["weight"]

    def packed_bytes(self, gear: str) -> int:
        """What the managed matrices take in a packed gear, with scales, in bytes."""
        bits = self.options.bits_of(gear)
        assert bits is not None  # high has no packed modules
        total = 0
        for place in self._places:
            item = self._sources.loaded_dtype(place).size
            rows = place.nbytes // (item * place.columns)
            total += rows * row_bytes(bits, place.columns, item)
        return total

    # --------------------------------------------------------------------------- where weights come

    def _return_originals(self) -> None:
        """Reads the originals again. Exactly what loading gave: the same bytes, the same cast."""
        weights = self._sources.originals(self._places)
        mx.eval(weights)
        for place, weight in zip(self._places, weights):
            place.shell["weight"] = weight
            self._ledger.add(place.owner, place.nbytes)

    def _packed(self, gear: str, places: list[Place]) -> list[Any]:
        """The modules of some places in a packed gear."""
        bits = self.options.bits_of(gear)
        assert bits is not None  # high has no packed modules
        made = []
        for place, rows in zip(places, self._sources.packed(gear, bits, places)):
            fused = self.options.path == "fused" and fused_is_exact(rows.scales.dtype)
            made.append(packed_module(place.shell, rows, bits, place.columns, fused, self.counts))
        return made

    def close(self) -> None:
        """Lets the checkpoint go; the gear stays what it is."""
        self._sources.close()


def _bytes_of(module: Any) -> int:
    """Bytes on the device of a managed matrix: packed, with its dequantised copy, or original."""
    if hasattr(module, "packed_bytes"):
        return module.packed_bytes + module.dense_bytes
    return module["weight"].nbytes if "weight" in module else 0


def _set_bytes(modules: list[Any]) -> int:
    return sum(map(_bytes_of, modules))


def _forget_dense(module: Any) -> None:
    if hasattr(module, "forget_dense"):
        module.forget_dense()
