"""Which modules are of a common form, whatever architecture they are of, and what they call their
parts: feed-forward networks, layers, attentions and norms whose forward is, instruction by
instruction, one of those of forwards.py and attention_forwards.py, by other names."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import cache
from types import FunctionType
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from toastkit.native.forms import attention_forwards as attentions
from toastkit.native.forms import forwards
from toastkit.native.functions import Native, our_function
from toastkit.native.library import ACTIVATIONS, ALONE
from toastkit.native.operands import Operand


class Form(NamedTuple):
    """parts: the attributes that hold gate, up and down; or gate and up in one, and down; or up and
    down alone. activation: as library.ACTIVATIONS has it."""

    parts: tuple[str, ...]
    activation: str
    alone: bool = False

    @property
    def kind(self) -> int:
        """Its activation, as the library takes it."""
        return ACTIVATIONS.index(self.activation) + ALONE * self.alone

    def hidden(self, before: Sequence[Operand]) -> int:
        """Numbers of a position between the parts before its last one, and that."""
        return before[0].rows // (1 if self.alone else 3 - len(before))


class Block(NamedTuple):
    """What a class of layers calls its parts. first_norm, second_norm: of what attention and
    network are given; attended_norm, fed_norm: of what they give, which multiplier is a factor of,
    over the root of depth. own_gate, own_product, own_norm: of its own input, see toast_layer;
    factor: an array (1,) that all is multiplied by. parallel: the network is beside attention.
    None for what it has not. scaled: it is given what queries are multiplied by, after x."""

    attention: str
    first_norm: str | None
    network: str | None
    second_norm: str | None
    attended_norm: str | None = None
    fed_norm: str | None = None
    multiplier: str | None = None
    depth: str | None = None
    scaled: bool = False
    own_gate: str | None = None
    own_product: str | None = None
    own_norm: str | None = None
    factor: str | None = None
    parallel: bool = False


class Heads(NamedTuple):
    """What a class of attentions calls its parts. attend: what it calls with queries, keys, values
    and the rest. q_norm, k_norm: of each head, or of all heads of a position together. gated: q
    gives a gate for each of its numbers, behind those of the same head, or `gate` does. joined: q,
    k and v are one, with the rows of one behind another. size: the numbers of a head. cap: of
    scores. normed: whether there are norms, where that is asked; turning: likewise, whether heads
    are turned. late: the norms are of heads that have been turned. scaled: as of Block. v_norm: of
    each head of values. shares: keys and values are those of a layer before. latent, still:
    numbers, narrow, unembed: parts, of latent attention (glue/latent.h). None for what it has
    not."""

    q: str
    k: str
    v: str
    out: str
    heads: str | None
    key_heads: str | None
    turn: str | None
    scale: str
    q_norm: str | None
    k_norm: str | None
    attend: Callable[..., Any]
    gated: bool = False
    late: bool = False
    joined: bool = False
    size: str | None = None
    sinks: str | None = None
    cap: str | None = None
    normed: str | None = None
    turning: str | None = None
    scaled: bool = False
    v_norm: str | None = None
    shares: bool = False
    latent: str | None = None
    still: str | None = None
    narrow: str | None = None
    gate: str | None = None
    unembed: str | None = None


# Of attentions that are known by their source, but for what is said otherwise.
HEADS = Heads(
    "q_proj", "k_proj", "v_proj", "o_proj", "n_heads", "n_kv_heads", "rope", "scale", None, None,
    lambda *_, **__: None,
)  # fmt: skip


class Known(Native):
    """Attention, or a convolution between gates, that is known by its source (known.py), so that a
    layer of it may be one node."""

    def __call__(self: Any, *given: Any, **named: Any) -> Any:
        return super().__call__(*given, **named)  # type: ignore[misc]


class KnownAttention(Known):
    """Attention that says what it calls its parts, but for what attends. _parts: where it is the
    same for all of a class."""

    _parts = HEADS

    def parts(self) -> Heads:
        return self._parts

    def heads(self) -> Heads | None:
        """Its parts, with ours to attend; None where somebody stands before it."""
        attend = our_function(attentions.BASE, attentions.ATTEND)
        alone = type(self).__call__ is Known.__call__
        return self.parts()._replace(attend=attend) if alone and attend is not None else None


@cache
def form_of(cls: type) -> Form | None:
    """Of a class of an architecture; None for a class that is no such network."""
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
            return Form(parts, activation, not names.keys() & {"gate", "both"})
    return None


@cache
def block_of(cls: type) -> Block | None:
    """Of a class of an architecture; None for one of another form."""
    if (found := _known(cls, forwards.BLOCKS, (*Block._fields, "clip_residual"))) is None:
        return None
    known, names = found
    clip = names.pop("clip_residual", None)
    if clip and not _is_of(cls, clip, forwards.CLIP):
        return None
    more: dict[str, Any] = {"first_norm": None, "second_norm": None, **names}
    if parallel := known in forwards.PARALLEL:
        more["second_norm"] = more["first_norm"]
    return Block(**more, scaled=known in forwards.SCALED, parallel=parallel)


@cache
def heads_of(cls: type) -> Heads | None:
    """Of a class of attentions; None for one of another form."""
    forward, ours = _forward(cls), our_function(attentions.BASE, attentions.ATTEND)
    found = _known(cls, attentions.HEADS, (*Heads._fields, "qkv", "repeats"))
    if not (forward and found and ours):
        return None
    known, names = found
    if known is not attentions.CAPPED and forward.__globals__[attentions.ATTEND] is not ours:
        return None
    names.pop("repeats", None)
    qkv = names.pop("qkv", None)
    given = dict.fromkeys(("q", "k", "v"), qkv) if qkv else {}
    none = dict.fromkeys(("heads", "key_heads", "q_norm", "k_norm"))
    more: dict[str, Any] = {**none, **names, **given}
    gated, scaled, late = (
        known is one for one in (attentions.GATED, attentions.SCALED, attentions.LATE)
    )
    return Heads(**more, attend=ours, gated=gated, late=late, joined=bool(qkv), scaled=scaled)


@cache
def adds_one(cls: type) -> bool:
    """Whether a class is an RMS norm that adds 1 to its weights, computed by a function of ours."""
    return _known(cls, forwards.NORMS_PLUS_ONE, ()) is not None


def _is_of(cls: type, name: str, origin: tuple[str, str]) -> bool:
    """Whether a name in a class's forward stands for a function of a module."""
    module, function = origin
    theirs, forward = getattr(sys.modules.get(module), function, None), _forward(cls)
    return forward is not None and forward.__globals__.get(name) is theirs is not None


