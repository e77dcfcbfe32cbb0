"""Native versions of MLX's functions on rows that architectures call. What the kernels do not
support is passed on to MLX."""

from __future__ import annotations

import math
from array import array
from functools import lru_cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from toastkit.native.batched_caches import attend
from toastkit.native.functions import replaces, stands_for
from toastkit.native.library import FLOATS, in_use
from toastkit.native.operands import Rotation
from toastkit.sampling.draws import GUARD

ROW = 256  # numbers that are added up first, see `total`


def fits(*arrays: Any) -> bool:
    """True if all are arrays of the kernels' dtypes."""
    return all(isinstance(array, mx.array) and array.dtype in FLOATS for array in arrays)


@stands_for("mlx.core", "fast.rms_norm")
def rms_norm(x: mx.array, weight: mx.array | None, eps: float, **rest: Any) -> mx.array:
    """As mx.fast.rms_norm: x (..., n) and a weight (n,) of any floating dtype."""
    library = in_use()
    if library is None or rest or not fits(x, x if weight is None else weight):
        return mx.fast.rms_norm(x, weight, eps, **rest)
    return library.rms_norm(x, weight, eps, 1.0 if weight is None else 0.0)


@stands_for("mlx.core", "fast.layer_norm")
def layer_norm(
    x: mx.array, weight: mx.array | None, bias: mx.array | None, eps: float, **rest: Any
) -> mx.array:
    """As mx.fast.layer_norm: x (..., n), weight and bias (n,), of any floating dtype."""
    library, weight_or_x = in_use(), x if weight is None else weight
    same_dtype = bias is None or (weight is not None and bias.dtype == weight.dtype)
    if library is None or rest or not same_dtype or not fits(x, weight_or_x):
        return mx.fast.layer_norm(x, weight, bias, eps, **rest)
    return library.layer_norm(x, weight, bias, eps)


@replaces("mx.fast.rms_norm(x, 1.0 + weight, eps)")
def rms_norm_plus_one(x: mx.array, weight: mx.array, eps: float) -> mx.array:
    """As mx.fast.rms_norm with 1 + weight: x (..., n) and a weight (n,) of any floating dtype."""
    library = in_use()
    if library is None or not fits(x, weight):
        return mx.fast.rms_norm(x, 1.0 + weight, eps)
    return library.rms_norm(x, weight, eps, 1.0)


