"""What two passes of one step have in common, whatever their K: all that comes before the first
router. The pass that is run again (paper 002, algorithm 1) need not compute it again.

While a pass is recorded, modules note what they return; while one is replayed they return that in
place of computing it, and their caches are put where the first pass left them. What they are:

  - the layers before that of the first MoE block, whole;
  - in that layer, what returns before the block is called: attention, a recurrence;
  - of its layer and of the block, what is called with nothing but the array that the block was
    called with: shared experts.

Only what is made of several modules is worth it: taking note of a norm, or of a router's matrix, in
every step takes longer than computing it once more in some; and only while steps fall back often. A
module is computed again that is called twice in a pass, or with anything but arrays, plain values
and caches of its own. So an architecture that is built otherwise is right, and no faster.
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
from toastkit.holdings.derived import derived
from toastkit.holdings.layer_slots import is_switch
from toastkit.holdings.streams import Streams

# Share of steps that fall back from which on taking note pays (benchmarks/experts_shared.py), and
# the weight of the last step in it: what is measured is the last thirty or so.
PAYS, SMOOTHING = 0.25, 1 / 16
PLAIN = (mx.array, bool, int, float, str, type(None))


class _Call(NamedTuple):
    """What a module returned, and the caches that it was called with."""

    out: Any
    caches: list[Any]


class Kept:
    """What a pass computed before its first router; nothing, before it was recorded.

    forward: by the id of a cache in `caches`, what puts it where that pass left it, once it was
    rolled back: for who rolls back to say, before a pass is replayed.
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """A pass begins: what came of another is forgotten."""
        self._calls: dict[int, _Call | None] = {}  # by the module's id; None for one not kept
        self._writers: dict[int, int] = {}  # ids of modules, by those of the caches they were given
        self.forward: dict[int, Callable[[], None]] = {}

    def __bool__(self) -> bool:
        return any(self._calls.values())

    @property
    def caches(self) -> list[Any]:
        """Of the calls that are kept. Those that are made of several are there part by part."""
        return [cache for call in self._calls.values() if call for cache in call.caches]

    def add(self, module: nn.Module, call: _Call, keeps: bool) -> None:
        """A module was called. keeps: the call may be kept, as far as it is known by itself."""
        keys = {self._writers.setdefault(id(cache), id(module)) for cache in call.caches}
        if id(module) in self._calls or keys - {id(module)}:
            self._calls.update(dict.fromkeys((id(module), *keys)))
        else:
            self._calls[id(module)] = call if keeps else None

    def evaluate(self) -> None:
        """Has nothing wait to be computed of caches that are about to be rolled back."""
        mx.eval([call.out for call in self._calls.values() if call])

    def of(self, module: nn.Module, caches: Sequence[Any]) -> _Call | None:
        """A module's call, with these caches; None where it is to be computed."""
        call = self._calls.get(id(module))
        return call if call and all(id(cache) in self.forward for cache in caches) else None


NOTHING = Kept()


class CommonPart:
    """Of a model. blocks: its MoE blocks, by layer. Layers that come and go have their own ways:
    where there is one among those in question, nothing is kept."""

    def __init__(self, model: nn.Module, blocks: Sequence[MoEBlock], streams: Streams):
        self._streams, self._last = streams, blocks[0].layer
        self._classes = _classes(model, blocks[0])
        for module, _ in self._classes:
            vars(module)["_common"] = self
        self._kept = NOTHING
        self._replays = self._reached = False
        self._seen: Any = None  # what the first router's block was called with
        self._used = 1.0  # share of steps of which what is kept was of use, or would have been

    def note(self, used: bool) -> None:
        """A step has run: whether what was kept of it was of use, or would have been."""
        self._used += SMOOTHING * (used - self._used)

    def nothing_kept(self) -> Kept:
        """What is kept of a pass before it was recorded."""
        return Kept()

    def recorded(self, kept: Kept) -> AbstractContextManager[None]:
        """Passes that are built meanwhile are kept, the last one of them; where that pays."""
        come_and_go = self._streams.layers and self._streams.layers[0] <= self._last
        if come_and_go or self._used < PAYS:
            return nullcontext()
        return self._taking_part(kept, replays=False)

    def replayed(self, kept: Kept) -> AbstractContextManager[None]:
        """Passes that are built meanwhile, from caches that were rolled back, do not compute what
        is kept."""
        return self._taking_part(kept, replays=True) if kept else nullcontext()

    @contextmanager
    def _taking_part(self, kept: Kept, replays: bool) -> Iterator[None]:
        own = [(module, type(module)) for module, _ in self._classes]
        for (module, mixin), (_, cls) in zip(self._classes, own):
            _set_class(module, derived(mixin, cls))
        self._kept, self._replays = kept, replays
        try:
            yield
        finally:
            for module, cls in own:
                _set_class(module, cls)
            self._kept, self._seen = NOTHING, None

    def begin(self) -> None:
        """The model is called."""
        self._reached, self._seen = False, None
        if not self._replays:
            self._kept.begin()

    def reach(self, args: tuple) -> None:
        """The first router's block is called."""
        self._reached, self._seen = True, args[0] if args else None

    def run(self, module: nn.Module, call: Callable[..., Any], args: tuple, rest: dict) -> Any:
        """A module is called: what it returns, or has returned."""
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
    """What a model does in addition to its architecture's own."""

    _common: CommonPart

    def __call__(self, *args: Any, **rest: Any) -> Any:
        self._common.begin()
        return super().__call__(*args, **rest)  # type: ignore[misc]


class _First:
    """What the first router's block does."""

    _common: CommonPart

    def __call__(self, *args: Any, **rest: Any) -> Any:
        self._common.reach(args)
        return super().__call__(*args, **rest)  # type: ignore[misc]


class _Part:
    """What a module does whose calls may be kept."""

    _common: CommonPart

    def __call__(self: Any, *args: Any, **rest: Any) -> Any:
        return self._common.run(self, super().__call__, args, rest)  # type: ignore[misc]


def _classes(model: nn.Module, block: MoEBlock) -> list[tuple[nn.Module, type]]:
    """The modules that take part, and what they do in addition. None, where that cannot be said:
    the block is not in its layer, or its router is not to be told apart."""
    layer = model.layers[block.layer]
    if all(module is not block.module for _, module in layer.named_modules()):
        return []
    # A router that holds K by itself depends on it.
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
    """Those that hang in a module itself, or in lists of it, and have some of their own."""
    found: Any = tree_flatten(module.children(), is_leaf=nn.Module.is_module)
    return [child for _, child in found if child.children()]


def _set_class(module: nn.Module, cls: type) -> None:
    # By object's way: a Module's own looks for a parameter of the name, which takes its time.
    object.__setattr__(module, "__class__", cls)


def _caches(values: Sequence[Any]) -> list[Any] | None:
    """The caches among what a module was called with, part by part; None where it was given
    something whose changes nobody would see."""
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
    """Whether it is arrays and plain values, in tuples or by itself."""
    return all(map(_is_plain, out)) if isinstance(out, tuple) else isinstance(out, PLAIN)


def _copied(out: Any) -> Any:
    """The same, in arrays of its own, as objects: `x[...] = y` changes the object."""
    if isinstance(out, tuple):
        values = [_copied(value) for value in out]
        return type(out)(*values) if hasattr(out, "_fields") else tuple(values)
    return copy.copy(out) if isinstance(out, mx.array) else out
