"""Prompts tokenised turn by turn: the ids of the whole text, and no turn tokenised twice."""

from __future__ import annotations

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from tests.unit.test_tokenizer import made_of
from toastkit.model.locate import locate
from toastkit.text import turns
from toastkit.text.tokenizer import Tokenizer
from toastkit.text.turns import TurnTokenizer

MARKS = ("<|im_start|>", "<|im_end|>", "<|im", "_start|>", "mask", "<s>", "&amp", "im_start", "A B")
PIECES = (*MARKS, "user\n", "a fox", " ", "  ", "\n", "|>", "ﬁ", "É", "word", "x")


def made(kind: str) -> tokenizers.Tokenizer:
    """Characters are tokens; special ones overlap, take blanks with them, or begin as others do."""
    letters = sorted({*"".join(PIECES), *"▁abcdefgh", *pre_tokenizers.ByteLevel.alphabet()})
    vocab = {letter: i for i, letter in enumerate(["<unk>", *letters])}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, [], unk_token="<unk>"))
    if kind == "bytes":
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
        tokenizer.decoder = decoders.ByteLevel()
    elif kind == "first":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    else:
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁"), normalizers.NFKC()]
        )
    plain = [text for text in MARKS if text not in ("mask", "<s>", "&amp", "A B")]
    tokenizer.add_special_tokens(plain)
    tokenizer.add_special_tokens([AddedToken("mask", lstrip=True, normalized=False)])
    tokenizer.add_special_tokens([AddedToken("<s>", rstrip=True, normalized=False)])
    tokenizer.add_tokens([AddedToken("&amp", normalized=False), AddedToken("A B", normalized=True)])
    if kind == "words":
        tokenizer.add_special_tokens([AddedToken("word", single_word=True, normalized=False)])
    return tokenizer


@pytest.fixture(scope="module", params=["crumb", "bytes", "first", "prepended", "words"])
def both(request: pytest.FixtureRequest) -> tuple[Tokenizer, TurnTokenizer]:
    """Of one checkpoint."""
    files = locate("crumb") if request.param == "crumb" else made_of(made(request.param))
    return Tokenizer(files), TurnTokenizer(files)


@given(
    texts=st.lists(st.lists(st.sampled_from(PIECES)).map("".join), min_size=1, max_size=4),
    together=st.sampled_from([1, 30, 1 << 18]),
)
def test_the_ids_are_those_of_the_whole_text(both: tuple, texts: list[str], together: int) -> None:
    """Each text goes on where the last one ended, or is told again from an earlier place. together:
    characters of turns that are tokenised in one call."""
    (plain, by_turn), so_far = both, ""
    by_turn._known.clear()
    by_turn._characters = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(turns, "MIN_PART", 1)
        patch.setattr(turns, "MAX_CACHED", 40)
        patch.setattr(turns, "PIECE", together)
        for text in texts:
            so_far += text
            expected = {(asked, special): plain.encode(asked, special)
                        for asked in (so_far, text) for special in (False, True)}  # fmt: skip
            for asked in (so_far, text, so_far):
                for special in (False, True):
                    assert by_turn.encode(asked, special) == expected[asked, special], asked


def test_a_turn_is_tokenised_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the library gets of a chat's next prompt is what is new in it."""
    tokenizer, seen, real = TurnTokenizer(locate("crumb")), [], Tokenizer._encode_all

    def encode(self: Tokenizer, texts: list[str], *rest) -> list[list[int]]:
        seen.extend(texts)
        return real(self, texts, *rest)

    monkeypatch.setattr(Tokenizer, "_encode_all", encode)
    asked = "<|im_start|>user\n" + "a fox " * 1000
    opened = "<|im_end|>\n<|im_start|>assistant\n"
    whole = tokenizer.encode(asked + opened, False)
    assert seen == [asked, opened]
    seen.clear()
    more = f"{opened}Yes.<|im_end|>\n<|im_start|>user\nthanks{opened}"
    ids = tokenizer.encode(asked + more, False)
    assert seen == [more]
    assert ids[: len(whole)] == whole
    assert ids == Tokenizer(locate("crumb")).encode(asked + more, False)


def test_new_turns_are_tokenised_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call waits for a thread; a history of hundreds of turns is not to wait hundreds."""
    tokenizer, calls, real = TurnTokenizer(locate("crumb")), [], Tokenizer._encode_all

    def encode(self: Tokenizer, texts: list[str], *rest) -> list[list[int]]:
        calls.append(len(texts))
        return real(self, texts, *rest)

    monkeypatch.setattr(Tokenizer, "_encode_all", encode)
    told = [f"<|im_start|>user\n{turn} " + "a fox " * 300 + "<|im_end|>\n" for turn in range(20)]
    tokenizer.encode("".join(told[:3]), False)
    tokenizer.encode("".join(told), False)
    assert calls == [3, 1, 17, 1]  # and what comes last, which goes on


def test_it_reads_no_further_than_is_of_use() -> None:
    text = "<|im_start|>user\n" + "a fox " * 1000 + "<|im_end|>\n"
    tokenizer = TurnTokenizer(locate("crumb"))
    whole = tokenizer.encode(text * 3, False)
    assert whole == Tokenizer(locate("crumb")).encode(text * 3, False)
    found = tokenizer.encode(text * 3, False, most=len(whole) // 3 + 1)
    assert len(whole) // 3 + 1 < len(found) < len(whole) and found == whole[: len(found)]


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "MAX_CACHED", 6000)
    tokenizer = TurnTokenizer(locate("crumb"))
    for number in range(8):
        text = f"<|im_start|>user\n{number} " + "a fox " * 300
        tokenizer.encode(text + "<|im_end|>\n<|im_start|>", False)
        held = sum(map(len, tokenizer._known))
        assert held == tokenizer._characters <= 6000
    assert tokenizer._known
