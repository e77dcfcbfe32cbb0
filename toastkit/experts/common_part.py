"""The common part of two passes of one step, whatever their K: everything before the first router.
A step that falls back to the big model (paper 002, algorithm 1) need not compute it again.

While a pass is recorded, modules keep what they return; while it is replayed, they return that
instead of computing it, and their caches are moved to where the first pass left them. These are:

  - the layers before that of the first MoE block, whole;
  - in that layer, what returns before the block is called: attention, a recurrence;
  - in that layer and the block, what is called with the block's input alone: shared experts.

Only modules with children are worth it: recording a norm, or a router's matrix, in every step takes
longer than computing it again in some; and only while steps fall back often. A module is computed
again if it is called twice in a pass, or with anything but arrays, plain values and caches of its
own. So an architecture that is built otherwise is right, only no faster.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from toastkit.experts.routers import MoEBlock
from toastkit.holdings.derived import extend, restore
from toastkit.holdings.layer_slots import is_switch
from toastkit.holdings.streams import Streams

# Fallback ratio from which on recording pays (benchmarks/experts_shared.py), and the weight of the
# last step in its moving average, which covers the last thirty or so.
PAYS, SMOOTHING = 0.25, 1 / 16
PLAIN = (mx.array, bool, int, float, str, type(None))


class _Call(NamedTuple):
    """A module's result, and the caches that it was called with."""

    out: Any
    caches: list[Any]


class Recording:
    """A recording of what a pass computed before its first router; empty to begin with.

    forward: by id of each cache in `caches`, a function that moves it, once rolled back, to where
    the recorded pass left it. Set by the code that rolls back, before a replay.
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Start recording a pass; drops an earlier recording."""
        self._calls: dict[int, _Call | None] = {}  # by the module's id; None if not kept
        self._writers: dict[int, int] = {}  # cache id -> id of the module that it was passed to
        self.forward: dict[int, Callable[[], None]] = {}

    def __bool__(self) -> bool:
        return any(self._calls.values())

    @property
    def caches(self) -> list[Any]:
        """The caches of the kept calls; composite caches part by part."""
        return [cache for call in self._calls.values() if call for cache in call.caches]

    def add(self, module: nn.Module, call: _Call, keeps: bool) -> None:
        """Record a call of a module. keeps: by itself, the call may be kept."""
        keys = {self._writers.setdefault(id(cache), id(module)) for cache in call.caches}
        if id(module) in self._calls or keys - {id(module)}:
            self._calls.update(dict.fromkeys((id(module), *keys)))
        else:
            self._calls[id(module)] = call if keeps else None

    def evaluate(self) -> None:
        """Evaluate the kept results, before the caches that they depend on are rolled back."""
        mx.eval([call.out for call in self._calls.values() if call])

    def of(self, module: nn.Module, caches: Sequence[Any]) -> _Call | None:
        """A module's recorded call, with these caches; None if it has to be computed."""
        call = self._calls.get(id(module))
        return call if call and all(id(cache) in self.forward for cache in caches) else None


NOTHING = Recording()


