"""Weights of a checkpoint out of nothing but their names and shapes, the same on every machine."""

from __future__ import annotations

import zlib

import numpy as np


def weight(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """A float32 tensor of that shape. RandomState's numbers are the same in every numpy."""
    noise = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape)
    last = name.rpartition(".")[2]
    if last == "A_log":
        made = np.log1p(np.abs(noise))
    elif len(shape) < 2:
        ones = "norm" in name and last == "weight" or last in ("D", "layer_scalar")
        made = 0.2 * noise + ones
    elif "embed" in name or ".wte." in name:
        made = noise
    else:
        inputs = shape[-2] if shape[-1] == 1 else shape[-1]
        made = 1.4 * noise / np.sqrt(inputs)
    return made.astype(np.float32)


def prompt(length: int, vocab: int) -> list[int]:
    """Token ids 3 and above."""
    return np.random.RandomState(length).randint(3, vocab, length).tolist()
