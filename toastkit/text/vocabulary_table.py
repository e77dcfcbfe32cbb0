"""Tables of large BPE vocabularies, in the cache directory: ids, words, and the merges of a word.

    magic, bytes of the header (u32), header (JSON), then of n words, ordered by id, as u32:
    ids [n], ends of their texts [n + 1], first merges [n + 1], slots [2^k], merges [m, 3], texts

A slot holds a word's number + 1, from the CRC-32 of its text on; 0 ends a search. A merge is its
rank and the numbers of its two parts; those of a word are the ones that give that word.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import struct
import sys
import zlib
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain
from typing import Any

from toastkit.base_directories import own_directory
from toastkit.private_files import closing_fd, not_private, open_private

MAGIC = b"toastbpe"
SUFFIX = ".bpe"
MAX_STEPS = 64  # of a search


def table_path(data: bytes) -> str:
    """Return where the table of a tokenizer.json is: named by what it is made of and what reads
    it."""
    import tokenizers

    digest = hashlib.sha256(f"1 {sys.byteorder} {tokenizers.__version__} ".encode())
    digest.update(data)
    return os.path.join(table_folder(), digest.hexdigest()[:32] + SUFFIX)


def table_folder() -> str:
    """Return the directory of all tables."""
    return own_directory("CACHE", "tokenizers")


class Table:
    """A table that is there.

    usable: False if no table can stand for the vocabulary; it has nothing else then. rules: the
    tokenizer.json without the model's words, which gives added tokens their ids. options: of the
    library's BPE. size, highest, reach: as of WholeVocabulary. longest: most characters of a word.
    always: numbers of the words that any encoding needs. Raises ValueError, KeyError, TypeError,
    struct.error for what is no table.
    """

    def __init__(self, content: bytes | memoryview):
        content = memoryview(content)
        (size,) = struct.unpack_from("<I", content, len(MAGIC))
        start = len(MAGIC) + 4 + size
        header = json.loads(bytes(content[len(MAGIC) + 4 : start]))
        if len(content) != start + 4 * sum(header["counts"]) + header["texts"]:
            raise ValueError("not of the length that its header gives")
        self.usable: bool = header["usable"]
        arrays = []
        for count in header["counts"]:
            arrays.append(content[start : start + 4 * count].cast("I"))
            start += 4 * count
        self._ids, self._ends, self._firsts, self._slots, self._merges = arrays
        self._texts = content[start:]
        self._mask = len(self._slots) - 1
        if self.usable:
            self.rules: bytes = header["rules"].encode()
            self.options: dict[str, Any] = header["options"]
            self.size: int = header["size"]
            self.highest: int = header["highest"]
            self.reach: int | None = header["reach"]
            self.longest: int = header["longest"]
            self._drops: bool = header["drops"]
            self.always: list[int] = header["always"]

    @classmethod
    def find(cls, data: bytes) -> Table | None:
        """Return the table of a tokenizer.json; None if there is none, or nothing that is one."""
        path = table_path(data)
        try:
            if not_private(table_folder()):
                return None
            with closing_fd(open_private(path, os.O_RDONLY)) as fd:
                content = mmap.mmap(fd, 0, access=mmap.ACCESS_READ)
            return cls(memoryview(content)) if content[: len(MAGIC)] == MAGIC else None
        except (OSError, ValueError, TypeError, KeyError, struct.error):
            return None

    def token(self, token_id: int) -> str | None:
        """Return the word of an id, or None."""
        number = bisect_left(self._ids, token_id)
        if number == len(self._ids) or self._ids[number] != token_id:
            return None
        return self._text(number)

    def token_id(self, token: str) -> int | None:
        """Return the id of a word, or None."""
        data = token.encode()
        number = self._number(data, 0, len(data), zlib.crc32(data))
        return None if number is None else self._ids[number]

    def lookups(self, word: str) -> int:
        """Return how many lookups `within` takes for a word."""
        most = min(len(word), self.longest)
        return most * len(word) - most * (most - 1) // 2

    def within(self, word: str) -> Iterator[int]:
        """Yield the numbers of the table's words that occur in this one, or in what remains of it
        where the library drops characters that are no words."""
        yield from self._occurring(word)
        if self._drops:
            known = [character for character in word if self.token_id(character) is not None]
            if len(known) < len(word):
                yield from self._occurring("".join(known))

    def _occurring(self, word: str) -> Iterator[int]:
        data, ends = word.encode(), [0]
        for character in word:
            ends.append(ends[-1] + len(character.encode()))
        for first, start in enumerate(ends[:-1]):
            crc, before = 0, start
            for end in ends[first + 1 : first + 1 + self.longest]:
                crc, before = zlib.crc32(data[before:end], crc), end
                number = self._number(data, start, end, crc)
                if number is not None:
                    yield number

    def part(self, numbers: Iterable[int]) -> tuple[dict[str, int], list[tuple[str, str]]]:
        """Return these words and their ids, and the merges that give them, by rank."""
        texts = {number: self._text(number) for number in numbers}
        merges = []
        for number in texts:
            for at in range(3 * self._firsts[number], 3 * self._firsts[number + 1], 3):
                rank, left, right = self._merges[at : at + 3]
                merges.append((rank, texts[left], texts[right]))
        vocab = {text: self._ids[number] for number, text in texts.items()}
        return vocab, [(left, right) for _, left, right in sorted(merges)]

    def _text(self, number: int) -> str:
        return str(self._texts[self._ends[number] : self._ends[number + 1]], "utf-8")

    def _number(self, data: bytes, start: int, end: int, crc: int) -> int | None:
        slots, ends = self._slots, self._ends
        at = crc & self._mask
        while found := slots[at]:
            first, last = ends[found - 1], ends[found]
            if last - first == end - start and self._texts[first:last] == data[start:end]:
                return found - 1
            at = (at + 1) & self._mask
        return None


def pack(
    header: dict[str, Any],
    words: Sequence[tuple[int, str]] = (),
    merges: Sequence[tuple[str, str]] = (),
) -> bytes | None:
    """Return the content of a table. header: what Table reads from it, without
    `counts` and `texts`; `drops` says whether unknown characters are dropped. words: (id, text), by
    id. merges: by rank, of such words. None if searches in it would take too long."""
    number = {text: n for n, (_, text) in enumerate(words)}
    giving: list[list[tuple[int, int, int]]] = [[] for _ in words]
    for rank, (left, right) in enumerate(merges):
        giving[number[left + right]].append((rank, number[left], number[right]))
    texts = [text.encode() for _, text in words]
    slots = _slots(texts)
    if slots is None:
        return None
    arrays = [
        array("I", (token_id for token_id, _ in words)),
        array("I", accumulate(map(len, texts), initial=0)),
        array("I", accumulate(map(len, giving), initial=0)),
        slots,
        array("I", chain.from_iterable(chain.from_iterable(giving))),
    ]
    sizes = {"counts": list(map(len, arrays)), "texts": sum(map(len, texts))}
    about = json.dumps({**header, **sizes}).encode()
    about += b" " * (-(len(MAGIC) + 4 + len(about)) % 4)  # u32 are aligned
    return b"".join([MAGIC, struct.pack("<I", len(about)), about, *arrays, *texts])


def _slots(texts: Sequence[bytes]) -> array[int] | None:
    slots = array("I", bytes(4 << (2 * len(texts)).bit_length()))
    mask = len(slots) - 1
    for number, text in enumerate(texts):
        at, steps = zlib.crc32(text) & mask, 0
        while slots[at]:
            at, steps = (at + 1) & mask, steps + 1
            if steps == MAX_STEPS:
                return None
        slots[at] = number + 1
    return slots
