"""Native products as MLX arrays: what MLX and float64 give, in whatever layout the arrays have; and
the models that compute with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models import switch_layers

from tests.conftest import examples
from tests.model.checkpoints import quantised_latent, quantised_qwen3, tied_llama
from tests.model.moe_checkpoints import write_moe
from tests.model.published import write_published
from tests.model.reference import PROMPTS
from tests.model.test_expert_slots import SlotOptions
from tests.model.test_reference import check_top20
from tests.model.test_streaming import alike, answer
from tests.native_library import built, cache, library, needed, operations_of
from toastkit.engine.engine import Engine
from toastkit.engine.opening import open_engine
from toastkit.gears.gear_options import GearOptions
from toastkit.holdings.policy import Wish
from toastkit.model.locate import locate
from toastkit.native import replacing, starting
from toastkit.native.library import BITS, FLOATS, GROUP_SIZES, Library, use
from toastkit.native.replacing import use_native
from toastkit.residency.residency_options import ResidencyOptions
from toastkit.store.skeleton import holds_experts

__all__ = ["built", "cache", "library"]
pytestmark = needed
DTYPES = (mx.float32, mx.float16, mx.bfloat16)
CLOSE = {mx.float32: 2e-4, mx.float16: 2e-3, mx.bfloat16: 1.5e-2}
PAIR_CLOSE = 3e-4  # of the largest activation of a group, where weights have 4 bits


def exact(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32)).astype(np.float64)


def laid_out(array: mx.array, layout: str) -> mx.array:
    """The same numbers, (..., m, n), lying otherwise in memory."""
    if layout == "columns":
        return mx.contiguous(array.swapaxes(-1, -2)).swapaxes(-1, -2)
    if layout == "sliced":
        return mx.concatenate([array, array], axis=-2)[..., : array.shape[-2], :]
    if layout == "gaps":
        return mx.stack([array, array], axis=-1).reshape(*array.shape[:-1], -1)[..., ::2]
    return array


layouts = st.sampled_from(("rows", "columns", "sliced", "gaps"))


@settings(max_examples=examples(60))
@given(
    st.lists(st.integers(1, 4), max_size=3), st.integers(1, 9), st.sampled_from(GROUP_SIZES),
    st.sampled_from((0, *BITS)), st.tuples(st.sampled_from(DTYPES), st.sampled_from(DTYPES)),
    st.tuples(layouts, layouts), st.sampled_from((12, 16, 32)),
)  # fmt: skip
def test_products(
    library: Library,
    batch: list,
    rows: int,
    columns: int,
    bits: int,
    dtypes: tuple,
    kinds: tuple,
    digits: int,
) -> None:
    keys = mx.random.split(mx.random.key(rows), 2)
    x = laid_out(mx.random.normal((*batch, 3, columns), key=keys[0]).astype(dtypes[0]), kinds[0])
    weight = mx.random.normal((rows, columns), key=keys[1]).astype(dtypes[1])
    if bits:
        packed = mx.quantize(weight, group_size=columns, bits=bits)
        wide = mx.dequantize(*(p.astype(mx.float32) if n else p for n, p in enumerate(packed)),
                             group_size=columns, bits=bits)  # fmt: skip
        packed = [laid_out(part, kinds[1]) for part in packed]
        y = library.multiply(x, *packed, bits=bits, group_size=columns, activation_bits=digits)
    else:
        wide = weight
        y = library.multiply(x, laid_out(weight, kinds[1]))
    wanted = exact(x) @ exact(wide).T
    assert y.dtype == (dtypes[0] if dtypes[0] == dtypes[1] else mx.float32)
    error = CLOSE[y.dtype] * (abs(exact(x)) @ abs(exact(wide)).T) + 1e-6
    if bits == 4 and digits == 12:
        most = abs(exact(x)).max(-1, keepdims=True)
        error += PAIR_CLOSE * most * abs(exact(wide)).sum(-1)
    assert (abs(exact(y) - wanted) <= error).all()


@settings(max_examples=examples(30))
@given(
    st.integers(1, 5), st.integers(1, 20), st.integers(1, 5), st.sampled_from(DTYPES),
    st.tuples(layouts, layouts), st.booleans(),
)  # fmt: skip
def test_products_in_mxfp4(
    library: Library, count: int, rows: int, groups: int, dtype: mx.Dtype, kinds: tuple,
    floats: bool,
) -> None:  # fmt: skip
    """One matrix and chosen experts, beside MLX's own, of the dtype of x."""
    keys = mx.random.split(mx.random.key(rows), 2)
    x = laid_out(mx.random.normal((count, 1, 32 * groups), key=keys[0]).astype(dtype), kinds[0])
    stack = mx.quantize(mx.random.normal((3, rows, 32 * groups), key=keys[1]), mode="mxfp4")
    chosen = mx.arange(count, dtype=mx.uint32) % 3
    size = abs(exact(x)) @ abs(exact(mx.dequantize(*stack, mode="mxfp4"))).max((0, 1))
    for experts in (None, chosen):
        parts = [laid_out(p if experts is not None else p[0], kinds[1]) for p in stack]
        y = library.multiply(
            x, *parts, experts=experts, bits=4, group_size=32, activation_bits=32 if floats else 16
        )
        if experts is None:
            wanted = mx.quantized_matmul(x, *parts, transpose=True, mode="mxfp4")
        else:
            wanted = mx.gather_qmm(x, *parts, rhs_indices=experts, transpose=True, mode="mxfp4")
        assert y.dtype == wanted.dtype == dtype and y.shape == wanted.shape
        assert (abs(exact(y) - exact(wanted)) <= 2 * CLOSE[dtype] * size[..., None] + 1e-6).all()


