"""What a commit writes, and in which order.

Data first, into places that the last header does not own; sync; then the header, by write, sync and
rename; then the directory is synced. Until the rename the session is the last commit, after it the
new one. An ephemeral session skips the syncs: it need not outlive a power failure.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Sequence

from toastkit.frames import pack_ids
from toastkit.session.blocks import LayerSource, store_layer
from toastkit.session.extents import Space, align
from toastkit.session.files import pwrite_all
from toastkit.session.layout import Header, Layer, LogitsRecord, TokenRecord
from toastkit.session.upkeep import CACHE_FILE, LOGITS_FILE, TOKENS_FILE

MAX_SLICES = 64
SLACK_BYTES = 1 << 20


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Number of leading tokens that two lists share."""
    n = min(len(a), len(b))
    if a[:n] == b[:n]:
        return n
    return next(i for i in range(n) if a[i] != b[i])


def write_tokens(
    fd: int, old: TokenRecord, stored: Sequence[int], tokens: Sequence[int]
) -> TokenRecord:
    """Appends what is new. stored: the history that `old` stands for. When the history lies in too
    many slices, all of it is appended once as one. Raises OSError."""
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
    """Writes float32 logits where the last commit's are not. Raises OSError."""
    used = [] if old is None else [(old.offset, align(4 * old.count))]
    offset = Space(used).allocate(logits.nbytes)
    pwrite_all(fd, logits, offset)
    return LogitsRecord(offset, logits.nbytes // 4, zlib.crc32(logits))


def logits_bytes(logits: object) -> memoryview:
    """The bytes of a contiguous float32 array of any library. Raises ValueError for another."""
    view = memoryview(logits)  # type: ignore[arg-type]
    if view.format != "f" or not view.c_contiguous:
        raise ValueError("logits must be a contiguous float32 array")
    return view.cast("B")


def write_layers(
    fd: int,
    old: Header,
    sources: Sequence[LayerSource],
    shared: int,
    count: int,
) -> list[Layer]:
    """Writes the caches of a state that has read `count` tokens. shared: leading tokens whose rows
    are as `old` has them. Raises OSError."""
    space = Space(old.extents())
    former = old.layers or []
    if len(former) != len(sources):
        former, shared = [], 0
    counts = (old.count, count)
    return [
        store_layer(fd, space, source, former[i] if former else None, shared, counts)
        for i, source in enumerate(sources)
    ]


def trim_file(fd: int, end: int) -> None:
    """Gives back the tail of a file that has become more than twice as long as its committed end
    (bytes). Not sooner: states that take turns between two places would grow and shrink it with
    every commit."""
    if os.fstat(fd).st_size > 2 * end + SLACK_BYTES:
        os.ftruncate(fd, end)


def damage(header: Header, size_of: Callable[[str], int]) -> str | None:
    """What the header promises and the data files do not have, or None. size_of: a file's size in
    bytes by name, 0 if it is not there. Raises OSError."""
    logits_end = header.logits.offset + 4 * header.logits.count if header.logits else 0
    ends = {
        TOKENS_FILE: 4 * max((first + n for first, n in header.tokens.slices), default=0),
        LOGITS_FILE: logits_end,
        CACHE_FILE: max(
            (r.offset + r.length for t in header.all_tensors() for r in t.ranges), default=0
        ),
    }
    for name, end in ends.items():
        size = size_of(name)
        if size < end:
            return f"{name} has {size} bytes where its header says {end}"
    return None
