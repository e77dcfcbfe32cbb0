"""Vocabularies read from a table: the ids that all words give, from the words of a text."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from toastkit.text import library, vocabulary, vocabulary_making
from toastkit.text.vocabulary import PartialVocabulary, WholeVocabulary, open_vocabulary
from toastkit.text.vocabulary_making import contents, make
from toastkit.text.vocabulary_table import Table, table_path

LETTERS = "abABé1 ▁ĠÃ©."
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
PIECES = (
    "ab",
    "Ab",
    "aab",
    "é",
    "e\u0301",
    "我",
    "1",
    "11",
    " ",
    "  ",
    "\n",
    "a.b",
    "<s>",
    "<s",
    "AB",
)
BYTE_LEVEL = {
    "type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True
}  # fmt: skip
NORMALIZERS: tuple[Any, ...] = (
    None, {"type": "NFC"}, {"type": "Lowercase"},
    {"type": "Sequence", "normalizers": [
        {"type": "Prepend", "prepend": "▁"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]},
)  # fmt: skip
PRE_TOKENIZERS: tuple[Any, ...] = (
    None, BYTE_LEVEL, {"type": "Whitespace"},
    {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": True},
    {"type": "Sequence", "pretokenizers": [
        {"type": "Digits", "individual_digits": True}, BYTE_LEVEL]},
)  # fmt: skip
POST_PROCESSOR = {
    "type": "TemplateProcessing", "pair": [{"Sequence": {"id": "A", "type_id": 0}}],
    "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}},
               {"Sequence": {"id": "A", "type_id": 0}}],
    "special_tokens": {"<s>": {"id": "<s>", "ids": [7], "tokens": ["<s>"]}},
}  # fmt: skip


def added(number: int, content: str, **more: bool) -> dict[str, Any]:
    usual = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": number, "content": content, "special": True, **usual, **more}


@st.composite
def documents(draw: st.DrawFn) -> dict[str, Any]:
    """A tokenizer.json of every kind of BPE that a table can stand for, with ids in any order."""
    words, merges = list(dict.fromkeys(draw(st.lists(st.sampled_from(LETTERS), min_size=1)))), []
    for _ in range(draw(st.integers(0, 25))):
        left, right = draw(st.sampled_from(words)), draw(st.sampled_from(words))
        merges.append([left, right])
        if left + right not in words:
            words.append(left + right)
    fallback, unknown = draw(st.booleans()), draw(st.booleans())
    words += [*BYTES * fallback, *["<unk>"] * unknown, *["<s>"] * draw(st.booleans())]
    ids = draw(st.permutations(range(len(words) + 3)))
    model = {
        "type": "BPE", "dropout": None, "unk_token": "<unk>" if unknown else None,
        "continuing_subword_prefix": None, "end_of_word_suffix": None,
        "fuse_unk": draw(st.booleans()), "byte_fallback": fallback,
        "ignore_merges": draw(st.booleans()), "vocab": dict(zip(words, ids)), "merges": merges,
    }  # fmt: skip
    first = len(words) + 3
    tokens = [
        added(first, "<s>", normalized=draw(st.booleans())),
        added(first + 1, "AB", lstrip=True),
    ]
    return {
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": draw(st.sampled_from([[], tokens])),
        "normalizer": draw(st.sampled_from(NORMALIZERS)),
        "pre_tokenizer": draw(st.sampled_from(PRE_TOKENIZERS)),
        "post_processor": draw(st.sampled_from([None, POST_PROCESSOR])),
        "decoder": None, "model": model,
    }  # fmt: skip


def loaded(document: dict[str, Any]) -> Any:
    return library.load(json.dumps(document).encode())


def ids(tokenizer: Any, texts: list[str], special: bool) -> list[list[int]]:
    return [one.ids for one in tokenizer.encode_batch_fast(texts, add_special_tokens=special)]


@given(document=documents(), texts=st.lists(st.lists(st.sampled_from(PIECES)).map("".join)))
def test_the_words_of_a_text_give_the_ids_that_all_words_give(
    document: dict[str, Any], texts: list[str]
) -> None:
    """A table is tried as it is made, here with a tenth of the texts: the test's own try it too."""
    tokenizer = loaded(document)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vocabulary_making, "SAMPLES", 20)
        table, whole = Table(contents(tokenizer)), WholeVocabulary(tokenizer)
    assert table.usable
    part = PartialVocabulary(table, lambda: pytest.fail("all words were loaded"))
    for special in (False, True):
        assert ids(part.loaded_for(texts), texts, special) == ids(tokenizer, texts, special)
    assert (part.size, part.highest, part.reach) == (whole.size, whole.highest, whole.reach)
    for token_id in range(whole.highest + 2):
        assert part.token(token_id) == whole.token(token_id)
    for token in (*tokenizer.get_vocab(), *PIECES, ""):
        assert part.token_id(token) == whole.token_id(token)


