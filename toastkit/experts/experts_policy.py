"""Big and little experts: the K of each pass (paper 002, section III).

Both are one model: the little one sends each token to fewer of the same experts, so nothing is
loaded or held for it in addition. The fallback, if the little one is not confident, is in
engine.big_little, which can roll a state back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from toastkit.errors import UsageError
from toastkit.experts.common_part import CommonPart
from toastkit.experts.experts_options import ExpertsOptions
from toastkit.experts.pass_times import PassTimes, with_steps
from toastkit.experts.routers import MoEBlock, moe_blocks
from toastkit.holdings.holdings import Holdings
from toastkit.holdings.policy import Policy, Wish
from toastkit.text.exact_numbers import exact_number


class ExpertsPolicy(Policy):
    """Sets K for each pass: for prefill as `options.prompt` says, else the little one or, with
    "big", the checkpoint's own. See holdings.policy.Policy; it moves no weights.

    k, little_k: experts per token in the big and the little model; if layers differ, in those with
    the most. steps, fallbacks: of all runs; a step that the big model ran again is one step and one
    fallback. common: the common part of both passes of such a step.
    """

    name = "experts"
    steps_together = True  # with MoBiLE, too: see batch.Batch.step

    def __init__(self, options: ExpertsOptions):
        self.options = options
        self.paths: list[str] = []
        self.blocks: list[MoEBlock] = []
        self.k = self.little_k = 0
        self.steps = self.fallbacks = 0
        self._little = False  # the blocks have the little K now
        self.times = PassTimes()

    def attach(self, holdings: Holdings) -> None:
        """Find the MoE blocks. Raises UsageError for a model without any, with unknown routers, or
        with one expert a token, which has no little one, or if the little K is larger than K."""
        self.blocks = moe_blocks(holdings.store)
        self._holdings, self._slots = holdings, holdings.slots
        self.common = CommonPart(holdings.store.model, self.blocks, holdings.streams)
        if self.options.threshold is not None:
            self._slots.foresight.watch()
        self.k = max(block.own_k for block in self.blocks)
        self.little_k = self.options.little_of(self.k)
        if self.options.runs_little and self.k == 1:
            name = holdings.store.files.name
            raise UsageError(f"{name} has no little model: each token goes to one expert as it is")
        if self.options.runs_little:  # otherwise the results are the checkpoint's
            mode, gamma = self.options.mode, self.options.threshold
            tried = "" if gamma is None else f"-{exact_number(gamma)}"
            self.variant = f"{mode}{tried}-{self.little_k}of{self.k}-{self.options.prompt}"

    # ------------------------------------------------------------------------------------ deciding

    def decide(self, wish: Wish) -> bool:
        """Set K for the next pass. Returns False, as no forms change."""
        mode = self.options.prompt if wish.prompt else self.options.mode
        self._set(mode != "big")
        return False

    @contextmanager
    def again(self, rows: Sequence[int] | None = None) -> Iterator[None]:
        """Context in which the big model runs a step again that was just rolled back. rows: of a
        batch, None for all. With expert slots, the choices of all layers' routers for their last
        inputs, with the big K, are prefetched: they include the little model's (section III-B)."""
        before = self._little
        self._set(False)
        try:
            if self._slots.layers:
                foresight = self._slots.foresight
                foresight.tell(foresight.last_choices(rows))
            yield
        finally:
            self._set(before)

    def _set(self, little: bool) -> None:
        if little == self._little:
            return
        for block in self.blocks:
            block.set_k(self._little_of(block) if little else block.own_k)
        self._little = little

    def _little_of(self, block: MoEBlock) -> int:
        """The little K of a block: a percentage is of the block's own K; a number is the same for
        all, up to their own."""
        chosen = self.options.little_k
        if chosen is None or chosen.percent:
            return self.options.little_of(block.own_k)
        return min(self.little_k, block.own_k)

    @property
    def k_now(self) -> int:
        """The K of the next pass."""
        return self.little_k if self._little else self.k

    @property
    def waits(self) -> bool:
        """True if the host waits for a pass's layers, which read weights as they run."""
        return self._holdings.reads_in_passes

    # ------------------------------------------------------------------------------------ counting

    def begin_run(self) -> None:
        super().begin_run()
        self.times.begin_run()

    def count_step(self) -> None:
        self.steps += 1

    def run_report(self) -> dict[str, Any]:
        """A report of the run since `begin_run`, see `_counted`."""
        return self._counted(self._run_counts(), self.times.means())

    def report(self) -> dict[str, Any]:
        """A report of all runs, with the setting."""
        setting = {"setting": self.options.setting}
        return {**setting, **self._counted(self._counts(), self.times.means(run=False))}

    def _counts(self) -> dict[str, Any]:
        return {"steps": self.steps, "fallbacks": self.fallbacks}

    def _counted(self, counts: dict[str, Any], means: dict[str, float | None]) -> dict[str, Any]:
        """Mode, gamma if it applies, both K, `prompt` if the little model reads it, and the steps
        as in `with_steps`; for MoBiLE also the mean seconds of its passes."""
        report: dict[str, Any] = {
            "mode": self.options.mode, "gamma": self.options.threshold, "k": self.k,
            "little_k": self.little_k,
        }  # fmt: skip
        if self.options.prompt == "little":
            report["prompt"] = "little"
        if self.options.threshold is not None:
            if not self.waits:
                means["again"] = means["whole"]
            report["seconds"] = means
        return with_steps(report, **counts)
