"""A step looked ahead to and taken back leaves no trace; one that is run is the step itself."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress

import mlx.core as mx
import pytest
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    RotatingKVCache,
)

from tests.model.checkpoints import read
from tests.model.reference import PROMPTS
from tests.native_library import native_cache, native_path, needed
from toastkit.engine.lookahead import Lookahead
from toastkit.engine.savepoints import roll_back, take_savepoint, undone_on_failure
from toastkit.gears.entropy_graph import entropy_bits
from toastkit.native.library import load
from toastkit.store.jobs import host_writes

PROMPT = PROMPTS[2]

pytestmark = pytest.mark.skipif(not host_writes(), reason="the device's memory is its own")


@pytest.fixture
def caches(crumb) -> list[list]:
    """Two that have read the same prompt."""
    made = [crumb.new_cache() for _ in range(2)]
    for cache in made:
        crumb.prefill(PROMPT["token_ids"], cache)
    return made


def test_a_step_that_is_run_is_the_step_and_one_that_is_not_leaves_no_trace(
    crumb, caches, monkeypatch
):
    """Without native operations: none is handed over."""
    monkeypatch.setattr("toastkit.native.library._in_use", None)
    one, two = caches
    Lookahead(crumb.step, two).discard()
    for token in PROMPT["greedy"][:4]:
        Lookahead(crumb.step, two).discard()
        ahead = Lookahead(crumb.step, two, sure=True)
        ahead.hand_over()
        assert mx.array_equal(crumb.step(token, one), ahead.run(token))


@pytest.fixture
def library(tmp_path_factory, monkeypatch) -> str:
    """Native operations are in use. Where the library is."""
    path = str(native_path(native_cache(tmp_path_factory)))
    monkeypatch.setattr("toastkit.native.library._in_use", load(path))
    return path


@needed
def test_a_step_that_waits_for_its_token_is_the_step(crumb, library, caches):
    one, two = caches
    for token in PROMPT["greedy"][:3]:
        taken_back = Lookahead(crumb.step, two, sure=True)
        taken_back.hand_over(measured=True)
        taken_back.discard()
        ahead = Lookahead(crumb.step, two, sure=True)
        logits = crumb.step(token, one)  # before the other waits: it may clear MLX's cache
        ahead.hand_over(measured=True)
        assert mx.array_equal(ahead.run(token), logits)
        assert ahead.summary.read().entropy == pytest.approx(entropy_bits(logits).item(), abs=1e-4)


def _allowed() -> dict[int, set[int]]:
    """The processors that each thread of this process may use."""
    found = {}
    for thread in map(int, os.listdir("/proc/self/task")):
        with suppress(ProcessLookupError):  # it has ended
            found[thread] = os.sched_getaffinity(thread)
    return found


def _allow(processors: dict[int, set[int]]) -> None:
    for thread, allowed in processors.items():
        with suppress(ProcessLookupError):
            os.sched_setaffinity(thread, allowed)


@needed
def test_a_stream_that_was_woken_may_run_on_any_processor_again(crumb, library, caches):
    """It is woken on another than this thread's."""
    before = _allowed()
    try:
        _allow({thread: set(range(os.cpu_count() or 1)) for thread in before})
        wanted = _allowed()  # conftest.py had bound them to one
        for token in PROMPT["greedy"][:3]:
            ahead = Lookahead(crumb.step, caches[0], sure=True)
            ahead.hand_over()
            mx.eval(ahead.run(token))
            now = _allowed()
            assert all(now.get(thread, allowed) == allowed for thread, allowed in wanted.items())
    finally:
        _allow(before)


@needed
@pytest.mark.parametrize("steps", [2, 9])
def test_every_kind_of_cache_comes_back_from_a_step_that_waits(steps: int, library):
    plain, tried = _caches(), _caches()
    for _ in range(steps):
        _step(mx.array(0), plain)
        _step(mx.array(0), tried)
        ahead = Lookahead(_step, tried, sure=True)
        ahead.hand_over()
        ahead.discard()
        assert [_contents(c) for c in plain] == [_contents(c) for c in tried]


@needed
def test_nobody_waits_for_a_token_that_is_never_named(library):
    """Neither who lets the step go, of more operations than MLX lets be unfinished; nor a process
    that ends."""
    Lookahead(lambda token, cache: sum([token] * 2000), [], sure=True).hand_over()
    assert (mx.array(2) + 2).item() == 4
    code = (
        "import sys, mlx.core as mx\nfrom toastkit.engine.lookahead import Lookahead\n"
        "from toastkit.native import library\nlibrary.use(library.load(sys.argv[1]))\n"
        "mx.set_default_device(mx.cpu)\n"
        "mx.never = Lookahead(lambda token, cache: token + 1.0, [], sure=True)\n"
        "mx.never.hand_over()\n"
    )
    assert subprocess.run([sys.executable, "-c", code, library], timeout=60).returncode == 0


