"""Layers of RWKV-7, each one node. Recognised by their source (known.py)."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from toastkit.native.forms.common import Block, Form, Known
from toastkit.native.layers.blocks import Layer
from toastkit.native.layers.recurrent import NORM_COUNT, VALUE_NORM, StepPlan, step_plan
from toastkit.native.library import NONE, in_use, objects, unshared
from toastkit.native.modules.norms import LayerNorm

# In the order of glue/time_mixing.cpp: how much of the token before is mixed in; and projections of
# low rank, with their activations, the last of which the first layer lacks.
MIXES = ("x_r", "x_k", "x_v", "x_w", "x_a", "x_g")
LOW_RANKS = {"w_lora": nn.Tanh, "a_lora": nn.Identity, "g_lora": nn.Sigmoid, "v_lora": nn.Identity}
NETWORK = Form(("key", "value"), "relu2", True)


class TimeMixingLayer(Layer):
    """Time mixing in place of attention, and a network that reads shifted tokens."""

    _block = Block("attn", "attn_norm", "ffn", "ffn_norm")

    def __call__(self: Any, x: mx.array, v_first: Any, cache: Any) -> Any:  # type: ignore[override]
        made = self.natively(x, v_first, cache)
        if made is not None:
            return made
        return super(Layer, self).__call__(x, v_first, cache)  # type: ignore[misc]

    def natively(  # type: ignore[override]
        self: Any, x: mx.array, v_first: Any, cache: Any
    ) -> tuple[mx.array, mx.array] | None:
        """The output for x (B, L, columns) float32, and the values of the first layer (B, L, heads,
        n), which other layers are given; None if the library cannot compute them."""
        library, first = in_use(), self.layer_idx == 0
        if library is None or cache is None or x.ndim != 3:
            return None
        states, begun = cache.cache, cache[0] is not None
        arrays = [x, *(states if begun else ()), *(() if first else (v_first,))]
        if any(one is None or one.dtype != mx.float32 for one in arrays):
            return None
        if not begun and any(one is not None for one in states):
            return None
        if (plan := self.current_plan(x.shape[2])) is None:
            return None
        plan.operands.mark_used()
        made = unshared(x, 4 + first)
        before = (states[0], states[2], states[1]) if begun else [NONE] * 3
        normed = self["pre_norm"](x) if first else x
        values = NONE if first else v_first
        library.c.time_mixing(objects(*made), normed, values, *before, *plan.given[:2])
        y, states[0], states[2], states[1] = made[0], *made[-3:]
        return y[:, -1:] if self._last_only else y, made[1] if first else v_first

    def _plan_of(self: Any, columns: int) -> StepPlan | None:  # type: ignore[override]
        mixing, network = self[self._block.attention], self[self._block.network]
        names = [*LOW_RANKS][: 4 if self.layer_idx else 3]
        known = (mixing, network, mixing["g_norm"], mixing["token_shift"], network["token_shift"])
        known += tuple(mixing[name] for name in names)
        norms = self[self._block.first_norm], self[self._block.second_norm]
        calls: Any = [*[Known.__call__] * len(known), *[LayerNorm.__call__] * len(norms)]
        if [type(one).__call__ for one in (*known, *norms)] != calls:
            return None
        low_ranks = [mixing[name]["lora"] for name in names]
        if [type(one[1]) for one in low_ranks] != [LOW_RANKS[name] for name in names]:
            return None
        if any(norm["weight"].dtype != mx.float32 for norm in norms):
            return None
        parts = [mixing[name] for name in ("r_proj", "k_proj", "v_proj", "o_proj")]
        parts += [network[name] for name in NETWORK.parts]
        further = [part for first, _, last in low_ranks for part in (first, last)]
        arrays: list[Any] = [None, None, None, *((norm, "bias") for norm in norms)]
        arrays += [*((mixing, name) for name in MIXES), (network, "x_k")]
        arrays += [(mixing, name) for name in ("k_k", "k_a", "r_k")]
        arrays += [(mixing["g_norm"], name) for name in ("weight", "bias")]
        places = [*norms, *[None] * (NORM_COUNT - len(norms))]
        plan = step_plan(self, columns, (self, *known), parts, None, further, places, arrays)
        if plan is None:
            return None
        plan.shape.heads, plan.shape.layer_norms = mixing.num_heads, True
        plan.shape.network, plan.shape.activation = len(NETWORK.parts), NETWORK.kind
        plan.shape.eps[VALUE_NORM] = mixing["g_norm"].eps
        return plan
