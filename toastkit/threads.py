"""Work in the background: threads that a process can do without, and processes that outlive it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import IO, TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from threading import Thread

T = TypeVar("T")


def start_optional(work: Callable[[], object], name: str) -> Thread | None:
    """Start a daemon thread that runs `work` and return it; None if this user's or this process's
    limit of threads is reached (ulimit -u, ulimit -v)."""
    from threading import Thread

    thread = Thread(target=work, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError:
        return None
    return thread


def never_interrupt() -> None:
    """Have this process wait, when it is woken, until the one that runs gives way, for work that
    nobody waits for. Only Linux knows such a policy."""
    if hasattr(os, "SCHED_BATCH"):
        with suppress(OSError):  # a sandbox may forbid it
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def start_process(
    module: str,
    *arguments: str,
    stdin: IO[bytes] | None = None,
    env: Mapping[str, str] | None = None,
) -> bool:
    """Start a module of toastkit's as a silent process that nobody waits for. stdin: a file for it
    to read. env: variables besides this process's. False if no process can be started."""
    import subprocess

    try:
        subprocess.Popen(
            [sys.executable, "-m", module, *arguments], stdin=stdin or subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
            cwd=os.path.dirname(os.path.dirname(__file__)), env={**os.environ, **(env or {})},
        )  # fmt: skip
    except OSError:
        return False
    return True


def in_background(work: Callable[[], T], name: str) -> Callable[[], T]:
    """Start `work` on a background thread, if there can be one. Return a function that waits for
    its result, and raises what it raised; it may be called repeatedly."""
    done: list[tuple[T | None, BaseException | None]] = []

    def run() -> None:
        try:
            done.append((work(), None))
        except BaseException as error:
            done.append((None, error))

    thread = start_optional(run, name)

    def result() -> T:
        if thread is not None:
            thread.join()
        elif not done:
            run()
        value, error = done[0]
        if error is not None:
            raise error
        return value  # type: ignore[return-value]

    return result
