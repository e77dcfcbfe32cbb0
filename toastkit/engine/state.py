"""What a model has read so far, in memory: tokens, caches, the logits after the last token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from toastkit.engine.engine import Engine
from toastkit.engine.lookahead import Lookahead, can_look_ahead
from toastkit.errors import NoInputError
from toastkit.session.directory import Session


@dataclass
class ModelState:
    """tokens: ids the caches hold; an id may still be a device array (). logits: (vocab,) float32
    after the last of them. session: where `commit` puts it, None for a state that is not kept."""

    cache: list
    tokens: list = field(default_factory=list)
    logits: mx.array | None = None
    session: Session | None = None
    _ahead: Lookahead | None = field(default=None, repr=False)

    def consume(self, engine: Engine, token: int | mx.array) -> None:
        """Runs one more token. Lazy: nothing is waited for."""
        if self._ahead is not None and isinstance(token, int):
            self.logits = self._ahead.run(token)
            self._ahead = None
        else:
            self.settle()
            self.logits = engine.step(token, self.cache)
        self.tokens.append(token)

    def look_ahead(self, engine: Engine) -> None:
        """Builds the graph of the next step already, whatever its token will be."""
        if self._ahead is None and can_look_ahead() and not engine.reads_on_host:
            self._ahead = Lookahead(engine, self.cache)

    def settle(self) -> None:
        """Takes back a step that was only looked ahead to."""
        if self._ahead is not None:
            self._ahead.discard()
            self._ahead = None

    def commit(self) -> None:
        """Writes the state into its session, if it has one."""
        if self.session is None:
            return
        self.settle()
        self.tokens = [t if isinstance(t, int) else int(t.item()) for t in self.tokens]
        logits = None if self.logits is None else np.array(self.logits, dtype=np.float32)
        self.session.commit(self.tokens, self.cache, logits)

    def close(self) -> None:
        """Lets the session go; an ephemeral one vanishes."""
        if self.session is not None:
            self.session.close()
            self.session = None


def restore_state(
    engine: Engine, session: Session | None, ids: Sequence[int], source: Session | None = None
) -> tuple[ModelState, int]:
    """The state from which a prompt can be continued, and how many of its tokens it holds.

    ids: the prompt's tokens. source: the session to read, where it is not the one to write.
    When the whole prompt is stored with its logits nothing is left to run; otherwise at least one
    token is, because logits come from running it.
    """
    read = source or session
    count = 0 if read is None else read.reusable(ids)
    if read is None or count == 0:
        return ModelState(engine.new_cache(), session=session), 0
    state = ModelState(read.restore(count, engine.new_cache), list(ids[:count]), session=session)
    if count == len(ids):
        stored = read.logits()
        assert stored is not None  # or reusable would have left a token to run
        state.logits = mx.array(stored)
    return state, count


def read_prompt(
    engine: Engine,
    state: ModelState,
    ids: Sequence[int],
    *,
    chunk: int | None = None,
    progress: Callable[[int, int], bool] | None = None,
) -> bool:
    """Prefills what the state does not hold of the prompt yet; False when it was stopped early."""
    done = len(state.tokens)
    rest = ids[done:]
    if not rest:
        return True
    count, logits = engine.prefill(rest, state.cache, chunk=chunk, progress=progress)
    state.tokens.extend(rest[:count])
    state.logits = logits
    return logits is not None


def require_hit(session_name: str, cached: int, stored: int) -> None:
    """Raises NoInputError unless every stored token could be reused."""
    if stored == 0:
        raise NoInputError(f"session {session_name} is empty", hint="--require-hit was given")
    if cached < stored:
        raise NoInputError(
            f"session {session_name} holds {stored} tokens that do not begin this prompt",
            hint="--require-hit was given; without it the prompt is read anew",
        )
