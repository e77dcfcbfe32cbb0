"""Recognise modules of a common form, whatever their architecture, and its names of their parts:
feed-forward networks, layers, attentions and norms whose forward equals, instruction by
instruction, one of those in forwards.py, up to names."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import cache
from types import FunctionType
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from toastkit.native.forms import forwards
from toastkit.native.functions import Native, our_function
from toastkit.native.library import ACTIVATIONS, ALONE
from toastkit.native.operands import Operand


class Form(NamedTuple):
    """The form of a feed-forward network. parts: attributes of gate, up and down; of fused gate-up
    and down; or, ungated (alone), of up and down. activation: of library.ACTIVATIONS."""

    parts: tuple[str, ...]
    activation: str
    alone: bool = False

    @property
    def kind(self) -> int:
        """The activation as the library takes it."""
        return ACTIVATIONS.index(self.activation) + ALONE * self.alone

    def hidden(self, others: Sequence[Operand]) -> int:
        """Hidden size of the network, from the matrices that come before its last one."""
        return others[0].rows // (1 if self.alone else 3 - len(others))


class Block(NamedTuple):
    """The attributes that hold a layer's parts; None for those it lacks. first_norm, second_norm:
    input norms of attention and network; attended_norm, fed_norm: of their outputs, which are then
    multiplied by multiplier / sqrt(depth). input_gate, input_projection, input_norm: of the
    per-layer input, see toast_layer. factor: an array (1,) that the layer's output is multiplied
    by. parallel: attention and network read the same input. scaled: the forward takes a factor of
    queries after x. holder: of the module that has the attention, in place of the layer."""

    attention: str
    first_norm: str | None
    network: str | None
    second_norm: str | None
    attended_norm: str | None = None
    fed_norm: str | None = None
    multiplier: str | None = None
    depth: str | None = None
    scaled: bool = False
    input_gate: str | None = None
    input_projection: str | None = None
    input_norm: str | None = None
    factor: str | None = None
    parallel: bool = False
    holder: str | None = None


USUAL = Block("self_attn", "input_layernorm", "mlp", "post_attention_layernorm")


class Heads(NamedTuple):
    """The attributes that hold an attention's parts; None for those it lacks. attend: the function
    called with queries, keys and values. q_norm, k_norm: of each head, or of all heads of a
    position together; v_norm: of each head of values. gated: gates are projected by q, behind the
    queries of each head, or by `gate`. fused: q, k and v are one projection, in that order, or, if
    grouped, so for each head of keys. size: of a head. cap: of scores. use_norms, use_rope: flags
    that turn norms and RoPE on.
    norm_after_rope: norms follow RoPE. scaled: as in Block. shares_cache: it attends to an earlier
    layer's cache. Of latent attention (glue/latent.h): latent, nope: the sizes; query_down,
    unembed: parts."""

    q: str
    k: str
    v: str
    out: str
    heads: str | None
    key_heads: str | None
    rope: str | None
    scale: str
    q_norm: str | None
    k_norm: str | None
    attend: Callable[..., Any]
    gated: bool = False
    norm_after_rope: bool = False
    fused: bool = False
    size: str | None = None
    sinks: str | None = None
    cap: str | None = None
    use_norms: str | None = None
    use_rope: str | None = None
    scaled: bool = False
    v_norm: str | None = None
    shares_cache: bool = False
    latent: str | None = None
    nope: str | None = None
    query_down: str | None = None
    gate: str | None = None
    unembed: str | None = None
    grouped: bool = False


# The names that most attentions have.
HEADS = Heads(
    "q_proj", "k_proj", "v_proj", "o_proj", "n_heads", "n_kv_heads", "rope", "scale", None, None,
    lambda *_, **__: None,
)  # fmt: skip


class Known(Native):
    """Attention, or a short convolution, recognised by its source (known.py), so that its layer can
    be one node."""

    def __call__(self: Any, *given: Any, **named: Any) -> Any:
        return super().__call__(*given, **named)  # type: ignore[misc]


class KnownAttention(Known):
    """Attention that gives the names of its parts, except `attend`. _parts: those of a class whose
    instances do not differ."""

    _parts = HEADS

    def parts(self) -> Heads:
        return self._parts

    def heads(self) -> Heads | None:
        """Its parts, with our function as `attend`; None if its forward was replaced."""
        attend = our_function(*forwards.ATTEND)
        alone = type(self).__call__ is Known.__call__
        return self.parts()._replace(attend=attend) if alone and attend is not None else None


@cache
def form_of(cls: type) -> Form | None:
    """Return the form of an architecture's network class; None if it is none."""
    if (forward := _forward(cls)) is None:
        return None
    for known, (module, function), activation in forwards.NETWORKS:
        names = _names_in(forward, known)
        gates = getattr(sys.modules.get(module), function, None)
        stand_for = {"nn": nn, "mx": mx, "swiglu": gates}
        if names is not None and all(
            forward.__globals__.get(there) is stand_for[name] is not None
            if name in stand_for
            else name in forwards.PARTS or there == name
            for name, there in names.items()
        ):
            parts = tuple(names[part] for part in forwards.PARTS if part in names)
            return Form(parts, activation, not names.keys() & {"gate", "gate_up"})
    return None


