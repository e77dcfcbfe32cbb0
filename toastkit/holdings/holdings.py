"""Which of a model's weights the device holds, and in which form: one ledger, one budget, one lock.

    holdings = Holdings(store, types, ledger)
    holdings.change({"model.layers.3.mlp.up_proj": packed(4), "model.layers.8.mlp.up_proj": ABSENT})

Policies decide forms; this module applies them. A change is atomic: it reads or makes the arrays
that are wanted, attaches them to the module tree and enters them in the ledger, or fails and leaves
everything as it was. Forms that it replaces are cached within a budget, evicted LRU first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import mlx.core as mx

from toastkit.errors import UsageError
from toastkit.holdings.derived import as_before
from toastkit.holdings.forms import ABSENT, MAPPED, ORIGINAL, Form
from toastkit.holdings.holding import (
    Holding,
    LoadedSizes,
    Parts,
    activation_bits,
    holdings_of,
    kept_narrow,
)
from toastkit.holdings.packed import PathCounts
from toastkit.holdings.streams import Streams
from toastkit.holdings.weights import Move, Reading, Weights
from toastkit.native.kv_caches import keep_in
from toastkit.native.library import in_use
from toastkit.native.replacing import use_native
from toastkit.store.dtypes import Loading
from toastkit.store.ledger import GEARS, READING, Ledger
from toastkit.store.store import Store

if TYPE_CHECKING:
    from toastkit.holdings.expert_slots import ExpertSlots

LITTLE_BYTES, FEW_TENSORS = 64 << 20, 512  # up to which MLX reads faster


class _Cached(NamedTuple):
    """Cached parts: on the device, not in use. change: the number of the change that put them
    aside."""

    parts: Parts
    change: int


class Holdings:
    """The weights of one model.

    store: opened, with the architecture; stays open. types: the dtypes that weights are loaded in.
    ledger: accounts for every byte; its lock is held during a change. budget: bytes on the device
    for cached forms, which are not in use; None for all packed ones and no originals. limit: bytes
    for everything, and the modules that leave for that, see policy.let_go. notify: called with a
    warning if weights seem to have been quantised before.

    modules: by path, in layer order. counts: matmuls of packed modules, by path taken. loaded:
    sizes of modules on the device.
    """

    def __init__(
        self,
        store: Store,
        types: Loading,
        ledger: Ledger,
        budget: int | None = None,
        notify: Callable[[str], None] | None = None,
    ):
        self.store = store
        self.types = types
        self.ledger = ledger
        self.budget = self._most = budget
        self.limit: tuple[int, Collection[str]] | None = None
        self.counts = PathCounts()
        self.modules = {holding.path: holding for holding in holdings_of(store)}
        if types.native:
            bits = activation_bits(store.model, types.exact)
            for holding in self.modules.values():
                holding.use_native(bits)
        if types.native and (library := in_use()) is not None:
            use_native(store.model.modules())
            store.reader.make_memory = library.memory
        if types.cast is not None:
            for holding in self.modules.values():
                holding.widen_rows(types.cast)
        narrow = kept_narrow(store, self.modules.values(), types)
        self._weights = Weights(store, types.cast, narrow, notify)
        self.loaded = LoadedSizes(store, self.modules, self._weights.loaded_dtype)
        self._kept: dict[Move, _Cached] = {}  # least recently used first
        self._prepared: dict[Move, Parts] = {}  # for a change that is expected
        self._changes = 0
        ledger.measure(READING, lambda: store.reader.held_bytes)
        self._freed = False
        self.streams = Streams(self, self._weights)

    def new_caches(self) -> list[Any]:
        """Empty caches, one per layer, of the architecture's own classes. Raises UsageError if
        these cannot keep keys and values in the dtype that is asked for."""
        from mlx_lm.models.cache import make_prompt_cache

        caches, types = make_prompt_cache(self.store.model), self.types
        if (kept := types.kept) is not None:
            unknown = keep_in(kept, caches)
            if unknown and types.kv_dtype != types.dtype:
                bits = 8 * kept.size
                raise UsageError(f"--kv-bits {bits}: this model has a {min(unknown)} of its own")
        return caches

    @cached_property
    def slots(self) -> ExpertSlots:
        """The expert slots, made on first use: few models have any."""
        from toastkit.holdings.expert_slots import ExpertSlots

        return ExpertSlots(self, self._weights)

    # --------------------------------------------------------------------------------- questions

    @property
    def has_slots(self) -> bool:
        """True once `slots` has been used."""
        return "slots" in vars(self)

    def counted_experts(self) -> dict[str, int] | None:
        """See ExpertSlots.counted."""
        return self.slots.counted() if self.has_slots else None

    def loaded_dtype(self, name: str) -> mx.Dtype:
        """The dtype of a parameter on the device."""
        return self._weights.loaded_dtype(name)

    def kept(self, path: str) -> list[Form]:
        """The cached forms of a module, other than the one in use, least recently used first."""
        return [form for holding, form in self._kept if holding.path == path]

    @property
    def reads_in_passes(self) -> bool:
        """True if a pass reads weights: layers are streamed, or experts fetched."""
        return bool(self.streams.layers or self.has_slots and self.slots.reads)

    def matrix_bytes(self, paths: Iterable[str]) -> int:
        """Bytes on the device of some modules' matrices, in all forms, used, cached or prepared."""
        wanted = {self.modules[path] for path in paths}
        # Lists, as another thread may call this while forms change.
        others = [(h, k.parts) for (h, _), k in list(self._kept.items())]
        others += [(h, parts) for (h, _), parts in list(self._prepared.items())]
        return sum(holding.matrix_bytes for holding in wanted) + sum(
            parts.matrix_bytes for holding, parts in others if holding in wanted
        )

    @contextmanager
    def shapes_only(self) -> Iterator[None]:
        """Context in which all modules hold arrays of the right shapes and dtypes, so that a pass
        can be built, but not evaluated. For a model of which nothing is loaded, or all of it."""
        if all(holding.form.whole for holding in self.modules.values()):
            return (yield)
        with as_before(self.store.model.modules()):
            for holding in self.modules.values():
                names = holding.names
                arrays = {n: mx.zeros(self.store.shape(n), self.loaded_dtype(n)) for n in names}
                holding.attach(holding.original(arrays), self.counts, self._grown)
            try:
                yield
            finally:
                for holding in self.modules.values():
                    holding.attach(Parts(ABSENT, {}, {}, holding.owner), self.counts, self._grown)

    # ----------------------------------------------------------------------------------- changes

    def change(self, wanted: Mapping[str, Form]) -> int | None:
        """Give modules, by path, the wanted forms.

        Returns how many had to be read or made, None if all had their forms already. Raises
        DataError, IOFailure, NoInputError; every module then keeps its form. If only the number of
        slots changes, their experts are not read again.
        """
        with self.ledger.lock:
            moves = [(h, form) for p, form in wanted.items() if (h := self.modules[p]).form != form]
            if not moves:
                return None
            moves = self.slots.resize(moves, self._replace) if self.has_slots else moves
            ready = self.ready(moves)
            made = self._make_all([move for move in moves if move not in ready])
            self._changes += 1
            for key, parts in {**ready, **made}.items():
                self._install(key, parts)
            self.streams.follow()
            if self.has_slots:
                self.slots.follow()
            self._drop_prepared()
            self._weights.forget_ahead()
            self._shrink()
            if self._freed:
                self._freed = False
                mx.clear_cache()  # or MLX's allocator would keep the memory
            return sum(1 for holding, form in made if form.whole)

    def prepare(self, wanted: Mapping[str, Form], share: float = 1.0) -> None:
        """Prepare a change to these forms: read originals ahead, and make a share of the packed
        forms, unless they exceed the budget. Drops what was prepared for another change."""
        with self.ledger.lock:
            moves = [
                (h, form)
                for path, form in wanted.items()
                if (h := self.modules[path]).form != form and (h, form) not in self._kept
                if form.whole
            ]
            if not moves or self.limit and not self.budget:
                return
            self._drop_prepared(keep=moves)
            self._weights.read_ahead([h for h, form in moves if form == ORIGINAL])
            missing = [m for m in moves if m[1].kind == "packed" and m not in self._prepared]
            size = sum(
                self.loaded.packed_bytes(h.path, f.bits) for h, f in moves if f.kind == "packed"
            )
            if missing and (self.budget is None or size <= self.budget - self.kept_bytes):
                self._prepared.update(self._make_all(missing[: math.ceil(len(moves) * share)]))

    def ready(self, moves: list[Move]) -> dict[Move, Parts]:
        """The moves whose parts are cached or prepared."""
        kept = {key: self._kept[key].parts for key in moves if key in self._kept}
        return {**kept, **{key: self._prepared[key] for key in moves if key in self._prepared}}

    def _make_all(self, moves: list[Move]) -> dict[Move, Parts]:
        """Read or make modules in other forms, and enter them in the ledger; layer by layer, the
        next being read while one is made. If one fails, nothing of this is kept."""
        made: dict[Move, Parts] = {}
        self._weights.sample([h for h, form in moves if form.kind == "packed"])
        with self._weights.whole() if self._mlx_reads_faster(moves) else nullcontext():
            try:
                for reading in self._readings(moves):
                    for move, parts in zip(reading.moves, self._weights.finish(reading)):
                        self._settle(parts)
                        self._enter(move[0], parts)
                        made[move] = parts
            except BaseException:
                for (holding, _), parts in made.items():
                    self._release(holding, parts)
                raise
        return made

    def _mlx_reads_faster(self, moves: Sequence[Move]) -> bool:
        """True if loading the whole file by MLX is faster than reading the wanted tensors: for a
        whole model at its start, and for small originals in a model of few tensors. MLX reads files
        that are stored expert by expert and then copies out of them; and it has no large pages,
        which make the reader of a native model faster."""
        if not moves or any(form != ORIGINAL for _, form in moves):
            return False
        large_pages = self.store.reader.make_memory is not None
        if len(moves) == len(self.modules) and not self._changes:
            return not (self.store.files.is_expert_major or large_pages)
        few = len(self.store.names) <= FEW_TENSORS and not self._weights.is_reading_ahead
        return few and self._is_small(moves)

    def _is_small(self, moves: Iterable[Move]) -> bool:
        return (
            sum(self.loaded.matrix_bytes(h.path) for h, f in moves if not f.mapped) <= LITTLE_BYTES
        )

    def _readings(self, moves: list[Move]) -> Iterator[Reading]:
        """The readings for moves, by layer: each is requested before the previous one is taken.
        Small originals are one reading: waiting for each layer takes longer."""
        layers = [list(group) for _, group in groupby(moves, lambda move: move[0].layer)]
        if moves and all(f.kind == "original" for _, f in moves) and self._is_small(moves):
            layers = [moves]
        begun: Reading | None = None
        try:
            for group in layers:
                there = {h: weight for h, _ in group if (weight := self._original(h)) is not None}
                reading = self._weights.request(group, there, at_once=True)
                begun, last = reading, begun
                if last is not None:
                    yield last
            if begun is not None:
                yield begun
        finally:
            if begun is not None:
                begun.cancel()

    def _original(self, holding: Holding) -> mx.array | None:
        """A module's original matrix, (..., columns), if it is on the device with all bits of the
        file: gears are made from these."""
        weight = holding.weight
        if weight is None or not self._keeps_bits(weight.name):
            return None
        kept = self._kept.get((holding, ORIGINAL))
        if holding.form in (ORIGINAL, MAPPED):
            return holding.parts.matrix.get("weight")
        return None if kept is None else kept.parts.matrix.get("weight")

    def _keeps_bits(self, name: str) -> bool:
        """True if a parameter's dtype on the device loses nothing of what is stored."""
        return self.loaded_dtype(name) in (self.store.dtype(name), mx.float32)

    def _install(self, key: Move, parts: Parts) -> None:
        """Attach a module's new form to the tree, and cache the old one; a module that is away or
        in slots caches none."""
        holding, form = key
        self._kept.pop(key, None)
        self._prepared.pop(key, None)
        before = holding.attach(parts, self.counts, self._grown)
        if not form.whole or before.form.slots:
            self._release(holding, before)
            self._drop([key for key in self._kept if key[0] is holding])
        elif before.matrix:
            self._kept[holding, before.form] = _Cached(before.with_rest({}), self._changes)

    def _replace(self, holding: Holding, parts: Parts) -> None:
        """Replace a module's parts by others that were made from them."""
        self._enter(holding, parts)
        self._install((holding, parts.form), parts)

    def _grown(self, count: int) -> None:
        """Account for a dequantised copy that was made, or dropped (negative)."""
        self.ledger.add(GEARS, count)

    def _settle(self, parts: Parts) -> None:
        """Move native modules' arrays onto large pages: reused memory may have small ones."""
        library = in_use() if self.types.native and not parts.form.mapped else None
        if library is not None:
            for array in (*parts.matrix.values(), *parts.rest.values()):
                library.settle(array)

    def _enter(self, holding: Holding, parts: Parts, sign: int = 1) -> None:
        self.ledger.add(parts.owner, sign * parts.matrix_bytes)
        self.ledger.add(holding.owner, sign * parts.rest_bytes)

    def _release(self, holding: Holding, parts: Parts) -> None:
        """Take parts out of the ledger, and have MLX return their memory to the system."""
        self._freed = True
        self._enter(holding, parts, -1)

    def _drop_prepared(self, keep: Iterable[Move] = ()) -> None:
        """Drop prepared parts that are not needed."""
        for holding, form in set(self._prepared).difference(keep):
            self._release(holding, self._prepared.pop((holding, form)))

    # ---------------------------------------------------------------------------- streamed layers

    def bring(self, reading: Reading) -> None:
        """Attach a reading's arrays to the tree, while their layer runs. Raises as `change`."""
        # Lazy: evaluating would wait for what is being computed meanwhile.
        made = self._weights.finish(reading, lazy=True)
        with self.ledger.lock:
            for (holding, _), parts in zip(reading.moves, made):
                self._enter(holding, parts)
                holding.attach(parts, self.counts, self._grown)

    def drop(self, forms: Iterable[Move]) -> None:
        """Detach a layer's arrays again; the modules return to their streamed forms."""
        with self.ledger.lock:
            for holding, form in forms:
                away = Parts(form, {}, {}, holding.owner)
                before = holding.attach(away, self.counts, self._grown)
                self._enter(holding, before, -1)  # its memory is not freed: it is read into again

    # -------------------------------------------------------------------------------- the budget

    @property
    def kept_bytes(self) -> int:
        """Bytes of the cached forms."""
        return sum(kept.parts.matrix_bytes for kept in self._kept.values())

    def keep(self, most: int) -> None:
        """Let cached forms take that many bytes, or fewer if fewer were asked for."""
        self.budget = most if self._most is None else min(most, self._most)
        with self.ledger.lock:
            self._shrink()

    def _shrink(self) -> None:
        """Evict cached forms down to the budget: those of the last change if they alone exceed it,
        then the least recently used; those of one change go together."""
        never = (MAPPED, ORIGINAL) if self._most is None else (MAPPED,)  # mapping again is free
        self._drop([key for key in self._kept if key[1] in never])
        if self.budget is not None:
            last = [k for k, kept in self._kept.items() if kept.change == self._changes]
            if sum(self._kept[key].parts.matrix_bytes for key in last) > self.budget:
                self._drop(last)
            while self.kept_bytes > self.budget:
                oldest = next(iter(self._kept.values())).change
                self._drop([k for k, kept in self._kept.items() if kept.change == oldest])

    def _drop(self, keys: Iterable[Move]) -> None:
        for key in keys:
            self._release(key[0], self._kept.pop(key).parts)

    def close(self) -> None:
        """Close the checkpoint; what is on the device stays usable."""
        self.streams.forget_ahead()
        if self.has_slots:
            self.slots.forget_ahead()
        self._weights.close()
