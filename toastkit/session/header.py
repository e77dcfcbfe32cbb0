"""session.msgpack <-> Header: written atomically, read without trusting any of it.

The fields are described in layout.py. A header that passes here is self-consistent: every range is
aligned, has the length that dtype and shape imply, and overlaps no other; every layer has the
settings and arrays of its class; savepoints ascend and have the layers of the end. The sizes of the
data files are checked in reading.py.
"""

from __future__ import annotations

import math
import zlib
from typing import Any

import msgpack

from toastkit.session.extents import ALIGNMENT
from toastkit.session.layout import (
    ITEM_BYTES,
    KINDS,
    SCHEMA_VERSION,
    Damaged,
    Header,
    Kind,
    Layer,
    LogitsRecord,
    NewerSchema,
    Part,
    Range,
    SavepointRecord,
    Tensor,
    TokenRecord,
)

MAX_HEADER_BYTES = 256 << 20
MAX_PARTS_DEPTH = 4
NAMES: dict[type, str] = {dict: "map", list: "list", str: "string"}


def encode_header(header: Header) -> bytes:
    """The bytes of session.msgpack."""
    body = msgpack.packb(
        {
            "fingerprint": header.fingerprint,
            "generation": header.generation,
            "count": header.count,
            "tokens": _fields(header.tokens),
            "logits": _fields(header.logits) if header.logits else None,
            "layers": None if header.layers is None else [_layer_map(x) for x in header.layers],
            "checkpoints": [  # schema 1 calls savepoints this
                {"count": point.count, "layers": _part_value(point.layers)}
                for point in header.savepoints
            ],
            "seal": header.seal,
        }
    )
    # What schema 1 can express, those can read that know no other.
    packed = any(r.offset % ALIGNMENT for tensor in header.all_tensors() for r in tensor.ranges)
    schema = SCHEMA_VERSION if packed else 1
    envelope = {"toastkit": "session", "schema": schema, "crc": zlib.crc32(body)}
    return msgpack.packb({**envelope, "body": body})


def _fields(record: Any) -> dict[str, Any]:
    return {name: getattr(record, name) for name in record.__slots__}


def _layer_map(layer: Layer) -> dict[str, Any]:
    return {
        **_fields(layer),
        "tensors": [_fields(tensor) for tensor in layer.tensors],
        "parts": [_layer_map(part) for part in layer.parts],
    }


def _part_value(part: Part) -> Any:
    if isinstance(part, list):
        return [_part_value(item) for item in part]
    return None if part is None else _layer_map(part)


def decode_header(data: bytes) -> Header:
    """Decode a header. Raises Damaged for anything that a commit did not write, and NewerSchema for
    a later layout."""
    envelope = _is(_unpack(data), dict, "the header")
    _need(envelope.get("toastkit") == "session", "the header is not one of toastkit")
    schema = _count(envelope.get("schema"), "schema")
    if schema > SCHEMA_VERSION:
        raise NewerSchema(f"its schema {schema} is newer than {SCHEMA_VERSION}")
    body = envelope.get("body")
    if type(body) is not bytes:
        raise Damaged("the header has no body")
    _need(zlib.crc32(body) == envelope.get("crc"), "the header's checksum is wrong")
    fields = _is(_unpack(body), dict, "the header")
    layers = fields.get("layers")
    header = Header(
        _is(fields.get("fingerprint"), str, "fingerprint"),
        _count(fields.get("generation"), "generation"),
        _count(fields.get("count"), "count"),
        _token_record(_is(fields.get("tokens"), dict, "tokens")),
        _logits_record(fields.get("logits")),
        None if layers is None else [_layer(layer) for layer in _is(layers, list, "layers")],
    )
    total = sum(count for _, count in header.tokens.slices)
    _need(total == header.count, "the token count and the token slices differ")
    if (seal := fields.get("seal")) is not None:
        header.seal = _is(seal, str, "seal")
    header.savepoints = _savepoints(fields.get("checkpoints", []), header)
    _check_overlap(header.extents())
    return header


def _token_record(fields: dict) -> TokenRecord:
    end = _count(fields.get("end"), "tokens.end")
    slices: list[tuple[int, int]] = []
    reached = 0
    for item in _is(fields.get("slices"), list, "tokens.slices"):
        first, count = _counts(item, 2, "tokens.slices")
        _need(reached <= first and first + count <= end, "the token slices are out of order")
        slices.append((first, count))
        reached = first + count
    return TokenRecord(slices, end, _count(fields.get("crc"), "tokens.crc"))


def _logits_record(value: Any) -> LogitsRecord | None:
    if value is None:
        return None
    fields = _is(value, dict, "logits")
    record = LogitsRecord(*(_count(fields.get(k), f"logits.{k}") for k in LogitsRecord.__slots__))
    _need(record.offset % ALIGNMENT == 0, "the logits are not aligned")
    return record


def _layer(value: Any, depth: int = 0) -> Layer:
    fields = _is(value, dict, "a layer")
    name = _is(fields.get("kind"), str, "kind")
    kind = KINDS.get(name)
    if kind is None:
        raise Damaged(f"it holds a cache of unknown class {name[:40]!r}")
    _need(depth < MAX_PARTS_DEPTH, "caches are nested too deep")
    settings = {
        _is(key, str, "settings"): _count(number, "settings")
        for key, number in _is(fields.get("settings"), dict, "settings").items()
    }
    layer = Layer(
        name,
        settings,
        [_tensor(item) for item in _is(fields.get("tensors"), list, "tensors")],
        [_layer(item, depth + 1) for item in _is(fields.get("parts"), list, "parts")],
    )
    _check_layer(kind, layer)
    return layer


