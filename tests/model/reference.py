"""The record that the embedded model is held against; tests/reference.json says how it was made."""

from __future__ import annotations

import json
from pathlib import Path

# name, text, token_ids, top20 [[id, logprob], ...], entropy_bits, greedy [id, ...], greedy_text
PROMPTS = json.loads((Path(__file__).parent.parent / "reference.json").read_bytes())["prompts"]