@settings(max_examples=examples(40))
@given(
    st.integers(1, 9), st.integers(1, 9), st.sampled_from(GROUP_SIZES), st.sampled_from((0, *BITS)),
    st.sampled_from((mx.float16, mx.bfloat16)), st.booleans(),
)  # fmt: skip
def test_numbers_in_16_bits_are_multiplied_as_if_they_were_wide(
    library: Library,
    vectors: int,
    rows: int,
    columns: int,
    bits: int,
    dtype: mx.Dtype,
    chosen: bool,
) -> None:
    """To the bit: so a model that keeps them needs no other oracle than one that does not."""
    keys = mx.random.split(mx.random.key(rows), 2)
    x = mx.random.normal((vectors, 1, columns), key=keys[0])
    weight = mx.random.normal((2, rows, columns), key=keys[1]).astype(dtype)
    packed = mx.quantize(weight, group_size=columns, bits=bits) if bits else [weight]
    more = {"bits": bits, "group_size": columns} if bits else {}
    if chosen:
        more["experts"] = mx.arange(vectors, dtype=mx.uint32) % 2
    else:
        packed = [part[0] for part in packed]
    wide = [part.astype(mx.float32) if part.dtype == dtype else part for part in packed]
    y = library.multiply(x, *packed, **more)
    assert y.dtype == mx.float32
    assert mx.array_equal(y, library.multiply(x, *wide, **more)).item()


@settings(max_examples=examples(40))
@given(
    st.integers(1, 5), st.integers(1, 3), st.integers(1, 3), st.booleans(), st.booleans(), layouts
)
def test_products_with_chosen_experts(
    library: Library, tokens: int, m: int, k: int, same: bool, packed: bool, layout: str
) -> None:
    """x is broadcast to the choice as in mx.gather_mm."""
    keys = mx.random.split(mx.random.key(tokens), 3)
    stack = mx.random.normal((4, 6, 64), key=keys[0])
    x = mx.random.normal((2, tokens, 1 if same else k, m, 64), key=keys[1])
    chosen = mx.random.randint(0, 4, (2, tokens, k), key=keys[2]).astype(mx.uint32)
    parts = mx.quantize(stack, group_size=32, bits=4) if packed else [stack]
    wide = mx.dequantize(*parts, group_size=32, bits=4) if packed else stack
    more = {"bits": 4, "group_size": 32} if packed else {}
    y = library.multiply(laid_out(x, layout), *parts, experts=laid_out(chosen, layout), **more)
    wanted = mx.gather_mm(x, wide.swapaxes(-1, -2), rhs_indices=chosen)
    assert y.shape == wanted.shape and mx.allclose(y, wanted, rtol=1e-3, atol=2e-3).item()


