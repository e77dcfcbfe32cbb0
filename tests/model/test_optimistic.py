"""Steps that take experts for granted: results are those of a whole model to the bit, whatever is
missing and whatever lies in its place; what is counted; when they are run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.model.checkpoints import read
from tests.model.moe_engines import arrays, read_once, same
from tests.model.published import write_published
from tests.model.test_expert_slots import CHOSEN, EXPERTS, NEXT, PROMPT, Lazily, opened
from tests.model.test_streaming import alike
from tests.model.test_streaming_failures import Disk
from toastkit.engine.batch import Batch
from toastkit.engine.engine import Engine
from toastkit.engine.state import ModelState
from toastkit.errors import DataError, IOFailure
from toastkit.experts.experts_options import ExpertsOptions
from toastkit.gears.gear_options import GearOptions
from toastkit.holdings.expert_slots import ExpertSlots
from toastkit.holdings.optimistic import FIRST_PATIENCE, MAX_PATIENCE, OptimisticSteps
from toastkit.holdings.policy import NO_WISH, Wish
from toastkit.residency.residency_options import ResidencyOptions

NAMES = ("qwen2_moe", "qwen3_moe_quantised", "qwen3_next", "gpt_oss")
SLOTS = (EXPERTS - 1, CHOSEN, 5, CHOSEN + 1)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("optimistic")
    return Lazily(lambda name: write_published(folder / name, name))


@pytest.fixture(scope="module")
def whole(models) -> dict[str, Engine]:
    return Lazily(lambda name: opened(models[name]))


def hopeful(engine: Engine) -> OptimisticSteps:
    """Makes all steps optimistic, however often they miss."""
    optimistic = engine.holdings.slots.optimistic
    optimistic.trusts, optimistic.note = True, lambda found: None
    return optimistic


def spoil(engine: Engine, lost: Callable[[int, int], bool]) -> None:
    """Empties the slots of experts that are lost(layer, expert), and fills all empty ones with
    NaN."""
    slots = engine.holdings.slots
    slots.forget_ahead()
    for place, layer in enumerate(slots.layers):
        for expert in [one for one in layer.table.held if lost(place, one)]:
            layer.drop(expert)
        free = sorted(set(range(layer.table.slots)) - set(layer.table.of.tolist()))
        for holding in layer.switch.stacks:
            for array in holding.module.values():
                mx.eval(array)
                rows = np.array(array.view(mx.uint8), copy=False)
                rows[free] = 0xFF  # NaN in all that is a float
                assert not rows.flags.owndata


def steps(engine: Engine, tokens: Sequence[int], wish: Wish = NO_WISH) -> tuple[list, ModelState]:
    """Logits of steps after the prompt, and the state."""
    state, found = read(engine, PROMPT), []
    for token in tokens:
        engine.consume(state, token, wish)
        found.append(state.logits)
    mx.eval(found)
    return found, state


# -------------------------------------------------------------------------------- to the bit


@pytest.fixture(scope="module")
def few_slots(models) -> dict[str, Engine]:
    """Engines whose steps are all optimistic, each with another number of slots."""

    def made(name: str) -> Engine:
        engine = opened(models[name], SLOTS[NAMES.index(name)])
        hopeful(engine)
        return engine

    return Lazily(made)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=4, deadline=None)
@given(data=st.data())
def test_nothing_of_a_miss_is_left(few_slots, whole, name: str, data: st.DataObject) -> None:
    """Whichever experts are there, and with NaN where there are none: logits and states are those
    of a model that is whole."""
    engine = few_slots[name]
    state, plain = (read_once(one, PROMPT) for one in (engine, whole[name]))
    for token in data.draw(st.lists(st.integers(0, 300), min_size=1, max_size=5), label="tokens"):
        lost = data.draw(st.sets(st.tuples(st.integers(0, 3), st.integers(0, EXPERTS - 1))))
        spoil(engine, lambda place, expert, lost=lost: (place, expert) in lost)
        made = token if data.draw(st.booleans()) else mx.array(token, mx.uint32)
        engine.consume(state, made)
        whole[name].consume(plain, token)
        assert alike([state.logits], [plain.logits])
    assert same(arrays(state.cache), arrays(plain.cache))


def test_a_step_that_misses_all(models, whole) -> None:
    """Of slots in which there are but NaN: these are its logits, and nobody's after it."""
    engine = opened(models["qwen2_moe"], EXPERTS - 1)
    optimistic, state = hopeful(engine), read(engine, PROMPT)
    looked: list[mx.array] = []
    look = optimistic.look
    optimistic.look = lambda logits: looked.append(logits) or look(logits)
    counts = engine.holdings.slots.counts
    before = counts.optimistic, counts.retried
    spoil(engine, lambda *_: True)
    engine.consume(state, 7)
    assert len(looked) == 1 and bool(mx.isnan(looked[0]).all().item())
    plain = read_once(whole["qwen2_moe"], PROMPT)
    whole["qwen2_moe"].consume(plain, 7)
    assert alike([state.logits], [plain.logits])
    assert (counts.optimistic, counts.retried) == (before[0] + 1, before[1] + 1)


