"""Which modules are of a common form, whatever architecture they are of, and what they call their
parts: feed-forward networks, layers and attentions whose forward is, instruction by instruction,
one of the forwards below, by other names."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import lru_cache  # `cache` is a name below, and an imported one is called otherwise
from types import FunctionType
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from toastkit.native.functions import our_function


class Form(NamedTuple):
    """parts: the attributes that hold gate, up and down; or gate and up in one, and down.
    activation: as library.ACTIVATIONS has it."""

    parts: tuple[str, ...]
    activation: str


class Block(NamedTuple):
    """What a class of layers calls its parts."""

    attention: str
    first_norm: str
    network: str
    second_norm: str


class Heads(NamedTuple):
    """What a class of attentions calls its parts. attend: what it calls with queries, keys, values
    and the rest. q_norm, k_norm: of each head, or of all heads of a position together. gated: q
    gives a gate for each of its numbers, behind those of the same head."""

    q: str
    k: str
    v: str
    out: str
    heads: str
    key_heads: str
    turn: str
    scale: str
    q_norm: str | None
    k_norm: str | None
    attend: Callable[..., Any]
    gated: bool = False


# What the forwards below call is looked up by those that they are compared with.
swiglu: Any = None
PARTS = ("gate", "up", "both", "down")  # theirs may have any name


def _gated(self: Any, x: Any) -> Any:
    return self.down(swiglu(self.gate(x), self.up(x)))


def _gated_and_kept(self: Any, x: Any) -> Any:
    y = self.down(swiglu(self.gate(x), self.up(x)))
    return y


def _multiplied(self: Any, x: Any) -> Any:
    return self.down(nn.silu(self.gate(x)) * self.up(x))


def _multiplied_gelu(self: Any, x: Any) -> Any:
    return self.down(nn.gelu_approx(self.gate(x)) * self.up(x))


def _multiplied_gelu_erf(self: Any, x: Any) -> Any:
    return self.down(nn.gelu(self.gate(x)) * self.up(x))


def _halved(self: Any, x: Any) -> Any:
    x = self.both(x)
    gate, x = mx.split(x, 2, axis=-1)
    return self.down(swiglu(gate, x))


def _halved_by_names(self: Any, x: Any) -> Any:
    x = self.both(x)
    gate, up = mx.split(x, 2, axis=-1)
    return self.down(swiglu(gate, up))


def _halved_at_once(self: Any, x: Any) -> Any:
    gate, up = mx.split(self.both(x), 2, axis=-1)
    return self.down(swiglu(gate, up))


# Each with what `swiglu` stands for in it, by module and name.
SWIGLU = ("mlx_lm.models.activations", "swiglu")
FORWARDS: list[tuple[Callable, tuple[str, str], str]] = [
    (_gated, SWIGLU, "silu"),
    (_gated, ("mlx_lm.models.gemma4_text", "geglu"), "gelu"),
    (_gated_and_kept, SWIGLU, "silu"),
    (_multiplied, SWIGLU, "silu"),
    (_multiplied_gelu, SWIGLU, "gelu"),
    (_multiplied_gelu_erf, SWIGLU, "gelu_erf"),
    (_halved, SWIGLU, "silu"),
    (_halved_by_names, SWIGLU, "silu"),
    (_halved_at_once, SWIGLU, "silu"),
]


def _block(self: Any, x: Any, mask: Any = None, cache: Any = None) -> Any:
    r = self.attention(self.first_norm(x), mask, cache)
    h = x + r
    r = self.network(self.second_norm(h))
    out = h + r
    return out


def _block_returned(self: Any, x: Any, mask: Any = None, cache: Any = None) -> Any:
    r = self.attention(self.first_norm(x), mask, cache)
    h = x + r
    r = self.network(self.second_norm(h))
    return h + r


def _block_added(self: Any, x: Any, mask: Any = None, cache: Any = None) -> Any:
    x = x + self.attention(self.first_norm(x), mask, cache)
    x = x + self.network(self.second_norm(x))
    return x


# What an attention calls is looked up by that name.
BASE, ATTEND = "mlx_lm.models.base", "scaled_dot_product_attention"
scaled_dot_product_attention: Any = None


def _heads(self: Any, x: Any, mask: Any = None, cache: Any = None) -> Any:
    B, L, D = x.shape
    queries, keys, values = self.q(x), self.k(x), self.v(x)
    queries = queries.reshape(B, L, self.heads, -1).transpose(0, 2, 1, 3)
    keys = keys.reshape(B, L, self.key_heads, -1).transpose(0, 2, 1, 3)
    values = values.reshape(B, L, self.key_heads, -1).transpose(0, 2, 1, 3)
    if cache is not None:
        queries = self.turn(queries, offset=cache.offset)
        keys = self.turn(keys, offset=cache.offset)
        keys, values = cache.update_and_fetch(keys, values)
    else:
        queries = self.turn(queries)
        keys = self.turn(keys)
    output = scaled_dot_product_attention(
        queries, keys, values, cache=cache, scale=self.scale, mask=mask
    )
    output = output.transpose(0, 2, 1, 3).reshape(B, L, -1)
    return self.out(output)


def _heads_normed(self: Any, x: Any, mask: Any = None, cache: Any = None) -> Any:
    B, L, D = x.shape
    queries, keys, values = self.q(x), self.k(x), self.v(x)
    queries = self.q_norm(queries.reshape(B, L, self.heads, -1)).transpose(0, 2, 1, 3)
    keys = self.k_norm(keys.reshape(B, L, self.key_heads, -1)).transpose(0, 2, 1, 3)
    values = values.reshape(B, L, self.key_heads, -1).transpose(0, 2, 1, 3)
    if cache is not None:
        queries = self.turn(queries, offset=cache.offset)
        keys = self.turn(keys, offset=cache.offset)
        keys, values = cache.update_and_fetch(keys, values)
    else:
        queries = self.turn(queries)
        keys = self.turn(keys)
    output = scaled_dot_product_attention(
        queries, keys, values, cache=cache, scale=self.scale, mask=mask
    )
    output = output.transpose(0, 2, 1, 3).reshape(B, L, -1)
    return self.out(output)


def _heads_normed_together(self: Any, x: Any, mask: Any = None, cache: Any = None) -> Any:
    B, L, D = x.shape
    queries, keys, values = self.q(x), self.k(x), self.v(x)
    queries = self.q_norm(queries)
    keys = self.k_norm(keys)
    queries = queries.reshape(B, L, self.heads, -1).transpose(0, 2, 1, 3)
    keys = keys.reshape(B, L, self.key_heads, -1).transpose(0, 2, 1, 3)
    values = values.reshape(B, L, self.key_heads, -1).transpose(0, 2, 1, 3)
    if cache is not None:
        queries = self.turn(queries, offset=cache.offset)
        keys = self.turn(keys, offset=cache.offset)
        keys, values = cache.update_and_fetch(keys, values)
    else:
        queries = self.turn(queries)
        keys = self.turn(keys)
    output = scaled_dot_product_attention(
        queries, keys, values, cache=cache, scale=self.scale, mask=mask
    )
    output = output.transpose(0, 2, 1, 3).reshape(B, L, -1)
    return self.out(output)


def _heads_gated(self: Any, x: Any, mask: Any = None, cache: Any = None) -> Any:
    B, L, D = x.shape
    q_proj_output = self.q(x)
    queries, gate = mx.split(q_proj_output.reshape(B, L, self.heads, -1), 2, axis=-1)
    gate = gate.reshape(B, L, -1)
    keys, values = self.k(x), self.v(x)
    queries = self.q_norm(queries).transpose(0, 2, 1, 3)
    keys = self.k_norm(keys.reshape(B, L, self.key_heads, -1)).transpose(0, 2, 1, 3)
    values = values.reshape(B, L, self.key_heads, -1).transpose(0, 2, 1, 3)
    if cache is not None:
        queries = self.turn(queries, offset=cache.offset)
        keys = self.turn(keys, offset=cache.offset)
        keys, values = cache.update_and_fetch(keys, values)
    else:
        queries = self.turn(queries)
        keys = self.turn(keys)
    output = scaled_dot_product_attention(
        queries, keys, values, cache=cache, scale=self.scale, mask=mask
    )
    output = output.transpose(0, 2, 1, 3).reshape(B, L, -1)
    return self.out(output * mx.sigmoid(gate))


HEADS = (_heads, _heads_normed, _heads_normed_together, _heads_gated)


@lru_cache(None)
def form_of(cls: type) -> Form | None:
    """Of a class of an architecture; None for a class that is no such network."""
    if (forward := _forward(cls)) is None:
        return None
    for known, (module, function), activation in FORWARDS:
        names = _names_in(forward, known)
        gates = getattr(sys.modules.get(module), function, None)
        stand_for = {"nn": nn, "mx": mx, "swiglu": gates}
        if names is not None and all(
            forward.__globals__.get(there) is stand_for[name] is not None
            if name in stand_for
            else name in PARTS or there == name
            for name, there in names.items()
        ):
            return Form(tuple(names[part] for part in PARTS if part in names), activation)
    return None


@lru_cache(None)
def block_of(cls: type) -> Block | None:
    """Of a class of an architecture; None for one of another form."""
    names = _names_of(cls, (_block, _block_returned, _block_added), Block._fields)
    return None if names is None else Block(**names)


@lru_cache(None)
def heads_of(cls: type) -> Heads | None:
    """Of a class of attentions; None for one of another form."""
    forward, ours = _forward(cls), our_function(BASE, ATTEND)
    names = _names_of(cls, HEADS, Heads._fields)
    if not (forward and names and ours) or forward.__globals__[ATTEND] is not ours:
        return None
    more: dict[str, Any] = {"q_norm": None, "k_norm": None, **names}
    return Heads(**more, attend=ours, gated=_names_in(forward, _heads_gated) is not None)


def _forward(cls: type) -> FunctionType | None:
    """The one that a class has or inherits; None where it is no plain function."""
    forwards = (vars(base)["__call__"] for base in cls.__mro__ if "__call__" in vars(base))
    forward = next(forwards, None)
    return forward if isinstance(forward, FunctionType) else None


def _names_of(
    cls: type, forwards: Sequence[Callable], free: Sequence[str]
) -> dict[str, str] | None:
    """What a class calls what is free in one of the forwards, whichever its own is."""
    if (forward := _forward(cls)) is None:
        return None
    for known in forwards:
        names = _names_in(forward, known)
        if names is not None and all(k in free or k == name for k, name in names.items()):
            return {k: name for k, name in names.items() if k in free}
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
