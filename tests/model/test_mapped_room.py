"""Room behind keys and values that are read where they lie in cache.bin."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest

from tests.model.test_mapped_state import (
    built,
    cache,
    commit,
    in_use,
    is_mapped,
    library,
    make,
    restored,
)
from tests.native_library import needed
from toastkit.session import mapped

__all__ = ["built", "cache", "in_use", "library"]
pytestmark = needed


@pytest.mark.parametrize("least", [1, 100_000])
def test_keys_of_another_size_than_values_have_the_same_room(tmp_path: Path, least: int) -> None:
    """As latent attention keeps them: the larger ones are worth a map, the smaller are not. mlx_lm
    asks the keys whether there is room."""
    sizes, count, end = (512, 64), 200, 200 + mapped.ROOM + 150

    def rows_of(first: int, last: int) -> list[mx.array]:
        return [
            mx.arange(first * n, last * n, dtype=mx.float32).reshape(1, 1, -1, n) for n in sizes
        ]

    kept = make(layers=1)
    mx.eval(kept[0].update_and_fetch(*rows_of(0, count)))
    commit(tmp_path, list(range(count)), kept)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mapped, "LEAST", least)
        [layer] = restored(tmp_path, count, layers=1)
    assert layer.keys.shape[2] == layer.values.shape[2]
    assert is_mapped(layer.keys) and is_mapped(layer.values)
    for at in range(count, end, 25):
        found = layer.update_and_fetch(*rows_of(at, at + 25))
        for ours, theirs in zip(found, rows_of(0, at + 25)):
            assert mx.array_equal(ours, theirs)
