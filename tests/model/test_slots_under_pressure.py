"""Slots that are given up and taken back while memory comes and goes: never a result changes, what
stays is not read again, and the account, MLX and the slots agree."""

from __future__ import annotations

import gc
import threading
from functools import lru_cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.model.checkpoints import open_store, read
from tests.model.moe_engines import read_once
from tests.model.published import write_published
from tests.model.test_expert_slots import CHOSEN, EXPERTS, PROMPT, deepseek, opened
from tests.model.test_streaming import MIB, Readings, alike
from toastkit.engine.batch import Batch
from toastkit.engine.engine import Engine
from toastkit.engine.room import room_for_experts
from toastkit.experts.experts_options import ExpertsOptions, SlotOptions
from toastkit.experts.experts_policy import ExpertsPolicy
from toastkit.experts.slot_policy import SlotPolicy
from toastkit.gears.gear_options import GearOptions
from toastkit.gears.gear_policy import gear_policy
from toastkit.holdings import pressure
from toastkit.holdings.holding import Holding
from toastkit.holdings.policy import NO_WISH, Wish, warn_of_memory
from toastkit.model.locate import locate
from toastkit.residency.residency_options import ResidencyOptions
from toastkit.residency.residency_policy import ResidencyPolicy
from toastkit.store import reader

MUCH, LITTLE = 8 << 30, pressure.LOW - 1
TOKENS = [3 + 5 * n % 290 for n in range(40)]


@pytest.fixture(autouse=True)
def looked_at_before_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pressure, "CHECK_TOKENS", 1)
    monkeypatch.setattr(reader, "IDLE_SECONDS", 0.05)  # a thread that waits keeps its engine


@pytest.fixture(scope="module")
def olmoe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_published(tmp_path_factory.mktemp("pressure") / "olmoe", "olmoe")


@lru_cache(maxsize=4)
def whole(path: Path | str, gears: GearOptions | None) -> Engine:
    """With all its experts. Tests share it: it takes longer to open than to run."""
    return opened(path, gear_options=gears)


class Watched:
    """A model with as many slots as memory allows. course: slots of a layer after each step.
    slots: to begin with, None for as many as there are experts."""

    def __init__(self, path: Path | str, slots: int | None = None, **rest: Any):
        self.path, self.readings = path, Readings(MUCH)
        self.residency, self.gears = rest.pop("residency", None), rest.pop("gears", None)
        self.engine = self._made(**rest)
        if slots is not None:
            self.readings.count = self._reading_for(slots)
            self.engine = self._made(**rest)
        self.engine.load()
        self.state = read(self.engine, PROMPT)
        self.course: list[int] = []
        self.logits = [self.state.logits]

    def _made(self, options: SlotOptions | None = None, experts: Any = None) -> Engine:
        store = open_store(self.path)
        self.policy = SlotPolicy(
            options or SlotOptions(), room_for_experts(self.residency, self.readings)
        )
        gears = gear_policy(store, self.gears, None) if self.gears else None
        others = [] if experts is None else [ExpertsPolicy(experts)]
        policies = [*([gears] if gears else []), *others, self.policy]
        if self.residency is not None:
            policies.append(ResidencyPolicy(self.residency, self.readings))
        return Engine(store, policies, dtype="float32")

    def _reading_for(self, slots: int) -> int:
        """Bytes that are free where so many fit."""
        self.readings.count = 4 * pressure.LOW  # and then a tenth is more than what LOW spares
        others = 3 * pressure.LOW - self.policy._room.size()
        return pressure.LOW + others + slots * self.policy.sizes.slot_bytes()

    def run(self, steps: int, wish: Wish = NO_WISH) -> list[int]:
        """Slots after each of some steps."""
        for _ in range(steps):
            self.engine.consume(self.state, TOKENS[len(self.course) % len(TOKENS)], wish)
            mx.eval(self.state.logits)
            self.logits.append(self.state.logits)
            self.course.append(self.policy.report()["slots"])
            agrees(self.engine)
        return self.course[-steps:]

    def is_as_whole(self, wish: Wish = NO_WISH) -> bool:
        """Whether its logits are those of a model with all its experts, and its slots hold what
        their tables say."""
        other = whole(self.path, self.gears)
        state = read_once(other, PROMPT)
        found = [state.logits]
        for n in range(len(self.course)):
            other.consume(state, TOKENS[n % len(TOKENS)], wish)
            found.append(state.logits)
        mx.eval(found)
        for layer in self.engine.holdings.slots.layers:
            for holding in layer.switch.stacks:
                stacks = other.holdings.modules[holding.path].module
                for key, array in holding.parts.matrix.items():
                    for expert in layer.table.held:
                        row = array[int(layer.table.of[expert])]
                        assert mx.array_equal(row, stacks[key][expert]).item()
        return alike(self.logits, found)


