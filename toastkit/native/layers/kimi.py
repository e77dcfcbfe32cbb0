"""Layers of Kimi Linear: of Kimi Delta Attention (arXiv 2510.26692), or of latent attention.
Recognised by their source (known.py)."""

from __future__ import annotations

import ctypes
from ctypes import byref
from typing import Any

import mlx.core as mx

from toastkit.native.forms.common import Block, Known
from toastkit.native.layers.mixer import MixerLayer, StepPlan, norms_of, step_plan
from toastkit.native.layers.plans import NO_EXTRAS, Extras
from toastkit.native.library import Library
from toastkit.native.modules.norms import Norm
from toastkit.native.modules.recurrent import Convolution

SEQUENCES = ("q", "k", "v")
GATES = ("f_a_proj", "f_b_proj", "b_proj", "g_a_proj", "g_b_proj")


class KimiLayer(MixerLayer):
    """All (B, L, columns) float32."""

    _block = Block("self_attn", "input_layernorm", "mlp", "post_attention_layernorm")

    def natively(
        self: Any, x: mx.array, mask: Any, cache: Any, extras: Extras = NO_EXTRAS
    ) -> mx.array | None:
        if self.is_linear:
            return self._recurrent_step(x, mask, cache)
        return super().natively(x, mask, cache, extras)

    def _plan_of(self: Any, columns: int) -> StepPlan | None:
        return _delta_plan(self, columns)

    def _make(
        self: Any, library: Library, outs: Any, x: mx.array, given: list[Any], plan: StepPlan,
        mixture: Any,
    ) -> None:  # fmt: skip
        states = (ctypes.py_object * len(given))(*given)
        layer = byref(plan.operands), byref(plan.shape)
        library.c.kimi_layer(outs, x, states, *layer, plan.recurrence, mixture)


def _delta_plan(layer: Any, columns: int) -> StepPlan | None:
    """The plan for x (..., columns); None if the library cannot compute a part."""
    rule, network = layer["self_attn"], layer["mlp"]
    short = [rule[f"{name}_conv"] for name in SEQUENCES]
    convs, norm = [one["conv"] for one in short], rule["o_norm"]
    known = all(type(one).__call__ is Known.__call__ for one in (rule, *short))
    plain = all(type(one).__call__ is Convolution.__call__ and one.is_plain() for one in convs)
    if not (known and plain) or any("bias" in one for one in convs):
        return None
    norms = norms_of(layer, norm)
    if norms is None or type(norm).__call__ is not Norm.__call__:
        return None
    arrays = [(convs[0], "weight"), (convs[1], "weight"), None, (convs[2], "weight")]
    arrays += [(rule, "A_log"), (rule, "dt_bias")]
    if any(one[0][one[1]].dtype != mx.float32 for one in arrays if one is not None):
        return None
    parts = [*(rule[f"{name}_proj"] for name in SEQUENCES), rule["o_proj"]]
    gates, modules = [rule[name] for name in GATES], (layer, rule, *short, *convs)
    plan = step_plan(layer, columns, modules, parts, network, gates, norms, arrays, rule.head_dim)
    if plan is not None:
        plan.shape.heads = rule.num_heads
    return plan
