"""The words of a tokenizer: all of them, as the `tokenizers` package loads them, or a text's.

The package takes a third of a second to load 150,000 words and their merges, of which a prompt uses
a few hundred. So a large vocabulary of byte-pair encoding (Sennrich et al. 2016) is also kept as a
table on disk (vocabulary_making.py), and the package is given the words that occur in a text: the
encoding of a text comes upon no others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import cached_property
from threading import Lock
from typing import Any

from toastkit.base_directories import can_be_written
from toastkit.text import library
from toastkit.text.vocabulary_table import Table, table_folder
from toastkit.threads import start_process

MIN_BYTES = 1 << 20  # of a tokenizer.json; a smaller one is loaded in a few milliseconds
MAX_CHARACTERS = 1 << 15  # of texts whose words are looked up one by one
WORD_LOOKUPS = 2  # a word of a vocabulary: they take a third of the time that loading it takes
CALL_LOOKUPS = 1 << 12  # as many lookups as loading a text's words takes


class WholeVocabulary:
    """All words.

    rules: a `tokenizers.Tokenizer` with all of the file but the words, at least. size: number of
    the model's words. highest: largest id, of an added token too, -1 if there is none. reach: as
    `library.reach`.
    """

    def __init__(self, tokenizer: Any):
        self.rules = tokenizer
        self.size = tokenizer.get_vocab_size(with_added_tokens=False)

    @cached_property
    def highest(self) -> int:
        return max(self.rules.get_vocab(with_added_tokens=True).values(), default=-1)

    @cached_property
    def reach(self) -> int | None:
        return library.reach(self.rules)

    def loaded_for(self, texts: Sequence[str]) -> Any:
        """Return a `tokenizers.Tokenizer` that encodes these texts as the whole one does. Raises
        what the library raises."""
        return self.rules

    def whole(self) -> Any:
        """Return the `tokenizers.Tokenizer` with all words. Raises DataError."""
        return self.rules

    def token(self, token_id: int) -> str | None:
        """Return the token of an id in 0..2**32 - 1, or None."""
        return self.rules.id_to_token(token_id)

    def token_id(self, token: str) -> int | None:
        """Return the id of a token, or None."""
        return self.rules.token_to_id(token)


class PartialVocabulary:
    """The words of each text; attributes and methods as of WholeVocabulary.

    load: the whole tokenizer, for texts too long or too many. lookups: in the table, before that.
    """

    def __init__(self, table: Table, load: Callable[[], Any], lookups: float = math.inf):
        self._table = table
        self._load = load
        self._left = lookups
        self._loaded: Any = None
        self._lock = Lock()
        self.rules = library.load(table.rules)
        self.size, self.highest, self.reach = table.size, table.highest, table.reach

    def whole(self) -> Any:
        with self._lock:
            if self._loaded is None:
                self._loaded = self._load()
        return self._loaded

    def token(self, token_id: int) -> str | None:
        found = self.rules.id_to_token(token_id)  # an added one
        return self._table.token(token_id) if found is None else found

    def token_id(self, token: str) -> int | None:
        found = self.rules.token_to_id(token)
        return self._table.token_id(token) if found is None else found

    def loaded_for(self, texts: Sequence[str]) -> Any:
        """Return a tokenizer with the words of these texts, or with all."""
        if self._loaded is not None or sum(map(len, texts)) > MAX_CHARACTERS:
            return self.whole()
        words = self._words(texts)
        self._left -= CALL_LOOKUPS + sum(map(self._table.lookups, words))
        if self._left < 0:
            return self.whole()
        found = set(self._table.always)
        for word in words:
            found.update(self._table.within(word))
        return self._tokenizer_of(found)

    def _words(self, texts: Sequence[str]) -> set[str]:
        """Return what the model would be asked to encode, as the rules make it of the texts."""
        import tokenizers

        seen: set[str] = set()

        class Collecting:
            def pre_tokenize(self, text: Any) -> None:
                seen.update(word for word, _, tokens in text.get_splits() if tokens is None)

        splitter = tokenizers.Tokenizer.from_buffer(self._table.rules)
        collecting = tokenizers.pre_tokenizers.PreTokenizer.custom(Collecting())
        steps = [splitter.pre_tokenizer, collecting]
        splitter.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([s for s in steps if s])
        splitter.post_processor = None
        splitter.encode_batch_fast(list(texts), add_special_tokens=False)
        return seen

    def _tokenizer_of(self, found: Iterable[int]) -> Any:
        """Return the rules with these words of the table, and the merges that give them."""
        import tokenizers

        made = tokenizers.Tokenizer.from_buffer(self._table.rules)
        vocab, merges = self._table.part(found)
        made.model = tokenizers.models.BPE(vocab, merges, **self._table.options)
        return made


Vocabulary = WholeVocabulary | PartialVocabulary


def open_vocabulary(data: bytes) -> Vocabulary:
    """Return the vocabulary of a tokenizer.json, of a large one what texts need, if there is a
    table; a missing one is made in the background, for later. Raises DataError."""
    if len(data) >= MIN_BYTES:
        table = Table.find(data)
        if table is not None and table.usable:
            lookups = WORD_LOOKUPS * table.size
            return PartialVocabulary(table, lambda: library.load(data), lookups)
        if table is None:
            _make_meanwhile(data)
    return WholeVocabulary(library.load(data))


def _make_meanwhile(data: bytes) -> None:
    """Start making the table of a tokenizer.json in the background, and return at once."""
    import tempfile

    if not can_be_written(table_folder()):
        return
    with suppress(OSError), tempfile.TemporaryFile() as file:
        file.write(data)
        file.seek(0)
        start_process("toastkit.text.vocabulary_making", stdin=file)
