"""Prompts that are too long: refused unread or after a part, or cut down to what fits."""

from __future__ import annotations

import random
from functools import lru_cache

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, normalizers
from tokenizers.processors import TemplateProcessing

from tests.unit.test_tokenizer import made_of
from toastkit.errors import DataError
from toastkit.model.config import load_config
from toastkit.model.locate import locate
from toastkit.stages import tokenize as tokenize_stage
from toastkit.stages.tokenize import Prompt, PromptOptions, PromptTokenizer
from toastkit.text import pieces
from toastkit.text.tokenizer import Tokenizer


@lru_cache
def crumb() -> Tokenizer:
    return Tokenizer(locate("crumb"))


def user(text: str) -> dict:
    return {"role": "user", "content": text}


class ReadsAll(PromptTokenizer):
    """One that reads a long text to its end before it is truncated."""

    def shortened(self, prompt: Prompt, limit: int) -> Prompt:
        """All of it."""
        return prompt


@settings(max_examples=12)
@given(
    before=st.sampled_from(["", "\n", " a", "🙂"]), seed=st.integers(0, 2**32), raw=st.booleans()
)
def test_truncation_looks_at_the_ends_only(before: str, seed: int, raw: bool) -> None:
    """What it leaves is what it would leave after reading all of a long text."""
    files, tokenizer = locate("crumb"), crumb()
    chance = random.Random(seed)
    words = ["bear", "\n", "🙂", "é", "river...", "(x)", "  ", "中文", "1234"]
    texts = [before + " ".join(chance.choices(words, k=n)) for n in (3, 900, 20, 600)]
    long = Prompt(texts[1]) if raw else Prompt(messages=[user(text) for text in texts])
    config, options = load_config(files)._replace(context=48), PromptOptions(raw, truncate=True)
    stage = PromptTokenizer(files, config, options, tokenizer)
    found = stage.encode(long)
    assert stage.shortened(long, 48) is not long
    assert found == ReadsAll(files, config, options, tokenizer).encode(long)
    assert 0 < len(found) <= 48


@given(length=st.integers(20, 80), word=st.sampled_from(["a", "ab ", "\u00e9a"]))
def test_truncation_where_a_blank_comes_before_any_text(length: int, word: str) -> None:
    """As with sentencepiece: a text that loses it has it again when it is tokenised."""
    letters = {letter: n for n, letter in enumerate("\u2581ab\u00e9:")}
    whole = tokenizers.Tokenizer(tokenizers.models.BPE(letters, []))
    whole.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    whole.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    files = locate("crumb")
    tokenizer = Tokenizer(made_of(whole))
    tokenizer.templates = {"default": "{% for m in messages %}:{{ m.content }}{% endfor %}"}
    options = PromptOptions(truncate=True, max_tokens=8)
    stage = PromptTokenizer(files, load_config(files)._replace(context=40), options, tokenizer)
    text = (word * length)[:length]
    left = tokenizer.decode(stage.encode(Prompt(messages=[user("a"), user(text)])))
    assert left.startswith(":a:") and text.endswith(left[3:])
    assert left == f":a:{text}" if length < 36 else 0 < len(left) <= 40


@pytest.mark.parametrize(
    ("context", "wanted", "left"), [(1000, None, 744), (1000, 8, 992), (48, None, 24), (48, 40, 24)]
)
def test_truncation_leaves_room_for_an_answer(context: int, wanted: int | None, left: int) -> None:
    """Of the length that is asked for, at most half of the context."""
    files, tokenizer, said = locate("crumb"), crumb(), []
    options = PromptOptions(raw=True, truncate=True, max_tokens=wanted, note=said.append)
    config = load_config(files)._replace(context=context)
    stage = PromptTokenizer(files, config, options, tokenizer)
    ids = tokenizer.encode("the bear " * 600, add_special=True)
    assert stage.encode(Prompt("the bear " * 600)) == ids[-left:]
    assert said[-1].endswith(
        f" tokens, the model's context is {context}: its beginning is cut off, "
        f"{left} tokens are left"
    )