def test_what_does_not_fit_together(library: Library) -> None:
    x, weight = mx.zeros((2, 64)), mx.zeros((8, 64))
    packed = mx.quantize(weight, group_size=32, bits=4)
    wrong = [
        ((x, mx.zeros((8, 65))), {}), ((x, mx.zeros((2, 8, 64))), {}), ((x, mx.zeros(64)), {}),
        ((x.astype(mx.int32), weight), {}), ((x, weight.astype(mx.int8)), {}),
        ((x, *packed), {"bits": 8, "group_size": 32}), ((x, *packed), {"bits": 4}),
        ((x, *packed), {"bits": 4, "group_size": 64}),
        ((x, packed[0], packed[1][:3], packed[2]), {"bits": 4, "group_size": 32}),
        ((x, *packed[:2]), {"bits": 4, "group_size": 32}),
        ((x, *mx.quantize(weight, mode="mxfp8")), {"bits": 8, "group_size": 32}),
        ((x, *mx.quantize(weight, mode="nvfp4")), {"bits": 4, "group_size": 16}),
        ((x[:, None], *(part[None] for part in packed[:1]), *(p[None][:0] for p in packed[1:])),
         {"bits": 4, "group_size": 32, "experts": mx.zeros((2,), mx.uint32)}),
        ((x, weight[None]), {"experts": mx.zeros((2,), mx.int32)}),
        ((mx.zeros((3, 2, 64)), weight[None]), {"experts": mx.zeros((2,), mx.uint32)}),
    ]  # fmt: skip
    for arrays, rest in wrong:
        with pytest.raises(ValueError):
            library.multiply(*arrays, **rest)


def test_results_are_lazy_and_can_be_computed_with(library: Library) -> None:
    weight = mx.random.normal((64, 64), key=mx.random.key(1)) / 12
    x = y = mx.random.normal((1, 64), key=mx.random.key(2))
    for _ in range(50):
        y = mx.tanh(library.multiply(y, weight))
        x = mx.tanh(x @ weight.T)
    assert mx.allclose(x, y, atol=1e-3).item()
    with mx.stream(mx.new_stream(mx.cpu)):
        assert mx.allclose(library.multiply(x, weight), x @ weight.T, atol=1e-4).item()


@pytest.mark.parametrize("shape", [(1, 1), (3, 8), (5, 1 << 20), (1, (2 << 20) + 3)])
def test_memory_to_read_into(library: Library, shape: tuple[int, int]) -> None:
    """It is MLX's, counted as such, and given back; large or not."""
    before = mx.get_active_memory()
    memory = library.memory(*shape)
    assert (memory.shape, memory.dtype) == (shape, mx.uint8)
    assert mx.get_active_memory() - before >= memory.nbytes
    numbers = np.random.default_rng(shape[1]).integers(0, 256, shape, np.uint8)
    memoryview(memory).cast("B")[:] = numbers.tobytes()
    assert np.array_equal(np.array(memory + 0), numbers)
    del memory
    assert mx.get_active_memory() <= before


@pytest.mark.parametrize("residency", [None, ResidencyOptions("layers", 1)])
def test_weights_are_read_into_such_memory(residency, tmp_path: Path, monkeypatch) -> None:
    made = []
    real = Library.memory
    monkeypatch.setattr(Library, "memory", lambda *given: made.append(given) or real(*given))
    files = locate(str(write_published(tmp_path / "moe", "qwen3_moe")))
    for setting in ("off", "require"):
        answer(open_engine(files, native=setting, residency=residency))
        assert bool(made) is (setting == "require")


@pytest.mark.parametrize("size", [0, 5, (1 << 18) - 1, 3 << 19])
def test_what_settles_is_what_it_was(library: Library, size: int) -> None:
    """Between two others, whose pages it shares."""
    arrays = [mx.random.normal((size,), key=mx.random.key(n)) for n in range(3)]
    before = [np.array(array) for array in arrays]
    library.settle(arrays[1])
    library.settle(arrays[1])
    assert all(np.array_equal(np.array(x), y) for x, y in zip(arrays, before))


