"""The `.toast` file of toast-file(5): a whole model in one safetensors file.

Tensors have the names of the model's parameters: mlx_lm's `sanitize` has been applied to the
published checkpoint, and quantised modules are stored as weight, scales, biases. There are no
holes, so any safetensors reader can open it.

A layer's experts may be stored expert-major: one tensor of bytes, (experts, bytes of an expert), in
place of the parameters that are stacked by expert, whose names are in the header's metadata.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from toastkit.model.safetensors import (
    ITEM_BYTES,
    MAX_DIMENSIONS,
    MAX_NAME_LENGTH,
    Entry,
    Header,
    counts,
)
from toastkit.text.bounded_json import parse

VERSION, EXPERT_MAJOR_VERSION = "1", "2"  # of a file with expert-major experts
VERSION_KEY, LAYERS_KEY, CHECKSUMS_KEY = "toastkit", "layers", "checksums"
EXPERTS_KEY = "experts"
SUFFIX = ".toast"
PAGE = 16384  # bytes; Apple silicon's, and a multiple of other machines' 4096
ITEM_ALIGNMENT = 64  # bytes; a cache line, so that vectors can be loaded from a mapped file
FILE_PREFIX, PAD_PREFIX, GEAR_PREFIX = "__file__.", "__pad__.", "__gear__."
EXPERTS_PREFIX = "__experts__."
FILES_GROUP, OUTSIDE_GROUP, LAYER_GROUP = "files", "outside", "layer.{}"
# The split layout: the same tensors, in one file per layer and one for the rest.
OUTSIDE_FILE, LAYER_FILE = "non_layer.safetensors", "layer_{:04}.safetensors"
DIGEST_BYTES = 8


def is_model_tensor(name: str) -> bool:
    """True if a tensor is a parameter of the model, not a file, padding or a gear."""
    return not name.startswith((FILE_PREFIX, PAD_PREFIX, GEAR_PREFIX, EXPERTS_PREFIX))


def layer_count(metadata: Mapping[str, str]) -> int:
    """Return the number of layers in a header, 0 if it has none."""
    layers = metadata.get(LAYERS_KEY, "")
    return int(layers) if layers.isdecimal() and len(layers) < 6 else 0


def new_digest(data: bytes = b"") -> hashlib.blake2b:
    """Return the hash of a tensor's bytes, or of its first ones, to be updated with the rest."""
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES)


# ---------------------------------------------------------------------------- expert after expert


class Part(NamedTuple):
    """One expert's share of a parameter. name: below the module that holds the experts. dtype: as
    safetensors names it. shape: of one expert's row, such as (rows, columns)."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


def offsets_of(parts: Iterable[Part]) -> list[int]:
    """Return the offset of each part in an expert's bytes, a multiple of ITEM_ALIGNMENT, and last
    that of the next expert."""
    offsets = [0]
    for part in parts:
        offsets.append(-(-(offsets[-1] + part.nbytes) // ITEM_ALIGNMENT) * ITEM_ALIGNMENT)
    return offsets


def describe_experts(parts: Mapping[str, Iterable[Part]]) -> str:
    """Return the text of EXPERTS_KEY for parts, by the name of the tensor that holds them."""
    return json.dumps({name: list(of) for name, of in parts.items()}, separators=(",", ":"))


def with_experts(header: Header) -> Header:
    """Return a header with parameters in place of the expert-major tensors that hold them. Raises
    ValueError if these do not match the metadata."""
    if header.metadata.get(VERSION_KEY) != EXPERT_MAJOR_VERSION:
        return header
    described = _parsed(header.metadata.get(EXPERTS_KEY, "{}"))
    for name in described:
        if name not in header.entries:
            raise ValueError(f"tensor {name[:100]!r} is described and not there")
    entries: dict[str, Entry] = {}
    for entry in header.entries.values():
        if not entry.name.startswith(EXPERTS_PREFIX) and entry.name not in described:
            entries[entry.name] = entry
            continue
        for part in _parts_inside(entry, described.get(entry.name)):
            if part.name in entries or part.name in header.entries:
                raise ValueError(f"tensor {part.name[:100]!r} is there twice")
            entries[part.name] = part
    return header._replace(entries=entries)


def _parsed(text: str) -> dict[str, object]:
    try:
        described = parse(text.encode())
    except ValueError as error:
        raise ValueError(f"its description of experts is not usable: {error}") from None
    if not isinstance(described, dict):
        raise ValueError("its description of experts is not a map")
    return described


def _parts_inside(entry: Entry, described: object) -> Iterator[Entry]:
    """Yield the parameters in a tensor, (experts, ...) each."""
    shown = entry.name[:100]
    parts = [_part(value) for value in described] if isinstance(described, list) else []
    if not parts or None in parts:
        raise ValueError(f"tensor {shown!r} has no usable description")
    known = [part for part in parts if part is not None]
    *offsets, row = offsets_of(known)
    if not entry.name.startswith(EXPERTS_PREFIX):
        raise ValueError(f"tensor {shown!r} is described, and holds no experts")
    if entry.dtype != "U8" or len(entry.shape) != 2 or entry.shape[1] != row or not entry.shape[0]:
        raise ValueError(f"tensor {shown!r} is not what its description says")
    experts = entry.shape[0]
    for part, offset in zip(known, offsets):
        name = f"{entry.name[len(EXPERTS_PREFIX) :]}.{part.name}"
        if len(name) > MAX_NAME_LENGTH:
            raise ValueError(f"the name of tensor {name[:100]!r} has {len(name)} characters")
        if name.startswith((FILE_PREFIX, PAD_PREFIX, EXPERTS_PREFIX)):
            raise ValueError(f"tensor {name[:100]!r} cannot lie expert by expert")
        start = entry.start + offset
        stop = start + (experts - 1) * row + part.nbytes
        yield Entry(name, part.dtype, (experts, *part.shape), start, stop, entry)


def _part(value: object) -> Part | None:
    """Parse [name, dtype, shape]; None for anything else, and for a part of no bytes."""
    if not isinstance(value, list) or len(value) != 3:
        return None
    name, dtype, shape = value
    sides = counts(shape, MAX_DIMENSIONS - 1)
    # Nothing here computes with F64 and C64.
    known = isinstance(dtype, str) and dtype in ITEM_BYTES and dtype not in ("F64", "C64")
    if not isinstance(name, str) or not known or sides is None or not all(sides):
        return None
    return Part(name, dtype, tuple(sides))
