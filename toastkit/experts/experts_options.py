"""Options of experts, as plain data: what the flags are parsed into."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from toastkit.errors import UsageError, check_choice
from toastkit.text.exact_numbers import exact_number, exact_size

MODES = ("big", "little", "mobile")
PROMPTS = ("big", "little")
GAMMA = 0.7  # of the paper, for all models and tasks (section V)


class LittleK(NamedTuple):
    """A number of experts per token, or a percentage of the model's own K."""

    amount: float
    percent: bool = False

    def __str__(self) -> str:
        """The text of the flag."""
        return exact_number(self.amount) + "%" * self.percent

    def of(self, own_k: int) -> int:
        """The K of a model whose own is `own_k`: a percentage is rounded up, to 1 at least."""
        if not self.percent:
            return int(self.amount)
        return max(1, min(own_k, -int(-own_k * self.amount // 100)))


HALF = LittleK(50, True)  # of the paper (section III)


@dataclass(frozen=True)
class ExpertsOptions:
    """Which model runs a step (paper 002, section III): big is the checkpoint as it is, little the
    same with fewer experts per token, mobile the little one if it is confident and the big one
    otherwise. gamma: the confidence above which the little model's step is kept. little_k: its K;
    None for half, rounded up. prompt: which model runs prefill.
    """

    mode: str = "big"
    gamma: float = GAMMA
    little_k: LittleK | None = None
    prompt: str = "big"

    def __post_init__(self) -> None:
        """Raise UsageError for invalid options."""
        check_choice("experts mode", self.mode, MODES)
        check_choice("experts prompt", self.prompt, PROMPTS)
        if not 0 <= self.gamma <= 1:  # nor NaN
            raise UsageError(f"gamma {exact_number(self.gamma)} is not in [0, 1]")
        if self.little_k is not None and not self.little_k.amount > 0:
            raise UsageError(f"--little-k {self.little_k}: a token goes to one expert at least")
        if self.little_k is not None and self.little_k.percent and self.little_k.amount > 100:
            raise UsageError(f"--little-k {self.little_k} is more than 100%")

    @property
    def runs_little(self) -> bool:
        """True if a pass may use fewer experts than the checkpoint's own K."""
        return self.mode != "big" or self.prompt == "little"

    @property
    def threshold(self) -> float | None:
        """The confidence above which a little step is kept; None outside mobile mode."""
        return self.gamma if self.mode == "mobile" else None

    def little_of(self, own_k: int) -> int:
        """The little model's K, given the big one's. Raises UsageError if it is larger."""
        little = (self.little_k or HALF).of(own_k)
        if little > own_k:
            raise UsageError(f"--little-k {little} is more than the model's K of {own_k}")
        return little

    @property
    def setting(self) -> str:
        """The options as after --experts on the command line, without defaults: equal options give
        equal text."""
        text = f"mobile:{exact_number(self.gamma)}" if self.mode == "mobile" else self.mode
        if self.runs_little and self.little_k not in (None, HALF):
            text += f" --little-k {self.little_k}"
        if self.prompt != ExpertsOptions.prompt:
            text += f" --prefill-experts {self.prompt}"
        return text


@dataclass(frozen=True)
class SlotOptions:
    """How many slots. kind: auto, as many as memory allows; slots, a number per layer; or bytes, as
    many as fit into so many for all layers. amount: of the last two. prefetch: how many layers
    ahead routers are asked, with the current layer's input, for experts to prefetch."""

    kind: str = "auto"
    amount: int = 0
    prefetch: str = "off"

    def __str__(self) -> str:
        """The text of the flag."""
        if self.kind == "bytes":
            return exact_size(self.amount)
        return self.kind if self.kind == "auto" else str(self.amount)

    @property
    def setting(self) -> str:
        """The options as on the command line, without defaults."""
        ahead = "" if self.prefetch == "off" else f" --expert-prefetch {self.prefetch}"
        return f"--expert-slots {self}{ahead}"
