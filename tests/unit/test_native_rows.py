"""What toastkit/native/kernels does to rows, against float64, on every instruction set of this
processor."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import examples
from tests.native_library import needed
from tests.unit.native_kernels import (
    ROUNDING,
    TYPES,
    Kernels,
    kernels,
    on_row_sets,
    read,
    stored,
    vectors,
)
from tests.unit.native_rows import (
    ACTIVATIONS,
    activated,
    blended,
    call,
    centred,
    distribution,
    gated,
    largest,
    log_sum_exp,
    normed,
    numbers,
    partition,
    rotated,
    rows_added,
    softmax,
    weighted_sums,
)

__all__ = ["kernels"]
pytestmark = needed
types = st.sampled_from(list(TYPES))
seeds = st.integers(0, 1 << 20)
# Numbers of a row: few, odd tails, several parts of a row (16,384).
columns = st.one_of(st.integers(1, 70), st.sampled_from([256, 2048, 16384, 16385, 40001]))


def close(out: np.ndarray, type_: str, wanted: np.ndarray, ulps: float, least: float = 0) -> bool:
    """Within so many units in the last place of float32 before it was rounded to its type."""
    with np.errstate(over="ignore"):
        error = abs(read(out, type_) - wanted)
    smallest = 2.0**-24 if type_ == "f16" else 2.0**-126  # what is denormal is as far apart
    return bool(
        (error <= abs(wanted) * (ulps * 2.0**-23 + ROUNDING[type_] * 1.01) + smallest + least).all()
    )


@settings(max_examples=examples(50))
@given(seeds, st.integers(0, 9), columns, st.tuples(types, types, types), st.integers(0, 3),
       st.booleans(), st.sampled_from([0.0, 1.0]))  # fmt: skip
def test_norms(
    kernels: Kernels, seed: int, rows: int, size: int, kinds: tuple, gap: int, weighted: bool,
    plus: float,
) -> None:  # fmt: skip
    x = numbers(seed, (rows, size), kinds[0], gap)
    weight = numbers(seed + 1, (size,), kinds[1]) if weighted else None
    wide = read(x, kinds[0])
    wanted = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5)
    factors = np.zeros(1) if weight is None else read(weight, kinds[1])
    wanted = wanted * (factors + plus).astype(np.float32).astype(np.float64)
    for _ in kernels.row_sets():
        out = normed(kernels, x, weight, kinds, plus)
        assert close(out, kinds[2], wanted, 4 + size / 256)


@settings(max_examples=examples(50))
@given(seeds, st.integers(0, 9), columns, st.tuples(types, types, types), st.integers(0, 3),
       st.integers(0, 2), st.sampled_from([0.0, 30.0]))  # fmt: skip
def test_layer_norms(
    kernels: Kernels, seed: int, rows: int, size: int, kinds: tuple, gap: int, given: int,
    far: float,
) -> None:  # fmt: skip
    """far: of the mean from 0."""
    x = numbers(seed, (rows, size), kinds[0], gap)
    x[...] = stored(read(x, kinds[0]) + far, kinds[0])
    own = [numbers(seed + n, (size,), kinds[1]) if n <= given else None for n in (1, 2)]
    wide = read(x, kinds[0])
    wanted = (wide - wide.mean(-1, keepdims=True)) / np.sqrt(wide.var(-1, keepdims=True) + 1e-5)
    size_of = abs(wanted) + (1 + far) / np.sqrt(wide.var(-1, keepdims=True) + 1e-5)
    for each, factor in ((0, True), (1, False)):
        if own[each] is not None:
            more = read(own[each], kinds[1])
            wanted = wanted * more if factor else wanted + more
            size_of = size_of * abs(more) if factor else size_of + abs(more)
    most = size_of * 2.0**-19 + abs(wanted) * ROUNDING[kinds[2]] * 1.01 + 2e-7
    for _ in kernels.row_sets():
        assert (abs(read(centred(kernels, x, *own, kinds), kinds[2]) - wanted) <= most).all()


def turns(rotation: dict, length: int, frequencies: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin, float64 (batch or 1, 1, length, pairs), of angles in float32 as MLX has them."""
    positions = np.arange(length, dtype=np.float32) + rotation["offsets"][:, None, None]
    with np.errstate(divide="ignore"):
        speeds = 1 / frequencies if rotation["inverse"] else frequencies
    positions = positions.astype(np.float32) * np.float32(rotation["scale"])
    angles = (positions[..., None] * speeds.astype(np.float32)).astype(np.float64)
    factor = float(np.float32(rotation["factor"]))
    return np.cos(angles) * factor, np.sin(angles) * factor


