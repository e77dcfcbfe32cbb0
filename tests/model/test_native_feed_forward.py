"""Feed-forward networks in one native operation: to the bit what their parts give one after
another, and found in architectures by their form."""

from __future__ import annotations

import sys
from types import ModuleType

import mlx.core as mx
import mlx.nn as nn
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models import (
    activations,
    afm7,
    deepseek_v3,
    exaone,
    falcon_h1,
    gemma,
    gemma2,
    gemma4_text,
    glm4,
    granitemoehybrid,
    internlm2,
    llama,
    nemotron_h,
    phi,
    phi3,
    starcoder2,
    switch_layers,
)

from tests.conftest import examples
from tests.model.reference import OLD_MLX_LM
from tests.model.test_native_operations import library
from tests.native_library import needed
from toastkit.native import operations, replacing
from toastkit.native.forms.common import Form, form_of
from toastkit.native.library import ACTIVATIONS, ALONE, BITS, Library
from toastkit.native.operands import Operand

__all__ = ["library"]
pytestmark = needed


def operand(seed: int, shape: tuple[int, ...], bits: int | str, dtype: mx.Dtype) -> Operand:
    """A random matrix, or stack, packed in groups of 32 where bits are not 0. bits: or "mxfp4"."""
    weight = mx.random.normal(shape, key=mx.random.key(seed)) / 8
    if bits == "mxfp4":
        return Operand(*mx.quantize(weight, mode="mxfp4"), None, 4, 32)
    if not bits:
        return Operand(weight.astype(dtype))
    weight, scales, biases = mx.quantize(weight, group_size=32, bits=bits)
    return Operand(weight, scales.astype(dtype), biases.astype(dtype), bits, 32)


parts = st.tuples(
    st.sampled_from((0, *BITS, "mxfp4")), st.sampled_from((mx.float32, mx.float16, mx.bfloat16))
)


@settings(max_examples=examples(40))
@given(st.lists(st.integers(1, 5), max_size=2), st.integers(1, 3), st.integers(1, 3),
       parts, parts, parts, st.integers(0, 4), st.sampled_from(ACTIVATIONS),
       st.tuples(*[st.booleans()] * 3), st.booleans())  # fmt: skip
def test_all_in_one_is_one_after_another(
    library: Library, batch: list, columns: int, hidden: int, gate: tuple, up: tuple, down: tuple,
    k: int, kind: str, biased: tuple, alone: bool,
) -> None:  # fmt: skip
    columns, hidden, stack = 32 * columns, 32 * hidden, (5,) if k else ()
    x = mx.random.normal((*batch, columns), key=mx.random.key(3))
    own = [operand(n, (*stack, hidden, columns), *part) for n, part in enumerate((gate, up))]
    own.append(operand(2, (*stack, 40, hidden), *down))
    chosen = mx.random.randint(0, 5, (*batch, k), key=mx.random.key(4)).astype(mx.uint32)

    rows = [(*stack, o.weight.shape[-2]) for o in own]
    biases = [
        mx.random.normal(s, key=mx.random.key(9)) if b else None for s, b in zip(rows, biased)
    ]

    def product(x: mx.array, n: int) -> mx.array:
        o, bias = own[n], biases[n]
        y = library.multiply(x, *o[:3], chosen if k else None, *o[3:])
        if bias is None:
            return y
        return y + mx.expand_dims(bias[chosen], -2) if k else y + bias

    y = mx.expand_dims(x, (-2, -3)) if k else x
    wanted = product(library.gate(product(y, 0), None if alone else product(y, 1), kind), 2)
    wanted = wanted.squeeze(-2) if k else wanted
    if alone:
        del own[1], biases[1]
    form = ACTIVATIONS.index(kind) + ALONE * alone
    made = library.feed_forward(x, own, form, chosen if k else None, biases=biases)
    assert made.dtype == mx.float32 and mx.array_equal(made, wanted)


