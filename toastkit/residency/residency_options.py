"""Which layers are to stay on the device, as plain data: what flags are parsed into."""

from __future__ import annotations

from dataclasses import dataclass

from toastkit.errors import UsageError, check_choice
from toastkit.text.exact_numbers import exact_number, exact_size

KINDS = ("all", "auto", "layers", "percent", "bytes")
COUNTED = ("layers", "percent")
PLACEMENTS = ("first", "last", "interleaved")
PRIORITIES = ("max-tps", "balanced", "max-context")
# Tokens whose keys and values have room kept for them (paper 001, section 3.4); None: as many as
# the model can read.
RESERVED_TOKENS = {"max-tps": 512, "balanced": 1024, "max-context": None}


@dataclass(frozen=True)
class ResidencyOptions:
    """kind: all layers stay, as many as memory allows while it runs, a number of layers, a share of
    them in per cent, or as many as fit into bytes of the device together with all else. amount: of
    the last three. placement: which of them stay. priority: what "auto" keeps memory for.
    context: tokens that "max-context" expects, None for as many as the model can read.
    """

    kind: str = "all"
    amount: float = 0
    placement: str = "interleaved"
    priority: str = "balanced"
    context: int | None = None

    def __post_init__(self) -> None:
        """Raises UsageError."""
        check_choice("residency", self.kind, KINDS)
        check_choice("placement", self.placement, PLACEMENTS)
        check_choice("priority", self.priority, PRIORITIES)
        if self.amount < 0 or (self.kind == "percent" and self.amount > 100):
            raise UsageError(f"no such residency: {exact_number(self.amount)} {self.kind}")

    @property
    def on(self) -> bool:
        """Whether layers may be streamed: "all" is the engine without a policy."""
        return self.kind != "all"

    def __str__(self) -> str:
        """As the flag has it."""
        if self.kind == "bytes":
            return exact_size(int(self.amount))
        share = "%" * (self.kind == "percent")
        return exact_number(self.amount) + share if self.kind in COUNTED else self.kind

    @property
    def setting(self) -> str:
        """All that stands after --resident on the command line, defaults left out: two that are
        the same say the same."""
        said = str(self)
        if self.kind == "auto" and self.priority != ResidencyOptions.priority:
            said += f" --priority {self.priority}"
        if self.on and self.placement != ResidencyOptions.placement:
            said += f" --placement {self.placement}"
        return said
