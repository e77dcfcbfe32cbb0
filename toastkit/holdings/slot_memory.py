"""The memory of one layer's expert slots, and reading experts into it.

An expert is a row of each parameter of its layer's stacks: gate, up and down weights, scales,
biases. If the host can write the device's memory, rows are read straight into their slots; else
into host memory, and from there with one update of each stack. A parameter that the files hold in
another form, because it is computed from other tensors or quantised on the fly, is made once its
sources have been read: the expert's rows, or, if those may not be enough, the whole layer's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from toastkit.holdings.holding import Holding
from toastkit.holdings.packed import drop_dense
from toastkit.holdings.weights import Weights
from toastkit.store.jobs import Filling, Job, Piece, host_writes
from toastkit.store.request import Request
from toastkit.store.rows import Rows
from toastkit.store.store import Store
from toastkit.store.waiting import NOW

UNSIGNED = {1: "uint8", 2: "uint16", 4: "uint32", 8: "uint64"}  # by item size in bytes
KEPT_BYTES = 64 << 20  # the largest source buffers that are kept, to be read into again
TOGETHER_BYTES = 256 << 10  # of an expert's pieces, wherever they are, for one thread to read


class _Stack(NamedTuple):
    """One parameter. key: in the holding's module. name: in the store. row: bytes per expert. view:
    the bytes of all its slots, if the host can write them."""

    holding: Holding
    key: str
    name: str
    row: int
    view: memoryview | None


class _Source(NamedTuple):
    """A stored tensor, by name, from which one or more parameters of a module are made."""

    holding: Holding
    name: str


class Fetch(NamedTuple):
    """Experts on their way into slots. request: the reads. staged: the bytes of each expert's rows,
    host buffers unless the slots themselves are written. made: the rows of each source, once
    read."""

    experts: list[int]
    slots: list[int]
    request: Request[dict[Any, mx.array]]
    staged: list[list[memoryview]]
    made: list[Rows]

    def cancel(self) -> None:
        """Cancel the fetch; the slots can be reused when this returns."""
        self.request.cancel()

    def leave_off(self) -> None:
        """Stop reading, without waiting: `cancel`, which must follow, then soon returns."""
        self.request.leave_off()


class SlotMemory:
    """The slots of some holdings' experts: the stacks of one layer, in one form.

    expert_bytes: size of an expert on the device. read_bytes: bytes read from the files for one.
    reads_all: true if fetching one expert reads all of the layer: then nothing is prefetched.
    """

    def __init__(self, store: Store, weights: Weights, holdings: Sequence[Holding]):
        self._store, self._weights, self.holdings = store, weights, list(holdings)
        self._direct: list[_Stack] = []  # whose rows are stored as on the device
        self._made: list[_Source] = []
        self._pieces: dict[tuple[int, int], Piece] = {}
        host = host_writes()
        mx.eval([holding.parts.matrix for holding in holdings])
        self.expert_bytes = self.read_bytes = 0
        for holding in holdings:
            stacks = [_stack(holding, k, n, host) for k, n in weights.sources(holding).items()]
            self.expert_bytes += sum(stack.row for stack in stacks)
            direct = [s for s in stacks if self._piece(s, 0, memoryview(bytearray(s.row)))]
            self._direct += direct
            self.read_bytes += sum(self._pieces[id(stack), 0].stored_bytes for stack in direct)
            made = {stack.key: stack.name for stack in stacks}
            for stack in direct:
                del made[stack.key]
            self._made += [_Source(holding, name) for name in dict.fromkeys(made.values())]
        jobs = {key: job for rows in self._rows_of([0]) for key, job in rows.jobs.items()}
        self.read_bytes += sum(job.stored_bytes for job in jobs.values())
        self.reads_all = any(store.row_reading.is_whole(source.name) for source in self._made)
        # In file order: adjacent pieces of an expert are read at once.
        self._direct.sort(key=lambda stack: self._pieces[id(stack), 0].spans)

    def release(self) -> None:
        """Drop the views of the slots, which would keep their memory alive."""
        self._direct = []

    def _rows_of(self, experts: list[int]) -> list[Rows]:
        """The reads that experts take, per source."""
        spans = [(expert, expert + 1) for expert in experts]
        return [self._store.row_reading.rows(source.name, spans) for source in self._made]

    def _piece(self, stack: _Stack, expert: int, view: memoryview) -> Piece | None:
        """The read of an expert's row of a stack into view; None if it is not stored as such."""
        known = self._pieces.get((id(stack), expert))
        if known is None:
            dtype = stack.holding.parts.matrix[stack.key].dtype
            known = self._store.row_reading.piece(stack.name, expert, view, dtype)
            if known is None:
                return None
            # Without the view, which would keep its memory alive.
            self._pieces[id(stack), expert] = known._replace(view=memoryview(b""))
        return known._replace(view=view)

    # ----------------------------------------------------------------------------------- fetching

    def begin(self, experts: list[int], slots: list[int], priority: int) -> Fetch:
        """Start reading experts into slots, in one request, and return at once. `finish` or cancel
        the fetch. No unevaluated output may depend on the slots' old contents."""
        jobs: dict[Any, Filling | Job] = {}
        staged: list[list[memoryview]] = []
        for n, (expert, slot) in enumerate(zip(experts, slots)):
            views = []
            for stack in self._direct:
                if stack.view is not None:
                    views.append(stack.view[slot * stack.row : (slot + 1) * stack.row])
                else:
                    views.append(np.empty(stack.row, np.uint8).data)
            for group in self._grouped(expert, views):
                jobs[n, len(jobs)] = Filling(tuple(group))
            staged.append(views)
        made = self._rows_of(experts)
        for rows in made:
            jobs.update(rows.jobs)
        # `finish` makes rows of what was read.
        request = self._store.reader.request(jobs, lambda read: read, priority, priority == NOW)
        return Fetch(experts, slots, request, staged, made)

    def _grouped(self, expert: int, views: list[memoryview]) -> list[list[Piece]]:
        """The pieces of an expert in groups large enough for a thread; adjacent pieces stay
        together."""
        groups: list[list[Piece]] = [[]]
        size = 0
        for stack, view in zip(self._direct, views):
            piece = self._piece(stack, expert, view)
            assert piece is not None  # as for expert 0, when the stack was found direct
            last = groups[-1][-1].spans[-1] if groups[-1] else piece.spans[0]
            if size >= TOGETHER_BYTES and not last.precedes(piece.spans[0]):
                groups.append([])
                size = 0
            groups[-1].append(piece)
            size += piece.stored_bytes
        return [group for group in groups if group]

    def finish(self, fetch: Fetch) -> None:
        """Wait until the experts are in their slots. Raises DataError, NoInputError, IOFailure; the
        slots' contents are then undefined."""
        read = fetch.request.result()
        where = mx.array(fetch.slots)
        written: list[mx.array] = []
        for n, stack in enumerate(self._direct):
            if stack.view is None:
                array = stack.holding.module[stack.key]
                rows = np.stack([np.frombuffer(views[n], np.uint8) for views in fetch.staged])
                array[where] = mx.array(rows).view(array.dtype).reshape(-1, *array.shape[1:])
                written.append(array)
        by_source = [of.make(read) for of in fetch.made]
        for n, slot in enumerate(fetch.slots if by_source else ()):
            sources = zip(self._made, by_source)
            parts = [self._weights.expert_rows(*source, of[n]) for source, of in sources]
            self._store.evaluate(parts)
            for source, made in zip(self._made, parts):
                for key, row in made.items():
                    self._write(source.holding, key, slot, row)
                written += (source.holding.module[key] for key in made)
        mx.eval(written)
        read.clear()
        if fetch.request.nbytes <= KEPT_BYTES:
            fetch.request.give_back()
        for holding in self.holdings:
            drop_dense(holding.module)

    def _write(self, holding: Holding, key: str, slot: int, row: mx.array) -> None:
        """Write an expert's row, (1, ...) and evaluated, into a slot of a stack."""
        array = holding.module[key]
        if not host_writes():
            array[slot] = row[0]
            return
        kind = UNSIGNED[array.itemsize]  # numpy has no bfloat16
        size = array.nbytes // array.shape[0]
        into = np.frombuffer(_bytes_of(array)[slot * size : (slot + 1) * size], kind)
        into.reshape(row.shape)[...] = np.asarray(row.view(getattr(mx, kind)))


def _stack(holding: Holding, key: str, name: str, host: bool) -> _Stack:
    array = holding.module[key]
    view = _bytes_of(array) if host else None
    return _Stack(holding, key, name, array.nbytes // array.shape[0], view)


def _bytes_of(array: Any) -> memoryview:
    """The memory of an array, of any shape such as (slots, rows) and any dtype; evaluates it."""
    mx.eval(array)
    return memoryview(array).cast("B")
