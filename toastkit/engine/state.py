"""What a model has read so far, in memory: tokens, caches, the logits after the last token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import mlx.core as mx

from toastkit.engine.lookahead import Lookahead
from toastkit.gears.entropy_graph import NativeSummary
from toastkit.native.kv_caches import nbytes_of

if TYPE_CHECKING:
    from toastkit.session.directory import Session
    from toastkit.session.ring import Summary
    from toastkit.session.savepoints import Savepoint


class Caches(list):
    """The caches of a state, one or several per layer: see Engine.counted. Some may be None."""

    @property
    def nbytes(self) -> int:
        """Bytes of their arrays on the device."""
        return sum(map(nbytes_of, self))


class Passed(NamedTuple):
    """How a step was done. k: experts per token in the pass that counts. fallback: that pass was
    the big model's, after a rejected one of the little model."""

    k: int
    fallback: bool


@dataclass(eq=False)
class ModelState:
    """The data that an Engine works on.

    cache: of the model's layers. tokens: ids that the caches hold; an id may still be a device
    array (). logits: (vocab,) float32 after the last of them, lazy. session: where `commit` writes
    it, None for a state that is not kept. savepoints: earlier positions at which it can be resumed,
    ascending. ahead: the next step, if built already. passed: how the last step was done, if
    experts were chosen for it; None for a prompt. experts: the report of expert slots on it, None
    if there is nothing to report.
    """

    cache: list
    tokens: list = field(default_factory=list)
    logits: mx.array | None = None
    session: Session | None = None
    savepoints: list[Savepoint] = field(default_factory=list)
    ahead: Lookahead | None = field(default=None, repr=False)
    passed: Passed | None = None
    experts: dict[str, Any] | None = None
    _summary: NativeSummary | None = field(default=None, repr=False)

    def next_logits(
        self, step: Callable[[int | mx.array, list], mx.array], token: int | mx.array
    ) -> mx.array:
        """Return the logits (vocab,) float32 after one more token, lazy; the caches count it from
        now on. step(token, cache): the pass, if it was not built ahead."""
        ahead = self.ahead
        if ahead is not None and isinstance(token, int):
            self.ahead, self._summary = None, ahead.summary
            return ahead.run(token)
        self.take_back()
        self._summary = None
        return step(token, self.cache)

    def submit(self, measured: bool = False) -> None:
        """Submit what was consumed to the device. measured: submit its summary too."""
        mx.async_eval(self.logits)
        if measured and self._summary is None:
            self._summary = NativeSummary(self.logits)  # type: ignore[arg-type]

    def hand_over_ahead(self, measured: bool = False) -> None:
        """Submit the step that was built ahead; the device waits for its token. Until that is
        consumed, or the step is taken back, nothing else may be asked of the device."""
        if self.ahead is not None:
            self.ahead.hand_over(measured)

    def summary(self) -> Summary | None:
        """The summary of logits that were submitted to be measured; waits for it. None if it was
        not computed: see NativeSummary."""
        return None if self._summary is None else self._summary.read()

    def values(self) -> memoryview[float]:
        """The logits, float32 (vocab,), in host memory; waits for them."""
        return memoryview(self.logits)  # type: ignore[arg-type]

    def take_back(self) -> None:
        """Roll back a step that was only built ahead."""
        if self.ahead is not None:
            self.ahead.discard()
            self.ahead = None

    def read_tokens(self) -> list[int]:
        """Return the tokens as ints; waits for those still being computed."""
        self.tokens = [t if isinstance(t, int) else int(t.item()) for t in self.tokens]
        return self.tokens

    def write_ahead(self, room: int) -> None:
        """Write what its session's next commit would, as far as known, while a prompt of `room`
        tokens is read; the commit follows after the last of them."""
        if self.session is not None and self.logits is None:
            self.session.write_ahead(self.read_tokens(), self.cache, room)

    def commit(self) -> None:
        """Write the state into its session, if it has one."""
        if self.session is None:
            return
        self.take_back()
        tokens = self.read_tokens()
        logits = None if self.logits is None else self.values()
        kept = [point for point in self.savepoints if point.count < len(tokens)]
        self.session.commit(tokens, self.cache, logits, kept)

    def close(self) -> None:
        """Close the session; an ephemeral one is deleted."""
        self.take_back()
        if self.session is not None:
            self.session.close()
            self.session = None
