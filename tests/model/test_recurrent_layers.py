"""Recurrent layers beside mlx_lm's: convolutions, the gated delta rule, Mamba-2's scan; and whole
layers, to the bit what their parts give."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import mlx.nn as nn
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models import gated_delta, qwen3_5, qwen3_next, ssm
from mlx_lm.models.cache import ArraysCache, KVCache

from tests.conftest import examples
from tests.model.checkpoints import open_model
from tests.model.moe_checkpoints import written
from tests.model.reference import OLD_MLX_LM, held_by, needs_new_mlx_lm
from tests.model.test_native_operations import CLOSE, alike, dtypes, layouts, library, numbers
from tests.native_library import built, cache, needed, operations_of, watched
from toastkit.engine.engine import Engine
from toastkit.native import known, replacing
from toastkit.native.kv_caches import keep_in
from toastkit.native.layers import blocks, decoder
from toastkit.native.library import in_use
from toastkit.native.modules import recurrent

__all__ = ["built", "cache", "library"]
pytestmark = needed


@needs_new_mlx_lm
@settings(max_examples=examples(30))
@given(st.integers(1, 2), st.integers(1, 5), st.integers(1, 3), st.integers(1, 40), dtypes,
       st.sampled_from(["none", "given"]), st.booleans(), st.booleans())  # fmt: skip
def test_gated_delta_rule(
    batch: int, length: int, each: int, size: int, dtype: mx.Dtype, start: str, masked: bool,
    negative: bool,
) -> None:  # fmt: skip
    keys, gates = (batch, length, 2, size), (batch, length, 2 * each)
    q, k = (numbers(n, keys, dtype, "turned") for n in (11, 12))
    v = numbers(13, (*gates, 5), dtype, "sliced")
    a, b = (numbers(n, gates, dtype) for n in (14, 15))
    a_log, bias = (numbers(n, gates[2:], mx.float32) / 4 for n in (16, 17))
    state = numbers(18, (batch, 2 * each, 5, size), mx.float32) if start == "given" else None
    mask = mx.arange(length)[None] >= mx.arange(batch)[:, None] if masked else None
    norm = {"inv_scale": size**-0.5, "eps": 1e-6}
    ours, theirs = recurrent.normalize_qk(q, k, **norm), gated_delta.normalize_qk(q, k, **norm)
    assert all(alike(x, y) for x, y in zip(ours, theirs))
    rest = [*theirs, v, a, b, a_log, bias, state, mask]
    ours = recurrent.gated_delta_update(*rest, allow_neg_eigval=negative)
    theirs = gated_delta.gated_delta_update(*rest, allow_neg_eigval=negative)
    assert all(alike(x, y, 4 * CLOSE[dtype]) for x, y in zip(ours, theirs))


@needs_new_mlx_lm
@pytest.mark.parametrize("bound", [None, -5.0])
@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("begun", [False, True])
def test_gates_of_columns_and_with_bounds(columns: bool, bound: float | None, begun: bool) -> None:
    """As in Kimi Linear, and its successor."""
    q, v = numbers(19, (2, 5, 2, 8), mx.float32), numbers(20, (2, 5, 4, 6), mx.float32)
    k = q / mx.linalg.norm(q, axis=-1, keepdims=True)
    a = numbers(21, (2, 5, 4, 8) if columns else (2, 5, 4), mx.float32)
    a_log = numbers(22, (4, 1) if columns else (4,), mx.float32) / 4
    bias = numbers(23, (4, 8) if columns else (4,), mx.float32) / 4
    state = numbers(24, (2, 4, 6, 8), mx.float32) if begun else None
    mask = mx.arange(5)[None] >= mx.arange(2)[:, None] if begun else None
    arrays = (q, k, v, a, v[..., 1], a_log, bias, state, mask)
    rest = {} if bound is None else {"lower_bound": bound}
    ours = recurrent.gated_delta_update(*arrays, **rest)
    assert "ToastGatedDelta" in operations_of(ours[0])
    theirs = gated_delta.gated_delta_update(*arrays, **rest)
    assert all(alike(x, y) for x, y in zip(ours, theirs))
    other = recurrent.gated_delta_update(*arrays, use_kernel=False)
    assert all(alike(x, y) for x, y in zip(other, gated_delta.gated_delta_update(*arrays)))


@settings(max_examples=examples(40))
@given(st.integers(1, 2), st.integers(1, 6), st.integers(1, 40), st.integers(1, 6), dtypes, layouts,
       st.booleans())  # fmt: skip
def test_convolutions(
    batch: int, length: int, channels: int, kernel: int, dtype: mx.Dtype, layout: str, biased: bool
) -> None:
    x = numbers(21, (batch, length + kernel - 1, channels), dtype, layout)
    theirs = nn.Conv1d(channels, channels, kernel, groups=channels, bias=biased)
    theirs.weight = numbers(22, (channels, kernel, 1), dtype)
    if biased:
        theirs.bias = numbers(23, (channels,), dtype)
    ours = replacing.native(nn.Conv1d)(channels, channels, kernel, groups=channels, bias=biased)
    ours.update(theirs.parameters())
    assert ours.convolved(x) is not None
    assert alike(ours(x), theirs(x), 2 * CLOSE[dtype])
    assert alike(recurrent.convolved_silu(ours, x), nn.silu(theirs(x)), 2 * CLOSE[dtype])
    if dtype == mx.float32:
        assert mx.array_equal(recurrent.convolved_silu(ours, x), recurrent.silu(ours(x)))


@pytest.mark.parametrize(
    "how",
    [{"stride": 2}, {"padding": 3}, {"dilation": 2}, {"groups": 2}, {"kernel_size": 17},
     {"dtype": mx.bfloat16}],
)  # fmt: skip
def test_convolutions_of_another_kind_are_left_to_mlx(how: dict) -> None:
    dtype = how.pop("dtype", mx.float32)
    rest = {"kernel_size": 4, "groups": 8, **how}
    theirs = nn.Conv1d(8, 8, **rest)
    ours = replacing.native(nn.Conv1d)(8, 8, **rest)
    ours.update(theirs.parameters())
    x = numbers(24, (2, 30, 8), dtype)
    assert ours.convolved(x) is None
    assert alike(ours(x), theirs(x))
    assert alike(recurrent.convolved_silu(ours, x), nn.silu(theirs(x)))
    with pytest.raises(ValueError):
        ours(x[0, :, :3])


@settings(max_examples=examples(40))
@given(st.integers(1, 2), st.integers(1, 5), st.integers(1, 2), st.integers(1, 3),
       st.tuples(st.integers(1, 9), st.integers(1, 40)), dtypes, st.booleans(), st.booleans(),
       st.sampled_from([(0.001, 100.0), (0.5, 1.0)]))  # fmt: skip
def test_scan(
    batch: int, length: int, groups: int, each: int, sizes: tuple, dtype: mx.Dtype, begun: bool,
    padded: bool, limits: tuple,
) -> None:  # fmt: skip
    heads = groups * each
    x = numbers(25, (batch, length, heads, sizes[0]), dtype, "turned")
    b, c = (numbers(n, (batch, length, groups, sizes[1]), dtype, "sliced") for n in (26, 27))
    dt = numbers(28, (batch, length, heads), dtype)
    a_log, d, bias = (numbers(n, (heads,), mx.float32) / 4 for n in (29, 30, 31))
    state = numbers(32, (batch, heads, *sizes), mx.float32) if begun else None
    # Of padding before a prompt: at least the last step counts.
    starts = mx.minimum(mx.arange(batch)[:, None], length - 1)
    padded = padded and not (OLD_MLX_LM and begun)  # where 0.31 decays what was there before
    mask = mx.arange(length)[None] >= starts if padded else None
    arrays = (x, a_log, b, c, d, dt, bias, state, limits, mask)
    (ours, after), (theirs, wanted) = recurrent.ssm_update(*arrays), ssm.ssm_update(*arrays)
    assert alike(after, wanted, 4 * CLOSE[dtype])
    if padded:  # what padding gives is nobody's
        ours, theirs = (mx.where(mask[..., None, None], y, 0) for y in (ours, theirs))
    assert alike(ours, theirs, 4 * CLOSE[dtype])


def test_rows_of_other_lengths() -> None:
    """A row that ends before the others has the state of its last step."""
    x, b = numbers(33, (2, 5, 2, 4), mx.float32), numbers(34, (2, 5, 1, 8), mx.float32)
    heads = numbers(35, (2,), mx.float32)
    lengths = mx.array([5, 3])
    mask = mx.arange(5)[None] < lengths[:, None]
    parts = (heads, b, b, heads, x[..., 0], heads)
    y, after = recurrent.ssm_update(x, *parts, mask=mask, lengths=lengths)
    _, wanted = ssm.ssm_update(x, *parts, mask=mask, lengths=lengths)
    alone = recurrent.ssm_update(x[1:, :3], heads, b[1:, :3], b[1:, :3], heads, x[1:, :3, :, 0],
                                 heads)  # fmt: skip
    assert alike(after, wanted)
    assert mx.array_equal(after[1:], alone[1]) and mx.array_equal(y[1:, :3], alone[0])


def opened(tmp_path: Path, name: str, **rest: Any) -> Engine:
    path = name if name == "crumb" else written(tmp_path, name)
    return open_model(path, **{"native": "require", **rest})


def read(engine: Engine, chunk: int | None = None) -> list[mx.array]:
    """Logits after a prompt and after three more tokens; and all that the caches hold then."""
    layers = engine.new_cache()
    ids = [(37 * n + 5) % 4096 for n in range(41)]
    found = [engine.prefill(ids, layers, chunk=chunk)]
    found += [engine.step(token, layers) for token in (7, 11, 13)]
    mx.eval(found)
    arrays = [array for layer in layers for array in held_by(layer)]
    return [*found, *(array for array in arrays if isinstance(array, mx.array))]


@pytest.mark.parametrize("name", ["crumb", "qwen3_next", "qwen3_5"])
def test_whole_layers_give_the_bits_of_their_parts(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = read(opened(tmp_path, name))
    assert all(map(mx.array_equal, read(opened(tmp_path, name), 7), whole))
    for each in [each for each, (cls, _) in known.LAYERS.items() if is_delta(cls)]:
        monkeypatch.delitem(known.LAYERS, each)
    known.layer_of.cache_clear()
    try:
        parts = opened(tmp_path, name)
        kinds = {type(m) for _, m in parts.model.named_modules()}
        assert not any(map(is_delta, kinds))
        assert all(map(mx.array_equal, read(parts), whole))
    finally:
        known.layer_of.cache_clear()


@needs_new_mlx_lm
@pytest.mark.parametrize("name", ["crumb", "qwen3_next", "qwen3_5"])
def test_a_decoder_layer_is_one_node(tmp_path: Path, name: str) -> None:
    """With its network, a mixture or not: to the bit what its parts give."""
    engine = opened(tmp_path, name)
    recurrent = sum(layer.is_linear for layer in engine.model.layers)
    with decoding() as decoded:
        whole = read(engine)
    assert decoded.call_count == 4 * recurrent > 0
    with patch.object(decoder.Decoder, "_recurrent_step", lambda *_: None):
        assert all(map(mx.array_equal, read(engine), whole))


@needs_new_mlx_lm
@pytest.mark.parametrize("name", ["crumb", "qwen3_next", "qwen3_5"])
@pytest.mark.parametrize("bits", [0, 4])
def test_attention_with_gates_is_one_node(tmp_path: Path, name: str, bits: int) -> None:
    """Of a few positions, wherever they are kept: to the bit what its parts give."""
    engine = opened(tmp_path, name)
    layer = next(one for one in engine.model.layers if not one.is_linear)
    if bits:
        nn.quantize(layer.self_attn, 32, bits)
        replacing.use_native(layer.self_attn.modules())

    def passes(batch: int, kept: mx.Dtype) -> list[mx.array]:
        cache, found = KVCache(), []
        if kept != mx.float32:
            keep_in(kept, [cache])
        for n, length in enumerate((5, 1, 1, 33, 3, 1)):
            shape = (batch, length, layer.input_layernorm.weight.size)
            x = mx.random.normal(shape, key=mx.random.key(n))
            found.append(layer(x, "causal" if length > 1 else None, cache))
        return found

    for batch in (1, 3):
        for kept in (mx.float32, mx.float16, mx.int8):
            with patch.object(blocks, "_one_node", wraps=blocks._one_node) as one:
                whole = passes(batch, kept)
            assert one.call_count == 4  # the first pass finds no room, and one has 33 positions
            with patch.object(decoder.Decoder, "natively", lambda *_: None):
                assert all(map(mx.array_equal, passes(batch, kept), whole))
    assert not mx.array_equal(passes(1, mx.float32)[1], changed(layer, passes)[1])


def changed(layer: Any, passes: Callable) -> list[mx.array]:
    """What it gives with other gates, both ways."""
    gates = layer.self_attn.q_proj
    key = "scales" if "scales" in gates else "weight"
    gates[key] = gates[key] * mx.array([[1.0]] * (gates[key].shape[0] - 1) + [[3.0]])
    whole = passes(1, mx.float32)
    with patch.object(decoder.Decoder, "natively", lambda *_: None):
        assert all(map(mx.array_equal, passes(1, mx.float32), whole))
    return whole


def decoding() -> Any:
    """Context that counts recurrent layers that are made."""
    functions = in_use().c
    return patch.object(functions, "decoder", wraps=functions.decoder)


def steps(layer: Any, seed: int) -> list[mx.array]:
    """What a recurrent layer makes of a pass over three positions of two rows, and of one more; and
    its state."""
    x = mx.random.normal((2, 4, layer.input_layernorm.weight.size), key=mx.random.key(seed))
    kept = ArraysCache(2)
    found = [layer(x[:, :3], None, kept), layer(x[:, 3:], None, kept)]
    return [*found, kept[0], kept[1]]


def compared(layer: Any, one: bool = True) -> list[mx.array]:
    """Both ways; one: whether it is one node."""
    with decoding() as decoded:
        found = steps(layer, 1)
    assert decoded.call_count == 2 * one
    with patch.object(decoder.Decoder, "_recurrent_step", lambda *_: None):
        assert all(map(mx.array_equal, steps(layer, 1), found))
    return found


@needs_new_mlx_lm
@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5"])
def test_what_changes_in_a_layer_is_seen(tmp_path: Path, name: str) -> None:
    layer, other = [one for one in opened(tmp_path, name).model.layers if one.is_linear][:2]
    rule, before = layer.linear_attn, compared(layer)
    rule.out_proj.weight = 2 * rule.out_proj.weight
    after = compared(layer)
    assert not mx.array_equal(after[0], before[0]) and mx.array_equal(after[3], before[3])
    rule.A_log = rule.A_log + 1
    assert not mx.array_equal(compared(layer)[3], before[3])
    rule.out_proj.bias = mx.ones(layer.input_layernorm.weight.shape)
    compared(layer)
    part = "gate" if "gate" in layer.mlp else "gate_proj"
    for module, key, there in ((rule, "out_proj", other.linear_attn), (layer.mlp, part, other.mlp)):
        before = compared(layer)
        module[key] = there[key]
        assert not mx.array_equal(compared(layer)[0], before[0])
    rule.A_log = rule.A_log.astype(mx.float16)
    compared(layer, one=False)


@needs_new_mlx_lm
@pytest.mark.parametrize("part", ["linear_attn", "input_layernorm", "mlp", "mlp.switch_mlp"])
def test_who_stands_before_a_part_of_a_layer_is_called(tmp_path: Path, part: str) -> None:
    layer = next(one for one in opened(tmp_path, "qwen3_next").model.layers if one.is_linear)
    before, module = compared(layer), layer
    for word in part.split("."):
        module = module[word]
    seen = watched(module)
    one = part.startswith("mlp")  # the network is then called behind the node
    assert all(map(mx.array_equal, compared(layer, one), before)) and len(seen) == 4


@needs_new_mlx_lm
def test_what_a_layer_leaves_to_its_parts(tmp_path: Path) -> None:
    """Masks, rows of other lengths, no cache, other dtypes."""
    layer = next(one for one in opened(tmp_path, "qwen3_next").model.layers if one.is_linear)
    x = mx.ones((1, 2, layer.input_layernorm.weight.size))
    lengths = ArraysCache(2)
    lengths.lengths = mx.array([2])
    with decoding() as decoded:
        for given in (
            (x, mx.ones((1, 2), mx.bool_), ArraysCache(2)), (x, None, lengths), (x, None, None),
            (x.astype(mx.float16), None, ArraysCache(2)),
        ):  # fmt: skip
            assert layer(*given).shape == x.shape
    assert not decoded.called
    odd = ArraysCache(2)
    odd[1] = mx.zeros((1, 1, 1, 1))
    with pytest.raises(ValueError):
        layer(x, None, odd)


def is_delta(cls: type) -> bool:
    return issubclass(cls, decoder.DeltaLayer)


@needs_new_mlx_lm
def test_layers_that_are_known() -> None:
    """Those of the mlx_lm that is installed; and no other version's."""
    for cls in (
        qwen3_next.Qwen3NextGatedDeltaNet, qwen3_5.GatedDeltaNet, qwen3_next.Qwen3NextDecoderLayer,
        qwen3_5.DecoderLayer,
    ):  # fmt: skip
        mixin = known.layer_of(cls)
        assert mixin is not None and issubclass(replacing.native(cls), mixin)
        other = type(cls.__name__, (cls,), {"__module__": cls.__module__, "__call__": read})
        assert known.layer_of(other) is None


@pytest.mark.parametrize("name", ["mamba2", "falcon_h1", "qwen3_5"])
def test_in_sixteen_bits(tmp_path: Path, name: str) -> None:
    """Chunks give what a prompt at once gives."""
    engine = opened(tmp_path, name, dtype="bfloat16")
    assert all(map(mx.array_equal, read(engine, 7), read(engine)))