@pytest.mark.parametrize("bits", [0, 4, 6, "mxfp4"])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_gate_and_up_in_one(library: Library, bits: int | str, dtype: mx.Dtype) -> None:
    """To the bit what they give as two matrices."""
    x = mx.random.normal((2, 3, 64), key=mx.random.key(10))
    both, down = operand(11, (192, 64), bits, dtype), operand(12, (64, 96), bits, dtype)
    bias = mx.random.normal((192,), key=mx.random.key(13))
    halves = [
        Operand(*(None if a is None else mx.contiguous(a[rows]) for a in both[:3]), *both[3:])
        for rows in (slice(96), slice(96, None))
    ]
    for added in ((bias, None), (None, None)):
        apart = [None, None] if added[0] is None else [bias[:96], bias[96:]]
        made = library.feed_forward(x, [both, down], biases=added)
        wanted = library.feed_forward(x, [*halves, down], biases=[*apart, None])
        assert mx.array_equal(made, wanted)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_in_sixteen_bits(library: Library, dtype: mx.Dtype) -> None:
    x = mx.random.normal((2, 3, 64), key=mx.random.key(5))
    own = [operand(n, shape, 0, dtype) for n, shape in enumerate([(96, 64), (96, 64), (64, 96)])]
    made = library.feed_forward(x.astype(dtype), own)
    wide = [o.weight.astype(mx.float32) for o in own]
    x = x.astype(dtype).astype(mx.float32)
    wanted = activations.swiglu(x @ wide[0].T, x @ wide[1].T) @ wide[2].T
    assert made.dtype == dtype and mx.allclose(made, wanted, rtol=2e-2, atol=2e-2).item()


def test_what_does_not_fit_together(library: Library) -> None:
    x, a, b = mx.zeros((2, 64)), mx.zeros((96, 64)), mx.zeros((64, 96))
    stacks, chosen = (mx.zeros((3, 96, 64)), mx.zeros((3, 64, 96))), mx.zeros((2, 1), mx.uint32)
    for y, gate, up, down, experts in (
        (x, a, a, a, None), (x, a, a[:90], b, None), (x, b, b, a, None), (x, *[a[0]] * 3, None),
        (x.astype(mx.int32), a, a, b, None), (x, a, a, b, chosen),
        (x, stacks[0], stacks[0], stacks[1], chosen[:1]),
        (x, stacks[0], stacks[0][:2], stacks[1], chosen),
        (x, stacks[0], stacks[0], stacks[1], chosen.astype(mx.int32)),
    ):  # fmt: skip
        with pytest.raises(ValueError):
            library.feed_forward(y, [*map(Operand, (gate, up, down))], experts=experts)
        with pytest.raises(ValueError):
            library.feed_forward(y, [*map(Operand, (gate, up, down))], ALONE, experts)
        with pytest.raises(ValueError):
            library.feed_forward(y, [*map(Operand, (gate, gate))], ALONE, experts)

    own, bias = [Operand(a), Operand(a), Operand(b)], mx.zeros(96)
    for biases in ((bias, None, bias), (bias.astype(mx.float16), None, None), (bias[None],) * 3):
        with pytest.raises(ValueError):
            library.feed_forward(x, own, biases=biases)
    for parts in ([Operand(a), Operand(b)], [Operand(a[:95]), Operand(b[:, :47])], own[:1]):
        with pytest.raises(ValueError):
            library.feed_forward(x, parts)
    with pytest.raises(ValueError):
        library.feed_forward(x, [Operand(stacks[0]), Operand(stacks[1][..., :48])], experts=chosen)


# ------------------------------------------------------------------------------------- their forms

SOURCE = """
import mlx.nn as nn
from mlx_lm.models.activations import swiglu as gated
from toastkit.native.operations import swiglu

class Renamed(nn.Module):
    def __call__(self, y):
        "By other names, the second first."
        return self.w2(gated(self.w3(y), self.w1(y)))

class Other(nn.Module):
    def __call__(self, x):
        return self.down(swiglu(self.gate(x), self.up(x)))

class Twice(nn.Module):
    def __call__(self, x):
        return self.down(gated(self.gate(x), self.gate(x)))

class Relu(nn.Module):
    def __call__(self, x):
        return self.down(nn.relu(self.gate(x)) * self.up(x))

class Inherited(Renamed):
    pass
"""


