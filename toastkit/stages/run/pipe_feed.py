"""The feed of a run between processes, for `sample`, `detokenize` and `feed`: its FIFO."""

from __future__ import annotations

import os
from pathlib import Path

from toastkit.errors import DataError, NoInputError
from toastkit.frames import Head
from toastkit.session.feed import FeedWriter
from toastkit.session.run import feed_of
from toastkit.stages.run.protocol import Next


class PipeFeed:
    """Sends tokens to the decodes that a head names: see `protocol.Feed`. For a run that is over
    nothing is sent, so that a saved stream can be sampled from again.

    send: False never sends. insist: every run must exist, and is waited for. opened: a run was to
    be opened.
    """

    def __init__(self, send: bool = True, insist: bool = False):
        self._sends = send
        self._insists = insist
        self._paths: list[Path] = []
        self._writer: FeedWriter | None = None
        self.opened = False

    def begin(self, head: Head) -> None:
        self.open(head.run)

    def open(self, run: str | list[str] | None) -> None:
        """Start the next run, or several. The FIFO is opened at the first message, or at once if
        insisting: DataError if no run is named, NoInputError if one does not exist."""
        self.finish()
        self.opened = True
        feeds = [feed_of(path) for path in ([run] if isinstance(run, str) else run or [])]
        if not self._insists:
            # Where we may not look, as at another user's saved run, there is none of ours.
            self._paths = list(filter(os.path.exists, feeds)) if self._sends else []
            return
        if not feeds:
            raise DataError("no run to feed: the stream has no head that names one")
        self._writer = FeedWriter(feeds)
        self._paths = feeds

    @property
    def awaited(self) -> bool:
        return bool(self._paths)

    def send(self, pos: int, following: Next) -> None:
        """pos: -1 if unknown. A decode that has ended meanwhile reports that in the stream, where
        it is noticed."""
        if self._writer is None and not all(map(os.path.exists, self._paths)):
            self.finish()  # a run has ended since
        if not self._paths:
            return
        # Prompts of several decodes differ in length: each takes the token as its own next one.
        known = pos if pos >= 0 and len(self._paths) == 1 else None
        try:
            if self._writer is None:
                self._writer = FeedWriter(self._paths)
            token, end, gear, expected = following
            self._writer.send(known, token, gear, end is not None, expected)
        except BrokenPipeError:
            pass  # the others, if there are any, got it
        except NoInputError:
            self.finish()

    def close(self, reason: str) -> None:
        self.send(-1, Next(None, reason))

    def finish(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        self._paths = []
