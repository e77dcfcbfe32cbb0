"""What prefill and decode ask of the place they run in: one process, or a pipe between two.

`local.LocalRuns` is the one process: the state is handed on as an object, tokens come from a deque,
logits stay on the device. `shared.PrefillEnd` and `shared.DecodeEnd` are two ends of a pipe: the
state goes through a session directory, tokens come through a FIFO, logits go through a ring.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import mlx.core as mx

from toastkit.engine.engine import Engine
from toastkit.engine.state import ModelState
from toastkit.frames import Array, Frame, Head
from toastkit.session.directory import Session


class Next(NamedTuple):
    """What to do after a step. token: the id to run next (an int, or a device array () that is
    still being computed), None to stop at once. end: the reason, where the run ends here."""

    token: int | mx.array | None
    end: str | None = None


class PrefillRuns(Protocol):
    """prefill's side."""

    def begin(self, head: Head) -> Head:
        """Opens the session of a run; the head that names it. BusyError where it is locked."""

    def session(self) -> Session | None:
        """The session of the run that has begun, None for a state that lives in memory only."""

    def abandoned(self) -> bool:
        """Whether nobody waits for the result any more."""

    def announce(self, state: ModelState) -> Array | None:
        """The committed state is about to be announced; the logits to put into the frame."""

    def hand_over(self, state: ModelState) -> None:
        """The frame is written: gives the state, and the writer's lock, to decode."""

    def close(self) -> None:
        """Lets go of a run that was not handed over."""


class DecodeRuns(Protocol):
    """decode's side."""

    def attach(self, head: Head) -> Head:
        """Prepares the run's feed and ring; the head that names them."""

    def take(self, engine: Engine, ids: list[int]) -> ModelState:
        """The state of a prompt. DataError where it is not the prompt that was prefilled."""

    def emit(self, state: ModelState, started: float | None) -> Iterator[Frame]:
        """The frames of one step. started: when the step began, of time.perf_counter, or None."""

    def next(self) -> Next:
        """Waits until the next token, or an end, is known."""

    def keeps(self, state: ModelState) -> bool:
        """Whether the state will be wanted after the run."""

    def finish(self, state: ModelState) -> None:
        """Commits the state and lets the run go."""

    def close(self) -> None:
        """Lets go of a run whose state was not taken."""
