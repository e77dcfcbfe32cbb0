"""The streaming detokenizer against the tokenizers library's own decode of the whole."""

from __future__ import annotations

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders

from tests.unit.test_tokenizer import made_of
from toastkit.errors import DataError
from toastkit.text.detokenizer import StreamingDetokenizer, byte_alphabet, count_bytes
from toastkit.text.emoji import LONGEST
from toastkit.text.tokenizer import Tokenizer

FAMILY = "👩🏽‍👩‍👧‍👦"
EMOJI = ["😀", FAMILY, "❤️", "👍🏿", "🇩🇪", "1️⃣", "#️⃣", "🏴󠁧󠁢󠁥󠁮󠁧󠁿", "🏳️‍🌈", "☝🏻"]


def build(tokens: list[str], decoder: object, special: tuple[str, ...] = ("<s>", "</s>")):
    """A tokenizer with these tokens and this decoder."""
    vocab = {token: i for i, token in enumerate(dict.fromkeys(tokens))}
    model = tokenizers.models.WordLevel(vocab, unk_token=tokens[0])
    tokenizer = tokenizers.Tokenizer(model)
    if decoder is not None:
        tokenizer.decoder = decoder
    tokenizer.add_special_tokens(list(special))
    tokenizer.add_tokens(["<tool call>", "größe"])
    return Tokenizer(made_of(tokenizer))


def byte_level() -> Tokenizer:
    words = [" the", "é", "😀"[:1], "\n", " 日", "\u200d", "\ufe0f"]
    alphabet = byte_alphabet()
    merged = ["".join(alphabet[b] for b in word.encode()) for word in words]
    halves = ["".join(alphabet[b] for b in "😀".encode()[i : i + 2]) for i in (0, 1, 2)]
    return build([*alphabet, *merged, *halves], decoders.ByteLevel())


def pieces(*steps: object) -> Tokenizer:
    words = ["▁", "▁the", "▁▁", "the", "é", "日本", " x", "", "\u200d", "<0x>", "<0xZZ>", "##s",
             ".", "'m", "n't", " do", "!", "a", "▁a▁b", "##", "</w>", "end</w>"]  # fmt: skip
    decoder = decoders.Sequence(list(steps)) if len(steps) > 1 else steps[0]
    return build([*words, *(f"<0x{b:02X}>" for b in range(256))], decoder)


def sentencepiece(strip: int) -> Tokenizer:
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    return pieces(*steps, *([decoders.Strip(" ", strip, 0)] if strip else []))


STREAMED = {
    "byte level": byte_level(),
    "byte level in a sequence": pieces(decoders.Replace("a", " "), decoders.ByteLevel()),
    "wordpiece": pieces(decoders.WordPiece("##", cleanup=True)),
    "wordpiece without cleanup": pieces(decoders.WordPiece("##", cleanup=False)),
    "metaspace": pieces(decoders.Metaspace()),
    "metaspace without prefix": pieces(decoders.Metaspace(prepend_scheme="never")),
    "no decoder": pieces(None),
}
FALLBACK = {"llama": sentencepiece(1), "gemma": sentencepiece(0), "strip two": sentencepiece(2)}
WHOLE = {
    "suffix": pieces(decoders.BPEDecoder("</w>")),
    "ctc": pieces(decoders.CTC("a", "▁")),
    "strip at the end": pieces(decoders.Fuse(), decoders.Strip(" ", 1, 2)),
}


def stream(tokenizer: Tokenizer, ids: list[int], keep_special: bool = False) -> list[str]:
    detokenizer = StreamingDetokenizer(tokenizer, keep_special)
    return [*map(detokenizer.add, ids), detokenizer.finish()]


def ids_of(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30)


