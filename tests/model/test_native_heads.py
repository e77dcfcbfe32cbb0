"""Products of activations with each other, and with a matrix for each head, natively: beside MLX's,
in whatever layout the arrays have."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models import deepseek_v3, glm4_moe_lite
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import KVCache
from mlx_lm.models.mla import MultiLinear

from tests.conftest import examples
from tests.model.test_native_operations import alike, dtypes, layouts, library, numbers
from tests.native_library import needed, operations_of
from toastkit.native import functions, modules, operations
from toastkit.native.kv_caches import keep_in
from toastkit.native.latent_attention import LatentAttention
from toastkit.native.library import BITS, FLOATS, Library, use

__all__ = ["library"]
pytestmark = [needed, pytest.mark.usefixtures("library")]
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
    anew = functions.methods_anew(deepseek_v3.MoEGate)
    assert "_toastkit_matmul" in anew["__call__"].__code__.co_names
    anew = functions.methods_anew(deepseek_v3.DeepseekV3Attention)
    assert "_toastkit_matmul" in anew["__call__"].__code__.co_names
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
        kind = modules.native(type(ours))
        ours.__class__ = type(kind.__name__, (kind,), {"_wide": wide})
        assert set(modules.narrow_keys(ours)) == ({"scales", "biases"} if bits else {"weight"})
        for heads in (1, 3):
            x = numbers(4, (2, heads, 5, 64), mx.float32)
            z = numbers(5, (2, heads, 5, 96), mx.float32)
            found += [ours(x), ours(z, transpose=False)]
            wanted = [theirs(x), theirs(z, transpose=False)]
            for a, b in zip(found[-2:], wanted):
                assert alike(a, b.astype(mx.float32), 1e-3 if dtype == mx.float32 else 2e-2)
    half = len(found) // 2
    assert all(mx.array_equal(a, b) for a, b in zip(found[:half], found[half:]))


LATENT = {
    "hidden_size": 48, "num_attention_heads": 3, "kv_lora_rank": 32, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16, "v_head_dim": 24,
}  # fmt: skip


def latent(architecture: Any, lora: int | None) -> tuple[Any, Any]:
    """mlx_lm's and ours, with the same random weights."""
    name = architecture.__name__.rpartition(".")[2]
    args = architecture.ModelArgs.from_dict({**LATENT, "model_type": name, "q_lora_rank": lora})
    kind = deepseek_v3.DeepseekV3Attention
    if architecture is glm4_moe_lite:
        kind = glm4_moe_lite.Glm4MoeLiteAttention
    mx.random.seed(4)
    theirs, ours = kind(args), kind(args)
    ours.update(theirs.parameters())
    modules.use_native(ours.modules())
    assert isinstance(ours, LatentAttention)
    return theirs, ours


@pytest.mark.parametrize("kept", [mx.float32, mx.float16, mx.int8])
@pytest.mark.parametrize("architecture", [deepseek_v3, glm4_moe_lite])
@pytest.mark.parametrize("lora", [None, 20])
def test_latent_attention(architecture: Any, lora: int | None, kept: mx.Dtype) -> None:
    """One position, several, behind others and with none before; what is kept is the same."""
    theirs, ours = latent(architecture, lora)
    caches = [KVCache(), KVCache()]
    keep_in(kept, caches[1:])
    for n, length in enumerate((5, 1, 3, 33, 1)):
        x = numbers(n, (2, length, 48), mx.float32)
        mask = create_causal_mask(length, caches[0].offset) if length > 1 else None
        wanted, found = (part(x, mask, cache) for part, cache in zip((theirs, ours), caches))
        assert alike(found, wanted, {mx.float32: 1e-5, mx.float16: 1e-3}.get(kept, 2e-2))
    # Without a cache the architecture's own is asked.
    x = numbers(9, (2, 4, 48), mx.float32)
    assert alike(ours(x, None, None), theirs(x, None, None), 1e-5)
