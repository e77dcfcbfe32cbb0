"""How sure a model is of the next token: what a step is kept by, or taken back."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from toastkit.engine.big_little import confidence


@given(
    st.lists(st.floats(-60, 60, width=32), min_size=1, max_size=600),
    st.sampled_from([0.0, 1e4, -1e4]),
)
@settings(max_examples=30, deadline=None)
def test_confidence_is_a_probability(values: list[float], shift: float) -> None:
    logits = np.array(values, np.float32) + np.float32(shift)
    found = confidence(mx.array(logits)).item()
    expected = 1 / np.exp(logits.astype(np.float64) - logits.max()).sum()
    assert found <= 1 and abs(found - expected) < 1e-5 * expected + 1e-9