@settings(max_examples=examples(60))
@given(seeds, st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 9)),
       st.integers(1, 40), st.integers(0, 9), types, st.booleans(), st.data())  # fmt: skip
def test_rotations(
    kernels: Kernels, seed: int, shape: tuple, pairs: int, rest: int, type_: str, turned: bool, data
) -> None:  # fmt: skip
    batch, heads, length = shape
    rng = np.random.default_rng(seed)
    if turned:  # as (batch, length, heads, size) lies in memory
        x = numbers(seed, (batch, length, heads, 2 * pairs + rest), type_).swapaxes(1, 2)
    else:
        x = numbers(seed, (batch, heads, length, 2 * pairs + rest), type_)
    inverse, traditional = data.draw(st.booleans()), data.draw(st.booleans())
    frequencies = (10000.0 ** -(np.arange(pairs) / pairs)).astype(np.float32)
    if inverse:
        frequencies = 1 / frequencies
        frequencies[rng.random(pairs) < 0.2] = np.inf  # these do not turn
    most = data.draw(st.sampled_from([1, 3000, 1 << 19, 1 << 23]))
    each = batch if data.draw(st.booleans()) else 1
    rotation = {
        "offsets": rng.integers(0, most, each).astype(np.int32), "inverse": inverse,
        "scale": data.draw(st.sampled_from([1.0, 0.25, 8.0])),
        "factor": data.draw(st.sampled_from([1.0, 1.19])),
    }  # fmt: skip
    wide = read(x, type_)
    cos, sin = turns(rotation, length, frequencies)
    cos, sin = cos.reshape(each, 1, length, pairs), sin.reshape(each, 1, length, pairs)
    half = (slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)) if traditional else (
        slice(0, pairs), slice(pairs, 2 * pairs))  # fmt: skip
    a, b = wide[..., half[0]], wide[..., half[1]]
    wanted, most = wide.copy(), np.zeros(wide.shape)
    for part, turned_part in zip(half, (a * cos - b * sin, a * sin + b * cos)):
        wanted[..., part] = turned_part
        size = (abs(a) + abs(b)) * 1.2
        most[..., part] = size * 6 * 2.0**-23 + abs(turned_part) * ROUNDING[type_] * 1.01 + 2.0**-24
    for _ in kernels.row_sets():
        out = rotated(kernels, x, type_, frequencies, traditional=traditional, **rotation)
        assert (abs(read(out, type_) - wanted) <= most).all()


@on_row_sets
def test_turns_are_those_of_float64(kernels: Kernels) -> None:
    """sin and cos, of one pair (1, 0), to within two units in the last place of 1."""
    rng = np.random.default_rng(1)
    quarters = np.arange(-40, 41) * np.pi / 2
    angles = [quarters, rng.normal(size=400) * 3, np.exp(rng.uniform(-20, 13.8, 400)), [1e7, -3e9]]
    speeds = np.concatenate(angles).astype(np.float32)
    x = np.zeros((1, 1, 1, 2 * len(speeds)), np.float32)
    x[..., : len(speeds)] = 1
    out = rotated(kernels, x, "f32", speeds, np.ones(1, np.int32))[0, 0, 0].astype(np.float64)
    wanted = np.concatenate([np.cos(speeds.astype(np.float64)), np.sin(speeds.astype(np.float64))])
    assert (abs(out - wanted) <= 2.0**-23).all()
    large = abs(wanted) > 1e-4
    assert (abs(out - wanted) <= abs(wanted) * 3 * 2.0**-23)[large].all()


@settings(max_examples=examples(40))
@given(seeds, st.one_of(st.integers(0, 300), st.just(40001)), types,
       st.sampled_from(ACTIVATIONS), st.booleans())  # fmt: skip
