"""Every mlx_lm cache class: saved, restored, and going on exactly as if it had never been saved."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.models import cache as mlx_caches
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from tests.model.reference import OLD_MLX_LM
from toastkit.errors import DataError
from toastkit.session.directory import Session
from toastkit.session.layout import KINDS

MODEL = "ab" * 32
HEADS, KEY, VALUE = 2, 64, 128

MAKERS: dict[str, Callable[[], list]] = {
    "kv": lambda: [KVCache(), KVCache()],
    "concatenate": lambda: [ConcatenateKVCache()],
    "quantized": lambda: [QuantizedKVCache(32, 4), QuantizedKVCache(64, 8)],
    "chunked": lambda: [ChunkedKVCache(300)],
    "rotating": lambda: [RotatingKVCache(200, keep=4), RotatingKVCache(1000)],
    "arrays": lambda: [ArraysCache(2), ArraysCache(1)],
    "hybrid": lambda: [KVCache(), ArraysCache(2), RotatingKVCache(64)],
    "list": lambda: [CacheList(ArraysCache(2), KVCache()), CacheList(KVCache(), KVCache())],
}
CUT_MAKERS = ("kv", "quantized", "cut_list", "long_window")
MAKERS["cut_list"] = lambda: [CacheList(KVCache(), QuantizedKVCache()), KVCache()]
MAKERS["long_window"] = lambda: [RotatingKVCache(4000), KVCache()]


class Stream:
    """Random keys and values, the same for the same seed: a stand-in for a model."""

    def __init__(self, seed: int, dtype):
        self.key = mx.random.key(seed)
        self.dtype = dtype

    def draw(self, *shape: int):
        self.key, key = mx.random.split(self.key)
        return mx.random.normal(shape, key=key).astype(self.dtype)

    def run(self, cache: list, steps: int) -> list:
        """Feeds one chunk to every layer; returns all that the caches gave back."""
        return [array for layer in cache for array in self._run_one(layer, steps)]

    def _run_one(self, cache, steps: int) -> list:
        if isinstance(cache, CacheList):
            return [array for part in cache.caches for array in self._run_one(part, steps)]
        if isinstance(cache, ArraysCache):
            entry = self.draw(1, 3, 5)
            cache[0] = entry if cache[0] is None else cache[0] * 0.5 + entry
            return [cache[0]]
        if isinstance(cache, ChunkedKVCache):
            cache.maybe_trim_front()
        keys, values = self.draw(1, HEADS, steps, KEY), self.draw(1, HEADS, steps, VALUE)
        return flat(cache.update_and_fetch(keys, values))


def flat(value) -> list:
    if isinstance(value, (tuple, list)):
        return [array for item in value for array in flat(item)]
    return [value]


def same(a: list, b: list) -> bool:
    return len(a) == len(b) and all(
        x.dtype == y.dtype and x.shape == y.shape and bool(mx.array_equal(x, y))
        for x, y in zip(a, b)
    )


def save(path: Path, n: int, cache: list) -> None:
    with Session.open(path, MODEL) as session:
        session.commit(range(n), cache, None)


def load(path: Path, n: int, make: Callable[[], list]) -> list:
    with Session.open(path, MODEL, write=False) as session:
        return session.restore(n, make)


# How many tokens are read at a time before a cache is saved, and in which numbers.
SAVED = [
    ((1,), mx.float16), ((255,), mx.bfloat16), ((256,), mx.float32),
    ((100, 1, 1, 150), mx.bfloat16), ((512, 3, 1), mx.float16),
]  # fmt: skip


@pytest.mark.parametrize("name", sorted(MAKERS))
def test_a_restored_cache_goes_on_bit_for_bit(tmp_path: Path, name: str):
    for number, (chunks, dtype) in enumerate(SAVED):
        path, live, stream = tmp_path / str(number), MAKERS[name](), Stream(1, dtype)
        for steps in chunks:
            stream.run(live, steps)
        save(path, sum(chunks), live)
        restored, again = load(path, sum(chunks), MAKERS[name]), Stream(1, dtype)
        again.key = stream.key
        for steps in (1, 40, 1, 300, 1) if number else (1, 1):
            assert same(stream.run(live, steps), again.run(restored, steps)), chunks


@pytest.mark.parametrize("name", CUT_MAKERS)
def test_cut_back(tmp_path: Path, name: str):
    whole, stream = MAKERS[name](), Stream(3, mx.float32)
    stream.run(whole, 300)
    save(tmp_path / "s", 300, whole)
    for n in (1, 100, 256, 299, 300):
        with Session.open(tmp_path / "s", MODEL, write=False) as session:
            assert session.reusable([*range(n), 999]) == n
        restored, live = load(tmp_path / "s", n, MAKERS[name]), copy.deepcopy(whole)
        mlx_caches.trim_prompt_cache(live, 300 - n)
        for steps in (1, 5, 1):
            expected, found = (Stream(steps, mx.float32).run(c, steps) for c in (live, restored))
            assert same(found, expected), n


def held(cache) -> list[mx.array]:
    """Keys and values of the positions that a cache holds."""
    rows = cache.offset - getattr(cache, "start_position", 0)
    return [cache.keys[:, :, :rows], cache.values[:, :, :rows]]


@pytest.mark.skipif(OLD_MLX_LM, reason="this mlx_lm's ChunkedKVCache fails past its chunk")
def test_cut_back_of_chunks_and_windows(tmp_path: Path):
    cache, stream = [ChunkedKVCache(100)], Stream(4, mx.float32)
    for _ in range(5):
        stream.run(cache, 60)
    assert cache[0].start_position == 140
    save(tmp_path / "s", 300, cache)
    with Session.open(tmp_path / "s", MODEL) as session:
        assert session.reusable([*range(270), 999]) == 270
        assert session.reusable([*range(190), 999]) == 0  # its chunk begins at 100, which is gone
        (restored,) = session.restore(270, lambda: [ChunkedKVCache(100)])
    assert restored.offset == 270 and restored.start_position == 140
    assert same(held(restored), [a[:, :, :130] for a in held(cache[0])])
    window = [RotatingKVCache(100)]
    stream.run(window, 120)
    save(tmp_path / "w", 120, window)
    with Session.open(tmp_path / "w", MODEL) as session:
        assert session.reusable([*range(119), 999]) == 0
        assert session.reusable(range(121)) == 120


@pytest.mark.skipif(OLD_MLX_LM, reason="this mlx_lm's ChunkedKVCache fails past its chunk")
def test_cut_back_to_where_a_chunk_begins(tmp_path: Path):
    """No row is left, and yet it is not a cache that has read nothing."""

    def make() -> list:
        return [ChunkedKVCache(100)]

    cache, stream = make(), Stream(4, mx.float32)
    for steps in (100, 100, 50):
        stream.run(cache, steps)
    assert cache[0].start_position == 100
    save(tmp_path / "s", 250, cache)
    with Session.open(tmp_path / "s", MODEL) as session:
        assert session.reusable([*range(100), 999]) == 100
        for _ in range(2):  # from the rows that are stored, then from none
            (restored,) = session.restore(100, make)
            assert restored.offset == restored.start_position == 100
            session.commit(range(100), [restored], None)
    cache[0].trim(150)
    again = Stream(5, mx.float32)
    assert same(Stream(5, mx.float32).run(cache, 7), again.run([restored], 7))
    assert restored.offset == 107


def test_concatenated_cache_cut_back(tmp_path: Path):
    cache, stream = [ConcatenateKVCache()], Stream(4, mx.float32)
    stream.run(cache, 300)
    save(tmp_path / "s", 300, cache)
    (restored,) = load(tmp_path / "s", 70, lambda: [ConcatenateKVCache()])
    assert restored.offset == 70
    assert same(held(restored), [a[:, :, :70] for a in held(cache[0])])


def test_empty_caches(tmp_path: Path):
    for name, make in MAKERS.items():
        save(tmp_path / name, 5, make())
        restored = load(tmp_path / name, 5, make)
        assert all(layer.empty() for layer in restored)
        assert same(Stream(5, mx.float32).run(restored, 3), Stream(5, mx.float32).run(make(), 3))


def test_commits_that_grow_and_go_back(tmp_path: Path):
    """A long session: each commit's state is what a fresh save of the same caches would be."""
    make = MAKERS["cut_list"]
    path = tmp_path / "s"
    stream = Stream(6, mx.bfloat16)
    live, tokens = make(), []
    for turn, (back, steps) in enumerate(
        [(0, 300), (0, 1), (40, 90), (0, 200), (511, 2), (1, 600)]
    ):
        kept = tokens[: len(tokens) - back]
        with Session.open(path, MODEL) as session:
            assert session.reusable([*kept, turn]) == len(kept)
            restored = session.restore(len(kept), make)
            mlx_caches.trim_prompt_cache(live, back)
            for added in ([turn] * steps, [77]):
                count = len(added)
                key = stream.key
                expected = stream.run(live, count)
                stream.key = key
                assert same(expected, stream.run(restored, count))
                kept = [*kept, *added]
                session.commit(kept, restored, None)
        tokens = kept


