"""The logits ring: float32 logits of the last few steps, in a file shared by a run's processes,
laid out as toast-frames(5) says.

Steps are numbered from 1; step n is in slot (n - 1) % slots. A slot is a seqlock: the writer sets
its number to 0, writes the logits, sets the number; a reader checks the number before and after its
copy. A summary of the logits is stored with them, if the writer knows it, so that it cannot be that
of others. A reference to an overwritten step is an error, never other numbers. The file's
blocks are allocated on creation: a full disk is an error then, not a SIGBUS in the middle of a run.
The writer maps it, and checks its size before each step; readers, who get it from others, use
pread.
"""

from __future__ import annotations

import errno
import math
import mmap
import os
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from toastkit.errors import DataError, IOFailure, from_os_error, reported_as
from toastkit.frames import MAX_VOCAB, Reference
from toastkit.private_files import Descriptor, open_private, pwrite_all

if TYPE_CHECKING:
    import numpy as np

MAGIC = b"toastrng"
VERSION = 3
HEADER = struct.Struct("<8sIIII")
NUMBER = struct.Struct("<Q")
LINE = struct.Struct("<QddI")  # header of a slot: number and summary; entropy NaN without one
LINE_BYTES = 64
STALE_HINT = "use --inline to save a stream"


class Summary(NamedTuple):
    """Of logits that are all finite. entropy: of their softmax, in bits. logprob: natural log of
    the largest probability. likeliest: the id that has it, the lowest of equals."""

    entropy: float
    logprob: float
    likeliest: int


def _stride(vocab: int) -> int:
    return LINE_BYTES + -(-4 * vocab // LINE_BYTES) * LINE_BYTES


class RingWriter:
    """Create the ring of a run and write steps to it.

    vocab: logits per step. slots: steps a reader may lag behind before its reference is stale.
    Raises IOFailure if the disk is full, CannotCreateError.
    """

    def __init__(self, path: Path | str, vocab: int, slots: int = 8):
        self.vocab = vocab
        self.slots = slots
        self._stride = _stride(vocab)
        self._number = 0
        self._size = size = LINE_BYTES + slots * self._stride
        with reported_as(f"cannot make the logits ring {path}", creating=True):
            self._fd = fd = open_private(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
            try:
                _fill(fd, size)
                pwrite_all(fd, HEADER.pack(MAGIC, VERSION, vocab, slots, 0), 0)
                self._map = mmap.mmap(fd, size)
            except BaseException:
                os.unlink(path)
                os.close(fd)
                raise

    def write(self, logits: Any, summary: Callable[[], Summary | None] | None = None) -> Reference:
        """Copy one step's logits, any contiguous buffer of float32 (vocab,), into the next slot.
        Return the reference for a frame, valid for `slots` steps. summary(): of them, None if
        unknown; called after they have been copied.
        Raises ValueError for another dtype or size, IOFailure if the file was truncated."""
        data = memoryview(logits)
        if data.format != "f" or data.nbytes != 4 * self.vocab:
            raise ValueError(f"not {self.vocab} float32 logits")
        if os.lseek(self._fd, 0, os.SEEK_END) < self._size:
            raise IOFailure("cannot write the logits ring: another program has cut it short")
        self._number += 1
        slot = (self._number - 1) % self.slots
        start = LINE_BYTES + slot * self._stride
        NUMBER.pack_into(self._map, start, 0)
        _fence()
        self._map[start + LINE_BYTES : start + LINE_BYTES + data.nbytes] = data.cast("B")
        known = None if summary is None else summary()
        LINE.pack_into(self._map, start, 0, *(known or (math.nan, math.nan, 0)))
        _fence()
        NUMBER.pack_into(self._map, start, self._number)
        return Reference(slot, self._number, "float32", (self.vocab,))

    def close(self) -> None:
        """Unmap the ring; the file stays until the run's directory is removed."""
        self._map.close()
        os.close(self._fd)


_ORDER = threading.Lock()


def _fence() -> None:
    """A memory barrier, for weakly ordered processors such as ARM: loads and stores before the
    release of a lock are visible before those after its next acquisition."""
    for _ in range(2):
        _ORDER.acquire()
        _ORDER.release()


def _fill(fd: int, size: int) -> None:
    """Allocates the blocks of a file of `size` bytes. Raises OSError."""
    if hasattr(os, "posix_fallocate"):
        try:
            return os.posix_fallocate(fd, 0, size)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
    zeros = bytes(1 << 16)
    for offset in range(0, size, len(zeros)):
        pwrite_all(fd, zeros[: size - offset], offset)


class RingReader(Descriptor):
    """Read steps from a run's ring. Raises DataError if there is none (any more) or it is invalid.

    vocab: logits per step. slots: as created.
    """

    def __init__(self, path: Path | str):
        try:
            super().__init__(path, open_private(path, os.O_RDONLY))
        except FileNotFoundError:
            raise DataError(f"the logits of run {Path(path).parent} are gone", STALE_HINT) from None
        except OSError as error:
            raise from_os_error(error, f"cannot read the logits ring {path}") from error
        try:
            self.vocab, self.slots = self._shape(path)
        except BaseException:
            self.close()
            raise
        self._stride = _stride(self.vocab)
        self._line = memoryview(bytearray(LINE.size))
        self._copy: tuple[memoryview, np.ndarray] | None = None

    def _shape(self, path: Path | str) -> tuple[int, int]:
        header = os.pread(self._fd, HEADER.size, 0)
        if len(header) == HEADER.size:
            magic, version, vocab, slots, _ = HEADER.unpack(header)
            whole = os.fstat(self._fd).st_size == LINE_BYTES + slots * _stride(vocab)
            if magic == MAGIC and version == VERSION and 0 < vocab < MAX_VOCAB and slots and whole:
                return vocab, slots
        raise DataError(f"not a logits ring: {path}")

    def read(self, reference: Reference) -> np.ndarray:
        """The logits that a reference points to, float32 (vocab,): a copy, valid until the next
        read.
        Raises DataError if they have been overwritten or the ring cannot hold such an array."""
        if self._copy is None:
            import numpy as np  # not needed to read only summaries

            slot = np.empty(self._stride, np.uint8)
            values = slot[LINE_BYTES : LINE_BYTES + 4 * self.vocab].view("<f4")
            self._copy = slot.data, values
        self._take(reference, self._copy[0])
        return self._copy[1]

    def summary(self, reference: Reference) -> Summary | None:
        """The summary of the logits that a reference points to, None if the writer gave none.
        Raises as `read`."""
        self._take(reference, self._line)
        summary = Summary(*LINE.unpack(self._line)[1:])
        return None if math.isnan(summary.entropy) else summary

    def _take(self, reference: Reference, into: memoryview) -> None:
        """Copy the beginning of a slot into a buffer, then read the number again: if it is
        unchanged, the copy is consistent. Raises as `read`."""
        slot, number = reference.slot, reference.seq
        fits = reference.dtype == "float32" and tuple(reference.shape) == (self.vocab,)
        if not (fits and 0 <= slot < self.slots and number > 0):
            raise DataError("a reference to logits does not fit the run's ring", STALE_HINT)
        start, mark = LINE_BYTES + slot * self._stride, NUMBER.pack(number)
        try:
            if os.preadv(self._fd, [into], start) == into.nbytes and into[: len(mark)] == mark:
                _fence()
                if os.pread(self._fd, len(mark), start) == mark:
                    return
        except OSError as error:
            raise from_os_error(error, "cannot read the logits ring") from error
        raise DataError(f"logits of step {number} are gone: the reference is stale", STALE_HINT)
