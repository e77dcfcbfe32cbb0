"""What a person sees on the way to an answer, and after it."""

from __future__ import annotations

import pytest

from toastkit.client.output import Progress, TextOutput, cached_line, usage_line


@pytest.mark.parametrize(
    ("pieces", "whole", "shown"),
    [
        (["a", "", "b"], True, "ab\n"),
        (["a\n"], True, "a\n"),
        (["a\n", "b"], False, "a\nb\n"),
        ([], True, "\n"),
        ([""], False, ""),
    ],
)
def test_each_answer_ends_its_line(capfdbinary, pieces, whole, shown) -> None:
    """So does one without text, that the next prompt's answer may stand where it is looked for; but
    for one that broke off before its first word."""
    output = TextOutput()
    for _ in range(2):
        for piece in pieces:
            output.put({"text": piece})
        output.end(whole)
    assert capfdbinary.readouterr().out.decode() == shown * 2


class FakeBar:
    """A bar that writes down what it is told."""

    def __init__(self, label: str, told: list):
        self.label = label
        self.told = told

    def __call__(self, done: int = 0, total: int = 0) -> None:
        self.told.append((self.label, done, total))

    def close(self) -> None:
        self.told.append(f"{self.label} closed")


@pytest.fixture
def told() -> list:
    return []


@pytest.fixture
def progress(told: list) -> Progress:
    return Progress(lambda label: FakeBar(label, told))


def read(done: int) -> dict:
    return {"progress": {"done": done, "total": 9, "cached": 3}}


@pytest.mark.parametrize("last", [{"text": "a"}, {"error": {"code": 70, "message": "no"}}, None])
def test_the_bar_goes_when_something_else_comes(progress, told: list, last: dict | None) -> None:
    for reply in (read(3), read(5), *([last] if last else [])):
        progress.put(reply)
    if last is not None:
        progress.put({"text": "b"})
    progress.end()
    assert told == [("prefill", 3, 9), ("prefill", 5, 9), "prefill closed"]


def test_each_request_has_a_bar_of_its_own(progress: Progress, told: list) -> None:
    for reply in (read(5), {"text": "a"}, read(2), {"text": "b"}):
        progress.put(reply)
    assert told == [("prefill", 5, 9), "prefill closed", ("prefill", 2, 9), "prefill closed"]


def test_loading_comes_before_reading(progress: Progress, told: list) -> None:
    for reply in ({"progress": {"loading": "crumb"}}, read(2), {"text": "a"}):
        progress.put(reply)
    told_first = [("loading crumb", 0, 0), "loading crumb closed"]
    assert told == [*told_first, ("prefill", 2, 9), "prefill closed"]


@pytest.mark.parametrize(
    ("stats", "line"),
    [
        (
            {"prompt": 12, "cached": 8, "answer": 11,
             "seconds": {"queued": 0, "prefill": 1, "first": 1.25, "total": 3.25}},
            "prompt 12 (cached 8), answer 11, first token 1.25 s, 5.0 tokens/s",
        ),
        (
            {"prompt": 12, "cached": 0, "answer": 1, "seconds": {"first": 0.5, "total": 0.5}},
            "prompt 12 (cached 0), answer 1, first token 0.50 s",
        ),
        (
            {"prompt": 12, "cached": 0, "answer": 0, "seconds": {"first": None, "total": 0.5}},
            "prompt 12 (cached 0), answer 0",
        ),
        ({}, "prompt 0 (cached 0), answer 0"),
    ],
)  # fmt: skip
def test_usage(stats: dict, line: str) -> None:
    assert usage_line(stats) == line


def test_cached() -> None:
    assert cached_line({"prompt": 9, "cached": 9, "why": ""}) == "9/9 prompt tokens cached"
    stats = {"prompt": 9, "cached": 3, "why": "the system message is another one"}
    assert cached_line(stats) == "3/9 prompt tokens cached: the system message is another one"
