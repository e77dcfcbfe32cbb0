"""prefill: run prompts through the model into sessions. tokens in, `prefilled` out."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing

from toastkit.engine.step_engine import StepEngine
from toastkit.errors import DataError
from toastkit.frames import End, Frame, Head, Prefilled, Tokens, unpack_ids
from toastkit.interrupts import Interrupt
from toastkit.model.config import check_ids
from toastkit.stages.run.protocol import PrefillRuns, check_vocab, open_fork
from toastkit.stages.run.settings import ReadOptions
from toastkit.stages.streams import whole_runs
from toastkit.text.exact_numbers import counted


def prefill(
    frames: Iterable[Frame],
    engine_for: Callable[[Head], StepEngine],
    runs: PrefillRuns,
    options: ReadOptions,
    interrupt: Interrupt,
) -> Iterator[Frame]:
    """Read each run's prompt and hand the state to decode.

    engine_for(head): the engine of that head's model. runs: where sessions are and who decodes. An
    interrupted prompt is committed as far as it got, and the run ends there.
    """
    with closing(runs):
        head: Head | None = None
        ids: list[int] = []
        for frame in whole_runs(frames, lambda f: isinstance(f, Tokens) and f.final):
            if isinstance(frame, Head):
                if options.fork is not None:
                    open_fork(options.fork, frame).close()  # report a missing one at once
                head, ids = runs.begin(frame), []
                yield head
            elif isinstance(frame, Tokens):
                ids += unpack_ids(frame.ids)
                yield frame
                if frame.final:
                    assert head is not None  # whole_runs: a head comes first
                    yield from _read(head, ids, engine_for(head), runs, options, interrupt)
                    if interrupt:
                        return
            else:
                yield frame


def _read(
    head: Head,
    ids: list[int],
    engine: StepEngine,
    runs: PrefillRuns,
    options: ReadOptions,
    interrupt: Interrupt,
) -> Iterator[Frame]:
    """One prompt: reuse what the session holds, run the rest, commit, hand over."""
    check_vocab(head, engine)
    check_prompt(ids, engine)
    start = time.perf_counter()
    session = runs.session()
    state, cached = runs.restore(engine, head, ids, options)
    kept = options.fork is not None or (session is not None and not session.ephemeral)
    if options.report is not None and kept:
        options.report(cached, len(ids))

    if options.progress is not None:
        options.progress(cached, len(ids))
    for done in engine.reading(state, ids, lambda: runs.pass_size(state) or options.chunk):
        if options.progress is not None:
            options.progress(done, len(ids))
        yield from runs.passed(state)
        if interrupt or runs.abandoned():
            break
    state.commit()
    if len(state.tokens) < len(ids):
        state.close()
        yield End("interrupt", 0)
        return
    new = len(ids) - cached
    seconds = round(time.perf_counter() - start, 6)
    yield Prefilled(len(ids), new, cached, seconds, runs.announce(state))
    runs.hand_over(state)


def check_prompt(ids: list[int], engine: StepEngine) -> None:
    """Raise DataError for a prompt that the model cannot read."""
    if not ids:
        raise DataError("empty prompt")
    check_ids(ids, engine.vocab)
    context = engine.context
    if context is not None and len(ids) > context:
        raise DataError(
            f"the prompt has {counted(len(ids), 'token')}, the model's context is {context}",
            hint="shorten it, or let toast-tokenize --truncate do so",
        )
