"""A checkpoint's tokenizer: text to token ids and back, its end-of-turn tokens, its chat template.

Reads tokenizer.json with the `tokenizers` package; transformers is not needed.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from functools import cached_property, lru_cache
from typing import Any

from toastkit.errors import DataError, NoInputError
from toastkit.heap import trim_heap
from toastkit.text import library, pieces
from toastkit.text.bounded_json import parse
from toastkit.text.chat_template import SmallFiles, read_templates
from toastkit.text.exact_numbers import counted
from toastkit.text.vocabulary import Vocabulary, open_vocabulary

# End a turn if the checkpoint's template writes them, whether or not a config says so.
_END_OF_TURN = (
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|eot|>", "<|end_of_turn|>", "<end_of_turn>",
    "<turn|>", "<|end|>", "<|return|>", "<|call|>", "<|endofturn|>", "[|endofturn|]",
    "<|END_OF_TURN_TOKEN|>",
)  # fmt: skip
MAX_SHARED = 1 << 24  # largest vocabulary whose ids are interned; beyond, most are holes


class Tokenizer:
    """The tokenizer of a checkpoint.

    files: its small files; `read` gives None for one that is absent. eos_ids: ids that end a turn,
    sorted: the union of those in config.json, generation_config.json and tokenizer_config.json and
    of the end-of-turn markers in the chat template. special_ids: ids of the tokens flagged special.
    special_tokens: bos_token, ... -> text. templates: name -> Jinja source of the chat templates.
    bos_id: None if there is none. Raises NoInputError if tokenizer.json is missing, DataError if a
    file is broken.
    """

    def __init__(self, files: SmallFiles):
        self.name = files.name
        self._vocabulary = _load(files)
        self._added = self._vocabulary.rules.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in self._added.items() if token.special)
        config = _read_json(files, "config.json")
        generation = _read_json(files, "generation_config.json")
        settings = _read_json(files, "tokenizer_config.json")
        special_map = _read_json(files, "special_tokens_map.json")
        self.templates = templates(files)
        self.special_tokens = _special_tokens({**special_map, **settings})
        self.bos_id = self._bos_id(config, generation)
        self.eos_ids = self._eos_ids(config, generation)

    @cached_property
    def vocab_size(self) -> int:
        """Highest id + 1, including added tokens and holes in the numbering."""
        return self._vocabulary.highest + 1

    def load_all(self) -> None:
        """Load all words of a vocabulary of which only those of the texts are loaded: that takes as
        long as many texts, and Python's lock with it."""
        self._vocabulary.whole()

    def check_fits(self, vocab: int) -> None:
        """Raise DataError if ordinary text could give ids outside a model's `vocab`. Added tokens
        beyond it are common, and harmless until used."""
        size = self._vocabulary.size
        if size > vocab:
            raise DataError(
                f"{self.name}: the tokenizer has {counted(size, 'token')}, the model {vocab}",
                hint="config.json and tokenizer.json belong to two models",
            )

    def encode(self, text: str, add_special: bool, most: int | None = None) -> list[int]:
        """Return the token ids of a text. The text of a special token becomes that token.

        add_special: let the tokenizer's post-processor add its BOS, EOS and the like. most: ids
        that are useful: of a long text with more, only a beginning with more than that is
        tokenised. Raises DataError for text that is not Unicode (lone surrogates), and if the
        tokenizer fails or takes too long.
        """
        if len(text) <= pieces.PIECE:
            return self._encode(text, add_special, library.SECONDS)
        ids: list[int] = []
        interned: Sequence[int] = range(self.vocab_size)
        if len(interned) <= MAX_SHARED:  # one object per id, however often it occurs
            interned = list(interned)
        deadline = time.monotonic() + library.SECONDS

        def encode(part: str) -> list[int]:
            return self._encode(part, False, deadline - time.monotonic())

        for piece in pieces.encode_pieces(encode, text, pieces.PIECE):
            ids += map(interned.__getitem__, piece)
            if most is not None and len(ids) > most:
                break
            deadline = time.monotonic() + library.SECONDS
        before, after = self._surrounding_ids(text[: pieces.MARGIN]) if add_special else ([], [])
        return [*before, *ids, *after] if before or after else ids

    def _encode(self, text: str, add_special: bool, seconds: float) -> list[int]:
        return self._encode_all([text], add_special, seconds)[0]

    def _encode_all(self, texts: list[str], add_special: bool, seconds: float) -> list[list[int]]:
        """Return the ids of each text, in one call: each call waits for a thread and for the
        GIL."""
        if fault := self._post_processor_faults[add_special]:
            raise DataError(f"{self.name}: broken tokenizer.json: {fault}")

        def encode() -> list[list[int]]:
            # Not `encode`: that holds the GIL, and computes unused offsets.
            tokenizer = self._vocabulary.loaded_for(texts)
            found = tokenizer.encode_batch_fast(texts, add_special_tokens=add_special)
            return [one.ids for one in found]

        try:
            ids = library.call(f"cannot tokenize the prompt for {self.name}", encode, seconds)
            if sum(map(len, texts)) > pieces.MAX_PIECE // 16:
                trim_heap()
            return ids
        except DataError as error:
            if any(0xD800 <= ord(character) < 0xE000 for text in texts for character in text):
                raise DataError("prompt: a lone surrogate is not text") from error
            raise

    @cached_property
    def _post_processor_faults(self) -> list[str | None]:
        """Faults without and with special tokens."""
        rules = self._vocabulary.rules
        return [library.post_processor_fault(rules, special) for special in (False, True)]

    def _surrounding_ids(self, text: str) -> tuple[list[int], list[int]]:
        """Return what the post-processor puts before and after a text."""
        whole = self._encode(text, True, library.SECONDS)
        ids = self._encode(text, False, library.SECONDS)
        for start in range(len(whole) - len(ids) + 1):
            if whole[start : start + len(ids)] == ids:
                return whole[:start], whole[start + len(ids) :]
        raise DataError(f"cannot tokenize the prompt for {self.name}: it is too long")

    @cached_property
    def reach(self) -> int | None:
        """Most characters of a text that a token stands for, None if unbounded."""
        return self._vocabulary.reach

    def encode_prompt(self, text: str, templated: bool, most: int | None = None) -> list[int]:
        """Return the token ids of a prompt.

        templated: the chat template wrote it, so its BOS is there already and none is added.
        Otherwise specials are added, but no second BOS if the text begins with one. most: as in
        encode.
        """
        if templated:
            return self.encode(text, False, most)
        ids = self.encode(text, True, most)
        if self.bos_id is not None and ids[:2] == [self.bos_id] * 2:
            written = self.encode(text[: pieces.MARGIN], add_special=False)[:8]
            if written[:1] == [self.bos_id] and ids[1 : 1 + len(written)] == written:
                return ids[1:]
        return ids

    @property
    def appended(self) -> int:
        """How many tokens are added behind a text, such as an end-of-text mark."""
        plain, whole = (self.encode("a", special) for special in (False, True))
        added = len(whole) - len(plain) if plain else 0
        places = range(added + 1)
        return next((added - n for n in places if whole[n : n + len(plain)] == plain), 0)

    def decode(self, ids: Iterable[int], keep_special: bool = False) -> str:
        """Return the text of token ids; invalid UTF-8 becomes U+FFFD.

        As `tokenizers` decodes, with one difference: in a broken byte-fallback run (<0xE2> ...),
        only the broken bytes become U+FFFD, and not the valid characters before them. Raises
        DataError for an id that is not in the vocabulary.
        """
        from toastkit.text.detokenizer import StreamingDetokenizer

        stream = StreamingDetokenizer(self, keep_special)
        return "".join([*map(stream.add, ids), stream.finish()])

    def decode_as_library(self, ids: list[int], keep_special: bool = False) -> str:
        """Return the text of token ids exactly as `tokenizers` decodes them."""
        return library.call(
            f"cannot decode tokens of {self.name}",
            lambda: self._vocabulary.whole().decode(ids, skip_special_tokens=not keep_special),
        )

    def token(self, token_id: int) -> str:
        """Return a token as the vocabulary spells it. Raises DataError for an id that is not in
        it."""
        token = self._vocabulary.token(token_id) if 0 <= token_id < 2**32 else None
        if token is None:
            raise DataError(f"token {token_id} is not in the vocabulary of {self.name}")
        return token

    def token_id(self, token: str) -> int | None:
        """Return the id of a token as the vocabulary spells it, or None."""
        return self._vocabulary.token_id(token)

    @cached_property
    def special_texts(self) -> frozenset[str]:
        """The texts of the tokens flagged special."""
        return frozenset(self._added[i].content for i in self.special_ids)

    @cached_property
    def decoder_json(self) -> str:
        """The decoder section of tokenizer.json, "null" if absent."""
        decoder = self._vocabulary.rules.decoder
        return "null" if decoder is None else decoder.__getstate__().decode()

    def _bos_id(self, config: dict, generation: dict) -> int | None:
        if "bos_token" in self.special_tokens:
            return self.token_id(self.special_tokens["bos_token"])
        found = _ids(generation.get("bos_token_id")) or _ids(config.get("bos_token_id"))
        return found[0] if found else None

    def _eos_ids(self, config: dict, generation: dict) -> list[int]:
        text_config = config.get("text_config")
        places = [config, generation, text_config if isinstance(text_config, dict) else {}]
        found = {i for place in places for i in _ids(place.get("eos_token_id"))}
        texts = [self.special_tokens.get("eos_token", "")] + self._end_of_turn_markers()
        found.update(i for i in map(self.token_id, filter(None, texts)) if i is not None)
        return sorted(found)

    def _end_of_turn_markers(self) -> list[str]:
        templates = "".join(self.templates.values())
        markers = [
            marker
            for marker in _END_OF_TURN
            if marker in templates and self.token_id(marker) in self.special_ids
        ]
        # In the harmony format (gpt-oss) <|end|> closes a message, and the turn goes on.
        if "<|return|>" in markers and "<|end|>" in markers:
            markers.remove("<|end|>")
        return markers


