"""What reading does to bytes on their way, to memory that is used again, and to the file cache."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import threading
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from toastkit import private_files
from toastkit.model.config import fingerprint
from toastkit.model.locate import locate
from toastkit.store.jobs import Job
from toastkit.store.raw import RawTensors, Span
from toastkit.store.reader import WIDENED_BYTES, Reader
from toastkit.store.waiting import AHEAD, NOW

PAGE = mmap.PAGESIZE
NO_FLAG = 1 << 30  # of preadv2: refused, as one is that the system does not know yet


def write(path: Path, arrays: dict[str, mx.array]) -> Path:
    mx.save_safetensors(str(path / "model.safetensors"), arrays)
    (path / "config.json").write_text('{"model_type": "llama"}')
    return path


def jobs_of(raw: RawTensors, *names: str, widened: bool = False) -> dict[str, Job]:
    found = {}
    for name in names:
        _, entry = raw.place(name)
        found[name] = Job(raw.spans(name), entry.dtype, entry.shape, widened)
    return found


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_sixteen_bits_become_float32_as_mlx_makes_them(tmp_path: Path, dtype) -> None:
    """Every one of the 65,536 patterns, over and over, in more than one piece and with an end."""
    count = WIDENED_BYTES + 2 * 777
    patterns = np.arange(count // 2, dtype=np.uint32).astype(np.uint16)
    values = mx.array(patterns).view(dtype)
    raw = RawTensors(locate(str(write(tmp_path, {"model.a": values}))))
    reader = Reader(raw)
    found = reader.request(jobs_of(raw, "model.a", widened=True), dict, NOW).result()["model.a"]
    wanted = values.astype(mx.float32)
    assert found.dtype == mx.float32
    ours, theirs = (np.array(x.view(mx.uint32)) for x in (found, wanted))
    numbers = ~np.isnan(np.array(wanted))
    assert (ours == theirs)[numbers].all() and np.isnan(np.array(found))[~numbers].all()
    reader.close()


def test_memory_is_read_into_again(tmp_path: Path) -> None:
    """Where it was given back and has the size; meanwhile in the account, within the limit."""
    names = [f"model.{c}" for c in "abcd"]
    arrays = {name: mx.random.normal((64, 64 + 8 * (n == 3))) for n, name in enumerate(names)}
    raw = RawTensors(locate(str(write(tmp_path, arrays))))
    size = arrays["model.a"].nbytes
    reader = Reader(raw, ahead_bytes=2 * size)

    def address(array: mx.array) -> int:
        return np.array(array, copy=False).ctypes.data

    first = reader.request(jobs_of(raw, "model.a"), dict, NOW)
    array = first.result()["model.a"]
    mx.eval(array)
    place = address(array)
    del array
    first.give_back()
    first.give_back()  # once
    assert reader.held_bytes == size
    other = reader.request(jobs_of(raw, "model.d"), dict, NOW).result()["model.d"]
    assert mx.array_equal(other, arrays["model.d"]).item()
    second = reader.request(jobs_of(raw, "model.b"), dict, NOW)
    again = second.result()["model.b"]
    mx.eval(again)
    assert mx.array_equal(again, arrays["model.b"]).item()
    assert address(again) == place or reader.held_bytes == 0
    third = reader.request(jobs_of(raw, "model.a", "model.b", "model.c"), dict, NOW)
    third.result()
    third.give_back()  # of three as much as there is room for
    assert reader.held_bytes == 2 * size
    reader.drop_spare()
    assert reader.held_bytes == 0
    reader.close()


def test_without_threads_who_waits_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where there may be no more of them (ulimit -u), or no room for stacks (ulimit -v)."""

    def fail(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    arrays = {f"model.{name}": mx.full((1000, 30), n) for n, name in enumerate("abc")}
    raw = RawTensors(locate(str(write(tmp_path, arrays))))
    monkeypatch.setattr(threading.Thread, "start", fail)
    reader = Reader(raw)
    ahead = reader.request(jobs_of(raw, "model.b", "model.c"), dict, AHEAD)
    found = {**reader.request(jobs_of(raw, "model.a"), dict, NOW).result(), **ahead.result()}
    assert all(mx.array_equal(found[name], arrays[name]).item() for name in arrays)
    reader.close()


def cached_pages(path: Path) -> int:
    """Pages of a file that the system holds in memory."""
    size = path.stat().st_size
    found = (ctypes.c_ubyte * -(-size // PAGE))()
    with path.open("rb") as file, mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ) as view:
        start = np.frombuffer(view, np.uint8)
        address = ctypes.c_void_p(start.ctypes.data)
        assert ctypes.CDLL(None).mincore(address, ctypes.c_size_t(size), found) == 0
        del start
    return sum(page & 1 for page in found)


def evict(path: Path) -> None:
    with path.open("rb") as file:
        os.fdatasync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if cached_pages(path):
        pytest.skip("this file system does not let go of its pages")


@pytest.mark.skipif(sys.platform != "linux", reason="mincore(2) counts pages as Linux does")
@pytest.mark.parametrize("past_cache", [True, False])
def test_samples_of_a_file_stay_out_of_its_cache(
    tmp_path: Path, past_cache: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the system can: between pages that are cached one by one there is no room for large
    ones. The fingerprint is the same."""
    path = write(tmp_path, {"model.a": mx.arange(1 << 22)}) / "model.safetensors"
    files = locate(str(tmp_path))
    wanted = fingerprint(files)
    evict(path)
    with path.open("rb") as file:
        if private_files.pread_past_cache(file.fileno(), [bytearray(1)], 1 << 20) is None:
            pytest.skip("this system cannot")
    if not past_cache:
        monkeypatch.setattr(private_files, "RWF_DONTCACHE", NO_FLAG)
    assert fingerprint(files) == wanted
    assert (cached_pages(path) < 40) == past_cache  # the header's, and what it reads ahead


@pytest.mark.skipif(sys.platform != "linux", reason="mincore(2) counts pages as Linux does")
@pytest.mark.parametrize("way", ["direct", "dontcache", "fadvise", "cached"])
def test_what_is_read_once_a_token_leaves_the_file_cache(
    tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that it does not throw out what others have use for. Where it is to stay, it does."""
    if way == "fadvise":
        monkeypatch.setattr(private_files, "RWF_DONTCACHE", NO_FLAG)
    path = write(tmp_path, {"model.a": mx.zeros((1 << 21,))}) / "model.safetensors"
    evict(path)
    raw = RawTensors(locate(str(tmp_path)))
    raw.cached = way == "cached"
    raw._direct.possible &= way == "direct"
    (span,) = raw.spans("model.a")
    view = memoryview(bytearray(span.stop - span.start))
    raw.fill([(Span(*span), view)], lambda: False)
    pages = cached_pages(path)
    assert pages > 2000 if way == "cached" else pages < 40  # the header's, and what it reads ahead
    raw.close()