def test_matrices_made_here_settle(tmp_path: Path, monkeypatch) -> None:
    settled: set[int] = set()
    monkeypatch.setattr(Library, "settle", lambda _, array: settled.add(id(array)))
    files = locate(str(tied_llama(tmp_path / "llama")))
    for setting in ("off", "require"):
        engine = open_engine(files, native=setting, gear_options=GearOptions("low", "all", (4, 8)))
        engine.shift("low")
        packed = [m for _, m in engine.model.named_modules() if hasattr(m, "packed_bits")]
        assert packed and all(
            (id(m["weight"]) in settled) is (setting == "require") for m in packed
        )


def test_only_the_classes_of_mlx_are_replaced(library: Library) -> None:
    class Linear(nn.Linear):
        pass

    before = dict(vars(nn.Linear))
    for cls in (
        nn.Linear, nn.QuantizedLinear, nn.Embedding, nn.QuantizedEmbedding,
        switch_layers.SwitchLinear, switch_layers.QuantizedSwitchLinear,
    ):  # fmt: skip
        made = replacing.native(cls)
        assert made is not cls and issubclass(made, cls) and made.__name__ == cls.__name__
        assert replacing.native(made) is made and replacing.is_native(made)
    assert replacing.native(Linear) is Linear and not replacing.is_native(nn.Linear)
    assert dict(vars(nn.Linear)) == before


@pytest.mark.parametrize("bits", [0, *BITS])
@pytest.mark.parametrize("dtype", FLOATS)
def test_embeddings_are_one_operation(library: Library, bits: int, dtype: mx.Dtype) -> None:
    """Where they become float32: to the bit what MLX makes of it, in any shape."""
    use(library)
    weight = mx.random.normal((40, 64), key=mx.random.key(bits)) / 3
    made: Any = nn.Embedding(40, 64)
    made.weight = weight.astype(dtype)
    if bits:
        made = made.to_quantized(32, bits)
        made.scales, made.biases = (a.astype(dtype) for a in (made.scales, made.biases))
    use_native([made])
    if dtype != mx.float32:
        vars(made)["_wide"] = mx.float32
    for shape in ((1,), (2, 3)):
        x = mx.random.randint(0, 40, shape).astype(mx.uint32)
        mx.eval(x, made.parameters())
        found, theirs = made(x), made(x.astype(mx.int32))
        assert (operations_of(found) == ["ToastRows"]) is bool(bits or dtype != mx.float32)
        assert "ToastRows" not in operations_of(theirs)
        assert found.dtype == mx.float32 and mx.array_equal(found, theirs)
    if bits:
        assert mx.isnan(made(mx.array([3, 40], mx.uint32))).tolist() == [[False] * 64, [True] * 64]


def test_modules_compute_what_they_are(library: Library) -> None:
    """With biases, also in mxfp4; and what only MLX packs is left to it."""
    use(library)
    x = mx.random.normal((2, 3, 64), key=mx.random.key(0))
    chosen = mx.array([[[0, 2], [1, 1], [2, 0]]] * 2, mx.uint32)
    made = [nn.Linear(64, 96), nn.Linear(64, 96, bias=False), nn.Embedding(96, 64)]
    made += [module.to_quantized(group_size=32, bits=bits) for module in made for bits in (3, 8)]
    made += [nn.Linear(64, 96).to_quantized(mode=mode) for mode in ("mxfp4", "mxfp8", "nvfp4")]
    switch = switch_layers.SwitchLinear(64, 96, 3)
    switch.bias = mx.random.normal((3, 96))
    made += [switch, *(switch.to_quantized(32, *rest) for rest in ((6,), (4, "mxfp4")))]
    for module in made:
        stack = "Switch" in type(module).__name__
        call = "as_linear" if "Embedding" in type(module).__name__ else "__call__"
        given = (mx.expand_dims(x, (-2, -3)), chosen) if stack else (x,)
        wanted = getattr(module, call)(*given)
        module.__class__ = replacing.native(type(module))
        assert mx.allclose(found := getattr(module, call)(*given), wanted, rtol=1e-3, atol=1e-3)
        if "ToastProduct" in (made_by := operations_of(found)) and "bias" in module and not stack:
            assert "Add" not in made_by and mx.array_equal(found, module.pop("bias") + module(x))


