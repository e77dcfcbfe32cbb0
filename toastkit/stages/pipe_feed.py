"""The feed of a run as `sample` and `detokenize` see it between processes: the run's FIFO."""

from __future__ import annotations

from pathlib import Path

from toastkit.errors import NoInputError
from toastkit.frames import Head
from toastkit.session.feed import FeedWriter


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
        feeds = [Path(run) / "feed" for run in runs]
        self._paths = [path for path in feeds if path.exists()] if self._sends else []

    def send(self, pos: int, token: int, end: str | None = None) -> None:
        """The token at `pos`; with `end`, the last. Raises BrokenPipeError where decode died."""
        self._send(pos, token, end is not None)

    def close(self, reason: str) -> None:
        """Ends the run at once."""
        try:
            self._send(0, None, True)
        except (BrokenPipeError, NoInputError):
            pass  # it has ended by itself meanwhile

    def _send(self, pos: int, token: int | None, end: bool) -> None:
        if not self._paths:
            return
        if self._writer is None:
            self._writer = FeedWriter(self._paths)
        self._writer.send(pos, token, end=end)

    def finish(self) -> None:
        """Lets the FIFO go."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        self._paths = []
