"""Reads past the page cache give the bytes of the file, at any alignment."""

from __future__ import annotations

import errno
import mmap
import os
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toastkit.store import direct
from toastkit.store.direct import MIN_STRAIGHT, PAGE, DirectReads

SIZE = 3 * MIN_STRAIGHT + 12_345
BYTES = np.random.default_rng(0).integers(0, 256, SIZE, np.uint8)


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    """A file that the system's cache has let go of. Skips where it does not, or cannot."""
    path = tmp_path_factory.mktemp("direct") / "file"
    path.write_bytes(BYTES.tobytes())
    with path.open("rb") as file:
        if not hasattr(os, "posix_fadvise"):
            pytest.skip("no system that reads so")
        os.fdatasync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if DirectReads().read(file.fileno(), [memoryview(bytearray(8))], 0) is None:
            pytest.skip("a file system that cannot, or does not let go of its pages")
    return path


def memory_at(place: int, size: int) -> np.ndarray:
    """uint8 (size,) that begins with byte `place` of a page."""
    memory = np.frombuffer(mmap.mmap(-1, size + 2 * PAGE), np.uint8)
    lead = (place - memory.ctypes.data) % PAGE
    return memory[lead : lead + size]


SIZES = st.one_of(st.integers(0, 5000), st.integers(MIN_STRAIGHT - 1, 2 * MIN_STRAIGHT))


@given(st.data())
@settings(deadline=None, max_examples=60)
def test_any_bytes_into_any_memory(path: Path, data: st.DataObject) -> None:
    """Memory that lies in pages as the file does, and other; in as many calls as it takes, past the
    end too. Beside it nothing is written."""
    start = data.draw(st.integers(0, SIZE + 10))
    sizes = data.draw(st.lists(SIZES, min_size=1, max_size=5))
    between = data.draw(st.sampled_from([PAGE, 3 * PAGE, direct.BOUNCE_BYTES]))
    memories, position = [], start
    for size in sizes:
        congruent = data.draw(st.booleans())
        memories.append(memory_at(position if congruent else position + 16, size + 8))
        position += size
    reads = DirectReads()
    reads._own.between = memory_at(0, between)
    views = [memoryview(memory)[:-8] for memory in memories]
    at = start
    with path.open("rb") as file:
        while any(views):
            count = reads.read(file.fileno(), views, at)
            assert count is not None and count <= sum(map(len, views))
            if not count:
                break
            at += count
            while views and count >= len(views[0]):
                count -= len(views.pop(0))
            if views:
                views[0] = views[0][count:]
    for descriptor in reads.opened.values():
        os.close(descriptor)
    assert at == max(start, min(position, SIZE))
    position = start
    for memory in memories:
        there = BYTES[position : position + memory.size - 8]
        assert np.array_equal(memory[: there.size], there) and not memory[there.size :].any()
        position += memory.size - 8


def test_what_the_cache_has_is_left_to_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(BYTES.tobytes())
    with (tmp_path / "file").open("rb") as file:
        file.read()
        assert DirectReads().read(file.fileno(), [memoryview(bytearray(1000))], 0) is None


@pytest.mark.parametrize("what", ["open", "preadv"])
def test_a_file_system_that_cannot(path: Path, monkeypatch, what: str) -> None:
    """It is not asked again. An error of the disk is one."""

    def refuse(number: int):
        def call(*_: object) -> None:
            raise OSError(number, "no")

        return call

    with path.open("rb") as file:
        view = memoryview(bytearray(8))
        for number, possible in ((errno.EIO, True), (errno.EINVAL, False)):
            reads = DirectReads()
            monkeypatch.setattr(direct.os, what, refuse(number))
            if possible:
                with pytest.raises(OSError, match="no"):
                    reads.read(file.fileno(), [view], 0)
            else:
                assert reads.read(file.fileno(), [view], 0) is None
            assert reads.possible is possible
            monkeypatch.undo()
            for descriptor in reads.opened.values():
                os.close(descriptor)


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc")
def test_memory_that_nobody_has_written_to_takes_none() -> None:
    """And reads as zeros; what is written stays."""

    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * mmap.PAGESIZE

    before = resident()
    memory = direct.unwritten(64 << 20)
    assert not any(memory[:: mmap.PAGESIZE])
    assert resident() - before < 16 << 20
    memory[5:8] = b"abc"
    assert bytes(memory[4:9]) == b"\0abc\0"
