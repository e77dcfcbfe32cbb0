"""Tokenises a chat turn by turn: what was in an earlier prompt is not tokenised again.

Special tokens are found in a text before anything else is done with it, and the text between two of
them is tokenised by itself. So cutting a text where one begins gives the same ids.
"""

from __future__ import annotations

import re
import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from functools import cached_property

from toastkit.text import library
from toastkit.text.pieces import PIECE
from toastkit.text.tokenizer import SmallFiles, Tokenizer

MIN_PART = 1 << 10  # characters of a part: to tokenise fewer takes no longer than the lookup
MAX_CACHED = 1 << 22  # characters of all cached parts


class TurnTokenizer(Tokenizer):
    """A tokenizer that caches the ids of long parts of recent texts, except the last part, which
    continues in the next one. Thread-safe. Raises as Tokenizer."""

    def __init__(self, files: SmallFiles):
        super().__init__(files)
        self._known: OrderedDict[str, array] = OrderedDict()
        self._characters = 0
        self._lock = threading.Lock()

    def encode(self, text: str, add_special: bool, most: int | None = None) -> list[int]:
        """Encode as Tokenizer.encode."""
        # What is put around a text belongs to no part of it.
        starts = [0, *(() if add_special else self._cuts(text))]
        start = starts[-1]
        ids: list[int] = []
        for group in _grouped(text[a:b] for a, b in zip(starts, starts[1:])):
            for found in self._ids(group):
                ids += found
                if most is not None and len(ids) > most:
                    return ids
        left = None if most is None else most - len(ids)
        rest = super().encode(text[start:] if start else text, add_special, left)
        return ids + rest if ids else rest

    def _cuts(self, text: str) -> Iterator[int]:
        """Yield where the text may be cut into parts of at least MIN_PART characters, ascending."""
        if self._marks is None or len(text) < MIN_PART:
            return
        start = 0
        for found in self._marks.finditer(text):
            if found.start() - start >= MIN_PART and found.group() in self._begins:
                start = found.start()
                yield start

    @cached_property
    def _begins(self) -> frozenset[str]:
        """The tokens that do not absorb blanks before them."""
        return frozenset(token.content for token in self._added.values() if not token.lstrip)

    @cached_property
    def _marks(self) -> re.Pattern[str] | None:
        """Pattern of the tokens that are matched first, as the library does: from the left, the
        longest. None if one of them depends on the words beside it."""
        first = [token for token in self._added.values() if not token.normalized and token.content]
        if not first or any(token.single_word for token in self._added.values()):
            return None
        texts = sorted((token.content for token in first), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, texts)))

    def _ids(self, parts: list[str]) -> Iterator[array]:
        """Return the ids of each part; uncached ones are tokenised in one call."""
        with self._lock:
            there = {part: self._known[part] for part in parts if part in self._known}
        new = [part for part in dict.fromkeys(parts) if part not in there]
        if len(new) == 1:
            there[new[0]] = array("I", super().encode(new[0], False))
        elif new:
            found = self._encode_all(new, False, library.SECONDS)
            there.update(zip(new, (array("I", ids) for ids in found)))
        with self._lock:
            for part in parts:
                self._remember(part, there[part])
        return map(there.__getitem__, parts)

    def _remember(self, part: str, ids: array) -> None:
        """Cache a part as the most recently used, evicting the least recently used (LRU)."""
        if part not in self._known and len(part) <= MAX_CACHED:
            self._known[part] = ids
            self._characters += len(part)
        elif part in self._known:
            self._known.move_to_end(part)
        while self._characters > MAX_CACHED:
            self._characters -= len(self._known.popitem(last=False)[0])


def _grouped(parts: Iterable[str]) -> Iterator[list[str]]:
    """Group parts in order, up to the size that the library is given at a time. A longer one is
    alone."""
    group: list[str] = []
    size = 0
    for part in parts:
        if group and size + len(part) > PIECE:
            yield group
            group, size = [], 0
        group.append(part)
        size += len(part)
    if group:
        yield group
