"""What of the replies is shown: answers on stdout, in one of two forms, progress on stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any, Protocol

Reply = dict[str, Any]
PATIENCE = 1.0  # seconds of loading before a person is told


class Output(Protocol):
    """Where the replies to one request go: put(reply) takes each of them as it comes, end() is
    called once, also where the answer broke off."""

    def put(self, reply: Reply) -> None: ...

    def end(self) -> None: ...


class TextOutput:
    """The text, as it comes, and a newline where it has none at its end."""

    def __init__(self) -> None:
        self._last = "\n"

    def put(self, reply: Reply) -> None:
        text = reply.get("text")
        if text:
            self._write(text)

    def end(self) -> None:
        if not self._last.endswith("\n"):
            self._write("\n")

    def _write(self, text: str) -> None:
        self._last = text
        sys.stdout.buffer.write(text.encode("utf-8", "replace"))
        sys.stdout.buffer.flush()


class JsonOutput:
    """The replies themselves, one a line."""

    def put(self, reply: Reply) -> None:
        line = json.dumps(reply, ensure_ascii=False) + "\n"
        sys.stdout.buffer.write(line.encode("utf-8", "replace"))
        sys.stdout.buffer.flush()

    def end(self) -> None:
        pass


class NoOutput:
    """Nothing, for an answer of which only a part is wanted in the end."""

    def put(self, reply: Reply) -> None:
        pass

    def end(self) -> None:
        pass


class Bar(Protocol):
    """A progress bar: called with what is done and the total; closed, it leaves its line."""

    def __call__(self, done: int, total: int) -> None: ...

    def close(self) -> None: ...


class Progress:
    """What a person sees before the first word: that a model loads, how far the prompt is read.

    make_bar: a new progress bar. say: takes a line for stderr.
    """

    def __init__(self, make_bar: Callable[[], Bar], say: Callable[[str], None]):
        self._make_bar = make_bar
        self._say = say
        self._bar: Bar | None = None
        self._total = 0
        self._timer: Any = None

    def put(self, reply: Reply) -> None:
        """Takes every reply: the first that is no progress ends the bar."""
        progress = reply.get("progress")
        self._stop_timer()
        if not isinstance(progress, dict):
            if self._bar is not None and "error" not in reply:
                self._bar(self._total, self._total)
                self._bar = None
        elif "loading" in progress:
            self._start_timer(f"loading {progress['loading']}")
        elif "total" in progress:
            if self._bar is None:
                self._bar = self._make_bar()
            self._total = progress["total"]
            self._bar(progress["done"], self._total)

    def end(self) -> None:
        """No more replies will come: a bar that is still there leaves its line."""
        self._stop_timer()
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _start_timer(self, line: str) -> None:
        import threading

        self._timer = threading.Timer(PATIENCE, self._say, [line])
        self._timer.daemon = True
        self._timer.start()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer.join()  # a line that is being written is written whole
            self._timer = None


def cached_line(stats: dict[str, Any]) -> str:
    """How much of the prompt was not read again, and why not more."""
    line = f"{stats.get('cached', 0)}/{stats.get('prompt', 0)} prompt tokens cached"
    return f"{line}: {stats['why']}" if stats.get("why") else line


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
