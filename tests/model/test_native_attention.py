"""Native attention as MLX arrays, and in the models that call it."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import examples
from tests.model.checkpoints import logits_after, open_model, read
from tests.model.moe_checkpoints import written
from tests.model.moe_engines import batched_and_alone
from tests.native_library import built, cache, library, needed
from toastkit.engine.engine import Engine
from toastkit.native import operations
from toastkit.native.layers import blocks
from toastkit.native.library import Library, use

__all__ = ["built", "cache", "library"]
pytestmark = needed
DTYPES = (mx.float32, mx.float16, mx.bfloat16)
CLOSE = {mx.float32: 1e-5, mx.float16: 5e-3, mx.bfloat16: 4e-2}
ATTEND = mx.fast.scaled_dot_product_attention


def laid_out(array: mx.array, layout: str) -> mx.array:
    """The same numbers, (B, heads, positions, size), lying otherwise in memory."""
    if layout == "turned":
        return mx.contiguous(array.swapaxes(1, 2)).swapaxes(1, 2)
    if layout == "cache":
        return mx.concatenate([array, mx.full(array.shape, mx.nan, array.dtype)], 2)[
            :, :, : array.shape[2]
        ]
    if layout == "gaps":
        return mx.stack([array, array], axis=-1).flatten(-2)[..., ::2]
    return array


layouts = st.sampled_from(("rows", "turned", "cache", "gaps"))


@settings(max_examples=examples(80))
@given(
    st.tuples(*[st.integers(1, 3)] * 3), st.tuples(st.integers(1, 9), st.integers(1, 80)),
    st.tuples(st.integers(1, 40), st.integers(1, 40)), st.tuples(*[st.sampled_from(DTYPES)] * 3),
    st.tuples(*[layouts] * 4), st.sampled_from((None, "causal", "bool", "added")), st.booleans(),
)  # fmt: skip
def test_attention(
    library: Library, heads: tuple, counts: tuple, sizes: tuple, dtypes: tuple, kinds: tuple,
    mask: Any, sinks: bool,
) -> None:  # fmt: skip
    """As MLX computes it in float32, lazily, in whatever layout."""
    batch, key_heads, repeats = heads
    mx.random.seed(sum(counts) + sum(sizes))
    shapes = [(batch, key_heads * repeats, counts[0], sizes[0])]
    shapes += [(batch, key_heads, counts[1], size) for size in sizes]
    q, k, v = (mx.random.normal(shape).astype(d) for shape, d in zip(shapes, dtypes))
    if mask in ("bool", "added"):
        # Of as few axes as one would give.
        full = (batch, key_heads * repeats, *counts)
        shape = tuple(n if i % 2 else 1 for i, n in enumerate(full))[sum(sizes) % 4 :]
        numbers = mx.random.normal(shape)
        mask = numbers > 0 if mask == "bool" else numbers
        mask = laid_out(mask, kinds[3]) if mask.ndim == 4 else mask
    of = {"mask": mask, "sinks": mx.random.normal(shapes[0][1:2]) if sinks else None}
    placed = [laid_out(array, kind) for array, kind in zip((q, k, v), kinds)]
    ours = library.attend(*placed, 0.3, **of)
    wide = [array.astype(mx.float32) for array in (q, k, v)]
    theirs = ATTEND(*wide, scale=0.3, **of)
    assert ours.dtype == (dtypes[0] if len(set(dtypes)) == 1 else mx.float32)
    for a, b in (
        (ours, theirs),
        (ours.swapaxes(1, 2).flatten(2), theirs.swapaxes(1, 2).flatten(2)),
    ):
        assert a.shape == b.shape
        close = CLOSE[ours.dtype]
        assert mx.allclose(a.astype(mx.float32), b, rtol=close, atol=close).item()


@settings(max_examples=examples(40))
@given(
    st.tuples(*[st.integers(1, 3)] * 3), st.tuples(st.integers(1, 40), st.integers(40, 80)),
    st.sampled_from(DTYPES), st.tuples(*[layouts] * 3), st.sampled_from((None, "causal")),
    st.tuples(st.booleans(), st.booleans()),
)  # fmt: skip
def test_keys_in_8_bits(
    library: Library, heads: tuple, counts: tuple, dtype: mx.Dtype, kinds: tuple, mask: Any,
    narrow: tuple,
) -> None:  # fmt: skip
    """Give what they stand for, of the dtype of queries, be they keys, values or both: what these
    meet has 16 bits at least."""
    batch, key_heads, repeats = heads
    mx.random.seed(sum(counts))
    q = mx.random.normal((batch, key_heads * repeats, counts[0], 24)).astype(dtype)
    rows = [mx.random.normal((batch, key_heads, counts[1], size)) for size in (24, 40)]
    rows = [library.quantise(x) if few else x.astype(dtype) for x, few in zip(rows, narrow)]
    wide = [library.dequantise(x) if few else x.astype(mx.float32) for x, few in zip(rows, narrow)]
    placed = [laid_out(x, kind) if x.dtype != mx.int8 or kind != "cache" else x
              for x, kind in zip((q, *rows), kinds)]  # fmt: skip
    ours = library.attend(*placed, 0.3, mask)
    theirs = ATTEND(q.astype(mx.float32), *wide, scale=0.3, mask=mask)
    assert ours.dtype == dtype and ours.shape == theirs.shape
    close = max(CLOSE[dtype], 1e-3)
    assert mx.allclose(ours.astype(mx.float32), theirs, rtol=close, atol=close).item()


def test_what_does_not_fit_together(library: Library) -> None:
    q, k = mx.zeros((2, 4, 3, 8)), mx.zeros((2, 2, 5, 8))
    wrong: list[tuple] = [
        (q[0], k, k), (q[:, :3], k, k), (q[:1], k, k), (q[..., :7], k, k), (q, k[:, :, :4], k),
        (q, k[:, :, :0], k[:, :, :0]), (q.astype(mx.int32), k, k), (q, k, k[:, :1]),
        (q, k.astype(mx.int8), k), (q, k, k[..., :4].astype(mx.int8)), (q.astype(mx.int8), k, k),
    ]  # fmt: skip
    for arrays in wrong:
        with pytest.raises(ValueError):
            library.attend(*arrays, 1.0)
    for mask in (
        mx.zeros((4, 5)),
        mx.zeros((3, 4)),
        mx.zeros((3, 5), mx.int32),
        mx.zeros((1,) * 5),
    ):
        with pytest.raises(ValueError):
            library.attend(q, k, k, 1.0, mask)
    for sinks in (mx.zeros(3), mx.zeros(4, mx.float16), mx.zeros((1, 4))):
        with pytest.raises(ValueError):
            library.attend(q, k, k, 1.0, None, sinks)


def test_what_only_mlx_has_is_left_to_it(library: Library) -> None:
    """And what is wrong, it says."""
    use(library)
    q, k = mx.random.normal((1, 4, 3, 8)), mx.random.normal((1, 2, 5, 8))

    quantised = mx.quantize(mx.random.normal((1, 2, 5, 32)), group_size=32, bits=8)
    cache = SimpleNamespace(bits=8, group_size=32)
    wide = mx.dequantize(*quantised, group_size=32, bits=8)
    x = mx.random.normal((1, 4, 3, 32))
    theirs = ATTEND(x, wide, wide, scale=0.2, mask="causal")
    ours = operations.attention(x + 0, quantised, quantised, cache, 0.2, "causal")
    assert mx.allclose(ours, theirs, atol=1e-4).item()
    one = mx.array([[[[True]]]])
    theirs = ATTEND(q, k, k, scale=1.0, mask=one)
    assert mx.array_equal(operations.fast_attention(q, k, k, scale=1.0, mask=one), theirs)
    for wrong in ({"mask": "window"}, {"mask": mx.zeros((3, 4))}, {"sinks": mx.zeros(3)}):
        with pytest.raises(ValueError):
            operations.fast_attention(q, k, k, scale=1.0, **wrong)
    with pytest.raises(ValueError):
        operations.fast_attention(q[0], k[0], k[0], scale=1.0)
    sinks = mx.zeros(4, mx.bfloat16)
    ours = operations.fast_attention(q, k, k, scale=1.0, sinks=sinks)
    theirs = ATTEND(q, k, k, scale=1.0, sinks=sinks.astype(mx.float32))
    assert mx.allclose(ours, theirs, atol=1e-5).item()


# --------------------------------------------------------------------------------------- of models


# Grouped heads, windows that wrap around (of 32), sinks, attention over what is kept of keys (a
# mask of numbers), beside recurrent layers, and after a normalisation of heads.
MODELS = (
    "llama", "gemma3_text", "gpt_oss", "deepseek_v3", "qwen3_next", "falcon_h1", "phi3", "olmoe",
)  # fmt: skip
PROMPT, NEXT = [(37 * n + 5) % 4096 for n in range(45)], (11, 12, 13, 14)


def opened(path: Path, name: str) -> Engine:
    """Natively, a random checkpoint."""
    # Exact: or roundings that differ are whole steps.
    return open_model(written(path, name), native="require", native_exact=True)


def answer(engine: Engine, chunk: int = 16) -> list[mx.array]:
    """Logits after a prompt of 45 tokens, and after each of those that follow."""
    return logits_after(engine, read(engine, PROMPT, chunk), NEXT)


@pytest.mark.parametrize("name", MODELS)
def test_models_attend_as_with_mlx(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All else being native alike. Whole layers attend by themselves (test_native_blocks.py)."""
    monkeypatch.setattr(blocks, "FEW", 0)
    engine = opened(tmp_path, name)
    ours = answer(engine)
    calls = []

    def attend(_: Library, *arrays: mx.array) -> mx.array:
        q, k, v, scale, mask, sinks = (*arrays, None)[:6]
        calls.append(q.shape)
        return ATTEND(q, k, v, scale=scale, mask=mask, sinks=sinks)

    monkeypatch.setattr(Library, "attend", attend)
    theirs = answer(engine)
    lengths = {shape[2] for shape in calls}
    assert 16 in lengths and 1 in lengths
    for a, b in zip(ours, theirs):
        assert mx.abs(a - b).max().item() < 1e-4 * mx.abs(b).max().item()


@pytest.mark.parametrize(
    ("name", "apart"),
    [*product(["llama", "qwen3_moe", "deepseek_v3"], [False, True]), ("gemma3_text", True),
     ("gpt_oss", True)],
)  # fmt: skip
def test_batches_are_each_alone(tmp_path: Path, name: str, apart: bool) -> None:
    """Conversations of different lengths, to the bit. One gets past the windows of 32. (In mlx_lm's
    batches they lie in another order.)"""
    engine = opened(tmp_path, name)
    for batch, alone in batched_and_alone(engine, ((3, 28, 45),), 6, apart):
        for a, b in zip(batch.members, alone):
            assert mx.array_equal(a.logits, b.logits).item()
        assert not apart or not any(layer.unread for layer in batch.caches)
