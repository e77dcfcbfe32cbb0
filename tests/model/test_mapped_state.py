"""Keys and values that are read where they lie in cache.bin."""

from __future__ import annotations

import faulthandler
import os
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models import cache as mlx_caches

from tests.conftest import examples
from tests.model.checkpoints import read
from tests.model.test_kv_bits import answer, keys_of, opened
from tests.model.test_kv_bits import ids as prompt
from tests.native_library import built, cache, library, needed
from toastkit.engine.savepoints import copy_caches, take_savepoint
from toastkit.errors import DataError
from toastkit.native.kv_caches import keep_in
from toastkit.native.library import Library
from toastkit.native.regions import LOST, Region
from toastkit.private_files import held_until, hold_bytes
from toastkit.session import mapped, reading
from toastkit.session.directory import Session
from toastkit.session.layout import BLOCK_ROWS

__all__ = ["built", "cache", "library"]
pytestmark = needed
MODEL = "ab" * 32
HEADS, SIZE = 2, 25  # so that 256 rows of no dtype make whole pages
FILE = "cache.bin"


@pytest.fixture(autouse=True)
def in_use(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tensors are worth a map too."""
    monkeypatch.setattr("toastkit.native.library._in_use", library)
    monkeypatch.setattr(mapped, "MIN_BYTES", 1)


def make(dtype: mx.Dtype = mx.float32, layers: int = 2) -> list:
    caches: list = [mlx_caches.KVCache() for _ in range(layers)]
    keep_in(dtype, caches)
    return caches


def numbers(ids: list[int], first: int, layer: int) -> mx.array:
    """Keys of tokens from a position on, which follow from them: (1, HEADS, N, SIZE)."""
    of_token = [[t % 97, n, layer] for n, t in enumerate(ids[first:], first)]
    rows = np.tile(np.array(of_token, np.float32), HEADS * SIZE)[:, : HEADS * SIZE]
    rows = np.sin(rows * (1 + np.arange(HEADS * SIZE)))
    return mx.array(rows.reshape(1, -1, HEADS, SIZE)).swapaxes(1, 2)


def run(caches: list, ids: list[int], chunk: int = 1 << 20) -> None:
    """Reads what of these tokens the caches have not read."""
    for index, layer in enumerate(caches):
        while layer.offset < len(ids):
            new = numbers(ids[: layer.offset + chunk], layer.offset, index)
            mx.eval(layer.update_and_fetch(new, new * 2))


def rows(caches: list) -> list[bytes]:
    """What they hold."""
    arrays = [a[:, :, : c.offset] for c in caches for a in (c.keys, c.values)]
    return [np.array(mx.contiguous(a).view(mx.uint8)).tobytes() for a in arrays]


def wanted(ids: list[int], dtype: mx.Dtype = mx.float32) -> list[bytes]:
    """What caches hold that have read these tokens and were never saved."""
    caches = make(dtype)
    run(caches, ids)
    return rows(caches)


def commit(path: Path, ids: list[int], caches: list | None = None) -> list:
    """Commits what has read them; caches: None for new ones."""
    if caches is None:
        caches = make()
        run(caches, ids)
    with Session.open(path, MODEL, durable=False) as session:
        session.commit(ids, caches, None)
    return caches


def restored(path: Path, count: int, write: bool = True, **kinds: Any) -> list:
    with Session.open(path, MODEL, write=write, create=False, durable=False) as session:
        return session.restore(count, lambda: make(**kinds))


def is_mapped(array: mx.array) -> bool:
    """Whether the first of its numbers is in a map of cache.bin."""
    place = np.array(array.view(mx.uint8), copy=False).ctypes.data
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(word, 16) for word in line.split()[0].split("-"))
        if first <= place < last:
            return line.endswith(FILE)
    return False


KINDS = [(mx.float32, 1), (mx.float32, 700), (mx.float16, 700), (mx.bfloat16, 256), (mx.int8, 1)]


@pytest.mark.parametrize("heads", [HEADS, 1])
@pytest.mark.parametrize(("dtype", "count"), [*KINDS, (mx.int8, 700)])
def test_a_state_is_read_in_place_and_goes_on(
    tmp_path: Path, dtype: mx.Dtype, count: int, heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In place however it grows, to the bit as one never saved; the file stays as it is."""
    monkeypatch.setitem(globals(), "HEADS", heads)
    ids = [n * 7 for n in range(count + 2 * BLOCK_ROWS + 44)]
    kept = make(dtype)
    run(kept, ids[:count])
    commit(tmp_path, ids[:count], kept)
    before = (tmp_path / FILE).read_bytes()
    caches = restored(tmp_path, count, dtype=dtype)
    assert all(is_mapped(a) for c in caches for a in (c.keys, c.values))
    assert rows(caches) == wanted(ids[:count], dtype)
    for end, chunk in ((count + 1, 1), (count + 2, 1), (count + 90, 40), (len(ids), len(ids))):
        run(caches, ids[:end], chunk)
        assert rows(caches) == wanted(ids[:end], dtype)
        assert all(is_mapped(a) for c in caches for a in (c.keys, c.values))
    assert (tmp_path / FILE).read_bytes() == before
    commit(tmp_path, ids, caches)
    assert rows(restored(tmp_path, len(ids), dtype=dtype)) == wanted(ids, dtype)


def test_attention_reads_it_in_place(library: Library, tmp_path: Path) -> None:
    commit(tmp_path, ids := list(range(900)))
    caches, others = restored(tmp_path, 900), make()
    run(others, ids)
    queries = mx.random.normal((1, 4, 3, SIZE))
    new = mx.random.normal((1, HEADS, 3, SIZE))
    found = []
    for layer in (caches[1], others[1]):
        keys, values = layer.update_and_fetch(new, new)
        found.append(library.attend(queries, keys, values, 0.25, "causal"))
    assert is_mapped(caches[1].keys) and mx.array_equal(*found).item()


@pytest.mark.parametrize("kv_bits", [32, 16])
@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_an_engine_goes_on_in_place(tmp_path: Path, name: str, kv_bits: int) -> None:
    """As if it had never been left, to the bit; and what it commits then too."""
    engine = opened(tmp_path, name, kv_bits)
    with Session.open(tmp_path / "s", MODEL) as session:
        state, _ = engine.restore(session, prompt(30))
        for _ in engine.reading(state, prompt(30)):
            pass
        state.commit()
    with Session.open(tmp_path / "s", MODEL) as session:
        state, count = engine.restore(session, prompt(61))
        assert count == 30 and any(is_mapped(array) for array in keys_of(state.cache))
        for _ in engine.reading(state, prompt(61)):
            pass
        found = answer(engine, state)
        assert any(is_mapped(array) for array in keys_of(state.cache))
        state.commit()
    assert np.array_equal(found, answer(engine, read(engine, prompt(61))))
    with Session.open(tmp_path / "s", MODEL, write=False) as session:
        state, count = engine.restore(session, session.tokens)
        assert count == 65 and np.array_equal(np.array(state.logits), found[-1])
        again = answer(engine, state)
    other = read(engine, prompt(61))
    for _ in range(2):
        answers = answer(engine, other)
    assert np.array_equal(again, answers)


def test_recurrent_states_are_read_in_place(tmp_path: Path) -> None:
    """Those of savepoints too; what goes on from any of them is what it would have been."""
    engine = opened(tmp_path, "qwen3_next", 32)
    with Session.open(tmp_path / "s", MODEL) as session:
        state, _ = engine.restore(session, prompt(30))
        for done in engine.reading(state, prompt(30), lambda: 16):
            if done == 16:
                state.savepoints.append(take_savepoint(state.cache, done))
        state.commit()
    for count, held in ((61, 30), (20, 16)):
        with Session.open(tmp_path / "s", MODEL, write=False) as session:
            state, found = engine.restore(session, prompt(count))
        kept = [state.cache, *(point.layers for point in state.savepoints)]
        layers = [layer for caches in kept for layer in caches]
        states = [a for x in layers if isinstance(x, mlx_caches.ArraysCache) for a in x.cache]
        assert found == held and all(map(is_mapped, states)) and len(kept) == 2
        before = [np.array(array) for array in states]
        for _ in engine.reading(state, prompt(count)):
            pass
        assert np.array_equal(answer(engine, state), answer(engine, read(engine, prompt(count))))
        for array, was in zip(states, before):
            assert np.array_equal(np.array(array), was)


def test_copies_of_a_state_part_ways(tmp_path: Path) -> None:
    """What one writes the other does not see; nor does the file."""
    commit(tmp_path, ids := list(range(300)))
    caches = restored(tmp_path, 300)
    twin = copy_caches(caches)
    run(caches, [*ids, 1, 2])
    run(twin, [*ids, 3, 4])
    for layer in twin:
        layer.trim(12)
    run(twin, other := [*ids[:290], 5, 6])
    assert rows(caches) == wanted([*ids, 1, 2]) and rows(twin) == wanted(other)
    assert rows(restored(tmp_path, 300)) == wanted(ids)


@settings(max_examples=examples(25))
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 400), st.booleans()), max_size=12))
def test_whoever_writes_nobody_reads_anything_else(
    tmp_path_factory: pytest.TempPathFactory, turns: list[tuple]
) -> None:
    """Histories grow, are cut back and go on otherwise, by whoever has the lock, while others have
    earlier commits in place, some of which go on for themselves."""
    path = tmp_path_factory.mktemp("session")
    ids = list(range(400))
    commit(path, ids)
    held: list[tuple[list[int], list]] = [(ids, restored(path, 400, write=False))]
    for number, (way, count, keeps) in enumerate(turns):
        if way == 0:  # cut back, and on with other tokens
            ids = [*ids[: count % (len(ids) + 1)], *[1000 * number + n for n in range(count % 90)]]
        elif way == 1:
            ids = [*ids, *[1000 * number + n for n in range(count)]]
        else:  # one of the readers goes on
            old, caches = held[count % len(held)]
            for layer in caches:
                layer.trim(len(old) - min(len(old), count))
            more = [*old[:count], *range(5000, 5000 + count % 50)]
            run(caches, more)
            held[count % len(held)] = more, caches
            continue
        if not ids:
            ids = [7]
        with Session.open(path, MODEL, durable=False) as session:
            n = session.reusable(ids)
            caches = session.restore(n, make)
            run(caches, ids)
            session.commit(ids, caches, None)
            run(caches, [*ids, 9])
        held.append(([*ids, 9], caches))
        if keeps:
            held.append((ids, restored(path, len(ids), write=False)))
        if number % 3 == 2:
            del held[0]
    for tokens, caches in held:
        assert not tokens or rows(caches) == wanted(tokens)
    assert rows(restored(path, len(ids))) == wanted(ids)


