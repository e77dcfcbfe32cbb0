"""What the stages ask of a model that takes steps, whoever computes it. Imports no MLX.

`engine.Engine` is a model of this process, `remote.RemoteEngine` a daemon's. What a model has read
is a state, which is the engine's: the stages look at it and hand it back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from toastkit.holdings.policy import NO_WISH, Wish

if TYPE_CHECKING:
    from toastkit.session.directory import Session


class State(Protocol):
    """What a model has read.

    tokens: ids that the caches hold, each an int or a device array () that may not be known yet.
    session: where `commit` puts the state, None for one that is not kept. passed: how the last step
    was done, state.Passed, where experts were chosen for it. experts: what slots have to say of
    it, None where there is nothing to say.
    """

    tokens: list[Any]
    session: Session | None
    passed: Any
    experts: dict[str, Any] | None

    @property
    def logits(self) -> Any:
        """float32 (vocab,) after the last token, None while the prompt is read."""

    def submit(self, measured: bool = False) -> None:
        """Lets the device begin with what was consumed. measured: and then with the entropy of the
        logits, where it does that sooner than the host."""

    def hand_over_ahead(self, measured: bool = False) -> None:
        """Where the engine has looked ahead to a step, and the device can wait for its token: hands
        it over, as of `submit`. Nothing else may be asked of the device until that is consumed."""

    def entropy(self) -> float | None:
        """In bits, of logits that were submitted to be measured; waits for it. None where it was
        not computed, or cannot be before they are made finite."""

    def values(self) -> memoryview[float]:
        """The logits, float32 (vocab,), where the host can read them; waits for them."""

    def commit(self) -> None:
        """Writes the state into its session, if it has one."""

    def close(self) -> None:
        """Lets the session go; an ephemeral one vanishes."""


S = TypeVar("S", bound=State)


class StepEngine(Protocol[S]):
    """A model, with states of a type S.

    vocab: entries in the logits. context: tokens that the model can read, None where that is not
    known. device: "cpu" or "gpu". dtype: of activations, None for the checkpoint's own.
    """

    device: str
    dtype: str | None

    @property
    def vocab(self) -> int: ...

    @property
    def context(self) -> int | None: ...

    def restore(
        self, session: Session | None, ids: Sequence[int], source: Session | None = None
    ) -> tuple[S, int]:
        """The state from which a prompt can be continued, and how many of its tokens it holds.

        ids: the prompt's tokens. session: where it is kept. source: the session to read, where it
        is another one."""

    def reading(
        self, state: S, ids: Sequence[int], chunk: Callable[[], int | None] = lambda: None
    ) -> Iterator[int]:
        """Reads what the state does not hold of the prompt yet; yields the number of tokens it
        holds after each pass. Until the last pass the state has no logits. chunk(): tokens of the
        next pass at most, None for what suits the device."""

    def begin_run(self) -> None:
        """A run begins: what `run_report` counts is counted from here on."""

    def consume(self, state: S, token: Any, wish: Wish = NO_WISH) -> None:
        """Runs one more token, an int or a device array (). Lazy: nothing is waited for."""

    def look_ahead(self, state: S) -> None:
        """Builds the next step already, whatever its token will be, where that is possible."""

    def run_report(self) -> dict[str, Any]:
        """What there is to say of the run at its end, by name: its `gears`, where it has any."""

    def close(self) -> None:
        """Lets go of what is held open."""
