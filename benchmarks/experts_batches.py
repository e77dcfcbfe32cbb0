"""What MoBiLE costs conversations that step together: crumb on its arithmetic set, in one process.

    python benchmarks/experts_batches.py [--gammas 0.7,0.9] [--counts 1,2,4,8] [--rounds 5]
                                         [--steps 32]

Tokens a second of so many conversations, all together, as the daemon's Stepper takes their steps:
mobile in a batch, mobile in turn, the big model in a batch, one after another in every round. Each
conversation answers a question of its own, greedily, without end; their prompts are read before the
clock starts. The share of the steps that fell back is that of the batch, and in turn.
"""

from __future__ import annotations

import argparse
import time
from functools import partial

import numpy as np
from experts_accuracy import Set
from measure import in_turn, machine, ratio, spread

from toastkit.daemon.scheduled_runs import ScheduledState
from toastkit.daemon.stepper import Stepper
from toastkit.engine.engine import Engine
from toastkit.engine.opening import open_engine
from toastkit.engine.savepoints import copy_caches
from toastkit.experts.experts_options import ExpertsOptions


class Case:
    """One way to take the steps of conversations. most: states in a batch. steps, fallbacks: of all
    rounds."""

    def __init__(self, engine: Engine, most: int, prompts: list[list[int]]):
        self._engine, self._most = engine, most
        self._read = []
        for ids in prompts:
            state = ScheduledState(engine.new_cache())
            list(engine.reading(state, ids))
            self._read.append(state)
        self.steps = self.fallbacks = 0

    def speed(self, count: int, steps: int) -> float:
        """Tokens a second of `count` conversations that take so many steps each."""
        states = [
            ScheduledState(self._engine.counted(copy_caches(s.cache)), list(s.tokens), s.logits)
            for s in self._read[:count]
        ]
        stepper = Stepper(self._engine, self._most)
        self._round(stepper, states)  # makes the batch, after the trial of whether there may be one
        before = time.perf_counter()
        for _ in range(steps):
            self._round(stepper, states)
        for state in states:
            state.values()
        seconds = time.perf_counter() - before
        for state in states:
            stepper.leave(state)
            state.take_back()
        return count * steps / seconds

    def _round(self, stepper: Stepper, states: list[ScheduledState]) -> None:
        for state in states:
            state.waiting = int(np.argmax(state.values()))
            state.tokens.append(state.waiting)
        assert not stepper.step(states)
        self.steps += len(states)
        self.fallbacks += sum(s.passed is not None and s.passed.fallback for s in states)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gammas", default="0.7,0.9")
    parser.add_argument("--counts", default="1,2,4,8")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=32)
    given = parser.parse_args()
    counts = [int(n) for n in given.counts.split(",")]
    questions = Set(max(counts))
    print(
        f"{machine()}\n\ntokens a second of all, median (min .. max); ratios of rounds", flush=True
    )
    big = Case(open_engine(questions.files), max(counts), questions.ids)
    for gamma in given.gammas.split(","):
        options = ExpertsOptions("mobile", float(gamma))
        engine = open_engine(questions.files, experts=options)
        batch = Case(engine, max(counts), questions.ids)
        alone = Case(engine, 1, questions.ids)
        cases = {"batch": batch, "in turn": alone, "big batch": big}
        for count in counts:
            found = in_turn(
                {name: partial(case.speed, count, given.steps) for name, case in cases.items()},
                given.rounds,
            )
            print(f"mobile:{gamma}, {count} conversations")
            for name, values in found.items():
                print(f"  {name:10} {spread(values, digits=1):>26}")
            for name in ("in turn", "big batch"):
                print(f"  batch / {name:10} {ratio(found['batch'], found[name]):>26}")
            shares = (f"{case.fallbacks / case.steps:.3f}" for case in (batch, alone))
            print(f"  fell back so far: {' in a batch, '.join(shares)} in turn", flush=True)


if __name__ == "__main__":
    main()
