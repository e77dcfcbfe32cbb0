"""Write a safetensors file tensor by tensor, holding no more than the data passed in.

The contents are known before the first byte is written, and so is every tensor's place; checksums
have a fixed length, so the header's length is known too, and the header is written last. Imports
neither MLX nor numpy.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from toastkit.errors import DataError
from toastkit.model.safetensors import ITEM_BYTES, LENGTH, MAX_HEADER_BYTES, METADATA, Entry, chunks
from toastkit.model.toast_format import (
    CHECKSUMS_KEY,
    DIGEST_BYTES,
    FILES_GROUP,
    ITEM_ALIGNMENT,
    OUTSIDE_GROUP,
    PAD_PREFIX,
    PAGE,
    Part,
    new_digest,
)
from toastkit.private_files import pwrite_all
from toastkit.store.direct import LARGE_PAGE
from toastkit.store.partial import Partial

BLOCK_BYTES = LARGE_PAGE
# Metadata: hex digest of everything else in the header, to detect changes there too.
LAYOUT_KEY = "layout"

Checksums = dict[str, dict[str, str]]  # group -> tensor -> hex
Progress = Callable[[int, int], None]  # bytes done, bytes in all


@dataclass(frozen=True)
class Planned:
    """A tensor to be written. dtype: in safetensors' terms. group: of its checksum. parts: what its
    rows consist of, if it holds experts one after another."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    group: str
    parts: tuple[Part, ...] = ()

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


