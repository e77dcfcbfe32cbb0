"""How routers choose experts, natively, against float64, on every instruction set of this
processor."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.conftest import examples
from tests.native_library import needed
from tests.unit.native_kernels import TYPES, Kernels, kernels, on_row_sets, read
from tests.unit.native_rows import Choice, numbers, partition, routed

__all__ = ["kernels"]
pytestmark = needed
types = st.sampled_from(list(TYPES))
seeds = st.integers(0, 1 << 20)


@settings(max_examples=examples(60))
@given(seeds, st.integers(0, 5), st.integers(1, 200), types, st.booleans(), st.booleans(),
       st.booleans(), st.data())  # fmt: skip
def test_routes(
    kernels: Kernels, seed: int, rows: int, size: int, type_: str, normed: bool, ahead: bool,
    of_chosen: bool, data,
) -> None:  # fmt: skip
    type_ = "f32" if of_chosen else type_
    x, k = numbers(seed, (rows, size), type_), data.draw(st.integers(1, size))
    how = normed + 2 * ahead + 4 * of_chosen
    logits = read(x, type_)
    wanted = np.exp(logits - logits.max(-1, keepdims=True))
    wanted /= wanted.sum(-1, keepdims=True)
    least = np.sort(wanted, -1)[:, -k:].min(-1, initial=1, keepdims=True)
    scores = np.float32(-logits if ahead else logits)
    for _ in kernels.row_sets():
        which, shares = routed(kernels, x, type_, Choice(k, how, factor=1.0))
        chosen = np.take_along_axis(wanted, which.astype(np.int64), -1)
        assert all(len({*row}) == k for row in which)
        assert (chosen >= least * (1 - 1e-6)).all()
        if normed or of_chosen:
            chosen /= chosen.sum(-1, keepdims=True)
        np.testing.assert_allclose(shares, chosen, rtol=1e-5, atol=1e-30)
        if of_chosen:
            order = partition(kernels, scores, type_, k - 1 if ahead else size - k)
            assert np.array_equal(which, order[:, :k] if ahead else order[:, size - k :])


@settings(max_examples=examples(60))
@given(seeds, st.integers(0, 5), st.integers(1, 6), st.integers(1, 9), types, st.integers(0, 15),
       st.booleans(), st.data())  # fmt: skip
def test_routes_by_scores_and_groups(
    kernels: Kernels, seed: int, rows: int, groups: int, size: int, type_: str, how: int,
    biased: bool, data,
) -> None:  # fmt: skip
    normed, ahead, scored, best = (bool(how >> i & 1) for i in range(4))
    kept = data.draw(st.integers(1, groups))
    k, n = data.draw(st.integers(1, kept * size)), groups * size
    x = numbers(seed, (rows, n), type_)
    bias = np.random.default_rng(seed).normal(size=n).astype(np.float32) if biased else None
    flags = normed + 2 * ahead + 8 * scored + 16 * best
    choice = Choice(k, flags, groups, kept, 0.25, 2.5)
    logits = read(x, type_)
    scores = 1 / (1 + np.exp(-logits))
    if not scored:
        scores = np.exp(logits - logits.max(-1, keepdims=True))
        scores /= scores.sum(-1, keepdims=True)
    added = 0 if bias is None else bias
    by = (scores + (0 if best else added)).reshape(rows, groups, size)
    of_groups = np.sort(by, -1)[..., -1 if best else -2 :].sum(-1)
    order, drop = np.argsort(of_groups, -1, kind="stable"), groups - kept
    ends = np.take_along_axis(of_groups, order[:, drop - 1 : drop + 1], -1) if drop else of_groups
    assume(not drop or (np.diff(ends) > 1e-5).all())  # else float32 may see it otherwise
    np.put_along_axis(by, order[:, :drop, None], 0.0, 1)
    by = by.reshape(rows, n)
    if best:
        scores, by = by, by + added
    least = np.sort(by, -1)[:, -k:].min(-1, initial=np.inf, keepdims=True)
    for _ in kernels.row_sets():
        which, shares = routed(kernels, x, type_, choice, bias)
        assert all(len({*row}) == k for row in which)
        assert (np.take_along_axis(by, which.astype(np.int64), -1) >= least - 1e-5).all()
        wanted = np.take_along_axis(scores, which.astype(np.int64), -1)
        if normed:
            wanted /= wanted.sum(-1, keepdims=True) + 0.25
        np.testing.assert_allclose(shares, 2.5 * wanted, rtol=1e-5, atol=1e-30)


@settings(max_examples=examples(60))
@given(seeds, st.integers(0, 5), st.integers(1, 70), st.sampled_from([0.02, 0.5, 3.0]), st.data())
def test_routes_that_mix_sparsely(
    kernels: Kernels, seed: int, rows: int, size: int, eps: float, data
) -> None:
    """Of equal logits the first goes ahead; one that is as far off as eps may be on either side."""
    k = data.draw(st.integers(1, size))
    x = numbers(seed, (rows, size), "f32")
    wanted, shares = np.zeros((rows, k), np.uint32), np.zeros((rows, k))
    for row, logits in enumerate(read(x, "f32")):
        left = logits.copy()
        for n in range(k):
            at = left.argmax()
            apart = (left[at] - logits) / np.maximum(abs(logits), left[at])
            assume((abs(apart - np.float32(eps)) > 1e-5).all())
            near = np.where(apart > np.float32(eps), -np.inf, left)
            wanted[row, n], shares[row, n] = at, 1 / np.exp(near - left[at]).sum()
            left[at] = -np.inf
    for _ in kernels.row_sets():
        found = routed(kernels, x, "f32", Choice(k, 32, 0, 0, eps, 1.0))
        assert np.array_equal(found[0], wanted)
        np.testing.assert_allclose(found[1], shares, rtol=1e-5, atol=1e-30)


@on_row_sets
def test_routes_that_cannot_be(kernels: Kernels) -> None:
    x = numbers(1, (2, 12), "f32")
    for wrong in (Choice(0), Choice(13), Choice(2, 0, 5, 1), Choice(2, 0, 3, -1),
                  Choice(2, 33), Choice(2, 32, 3, 2)):  # fmt: skip
        with pytest.raises(ValueError):
            routed(kernels, x, "f32", wrong)
    with pytest.raises(ValueError):
        routed(kernels, numbers(1, (2, 12), "f16"), "f16", Choice(2, 4))
    odd = np.full((1, 12), np.nan, np.float32)  # some experts all the same
    which, _ = routed(kernels, odd, "f32", Choice(3, 10, 4, 2, 0.0, 1.0))
    assert len({*which[0]}) == 3 and which.max() < 12
