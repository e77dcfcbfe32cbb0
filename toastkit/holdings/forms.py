"""The forms that a module's weights can have on the device: plain data, decided by policies."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Form:
    """kind: "absent", "original" or "packed". bits: of a packed weight, 2, 4, 6 or 8. fused:
    multiply packed weights as they are, where MLX computes that exactly; else from a dequantised
    copy."""

    kind: str
    bits: int = 0
    fused: bool = True


ABSENT, ORIGINAL = Form("absent"), Form("original")


def packed(bits: int, fused: bool = True) -> Form:
    """The form of weights in so many bits with one scale a row (store.precision)."""
    return Form("packed", bits, fused)