class TensorWriter:
    """A safetensors file on its way to `path`, which appears only on `finish`. A context manager:
    leaving it earlier leaves no file.

    plan: every tensor, in order. metadata: strings for the header. checksums: of what is not in
    this file, to be listed with its own. overwrite: replace what is at `path`. progress(done,
    total), in bytes of tensors.
    Raises DataError for a plan too long for a header, BusyError, CannotCreateError, IOFailure.
    """

    def __init__(
        self,
        path: Path,
        plan: Sequence[Planned],
        metadata: Mapping[str, str],
        *,
        checksums: Checksums | None = None,
        overwrite: bool = True,
        progress: Progress | None = None,
    ):
        self.path = path
        self._plan = list(plan)
        self._metadata = dict(metadata)
        self._checksums = {group: dict(names) for group, names in (checksums or {}).items()}
        for item in self._plan:
            self._checksums.setdefault(item.group, {})[item.name] = "0" * (2 * DIGEST_BYTES)
        self._entries = lay_out(self._plan)
        self._places = {entry.name: entry for entry in self._entries}
        self._data_start = LENGTH.size + len(self._header())
        self._progress = progress
        self._done, self._total = 0, sum(item.nbytes for item in self._plan)
        self._next, self._written, self._digest = 0, 0, new_digest()
        self._partial = Partial(path, overwrite=overwrite)
        self._blocks = _Blocks(self._partial.fd)
        try:
            last = self._entries[-1].stop if self._entries else 0
            self._partial.check_room(self._data_start + last)
            self._skip_empty()
        except BaseException:
            self._partial.discard()
            raise

    def write(self, name: str, data: bytes | memoryview) -> None:
        """Write the next bytes of the current tensor. Raises ValueError for another tensor or too
        many bytes, which is a bug, and as Partial.reported does."""
        item = self._plan[self._next] if self._next < len(self._plan) else None
        view = memoryview(data).cast("B")
        if item is None or item.name != name:
            raise ValueError(f"tensor {name} is written out of turn")
        if self._written + view.nbytes > item.nbytes:
            raise ValueError(f"tensor {name} has more than its {item.nbytes} bytes")
        with self._partial.reported():
            self._blocks.write(view, self._data_start + self._places[name].start + self._written)
        self._digest.update(view)
        self._written += view.nbytes
        self._done += view.nbytes
        if self._written == item.nbytes:
            self._complete(item)
            self._skip_empty()
        if self._progress is not None:
            self._progress(self._done, self._total)

    def _complete(self, item: Planned) -> None:
        self._checksums[item.group][item.name] = self._digest.hexdigest()
        self._next, self._written, self._digest = self._next + 1, 0, new_digest()

    def _skip_empty(self) -> None:
        while self._next < len(self._plan) and not self._plan[self._next].nbytes:
            self._complete(self._plan[self._next])

    def copy(self, name: str, source: Path, start: int, stop: int) -> None:
        """Write a whole tensor from bytes start:stop of another file, in chunks.
        Raises DataError if that file ends before, what from_os_error gives."""
        for part in chunks(source, start, stop):
            if part is None:
                raise DataError(f"cannot read {source}: truncated while it was read")
            self.write(name, part)

    def finish(self) -> None:
        """Write the header, and give the file its name. Raises ValueError if tensors are missing,
        which is a bug, and as Partial.reported does."""
        if self._next < len(self._plan):
            raise ValueError(f"tensor {self._plan[self._next].name} is missing")
        header = self._header()
        with self._partial.reported():
            self._blocks.flush()
            pwrite_all(self._partial.fd, LENGTH.pack(len(header)) + header, 0)
        self._partial.publish()
        self._partial.discard()

    def _header(self) -> bytes:
        """The header's JSON, padded with spaces so that the data begins at a multiple of PAGE."""
        metadata = {**self._metadata, CHECKSUMS_KEY: _compact(self._checksums)}
        metadata[LAYOUT_KEY] = layout_digest(self._entries, 0, metadata)
        fields: dict[str, object] = {METADATA: metadata}
        for entry in self._entries:
            fields[entry.name] = {
                "dtype": entry.dtype,
                "shape": entry.shape,
                "data_offsets": (entry.start, entry.stop),
            }
        text = _compact(fields).encode()
        length = -(-(LENGTH.size + len(text)) // PAGE) * PAGE - LENGTH.size
        if length > MAX_HEADER_BYTES:
            raise DataError(f"cannot write {self.path}: too many tensors for one file's header")
        return text.ljust(length)

    def __enter__(self) -> TensorWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._partial.discard()


class _Blocks:
    """Writes a file from its start on, in whole blocks of BLOCK_BYTES: what is written so, Linux
    caches in pages of that size, which are mapped at once (docs/decisions.md, Start-up)."""

    def __init__(self, fd: int):
        self._fd = fd
        self._start = 0  # of the block, in the file
        self._block = bytearray()

    def write(self, data: memoryview, offset: int) -> None:
        """Write bytes at an offset, behind all others; what lies between is zeros. Raises
        OSError."""
        self._append(memoryview(bytes(offset - self._start - len(self._block))))
        self._append(data)

    def _append(self, data: memoryview) -> None:
        while data.nbytes:
            if self._block or data.nbytes < BLOCK_BYTES:
                count = min(BLOCK_BYTES - len(self._block), data.nbytes)
                self._block += data[:count]
                if len(self._block) == BLOCK_BYTES:
                    self.flush()
            else:  # not through the block
                count = data.nbytes // BLOCK_BYTES * BLOCK_BYTES
                pwrite_all(self._fd, data[:count], self._start)
                self._start += count
            data = data[count:]

    def flush(self) -> None:
        """Write what is left of the last block. Raises OSError."""
        pwrite_all(self._fd, memoryview(self._block), self._start)
        self._start += len(self._block)
        self._block.clear()


def lay_out(plan: Iterable[Planned]) -> list[Entry]:
    """Place each tensor, each layer aligned to PAGE, with padding tensors in all gaps. Offsets
    count from the start of the data.
    Raises ValueError for a duplicate name, which is a bug."""
    entries: list[Entry] = []
    names: set[str] = set()
    end = pads = 0
    group, aligned = FILES_GROUP, False
    for item in plan:
        if item.name in names:
            raise ValueError(f"tensor {item.name} is planned twice")
        names.add(item.name)
        if item.group != group:
            group, aligned = item.group, item.group != OUTSIDE_GROUP
        gap = -end % (PAGE if aligned else ITEM_ALIGNMENT) if item.nbytes else 0
        aligned = aligned and not item.nbytes  # an empty tensor passes it on to the next
        if gap:
            entries.append(Entry(f"{PAD_PREFIX}{pads}", "U8", (gap,), end, end + gap))
            pads, end = pads + 1, end + gap
        entries.append(Entry(item.name, item.dtype, item.shape, end, end + item.nbytes))
        end += item.nbytes
    return entries


def layout_digest(entries: Iterable[Entry], data_start: int, metadata: Mapping[str, str]) -> str:
    """Hex digest of what a header says: all tensors and their places, counted from data_start, and
    the metadata except LAYOUT_KEY itself."""
    places = [
        [entry.name, entry.dtype, entry.shape, entry.start - data_start, entry.stop - data_start]
        for entry in entries
    ]
    texts = {key: value for key, value in metadata.items() if key != LAYOUT_KEY}
    return new_digest(_compact([places, sorted(texts.items())]).encode()).hexdigest()


def _compact(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))
