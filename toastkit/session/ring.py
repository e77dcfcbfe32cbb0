"""The logits ring: float32 logits of the last few steps, in a file that a run's processes share,
laid out as toast-frames(5) says.

Steps are numbered from 1; step n is in slot (n - 1) % slots. A slot is a seqlock: the writer sets
its number to 0, writes the logits, sets the number; a reader looks at the number before and after
its copy. A reference to a step that the ring has passed is an error, never other numbers. The file
is filled when it is made: a full disk is an error then, not a SIGBUS in the middle of a run. The
writer maps it, and looks at its size before each step; readers, who get it from others, use pread.
"""

from __future__ import annotations

import errno
import mmap
import os
import struct
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toastkit.errors import DataError, IOFailure, from_os_error
from toastkit.frames import MAX_VOCAB, Reference
from toastkit.private_files import Descriptor, open_private, pread_into, pwrite_all

if TYPE_CHECKING:
    import numpy as np

MAGIC = b"toastrng"
VERSION = 1
HEADER = struct.Struct("<8sIIII")
NUMBER = struct.Struct("<Q")
LINE_BYTES = 64
STALE_HINT = "use --inline to save a stream"


def _stride(vocab: int) -> int:
    return LINE_BYTES + -(-4 * vocab // LINE_BYTES) * LINE_BYTES


class RingWriter:
    """Makes the ring of a run and writes steps into it.

    vocab: logits a step. slots: steps a reader may lag behind before its reference is stale.
    Raises IOFailure if the disk is full, CannotCreateError.
    """

    def __init__(self, path: Path | str, vocab: int, slots: int = 8):
        self.vocab = vocab
        self.slots = slots
        self._stride = _stride(vocab)
        self._number = 0
        self._size = size = LINE_BYTES + slots * self._stride
        try:
            self._fd = fd = open_private(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
            try:
                _fill(fd, size)
                pwrite_all(fd, HEADER.pack(MAGIC, VERSION, vocab, slots, 0), 0)
                self._map = mmap.mmap(fd, size)
            except BaseException:
                os.unlink(path)
                os.close(fd)
                raise
        except OSError as error:
            raise from_os_error(
                error, f"cannot make the logits ring {path}", creating=True
            ) from error

    def write(self, logits: Any) -> Reference:
        """Copies one step's logits, any contiguous buffer of float32 (vocab,), into the next slot.
        Returns what a frame says in their place; it is good for `slots` steps.
        Raises ValueError for another dtype or size, IOFailure where the file was cut short."""
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
        _fence()
        NUMBER.pack_into(self._map, start, self._number)
        return Reference(slot, self._number, "float32", (self.vocab,))

    def close(self) -> None:
        """Unmaps the ring; the file stays until the run's directory goes."""
        self._map.close()
        os.close(self._fd)


_ORDER = threading.Lock()


def _fence() -> None:
    """A memory barrier, for weakly ordered processors such as ARM: loads and stores before the
    release of a lock are seen before those after its next acquisition."""
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
    """Reads steps from a run's ring. Raises DataError if there is none (any more) or it is not one.

    vocab: logits a step. slots: as its writer made it."""

    def __init__(self, path: Path | str):
        try:
            self._fd = open_private(path, os.O_RDONLY)
        except FileNotFoundError:
            raise DataError(f"the logits of run {Path(path).parent} are gone", STALE_HINT) from None
        except OSError as error:
            raise from_os_error(error, f"cannot read the logits ring {path}") from error
        try:
            self.vocab, self.slots = self._shape(path)
        except BaseException:
            self.close()
            raise
        import numpy as np

        # A slot as it lies, number and logits, is read at once into memory that is made once; then
        # the number again: where it is still the same, the logits were whole all the time.
        self._stride = _stride(self.vocab)
        slot = np.empty(self._stride, np.uint8)
        self._copy, self._after = slot.data, memoryview(bytearray(NUMBER.size))
        self._values = slot[LINE_BYTES : LINE_BYTES + 4 * self.vocab].view("<f4")

    def _shape(self, path: Path | str) -> tuple[int, int]:
        header = bytearray(HEADER.size)
        if self._fill(memoryview(header), 0):
            magic, version, vocab, slots, _ = HEADER.unpack(header)
            whole = os.fstat(self._fd).st_size == LINE_BYTES + slots * _stride(vocab)
            if magic == MAGIC and version == VERSION and 0 < vocab < MAX_VOCAB and slots and whole:
                return vocab, slots
        raise DataError(f"not a logits ring: {path}")

    def _fill(self, buffer: Any, offset: int) -> bool:
        """Reads a part of the file; False where it ends before."""
        try:
            return pread_into(self._fd, buffer, offset)
        except OSError as error:
            raise from_os_error(error, "cannot read the logits ring") from error

    def read(self, reference: Reference) -> np.ndarray:
        """The logits that a reference points to, float32 (vocab,): a copy, until the next read.
        Raises DataError if the ring has gone past them or cannot hold such an array."""
        slot, number = reference.slot, reference.seq
        fits = reference.dtype == "float32" and tuple(reference.shape) == (self.vocab,)
        if not (fits and 0 <= slot < self.slots and number > 0):
            raise DataError("a reference to logits does not fit the run's ring", STALE_HINT)
        start = LINE_BYTES + slot * self._stride
        if self._fill(self._copy, start) and NUMBER.unpack_from(self._copy)[0] == number:
            _fence()
            if self._fill(self._after, start) and NUMBER.unpack(self._after)[0] == number:
                return self._values
        raise DataError(f"logits of step {number} are gone: the reference is stale", STALE_HINT)
