"""What the stages ask of the place that a run is in: one process, or a pipe between several.

`one_process.LocalRuns` is the one process: the state is handed on as an object, tokens come from a
deque, logits stay on the device. `pipe_prefill.PrefillEnd` and `pipe_decode.DecodeEnd` are two ends
of a pipe: the state goes through a session directory, tokens come through a FIFO, logits go through
a ring.
"""

from __future__ import annotations

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
    """What to do after a step. token: the id to run next (an int, or a device array () that is
    still being computed), None to stop at once. end: the reason, where the run ends here. gear: of
    the pass that runs the token, None for as before. expected: the gear that is coming, perhaps."""

    token: Any
    end: str | None = None
    gear: str | None = None
    expected: str | None = None


class PrefillRuns(Protocol):
    """prefill's side."""

    def begin(self, head: Head) -> Head:
        """Opens the session of a run; the head that names it. BusyError where it is locked."""

    def session(self) -> Session | None:
        """The session of the run that has begun, None for a state that lives in memory only."""

    def restore(
        self, engine: StepEngine, head: Head, ids: list[int], options: ReadOptions
    ) -> tuple[State, int]:
        """The state to continue from, and how many of the prompt's tokens it holds."""

    def pass_size(self, state: State) -> int | None:
        """Tokens of the next pass over the prompt, None for what the options say."""

    def passed(self, state: State) -> Iterator[Any]:
        """A pass is done; what it has to say to whoever runs the stages."""

    def abandoned(self) -> bool:
        """Whether nobody waits for the result any more."""

    def announce(self, state: State) -> Array | None:
        """The committed state is about to be announced; the logits to put into the frame."""

    def hand_over(self, state: State) -> None:
        """The frame is written: gives the state, and the writer's lock, to decode."""

    def close(self) -> None:
        """Lets go of a run that was not handed over."""


class DecodeRuns(Protocol):
    """decode's side."""

    def attach(self, head: Head) -> DecodeRun:
        """Prepares the feed and the ring of a run. Raises NoInputError for one that is over."""


class DecodeRun(Protocol):
    """One run on decode's side. head: the one that goes on, which names the run. deferred: a token
    is run before it is known, so that its end is noticed a step late. answers: every step's token
    comes from the run itself, the last one's too."""

    head: Head
    deferred: bool
    answers: bool

    def take(self, engine: StepEngine, ids: list[int]) -> State:
        """The state of a prompt. DataError where it is not the prompt that was prefilled."""

    def emit(self, state: State, started: float | None) -> Iterator[Frame]:
        """The frames of one step. started: when the step began, of time.perf_counter, or None."""

    def consume(self, state: State, token: Any, wish: Wish) -> None:
        """Has the engine run one more token: now, or when the state's turn comes."""

    def next(self) -> Next:
        """Waits until the next token, or an end, is known."""

    def keeps(self, state: State) -> bool:
        """Whether the state will be wanted after the run."""

    def finish(self, state: State) -> None:
        """Commits the state and lets the run go."""

    def close(self) -> None:
        """Lets the run go, however far it got. May be called again."""


class Feed(Protocol):
    """The way back to decode: `one_process.LocalFeed`, or `pipe_feed.PipeFeed`."""

    def begin(self, head: Head) -> None:
        """Takes the next run."""

    def send(self, pos: int, following: Next) -> None:
        """The token at `pos`, and how to go on with it."""

    def close(self, reason: str) -> None:
        """Ends the run before any token that waits."""

    def finish(self) -> None:
        """The run is over."""

    @property
    def awaited(self) -> bool:
        """Whether another process waits for the tokens of the run."""


def experts_of(state: State) -> dict[str, Any] | None:
    """The `experts` of a logits frame: how the step was done that gave the logits, and what slots
    have to say of it. None where there is nothing to say, as of a prompt's."""
    passed = {} if state.passed is None else state.passed._asdict()
    return {**passed, **(state.experts or {})} or None


class Pause(NamedTuple):
    """Not a frame of any stream: the stages yield it to a scheduler that runs several of them, to
    let others at the device. want: "read" after a pass over the prompt; "step" before the step
    that the scheduler is to take for this run."""

    want: str


class SessionRuns:
    """PrefillRuns, in part: states come from sessions alone, and nobody else waits."""

    _session: Session | None = None

    def session(self) -> Session | None:
        return self._session

    def restore(
        self, engine: StepEngine, head: Head, ids: list[int], options: ReadOptions
    ) -> tuple[State, int]:
        """The fork's, else the session's own, else an empty one."""
        session = self.session()
        with nullcontext() if options.fork is None else open_fork(options.fork, head) as source:
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
    """The session to start from, for reading. Raises NoInputError where there is none."""
    from toastkit.session.directory import Session
    from toastkit.session.names import resolve

    return Session.open(resolve(name), head.fingerprint, create=False, write=False)


def check_vocab(head: Head, engine: StepEngine) -> None:
    """Raises DataError where a stream counts other logits than its model gives."""
    if head.vocab != engine.vocab:
        raise DataError(f"the head says {head.vocab} logits a step, the model has {engine.vocab}")


def _require_hit(session_name: str, cached: int, stored: int) -> None:
    """Raises NoInputError unless every stored token could be reused."""
    if stored == 0:
        raise NoInputError(f"session {session_name} is empty", hint="--require-hit was given")
    if cached < stored:
        raise NoInputError(
            f"session {session_name} holds {counted(stored, 'token')} with which this prompt "
            "does not begin",
            hint="--require-hit was given; without it the prompt is read anew",
        )