def _forward(cls: type) -> FunctionType | None:
    """The one that a class has or inherits; None where it is no plain function."""
    own = (vars(base)["__call__"] for base in cls.__mro__ if "__call__" in vars(base))
    forward = next(own, None)
    return forward if isinstance(forward, FunctionType) else None


def _known(
    cls: type, some: Sequence[Callable], free: Sequence[str]
) -> tuple[Callable, dict[str, str]] | None:
    """Which of some forwards a class's own is, and what it calls what is free in that."""
    if (forward := _forward(cls)) is None:
        return None
    for known in some:
        names = _names_in(forward, known)
        if names is not None and all(k in free or k == name for k, name in names.items()):
            return known, {k: name for k, name in names.items() if k in free}
    return None


def _names_in(forward: FunctionType, known: Callable) -> dict[str, str] | None:
    """What a forward calls the names of a known one; None where it is another."""
    code, own = forward.__code__, known.__code__  # type: ignore[attr-defined]
    alike = (
        code.co_code == own.co_code
        and code.co_argcount == own.co_argcount
        and code.co_consts[1:] == own.co_consts[1:]  # the first is a docstring
        and len(code.co_names) == len(own.co_names)
        and not code.co_freevars
    )
    return dict(zip(own.co_names, code.co_names)) if alike else None
