"""The forms that a module's weights can have on the device: plain data, decided by policies."""

from __future__ import annotations

from typing import NamedTuple


class Form(NamedTuple):
    """The form of a module's weights. kind: "absent", "original" or "packed". bits: of a packed
    weight, 2, 4, 6 or 8. fused: multiply packed weights as they are, where MLX computes that
    exactly; else use a dequantised copy. streamed: present only while its layer runs. slots: how
    many experts of a stack are on the device at a time, fetched on demand; 0 for all. mapped: an
    original that is memory-mapped from its file."""

    kind: str
    bits: int = 0
    fused: bool = True
    streamed: bool = False
    slots: int = 0
    mapped: bool = False

    @property
    def away(self) -> bool:
        """True if nothing of it is on the device between passes."""
        return self.streamed or self.kind == "absent"

    @property
    def whole(self) -> bool:
        """True if all of it is on the device between passes."""
        return not (self.away or self.slots)

    @property
    def present(self) -> Form:
        """The form while its layer runs."""
        return self._replace(streamed=False)


ABSENT, ORIGINAL = Form("absent"), Form("original")
MAPPED = ORIGINAL._replace(mapped=True)


def packed(bits: int, fused: bool = True) -> Form:
    """The form of weights packed to that many bits, with one scale per row (store.precision)."""
    return Form("packed", bits, fused)
