"""Recurrent layers, natively: what they compute between their projections. Convolutions, the gated
delta rule, the scans of Mamba, the recurrences of RWKV-7 and others, in any architecture. Whole
layers are in layers/recurrent.py."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from toastkit.native.forms.common import Known
from toastkit.native.functions import Native, replaces, stands_for
from toastkit.native.library import NONE, called, in_use, objects
from toastkit.native.operations import fits, rms_norm, silu, swiglu

MAX_KERNEL = 16  # width of a convolution, as the kernels have it

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
    """As gated_delta.gated_delta_update, of any dtype: gates (B, T, heads), or per key column, (B,
    T, heads, n). Gates with a lower bound are computed by mlx_lm."""
    library, arrays = in_use(), (q, k, v, a, b, A_log, dt_bias)
    plain = rest.keys() <= {"use_kernel", "allow_neg_eigval", "lower_bound"} and a.ndim in (3, 4)
    bound = rest.get("lower_bound")
    if a.ndim == 4 and bound is None:
        plain = plain and A_log.size == a.shape[2] and dt_bias.shape == a.shape[2:]
    known = (state is None or state.dtype == mx.float32) and (
        mask is None or (mask.dtype == mx.bool_ and mask.shape == q.shape[:2])
    )
    if library is None or not (plain and known and fits(*arrays)):
        return sys.modules[DELTA].gated_delta_update(*arrays, state, mask, **rest)
    factor = 2.0 if rest.get("allow_neg_eigval") else 1.0
    inputs: list[mx.array | None] = [array.astype(mx.float32) for array in arrays]
    if bound is not None:
        inputs[3:] = [_decays(a, A_log, dt_bias, bound, k.shape[-1]), inputs[4], None, None]
    elif a.ndim == 4:
        inputs[5:] = [A_log.astype(mx.float32).reshape(-1), dt_bias.astype(mx.float32)]
    y, new_state = library.gated_delta(inputs, state, mask, factor)
    return y.astype(q.dtype), new_state


def _decays(a: mx.array, A_log: mx.array, dt_bias: mx.array, bound: float, size: int) -> mx.array:
    """Decay of each column of a state, float32 (B, T, heads, size)."""
    made = sys.modules[DELTA].compute_lower_bound_g(A_log, a, dt_bias, bound).astype(mx.float32)
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
    groups, state size), dt (B, T, heads), state float32 (B, heads, n, state size). lengths: of
    padded rows, which the mask, bool (B, T), describes too."""
    library, x = in_use(), hidden_states
    arrays = (x, B, C, dt, A_log, D, dt_bias)
    known = (state is None or state.dtype == mx.float32) and (
        lengths is None if mask is None else mask.dtype == mx.bool_ and mask.shape == x.shape[:2]
    )
    heads = x.shape[2:3]
    if library is None or not (
        known
        and _is_range(time_step_limit)
        and fits(*arrays)
        and dt.shape == x.shape[:3]
        and A_log.shape == D.shape == heads
    ):
        upstream = sys.modules["mlx_lm.models.ssm"].ssm_update
        return upstream(x, A_log, B, C, D, dt, dt_bias, state, time_step_limit, mask, lengths)
    inputs = tuple(array.astype(mx.float32) for array in arrays)
    y, new_state = library.scan(inputs, state, mask, time_step_limit)
    return y.astype(mx.result_type(x, D)), new_state


def _is_range(limits: Any) -> bool:
    """True for two numbers. It is config.json's, and MLX's to judge otherwise."""
    numbers = isinstance(limits, (tuple, list)) and len(limits) == 2
    return numbers and all(isinstance(one, (int, float)) for one in limits)


class Convolution(Native):
    """mlx.nn.Conv1d, if depthwise."""

    def __call__(self: Any, x: mx.array) -> mx.array:
        y = self.convolved(x)
        return super().__call__(x) if y is None else y  # type: ignore[misc]

    def convolved(self: Any, x: mx.array, silu: bool = False) -> mx.array | None:
        """The convolution of x (B, T, channels) of any floating dtype, then SiLU on request; None
        if only MLX supports it."""
        library, weight, bias = in_use(), self["weight"], self.get("bias")
        if library is None or not self.is_plain() or not fits(x, weight):
            return None
        if x.ndim != 3 or x.shape[1] < weight.shape[1] or mx.result_type(x, weight) != x.dtype:
            return None
        if bias is not None and bias.dtype != weight.dtype:
            return None
        return library.convolve(x, weight, bias, silu)

    def is_plain(self: Any) -> bool:
        """True if it is depthwise, and as the kernels have it."""
        channels, kernel, each = self["weight"].shape
        kind = self.stride, self.padding, self.dilation, self.groups, each
        return kind == (1, 0, 1, channels, 1) and kernel <= MAX_KERNEL


