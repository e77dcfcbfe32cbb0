"""What a commit writes, and in which order.

Data first, into space that the last header does not own; sync; then the header, by write, sync and
rename; then sync the directory. Until the rename the session is the last commit, after it the new
one. An ephemeral session, and one that is only a cache, skips the syncs: it need not outlive a
power failure.

Rows that are final while a prompt is still being prefilled may be written long before (Ahead). No
header names them until the commit; without one they do not exist.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from toastkit.frames import pack_ids
from toastkit.prefix import common_prefix
from toastkit.private_files import DataFiles, held_until, pwrite_all
from toastkit.session.blocks import LayerSource, Pieces, copy_layer, store_layer, written
from toastkit.session.extents import Space, align
from toastkit.session.layout import Header, Layer, LogitsRecord, Part, SavepointRecord, TokenRecord
from toastkit.session.savepoints import ALWAYS_TRIMMABLE, Savepoint, can_trim
from toastkit.session.upkeep import CACHE_FILE, LOGITS_FILE, TOKENS_FILE

MAX_SLICES = 64
SLACK_BYTES = 1 << 20


def write_tokens(
    fd: int, old: TokenRecord, stored: Sequence[int], tokens: Sequence[int]
) -> TokenRecord:
    """Append what is new. stored: the history that `old` stands for. If the history is in too many
    slices, it is appended once more as one. Raises OSError."""
    data = pack_ids(tokens)
    kept = common_prefix(stored, tokens)
    slices = _cut_slices(old.slices, kept)
    if len(slices) >= MAX_SLICES:
        slices, kept = [], 0
    added = len(tokens) - kept
    if added:
        pwrite_all(fd, memoryview(data)[4 * kept :], 4 * old.end)
        if slices and sum(slices[-1]) == old.end:
            slices[-1] = (slices[-1][0], slices[-1][1] + added)
        else:
            slices.append((old.end, added))
    return TokenRecord(slices, old.end + added, zlib.crc32(data))


def _cut_slices(slices: list[tuple[int, int]], count: int) -> list[tuple[int, int]]:
    kept = []
    for first, length in slices:
        length = min(length, count)
        if length:
            kept.append((first, length))
        count -= length
    return kept


def write_logits(fd: int, old: LogitsRecord | None, logits: memoryview) -> LogitsRecord:
    """Write logits if they differ from the last commit's. logits: the bytes of float32 (vocab,).
    Raises OSError."""
    used = [] if old is None else [(old.offset, align(4 * old.count))]
    offset = Space(used).allocate(logits.nbytes)
    pwrite_all(fd, logits, offset)
    return LogitsRecord(offset, logits.nbytes // 4, zlib.crc32(logits))


def logits_bytes(logits: object) -> memoryview:
    """The bytes (uint8) of a contiguous float32 array of any shape and library. Raises ValueError
    for another."""
    view = memoryview(logits)  # type: ignore[arg-type]
    if view.format != "f" or not view.c_contiguous:
        raise ValueError("logits must be a contiguous float32 array")
    return view.cast("B")


class Ahead(NamedTuple):
    """What cache.bin holds that a commit may take over. tokens: ids that its rows belong to.
    layers: the growing parts of the layers. shared: leading tokens whose rows are the state's.
    space: what else of the file is in use."""

    tokens: list[int]
    layers: list[Layer]
    shared: int
    space: Space


def as_committed(fd: int, old: Header, stored: Sequence[int], shared: int, rows: int = 0) -> Ahead:
    """What the last commit has left to take over. stored: its tokens. rows: expected in the next
    one."""
    space = Space(old.runs(), partial(held_until, fd), rows)
    return Ahead(list(stored), old.layers or [], shared, space)


def write_ahead(fd: int, ahead: Ahead, tokens: list[int], sources: Sequence[LayerSource]) -> Ahead:
    """Write the growing parts of the caches of an unfinished state that has read these tokens.
    Raises OSError."""
    if len(tokens) <= _shared(ahead, tokens):
        return ahead  # cut back here, it would grow over rows that the last commit may own
    layers = written(write_layers(fd, ahead, [_growing(source) for source in sources], tokens))
    return Ahead(tokens, layers, len(tokens), ahead.space)


def copy_ahead(
    fd: int, ahead: Ahead, tokens: list[int], layers: Sequence[Layer], source: int
) -> Ahead:
    """Copy the growing parts of a state that has read these tokens from another file of caches,
    `source`, with these layers. Raises OSError."""
    copies = [copy_layer(fd, ahead.space, layer, source) for layer in layers]
    return Ahead(tokens, copies, len(tokens), ahead.space)


def _shared(ahead: Ahead, tokens: Sequence[int]) -> int:
    return min(ahead.shared, common_prefix(ahead.tokens, tokens))


def _growing(source: LayerSource) -> LayerSource:
    tensors = [tensor for tensor in source.tensors if tensor.axis is not None]
    return LayerSource(source.kind, source.settings, tensors, [_growing(x) for x in source.parts])


def write_layers(
    fd: int, ahead: Ahead, sources: Sequence[LayerSource], tokens: Sequence[int]
) -> Pieces[list[Layer]]:
    """Write the caches of a state that has read these tokens, except for what is there already.
    Raises OSError."""
    former, shared = ahead.layers, _shared(ahead, tokens)
    if len(former) != len(sources):
        former, shared = [], 0
    counts = (len(ahead.tokens), len(tokens))
    layers = []
    for i, source in enumerate(sources):
        old = former[i] if former else None
        layers.append((yield from store_layer(fd, ahead.space, source, old, shared, counts)))
    return layers


# ------------------------------------------------------------------------------------- savepoints

# Treatment of a layer in a savepoint: taken over, written, cut back from the end (None); the parts
# of a CacheList.
Plan = Layer | LayerSource | list["Plan"] | None


def in_order(
    savepoints: Sequence[Savepoint], sources: Sequence[LayerSource] | None, count: int
) -> list[Savepoint]:
    """Savepoints of LayerSources, ascending. Raises ValueError for positions and layers that a
    state of `count` tokens with these layers cannot have."""
    rising = sorted(savepoints, key=lambda point: point.count)
    reached = 0
    for point in rising:
        if not reached < point.count < count:
            raise ValueError(f"a savepoint at {point.count} of {count} tokens, after {reached}")
        if sources is None or not _alike(point.layers, sources):
            raise ValueError(f"the savepoint at {point.count} has other layers than the state")
        reached = point.count
    return rising


def _alike(given: Sequence[LayerSource | None], sources: Sequence[LayerSource]) -> bool:
    return len(given) == len(sources) and all(
        a is None or (a.kind == b.kind and _alike(a.parts, b.parts)) for a, b in zip(given, sources)
    )


def write_savepoints(
    fd: int, space: Space, old: Header, new: Header, points: Sequence[Savepoint], shared: int
) -> Pieces[list[SavepointRecord]]:
    """Write what the savepoints of a commit need besides new.layers. Those of `old` within its
    first `shared` tokens are taken over. A savepoint that cannot be resumed is left out: a window
    has begun to slide since, and there is no copy of it. Raises OSError."""
    ends = new.layers or []
    held = {point.count: point.layers for point in old.savepoints if point.count <= shared}
    records = []
    for n, layers in points:
        plans = _plan_all(layers, held.get(n), ends, new.count, n)
        if all(_leads_back(plan, end, new.count, n) for plan, end in zip(plans, ends)):
            records.append(SavepointRecord(n, (yield from _store_all(fd, space, plans, n))))
    return records


def _plan_all(
    given: Sequence[LayerSource | None] | None,
    held: list[Part] | None,
    ends: Sequence[Layer],
    count: int,
    n: int,
) -> list[Plan]:
    nothing = [None] * len(ends)
    if held is None or len(held) != len(ends):
        held = list(nothing)
    triples = zip(given or nothing, held, ends)
    return [_plan(source, part, end, count, n) for source, part, end in triples]


def _plan(given: LayerSource | None, held: Part, end: Layer, count: int, n: int) -> Plan:
    if end.kind == "CacheList":
        before = held if isinstance(held, list) else None
        parts = _plan_all(given.parts if given else None, before, end.parts, count, n)
        return parts if any(part is not None for part in parts) else None
    if isinstance(held, Layer) and held.same_class(end):
        return held
    always = end.kind in ALWAYS_TRIMMABLE and can_trim(end, count, n)
    return None if always else given


def _leads_back(plan: Plan, end: Layer, count: int, n: int) -> bool:
    if isinstance(plan, list):
        return all(_leads_back(item, part, count, n) for item, part in zip(plan, end.parts))
    return plan is not None or can_trim(end, count, n)


def _store_all(fd: int, space: Space, plans: Sequence[Plan], n: int) -> Pieces[list[Part]]:
    parts: list[Part] = []
    for plan in plans:
        if isinstance(plan, list):
            parts.append((yield from _store_all(fd, space, plan, n)))
        elif isinstance(plan, LayerSource):
            parts.append((yield from store_layer(fd, space, plan, None, 0, (0, n))))
        else:
            parts.append(plan)
    return parts


# ----------------------------------------------------------------------------------- the data files


class State(NamedTuple):
    """The state to commit. tokens: all ids that were read. sources: its layers, None to keep none.
    logits: the bytes of float32 (vocab,) after the last token, or None. savepoints: of
    LayerSources, as from in_order."""

    tokens: list[int]
    sources: Sequence[LayerSource] | None
    logits: memoryview | None
    savepoints: Sequence[Savepoint]


def write_data(
    files: DataFiles,
    old: Header,
    stored: Sequence[int],
    state: State,
    shared: int,
    ahead: Ahead | None = None,
) -> Pieces[Header]:
    """Write everything but the header, which is returned; nothing is synced. What is written must
    not change before the last piece is.

    old, stored: the last commit and its tokens. shared: leading tokens whose rows the state has as
    that commit left them. ahead: what was written since, for this one. Raises OSError.
    """
    new = Header(old.fingerprint, old.generation + 1, len(state.tokens))
    new.tokens = write_tokens(files.fd(TOKENS_FILE), old.tokens, stored, state.tokens)
    if state.logits is not None:
        new.logits = write_logits(files.fd(LOGITS_FILE), old.logits, state.logits)
    if state.sources is not None:
        shared = min(shared, common_prefix(stored, state.tokens))
        fd = files.fd(CACHE_FILE)
        ahead = ahead or as_committed(fd, old, stored, shared)
        new.layers = yield from write_layers(fd, ahead, state.sources, state.tokens)
        space, points = ahead.space, state.savepoints
        new.savepoints = yield from write_savepoints(fd, space, old, new, points, shared)
    return new


def end_of(header: Header) -> int:
    """Where what a commit owns of the file of its caches ends (bytes)."""
    return max((offset + size for offset, size in header.extents()), default=0)


def trim_file(fd: int, end: int, sooner: bool = False) -> None:
    """Truncate a file that is more than twice as long as its committed end (bytes). Not sooner,
    unless the disk is full: states alternating between two places would grow and shrink it with
    every commit. Not while another process reads there in place."""
    size = os.fstat(fd).st_size
    most = end if sooner else 2 * end + SLACK_BYTES
    if size > most and held_until(fd, end, size - end) is None:
        os.ftruncate(fd, end)
