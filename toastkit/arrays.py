"""Arrays inside frames: msgpack ext values, type 1 with the bytes, type 2 by reference.

Imports neither MLX nor numpy: a dtype is a name and a payload is bytes until a stage needs more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgpack

EXT_INLINE = 1
EXT_REFERENCE = 2
ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "uint32": 4, "int32": 4, "uint8": 1}


# A packer allocates a megabyte, so it is made once. Packing these values runs no other Python.
_pack = msgpack.Packer().pack


class Invalid(ValueError):
    """A value that a frame cannot have. The frame reader turns it into a FrameError with an
    offset."""


class Record:
    """Base of frames and their arrays: equality and repr by fields. dataclass would compile these
    for each kind, in each process: 3 ms of start-up."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and _values(self) == _values(other)

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={value!r}" for name, value in _values(self).items())
        return f"{type(self).__name__}({fields})"


def _values(record: Any) -> dict[str, Any]:
    return {name: getattr(record, name) for name in record.__slots__}


@dataclass(slots=True, eq=False, repr=False)
class Array(Record):
    """An inline array. dtype: a key of ITEM_BYTES. shape: sizes. data: little-endian, C order."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes | memoryview


@dataclass(slots=True, eq=False, repr=False)
class Reference(Record):
    """An array in the run's logits ring. slot: index. seq: the number the slot must still carry."""

    slot: int
    seq: int
    dtype: str
    shape: tuple[int, ...]


def pack_extension(value: Any) -> Any:
    """Return the msgpack ext value of an array; TypeError for what a frame cannot hold."""
    if type(value) is Reference:
        payload = _pack((value.slot, value.seq, value.dtype, value.shape))
        return msgpack.ExtType(EXT_REFERENCE, payload)
    if type(value) is Array:
        payload = _pack((value.dtype, value.shape)) + bytes(value.data)
        return msgpack.ExtType(EXT_INLINE, payload)
    raise TypeError(f"cannot put a {type(value).__name__} into a frame")


def unpack_extension(code: int, payload: bytes) -> Any:
    """Turn ext types 1 and 2 into arrays; other types are kept, to be passed on."""
    if code == EXT_REFERENCE:
        return _reference(payload)
    if code != EXT_INLINE:
        return msgpack.ExtType(code, payload)
    unpacker = msgpack.Unpacker(None, max_buffer_size=max(len(payload), 1), use_list=False)
    unpacker.feed(payload)
    try:
        head = unpacker.unpack()
    except Exception as error:
        raise Invalid("a broken array") from error
    if not (type(head) is tuple and len(head) == 2):
        raise Invalid("a broken array")
    dtype, shape = head
    start = unpacker.tell()
    if len(payload) - start != _array_bytes(dtype, shape):
        raise Invalid(f"an array of {dtype}{list(shape)} with {len(payload) - start} bytes")
    return Array(dtype, shape, memoryview(payload)[start:])


def _reference(payload: bytes) -> Reference:
    """Unpack a reference, one per step: with unpackb, because making an Unpacker takes longer than
    all the rest."""
    try:
        head = msgpack.unpackb(payload, use_list=False)
    except Exception as error:
        raise Invalid("a broken array reference") from error
    if not (type(head) is tuple and len(head) == 4):
        raise Invalid("a broken array reference")
    slot, seq, dtype, shape = head
    if not (type(slot) is int and type(seq) is int and 0 <= slot < 2**16 and seq >= 0):
        raise Invalid("a broken array reference")
    _array_bytes(dtype, shape)
    return Reference(slot, seq, dtype, shape)


def _array_bytes(dtype: Any, shape: Any) -> int:
    """Return the bytes of an array; raises Invalid for an unknown dtype or an impossible shape."""
    if type(dtype) is not str or dtype not in ITEM_BYTES:
        raise Invalid("an array of an unknown dtype")
    if type(shape) is not tuple or len(shape) > 8:
        raise Invalid("an array of an impossible shape")
    size = ITEM_BYTES[dtype]
    for n in shape:
        if type(n) is not int or not 0 <= n < 2**40:
            raise Invalid("an array of an impossible shape")
        size *= n
    return size