def test_caches_begun_anew_are_saved_whole(tmp_path: Path):
    """The same tokens, but not the rows on disk."""
    make, path = MAKERS["kv"], tmp_path / "s"
    save_from = [make(), make()]
    for seed, cache in enumerate(save_from):
        Stream(seed, mx.float32).run(cache, 300)
    with Session.open(path, MODEL) as session:
        session.commit(range(300), save_from[0], None)
        assert session.restore(0, make)[0].empty()
        session.commit(range(300), save_from[1], None)
        restored = session.restore(300, make)
    for a, b in zip(restored, save_from[1]):
        assert same(held(a), held(b))


def test_arrays_with_padding_lengths_and_gaps(tmp_path: Path):
    cache = ArraysCache(3, left_padding=[2, 0])
    cache.prepare(lengths=[5, 7])
    cache[1] = mx.arange(6, dtype=mx.uint32).reshape(2, 3)
    cache[2] = mx.zeros((2, 0, 4), dtype=mx.float16)
    save(tmp_path / "s", 1, [cache])
    (restored,) = load(tmp_path / "s", 1, lambda: [ArraysCache(3)])
    assert restored[0] is None
    assert same(
        [restored[1], restored[2], restored.lengths, restored.left_padding],
        [cache[1], cache[2], cache.lengths, cache.left_padding],
    )


