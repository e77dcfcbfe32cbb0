"""The gated delta rule of toastkit/native/kernels, against float64, on every instruction set of
this processor."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import examples
from tests.native_library import needed
from tests.unit.native_kernels import Kernels, instructions, kernels
from tests.unit.native_rows import delta

__all__ = ["instructions", "kernels"]
pytestmark = [needed, pytest.mark.usefixtures("instructions")]
seeds = st.integers(0, 1 << 20)


def by_steps(
    arrays: list[np.ndarray], state: np.ndarray, mask: np.ndarray | None, factor: float
) -> tuple[np.ndarray, np.ndarray]:
    """The gated delta rule in float64."""
    q, k, v, a, b, a_log, bias = (one.astype(np.float64) for one in arrays)
    each = v.shape[2] // k.shape[2]
    q, k = np.repeat(q, each, 2), np.repeat(k, each, 2)
    kept = np.exp(-np.exp(a_log) * np.logaddexp(a + bias, 0))
    rate = factor / (1 + np.exp(-b))
    state, y = state.astype(np.float64), np.zeros(v.shape)
    for t in range(v.shape[1]):
        now = state * kept[:, t, :, None, None]
        change = (v[:, t] - np.einsum("bhvk,bhk->bhv", now, k[:, t])) * rate[:, t, :, None]
        now = now + change[..., None] * k[:, t, :, None]
        y[:, t] = np.einsum("bhvk,bhk->bhv", now, q[:, t])
        state = now if mask is None else np.where(mask[:, t, None, None, None], now, state)
    return y, state


def of_heads(seed: int, batch: int, length: int, heads: tuple, sizes: tuple) -> list[np.ndarray]:
    """What the rule takes, keys of length 1."""
    rng = np.random.default_rng(seed)
    keys, gates = (batch, length, heads[0], sizes[0]), (batch, length, heads[1])
    shapes = [keys, keys, (*gates, sizes[1]), gates, gates, heads[1:], heads[1:]]
    arrays = [rng.normal(size=shape).astype(np.float32) for shape in shapes]
    for array in arrays[:2]:
        array /= np.sqrt((array**2).sum(-1, keepdims=True))
    return arrays


@settings(max_examples=examples(40))
@given(seeds, st.integers(1, 2), st.integers(0, 7), st.integers(1, 2), st.integers(1, 3),
       st.tuples(st.integers(1, 70), st.integers(1, 11)), st.booleans(), st.booleans(),
       st.sampled_from([1.0, 2.0]))  # fmt: skip
def test_gated_delta_rule(
    kernels: Kernels, seed: int, batch: int, length: int, heads: int, each: int, sizes: tuple,
    begun: bool, masked: bool, factor: float,
) -> None:  # fmt: skip
    arrays = of_heads(seed, batch, length, (heads, heads * each), sizes)
    rng = np.random.default_rng(seed + 1)
    shape = (batch, heads * each, sizes[1], sizes[0])
    state = rng.normal(size=shape).astype(np.float32) if begun else None
    mask = rng.random((batch, length)) < 0.7 if masked else None
    y, after = delta(kernels, arrays, state, mask, factor)
    start = np.zeros(shape) if state is None else state
    wanted = by_steps(arrays, start, mask, factor)
    for ours, theirs in zip((y, after), wanted):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-5)


@settings(max_examples=examples(15))
@given(seeds, st.integers(1, 40), st.integers(0, 40), st.integers(1, 4))
def test_a_chunk_of_steps_gives_what_they_give(
    kernels: Kernels, seed: int, length: int, cut: int, threads: int
) -> None:
    """To the bit, with any number of threads."""
    arrays = of_heads(seed, 2, length, (2, 4), (64, 30))
    whole = delta(kernels, arrays, None, None)
    kernels.library.toast_set_threads(threads)
    state, found = None, []
    for part in (slice(0, cut), slice(cut, length)):
        some = [np.ascontiguousarray(one[1:, part]) for one in arrays[:5]] + arrays[5:]
        y, state = delta(kernels, some, state, None)
        found.append(y)
    assert np.array_equal(np.concatenate(found, 1), whole[0][1:])
    assert np.array_equal(state, whole[1][1:])


def test_heads_that_do_not_fit_are_refused(kernels: Kernels) -> None:
    with pytest.raises(ValueError, match="1"):
        delta(kernels, of_heads(1, 1, 1, (2, 3), (4, 4)), None, None)
