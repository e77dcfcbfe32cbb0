"""Gears, as plain data: what the flags are parsed into."""

from __future__ import annotations

from dataclasses import dataclass

from toastkit.errors import UsageError, check_choice

MODES = ("auto", "low", "mid", "high", "off")
SCOPES = ("attention", "all")
PATHS = ("fused", "dequant")
WIDTHS = (2, 4, 6, 8)  # bits that a gear may have: keys of store.precision.LARGEST


@dataclass(frozen=True)
class GearOptions:
    """mode: auto follows the entropy; low, mid, high are fixed; off disables gears. scope: the
    attention matrices (paper 003, section 6.1), or all of the decoder layers. bits: of the low and
    of the mid gear. path: packed weights are multiplied by MLX's quantised kernels, or from a
    dequantised copy (section 7). cache_bytes: on the device, for gears that are not in use; None
    for all packed ones, and no originals.
    """

    mode: str = "off"
    scope: str = "attention"
    bits: tuple[int, int] = (4, 8)
    path: str = "fused"
    cache_bytes: int | None = None

    def __post_init__(self) -> None:
        """Raise UsageError for invalid options."""
        check_choice("gear", self.mode, MODES)
        check_choice("gear scope", self.scope, SCOPES)
        check_choice("gear path", self.path, PATHS)
        low, mid = self.bits
        if low not in WIDTHS or mid not in WIDTHS or low > mid:
            raise UsageError(
                f"no such gear bits: {low},{mid} (each of 2, 4, 6, 8; low has no more than mid)"
            )

    @property
    def on(self) -> bool:
        """True if the model's modules may be replaced."""
        return self.mode != "off"

    @property
    def fixed(self) -> str | None:
        """The gear that every step runs in; None if the entropy decides, or gears are off."""
        return self.mode if self.mode in ("low", "mid", "high") else None

    def bits_of(self, gear: str) -> int | None:
        """Bits per weight in a gear; None in high, which is the checkpoint's own."""
        return {"low": self.bits[0], "mid": self.bits[1]}.get(gear)
