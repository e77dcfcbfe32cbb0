"""Streaming detokenizer: token ids in, text out as soon as it is certain, never a partial
character.

A tokenizer's decoder is a list of steps. Here they become a chain in which each link holds back no
more than it must:

    id -> pieces of text, each its own (Replace, Metaspace, WordPiece: by the library, memoised)
       -> bytes to characters       (ByteLevel, ByteFallback: up to 3 bytes are held back)
       -> stripping of the first characters of the text     (Strip)
       -> emoji held together       (toastkit.text.emoji)

A decoder of another form (CTC, a suffix that depends on what comes last) decodes everything when
the text ends: correct, but not streamed.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from toastkit.errors import DataError
from toastkit.text import library
from toastkit.text.emoji import EmojiKeeper

if TYPE_CHECKING:
    from toastkit.text.tokenizer import Tokenizer

_PER_TOKEN = ("Replace", "Metaspace", "WordPiece")
_REPLACE_EACH = "toastkit.replace-each-byte"


def _replace_each(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error(_REPLACE_EACH, _replace_each)


class StreamingDetokenizer:
    """Decodes a stream of token ids; add()s and finish() together equal `tokenizer.decode`.

    keep_special: show special tokens. padded: ids below it that the tokenizer lacks, as in an
    embedding padded to a round size, are no text. Time per token and memory do not grow with it.
    """

    def __init__(self, tokenizer: Tokenizer, keep_special: bool = False, padded: int = 0):
        self._chain = _chain(tokenizer, keep_special)
        self._tokenizer = tokenizer
        self._padded = padded
        self._hidden = frozenset() if keep_special else tokenizer.special_texts
        self._emoji = EmojiKeeper()

    def add(self, token_id: int) -> str:
        """Return the text that is now certain, possibly "". Raises DataError for an unknown id."""
        try:
            token = self._tokenizer.token(token_id)
        except DataError:
            if 0 <= token_id < self._padded:
                return ""
            raise
        if token in self._hidden:
            return ""
        return self._emoji.add(self._chain.add(token_id, token))

    def finish(self) -> str:
        """Return the rest; an incomplete character becomes U+FFFD. A new text can begin after
        it."""
        return self._emoji.add(self._chain.finish()) + self._emoji.finish()


def count_bytes(tokenizer: Tokenizer, ids: list[int]) -> int:
    """Count the bytes of UTF-8 that the ids encode as a text of their own, special tokens as
    written. Bytes of incomplete characters count as they are."""
    chain = _chain(tokenizer, keep_special=True)
    if isinstance(chain, _Whole):
        return len(tokenizer.decode_as_library(ids, keep_special=True).encode())
    return chain.count_bytes((token_id, tokenizer.token(token_id)) for token_id in ids)


# ------------------------------------------------------------------------------------------- chains


class _Chain:
    """The steps up to the text. per_token: decoder of the pieces, or None if the token is the
    piece. to_text: bytes to characters. strip: (character, most of it to strip)."""

    def __init__(self, per_token: Any, to_text: Any, strip: tuple[str, int]):
        self._per_token = per_token
        self._to_text = to_text
        self._strip = strip
        self._pieces: dict[int, Any] = {}  # id -> prepared piece, if not the first
        self._first = True
        self._left = strip[1]

    def add(self, token_id: int, token: str) -> str:
        return self._stripped(self._to_text.add(self._piece(token_id, token)))

    def finish(self) -> str:
        text = self._stripped(self._to_text.finish())
        self._first, self._left = True, self._strip[1]
        return text

    def count_bytes(self, tokens: Iterable[tuple[int, str]]) -> int:
        """Count the bytes of a whole text from (id, token); the chain must be new, and is used
        up."""
        pieces = (self._piece(*token) for token in tokens)
        data = b"".join(p if isinstance(p, bytes) else p.encode() for p in pieces)
        character, most = self._strip
        for _ in range(most):
            data = data.removeprefix(character.encode())
        return len(data)

    def _piece(self, token_id: int, token: str) -> Any:
        """Return a token as the input of the next link: bytes or text."""
        if self._first:
            self._first = False
            return self._prepare([token])
        piece = self._pieces.get(token_id)
        if piece is None:
            piece = self._pieces[token_id] = self._prepare(["", token])
        return piece

    def _prepare(self, tokens: list[str]) -> Any:
        piece = tokens[-1] if self._per_token is None else self._per_token.decode(tokens)
        return self._to_text.prepare(piece)

    def _stripped(self, text: str) -> str:
        while self._left and text:
            if text[0] != self._strip[0]:
                self._left = 0
                break
            text = text[1:]
            self._left -= 1
        return text


class _Whole:
    """Decodes everything at the end, with the library."""

    def __init__(self, tokenizer: Tokenizer, keep_special: bool):
        self._tokenizer = tokenizer
        self._keep_special = keep_special
        self._ids: list[int] = []

    def add(self, token_id: int, token: str) -> str:
        self._ids.append(token_id)
        return ""

    def finish(self) -> str:
        ids, self._ids = self._ids, []
        # A decoder that strips the end panics where there is nothing.
        return self._tokenizer.decode_as_library(ids, self._keep_special) if ids else ""


def _chain(tokenizer: Tokenizer, keep_special: bool) -> _Chain | _Whole:
    """Build the chain for a tokenizer's decoder from its JSON."""
    decoder = json.loads(tokenizer.decoder_json)
    if decoder is None:
        return _Chain(_Joined(), _Characters(), ("", 0))
    steps = library.steps(decoder)
    per_token = []
    while steps and steps[0]["type"] in _PER_TOKEN:
        per_token.append(steps.pop(0))
    to_text: Any = _Characters()
    fused = False
    if steps and steps[0]["type"] in ("ByteLevel", "ByteFallback"):
        fused = steps[0]["type"] == "ByteLevel"
        to_text = _ByteLevel() if fused else _ByteFallback()
        steps.pop(0)
    while steps and steps[0]["type"] == "Fuse":
        fused = True
        steps.pop(0)
    strip = ("", 0)
    if fused and steps and steps[0]["type"] == "Strip" and steps[0]["stop"] == 0:
        strip = (steps[0]["content"], steps[0]["start"])
        steps.pop(0)
    pieces = _library_decoder(per_token) if per_token else None
    if steps or (pieces is not None and pieces.decode([""])):
        return _Whole(tokenizer, keep_special)
    return _Chain(pieces, to_text, strip)


