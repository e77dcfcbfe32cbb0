"""Which gear a model is in: its matrices are replaced in the module tree, one set at a time.

Paper 003, section 6. Nothing is quantised before a gear is first entered. The originals leave the
device with the shift (so device memory falls) and are read again from the store with the shift up,
bit for bit; the file, or rather the system's cache of it, is the host memory of section 6.3. Sets
that are not in use are kept within a budget, the most recently used ones.

    manager = PrecisionManager(store, dtype, ledger, options)
    manager.shift("low")
"""

from __future__ import annotations

import math
import os
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from toastkit.errors import DataError, UsageError, from_os_error
from toastkit.gears.cost import row_bytes
from toastkit.gears.discovery import discover
from toastkit.gears.options import GearOptions
from toastkit.gears.packed import PathCounts, fused_is_exact, packed_module
from toastkit.store.ledger import GEARS, OUTSIDE, Ledger, layer_owner
from toastkit.store.precision import GEAR_BITS, Rows, looks_quantised, quantise_rows
from toastkit.store.store import Store

PREPARE_STEPS = 2  # a gear that is seen coming is made in so many parts: the forecast's two steps
SAMPLED_MODULES = 3  # whose rows are looked at for an earlier quantisation


@dataclass
class _Place:
    """A managed matrix. parents: where in the tree it hangs, (container, key). shell: the original
    module, with its weight only while high gear is kept."""

    path: str
    shell: Any
    parents: list[tuple[Any, Any]]
    owner: str
    columns: int
    nbytes: int

    @property
    def weight_name(self) -> str:
        return f"{self.path}.weight"

    def put(self, module: nn.Module) -> None:
        """Hangs a module into the tree."""
        for container, key in self.parents:
            container[key] = module


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
        self._store, self._dtype, self._ledger, self._notify = store, dtype, ledger, notify
        self._files = _identities(store)
        self._places = self._discover()
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

    def _discover(self) -> list[_Place]:
        by_module: dict[int, _Place] = {}
        for path, module, _ in discover(self._store.model, self.options.scope):
            container, key = _parent(self._store.model, path)
            place = by_module.get(id(module))
            if place is not None:  # one module in two places of the tree
                place.parents.append((container, key))
                continue
            weight = module["weight"]
            index = self._store.layer_of(f"{path}.weight")
            owner = OUTSIDE if index is None else layer_owner(index)
            by_module[id(module)] = _Place(
                path, module, [(container, key)], owner, weight.shape[-1], weight.nbytes
            )
        return list(by_module.values())

    # -------------------------------------------------------------------------------- what is where

    @property
    def paths(self) -> list[str]:
        """The managed modules, by layer."""
        return [place.path for place in self._places]

    @property
    def bits(self) -> dict[str, float]:
        """Bits a weight by gear; in high those of the file, on average."""
        low, mid = self.options.bits
        sizes = [self._store.dtype(place.weight_name).size for place in self._places]
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
        if gear is not None:
            self.shift(gear)
        elif self.counts.miss:
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
            layers = {self._store.layer_of(place.weight_name) for place in self._places}
            self._store.prefetch(sorted(layer for layer in layers if layer is not None))
            return
        if self._coming is not None and self._coming[0] != gear:
            self._coming = None
        done = [] if self._coming is None else self._coming[1]
        size = -(-len(self._places) // PREPARE_STEPS)
        if len(done) == len(self._places) or self.packed_bytes(gear) > self.budget:
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
            item = (self._dtype or self._store.dtype(place.weight_name)).size
            rows = place.nbytes // (item * place.columns)
            total += rows * row_bytes(bits, place.columns, item)
        return total

    # --------------------------------------------------------------------------- where weights come

    def _return_originals(self) -> None:
        """Reads the originals again. Exactly what loading gave: the same bytes, the same cast."""
        weights = self._originals(self._places)
        mx.eval(weights)
        for place, weight in zip(self._places, weights):
            place.shell["weight"] = weight
            self._ledger.add(place.owner, place.nbytes)

    def _originals(self, places: list[_Place]) -> list[mx.array]:
        """The weights of these places as they were loaded, lazy; read anew if they have left."""
        if places and "weight" in places[0].shell:
            return [place.shell["weight"] for place in places]
        self._check_files()
        try:
            found = self._store.tensors([place.weight_name for place in places])
        except KeyError as error:
            raise DataError(f"{self._store.files.name}: {error} cannot be read again") from error
        arrays = [found[place.weight_name] for place in places]
        return arrays if self._dtype is None else [a.astype(self._dtype) for a in arrays]

    def _check_files(self) -> None:
        """Raises DataError where the checkpoint is no longer the one that was loaded."""
        if _identities(self._store) != self._files:
            raise DataError(
                f"{self._store.files.name}: its files have changed since the model was loaded",
                hint="start again, or keep the originals with a larger --gear-cache",
            )

    def _packed(self, gear: str, places: list[_Place]) -> list[Any]:
        """The modules of some places in a packed gear: as they lie baked in the checkpoint, or
        quantised now."""
        bits = self.options.bits_of(gear)
        assert bits is not None  # high has no packed modules
        made = []
        baked = self._baked(gear, bits, places)
        originals: list[Any] = [] if baked else self._originals(places)
        if not baked:
            self._look_at(places, originals)
        for n, place in enumerate(places):
            rows = baked[n] if baked else self._quantised(place, originals[n], bits)
            if not baked:
                originals[n] = None  # read anew, it is let go as soon as it is packed
            if self._dtype is not None:
                scales, biases = rows.scales.astype(self._dtype), rows.biases.astype(self._dtype)
                rows = Rows(rows.weight, scales, biases)
            mx.eval(rows)
            fused = self.options.path == "fused" and fused_is_exact(rows.scales.dtype)
            made.append(packed_module(place.shell, rows, bits, place.columns, fused, self.counts))
        return made

    def _quantised(self, place: _Place, weight: Any, bits: int) -> Rows:
        # In the dtype of the file, as baking does: a gear is the same, baked or made here.
        stored = self._store.dtype(place.weight_name)
        try:
            return quantise_rows(weight.astype(stored), bits, pad=True)
        except DataError as error:
            raise DataError(f"{place.weight_name}: {error.message}", error.hint) from error

    def _baked(self, gear: str, bits: int, places: list[_Place]) -> list[Rows]:
        """The gear as the checkpoint holds it; empty where it does not hold all of it."""
        if GEAR_BITS.get(gear) != bits:
            return []
        self._check_files()
        found = []
        for place in places:
            try:
                parts = self._store.module(place.path, gear)
            except KeyError:
                return []
            found.append(Rows(*(parts[f"{place.path}.{name}"] for name in Rows._fields)))
        return found

    def _look_at(self, places: list[_Place], weights: list[Any]) -> None:
        """Says once that the weights seem to have been quantised before (sections 6.4, 13.3)."""
        if self._notify is None or not places:
            return
        step = max(1, len(places) // SAMPLED_MODULES)
        if any(looks_quantised(weight) for weight in weights[::step]):
            self._notify(
                f"warning: {self._store.files.name}: its weights look as if they had been "
                "quantised before; gears do so again, which adds up, most of all in low gear"
            )
        self._notify = None

    def close(self) -> None:
        """Lets the checkpoint go; the gear stays what it is."""
        self._store.close()


def _parent(model: nn.Module, path: str) -> tuple[Any, Any]:
    """The container of a module, a dict or a list, and the key in it."""
    node: Any = model
    *parts, last = path.split(".")
    for part in parts:
        node = node[int(part)] if isinstance(node, list) else node[part]
    return node, int(last) if isinstance(node, list) else last


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


def _identities(store: Store) -> list[tuple[int, int, int]]:
    """What tells a file from another that took its name."""
    found = []
    for header in store.files.headers:
        try:
            about = os.stat(header.path)
        except OSError as error:
            raise from_os_error(error, f"cannot read {header.path}") from error
        found.append((about.st_ino, about.st_size, about.st_mtime_ns))
    return found