def test_values_without_bytes(tmp_path: Path):
    """An index cache as of DeepSeek's sparse attention: keys only."""
    make: Callable[[], list] = lambda: [KVCache()]  # noqa: E731
    cache = make()
    keys = mx.random.normal((1, 1, 300, 8))
    cache[0].update_and_fetch(keys, mx.zeros((1, 1, 300, 0)))
    save(tmp_path / "s", 300, cache)
    for n in (300, 10):
        (restored,) = load(tmp_path / "s", n, make)
        got = restored.update_and_fetch(keys[:, :, :1], mx.zeros((1, 1, 1, 0)))
        assert same([got[0][:, :, :n]], [keys[:, :, :n]]) and got[1].shape == (1, 1, n + 1, 0)


def test_room_to_grow(tmp_path: Path):
    cache = [KVCache()]
    Stream(7, mx.float32).run(cache, 300)
    save(tmp_path / "s", 300, cache)
    for n, room in ((300, 512), (256, 256), (1, 256)):
        assert load(tmp_path / "s", n, lambda: [KVCache()])[0].keys.shape[2] == room


class Subclass(KVCache):
    """Holds who knows what besides."""


class LayerCache:
    """An architecture's own."""


def test_unknown_classes_are_refused(tmp_path: Path):
    with Session.open(tmp_path / "s", MODEL) as session:
        session.commit([1], None, None)
        for cache in (Subclass(), LayerCache(), None, CacheList(KVCache(), Subclass())):
            with pytest.raises(DataError, match="cannot save a cache of class "):
                session.commit([1, 2], [KVCache(), cache], None)
    with Session.open(tmp_path / "s", MODEL) as session:
        assert session.tokens == [1]


def test_another_models_caches_are_refused(tmp_path: Path):
    cache = [KVCache(), RotatingKVCache(50)]
    Stream(8, mx.float32).run(cache, 3)
    save(tmp_path / "s", 3, cache)
    for others, problem in (
        ([KVCache()], "it has 2 layers, the model 1"),
        ([RotatingKVCache(50), KVCache()],
         "layer 0: it is a KVCache, the model's a RotatingKVCache"),
        ([KVCache(), RotatingKVCache(60)], "layer 1: max_size is 50, the model's 60"),
    ):  # fmt: skip
        with pytest.raises(DataError) as caught:
            load(tmp_path / "s", 3, lambda others=others: others)
        assert caught.value.message == f"cannot read session {tmp_path / 's'}: {problem}"


def test_every_class_of_the_table_is_one_of_mlx_lm():
    assert all(hasattr(mlx_caches, name) for name in KINDS)
