"""The forms that a module's weights can have on the device: plain data, decided by policies."""

from __future__ import annotations

from typing import NamedTuple


class Form(NamedTuple):
    """kind: "absent", "original" or "packed". bits: of a packed weight, 2, 4, 6 or 8. fused:
    multiply packed weights as they are, where MLX computes that exactly; else from a dequantised
    copy. streamed: it is so while its layer runs, and absent else. slots: of the experts of a stack
    as many are on the device at a time, fetched when a token wants them; 0 for all. mapped: an
    original that lies in its file."""

    kind: str
    bits: int = 0
    fused: bool = True
    streamed: bool = False
    slots: int = 0
    mapped: bool = False

    @property
    def away(self) -> bool:
        """Whether nothing of it is on the device between two passes."""
        return self.streamed or self.kind == "absent"

    @property
    def whole(self) -> bool:
        """Whether all of it is on the device between two passes."""
        return not (self.away or self.slots)

    @property
    def present(self) -> Form:
        """The form while its layer runs."""
        return self._replace(streamed=False)


ABSENT, ORIGINAL = Form("absent"), Form("original")
MAPPED = ORIGINAL._replace(mapped=True)


def packed(bits: int, fused: bool = True) -> Form:
    """The form of weights in so many bits with one scale a row (store.precision)."""
    return Form("packed", bits, fused)
