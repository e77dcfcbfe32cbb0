"""decode: one pass of the model per token, each told which token comes next. `logits` out."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator

from toastkit.engine.engine import Engine
from toastkit.engine.state import ModelState
from toastkit.errors import DataError
from toastkit.frames import End, Frame, Head, Prefilled, Tokens, unpack_ids
from toastkit.stages.options import Interrupt, StepOptions
from toastkit.stages.runs import DecodeRuns
from toastkit.stages.streams import whole_runs


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
    try:
        yield from _runs(frames, engine_for, runs, options, interrupt)
    finally:
        runs.close()


def _runs(
    frames: Iterable[Frame],
    engine_for: Callable[[Head], Engine],
    runs: DecodeRuns,
    options: StepOptions,
    interrupt: Interrupt,
) -> Iterator[Frame]:
    head: Head | None = None
    ids: list[int] = []
    for frame in whole_runs(frames, lambda f: isinstance(f, (Prefilled, End))):
        if isinstance(frame, Head):
            head, ids = runs.attach(frame), []
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


def _run(engine: Engine, runs: DecodeRuns, ids: list[int], options: StepOptions) -> Iterator[Frame]:
    """One run: state in, logits out, commit, and only then the end."""
    state = runs.take(engine, ids)
    try:
        end = yield from _steps(engine, runs, state, options)
    finally:
        runs.finish(state)
    yield end


def _steps(engine: Engine, runs: DecodeRuns, state: ModelState, options: StepOptions):
    """The loop; returns the run's End."""
    limits = [n for n in (options.max_tokens, options.steps) if n is not None]
    limit = min(limits, default=None)
    context = engine.config.context
    drawn = 0
    started = None
    while True:
        yield from runs.emit(state, started)
        token, end = runs.next()
        if token is None:
            return End(end or "interrupt", drawn)
        started = time.perf_counter()
        drawn += 1
        if isinstance(token, int) and token >= engine.vocab:
            raise DataError(f"token {token} is outside the vocabulary of {engine.vocab}")
        full = context is not None and len(state.tokens) >= context
        if end is None and (full or drawn == limit):
            end = "length"
        # A kept session holds every token of the answer, the last one too.
        if not full and (end is None or runs.keeps(state)):
            state.consume(engine, token)
        if end is not None:
            return End(end, drawn)
