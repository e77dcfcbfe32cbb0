"""The formats that gears store weights in. They are defined in the store, which bakes them into
.toast files and may not import from here."""

from toastkit.store.precision import (
    GEAR_BITS,
    LARGEST,
    Rows,
    dequantise_rows,
    group_size_of,
    quantise_rows,
)

__all__ = ["GEAR_BITS", "LARGEST", "Rows", "dequantise_rows", "group_size_of", "quantise_rows"]
