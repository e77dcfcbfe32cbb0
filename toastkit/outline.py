"""Limits of a frame as msgpack: not too many values, not too deep, field names that are text.

msgpack's own limits are per list: a few megabytes of nested lists become gigabytes of Python
objects. So values are counted before they are created, from headers alone.
"""

from __future__ import annotations

from typing import Any

from toastkit.arrays import Invalid


def _table() -> list[tuple[int, int, int]]:
    """Return, for each first byte of a value: the bytes of the length field after it, the values in
    it (per unit of that length, if there is one), and the bytes in it besides."""
    table = [(0, 0, 0)] * 256
    for n in range(16):
        table[0x80 + n], table[0x90 + n] = (0, 2 * n, 0), (0, n, 0)
    for n in range(32):
        table[0xA0 + n] = (0, 0, n)
    for n in range(3):
        table[0xC4 + n] = table[0xD9 + n] = (1 << n, 0, 0)  # bin, str
        table[0xC7 + n] = (1 << n, 0, 1)  # ext
    for n in range(4):
        table[0xCC + n] = table[0xD0 + n] = (0, 0, 1 << n)  # integers
    for n in range(5):
        table[0xD4 + n] = (0, 0, 1 + (1 << n))  # ext of a fixed size
    table[0xCA], table[0xCB] = (0, 0, 4), (0, 0, 8)  # floats
    table[0xDC], table[0xDD] = (2, 1, 0), (4, 1, 0)
    table[0xDE], table[0xDF] = (2, 2, 0), (4, 2, 0)
    return table


_TABLE = _table()


class Outline:
    """Counts the values of frames that arrive in several pieces; a frame within one piece is small.
    limit: values that a frame may have, at all depths."""

    def __init__(self, limit: int):
        self._limit = limit
        self._last = b""
        self._follows = True
        self.begin()

    def begin(self) -> None:
        """Begin a new frame."""
        if not self._follows:
            return
        self._follows = False
        self._announced = 0
        self._open = 1  # values still to come
        self._skip = 0  # bytes still to come of the last one
        self._cut = b""  # the beginning of a header

    def add(self, begun: int, data: bytes) -> None:
        """Count the next piece of the stream. begun: bytes of the frame that came before. Raises
        Invalid as soon as too many values are announced."""
        if begun:
            if not self._follows:
                self._read(self._last[-begun:])
                self._follows = True
            self._read(data)
        self._last = data

    def _read(self, data: bytes) -> None:
        """Count the values in a piece, up to the end of the frame."""
        data = self._cut + data
        self._cut = b""
        at, end, pending = self._skip, len(data), self._open
        while pending and at < end:
            width, values, size = _TABLE[data[at]]
            body = at + 1 + width
            if width:
                if body > end:
                    self._cut = data[at:]
                    at = end
                    break
                length = int.from_bytes(data[at + 1 : body], "big")
                if values:
                    values *= length
                else:
                    size += length
            if values:
                self._announced += values
                if self._announced > self._limit:
                    raise Invalid(f"more than {self._limit} values")
                pending += values
            pending -= 1
            at = body + size
        self._skip, self._open = max(at - end, 0), pending


def check_nesting(value: Any, levels: int) -> None:
    """Raise Invalid for more than so many levels, or a map with a key that is not text."""
    if type(value) is dict:
        for key in value:
            if type(key) is not str:
                raise Invalid("a field name that is not text")
        value = value.values()
    elif type(value) is not list:
        return
    if levels == 0:
        raise Invalid("nested too deep")
    for part in value:
        if type(part) in (dict, list):
            check_nesting(part, levels - 1)
