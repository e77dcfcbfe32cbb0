"""decode's side of runs between processes: the state comes from a session directory, tokens come
back through a FIFO, logits go through a ring."""

from __future__ import annotations

import dataclasses
import select
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toastkit.descriptors import GONE
from toastkit.engine.step_engine import State, StepEngine, Wish
from toastkit.errors import DataError, NoInputError, UnavailableError
from toastkit.frames import Array, Frame, Head, Logits, Reference, Token
from toastkit.interrupts import Interrupt
from toastkit.session.directory import Session
from toastkit.session.feed import FeedMessage, FeedReader
from toastkit.session.handover import HandoverClient
from toastkit.session.ring import RingWriter
from toastkit.session.run import RunDirectory, feed_of, ring_of
from toastkit.stages.run.own_tokens import ForcedFeed, GreedyFeed
from toastkit.stages.run.protocol import DecodeRun, Next, check_vocab, experts_of

if TYPE_CHECKING:
    from toastkit.gears.monitor import EntropyMeter
    from toastkit.stages.follow import Follower


@dataclasses.dataclass(frozen=True)
class DecodeEnd:
    """decode's side of runs: see `protocol.DecodeRuns`.

    own: chooses the tokens here; None waits for them on the run's FIFO. inline: logits travel in
    the frames; else through the ring, which a reader must not fall behind. follower: chooses the
    gears if the tokens that come back name none.
    """

    interrupt: Interrupt
    own: GreedyFeed | ForcedFeed | None
    inline: bool
    follower: Follower | None = None

    def attach(self, head: Head) -> DecodeRun:
        if head.session is None:
            raise DataError(
                "the stream names no session", hint="is toast-prefill before toast-decode?"
            )
        run = PipeRun(self, head, head.session)
        try:
            run.open()
        except BaseException:
            run.close()
            raise
        return run


