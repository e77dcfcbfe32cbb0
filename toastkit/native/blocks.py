"""Layers of the common form in two operations beside attention and its cache: what lies before it
and what lies behind. Found, as feed-forward networks are, by what their forwards are, instruction
by instruction, whatever architecture they are of. What is not as it says here goes to the
architecture's own forward."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import lru_cache  # `cache` is a name below, and an imported one is called otherwise
from types import FunctionType
from typing import Any, NamedTuple

import mlx.core as mx

from toastkit.native.feed_forward import Form, names_in
from toastkit.native.functions import Native, our_function
from toastkit.native.library import ACTIVATIONS, NONE, Library, Operand, in_use
from toastkit.native.modules import Linear, Norm

BASE, ATTEND = "mlx_lm.models.base", "scaled_dot_product_attention"


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


class Block(NamedTuple):
    """What a class of layers calls its parts."""

    attention: str
    first_norm: str
    network: str
    second_norm: str


class Heads(NamedTuple):
    """What a class of attentions calls its parts. attend: what it calls with queries, keys, values
    and the rest."""

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


@lru_cache(None)
def block_of(cls: type) -> Block | None:
    """Of a class of an architecture; None for one of another form."""
    names = _names_of(cls, (_block, _block_returned), Block._fields)
    return None if names is None else Block(**names)


@lru_cache(None)
def heads_of(cls: type) -> Heads | None:
    """Of a class of attentions; None for one of another form."""
    names, ours = _names_of(cls, (_heads, _heads_normed), Heads._fields), our_function(BASE, ATTEND)
    if names is None or ours is None or _forward(cls).__globals__[ATTEND] is not ours:
        return None
    more: dict[str, Any] = {"q_norm": None, "k_norm": None, **names}
    return Heads(**more, attend=ours)


def _forward(cls: type) -> Any:
    return next((vars(base)["__call__"] for base in cls.__mro__ if "__call__" in vars(base)), None)


def _names_of(
    cls: type, forwards: Sequence[Callable], free: Sequence[str]
) -> dict[str, str] | None:
    """What a class calls what is free in one of the forwards, whichever its own is."""
    if not isinstance(forward := _forward(cls), FunctionType):
        return None
    for known in forwards:
        names = names_in(forward, known)
        if names is not None and all(k in free or k == name for k, name in names.items()):
            return {k: name for k, name in names.items() if k in free}
    return None


class Layer(Native):
    """One of that form. _block: what its class calls its parts."""

    _block: Block

    def __call__(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        y = self._in_two(x, mask, cache)
        return super().__call__(x, mask, cache) if y is None else y  # type: ignore[misc]

    def _in_two(self: Any, x: mx.array, mask: Any, cache: Any) -> mx.array | None:
        """None where a part is not as it has to be."""
        library = in_use()
        attention, first, network, second = (self[name] for name in self._block)
        kind: Any = type(attention)
        own = heads_of(kind)
        if library is None or own is None or cache is None or x.dtype != mx.float32:
            return None
        if not _are_plain(first, second) or x.ndim != 3:
            return None
        counts = [getattr(attention, name) for name in (own.heads, own.key_heads, own.key_heads)]
        out, form = attention[own.out], vars(type(network)).get("_form")
        before = [attention[name] for name in (own.q, own.k, own.v)]
        if (parts := _given(before, x.shape[-1])) is None:
            return None
        joined = counts[0] * (parts[2][0].weight.shape[-2] // counts[2])
        last, behind = _given([out], joined), [out]
        if last is None:
            return None
        if form and (more := _network([network[name] for name in form.parts], x.shape[-1])):
            last, behind = last + more, behind + [network[name] for name in form.parts]
        else:  # it is left to itself
            form = None
        for part in (*before, *behind):
            part.was_used()
        queries, keys, values = _projected(library, x, first, parts, counts, out._exact)
        if own.q_norm and own.k_norm:
            queries, keys = attention[own.q_norm](queries), attention[own.k_norm](keys)
        turn = attention[own.turn]
        queries, keys = turn(queries, offset=cache.offset), turn(keys, offset=cache.offset)
        keys, values = cache.update_and_fetch(keys, values)
        scale = getattr(attention, own.scale)
        attended = own.attend(queries, keys, values, cache=cache, scale=scale, mask=mask)
        y, *normed = _closed(library, x, attended, second, last, form, out._exact)
        return y + network(normed[0]) if normed else y


def _are_plain(*norms: Any) -> bool:
    """Whether they are RMS norms of ours and nothing else."""
    return all(type(norm).__call__ is Norm.__call__ for norm in norms)


def _given(parts: Sequence[Any], columns: int) -> list[tuple[Operand, mx.array | None]] | None:
    """What parts multiply vectors (..., columns) with, and what they add; None where one is not to
    be multiplied so."""
    found = []
    for part in parts:
        if not isinstance(part, Linear) or (part._wide or mx.float32) != mx.float32:
            return None
        own, bias = part.operand(), part.get("bias")  # type: ignore[attr-defined]
        plain = bias is None or bias.dtype == mx.float32
        if own is None or own.columns != columns or not plain:
            return None
        found.append((own, bias))
    return found


def _network(parts: Sequence[Any], columns: int) -> list[tuple[Operand, mx.array | None]] | None:
    """Likewise of a network's."""
    *first, down = parts
    if (found := _given(first, columns)) is None:
        return None
    last = _given([down], found[0][0].weight.shape[-2] // (3 - len(first)))
    return None if last is None else found + last


def _objects(parts: Sequence[tuple[Operand, mx.array | None]]) -> Any:
    some: list[Any] = [
        NONE if array is None else array
        for operand, bias in parts
        for array in (*operand[:3], bias)
    ]
    return (ctypes.py_object * len(some))(*some)


@lru_cache(None)
def _functions(library: Library) -> tuple[Any, Any]:
    array, whole, number, place = ctypes.py_object, ctypes.c_int, ctypes.c_float, ctypes.c_void_p
    head = (place, array, array, number, place, place, whole, whole)
    projected = library.function("projected", *head)
    closed = library.function("closed", place, *[array] * 3, number, place, place, *[whole] * 3)
    return projected, closed


def _made(count: int, call: Callable[[Any], bytes | None]) -> list[mx.array]:
    outs: list[Any] = [mx.array(0) for _ in range(count)]
    if (wrong := call((ctypes.py_object * count)(*outs))) is not None:
        raise ValueError(wrong.decode())
    return outs


def _projected(
    library: Library, x: mx.array, norm: Any, parts: Any, heads: Sequence[int], exact: bool
) -> list[mx.array]:
    """Products of the norm of x (B, L, columns) with each part, lazy: (B, heads, L, size)."""
    packing = [n for (o, _), count in zip(parts, heads) for n in (o.bits, o.group_size, count)]
    given, numbers = _objects(parts), (ctypes.c_int * len(packing))(*packing)
    call = _functions(library)[0]
    return _made(
        len(parts),
        lambda outs: call(outs, x, norm["weight"], norm.eps, given, numbers, len(parts), exact),
    )


def _closed(
    library: Library, x: mx.array, attended: mx.array, norm: Any, parts: Any, form: Form | None,
    exact: bool,
) -> list[mx.array]:  # fmt: skip
    """h = x + out(attended) and what a network makes of it, h + network(norm of h); or, where there
    is none, h and its norm; lazy, (B, L, columns) each."""
    packing = [n for operand, _ in parts for n in operand[3:]]
    given, numbers = _objects(parts), (ctypes.c_int * len(packing))(*packing)
    kind = ACTIVATIONS.index(form.activation) if form else 0
    call = _functions(library)[1]
    return _made(
        1 if form else 2,
        lambda outs: call(
            outs, x, attended, norm["weight"], norm.eps, given, numbers, len(parts), kind, exact
        ),
    )
