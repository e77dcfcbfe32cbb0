"""Standard input as text: whether there is any, and what it says."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator

from toastkit.errors import DataError
from toastkit.frames import starts_frames


def stdin_has_text() -> bool:
    """Whether stdin is something to read: a pipe or a file. A terminal, a device or a socket that
    was merely inherited is not: reading it could wait for ever."""
    try:
        mode = os.fstat(0).st_mode
    except OSError:
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode)


def read_stdin() -> bytes:
    """All of it, nothing where it is closed."""
    return sys.stdin.buffer.read() if sys.stdin is not None else b""


def stdin_lines() -> Iterator[str]:
    """Its lines as they come, without their ends. Raises DataError for one that is not UTF-8."""
    if sys.stdin is not None:
        for line in sys.stdin.buffer:
            yield text_of(line).rstrip("\r\n")


def text_of(data: bytes) -> str:
    """Bytes as text. Raises DataError, naming the first byte that is not UTF-8."""
    if starts_frames(data[:1]):
        raise DataError("the prompt is frames, not text", hint="toast-detokenize makes text of it")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"the prompt is not UTF-8: byte 0x{data[error.start]:02x} at offset {error.start}"
        ) from error


def user_turn(text: str, words: str) -> str:
    """One message of piped text and then the words, with a blank line between; the newline that
    ends a file is left out."""
    return "\n\n".join(part for part in (text.rstrip("\n"), words) if part)
