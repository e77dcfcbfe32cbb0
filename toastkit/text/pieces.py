"""Tokenises a long text piece by piece: the same ids in less memory, and no further than needed.

A text is cut where the tokens on both sides are the same whether it is cut or not. That is tested
on MARGIN characters to the left and to the right; on the left the piece itself, with all that
precedes, has to agree. So the ids are those of the whole text unless a token depends on text
further away than that.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from toastkit.errors import DataError

PIECE = 1 << 18  # characters
MARGIN = 1 << 10
MAX_PIECE = 1 << 20  # of a piece without a place to cut
PLACES = 12  # of each kind to try before a piece is made longer
_SPACED = re.compile(r"(?<=\S)\s(?=\S)")
_SOLID = re.compile(r"(?<=\S)(?=\S)")

Encode = Callable[[str], list[int]]


def encode_pieces(encode: Encode, text: str, size: int) -> Iterator[list[int]]:
    """Yield the ids of a text, piece by piece. size: characters of a piece.

    encode: ids of a text without special tokens. Raises DataError if a text has no place to cut for
    too long.
    """
    start, margin = 0, min(MARGIN, size // 4)
    while len(text) - start > size:
        found = _next_piece(encode, text, start, size, margin)
        if found is None:
            break
        ids, start = found
        yield ids
    if len(text) - start > max(MAX_PIECE, 4 * size):
        raise DataError(
            f"cannot tokenize {len(text) - start} characters at once, from character {start} on,"
            " and finds no place to cut them"
        )
    yield encode(text[start:])


def _next_piece(
    encode: Encode, text: str, start: int, size: int, margin: int
) -> tuple[list[int], int] | None:
    """Return the ids of the next piece, and where the one after it begins."""
    for end in range(start + size, min(len(text), start + max(MAX_PIECE, 4 * size)), size):
        for cut in _places(text, end - margin, min(end, len(text) - margin)):
            left = encode(text[cut - margin : cut])
            joint = encode(text[cut - margin : cut + margin])
            if joint[: len(left)] != left:
                continue
            skipped = _skipped(encode, text[cut : cut + margin], joint[len(left) :])
            if skipped is None:
                continue
            ids, known = encode(text[start:cut]), left[len(left) // 2 :]
            if ids[len(ids) - len(known) :] == known:
                return ids, cut + skipped
    return None


def _places(text: str, low: int, high: int) -> Iterator[int]:
    """Yield places to try, last first: before single blanks, which end a word nearly everywhere,
    then within text without blanks. Never next to a run of blanks, whose tokens depend on its
    ends."""
    for pattern in (_SPACED, _SOLID):
        places = [found.start() for found in pattern.finditer(text, low, high)]
        yield from places[: -PLACES - 1 : -1]


def _skipped(encode: Encode, right: str, wanted: list[int]) -> int | None:
    """Return how many characters to drop for the right side to give these ids: one if the tokenizer
    itself puts a blank before every text."""
    if encode(right) == wanted:
        return 0
    return 1 if right[0] == " " and encode(right[1:]) == wanted else None
