"""Expert slots, as plain data: what the flags are parsed into."""

from __future__ import annotations

from dataclasses import dataclass

from toastkit.text.exact_numbers import exact_size

PREFETCHES = ("off", "auto", "1", "2", "3")


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
