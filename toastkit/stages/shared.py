"""Runs between processes: the state goes through a session directory, tokens come back through a
FIFO, logits go through a ring. `PrefillEnd` is prefill's side, `DecodeEnd` is decode's."""

from __future__ import annotations

import dataclasses
import os
import select
import stat
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from toastkit.errors import DataError, NoInputError, UnavailableError
from toastkit.frames import Array, Frame, Head, Logits, Token
from toastkit.gears.monitor import EntropyMeter
from toastkit.session.directory import Session
from toastkit.session.feed import FeedMessage, FeedReader
from toastkit.session.handover import HandoverClient, HandoverServer
from toastkit.session.names import resolve
from toastkit.session.ring import RingWriter
from toastkit.session.run import RunDirectory
from toastkit.stages.arrays import from_numpy, log_softmax
from toastkit.stages.follow import Follower
from toastkit.stages.options import Interrupt
from toastkit.stages.poll import GONE, reader_gone, unread_bytes
from toastkit.stages.runs import Next, SessionRuns, check_vocab

if TYPE_CHECKING:
    from toastkit.engine.engine import Engine
    from toastkit.engine.state import ModelState

HANDOVER_SECONDS = 2.0  # how long prefill waits for a decode that has not shown up yet
RUNS_AHEAD = 2  # ephemeral sessions that prefill may fill before decode is done with the first


class PrefillEnd(SessionRuns):
    """prefill's side of runs: see `runs.PrefillRuns`.

    session_name: where to keep the state; the head's session where it is None, and one that
    vanishes with the run where that is None too.
    """

    def __init__(self, session_name: str | None):
        self._name = session_name
        self._session: Session | None = None
        self._run: RunDirectory | None = None
        self._server: HandoverServer | None = None
        self._handed: deque[tuple[Path, HandoverServer]] = deque()

    def begin(self, head: Head) -> Head:
        name = self._name or head.session
        path = None if name is None else resolve(name)
        self._settle(path)
        if path is None:
            self._session = Session.create_ephemeral(head.fingerprint)
        else:
            self._session = Session.open(path, head.fingerprint)
        assert self._session.lock is not None
        self._run = RunDirectory.create(self._session.path)
        self._server = HandoverServer(self._run.path, self._session.lock)
        return dataclasses.replace(head, session=str(self._session.path), run=str(self._run.path))

    def _settle(self, path: Path | None) -> None:
        """Waits until decode is done with an earlier run of this session, or with the first of
        several that vanish."""
        while self._handed:
            earlier, server = self._handed[0]
            if path is None and len(self._handed) < RUNS_AHEAD:
                return
            while not server.wait_done(0.2):
                if reader_gone():
                    raise BrokenPipeError
            server.close()
            self._handed.popleft()

    def abandoned(self) -> bool:
        return reader_gone()

    def announce(self, state: ModelState) -> Array:
        logits = from_numpy(np.array(state.values(), dtype=np.float32))
        state.session = None  # it stays open: it is to be handed over
        state.close()
        return logits

    def hand_over(self, state: ModelState) -> None:
        assert self._session is not None and self._server is not None and self._run is not None
        if _is_pipe(1) and self._offer(self._server):
            self._handed.append((self._session.path, self._server))
            self._run.close()
            self._session.close()
            self._session = self._run = self._server = None
        else:
            self.close()

    def _offer(self, server: HandoverServer) -> bool:
        """Gives the state to decode, which may be at work on an earlier run for as long as that
        lasts, or not have read of this one yet. A reader that has read it all and does not come
        for the state is no decode."""
        while not server.offer(HANDOVER_SECONDS, 1, until_asked=True):
            busy = any(not earlier.wait_done(0) for _, earlier in self._handed)
            if reader_gone() or not (busy or unread_bytes()):
                return False
        return True

    def close(self) -> None:
        """Lets go of a run that was not handed over."""
        if self._server is not None:
            self._server.close()
        if self._run is not None:
            self._run.remove()
        if self._session is not None:
            self._session.close()
        self._session = self._run = self._server = None