def _library_decoder(steps: list[dict]) -> Any:
    """Build a decoder of the library from these steps."""
    import tokenizers

    model = {"type": "WordLevel", "vocab": {}, "unk_token": ""}
    decoder = {"type": "Sequence", "decoders": steps}
    document = {"version": "1.0", "added_tokens": [], "model": model, "decoder": decoder}
    return tokenizers.Tokenizer.from_str(json.dumps(document)).decoder


class _Joined:
    """No decoder: the library puts a space between tokens."""

    def decode(self, tokens: list[str]) -> str:
        return " ".join(tokens)


# ------------------------------------------------------------------------------ bytes to characters


class _Characters:
    """For pieces that are text already."""

    def prepare(self, piece: str) -> str:
        return piece

    def add(self, piece: str) -> str:
        return piece

    def finish(self) -> str:
        return ""


class _ByteLevel:
    """GPT-2's byte alphabet (Radford et al. 2019): each character of a token stands for a byte."""

    def __init__(self) -> None:
        self._byte_of = {character: byte for byte, character in enumerate(byte_alphabet())}
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def prepare(self, piece: str) -> bytes:
        try:
            return bytes([self._byte_of[character] for character in piece])
        except KeyError:  # an added token with other characters stands for itself
            return piece.encode()

    def add(self, piece: bytes) -> str:
        return self._decoder.decode(piece)

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class _ByteFallback:
    """Tokens <0x00> to <0xFF> are bytes, all others text (SentencePiece, Kudo and Richardson 2018).

    Each byte of invalid UTF-8 becomes one U+FFFD, as in the library.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(_REPLACE_EACH)

    def prepare(self, piece: str) -> bytes | str:
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            try:
                return bytes([int(piece[3:5], 16)])
            except ValueError:
                return piece
        return piece

    def add(self, piece: bytes | str) -> str:
        if isinstance(piece, bytes):
            return self._decoder.decode(piece)
        return self.finish() + piece

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


def byte_alphabet() -> str:
    """Return 256 characters, the i-th for byte i: itself if printable, else from U+0100 on."""
    prints = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return "".join(chr(b) if b in prints else chr(next(others)) for b in range(256))
