"""Tokens for a decode without a sampler downstream: greedy, or given."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from toastkit.errors import DataError, from_os_error
from toastkit.frames import (
    End,
    Error,
    Frame,
    FrameReader,
    Head,
    Token,
    Tokens,
    starts_frames,
    unpack_ids,
)
from toastkit.stages.feed import bare_ids
from toastkit.stages.run.protocol import Next


class GreedyFeed:
    """The most likely token of each step, until an end-of-turn token."""

    def begin(self, head: Head) -> None:
        """Start the next run."""
        self._eos = frozenset(head.eos)

    def choose(self, logits: memoryview[float]) -> Next | None:
        """The next token after `logits` (vocab,) float32."""
        import numpy as np

        token = int(np.argmax(np.nan_to_num(logits, nan=0.0, posinf=1e4, neginf=-1e4)))
        return Next(token, "eos" if token in self._eos else None)


class ForcedFeed:
    """The given tokens, one per step; the run ends after the last (scoring).

    ids: the tokens of every run, or None to take those that follow `prefilled` in the stream.
    """

    def __init__(self, ids: list[int] | None):
        self._given = ids
        self._waiting: deque[int] = deque()
        self._frames: Iterator[Frame] = iter(())
        self._next: Frame | None = None  # looked ahead at: the next run's

    def listen(self, frames: Iterable[Frame]) -> Iterator[Frame]:
        """Pass the stream on; tokens are taken out of it on demand."""
        self._frames = iter(frames)
        return self._rest()

    def _rest(self) -> Iterator[Frame]:
        while (frame := self._next or next(self._frames, None)) is not None:
            self._next = None
            yield frame

    def begin(self, head: Head) -> None:
        """Start the next run."""
        self._waiting = deque(self._given or ())

    def choose(self, logits: memoryview[float]) -> Next | None:
        """The next given token, None after the last. logits: float32 (vocab,), unused."""
        if not self._waiting and self._given is None and self._next is None:
            self._pull()
        return Next(self._waiting.popleft()) if self._waiting else None

    def _pull(self) -> None:
        for frame in self._frames:
            if isinstance(frame, Token):
                self._waiting.append(frame.id)
                return
            if isinstance(frame, Tokens):
                self._waiting.extend(unpack_ids(frame.ids))
                return
            if isinstance(frame, End):
                return
            if isinstance(frame, (Head, Error)):
                self._next = frame
                return


def forced_ids(name: str) -> list[int]:
    """Token ids from a file: decimal numbers, or the token frames among frames."""
    try:
        with open(name, "rb") as file:
            frames = FrameReader(file) if starts_frames(file.peek(1)) else bare_ids(file)
            return [frame.id for frame in frames if isinstance(frame, Token)]
    except DataError as error:
        raise DataError(f"{name}: {error.message}") from error
    except OSError as error:
        raise from_os_error(error, f"cannot read {name}") from error
