"""Takes the steps of several states: together where the architecture allows, else in turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx

from toastkit.daemon.runs import ScheduledState
from toastkit.engine.batch import Batch, can_batch
from toastkit.engine.engine import Engine
from toastkit.engine.state import ModelState

# A batch pads its states to the longest. One joins where it is neither much shorter nor much longer
# than those that are there: no more than twice, or this many tokens.
SLACK_TOKENS = 1024


class Stepper:
    """most: states in a batch; 1 takes every step alone. say: is told why states are not batched.

    Whether a model can be batched is tried out when two states first step at once.
    """

    def __init__(self, engine: Engine, most: int, say: Callable[[str], None] | None = None):
        self._engine = engine
        self._most = most
        self._say = say
        self._batches: list[Batch] = []
        self._works: bool | None = None if most > 1 else False

    def step(self, states: Sequence[ScheduledState]) -> None:
        """Takes the step that is due of each state; their logits are being computed after it."""
        if len(states) == 1 or not self._can_batch():
            for state in states:
                self._step_alone(state)
            return
        for state in states:
            if self._batch_of(state) is None:
                self._join(state)
        for batch in list(self._batches):
            members = [state for state in batch.members if isinstance(state, ScheduledState)]
            if len(members) == 1:
                self._step_alone(members[0])
            else:
                batch.step([_token(state) for state in members])
                mx.async_eval([state.logits for state in members])

    def _step_alone(self, state: ScheduledState) -> None:
        self.leave(state)
        known = isinstance(state.waiting, int)
        state.take_step(self._engine)
        state.submit()
        if known:
            state.look_ahead(self._engine)  # while the last of this step is computed

    def _can_batch(self) -> bool:
        if self._works is None:
            self._works = can_batch(self._engine)
            if not self._works and self._say is not None:
                name = self._engine.files.name
                self._say(f"{name} cannot be batched: conversations take their steps in turn")
        return self._works

    def _join(self, state: ScheduledState) -> None:
        """Puts a state into the first batch that has room and is about as long."""
        for batch in self._batches:
            if len(batch.members) < self._most and _alike(batch, state):
                batch.join([state])
                return
        batch = Batch(self._engine)
        batch.join([state])
        self._batches.append(batch)

    def _batch_of(self, state: ModelState) -> Batch | None:
        for batch in self._batches:
            if any(member is state for member in batch.members):
                return batch
        return None

    def leave(self, state: ModelState) -> None:
        """Takes a state out of the batch that it is in, if any."""
        batch = self._batch_of(state)
        if batch is not None:
            batch.leave([state])
            if not batch.members:
                self._batches.remove(batch)

    @property
    def nbytes(self) -> int:
        """Bytes of the batches' caches."""
        return sum(batch.nbytes for batch in self._batches)


def _token(state: ScheduledState) -> int | mx.array:
    token, state.waiting = state.waiting, None
    return token


def _alike(batch: Batch, state: ModelState) -> bool:
    lengths = [len(s.tokens) for s in (*batch.members, state)]
    return max(lengths) <= 2 * min(lengths) + SLACK_TOKENS
