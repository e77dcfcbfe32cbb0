"""What attention appends to its caches, in one native operation."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import cache as mlx_caches

from tests.model.test_mapped_state import commit, is_mapped, restored, rows, run
from tests.native_library import built, cache, library, native_path, needed, operations_of
from toastkit.native import kv_caches
from toastkit.native.batched_caches import (
    ApartKVCache,
    ApartRotatingKVCache,
    _gathered,
    attend,
    can_stay_apart,
    merged,
)
from toastkit.native.library import Library
from toastkit.residency.memory import left_by_limits

__all__ = ["built", "cache", "library"]
pytestmark = needed
IN_USE = "toastkit.native.library._in_use"


@pytest.mark.parametrize("given", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.int8])
def test_appending_is_one_operation(
    library: Library, given: mx.Dtype, dtype: mx.Dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same to the bit as MLX's, in the memory that the cache has, whoever is to see it or not,
    and where one that is full grows."""
    mx.random.seed(4)
    kept, theirs = mlx_caches.KVCache(), mlx_caches.KVCache()
    kv_caches.keep_in(dtype, [kept, theirs])
    before = None
    for steps in (3, 1, 1, 250, 1, 5, 1):
        new = [
            (mx.random.normal((2, steps, 3, n)) * 4e4).astype(given).swapaxes(1, 2) for n in (8, 4)
        ]
        monkeypatch.setattr(IN_USE, None)
        wanted = theirs.update_and_fetch(*new)
        monkeypatch.setattr(IN_USE, library)
        found = kept.update_and_fetch(*new)
        for mine, other in zip(found, wanted):
            assert (mine.dtype, mine.shape) == (given, other.shape)
            assert mx.array_equal(mine, other).item()
            assert mx.array_equal(kv_caches.kept_of(mine), kv_caches.kept_of(other)).item()
        assert kept.keys.shape == theirs.keys.shape and kept.offset == theirs.offset
        if before is not None:
            assert mx.array_equal(*before, equal_nan=dtype != mx.int8).item()  # unset room, too
            before = None
        elif steps == 5:  # somebody looks on: what is seen stays
            before = kept.keys, mx.array(np.array(kept.keys.astype(mx.float32)))
    place = pointer(kept.keys)
    kept.update_and_fetch(*new)
    mx.eval(kept.keys)
    assert pointer(kept.keys) != place  # `found` sees it
    place = pointer(kept.keys)
    found = mine = None
    kept.update_and_fetch(*new)
    assert operations_of(kept.values) == ["ToastAppend"]
    mx.eval(kept.keys)
    assert pointer(kept.keys) == place


@pytest.mark.parametrize("heads", [1, 3])
def test_a_large_cache_grows_where_it_is(
    library: Library, heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of more than some MiB: it is copied once, not each time that it is full. One that
    somebody else looks at is copied, and both go on."""
    monkeypatch.setattr(IN_USE, library)
    mx.random.seed(6)
    kept, parts, places = mlx_caches.KVCache(), [], []
    kv_caches.keep_in(mx.float32, [kept])
    for positions in (2000, 500, 200, 1, 3000, 60, 1):
        parts.append(mx.random.normal((1, positions, heads, 1024 // heads)).swapaxes(1, 2))
        mx.eval(kept.update_and_fetch(parts[-1], parts[-1]))
        places.append(pointer(kept.keys))
        assert mx.array_equal(kept.keys[..., : kept.offset, :], mx.concatenate(parts, 2)).item()
    assert len(set(places[1:])) == 1 and kept.keys.shape[2] == -(-kept.offset // 256) * 256
    keys, before = kept.keys, mx.concatenate(parts, 2)
    mx.eval(kept.update_and_fetch(parts[0] + 1, parts[0]))
    assert pointer(kept.keys) != places[-1] == pointer(keys)
    assert mx.array_equal(keys[..., : before.shape[2], :], before).item()
    wanted = mx.concatenate([before, parts[0] + 1], 2)
    assert mx.array_equal(kept.keys[..., : kept.offset, :], wanted).item()


def test_the_first_positions_of_a_cache_grow_to_what_it_had(library: Library) -> None:
    """A view of them has the strides of the result, and is not as dense."""
    whole, new = mx.random.normal((1, 2, 8, 4)), mx.ones((1, 2, 1, 4))
    some = [whole[..., :5, :], whole[..., :5, :]]
    for array in library.append(some, [new, new], 5, 8)[2:]:
        assert mx.array_equal(array, mx.concatenate([whole[..., :5, :], new], 2)).item()


def test_no_addresses_are_kept_that_count(
    library: Library, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Against a limit of the process: other memory would be missing."""
    monkeypatch.setattr(IN_USE, library)
    ids = list(range(9000))
    own = commit(tmp_path, ids[:8990])
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (1 << 46, limits[1]))
    try:
        before = left_by_limits()
        theirs = restored(tmp_path, 8990)
        assert is_mapped(theirs[0].keys)
        run(theirs, ids), run(own, ids)
        run(theirs, ids * 3), run(own, ids * 3)  # beyond their room
        after = left_by_limits()
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    assert rows(theirs) == rows(own)
    assert before is not None and after is not None and before - after < 1 << 28