def templates(files: SmallFiles) -> dict[str, str]:
    """Return name -> source of a checkpoint's chat templates. Raises DataError for a broken
    file."""
    places = [_read_json(files, name) for name in ("chat_template.json", "tokenizer_config.json")]
    return read_templates(files, *places)


def _load(files: SmallFiles) -> Vocabulary:
    """Load the vocabulary and its rules. Raises as Tokenizer."""
    data = files.read("tokenizer.json")
    if data is None:
        hint = "the checkpoint needs the tokenizers-library format; convert it with transformers"
        if "/" in files.name and not files.name.startswith("/"):  # a hub id, not a path
            hint = f"toast-model pull {files.name} fetches it where the hub has one"
        raise NoInputError(f"{files.name}: no tokenizer.json", hint)
    try:
        return open_vocabulary(data)
    except DataError as error:
        reason = error.message.replace("Cannot instantiate Tokenizer from buffer: ", "")
        raise DataError(f"{files.name}: {reason}") from error


def _read_json(files: SmallFiles, name: str) -> dict:
    """Read a JSON object, empty if the file is absent. Raises DataError if it is broken."""
    data = files.read(name)
    if data is None:
        return {}
    try:
        document = _parsed(data)
    except ValueError as error:
        raise DataError(f"{files.name}: broken {name}: {error}") from error
    if not isinstance(document, dict):
        raise DataError(f"{files.name}: broken {name}: not an object")
    return document


_parsed = lru_cache(maxsize=4)(parse)  # one with 6,000 added tokens takes 10 ms


def _special_tokens(settings: dict) -> dict[str, str]:
    """Return bos_token, eos_token, ... -> text, for those that are set, including the checkpoint's
    own, such as image_token, which templates may use too."""
    found = {}
    own = settings.get("extra_special_tokens")
    for name, token in {**settings, **(own if isinstance(own, dict) else {})}.items():
        if isinstance(token, dict):
            token = token.get("content")
        if name.endswith("_token") and isinstance(token, str):
            if any("\ud800" <= character <= "\udfff" for character in token):
                raise DataError(f"{name}: half of a character (a lone surrogate): {token!r}")
            found[name] = token
    return found


def _ids(value: Any) -> list[int]:
    """Return a token id or a list of them as a list, without what is no id."""
    values = value if isinstance(value, list) else [value]
    return [i for i in values if type(i) is int and 0 <= i < 1 << 32]