def test_gates(kernels: Kernels, seed: int, size: int, type_: str, kind: str, alone: bool) -> None:
    gate = numbers(seed, (size,), type_)
    x = None if alone else numbers(seed + 1, (size,), type_)
    factor = 1 if x is None else read(x, type_)
    if kind == "swiglu_oai" and x is not None:
        factor = np.clip(factor, -7, 7) + 1
    wanted = activated(read(gate, type_), kind) * factor
    # An argument of exp that is off by half a unit is worth as many units as it is large; a sum of
    # erf is off by 1e-7 of the gate.
    least = 2.0**-20 if kind in ("gelu", "swiglu_oai") else 0
    if kind == "gelu_erf":
        least = 2.0**-22 * (abs(read(gate, type_) * factor) + 1e-20)
    for _ in kernels.row_sets():
        assert close(gated(kernels, gate, x, type_, kind), type_, wanted, 16, least)


@on_row_sets
def test_gates_at_the_ends(kernels: Kernels) -> None:
    ends = np.array([0, -0.0, np.inf, -np.inf, np.nan, 200, -200, 88.9, -88.9, 1e30], np.float32)
    out = gated(kernels, ends, None, "f32", "sigmoid")
    np.testing.assert_allclose(
        out, [0.5, 0.5, 1, 0, np.nan, 1, 0, 1, activated(np.float64(-88.9), "sigmoid"), 1],
        rtol=1e-6, atol=1e-38,
    )  # fmt: skip
    out = gated(kernels, ends, None, "f32", "silu")
    np.testing.assert_allclose(
        out, [0, 0, np.inf, np.nan, np.nan, 200, 0, 88.9, 0, 1e30], rtol=1e-6, atol=1e-35
    )
    out = gated(kernels, ends, None, "f32", "gelu_erf")
    np.testing.assert_allclose(out, [0, 0, np.inf, np.nan, np.nan, 200, 0, 88.9, 0, 1e30])
    out = gated(kernels, ends, None, "f32", "relu2")
    np.testing.assert_allclose(
        out, [0, 0, np.inf, 0, np.nan, 4e4, 0, 88.9**2, 0, np.inf], rtol=1e-6
    )
    out = gated(kernels, ends, None, "f32", "finite")
    np.testing.assert_array_equal(out, [0, 0, 1e4, -1e4, 0, *ends[5:]])
    out = gated(kernels, np.zeros_like(ends) + 8, ends, "f32", "swiglu_oai")
    limits = np.array([1, 1, 8, -6, np.nan, 8, -6, 8, -6, 8])
    np.testing.assert_allclose(out, 7 * limits / (1 + np.exp(-7 * 1.702)), rtol=1e-6)


@settings(max_examples=examples(20))
@given(seeds, st.integers(0, 9), st.one_of(st.integers(1, 90), st.just(9001)), st.booleans())
def test_rows_that_are_added(
    kernels: Kernels, seed: int, count: int, size: int, chosen: bool
) -> None:
    """What is not there adds nothing."""
    x, rows = numbers(seed, (count, size), "f32"), numbers(seed + 1, (5, size), "f32")
    which = np.random.default_rng(seed).integers(0, 7, count).astype(np.uint32) if chosen else None
    added = np.concatenate([rows, np.zeros((2, size), np.float32)])[
        which if chosen else [0] * count
    ]
    for _ in kernels.row_sets():
        assert np.array_equal(rows_added(kernels, x, rows, which), x + added)


@settings(max_examples=examples(40))
@given(seeds, st.integers(0, 5), columns, st.tuples(types, types), st.integers(0, 3),
       st.sampled_from([1, 1e-4, 20]))  # fmt: skip
