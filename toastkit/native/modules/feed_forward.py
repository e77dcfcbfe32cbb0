"""Feed-forward networks, those of experts too: one operation if their parts are native."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from toastkit.native.forms.common import Form
from toastkit.native.functions import Native
from toastkit.native.library import FLOATS, in_use
from toastkit.native.modules.products import Product
from toastkit.native.operands import usage_tracked

# Activations of experts by module and name; OAI: constants of gpt-oss's in the kernels.
GATES = {
    ("switch_layers", "SwiGLU"): "silu", ("gemma4_text", "GeGLU"): "gelu",
    ("activations", "SwigluOAI"): "swiglu_oai", ("mlx.nn.layers.activations", "ReLU2"): "relu2",
}  # fmt: skip
OAI = (1.702, 7.0)


class FeedForward(Native):
    """A network of a known form."""

    _form: Form

    def __call__(self: Any, x: mx.array) -> mx.array:
        y = _feed_forward(x, [self[name] for name in self._form.parts], self._form)
        return super().__call__(x) if y is None else y  # type: ignore[misc]


class SwitchNetwork(Native):
    """The routed experts of a layer. _parts: as in Form."""

    _parts: tuple[str, ...]
    _alone = False

    def __call__(self: Any, x: mx.array, indices: mx.array) -> mx.array:
        y, form = None, self.form()
        if form is not None:
            y = _feed_forward(x, [self[name] for name in form.parts], form, indices)
        return super().__call__(x, indices) if y is None else y  # type: ignore[misc]

    def form(self: Any) -> Form | None:
        """Its form; None for an activation that the kernels do not have."""
        kind = gate_of(self.activation)
        if kind is None or (kind == "relu2") is not self._alone:
            return None
        return Form(self._parts, kind, self._alone)


class SwitchGLU(SwitchNetwork):
    _parts = ("gate_proj", "up_proj", "down_proj")


class SwitchMLP(SwitchNetwork):
    """Ungated experts."""

    _parts, _alone = ("fc1", "fc2"), True


def gate_of(activation: Any) -> str | None:
    """The kernels' name of the experts' activation; None if they do not have it."""
    kind = type(activation)
    name = GATES.get((kind.__module__.removeprefix("mlx_lm.models."), kind.__name__))
    supported = name != "swiglu_oai" or (activation._alpha, activation._limit) == OAI
    return name if supported else None


def _feed_forward(
    x: mx.array, parts: list[Any], form: Form, experts: mx.array | None = None
) -> mx.array | None:
    """The network of these parts; None if only MLX supports it, or biases are added in 16 bits."""
    library = in_use()
    operands = [
        o for part in parts if isinstance(part, Product) and (o := part.operand()) is not None
    ]
    if library is None or len(operands) < len(parts):
        return None
    biases = [part.get("bias") for part in parts]
    if (wide := parts[0]._wide) is not None:
        x = x.astype(wide)
    hidden = form.hidden(operands[:-1])
    columns = [*[x.shape[-1]] * (len(operands) - 1), hidden]
    if x.dtype not in FLOATS or [operand.columns for operand in operands] != columns:
        return None
    if any(b is not None and (b.dtype, x.dtype) != (mx.float32, mx.float32) for b in biases):
        return None
    if experts is not None and experts.dtype != mx.uint32:
        experts = experts.astype(mx.uint32)
    for part in usage_tracked(parts):
        part.was_used()
    return library.feed_forward(x, operands, form.kind, experts, parts[0]._activation_bits, biases)
