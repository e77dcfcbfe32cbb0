"""Experts that are read ahead: what routers say when they are asked, what becomes of what they say,
and that it never changes a result."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import examples
from tests.model.checkpoints import read
from tests.model.published import write_published
from tests.model.test_expert_slots import CHOSEN, EXPERTS, NEXT, PROMPT, answer, opened
from tests.model.test_streaming import alike
from toastkit.engine.engine import Engine
from toastkit.engine.state import ModelState
from toastkit.errors import UsageError
from toastkit.experts.experts_options import ExpertsOptions
from toastkit.holdings.foresight import MAX_AHEAD, Places
from toastkit.holdings.layer_slots import LayerSlots
from toastkit.holdings.slot_memory import SlotMemory
from toastkit.residency.residency_options import ResidencyOptions
from toastkit.store import raw
from toastkit.store.direct import PAGE
from toastkit.store.waiting import AHEAD

NAMES = ("olmoe", "qwen3_next", "gpt_oss")
SECONDS = 60  # for what would otherwise wait for ever


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("foresight")
    return {name: write_published(folder / name, name) for name in NAMES}


def stepped(engine: Engine, token: int = 7) -> ModelState:
    """A state after a prompt and a step."""
    state = read(engine, PROMPT)
    engine.consume(state, token)
    mx.eval(state.logits)
    return state


def choices_of(engine: Engine) -> dict[int, set[int]]:
    return {n: set(layer.choice) for n, layer in enumerate(engine.holdings.slots.layers)}


@pytest.mark.parametrize("name", NAMES)
def test_routers_say_what_they_chose(models, name: str) -> None:
    engine = opened(models[name], 3)
    foresight = engine.holdings.slots.foresight
    assert foresight.last_choices() == {}  # nobody watches
    foresight.watch()
    stepped(engine)
    told = foresight.last_choices()
    assert {place: set(experts) for place, experts in told.items()} == choices_of(engine)
    assert all(len(experts) == CHOSEN for experts in told.values())


def test_a_step_with_few_experts_names_those_of_the_whole(models) -> None:
    """All of the first layer, which sees the same; with those that the few had among them."""
    engine = opened(models["olmoe"], 4)
    slots = engine.holdings.slots
    slots.foresight.watch()
    blocks = [layer.switch.block for layer in slots.layers]
    for block in blocks:
        block.top_k = 1
    stepped(engine)
    few = choices_of(engine)
    for block in blocks:
        block.top_k = CHOSEN
    told = slots.foresight.last_choices()
    assert all(len(told[place]) == CHOSEN and few[place] <= set(told[place]) for place in few)
    whole = opened(models["olmoe"], 4)
    for block in (layer.switch.block for layer in whole.holdings.slots.layers):
        block.top_k = 1
    state = read(whole, PROMPT)
    for block in (layer.switch.block for layer in whole.holdings.slots.layers):
        block.top_k = CHOSEN
    whole.consume(state, 7)
    assert set(told[0]) == choices_of(whole)[0]


def test_what_is_told_is_there_when_it_is_wanted(models) -> None:
    """Right, wrong, or for layers that there are not: counted, and the results are the same."""
    plain = opened(models["olmoe"], CHOSEN)
    stepped(plain, 7)
    wanted = choices_of(plain)
    wrong = {n: sorted(set(range(EXPERTS)) - some)[:CHOSEN] for n, some in wanted.items()}
    for told, depth in ((wanted, 1), (wanted, MAX_AHEAD), (wrong, 2), ({99: [0]}, 1)):
        engine = opened(models["olmoe"], CHOSEN)
        slots = engine.holdings.slots
        state = read(engine, PROMPT)
        before = slots.counts.as_map()
        slots.foresight.tell({n: list(some) for n, some in told.items()}, depth)
        engine.consume(state, 7)
        mx.eval(state.logits)
        now = slots.counts.as_map()
        counted = {name: now[name] - before[name] for name in now}
        assert choices_of(engine) == wanted
        if told is wanted:
            assert counted["hit"] == counted["wanted"] and counted["right"] == counted["ahead"]
        else:
            assert counted["right"] == 0
        engine.consume(state, 8)  # nothing is told of this one
        assert slots.counts.ahead == now["ahead"]


def test_what_is_wanted_a_pass_later_was_not_foreseen(models) -> None:
    """An expert that was read for a step which does not want it, and is wanted by another."""
    plain = opened(models["olmoe"], EXPERTS - 1)
    state, wanted = read(plain, PROMPT), []
    for token in NEXT:
        plain.consume(state, token)
        mx.eval(state.logits)
        wanted.append(choices_of(plain)[0])
    later = next(n for n, some in enumerate(wanted) if some - wanted[0])
    engine = opened(models["olmoe"], EXPERTS - 1)
    slots, state = engine.holdings.slots, read(engine, PROMPT)
    [expert, *_] = wanted[later] - wanted[0]
    if expert in slots.layers[0].table:
        slots.layers[0].drop(expert)
    slots.foresight.tell({0: [expert]}, 1)
    while not slots.settle():
        time.sleep(0.001)
    for token in NEXT[: later + 1]:
        engine.consume(state, token)
        mx.eval(state.logits)
    assert (slots.counts.ahead, slots.counts.right) == (1, 0)


@pytest.mark.parametrize("name", ["olmoe", "qwen3_next"])
def test_an_evicted_pass_names_the_experts_of_the_big_one(models, name: str) -> None:
    """And of no other: the results are those of a whole model."""
    path = models[name]
    expected = {gamma: answer(opened(path, experts=ExpertsOptions("mobile", gamma))) for gamma in
                (0.0, 1.0)}  # fmt: skip
    assert alike(expected[1.0], answer(opened(path)))
    for gamma in (1.0, 0.0):
        engine = opened(path, CHOSEN + 1, experts=ExpertsOptions("mobile", gamma))
        assert engine.experts is not None
        assert alike(answer(engine), expected[gamma])
        counts = engine.holdings.slots.counts
        assert engine.experts.fallbacks == (len(NEXT) if gamma else 0)
        seconds = engine.run_report()["experts"]["seconds"]
        assert (seconds["again"] is not None) == bool(gamma)  # they read, and are timed apart
        if gamma:
            assert counts.ahead > 0 and counts.right > counts.ahead / 2
        else:
            assert counts.ahead == 0


def test_routers_of_layers_ahead_are_asked(models) -> None:
    path = models["qwen3_next"]
    plain = opened(path, 3)
    expected = answer(plain)
    assert plain.run_report()["slots"]["ahead"] == 0
    for depth in ("1", "3", "auto"):
        engine = opened(path, 3, prefetch=depth)
        assert alike(answer(engine), expected)
        report = engine.run_report()["slots"]
        assert 0 < report["right"] <= report["ahead"]
        assert any(engine.holdings.slots.foresight._places._right.values())  # and compared


def test_the_next_layer_is_asked_for_before_this_one_is_waited_for(models, monkeypatch) -> None:
    """So the disk has something to do while the last of this one comes."""
    engine = opened(models["olmoe"], CHOSEN, prefetch="1")
    state, seen, compared = stepped(engine), [], 0
    begin, finish = SlotMemory.begin, SlotMemory.finish

    def begun(memory, experts, slots, priority):
        seen.append((memory, priority))
        return begin(memory, experts, slots, priority)

    def finished(memory, fetch):
        seen.append((memory, "finish"))
        finish(memory, fetch)

    monkeypatch.setattr(SlotMemory, "begin", begun)
    monkeypatch.setattr(SlotMemory, "finish", finished)
    memories = [layer.memory for layer in engine.holdings.slots.layers]
    for token in range(8, 16):
        seen.clear()
        engine.consume(state, token)
        mx.eval(state.logits)
        for here, there in zip(memories, memories[1:]):
            if (there, AHEAD) in seen and (here, "finish") in seen:
                compared += 1
                assert seen.index((there, AHEAD)) < seen.index((here, "finish"))
    assert compared


@settings(max_examples=examples(10))
@given(st.data())
def test_what_was_right_most_often_is_read_first(data: st.DataObject) -> None:
    """Whatever a choice is like; and it stays the same experts."""
    places, k = Places(), data.draw(st.integers(1, 6))
    best, often = data.draw(st.integers(0, k - 1)), data.draw(st.integers(2, 4))
    draws = st.lists(st.permutations(range(8)), min_size=40, max_size=40)
    for n, drawn in enumerate(data.draw(draws)):
        choice = drawn[:k]
        assert sorted(places.ordered(choice)) == sorted(choice)
        places.note(choice, {choice[best]} if n % often else choice)
        places.note([*choice, 9], [9])  # of another K
    assert places.ordered(choice)[0] == choice[best]


def slow(engine: Engine, monkeypatch, wait: Callable[[], object]) -> None:
    """Experts are read ahead a page at a time, and each read ends with a wait."""
    files = engine.holdings.store._raw
    read = files._pread

    def waiting(fd: int, views: list[memoryview], start: int) -> int:
        count = read(fd, views, start)
        wait()
        return count

    monkeypatch.setattr(files, "_pread", waiting)
    monkeypatch.setattr(raw, "CALL_SECONDS", 0)
    monkeypatch.setattr(raw, "MIN_CALL_BYTES", PAGE)


def test_what_was_foreseen_wrongly_is_left_off(models, monkeypatch) -> None:
    """In the middle of an expert; what was read of it is counted, and it is in no slot."""
    plain = opened(models["olmoe"], CHOSEN)
    stepped(plain, 7)
    engine = opened(models["olmoe"], 4)
    state, first = read(engine, PROMPT), engine.holdings.slots.layers[0]
    wrong = min(set(range(EXPERTS)) - set(first.table.held) - choices_of(plain)[0])
    known, leave_off = threading.Event(), LayerSlots.leave_off

    def leaving(layer: LayerSlots, wanted: Sequence[int]) -> list[int]:
        left = leave_off(layer, wanted)
        assert left == [wrong] * (layer is first)
        known.set()
        return left

    monkeypatch.setattr(LayerSlots, "leave_off", leaving)
    begun, counts = threading.Event(), engine.holdings.slots.counts

    def wait() -> None:
        begun.set()
        known.wait(SECONDS)

    slow(engine, monkeypatch, wait)
    before = counts.as_map()
    engine.holdings.slots.foresight.tell({0: [wrong]}, 1)
    assert begun.wait(SECONDS)
    engine.consume(state, 7)
    mx.eval(state.logits)
    counted = {name: value - before[name] for name, value in counts.as_map().items()}
    assert counted["ahead"] == 1 and counted["right"] == 0 and wrong not in first.table
    missed = (counted["wanted"] - counted["hit"]) * first.memory.read_bytes
    assert 0 < counted["read"] - missed < first.memory.read_bytes


@settings(max_examples=examples(6), deadline=None)
@given(data=st.data())
def test_whatever_was_foreseen_and_wherever_its_reading_is(models, data: st.DataObject) -> None:
    with pytest.MonkeyPatch.context() as patch:
        count = data.draw(st.integers(CHOSEN, 5))
        engine, whole = opened(models["olmoe"], count), opened(models["olmoe"])
        state, other = stepped(engine), stepped(whole)
        slots, reader = engine.holdings.slots, engine.holdings.store.reader
        slow(engine, patch, lambda: time.sleep(0.0005))
        read = slots.counts.read - reader.bytes_read
        for token in data.draw(st.lists(st.integers(0, 300), min_size=1, max_size=4)):
            for layer in slots.layers:
                experts = st.lists(st.integers(0, EXPERTS - 1), max_size=4, unique=True)
                slots.prefetch(layer, data.draw(experts))
            engine.consume(state, token)
            whole.consume(other, token)
            assert mx.array_equal(state.logits, other.logits).item()
        slots.forget_ahead()
        assert slots.counts.read - reader.bytes_read == read


def test_what_comes_and_goes_is_not_asked(models) -> None:
    path = models["qwen3_next"]
    engine = opened(path, 3, prefetch="1", residency=ResidencyOptions("layers", 0))
    assert alike(answer(engine), answer(opened(path)))
    assert engine.run_report()["slots"]["ahead"] == 0
    assert engine.holdings.slots.foresight.last_choices() == {}


def test_routers_that_cannot_be_asked(models, monkeypatch) -> None:
    from mlx_lm.models import olmoe

    block = olmoe.OlmoeSparseMoeBlock
    plain = block.__call__
    monkeypatch.setattr(block, "__call__", lambda self, x, mask=None: plain(self, x))
    opened(models["olmoe"], 3)
    with pytest.raises(UsageError, match="the routers of .* cannot be asked ahead"):
        opened(models["olmoe"], 3, prefetch="1")