@pytest.mark.parametrize("kind", STREAMED)
@given(data=st.data(), keep_special=st.booleans())
def test_equals_the_library(kind: str, data: st.DataObject, keep_special: bool) -> None:
    tokenizer = STREAMED[kind]
    ids = data.draw(ids_of(tokenizer))
    expected = tokenizer.decode_as_library(ids, keep_special)
    assert "".join(stream(tokenizer, ids, keep_special)) == expected
    assert tokenizer.decode(ids, keep_special) == expected
    check_bytes(tokenizer, ids)


def check_bytes(tokenizer: Tokenizer, ids: list[int]) -> None:
    """The bytes of whole characters are those of the text."""
    text = tokenizer.decode(ids, keep_special=True)
    if "\ufffd" not in text:
        assert count_bytes(tokenizer, ids) == len(text.encode())


@pytest.mark.parametrize("kind", FALLBACK)
@given(data=st.data(), keep_special=st.booleans())
def test_byte_fallback_equals_the_library(kind: str, data: st.DataObject, keep_special: bool):
    """Where all byte runs are sound; where not, only the broken bytes are lost."""
    tokenizer = FALLBACK[kind]
    ids = data.draw(ids_of(tokenizer) | sound_ids(tokenizer))
    text = "".join(stream(tokenizer, ids, keep_special))
    expected = tokenizer.decode_as_library(ids, keep_special)
    assert tokenizer.decode(ids, keep_special) == text
    if "\ufffd" not in expected:
        assert text == expected
    else:
        assert text.count("\ufffd") <= expected.count("\ufffd")
    check_bytes(tokenizer, ids)


