"""The record that the embedded model is held against; tests/reference.json says how it was made."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

# name, text, token_ids, top20 [[id, logprob], ...], entropy_bits, greedy [id, ...], greedy_text
PROMPTS = json.loads((Path(__file__).parent.parent / "reference.json").read_bytes())["prompts"]

# The last that runs on Python 3.10; some of its own functions fail under newer versions of MLX.
OLD_MLX_LM = tuple(map(int, version("mlx-lm").split(".")[:2])) < (0, 32)
needs_new_mlx_lm = pytest.mark.skipif(OLD_MLX_LM, reason="of mlx-lm 0.32 and Python 3.11")


def held_by(cache: Any) -> Sequence[Any]:
    """The arrays of a cache of mlx_lm's, without the room behind what was written, which is
    anything: keys and values, or those of a recurrent layer."""
    if OLD_MLX_LM:
        return cache.state[:2]
    return cache.keys_and_values() if hasattr(cache, "keys_and_values") else cache.state[0]
