"""Residency of layers, as plain data: what the flags are parsed into."""

from __future__ import annotations

from dataclasses import dataclass

from toastkit.text.exact_numbers import exact_number, exact_size

COUNTED = ("layers", "percent")
PLACEMENTS = ("first", "last", "interleaved")
# Tokens that KV cache is reserved for (paper 001, section 3.4); None: as many as the model can
# read.
RESERVED_TOKENS = {"max-tps": 512, "balanced": 1024, "max-context": None}
PRIORITIES = tuple(RESERVED_TOKENS)


@dataclass(frozen=True)
class ResidencyOptions:
    """How many layers are resident. kind: all; auto, as many as memory allows at run time; layers,
    a number; percent; or bytes, as many as fit into so many with everything else. amount: of the
    last three. placement: which layers. priority: what "auto" reserves memory for. context: tokens
    that "max-context" expects, None for as many as the model can read.
    """

    kind: str = "all"
    amount: float = 0
    placement: str = "interleaved"
    priority: str = "balanced"
    context: int | None = None

    @property
    def on(self) -> bool:
        """True if layers may be streamed: with "all" the engine has no residency policy."""
        return self.kind != "all"

    def __str__(self) -> str:
        """The text of the flag."""
        if self.kind == "bytes":
            return exact_size(int(self.amount))
        share = "%" * (self.kind == "percent")
        return exact_number(self.amount) + share if self.kind in COUNTED else self.kind

    @property
    def setting(self) -> str:
        """The options as after --resident on the command line, without defaults: equal options give
        equal text."""
        text = str(self)
        if self.kind == "auto" and self.priority != ResidencyOptions.priority:
            text += f" --priority {self.priority}"
        if self.on and self.placement != ResidencyOptions.placement:
            text += f" --placement {self.placement}"
        return text
