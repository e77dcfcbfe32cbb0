"""What of the replies is shown: answers on stdout, in one of two forms, progress on stderr."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any, Protocol

from toastkit.text.terminal import harmless

Reply = dict[str, Any]


class Output:
    """Where the replies to one request go. This one shows nothing: for an answer of which only a
    part is wanted in the end."""

    def put(self, reply: Reply) -> None:
        """Takes each reply as it comes."""

    def end(self, whole: bool = True) -> None:
        """Called once an answer; whole: it did not break off."""


def write_text(text: str) -> None:
    """Text of a model to stdout, at once: as it is, but to a terminal without what would command
    it."""
    text = harmless(text) if os.isatty(1) else text
    sys.stdout.buffer.write(text.encode("utf-8", "replace"))
    sys.stdout.buffer.flush()


class TextOutput(Output):
    """The text, as it comes, and a newline where it has none at its end. An answer of no text is an
    empty line, so that who asks line by line can tell which answer is which's; one that broke off
    before its first word is nothing."""

    def __init__(self) -> None:
        self._last = ""

    def put(self, reply: Reply) -> None:
        self.write(reply.get("text", ""))

    def end(self, whole: bool = True) -> None:
        if not self._last.endswith("\n") and (whole or self._last):
            self.write("\n")
        self._last = ""

    def write(self, text: str) -> None:
        """Writes a part of the text."""
        if text:
            self._last = text
            write_text(text)


class JsonOutput(Output):
    """The replies themselves, one a line."""

    def put(self, reply: Reply) -> None:
        write_text(json.dumps(reply, ensure_ascii=False) + "\n")


class Lines:
    """Lines for people, which wait while the line of an answer is not at its end: on a terminal
    they would stand in the middle of it. say: writes one."""

    def __init__(self, say: Callable[[str], None]):
        self._say = say
        self._waiting: list[str] | None = None

    def __call__(self, line: str) -> None:
        if self._waiting is None:
            self._say(line)
        else:
            self._waiting.append(line)

    def hold(self) -> None:
        """Has those to come wait. May be called again."""
        if self._waiting is None:
            self._waiting = []

    def release(self) -> None:
        """Writes those that wait. May be called again."""
        waiting, self._waiting = self._waiting or [], None
        for line in waiting:
            self._say(line)


class Bar(Protocol):
    """A progress bar, shown once it is there for long: called with what is done and the total, or
    without them where there are none; closed, it vanishes."""

    def __call__(self, done: int = 0, total: int = 0) -> None: ...

    def close(self) -> None: ...


class Progress:
    """What a person sees before the first word: that a model loads, how far the prompt is read.

    make_bar(label): a new progress bar.
    """

    def __init__(self, make_bar: Callable[[str], Bar]):
        self._make_bar = make_bar
        self._bar: Bar | None = None
        self._loading = False

    def put(self, reply: Reply) -> None:
        """Takes every reply: the first that is no progress ends the bar."""
        progress = reply.get("progress")
        if not isinstance(progress, dict):
            self.end()
        elif "loading" in progress:
            self.end()
            self._bar = self._make_bar(f"loading {progress['loading']}")
            self._bar()
            self._loading = True
        elif "total" in progress:
            if self._loading:
                self.end()
            if self._bar is None:
                self._bar = self._make_bar("prefill")
            self._bar(progress["done"], progress["total"])

    def end(self) -> None:
        """There is no more progress: a bar that is still there vanishes."""
        self._loading = False
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def cached_line(stats: dict[str, Any]) -> str:
    """How much of the prompt was not read again, and why not more."""
    line = f"{stats.get('cached', 0)}/{stats.get('prompt', 0)} prompt tokens cached"
    return f"{line}: {stats['why']}" if stats.get("why") else line


def notes_of(stats: dict[str, Any]) -> list[str]:
    """What of the request made no difference, a line each."""
    notes = stats.get("notes")
    return [n for n in notes if isinstance(n, str)] if isinstance(notes, list) else []


def usage_line(stats: dict[str, Any]) -> str:
    """Tokens and times of an answer. Tokens a second are those after the first one."""
    seconds = stats.get("seconds") or {}
    first, total = seconds.get("first"), seconds.get("total")
    answer = stats.get("answer", 0)
    line = f"prompt {stats.get('prompt', 0)} (cached {stats.get('cached', 0)}), answer {answer}"
    if first is not None:
        line += f", first token {first:.2f} s"
        if total is not None and total > first and answer > 1:
            line += f", {(answer - 1) / (total - first):.1f} tokens/s"
    return line