class PipeRun:
    """A run on decode's side: see `protocol.DecodeRun`. session_path: where the state comes
    from."""

    def __init__(self, end: DecodeEnd, head: Head, session_path: str):
        self.head = head
        self.answers = end.own is not None
        self._end = end
        self._session_path = session_path
        self._session: Session | None = None
        self._directory: RunDirectory | None = None
        self._client: HandoverClient | None = None
        self._ring: RingWriter | None = None
        self._feed: FeedReader | None = None
        self._poll: select.poll | None = None
        self._messages: deque[FeedMessage] = deque()
        self._chosen: Next | None = None
        self._meter: EntropyMeter | None = None
        self._step: tuple[Logits, State] | None = None

    def open(self) -> None:
        """Join the run that prefill began, or begin one; open its FIFO."""
        self._join()
        if self._directory is None:
            self._session = Session.open(self._session_path, self.head.fingerprint, create=False)
            self._directory = RunDirectory.create(self._session.path)
        run, own = self._directory, self._end.own
        if own is not None:
            feed_of(run.path).unlink(missing_ok=True)  # nobody waits for tokens
            own.begin(self.head)
        else:
            self._feed = FeedReader(feed_of(run.path))
        self.head = dataclasses.replace(self.head, run=str(run.path))

    def _join(self) -> None:
        """The run that prefill began, if prefill is still alive: a stream from a file names one
        that is over."""
        if not isinstance(self.head.run, str):
            return
        try:
            self._directory = RunDirectory.join(self.head.run)
            self._client = HandoverClient(self.head.run, Path(self._session_path))
        except (NoInputError, UnavailableError):
            if self._directory is not None:
                self._directory.close()
                self._directory = None

    def take(self, engine: StepEngine, ids: list[int]) -> State:
        if self._session is None:
            self._session = self._adopted()
        session = self._session
        if session.tokens != ids:
            raise DataError(
                f"session {session.name} has moved on since this prompt was prefilled",
                hint="run toast-prefill again",
            )
        check_vocab(self.head, engine)
        if not self._end.inline:
            assert self._directory is not None  # opened by `open`
            self._ring = RingWriter(ring_of(self._directory.path), engine.vocab)
        self._engine = engine
        state, _ = engine.restore(session, ids)
        for _ in engine.reading(state, ids):
            pass
        return state

    def _adopted(self) -> Session:
        """The session, under the lock handed over by prefill."""
        if self._client is not None:
            try:
                lock = self._client.receive()
            except UnavailableError:
                pass  # prefill has died or given up waiting: its lock is free
            else:
                return Session.adopt(self._session_path, self.head.fingerprint, lock)
        return Session.open(self._session_path, self.head.fingerprint, create=False)

    def emit(self, state: State, started: float | None) -> Iterator[Frame]:
        state.submit(measured=self._measured)
        self._engine.look_ahead(state)  # while the rest of this step is computed
        values = state.values()
        seconds = None if started is None else round(time.perf_counter() - started, 6)
        position, own = len(state.tokens), self._end.own
        frame = Logits(position, self._sent(state, values), seconds, experts_of(state))
        self._step = frame, state
        if own is not None:
            self._follow(frame, state)
        yield frame
        if own is None:
            return
        chosen = None if self._end.interrupt else own.choose(values)
        if chosen is not None:
            from toastkit.model.config import check_ids
            from toastkit.stages.arrays import log_softmax

            token = chosen.token
            check_ids((token,), len(values))  # before anybody is shown it
            logprob = round(float(log_softmax(values)[token]), 6)
            yield Token(position, token, logprob, gear=frame.gear, entropy=frame.entropy)
            chosen = chosen._replace(gear=frame.gear, expected=frame.expected)
        self._chosen = chosen

    @property
    def _measured(self) -> bool:
        """True if a summary of each step is wanted."""
        return self._ring is not None or self._end.follower is not None

    def _sent(self, state: State, values: memoryview[float]) -> Array | Reference:
        """A state's logits, float32 (vocab,), as put into a frame."""
        if self._ring is not None:
            return self._ring.write(values, state.summary)
        return Array("float32", (len(values),), values.cast("B"))

    def _follow(self, frame: Logits, state: State) -> None:
        """Choose the gear of the pass after a state's logits."""
        if self._end.follower is None:
            return
        summary = state.summary()
        if summary is not None:
            entropy = summary.entropy
        else:
            import numpy as np

            from toastkit.gears.monitor import EntropyMeter

            self._meter = self._meter or EntropyMeter(self._engine.vocab)
            entropy = self._meter.bits(np.asarray(state.values()))
        self._end.follower.annotate(frame, entropy)

    def consume(self, state: State, token: Any, wish: Wish) -> None:
        self._engine.consume(state, token, wish)

    def next(self) -> Next:
        interrupt = self._end.interrupt
        if self._feed is None:  # our own tokens
            return Next(None, "interrupt") if interrupt else self._chosen or Next(None, "stop")
        if interrupt:
            self._messages += self._feed.read_available()
        if not self._messages and not interrupt and self._step is not None:
            self._step[1].hand_over_ahead(self._measured)  # while the sampler works
        while not self._messages:
            if interrupt or self._wait(self._feed):
                return Next(None, "interrupt")
        return self._following(self._messages.popleft())

    def _following(self, message: FeedMessage) -> Next:
        """Decode a message. Raises DataError if it is about another step."""
        assert self._step is not None  # emit comes before next
        frame, state = self._step
        if message.id is None:
            return Next(None, "stop")
        if message.pos is not None and message.pos != frame.pos:
            raise DataError(
                f"the feed sent a token for position {message.pos}, decode is at {frame.pos}",
                hint="do two samplers feed one run? give one of them --no-feed",
            )
        gear, expected = message.gear, message.expected
        if gear is None:  # no entropy-gear in the pipe
            self._follow(frame, state)
            gear, expected = frame.gear, frame.expected
        # A token already sampled has been shown: it belongs to what is committed.
        end = "interrupt" if self._end.interrupt else None
        if message.end:
            end = "eos" if message.id in self.head.eos else "length"
        return Next(message.id, end, gear, expected)

    def _wait(self, feed: FeedReader) -> bool:
        """Wait for the feed; True if a signal came instead. Raises BrokenPipeError when the reader
        of stdout goes away: no token can come any more."""
        interrupt = self._end.interrupt
        if self._poll is None:
            self._poll = poll = select.poll()
            poll.register(feed.fileno(), select.POLLIN)
            poll.register(1, 0)
            if interrupt.fileno() >= 0:
                poll.register(interrupt.fileno(), select.POLLIN)
        ready = dict(self._poll.poll())
        if feed.fileno() in ready:
            self._messages += feed.read_available()
            return False
        if ready.get(1, 0) & GONE:
            raise BrokenPipeError
        return interrupt.noted()

    def keeps(self, state: State) -> bool:
        return state.session is not None and not state.session.ephemeral

    def finish(self, state: State) -> None:
        try:
            if self.keeps(state):
                state.commit()
        finally:
            state.session = None  # closed by `close`, after the run has been removed
            state.close()
            if self._end.follower is not None:
                self._end.follower.end()
            self.close()

    def close(self) -> None:
        for held in (self._feed, self._ring):
            if held is not None:
                held.close()
        if self._directory is not None:
            self._directory.remove()
        for last in (self._session, self._client):  # prefill takes the session for free after it
            if last is not None:
                last.close()
        self._feed = self._ring = self._directory = self._session = self._client = None
