"""Keys and values read in place whose blocks of 256 rows fill pages, but no extent; or no pages; or
of which only the keys can be."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import cache as mlx_caches

from tests.model.test_mapped_state import MODEL, commit, is_mapped, make, numbers
from tests.native_library import built, cache, library, needed
from tests.unit.session_states import make_schema_1, schema_of
from toastkit.native.library import Library
from toastkit.session import mapped
from toastkit.session.directory import Session

__all__ = ["built", "cache", "library"]
pytestmark = needed
SIZE = 8  # of 16 bits: 256 rows are a page of 4 KiB


@pytest.fixture
def held(library: Library, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The bytes of cache.bin that are locked: offsets and sizes."""
    monkeypatch.setattr("toastkit.native.library._in_use", library)
    found: list[tuple[int, int]] = []
    hold = mapped.hold_bytes

    def holding(fd: int, *place: int) -> None:
        found.append(place)
        hold(fd, *place)

    monkeypatch.setattr(mapped, "hold_bytes", holding)
    return found


@pytest.mark.parametrize("count", [700, 540_000])
def test_extents_that_do_not_touch(
    held: list, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """As in files of schema 1. However long, they are read in place, and held by a lock for each
    tensor: a lock for each extent took 0.3 s at 68,000 positions."""
    monkeypatch.setattr(mapped, "MIN_BYTES", 1)
    (made,) = make(mx.float16, layers=1)
    numbers = mx.arange(count * SIZE).reshape(1, 1, count, SIZE) % 251
    made.keys, made.values = numbers.astype(mx.float16), (numbers + 1).astype(mx.float16)
    made.offset = count
    with Session.open(tmp_path, MODEL, durable=False) as session:
        session.commit([5] * count, [made], None)
    make_schema_1(tmp_path)
    with Session.open(tmp_path, MODEL, write=False) as session:
        blocks = [tensor.ranges for tensor in session.header.layers[0].tensors]
        assert len(session.header.runs()) == 2 * -(-count // 256)
        (found,) = session.restore(count, lambda: make(mx.float16, layers=1))
    for array, was in ((found.keys, made.keys), (found.values, made.values)):
        assert is_mapped(array) and np.array_equal(np.array(array[:, :, :count]), np.array(was))
    first, last = zip(*((ranges[0].offset, ranges[-1]) for ranges in blocks))
    assert held == [(a, b.offset + b.length - a) for a, b in zip(first, last)]


def kept(heads: int, first: int, last: int) -> mx.array:
    """Keys in 8 bits of these positions: numbers of 128, and a scale."""
    numbers = mx.arange(first * heads * 132, last * heads * 132) % 251 - 125
    return mx.swapaxes(numbers.astype(mx.int8).reshape(1, last - first, heads, 132), 1, 2)


def restored(path: Path, count: int) -> mx.array:
    """The keys, with room."""
    with Session.open(path, MODEL, write=False) as session:
        (found,) = session.restore(count, lambda: make(mx.int8, layers=1))
    assert mx.array_equal(found.keys[:, :, :count], found.values[:, :, :count])
    return found.keys


@pytest.mark.parametrize("heads", [1, 2, 4, 8])
def test_8_bits_are_a_map_and_a_lock_a_tensor(
    held: list, tmp_path: Path, heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And two where a history was cut back and went on otherwise, within a page of the first."""
    count, cut = 5000, 2305
    (made,) = make(mx.int8, layers=1)
    made.keys = made.values = kept(heads, 0, count)
    made.offset = count
    with Session.open(tmp_path, MODEL, durable=False) as session:
        session.commit([5] * count, [made], None)
        found = restored(tmp_path, count)
        assert is_mapped(found) and mx.array_equal(found[:, :, :count], made.keys)
        assert [size for _, size in held] == [132 * heads * count] * 2
        held.clear()
        other = mx.concatenate([made.keys[:, :, :cut], kept(heads, 7000, 9000)], axis=2)
        made.keys = made.values = other
        made.offset = other.shape[2]
        session.commit([5] * cut + [6] * 2000, [made], None)
    again = restored(tmp_path, cut + 2000)
    assert is_mapped(again) and mx.array_equal(again[:, :, : cut + 2000], other)
    assert sorted(n for _, n in held) == [132 * heads * n for n in (2001, 2001, 2304, 2304)]
    assert mx.array_equal(found[:, :, :count], kept(heads, 0, count))
    monkeypatch.setattr(mapped, "MAX_PIECES", 3)
    assert not is_mapped(restored(tmp_path, cut + 2000))


@pytest.mark.parametrize(("heads", "in_place"), [(1, False), (2, False), (4, True), (8, True)])
def test_8_bits_of_schema_1_go_on(held: list, tmp_path: Path, heads: int, in_place: bool) -> None:
    """In place where they were before, otherwise copied; new rows get their places in runs."""
    (made,) = make(mx.int8, layers=1)
    numbers = kept(heads, 0, 4000)
    for count in (2000, 4000):
        made.keys = made.values = numbers[:, :, :count]
        made.offset = count
        with Session.open(tmp_path, MODEL, durable=False) as session:
            if session.n_past:
                assert session.continues(session.n_past, session.generation)
            session.commit([5] * count, [made], None)
            runs = len(session.header.runs())
        if count == 2000:
            make_schema_1(tmp_path)
        found = restored(tmp_path, count)
        assert mx.array_equal(found[:, :, :count], made.keys) and bool(held) == in_place
    assert schema_of(tmp_path) == 2 and runs == 2 * 9


def test_tensors_that_take_turns_are_held_together(
    held: list, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for their last pieces, behind which they go on: in place, while they are read there."""
    monkeypatch.setattr(mapped, "MIN_BYTES", 1)
    made, rows = make(mx.int8, layers=2), kept(1, 0, 1100)
    with Session.open(tmp_path, MODEL, durable=False) as session:
        for count in (300, 700, 1023):
            for layer in made:
                layer.keys, layer.values = rows[:, :, :count], rows[:, :, :count]
                layer.offset = count
            session.commit([5] * count, made, None)
        found = session.restore(1023, lambda: make(mx.int8, layers=2))
        assert is_mapped(found[0].keys) and len(session.header.runs()) == 12
        assert len(held) == 4  # all before the first of four last pieces with that one
        places = [[r.offset for r in t.ranges] for t in session.header.all_tensors()]
        for layer in found:
            new = mx.ones((1, 1, 1, 128))
            layer.update_and_fetch(new, new)
        session.commit([5] * 1024, found, None)
        assert [[r.offset for r in t.ranges] for t in session.header.all_tensors()] == places


def test_keys_that_are_kept_as_stored_and_values_that_are_not_have_the_same_room(
    held: list, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mapped, "MIN_BYTES", 1)
    ids, plain = list(range(200)), mlx_caches.KVCache()
    new = numbers(ids, 0, 0)
    mx.eval(plain.update_and_fetch(new.astype(mx.bfloat16), new))
    commit(tmp_path, ids, [plain])
    with Session.open(tmp_path, MODEL, write=False) as session:
        [layer] = session.restore(len(ids), lambda: make(mx.float16, layers=1))
    assert layer.keys.shape[2] == layer.values.shape[2]
