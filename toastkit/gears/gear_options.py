"""How the gears are to run, as plain data: what flags are parsed into."""

from __future__ import annotations

from dataclasses import dataclass

from toastkit.errors import UsageError, check_choice

MODES = ("auto", "low", "mid", "high", "off")
SCOPES = ("attention", "all")
PATHS = ("fused", "dequant")
WIDTHS = (2, 4, 6, 8)  # bits that a gear may have: keys of store.precision.LARGEST


@dataclass(frozen=True)
class GearOptions:
    """mode: auto follows the entropy; low, mid, high are fixed; off does nothing at all. scope:
    matrices of attention (paper 003, section 6.1), or of all decoder layers. bits: of the low and
    of the mid gear. path: how packed weights are multiplied, by MLX's own kernels or from a
    dequantised copy (section 7). cache_bytes: what gears that are not in use may keep on the
    device; None for all that is packed, and no originals.
    """

    mode: str = "off"
    scope: str = "attention"
    bits: tuple[int, int] = (4, 8)
    path: str = "fused"
    cache_bytes: int | None = None

    def __post_init__(self) -> None:
        """Raises UsageError."""
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
        """Whether the model's modules may be replaced."""
        return self.mode != "off"

    @property
    def fixed(self) -> str | None:
        """The gear that every step runs in, None where the entropy decides or none is wanted."""
        return self.mode if self.mode in ("low", "mid", "high") else None

    def bits_of(self, gear: str) -> int | None:
        """Bits a weight in a gear; None in high, which is the checkpoint's own."""
        return {"low": self.bits[0], "mid": self.bits[1]}.get(gear)