@pytest.mark.parametrize("name", ["qwen3_next", "gpt_oss"])
def test_rows_of_a_batch(models, whole, name: str) -> None:
    found = []
    for engine in (opened(models[name], 6), whole[name]):
        states, batch = [read(engine, PROMPT[:n]) for n in (6, 9, 12)], Batch(engine)
        if engine is not whole[name]:
            hopeful(engine)
        batch.join(states)
        for token in (3, 4, 5):
            if engine is not whole[name]:
                spoil(engine, lambda place, expert, token=token: expert == token)
            batch.step([token, token + 1, token + 2])
        counts = engine.holdings.slots.counts
        logits = [state.logits for state in states]
        batch.leave(states)
        found.append((logits, [arrays(state.cache) for state in states], counts))
    assert alike(found[0][0], found[1][0])
    assert all(same(a, b) for a, b in zip(found[0][1], found[1][1]))
    assert found[0][2].optimistic == 3 and found[0][2].retried > 0


@pytest.mark.parametrize("gamma", [0.0, 0.022, 1.0])
def test_big_and_little(models, gamma: float) -> None:
    """The little pass too, whether it is kept or not."""
    found = []
    for amount in (5, None):
        engine = opened(models["olmoe"], amount, experts=ExpertsOptions("mobile", gamma))
        if amount is not None:
            hopeful(engine)
        logits, state = steps(engine, NEXT)
        report = engine.run_report()["experts"]
        found.append((logits, arrays(state.cache), (report["steps"], report["fallbacks"])))
        if amount is not None:
            assert engine.run_report()["slots"]["optimistic"] >= len(NEXT)
    assert alike(found[0][0], found[1][0]) and same(found[0][1], found[1][1])
    assert found[0][2] == found[1][2]


def test_gears(models) -> None:
    found = []
    for amount in (6, None):
        engine = opened(models["qwen2_moe"], amount, gear_options=GearOptions("auto", "all"))
        hopeful(engine)
        found.append([steps(engine, NEXT, Wish(gear))[0] for gear in ("low", "high", "low")])
    assert all(alike(a, b) for a, b in zip(*found))


def test_two_states_in_turn(models, whole) -> None:
    """A careful step of one that nobody has evaluated, and an optimistic one of the other."""
    found = []
    for engine in (opened(models["qwen2_moe"], CHOSEN), whole["qwen2_moe"]):
        states, logits = [read(engine, PROMPT), read(engine, PROMPT)], []
        for n, (a, b) in enumerate(zip(NEXT, reversed(NEXT))):
            for state, token in zip(states, (a, b)):
                engine.holdings.slots.optimistic.trusts = (n + (state is states[0])) % 2 == 0
                engine.consume(state, token)
                logits.append(state.logits)
        found.append(logits)
    assert alike(*found)


# ------------------------------------------------------------------------------ what is counted


def one_token(engine: Engine, count: int, token: int = 7) -> ModelState:
    """The same step, again and again, of which all is there from the second time on."""
    state = read(engine, PROMPT)
    for _ in range(count):
        twin = ModelState(engine.new_cache())
        engine.consume(twin, token)
        mx.eval(twin.logits)
    return state


def test_a_choice_is_not_read_back(models, monkeypatch) -> None:
    """Once a step finds all, for as long as it took to see that, layers run without waiting; what
    they want is counted as ever."""
    engine, careful = opened(models["olmoe"], 6), opened(models["olmoe"], 6)
    careful.holdings.slots.optimistic.is_due = lambda: False
    waited: list[Any] = []
    run = ExpertSlots.run
    monkeypatch.setattr(
        ExpertSlots, "run", lambda self, *rest: waited.append(self) or run(self, *rest)
    )
    layers = 0
    for count in range(1, 3 * FIRST_PATIENCE):
        for one in (engine, careful):
            one_token(one, 1) if count == 1 else one.consume(ModelState(one.new_cache()), 7)
        layers = len(engine.holdings.slots.layers)
        if count == FIRST_PATIENCE + 1:
            before = waited.count(engine.holdings.slots)
    assert waited.count(engine.holdings.slots) == before
    slots, others = engine.holdings.slots, careful.holdings.slots
    assert slots.counts.optimistic == 2 * FIRST_PATIENCE - 2 and slots.counts.retried == 0
    told, plain = slots.counts.as_map(), others.counts.as_map()
    assert {n: told[n] for n in ("wanted", "hit", "passes", "read")} == {
        n: plain[n] for n in ("wanted", "hit", "passes", "read")
    } and told["wanted"] >= layers * CHOSEN
    for mine, theirs in zip(slots.layers, others.layers):
        assert mine.choice == theirs.choice and mine.table.held == theirs.table.held
        assert mine.table.uses == theirs.table.uses