class OwnFeed(Protocol):
    """Where tokens come from when no sampler sends them: see `feeds`."""

    def begin(self, head: Head) -> None: ...

    def choose(self, logits: np.ndarray) -> Next | None: ...


class DecodeEnd:
    """decode's side of runs: see `runs.DecodeRuns`.

    own: chooses the tokens here; None waits for them on the run's FIFO. inline: logits travel in
    the frames; else through the ring, which a reader must not fall behind of. follower: chooses the
    gears where no token that comes back names one.
    """

    def __init__(
        self,
        interrupt: Interrupt,
        own: OwnFeed | None,
        inline: bool,
        follower: Follower | None = None,
    ):
        self._interrupt = interrupt
        self._own = own
        self._inline = inline
        self._follower = follower
        self._clear()

    def _clear(self) -> None:
        self._head: Head | None = None
        self._session: Session | None = None
        self._run: RunDirectory | None = None
        self._client: HandoverClient | None = None
        self._ring: RingWriter | None = None
        self._feed: FeedReader | None = None
        self._messages: deque[FeedMessage] = deque()
        self._chosen: Next | None = None
        self._position = 0
        self._engine: Engine | None = None
        self._meter: EntropyMeter | None = None
        self._step: tuple[Logits, np.ndarray] | None = None

    def attach(self, head: Head) -> Head:
        if head.session is None:
            raise DataError(
                "the stream names no session", hint="is toast-prefill before toast-decode?"
            )
        self._join(head)
        if self._run is None:
            self._session = Session.open(head.session, head.fingerprint, create=False)
            self._run = RunDirectory.create(self._session.path)
        if self._own is not None:
            self._run.feed.unlink(missing_ok=True)  # nobody waits for tokens
            self._own.begin(head)
        else:
            self._feed = FeedReader(self._run.feed)
        self._head = dataclasses.replace(head, run=str(self._run.path))
        return self._head

    def _join(self, head: Head) -> None:
        """The run that prefill began, if prefill is still there: a stream from a file names one
        that is over."""
        if not isinstance(head.run, str) or head.session is None:
            return
        try:
            self._run = RunDirectory.join(head.run)
            self._client = HandoverClient(head.run, Path(head.session))
        except (NoInputError, UnavailableError):
            if self._run is not None:
                self._run.close()
                self._run = None

    def take(self, engine: Engine, ids: list[int]) -> ModelState:
        assert self._head is not None and self._head.session is not None
        if self._session is None:
            self._session = self._adopt(self._head)
        session = self._session
        if session.tokens != ids:
            raise DataError(
                f"session {session.name} has moved on since this prompt was prefilled",
                hint="run toast-prefill again",
            )
        check_vocab(self._head, engine)
        self._make_room(engine.vocab)
        state, _ = engine.restore(session, ids)
        for _ in engine.reading(state, ids):
            pass
        self._engine = engine
        return state

    def _make_room(self, vocab: int) -> None:
        """For logits of the size that head and model agree upon."""
        assert self._run is not None  # attached
        if not self._inline:
            self._ring = RingWriter(self._run.ring, vocab)
        if self._follower is not None:
            self._meter = EntropyMeter(vocab)

    def _adopt(self, head: Head) -> Session:
        assert head.session is not None
        if self._client is not None:
            try:
                lock = self._client.receive()
            except UnavailableError:
                pass  # prefill has died or given up waiting: its lock is free
            else:
                return Session.adopt(head.session, head.fingerprint, lock)
        return Session.open(head.session, head.fingerprint, create=False)

    def emit(self, state: ModelState, started: float | None) -> Iterator[Frame]:
        assert self._engine is not None  # set by take
        state.submit()
        state.look_ahead(self._engine)  # while the rest of this step is computed
        values = state.values()
        seconds = None if started is None else round(time.perf_counter() - started, 6)
        self._position = len(state.tokens)
        array = from_numpy(values) if self._ring is None else self._ring.write(values)
        frame = Logits(self._position, array, seconds)
        if self._own is None:
            self._step = frame, values
            yield frame
            return
        self._follow(frame, values)
        yield frame
        chosen = None if self._interrupt else self._own.choose(values)
        if chosen is not None and isinstance(chosen.token, int):
            logprob = _log_probability(values, chosen.token)
            logprob = None if logprob is None else round(logprob, 6)
            yield Token(
                self._position, chosen.token, logprob, gear=frame.gear, entropy=frame.entropy
            )
            chosen = chosen._replace(gear=frame.gear, expected=frame.expected)
        self._chosen = chosen

    def _follow(self, frame: Logits, values: np.ndarray) -> None:
        """Chooses the gear of the pass after these logits."""
        if self._follower is not None and self._meter is not None:
            self._follower.annotate(frame, self._meter.bits(values))

    def next(self) -> Next:
        if self._own is not None:
            if self._interrupt:
                return Next(None, "interrupt")
            return self._chosen or Next(None, "stop")
        assert self._feed is not None
        if self._interrupt:
            self._messages += self._feed.read_available()
        while not self._messages:
            if self._interrupt or self._wait():
                return Next(None, "interrupt")
        message = self._messages.popleft()
        if message.id is None:
            return Next(None, "stop")
        if message.pos is not None and message.pos != self._position:
            raise DataError(
                f"the feed sent a token for position {message.pos}, decode is at {self._position}",
                hint="do two samplers feed one run? give one of them --no-feed",
            )
        gear, expected = message.gear, message.expected
        if gear is None and self._step is not None:  # no entropy-gear stands in the pipe
            frame, values = self._step
            self._follow(frame, values)
            gear, expected = frame.gear, frame.expected
        if not message.end:
            # A token that was drawn already has been shown: it belongs to what is committed.
            end = "interrupt" if self._interrupt else None
        else:
            end = "eos" if self._is_eos(message.id) else "length"
        return Next(message.id, end, gear, expected)

    def _is_eos(self, token: int) -> bool:
        return self._head is not None and token in self._head.eos

    def _wait(self) -> bool:
        """Waits for the feed; True when a signal came instead. Raises BrokenPipeError when the
        reader of stdout goes away: no token can come any more."""
        assert self._feed is not None
        poll = select.poll()
        poll.register(self._feed.fileno(), select.POLLIN)
        poll.register(1, 0)
        if self._interrupt.fileno() >= 0:
            poll.register(self._interrupt.fileno(), select.POLLIN)
        ready = dict(poll.poll())
        if self._feed.fileno() in ready:
            self._messages += self._feed.read_available()
            return False
        if ready.get(1, 0) & GONE:
            raise BrokenPipeError
        return bool(self._interrupt)

    def keeps(self, state: ModelState) -> bool:
        return state.session is not None and not state.session.ephemeral

    def finish(self, state: ModelState) -> None:
        try:
            if self.keeps(state):
                state.commit()
        finally:
            state.session = None  # `close` closes it, when the run has been removed
            state.close()
            if self._follower is not None:
                self._follower.end()
            self.close()

    def close(self) -> None:
        """Lets the run go, however far it got."""
        if self._feed is not None:
            self._feed.close()
        if self._ring is not None:
            self._ring.close()
        if self._run is not None:
            self._run.remove()
        if self._session is not None:
            self._session.close()
        if self._client is not None:
            self._client.close()  # last: prefill takes the session for free now
        self._clear()


def _log_probability(logits: np.ndarray, token: int) -> float | None:
    """Natural log of softmax(logits)[token]; None for a token outside the logits."""
    if not 0 <= token < logits.size:
        return None
    return float(log_softmax(logits)[token])


def _is_pipe(descriptor: int) -> bool:
    mode = os.fstat(descriptor).st_mode
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)