@pytest.mark.parametrize(
    "change",
    [{"dropout": 0.5}, {"continuing_subword_prefix": "##"}, {"end_of_word_suffix": "</w>"},
     {"vocab": {"a": 0, "b": 1, "ab": 1}}, {"byte_fallback": True},
     {"type": "Unigram", "vocab": [["a", 0.0]], "unk_id": 0}],
    ids=["dropout", "prefix", "suffix", "an id twice", "merged bytes", "unigram"],
)  # fmt: skip
def test_a_vocabulary_of_another_kind_is_loaded_whole(change: dict[str, Any]) -> None:
    vocab = {"a": 0, "b": 1, "ab": 2, "<0x41>": 3, "<0x41>b": 4, "##b": 5, "a##b": 6}
    model = {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
        "ignore_merges": False, "vocab": vocab, "merges": [["a", "b"], ["<0x41>", "b"]], **change,
    }  # fmt: skip
    if change.get("type") == "Unigram":
        model = change
    elif "##" in str(change):
        model["merges"] = [["a", "##b"]]
        model["vocab"] = {**vocab, "ab": 2}
    elif "vocab" in change:
        model["merges"] = []
    assert not Table(
        contents(loaded({"version": "1.0", "added_tokens": [], "model": model}))
    ).usable


@pytest.fixture
def data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> bytes:
    """A tokenizer.json that counts as large, with a cache directory of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(vocabulary, "MIN_BYTES", 0)
    return json.dumps(
        {
            "version": "1.0", "added_tokens": [added(4, "<s>")], "pre_tokenizer": None,
            "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2, "abb": 3},
                      "merges": [["a", "b"], ["ab", "b"]]},
        }
    ).encode()  # fmt: skip


def test_a_table_is_made_once_and_then_used(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    begun: list[bytes] = []
    monkeypatch.setattr(vocabulary, "_make_meanwhile", begun.append)
    assert isinstance(open_vocabulary(data), WholeVocabulary)
    assert begun == [data]
    assert make(data) and make(data)
    assert isinstance(open_vocabulary(data), PartialVocabulary)
    assert isinstance(open_vocabulary(data + b" "), WholeVocabulary)
    assert begun == [data, data + b" "]


@pytest.mark.parametrize("broken", [b"", b"x" * 100, "cut", "header", "counts"])
def test_a_broken_table_is_none(data: bytes, broken: bytes | str) -> None:
    assert make(data)
    path = Path(table_path(data))
    good = path.read_bytes()
    more = good.replace(b'"counts": [', b'"counts": [9')
    changed = {"cut": good[:-40], "header": good[:50], "counts": more}
    path.write_bytes(broken if isinstance(broken, bytes) else changed[broken])
    found = open_vocabulary(data)
    assert ids(found.loaded_for(["abba<s>"]), ["abba<s>"], False) == [[3, 0, 4]]


def test_a_table_that_others_may_write_is_none(data: bytes) -> None:
    assert make(data)
    os.chmod(os.path.dirname(table_path(data)), 0o777)
    assert Table.find(data) is None
    assert not make(data)


def test_what_fails_is_not_begun_again(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(vocabulary_making, "contents", lambda tokenizer: 1 // 0)
    begun: list[bytes] = []
    monkeypatch.setattr(vocabulary, "_make_meanwhile", begun.append)
    assert not make(data)
    assert isinstance(open_vocabulary(data), WholeVocabulary) and not begun


def test_old_tables_are_removed(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(vocabulary_making, "SAMPLES", 1)
    for blanks in range(20):
        assert make(data + b" " * blanks)
    assert Table.find(data) is None
    assert Table.find(data + b" " * 19)
    assert len(os.listdir(os.path.dirname(table_path(data)))) == 17  # with the lock


@pytest.mark.parametrize("texts", [["ab" * 20_000], [f"ab{n}" for n in range(9)]])
def test_what_takes_longer_than_loading_all_words_loads_them(data: bytes, texts: list[str]) -> None:
    tokenizer = library.load(data)
    part = PartialVocabulary(Table(contents(tokenizer)), lambda: tokenizer, lookups=30_000)
    found = [ids(part.loaded_for([text]), [text], True)[0] for text in texts]
    assert found == ids(tokenizer, texts, True)
    assert part.loaded_for(["a"]) is tokenizer


def test_a_table_that_gives_other_ids_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the texts that it is tried with is encoded with its words alone."""
    model = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]}
    document = {"version": "1.0", "model": model}
    assert Table(contents(loaded(document))).usable
    calls = 0

    def without_merges(self: Table, numbers: Any) -> tuple[dict[str, int], list]:
        nonlocal calls
        calls += 1
        vocab, merges = part(self, numbers)
        return vocab, merges if calls < 2 * vocabulary_making.SAMPLES else []

    part = Table.part
    monkeypatch.setattr(Table, "part", without_merges)
    assert not Table(contents(loaded(document))).usable


def test_a_hostile_vocabulary_is_not_searched_for_long() -> None:
    """Words whose checksums agree in their last bits all want the same slot."""
    from zlib import crc32

    same = [str(n) for n in range(1 << 18) if crc32(str(n).encode()) % 256 == 0]
    choose = random.Random(0)
    words = choose.sample(same, 100)
    model = {"type": "BPE", "vocab": {word: n for n, word in enumerate(words)}, "merges": []}
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps({"version": "1.0", "model": model}))
    assert not Table(contents(tokenizer)).usable
