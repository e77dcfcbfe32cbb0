"""The record that the embedded model is held against; tests/reference.json says how it was made."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path

import pytest

# name, text, token_ids, top20 [[id, logprob], ...], entropy_bits, greedy [id, ...], greedy_text
PROMPTS = json.loads((Path(__file__).parent.parent / "reference.json").read_bytes())["prompts"]

# The last that runs on Python 3.10; some of its own functions fail under newer versions of MLX.
OLD_MLX_LM = tuple(map(int, version("mlx-lm").split(".")[:2])) < (0, 32)
needs_new_mlx_lm = pytest.mark.skipif(OLD_MLX_LM, reason="of mlx-lm 0.32 and Python 3.11")
