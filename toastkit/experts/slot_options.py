"""Expert slots, as plain data: what the flags are parsed into."""

from __future__ import annotations

from dataclasses import dataclass

from toastkit.errors import UsageError, check_choice
from toastkit.text.exact_numbers import exact_size

KINDS = ("auto", "slots", "bytes")
PREFETCHES = ("off", "auto", "1", "2", "3")


@dataclass(frozen=True)
class SlotOptions:
    """How many slots. kind: as many as memory allows, a number per layer, or as many as fit into
    bytes for all layers together. amount: of the last two. prefetch: how many layers ahead routers
    are asked, with the current layer's input, for experts to prefetch."""

    kind: str = "auto"
    amount: int = 0
    prefetch: str = "off"

    def __post_init__(self) -> None:
        """Raise UsageError for invalid options."""
        check_choice("kind of slots", self.kind, KINDS)
        check_choice("prefetch", self.prefetch, PREFETCHES)
        if self.amount < 0:
            raise UsageError(f"no such number of slots: {self.amount}")

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
