"""Runs under a scheduler: the stages of `answer`, yielding the device to others between passes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from toastkit.daemon.prepare import Prepared
from toastkit.daemon.spill import CachedState
from toastkit.engine.engine import CHUNK, Engine
from toastkit.engine.savepoints import always_trimmable, take_savepoint, thinned
from toastkit.engine.state import ModelState
from toastkit.engine.step_engine import State, StepEngine
from toastkit.errors import ToastError
from toastkit.frames import Frame, Head, Logits
from toastkit.holdings.policy import NO_WISH, Wish
from toastkit.interrupts import Interrupt
from toastkit.session.directory import Session
from toastkit.session.names import resolve
from toastkit.stages.run.one_process import LocalRuns
from toastkit.stages.run.protocol import Pause, experts_of
from toastkit.stages.run.settings import ReadOptions

if TYPE_CHECKING:
    from toastkit.daemon.service import Service

MAX_SAVEPOINTS = 3  # per state; each costs another copy of the recurrent layers
MIN_APART = 32  # tokens between savepoints: fewer are prefilled as fast


@dataclass(eq=False)
class ScheduledState(ModelState):
    """A state whose steps the scheduler takes. waiting: the token of the pending step, already the
    last of its tokens. wish: what is wanted of that step. prompt: tokens prefilled, 0 until there
    is a step."""

    waiting: Any = field(default=None)
    wish: Wish = field(default=NO_WISH)
    prompt: int = 0

    def take_step(self, engine: Engine) -> None:
        """Take the pending step, unbatched. Lazy."""
        token, self.waiting = self.waiting, None
        self.tokens.pop()
        engine.consume(self, token, self.wish)


class ScheduledRuns(LocalRuns):
    """One run: see `protocol.PrefillRuns` and `protocol.DecodeRuns`.

    service: takes the steps, and caches states. deferred: see LocalRuns. Nothing interrupts it:
    whoever began it gives it up at a pause.

    state: once there is one. cached, why: tokens reused, and why not more. parent: the cached state
    that it continues.
    """

    def __init__(self, service: Service, prepared: Prepared, deferred: bool):
        super().__init__(prepared.request.session, Interrupt(), deferred=deferred)
        self._engine: Engine = service.engine
        self._service = service
        self._key = prepared.key
        self._points = prepared.points
        self.state: ScheduledState | None = None
        self.parent: CachedState | None = None
        self.cached = 0
        self.why = ""

    def known(self, ids: list[int]) -> int:
        """Before it has begun: how many tokens of the prompt are kept, in the state cache or in the
        named session."""
        count = self._service.memory.find(self._key, ids).count
        if self._name is not None:
            with (
                suppress(ToastError),  # told once it begins
                Session.open(resolve(self._name), None, create=False, write=False) as session,
            ):
                count = max(count, session.reusable(ids))
        return count

    def stop_at(self, count: int) -> None:
        """Have a prefill pass end at this position, unless one does just before: another prompt
        branches off here, and is to continue from this state."""
        if not any(count - MIN_APART < point <= count for point in self._points):
            self._points.append(count)

    @property
    def _held(self) -> ScheduledState:
        assert self.state is not None  # restore has made it
        return self.state

    def restore(
        self, engine: StepEngine, head: Head, ids: list[int], options: ReadOptions
    ) -> tuple[ScheduledState, int]:
        state = self._resumed(self._engine, ids)
        self.state, self.cached = state, len(state.tokens)
        if always_trimmable(state.cache):
            self._points = []
        else:
            self._note_savepoint(state)
            self._points = self._worth_a_pass(state)
        return state, self.cached

    def _worth_a_pass(self, state: ModelState) -> list[int]:
        """The positions at which a prefill pass should end, sufficiently far apart."""
        last, points = _last_savepoint(state), []
        for point in self._points:
            if point > len(state.tokens) and point - last >= MIN_APART:
                points.append(point)
                last = point
        return points

    def _resumed(self, engine: Engine, ids: list[int]) -> ScheduledState:
        """The initial state: from the state cache, or from the named session."""
        named = self.session()
        path = None if named is None else named.path
        unfinished = self._service.unfinished()
        while True:
            match = self._service.memory.find(self._key, ids, path, unfinished)
            self.why = match.why
            self.parent = None if match.kept in unfinished else match.kept
            stored = 0 if named is None else min(named.reusable(ids), len(ids) - 1)
            if named is not None and stored > match.count:
                return self._restored(engine, ids, named)
            if match.kept is None:
                return ScheduledState(engine.new_cache(), session=named)
            found = self._service.memory.resume(match)
            if found is not None:
                break
        cache, savepoints = found
        if named is not None and match.kept.path == path:
            named.continues(match.count, match.kept.generation)
        held = list(ids[: match.count])
        return ScheduledState(engine.counted(cache), held, session=named, savepoints=savepoints)

    def _restored(self, engine: Engine, ids: list[int], session: Session) -> ScheduledState:
        state, _ = engine.restore(session, ids[:-1])
        self.parent, self.why = None, f"session {session.name} holds no more of it"
        held = ScheduledState(state.cache, state.tokens, state.logits, session)
        held.savepoints = state.savepoints
        return held

    def _note_savepoint(self, state: ModelState) -> None:
        """Make a savepoint at the state's position, if far enough from the last one."""
        count = len(state.tokens)
        if count - _last_savepoint(state) >= MIN_APART:
            point = take_savepoint(state.cache, count)
            point = point._replace(layers=self._engine.counted(point.layers))
            state.savepoints = thinned([*state.savepoints, point], MAX_SAVEPOINTS)

    def pass_size(self, state: State) -> int | None:
        size = self._service.slice_size() or CHUNK[self._engine.device]
        return min([size, *(n - len(state.tokens) for n in self._points if n > len(state.tokens))])

    def passed(self, state: State) -> Iterator[Any]:
        if len(state.tokens) in self._points and not always_trimmable(self._held.cache):
            self._note_savepoint(self._held)
        yield Pause("read")

    def emit(self, state: State, started: float | None) -> Iterator[Frame]:
        if self._held.waiting is not None:
            yield Pause("step")  # type: ignore[misc]
        yield Logits(len(state.tokens), state.logits, experts=experts_of(state))

    def consume(self, state: State, token: Any, wish: Wish) -> None:
        """Record the token; its step is pending from now on."""
        self._held.waiting, self._held.wish = token, wish
        self._held.prompt = self._held.prompt or len(state.tokens)
        state.tokens.append(token)

    def finish(self, state: State) -> None:
        """Bring the caches up to the state's tokens, and a named session up to date."""
        self._service.stepper.leave(self._held)
        if self._held.waiting is not None:
            self._held.take_step(self._engine)
        self._held.take_back()
        state.commit()

    def close(self) -> None:
        """Nothing: whoever began the run keeps or releases the state."""


def _last_savepoint(state: ModelState) -> int:
    return state.savepoints[-1].count if state.savepoints else 0
