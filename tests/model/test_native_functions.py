"""Functions that architectures call by name, in classes of ours that call others."""

from __future__ import annotations

import importlib
import linecache
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import mlx.core as mx
import pytest

from toastkit.native import functions, replacing

SOURCE = """
import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import scaled_dot_product_attention as attend
from mlx_lm.models.activations import swiglu

def helper(x):
    return attend(x, x, x, None, 1.0, None)

def other(x):
    return x

class Attention(nn.Module):
    kind = "base"
    def __call__(self, x, *, more=0):
        "Calls it."
        return (lambda y: attend(y, y, y, None, 1.0, None))(x), more

class Helped(nn.Module):
    def __call__(self, x):
        return helper(x)

class Fast(nn.Module):
    def __call__(self, x):
        return mx.fast.scaled_dot_product_attention(x, x, x, scale=1.0), mx.fast.rms_norm, mx.abs

class Inherited(Attention):
    def __call__(self, x):
        return super().__call__(x)[0], other(x)

class Kept(Attention):
    pass

class Plain(nn.Module):
    def __call__(self, x):
        return other(mx.fast.rms_norm(x, None, 1.0))

class Overridden(Attention):
    def __call__(self, x):
        return x
"""


@pytest.fixture
def architecture(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A module as mlx_lm's are, where only attention is replaced: by the word "ours"."""
    monkeypatch.setattr(functions, "_OURS", {})
    monkeypatch.setattr(functions, "_EXPRESSIONS", {})
    monkeypatch.setattr(replacing, "under_its_name", replacing.under_its_name.__wrapped__)

    @functions.stands_for("mlx_lm.models.base", "scaled_dot_product_attention")
    def attend(queries, keys, values, cache, scale, mask, sinks=None) -> str:
        return "ours"

    @functions.stands_for("mlx.core", "fast.scaled_dot_product_attention")
    def fast(q, k, v, *, scale, mask=None, sinks=None) -> str:
        return "ours, fast"

    made = ModuleType("an_architecture")
    monkeypatch.setitem(sys.modules, "an_architecture", made)
    exec(SOURCE, vars(made))
    yield made
    functions._clear_caches()


def test_methods_call_ours(architecture: ModuleType) -> None:
    x = mx.ones((1, 1, 1, 8))
    before = dict(vars(architecture))

    def made(name: str) -> object:
        cls = replacing.native(getattr(architecture, name))
        assert (cls.__name__, cls.__module__) == (name, "an_architecture")
        assert issubclass(cls, getattr(architecture, name)) and replacing.native(cls) is cls
        return cls()

    attention = made("Attention")
    assert attention(x, more=3) == ("ours", 3) and attention(x) == ("ours", 0)
    assert type(attention).__call__.__doc__ == "Calls it." and attention.kind == "base"
    assert made("Kept")(x) == ("ours", 0)
    assert made("Helped")(x) == "ours"
    assert made("Fast")(x) == ("ours, fast", mx.fast.rms_norm, mx.abs)
    assert dict(vars(architecture)) == before
    assert mx.array_equal(architecture.Helped()(x), x)
    assert mx.fast.scaled_dot_product_attention(x, x, x, scale=1.0).shape == x.shape


EXPRESSIONS = """
import mlx.core as mx
import mlx.nn as nn
from functools import partial

@partial(mx.compile, shapeless=True)
def helper(y, w):
    return (y * w[..., None]).sum(axis=-2).astype(y.dtype)

class Weighs(nn.Module):
    def __call__(self, y, scores=None, *, w: int = 3):
        def inner():
            return w
        r = (
            (y + 1) * scores[..., None]
        ).sum(axis=-2)
        return r, inner()

class Compiled(nn.Module):
    def __call__(self, y, w):
        return helper(y, w)

class Fails(nn.Module):
    def __call__(self, y, w):
        y = (y * w[..., None]).sum(axis=-2)
        raise ValueError("it does")

class Others(nn.Module):
    def __call__(self, y, w):
        return (y * w[..., None]).sum(axis=-1), (y + w[..., None]).sum(axis=-2)

class Within(nn.Module):
    def __call__(self, y, w):
        return super().__call__((y * w[..., None]).sum(axis=-2))
"""


def test_expressions(
    architecture: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "an_expression.py").write_text(EXPRESSIONS)
    monkeypatch.syspath_prepend(tmp_path)
    made = importlib.import_module("an_expression")
    monkeypatch.setitem(sys.modules, "an_expression", made)

    @functions.replaces("(a * b[..., None]).sum(axis=-2)")
    def weighed(a: mx.array, b: mx.array) -> mx.array:
        return mx.array([7.0, *a.shape, *b.shape])

    y, w = mx.ones((2, 3)), mx.ones(2)
    r, inner = replacing.native(made.Weighs)()(y, scores=w, w=5)
    assert r.tolist() == [7, 2, 3, 2] and inner == 5
    assert made.Weighs()(y, w)[0].tolist() == [4, 4, 4]
    assert replacing.native(made.Compiled)()(y, w).tolist() == [7, 2, 3, 2]
    for name in ("Others", "Within"):
        cls = getattr(made, name)
        assert replacing.native(cls) is cls
    with pytest.raises(ValueError) as error:
        replacing.native(made.Fails)()(y, w)
    assert "raise" in EXPRESSIONS.splitlines()[error.traceback[-1].lineno]
    (tmp_path / "an_expression.py").write_text(EXPRESSIONS.replace("y", "z"))  # since imported
    linecache.clearcache()
    functions._clear_caches()
    assert functions.rebuilt_methods(made.Weighs) == {}


def test_classes_that_call_none_stay(architecture: ModuleType) -> None:
    """By super(), too: MLX's runs."""
    for name in ("Plain", "Overridden", "Inherited"):
        cls = getattr(architecture, name)
        assert replacing.native(cls) is cls


def test_modules_of_a_tree(architecture: ModuleType) -> None:
    tree = architecture.Plain()
    tree.parts = [architecture.Attention(), architecture.Plain()]
    replacing.use_native(tree.modules())
    assert [replacing.is_native(type(part)) for part in tree.parts] == [True, False]
    assert tree.parts[0](mx.ones((1, 1, 1, 8))) == ("ours", 0)
    assert type(tree) is architecture.Plain


def test_a_module_that_two_others_share(architecture: ModuleType) -> None:
    """As an activation of MiniMax-M3's routed and shared experts is: a tree names it twice."""
    tree = architecture.Plain()
    tree.first = tree.second = architecture.Attention()
    replacing.use_native(tree.modules())
    assert tree.first is tree.second and replacing.is_native(type(tree.first))