def agrees(engine: Engine) -> None:
    """The account, the arrays in the tree and the tables say the same."""
    layers = engine.holdings.slots.layers
    for layer in layers:
        for holding in layer.switch.stacks:
            arrays = holding.parts.matrix.values()
            assert {array.shape[0] for array in arrays} == {layer.table.slots}
            assert holding.form.slots == layer.table.slots
    stacks = [holding for layer in layers for holding in layer.switch.stacks]
    assert engine.ledger.of("experts") == sum(h.parts.matrix_bytes for h in stacks)


# -------------------------------------------------------------------------------------- the course


def test_slots_follow_memory(olmoe: Path) -> None:
    """A quarter of them goes when memory is short, never one of the least; what comes back is less
    than what was too much."""
    model = Watched(olmoe, 6)
    assert model.run(2) == [6, 6]
    model.readings.count = LITTLE
    assert model.run(1) == [4]
    model.readings.count = MUCH
    assert model.run(6) == [4, 4, 4, 5, 5, 5]
    model.readings.count = LITTLE
    assert model.run(4) == [3, 2, CHOSEN, CHOSEN]
    assert model.is_as_whole()
    report = model.engine.run_report()["slots"]
    assert (report["slots"], report["initial"], report["experts"]) == (CHOSEN, 6, EXPERTS)
    model.engine.begin_run()  # another one may find more
    assert model.engine.run_report()["slots"]["initial"] == CHOSEN
    model.readings.count = MUCH
    course = model.run(24)
    assert course[:4] == [2, 2, 2, 3] and course[-1] == EXPERTS - 1
    assert model.is_as_whole()


def test_memory_is_not_looked_at_before_each_step(olmoe: Path, monkeypatch) -> None:
    monkeypatch.setattr(pressure, "CHECK_TOKENS", 3)
    model = Watched(olmoe, 6)
    model.readings.count = LITTLE
    assert model.run(7) == [4, 4, 4, 3, 3, 3, CHOSEN]


def test_experts_that_are_all_there_leave_too(olmoe: Path) -> None:
    """Nothing is read for it; a token that wants one that stayed finds it."""
    model = Watched(olmoe)
    assert model.run(2) == [EXPERTS, EXPERTS] and not model.engine.holdings.slots.layers
    store = model.engine.holdings.store
    before = store.reader.bytes_read
    model.readings.count = LITTLE
    model.engine.decide(NO_WISH)
    assert store.reader.bytes_read == before
    layers = model.engine.holdings.slots.layers
    assert [layer.table.held for layer in layers] == [[2, 3, 4, 5, 6, 7]] * len(layers)
    assert model.run(3)[-1] < 6
    counted = model.engine.run_report()["slots"]
    assert counted["hit"] > 0 and model.is_as_whole()
    model.readings.count = MUCH
    assert max(model.run(40)) < 6


def test_what_stays_is_what_would_leave_last(olmoe: Path) -> None:
    model = Watched(olmoe, 6)
    model.run(5)
    [before, *_] = model.engine.holdings.slots.layers
    held, uses = before.table.held, np.array(before.table.uses)
    model.readings.count = LITTLE
    model.engine.decide(NO_WISH)
    [after, *_] = model.engine.holdings.slots.layers
    assert set(after.table.held) < set(held) and len(after.table.held) == 4
    assert min(uses[after.table.held]) >= max(uses[[e for e in held if e not in after.table]])


def test_a_warning_leaves_the_least(olmoe: Path) -> None:
    """Also of a number or a size, which otherwise never changes."""
    auto = Watched(olmoe, 6)
    size = auto.policy.sizes.slot_bytes()
    for options in (None, SlotOptions("slots", 6), SlotOptions("bytes", 6 * size)):
        model = auto if options is None else Watched(olmoe, options=options)
        assert model.run(2) == [6, 6]
        if options is not None:
            model.readings.count = 0
            assert model.run(3) == [6, 6, 6]
        warn_of_memory(model.engine.policies)
        assert model.run(1) == [CHOSEN]
        model.readings.count = MUCH
        course = model.run(3 if options else 30)
        assert set(course) == ({CHOSEN} if options else {2, 3, 4, 5})
        assert model.is_as_whole()
    model = Watched(olmoe, options=SlotOptions("slots", 99))
    warn_of_memory(model.engine.policies)
    assert model.run(1) == [CHOSEN] and model.is_as_whole()


