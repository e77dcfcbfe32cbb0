"""The prompt classifier: the paper's formula term by term, and what counts as a symbol or word."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toastkit.gears.classifier import (
    KEYWORDS,
    SYMBOLS,
    UNICODE_SYMBOLS,
    Difficulty,
    classify,
    gear_of,
    short,
)

texts = st.text(st.sampled_from("ab 12=+-*/<π√(),.\né prove step"), max_size=60)


@pytest.mark.parametrize(
    "text, score, gear",
    [
        ("", 0, "low"),
        (" \n\t", 0, "low"),
        ("a b", 0.3 * 2 / 50, "low"),
        ("a = b", 2 + 0.3 * 3 / 50, "mid"),
        ("a = b < c", 4 + 0.3 * 5 / 50, "high"),
        ("prove", 1.5 + 0.3 / 50, "mid"),
        ("prove it step by step", 4.5 + 0.3 * 5 / 50, "high"),
        ("seven letter", 0.3 * 2 / 50, "low"),  # 5.5 a word
        ("seventy letters", 1.5 + 0.3 * 2 / 50, "mid"),  # 7 a word
        ("abcdef abcdefg", 0.3 * 2 / 50, "low"),  # 6.5 is not more than 6.5
        ("a " * 50, 0.3, "low"),
        ("a " * 150, 0.9, "low"),
        ("a " * 1000, 0.9, "low"),
        ("seventy letters = " + "seventy " * 148, 2 + 0.9 + 1.5, "high"),
    ],
)
def test_every_term_of_the_score(text, score, gear):
    found = classify(text)
    assert found.score == pytest.approx(score, abs=1e-6)
    assert found.gear == gear


def test_the_fields_of_a_difficulty():
    assert classify("Solve x = y + 1") == Difficulty(5.536, "high", 2, 1, 6, 1.666667)
    assert classify("") == Difficulty(0.0, "low", 0, 0, 0, 0.0)
    assert classify("\ud800 prove \0 x = y").code == 1  # a lone surrogate and NUL are text
    text = "x = a * b + c / d - 3 while the quick brown fox is (π) "
    assert classify(text * 5_000).math == 5_000 * classify(text).math  # linear, or it took hours


def test_scores_at_the_boundaries():
    scores = (0, 1.499999, 1.5, 3.999999, 4.0)
    assert [gear_of(score) for score in scores] == ["low", "low", "mid", "mid", "high"]


@pytest.mark.parametrize(
    "text, count",
    [("x = y", 1), ("x == y and x >= 2", 3), ("=====", 1), ("a+b^c < d > 5 %", 5), ("∑ √x ≤ ∞", 4),
     ("3*4, x * y, a*b*c, (a)*(b)", 5), ("**bold** and *it*", 0), ("* one\n* two\n", 0),
     ("1/2 x / y (a+b)/c a/2", 5), ("and/or km/h https://example.org/a/b", 0),
     ("17 - 9, x - 3, 3 - x", 3), ("a well-known fact - or not - from 3-4 days", 0),
     ("- one\n- two", 0), ("2πr and π", 2), ("από την πόλη", 0), ("2 − 1 × 3", 2),
     ("12 345.67", 0)],
)  # fmt: skip
def test_symbols(text, count):
    assert classify(text).math == count


@pytest.mark.parametrize(
    "text, count",
    [("def DEF Def", 3), ("define defer undef def_x def2 a_def", 0), ("(why?) “prove” return;", 3),
     ("step-by-step", 2), ("naïve prouvé", 0), ("", 0)],
)  # fmt: skip
def test_keywords(text, count):
    assert classify(text).code == count


def test_the_sets_are_what_they_say():
    assert all(word.isascii() and word == word.lower() and word.isalpha() for word in KEYWORDS)
    for symbol in SYMBOLS + UNICODE_SYMBOLS:
        assert classify(symbol).math == 1, symbol
    for word in KEYWORDS:
        assert classify(word).code == 1, word


@pytest.mark.parametrize(
    "text, gears",
    [("What is the capital of France?", "low"), ("Tell me a story about a cat.", "low"),
     ("Summarise this chapter in two sentences.", "low"), ("Hello, how are you today?", "low"),
     ("What is 12 * 7?", "mid"), ("Write a Python function that reverses a list.", "mid high"),
     ("def f(x):\n    return x + 1\n\nWhy is f(2) == 3?", "high"),
     ("Prove that √2 is irrational, step by step.", "high"), ("Solve 3x + 4 = 19 for x.", "high"),
     ("Derive the equation ∫ x dx = x^2 / 2", "high")],
)  # fmt: skip
def test_typical_prompts(text, gears):
    assert classify(text).gear in gears.split()


@given(texts, st.sampled_from(SYMBOLS + UNICODE_SYMBOLS))
def test_a_symbol_at_the_end_never_makes_a_prompt_easier(text, symbol):
    before, after = classify(text), classify(text + symbol)
    assert after.score >= before.score
    assert after.math - before.math in (0, 1)


@given(texts)
def test_the_score_is_its_terms(text):
    found = classify(text)
    long_words = 1.5 if found.words and sum(map(len, text.split())) / found.words > 6.5 else 0
    length = min(found.words / 50, 3)
    expected = 2 * found.math + 1.5 * found.code + 0.3 * length + long_words
    assert found.score == pytest.approx(expected, abs=1e-6)
    assert found.words == len(text.split())
    assert found.gear == gear_of(found.score)


@given(texts)
def test_a_difficulty_survives_its_map(text):
    found = classify(text)
    assert Difficulty.from_map(found._asdict()) == found
    assert Difficulty.from_map({**found._asdict(), "later": [1]}) == found
    whole = Difficulty.from_map({**found._asdict(), "score": 3, "gear": "high"})
    assert whole is not None and (whole.score, whole.gear) == (3, "high")


@pytest.mark.parametrize(
    "change",
    [{"score": float("nan")}, {"score": float("inf")}, {"score": -1}, {"score": "4"},
     {"score": None}, {"score": True}, {"gear": "reverse"}, {"gear": None}, {"gear": ["high"]},
     {"math": -1}, {"math": 1.0}, {"code": 2**60}, {"words": None}, {"words": False},
     {"mean_length": "x"}],
    ids=str,
)  # fmt: skip
def test_a_malformed_map_is_none(change):
    assert Difficulty.from_map({**classify("a = b")._asdict(), **change}) is None


def test_what_is_no_map_is_none():
    assert [Difficulty.from_map(value) for value in (None, [], "high", 3, {}, b"")] == [None] * 6


def test_the_explanation_is_the_formula():
    long = classify("Prove that unquestionably a = b + unforgettable " + "seventy " * 62)
    assert long.explain() == (
        "score 7.42 = 2 x 2 math + 1.5 x 1 code + 0.3 x min(70/50, 3) + 1.5 -> high"
    )
    assert classify("").explain() == (
        "score 0 = 2 x 0 math + 1.5 x 0 code + 0.3 x min(0/50, 3) + 0 -> low"
    )
    assert [short(x) for x in (4.8, 4.0, 0.0, 10.0, 4.804)] == ["4.8", "4", "0", "10", "4.804"]
