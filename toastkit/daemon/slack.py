"""When memory that nothing uses goes back to the system."""

from __future__ import annotations

import time

from toastkit.engine.device import give_memory_back

IDLE_SECONDS = 5.0  # without requests, until all of it does
BUSY_SECONDS = 60.0  # at most, until some of it does


class Slack:
    """The memory that requests have left behind. any: there may be some."""

    def __init__(self) -> None:
        self.any = False
        self._since = time.monotonic()

    def give_all(self) -> None:
        """Give it back: nobody is waiting."""
        self.any = False
        give_memory_back()

    def give_some(self) -> None:
        """Give back what takes no pause, every BUSY_SECONDS."""
        now = time.monotonic()
        if self.any and now >= self._since + BUSY_SECONDS:
            self._since = now
            give_memory_back(collect=False)