def test_softmax(
    kernels: Kernels, seed: int, rows: int, size: int, kinds: tuple, gap: int, scale: float
) -> None:
    x = stored(read(numbers(seed, (rows, size), kinds[0], gap), kinds[0]) * scale, kinds[0])
    x.flat[:: 1 + size // 3] = stored(np.array(-np.inf), kinds[0])
    x[:, -1:] = stored(np.array(0.5), kinds[0])
    wide = read(x, kinds[0])
    most = wide.max(-1, keepdims=True, initial=-1e9)
    exps = np.exp(wide - most)
    sums = exps.sum(-1, keepdims=True)
    apart = np.where(np.isinf(wide), 0, wide - most)  # what is ruled out adds nothing
    logs = np.log(sums)[:, 0]
    told = np.stack([most[:, 0], logs, logs - (exps * apart).sum(-1) / sums[:, 0]]).T
    first = wide.argmax(-1)
    logs = most[:, 0] + logs
    for _ in kernels.row_sets():
        out = softmax(kernels, x, kinds)
        assert close(out, kinds[1], exps / sums, 110)  # exp of up to -100
        error = abs(log_sum_exp(kernels, x, kinds[0]) - logs)
        assert (error <= 2.0**-22 * (abs(logs) + 1)).all()
        found = distribution(kernels, x, kinds[0])
        error = abs(found[:, :3] - told)
        assert (error <= 2.0**-20 * (abs(told) + 1)).all()
        assert np.array_equal(found[:, 3], first)


@pytest.mark.parametrize("size", [5, 64, 20000])
@on_row_sets
def test_softmax_at_the_ends(kernels: Kernels, size: int) -> None:
    """As MLX has them: no number, and infinite ones."""
    x = np.zeros((5, size), np.float32)
    x[0], x[1, size // 2], x[2, size - 1], x[3] = -np.inf, np.nan, np.inf, 1e38
    both = np.stack([x[2], np.where(np.isnan(x[1]), x[1], x[2])])
    assert list(np.isnan(log_sum_exp(kernels, both, "f32"))) == [False, True]
    out, sums = softmax(kernels, x, ("f32", "f32")), log_sum_exp(kernels, x, "f32")
    assert np.isnan(out[:3]).any(-1).all() and np.isnan(out[:2]).all()
    np.testing.assert_allclose(out[3:], 1 / size, rtol=1e-6)
    assert sums[0] == -np.inf and np.isnan(sums[1]) and sums[2] == np.inf
    np.testing.assert_allclose(sums[3:], [1e38, np.log(size)], rtol=1e-6)
    found = distribution(kernels, x, "f32")
    assert np.isnan(found[:3, 1:3]).all()
    np.testing.assert_allclose(found[3:, 0], [1e38, 0])
    np.testing.assert_allclose(found[3:, 1:3], np.log(size), rtol=1e-6)
    assert not found[3:, 3].any()


@settings(max_examples=examples(40))
@given(seeds, st.integers(1, 5), st.one_of(st.integers(1, 150), st.just(20001)), types,
       st.integers(0, 3), st.booleans(), st.data())  # fmt: skip
def test_partitions(
    kernels: Kernels, seed: int, rows: int, size: int, type_: str, gap: int, alike: bool, data
) -> None:  # fmt: skip
    """Equal numbers by their places, both zeros being equal; no number after all."""
    x = numbers(seed, (rows, size), type_, gap)
    if alike:
        x[:] = stored(np.round(read(x, type_) / 4), type_)
    x.flat[:: 1 + size // 3] = stored(np.array(np.inf), type_)
    x.flat[1 :: 2 + size // 3] = stored(np.array(-np.nan), type_)
    x.flat[2 :: 2 + size // 4] = stored(np.array(-np.inf), type_)
    kth = data.draw(st.integers(0, size - 1))
    wanted = np.argsort(read(x, type_), axis=-1, kind="stable")
    parts = (slice(kth), slice(kth, kth + 1), slice(kth + 1, None))
    sorted_parts = [np.sort(wanted[:, part]) for part in parts]
    for _ in kernels.row_sets():
        out = partition(kernels, x, type_, kth)
        for part, right in zip(parts, sorted_parts):
            assert np.array_equal(np.sort(out[:, part]), right)


@settings(max_examples=examples(40))
@given(seeds, st.integers(0, 5), columns, types, st.integers(0, 3), st.booleans())
def test_the_largest(
    kernels: Kernels, seed: int, rows: int, size: int, type_: str, gap: int, alike: bool
) -> None:
    """The first of equal ones; what is no number is none."""
    x = numbers(seed, (rows, size), type_, gap)
    if alike:
        x[:] = stored(np.round(read(x, type_) / 4), type_)
    x[:, : seed % size] = stored(np.array(-np.inf), type_)
    x[:, seed % 7 :: 1 + seed % 3] = stored(np.array(np.nan), type_)
    wide = read(x, type_)
    wanted = np.where(np.isnan(wide), -np.inf, wide)
    # Where nothing else is left, the first -inf that there is.
    first = np.where(wanted.max(-1) == -np.inf, (wide == -np.inf).argmax(-1), wanted.argmax(-1))
    for _ in kernels.row_sets():
        assert np.array_equal(largest(kernels, x, type_), first)


@settings(max_examples=examples(40))
@given(seeds, st.integers(0, 5), st.integers(1, 9), columns, st.tuples(types, types),
       st.integers(0, 3))  # fmt: skip
def test_weighted_sums(
    kernels: Kernels, seed: int, groups: int, group: int, size: int, kinds: tuple, gap: int
) -> None:
    x = numbers(seed, (groups * group, size), kinds[0], gap)
    weights = np.random.default_rng(seed).normal(size=groups * group).astype(np.float32)
    each = (read(x, kinds[0]) * weights[:, None].astype(np.float64)).reshape(groups, group, size)
    least = group * 2.0**-23 * abs(each).max(initial=0) + 1e-38
    wanted = each.sum(1)
    for _ in kernels.row_sets():
        out = weighted_sums(kernels, x, weights, kinds, group)
        assert close(out, kinds[1], wanted, 4, least)


@settings(max_examples=examples(30))
@given(seeds, st.integers(0, 5), st.integers(1, 9), columns, types, st.integers(0, 3))
def test_blends(
    kernels: Kernels, seed: int, groups: int, group: int, size: int, type_: str, gap: int
) -> None:
    x, rng = numbers(seed, (groups * group, size), type_, gap), np.random.default_rng(seed)
    weights, gates = (rng.normal(size=n).astype(np.float32) for n in (groups * group, groups))
    more = rng.normal(size=(groups, size)).astype(np.float32)
    parts = (read(x, type_) * weights[:, None].astype(np.float64)).reshape(groups, group, size)
    added = more.astype(np.float64) / (1 + np.exp(-gates.astype(np.float64)))[:, None]
    least = group * 2.0**-23 * (abs(parts).max(initial=0) + abs(added).max(initial=0)) + 1e-38
    wanted = parts.sum(1) + added
    for _ in kernels.row_sets():
        assert close(blended(kernels, x, weights, more, gates, type_), "f32", wanted, 8, least)


@settings(max_examples=examples(20))
@given(seeds, st.integers(1, 30), st.sampled_from([64, 2048, 40001]), st.integers(1, 4))
def test_rows_are_what_each_is_alone(
    kernels: Kernels, seed: int, rows: int, size: int, threads: int
) -> None:
    """To the bit, with any number of threads."""
    x, kinds = numbers(seed, (rows, size), "f32"), ("f32",) * 3
    frequencies = np.geomspace(1, 1e-4, size // 2).astype(np.float32)
    positions = np.arange(rows, dtype=np.int32)

    def all_of(x: np.ndarray, offsets: np.ndarray) -> list[np.ndarray]:
        return [
            normed(kernels, x, x[0], kinds), gated(kernels, x, x, "f32", "silu"),
            softmax(kernels, x, kinds), log_sum_exp(kernels, x, "f32"),
            rotated(kernels, x[:, None, None], "f32", frequencies, offsets),
            partition(kernels, x, "f32", size // 2), distribution(kernels, x, "f32"),
            largest(kernels, x, "f32"),
            weighted_sums(kernels, np.repeat(x, 2, 0), x[0, np.arange(2 * len(x)) % 2], kinds, 2),
        ]  # fmt: skip

    for _ in kernels.row_sets():
        together = all_of(x, positions)
        kernels.library.toast_set_threads(threads)
        for row in range(0, rows, 7):
            alone = all_of(np.concatenate([x[:1], x[row : row + 1]]), positions[[0, row]])
            for a, b in zip(together, alone):
                assert np.array_equal(a[row], b[1])


@on_row_sets
def test_what_is_no_operation_is_refused(kernels: Kernels) -> None:
    x = np.zeros((2, 8), np.float32)
    one = np.zeros(1, np.int32)
    calls = [
        lambda: call(kernels, "rms_norm", vectors(x, "f32"), 8, None, 3, 0.0, 0.0, x, 0),
        lambda: call(kernels, "gate", x, None, 8, 0, 7, x),
        lambda: call(kernels, "softmax", vectors(x, "f32"), 8, x, -1),
        lambda: partition(kernels, x, "f32", 8),
        lambda: largest(kernels, x[:, :0], "f32"),
        lambda: weighted_sums(kernels, x, x[0], ("f32", "f32"), 3),
    ]
    for refused in calls:
        with pytest.raises(ValueError, match="1"):
            refused()
    for frequencies, offsets in ((np.zeros(5, np.float32), one), (x[0, :4], np.zeros(3, np.int32))):
        with pytest.raises(ValueError, match="1"):
            rotated(kernels, x[:, None, None], "f32", frequencies, offsets)
