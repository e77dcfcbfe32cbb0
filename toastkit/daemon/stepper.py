"""Take decode steps of several states: batched if the architecture allows it, else in turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx

from toastkit.daemon.scheduled_runs import ScheduledState
from toastkit.engine.batch import Batch, can_batch, can_be_apart
from toastkit.engine.engine import Engine
from toastkit.engine.state import ModelState
from toastkit.holdings.policy import NO_WISH

# Merged caches pad states to the longest. One joins them if its length is within a factor of two,
# or this many tokens, of those in the batch.
SLACK_TOKENS = 1024
# Rounds of steps before batching is retried after a failure, doubled each time.
FIRST_ROUNDS, MAX_ROUNDS = 64, 1 << 14


class Stepper:
    """most: states per batch; 1 takes every step alone, which policies may require too. say: called
    with why states are not batched.

    Whether a model can be batched is tested when two states first step at once; if the test or a
    later batch fails, again after some time.
    """

    def __init__(self, engine: Engine, most: int, say: Callable[[str], None] | None = None):
        self._engine = engine
        self._most = most if engine.steps_together else 1
        self._say = say
        self._batches: list[Batch] = []
        self._works: bool | None = None if self._most > 1 else False
        self._apart = False  # whether each state keeps its own keys and values
        self._wait, self._pause = 0, FIRST_ROUNDS

    @property
    def sizes(self) -> list[int]:
        """The size of each batch."""
        return [len(batch.members) for batch in self._batches]

    def step(self, states: Sequence[ScheduledState]) -> list[tuple[ScheduledState, Exception]]:
        """Take the pending step of each state; their logits are being computed on return. Returns
        the failed ones, each with its error. If a batch fails, each of its states is prefilled
        again and stepped alone, which shows the culprit."""
        alone = states
        if len(states) > 1 and self._can_batch() and self._decided():
            try:
                alone = self._step_together(states)
            except Exception:
                self._back_off()
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

    def _decided(self) -> bool:
        """Have the policies decide about a pass of a batch. False if that fails, as where the
        model's files have changed: batches are as they were, and each state finds out alone."""
        try:
            self._engine.decide(NO_WISH)
        except Exception:
            return False
        return True

    def _step_together(self, states: Sequence[ScheduledState]) -> list[ScheduledState]:
        """Step all that share a batch; return the others."""
        groups: list[list[ScheduledState]] = []  # of those in no batch
        for state in states:
            if self._batch_of(state) is None:
                self._join(state, groups)
        for group in groups:
            if len(group) > 1:  # a state that joins or leaves a batch is copied
                batch = Batch(self._engine, self._apart)
                batch.join(group)
                self._batches.append(batch)
        alone = [group[0] for group in groups if len(group) == 1]
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
        """Dissolve a failed batch: the contents of its caches are unknown."""
        self._batches.remove(batch)
        batch.dissolve()

    def _back_off(self) -> None:
        """Suspend batching, longer with each failure."""
        self._works, self._wait = None, self._pause
        self._pause = min(2 * self._pause, MAX_ROUNDS)

    def _rebuild_caches(self, state: ScheduledState) -> None:
        """Rebuild the caches of a state whose batch failed. Its decode steps are repeated as such
        if a policy computes them differently from prefill."""
        state.take_back()
        ids = state.read_tokens() if state.waiting is None else state.read_tokens()[:-1]
        steps = any(policy.variant for policy in self._engine.policies)
        count = state.prompt if steps else len(ids)
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
            self._engine.look_ahead(state)  # while the rest of this step is computed

    def _can_batch(self) -> bool:
        if self._works is None:
            if self._wait:
                self._wait -= 1
                return False
            self._apart = can_be_apart(self._engine)
            self._works = self._apart and can_batch(self._engine, apart=True)
            if self._works is False:
                self._apart, self._works = False, can_batch(self._engine)
            if self._works is None:
                self._back_off()
            elif not self._works and self._say is not None:
                name = self._engine.files.name
                self._say(f"{name} cannot be batched: conversations take their steps in turn")
        return bool(self._works)

    def _join(self, state: ScheduledState, groups: list[list[ScheduledState]]) -> None:
        """Put a state into the first batch with room and similar length, or else into such a group
        or a new one."""
        for batch in self._batches:
            if self._fits(state, batch.members):
                batch.join([state])
                return
        for group in groups:
            if self._fits(state, group):
                group.append(state)
                return
        groups.append([state])

    def _fits(self, state: ModelState, others: Sequence[ModelState]) -> bool:
        lengths = [len(s.tokens) for s in (*others, state)]
        alike = self._apart or max(lengths) <= 2 * min(lengths) + SLACK_TOKENS
        return alike and len(others) < self._most

    def _batch_of(self, state: ModelState) -> Batch | None:
        for batch in self._batches:
            if any(member is state for member in batch.members):
                return batch
        return None

    def leave(self, state: ScheduledState) -> None:
        """Take a state out of its batch, if any; its caches then hold its tokens."""
        self.drop(state)
        if not state.cache:
            self._rebuild_caches(state)

    def drop(self, state: ScheduledState) -> None:
        """The same, but where its batch fails it has no caches. Raises nothing."""
        batch = self._batch_of(state)
        if batch is not None:
            try:
                batch.leave([state])
            except Exception:
                self._give_up(batch)
                self._back_off()
            else:
                if not batch.members:
                    self._batches.remove(batch)
