"""Products of activations with each other, and with a matrix for each head, natively: beside MLX's,
in whatever layout the arrays have."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models import deepseek_v3
from mlx_lm.models.mla import MultiLinear

from tests.conftest import examples
from tests.model.test_native_operations import alike, dtypes, layouts, library, numbers
from tests.native_library import needed, operations_of
from toastkit.native import functions, operations, replacing
from toastkit.native.library import BITS, FLOATS, Library, use

__all__ = ["library"]
pytestmark = needed
LEADING = [((), ()), ((2,), (2,)), ((2, 3), (2, 1)), ((2, 1), (1, 3)), ((3,), (2, 3)), ((2, 2), ())]
sizes = st.integers(1, 40)
CLOSE = {mx.float32: 1e-4, mx.float16: 2e-2, mx.bfloat16: 0.1}


@settings(max_examples=examples(40))
@given(st.sampled_from(LEADING), st.tuples(sizes, sizes, sizes), st.tuples(dtypes, dtypes),
       st.tuples(layouts, layouts), st.booleans())  # fmt: skip
def test_products(
    leading: tuple, shape: tuple, kinds: tuple, lie: tuple[str, str], turned: bool
) -> None:
    (first, second), (m, k, n) = leading, shape
    a = numbers(1, (*first, 1, m, k), kinds[0], lie[0]).squeeze(-3)
    b = numbers(2, (*second, 1, *((n, k) if turned else (k, n))), kinds[1], lie[1]).squeeze(-3)
    if turned:
        b = b.swapaxes(-1, -2)
    y = operations.matmul(a, b)
    assert any(name.startswith("Toast") for name in operations_of(y))
    wanted = a.astype(mx.float32) @ b.astype(mx.float32)
    dtype = mx.result_type(a, b)
    assert alike(y, wanted.astype(dtype), CLOSE[dtype] * k**0.5)


def test_what_is_left_to_mlx() -> None:
    a, b = numbers(1, (3, 4), mx.float32), numbers(2, (4, 5), mx.float32)
    for one, other in ((a[0], b), (a, b[:, 0]), (a.astype(mx.int32), b), (a[:, :0], b[:0])):
        assert mx.allclose(operations.matmul(one, other), one @ other, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="shape|dim"):
        operations.matmul(a, a)
    assert operations.matmul(a, b).shape == (3, 5)


def test_architectures_multiply_so() -> None:
    """Scores of latent attention, and routers, by their own source."""
    rebuilt = functions.rebuilt_methods(deepseek_v3.MoEGate)
    assert "_toastkit_matmul" in rebuilt["__call__"].__code__.co_names
    rebuilt = functions.rebuilt_methods(deepseek_v3.DeepseekV3Attention)
    assert "_toastkit_matmul" in rebuilt["__call__"].__code__.co_names
    assert "_toastkit_matmul" not in deepseek_v3.MoEGate.__call__.__code__.co_names


@pytest.mark.parametrize("bits", [0, *BITS])
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_matrix_for_each_head(library: Library, bits: int, dtype: mx.Dtype) -> None:
    """Either way round, for a head's own vectors and for those that all heads have in common. In 16
    bits they are, to the bit, what the same matrices are when they are widened."""
    use(library)
    theirs: Any = MultiLinear(64, 96, 3)
    theirs.weight = numbers(3, (3, 96, 64), dtype) / 8
    if bits:
        theirs = theirs.to_quantized(group_size=32, bits=bits)
    found = []
    for wide in (None, mx.float32):
        ours: Any = type(theirs).__new__(type(theirs))
        ours.__dict__.update(vars(theirs))
        dict.update(ours, theirs)
        if wide is None:
            ours.set_dtype(mx.float32)
        kind = replacing.native(type(ours))
        ours.__class__ = type(kind.__name__, (kind,), {"_wide": wide})
        assert set(replacing.narrow_keys(ours)) == ({"scales", "biases"} if bits else {"weight"})
        for heads in (1, 3):
            x = numbers(4, (2, heads, 5, 64), mx.float32)
            z = numbers(5, (2, heads, 5, 96), mx.float32)
            found += [ours(x), ours(z, transpose=False)]
            wanted = [theirs(x), theirs(z, transpose=False)]
            for a, b in zip(found[-2:], wanted):
                assert alike(a, b.astype(mx.float32), 1e-3 if dtype == mx.float32 else 2e-2)
    half = len(found) // 2
    assert all(mx.array_equal(a, b) for a, b in zip(found[:half], found[half:]))
