"""Files mapped into ranges of memory, with arrays over them."""

from __future__ import annotations

import errno
import gc
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.native_library import built, cache, library, native_path, needed
from toastkit.native.library import Library
from toastkit.native.regions import PAGE, Region

__all__ = ["built", "cache", "library"]
pytestmark = needed


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """8 pages of other bytes each."""
    path = tmp_path_factory.mktemp("files") / "pages"
    path.write_bytes(np.random.default_rng(1).bytes(8 * PAGE))
    return path


def mapped() -> int:
    """Maps that this process has."""
    return Path("/proc/self/maps").read_text().count("\n")


def pages() -> st.SearchStrategy:
    """(page of the region, page of the file or None for zeros, count)."""
    return st.tuples(st.integers(0, 7), st.none() | st.integers(0, 7), st.integers(0, 4))


@given(st.lists(pages(), max_size=8), st.integers(0, 15), st.integers(0, 3))
def test_a_region_has_what_was_put_there_last(
    library: Library, file: Path, puts: list[tuple], first: int, axes: int
) -> None:
    region, wanted = Region(library, 8 * PAGE), bytearray(8 * PAGE)
    data = file.read_bytes()
    region.room(0, region.nbytes)
    with open(file, "rb") as stored:
        for at, of, count in puts:
            count = min(count, 8 - at, 8 - (of or 0))
            size, place = count * PAGE, at * PAGE
            if of is None:
                region.room(place, size)
            else:
                region.map_file(place, stored.fileno(), of * PAGE, size)
            wanted[place : place + size] = bytes(size) if of is None else data[of * PAGE :][:size]
    shape = (2, 3, 5)[:axes]
    found = region.array(4 * first, mx.uint32, shape)
    del region
    assert (found.shape, found.dtype) == (shape, mx.uint32)
    count = int(np.prod(shape))
    expected = np.frombuffer(wanted, "<u4", count, 4 * first).reshape(shape)
    assert np.array_equal(np.array(found), expected)
    assert mx.sum(found + 1).item() == (int(np.array(found, np.int64).sum()) + count) % 2**32


def test_it_ends_with_the_last_of_its_holders(library: Library, file: Path) -> None:
    gc.collect()
    before = mapped()
    region = Region(library, 8 * PAGE)
    with open(file, "rb") as stored:
        region.map_file(PAGE, stored.fileno(), 0, 2 * PAGE)
    one, other = (region.array(PAGE * n, mx.float16, (4, 8)) for n in (1, 2))
    del region
    lazy, wanted = (one.view(mx.uint16) + 1).sum(), int(np.array(one.view(mx.uint16) + 1).sum())
    del one
    assert mapped() > before and lazy.item() == wanted
    del lazy
    assert np.array(other.view(mx.uint8)).tobytes() == file.read_bytes()[PAGE:][:64]
    del other
    mx.synchronize()
    assert mapped() == before


def test_what_is_written_is_a_copy(library: Library, file: Path) -> None:
    """Of MLX's operations none writes there, though nobody else has the array; who writes there
    has pages of its own, and the others go on to show the file."""
    data = file.read_bytes()
    region = Region(library, 2 * PAGE)
    with open(file, "rb") as stored:
        region.map_file(0, stored.fileno(), 0, 2 * PAGE)
    mine: Any = region.array(0, mx.uint8, (2 * PAGE,))
    added = region.array(0, mx.uint8, (2 * PAGE,))
    added = added + 1
    added[:3] = 7
    assert added[:4].tolist() == [7, 7, 7, (data[3] + 1) % 256]
    seen = memoryview(mine)
    assert bytes(seen) == data[: 2 * PAGE]
    seen[5] = data[5] ^ 1
    assert file.read_bytes() == data
    with open(file, "r+b") as stored:
        stored.write(bytes(10))
        stored.seek(PAGE)
        stored.write(bytes(10))
    assert bytes(seen[:5]) == data[:5] and bytes(seen[PAGE:][:10]) == bytes(10)
    file.write_bytes(data)


def test_what_is_wrong_is_said(library: Library, file: Path, tmp_path: Path) -> None:
    with pytest.raises(OSError) as wrong:
        Region(library, 0)
    assert wrong.value.errno == errno.EINVAL
    region = Region(library, PAGE + 1)
    assert region.nbytes == 2 * PAGE
    with open(file, "rb") as stored:
        fd = stored.fileno()
        beyond = (PAGE, 0, PAGE + 1)
        for at, offset, count in ((1, 0, 9), (0, 9, 9), (-PAGE, 0, 9), beyond, (0, -PAGE, 9)):
            with pytest.raises(OSError) as wrong:
                region.map_file(at, fd, offset, count)
            assert wrong.value.errno == errno.EINVAL
    with pytest.raises(OSError) as wrong:
        region.map_file(0, fd, 0, PAGE)
    assert wrong.value.errno == errno.EBADF
    with open(tmp_path / "writes", "wb") as stored, pytest.raises(OSError) as wrong:
        region.map_file(0, stored.fileno(), 0, PAGE)
    assert wrong.value.errno == errno.EACCES
    with pytest.raises(ValueError, match="no descriptor"):
        region.map_file(0, -1, 0, PAGE)
    with pytest.raises(OSError):
        region.advise(0, PAGE, 12345)
    region.room(0, PAGE)
    region.advise(5, PAGE - 5, 3)
    huge = (PAGE, 2**31 - 1, 2**31 - 1)
    for at, shape in ((2, (1,)), (0, (PAGE // 2 + 1,)), (8, huge), (-4, ())):
        with pytest.raises(ValueError):
            region.array(at, mx.float32, shape)
    assert region.array(2 * PAGE, mx.float32, (3, 0)).shape == (3, 0)


def test_no_addresses_are_an_error(cache: Path) -> None:
    code = f"""
import resource
from toastkit.native.library import load
from toastkit.native.regions import Region
library = load({str(native_path(cache))!r})
resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
try:
    Region(library, 9 << 30)
except OSError as error:
    print(error.errno)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == (f"{errno.ENOMEM}\n", "")


def test_a_fork_has_its_own(library: Library, file: Path) -> None:
    region = Region(library, PAGE)
    region.room(0, PAGE)
    mine: Any = region.array(0, mx.uint8, (PAGE,))
    seen = memoryview(mine)
    if not (child := os.fork()):
        seen[0] = 9
        os._exit(seen[0])
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9 and seen[0] == 0