@cache
def block_of(cls: type) -> Block | None:
    """Return the names in an architecture's layer class; None for another form."""
    if (found := _known(cls, forwards.BLOCKS, Block._fields)) is None:
        return None
    form, names = found
    fields: dict[str, Any] = {"first_norm": None, "second_norm": None, **names}
    if parallel := form in forwards.PARALLEL:
        fields["second_norm"] = fields["first_norm"]
    return Block(**fields, parallel=parallel)


@cache
def heads_of(cls: type) -> Heads | None:
    """Return the names in an attention class; None for another form."""
    forward, ours = _forward(cls), our_function(*forwards.ATTEND)
    found = _known(cls, forwards.HEADS, Heads._fields)
    if not (forward and found and ours) or forward.__globals__[forwards.ATTEND[1]] is not ours:
        return None
    fields: dict[str, Any] = {**found[1], "attend": ours}
    return HEADS._replace(**fields)


@cache
def adds_one(cls: type) -> bool:
    """True for an RMS norm class that adds 1 to its weights, and calls our function."""
    return _known(cls, forwards.NORMS_PLUS_ONE, ()) is not None


def _forward(cls: type) -> FunctionType | None:
    """The class's own or inherited forward; None if it is not a plain function."""
    methods = (vars(base)["__call__"] for base in cls.__mro__ if "__call__" in vars(base))
    forward = next(methods, None)
    return forward if isinstance(forward, FunctionType) else None


def _known(
    cls: type, some: Sequence[Callable], free: Sequence[str]
) -> tuple[Callable, dict[str, str]] | None:
    """Find the known forward that a class's forward equals; with the class's names for its free
    names."""
    if (forward := _forward(cls)) is None:
        return None
    for known in some:
        names = _names_in(forward, known)
        if names is not None and all(k in free or k == name for k, name in names.items()):
            return known, {k: name for k, name in names.items() if k in free}
    return None


def _names_in(forward: FunctionType, known: Callable) -> dict[str, str] | None:
    """Map the names of a known forward to those of another; None if they differ otherwise."""
    code, known_code = forward.__code__, known.__code__  # type: ignore[attr-defined]
    alike = (
        code.co_code == known_code.co_code
        and code.co_argcount == known_code.co_argcount
        and code.co_consts[1:] == known_code.co_consts[1:]  # the first is a docstring
        and len(code.co_names) == len(known_code.co_names)
        and not code.co_freevars
    )
    return dict(zip(known_code.co_names, code.co_names)) if alike else None
