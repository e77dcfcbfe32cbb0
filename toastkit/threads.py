"""Background threads that a process can do without."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from threading import Thread


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