@replaces("nn.silu(module(x))")
def convolved_silu(module: Any, x: mx.array) -> mx.array:
    """SiLU of a module's output for x, (B, T, channels) of any dtype: one operation if the module
    is a convolution."""
    y = module.convolved(x, silu=True) if isinstance(module, Convolution) else None
    return silu(module(x)) if y is None else y


@stands_for("mlx_lm.models.bailing_moe_linear", "recurrent_gla")
def recurrent_gla(
    q: mx.array, k: mx.array, v: mx.array, g: mx.array, scale: float, h: mx.array | None = None
) -> tuple[mx.array, mx.array]:
    """As bailing_moe_linear.recurrent_gla: q, k, v (B, heads, T, n) of any floating dtype, g
    (heads,) below 0, state h (B, heads, n, n). It is Mamba-2's scan with steps of 1, and a state
    with rows for v."""
    library, heads = in_use(), q.shape[1:2]
    if library is None or not fits(q, k, v, g) or g.shape != heads:
        return sys.modules["mlx_lm.models.bailing_moe_linear"].recurrent_gla(q, k, v, g, scale, h)
    x, b, c = (one.astype(mx.float32).transpose(0, 2, 1, 3) for one in (v, k, q * scale))
    zeros, state = mx.zeros(heads), None if h is None else h.astype(mx.float32).swapaxes(2, 3)
    a_log = mx.log(-g.astype(mx.float32))
    dt = mx.broadcast_to(zeros, x.shape[:3])
    y, after = library.scan((x, b, c, dt, a_log, zeros, zeros), state, None, (1.0, 1.0))
    return y.transpose(0, 2, 1, 3).astype(q.dtype), after.swapaxes(2, 3).astype(q.dtype)


def _float32(*arrays: mx.array | None) -> ctypes.Array[ctypes.py_object]:
    """The arrays in float32, as the library takes them."""
    return objects(*(NONE if one is None else one.astype(mx.float32) for one in arrays))


@stands_for("mlx_lm.models.recurrent_gemma", "rnn_scan")
def rnn_scan(x: mx.array, a: mx.array, h0: mx.array | None) -> tuple[mx.array, mx.array]:
    """As recurrent_gemma.rnn_scan: x and its decays a (B, T, channels) of one floating dtype, h0
    (B, channels)."""
    library = in_use()
    if library is None or not fits(x, a, x if h0 is None else h0) or a.shape != x.shape:
        return sys.modules["mlx_lm.models.recurrent_gemma"].rnn_scan(x, a, h0)
    h = mx.array(0)
    library.c.linear(h, _float32(a, x, h0))
    h = h.astype(x.dtype)
    return h, h[:, -1]


class GeneralisedDelta(Known):
    """The recurrence of RWKV-7's time mixing, a method of its class."""

    def _wkv7(
        self: Any, r: mx.array, w: mx.array, k: mx.array, v: mx.array, a: mx.array, b: mx.array,
        state: mx.array | None,
    ) -> tuple[mx.array, mx.array]:  # fmt: skip
        """All (B, T, heads, n) of any floating dtype, state (B, heads, n, n)."""
        library, arrays = in_use(), (r, w, k, v, a, b)
        if library is None or not fits(*arrays, r if state is None else state):
            return super()._wkv7(*arrays, state)  # type: ignore[misc]
        y, new_state = called(2, library.c.wkv, _float32(*arrays, state))
        return y.astype(r.dtype), new_state.astype(r.dtype)