def test_forms() -> None:
    usual = ("gate_proj", "up_proj", "down_proj")
    assert form_of(llama.MLP) == form_of(deepseek_v3.DeepseekV3MLP) == Form(usual, "silu")
    assert form_of(internlm2.MLP) == Form(("w1", "w3", "w2"), "silu")
    assert form_of(exaone.MLP) == Form(("c_fc_0", "c_fc_1", "c_proj"), "silu")
    assert form_of(gemma2.MLP) == form_of(gemma4_text.MLP) == Form(usual, "gelu")
    assert form_of(gemma.MLP) == Form(usual, "gelu_erf")
    for cls in (phi3.MLP, glm4.Glm4MLP):
        assert form_of(cls) == Form(("gate_up_proj", "down_proj"), "silu")
    assert form_of(afm7.MLP) == form_of(falcon_h1.FalconH1MLP) == Form(usual, "silu")
    shared = granitemoehybrid.GraniteMoeHybridSharedMLP
    assert form_of(shared) == Form(("input_linear", "output_linear"), "silu")
    assert form_of(starcoder2.MLP) == Form(("c_fc", "c_proj"), "gelu_erf", True)
    assert form_of(nemotron_h.NemotronHMLP) == Form(("up_proj", "down_proj"), "relu2", True)
    assert form_of(phi.PhiMLP) == Form(("fc1", "fc2"), "gelu", True)
    for cls in (nn.Linear, nn.Module, llama.TransformerBlock):
        assert form_of(cls) is None
    made = ModuleType("an_architecture")
    exec(SOURCE, vars(made))
    assert form_of(made.Renamed) == form_of(made.Inherited) == Form(("w3", "w1", "w2"), "silu")
    assert form_of(made.Other) is form_of(made.Twice) is form_of(made.Relu) is None


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows with every network that is computed in one."""
    calls: list[int] = []
    inner = Library.feed_forward
    monkeypatch.setattr(
        Library, "feed_forward", lambda *a, **rest: calls.append(1) or inner(*a, **rest)
    )
    return calls


def check(
    module: nn.Module, given: tuple, calls: list[int], in_one: bool, close: float = 1e-3
) -> None:
    """Native, it gives what it gave."""
    theirs, before = module(*given), len(calls)
    replacing.use_native(module.modules())
    assert replacing.is_native(type(module))
    assert mx.allclose(module(*given), theirs, rtol=close, atol=close).item()
    assert len(calls) - before == in_one


def test_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = counted(monkeypatch)
    x = mx.random.normal((2, 3, 64), key=mx.random.key(6))
    args = llama.ModelArgs("llama", 64, 1, 96, 2, 1e-5, 8)
    check(llama.MLP(args), (x,), calls, True)
    check(gemma2.MLP(64, 96), (x,), calls, True)
    check(gemma.MLP(64, 96), (x,), calls, True)
    check(phi3.MLP(64, 96), (x,), calls, True)
    check(starcoder2.MLP(64, 96), (x,), calls, True)
    args.mlp_bias = True
    check(llama.MLP(args), (x,), calls, True)
    narrow = llama.MLP(args)
    narrow.set_dtype(mx.bfloat16)
    check(narrow, (x.astype(mx.bfloat16),), calls, False, 2e-2)
    args.mlp_bias = False
    for mode, in_one in (("affine", True), ("mxfp4", True), ("mxfp8", False)):
        module = llama.MLP(args)
        nn.quantize(module, group_size=32, bits=8 if mode == "mxfp8" else 4, mode=mode)
        check(module, (x,), calls, in_one)


@pytest.mark.parametrize("tokens", [1, 40])  # mlx_lm sorts 64 and more
def test_modules_of_experts(monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    calls = counted(monkeypatch)
    x = mx.random.normal((1, tokens, 64), key=mx.random.key(7))
    chosen = mx.random.randint(0, 6, (1, tokens, 2), key=mx.random.key(8))
    for index in (mx.uint32, mx.int32):
        check(switch_layers.SwitchGLU(64, 96, 6), (x, chosen.astype(index)), calls, True)
    for mode in ("affine", "mxfp4"):
        module = switch_layers.SwitchGLU(64, 96, 6)
        nn.quantize(module, group_size=32, bits=4, mode=mode)
        check(module, (x, chosen), calls, True)
    check(switch_layers.SwitchGLU(64, 96, 6, bias=True), (x, chosen), calls, True)
    for activation, in_one in ((nn.ReLU2(), True), (nn.GELU(), False)):
        alone = switch_layers.SwitchMLP(64, 96, 6, activation=activation)
        check(alone, (x, chosen), calls, in_one)
    forms = [(gemma4_text.GeGLU(), True)]
    if not OLD_MLX_LM:
        forms += [(activations.SwigluOAI(), True), (activations.SwigluOAI(limit=3.0), False)]
    for activation, in_one in forms:
        other = switch_layers.SwitchGLU(64, 96, 6, activation=activation, bias=in_one)
        check(other, (x, chosen), calls, in_one)


def test_what_is_called_is_ours_where_parts_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part that only MLX computes: the form's own forward, with our gate."""
    module = llama.MLP(llama.ModelArgs("llama", 64, 1, 96, 2, 1e-5, 8))
    module.__class__ = replacing.native(llama.MLP)
    called: list[int] = []
    space = sys.modules["toastkit.native.operations"]
    assert space is operations
    inner = operations.gated
    monkeypatch.setattr(operations, "gated", lambda *a: called.append(1) or inner(*a))
    assert module(mx.ones((1, 64))).shape == (1, 64) and called
