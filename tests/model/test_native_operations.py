"""Native operations on rows as MLX arrays, beside MLX's: in whatever layout the arrays have, by
whatever name architectures call them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models import (
    activations,
    deepseek_v2,
    deepseek_v3,
    gemma,
    qwen3_moe,
    rope_utils,
    switch_layers,
)

from tests.conftest import examples
from tests.model.reference import OLD_MLX_LM, needs_new_mlx_lm
from tests.native_library import native_cache, native_path, needed, operations_of
from toastkit.engine.big_little import confidence, unsure_rows
from toastkit.engine.perplexity import _judge
from toastkit.gears.entropy_graph import NativeSummary, entropy_bits
from toastkit.gears.monitor import EntropyMeter
from toastkit.native import operations, replacing
from toastkit.native.library import Library, load, use
from toastkit.native.operands import Rotation
from toastkit.sampling.draws import GUARD
from toastkit.sampling.host import HostSampler
from toastkit.sampling.sampling_options import SamplingOptions

pytestmark = needed
DTYPES = (mx.float32, mx.float16, mx.bfloat16)
CLOSE = {mx.float32: 1e-5, mx.float16: 4e-3, mx.bfloat16: 3e-2}
ODD = (math.nan, math.inf, -math.inf, 3e38, -3e38, 1e4)
dtypes = st.sampled_from(DTYPES)
layouts = st.sampled_from(("rows", "turned", "sliced", "gaps", "broadcast"))
shapes = st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 5))


@pytest.fixture(scope="module", autouse=True)
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    """In use, also in modules that import this."""
    made = load(str(native_path(native_cache(tmp_path_factory))))
    use(made)
    return made


def numbers(seed: int, shape: tuple[int, ...], dtype: mx.Dtype, layout: str = "rows") -> mx.array:
    """Random ones, (..., m, n), that lie so in memory."""
    x = (2 * mx.random.normal(shape, key=mx.random.key(seed))).astype(dtype)
    if layout == "turned":
        return mx.contiguous(x.swapaxes(-2, -3)).swapaxes(-2, -3)
    if layout == "sliced":
        return mx.concatenate([x, x], axis=-1)[..., : x.shape[-1]]
    if layout == "gaps":
        return mx.stack([x, x], axis=-1).reshape(*x.shape[:-1], -1)[..., ::2]
    if layout == "broadcast":
        return mx.broadcast_to(x[:1], x.shape)
    return x


def alike(ours: mx.array, theirs: mx.array, close: float | None = None) -> bool:
    """Up to rounding. close: a share of the largest number; None for what the dtype has."""
    assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
    most = CLOSE[theirs.dtype] if close is None else close
    ours, theirs = ours.astype(mx.float32), theirs.astype(mx.float32)
    return bool((mx.abs(ours - theirs) <= most * (1 + mx.abs(theirs).max())).all().item())


@settings(max_examples=examples(40))
@given(shapes, st.integers(1, 80), st.tuples(dtypes, dtypes), layouts, st.booleans())
def test_norms(shape: tuple, size: int, kinds: tuple, layout: str, weighted: bool) -> None:
    x = numbers(1, (*shape, size), kinds[0], layout)
    weight = numbers(2, (size,), kinds[1]) if weighted else None
    theirs = mx.fast.rms_norm(x, weight, 1e-5)
    close = max(CLOSE[kinds[0]], CLOSE[kinds[1]])
    assert alike(operations.rms_norm(x, weight, 1e-5), theirs, close)


@settings(max_examples=examples(60))
@given(shapes, st.integers(1, 33), st.integers(0, 5), dtypes, layouts, st.booleans(), st.data())
def test_ropes(
    shape: tuple, pairs: int, rest: int, dtype: mx.Dtype, layout: str, traditional: bool, data
) -> None:  # fmt: skip
    x = numbers(3, (*shape, 2 * pairs + rest), dtype, layout)
    if data.draw(st.booleans()):
        x = x[:, 0]
    base, freqs = 10000.0, None
    if data.draw(st.booleans()):
        base, freqs = None, mx.concatenate([mx.exp(mx.arange(pairs - 1.0)), mx.array([mx.inf])])
    offset: Any = data.draw(st.sampled_from([0, 7, 100_000]))
    kind = data.draw(st.sampled_from(["number", "array", "each"]))
    if kind != "number":
        offset = mx.array(offset) if kind == "array" else mx.arange(shape[0]) * 1000 + offset
        offset = offset.astype(data.draw(st.sampled_from([mx.int32, mx.int64, mx.uint32])))
    rest_of = {
        "traditional": traditional, "base": base, "freqs": freqs, "offset": offset,
        "scale": data.draw(st.sampled_from([1.0, 0.125])),
    }  # fmt: skip
    factor = data.draw(st.sampled_from([1.0, 1.375]))
    scaled = x.astype(mx.float32).at[..., : 2 * pairs].multiply(factor)
    theirs = mx.fast.rope(scaled, 2 * pairs, **rest_of).astype(dtype)
    if factor == 1:
        assert alike(operations.rope(x, 2 * pairs, **rest_of), theirs)
    speeds = freqs if base is None else operations.frequencies(base, 2 * pairs)
    how = Rotation(2 * pairs, speeds, base is None, rest_of["scale"], factor, traditional)
    assert alike(operations.rotated(x, offset, how), theirs)


@settings(max_examples=examples(30))
@given(shapes, st.integers(1, 80), dtypes, layouts, layouts)
def test_gates(shape: tuple, size: int, dtype: mx.Dtype, first: str, second: str) -> None:
    x, y = (numbers(n, (*shape, size), dtype, f) for n, f in ((4, first), (5, second)))
    assert alike(operations.swiglu(x, y), activations.swiglu(x, y))
    h = x.astype(mx.bfloat16)
    if not OLD_MLX_LM:
        assert alike(operations.precise_swiglu(h, x, y), activations.precise_swiglu(h, x, y))
    assert alike(operations.silu(x), nn.silu(x))
    assert alike(operations.gelu_approx(x), nn.gelu_approx(x))
    assert alike(operations.gelu(x), nn.gelu(x))
    assert alike(operations.sigmoid(x), mx.sigmoid(x))


@settings(max_examples=examples(30))
@given(shapes, st.sampled_from([1, 7, 64, 33000]), dtypes, layouts, st.booleans())
def test_softmax(shape: tuple, size: int, dtype: mx.Dtype, layout: str, keep: bool) -> None:
    x = numbers(6, (*shape, size), dtype, layout)
    wide = x.astype(mx.float32)
    theirs = mx.softmax(wide, axis=-1).astype(dtype)
    assert alike(operations.softmax(x, axis=-1, precise=True), theirs)
    assert alike(operations.softmax(x, 3), theirs)
    theirs = mx.logsumexp(wide, axis=-1, keepdims=keep).astype(dtype)
    assert alike(operations.logsumexp(x, -1, keep), theirs)


@settings(max_examples=examples(30))
@given(shapes, st.sampled_from([1, 7, 300, 33000]), dtypes, layouts, st.booleans())
def test_distributions(
    shape: tuple, size: int, dtype: mx.Dtype, layout: str, ruled_out: bool
) -> None:
    x = numbers(26, (*shape, size), dtype, layout)
    if ruled_out:
        x = mx.where(mx.arange(size) % 3 == 1, -mx.inf, x).astype(dtype)
    ours = operations.distribution(x)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("toastkit.native.library._in_use", None)
        theirs = operations.distribution(x)
    assert all(alike(a, b, 2e-6) for a, b in zip(ours, theirs))


@settings(max_examples=examples(40), deadline=None)
@given(
    seed=st.integers(0, 99), size=st.sampled_from([2, 31, 4096, 20_000]),
    odd=st.lists(st.tuples(st.integers(0, 19_999), st.sampled_from(ODD)), max_size=3),
)  # fmt: skip
def test_summaries_of_steps(seed: int, size: int, odd: list[tuple[int, float]]) -> None:
    """What a step's own graph finds is what numpy finds, or nothing where logits are not finite."""
    row = np.array(numbers(seed, (size,), mx.float32)) * 5
    for place, value in odd:
        row[place % size] = value
    found, limit = NativeSummary(mx.array(row)).read(), math.log2(size)
    if np.isnan(row).any() or row.max() == np.inf or row.max() <= -GUARD:
        assert found is None
    else:
        wanted = HostSampler(SamplingOptions(temperature=0), size).draw(row, 0)
        assert found.likeliest == wanted.id
        assert found.logprob == pytest.approx(wanted.logprob, abs=2e-6)
        assert found.entropy == pytest.approx(EntropyMeter(size).bits(row), abs=2e-5)
        assert found.entropy <= limit


