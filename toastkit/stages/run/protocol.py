"""What the stages require of a run's environment: one process, or a pipe between several.

`one_process.LocalRuns` is the one process: the state is passed as an object, tokens come from a
deque, logits stay on the device. `pipe_prefill.PrefillEnd` and `pipe_decode.DecodeEnd` are two ends
of a pipe: the state goes through a session directory, tokens come through a FIFO, logits go through
a ring.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from toastkit.engine.step_engine import State, StepEngine, Wish
from toastkit.errors import DataError, NoInputError, UsageError
from toastkit.frames import Array, Frame, Head
from toastkit.stages.run.settings import ReadOptions
from toastkit.text.exact_numbers import counted

if TYPE_CHECKING:
    from toastkit.session.directory import Session


class Next(NamedTuple):
    """What to do after a step. token: the id to run next (an int, or a device array () still being
    computed), None to stop at once. end: the reason, if the run ends here. gear: of the pass that
    runs the token, None for no change. expected: the gear that may be coming."""

    token: Any
    end: str | None = None
    gear: str | None = None
    expected: str | None = None


class PrefillRuns(Protocol):
    """prefill's side."""

    def begin(self, head: Head) -> Head:
        """Open the session of a run; return the head that names it. BusyError if it is locked."""

    def session(self) -> Session | None:
        """The session of the current run, None for a state in memory only."""

    def restore(
        self, engine: StepEngine, head: Head, ids: list[int], options: ReadOptions
    ) -> tuple[State, int]:
        """The state to continue from, and how many of the prompt's tokens it holds."""

    def pass_size(self, state: State) -> int | None:
        """Tokens of the next prefill pass, None for what the options say."""

    def passed(self, state: State) -> Iterator[Any]:
        """Called after each pass; yields what the driver of the stages should see."""

    def abandoned(self) -> bool:
        """True if nobody waits for the result any more."""

    def announce(self, state: State) -> Array | None:
        """Called before the committed state is announced; return the logits for the frame."""

    def hand_over(self, state: State) -> None:
        """Called after the frame is written: hand the state, and the writer's lock, to decode."""

    def close(self) -> None:
        """Release a run that was not handed over."""


class DecodeRuns(Protocol):
    """decode's side."""

    def attach(self, head: Head) -> DecodeRun:
        """Prepare the feed and the ring of a run. Raises NoInputError for one that is over."""


class DecodeRun(Protocol):
    """One run on decode's side. head: the one to pass on, which names the run. answers: every
    step's token comes from the run itself, the last one's too."""

    head: Head
    answers: bool

    def take(self, engine: StepEngine, ids: list[int]) -> State:
        """The state of a prompt. DataError if it is not the prompt that was prefilled."""

    def emit(self, state: State, started: float | None) -> Iterator[Frame]:
        """The frames of one step. started: its start by time.perf_counter, or None."""

    def consume(self, state: State, token: Any, wish: Wish) -> None:
        """Have the engine run one more token: now, or when the state is scheduled."""

    def next(self) -> Next:
        """Wait until the next token, or an end, is known."""

    def keeps(self, state: State) -> bool:
        """True if the state is wanted after the run."""

    def finish(self, state: State) -> None:
        """Commit the state and release the run."""

    def close(self) -> None:
        """Release the run, however far it got. Idempotent."""


class Feed(Protocol):
    """The way back to decode: `one_process.LocalFeed`, or `pipe_feed.PipeFeed`."""

    def begin(self, head: Head) -> None:
        """Start the next run."""

    def send(self, pos: int, following: Next) -> None:
        """Send the token at `pos`, and how to continue with it."""

    def close(self, reason: str) -> None:
        """End the run before any pending token."""

    def finish(self) -> None:
        """The run is over."""

    @property
    def awaited(self) -> bool:
        """True if another process waits for the tokens of the run."""


def experts_of(state: State) -> dict[str, Any] | None:
    """The `experts` of a logits frame: how the experts of its step were computed, and counters of
    the expert slots. None if there is nothing to report, as for a prompt."""
    passed = {} if state.passed is None else state.passed._asdict()
    return {**passed, **(state.experts or {})} or None


class Pause(NamedTuple):
    """Not a frame: the stages yield it to a scheduler that runs several of them, to let others use
    the device. want: "read" after a prefill pass; "step" before the step that the scheduler is to
    take for this run."""

    want: str


class SessionRuns:
    """Part of PrefillRuns: states come from sessions alone, and nobody else waits."""

    _session: Session | None = None

    def session(self) -> Session | None:
        return self._session

    def restore(
        self, engine: StepEngine, head: Head, ids: list[int], options: ReadOptions
    ) -> tuple[State, int]:
        """The state of the fork, else of the session, else an empty one."""
        session = self.session()
        with nullcontext() if options.fork is None else open_fork(options.fork, head) as source:
            if source and session is not None and os.path.samefile(source.path, session.path):
                said = "--fork and --session name the same session"
                raise UsageError(said, hint="--session alone goes on with it")
            state, cached = engine.restore(session, ids, source)
            if options.require_hit:
                stored = source or session
                if stored is None or (source is None and stored.ephemeral):
                    raise UsageError("--require-hit needs a --session or a --fork")
                _require_hit(stored.path.name, cached, stored.n_past)
        return state, cached

    def pass_size(self, state: State) -> int | None:
        return None

    def passed(self, state: State) -> Iterator[Any]:
        return iter(())


def open_fork(name: str, head: Head) -> Session:
    """The session to start from, read-only. Raises NoInputError if it does not exist."""
    from toastkit.session.directory import Session
    from toastkit.session.names import resolve

    return Session.open(resolve(name), head.fingerprint, create=False, write=False)


def check_vocab(head: Head, engine: StepEngine) -> None:
    """Raise DataError if a stream's vocabulary size is not its model's."""
    if head.vocab != engine.vocab:
        raise DataError(f"the head says {head.vocab} logits a step, the model has {engine.vocab}")


def _require_hit(session_name: str, cached: int, stored: int) -> None:
    """Raise NoInputError unless every stored token could be reused."""
    if stored == 0:
        raise NoInputError(f"session {session_name} is empty", hint="--require-hit was given")
    if cached < stored:
        raise NoInputError(
            f"session {session_name} holds {counted(stored, 'token')} with which this prompt "
            "does not begin",
            hint="--require-hit was given; without it the prompt is read anew",
        )
