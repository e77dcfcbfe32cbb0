"""Graphs of MLX with native operations that are evaluated more than once."""

from __future__ import annotations

import ctypes
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import mlx.core as mx
import pytest

from tests.model.test_native_operations import alike, library, numbers
from tests.native_library import needed
from toastkit.native.library import Library, objects

__all__ = ["library"]
pytestmark = needed


@pytest.fixture
def compiling() -> Iterator[None]:
    mx.enable_compile()
    yield
    mx.disable_compile()  # as engines leave it


@contextmanager
def little_memory() -> Iterator[None]:
    """For 16 MiB more."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text("ascii").split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (16 << 20), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.parametrize("held", [True, False])
def test_a_compiled_function_computes_each_time(
    library: Library, compiling: None, held: bool
) -> None:
    """With weights of its own (held), or such as it is given."""
    weight = numbers(9, (1, 7, 32), mx.float32)[0]
    mx.eval(weight)
    if held:
        product = mx.compile(lambda x, _: library.multiply(library.softmax(x), weight) + 1)
    else:
        product = mx.compile(lambda x, w: library.multiply(library.softmax(x), w) + 1)
    for seed in range(3):
        x = numbers(seed, (1, 3, 32), mx.float32)[0]
        assert alike(product(x, weight), mx.softmax(x, -1) @ weight.T + 1)


def test_a_product_that_there_was_no_memory_for(library: Library) -> None:
    x, weight = numbers(1, (1, 1 << 14, 32), mx.float32)[0], numbers(2, (1, 1024, 32), mx.float32)
    weight = weight[0]
    mx.eval(x, weight)
    y = library.multiply(x, weight)  # 64 MiB
    with little_memory(), pytest.raises(MemoryError):
        mx.eval(y)
    assert alike(y[:5], x[:5] @ weight.T)


def test_caches_that_there_was_no_memory_for(library: Library) -> None:
    """One output after another has been asked for."""
    empty = mx.broadcast_to(mx.array(0.0), (1, 2, 1 << 18, 32))  # 64 MiB each
    keys, values = (numbers(seed, (1, 2, 3, 32), mx.float32) for seed in (3, 4))
    mx.eval(empty, keys, values)
    made = library.append((empty, empty), (keys, values), 0)
    for output in made[:2]:
        with little_memory(), pytest.raises(MemoryError):
            mx.eval(output)
    assert alike(made[2], keys) and alike(made[3], values)


def test_no_writer_of_caches_is_left_waiting_without_memory(library: Library) -> None:
    """An operation that never ran, though one of its caches had its buffer."""
    empty = mx.broadcast_to(mx.array(0.0), (1, 2, 1 << 18, 32))
    new = tuple(numbers(seed, (1, 2, 1, 32), mx.float32) for seed in (3, 4))
    keys = library.append((empty, empty), new, 0)[0]
    mx.eval(keys, *new)
    made = library.append((keys, empty), new, 1)
    del keys
    with little_memory(), pytest.raises(MemoryError):
        mx.eval(made[0])
    deadline = time.monotonic() + 9
    mx.eval(made)
    assert time.monotonic() < deadline, "it waited for an operation that never ran"


def test_nor_is_one_of_a_row_where_there_was_none_for_the_next(library: Library) -> None:
    """The first row's caches had their buffers."""
    empty = mx.broadcast_to(mx.array(0.0), (1, 2, 1 << 18, 32))
    own = [mx.zeros((1, 2, 4, 32)) for _ in range(2)]
    new = [mx.ones((2, 2, 1, 32)) for _ in range(2)]
    mx.eval(own, new)
    made = [mx.array(0) for _ in range(4)]
    numbers_of = (ctypes.c_int * 2)(1, 0)
    given = objects(*own, empty, empty, *new)
    library.c.append_apart(objects(*made), given, numbers_of, (ctypes.c_int * 2)(), 2)
    del own, given
    with little_memory(), pytest.raises(MemoryError):
        mx.eval(made)
    deadline = time.monotonic() + 9
    mx.eval(made)
    assert time.monotonic() < deadline, "it waited for an operation that never ran"
