"""Stop strings against str.find on the whole text."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from toastkit.errors import UsageError
from toastkit.text.stops import StopStrings

letters = st.text("ab", max_size=40)
stop_lists = st.lists(st.text("ab", min_size=1, max_size=6), max_size=4)


def naive(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The text before the earliest stop string and that string, the longest of equal starts."""
    found = [(text.find(stop), -len(stop), stop) for stop in stops if stop in text]
    if not found:
        return text, None
    start, _, stop = min(found)
    return text[:start], stop


def split(text: str, cuts: list[int]) -> list[str]:
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    return [text[a:b] for a, b in zip(edges, edges[1:])]


@given(letters, stop_lists, st.lists(st.integers(0, 40), max_size=12))
@example("abcd", ["bc", "abcx"], [3])
@example("aab", ["ab", "aab"], [1, 2])
def test_equals_find_on_the_whole_text(text: str, stops: list[str], cuts: list[int]) -> None:
    expected, stop = naive(text, stops)
    stream = StopStrings(stops)
    shown = ""
    for piece in split(text, cuts):
        safe, stopped = stream.add(piece)
        shown += safe
        assert expected.startswith(shown), "something of a stop string was shown"
        if stopped:
            break
    shown += stream.finish()
    assert (shown, stream.stopped) == (expected, stop)


@given(letters, stop_lists)
def test_holds_back_only_what_may_become_a_stop(text: str, stops: list[str]) -> None:
    stream = StopStrings(stops)
    shown = "".join(stream.add(character)[0] for character in text)
    if stream.stopped is None:
        assert len(text) - len(shown) <= max(map(len, stops), default=0)
        if not any(text.endswith(stop[:n]) for stop in stops for n in range(1, len(stop) + 1)):
            assert shown == text or naive(text, stops)[1]


def test_a_prefix_is_released_when_it_fails() -> None:
    stream = StopStrings(["\n\nUser:"])
    assert stream.add("Hello\n") == ("Hello", False)
    assert stream.add("\nUse") == ("", False)
    assert stream.add("ful") == ("\n\nUseful", False)
    assert stream.add("\n\nUser: more") == ("", True)
    assert stream.stopped == "\n\nUser:"
    assert stream.add("more") == ("", True)
    assert stream.finish() == ""


def test_waits_for_a_longer_stop_at_the_same_start() -> None:
    stream = StopStrings(["ab", "abc"])
    assert stream.add("xab") == ("x", False)
    assert stream.add("c") == ("", True)
    assert stream.stopped == "abc"
    stream = StopStrings(["ab", "abc"])
    stream.add("xab")
    assert stream.finish() == ""
    assert stream.stopped == "ab"


def test_no_stops_hold_nothing() -> None:
    stream = StopStrings([])
    assert stream.add("text") == ("text", False)
    assert stream.finish() == ""


def test_empty_stop_is_refused() -> None:
    with pytest.raises(UsageError, match="a stop string is empty"):
        StopStrings(["x", ""])


def test_many_stops_and_a_long_text_are_linear() -> None:
    stops = ["a" * n + "b" for n in range(1, 300)]
    stream = StopStrings(stops)
    shown = "".join(stream.add("a" * 1000)[0] for _ in range(50))
    assert len(shown) == 50_000 - 299
    assert stream.add("b") == ("", True)
    assert stream.stopped == "a" * 299 + "b"
