"""The counter-based generator: published vectors, recorded MLX numbers, laws of its layout."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import examples
from toastkit.sampling.draws import position_key, threefry2x32, uniform_scalar
from toastkit.sampling.threefry import GUMBEL_MAX, gumbel, uniform, uniform_at

words = st.integers(0, 2**32 - 1)
keys = st.tuples(words, words)

# Threefry2x32, 20 rounds, from the test vectors of the authors" library Random123.
KNOWN_ANSWERS = [
    ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
    ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
    ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
]
# mx.random.uniform(shape=(n,), key=mx.array(key, mx.uint32)) of MLX 0.32.4, bits as float hex.
RECORDED = [
    ((0, 0), 1, ["0x1.ac80060000000p-2"]),
    (
        (1, 2),
        4,
        [
            "0x1.ec283c0000000p-1",
            "0x1.7c8a660000000p-1",
            "0x1.17a7d80000000p-1",
            "0x1.6c7c8c0000000p-1",
        ],
    ),
    (
        (4294967295, 305419896),
        5,
        [
            "0x1.4f3c580000000p-2",
            "0x1.be90c00000000p-4",
            "0x1.a29a2e0000000p-4",
            "0x1.efdd3e0000000p-7",
            "0x1.483aec0000000p-1",
        ],
    ),
]


@pytest.mark.parametrize("key, counter, expected", KNOWN_ANSWERS)
def test_known_answers(key, counter, expected):
    assert threefry2x32(key, *counter) == expected


@pytest.mark.parametrize("key, n, expected", RECORDED)
def test_numbers_are_those_of_mlx(key, n, expected):
    assert [float(u).hex() for u in uniform(key, n)] == expected


def naive_uniform(key: tuple[int, int], n: int, index: int) -> np.float32:
    """One number of the layout without blocks and vectors: what the module"s docstring says."""
    half = n - n // 2
    first = index % half
    second = first + half if first + half < n else 0
    bits = threefry2x32(key, first, second)[index >= half]
    below_one = np.nextafter(np.float32(1), np.float32(0))
    return min(np.float32(bits) * np.float32(2**-32), below_one)


# Sizes around the block boundaries, odd and even.
@pytest.mark.parametrize("n", [1, 2, 3, 4096, 32767, 32768, 32769, 65537, 98304, 151936])
def test_blocks_do_not_show(n):
    edges = {edge + near for edge in range(0, n + 1, 16384) for near in (-2, -1, 0, 1)}
    half = {n - n // 2 + near for near in (-1, 0, 1)}
    chosen = sorted({*edges, *half, *range(0, n, 97)} & set(range(n)))
    assert uniform((7, 8), n)[chosen].tolist() == [naive_uniform((7, 8), n, i) for i in chosen]


@settings(max_examples=examples(25))
@given(keys, st.integers(1, 5000), st.data())
def test_uniform_at_is_a_view_into_uniform(key, n, data):
    indices = np.array(data.draw(st.lists(st.integers(0, n - 1), max_size=30)), np.int64)
    assert (uniform_at(key, n, indices) == uniform(key, n)[indices]).all()


def test_uniform_at_over_several_blocks():
    indices = np.random.default_rng(0).integers(0, 151937, 50000)
    assert (uniform_at((1, 2), 151937, indices) == uniform((1, 2), 151937)[indices]).all()


@given(keys)
def test_uniform_scalar_is_the_first_of_one(key):
    assert uniform_scalar(key) == uniform(key, 1)[0]


def test_words_that_round_to_one_stay_below_it():
    key = 0, 0x29483BB
    assert threefry2x32(key, 0, 0)[0] == 0xFFFFFFB6
    assert uniform_scalar(key) == uniform(key, 1)[0] == 1 - 2.0**-24


def test_position_keys_differ_by_seed_position_and_stream():
    arguments = [
        (seed, position, stream)
        for seed in (0, 1, 2**32, 2**64 - 1)
        for position in range(50)
        for stream in (0, 1)
    ]
    assert len({position_key(*each) for each in arguments}) == len(arguments)


def test_position_key_is_threefry_of_seed_and_position():
    seed = 0x13198A2E_03707344
    assert position_key(seed, 0x243F6A88, 0x85A308D3) == (0xC4923A9C, 0x483DF7A0)


def test_uniform_is_flat():
    u = uniform(position_key(1, 2), 200_000)
    assert u.min() >= 0 and u.max() < 1
    counts = np.bincount((u * 100).astype(int), minlength=100)
    chi_square = ((counts - 2000.0) ** 2 / 2000).sum()
    # 99 degrees of freedom: mean 99, standard deviation 14.
    assert 40 < chi_square < 180


def test_gumbel_at_the_ends_is_finite_and_bounded():
    highest = np.nextafter(np.float32(1), np.float32(0))
    noise = gumbel(np.array([0, 1e-10, 0.5, highest], np.float32))
    assert noise.dtype == np.float32 and np.isfinite(noise).all()
    assert noise[-1] < GUMBEL_MAX
    assert noise[2] == pytest.approx(-np.log(-np.log(0.5)), rel=1e-6)


def test_gumbel_has_the_mean_and_variance_of_its_law():
    noise = gumbel(uniform(position_key(3, 4), 200_000)).astype(np.float64)
    assert noise.mean() == pytest.approx(0.5772, abs=0.01)
    assert noise.var() == pytest.approx(np.pi**2 / 6, abs=0.03)
