"""Big and little experts: which K the passes of a model have (paper 002, section III).

Both models are one: the little one sends each token to fewer of the same experts, so there is
nothing to load for it and nothing to hold beside the big one. What is done where the little one is
not confident is for engine.big_little, which can take a state back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from toastkit.experts.common_part import CommonPart
from toastkit.experts.experts_options import ExpertsOptions
from toastkit.experts.pass_times import PassTimes, with_steps
from toastkit.experts.routers import MoEBlock, moe_blocks
from toastkit.holdings.holdings import Holdings
from toastkit.holdings.policy import Policy, Wish
from toastkit.text.exact_numbers import exact_number


class ExpertsPolicy(Policy):
    """Sets K for each pass: for a prompt as `options.prompt` says, else the little one or, with
    "big", the checkpoint's own. See holdings.policy.Policy; it moves no weights.

    k, little_k: experts that a token goes to in the big and in the little model; where layers
    differ, in those with the most. steps, fallbacks: of all runs. A step that the big model did
    again is one step and one fallback. common: what both passes of such a step have in common,
    which is kept of the first.
    """

    name = "experts"
    steps_together = True  # with MoBiLE, too: see batch.Batch.step

    def __init__(self, options: ExpertsOptions):
        self.options = options
        self.paths: list[str] = []
        self.blocks: list[MoEBlock] = []
        self.k = self.little_k = 0
        self.steps = self.fallbacks = 0
        self._little = False  # in force
        self.times = PassTimes()
        self._before = (0, 0)

    def attach(self, holdings: Holdings) -> None:
        """Finds the MoE blocks. Raises UsageError for a model without any, or with routers that are
        not known, and for a little K over its own."""
        self.blocks = moe_blocks(holdings.store)
        self._holdings, self._slots = holdings, holdings.slots
        self.common = CommonPart(holdings.store.model, self.blocks, holdings.streams)
        if self.options.threshold is not None:
            self._slots.foresight.watch()
        self.k = max(block.own_k for block in self.blocks)
        self.little_k = self.options.little_of(self.k)
        if self.options.runs_little:  # or it is the model as it is
            mode, gamma = self.options.mode, self.options.threshold
            tried = "" if gamma is None else f"-{exact_number(gamma)}"
            self.variant = f"{mode}{tried}-{self.little_k}of{self.k}-{self.options.prompt}"

    # ------------------------------------------------------------------------------------ deciding

    def decide(self, wish: Wish) -> bool:
        """Sets K for the pass that comes. False: the weights stay where they are."""
        mode = self.options.prompt if wish.prompt else self.options.mode
        self._set(mode != "big")
        return False

    @contextmanager
    def again(self, rows: Sequence[int] | None = None) -> Iterator[None]:
        """A step that was just run and taken back is run by the big model meanwhile; rows: of a
        batch, None for all. Where experts are in slots, those are read ahead that the routers of
        all layers name, asked with its K about what they saw: among them those that the little
        model wanted (section III-B)."""
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
        """A share is one of the block's own K; a number goes for all, as far as they have as
        many."""
        chosen = self.options.little_k
        if chosen is None or chosen.percent:
            return self.options.little_of(block.own_k)
        return min(self.little_k, block.own_k)

    @property
    def k_now(self) -> int:
        """K of the pass that comes."""
        return self.little_k if self._little else self.k

    @property
    def waits(self) -> bool:
        """Whether the host waits for the layers of a pass, which read what they run with."""
        return self._holdings.reads_in_passes

    # ------------------------------------------------------------------------------------ counting

    def begin_run(self) -> None:
        """Counts from here on."""
        self._before = (self.steps, self.fallbacks)
        self.times.begin_run()

    def count_step(self) -> None:
        """A step is being run."""
        self.steps += 1

    def run_report(self) -> dict[str, Any]:
        """Of the run since `begin_run`, see `_counted`."""
        steps, fallbacks = self._before
        counts = self.steps - steps, self.fallbacks - fallbacks
        return self._counted(*counts, self.times.means())

    def report(self) -> dict[str, Any]:
        """Of all runs, with the setting."""
        setting = {"setting": self.options.setting}
        means = self.times.means(run=False)
        return {**setting, **self._counted(self.steps, self.fallbacks, means)}

    def _counted(
        self, steps: int, fallbacks: int, means: dict[str, float | None]
    ) -> dict[str, Any]:
        """The mode with gamma, where it counts; both K; what `with_steps` has of the steps. Of
        MoBiLE the mean seconds of its passes too."""
        report: dict[str, Any] = {
            "mode": self.options.mode, "gamma": self.options.threshold, "k": self.k,
            "little_k": self.little_k,
        }  # fmt: skip
        if self.options.threshold is not None:
            if not self.waits:
                means["again"] = means["whole"]
            report["seconds"] = means
        return with_steps(report, steps, fallbacks)
