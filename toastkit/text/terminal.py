"""Escapes text for a terminal, where control characters could repaint it, retitle it, or set what
the user pastes next; and validates text typed at one."""

from __future__ import annotations

import os
import re

from toastkit.errors import DataError

_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")


def shown(text: object) -> str:
    """Return a name or a message as part of one line: non-printable characters are escaped, an
    undecodable byte as that byte."""
    return "".join(c if c.isprintable() else _escaped(c) for c in str(text))


def harmless(text: str) -> str:
    """Return an answer for a terminal: lines, tabs and every script unchanged, other control
    characters escaped."""
    return _CONTROL.sub(lambda match: _escaped(match[0]), text)


def typed(text: str, what: str) -> str:
    """Return an argument or a terminal line unchanged. what: names it in the DataError for bytes
    that are not UTF-8, which Python decodes to lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        byte = os.fsencode(text[error.start])[0]
        at = f"byte 0x{byte:02x} at offset {len(text[: error.start].encode())}"
        raise DataError(f"{what} is not UTF-8: {at}") from error
    return text


def _escaped(character: str) -> str:
    if "\udc80" <= character <= "\udcff":  # surrogateescape, from arguments and file names
        character = chr(ord(character) - 0xDC00)
    return character.encode("unicode_escape").decode()
