"""The products of toastkit/native/kernels, against float64, on the processor's instruction sets."""

from __future__ import annotations

import os
import resource
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import examples
from tests.native_library import needed
from tests.unit.native_kernels import (
    E2M1,
    IN_FLOATS,
    SANITIZERS,
    TYPES,
    Kernels,
    Matrix,
    kernels,
    mxfp4_matrix,
    on_sets,
    products,
    random_matrix,
    read,
    stored,
)

__all__ = ["kernels"]
pytestmark = needed
BITS = (0, 2, 3, 4, 5, 6, 8, "mxfp4")
IN_TILES = 7  # vectors: fewer than six go without AMX's tiles
activation_bits = st.sampled_from((12, 16, 32))
matrices = st.builds(
    lambda seed, experts, rows, groups, odd, bits, size, type_: random_matrix(
        seed, (experts, rows, groups * size if bits else groups * 16 + odd), bits, size, type_
    ),
    st.integers(0, 1 << 30), st.integers(1, 3), st.integers(0, 40), st.integers(0, 19),
    st.integers(0, 15), st.sampled_from(BITS), st.sampled_from((32, 64, 128)),
    st.sampled_from(list(TYPES)),
)  # fmt: skip


def vectors(seed: int, count: int, columns: int, type_: str, gap: int) -> np.ndarray:
    """Random ones, of very different sizes, (count, columns) as stored, with a gap between."""
    rng = np.random.default_rng(seed)
    sizes = np.exp(2 * rng.normal(size=(count, columns + gap)))
    return stored(rng.normal(size=sizes.shape) * np.minimum(sizes, 50), type_)[:, :columns]


@settings(max_examples=examples(80))
@given(matrix=matrices, data=st.data())
def test_products_are_those_of_float64(kernels: Kernels, matrix: Matrix, data) -> None:
    experts, rows, columns = matrix.exact.shape
    x_type, out_type = (data.draw(st.sampled_from(list(TYPES))) for _ in "xo")
    count, gathered = data.draw(st.integers(0, 21)), data.draw(st.booleans())
    x = vectors(data.draw(st.integers(0, 99)), count, columns, x_type, data.draw(st.integers(0, 3)))
    bits = data.draw(activation_bits)
    expert, vector = np.zeros(count, np.uint32), np.arange(count, dtype=np.uint32)
    chosen = {}
    if gathered and count:
        rng = np.random.default_rng(count)
        expert = rng.integers(0, experts, 2 * count).astype(np.uint32)
        vector = rng.integers(0, count, 2 * count).astype(np.uint32)
        chosen = {"vector": vector, "expert": expert}
    wide = read(x, x_type)[vector]
    wanted = products(wide, matrix.exact, expert)
    for _ in kernels.sets():
        out = kernels.multiply(matrix, x, x_type, out_type, activation_bits=bits, **chosen)
        error = abs(read(out, out_type) - wanted)
        assert (error <= kernels.most_error(matrix, wide, expert, bits, out_type)).all()


@settings(max_examples=examples(40))
@given(matrix=matrices, count=st.integers(1, 30), bits=activation_bits, data=st.data())
def test_a_batch_gives_what_its_vectors_give(
    kernels: Kernels, matrix: Matrix, count: int, bits: int, data
) -> None:
    """To the bit, with any number of threads, and however experts are mixed."""
    experts, _, columns = matrix.exact.shape
    x = vectors(count, count, columns, "f32", 0)
    rng = np.random.default_rng(count)
    expert = rng.integers(0, experts, count).astype(np.uint32)
    vector = np.arange(count, dtype=np.uint32)
    threads = data.draw(st.integers(1, 4))
    for _ in kernels.sets():
        together = kernels.multiply(matrix, x, vector=vector, expert=expert, activation_bits=bits)
        kernels.library.toast_set_threads(threads)
        for i in range(count):
            alone = kernels.multiply(matrix, x[i : i + 1], vector=vector[:1],
                                     expert=expert[i : i + 1], activation_bits=bits)  # fmt: skip
            assert np.array_equal(together[i], alone[0])


@settings(max_examples=examples(40))
@given(matrix=matrices, count=st.integers(1, 150), bits=activation_bits, gathered=st.booleans())
def test_one_set_gives_what_another_gives(
    kernels: Kernels, matrix: Matrix, count: int, bits: int, gathered: bool
) -> None:
    """To the bit, where they multiply the same whole numbers: a home on two machines."""
    x = vectors(count, count, matrix.exact.shape[2], "f32", 1)
    vector = np.random.default_rng(count).permutation(count).astype(np.uint32) if gathered else None
    first: dict[int | None, np.ndarray] = {}
    for name in kernels.sets():
        # In floats sums depend on the size of registers.
        alike = bits != 32 and matrix.bits
        numbers = kernels.pair_digits(matrix, bits) if alike else name in ("avx2", "avxvnni")
        if name not in IN_FLOATS:
            out = kernels.multiply(matrix, x, vector=vector, activation_bits=bits)
            assert np.array_equal(out, first.setdefault(numbers, out), equal_nan=True), name


