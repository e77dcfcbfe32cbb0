"""Takes the steps of several states: together where the architecture allows, else in turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx

from toastkit.daemon.scheduled_runs import ScheduledState
from toastkit.engine.batch import Batch, can_batch
from toastkit.engine.engine import Engine
from toastkit.engine.state import ModelState

# A batch pads its states to the longest. One joins where it is neither much shorter nor much longer
# than those that are there: no more than twice, or this many tokens.
SLACK_TOKENS = 1024
# Rounds of steps after which batching is tried again where it has failed: doubled each time.
FIRST_ROUNDS, MOST_ROUNDS = 64, 1 << 14


class Stepper:
    """most: states in a batch; 1 takes every step alone, as policies may ask for too. say: is told
    why states are not batched.

    Whether a model can be batched is tried out when two states first step at once; where the trial
    itself fails, or a batch does later, again after some time.
    """

    def __init__(self, engine: Engine, most: int, say: Callable[[str], None] | None = None):
        self._engine = engine
        self._most = most if engine.steps_together else 1
        self._say = say
        self._batches: list[Batch] = []
        self._works: bool | None = None if self._most > 1 else False
        self._wait, self._pause = 0, FIRST_ROUNDS

    @property
    def sizes(self) -> list[int]:
        """How many states step together, batch by batch."""
        return [len(batch.members) for batch in self._batches]

    def step(self, states: Sequence[ScheduledState]) -> list[tuple[ScheduledState, Exception]]:
        """Takes the step that is due of each state; their logits are being computed after it.
        Returns those that failed, each with its error. Where a batch fails, each of its states is
        read anew and steps alone: whose fault it was shows then."""
        alone = states
        if len(states) > 1 and self._can_batch():
            try:
                alone = self._step_together(states)
            except Exception:
                self._put_off()
                for batch in list(self._batches):
                    self._give_up(batch)
                alone = [state for state in states if state.waiting is not None]
        failed: list[tuple[ScheduledState, Exception]] = []
        for state in alone:
            try:
                self._step_alone(state)
            except Exception as error:
                failed.append((state, error))
        return failed

    def _step_together(self, states: Sequence[ScheduledState]) -> list[ScheduledState]:
        """Steps all that have company; returns the others."""
        alone = []
        for state in states:
            if self._batch_of(state) is None:
                self._join(state)
        for batch in list(self._batches):
            members = [state for state in batch.members if isinstance(state, ScheduledState)]
            if len(members) == 1:
                alone += members
                continue
            batch.step([state.waiting for state in members])
            mx.async_eval([state.logits for state in members])
            for state in members:
                state.waiting = None
        return alone

    def _give_up(self, batch: Batch) -> None:
        """Dissolves a batch that has failed: what its caches hold is not known."""
        self._batches.remove(batch)
        batch.dissolve()

    def _put_off(self) -> None:
        """No batches for some time, and longer with each failure."""
        self._works, self._wait = None, self._pause
        self._pause = min(2 * self._pause, MOST_ROUNDS)

    def _read_anew(self, state: ScheduledState) -> None:
        """Makes the caches of a state whose batch was given up. Its steps are taken again as steps
        where a policy has them computed in another way than a prompt."""
        state.take_back()
        ids = state.read_tokens() if state.waiting is None else state.read_tokens()[:-1]
        steps = any(policy.variant for policy in self._engine.policies)
        count = state.prompt if steps and state.prompt else len(ids)
        twin = ModelState(self._engine.new_cache(), ids[:count])
        self._engine.prefill(twin.tokens, twin.cache)
        for token in ids[count:]:
            self._engine.consume(twin, token)
            mx.eval(twin.logits)
        state.cache = twin.cache

    def _step_alone(self, state: ScheduledState) -> None:
        self.leave(state)
        known = isinstance(state.waiting, int)
        state.take_step(self._engine)
        state.submit()
        if known:
            self._engine.look_ahead(state)  # while the last of this step is computed

    def _can_batch(self) -> bool:
        if self._works is None:
            if self._wait:
                self._wait -= 1
                return False
            self._works = can_batch(self._engine)
            if self._works is None:
                self._put_off()
            elif not self._works and self._say is not None:
                name = self._engine.files.name
                self._say(f"{name} cannot be batched: conversations take their steps in turn")
        return bool(self._works)

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
        """Takes a state out of the batch that it is in, if any. Its caches hold its tokens then."""
        batch = self._batch_of(state)
        if batch is not None:
            try:
                batch.leave([state])
            except Exception:
                self._give_up(batch)
                self._put_off()
            else:
                if not batch.members:
                    self._batches.remove(batch)
        if not state.cache and isinstance(state, ScheduledState):
            self._read_anew(state)


def _alike(batch: Batch, state: ModelState) -> bool:
    lengths = [len(s.tokens) for s in (*batch.members, state)]
    return max(lengths) <= 2 * min(lengths) + SLACK_TOKENS