@lru_cache(64)
def frequencies(base: float, dims: int) -> mx.array:
    """RoPE frequencies of `dims` numbers, float32 (pairs,), as mx.fast.rope computes them, to the
    bit."""
    step = mx.array(math.log(base), mx.float32) / (dims // 2)
    made = mx.exp(mx.arange(0, -(dims // 2), -1, dtype=mx.float32) * step)
    mx.eval(made)
    return made


@stands_for("mlx.core", "fast.rope")
def rope(
    x: mx.array,
    dims: int,
    *,
    traditional: bool,
    base: float | None,
    scale: float,
    offset: int | mx.array,
    freqs: mx.array | None = None,
    **rest: Any,
) -> mx.array:
    """As mx.fast.rope: x (batch, heads, length, n) of any floating dtype."""
    made = None
    # Exactly one of base and freqs; else MLX reports the error.
    if in_use() is not None and not rest and (base is None) is not (freqs is None):
        pairs: Any = freqs if base is None else frequencies(base, dims)
        how = Rotation(dims, pairs, base is None, scale, traditional=traditional)
        made = rotated(x, offset, how)
    if made is not None:
        return made
    return mx.fast.rope(
        x, dims, traditional=traditional, base=base, scale=scale, offset=offset, freqs=freqs, **rest
    )


def rotated(x: mx.array, offset: int | mx.array, how: Rotation) -> mx.array | None:
    """x (batch, heads, length, n) of any floating dtype with RoPE applied; None if MLX must do
    it."""
    library, dims = in_use(), how.dims
    heads = x.ndim in (3, 4) and fits(x) and 0 < dims <= x.shape[-1] and dims % 2 == 0
    if library is None or not heads:
        return None
    if isinstance(offset, mx.array) and offset.dtype != mx.int32:
        offset = offset.astype(mx.int32)
    return library.rope(x, offset, how)


def gated(gate: mx.array, x: mx.array, activation: str) -> mx.array | None:
    """activation(gate) * x, (..., n) of one dtype; None if MLX must do it."""
    library = in_use()
    same = fits(gate, x) and gate.shape == x.shape and gate.dtype == x.dtype
    return library.gate(gate, x, activation) if library is not None and same else None


@stands_for("mlx_lm.models.activations", "swiglu")
def swiglu(gate: mx.array, x: mx.array) -> mx.array:
    """silu(gate) * x, (..., n) of one dtype; or broadcast."""
    made = gated(gate, x, "silu")
    return nn.silu(gate) * x if made is None else made


@stands_for("mlx_lm.models.activations", "precise_swiglu")
def precise_swiglu(h: mx.array, gate: mx.array, x: mx.array) -> mx.array:
    """The same of (..., n), computed in float32, of the dtype of h."""
    return swiglu(gate.astype(mx.float32), x.astype(mx.float32)).astype(h.dtype)


def _activation(module: str, name: str, upstream: Any, activation: str) -> Any:
    """Replace a function of one array of MLX."""

    def ours(x: mx.array, **rest: Any) -> mx.array:
        library = in_use()
        if library is None or rest or not fits(x):
            return upstream(x, **rest)
        return library.gate(x, None, activation)

    return stands_for(module, name)(ours)


silu = _activation("mlx.nn", "silu", nn.silu, "silu")
gelu = _activation("mlx.nn", "gelu", nn.gelu, "gelu_erf")
gelu_approx = _activation("mlx.nn", "gelu_approx", nn.gelu_approx, "gelu")
sigmoid = _activation("mlx.core", "sigmoid", mx.sigmoid, "sigmoid")


def _is_last(x: mx.array, axis: Any) -> bool:
    return isinstance(axis, int) and x.ndim > 0 and axis in (-1, x.ndim - 1) and x.shape[-1] > 0


@stands_for("mlx.core", "softmax")
def softmax(x: mx.array, axis: Any = None, **rest: Any) -> mx.array:
    """As mx.softmax, of (..., n) and any dtype; always with precise=True."""
    library = in_use()
    if library is None or rest.keys() - {"precise"} or not (fits(x) and _is_last(x, axis)):
        return mx.softmax(x, axis, **rest)
    return library.softmax(x)


@stands_for("mlx.core", "logsumexp")
def logsumexp(x: mx.array, axis: Any = None, keepdims: bool = False, **rest: Any) -> mx.array:
    """As mx.logsumexp, of (..., n) and any dtype."""
    library = in_use()
    if library is None or rest or not (fits(x) and _is_last(x, axis)):
        return mx.logsumexp(x, axis, keepdims, **rest)
    made = library.log_sum_exp(x)
    return (made if keepdims else made.squeeze(-1)).astype(x.dtype)


def distribution(logits: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """Of softmax(logits), (..., n) of any floating dtype: the largest logit, log of the sum of
    exp(logits - largest), and the entropy in nats; float32 (...) each."""
    library = in_use()
    if library is not None and fits(logits) and logits.shape[-1]:
        found = library.distribution(logits)
        return found[..., 0], found[..., 1], found[..., 2]
    most = logits.max(axis=-1, keepdims=True).astype(mx.float32)
    values = logits - most
    weights = mx.exp(values)
    mass = total(weights)
    log_mass = mx.log(mass)
    # Logits of -inf add nothing to the entropy, but 0 * -inf is NaN.
    surprise = total(mx.where(values > -math.inf, weights * values, 0.0))
    return most[..., 0], log_mass, log_mass - surprise / mass


def total(values: mx.array) -> mx.array:
    """Sum float32 (..., n) over the last axis, (...), in two stages: MLX on the CPU adds
    sequentially, and at 151,936 probabilities the logarithm of such a sum is off by 2e-4, of a sum
    of row sums by 1e-7."""
    return in_rows(values).sum(axis=-1).sum(axis=-1)


def in_rows(values: mx.array) -> mx.array:
    """Split the last axis, of any dtype, (..., n) -> (..., rows, ROW), padding with zeros."""
    *outer, count = values.shape
    padding = [(0, 0)] * len(outer) + [(0, -count % ROW)]
    return mx.pad(values, padding).reshape(*outer, -1, ROW)


def finite(logits: mx.array) -> mx.array:
    """Logits, float32 (...), with 0 for NaN and +-GUARD for infinities (paper 003, section
    10.1)."""
    library = in_use()
    if library is None:
        return mx.nan_to_num(logits, nan=0.0, posinf=GUARD, neginf=-GUARD)
    return library.gate(logits, None, "finite")


def argmax(values: mx.array) -> mx.array:
    """First index of the maximum of float32 (..., n) without NaN: uint32 (...)."""
    library = in_use()
    if library is None or not values.shape[-1]:
        return mx.argmax(values, axis=-1)
    return library.largest(values)


@stands_for("mlx.core", "argpartition")
def argpartition(x: mx.array, kth: int, axis: Any = -1, **rest: Any) -> mx.array:
    """As mx.argpartition, of (..., n) and any dtype; in the same order if both are compiled with
    the same standard library."""
    library = in_use()
    known = fits(x) and _is_last(x, axis) and -x.shape[-1] <= kth < x.shape[-1]
    if library is None or rest or not known:
        return mx.argpartition(x, kth, axis, **rest)
    return library.partition(x, kth % x.shape[-1])


@stands_for("mlx.core", "topk")
def topk(x: mx.array, k: int, axis: Any = -1, **rest: Any) -> mx.array:
    """As mx.topk, of (..., n) and any dtype."""
    if in_use() is None or rest or not (fits(x) and _is_last(x, axis) and 0 < k <= x.shape[-1]):
        return mx.topk(x, k, axis, **rest)
    return mx.take_along_axis(x, argpartition(x, -k)[..., -k:], axis=-1)


@replaces("(y * scores[..., None]).sum(axis=-2)")
def weighted_sum(y: mx.array, scores: mx.array) -> mx.array:
    """Outputs of experts, (..., k, n), times their weights (..., k), added up in float32."""
    library = in_use()
    if library is None or not fits(y, scores) or y.shape[:-1] != scores.shape or not scores.size:
        return (y * scores[..., None]).sum(axis=-2)
    made = library.weighted_sum(y, scores.astype(mx.float32))
    return made.astype(mx.result_type(y, scores))


@lru_cache(64)
def numbered(shape: tuple[int, ...]) -> mx.array:
    """0, 1, 2, ... as uint32 (...) of a shape, evaluated without waiting for the device."""
    numbers: Any = memoryview(array("I", range(math.prod(shape)))).cast("B")
    return mx.array(numbers.cast("I", shape))


@replaces("a @ b")
def matmul(a: Any, b: Any) -> Any:
    """As MLX's for arrays (..., m, k) and (..., k, n); other operands go to their own @."""
    library = in_use()
    if library is None or not fits(a, b) or min(a.ndim, b.ndim) < 2 or not (a.size and b.size):
        return a @ b
    if a.shape[-1] != b.shape[-2]:
        return a @ b  # MLX reports the error
    transposed, dtype = b.swapaxes(-1, -2), mx.result_type(a, b)
    if b.ndim == 2:
        return library.multiply(a, transposed).astype(dtype)
    stack, matrices = transposed.reshape(-1, *transposed.shape[-2:]), numbered(b.shape[:-2])
    return library.multiply(a, stack, experts=matrices).astype(dtype)


@stands_for("mlx_lm.models.base", "scaled_dot_product_attention")
def attention(
    queries: mx.array,
    keys: Any,
    values: Any,
    cache: Any,
    scale: float,
    mask: Any,
    sinks: mx.array | None = None,
) -> mx.array:
    """As mlx_lm's, for float rows (B, heads, positions, size); mlx_lm's is called for quantised
    caches."""
    if hasattr(cache, "bits"):
        from mlx_lm.models.base import scaled_dot_product_attention

        return scaled_dot_product_attention(queries, keys, values, cache, scale, mask, sinks)
    return fast_attention(queries, keys, values, scale=scale, mask=mask, sinks=sinks)


def is_mask(mask: Any) -> bool:
    """True for masks that native attention takes."""
    if isinstance(mask, mx.array):
        return mask.dtype in (mx.bool_, *FLOATS)
    return mask in (None, "causal")


@stands_for("mlx.core", "fast.scaled_dot_product_attention")
def fast_attention(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    *,
    scale: float,
    mask: Any = None,
    sinks: mx.array | None = None,
    **rest: Any,
) -> mx.array:
    """As MLX's, for float32, float16 or bfloat16 (B, heads, positions, size); MLX's is called for
    what ours does not support, and reports errors."""
    library = in_use()
    known = all(a.dtype in FLOATS and a.ndim == 4 for a in (q, k, v)) and k.shape[2] > 0
    if isinstance(mask, mx.array):
        known = known and mask.shape[-1:] == k.shape[2:3]
    if library is None or not (known and is_mask(mask)) or rest:
        return mx.fast.scaled_dot_product_attention(
            q, k, v, scale=scale, mask=mask, sinks=sinks, **rest
        )
    if sinks is not None and sinks.dtype != mx.float32:
        sinks = sinks.astype(mx.float32)
    return attend(library, q, k, v, scale, mask, sinks)
