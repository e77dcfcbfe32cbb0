"""Reading a session's files: the last commit's header, tokens and logits."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import TypeVar

from toastkit.errors import DataError, from_os_error
from toastkit.frames import unpack_ids
from toastkit.private_files import DataFiles
from toastkit.session.blocks import Stored
from toastkit.session.header import MAX_HEADER_BYTES, decode_header
from toastkit.session.layout import Damaged, Header, NewerSchema
from toastkit.session.lock import WriterLock
from toastkit.session.names import HEADER_FILE, display_name
from toastkit.session.upkeep import CACHE_FILE, LOGITS_FILE, TOKENS_FILE, gone

Result = TypeVar("Result")


def seal(fd: int) -> str | None:
    """A mark that a file keeps only until it is written to, or the machine reboots: a commit whose
    header has the current one is as it was written, as far as memory can be trusted. None if the
    system offers none."""
    boot = _boot()
    about = os.fstat(fd)
    return boot and f"{boot} {about.st_dev} {about.st_ino} {about.st_ctime_ns} {about.st_size}"


@cache
def _boot() -> str | None:
    """An identifier of the current boot."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return None


class LastCommit:
    """The last commit of one session, as its files have it.

    path: the directory. tokens: ids that it has read. header: not to be modified. lock: the
    writer's lock, None if this process only reads.
    """

    def __init__(self, path: Path, fingerprint: str | None, lock: WriterLock | None):
        self.path = path
        self.lock = lock
        self.tokens: list[int] = []
        self.header = Header(fingerprint or "")
        self._expected = fingerprint
        self._stale = False  # a commit failed while its header was being put in place
        self._files = DataFiles(path, writes=lock is not None)

    @property
    def name(self) -> str:
        """Its name in messages."""
        return display_name(self.path)

    def logits(self) -> memoryview[float] | None:
        """float32 (vocab,) after the last committed token, or None if there are none.
        Raises DataError if they are damaged."""
        wanted = self.tokens

        def attempt() -> bytearray | None:
            if self.tokens != wanted:
                raise Damaged("it was changed while it was being read")
            record = self.header.logits
            if record is None:
                return None
            return self._checked(LOGITS_FILE, [(record.offset // 4, record.count)], record.crc)

        buffer = self._guarded(attempt)
        return None if buffer is None else memoryview(buffer).cast("f")

    def _unless_changed(self, n: int, rebuilt: Callable[[], Result]) -> Result:
        """Run a reading action, and again if a writer interfered. What is stored by then must begin
        with the same n tokens."""
        wanted = self.tokens[:n]

        def attempt() -> Result:
            if self.tokens[:n] != wanted:
                raise Damaged("it was changed while it was being read")
            if self.header.layers is None:
                raise Damaged("it holds tokens but no caches")
            return rebuilt()

        return self._guarded(attempt)

    def _read_commit(self) -> tuple[Header, list[int]]:
        """The last commit and its tokens. Raises FileNotFoundError if there has been none, Damaged,
        DataError for another model's session, OSError."""
        header = decode_header(self._files.whole(HEADER_FILE, MAX_HEADER_BYTES))
        if self._expected is not None and header.fingerprint != self._expected:
            raise DataError(
                f"session {self.name} belongs to another model "
                f"({header.fingerprint[:12]}, not {self._expected[:12]})",
                hint="give the model it was made with, or another session",
            )
        problem = _damage(header, self._files.size)
        if problem:
            raise Damaged(problem)
        tokens = self._checked(TOKENS_FILE, header.tokens.slices, header.tokens.crc)
        return header, unpack_ids(bytes(tokens))

    def _checked(self, name: str, slices: list[tuple[int, int]], crc: int) -> bytearray:
        """Slices of a file, (first, count) in units of 4 bytes, concatenated. Raises Damaged if
        their checksum is wrong, OSError."""
        buffer = bytearray(4 * sum(count for _, count in slices))
        view = memoryview(buffer)
        for first, count in slices:
            if not self._files.read(name, view[: 4 * count], 4 * first):
                raise Damaged(f"{name} is too short")
            view = view[4 * count :]
        if zlib.crc32(buffer) != crc:
            raise Damaged(f"the checksum of the {name.partition('.')[0]} is wrong")
        return buffer

    def _stored(self) -> Stored:
        """The tensors of cache.bin, to be read in place if nobody has written to it since."""
        fd, sealed = self._files.fd(CACHE_FILE), self.header.seal
        whole = sealed is not None and sealed == seal(fd)
        return Stored(fd, partial(self._files.again, CACHE_FILE) if whole else None)

    def _check_last(self) -> None:
        """Raise Damaged if there has been another commit since the header was read."""
        header, _ = self._read_commit()
        if header.generation != self.header.generation:
            raise Damaged("it was changed while it was being read")

    def _guarded(self, action: Callable[[], Result], load: bool = False) -> Result:
        """Run a reading action; damage becomes DataError, an OSError its ToastError. A reader
        beside a writer may find a header's extents reused by a later commit: it then rereads the
        header, once. load: read the header before the first attempt too."""
        try:
            try:
                if load:
                    self._load()
                return action()
            except Damaged:
                if self.lock is not None:
                    raise
                self._load()
                return action()
        except Damaged as error:
            raise self._damaged(error) from error
        except OSError as error:
            raise from_os_error(error, f"cannot read session {self.name}") from error

    def _damaged(self, error: Damaged) -> DataError:
        hint = "a newer toastkit wrote it" if isinstance(error, NewerSchema) else None
        return DataError(f"cannot read session {self.name}: {error}", hint)

    def _load(self) -> None:
        """Read header and tokens of the last commit. Raises Damaged, DataError for another model,
        NoInputError if a reader finds no session, OSError."""
        try:
            header, tokens = self._read_commit()
        except FileNotFoundError:
            if self.lock is not None:
                return  # created, but not yet committed to
            raise gone(self.path) from None
        self.header, self.tokens, self._stale = header, tokens, False


def _damage(header: Header, size_of: Callable[[str], int]) -> str | None:
    """What the header promises and the data files lack, or None. size_of: a file's size in bytes by
    name, 0 if it does not exist. Raises OSError."""
    logits_end = header.logits.offset + 4 * header.logits.count if header.logits else 0
    ends = {
        TOKENS_FILE: 4 * max((first + n for first, n in header.tokens.slices), default=0),
        LOGITS_FILE: logits_end,
        CACHE_FILE: max(
            (r.offset + r.length for t in header.all_tensors() for r in t.ranges), default=0
        ),
    }
    for name, end in ends.items():
        size = size_of(name)
        if size < end:
            return f"{name} has {size} bytes where its header says {end}"
    return None
