"""Layers of Kimi Linear: of Kimi Delta Attention (arXiv 2510.26692), or of latent attention.
Recognised by their source (known.py)."""

from __future__ import annotations

import ctypes
from typing import Any

from toastkit.native.forms.common import Block, Known
from toastkit.native.layers.recurrent import RecurrentLayer, StepPlan, norms_of, step_plan
from toastkit.native.modules.norms import Norm
from toastkit.native.modules.recurrent import Convolution

SEQUENCES = ("q", "k", "v")
GATES = ("f_a_proj", "f_b_proj", "b_proj", "g_a_proj", "g_b_proj")


class KimiLayer(RecurrentLayer):
    """All (B, L, columns) float32."""

    _block = Block("self_attn", "input_layernorm", "mlp", "post_attention_layernorm")
    _function = "kimi_layer"

    def _step_plan(self: Any, columns: int) -> StepPlan | None:
        rule, network = self["self_attn"], self["mlp"]
        short = [rule[f"{name}_conv"] for name in SEQUENCES]
        convs, norm = [one["conv"] for one in short], rule["o_norm"]
        known = all(type(one).__call__ is Known.__call__ for one in (rule, *short))
        plain = all(type(one).__call__ is Convolution.__call__ and one.is_plain() for one in convs)
        if not (known and plain) or any("bias" in one for one in convs):
            return None
        norms = norms_of(self, norm)
        if norms is None or type(norm).__call__ is not Norm.__call__:
            return None
        arrays = [(convs[0], "weight"), (convs[1], "weight"), None, (convs[2], "weight")]
        arrays += [(rule, "A_log"), (rule, "dt_bias")]
        parts = [*(rule[f"{name}_proj"] for name in SEQUENCES), rule["o_proj"]]
        gates, modules = [rule[name] for name in GATES], (self, rule, *short, *convs)
        size = ctypes.c_int32(rule.head_dim)
        plan = step_plan(self, columns, modules, parts, network, gates, norms, arrays, size)
        if plan is not None:
            plan.shape.heads = rule.num_heads
        return plan