def test_measures_of_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of texts, entropy of a step, how sure a little model is; what is no number stays none."""
    logits = numbers(27, (4, 5000), mx.float32) * 3
    logits[1, 7:] = -mx.inf
    targets = mx.array([4, 3, 2, 1], mx.uint32)
    broken = mx.stack([logits[0] * mx.nan, mx.full((5000,), -mx.inf)])

    def measured() -> list[mx.array]:
        found = [*_judge(logits, targets), *([entropy_bits(row).item()] * 4 for row in logits)]
        return [mx.array(found), confidence(logits)]

    ours = measured()
    assert np.isnan(_judge(broken, targets[:2])).all() and unsure_rows(broken, 0.0) == [0, 1]
    called: list[int] = []
    inner = Library.distribution
    monkeypatch.setattr(Library, "distribution", lambda *a: called.append(1) or inner(*a))
    measured()
    assert len(called) == 6
    monkeypatch.setattr("toastkit.native.library._in_use", None)
    assert all(alike(a, b, 2e-6) for a, b in zip(ours, measured()))
    assert np.isnan(_judge(broken, targets[:2])).all() and unsure_rows(broken, 0.0) == [0, 1]


@settings(max_examples=examples(40))
@given(shapes, st.integers(2, 130), dtypes, layouts, st.booleans(), st.data())
def test_partitions(
    shape: tuple, size: int, dtype: mx.Dtype, layout: str, equal: bool, data
) -> None:
    """The same places on either side, also of equal numbers; MLX has no order of two NaN."""
    x = numbers(21, (*shape, size), dtype, layout)
    x = mx.round(x) if equal else x
    x = mx.where(mx.arange(size) == size // 3, mx.nan, x).astype(dtype)
    kth = data.draw(st.integers(-size, size - 1))
    ours, theirs = (f(x, kth=kth, axis=-1) for f in (operations.argpartition, mx.argpartition))
    assert ours.dtype == theirs.dtype
    for part in (slice(kth % size), slice(kth % size, kth % size + 1), slice(kth % size, size)):
        assert mx.array_equal(mx.sort(ours[..., part], -1), mx.sort(theirs[..., part], -1))
    k = data.draw(st.integers(1, size))
    ours, theirs = (mx.sort(f(x, k, axis=-1), -1) for f in (operations.topk, mx.topk))
    assert mx.array_equal(ours, theirs, equal_nan=True)


@settings(max_examples=examples(30))
@given(shapes, st.integers(1, 80), st.tuples(dtypes, dtypes), layouts)
def test_weighted_sums(shape: tuple, size: int, kinds: tuple, layout: str) -> None:
    y, scores = numbers(22, (*shape, size), kinds[0], layout), numbers(23, shape, kinds[1])
    wide = (y.astype(mx.float32) * scores.astype(mx.float32)[..., None]).sum(axis=-2)
    theirs = (y * scores[..., None]).sum(axis=-2)
    assert alike(operations.weighted_sum(y, scores), wide.astype(theirs.dtype))


def test_what_only_mlx_has(monkeypatch: pytest.MonkeyPatch, library: Library) -> None:
    """Other dtypes, axes and shapes go there; what it refuses is refused."""
    x, ints = numbers(7, (2, 3, 4, 8), mx.float32), mx.arange(12).reshape(1, 3, 4)
    calls = [
        lambda f: f.softmax(x), lambda f: f.softmax(x, axis=1), lambda f: f.softmax(ints, axis=-1),
        lambda f: f.logsumexp(x, axis=(0, 1)), lambda f: f.sigmoid(ints),
        lambda f: f.sigmoid(x, stream=mx.cpu), lambda f: f.topk(x, 2, axis=1),
        lambda f: f.argpartition(x, 1, axis=0).astype(mx.float32),
        lambda f: f.argpartition(ints, 2).astype(mx.float32),
        lambda f: (f if f is operations else mx.fast).rms_norm(x, x[0, 0, 0], 1e-5, stream=mx.cpu),
        lambda f: (f if f is operations else mx.fast).rope(
            x[None], 4, traditional=False, base=10.0, scale=1.0, offset=1
        ),
    ]  # fmt: skip
    for call in calls:
        assert alike(call(operations), call(mx))
    assert alike(operations.swiglu(x, x[:1]), activations.swiglu(x, x[:1]))
    for scores in (x[0, ..., 0], x[..., :1, 0], ints[:, 0, :]):
        theirs = (x * scores[..., None]).sum(axis=-2)
        assert alike(operations.weighted_sum(x, scores), theirs)
    with pytest.raises(ValueError):
        operations.argpartition(x, 8, axis=-1)
    for weights in (x[..., 0].astype(mx.float16), x[0, ..., 0]):
        with pytest.raises(ValueError):
            library.weighted_sum(x, weights)
    wrong = {"traditional": False, "scale": 1.0, "offset": 0}
    for dims, rest in ((4, {"base": None}), (5, {"base": 1.0}), (10, {"base": 1.0})):
        with pytest.raises(ValueError):
            operations.rope(x, dims, **rest, **wrong)
    with pytest.raises(ValueError):
        operations.rms_norm(x, x[0, 0, 0, :5], 1e-5)
    with pytest.raises(ValueError):
        library.gate(x, x[:1], "silu")
    with pytest.raises(ValueError):
        library.multiply(mx.zeros((3, 0)), mx.zeros((4, 0)))
    monkeypatch.setattr("toastkit.native.library._in_use", None)
    for call in calls[:8]:
        assert alike(call(operations), call(mx))
    assert alike(operations.rms_norm(x, None, 1e-5), mx.fast.rms_norm(x, None, 1e-5))


ROPES = {
    "plain": lambda: nn.RoPE(24, base=500.0, scale=0.5),
    "traditional": lambda: nn.RoPE(32, traditional=True),
    "llama3": lambda: rope_utils.Llama3RoPE(32, scaling_config={"factor": 8.0}),
    "yarn": lambda: rope_utils.YarnRoPE(32, scaling_factor=4.0, beta_fast=4),
    "yarn, traditional": lambda: rope_utils.YarnRoPE(24, True, scaling_factor=40.0, mscale=0.7),
    "yarn, unscaled": lambda: rope_utils.YarnRoPE(32, scaling_factor=4.0, mscale_all_dim=1),
    "deepseek_v2": lambda: deepseek_v2.DeepseekV2YarnRotaryEmbedding(32, scaling_factor=40.0),
    "su": lambda: rope_utils.SuScaledRoPE(16, long_factor=[1.5] * 8, short_factor=1.0),
    "proportional": lambda: rope_utils.ProportionalRoPE(32, 16),
    "dynamic": lambda: rope_utils.DynamicNTKScalingRoPE(32, 4, False, 1e4, 2.0),
}


@pytest.mark.parametrize("name", [name for name in ROPES if not (OLD_MLX_LM and name == "dynamic")])
def test_modules_of_ropes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ROPES[name]()
    x = numbers(8, (2, 3, 5, 32), mx.float32, "turned")
    offsets = [0, 3] if name == "dynamic" else [0, 3, mx.array([2, 900])]
    theirs = [module(x, offset=offset) for offset in offsets]
    module.__class__ = replacing.native(type(module))
    assert replacing.is_native(type(module))
    monkeypatch.setattr(mx.fast, "rope", None)
    assert all(alike(module(x, offset=offset), y) for offset, y in zip(offsets, theirs))
    if name != "dynamic":
        assert operations_of(module(x, offset=3)) == ["ToastRope"]


@needs_new_mlx_lm
def test_a_yarn_rope_that_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = ROPES["yarn"](), numbers(8, (2, 3, 5, 40), mx.float32)
    turned = module(x, offset=7, scale=0.5)
    wanted = module(turned, offset=7, scale=0.5, inverse=True)
    module.__class__ = replacing.native(type(module))
    with monkeypatch.context() as patch:
        patch.setattr(mx.fast, "rope", None)
        assert alike(module(x, offset=7, scale=0.5), turned)
        assert alike(module(turned, offset=7, scale=0.5, inverse=True), wanted)
        assert alike(wanted, x)
    monkeypatch.setattr("toastkit.native.library._in_use", None)
    assert alike(module(x, offset=7, scale=0.5), turned)


def test_modules_of_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = nn.RMSNorm(48), numbers(9, (2, 3, 48), mx.float32)
    module.weight = numbers(10, (48,), mx.float32)
    theirs = module(x)
    module.__class__ = replacing.native(type(module))
    added = gemma.RMSNorm(48)  # 1 to its weight
    added.weight = module.weight
    wanted = added(x)
    replacing.use_native([added])
    monkeypatch.setattr(mx.fast, "rms_norm", None)
    calls: list[tuple] = []
    inner = Library.rms_norm
    monkeypatch.setattr(Library, "rms_norm", lambda *a: calls.append(a) or inner(*a))
    assert alike(module(x), theirs) and alike(added(x), wanted)
    assert [call[2] is module.weight for call in calls] == [True, True]


@pytest.mark.parametrize("normed", [False, True])
def test_modules_of_routers(normed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chosen among all, or among those of the best groups by a function that is compiled."""
    args = qwen3_moe.ModelArgs(
        "qwen3_moe", 32, 1, 32, 2, 8, 3, 1, [], 16, 8, 1e-6, 99, 2, 16, 1e4, False, 99, normed
    )  # fmt: skip
    known = qwen3_moe.Qwen3MoeSparseMoeBlock
    own = {"__call__": known.__call__, "__module__": known.__module__}
    block = type("Unknown", (known,), own)(args)  # by name: known ones are one operation
    x = numbers(24, (1, 5, 32), mx.float32)
    gate = deepseek_v3.MoEGate(deepseek_v3.ModelArgs(
        hidden_size=32, n_routed_experts=16, num_experts_per_tok=3, n_group=4, topk_group=2,
        norm_topk_prob=normed,
    ))  # fmt: skip
    gate.weight = numbers(25, (16, 32), mx.float32)
    theirs, (chosen, scores) = block(x), gate(x)
    replacing.use_native([*block.modules(), gate])
    monkeypatch.setattr(mx, "topk", None)  # groups are chosen over another axis
    assert alike(block(x), theirs, 1e-3)
    ours, weights = gate(x)
    assert mx.array_equal(mx.sort(ours, -1), mx.sort(chosen, -1))
    assert alike(mx.sort(weights, -1), mx.sort(scores, -1))
    calls: list[str] = []
    for name in ("partition", "weighted_sum"):
        inner = getattr(Library, name)
        monkeypatch.setattr(
            Library, name, lambda *a, name=name, inner=inner: calls.append(name) or inner(*a)
        )
    assert alike(block(x), theirs, 1e-3) and calls == ["partition", "weighted_sum"]


def test_what_all_models_share_stays(tmp_path: Path) -> None:
    """The default of an argument is one module for the whole process."""
    made = switch_layers.SwitchGLU(8, 8, 2)
    replacing.use_native(made.modules())
    assert type(made.activation) is switch_layers.SwiGLU
    assert type(switch_layers.SwitchGLU(8, 8, 2).up_proj) is switch_layers.SwitchLinear


def test_memory_that_there_is_not(library: Library) -> None:
    """MLX does not count it as taken, which would slow down all that this process does later."""
    before = mx.get_active_memory()
    with pytest.raises(MemoryError):
        library.memory(1 << 20, 1 << 30)  # more than there are addresses
    assert mx.get_active_memory() == before
