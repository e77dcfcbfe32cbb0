"""Keys and values read in place whose extents do not touch: 256 rows fill pages, but no extent."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from tests.model.test_mapped_state import MODEL, is_mapped, make
from tests.native_library import built, cache, library, needed
from toastkit.native.library import Library
from toastkit.session import mapped
from toastkit.session.directory import Session

__all__ = ["built", "cache", "library"]
pytestmark = needed
SIZE = 8  # of 16 bits: 256 rows are a page of 4 KiB


@pytest.mark.parametrize("count", [700, 540_000])
def test_extents_that_do_not_touch(
    library: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """However long, they are read in place, and held by a lock for each tensor: a lock for each
    extent took 0.3 s at 68,000 positions."""
    monkeypatch.setattr("toastkit.native.library._in_use", library)
    monkeypatch.setattr(mapped, "MIN_BYTES", 1)
    held: list[tuple[int, int]] = []
    hold = mapped.hold_bytes
    monkeypatch.setattr(
        mapped, "hold_bytes", lambda fd, *place: (held.append(place), hold(fd, *place))
    )
    (made,) = make(mx.float16, layers=1)
    numbers = mx.arange(count * SIZE).reshape(1, 1, count, SIZE) % 251
    made.keys, made.values = numbers.astype(mx.float16), (numbers + 1).astype(mx.float16)
    made.offset = count
    with Session.open(tmp_path, MODEL, durable=False) as session:
        session.commit([5] * count, [made], None)
        blocks = [tensor.ranges for tensor in session.header.layers[0].tensors]
    with Session.open(tmp_path, MODEL, write=False) as session:
        (found,) = session.restore(count, lambda: make(mx.float16, layers=1))
    for array, was in ((found.keys, made.keys), (found.values, made.values)):
        assert is_mapped(array) and np.array_equal(np.array(array[:, :, :count]), np.array(was))
    first, last = zip(*((ranges[0].offset, ranges[-1]) for ranges in blocks))
    assert held == [(a, b.offset + b.length - a) for a, b in zip(first, last)]
