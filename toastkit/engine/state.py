"""What a model has read so far, in memory: tokens, caches, the logits after the last token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np

from toastkit.engine.checkpoints import take_checkpoint
from toastkit.engine.lookahead import Lookahead, can_look_ahead
from toastkit.session.checkpoints import Checkpoint
from toastkit.session.directory import Session

if TYPE_CHECKING:
    from toastkit.engine.engine import Engine


@dataclass(eq=False)
class ModelState:
    """tokens: ids the caches hold; an id may still be a device array (). logits: (vocab,) float32
    after the last of them. session: where `commit` puts it, None for a state that is not kept.
    checkpoints: earlier positions at which it can be resumed, ascending."""

    cache: list
    tokens: list = field(default_factory=list)
    logits: mx.array | None = None
    session: Session | None = None
    checkpoints: list[Checkpoint] = field(default_factory=list)
    _ahead: Lookahead | None = field(default=None, repr=False)

    def run(self, engine: Engine, token: int | mx.array) -> None:
        """Runs one more token. Lazy: nothing is waited for."""
        if self._ahead is not None and isinstance(token, int):
            self.logits, self._ahead = self._ahead.run(token), None
        else:
            self.settle()
            self.logits = engine.step(token, self.cache)
        self.tokens.append(token)

    def submit(self) -> None:
        """Lets the device begin with what was consumed."""
        mx.async_eval(self.logits)

    def values(self) -> np.ndarray:
        """The logits as float32 (vocab,) of the host; waits for them."""
        return np.array(self.logits, copy=False)

    def look_ahead(self, engine: Engine) -> None:
        """Builds the graph of the next step already, whatever its token will be."""
        if self._ahead is None and can_look_ahead() and not engine.reads_on_host:
            self._ahead = Lookahead(engine, self.cache)

    def settle(self) -> None:
        """Takes back a step that was only looked ahead to."""
        if self._ahead is not None:
            self._ahead.discard()
            self._ahead = None

    def read_tokens(self) -> list[int]:
        """The tokens, all of them known; waits for those that are not yet."""
        self.tokens = [t if isinstance(t, int) else int(t.item()) for t in self.tokens]
        return self.tokens

    def commit(self) -> None:
        """Writes the state into its session, if it has one."""
        if self.session is None:
            return
        self.settle()
        tokens = self.read_tokens()
        logits = None if self.logits is None else np.array(self.logits, dtype=np.float32)
        kept = [point for point in self.checkpoints if point.count < len(tokens)]
        self.session.commit(tokens, self.cache, logits, kept)

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
    checkpoints = read.restore_checkpoints(count, engine.new_cache)
    cache = read.restore(count, engine.new_cache)
    if count in read.checkpoints:
        checkpoints.append(take_checkpoint(cache, count))  # or the next commit would drop it
    state = ModelState(cache, list(ids[:count]), session=session, checkpoints=checkpoints)
    if count == len(ids):
        stored = read.logits()
        assert stored is not None  # or reusable would have left a token to run
        state.logits = mx.array(stored)
    return state, count
