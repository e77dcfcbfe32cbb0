"""Recurrent layers: what they do between their products, natively. Convolutions, the gated delta
rule and Mamba-2's scan, wherever an architecture calls them. For whole layers: decoder.py."""

from __future__ import annotations

import sys
from typing import Any

import mlx.core as mx

from toastkit.native.functions import Native, replaces, stands_for
from toastkit.native.library import in_use
from toastkit.native.operations import fits, silu

MOST_KERNEL = 16  # positions of a convolution

DELTA = "mlx_lm.models.gated_delta"


@stands_for(DELTA, "normalize_qk")
def normalize_qk(
    q: mx.array, k: mx.array, *, inv_scale: float, eps: float
) -> tuple[mx.array, mx.array]:
    """As gated_delta.normalize_qk, of (..., n) and any dtype."""
    library = in_use()
    if library is None or not fits(q, k):
        return sys.modules[DELTA].normalize_qk(q, k, inv_scale=inv_scale, eps=eps)
    eps, factor = eps * inv_scale**2, inv_scale**2
    return library.rms_norm(q, None, eps, factor), library.rms_norm(k, None, eps, inv_scale)


@stands_for(DELTA, "gated_delta_update")
def gated_delta_update(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    a: mx.array,
    b: mx.array,
    A_log: mx.array,
    dt_bias: mx.array,
    state: mx.array | None = None,
    mask: mx.array | None = None,
    **rest: Any,
) -> tuple[mx.array, mx.array]:
    """As gated_delta.gated_delta_update, of any dtype: gates (B, T, heads), or of columns, (B, T,
    heads, n). What these are, and those that have a lower bound, is asked there."""
    library, arrays = in_use(), (q, k, v, a, b, A_log, dt_bias)
    plain = rest.keys() <= {"use_kernel", "allow_neg_eigval", "lower_bound"} and a.ndim in (3, 4)
    known = (state is None or state.dtype == mx.float32) and (
        mask is None or (mask.dtype == mx.bool_ and mask.shape == q.shape[:2])
    )
    if library is None or not (plain and known and fits(*arrays)):
        return sys.modules[DELTA].gated_delta_update(*arrays, state, mask, **rest)
    factor = 2.0 if rest.get("allow_neg_eigval") else 1.0
    wide: list[mx.array | None] = [array.astype(mx.float32) for array in arrays]
    bound = rest.get("lower_bound")
    if bound is not None or a.ndim == 4:
        wide[3:] = [_decays(a, A_log, dt_bias, bound, k.shape[-1]), wide[4], None, None]
    y, after = library.gated_delta(wide, state, mask, factor)
    return y.astype(q.dtype), after


def _decays(
    a: mx.array, A_log: mx.array, dt_bias: mx.array, bound: float | None, size: int
) -> mx.array:
    """Of each column of a state, float32 (B, T, heads, size)."""
    theirs = sys.modules[DELTA]
    more = () if bound is None else (bound,)
    made = (theirs.compute_lower_bound_g if more else theirs.compute_g)(A_log, a, dt_bias, *more)
    made = made.astype(mx.float32)
    return made if a.ndim == 4 else mx.broadcast_to(made[..., None], (*made.shape, size))


@stands_for("mlx_lm.models.ssm", "ssm_update")
def ssm_update(
    hidden_states: mx.array,
    A_log: mx.array,
    B: mx.array,
    C: mx.array,
    D: mx.array,
    dt: mx.array,
    dt_bias: mx.array,
    state: mx.array | None = None,
    time_step_limit: tuple[float, float] = (0.001, 100.0),
    mask: mx.array | None = None,
    lengths: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """As ssm.ssm_update, of any floating dtype: hidden_states (B, T, heads, n), B and C (B, T,
    groups, state size), dt (B, T, heads), a state of float32 (B, heads, n, state size). lengths: of
    rows whose mask, bool (B, T), says where they end."""
    library, x = in_use(), hidden_states
    arrays = (x, B, C, dt, A_log, D, dt_bias)
    known = (state is None or state.dtype == mx.float32) and (
        lengths is None if mask is None else mask.dtype == mx.bool_ and mask.shape == x.shape[:2]
    )
    heads = x.shape[2:3]
    if library is None or not (
        known and fits(*arrays) and dt.shape == x.shape[:3] and A_log.shape == D.shape == heads
    ):
        theirs = sys.modules["mlx_lm.models.ssm"].ssm_update
        return theirs(x, A_log, B, C, D, dt, dt_bias, state, time_step_limit, mask, lengths)
    wide = tuple(array.astype(mx.float32) for array in arrays)
    y, after = library.scan(wide, state, mask, time_step_limit)
    return y.astype(mx.result_type(x, D)), after


class Convolution(Native):
    """In place of mlx.nn.Conv1d, where each channel is for itself."""

    def __call__(self: Any, x: mx.array) -> mx.array:
        y = self.convolved(x)
        return super().__call__(x) if y is None else y  # type: ignore[misc]

    def convolved(self: Any, x: mx.array, silu: bool = False) -> mx.array | None:
        """Of x (B, T, channels) of any floating dtype, with SiLU after it; None for what only MLX
        has."""
        library, weight, bias = in_use(), self["weight"], self.get("bias")
        channels, kernel, each = weight.shape
        kind = self.stride, self.padding, self.dilation, self.groups, each
        plain = kind == (1, 0, 1, channels, 1)
        if library is None or not plain or kernel > MOST_KERNEL or not fits(x, weight):
            return None
        if x.ndim != 3 or x.shape[1] < kernel or mx.result_type(x, weight) != x.dtype:
            return None
        if bias is not None and bias.dtype != weight.dtype:
            return None
        return library.convolve(x, weight, bias, silu)


@replaces("nn.silu(module(x))")
def convolved_silu(module: Any, x: mx.array) -> mx.array:
    """SiLU of what a module gives for x, (B, T, channels) of any dtype: in one operation where it
    is a convolution."""
    y = module.convolved(x, silu=True) if isinstance(module, Convolution) else None
    return silu(module(x)) if y is None else y
