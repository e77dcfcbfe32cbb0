"""States resumed at a savepoint: a recurrent state or a full window goes on as if never saved."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache

from tests.model.checkpoints import open_model
from tests.model.published import write_published
from toastkit.errors import DataError
from toastkit.session.directory import Session
from toastkit.session.savepoints import Savepoint

MODEL = "ab" * 32
PROMPT = [(37 * n + 5) % 4096 for n in range(50)]
BRANCH = [*PROMPT[:35], *((11 * n + 1) % 4096 for n in range(12))]  # shares 35 tokens
CHUNKED = 1e-3  # of the largest logit, between prompts that were read in other chunks


def snapshot(cache: list, count: int) -> Savepoint:
    """Copies of all layers as they are now, what can be cut back included."""
    return Savepoint(count, copy.deepcopy(cache))


def bare(cache: list, count: int) -> Savepoint:
    """The same without the layers that can always be cut back."""
    return Savepoint(count, [None if type(x) is KVCache else copy.deepcopy(x) for x in cache])


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory, mlx_started) -> Callable:
    """Random models by architecture, each made once."""
    folder = tmp_path_factory.mktemp("published")
    return cache(lambda name: open_model(write_published(folder / name, name)))


def read(engine, cache: list, ids: list[int]) -> np.ndarray:
    return np.array(engine.prefill(ids, cache))


@pytest.mark.parametrize(
    ("name", "take"),
    [("qwen3_next", bare), ("gemma3_text", snapshot), ("falcon_h1", snapshot), ("gpt_oss", bare)],
)
def test_a_prompt_that_parts_from_the_history(
    tmp_path: Path, engines: Callable, name: str, take: Callable
) -> None:
    engine = engines(name)
    live = engine.new_cache()
    read(engine, live, PROMPT[:30])
    twin, point = copy.deepcopy(live), take(live, 30)
    logits = read(engine, live, PROMPT[30:])
    with Session.open(tmp_path / "s", MODEL) as session:
        session.commit(PROMPT, live, logits, [point])
        assert session.savepoints == [30] and not session.can_trim
    with Session.open(tmp_path / "s", MODEL, write=False) as session:
        assert session.reusable(BRANCH) == 30
        restored = session.restore(30, engine.new_cache)
        assert session.reusable([*PROMPT, 7]) == 50
    found = read(engine, restored, BRANCH[30:])
    assert np.array_equal(found, read(engine, twin, BRANCH[30:]))
    whole = read(engine, engine.new_cache(), BRANCH)
    assert np.abs(whole).max() > 1
    assert np.abs(found - whole).max() < CHUNKED * np.abs(whole).max()


@pytest.mark.parametrize("name", ["qwen3_next", "gemma3_text", "falcon_h1"])
def test_turns_of_a_chat_hand_their_savepoints_on(
    tmp_path: Path, engines: Callable, name: str
) -> None:
    """Each turn goes back to an earlier one, and every savepoint stays what it was."""
    engine, path = engines(name), tmp_path / "s"
    history: list[int] = []
    turns = [(0, [20, 30]), (30, [35, 50]), (50, [52]), (20, [40])]
    for turn, (back, places) in enumerate(turns):
        ids = [*history[:back], *((turn * 100 + n) % 4096 for n in range(60))]
        with Session.open(path, MODEL) as session:
            held = session.reusable(ids)
            assert held == back
            points = session.restore_savepoints(held, engine.new_cache)
            assert [point.count for point in points] == [n for n in session.savepoints if n < back]
            cache = session.restore(held, engine.new_cache)
            if held:
                points.append(snapshot(cache, held))
            for place in [n for n in places if n > held]:
                read(engine, cache, ids[held:place])
                points.append(bare(cache, place))
                held = place
            logits = read(engine, cache, ids[held:])
            session.commit(ids, cache, logits, points)
            assert session.savepoints == [point.count for point in points]
        history = ids
    for place in [point.count for point in points]:
        with Session.open(path, MODEL, write=False) as session:
            restored = session.restore(place, engine.new_cache)
        found = read(engine, restored, [9, 8])
        whole = read(engine, engine.new_cache(), [*ids[:place], 9, 8])
        assert np.abs(found - whole).max() < CHUNKED * np.abs(whole).max()


def filled(steps: int) -> list:
    """Caches of four classes that have read so many random positions."""
    lists = CacheList(ArraysCache(2), KVCache())
    cache = [KVCache(), ArraysCache(2), RotatingKVCache(16), lists]
    advance(cache, 0, steps)
    return cache


def advance(cache: list, start: int, stop: int) -> list:
    """Reads positions; those of the same number are always the same."""
    for position in range(start, stop):
        for layer in [cache[0], cache[2], cache[3].caches[1]]:
            keys, values = (
                mx.random.normal((1, 2, 1, 8), key=mx.random.key(10 * position + n)) for n in (1, 2)
            )
            layer.update_and_fetch(keys, values)
        for layer in (cache[1], cache[3].caches[0]):
            drawn = mx.random.normal((1, 3, 4), key=mx.random.key(position))
            layer[0] = drawn if layer[0] is None else 0.5 * layer[0] + drawn
            layer[1] = mx.array([position])
    return cache


def empty() -> list:
    return [KVCache(), ArraysCache(2), RotatingKVCache(16), CacheList(ArraysCache(2), KVCache())]


def arrays_of(cache) -> list[np.ndarray]:
    if isinstance(cache, CacheList):
        return [array for part in cache.caches for array in arrays_of(part)]
    if isinstance(cache, ArraysCache):
        return [np.array(entry) for entry in cache.cache]
    rows = min(cache.offset, 16 if isinstance(cache, RotatingKVCache) else cache.offset)
    idx = getattr(cache, "_idx", 0)
    return [np.array(a[:, :, :rows]) for a in (cache.keys, cache.values)] + [
        np.array([cache.offset, idx])
    ]


def alike(a, b) -> bool:
    pairs = list(zip(arrays_of(a), arrays_of(b), strict=True))
    return bool(pairs) and all(np.array_equal(x, y) for x, y in pairs)


def test_savepoints_come_back_as_they_were_given(tmp_path: Path) -> None:
    cache, points = empty(), []
    for start, stop in ((0, 5), (5, 15), (15, 40), (40, 41)):
        advance(cache, start, stop)
        points.append(snapshot(cache, stop))
    advance(cache, 41, 60)
    with Session.open(tmp_path / "s", MODEL) as session:
        session.commit(range(60), cache, None, points)
    for write in (True, False):
        with Session.open(tmp_path / "s", MODEL, write=write) as session:
            assert session.restore_savepoints(0, empty) == []
            assert [p.count for p in session.restore_savepoints(40, empty)] == [5, 15]
            found = session.restore_savepoints(60, empty)
            assert [point.count for point in found] == [5, 15, 40, 41]
            for point in found:
                assert point.layers[0] is None  # it is cut back from the end
                whole = filled(point.count)
                assert all(alike(*pair) for pair in zip(point.layers[1:], whole[1:]))
                assert all(alike(*p) for p in zip(session.restore(point.count, empty), whole))
            for n in (4, 11):  # the window had not slid, but the recurrent state was not kept
                assert session.reusable([*range(n), 999]) in (0, 5)


def test_a_session_without_savepoints_hands_on_none(tmp_path: Path) -> None:
    with Session.open(tmp_path / "s", MODEL) as session:
        assert session.restore_savepoints(0, empty) == []
        session.commit([1, 2, 3], None, None)
        assert session.restore_savepoints(3, empty) == []


def test_a_window_cut_back_within_a_savepoint(tmp_path: Path) -> None:
    """The end has slid, a copy from before has not: it can be cut back further."""

    def make() -> list:
        return [RotatingKVCache(16)]

    cache, points = empty(), []
    for start, stop in ((0, 12), (12, 40)):
        advance(cache, start, stop)
        points.append(Savepoint(stop, [copy.deepcopy(cache[2])]))
    advance(cache, 40, 50)
    with Session.open(tmp_path / "s", MODEL) as session:
        session.commit(range(50), [cache[2]], None, points)
        assert session.reusable([*range(7), 999]) == 7
        assert session.reusable([*range(39), 999]) == 12
        (restored,) = session.restore(7, make)
        assert alike(restored, filled(7)[2])
        again, live = empty(), filled(7)
        again[2] = restored
        assert alike(advance(again, 7, 30)[2], advance(live, 7, 30)[2])


def test_damage_names_the_layer_and_spares_the_rest(tmp_path: Path) -> None:
    cache = filled(10)
    points = [snapshot(cache, 10)]
    advance(cache, 10, 20)
    with Session.open(tmp_path / "s", MODEL) as session:
        session.commit(range(20), cache, None, points)
        (record,) = session.header.savepoints
        place = record.layers[1].tensors[0].ranges[0].offset
    file = tmp_path / "s" / "cache.bin"
    data = bytearray(file.read_bytes())
    data[place] ^= 1
    file.write_bytes(data)
    with Session.open(tmp_path / "s", MODEL, write=False) as session:
        for attempt in (session.restore, session.restore_savepoints):
            with pytest.raises(DataError, match="s: layer 1: the checksum of 0 is wrong"):
                attempt(10 if attempt == session.restore else 20, empty)
        assert alike(session.restore(20, empty)[1], cache[1])


def test_layers_of_another_model_are_refused(tmp_path: Path) -> None:
    cache = filled(10)
    with Session.open(tmp_path / "s", MODEL) as session:
        with pytest.raises(ValueError, match="other layers than the state"):
            session.commit(range(20), cache, None, [Savepoint(10, [KVCache()] * 4)])
        session.commit(range(20), cache, None, [snapshot(cache, 10)])
        with pytest.raises(DataError, match="it has 4 layers, the model 1"):
            session.restore_savepoints(20, lambda: [KVCache()])


def test_a_source_whose_writer_goes_on_meanwhile(
    tmp_path: Path, engines: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The logits are those of the prompt, not of what the source has become."""
    engine = engines("llama")
    cache = engine.new_cache()
    logits = read(engine, cache, PROMPT)
    check, written = Session._check_held, []

    def goes_on(self: Session, stored: object) -> None:
        if not written:
            written.append(True)
            for n in range(1, 5):
                writer.commit([*PROMPT, *[7] * n], cache, read(engine, cache, [7]))
        check(self, stored)

    with Session.open(tmp_path / "s", MODEL) as writer:
        writer.commit(PROMPT, cache, logits)
        with Session.open(tmp_path / "s", MODEL, write=False) as source:
            monkeypatch.setattr(Session, "_check_held", goes_on)
            state, count = engine.restore(None, PROMPT, source)
    assert written and count == len(PROMPT) and state.tokens == PROMPT
    assert np.array_equal(np.array(state.logits), logits)
