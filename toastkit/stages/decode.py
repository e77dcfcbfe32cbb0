"""decode: one pass of the model per token, each told which token comes next. `logits` out."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator

from toastkit.engine.step_engine import State, StepEngine, Wish
from toastkit.errors import NoInputError
from toastkit.frames import End, Frame, Head, Prefilled, Tokens, unpack_ids
from toastkit.interrupts import Interrupt
from toastkit.model.config import check_ids
from toastkit.stages.run.protocol import DecodeRun, DecodeRuns
from toastkit.stages.run.settings import StepOptions
from toastkit.stages.streams import whole_runs


def decode(
    frames: Iterable[Frame],
    engine_for: Callable[[Head], StepEngine],
    runs: DecodeRuns,
    options: StepOptions,
    interrupt: Interrupt,
) -> Iterator[Frame]:
    """Emit the logits of each step and wait for the next token.

    engine_for(head): the engine of that head's model. runs: where the state comes from, who chooses
    the next token, and how logits travel. The state is committed when the run ends, however it
    ends: a reader that goes away closes this generator.
    """
    run: DecodeRun | None = None
    ids: list[int] = []
    whole = whole_runs(frames, lambda f: isinstance(f, (Prefilled, End)))
    try:
        for frame in whole:
            if isinstance(frame, Head):
                run, ids = _attach(runs, frame, whole), []
                yield run.head
            elif run is None:
                yield frame
            elif isinstance(frame, Tokens):
                ids += unpack_ids(frame.ids)
                yield frame
                if frame.final:
                    engine_for(run.head)  # loads while prefill computes
            elif isinstance(frame, Prefilled):
                frame.logits = None
                yield frame
                yield from _run(engine_for(run.head), run, ids, options)
                run = None
                if interrupt:
                    return
            else:
                if isinstance(frame, End):
                    run.close()
                    run = None
                yield frame
    finally:
        if run is not None:
            run.close()


def _attach(runs: DecodeRuns, head: Head, rest: Iterator[Frame]) -> DecodeRun:
    """Attach to a run. If it is already gone, the error that ended prefill is next in the stream,
    and takes precedence."""
    try:
        return runs.attach(head)
    except NoInputError:
        while not isinstance(next(rest, None), (Prefilled, End, type(None))):
            pass
        raise


def _run(
    engine: StepEngine, run: DecodeRun, ids: list[int], options: StepOptions
) -> Iterator[Frame]:
    """One run: state in, logits out, commit, and only then the end."""
    state = run.take(engine, ids)
    engine.begin_run()
    fallbacks: list[bool] = []
    kept, begun = run.keeps(state), len(state.tokens)
    try:
        end = yield from _steps(engine, run, state, options, fallbacks)
    finally:
        run.finish(state)
    if kept and state.passed is not None and len(fallbacks) < len(state.tokens) - begun:
        fallbacks.append(state.passed.fallback)  # of the last token, which only the session needs
    end.extra.update(engine.run_report())
    if "experts" in end.extra:
        report = end.extra["experts"]  # restricted to the steps of this run:
        from toastkit.experts.pass_times import with_steps

        end.extra["experts"] = with_steps(report, len(fallbacks), sum(fallbacks))
    yield end


def _steps(
    engine: StepEngine, run: DecodeRun, state: State, options: StepOptions, fallbacks: list[bool]
):
    """The loop; return the run's End. fallbacks: collects, per emitted step, whether expert
    selection fell back. (The model may take steps for others meanwhile.)"""
    context = engine.context
    drawn = steps = 0
    started, unread = None, False
    while True:
        yield from run.emit(state, started)
        if state.passed is not None:
            fallbacks.append(state.passed.fallback)
        steps += 1
        last = steps == options.steps
        if last and not run.answers:  # no token for it need be sent
            return End("length", drawn)
        following = run.next()
        token, end = following.token, following.end
        if token is None:
            if unread and end != "interrupt" and not run.keeps(state):
                del fallbacks[-1:]  # a step after the last sampled token
                engine.uncount_step()
            return End(end or "interrupt", drawn)
        started = time.perf_counter()
        drawn += 1
        if isinstance(token, int):
            check_ids((token,), engine.vocab)
        full = context is not None and len(state.tokens) >= context
        if end is None and (full or last or drawn == options.max_tokens):
            end = "length"
        # A kept session holds every token of the answer, the last one too.
        if not full and (end is None or run.keeps(state)):
            run.consume(state, token, Wish(following.gear, following.expected))
            unread = not isinstance(token, int)  # its end is noticed a step late
        if end is not None:
            return End(end, drawn)
