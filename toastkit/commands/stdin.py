"""Standard input as text: whether there is any, and its contents."""

from __future__ import annotations

import os
import select
import stat
import sys
from collections.abc import Iterator, Sequence
from typing import BinaryIO

from toastkit.errors import DataError, UsageError, reported_as

# of a text: no context holds more, and scoring such a corpus takes days
MAX_BYTES = 32 << 20
GIVE_ONE = "give one as an argument, or pipe one in"


def stdin_has_text() -> bool:
    """True if stdin should be read: a pipe or a file. Reading a terminal, a device or an inherited
    socket could block for ever."""
    try:
        mode = os.fstat(0).st_mode
    except OSError:
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode)


def holds_prompt(words: Sequence[str], tools: str | None) -> bool:
    """True if stdin is read for the prompt: it has text, or "-" is among the prompt's words, and
    --tools does not name it. Raises UsageError where both do, or the words do twice."""
    asked = "-" in words
    if words.count("-") > 1:
        raise UsageError("- is standard input, which can be read only once")
    if tools == "-" and asked:
        raise UsageError("the prompt and --tools cannot both be standard input")
    return asked or (tools != "-" and stdin_has_text())


_first: bytes | None = None


def first_byte(seconds: float | None = None) -> bytes:
    """The first byte of stdin, b"" at its end; later calls return the same. seconds: wait no longer
    than that for it, and return b"" then."""
    global _first
    if _first is None:
        if seconds is not None and not select.select([0], [], [], seconds)[0]:
            return b""
        _first = os.read(0, 1)
    return _first


def read_stdin(what: str = "the prompt", most: int = MAX_BYTES) -> bytes:
    """Read all of stdin. Raises DataError if it is too long."""
    return _read(sys.stdin.buffer, what, most)


def read_input(name: str, what: str, most: int = MAX_BYTES) -> bytes:
    """Read all of a file, or of stdin if the name is "-". what: for the message of the DataError
    raised for more than `most` bytes. Raises as from_os_error does if it cannot be read."""
    with reported_as(f"cannot read {name or repr(name)}"):
        if name == "-":
            return read_stdin(what, most)
        with open(name, "rb") as file:
            return _read(file, what, most)


def _read(stream: BinaryIO, what: str, most: int) -> bytes:
    data = stream.read(most + 1)
    if len(data) > most:
        raise DataError(f"{what}: over {most >> 20} MiB")
    return data


def no_prompt(data: bytes | None, hint: str = GIVE_ONE) -> DataError | UsageError:
    """The error for a prompt without text. data: what stdin had, None if it was not read. hint:
    what to do at a terminal."""
    if data is None and sys.stdin is not None and sys.stdin.isatty():
        return UsageError("no prompt", hint)
    ended = "standard input ended without a byte: what writes to it may have failed"
    return DataError("empty prompt", hint=ended if data == b"" else None)


def stdin_lines(first: bytes = b"") -> Iterator[bytes]:
    """Its lines as they come, without line ends. first: bytes of it that were read already. Raises
    DataError for one that is too long."""
    while (line := sys.stdin.buffer.readline(MAX_BYTES + 1)) or first:
        if len(line) > MAX_BYTES:
            raise DataError(f"a line of the prompt: over {MAX_BYTES >> 20} MiB")
        yield from (first + line).splitlines()
        first = b""


def text_of(data: bytes) -> str:
    """Decode bytes. Raises DataError, naming the first byte that is not UTF-8."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        from toastkit.frames import starts_frames  # and msgpack, which the client does without

        if starts_frames(data[:1]):
            raise DataError(
                "the prompt is frames, not text", hint="toast-detokenize makes text of it"
            ) from error
        raise not_utf8("the prompt is", error) from error


def not_utf8(what: str, error: UnicodeDecodeError) -> DataError:
    """The error for bytes that are not UTF-8. what: prefix of its message."""
    byte = error.object[error.start]
    return DataError(f"{what} not UTF-8: byte 0x{byte:02x} at offset {error.start}")


def user_turn(text: str, words: str) -> str:
    """One message of piped text and then the words, with a blank line between, without the newline
    that ends a file."""
    return "\n\n".join(part for part in (text.rstrip("\n"), words) if part)