class Mixer(Native):
    """Mamba-2's mixer: one operation between its projections, apart from the output gate. x (B, T,
    columns) float32."""

    def __call__(self: Any, hidden_states: mx.array, mask: Any, cache: Any = None) -> mx.array:
        if (y := self.mixed(hidden_states, mask, cache)) is not None:
            return y
        return super().__call__(hidden_states, mask, cache)  # type: ignore[misc]

    def mixed(self: Any, x: mx.array, mask: Any, cache: Any) -> mx.array | None:
        """The output for x (B, T, columns) float32; None if only the architecture supports it."""
        library, conv = in_use(), self["conv1d"]
        if library is None or mask is not None or cache is None or cache.lengths is not None:
            return None
        if not self.is_limited:
            return None
        arrays = [conv["weight"], conv.get("bias"), cache[0], self["A_log"], self["D"]]
        arrays += [self["dt_bias"], cache[1]]
        unsupported = any(one is not None and one.dtype != mx.float32 for one in (x, *arrays))
        if unsupported or type(conv).__call__ is not Convolution.__call__ or not conv.is_plain():
            return None
        if (projected := self["in_proj"](x)).dtype != mx.float32:
            return None
        given = _float32(projected, *arrays)
        y, *new_states = called(3, library.c.mixer, given, ctypes.byref(self.shape()))
        cache[0], cache[1] = new_states
        cache.advance(x.shape[1])
        gate = projected[..., : y.shape[2]]
        return self["out_proj"](self["norm"](y, gate) if "norm" in self else swiglu(gate, y))

    @property
    def is_limited(self: Any) -> bool:
        """True if time steps have a lower and an upper limit, as `shape` needs them."""
        return _is_range(self.time_step_limit)

    def shape(self: Any, normed: int = 0) -> MixerShape:
        """Its constants. normed: numbers per group of its norm."""
        sizes = self.num_heads, self.n_groups, self.ssm_state_size, normed
        return MixerShape(*sizes, *self.time_step_limit)


class MixerShape(ctypes.Structure):
    """toast_mixer, see glue/mixer.cpp."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("heads", "groups", "numbers", "normed")),
        ("least", ctypes.c_float), ("most", ctypes.c_float),
    )  # fmt: skip


class MixerGivenCacheFirst(Mixer):
    """Falcon-H1's, with the cache before the mask."""

    def __call__(  # type: ignore[override]
        self: Any, input_states: mx.array, cache: Any = None, mask: Any = None
    ) -> mx.array:
        y = self.mixed(input_states, mask, cache)
        if y is not None:
            return y
        return super(Mixer, self).__call__(input_states, cache, mask)  # type: ignore[misc]


class SelectiveScan(Known):
    """Mamba's block: all positions at once. _norms: the attributes of the norms of delta, B and C,
    in an architecture that always has them."""

    _norms: Sequence[str] = ()

    def _process_sequence(
        self: Any, x: mx.array, conv_state: mx.array | None, state: mx.array | None
    ) -> tuple[mx.array, tuple[mx.array, mx.array]]:
        """The output for x (B, T, hidden size) of any floating dtype, and the new states.
        conv_state: the last rows convolved; state: (B, channels, state size)."""
        library, floats = in_use(), (x, self.A_log, self.D, x if state is None else state)
        normed_twice = hasattr(self, "mixer_norm")  # mlx_lm 0.31 normalises delta, B and C twice
        if library is None or normed_twice or not fits(*floats):
            return super()._process_sequence(x, conv_state, state)  # type: ignore[misc]
        x, z = self.in_proj(x).split(2, axis=-1)
        kept = self.conv_kernel_size - 1
        if conv_state is None:
            conv_state = mx.zeros((x.shape[0], kept, x.shape[2]), x.dtype)
        rows = mx.concatenate([conv_state, x], axis=1)
        x = convolved_silu(self.conv1d, rows)
        splits = self.time_step_rank, self.time_step_rank + self.ssm_state_size
        delta, b, c = self._normed(mx.split(self.x_proj(x), splits, axis=-1))
        arrays = (x, b, c, self.dt_proj(delta), self.A_log, self.D)
        wide = [*(one.astype(mx.float32) for one in arrays), None]
        y, new_state = library.scan(wide, None if state is None else state.astype(mx.float32))
        y, new_state = y.astype(x.dtype), new_state.astype(x.dtype)
        return self.out_proj(swiglu(z, y)), (rows[:, -kept:], new_state)

    def _normed(self: Any, parts: Sequence[mx.array]) -> Sequence[mx.array]:
        if self._norms:
            return [self[norm](part) for norm, part in zip(self._norms, parts)]
        if not self.use_bcdt_rms:
            return parts
        return [rms_norm(part, None, self.args.mixer_rms_eps) for part in parts]
