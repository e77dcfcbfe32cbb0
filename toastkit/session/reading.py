"""What reading a session takes from its files: the last commit's header and tokens, its logits."""

from __future__ import annotations

import os
import zlib
from functools import cache
from pathlib import Path

from toastkit.errors import DataError
from toastkit.frames import unpack_ids
from toastkit.private_files import DataFiles
from toastkit.session.commit import damage
from toastkit.session.header import MAX_HEADER_BYTES, decode_header
from toastkit.session.layout import Damaged, Header, LogitsRecord
from toastkit.session.names import HEADER_FILE
from toastkit.session.upkeep import LOGITS_FILE, TOKENS_FILE


def read_commit(name: str, files: DataFiles, fingerprint: str | None) -> tuple[Header, list[int]]:
    """The last commit of a session, and its tokens. name: for messages. fingerprint: of the model
    that it must belong to, or None.

    Raises FileNotFoundError where there has been no commit, Damaged, DataError for another model's
    session, OSError.
    """
    header = decode_header(files.whole(HEADER_FILE, MAX_HEADER_BYTES))
    if fingerprint is not None and header.fingerprint != fingerprint:
        raise DataError(
            f"session {name} belongs to another model "
            f"({header.fingerprint[:12]}, not {fingerprint[:12]})",
            hint="give the model it was made with, or another --session",
        )
    problem = damage(header, files.size)
    if problem:
        raise Damaged(problem)
    return header, _read_tokens(files, header)


def _read_tokens(files: DataFiles, header: Header) -> list[int]:
    buffer = bytearray(4 * header.count)
    view = memoryview(buffer)
    for first, count in header.tokens.slices:
        _read(files, TOKENS_FILE, view[: 4 * count], 4 * first)
        view = view[4 * count :]
    if zlib.crc32(buffer) != header.tokens.crc:
        raise Damaged("the checksum of the tokens is wrong")
    return unpack_ids(bytes(buffer))


def seal(fd: int) -> str | None:
    """What a file has only until somebody writes to it, or the machine starts anew: a commit that
    ends with it is as it was written, as far as the memory of the machine can be trusted. None
    where the system does not say."""
    boot = _boot()
    about = os.fstat(fd)
    return boot and f"{boot} {about.st_dev} {about.st_ino} {about.st_ctime_ns} {about.st_size}"


@cache
def _boot() -> str | None:
    """What no two starts of a machine have in common."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return None


def read_logits(files: DataFiles, record: LogitsRecord) -> bytearray:
    """The bytes of the logits, float32 (record.count,). Raises Damaged, OSError."""
    buffer = bytearray(4 * record.count)
    _read(files, LOGITS_FILE, memoryview(buffer), record.offset)
    if zlib.crc32(buffer) != record.crc:
        raise Damaged("the checksum of the logits is wrong")
    return buffer


def _read(files: DataFiles, name: str, buffer: memoryview, offset: int) -> None:
    if not files.read(name, buffer, offset):
        raise Damaged(f"{name} is too short")
