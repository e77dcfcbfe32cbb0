"""prefill: runs prompts through the model into sessions. tokens in, `prefilled` out."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing

from toastkit.engine.engine import Engine
from toastkit.engine.state import ModelState, read_prompt, require_hit, restore_state
from toastkit.errors import DataError, UsageError
from toastkit.frames import End, Frame, Head, Prefilled, Tokens, unpack_ids
from toastkit.session.directory import Session
from toastkit.session.names import resolve
from toastkit.stages.options import Interrupt, ReadOptions
from toastkit.stages.runs import PrefillRuns
from toastkit.stages.streams import whole_runs


def prefill(
    frames: Iterable[Frame],
    engine_for: Callable[[Head], Engine],
    runs: PrefillRuns,
    options: ReadOptions,
    interrupt: Interrupt,
) -> Iterator[Frame]:
    """Reads each run's prompt and hands the state to decode.

    engine_for(head): the engine of that head's model. runs: where sessions are and who decodes.
    An interrupted prompt is committed as far as it got, and the run ends there.
    """
    with closing(runs):
        head: Head | None = None
        ids: list[int] = []
        for frame in whole_runs(frames, lambda f: isinstance(f, Tokens) and f.final):
            if isinstance(frame, Head):
                if options.fork is not None:
                    _open_fork(options.fork, frame).close()  # a missing one is noticed at once
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
    engine: Engine,
    runs: PrefillRuns,
    options: ReadOptions,
    interrupt: Interrupt,
) -> Iterator[Frame]:
    """One prompt: reuse what the session holds, run the rest, commit, hand over."""
    check_prompt(ids, engine)
    start = time.perf_counter()
    session = runs.session()
    state, cached = _restore(head, ids, engine, session, options)
    kept = options.fork is not None or (session is not None and not session.ephemeral)
    if options.report is not None and kept:
        options.report(cached, len(ids))

    def passed(done: int, total: int) -> bool:
        if options.progress is not None:
            options.progress(cached + done, cached + total)
        return bool(interrupt) or runs.abandoned()

    finished = read_prompt(engine, state, ids, chunk=options.chunk, progress=passed)
    state.commit()
    if not finished:
        state.close()
        yield End("interrupt", 0)
        return
    new = len(ids) - cached
    seconds = round(time.perf_counter() - start, 6)
    yield Prefilled(len(ids), new, cached, seconds, runs.announce(state))
    runs.hand_over(state)


def _open_fork(name: str, head: Head) -> Session:
    return Session.open(resolve(name), head.fingerprint, create=False, write=False)


def check_prompt(ids: list[int], engine: Engine) -> None:
    """Raises DataError for a prompt that the model cannot read."""
    if not ids:
        raise DataError("empty prompt")
    if max(ids) >= engine.vocab:
        raise DataError(f"token {max(ids)} is outside the vocabulary of {engine.vocab}")
    context = engine.config.context
    if context is not None and len(ids) > context:
        raise DataError(
            f"the prompt has {len(ids)} tokens, the model's context is {context}",
            hint="shorten it, or let toast-tokenize --truncate do so",
        )


def _restore(
    head: Head, ids: list[int], engine: Engine, session: Session | None, options: ReadOptions
) -> tuple[ModelState, int]:
    """The state to continue from: the fork's, else the session's own."""
    if options.fork is None:
        state, cached = restore_state(engine, session, ids)
        if options.require_hit:
            if session is None or session.ephemeral:
                raise UsageError("--require-hit needs a --session or a --fork")
            require_hit(session.path.name, cached, session.n_past)
        return state, cached
    with _open_fork(options.fork, head) as source:
        state, cached = restore_state(engine, session, ids, source)
        if options.require_hit:
            require_hit(source.path.name, cached, source.n_past)
    return state, cached
