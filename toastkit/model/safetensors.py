"""Reads the header of a safetensors file: where every tensor lies, checked before anything is read.

    8 bytes   length of the header, little-endian
    header    JSON: {NAME: {"dtype", "shape", "data_offsets": [begin, end]}, "__metadata__": {}}
    data      offsets count from here

https://github.com/huggingface/safetensors, "Format". Imports neither MLX nor numpy.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from toastkit.errors import DataError, NoInputError, from_os_error, reported_as
from toastkit.private_files import pread_into
from toastkit.text.bounded_json import parse

ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2, "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip
LENGTH = struct.Struct("<Q")
# Limits for one file, and for all files of a checkpoint together. An MoE with 23,000 experts, each
# matrix stored in three parts, has 218,000 tensors and 25 MB of headers.
MAX_HEADER_BYTES = 64 << 20
MAX_TENSORS = 1 << 18
MAX_DIMENSIONS = 16
MAX_NAME_LENGTH = 1024
METADATA = "__metadata__"
CHUNK_BYTES = 4 << 20


class Entry(NamedTuple):
    """One tensor in a file. dtype: as safetensors names it. start, stop: bytes from the beginning
    of the file. inside: the tensor, U8 (rows, bytes), each row of which contains a row of this one;
    None if rows are contiguous."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int
    inside: Entry | None = None

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    @property
    def stride(self) -> int:
        """Bytes from one row to the next; 0 if rows are contiguous."""
        return 0 if self.inside is None else self.inside.shape[1]


class Header(NamedTuple):
    """entries: the tensors in file order. data_start, size: bytes."""

    path: Path
    entries: dict[str, Entry]
    metadata: dict[str, str]
    data_start: int
    size: int

    @property
    def stored(self) -> list[Entry]:
        """The tensors as a reader that ignores `inside` finds them, in file order."""
        return list(dict.fromkeys(entry.inside or entry for entry in self.entries.values()))


def read_header(path: Path, label: str) -> Header:
    """Read and check a file's header; the data is not touched.

    label: what messages call the checkpoint. Raises NoInputError if the file is missing, DataError
    if it is not a complete safetensors file: truncated, or offsets that overlap, leave it or do not
    fit dtype and shape.
    """
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            text, data_start = _read_text(file, size)
        fields = _parse(text)
        metadata = fields.pop(METADATA, None) or {}
        check_sizes(data_start, len(fields))
        if not isinstance(metadata, dict):
            raise ValueError("its metadata is not a map")
        entries = [_entry(name, value, data_start) for name, value in fields.items()]
        entries.sort(key=lambda entry: (entry.start, entry.stop))
        _check_places(entries, size)
    except FileNotFoundError as error:
        raise NoInputError(f"{label}: no such file: {path.name}") from error
    except OSError as error:
        raise from_os_error(error, f"cannot read {path}") from error
    except ValueError as error:
        raise DataError(f"{label}: cannot read {path.name}: {error}") from error
    texts = {key: value for key, value in metadata.items() if isinstance(value, str)}
    return Header(path, {entry.name: entry for entry in entries}, texts, data_start, size)


def chunks(path: Path, start: int, stop: int) -> Iterator[memoryview | None]:
    """Yield bytes start:stop of a file, CHUNK_BYTES at a time, each valid until the next; None, as
    the last, if the file ends before. Raises what from_os_error gives."""
    scratch = memoryview(bytearray(min(CHUNK_BYTES, stop - start)))
    with reported_as(f"cannot read {path}"), open(path, "rb", buffering=0) as file:
        for offset in range(start, stop, CHUNK_BYTES):
            part = scratch[: stop - offset]
            yield part if pread_into(file.fileno(), part, offset) else None


def check_sizes(header_bytes: int, tensors: int) -> None:
    """Raise ValueError for more than a checkpoint may have, in one file or in all."""
    if header_bytes > MAX_HEADER_BYTES:
        raise ValueError(f"{header_bytes} bytes of headers are more than {MAX_HEADER_BYTES}")
    if tensors > MAX_TENSORS:
        raise ValueError(f"{tensors} tensors are more than {MAX_TENSORS}")


def _read_text(file, size: int) -> tuple[bytes, int]:
    """Return the header's JSON and the offset of the data."""
    first = file.read(LENGTH.size)
    if len(first) < LENGTH.size:
        raise ValueError("not a safetensors file: too short")
    (length,) = LENGTH.unpack(first)
    if length + LENGTH.size > MAX_HEADER_BYTES:
        raise ValueError(f"not a safetensors file: its header claims {length} bytes")
    if LENGTH.size + length > size:
        raise ValueError(f"truncated: its header claims {length} bytes of {size}")
    return file.read(length), LENGTH.size + length


def _parse(text: bytes) -> dict:
    def unique(pairs: list[tuple[str, object]]) -> dict:
        made = dict(pairs)
        if len(made) < len(pairs):
            raise ValueError("a name occurs twice in it")
        return made

    try:
        fields = parse(text, object_pairs_hook=unique)
    except ValueError as error:
        raise ValueError(f"its header is not usable: {error}") from None
    if not isinstance(fields, dict):
        raise ValueError("its header is not a map")
    return fields


def _entry(name: str, value: object, data_start: int) -> Entry:
    shown = name[:100]
    if len(name) > MAX_NAME_LENGTH:
        raise ValueError(f"the name of tensor {shown!r} has {len(name)} characters")
    if not isinstance(value, dict):
        raise ValueError(f"tensor {shown!r} is not described by a map")
    dtype = value.get("dtype")
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise ValueError(f"tensor {shown!r} has dtype {str(dtype)[:20]!r}, which is not known")
    shape = counts(value.get("shape"), MAX_DIMENSIONS)
    offsets = counts(value.get("data_offsets"), 2)
    if shape is None or offsets is None or len(offsets) != 2:
        raise ValueError(f"tensor {shown!r} has no usable shape and offsets")
    begin, end = offsets
    if end - begin != math.prod(shape) * ITEM_BYTES[dtype]:
        raise ValueError(f"tensor {shown!r} has offsets that do not fit its shape and dtype")
    return Entry(name, dtype, tuple(shape), data_start + begin, data_start + end)


def counts(value: object, most: int) -> list[int] | None:
    """Return a list of at most `most` integers >= 0, or None for anything else."""
    if not isinstance(value, list) or len(value) > most:
        return None
    return value if all(type(n) is int and 0 <= n < 2**63 for n in value) else None


def _check_places(entries: list[Entry], size: int) -> None:
    """Check for truncation and overlaps. entries: sorted by offset."""
    end, last = 0, ""
    for entry in entries:
        if entry.stop > size:
            raise ValueError(
                f"truncated: tensor {entry.name[:100]!r} ends at byte {entry.stop} of {size}"
            )
        if entry.start < end and entry.nbytes:
            raise ValueError(f"tensors {last[:100]!r} and {entry.name[:100]!r} overlap")
        if entry.stop > end:
            end, last = entry.stop, entry.name
