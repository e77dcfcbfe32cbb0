"""toast --chat: turn after turn, from a person at a terminal or from a pipe."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from toastkit.client.turn import Turns
from toastkit.errors import ToastError, reported_as
from toastkit.interrupts import Signals
from toastkit.private_files import make_private_directories, open_private
from toastkit.text.terminal import typed

PROMPT = "> "
HISTORY_LINES = 1000


class _Stopped(Exception):
    """Ctrl-Z was pressed. The text is the line so far."""


class Editor:
    """Line input from a terminal with editing, and a history across chats.

    history: its file, None for none.
    """

    def __init__(self, history: Path | None):
        # Editing requires that the line is shown: stdout may be a file.
        self._edits = sys.stdin.isatty() and sys.stdout.isatty()
        self._screen = sys.stdout if self._edits else sys.stderr
        self._history = history
        self._readline: Any = None
        if self._edits:
            self._start_readline()

    def read(self) -> str | None:
        """The next line, None after Ctrl-D. Raises KeyboardInterrupt for Ctrl-C."""
        if self._edits:
            return self._read_edited()
        self._screen.write(PROMPT)
        self._screen.flush()
        line = sys.stdin.readline()
        return line.rstrip("\n") if line else None

    def _read_edited(self) -> str | None:
        """As read. The line continues after Ctrl-Z and fg: a process stopped inside readline would
        leave the terminal in readline's mode, and find it in the shell's."""
        while True:
            try:
                with self._stops_between_lines():
                    return input(PROMPT)
            except EOFError:
                return None
            except _Stopped as stopped:
                os.kill(os.getpid(), signal.SIGTSTP)
                self._begin_with(str(stopped))

    @contextmanager
    def _stops_between_lines(self) -> Iterator[None]:
        """Make Ctrl-Z raise _Stopped, unless it is ignored or there is no readline."""

        def stop(number: int, frame: FrameType | None) -> None:
            raise _Stopped(self._readline.get_line_buffer())

        before = signal.getsignal(signal.SIGTSTP)
        caught = self._readline is not None and before is not signal.SIG_IGN
        if caught:
            signal.signal(signal.SIGTSTP, stop)
        try:
            yield
        finally:
            if caught:
                signal.signal(signal.SIGTSTP, before)

    def _begin_with(self, text: str) -> None:
        """Put text into the next line, once."""

        def begin() -> None:
            self._readline.set_startup_hook(None)
            self._readline.insert_text(text)

        self._readline.set_startup_hook(begin)

    def newline(self) -> None:
        """End the cursor's line."""
        self._screen.write("\n")
        self._screen.flush()

    def close(self) -> None:
        """Write the history. Raises CannotCreateError or IOFailure."""
        if self._readline is not None and self._history is not None:
            with reported_as(f"cannot keep the history in {self._history}", creating=True):
                _make_private(self._history)
                self._readline.write_history_file(str(self._history))

    def _start_readline(self) -> None:
        _types_utf8()
        try:
            import readline
        except ImportError:
            return  # a Python without it: no line editing
        self._readline = readline
        readline.set_history_length(HISTORY_LINES)
        if self._history is not None:
            with suppress(OSError):  # none yet; a failure to write it is reported at the end
                readline.read_history_file(str(self._history))


def _types_utf8() -> None:
    """Have readline treat input as UTF-8 under LC_ALL=C too, as Python does; else it would take the
    bytes of a letter for commands. It reads the environment at every line."""
    import locale

    if locale.setlocale(locale.LC_CTYPE) not in ("C", "POSIX"):
        return
    for name in ("C.UTF-8", "UTF-8"):  # Linux, macOS
        with suppress(locale.Error):
            locale.setlocale(locale.LC_CTYPE, name)
            os.environ["LC_ALL"] = name
            return


def _make_private(path: Path) -> None:
    """Create an empty file with mode 0600, unless it exists."""
    make_private_directories(path.parent)
    os.close(open_private(path, os.O_WRONLY | os.O_CREAT))


def chat_with_person(
    turns: Turns,
    first: str,
    interrupts: Signals,
    history: Path | None,
    report: Callable[[ToastError], None],
) -> int:
    """Ask each line typed until Ctrl-D, beginning with `first` unless that is empty. Return the
    exit code.

    Ctrl-C stops an answer, or clears the line. A failure is reported and the chat goes on.
    """
    editor = Editor(history)
    try:
        while interrupts.signal in (0, signal.SIGINT):
            interrupts.forget()
            interrupts.graceful = False
            try:
                line, first = first or editor.read(), ""
            except KeyboardInterrupt:
                editor.newline()
                continue
            finally:
                interrupts.graceful = True
            if line is None:
                editor.newline()
                return 0
            if line.strip():
                _ask(turns, line, editor, report)
        return interrupts.code
    finally:
        editor.close()


def _ask(turns: Turns, line: str, editor: Editor, report: Callable[[ToastError], None]) -> None:
    try:
        answer = turns.ask(typed(line, "the line"))
    except KeyboardInterrupt:
        editor.newline()
    except ToastError as error:
        report(error)
    else:
        if answer.reason is None and not answer.text:
            editor.newline()  # below the ^C


def chat_with_lines(turns: Turns, lines: Iterator[str], interrupts: Signals) -> int:
    """Ask each non-blank line. Return the exit code; the first failure ends the chat."""
    while not interrupts.signal:
        interrupts.graceful = False  # the writer of the lines may take long
        line = next(lines, None)
        interrupts.graceful = True
        if line is None:
            return 0
        if line.strip():
            turns.ask(line)
    return interrupts.code