@needed
def test_a_summary_is_of_the_last_step(crumb) -> None:
    """Whether that was built ahead, and handed over, or neither, as after a shift of gears."""
    state = read(crumb, PROMPT["token_ids"])
    for token, ahead in zip(PROMPT["token_ids"], (False, False, True, False)):
        if ahead:
            crumb.look_ahead(state)
            state.hand_over_ahead(measured=True)
        crumb.consume(state, token)
        state.submit(measured=True)
        found = state.summary()
        assert found.entropy == pytest.approx(entropy_bits(state.logits).item(), abs=1e-4)


def _step(token, cache):
    """Stands for a model: a step writes one row into every cache."""
    for layer in cache:
        _write(layer, 1)
    return token.astype(mx.float32)


def _write(layer, rows: int, size: int = 4) -> None:
    if isinstance(layer, CacheList):
        for part in layer.caches:
            _write(part, rows, size)
    elif isinstance(layer, ArraysCache):
        layer[0] = (layer[0] if layer[0] is not None else mx.zeros(3)) + rows
    else:
        if isinstance(layer, ChunkedKVCache):
            layer.maybe_trim_front()
        values = mx.arange(layer.offset, layer.offset + rows, dtype=mx.float32)
        new = mx.broadcast_to(values[None, None, :, None], (1, 2, rows, size))
        layer.update_and_fetch(new, new)


def _contents(layer) -> list:
    """What attention would read, in its order, and all that tells where the next row goes."""
    if isinstance(layer, CacheList):
        return [x for part in layer.caches for x in _contents(part)]
    if isinstance(layer, ArraysCache):
        return [layer[0].tolist()]
    places = [getattr(layer, name, None) for name in ("_idx", "start_position")]
    used = layer.keys[..., : layer.offset - (places[1] or 0), :]
    return [layer.offset, *places, used.tolist()]


def _caches() -> list:
    return [
        KVCache(), RotatingKVCache(max_size=4), RotatingKVCache(max_size=4, keep=1),
        ArraysCache(2), ConcatenateKVCache(), ChunkedKVCache(4),
        CacheList(ArraysCache(1), KVCache(), RotatingKVCache(max_size=4)),
    ]  # fmt: skip


@pytest.mark.parametrize("steps", [2, 9])
def test_every_kind_of_cache(steps: int):
    plain, tried = _caches(), _caches()
    for _ in range(steps):
        _step(mx.array(0), plain)
        _step(mx.array(0), tried)
        Lookahead(_step, tried).discard()
    _step(mx.array(0), plain)
    Lookahead(_step, tried).run(0)
    assert [_contents(c) for c in plain] == [_contents(c) for c in tried]


@pytest.mark.parametrize("prompt", [0, 1, 3, 4, 6])
@pytest.mark.parametrize("steps", [1, 3, 4, 9])
def test_rolled_back_is_never_run(prompt: int, steps: int) -> None:
    """Every class of cache, empty, full, over full and wrapped round: to the bit."""
    plain, tried = _caches(), _caches()
    for caches in (plain, tried):
        for layer in caches:
            if prompt:
                _write(layer, prompt)
        for _ in range(steps):
            _step(mx.array(0), caches)
    for _ in range(6):
        held = prompt + steps
        point = take_savepoint(tried, held, one_step=True)
        before = [_contents(c) for c in tried]
        _step(mx.array(0), tried)
        mx.eval([layer.state for layer in tried])
        roll_back(tried, held + 1, point)
        assert [_contents(c) for c in tried] == before == [_contents(c) for c in plain]
        _step(mx.array(0), plain)
        _step(mx.array(0), tried)
        steps += 1


@pytest.mark.parametrize("held", [0, 1, 3, 4, 6])
@pytest.mark.parametrize("tokens", [1, 3])
def test_a_pass_that_fails_half_way_is_never_run(held: int, tokens: int) -> None:
    """Wherever it fails: what is written next lies where it would have lain."""
    for ran in range(len(_caches()) + 1):
        plain, tried = _caches(), _caches()
        for layer in (*plain, *tried):
            if held:
                _write(layer, held)
        with suppress(OSError), undone_on_failure(tried, tokens):
            for layer in tried[:ran]:
                _write(layer, tokens)
            raise OSError
        for layer in (*plain, *tried):
            _write(layer, 2)
        assert [_contents(c) for c in tried] == [_contents(c) for c in plain]


@pytest.mark.parametrize("make", [KVCache, lambda: RotatingKVCache(max_size=4096)])
def test_no_keys_and_values_are_copied(make) -> None:
    """The step after a savepoint writes where it would have written without."""
    layer = make()
    _write(layer, 4000, 64)
    for _ in range(200):
        _write(layer, 1, 64)
    mx.eval(layer.state)
    point = take_savepoint([layer], 4200, one_step=True)
    size, before = layer.nbytes, mx.get_active_memory()
    mx.reset_peak_memory()
    _write(layer, 1, 64)
    mx.eval(layer.state)
    assert mx.get_peak_memory() - before < size / 8
    roll_back([layer], 4201, point)
    assert layer.offset == 4200
