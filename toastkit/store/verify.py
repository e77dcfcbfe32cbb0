"""Check a checkpoint against the checksums that toastkit wrote into it, and its weights for NaN.

Files are read sequentially in large chunks. Imports neither MLX nor, without `values`, numpy.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from toastkit.errors import DataError, ToastError
from toastkit.model.files import INDEX_FILE, ModelFiles
from toastkit.model.safetensors import Entry, Header, chunks, read_header
from toastkit.model.toast_format import (
    CHECKSUMS_KEY,
    FILE_PREFIX,
    FILES_GROUP,
    LAYER_GROUP,
    OUTSIDE_GROUP,
    PAD_PREFIX,
    VERSION_KEY,
    layer_count,
    new_digest,
)
from toastkit.store.writer import LAYOUT_KEY, Progress, layout_digest
from toastkit.text.bounded_json import parse

# dtype -> (numpy's type of its bits, bits that are all set if not finite, bits of which some are
# set in NaN). float8: https://arxiv.org/abs/2209.05433, E8M0: OCP MX 1.0.
NOT_FINITE = {
    "F16": ("<u2", 0x7C00, 0x03FF),
    "BF16": ("<u2", 0x7F80, 0x007F),
    "F32": ("<u4", 0x7F800000, 0x007FFFFF),
    "F64": ("<u8", 0x7FF0000000000000, 0x000FFFFFFFFFFFFF),
    "F8_E5M2": ("<u1", 0x7C, 0x03),
    "F8_E4M3": ("<u1", 0x7F, 0x7F),
    "F8_E8M0": ("<u1", 0xFF, 0xFF),
}


@dataclass(frozen=True)
class Problem:
    """file: its name. tensor: its name, None for the file as a whole. reason: a phrase without the
    names."""

    file: str
    tensor: str | None
    reason: str

    def __str__(self) -> str:
        where = f"{self.file}: {self.tensor}" if self.tensor else self.file
        return f"{where}: {self.reason}"


def has_checksums(files: ModelFiles) -> bool:
    """True if toastkit wrote the checkpoint, with checksums. Of others `verify` checks only that
    files are complete. Raises as ModelFiles.headers does."""
    return any(map(_is_ours, files.headers))


def verify(
    files: ModelFiles, *, values: bool = False, progress: Progress | None = None
) -> Iterator[Problem]:
    """Yield the problems of a checkpoint's weight files as they are found.

    values: look for NaN and infinite weights too. progress(done, total): bytes read.
    Raises NoInputError, DataError, IOFailure if files are missing or unreadable.
    """
    headers, paths = [], files.weight_files()
    for path in paths:
        try:
            headers.append(read_header(path, files.name))
        except DataError as error:
            reason = error.message.partition(f"cannot read {path.name}: ")[2]
            yield Problem(path.name, None, reason or error.message)
    if len(headers) == len(paths):
        headers = files.headers  # raises for what no single file shows: a missing layer
        yield from _check_index(files, headers)
    total = sum(entry.nbytes for header in headers for entry in header.stored)
    done = 0
    found: set[str] = set()
    for header in headers:
        expected: dict[str, str] = {}
        if _is_ours(header):
            groups = _checksums(header)
            found |= set(groups)
            expected = {name: value for group in groups.values() for name, value in group.items()}
            yield from _check_header(header, expected)
            yield from _check_small_files(files, header, groups.get(FILES_GROUP, {}))
        parts: dict[Entry, list[Entry]] = {}
        for entry in header.entries.values():
            parts.setdefault(entry.inside or entry, []).append(entry)
        for entry, own in parts.items():
            yield from _check_tensor(header, entry, expected, own if values else [])
            done += entry.nbytes
            if progress is not None:
                progress(done, total)
    if found:
        yield from _missing_groups(headers[0], found)


def _check_index(files: ModelFiles, headers: list[Header]) -> Iterator[Problem]:
    """Tensors that the index of shards names in files without them."""
    stored = {header.path.name: header.entries for header in headers}
    for name, file in files.weight_map().items():
        if name not in stored[file]:
            yield Problem(file, name, f"is not there, though {INDEX_FILE} says so")


def _is_ours(header: Header) -> bool:
    """True if toastkit wrote a file; any one of the keys is enough, as the others may be
    damaged."""
    return any(key in header.metadata for key in (VERSION_KEY, LAYOUT_KEY, CHECKSUMS_KEY))


def _checksums(header: Header) -> dict[str, dict[str, str]]:
    """The checksums in a header, {} if they cannot be read."""
    with suppress(ValueError):
        groups = parse(header.metadata.get(CHECKSUMS_KEY, "").encode())
        if isinstance(groups, dict) and all(isinstance(g, dict) for g in groups.values()):
            return groups
    return {}


def _check_header(header: Header, expected: dict[str, str]) -> Iterator[Problem]:
    """Check that the header is unchanged and lists the tensors that have checksums."""
    file = header.path.name
    digest = layout_digest(header.stored, header.data_start, header.metadata)
    if header.metadata.get(LAYOUT_KEY) != digest:
        yield Problem(file, None, "its header is not as it was written")
    if header.size > max((entry.stop for entry in header.stored), default=header.data_start):
        yield Problem(file, None, "goes on after the last tensor")
    names = {entry.name: None for entry in header.stored}
    for name in names:
        if name not in expected and not name.startswith(PAD_PREFIX):
            yield Problem(file, name, "has no checksum")
    for name in expected:
        if name not in names and not name.startswith(FILE_PREFIX):
            yield Problem(file, name, "is missing")


def _check_small_files(
    files: ModelFiles, header: Header, expected: dict[str, str]
) -> Iterator[Problem]:
    """Check the small files beside the weights of a split checkpoint."""
    for name, digest in expected.items():
        if name in header.entries:
            continue
        small = name[len(FILE_PREFIX) :]
        if "\0" in small or not {"", ".", ".."}.isdisjoint(small.split("/")):
            yield Problem(header.path.name, name, "is not the name of a file")
            continue
        try:
            data = files.read(small)
        except ToastError as error:
            yield Problem(small, None, f"cannot be read: {error.message}")
            continue
        if data is None:
            yield Problem(small, None, "is missing")
            continue
        if new_digest(data).hexdigest() != digest:
            yield Problem(small, None, "is not as it was written")


def _check_tensor(
    header: Header, entry: Entry, expected: dict[str, str], parts: list[Entry]
) -> Iterator[Problem]:
    """Read one stored tensor and compare. parts: itself, or the tensors interleaved in it, whose
    values are checked. Raises what from_os_error gives."""
    name, padding = entry.name, entry.name.startswith(PAD_PREFIX)
    digest = new_digest() if name in expected else None
    scans = [_Scan(part) for part in parts if part.dtype in NOT_FINITE]
    if digest is None and not scans and not (padding and expected):
        return
    clean, place = True, entry.start
    for chunk in chunks(header.path, entry.start, entry.stop):
        if chunk is None:
            yield Problem(header.path.name, name, "is cut off")
            return
        if digest is not None:
            digest.update(chunk)
        for scan in scans:
            scan.look(chunk, place)
        if padding:
            clean = clean and not any(chunk)
        place += len(chunk)
    if not clean or (digest is not None and digest.hexdigest() != expected[name]):
        yield Problem(header.path.name, name, "is not as it was written")
    for scan in scans:
        if scan.count:
            yield Problem(header.path.name, scan.name, scan.report())


class _Scan:
    """Count the non-finite values in a tensor's bytes. name: of the tensor."""

    def __init__(self, entry: Entry):
        self.name = entry.name
        self._kind, self._exponent, self._fraction = NOT_FINITE[entry.dtype]
        self._start, self._stop = entry.start, entry.stop
        self._row = self._stride = entry.nbytes
        if entry.inside is not None:
            self._row, self._stride = entry.nbytes // entry.shape[0], entry.stride
        self._seen = 0
        self._first = -1
        self._nan = 0
        self.count = 0

    def look(self, chunk: memoryview, place: int) -> None:
        """Scan the tensor's part of a chunk that begins at byte `place` of the file."""
        end = min(place + len(chunk), self._stop)
        row = self._start + max(0, place - self._start) // self._stride * self._stride
        while row < end:
            first, stop = max(row, place), min(row + self._row, end)
            if first < stop:
                self._update(chunk[first - place : stop - place])
            row += self._stride

    def _update(self, chunk: memoryview) -> None:
        import numpy as np

        bits: Any = np.frombuffer(chunk, self._kind)
        odd = (bits & self._exponent) == self._exponent
        count = int(np.count_nonzero(odd))
        if count:
            if self._first < 0:
                self._first = self._seen + int(odd.argmax())
            self.count += count
            self._nan += int(np.count_nonzero(bits[odd] & self._fraction))
        self._seen += len(bits)

    def report(self) -> str:
        """Such as `2 NaN and 0 infinite values, the first at 17`."""
        infinite = self.count - self._nan
        return f"{self._nan} NaN and {infinite} infinite values, the first at {self._first}"


def _missing_groups(header: Header, found: set[str]) -> Iterator[Problem]:
    """Report layers that no file has checksums of."""
    layers = range(layer_count(header.metadata))
    for group in [OUTSIDE_GROUP, *map(LAYER_GROUP.format, layers)]:
        if group not in found:
            yield Problem(header.path.name, None, f"has no checksums of {group}")