def test_what_was_missed_is_read_ahead(models) -> None:
    engine = opened(models["olmoe"], EXPERTS - 1)
    hopeful(engine)
    state = read(engine, PROMPT)
    counts = engine.holdings.slots.counts
    before = counts.as_map()
    spoil(engine, lambda *_: True)
    engine.consume(state, 7)
    now = {name: value - before[name] for name, value in counts.as_map().items()}
    layers = len(engine.holdings.slots.layers)
    assert now["retried"] == 1 and now["ahead"] >= layers and now["right"] >= CHOSEN
    assert now["wanted"] == now["passes"] * CHOSEN == layers * CHOSEN
    assert state.experts == {"wanted": now["wanted"], "hit": now["hit"]}


# ----------------------------------------------------------------------------------------- when


@given(found=st.lists(st.booleans(), max_size=400))
def test_patience(found: list[bool]) -> None:
    """Doubles with each vain hope, so that these become rare; and what misses often never hopes."""
    steps = OptimisticSteps(None)  # type: ignore[arg-type]
    vain = 0
    row = 0
    for one in found:
        before = steps.trusts, steps.patience
        vain += steps.trusts and not one
        steps.note(one)
        row = row + 1 if one else 0
        assert 1 <= steps.patience <= MAX_PATIENCE
        if steps.patience != before[1]:
            assert before[0] and not one
        assert not steps.trusts or (before[0] and one) or row >= before[1] // 2
    if max(map(len, "".join("x" if one else " " for one in found).split()), default=0) < 8:
        assert not vain and not steps.trusts


@pytest.mark.parametrize("row", [1, FIRST_PATIENCE - 1])
def test_steps_that_miss_are_careful(row: int) -> None:
    steps = OptimisticSteps(None)  # type: ignore[arg-type]
    for _ in range(50):
        for found in [True] * row + [False]:
            assert not steps.trusts
            steps.note(found)


def test_layers_that_come_and_go_are_careful(models, whole) -> None:
    engine = opened(models["qwen3_next"], 5, residency=ResidencyOptions("layers", 0))
    hopeful(engine)
    assert alike(steps(engine, NEXT)[0], steps(whole["qwen3_next"], NEXT)[0])
    assert engine.holdings.slots.counts.optimistic == 0


# ------------------------------------------------------------------------------------- failures


@pytest.mark.parametrize("name", ["olmoe", "qwen3_next"])
def test_a_second_run_that_fails_leaves_the_state_as_it_was(
    models, whole, name: str, disk: Disk
) -> None:
    engine = opened(models[name], EXPERTS - 2)
    optimistic, state, plain = hopeful(engine), read(engine, PROMPT), read_once(whole[name], PROMPT)
    before, held = arrays(state.cache), list(state.tokens)
    spoil(engine, lambda *_: True)
    disk.left = 3
    with pytest.raises(IOFailure, match="the disk is broken"):
        engine.consume(state, 9)
    disk.left = None
    assert state.tokens == held and same(arrays(state.cache), before)
    assert not optimistic.is_running and engine.holdings.slots.counts.retried >= 1
    engine.consume(state, 9)
    whole[name].consume(plain, 9)
    assert alike([state.logits], [plain.logits])
    assert same(arrays(state.cache), arrays(plain.cache))


def test_what_cannot_be_evaluated_leaves_the_state_as_it_was(models, monkeypatch) -> None:
    engine = opened(models["qwen3_next"], EXPERTS - 1)
    optimistic, state = hopeful(engine), read(engine, PROMPT)
    before = arrays(state.cache)

    def fails(logits: mx.array) -> bool:
        mx.eval(logits)
        raise RuntimeError("the device is lost")

    monkeypatch.setattr(optimistic, "look", fails)
    with pytest.raises(RuntimeError, match="the device is lost"):
        engine.consume(state, 9)
    assert same(arrays(state.cache), before)


def test_files_that_change_are_noticed(tmp_path: Path) -> None:
    """What was read ahead of them counts for nothing."""
    path = write_published(tmp_path / "olmoe", "olmoe")
    engine = opened(path, EXPERTS - 1)
    hopeful(engine)
    state, layer = read(engine, PROMPT), engine.holdings.slots.layers[0]
    lost = layer.table.held[0]
    layer.drop(lost)
    file = next(path.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-65536] + bytes(65536))
    engine.holdings.slots.prefetch(layer, [lost])
    while engine.holdings.slots.is_reading:
        pass
    held = list(state.tokens)
    with pytest.raises(DataError, match="have changed since the model was loaded"):
        engine.consume(state, 9)
    assert state.tokens == held and lost not in layer.table
