"""Weights that were quantised before show by how few values they take; others never do."""

from __future__ import annotations

import mlx.core as mx
import pytest

from tests.model.checkpoints import open_store
from toastkit.store.precision import LARGEST, dequantise_rows, looks_quantised, quantise_rows

DTYPES = [mx.float32, mx.float16, mx.bfloat16]


def drawn(kind: str, shape: tuple[int, ...]) -> mx.array:
    """Weights as they might be trained."""
    key = mx.random.key(11)
    if kind == "uniform":
        return mx.random.uniform(-0.1, 0.1, shape, key=key)
    if kind == "heavy-tailed":
        return mx.random.laplace(shape, key=key) * mx.exp(mx.random.normal(shape, key=key))
    return 0.02 * mx.random.normal(shape, key=key)


KINDS = ("normal", "uniform", "heavy-tailed")
# (bits, group size, mode) of mx.quantize; columns that the rows have at least.
MLX_FORMATS = [
    *((bits, size, "affine", 128) for bits in (2, 3, 4, 5, 6) for size in (32, 64, 128)),
    *((8, size, "affine", 512) for size in (32, 64, 128)),
    (4, 32, "mxfp4", 128), (4, 16, "nvfp4", 128), (8, 32, "mxfp8", 128),
]  # fmt: skip


def expanded(weight: mx.array, bits: int, size: int, mode: str) -> mx.array:
    parts = mx.quantize(weight, size, bits, mode=mode)
    return mx.dequantize(*parts, group_size=size, bits=bits, mode=mode)


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_quantised_by_mlx_shows(kind: str) -> None:
    for bits, size, mode, least in MLX_FORMATS:
        for columns, dtypes in ((least, DTYPES), (1536, DTYPES[2:])):
            weight = drawn(kind, (48, columns)).astype(mx.bfloat16)
            back = expanded(weight, bits, size, mode)
            for dtype in dtypes:
                assert looks_quantised(back.astype(dtype)), (bits, size, mode, columns, dtype)


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_quantised_by_rows_shows(kind: str) -> None:
    """One scale a row; with one number a weight, ternary."""
    for columns in (64, 192, 4096):
        weight = drawn(kind, (24, columns))
        for bits in sorted(LARGEST):
            if (bits == 8 and columns == 64) or (bits == 2 and kind == "heavy-tailed"):
                continue  # too few numbers; all of them zeros but the largest
            back = dequantise_rows(quantise_rows(weight, bits), bits)
            assert looks_quantised(back.astype(mx.bfloat16)), (columns, bits)
        some = mx.random.uniform(shape=weight.shape, key=mx.random.key(5)) > 0.4
        assert looks_quantised((mx.sign(weight) * some * 0.37).astype(mx.bfloat16)), columns


def test_experts_and_single_rows_show_too() -> None:
    stack = expanded(drawn("normal", (6, 5, 192)), 4, 32, "affine").astype(mx.bfloat16)
    assert looks_quantised(stack) and looks_quantised(stack[0, :1])
    assert not looks_quantised(drawn("normal", (6, 5, 192)).astype(mx.bfloat16))


@pytest.mark.parametrize("kind", KINDS)
def test_weights_that_were_never_quantised_do_not_show(kind: str) -> None:
    for shape in ((1, 192), (4, 192), (512, 192), (16, 64), (3, 8, 768), (9, 4096)):
        weight = drawn(kind, shape)
        for made in (weight, weight * (drawn("normal", shape) > 0)):  # half of them pruned
            narrow = made.astype(mx.bfloat16)
            for given in (*map(made.astype, DTYPES), *map(narrow.astype, DTYPES[:2])):
                assert not looks_quantised(given), (shape, given.dtype)


def test_constants_and_too_few_numbers_tell_nothing() -> None:
    some = [mx.zeros((8, 192)), mx.ones((8, 192)), mx.full((8, 192), -0.3), mx.eye(192)]
    some += [mx.zeros((0, 64)), mx.zeros((4, 0)), mx.array([[1.0, 2.0, 1.0, 2.0]])]
    assert [looks_quantised(one.astype(mx.bfloat16)) for one in some] == [False] * len(some)
    assert not looks_quantised(mx.array([[float("nan"), float("inf")] * 100] * 4))


def test_few_rows_are_looked_at() -> None:
    """And those evenly: the other rows are of another kind."""
    weight = drawn("normal", (1501, 192))
    coarse = expanded(weight, 4, 32, "affine")
    every_hundredth = (mx.arange(1501) % 100 == 0)[:, None]
    assert looks_quantised(mx.where(every_hundredth, coarse, weight))
    assert not looks_quantised(mx.where(every_hundredth, weight, coarse))


def test_the_embedded_model_was_not_quantised() -> None:
    store = open_store("crumb")
    found = store.read([name for name in store.names if len(store.shape(name)) > 1])
    assert len(found) > 90
    for name, array in found.items():
        assert not looks_quantised(array), name