def test_nor_where_they_count_against_memory(cache: Path, tmp_path: Path) -> None:
    """As where Linux never overcommits: other memory would be missing, and soon all of it."""
    mode = tmp_path / "overcommit_memory"
    mode.write_text("2\n")
    beside = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-ec"]
    bound = [*beside, f'mount --bind {mode} /proc/sys/vm/overcommit_memory; exec "$@"', "sh"]
    with suppress(OSError):
        if subprocess.run([*bound, "true"], stderr=subprocess.DEVNULL).returncode == 0:
            code = f"""
import mlx.core as mx
from toastkit.native.library import load
library, kept = load({str(native_path(cache))!r}), [mx.zeros((1, 1, 8192, 128))] * 2
new = [mx.ones((1, 1, 1, 128))] * 2
made = library.append(kept, new, 8192, 8448)
mx.eval(made)
maps = [line.split()[0].split("-") for line in open("/proc/self/maps")]
print(max(int(last, 16) - int(first, 16) for first, last in maps) < 1 << 28)
"""
            done = subprocess.run(
                [*bound, sys.executable, "-c", code], capture_output=True, text=True
            )
            assert (done.stdout, done.stderr) == ("True\n", "")
            return
    pytest.skip("no mounts of its own")


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.int8])
def test_a_batch_appends_to_each_in_its_place(
    library: Library, dtype: mx.Dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it is and stays, until it is full; what is returned is padded for whoever wants it, and
    attended to in place."""
    monkeypatch.setattr(IN_USE, library)
    mx.random.seed(5)
    theirs, own = ([mlx_caches.KVCache() for _ in range(3)] for _ in range(2))
    kv_caches.keep_in(dtype, [*theirs, *own])
    for length, *pair in zip((3, 255, 40), theirs, own):
        new = [mx.random.normal((1, 2, length, n)) for n in (8, 4)]
        mx.eval([cache.update_and_fetch(*new) for cache in pair])
    batch = ApartKVCache(own)
    own.clear(), pair.clear()
    places = [pointer(array) for array in batch.arrays]
    for step in range(3):
        new = [mx.random.normal((3, 2, 1, n)) for n in (8, 4)]
        alone = [c.update_and_fetch(*(x[i : i + 1] for x in new)) for i, c in enumerate(theirs)]
        mask = batch.make_mask(1)
        found = batch.update_and_fetch(*new)
        assert batch.lengths == batch.offset.tolist() == [3 + step + 1, 256 + step, 41 + step]
        queries = mx.random.normal((3, 4, 1, 8))
        attended = attend(library, queries, *found, 0.5, mask)
        assert "ToastAttentionApart" in operations_of(attended) and batch.unread == 0
        elsewhere = attend(library, queries, *found, 0.5, mx.logical_and(mask, True))
        for i, (keys, values) in enumerate(alone):
            first = batch.size() - batch.lengths[i]
            for mine, other in zip(found, (keys, values)):
                assert mx.array_equal(mine[i : i + 1, :, first:], other).item()
            wanted = attend(library, queries[i : i + 1], keys, values, 0.5, None)
            for one in (attended, elsewhere):
                assert mx.array_equal(one[i : i + 1], wanted).item()
        found = attended = elsewhere = alone = None
        now = [pointer(array) for array in batch.arrays]
        assert [a == b for a, b in zip(places, now)] == [True, True, step < 1, step < 1, True, True]
    taken = batch.extract(1)
    assert mx.array_equal(taken.keys[..., : taken.offset, :], theirs[1].keys[..., :258, :]).item()


def test_a_batch_attends_to_what_it_is_given(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not to its cache's own values in place of others, nor to positions that came later, or that
    did not come at all."""
    monkeypatch.setattr(IN_USE, library)
    own = [mlx_caches.KVCache() for _ in range(2)]
    for row in own:
        mx.eval(row.update_and_fetch(*mx.random.normal((2, 1, 2, 5, 8))))
    batch = ApartKVCache(own)
    with pytest.raises(ValueError, match="another shape"):
        batch.update_and_fetch(*mx.ones((2, 2, 2, 1, 9)))
    assert batch.lengths == [5, 5]
    rings = [mlx_caches.RotatingKVCache(8) for _ in range(2)]
    for ring in rings:
        mx.eval(ring.update_and_fetch(*mx.ones((2, 1, 2, 5, 8))))
    sliding = merged(rings, True)
    with pytest.raises(ValueError, match="another shape"):
        sliding.update_and_fetch(*mx.ones((2, 2, 2, 1, 9)))
    assert (sliding.extract(0)._idx, sliding.extract(0).offset) == (5, 5)
    assert batch.make_mask(1, window_size=3).tolist() == [[[[False] * 3 + [True] * 3]]] * 2
    keys, values = batch.update_and_fetch(*mx.random.normal((2, 2, 2, 1, 8)))
    queries = mx.random.normal((2, 4, 1, 8))
    wanted = [library.attend(queries, keys, some, 0.5) for some in (keys, values)]
    found = [attend(library, queries, keys, keys, 0.5, None)]
    batch.update_and_fetch(keys[..., :1, :], values[..., :1, :])
    found.append(attend(library, queries, keys, values, 0.5, None))
    assert all(mx.array_equal(*pair).item() for pair in zip(found, wanted))


def test_rings_of_a_batch_take_one_position_and_are_seen_whole(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(IN_USE, library)
    rings = [mlx_caches.RotatingKVCache(8) for _ in range(2)]
    for n, ring in enumerate(rings, 4):
        mx.eval(ring.update_and_fetch(*mx.ones((2, 1, 2, n, 8))))
    batch = ApartRotatingKVCache(rings)
    for count, window in ((2, None), (1, 7)):
        with pytest.raises(NotImplementedError):
            batch.make_mask(count, window_size=window)
    assert batch.make_mask(1, window_size=8).tolist() == [
        [[[False] + [True] * 5]], [[[True] * 6]]
    ]  # fmt: skip


def test_what_can_stay_apart(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(IN_USE, library)
    kv, ring, chunks = (
        mlx_caches.KVCache(), mlx_caches.RotatingKVCache(8), mlx_caches.ChunkedKVCache(8),
    )  # fmt: skip
    arrays = mlx_caches.ArraysCache(2)
    assert can_stay_apart([kv, mlx_caches.CacheList(arrays, ring)])
    assert not can_stay_apart([kv, chunks]) and can_stay_apart([arrays])
    monkeypatch.setattr(kv_caches, "ROTATIONS", frozenset())  # a ring that turns in another way
    assert kv_caches._rotating.__wrapped__(type(ring)) is None


def test_recurrent_states_of_a_batch_stay_where_they_are(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are added behind them, and move only into the places of others; what is left of the
    memory goes back to the system. Small ones, and those that somebody else looks at, are copied,
    and rows may come in any order."""
    monkeypatch.setattr(IN_USE, library)
    mx.random.seed(7)

    def states(count: int) -> list:
        made = [mlx_caches.ArraysCache(2) for _ in range(count)]
        for one in made:
            one.cache = [mx.random.normal((1, 2, 3)), mx.random.normal((1, 16, 256, 256))]
            mx.eval(one.cache)
        return made

    def seen(change: Callable[[], Any]) -> int:
        nonlocal wanted
        change()
        mx.eval(batch.cache)
        for found, some in zip(batch.cache, zip(*wanted)):
            assert np.array_equal(np.array(found), np.concatenate(some))
        return pointer(batch.cache[1])

    more, first = states(3), states(3)
    wanted = [[np.array(x) for x in one.cache] for one in first]
    batch = merged(first, False)
    place = seen(lambda: None)
    wanted += [[np.array(x) for x in one.cache] for one in more]
    assert seen(lambda: batch.extend(merged(more, False))) == place
    had = resident()
    wanted = [wanted[i] for i in (0, 5)]
    assert seen(lambda: batch.filter(mx.array([0, 5]))) == place
    assert had - resident() > 3 * wanted[0][1].nbytes
    wanted += [[np.array(x) for x in one.cache] for one in first]
    assert seen(lambda: batch.extend(merged(first, False))) == place
    held, before = batch.cache, [np.array(x) for x in batch.cache]
    wanted = [wanted[i] for i in (0, 1, 4)]
    assert seen(lambda: batch.filter(mx.array([0, 1, 4]))) != place
    assert all(np.array_equal(np.array(x), y) for x, y in zip(held, before))
    wanted = [wanted[i] for i in (1, 0, 0, 2)]
    seen(lambda: batch.filter(mx.array([1, 0, 0, 2])))
    assert operations_of(_gathered([0], batch.cache[0])) == ["ToastGather"]


def resident() -> int:
    """Bytes of the process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def pointer(array: mx.array) -> int:
    """Where an array's numbers begin."""
    return np.asarray(memoryview(array.view(mx.uint16))).ctypes.data
