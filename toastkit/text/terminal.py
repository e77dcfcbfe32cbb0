"""What of a text may reach a terminal: control characters could repaint it, retitle it, or set what
the user pastes next. And what of one that was typed is text."""

from __future__ import annotations

import os
import re

from toastkit.errors import DataError

_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")


def shown(text: object) -> str:
    """A name or a message as a part of one line: what is not printable is escaped, a byte that was
    no text as that byte."""
    return "".join(c if c.isprintable() else _escaped(c) for c in str(text))


def harmless(text: str) -> str:
    """An answer for a terminal: lines, tabs and every script as they are, the other control
    characters escaped."""
    return _CONTROL.sub(lambda match: _escaped(match[0]), text)


def typed(text: str, what: str) -> str:
    """An argument or a line of a terminal, as it is. what: for the message of the DataError that is
    raised for bytes that are not UTF-8, which Python has as lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        byte = os.fsencode(text[error.start])[0]
        at = f"byte 0x{byte:02x} at offset {len(text[: error.start].encode())}"
        raise DataError(f"{what} is not UTF-8: {at}") from error
    return text


def _escaped(character: str) -> str:
    if "\udc80" <= character <= "\udcff":  # what decodes an argument's or a file name's bytes
        character = chr(ord(character) - 0xDC00)
    return character.encode("unicode_escape").decode()
