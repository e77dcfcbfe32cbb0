"""The feed of a run as `sample` and `detokenize` see it between processes: the run's FIFO."""

from __future__ import annotations

from pathlib import Path

from toastkit.errors import NoInputError
from toastkit.frames import Head
from toastkit.session.feed import FeedWriter
from toastkit.session.run import feed_of
from toastkit.stages.run.protocol import Next


class PipeFeed:
    """Sends tokens to the decodes that a head names; to nobody for a run that is over, so that a
    saved stream can be drawn from again.

    send: False never sends. The FIFO is opened at the first message.
    """

    def __init__(self, send: bool = True):
        self._sends = send
        self._paths: list[Path] = []
        self._writer: FeedWriter | None = None

    def begin(self, head: Head) -> None:
        """Takes the next run."""
        self.finish()
        runs = [head.run] if isinstance(head.run, str) else head.run or []
        feeds = map(feed_of, runs)
        self._paths = [path for path in feeds if path.exists()] if self._sends else []

    @property
    def awaited(self) -> bool:
        """Whether a decode waits for the tokens of the run."""
        return bool(self._paths)

    def send(self, pos: int, following: Next) -> None:
        """As of Feed. A decode that has ended meanwhile says so in the stream: that is where it is
        noticed."""
        if not self._paths:
            return
        # Prompts of several decodes differ in length: each takes the token for its own next one.
        known = pos if following.token is not None and len(self._paths) == 1 else None
        try:
            if self._writer is None:
                self._writer = FeedWriter(self._paths)
            token, end, gear, expected = following
            self._writer.send(known, token, gear, end is not None, expected)
        except (BrokenPipeError, NoInputError):
            self.finish()

    def close(self, reason: str) -> None:
        """Ends the run at once."""
        self.send(0, Next(None, reason))

    def finish(self) -> None:
        """Lets the FIFO go."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        self._paths = []