# ------------------------------------------------------------------------------ what goes with it


@pytest.mark.parametrize("name", ["qwen3_moe_quantised", "gpt_oss", "deepseek"])
def test_other_checkpoints(tmp_path: Path, name: str) -> None:
    """Quantised, with biases, with a layer that has no experts."""
    path = tmp_path / name
    model = Watched(deepseek(path) if name == "deepseek" else write_published(path, name))
    model.readings.count = LITTLE
    assert model.run(1) == [6]
    model.readings.count = MUCH
    assert model.run(5)[-1] == 7 and model.is_as_whole()


def test_slots_in_a_gear(olmoe: Path) -> None:
    """Bytes are given up, whatever the gear, and least is least in any."""
    model = Watched(olmoe, 3, gears=GearOptions("low", "all"))
    low = Wish("low")
    first = model.run(2, low)[-1]
    model.readings.count = pressure.CRITICAL - 1
    assert model.run(2, low) == [CHOSEN, CHOSEN] and first > 3
    assert model.is_as_whole(low)
    model.engine.shift("high")
    layers = model.engine.holdings.slots.layers
    assert {layer.table.slots for layer in layers} == {CHOSEN}
    agrees(model.engine)


def test_what_was_too_much_in_a_gear_is_too_much_in_it(olmoe: Path) -> None:
    """Whatever another gear, of smaller slots, has found room for since."""
    model = Watched(olmoe, 6, gears=GearOptions("auto", "all"))
    mid, high = Wish("mid"), Wish("high")
    model.run(1, high)
    model.readings.count = LITTLE
    assert model.run(1, high) == [4]
    model.readings.count = pressure.LOW
    assert model.run(1, mid) == [EXPERTS]  # all of them are less
    model.policy._amount = 7 * model.policy.sizes.slot_bytes()  # as if it had grown there
    assert model.run(1, high) == [5]
    model.engine.begin_run()
    model.run(1, mid)
    assert model.run(1, high) == [7]


def test_layers_that_come_and_go(tmp_path: Path) -> None:
    """Experts in slots and layers give way to the same shortage. Where a layer has all its experts
    these are the layer's, and no slot's."""
    path = write_published(tmp_path / "next", "qwen3_next")
    auto = ResidencyOptions("auto")
    model = Watched(path, 6, residency=auto)
    model.run(1)
    model.readings.count = LITTLE
    assert model.run(2)[-1] == 3 and model.is_as_whole()
    resident = model.engine.residency
    assert resident is not None and len(resident.resident) < resident.layers
    warn_of_memory(model.engine.policies)
    assert model.run(1) == [CHOSEN] and not resident.resident and model.is_as_whole()
    model = Watched(path, residency=auto)
    warn_of_memory(model.engine.policies)
    assert model.run(2) == [EXPERTS] * 2 and model.is_as_whole()
    budget = Watched(path, residency=ResidencyOptions("bytes", 64 << 20))
    budget.readings.count = 0  # which is not asked: the budget is all there is
    assert budget.run(2) == [EXPERTS] * 2


def test_mobile_and_what_is_foreseen(olmoe: Path) -> None:
    model = Watched(
        olmoe, 6, options=SlotOptions(prefetch="2"), experts=ExpertsOptions("mobile", 1)
    )
    model.run(2)
    model.readings.count = LITTLE
    model.run(2)
    model.readings.count = MUCH
    assert model.run(6)[-1] > 2 and model.is_as_whole()


def test_rows_of_a_batch(olmoe: Path) -> None:
    found = []
    for short in (False, True):
        model = Watched(olmoe, 6)
        batch, other = Batch(model.engine), read(model.engine, PROMPT)
        start = model.readings.count
        batch.join([model.state, other])
        for n in range(4):
            model.readings.count = LITTLE if short and n == 2 else start
            batch.step([TOKENS[n], TOKENS[n + 1]])
            mx.eval(model.state.logits, other.logits)
            found += [model.state.logits, other.logits]
        assert model.policy.report()["slots"] == (4 if short else 6)
    assert alike(found[:8], found[8:])


