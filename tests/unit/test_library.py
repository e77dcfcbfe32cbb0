"""What a tokenizer.json may make the library do, and long texts in pieces."""

from __future__ import annotations

import json
import os
from functools import cache
from threading import Thread
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import ROOT
from tests.unit.test_tokenizer import Files
from toastkit.errors import DataError
from toastkit.model.locate import locate
from toastkit.text import library, pieces
from toastkit.text.tokenizer import Tokenizer

CATASTROPHE = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated",
               "invert": False}  # fmt: skip
STORY = (ROOT / "tests" / "texts" / "story.txt").read_text()
TEXTS = st.lists(
    st.sampled_from([" ", "  ", "\n", "a", "the", "x" * 9, "é", "中文", "\u0301", "🙂", "12", "…",
                     "<|im_end|>", "don't", " (", "\t", STORY[:40]]), min_size=20, max_size=90
).map("".join)  # fmt: skip


def replace(old: str, new: str, kind: str = "String") -> dict:
    return {"type": "Replace", "pattern": {kind: old}, "content": new}


def sequence(*steps: dict, name: str = "normalizers") -> dict:
    return {"type": "Sequence", name: list(steps)}


def made(**parts: Any) -> Tokenizer:
    """A tokenizer of the letters a to z and "▁", with these parts."""
    vocab = {character: i for i, character in enumerate("▁abcdefghijklmnopqrstuvwxyz")}
    document = {"added_tokens": [], "model": {"type": "BPE", "vocab": vocab, "merges": []}, **parts}
    return loaded("odd", json.dumps(document).encode())


def loaded(name: str, data: bytes) -> Tokenizer:
    """The tokenizer of a checkpoint that has only this tokenizer.json."""
    return Tokenizer(Files(None, name, tokenizer__json=data))


def test_a_panic_is_an_error_in_the_data(capfd: pytest.CaptureFixture) -> None:
    tokenizer = made(pre_tokenizer=CATASTROPHE)
    with pytest.raises(DataError, match="cannot tokenize the prompt for odd: Onig: Regex search"):
        tokenizer.encode("a" * 38 + "b", add_special=False)
    assert tokenizer.encode("ab", add_special=False) == [1, 2]
    assert capfd.readouterr().err == ""
    thread = Thread(target=lambda: library.call("cannot act", lambda: os.write(2, b"another's")))
    thread.start()  # in a daemon, where others have something to say
    thread.join()
    assert capfd.readouterr().err == "another's"


def around(*pieces: dict, **special: dict) -> dict:
    """A post-processor with these pieces. special: id -> what it stands for."""
    both = [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}]
    return {"type": "TemplateProcessing", "single": pieces, "pair": both, "special_tokens": special}


@pytest.mark.parametrize(
    ("piece", "said", "always"),
    [
        ({"SpecialToken": {"id": "<s>", "type_id": 0}}, "adds '<s>', which is not defined", False),
        ({"Sequence": {"id": "B", "type_id": 0}}, "puts in a second text where there is one", True),
    ],
)
def test_a_post_processor_without_its_token(capfd, piece: dict, said: str, always: bool) -> None:
    own = {"Sequence": {"id": "A", "type_id": 0}}
    for post in (around(piece, own), sequence(around(piece, own), name="processors")):
        tokenizer = made(post_processor=post)
        for special in {True, not always}:
            with pytest.raises(DataError) as caught:
                tokenizer.encode("ab", add_special=special)
            assert caught.value.message == f"odd: broken tokenizer.json: its post-processor {said}"
        assert always or tokenizer.encode("ab", add_special=False) == [1, 2]
    assert capfd.readouterr().err == ""
    token = {"id": "<s>", "ids": [9], "tokens": ["<s>"]}
    fine = around({"SpecialToken": {"id": "<s>", "type_id": 0}}, own, **{"<s>": token})
    assert made(post_processor=fine).encode("ab", add_special=True) == [9, 1, 2]


def test_what_is_put_behind_a_text() -> None:
    text, end, begin = (
        {"Sequence": {"id": "A", "type_id": 0}},
        *({"SpecialToken": {"id": name, "type_id": 0}} for name in "zy"),
    )
    marks = {name: {"id": name, "ids": [n], "tokens": [name]} for name, n in (("z", 26), ("y", 25))}
    for pieces_, count in (([text], 0), ([begin, text], 0), ([begin, text, end, end], 2)):
        assert made(post_processor=around(*pieces_, **marks)).appended == count
    assert made().appended == 0


def test_a_search_without_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "SECONDS", 0.05)
    tokenizer = made(pre_tokenizer=CATASTROPHE)
    with pytest.raises(DataError, match="cannot tokenize the prompt for odd: it takes over 0.05 s"):
        tokenizer.encode(("a" * 18 + "b") * 40, add_special=False)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_is_no_panic(kind: type[BaseException]) -> None:
    def act() -> None:
        raise kind

    with pytest.raises(kind):
        library.call("cannot act", act)


