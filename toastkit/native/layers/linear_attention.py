"""Layers of Ling's linear attention, whose states decay head by head: one node each. Recognised by
their source (known.py)."""

from __future__ import annotations

import ctypes
from typing import Any

import mlx.core as mx

from toastkit.native.forms.common import Block, Known
from toastkit.native.layers.blocks import Layer
from toastkit.native.layers.plans import LayerShape, set_rope
from toastkit.native.layers.recurrent import (
    VALUE_NORM,
    RecurrentLayer,
    StepPlan,
    norms_of,
    step_plan,
)
from toastkit.native.modules.norms import Norm

FREE = VALUE_NORM - 2  # where toast_layer has the norms of queries and of keys


class LinearAttentionShape(ctypes.Structure):
    """toast_linear_attention, see glue/linear_attention.cpp."""

    _fields_ = (("position", ctypes.c_int32), ("normed", ctypes.c_int32))


class LinearAttentionLayer(RecurrentLayer):
    """A layer of attention, or of linear attention, which is given the position of x (B, L,
    columns) float32."""

    _block = Block("attention", "input_layernorm", "mlp", "post_attention_layernorm")
    _function = "linear_attention"

    @property
    def _attends(self: Any) -> bool:
        return self.is_global

    def __call__(  # type: ignore[override]
        self: Any, x: mx.array, mask: Any = None, cache: Any = None, offset: Any = 0
    ) -> mx.array:
        known = self._attends or self._is_planned(x, offset)
        y = self.natively(x, mask, cache) if known else None
        if y is None:
            return super(Layer, self).__call__(x, mask, cache, offset)  # type: ignore[misc]
        return y

    def _is_planned(self: Any, x: mx.array, offset: Any) -> bool:
        """True if there is a plan, which is of this position then."""
        plan = self.current_plan(x.shape[-1]) if isinstance(offset, int) else None
        if plan is not None:
            plan.recurrence.position = offset
        return plan is not None

    def _recurrent_step(self: Any, x: mx.array, mask: Any, cache: Any) -> mx.array | None:
        """With the state transposed, as a view: the library's has a row for each value."""
        states = [] if cache is None else cache.cache
        states[:] = [one if one is None else one.swapaxes(2, 3) for one in states]
        y = super()._recurrent_step(x, mask, cache)
        states[:] = [one if one is None else one.swapaxes(2, 3) for one in states]
        return y

    def _step_plan(self: Any, columns: int) -> StepPlan | None:
        attention, network = self[self._block.attention], self[self._block.network]
        norm, rope = attention["g_norm"], attention["rope"]
        norms, shape = norms_of(self, None), LayerShape()
        frequencies = set_rope(shape, rope, attention.head_dim)
        calls = [type(one).__call__ for one in (attention, norm)]
        if calls != [Known.__call__] * 2 or norms is None or frequencies is None:
            return None
        if attention.use_qk_norm:
            norms[FREE:VALUE_NORM] = attention["query_layernorm"], attention["key_layernorm"]
        if any(type(one).__call__ is not Norm.__call__ for one in norms if one is not None):
            return None
        parts = [*[attention["query_key_value"]] * 3, attention["dense"]]
        arrays = [frequencies, None, None, (attention, "_slope"), (norm, "weight")]
        recurrence = LinearAttentionShape(normed=norm["weight"].size // norm.groups)
        plan = step_plan(
            self, columns, (self, attention, norm, rope), parts, network, [attention["g_proj"]],
            norms, arrays, recurrence,
        )  # fmt: skip
        if plan is None:
            return None
        set_rope(plan.shape, rope, attention.head_dim)
        plan.shape.heads = plan.shape.key_heads = attention.num_attention_heads
        plan.shape.gated, plan.shape.fused_head = 2, attention.head_dim
        plan.shape.scale, plan.shape.eps[VALUE_NORM] = attention.scale, norm.eps
        return plan