def test_what_a_model_holds_is_room_for_it(olmoe: Path) -> None:
    model, held = Watched(olmoe, 6), 0
    rooms = []
    for engine in (model._made(), model.engine):
        [policy] = engine.policies
        model.readings.count -= engine.ledger.total()
        rooms.append(policy._room.size())
        held = engine.ledger.total()
    assert rooms[0] == rooms[1] > 0 and held > MIB


@pytest.mark.parametrize("residency", [None, ResidencyOptions("layers", 1)])
def test_files_leave_the_cache_that_cannot_hold_what_is_read_again(
    olmoe: Path, residency: ResidencyOptions | None
) -> None:
    """Half of the memory: when the model is loaded, and when slots are given up. Counted from the
    files' headers: experts without a slot, and all else in layers that come and go."""
    entries = [item for header in locate(str(olmoe)).headers for item in header.entries.items()]
    experts = sum(entry.nbytes for name, entry in entries if ".experts." in name)
    gone = [item for item in entries if ".layers." in item[0] and ".layers.0." not in item[0]]
    others = sum(entry.nbytes for name, entry in gone if ".experts." not in name)
    away = [experts * (EXPERTS - n) // EXPERTS + (others if residency else 0) for n in (6, CHOSEN)]
    model = Watched(olmoe, options=SlotOptions("slots", 6), residency=residency)
    cases = [(2 * away[0], [False] * 2), (2 * away[0] + 2, [True, False])]
    for free, expected in [*cases, (2 * away[1] + 2, [True, True])]:
        model.readings.count = free
        engine = model._made(SlotOptions("slots", 6))
        store = engine.holdings.store
        engine.load()
        assert (not engine.holdings.streams.layers) == (not residency)
        found = [store.keeps_cached]
        model.policy.memory_warning()  # which is not told to where layers stay
        engine.decide(NO_WISH)
        assert [*found, store.keeps_cached] == expected
        engine.close()


def test_memory_is_given_back() -> None:
    """What MLX holds falls with the account; meanwhile it is more by the new slots of a matrix."""
    for thread in threading.enumerate():
        if thread.name == "reader":  # of an engine of another test, which lives as long
            thread.join(10)
    model = Watched("crumb", 12)
    model.run(1)
    gc.collect()
    mx.clear_cache()
    active, held = mx.get_active_memory(), model.engine.ledger.total()
    mx.reset_peak_memory()
    model.readings.count = pressure.CRITICAL - 1
    model.engine.decide(NO_WISH)
    size = model.engine.holdings.slots.layers[0].memory.expert_bytes
    gone = held - model.engine.ledger.total()
    assert gone == 8 * (12 - 4) * size
    assert abs(active - mx.get_active_memory() - gone) < MIB / 4
    assert mx.get_peak_memory() - active < 4 * size // 3 + 4096 and mx.get_cache_memory() < MIB
    assert model.is_as_whole()


@pytest.mark.parametrize("start", [6, None])
def test_what_fails_leaves_slots_that_can_be_used(
    olmoe: Path, monkeypatch: pytest.MonkeyPatch, start: int | None
) -> None:
    """Between two matrices of the second layer, of which the first has fewer slots now."""
    model = Watched(olmoe, start)
    model.run(3)
    real, calls = Holding.in_slots, []

    def failing(self: Holding, *rest: Any) -> Any:
        calls.append(self)
        if len(calls) == 5:
            raise MemoryError
        return real(self, *rest)

    monkeypatch.setattr(Holding, "in_slots", failing)
    left = model.readings.count
    model.readings.count = LITTLE
    with pytest.raises(MemoryError):
        model.engine.decide(NO_WISH)
    counts = [layer.table.slots for layer in model.engine.holdings.slots.layers]
    assert counts == ([4, 4] if start else [6])
    model.readings.count = left
    # As they are, without another decision.
    state = read(model.engine, PROMPT)
    monkeypatch.setattr(model.policy, "decide", lambda wish: False)
    assert mx.array_equal(state.logits, read(whole(olmoe, None), PROMPT).logits).item()
    monkeypatch.undo()
    monkeypatch.setattr(pressure, "CHECK_TOKENS", 1)
    model.readings.count = LITTLE
    assert model.run(1)[0] < 6  # in each layer, now that memory is short again
    assert model.is_as_whole()
