"""Layers of Nemotron-H and Granite 4, each one node: with a Mamba-2 mixer in place of attention, or
a network alone; and those of Mamba and Jamba, with a selective scan. Recognised by their source
(known.py)."""

from __future__ import annotations

from ctypes import byref
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from toastkit.native.forms.common import Block, Known
from toastkit.native.layers.blocks import Layer
from toastkit.native.layers.plans import NO_EXTRAS, Extras
from toastkit.native.layers.recurrent import (
    NORM_COUNT,
    VALUE_NORM,
    RecurrentLayer,
    StepPlan,
    norms_of,
    step_plan,
)
from toastkit.native.library import in_use
from toastkit.native.modules.mixtures import Mixture, MixtureShape, is_mixture
from toastkit.native.modules.norms import Norm
from toastkit.native.modules.recurrent import Convolution, Mixer, SelectiveScan


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
        if norm is not None and type(norm).__call__ is not Known.__call__ or not mixer.is_limited:
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


class BareMixerLayer(MixerLayer):
    """Mamba-2's: a mixer alone."""

    _block = Block("mixer", "norm", None, None)
    _attends = False  # type: ignore[assignment]


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


class SelectiveLayer(RecurrentLayer):
    """Jamba's: attention or a selective scan, then a network or experts: (B, L, columns) float32.
    _mixer: its part with the scan."""

    _block = Block("self_attn", "input_layernorm", "feed_forward", "pre_ff_layernorm")
    _function, _mixer = "selective", "mamba"

    @property
    def _attends(self: Any) -> bool:
        return self.is_attn

    def _recurrent_step(self: Any, x: mx.array, mask: Any, cache: Any) -> mx.array | None:
        return super()._recurrent_step(x, None, cache)  # the architecture ignores masks here

    def _step_plan(self: Any, columns: int) -> StepPlan | None:
        mixer, network = self[self._mixer], self._block.network and self[self._block.network]
        conv, calls = mixer["conv1d"], (Known.__call__, Convolution.__call__)
        if (type(mixer).__call__, type(conv).__call__) != calls or not conv.is_plain():
            return None
        if not issubclass(type(mixer), SelectiveScan) or hasattr(mixer, "mixer_norm"):
            return None
        norms, own = norms_of(self, None), _norms_of_scan(mixer)
        if norms is None or own is None:
            return None
        norms[VALUE_NORM - 2 : VALUE_NORM + 1] = own
        parts = [mixer[name] for name in ("in_proj", "x_proj", "dt_proj", "out_proj")]
        arrays = [(conv, "weight"), (conv, "bias") if "bias" in conv else None, None]
        arrays += [(mixer, "A_log"), (mixer, "D")]
        return step_plan(self, columns, (self, mixer, conv), parts, network, [], norms, arrays)


class MambaLayer(SelectiveLayer):
    """Mamba's: a scan alone."""

    _block = Block("mixer", "norm", None, None)
    _mixer, _attends = "mixer", False  # type: ignore[assignment]

    def __call__(self: Any, x: mx.array, cache: Any) -> mx.array:  # type: ignore[override]
        y = self.natively(x, None, cache)
        return super(Layer, self).__call__(x, cache) if y is None else y  # type: ignore[misc]


def _norms_of_scan(mixer: Any) -> list[Any] | None:
    """The norms of time steps, B and C, or None for each; None if one is not native."""
    if mixer._norms:
        norms = [mixer[name] for name in mixer._norms]
        return norms if all(type(one).__call__ is Norm.__call__ for one in norms) else None
    if not mixer.use_bcdt_rms:
        return [None] * 3
    sizes = mixer.time_step_rank, mixer.ssm_state_size, mixer.ssm_state_size
    return [nn.RMSNorm(size, mixer.args.mixer_rms_eps) for size in sizes]  # as if without weights


def _network_plan(layer: Any, columns: int) -> StepPlan | None:
    """The plan of a layer that is a network, or a mixture, alone."""
    block = layer._block
    network, norm = layer[block.attention], layer[block.first_norm]
    known = "_form" in vars(type(network)) or is_mixture(network)
    if type(norm).__call__ is not Norm.__call__ or not known:
        return None
    norms = [None, norm, *[None] * (NORM_COUNT - 2)]
    return step_plan(layer, columns, (layer,), [], network, [], norms, [None] * 3)
