"""What is begun on a thread: its result, its error, and work that no thread can be had for."""

from __future__ import annotations

import threading

import pytest

from toastkit import threads


@pytest.fixture(params=["a thread", "no thread"])
def calls(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the threads that did the work."""
    if request.param == "no thread":
        monkeypatch.setattr(threads, "start_optional", lambda work, name: None)
    return []


def test_the_result_is_waited_for_and_given_again(calls: list[str]) -> None:
    def work() -> int:
        calls.append(threading.current_thread().name)
        return 7

    result = threads.in_background(work, "test")
    assert [result(), result()] == [7, 7]
    assert len(calls) == 1 and calls[0] in ("test", "MainThread")


def test_an_error_is_raised_where_the_result_is_wanted(calls: list[str]) -> None:
    result = threads.in_background(lambda: 1 // 0, "test")
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            result()