def sound_ids(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Token ids whose byte runs are UTF-8."""

    def one(character: str) -> list[int]:
        return [tokenizer.token_id(f"<0x{b:02X}>") for b in character.encode()]

    word = st.sampled_from(["▁", "▁the", "é", "<s>", "größe"]).map(
        lambda w: [tokenizer.token_id(w)]
    )
    parts = st.lists(st.characters(exclude_categories=["Cs"]).map(one) | word, max_size=12)
    return parts.map(lambda lists: [i for part in lists for i in part])


@pytest.mark.parametrize("kind", WHOLE)
@given(data=st.data())
def test_other_decoders_are_decoded_as_a_whole(kind: str, data: st.DataObject) -> None:
    tokenizer = WHOLE[kind]
    ids = [tokenizer.token_id(token) for token in ["the", "end</w>", "▁", "a", "</s>", " x", "!"]]
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode_as_library(ids) != ""
    if kind != "strip at the end":
        check_bytes(tokenizer, data.draw(ids_of(tokenizer)))


@given(st.lists(st.integers(0, 255), max_size=60))
def test_holds_back_no_more_than_a_character_needs(data: list[int]) -> None:
    shown = ""
    detokenizer = StreamingDetokenizer(STREAMED["byte level"])
    for count, token_id in enumerate(of_bytes(bytes(data)), 1):
        piece = detokenizer.add(token_id)
        piece.encode()
        shown += piece
        assert count - len(shown.encode("utf-8", "replace")) <= 3 + 4 * LONGEST
    whole = bytes(data).decode("utf-8", "replace")
    assert shown + detokenizer.finish() == whole
    assert whole.startswith(shown)


def of_bytes(data: bytes) -> list[int]:
    return [STREAMED["byte level"].token_id(byte_alphabet()[byte]) for byte in data]


def test_text_comes_token_by_token() -> None:
    """Invalid bytes at once; an unfinished character becomes a replacement."""
    tokenizer = STREAMED["byte level"]
    the = [tokenizer.token_id("Ġthe")] * 3
    assert stream(tokenizer, the) == [" the", " the", " the", ""]
    assert stream(tokenizer, of_bytes(b"\xff" * 3)) == ["\ufffd", "\ufffd", "\ufffd", ""]
    assert stream(tokenizer, of_bytes("x€".encode()[:-1])) == ["x", "", "", "\ufffd"]


def test_broken_byte_runs_keep_what_is_sound() -> None:
    tokenizer = FALLBACK["gemma"]
    ids = [tokenizer.token_id(f"<0x{b:02X}>") for b in b"A\xe2\x82B\xff"]
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids) == "A\ufffd\ufffdB\ufffd"


@pytest.mark.parametrize("emoji", EMOJI)
def test_emoji_are_not_split(emoji: str) -> None:
    text = f"a{emoji}b{emoji}{emoji} c"
    parts = [part for part in stream(STREAMED["byte level"], of_bytes(text.encode())) if part]
    assert "".join(parts) == text
    rest = text
    for part in parts:
        assert emoji not in rest or not 0 < (len(part) - rest.index(emoji)) < len(emoji)
        rest = rest[len(part) :]


def test_endless_joiners_are_let_through() -> None:
    detokenizer = StreamingDetokenizer(STREAMED["byte level"])
    shown = "".join(map(detokenizer.add, of_bytes("😀\u200d".encode()) * 100))
    assert len(shown) >= 200 - LONGEST - 2


def test_special_tokens_are_hidden_or_kept() -> None:
    tokenizer = STREAMED["byte level"]
    ids = [tokenizer.token_id(token) for token in ["<s>", "Ġthe", "<tool call>", "</s>"]]
    assert "".join(stream(tokenizer, ids)) == " the<tool call>"
    assert "".join(stream(tokenizer, ids, keep_special=True)) == "<s> the<tool call></s>"


def test_byte_alphabet_is_the_library_s() -> None:
    alphabet = set(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    assert set(byte_alphabet()) == alphabet and len(alphabet) == 256
    assert byte_alphabet()[ord("A")] + byte_alphabet()[0x20] == "AĠ"


def test_can_be_used_again_after_finish() -> None:
    tokenizer = FALLBACK["llama"]
    ids = [tokenizer.token_id("▁the"), tokenizer.token_id("<0xE2>")]
    detokenizer = StreamingDetokenizer(tokenizer)
    for _ in range(2):
        assert [*map(detokenizer.add, ids), detokenizer.finish()] == ["the", "", "\ufffd"]
    assert detokenizer.finish() == ""


def test_unknown_ids_are_refused() -> None:
    tokenizer = STREAMED["byte level"]
    for bad in (-1, 10**6, 2**32, 2**70):
        with pytest.raises(DataError, match=f"token {bad} is not in the vocabulary of made"):
            StreamingDetokenizer(tokenizer).add(bad)
        with pytest.raises(DataError, match="is not in the vocabulary"):
            tokenizer.decode([bad])


@pytest.mark.parametrize("kind", ["byte level", "strip at the end"])
def test_ids_of_padding_are_no_text(kind: str) -> None:
    """A model with more words than its tokenizer draws one, rarely."""
    tokenizer = {**STREAMED, **WHOLE}[kind]
    stream = StreamingDetokenizer(tokenizer, padded=10**6)
    plain = StreamingDetokenizer(tokenizer)
    assert [stream.add(n) for n in (3, 10**6 - 1, 4)] == [plain.add(3), "", plain.add(4)]
    assert stream.finish() == plain.finish()
    for bad in (-1, 10**6):
        with pytest.raises(DataError, match="is not in the vocabulary"):
            stream.add(bad)


@pytest.mark.parametrize("kind", [*STREAMED, *FALLBACK, *WHOLE])
def test_no_tokens_are_no_text(kind: str) -> None:
    stream = StreamingDetokenizer({**STREAMED, **FALLBACK, **WHOLE}[kind])
    assert stream.finish() == ""


def test_a_part_of_a_character_counts_its_own_bytes() -> None:
    for kind, tokenizer in (("byte level", STREAMED["byte level"]), ("llama", FALLBACK["llama"])):
        spelt = byte_alphabet() if kind == "byte level" else [f"<0x{b:02X}>" for b in range(256)]
        ids = [tokenizer.token_id(spelt[byte]) for byte in "é🦊".encode()]
        counts = [count_bytes(tokenizer, ids[:n]) for n in range(len(ids) + 1)]
        assert counts == [0, 1, 2, 3, 4, 5, 6]
