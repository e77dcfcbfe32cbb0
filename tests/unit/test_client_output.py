"""What a person sees on the way to an answer, and after it."""

from __future__ import annotations

import threading

import pytest

from tests.unit.fake_daemon import SECONDS
from toastkit.client import output
from toastkit.client.output import Progress, cached_line, usage_line


class FakeBar:
    """A bar that writes down what it is told."""

    def __init__(self, told: list):
        self.told = told

    def __call__(self, done: int, total: int) -> None:
        self.told.append((done, total))

    def close(self) -> None:
        self.told.append("closed")


@pytest.fixture
def told() -> list:
    return []


@pytest.fixture
def progress(told: list, monkeypatch: pytest.MonkeyPatch) -> Progress:
    monkeypatch.setattr(output, "PATIENCE", 0.02)
    return Progress(lambda: FakeBar(told), told.append)


def read(done: int) -> dict:
    return {"progress": {"done": done, "total": 9, "cached": 3}}


def test_the_bar_is_full_when_text_comes(progress: Progress, told: list) -> None:
    for reply in (read(3), read(5), {"text": "a"}, {"text": "b"}):
        progress.put(reply)
    progress.end()
    assert told == [(3, 9), (5, 9), (9, 9)]


def test_the_bar_leaves_its_line_when_nothing_comes(progress: Progress, told: list) -> None:
    progress.put(read(5))
    progress.end()
    assert told == [(5, 9), "closed"]


def test_the_bar_is_not_full_when_an_error_comes(progress: Progress, told: list) -> None:
    progress.put(read(5))
    progress.put({"error": {"code": 70, "message": "no"}})
    progress.end()
    assert told == [(5, 9), "closed"]


def test_each_request_has_a_bar_of_its_own(progress: Progress, told: list) -> None:
    for reply in (read(5), {"text": "a"}, read(2), {"text": "b"}):
        progress.put(reply)
    assert told == [(5, 9), (9, 9), (2, 9), (9, 9)]


def test_loading_is_told_of_when_it_takes_long(told: list, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "PATIENCE", 0.02)
    said = threading.Event()
    progress = Progress(lambda: FakeBar(told), lambda line: (told.append(line), said.set()))
    progress.put({"progress": {"loading": "crumb"}})
    assert said.wait(SECONDS)
    progress.put(read(2))
    progress.end()
    assert told == ["loading crumb", (2, 9), "closed"]


def test_loading_is_not_told_of_when_it_is_quick(
    told: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "PATIENCE", SECONDS)
    progress = Progress(lambda: FakeBar(told), told.append)
    progress.put({"progress": {"loading": "crumb"}})
    before = threading.active_count()
    progress.end()
    assert told == [] and threading.active_count() == before - 1


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
