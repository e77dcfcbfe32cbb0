"""Expert slots: each layer caches a few experts on the device; the others stay in the file.

The module that holds a layer's experts (SwitchGLU, SwitchMLP) changes its class, never its
identity. Called with the router's choice, it reads the choice back, fetches all missing experts
into slots at once, and runs the architecture's own code with slot numbers in place of experts. A
row's result depends only on its expert's matrices, so it is the same to the bit whichever slot they
are in and whichever rows are computed with it.

A choice of more experts than there are slots, as in a prefill chunk, is computed in groups of
experts: each expert is read once, and the next group is read while one is computed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np

from toastkit.errors import ToastError
from toastkit.holdings.derived import extend, restore
from toastkit.holdings.foresight import Foresight
from toastkit.holdings.forms import Form
from toastkit.holdings.layer_slots import LayerSlots, SlotCounts, Switch, by_last_use, find_switches
from toastkit.holdings.optimistic import OptimisticSteps
from toastkit.holdings.slot_memory import Fetch, SlotMemory
from toastkit.holdings.slot_table import SlotTable
from toastkit.holdings.weights import Weights
from toastkit.store.reader import Reader
from toastkit.store.waiting import AHEAD, NOW

if TYPE_CHECKING:
    from toastkit.holdings.holding import Holding, Parts
    from toastkit.holdings.holdings import Holdings


class ExpertSlots:
    """The layers of a model that have slots. Used by one thread at a time, the one that computes.
    layers: in execution order. counts: see SlotCounts. foresight: reads experts before they are
    known to be needed. optimistic: steps that do not read the choice back."""

    def __init__(self, holdings: Holdings, weights: Weights):
        self._holdings, self._weights = holdings, weights
        self._by_path: dict[str, LayerSlots] = {}
        # The last layer that was computed from slots, and its output, perhaps not yet evaluated.
        self._pending: tuple[LayerSlots, mx.array] | None = None
        self._unchecked: list[tuple[LayerSlots, int]] = []  # fetched since the last check_files
        self._reported = (0, 0)
        self._switches: list[Switch] | None = None
        self.layers: list[LayerSlots] = []
        self.counts = SlotCounts()
        self.foresight = Foresight(self)
        self.optimistic = OptimisticSteps(self)

    @property
    def switches(self) -> list[Switch]:
        """All modules that hold experts, by layer. First read before any expert is in slots."""
        if self._switches is None:
            self._switches = sorted(find_switches(self._holdings), key=lambda s: (s.layer, s.path))
        return self._switches

    @property
    def reads(self) -> bool:
        """True if a pass that is built now may read experts."""
        return bool(self.layers) and not self.optimistic.is_running

    @property
    def reader(self) -> Reader:
        """The reader of the experts."""
        return self._holdings.store.reader

    def follow(self) -> None:
        """Update `layers` after a change of forms. Slots in new memory start empty."""
        if self._switches is None:
            return  # no policy uses slots
        before, self._by_path = self._by_path, {}
        for switch in self._switches:
            layer = before.get(switch.path)
            if layer is not None and layer.is_stale:
                self._leave(layer)
                layer = None
            if layer is None and all(holding.form.slots for holding in switch.stacks):
                layer = self._enter(switch)
            if layer is not None:
                self._by_path[switch.path] = layer
        self.layers = list(self._by_path.values())
        self.foresight.follow()

    def _enter(self, switch: Switch, table: SlotTable | None = None) -> LayerSlots:
        """Replace a switch's class. table: the contents of its slots, None if they are empty."""
        memory = SlotMemory(self._holdings.store, self._weights, switch.stacks)
        slots = min(holding.form.slots for holding in switch.stacks)
        table = table or SlotTable(switch.experts, slots)
        layer = LayerSlots(switch, memory, table, self.counts)
        extend(switch.module, _Slotted, _slots=self, _layer=layer)
        return layer

    def _leave(self, layer: LayerSlots) -> None:
        self._forget(layer)
        restore(layer.switch.module)

    def resize(
        self, moves: Sequence[tuple[Holding, Form]], put: Callable[[Holding, Parts], None]
    ) -> list[tuple[Holding, Form]]:
        """Change the number of slots of stacks that are whole on the device or in slots. The
        experts that would be evicted last stay. One matrix at a time, as memory may be short: its
        old slots are freed before the next matrix gets new ones. put(holding, parts): replaces the
        holding's parts. Returns the moves that are not such changes. Raises DataError, NoInputError
        if the files have changed since they were opened."""
        wanted = {holding: form for holding, form in moves if _is_resizing(holding.form, form)}
        if not wanted:
            return list(moves)
        switches = [s for s in self.switches if wanted.keys() >= set(s.stacks)]
        if self._pending is not None:
            mx.eval(self._pending[1])
            self._pending = None
        self._check_files()
        try:
            for switch in switches:
                self._resize(switch, wanted[switch.stacks[0]], put)
                mx.clear_cache()  # or MLX's allocator would keep the memory
        finally:
            self.follow()
        done = {holding for switch in switches for holding in switch.stacks}
        return [move for move in moves if move[0] not in done]

    def _resize(self, switch: Switch, form: Form, put: Callable[[Holding, Parts], None]) -> None:
        """Resize one layer: slots one matrix at a time (if that fails half way, the layer is left
        with as many slots as its smallest matrix has, all empty); a whole stack all matrices
        together, as it cannot be used half converted."""
        layer = self._by_path.pop(switch.path, None)
        if layer is None:
            table, rows = SlotTable.full(switch.experts).resized(form.slots)
            made = [(holding, holding.in_slots(form, rows)) for holding in switch.stacks]
            while made:
                put(*made.pop(0))
        else:
            self._leave(layer)
            table, rows = layer.table.resized(form.slots)
            layer.release()
            for holding in switch.stacks:
                put(holding, holding.in_slots(form, rows))
                mx.clear_cache()
        self._by_path[switch.path] = self._enter(switch, table)

    # -------------------------------------------------------------------------------- one layer

    def run(
        self, layer: LayerSlots, call: Callable[..., mx.array], x: mx.array, indices: mx.array
    ) -> mx.array:
        """The outputs of a layer's experts for x, (..., K, D), lazy. call: the architecture's own
        code, called with slots in place of experts. x: (..., D). indices: the router's choice,
        (..., K) uint32. Raises DataError, IOFailure, NoInputError; the slots then hold the experts
        that they held, or fewer."""
        # The pending output is evaluated too, before its slots are overwritten.
        predicted = self.foresight.ask(layer)
        mx.eval(indices, self._pending and self._pending[1], list(predicted.values()))
        self._pending = None
        chosen = np.array(indices)
        wanted = by_last_use(chosen)
        self._count(layer, wanted)
        fits = len(wanted) <= layer.table.slots
        unwanted = layer.leave_off(wanted) if fits else []  # first of all: the disk is busy with it
        self._count_foreseen(layer, wanted)
        if fits:
            try:
                self._load(layer, wanted, unwanted, lambda: self.foresight.go_on(layer, predicted))
            finally:
                for expert in unwanted:
                    layer.drop(expert)
            self.foresight.leave(layer)
            out = call(x, _slots_of(layer, chosen))
            self._pending = layer, out
        else:
            out = self._in_groups(layer, call, x, chosen)
        if layer is self.layers[-1]:
            self._check_files()
        return out

    def _count(self, layer: LayerSlots, wanted: list[int]) -> None:
        """Count the experts that a pass of a layer needs, and the hits among them."""
        layer.choice = wanted
        layer.table.count(wanted)
        self.counts.passes += 1
        self.counts.wanted += len(wanted)
        self.counts.hit += sum(expert in layer.table for expert in wanted)

    def _count_foreseen(self, layer: LayerSlots, wanted: Sequence[int]) -> None:
        """Count those of a pass's experts that were foreseen for it: later ones are others'."""
        self.counts.right += len(layer.foreseen.intersection(wanted))
        layer.foreseen.clear()

    def count_hits(self, layer: LayerSlots, wanted: list[int]) -> None:
        """Count a pass of a layer all of whose experts were hits."""
        self._count(layer, wanted)
        self._count_foreseen(layer, wanted)
        layer.table.use(wanted)

    def _in_groups(
        self, layer: LayerSlots, call: Callable[..., mx.array], x: mx.array, chosen: np.ndarray
    ) -> mx.array:
        """As `run`, for more experts than slots: in groups of half the slots, cached experts first;
        the last expert is used last, so that it stays."""
        order = sorted(layer.choice, key=lambda expert: expert not in layer.table)
        size = max(1, layer.table.slots // 2)
        groups = [order[i : i + size] for i in range(0, len(order), size)]
        rows, flat = x.reshape(-1, x.shape[-1]), chosen.reshape(-1)
        outs, places = [], []
        for n, group in enumerate(groups):
            later = set(order[(n + 1) * size :])
            self._load(layer, group, later)
            if n + 1 < len(groups):
                self._begin(layer, groups[n + 1], {*group, *groups[n + 1]}, later)
            place = np.nonzero(np.isin(flat, group))[0]
            tokens = mx.array(place // chosen.shape[-1])
            out = call(rows[tokens], _slots_of(layer, flat[place][:, None]))
            mx.eval(out)
            outs.append(out.reshape(len(place), -1))
            places.append(place)
        layer.table.use(expert for expert in layer.choice if expert in layer.table)
        back = mx.array(np.argsort(np.concatenate(places)))
        return mx.concatenate(outs)[back].reshape(*chosen.shape, -1)

    def _load(
        self,
        layer: LayerSlots,
        experts: Sequence[int],
        spare: Collection[int] = (),
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        """Load experts into slots, and wait for them. spare: experts to evict only if no others can
        be. meanwhile(): called when all reads have been requested: requests that it adds keep the
        disk busy while the last of these finish."""
        coming = [expert for expert in experts if expert in layer.coming]
        slots = layer.claim([e for e in experts if e not in layer.table], experts, spare)
        start = time.perf_counter()
        fetch = None
        try:
            fetch = self._fetch(layer, slots)
            meanwhile()
            failed = self._finish_ahead(layer, coming)
            if fetch is not None:
                layer.finish(fetch)
            if failed:  # reading ahead failed: try again, as they are needed now
                slots |= (again := layer.claim(failed, experts, spare))
                if (fetch := self._fetch(layer, again)) is not None:
                    layer.finish(fetch)
        except BaseException:
            if fetch is not None:
                fetch.cancel()
            for expert in (*slots, *coming):
                layer.drop(expert)
            raise
        if slots or coming:
            self.counts.wait += time.perf_counter() - start
        layer.table.use(experts)

    def _fetch(self, layer: LayerSlots, slots: Mapping[int, int]) -> Fetch | None:
        """Start reading experts that are needed now, in one request."""
        if not slots:
            return None
        self._note(layer, slots)
        return layer.memory.begin(list(slots), list(slots.values()), NOW)

    def _finish_ahead(self, layer: LayerSlots, coming: Iterable[int]) -> list[int]:
        """Wait for experts that are being read ahead. Returns those that failed; they have lost
        their slots."""
        failed = []
        for expert in coming:
            try:
                layer.finish(layer.coming[expert])
                del layer.coming[expert]
            except ToastError:
                layer.drop(expert)
                failed.append(expert)
        return failed

    def _note(self, layer: LayerSlots, experts: Iterable[int]) -> None:
        """Remember experts that are being read, for `_check_files`."""
        self._unchecked += ((layer, expert) for expert in experts)

    def _begin(
        self,
        layer: LayerSlots,
        experts: Sequence[int],
        keep: Collection[int],
        spare: Collection[int] = (),
    ) -> list[int]:
        """Start prefetching the misses among experts; returns at once, with those that got a slot.
        No unevaluated output may depend on the slots that are evicted."""
        if layer.memory.reads_all:
            return []
        absent = [expert for expert in experts if expert not in layer.table]
        slots = layer.claim(absent, keep, spare)
        for expert, slot in slots.items():
            layer.coming[expert] = layer.memory.begin([expert], [slot], AHEAD)
        self._note(layer, slots)
        return list(slots)

    def _check_files(self) -> None:
        """Raise DataError, NoInputError if the files have changed since they were opened, and drop
        the experts read since the last check. Called before the result of a pass is used."""
        if not self._unchecked:
            return
        unchecked, self._unchecked = self._unchecked, []
        try:
            self._holdings.store.check_files()
        except BaseException:
            for layer, expert in unchecked:
                layer.drop(expert)
            raise

    # -------------------------------------------------------------------------------- reading ahead

    def prefetch(self, layer: LayerSlots, experts: Sequence[int]) -> None:
        """Start reading a layer's misses among experts, as far as there are slots; returns at once.
        Hits keep their slots."""
        if self._pending is not None and self._pending[0] is layer:
            mx.eval(self._pending[1])
        begun = self._begin(layer, experts, set(experts))
        layer.foreseen.update(begun)
        self.counts.ahead += len(begun)

    @property
    def is_reading(self) -> bool:
        """True while a prefetch is under way."""
        fetches = (fetch for layer in self.layers for fetch in layer.coming.values())
        return not all(fetch.request.is_done for fetch in fetches)

    def settle(self) -> bool:
        """Finish all prefetches; False if one is still being read. Raises as `run`."""
        if self.is_reading:
            return False
        for layer in self.layers:
            self._finish_ahead(layer, list(layer.coming))
        self._check_files()
        return True

    def _forget(self, layer: LayerSlots) -> None:
        for expert in list(layer.coming):
            layer.drop(expert)

    def forget_ahead(self) -> None:
        """Cancel all prefetches."""
        self.foresight.forget()
        for layer in self.layers:
            self._forget(layer)

    def counted(self) -> dict[str, int] | None:
        """wanted and hit since the last call; None if no layer has slots."""
        if not self.layers:
            return None
        before, self._reported = self._reported, (self.counts.wanted, self.counts.hit)
        return {"wanted": self._reported[0] - before[0], "hit": self._reported[1] - before[1]}


def _is_resizing(before: Form, form: Form) -> bool:
    """True if only the number of slots changes, and the experts are on the device."""
    same = before._replace(slots=0) == form._replace(slots=0)
    return same and form.slots != 0 and not before.away


def _slots_of(layer: LayerSlots, chosen: np.ndarray) -> mx.array:
    """The slots, uint32 (..., K), of chosen experts, all of which are in slots."""
    return mx.array(layer.table.of[chosen].astype(np.uint32))


class _Slotted:
    """Mixin for the class of a switch: runs its experts in slots."""

    _slots: ExpertSlots
    _layer: LayerSlots

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        self._slots.foresight.answer(indices)
        optimistic = self._slots.optimistic
        run = optimistic.run if optimistic.is_running else self._slots.run
        return run(self._layer, super().__call__, x, indices)  # type: ignore[misc]
