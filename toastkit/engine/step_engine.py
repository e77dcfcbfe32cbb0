"""The interface of a model that takes steps, as the stages use it. Imports no MLX.

`engine.Engine` is a model of this process, `remote.RemoteEngine` a daemon's. What a model has read
is a state, owned by the engine: the stages inspect it and pass it back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from toastkit.holdings.policy import NO_WISH, Wish

if TYPE_CHECKING:
    from toastkit.session.directory import Session
    from toastkit.session.ring import Summary


class State(Protocol):
    """What a model has read.

    tokens: ids that the caches hold, each an int or a device array () that may not be computed yet.
    session: where `commit` writes the state, None for one that is not kept. passed: how the last
    step was done, state.Passed, if experts were chosen for it. experts: the report of expert slots
    on it, None if there is nothing to report.
    """

    tokens: list[Any]
    session: Session | None
    passed: Any
    experts: dict[str, Any] | None

    @property
    def logits(self) -> Any:
        """float32 (vocab,) after the last token, None while the prompt is read."""

    def submit(self, measured: bool = False) -> None:
        """Submit what was consumed to the device. measured: submit the summary of the logits too,
        if the device computes it sooner than the host."""

    def hand_over_ahead(self, measured: bool = False) -> None:
        """If the engine has built a step ahead and the device can wait for its token, submit it, as
        `submit` does. Nothing else may be asked of the device until that token is consumed."""

    def summary(self) -> Summary | None:
        """The summary of logits that were submitted to be measured; waits for it. None if it was
        not computed, or cannot be before the logits are made finite."""

    def values(self) -> memoryview[float]:
        """The logits, float32 (vocab,), in host memory; waits for them."""

    def commit(self) -> None:
        """Write the state into its session, if it has one."""

    def close(self) -> None:
        """Close the session; an ephemeral one is deleted."""


S = TypeVar("S", bound=State)


class StepEngine(Protocol[S]):
    """A model, with states of a type S.

    vocab: entries in the logits. context: tokens that the model can read, None if unknown. device:
    "cpu" or "gpu". dtype: of activations, None for the checkpoint's own.
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
        """Return the state from which a prompt can be continued, and how many of its tokens it
        holds.

        ids: the prompt's tokens. session: where it is kept. source: the session to read, if it is
        another one.
        """

    def reading(
        self, state: S, ids: Sequence[int], chunk: Callable[[], int | None] = lambda: None
    ) -> Iterator[int]:
        """Prefill what the state does not hold of the prompt yet; yield the number of tokens it
        holds after each pass. Until the last pass the state has no logits. chunk(): most tokens of
        the next pass, None for what suits the device."""

    def begin_run(self) -> None:
        """Begin a run: `run_report` counts from here on."""

    def consume(self, state: S, token: Any, wish: Wish = NO_WISH) -> None:
        """Run one more token, an int or a device array (). Lazy: nothing is waited for."""

    def uncount_step(self) -> None:
        """Leave the last step out of the run's report: its token was after the run's end."""

    def look_ahead(self, state: S) -> None:
        """Build the next step for a token to come, if that is possible."""

    def run_report(self) -> dict[str, Any]:
        """Return the reports on the run at its end, by name: its `gears`, if it has any."""

    def close(self) -> None:
        """Close what is held open."""
