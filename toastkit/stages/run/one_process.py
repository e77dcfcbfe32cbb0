"""Runs in one process: the state is an object, the feed a deque, the logits stay on the device."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from toastkit.engine.step_engine import State, StepEngine, Wish
from toastkit.frames import Frame, Head, Logits
from toastkit.interrupts import Interrupt
from toastkit.stages.run.protocol import DecodeRun, Next, SessionRuns, experts_of

if TYPE_CHECKING:
    from toastkit.session.directory import Session


class LocalFeed:
    """The feed of a run for `sample` and `detokenize`: here a deque."""

    awaited = False  # by no other process

    def __init__(self) -> None:
        self.waiting: deque[Next] = deque()
        self.closed: str | None = None

    def begin(self, head: Head) -> None:
        """Start the next run."""
        self.waiting.clear()
        self.closed = None

    def send(self, pos: int, following: Next) -> None:
        """The token may be a device array () here."""
        self.waiting.append(following)

    def close(self, reason: str) -> None:
        """End the run before any pending token."""
        self.closed = self.closed or reason

    def finish(self) -> None:
        """Nothing to release here."""


class LocalRuns(SessionRuns):
    """Both ends at once: see `protocol.PrefillRuns` and `protocol.DecodeRuns`.

    session_name: the session to keep the state in, None to keep it in memory only. reader_gone:
    returns True once the output's reader has closed it. deferred: tokens are sampled on the device
    and come back unread; else as numbers.
    """

    def __init__(
        self,
        session_name: str | None,
        interrupt: Interrupt,
        reader_gone: Callable[[], bool] = lambda: False,
        deferred: bool = True,
    ):
        self.deferred, self.answers = deferred, False
        self.feed = LocalFeed()
        self.abandoned = reader_gone
        self._name = session_name
        self._interrupt = interrupt
        self._session: Session | None = None
        self._state: State | None = None

    def begin(self, head: Head) -> Head:
        if self._name is None:
            return head
        from toastkit.session.directory import Session
        from toastkit.session.names import resolve

        path = resolve(self._name)
        self._session = Session.open(path, head.fingerprint)
        return dataclasses.replace(head, session=str(path))

    def announce(self, state: State) -> None:
        self._state = state

    def hand_over(self, state: State) -> None:
        """Nothing: decode took the state when it was announced."""

    def attach(self, head: Head) -> DecodeRun:
        self.head = head
        return self

    def take(self, engine: StepEngine, ids: list[int]) -> State:
        assert self._state is not None  # announced by prefill
        self._engine = engine
        return self._state

    def emit(self, state: State, started: float | None) -> Iterator[Frame]:
        if not self.deferred:
            state.submit()
            self._engine.look_ahead(state)  # while the rest of this step is computed
        yield Logits(len(state.tokens), state.logits, experts=experts_of(state))

    def consume(self, state: State, token: Any, wish: Wish) -> None:
        self._engine.consume(state, token, wish)

    def next(self) -> Next:
        if self.feed.closed is not None:
            return Next(None, self.feed.closed)
        if self._interrupt:
            return Next(None, "interrupt")
        return self.feed.waiting.popleft()

    def keeps(self, state: State) -> bool:
        return state.session is not None

    def finish(self, state: State) -> None:
        try:
            state.commit()
        finally:
            state.close()
            self.close()

    def close(self) -> None:
        if self._session is not None:
            self._session.close()
        self._state = self._session = None
