"""What a person sees while a prompt is read: a bar on a terminal, one line with -v."""

from __future__ import annotations

import atexit
import sys
import time
from typing import Any

from toastkit.commands.cli import say
from toastkit.stages.options import ReadOptions

PATIENCE = 1.0  # seconds of work before a bar appears


class ProgressBar:
    """A progress bar on stderr, shown only on a terminal and once the work takes over a second.

    label: what is being done. positions: show how far as numbers too.
    """

    def __init__(self, label: str = "prefill", positions: bool = True) -> None:
        self._label = label
        self._positions = positions
        self._start = time.monotonic()
        self._bar: Any = None
        self._shown = 0

    def __call__(self, done: int, total: int) -> None:
        """done, total: prompt tokens in the state, and in all; or what else is counted."""
        if self._bar is None:
            if done >= total or time.monotonic() - self._start < PATIENCE:
                return
            import click

            self._bar = click.progressbar(
                length=total, label=self._label, file=sys.stderr, show_pos=self._positions
            )
            self._shown = 0
            atexit.register(self.close)
        self._bar.update(done - self._shown)
        self._shown = done
        if done >= total:
            self._bar.render_finish()
            self._bar = None

    def close(self) -> None:
        """An interrupted bar leaves its line, so that the shell's prompt begins on the next."""
        if self._bar is not None:
            print(file=sys.stderr)
            self._bar = None


def read_options(flags: dict[str, Any]) -> ReadOptions:
    """ReadOptions from flags, with a bar where stderr is a terminal."""
    named = flags["session"] is not None or flags["fork"] is not None
    terminal = sys.stderr.isatty()

    def report(cached: int, total: int) -> None:
        say(f"{cached}/{total} prompt tokens taken from the session")

    tell = flags["verbose"] or (named and terminal and not flags["quiet"])
    return ReadOptions(
        chunk=flags["chunk"],
        require_hit=flags["require_hit"],
        fork=flags["fork"],
        progress=ProgressBar() if terminal and not flags["quiet"] else None,
        report=report if tell else None,
    )
