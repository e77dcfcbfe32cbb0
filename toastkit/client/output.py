"""Show replies: answers on stdout, in one of two forms, progress on stderr."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any, Protocol

from toastkit.text.terminal import harmless

Reply = dict[str, Any]


class Output:
    """The sink for the replies to one request. This one shows nothing, for an answer of which only
    a part is printed at the end."""

    def put(self, reply: Reply) -> None:
        """Take each reply as it comes."""

    def end(self, whole: bool = True) -> None:
        """Called once per answer; whole: it is complete."""


def write_text(text: str) -> None:
    """Write a model's text to stdout and flush; on a terminal without control sequences."""
    text = harmless(text) if os.isatty(1) else text
    sys.stdout.buffer.write(text.encode("utf-8", "replace"))
    sys.stdout.buffer.flush()


class TextOutput(Output):
    """The text as it comes, with a final newline if it lacks one. An empty answer is an empty line,
    so that readers of lines can tell answers apart; one that broke off before its first word is
    nothing."""

    def __init__(self) -> None:
        self._last = ""

    def put(self, reply: Reply) -> None:
        self.write(reply.get("text", ""))

    def end(self, whole: bool = True) -> None:
        if not self._last.endswith("\n") and (whole or self._last):
            self.write("\n")
        self._last = ""

    def write(self, text: str) -> None:
        """Write a part of the text."""
        if text:
            self._last = text
            write_text(text)


class JsonOutput(Output):
    """The replies themselves, one per line."""

    def put(self, reply: Reply) -> None:
        write_text(json.dumps(reply, ensure_ascii=False) + "\n")


class Lines:
    """Messages for people, held back while an answer's line is incomplete: on a terminal they would
    appear in the middle of it. say: writes one."""

    def __init__(self, say: Callable[[str], None]):
        self._say = say
        self._waiting: list[str] | None = None

    def __call__(self, line: str) -> None:
        if self._waiting is None:
            self._say(line)
        else:
            self._waiting.append(line)

    def hold(self) -> None:
        """Hold back messages from now on. Idempotent."""
        if self._waiting is None:
            self._waiting = []

    def release(self) -> None:
        """Write those held back. Idempotent."""
        waiting, self._waiting = self._waiting or [], None
        for line in waiting:
            self._say(line)


class Bar(Protocol):
    """A progress bar, shown after a delay: called with what is done and the total, or without them
    if unknown; closing removes it."""

    def __call__(self, done: int = 0, total: int = 0) -> None: ...

    def close(self) -> None: ...


class Progress:
    """What a person sees before the first word: loading of the model, progress of the prefill.

    make_bar(label): a new progress bar.
    """

    def __init__(self, make_bar: Callable[[str], Bar]):
        self._make_bar = make_bar
        self._bar: Bar | None = None
        self._loading = False

    def put(self, reply: Reply) -> None:
        """Take every reply: the first that is no progress ends the bar."""
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
        """Remove the bar, if any."""
        self._loading = False
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def cached_line(stats: dict[str, Any]) -> str:
    """How much of the prompt was reused, and why not more."""
    line = f"{stats.get('cached', 0)}/{stats.get('prompt', 0)} prompt tokens cached"
    return f"{line}: {stats['why']}" if stats.get("why") else line


def notes_of(stats: dict[str, Any]) -> list[str]:
    """Parts of the request without effect, one line each."""
    notes = stats.get("notes")
    return [n for n in notes if isinstance(n, str)] if isinstance(notes, list) else []


def usage_line(stats: dict[str, Any]) -> str:
    """Tokens and times of an answer. The token rate excludes the first token."""
    seconds = stats.get("seconds") or {}
    first, total = seconds.get("first"), seconds.get("total")
    answer = stats.get("answer", 0)
    line = f"prompt {stats.get('prompt', 0)} (cached {stats.get('cached', 0)}), answer {answer}"
    if first is not None:
        line += f", first token {first:.2f} s"
        if total is not None and total > first and answer > 1:
            line += f", {(answer - 1) / (total - first):.1f} tokens/s"
    return line
