"""Progress of long operations: a line on a terminal, removed when done."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from typing import TYPE_CHECKING, Any

from toastkit.commands.cli import say
from toastkit.text.terminal import shown

if TYPE_CHECKING:
    from toastkit.stages.run.settings import ReadOptions

PATIENCE = 1.0  # seconds before anything is shown
LABEL_CHARACTERS = 24
ROOM = 3  # columns for ^C, and the cursor after it


class ProgressBar:
    """A line on stderr that appears once the work takes over a second, and vanishes with it.

    label: what is being done. unit: what is counted, "B" for bytes.
    """

    def __init__(self, label: str, unit: str = " tokens") -> None:
        label = shown(label)
        short = label[: LABEL_CHARACTERS - 3] + "..."
        self._label = label if len(label) <= LABEL_CHARACTERS else short
        self._unit = unit
        self._done = self._total = 0
        self._note = ""
        self._bar: Any = None
        self._timer: threading.Timer | None = None
        self._lock = threading.Lock()

    def __call__(self, done: int = 0, total: int = 0, note: str = "") -> None:
        """Show progress. done, total: prompt tokens in the state, and in all, or whatever is
        counted; a total of 0 is unknown. note: shown beside them. When all is done the line
        vanishes; the next call begins another."""
        with self._lock:
            self._done, self._total, self._note = done, total, note
            if self._bar is not None:
                self._draw()
        if total and done >= total:
            self.close()
        elif self._timer is None:
            self._timer = threading.Timer(PATIENCE, self._show)
            self._timer.daemon = True
            self._timer.start()
            # However the work ends, the shell's prompt begins on a clean line.
            atexit.register(self.close)

    def close(self) -> None:
        """Remove the line."""
        atexit.unregister(self.close)
        if self._timer is not None:
            self._timer.cancel()
        with self._lock:
            self._timer = None
            if self._bar is not None:
                self._bar.close()
                self._bar = None
                with suppress(OSError):  # ^C, too, which the terminal has added
                    blank = " " * (_columns() + ROOM - 1)
                    print(f"\r{blank}", end="\r", file=sys.stderr, flush=True)

    def _show(self) -> None:
        """Draw, on the timer's thread: the work may be one long call."""
        from tqdm.std import tqdm

        with self._lock:
            if self._timer is None:
                return
            tqdm.monitor_interval = 0  # no redraw thread
            tqdm.set_lock(threading.RLock())  # and no lock between processes
            self._bar = tqdm(
                desc=self._label,
                total=self._total or None,
                initial=self._done,
                unit=self._unit,
                unit_scale=self._unit == "B",
                bar_format=None if self._total else "{desc}",
                postfix=self._note or None,
                file=sys.stderr,
                ncols=_columns(),
                leave=False,
            )

    def _draw(self) -> None:
        self._bar.total, self._bar.bar_format = self._total, None
        self._bar.ncols = _columns()
        self._bar.set_postfix_str(self._note, refresh=False)
        self._bar.update(self._done - self._bar.n)


def _columns() -> int:
    """Maximum width of the line: the terminal's current width, less the ^C of an impatient
    person."""
    return max(1, (os.get_terminal_size(sys.stderr.fileno()).columns or 80) - ROOM)


def last_part(name: str) -> str:
    """A model's or a file's name for a label: the end of its path."""
    return name.rstrip("/").rpartition("/")[2]


def watched(flags: dict[str, Any]) -> bool:
    """True if a person sees stderr, and has not asked for quiet."""
    return sys.stderr.isatty() and not flags["quiet"]


def tell_silence(path: str) -> None:
    """Say whom is waited for: the daemon at a path has not answered for some seconds."""
    from toastkit.daemon.pidfile import process_at

    number = process_at(path)
    process = "" if number is None else f" (process {number})"
    say(f"waiting for the daemon at {path}{process}: Ctrl-C ends that")


@contextmanager
def waiting(label: str, flags: dict[str, Any]) -> Iterator[None]:
    """Show what is being done, if a person watches and it takes long."""
    if not watched(flags):
        yield
        return
    with closing(ProgressBar(label)) as bar:
        bar()
        yield


def read_options(flags: dict[str, Any]) -> ReadOptions:
    """ReadOptions from flags, with a bar if stderr is a terminal."""
    from toastkit.stages.run.settings import ReadOptions

    named = flags["session"] is not None or flags["fork"] is not None

    def report(cached: int, total: int) -> None:
        say(f"{cached}/{total} prompt tokens taken from the session")

    return ReadOptions(
        chunk=flags["chunk"],
        require_hit=flags["require_hit"],
        fork=flags["fork"],
        progress=ProgressBar("prefill") if watched(flags) else None,
        report=report if flags["verbose"] or (named and watched(flags)) else None,
    )