@settings(max_examples=examples(40))
@given(
    kinds=st.lists(st.tuples(st.sampled_from(BITS), st.sampled_from((32, 64))), max_size=4),
    count=st.integers(1, 12), bits=activation_bits, seed=st.integers(0, 1 << 30), data=st.data(),
)  # fmt: skip
def test_several_give_what_each_gives(
    kernels: Kernels, kinds: list, count: int, bits: int, seed: int, data
) -> None:
    """To the bit: little ones and such as are shared out, for which vectors are prepared alike or
    otherwise."""
    rows = data.draw(st.lists(st.sampled_from((0, 7, 33, 600)), min_size=4, max_size=4))
    x = vectors(seed, count, 256, "f32", 0)
    matrices = [
        random_matrix(seed + i, (1, rows[i], 256), packing, size, "f16")
        for i, (packing, size) in enumerate(kinds)
    ]
    for _ in kernels.sets():
        together = kernels.multiply_all(matrices, x, bits)
        for matrix, found in zip(matrices, together, strict=True):
            assert np.array_equal(found, kernels.multiply(matrix, x, activation_bits=bits))


def test_more_matrices_than_one_call_takes_are_refused(kernels: Kernels) -> None:
    with pytest.raises(ValueError, match="1"):
        kernels.multiply_all([random_matrix(0, (1, 1, 32), 0, 0, "f32")] * 9, np.ones((1, 32), "f"))


@pytest.mark.parametrize("bits", BITS)
def test_large_ones_are_shared_out(kernels: Kernels, bits: int | str) -> None:
    matrix, x = random_matrix(1, (1, 301, 2048), bits, 64, "f32"), vectors(2, 17, 2048, "f32", 0)
    wide = x.astype(np.float64)
    wanted, expert = wide @ matrix.exact[0].T, np.zeros(17, int)
    for _ in kernels.sets():
        most = kernels.most_error(matrix, wide, expert, False, "f32")
        for rows in (1, 17):
            out = kernels.multiply(matrix, x[:rows])
            assert (abs(out - wanted[:rows]) <= most[:rows]).all()


@pytest.mark.parametrize(
    ("bits", "group_size"), [*((b, 32) for b in BITS), *((b, 128) for b in BITS[1:-1])]
)
def test_more_than_is_computed_at_once(kernels: Kernels, bits: int | str, group_size: int) -> None:
    """Vectors and columns in several goes, all of them with odd ends: to the bit as one by one. Of
    4096 columns as float32 fewer rows are computed at once than of 1024."""
    columns = (4096 if bits == 4 else 1024) + 3 * group_size
    matrix = random_matrix(14, (1, 83, columns), bits, group_size, "bf16")
    x = vectors(15, 67, matrix.exact.shape[2], "f32", 1)
    wide, expert = x.astype(np.float64), np.zeros(67, int)
    wanted = wide @ matrix.exact[0].T
    for _ in kernels.sets():
        out = kernels.multiply(matrix, x)
        most = kernels.most_error(matrix, wide, expert, False, "f32")
        assert (abs(out - wanted) <= most).all()
        for i in (0, 40, 63, 64, 66):
            assert np.array_equal(kernels.multiply(matrix, x[i : i + 1])[0], out[i])


def test_many_vectors_and_rows_are_one_by_one(kernels: Kernels) -> None:
    """So many rows for one thread that more vectors than elsewhere are a batch."""
    matrix = random_matrix(16, (1, 700, 96), 4, 32, "f32")
    x = vectors(17, 300, 96, "f32", 0)
    for _ in kernels.sets():
        kernels.library.toast_set_threads(1)
        out = kernels.multiply(matrix, x)
        for i in (0, 2, 63, 64, 127, 128, 255, 256, 299):
            assert np.array_equal(kernels.multiply(matrix, x[i : i + 1])[0], out[i])


