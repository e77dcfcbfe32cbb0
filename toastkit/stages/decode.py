"""decode: one pass of the model per token, each told which token comes next. `logits` out."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from typing import TYPE_CHECKING

from toastkit.errors import DataError, NoInputError
from toastkit.frames import End, Frame, Head, Prefilled, Tokens, unpack_ids
from toastkit.stages.options import Interrupt, StepOptions
from toastkit.stages.runs import DecodeRuns, Next
from toastkit.stages.streams import whole_runs

if TYPE_CHECKING:
    from toastkit.engine.engine import Engine
    from toastkit.engine.state import ModelState
    from toastkit.gears.manager import PrecisionManager


def decode(
    frames: Iterable[Frame],
    engine_for: Callable[[Head], Engine],
    runs: DecodeRuns,
    options: StepOptions,
    interrupt: Interrupt,
) -> Iterator[Frame]:
    """Emits the logits of each step and waits for the token to go on with.

    engine_for(head): the engine of that head's model. runs: where the state comes from, who says
    which token is next, and how logits travel. The state is committed when the run ends, however
    it ends: a reader that goes away closes this generator.
    """
    with closing(runs):
        head: Head | None = None
        ids: list[int] = []
        whole = whole_runs(frames, lambda f: isinstance(f, (Prefilled, End)))
        for frame in whole:
            if isinstance(frame, Head):
                head, ids = _attach(runs, frame, whole), []
                yield head
            elif isinstance(frame, Tokens):
                ids += unpack_ids(frame.ids)
                yield frame
                if frame.final and head is not None:
                    engine_for(head)  # loads while prefill computes
            elif isinstance(frame, Prefilled):
                assert head is not None  # whole_runs: a head comes first
                frame.logits = None
                yield frame
                yield from _run(engine_for(head), runs, ids, options)
                if interrupt:
                    return
            else:
                yield frame


def _attach(runs: DecodeRuns, head: Head, rest: Iterator[Frame]) -> Head:
    """Attaches to a run. Where it has gone already, the error that ended prefill comes next in the
    stream, and it is that error which counts."""
    try:
        return runs.attach(head)
    except NoInputError:
        while not isinstance(next(rest, None), (Prefilled, End, type(None))):
            pass
        raise


def _run(engine: Engine, runs: DecodeRuns, ids: list[int], options: StepOptions) -> Iterator[Frame]:
    """One run: state in, logits out, commit, and only then the end."""
    state = runs.take(engine, ids)
    if engine.gears is not None:
        engine.gears.begin_run()
    try:
        end = yield from _steps(engine, runs, state, options)
    finally:
        runs.finish(state)
    if engine.gears is not None:
        end.extra["gears"] = engine.gears.run_report()
    yield end


def _steps(engine: Engine, runs: DecodeRuns, state: ModelState, options: StepOptions):
    """The loop; returns the run's End."""
    context = engine.context
    drawn = steps = 0
    started = None
    while True:
        yield from runs.emit(state, started)
        steps += 1
        if steps == options.steps:
            return End("length", drawn)
        following = runs.next()
        token, end = following.token, following.end
        if token is None:
            return End(end or "interrupt", drawn)
        started = time.perf_counter()
        drawn += 1
        if isinstance(token, int) and token >= engine.vocab:
            raise DataError(f"token {token} is outside the vocabulary of {engine.vocab}")
        full = context is not None and len(state.tokens) >= context
        if end is None and (full or drawn == options.max_tokens):
            end = "length"
        # A kept session holds every token of the answer, the last one too.
        if not full and (end is None or runs.keeps(state)):
            if engine.gears is not None:
                _shift(engine.gears, state, following)
            state.consume(engine, token)
        if end is not None:
            return End(end, drawn)


def _shift(gears: PrecisionManager, state: ModelState, following: Next) -> None:
    """Puts the model into the gear of the pass that comes now."""
    gear = gears.options.fixed or following.gear
    if gear is not None and gear != gears.gear:
        state.settle()  # the next step's graph was built of modules that leave
    gears.step(gear)
    if following.expected is not None and gears.options.fixed is None:
        gears.prepare(following.expected)
