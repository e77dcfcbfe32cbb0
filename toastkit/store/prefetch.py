"""Reading ahead: file ranges are read into the system's page cache before somebody needs them.

The bytes are read in large chunks, in the order of the file, and thrown away: the page cache keeps
them, and gives them back under pressure, so that this bounds its own memory to a chunk a thread.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

CHUNK_BYTES = 8 << 20
MERGE_BYTES = 1 << 20  # ranges no further apart are read as one
AHEAD_BYTES = 1 << 30
THREADS = 2


class Range(NamedTuple):
    """Bytes start:stop of a file."""

    path: Path
    start: int
    stop: int


def merged(ranges: Iterable[Range]) -> list[Range]:
    """Sorted by place, neighbours joined."""
    joined: list[Range] = []
    for one in sorted(ranges):
        last = joined[-1] if joined else None
        if last and last.path == one.path and one.start <= last.stop + MERGE_BYTES:
            joined[-1] = Range(last.path, last.start, max(last.stop, one.stop))
        else:
            joined.append(one)
    return joined


class Prefetcher:
    """A small pool of threads. ahead_bytes: how much may be asked for and not be read yet; what
    goes beyond is not read ahead, and `declined` counts its bytes."""

    def __init__(self, ahead_bytes: int = AHEAD_BYTES, threads: int = THREADS):
        self._limit = ahead_bytes
        self._pool = ThreadPoolExecutor(threads, "prefetch")
        self._lock = threading.Lock()
        self._pending = 0
        self._closed = False
        self.declined = 0
        self.read = 0

    def ask(self, ranges: Iterable[Range]) -> None:
        """Starts reading and returns at once."""
        for one in merged(ranges):
            size = one.stop - one.start
            with self._lock:
                if self._closed or self._pending + size > self._limit:
                    self.declined += size
                    continue
                self._pending += size
            self._pool.submit(self._read, one)

    def _read(self, one: Range) -> None:
        done = 0
        try:
            scratch = memoryview(bytearray(min(CHUNK_BYTES, one.stop - one.start)))
            with open(one.path, "rb", buffering=0) as file:
                file.seek(one.start)
                while done < one.stop - one.start and not self._closed:
                    count = file.readinto(scratch[: one.stop - one.start - done])
                    if not count:
                        break
                    done += count
        except OSError:
            pass  # only a hint: whoever needs the bytes meets the error
        finally:
            with self._lock:
                self._pending -= one.stop - one.start
                self.read += done

    def wait(self) -> None:
        """Waits until all that was asked for has been read; no more can be asked afterwards."""
        self._pool.shutdown(wait=True)

    def close(self) -> None:
        """Stops reading. May be called again."""
        self._closed = True
        self._pool.shutdown(wait=True, cancel_futures=True)
