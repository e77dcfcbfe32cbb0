"""What attention appends to its caches, in one native operation."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import cache as mlx_caches

from tests.native_library import built, cache, library, needed, operations_of
from toastkit.native import kv_caches
from toastkit.native.library import Library

__all__ = ["built", "cache", "library"]
pytestmark = needed
IN_USE = "toastkit.native.library._in_use"


@pytest.mark.parametrize("given", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.int8])
def test_appending_is_one_operation(
    library: Library, given: mx.Dtype, dtype: mx.Dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same to the bit as MLX's, in the memory that the cache has, whoever is to see it or not;
    a cache that is full grows as ever."""
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
        assert mx.array_equal(kept.keys, theirs.keys).item() and kept.offset == theirs.offset
        if before is not None:
            assert mx.array_equal(before[0], before[1]).item()
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


def pointer(array: mx.array) -> int:
    """Where an array's numbers begin."""
    return np.frombuffer(memoryview(array.view(mx.uint16)), np.uint16).ctypes.data