def test_space_is_used_again_when_nobody_reads_there(tmp_path: Path) -> None:
    """And not before: nor is the file cut off there."""
    short, long = list(range(10)), list(range(9000))
    commit(tmp_path, long)
    size = (tmp_path / FILE).stat().st_size
    assert size > 4 << 20
    reader = restored(tmp_path, 9000, write=False)
    commit(tmp_path, short)
    assert (tmp_path / FILE).stat().st_size >= size
    assert rows(reader) == wanted(long)
    commit(tmp_path, other := [n + 1 for n in range(2000)])
    assert rows(reader) == wanted(long) and rows(restored(tmp_path, 2000)) == wanted(other)
    del reader
    mx.synchronize()
    commit(tmp_path, short)
    assert (tmp_path / FILE).stat().st_size < size


@pytest.mark.parametrize("how", ["flipped", "cut", "another start", "no seal", "no locks", "gone"])
def test_what_is_not_surely_as_committed_is_read_and_checked(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = list(range(400))
    commit(tmp_path, ids)
    file = tmp_path / FILE
    if how == "flipped":
        data = np.memmap(file, np.uint8, "r+")
        data[5000] ^= 1
        del data
    elif how == "cut":
        os.truncate(file, file.stat().st_size - 1)
    elif how == "another start":
        monkeypatch.setattr(reading, "_boot", lambda: "another")
    elif how == "no seal":
        monkeypatch.setattr(reading, "_boot", lambda: None)
    elif how == "no locks":
        monkeypatch.setattr(mapped, "hold_bytes", Mock(side_effect=OSError(22, "no locks")))
    else:
        copy = file.read_bytes()
        file.unlink()
        file.write_bytes(copy)
        file.chmod(0o600)
    if how in ("flipped", "cut"):
        with pytest.raises(DataError, match="checksum|bytes where"):
            restored(tmp_path, 400)
        return
    caches = restored(tmp_path, 400)
    assert rows(caches) == wanted(ids) and not is_mapped(caches[0].keys)


def test_a_reader_that_a_writer_overtakes_reads_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A commit between the header and the locks: what was freed by it may have been written."""
    ids, other = list(range(400)), [*range(300), *range(900, 1000)]
    kept = commit(tmp_path, ids)
    session = Session.open(tmp_path, MODEL, write=False)
    calls: list[int] = []

    def late(fd: int, first: int, count: int) -> None:
        if not calls:
            for layer in kept:
                layer.trim(100)
            run(kept, other)
            commit(tmp_path, other, kept)
            commit(tmp_path, ids)
            commit(tmp_path, ids)
        calls.append(first)
        hold_bytes(fd, first, count)

    monkeypatch.setattr(mapped, "hold_bytes", late)
    with session:
        assert rows(session.restore(400, make)) == wanted(ids)
        assert len(calls) > 4 and session.generation == 4


def test_a_writer_may_go_on_where_it_reads(tmp_path: Path) -> None:
    """Rows behind those that it has in place are appended in place: no new extent."""
    ids = list(range(300))
    commit(tmp_path, ids)
    size = (tmp_path / FILE).stat().st_size
    with Session.open(tmp_path, MODEL, durable=False) as session:
        caches = session.restore(300, make)
        for end in range(301, 400, 30):
            run(caches, list(range(end)))
            session.commit(list(range(end)), caches, None)
        assert is_mapped(caches[0].keys)
    assert (tmp_path / FILE).stat().st_size <= size + 4 * 90 * HEADS * SIZE * 4
    assert rows(restored(tmp_path, 391)) == wanted(list(range(391)))


def test_a_file_that_became_shorter_ends_with_a_line(library: Library, tmp_path: Path) -> None:
    """And not with a signal that nobody explains: see test_mapping.py."""
    commit(tmp_path, list(range(600)))
    [layer, _] = restored(tmp_path, 600)
    assert is_mapped(layer.keys)
    seen = np.array(layer.keys.view(mx.uint8), copy=False)
    os.truncate(tmp_path / FILE, 4096)
    with open(tmp_path / "said", "w+b") as said:
        if not (child := os.fork()):
            os.dup2(said.fileno(), 2)
            faulthandler.disable()  # so that the signal is nobody's
            Region(library, 1)
            os._exit(seen.max() & 0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        said.seek(0)
        assert (status, said.read().decode()) == (74, LOST)


def test_bytes_are_held_until_the_file_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(1000))
    with open(path, "rb") as reader, open(path, "r+b") as writer:
        hold_bytes(reader.fileno(), 100, 50)
        hold_bytes(reader.fileno(), 150, 10)
        ask = partial(held_until, writer.fileno())
        assert [ask(0, 100), ask(160, 9), ask(90, 0)] == [None] * 3
        assert [ask(0, 101), ask(159, 1), ask(0, 1000)] == [160] * 3
        assert held_until(reader.fileno(), 0, 1000) is None
        reader.close()
        assert ask(0, 1000) is None


@pytest.mark.parametrize("least", [1, 100_000])
def test_keys_of_another_size_than_values_have_the_same_room(
    tmp_path: Path, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As latent attention keeps them: the larger ones are worth a map, the smaller are not. mlx_lm
    asks the keys whether there is room."""
    count, end = 200, 200 + BLOCK_ROWS + 150

    def rows_of(first: int, last: int) -> list[mx.array]:
        return [1.0 * mx.arange(first * n, last * n).reshape(1, 1, -1, n) for n in (512, 64)]

    kept = make(layers=1)
    mx.eval(kept[0].update_and_fetch(*rows_of(0, count)))
    commit(tmp_path, list(range(count)), kept)
    monkeypatch.setattr(mapped, "MIN_BYTES", least)
    [layer] = restored(tmp_path, count, layers=1)
    assert layer.keys.shape[2] == layer.values.shape[2]
    assert is_mapped(layer.keys) and is_mapped(layer.values)
    for at in range(count, end, 75):
        found = layer.update_and_fetch(*rows_of(at, at + 75))
        assert all(map(mx.array_equal, found, rows_of(0, at + 75)))