@pytest.mark.parametrize(
    ("section", "rules"),
    [("normalizer", [replace("h", "h" * 1000)] * 3), ("normalizer", [replace("", "h" * 100)]),
     ("normalizer", [replace("(?=h)", "h" * 80, "Regex")]),
     ("normalizer", [replace("h*", "h" * 64, "Regex")]),
     ("normalizer", [{"type": "Prepend", "prepend": "h" * 3000}, replace("h", "h" * 50)]),
     ("decoder", [replace("h", "h" * 1000)] * 3)],
)  # fmt: skip
def test_rules_that_make_a_text_endless(section: str, rules: list[dict]) -> None:
    name = "normalizers" if section == "normalizer" else "decoders"
    with pytest.raises(DataError, match=f"odd: broken tokenizer.json: its {section} makes a text"):
        made(**{section: sequence(sequence(*rules, name=name), name=name)})


def test_usual_rules_are_taken() -> None:
    rules = [{"type": "Prepend", "prepend": "▁"}, replace(" ", "▁"), replace("`", "'"),
             replace(" {2,}", " ", "Regex"), {"type": "NFKC"}]  # fmt: skip
    assert made(normalizer=sequence(*rules)).encode("a b", add_special=False) == [0, 1, 0, 2]
    steps = [replace("▁", " "), {"type": "ByteFallback"}, {"type": "Fuse"},
             {"type": "Strip", "content": " ", "start": 1, "stop": 0}]  # fmt: skip
    tokenizer = made(decoder=sequence(*steps, name="decoders"))
    assert tokenizer.decode([0, 1, 0, 2]) == "a b"


@cache
def llama_data() -> bytes:
    """tokenizer.json of one that writes a blank before every text, and cuts nothing before it
    merges."""
    trained = tokenizers.Tokenizer(tokenizers.models.BPE(byte_fallback=True, unk_token="<unk>"))
    trained.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
    )
    specials = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=600, special_tokens=specials, show_progress=False
    )
    trained.train_from_iterator(STORY.splitlines(), trainer)
    return trained.to_str().encode()


CRUMB, LLAMA = Tokenizer(locate("crumb")), loaded("llama", llama_data())
each_tokenizer = pytest.mark.parametrize("tokenizer", [CRUMB, LLAMA], ids=["crumb", "llama"])


@each_tokenizer
@given(text=TEXTS)
def test_pieces_are_the_tokens_of_the_whole(tokenizer: Tokenizer, text: str) -> None:
    """And no token stands for more characters than it says."""

    def encode(part: str) -> list[int]:
        return tokenizer.encode(part, add_special=False)

    whole = encode(text)
    found = list(pieces.encode_pieces(encode, text, size=120))
    assert [i for piece in found for i in piece] == whole
    assert tokenizer.reach is not None and len(text) <= tokenizer.reach * len(whole)


@each_tokenizer
def test_a_long_text_is_read_in_pieces(tokenizer: Tokenizer, monkeypatch) -> None:
    text, line = STORY[:15_000], "ab" * 2500
    whole, letters = tokenizer.encode(text, add_special=True), CRUMB.encode(line, add_special=True)
    monkeypatch.setattr(pieces, "PIECE", 1000)
    assert tokenizer.encode(text, add_special=True) == whole
    some = tokenizer.encode(text, add_special=True, most=250)
    assert 250 < len(some) < len(whole) / 2 and some == whole[: len(some)]
    assert CRUMB.encode(line, add_special=True) == letters


def test_specials_stand_around_all_the_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    post = tokenizers.processors.TemplateProcessing(
        single="a $A b", special_tokens=[("a", 1), ("b", 2)]
    )
    tokenizer = made(post_processor=json.loads(post.__getstate__()))
    monkeypatch.setattr(pieces, "PIECE", 300)
    assert tokenizer.encode("xyz" * 700, add_special=True) == [1, *[24, 25, 26] * 700, 2]


def test_a_text_without_a_place_to_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of blanks depend on both their ends. (Ten million of them make the library panic.)"""
    monkeypatch.setattr(pieces, "MAX_PIECE", 1 << 10)
    monkeypatch.setattr(pieces, "PIECE", 1 << 8)
    for text in (" " * 4000, "a b " * 90 + " " * 4000):
        with pytest.raises(DataError, match="finds no place to cut"):
            CRUMB.encode(text, add_special=False)


@pytest.mark.parametrize(
    "parts",
    [{"pre_tokenizer": {"type": "Whitespace"}},
     {"pre_tokenizer": {**CATASTROPHE, "behavior": "Removed"}}, {"normalizer": replace("a", "")},
     {"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}},
     {"normalizer": replace("a+", "a", "Regex")}, {}],  # what it does not know is dropped
)  # fmt: skip
def test_where_nothing_bounds_what_a_token_stands_for(parts: dict) -> None:
    assert made(**parts).reach is None


def test_composed_characters_count() -> None:
    """Four characters become one: α with three marks."""
    document = json.loads(llama_data())
    document["normalizer"] = sequence({"type": "NFC"}, document["normalizer"])
    composing = loaded("nfc", json.dumps(document).encode())
    assert (composing.reach or 0) > 4 * ((LLAMA.reach or 0) - 1)