# --------------------------------------------------------------------------------------- of models


def test_the_reference() -> None:
    """Of an independent implementation: the distribution, and the tokens that follow."""
    crumb = open_engine(locate("crumb"), native="require")
    assert crumb.native.on
    for prompt in PROMPTS[::4]:
        caches = crumb.new_cache()
        logits = crumb.prefill(prompt["token_ids"], caches)
        check_top20(logits, prompt)
        for token in prompt["greedy"][:12]:
            assert int(mx.argmax(logits).item()) == token, prompt["name"]
            logits = crumb.step(token, caches)


MAKERS = {
    "llama": tied_llama, "qwen3": quantised_qwen3, "latent": quantised_latent,
    "deepseek_v3": lambda path: write_moe(path, "deepseek_v3"),
}  # fmt: skip
# All recorded architectures: test_transformers.py (whole prompts), `make modes` (steps).
NAMES = (
    "llama", "qwen3", "qwen3_moe_quantised", "gemma3_text", "gpt_oss", "phi3", "deepseek_v3",
    "qwen2_moe", "qwen3_5_moe", "qwen3_next", "falcon_h1", "latent",
)  # fmt: skip
PACKED = ("qwen3", "qwen3_moe_quantised", "gpt_oss", "latent")  # weights of 4 bits


def apart(a: list[mx.array], b: list[mx.array]) -> float:
    """The largest difference of two answers, as a share of the largest logit."""
    pairs = zip(a, b, strict=True)
    return max((mx.abs(x - y).max() / mx.abs(x).max()).item() for x, y in pairs)


@pytest.mark.parametrize("name", ["crumb", *NAMES])
def test_models_are_those_of_mlx(tmp_path: Path, name: str) -> None:
    """Where products are exact, within 1e-5. One engine's setting is not that of another beside
    it. The embedded model is in low gear."""
    make = MAKERS.get(name) or (lambda path: write_published(path, name))
    files = locate(name if name == "crumb" else str(make(tmp_path / name)))
    gears = GearOptions("low", "all") if name == "crumb" else None

    def opened(native: str, exact: bool = False) -> tuple[Engine, list[mx.array]]:
        engine = open_engine(files, native=native, native_exact=exact, gear_options=gears)
        return engine, answer(engine, lambda n: Wish("low") if gears else Wish())

    wanted = opened("off")[1]
    if gears or name in PACKED:
        exact, found = opened("require", True)
        assert exact.native.exact and "exact" in exact.native.why
        assert apart(wanted, found) <= 1e-5
    usual, others = opened("require")
    assert not usual.native.exact
    if gears:  # without these instructions both may compute alike
        assert starting.status().why != "avx512vnni" or not alike(others, found)
        return
    parts = [holding.module for holding in usual.holdings.modules.values()]
    bits = {part._activation_bits for part in parts if hasattr(part, "_activation_bits")}
    assert bits == {16 if any(map(holds_experts, parts)) else 12}
    assert apart(wanted, others) < (5e-3 if name in ("qwen3", "latent") else 1e-3)


def test_layers_experts_and_gears_are_as_ever(tmp_path: Path) -> None:
    """Streamed, in slots, in a gear: to the bit what the same is when all of it stays."""
    files = locate(str(write_published(tmp_path / "moe", "qwen3_moe")))
    gears = GearOptions("low", "all")

    def wish(n: int) -> Wish:
        return Wish("low")

    def opened(**rest):
        return open_engine(files, native="require", gear_options=gears, **rest)

    engine, plain = opened(), open_engine(files, gear_options=gears)
    wanted = answer(engine, wish)
    answer(plain, wish)
    assert engine.holdings.counts == plain.holdings.counts and plain.holdings.counts.fused
    assert alike(answer(opened(residency=ResidencyOptions("layers", 1)), wish), wanted)
    assert alike(answer(opened(expert_slots=SlotOptions("slots", 3, "off")), wish), wanted)