@pytest.mark.parametrize("bits", BITS[1:])
def test_vectors_that_fit_no_cache_are_one_by_one(kernels: Kernels, bits: int | str) -> None:
    """Several tiles of rows meet a part of their columns before the next, odd one: with one thread,
    and so many rows that chunks have several tiles."""
    matrix = random_matrix(18, (1, 1061, 4160), bits, 32, "bf16")
    x = vectors(19, 67, 4160, "f32", 0)
    for _ in kernels.sets():
        shared = kernels.multiply(matrix, x)
        kernels.library.toast_set_threads(1)
        assert np.array_equal(kernels.multiply(matrix, x), shared)
        for i in (0, 63, 64, 66):
            assert np.array_equal(kernels.multiply(matrix, x[i : i + 1])[0], shared[i])


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@on_sets
def test_what_is_no_number_stays_none(kernels: Kernels, bits: int | str, bad: float) -> None:
    """In its vector, and in no other."""
    matrix = random_matrix(3, (1, 20, 192), bits, 64, "f32")
    for count in (3, IN_TILES):
        x = vectors(4, count, 192, "f32", 0)
        x[1, 100] = bad
        out = kernels.multiply(matrix, x)
        assert not np.isfinite(out[1]).any()
        assert np.isfinite(np.delete(out, 1, 0)).all()


@on_sets
def test_extreme_activations(kernels: Kernels) -> None:
    matrix = random_matrix(5, (1, 9, 64), 4, 64, "f32")
    x = np.zeros((4, 64), np.float32)
    x[1], x[2], x[3] = 1e-42, 1e35, -1e35
    out = kernels.multiply(matrix, x)
    assert not out[0].any()
    assert (abs(out[1]) < 1e-39).all()
    np.testing.assert_allclose(out[2], 1e35 * matrix.exact[0].sum(-1), rtol=1e-3)
    assert np.array_equal(out[3], -out[2])


@on_sets
def test_every_code_with_every_scale(kernels: Kernels) -> None:
    """One at a time, to the bit: of the least scales numbers below the normal ones, NaN of the
    last; what is computed on the way to those before it is beyond float32."""
    codes = np.tile(np.arange(32, dtype=np.uint8) % 16, (1, 256, 1))
    matrix = mxfp4_matrix(codes, np.arange(256, dtype=np.uint8)[None, :, None])
    out = kernels.multiply(matrix, np.eye(32, dtype=np.float32), activation_bits=32).T
    assert np.array_equal(out[:252], matrix.exact[0, :252]) and np.isnan(out[255]).all()
    out = kernels.multiply(matrix, np.eye(32, dtype=np.float32)).T[20:252]
    np.testing.assert_allclose(out / 2.0 ** np.arange(-107, 125)[:, None], E2M1[codes[0, 20:252]],
                               rtol=0, atol=1e-5)  # fmt: skip


@pytest.mark.parametrize("bits", (0, 4, "mxfp4"))
@pytest.mark.parametrize("out_type", list(TYPES))
@on_sets
def test_experts_that_are_not_there(kernels: Kernels, bits: int | str, out_type: str) -> None:
    matrix = random_matrix(6, (2, 8, 64), bits, 32, "f16")
    x = vectors(7, 2, 64, "f32", 0)
    expert, vector = (np.array(some, np.uint32) for some in ([0, 2, 1, 1 << 31], [0, 0, 2, 1]))
    out = read(kernels.multiply(matrix, x, "f32", out_type, vector, expert), out_type)
    assert np.isfinite(out[0]).all() and np.isnan(out[1:]).all()


@on_sets
def test_numbers_of_all_types_are_rounded_alike(kernels: Kernels) -> None:
    """One times one number, which is rounded to the type of the result as numpy rounds it."""
    values = np.concatenate([
        np.random.default_rng(8).normal(size=400) * 10.0 ** np.arange(-10, 10).repeat(20),
        [65519.9, 65520, 65504, 6e-8, 2.9e-8, 2.99e-8, 6.1e-5, 1 + 2**-11, 1 + 3 * 2**-11, 1e-45],
    ]).astype(np.float32)  # fmt: skip
    one = random_matrix(9, (1, 1, 1), 0, 32, "f32")
    one = one._replace(weight=np.ones((1, 1, 1), np.float32))
    column = np.ascontiguousarray(values[:, None])
    with np.errstate(over="ignore"):
        half = values.astype(np.float16)
    assert np.array_equal(kernels.multiply(one, column, out_type="f16")[:, 0], half)
    assert np.array_equal(kernels.multiply(one, column)[:, 0], values)
    bits = values.view(np.uint32).astype(np.uint64)
    nearest = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    assert np.array_equal(kernels.multiply(one, column, out_type="bf16")[:, 0], nearest)
    every = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    every = every[np.isfinite(every)][:, None]
    out = kernels.multiply(one, every, "f16", "f16")
    assert np.array_equal(out, every)


