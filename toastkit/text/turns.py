"""A chat tokenised turn by turn: what was in an earlier prompt is not tokenised again.

Special tokens are found in a text before anything else is done with it, and what lies between two
of them is tokenised by itself. So a text may be cut where one begins, and the ids are the same.
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

LEAST = 1 << 10  # characters of a part: to tokenise fewer takes no longer than to look them up
MOST = 1 << 22  # characters of all parts that are remembered


class TurnTokenizer(Tokenizer):
    """A tokenizer that remembers the ids of long parts of the last texts, those but the last part,
    which goes on in the next one. Several threads may use it at once. Raises as Tokenizer."""

    def __init__(self, files: SmallFiles):
        super().__init__(files)
        self._known: OrderedDict[str, array] = OrderedDict()
        self._characters = 0
        self._lock = threading.Lock()

    def encode(self, text: str, add_special: bool, most: int | None = None) -> list[int]:
        """As Tokenizer.encode."""
        # What is put around a text is not of any part of it.
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
        """Where the text may be cut into parts of LEAST characters or more, ascending."""
        if self._marks is None or len(text) < LEAST:
            return
        start = 0
        for found in self._marks.finditer(text):
            if found.start() - start >= LEAST and found.group() in self._begins:
                start = found.start()
                yield start

    @cached_property
    def _begins(self) -> frozenset[str]:
        """The tokens that take nothing of the blanks before them."""
        return frozenset(token.content for token in self._added.values() if not token.lstrip)

    @cached_property
    def _marks(self) -> re.Pattern[str] | None:
        """Finds the tokens that are found first, as the library does: from the left, the longest.
        None where one of them depends on the words beside it."""
        first = [token for token in self._added.values() if not token.normalized and token.content]
        if not first or any(token.single_word for token in self._added.values()):
            return None
        texts = sorted((token.content for token in first), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, texts)))

    def _ids(self, parts: list[str]) -> Iterator[array]:
        """The ids of each part; those that are not known yet are tokenised at once."""
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
        """Notes a part as the last that was used. The longest unused are forgotten for it."""
        if part not in self._known and len(part) <= MOST:
            self._known[part] = ids
            self._characters += len(part)
        elif part in self._known:
            self._known.move_to_end(part)
        while self._characters > MOST:
            self._characters -= len(self._known.popitem(last=False)[0])


def _grouped(parts: Iterable[str]) -> Iterator[list[str]]:
    """Parts in their order, together no longer than the library is given at a time. One that is
    longer is alone."""
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
