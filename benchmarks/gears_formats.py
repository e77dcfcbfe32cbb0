"""The packed formats on the embedded model's own matrices: their error and their size."""

from __future__ import annotations

from typing import NamedTuple, cast

import mlx.core as mx
from gears_report import percent, table, title

from toastkit.gears.discovery import discover
from toastkit.model.locate import locate
from toastkit.store.precision import LARGEST, dequantise_rows, quantise_rows, row_bytes
from toastkit.store.store import Store


class Found(NamedTuple):
    """Of a weight in the mean. expected, error: squared, by s^2/12 and as it is. forecast, size:
    bytes, by the formula and as they lie there."""

    expected: float
    error: float
    forecast: float
    size: float


def formats() -> None:
    """A row for each width."""
    store = Store(locate("crumb"))
    store.model.load_weights(list(store.load().items()))
    weights: list[mx.array] = [one.module["weight"] for one in discover(store.model, "all")]
    found = {bits: _measured(weights, bits) for bits in sorted(LARGEST, reverse=True)}
    title(
        "Formats",
        f"The {len(weights)} matrices of the embedded model's layers,",
        f"{sum(weight.size for weight in weights):,} weights in bfloat16. Mean squared error",
        "a weight: s^2/12 of each row (section 13.1), and measured. The paper's ratios take",
        "errors to fall evenly between two steps; where most weights are closer to zero than half",
        "a step (2 bits) they do not. Bytes a weight: with the row's scale and bias in each group.",
    )
    rows = []
    for bits, now in found.items():
        paper = (LARGEST[8] / LARGEST[bits]) ** 2
        rows.append([
            str(bits), f"{now.expected:.3e}", f"{now.error:.3e}",
            percent(now.error / now.expected), f"{paper:,.1f}",
            f"{now.expected / found[8].expected:,.1f}", f"{now.error / found[8].error:,.1f}",
            f"{bits / 8:.3f}", f"{now.forecast:.4f}", f"{now.size:.4f}",
        ])  # fmt: skip
    head = (
        "bits", "s^2/12", "measured", "of it", "to 8 bits: paper", "s^2/12", "measured",
        "bytes: paper", "predicted", "measured",
    )  # fmt: skip
    table(head, rows)


def _measured(weights: list[mx.array], bits: int) -> Found:
    expected = error = forecast = size = 0.0
    for weight in weights:
        packed, columns = quantise_rows(weight, bits, pad=True), weight.shape[-1]
        off = weight.astype(mx.float32) - dequantise_rows(packed, bits, columns)
        means = mx.stack(
            [
                mx.mean(mx.square(packed.scales[..., 0].astype(mx.float32))) / 12,
                mx.mean(mx.square(off)),
            ]
        )
        first, second = cast("list[float]", means.tolist())
        expected += first * weight.size
        error += second * weight.size
        forecast += weight.size // columns * row_bytes(bits, columns, weight.dtype.size)
        size += sum(part.nbytes for part in packed)
    count = sum(weight.size for weight in weights)
    return Found(expected / count, error / count, forecast / count, size / count)