class CommonPart:
    """Records and replays the common part of a model's passes. blocks: its MoE blocks, by layer.
    Nothing is kept if one of the layers concerned is streamed."""

    def __init__(self, model: nn.Module, blocks: Sequence[MoEBlock], streams: Streams):
        self._streams, self._last = streams, blocks[0].layer
        self._parts = _parts(model, blocks[0])
        self._kept = NOTHING
        self._replays = self._reached = False
        self._seen: Any = None  # the input of the first router's block
        self._used = 1.0  # moving average of the steps for which a recording was or would be used

    def note(self, used: bool) -> None:
        """Count a step. used: its recording was used, or would have been."""
        self._used += SMOOTHING * (used - self._used)

    def nothing_kept(self) -> Recording:
        """An empty recording."""
        return Recording()

    def recorded(self, kept: Recording) -> AbstractContextManager[None]:
        """Context in which passes are recorded, if that pays; the last one stays in `kept`."""
        streamed = self._streams.layers and self._streams.layers[0] <= self._last
        if streamed or self._used < PAYS:
            return nullcontext()
        return self._wrapped(kept, replays=False)

    def replayed(self, kept: Recording) -> AbstractContextManager[None]:
        """Context in which a pass, from caches that were rolled back, replays what is kept."""
        return self._wrapped(kept, replays=True) if kept else nullcontext()

    @contextmanager
    def _wrapped(self, kept: Recording, replays: bool) -> Iterator[None]:
        for module, mixin in self._parts:
            extend(module, mixin, _common=self)
        self._kept, self._replays = kept, replays
        try:
            yield
        finally:
            for module, _ in self._parts:
                restore(module)
            self._kept, self._seen = NOTHING, None

    def begin(self) -> None:
        """Called when the model is called."""
        self._reached, self._seen = False, None
        if not self._replays:
            self._kept.begin()

    def reach(self, args: tuple) -> None:
        """Called when the first router's block is called."""
        self._reached, self._seen = True, args[0] if args else None

    def run(self, module: nn.Module, call: Callable[..., Any], args: tuple, rest: dict) -> Any:
        """Call a module, recording it, or replay its recorded call."""
        caches = _caches((*args, *rest.values()) if rest else args)
        if self._replays:
            kept = None if caches is None else self._kept.of(module, caches)
            if kept is None:
                return call(*args, **rest)
            for cache in caches or ():
                self._kept.forward[id(cache)]()
            return _copied(kept.out)
        alone = self._reached and len(args) == 1 and not rest and args[0] is self._seen
        out = call(*args, **rest)
        keeps = caches is not None and (alone or not self._reached) and _is_plain(out)
        self._kept.add(module, _Call(_copied(out) if keeps else None, caches or []), keeps)
        return out


class _Pass:
    """Mixin for the class of the model."""

    _common: CommonPart

    def __call__(self, *args: Any, **rest: Any) -> Any:
        self._common.begin()
        return super().__call__(*args, **rest)  # type: ignore[misc]


class _First:
    """Mixin for the class of the first router's block."""

    _common: CommonPart

    def __call__(self, *args: Any, **rest: Any) -> Any:
        self._common.reach(args)
        return super().__call__(*args, **rest)  # type: ignore[misc]


class _Part:
    """Mixin for the class of a module whose calls may be kept."""

    _common: CommonPart

    def __call__(self: Any, *args: Any, **rest: Any) -> Any:
        return self._common.run(self, super().__call__, args, rest)  # type: ignore[misc]


def _parts(model: nn.Module, block: MoEBlock) -> list[tuple[nn.Module, type]]:
    """The modules that take part, with their mixins. Empty if the block is not in its layer, or its
    router cannot be told apart."""
    layer = model.layers[block.layer]
    if all(module is not block.module for _, module in layer.named_modules()):
        return []
    # A router that holds K depends on it.
    router = getattr(block.module, block.k_name.partition(".")[0], None)
    first = router if layer is block.module else block.module
    if not isinstance(first, nn.Module):
        return []
    parts = [*model.layers[: block.layer], *_children(layer), *_children(block.module)]
    found = {id(module): (module, _Part) for module in parts if not is_switch(module)}
    if isinstance(router, nn.Module):
        found.pop(id(router), None)
    return [*(found | {id(first): (first, _First)}).values(), (model, _Pass)]


def _children(module: nn.Module) -> list[nn.Module]:
    """A module's direct children, also those in lists, that have children themselves."""
    found: Any = tree_flatten(module.children(), is_leaf=nn.Module.is_module)
    return [child for _, child in found if child.children()]


def _caches(values: Sequence[Any]) -> list[Any] | None:
    """The caches among a module's arguments, part by part; None if there is an object among them
    whose changes would go unnoticed."""
    found: list[Any] = []
    for value in values:
        if isinstance(value, PLAIN):
            continue
        parts = value if isinstance(value, tuple) else getattr(value, "caches", None)
        if parts is not None:
            if (inner := _caches(parts)) is None:
                return None
            found += inner
        elif hasattr(value, "is_trimmable"):
            found.append(value)
        else:
            return None
    return found


def _is_plain(out: Any) -> bool:
    """True for arrays and plain values, and tuples of them."""
    return all(map(_is_plain, out)) if isinstance(out, tuple) else isinstance(out, PLAIN)


def _copied(out: Any) -> Any:
    """A copy with array objects of its own, as `x[...] = y` changes the object."""
    if isinstance(out, tuple):
        values = [_copied(value) for value in out]
        return type(out)(*values) if hasattr(out, "_fields") else tuple(values)
    return copy.copy(out) if isinstance(out, mx.array) else out
