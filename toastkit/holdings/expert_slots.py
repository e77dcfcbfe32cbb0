"""Experts that are on the device in a few slots of each layer, and else in the file.

The module that holds a layer's experts (SwitchGLU, SwitchMLP) changes its class and not its
identity. Called with the router's choice it reads this back, sees to it that the experts wanted are
in slots, all that are missing being read at once, and runs the architecture's own code with slots
in place of experts. A row's result depends on nothing but its expert's matrices, so it is the same
to the bit wherever these lie, and with whichever rows it is computed.

A choice of more experts than there are slots, as a chunk of a prompt makes, is computed in groups
of experts: each is read once, and while one group is computed the next is read.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np

from toastkit.errors import ToastError
from toastkit.holdings.derived import derived
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
    """The layers of a model that have slots. Used by one thread at a time, which is the one that
    computes. layers: in the order in which they run. counts: see SlotCounts. foresight: what is
    read before it is known to be wanted. optimistic: steps that do not read the choice back."""

    def __init__(self, holdings: Holdings, weights: Weights):
        self._holdings, self._weights = holdings, weights
        self._own: dict[str, type] = {}  # the classes that the switches had, by path
        self._by_path: dict[str, LayerSlots] = {}
        # What was computed last of what is in slots, where it may not have been evaluated.
        self._pending: tuple[LayerSlots, mx.array] | None = None
        self._unchecked: list[tuple[LayerSlots, int]] = []  # fetched since the files were looked at
        self._told = (0, 0)
        self._switches: list[Switch] | None = None
        self.layers: list[LayerSlots] = []
        self.counts = SlotCounts()
        self.foresight = Foresight(self)
        self.optimistic = OptimisticSteps(self)

    @property
    def switches(self) -> list[Switch]:
        """All modules that hold experts, by layer; first asked for before any is in slots."""
        if self._switches is None:
            self._switches = sorted(find_switches(self._holdings), key=lambda s: (s.layer, s.path))
        return self._switches

    @property
    def reads(self) -> bool:
        """Whether a pass that is built now reads experts, or may."""
        return bool(self.layers) and not self.optimistic.is_running

    @property
    def reader(self) -> Reader:
        """Who reads experts."""
        return self._holdings.store.reader

    def follow(self) -> None:
        """Takes note of which stacks are in slots now; those whose memory is new are empty."""
        if self._switches is None:
            return  # nobody has asked for any
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
        """table: of what is in the slots, None for nothing."""
        memory = SlotMemory(self._holdings.store, self._weights, switch.stacks)
        slots = min(holding.form.slots for holding in switch.stacks)
        table = table or SlotTable(switch.experts, slots)
        layer = LayerSlots(switch, memory, table, self.counts)
        self._own[switch.path] = type(switch.module)
        switch.module.__class__ = derived(_Slotted, type(switch.module))
        vars(switch.module).update(_slots=self, _layer=layer)
        return layer

    def _leave(self, layer: LayerSlots) -> None:
        self._forget(layer)
        module = layer.switch.module
        module.__class__ = self._own.pop(layer.switch.path)
        for name in ("_slots", "_layer"):
            vars(module).pop(name)

    def resize(
        self, moves: Sequence[tuple[Holding, Form]], put: Callable[[Holding, Parts], None]
    ) -> list[tuple[Holding, Form]]:
        """Gives stacks that are on the device, or that are in slots, more or fewer slots. Those
        experts stay that would leave last. One matrix after another, as memory may be short: old
        slots are let go before the next one has new ones. put(holding, parts): has the parts
        take the place of those there are. Returns the moves that are something else. Raises
        DataError, NoInputError where the files are not those that were opened."""
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
                mx.clear_cache()  # or MLX would keep the memory for itself
        finally:
            self.follow()
        done = {holding for switch in switches for holding in switch.stacks}
        return [move for move in moves if move[0] not in done]

    def _resize(self, switch: Switch, form: Form, put: Callable[[Holding, Parts], None]) -> None:
        """Of slots, one matrix after another; should that fail half way, the layer has as many as
        all of them have, with nothing in them. Of all experts, all matrices together: they cannot
        be used by halves."""
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
        """What a layer's experts make of x: (..., K, D), lazy. call: the architecture's own code,
        for slots in place of experts. x: (..., D). indices: the router's choice, (..., K) uint32.
        Raises DataError, IOFailure, NoInputError; what is in slots is then what it was, or less."""
        # What was computed of these slots before is evaluated too, or it would see other experts.
        asked = self.foresight.ask(layer)
        mx.eval(indices, self._pending and self._pending[1], list(asked.values()))
        self._pending = None
        chosen = np.array(indices)
        wanted = by_last_use(chosen)
        self._count(layer, wanted)
        if len(wanted) <= layer.table.slots:
            wrong = layer.leave_off(wanted)  # before anything else, as the disk is at it
            try:
                self._bring(layer, wanted, wrong, lambda: self.foresight.go_on(layer, asked))
            finally:
                for expert in wrong:
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
        """Counts what a pass of a layer wants."""
        layer.choice = wanted
        layer.table.count(wanted)
        self.counts.passes += 1
        self.counts.wanted += len(wanted)
        self.counts.hit += sum(expert in layer.table for expert in wanted)

    def _count_right(self, layer: LayerSlots, wanted: Sequence[int]) -> None:
        """Who has foreseen some of these was right."""
        self.counts.right += len(layer.foreseen.intersection(wanted))
        layer.foreseen.difference_update(wanted)

    def count_hits(self, layer: LayerSlots, wanted: list[int]) -> None:
        """A pass of a layer has run, and these, all that it wanted, were in slots."""
        self._count(layer, wanted)
        self._count_right(layer, wanted)
        layer.table.use(wanted)

    def _in_groups(
        self, layer: LayerSlots, call: Callable[..., mx.array], x: mx.array, chosen: np.ndarray
    ) -> mx.array:
        """As `run`, for more experts than there are slots: those that are there first, then half as
        many at a time as there are slots, the last one used last, so that it stays."""
        order = sorted(layer.choice, key=lambda expert: expert not in layer.table)
        size = max(1, layer.table.slots // 2)
        groups = [order[i : i + size] for i in range(0, len(order), size)]
        rows, flat = x.reshape(-1, x.shape[-1]), chosen.reshape(-1)
        outs, places = [], []
        for n, group in enumerate(groups):
            later = set(order[(n + 1) * size :])
            self._bring(layer, group, later)
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

    def _bring(
        self,
        layer: LayerSlots,
        experts: Sequence[int],
        spare: Collection[int] = (),
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        """Sees to it that experts are in slots, and waits for them. spare: others that leave only
        where no others can. meanwhile(): called when all that is waited for has been asked for: who
        asks for more there keeps the disk busy while the last of it comes."""
        coming = [expert for expert in experts if expert in layer.coming]
        slots = layer.claim([e for e in experts if e not in layer.table], experts, spare)
        self._count_right(layer, experts)
        start = time.perf_counter()
        fetch = None
        try:
            fetch = self._fetch(layer, slots)
            meanwhile()
            failed = self._take(layer, coming)
            if fetch is not None:
                layer.finish(fetch)
            if failed:  # they are tried again now that somebody waits
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
        """Begins to read what somebody waits for, all of it at once."""
        if not slots:
            return None
        self._note(layer, slots)
        return layer.memory.begin(list(slots), list(slots.values()), NOW)

    def _take(self, layer: LayerSlots, coming: Iterable[int]) -> list[int]:
        """Waits for experts that are being read ahead. Those of which that failed, which have no
        slots any more."""
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
        """Notes experts that are being read, for `_check_files`."""
        self._unchecked += ((layer, expert) for expert in experts)

    def _begin(
        self,
        layer: LayerSlots,
        experts: Sequence[int],
        keep: Collection[int],
        spare: Collection[int] = (),
    ) -> list[int]:
        """Begins to read experts that are not there, and returns at once: those that found a slot.
        Nothing that is not evaluated may have been computed of the slots that leave."""
        if layer.memory.reads_all:
            return []
        absent = [expert for expert in experts if expert not in layer.table]
        slots = layer.claim(absent, keep, spare)
        for expert, slot in slots.items():
            layer.coming[expert] = layer.memory.begin([expert], [slot], AHEAD)
        self._note(layer, slots)
        return list(slots)

    def _check_files(self) -> None:
        """Before anybody sees what came of a pass: raises DataError, NoInputError where the files
        are not those that were opened; what was read of them is then nowhere."""
        if not self._unchecked:
            return
        unchecked, self._unchecked = self._unchecked, []
        try:
            self._weights.check_files()
        except BaseException:
            for layer, expert in unchecked:
                layer.drop(expert)
            raise

    # -------------------------------------------------------------------------------- reading ahead

    def prefetch(self, layer: LayerSlots, experts: Sequence[int]) -> None:
        """Begins to read what of these a layer does not have, as far as there are slots for, and
        returns at once. Those that are there keep their slots."""
        if self._pending is not None and self._pending[0] is layer:
            mx.eval(self._pending[1])
        begun = self._begin(layer, experts, set(experts))
        layer.foreseen.update(begun)
        self.counts.ahead += len(begun)

    @property
    def is_reading(self) -> bool:
        """Whether something that is read ahead has not come yet."""
        fetches = (fetch for layer in self.layers for fetch in layer.coming.values())
        return not all(fetch.request.is_done for fetch in fetches)

    def settle(self) -> bool:
        """Puts what was read ahead into its slots; False where something has not come yet. Raises
        as `run`."""
        if self.is_reading:
            return False
        for layer in self.layers:
            self._take(layer, list(layer.coming))
        self._check_files()
        return True

    def _forget(self, layer: LayerSlots) -> None:
        for expert in list(layer.coming):
            layer.drop(expert)

    def forget_ahead(self) -> None:
        """Lets go what is being read ahead."""
        self.foresight.forget()
        for layer in self.layers:
            self._forget(layer)

    def counted(self) -> dict[str, int] | None:
        """wanted and hit since the last call; None where no layer has slots."""
        if not self.layers:
            return None
        before, self._told = self._told, (self.counts.wanted, self.counts.hit)
        return {"wanted": self._told[0] - before[0], "hit": self._told[1] - before[1]}


def _is_resizing(before: Form, form: Form) -> bool:
    """Whether they differ in the number of slots alone, of experts that are on the device."""
    same = before._replace(slots=0) == form._replace(slots=0)
    return same and form.slots != 0 and not before.away


def _slots_of(layer: LayerSlots, chosen: np.ndarray) -> mx.array:
    """Slots, uint32 (..., K), in place of experts that are all there."""
    return mx.array(layer.table.of[chosen].astype(np.uint32))


class _Slotted:
    """What a switch with slots does in addition to the class that computes."""

    _slots: ExpertSlots
    _layer: LayerSlots

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        self._slots.foresight.answer(indices)
        optimistic = self._slots.optimistic
        run = optimistic.run if optimistic.is_running else self._slots.run
        return run(self._layer, super().__call__, x, indices)  # type: ignore[misc]