@on_sets
def test_matrices_of_no_known_kind_are_refused(kernels: Kernels) -> None:
    good = random_matrix(10, (1, 4, 64), 4, 64, "f32")
    x = vectors(1, 1, 64, "f32", 0)
    for bad in ({"bits": 7}, {"group_size": 48}, {"group_size": 0}, {"bits": -4}):
        with pytest.raises(ValueError, match="1"):
            kernels.multiply(good._replace(**bad), x)
    powers = random_matrix(10, (1, 4, 64), "mxfp4", 32, "")
    for bad in ({"bits": 8}, {"bits": 0}, {"group_size": 64}):
        with pytest.raises(ValueError, match="1"):
            kernels.multiply(powers._replace(**bad), x)
    ragged = good._replace(exact=np.zeros((1, 4, 65)), group_size=32)
    with pytest.raises(ValueError, match="1"):
        kernels.multiply(ragged, vectors(1, 1, 65, "f32", 0))


def test_an_instruction_set_that_is_not_there(kernels: Kernels) -> None:
    for name in kernels.sets():
        assert not kernels.choose("avx1024")
        assert kernels.instructions == name


# The pool is the same with every set: with the first, whose threads may have tiles (AMX).


def test_many_callers_at_once(kernels: Kernels) -> None:
    """One has the pool; the others compute alone."""
    next(kernels.sets())
    matrix = random_matrix(11, (1, 64, 2048), 4, 64, "f32")
    x = vectors(12, IN_TILES, 2048, "f32", 0)
    wanted = kernels.multiply(matrix, x)
    start = threading.Barrier(4)

    def call(_: int) -> bool:
        start.wait()
        return all(np.array_equal(kernels.multiply(matrix, x), wanted) for _ in range(20))

    with ThreadPoolExecutor(4) as callers:
        assert all(callers.map(call, range(4)))


def computes_in_three(kernels: Kernels, matrix: Matrix, x: np.ndarray, wanted) -> bool:
    """Whether a child, which has none of its parent's threads, computes right in its own."""
    before = len(os.listdir("/proc/self/task"))  # an emulator has some beside
    right = all(np.array_equal(kernels.multiply(matrix, x), wanted) for _ in range(3))
    return right and len(os.listdir("/proc/self/task")) == before + 2


def test_after_a_fork(kernels: Kernels) -> None:
    next(kernels.sets())
    matrix = random_matrix(13, (1, 512, 2048), 4, 64, "f32")
    x = vectors(14, IN_TILES, 2048, "f32", 0)
    wanted = kernels.multiply(matrix, x)
    child = os.fork()
    if not child:
        os._exit(not computes_in_three(kernels, matrix, x, wanted))
    assert os.waitpid(child, 0)[1] == 0


def test_forks_while_others_compute(kernels: Kernels) -> None:
    """The pool was in use when the child came to be; the child's is not."""
    next(kernels.sets())
    matrix = random_matrix(13, (1, 256, 2048), 4, 64, "f32")
    x = vectors(14, IN_TILES, 2048, "f32", 0)
    wanted = kernels.multiply(matrix, x)
    over = threading.Event()

    def compute() -> None:
        while not over.is_set():
            kernels.multiply(matrix, x)

    others = threading.Thread(target=compute)
    others.start()
    try:
        for _ in range(5):
            child = os.fork()
            if not child:
                os._exit(not computes_in_three(kernels, matrix, x, wanted))
            assert os.waitpid(child, 0)[1] == 0
    finally:
        over.set()
        others.join()


def test_fewer_processors_than_at_the_start(kernels: Kernels) -> None:
    """And fewer than threads."""
    next(kernels.sets())
    matrix = random_matrix(15, (1, 512, 2048), 4, 64, "f32")
    x = vectors(16, 3, 2048, "f32", 0)
    wanted = kernels.multiply(matrix, x)
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        kernels.library.toast_set_threads(6)
        assert np.array_equal(kernels.multiply(matrix, x), wanted)
    finally:
        os.sched_setaffinity(0, before)


@pytest.mark.skipif(bool(SANITIZERS), reason="sanitizers need addresses of their own")
def test_a_limit_on_threads(kernels: Kernels) -> None:
    """Those that can be had do the work."""
    next(kernels.sets())
    matrix = random_matrix(17, (1, 512, 2048), 4, 64, "f32")
    x = vectors(18, 3, 2048, "f32", 0)
    wanted = kernels.multiply(matrix, x)
    child = os.fork()
    if not child:  # addresses are left for few stacks
        kernels.library.toast_set_threads(200)
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (6 << 20), used + (6 << 20)))
        right = np.array_equal(kernels.multiply(matrix, x), wanted)
        os._exit(0 if right and kernels.library.toast_threads() < 200 else 1)
    assert os.waitpid(child, 0)[1] == 0
