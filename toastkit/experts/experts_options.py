"""How many experts a token goes to, as plain data: what flags are parsed into."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from toastkit.errors import UsageError, check_choice
from toastkit.text.exact_numbers import exact_number

MODES = ("big", "little", "mobile")
PROMPTS = ("big", "little")
GAMMA = 0.7  # of the paper, for all models and tasks (section V)


class LittleK(NamedTuple):
    """A number of experts, or a share in per cent of those that the model goes to by itself."""

    amount: float
    percent: bool = False

    def __str__(self) -> str:
        """As the flag has it."""
        return exact_number(self.amount) + "%" * self.percent

    def of(self, own_k: int) -> int:
        """The K that this is, where the model's own is `own_k`: a share is rounded up, and 1 at
        least."""
        if not self.percent:
            return int(self.amount)
        return max(1, min(own_k, -int(-own_k * self.amount // 100)))


HALF = LittleK(50, True)  # of the paper (section III)


@dataclass(frozen=True)
class ExpertsOptions:
    """Which model runs a step (paper 002, section III): big is the checkpoint as it is, little the
    same with fewer experts a token, mobile the little one where it is confident and the big one
    where it is not. gamma: the confidence above which the little model's step is kept. little_k:
    its experts; None for half, rounded up. prompt: which model reads the prompt.
    """

    mode: str = "big"
    gamma: float = GAMMA
    little_k: LittleK | None = None
    prompt: str = "big"

    def __post_init__(self) -> None:
        """Raises UsageError."""
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
        """Whether a pass may have fewer experts than the checkpoint has it."""
        return self.mode != "big" or self.prompt == "little"

    @property
    def threshold(self) -> float | None:
        """The confidence above which a little step is kept, None where none is looked at."""
        return self.gamma if self.mode == "mobile" else None

    def little_of(self, own_k: int) -> int:
        """Experts of the little model where the big one's K is that. Raises UsageError for more
        than it has."""
        little = (self.little_k or HALF).of(own_k)
        if little > own_k:
            raise UsageError(f"--little-k {little} is more than the model's K of {own_k}")
        return little

    @property
    def setting(self) -> str:
        """All that stands after --experts on the command line, defaults left out: two that are the
        same say the same."""
        said = f"mobile:{exact_number(self.gamma)}" if self.mode == "mobile" else self.mode
        if self.runs_little and self.little_k is not None:
            said += f" --little-k {self.little_k}"
        if self.prompt != ExpertsOptions.prompt:
            said += f" --prefill-experts {self.prompt}"
        return said
