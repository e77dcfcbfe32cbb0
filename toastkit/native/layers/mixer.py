"""Layers of Nemotron-H and Granite 4, each one node: with a Mamba-2 mixer in place of attention, or
a network alone. Recognised by their source (known.py)."""

from __future__ import annotations

from ctypes import byref
from typing import Any

import mlx.core as mx

from toastkit.native.forms.common import Block, Known
from toastkit.native.layers.plans import NO_EXTRAS, Extras
from toastkit.native.layers.recurrent import (
    NORM_COUNT,
    RecurrentLayer,
    StepPlan,
    norms_of,
    step_plan,
)
from toastkit.native.library import in_use
from toastkit.native.modules.mixtures import Mixture, MixtureShape, is_mixture
from toastkit.native.modules.norms import Norm
from toastkit.native.modules.recurrent import Convolution, Mixer


class GatedNorm(Known):
    """A mixer's norm over all its numbers, recognised by its source."""

    @property
    def normed_size(self: Any) -> int:
        """Numbers per group that is normed."""
        return self["weight"].size


class GatedNormInGroups(GatedNorm):
    @property
    def normed_size(self: Any) -> int:
        return self.group_size


class MixerLayer(RecurrentLayer):
    """A layer of attention or a mixer. All (B, L, columns) float32."""

    _function = "mixer_layer"

    def _step_plan(self: Any, columns: int) -> StepPlan | None:
        block = self._block
        mixer, network = self[block.attention], block.network and self[block.network]
        conv, norm = mixer["conv1d"], mixer.get("norm")
        calls: Any = Mixer.__call__, Convolution.__call__
        if (type(mixer).__call__, type(conv).__call__) != calls or not conv.is_plain():
            return None
        if norm is not None and type(norm).__call__ is not Known.__call__:
            return None
        arrays = [(conv, "weight"), (conv, "bias") if "bias" in conv else None, None]
        arrays += [(mixer, name) for name in ("A_log", "D", "dt_bias")]
        if (norms := norms_of(self, norm)) is None:
            return None
        parts, modules = [*[mixer["in_proj"]] * 3, mixer["out_proj"]], (self, mixer, conv)
        recurrence = mixer.shape(0 if norm is None else norm.normed_size)
        return step_plan(self, columns, modules, parts, network, [], norms, arrays, recurrence)


class NemotronLayer(MixerLayer):
    """Nemotron-H's: its only part reads a norm and is added to the residual, (B, L, columns)
    float32."""

    _block = Block("mixer", "norm", None, None)

    @property
    def keeps_nothing(self: Any) -> bool:
        """True if it has no cache."""
        return self.block_type not in ("M", "*")

    @property
    def _attends(self: Any) -> bool:
        return self.block_type == "*"

    def natively(
        self: Any, x: mx.array, mask: Any, cache: Any, extras: Extras = NO_EXTRAS
    ) -> mx.array | None:
        if self.keeps_nothing:
            return self._network_only(x)
        return super().natively(x, mask, cache, extras)

    def _step_plan(self: Any, columns: int) -> StepPlan | None:
        return _network_plan(self, columns) if self.keeps_nothing else super()._step_plan(columns)

    def _network_only(self: Any, x: mx.array) -> mx.array | None:
        """The output of a layer that is a network alone; None if the library cannot compute it."""
        library = in_use()
        if library is None or x.ndim != 3 or x.dtype != mx.float32:
            return None
        if (plan := self.current_plan(x.shape[-1])) is None:
            return None
        mixture = self._mixture_shape(plan.network) if plan.network is not None else None
        if plan.network is not None and mixture is None:
            return None
        plan.operands.mark_used()
        out = x.__copy__()
        layer = byref(plan.operands), byref(plan.shape), byref(mixture) if mixture else None
        library.c.fed(out, x, *layer)
        return out


class HybridLayer(MixerLayer):
    """Granite 4's: attention or a mixer, then a network, or experts beside one: (B, L, columns)
    float32."""

    @property
    def _block(self: Any) -> Block:  # type: ignore[override]
        return Block(
            "self_attn" if self.layer_type == "attention" else "mamba", "input_layernorm",
            "block_sparse_moe" if self.use_moe else "mlp", "post_attention_layernorm",
            multiplier="residual_multiplier",
        )  # fmt: skip

    @property
    def _attends(self: Any) -> bool:
        return self.layer_type == "attention"

    def _feed_forward(self: Any, network: Any, normed: mx.array) -> mx.array:
        y = network(normed)
        if self.use_moe:
            y = y + self["shared_mlp"](normed)
        return y * self.residual_multiplier

    def _mixture_shape(self: Any, mixture: Mixture) -> MixtureShape | None:
        return mixture.as_shape(self["shared_mlp"])


def _network_plan(layer: Any, columns: int) -> StepPlan | None:
    """The plan of a layer that is a network, or a mixture, alone."""
    block = layer._block
    network, norm = layer[block.attention], layer[block.first_norm]
    known = "_form" in vars(type(network)) or is_mixture(network)
    if type(norm).__call__ is not Norm.__call__ or not known:
        return None
    norms = [None, norm, *[None] * (NORM_COUNT - 2)]
    return step_plan(layer, columns, (layer,), [], network, [], norms, [None] * 3)
