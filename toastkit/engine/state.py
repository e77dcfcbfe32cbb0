"""What a model has read so far, in memory: tokens, caches, the logits after the last token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import mlx.core as mx

from toastkit.engine.lookahead import Lookahead
from toastkit.gears.entropy_graph import NativeEntropy
from toastkit.native.kv_caches import nbytes_of

if TYPE_CHECKING:
    from toastkit.session.directory import Session
    from toastkit.session.savepoints import Savepoint


class Caches(list):
    """The caches of a state, one a layer, or several: see Engine.counted. Some may be None."""

    @property
    def nbytes(self) -> int:
        """Bytes of their arrays on the device."""
        return sum(map(nbytes_of, self))


class Passed(NamedTuple):
    """How a step was done. k: experts that a token went to in the pass that counts. fallback: the
    big model's, after a little one's that does not."""

    k: int
    fallback: bool


@dataclass(eq=False)
class ModelState:
    """A state is what an Engine works on; by itself it does nothing but be kept.

    cache: of the model's layers. tokens: ids that the caches hold; an id may still be a device
    array (). logits: (vocab,) float32 after the last of them, lazy. session: where `commit` puts
    it, None for a state that is not kept. savepoints: earlier positions at which it can be resumed,
    ascending. ahead: the next step, if it was looked ahead to. passed: how the last step was done,
    where experts were chosen for it; None for a prompt. experts: what slots have to say of it, None
    where there is nothing to say.
    """

    cache: list
    tokens: list = field(default_factory=list)
    logits: mx.array | None = None
    session: Session | None = None
    savepoints: list[Savepoint] = field(default_factory=list)
    ahead: Lookahead | None = field(default=None, repr=False)
    passed: Passed | None = None
    experts: dict[str, Any] | None = None
    _entropy: NativeEntropy | None = field(default=None, repr=False)

    def next_logits(
        self, step: Callable[[int | mx.array, list], mx.array], token: int | mx.array
    ) -> mx.array:
        """The logits (vocab,) float32 after one more token, lazy; the caches count it from now on.
        step(token, cache): the pass, where it was not looked ahead to."""
        ahead = self.ahead
        if ahead is not None and isinstance(token, int):
            self.ahead, self._entropy = None, ahead.entropy
            return ahead.run(token)
        self.take_back()
        self._entropy = None
        return step(token, self.cache)

    def submit(self, measured: bool = False) -> None:
        """Lets the device begin with what was consumed. measured: and then with the entropy."""
        mx.async_eval(self.logits)
        if measured and self._entropy is None:
            self._entropy = NativeEntropy(self.logits)  # type: ignore[arg-type]

    def hand_over_ahead(self, measured: bool = False) -> None:
        """Hands the step that was looked ahead to to the device, which waits for its token; until
        that is consumed, or the step is taken back, nothing else may be asked of it."""
        if self.ahead is not None:
            self.ahead.hand_over(measured)

    def entropy(self) -> float | None:
        """In bits, of the logits that were submitted to be measured; waits for it. None where it
        was not computed: see NativeEntropy."""
        return None if self._entropy is None else self._entropy.bits()

    def values(self) -> memoryview[float]:
        """The logits, float32 (vocab,), where the host can read them; waits for them."""
        return memoryview(self.logits)  # type: ignore[arg-type]

    def take_back(self) -> None:
        """Takes back a step that was only looked ahead to."""
        if self.ahead is not None:
            self.ahead.discard()
            self.ahead = None

    def read_tokens(self) -> list[int]:
        """The tokens, all of them known; waits for those that are not yet."""
        self.tokens = [t if isinstance(t, int) else int(t.item()) for t in self.tokens]
        return self.tokens

    def write_ahead(self, room: int) -> None:
        """Writes what its session's next commit would, as far as that is known, while a prompt of
        `room` tokens is read; after the last of them the commit follows."""
        if self.session is not None and self.logits is None:
            self.session.write_ahead(self.read_tokens(), self.cache, room)

    def commit(self) -> None:
        """Writes the state into its session, if it has one."""
        if self.session is None:
            return
        self.take_back()
        tokens = self.read_tokens()
        logits = None if self.logits is None else self.values()
        kept = [point for point in self.savepoints if point.count < len(tokens)]
        self.session.commit(tokens, self.cache, logits, kept)

    def close(self) -> None:
        """Lets the session go; an ephemeral one vanishes."""
        self.take_back()
        if self.session is not None:
            self.session.close()
            self.session = None