def _savepoints(value: Any, header: Header) -> list[SavepointRecord]:
    """Decode the savepoints; the rest of the header is valid."""
    found: list[SavepointRecord] = []
    reached = 0
    for item in _is(value, list, "checkpoints"):
        fields = _is(item, dict, "a savepoint")
        count = _count(fields.get("count"), "checkpoints.count")
        _need(reached < count < header.count, "the savepoints are out of order")
        if header.layers is None:
            raise Damaged("it holds savepoints but no caches")
        found.append(SavepointRecord(count, _parts(fields.get("layers"), header.layers)))
        reached = count
    return found


def _parts(value: Any, ends: list[Layer]) -> list[Part]:
    """Decode what a savepoint holds of each of these layers."""
    items = _is(value, list, "checkpoints.layers")
    _need(len(items) == len(ends), "a savepoint has another number of layers")
    return [_part(item, end) for item, end in zip(items, ends)]


def _part(value: Any, end: Layer) -> Part:
    if value is None:
        return None
    if end.kind == "CacheList":
        return _parts(value, end.parts)
    layer = _layer(value)
    _need(layer.kind == end.kind, f"a savepoint of a {end.kind} has the kind {layer.kind}")
    return layer


def _check_layer(kind: Kind, layer: Layer) -> None:
    """Check that settings and tensors are those of the class."""
    name = layer.kind
    names = tuple(tensor.name for tensor in layer.tensors)
    _need(set(layer.settings) == set(kind.settings), f"a {name} has other settings")
    _need(not layer.parts or name == "CacheList", f"a {name} has no parts")
    if name == "ArraysCache":
        size = layer.settings["size"]
        allowed = {*map(str, range(min(size, 1 << 16))), "left_padding", "lengths"}
        _need(set(names) <= allowed and len(set(names)) == len(names), f"a {name} has other arrays")
    elif name == "CacheList":
        _need(not names, f"a {name} has no arrays of its own")
    else:
        _need(names in ((), kind.tensors), f"a {name} has other arrays")
    _need(layer.settings.get("chunk_size", 1) > 0, f"a {name} has chunks without size")
    for tensor in layer.tensors:
        _need(tensor.axis == (2 if kind.grows else None), f"a {name} grows along another axis")
        if name != "ArraysCache":
            _need(len(tensor.shape) == 4, f"a {name} has arrays of another rank")
        if kind.grows:
            rows = layer.settings["offset"] - layer.start
            _need(tensor.rows == rows, f"a {name} has another number of rows")
    if name == "RotatingKVCache" and names:
        _need(
            layer.settings["idx"] <= layer.tensors[0].shape[2], f"a {name} points past its buffer"
        )


def _tensor(value: Any) -> Tensor:
    fields = _is(value, dict, "a tensor")
    dtype = _is(fields.get("dtype"), str, "dtype")
    _need(dtype in ITEM_BYTES, "it holds an array of unknown dtype")
    shape = tuple(_count(n, "shape") for n in _is(fields.get("shape"), list, "shape"))
    axis = fields.get("axis")
    _need(len(shape) <= 8 and math.prod(shape) < 2**53, "it holds an array of impossible shape")
    _need(axis is None or (type(axis) is int and 0 <= axis < len(shape)), "a wrong axis")
    tensor = Tensor(_is(fields.get("name"), str, "name"), dtype, shape, axis, [])
    whole, block = tensor.rows * tensor.row_bytes, tensor.block_bytes
    ranges = _is(fields.get("ranges"), list, "ranges")
    expected = -(-whole // block) if block else 0
    _need(len(ranges) == expected, "an array has another number of ranges")
    at = 0
    for item in ranges:
        offset, length, crc = _counts(item, 3, "ranges")
        if offset % ALIGNMENT not in (0, at % ALIGNMENT):
            raise Damaged("a range is not aligned")
        if length != min(block, whole - at):
            raise Damaged("a range has another length")
        tensor.ranges.append(Range(offset, length, crc))
        at += block
    return tensor


def _check_overlap(extents: list[tuple[int, int]]) -> None:
    end = 0
    for offset, size in sorted(extents):
        _need(offset >= end, "two ranges overlap")
        end = offset + size


def _unpack(data: bytes) -> Any:
    try:
        return msgpack.unpackb(data, strict_map_key=True)
    except Exception as error:  # msgpack raises ValueError, StackError, UnicodeDecodeError, ...
        raise Damaged("the header is not whole") from error


def _need(condition: bool, what: str) -> None:
    if not condition:
        raise Damaged(what)


def _is(value: Any, kind: type, what: str) -> Any:
    _need(type(value) is kind, f"{what} is not a {NAMES[kind]}")
    return value


def _count(value: Any, what: str) -> int:
    if type(value) is not int or not 0 <= value < 2**53:
        raise Damaged(f"{what} is not a count")
    return value


def _counts(value: Any, number: int, what: str) -> list[int]:
    if type(value) is not list or len(value) != number:
        raise Damaged(f"{what} is not a list of {number}")
    for n in value:
        if type(n) is not int or not 0 <= n < 2**53:
            raise Damaged(f"{what} is not a count")
    return value