def test_the_tokens_of_a_prompt_tell_whose_message_is_last() -> None:
    stage = PromptTokenizer(locate("crumb"), load_config(locate("crumb")), PromptOptions(), crumb())
    talk = [user("Hi"), {"role": "assistant", "content": "Ho"}]
    for prompt, role in ((Prompt("Hi"), "user"), (Prompt(messages=talk), "assistant")):
        head, tokens = tokenize_stage.tokenize([prompt], stage)
        assert tokens.role == role and head.vocab == stage.head(None).vocab


def test_truncation_goes_through_many_messages_once(monkeypatch: pytest.MonkeyPatch) -> None:
    files, tokenizer = locate("crumb"), crumb()
    config = load_config(files)._replace(context=200)
    stage = PromptTokenizer(files, config, PromptOptions(truncate=True), tokenizer)
    rendered: list[Prompt] = []
    monkeypatch.setattr(
        stage, "render", lambda p: rendered.append(p) or "|".join(m["content"] for m in p.messages)
    )
    ids = stage.encode(Prompt(messages=[user("the bear " * 20) for _ in range(100)]))
    assert 0 < len(ids) <= 200 and len(rendered) < 5


def test_what_cannot_fit_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    files, tokenizer = locate("crumb"), crumb()
    stage = PromptTokenizer(files, load_config(files), PromptOptions(raw=True), tokenizer)
    monkeypatch.setattr(tokenizer, "encode", None)
    with pytest.raises(DataError, match="400000 characters, 163840 at most can fit, the model's"):
        stage.encode(Prompt("x" * 400_000))


def test_what_does_not_fit_is_read_no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    files, tokenizer = locate("crumb"), crumb()
    monkeypatch.setattr(pieces, "PIECE", 1000)
    monkeypatch.setattr(tokenizer, "reach", None)
    for context, said in ((64, "the model's context is 64"), (None, "400 is the limit")):
        monkeypatch.setattr(tokenize_stage, "MAX_TOKENS", 400)
        config = load_config(files)._replace(context=context)
        stage = PromptTokenizer(files, config, PromptOptions(raw=True), tokenizer)
        with pytest.raises(DataError, match=f"the prompt has at least [0-9]{{3}} tokens.*{said}"):
            stage.encode(Prompt("a bear " * 10_000))


def test_tokens_that_the_model_has_not() -> None:
    """Added ones and those of the post-processor may be such: refused where the text is known."""
    whole = tokenizers.Tokenizer.from_buffer(locate("crumb").read("tokenizer.json"))
    whole.add_special_tokens(["<beyond>"])
    files = locate("crumb")
    options = PromptOptions(raw=True)
    plain = PromptTokenizer(files, load_config(files), options, Tokenizer(made_of(whole)))
    fine = plain.encode(Prompt("hi"))
    whole.post_processor = TemplateProcessing(single="x $A", special_tokens=[("x", 2**32 - 1)])
    around = PromptTokenizer(files, load_config(files), options, Tokenizer(made_of(whole)))
    for stage, text, bad in ((plain, "hi<beyond>", 4096), (around, "hi", 2**32 - 1)):
        with pytest.raises(DataError, match=f"token {bad} is outside the vocabulary of 4096"):
            stage.encode(Prompt(text))
    assert 0 < max(fine) < 4096


@pytest.mark.parametrize(
    ("truncate", "hint"), [(False, "shorten it, or give --truncate"), (None, "shorten it")]
)
def test_the_hint_names_what_can_be_given(truncate: bool | None, hint: str) -> None:
    """Clients of a daemon have no --truncate."""
    files, tokenizer = locate("crumb"), crumb()
    options = PromptOptions(raw=True, truncate=truncate)
    stage = PromptTokenizer(files, load_config(files), options, tokenizer)
    with pytest.raises(DataError) as caught:
        stage.encode(Prompt("x" * 400_000))
    assert caught.value.hint == hint
