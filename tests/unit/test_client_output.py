"""Progress bars before an answer, its end, and the lines after it."""

from __future__ import annotations

import pytest

from toastkit.client.output import Progress, TextOutput, cached_line, usage_line


@pytest.mark.parametrize(
    ("pieces", "whole", "shown"),
    [(["é", "", "b"], True, "éb\n"), (["a\n"], True, "a\n"), (["a\n", "b"], False, "a\nb\n"),
     ([], True, "\n"), ([""], False, "")],
)  # fmt: skip
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


def read(done: int) -> dict:
    return {"progress": {"done": done, "total": 9, "cached": 3}}


TEXT, LOADING = {"text": "a"}, {"progress": {"loading": "crumb"}}
CLOSED = "prefill closed"


@pytest.mark.parametrize(
    ("replies", "told"),
    [([read(3), read(5), TEXT, TEXT], [("prefill", 3, 9), ("prefill", 5, 9), CLOSED]),
     ([read(3), {"error": {"code": 70, "message": "no"}}], [("prefill", 3, 9), CLOSED]),
     ([read(3)], [("prefill", 3, 9), CLOSED]),
     ([read(5), TEXT, read(2), TEXT], [("prefill", 5, 9), CLOSED, ("prefill", 2, 9), CLOSED]),
     ([LOADING, LOADING, read(2), read(3), TEXT],
      [("loading crumb", 0, 0), "loading crumb closed"] * 2
      + [("prefill", 2, 9), ("prefill", 3, 9), CLOSED])],
)  # fmt: skip
def test_each_wait_has_a_bar_until_something_else_comes(replies: list, told: list) -> None:
    shown: list = []
    progress = Progress(lambda label: FakeBar(label, shown))
    for reply in replies:
        progress.put(reply)
    progress.end()
    assert shown == told


@pytest.mark.parametrize(
    ("stats", "line"),
    [({"prompt": 12, "cached": 8, "answer": 11,
       "seconds": {"queued": 0, "prefill": 1, "first": 1.25, "total": 3.25}},
      "prompt 12 (cached 8), answer 11, first token 1.25 s, 5.0 tokens/s"),
     *[({"prompt": 12, "cached": 0, "answer": answer, "seconds": {"first": 0.5, "total": total}},
        f"prompt 12 (cached 0), answer {answer}, first token 0.50 s")
       for answer, total in [(1, 0.75), (2, 0.5), (2, None)]],
     ({"prompt": 12, "cached": 0, "answer": 0, "seconds": {"first": None, "total": 0.5}},
      "prompt 12 (cached 0), answer 0"),
     ({}, "prompt 0 (cached 0), answer 0")],
)  # fmt: skip
def test_usage(stats: dict, line: str) -> None:
    assert usage_line(stats) == line


def test_cached() -> None:
    assert cached_line({"prompt": 9, "cached": 9, "why": ""}) == "9/9 prompt tokens cached"
    stats = {"prompt": 9, "cached": 3, "why": "the system message is another one"}
    assert cached_line(stats) == "3/9 prompt tokens cached: the system message is another one"
