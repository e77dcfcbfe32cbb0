"""Recurrent layers of toastkit/native/kernels, against float64, on every instruction set of this
processor; and that a chunk gives what its steps give."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import examples
from tests.native_library import needed
from tests.unit.native_kernels import ROUNDING, TYPES, Kernels, kernels, on_row_sets, read, stored
from tests.unit.native_recurrent import (
    convolved,
    delta,
    flat,
    layer,
    linear,
    mixed,
    of_heads,
    of_layer,
    of_scan,
    of_selective_scan,
    of_wkv,
    scanned,
    wkv,
)
from tests.unit.native_rows import gated, normed

__all__ = ["kernels"]
pytestmark = needed
seeds = st.integers(0, 1 << 20)
types = st.sampled_from(list(TYPES))


def by_steps(
    arrays: list, state: np.ndarray, mask: np.ndarray | None, factor: float
) -> tuple[np.ndarray, np.ndarray]:
    """The gated delta rule in float64. arrays: without a_log and bias, decays of columns for a; or
    a and bias of columns."""
    q, k, v, a, b = (one.astype(np.float64) for one in arrays[:5])
    each = v.shape[2] // k.shape[2]
    q, k = np.repeat(q, each, 2), np.repeat(k, each, 2)
    a_log, bias = arrays[5:]
    if a_log is not None and a.ndim == 4:
        kept = np.exp(-np.exp(a_log)[:, None] * np.logaddexp(a + bias, 0))
    else:
        kept = a if a_log is None else np.exp(-np.exp(a_log) * np.logaddexp(a + bias, 0))[..., None]
    rate = factor / (1 + np.exp(-b))
    state, y = state.astype(np.float64), np.zeros(v.shape)
    for t in range(v.shape[1]):
        now = state * kept[:, t, :, None]
        change = (v[:, t] - np.einsum("bhvk,bhk->bhv", now, k[:, t])) * rate[:, t, :, None]
        now = now + change[..., None] * k[:, t, :, None]
        y[:, t] = np.einsum("bhvk,bhk->bhv", now, q[:, t])
        state = now if mask is None else np.where(mask[:, t, None, None, None], now, state)
    return y, state


@settings(max_examples=examples(40))
@given(seeds, st.integers(1, 2), st.integers(0, 7), st.integers(1, 2), st.integers(1, 3),
       st.tuples(st.integers(1, 70), st.integers(1, 11)), st.booleans(), st.booleans(),
       st.sampled_from([1.0, 2.0]), st.sampled_from(["no", "decays", "gates"]))  # fmt: skip
def test_gated_delta_rule(
    kernels: Kernels, seed: int, batch: int, length: int, heads: int, each: int, sizes: tuple,
    begun: bool, masked: bool, factor: float, columns: str,
) -> None:  # fmt: skip
    arrays = of_heads(seed, batch, length, (heads, heads * each), sizes)
    rng = np.random.default_rng(seed + 1)
    if columns == "gates":
        own = [rng.normal(size=(*arrays[i].shape, sizes[0])).astype(np.float32) for i in (3, 6)]
        arrays[3], arrays[6] = own
    if columns == "decays":
        decays = rng.random((*arrays[3].shape, sizes[0]))
        arrays[3:] = [decays.astype(np.float32), arrays[4], None, None]
    shape = (batch, heads * each, sizes[1], sizes[0])
    state = rng.normal(size=shape).astype(np.float32) if begun else None
    mask = rng.random((batch, length)) < 0.7 if masked else None
    start = np.zeros(shape) if state is None else state
    wanted = by_steps(arrays, start, mask, factor)
    for _ in kernels.row_sets():
        for ours, theirs in zip(delta(kernels, arrays, state, mask, factor), wanted):
            np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-5)


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def windows(x: np.ndarray, weight: np.ndarray, before: np.ndarray | None) -> np.ndarray:
    """The convolution in float64: x (batch, length, channels), weight (channels, kernel)."""
    batch, length, channels = x.shape
    kept = weight.shape[1] - 1
    earlier = np.zeros((batch, kept, channels)) if before is None else before
    rows = np.concatenate([earlier, x], 1)
    return sum(rows[:, i : i + length] * weight[:, i] for i in range(kept + 1))


@settings(max_examples=examples(60))
@given(seeds, st.integers(1, 3), st.integers(0, 9),
       st.one_of(st.integers(1, 40), st.sampled_from([128, 129, 300])), st.integers(1, 16),
       st.tuples(types, types, types), st.booleans(), st.booleans(), st.booleans(),
       st.integers(0, 3))  # fmt: skip
def test_convolution(
    kernels: Kernels, seed: int, batch: int, length: int, channels: int, kernel: int, kinds: tuple,
    begun: bool, biased: bool, activated: bool, gap: int,
) -> None:  # fmt: skip
    rng = np.random.default_rng(seed)
    x = stored(rng.normal(size=(batch, length, channels + gap)), kinds[0])[..., :channels]
    weight = stored(rng.normal(size=(channels, kernel)), kinds[1])
    bias = stored(rng.normal(size=channels), kinds[1]) if biased else None
    before = stored(rng.normal(size=(batch, kernel - 1, channels)), kinds[0]) if begun else None
    wide = [None if one is None else read(one, kind)
            for one, kind in ((x, kinds[0]), (weight, kinds[1]), (before, kinds[0]))]  # fmt: skip
    wanted = windows(*wide) + (0 if bias is None else read(bias, kinds[1]))
    size = windows(*(one if one is None else abs(one) for one in wide)) + abs(wanted)
    wanted = silu(wanted) if activated else wanted
    # SiLU is nowhere steeper than 1.1.
    most = size * 2.0**-24 * (kernel + 4) * 1.2 + abs(wanted) * ROUNDING[kinds[2]] * 1.01 + 2.0**-24
    for _ in kernels.row_sets():
        out = convolved(kernels, x, weight, bias, before, kinds, activated)
        assert (abs(read(out, kinds[2]) - wanted) <= most).all()


@settings(max_examples=examples(40))
@given(seeds, st.integers(1, 2), st.integers(0, 6), st.integers(1, 3), st.integers(1, 3),
       st.tuples(st.sampled_from([1, 7, 16, 32, 70]), st.integers(1, 40)), st.integers(1, 5),
       st.booleans())  # fmt: skip
def test_delta_layer(
    kernels: Kernels, seed: int, batch: int, length: int, heads: int, each: int, sizes: tuple,
    kernel: int, begun: bool,
) -> None:  # fmt: skip
    """Is, to the bit, what its parts give one after another, each of which is tested by itself."""
    shape = (heads, heads * each)
    projections, own = of_layer(seed, batch, length, shape, sizes, kernel)
    rng = np.random.default_rng(seed + 1)
    before = state = None
    if begun:
        before = rng.normal(size=(batch, kernel - 1, len(own["weight"]))).astype(np.float32)
        state = rng.normal(size=(batch, shape[1], sizes[1], sizes[0])).astype(np.float32)
    for _ in kernels.row_sets():
        found = layer(kernels, projections, own, before, state, 1e-5)
        wanted = layer_in_parts(kernels, projections, own, before, state)
        for ours, theirs in zip(found, wanted, strict=True):
            assert ours.shape == theirs.shape and np.array_equal(ours, theirs)


def layer_in_parts(
    kernels: Kernels, projections: dict, own: dict, before: np.ndarray | None, state
) -> tuple[np.ndarray, ...]:
    """What `layer` gives, by the other operations."""
    batch, length, heads, size = projections["q"].shape
    value_heads, value_size = len(own["bias"]), len(own["norm"])
    x, keys, kernel = mixed(projections), heads * size, own["weight"].shape[1]
    q, k, v = np.split(convolved(kernels, x, own["weight"], None, before, silu=True),
                       [keys, 2 * keys], -1)  # fmt: skip
    scale = size**-0.5
    q, k = (
        normed(kernels, np.ascontiguousarray(one).reshape(-1, size), None, ("f32",) * 3, plus,
               1e-6 * scale**2).reshape(batch, length, heads, size)
        for one, plus in ((q, scale**2), (k, scale))
    )  # fmt: skip
    gates = [flat(projections[name]) for name in "ab"]
    values = np.ascontiguousarray(v).reshape(batch, length, value_heads, value_size)
    arrays = [
        np.ascontiguousarray(one) for one in (q, k, values, *gates, own["a_log"], own["bias"])
    ]
    y, after = delta(kernels, arrays, state)
    rows = normed(kernels, y.reshape(-1, value_size), own["norm"], ("f32",) * 3)
    z = np.ascontiguousarray(projections["z"].reshape(-1, value_size))
    y = gated(kernels, z, rows, "f32", "silu").reshape(y.shape)
    earlier = np.zeros((batch, kernel - 1, x.shape[-1]), np.float32) if before is None else before
    return y, np.concatenate([earlier, x], 1)[:, length:], after


@settings(max_examples=examples(40))
@given(seeds, st.integers(1, 2), st.integers(0, 7), st.integers(1, 3), st.integers(1, 3),
       st.tuples(st.integers(1, 11), st.integers(1, 70)), st.booleans(), st.booleans(),
       st.sampled_from([(0.0, np.inf), (0.5, 1.0)]))  # fmt: skip
def test_scan(
    kernels: Kernels, seed: int, batch: int, length: int, groups: int, each: int, sizes: tuple,
    begun: bool, masked: bool, limits: tuple,
) -> None:  # fmt: skip
    heads = groups * each
    arrays = of_scan(seed, batch, length, (heads, groups), sizes)
    rng = np.random.default_rng(seed + 1)
    shape = (batch, heads, *sizes)
    state = rng.normal(size=shape).astype(np.float32) if begun else None
    mask = rng.random((batch, length)) < 0.7 if masked else None
    x, b, c, dt, a_log, d, bias = (one.astype(np.float64) for one in arrays)
    b, c = np.repeat(b, each, 2), np.repeat(c, each, 2)
    dt = np.clip(np.logaddexp(dt + bias, 0), *limits)
    now = np.zeros(shape) if state is None else state.astype(np.float64)
    wanted = np.zeros(x.shape)
    for t in range(length):
        kept = np.exp(-np.exp(a_log) * dt[:, t])[..., None, None]
        new = kept * now + (dt[:, t, :, None] * x[:, t])[..., None] * b[:, t, :, None]
        wanted[:, t] = np.einsum("bhps,bhs->bhp", new, c[:, t]) + d[:, None] * x[:, t]
        now = new if mask is None else np.where(mask[:, t, None, None, None], new, now)
    for _ in kernels.row_sets():
        y, after = scanned(kernels, arrays, state, mask, limits)
        np.testing.assert_allclose(y, wanted, rtol=2e-5, atol=1e-4)
        np.testing.assert_allclose(after, now, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("limits", [(0.0, np.inf), (0.5, 1.0)])
def test_a_step_that_is_no_number_is_not_hidden(kernels: Kernels, limits: tuple) -> None:
    """Limits of a step would make one of it. The other head does not see it."""
    arrays = of_scan(1, 1, 2, (2, 1), (3, 4))
    arrays[3][0, 0, 0] = np.nan
    for _ in kernels.row_sets():
        y, after = scanned(kernels, arrays, None, None, limits)
        assert np.isnan(y[:, :, 0]).all() and np.isnan(after[:, 0]).all()
        assert np.isfinite(y[:, :, 1]).all() and np.isfinite(after[:, 1]).all()


@settings(max_examples=examples(40))
@given(seeds, st.integers(1, 2), st.integers(0, 7),
       st.tuples(st.integers(1, 40), st.integers(1, 70)), st.booleans(), st.booleans(),
       st.sampled_from([(0.0, np.inf), (0.5, 1.0)]), st.sampled_from([1, 30]))  # fmt: skip
def test_selective_scan(
    kernels: Kernels, seed: int, batch: int, length: int, sizes: tuple, begun: bool, biased: bool,
    limits: tuple, spread: float,
) -> None:  # fmt: skip
    arrays = of_selective_scan(seed, batch, length, sizes)
    arrays[3] *= np.float32(spread)
    rng, shape = np.random.default_rng(seed + 1), (batch, 1, *sizes)
    state = rng.normal(size=shape).astype(np.float32) if begun else None
    arrays[6] = arrays[6] if biased else None
    x, b, c, dt, a_log, d = (one.astype(np.float64) for one in arrays[:6])
    dt = np.clip(np.logaddexp(dt + (arrays[6] if biased else 0), 0), *limits)[..., None]
    now = np.zeros(shape) if state is None else state.astype(np.float64)
    wanted, scale = np.zeros(x.shape), np.zeros(x.shape)
    for t in range(length):
        now = np.exp(-np.exp(a_log) * dt[:, t]) * now
        now = now + dt[:, t] * x[:, t, :, :, None] * b[:, t, :, None]
        terms = now * c[:, t, :, None]
        wanted[:, t] = terms.sum(-1) + d * x[:, t]
        scale[:, t] = abs(terms).sum(-1) + abs(x[:, t])
    for _ in kernels.row_sets():
        y, after = scanned(kernels, arrays, state, None, limits)
        assert (abs(y - wanted) <= 1e-5 * scale + 1e-5).all()
        np.testing.assert_allclose(after, now, rtol=2e-5, atol=2e-5)


@settings(max_examples=examples(40))
@given(seeds, st.integers(1, 2), st.integers(0, 7), st.integers(1, 3), st.integers(1, 70),
       st.booleans())  # fmt: skip
def test_generalised_delta_rule(
    kernels: Kernels, seed: int, batch: int, length: int, heads: int, size: int, begun: bool
) -> None:
    arrays = of_wkv(seed, batch, length, heads, size)
    shape = (batch, heads, size, size)
    state = np.random.default_rng(seed).normal(size=shape).astype(np.float32) if begun else None
    now = np.zeros(shape) if state is None else state.astype(np.float64)
    wanted = np.zeros(arrays[0].shape)
    for t in range(length):
        r, w, k, v, a, b = (one[:, t].astype(np.float64) for one in arrays)
        found = np.einsum("bhvk,bhk->bhv", now, a)
        now = now * w[:, :, None] + found[..., None] * b[:, :, None] + v[..., None] * k[:, :, None]
        wanted[:, t] = np.einsum("bhvk,bhk->bhv", now, r)
    for _ in kernels.row_sets():
        y, after = wkv(kernels, arrays, state)
        np.testing.assert_allclose(y, wanted, rtol=2e-5, atol=2e-4)
        np.testing.assert_allclose(after, now, rtol=2e-5, atol=2e-5)


@settings(max_examples=examples(30))
@given(seeds, st.integers(1, 3), st.integers(0, 9), st.integers(1, 70), st.integers(0, 9),
       st.booleans())  # fmt: skip
def test_linear_recurrence(
    kernels: Kernels, seed: int, batch: int, length: int, channels: int, cut: int, begun: bool
) -> None:
    """And, to the bit, in two chunks."""
    rng = np.random.default_rng(seed)
    decays = rng.random((batch, length, channels)).astype(np.float32)
    x = rng.normal(size=decays.shape).astype(np.float32)
    state = rng.normal(size=(batch, channels)).astype(np.float32) if begun else None
    now = np.zeros((batch, channels)) if state is None else state.astype(np.float64)
    wanted = np.zeros(x.shape)
    for t in range(length):
        now = wanted[:, t] = decays[:, t] * now + x[:, t]
    halves = [[np.ascontiguousarray(one[:, part]) for one in (decays, x)]
              for part in (slice(0, cut), slice(cut, length))]  # fmt: skip
    for _ in kernels.row_sets():
        found = linear(kernels, decays, x, state)
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
        if 0 < cut < length:
            first = linear(kernels, *halves[0], state)
            rest = linear(kernels, *halves[1], np.ascontiguousarray(first[:, -1]))
            assert np.array_equal(np.concatenate([first, rest], 1), found)


@settings(max_examples=examples(15))
@given(seeds, st.integers(1, 40), st.integers(0, 40), st.integers(1, 4), st.booleans())
@on_row_sets
def test_a_chunk_of_steps_gives_what_they_give(
    kernels: Kernels, seed: int, length: int, cut: int, threads: int, in_place: bool
) -> None:
    """To the bit, with any number of threads, wherever the state lies; and a batch what its rows
    give."""
    # With how many of their arrays are of steps.
    recurrences = [
        (delta, of_heads(seed, 2, length, (2, 4), (64, 30)), 5),
        (scanned, of_scan(seed, 2, length, (4, 2), (30, 64)), 4),
        (scanned, of_selective_scan(seed, 2, length, (40, 16)), 4),
        (wkv, of_wkv(seed, 2, length, 2, 40), 6),
    ]
    projections, own = of_layer(seed, 2, length, (2, 4), (64, 30), 4)
    x, weight = mixed(projections), own["weight"]
    wholes = [recurrence(kernels, arrays, None) for recurrence, arrays, _ in recurrences]
    wholes.append(layer(kernels, projections, own, None, None, 1e-5))
    convolution = convolved(kernels, x, weight, silu=True)
    kernels.library.toast_set_threads(threads)
    states: list = [None] * len(wholes)
    last = rows = None
    found: list[list[np.ndarray]] = [[] for _ in (*wholes, convolution)]
    for part in (slice(0, cut), slice(cut, length)):
        for i, (recurrence, arrays, steps) in enumerate(recurrences):
            some = [np.ascontiguousarray(a[1:, part]) for a in arrays[:steps]] + arrays[steps:]
            y, states[i] = recurrence(kernels, some, states[i], in_place=in_place)
            found[i].append(y)
        parts = {name: one[1:, part] for name, one in projections.items()}
        y, last, states[-1] = layer(kernels, parts, own, last, states[-1], 1e-5, in_place)
        found[-2].append(y)
        found[-1].append(convolved(kernels, x[1:, part], weight, None, rows, silu=True))
        rows = last
    for (y, *_), parts_of in zip((*wholes, (convolution,)), found):
        assert np.array_equal(np.concatenate(parts_of, 1), y[1:])
    for state, (_, *rest) in zip(states, wholes, strict=True):
        assert np.array_equal(state, rest[-1][1:])


@pytest.mark.parametrize("size", [64, 63])
@on_row_sets
def test_large_states_are_written_past_the_caches(kernels: Kernels, size: int) -> None:
    """A step that leaves its state gives, to the bit, what one in its place gives."""
    recurrences = [
        (delta, of_heads(1, 1, 2, (32, 64), (size, 67)), 5),
        (scanned, of_scan(2, 1, 2, (64, 32), (67, size)), 4),
        (scanned, of_selective_scan(4, 1, 2, (4200, size)), 4),
        (wkv, of_wkv(5, 1, 2, 70, size), 6),
    ]
    projections, own = of_layer(3, 1, 2, (32, 64), (size, 67), 4)

    def stepped(in_place: bool) -> list[np.ndarray]:
        made: list = [None] * 5
        last, found = None, []
        for part in (slice(0, 1), slice(1, 2)):
            for i, (recurrence, arrays, steps) in enumerate(recurrences):
                some = [np.ascontiguousarray(a[:, part]) for a in arrays[:steps]] + arrays[steps:]
                y, made[i] = recurrence(kernels, some, made[i], in_place=in_place)
                found.append(y)
            parts = {name: one[:, part] for name, one in projections.items()}
            y, last, made[4] = layer(kernels, parts, own, last, made[4], 1e-5, in_place)
            found.append(y)
        return found + made

    for one, other in zip(stepped(False), stepped(True), strict=True):
        assert np.array_equal(one, other)


@on_row_sets
def test_heads_that_do_not_fit_are_refused(kernels: Kernels) -> None:
    with pytest.raises(ValueError, match="1"):
        delta(kernels, of_heads(1, 1, 1, (2, 3), (4, 4)), None)
    with pytest.raises(ValueError, match="1"):
        scanned(kernels, of_scan(1, 1, 1, (3, 2), (4, 4)), None)
    with pytest.raises(ValueError, match="1"):
        layer(kernels, *of_layer(1, 1, 1, (2, 3), (4, 4), 4), None, None, 1e-5)
    x, weight = np.zeros((1, 2, 3), np.float32), np.zeros((3, 17), np.float32)
    with pytest.raises(ValueError, match="1"):
        convolved(kernels, x, weight)
