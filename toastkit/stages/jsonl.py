"""Frames as JSON lines and back, as in toast-frames(5): for awk, jq and people.

A line is bounded before parsing: in bytes, and in values by its commas and brackets, of which those
in strings only add to the count.
"""

from __future__ import annotations

import base64
import io
import json
import math
from collections.abc import Iterator
from typing import Any

import msgpack

from toastkit.errors import DataError, FrameError
from toastkit.frames import (
    MAX_VOCAB,
    Array,
    Frame,
    FrameReader,
    Invalid,
    Logits,
    Prefilled,
    Reference,
    Tokens,
    dumps,
    from_map,
    pack_ids,
    to_map,
    unpack_ids,
)

MAX_LINE_BYTES = 32 << 20
MAX_LINE_VALUES = 1 << 21


def to_json(frame: Frame, arrays: str, top: int, read: Any) -> str:
    """One line, without the newline.

    arrays: "topk", "base64" or "none". top: entries of a top-k list. read(value): the numpy array
    of an Array or Reference, as LogitsReader.read.
    """
    fields = _shown(to_map(frame))
    if isinstance(frame, Tokens):
        fields["ids"] = unpack_ids(frame.ids)
    elif isinstance(frame, (Logits, Prefilled)) and fields.get("logits") is not None:
        if arrays == "none":
            del fields["logits"]
        elif arrays == "topk":
            fields["logits"] = _top(read(frame.logits), top)
        elif isinstance(frame.logits, Reference):
            from toastkit.stages.arrays import from_numpy

            fields["logits"] = _plain(from_numpy(read(frame.logits)))
    return json.dumps(fields, ensure_ascii=False, allow_nan=False, default=_plain)


def from_json(line: str | bytes) -> Frame:
    """The frame of one line. Raises DataError with a one-line message."""
    line = line.encode("utf-8", "surrogatepass") if isinstance(line, str) else line
    if sum(map(line.count, (b",", b"[", b"{"))) > MAX_LINE_VALUES:
        raise DataError(f"more than {MAX_LINE_VALUES} values")
    try:
        fields = json.loads(line)
    except json.JSONDecodeError as error:
        reason = error.msg[:1].lower() + error.msg[1:]
        raise DataError(f"not JSON: column {error.pos + 1}: {reason}") from error
    except (ValueError, RecursionError) as error:  # not UTF-8, a number of thousands of digits
        raise DataError("not JSON that can be read") from error
    if not isinstance(fields, dict):
        raise DataError("not a JSON object")
    try:
        fields = {name: _restore(name, value) for name, value in fields.items()}
        if fields.get("k") == "tokens":
            fields["ids"] = _ids(fields.get("ids"))
        data = dumps(from_map(fields))
    except (OverflowError, UnicodeEncodeError, TypeError, RecursionError) as error:
        raise DataError("a value that no frame can hold") from error
    except (Invalid, ValueError) as error:
        raise DataError(str(error)) from error
    try:
        return next(FrameReader(io.BytesIO(data)))  # same rules as on the wire
    except FrameError as error:
        raise DataError(error.message.partition(": ")[2]) from error


def json_frames(stream: Any) -> Iterator[Frame]:
    """Frames from JSON lines; a DataError names the line."""
    for number, line in enumerate(lines(stream), 1):
        if line.strip():
            try:
                yield from_json(line)
            except DataError as error:
                raise DataError(f"cannot read line {number}: {error.message}") from error


def lines(stream: Any) -> Iterator[bytes]:
    """The lines of a stream with a `read1`, each as soon as it is complete. Raises DataError for
    one of more than MAX_LINE_BYTES."""
    held: list[bytes] = []
    size = count = 0
    while data := stream.read1(1 << 16):
        first, *rest = data.split(b"\n")
        held.append(first)
        size += len(first)
        if size > MAX_LINE_BYTES:
            raise DataError(f"cannot read line {count + 1}: more than {MAX_LINE_BYTES >> 20} MiB")
        if rest:
            yield b"".join(held)
            yield from rest[:-1]
            held, size = [rest[-1]], len(rest[-1])
            count += len(rest)
    if size:
        yield b"".join(held)


def _ids(value: Any) -> bytes:
    if not isinstance(value, list) or not all(type(i) is int and 0 <= i < 2**32 for i in value):
        raise Invalid("tokens.ids is not a list of token ids")
    return pack_ids(value)


def _top(values: Any, count: int) -> dict:
    """The most likely entries of softmax(values), most likely first, ties by lower index."""
    import numpy as np

    from toastkit.stages.arrays import log_softmax

    x = log_softmax(values)
    count = min(count, x.size)
    best = np.argsort(-x, kind="stable")[:count]
    return {"topk": [[int(i), round(float(x[i]), 6)] for i in best], "size": int(x.size)}


def _shown(value: Any) -> Any:
    """Wrap in objects what json would write without calling `_plain`: ext types, which are tuples,
    and non-finite numbers."""
    if isinstance(value, msgpack.ExtType):
        return _plain(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, dict):
        return {name: _shown(part) for name, part in value.items()}
    return [_shown(part) for part in value] if isinstance(value, list) else value


def _plain(value: Any) -> Any:
    """Convert what JSON has no type for, in the fields of newer schemas."""
    if isinstance(value, Reference):
        return {"slot": value.slot, "seq": value.seq, "dtype": value.dtype,
                "shape": list(value.shape)}  # fmt: skip
    if isinstance(value, Array):
        return {"dtype": value.dtype, "shape": list(value.shape),
                "base64": base64.b64encode(bytes(value.data)).decode()}  # fmt: skip
    if isinstance(value, msgpack.Timestamp):
        return {"ext": -1, "base64": base64.b64encode(value.to_bytes()).decode()}
    if isinstance(value, msgpack.ExtType):
        return {"ext": value.code, "base64": base64.b64encode(value.data).decode()}
    if isinstance(value, (bytes, memoryview)):
        return {"bytes": base64.b64encode(bytes(value)).decode()}
    raise TypeError(f"cannot write a {type(value).__name__} as JSON")


def _restore(name: str, value: Any) -> Any:
    """The value of a field, undoing `_plain` and `_shown`. name: "" within another value: only a
    frame's own logits are read from a top-k list, or a short line would make many arrays, each of
    64 MB."""
    if isinstance(value, list):
        return [_restore("", part) for part in value]
    if not isinstance(value, dict):
        return value
    keys = set(value)
    if keys == {"topk", "size"} and name == "logits":
        return _from_top(value["topk"], value["size"])
    if keys == {"dtype", "shape", "base64"}:
        return Array(
            value["dtype"], _shape(value), base64.b64decode(value["base64"], validate=True)
        )
    if keys == {"slot", "seq", "dtype", "shape"}:
        return Reference(value["slot"], value["seq"], value["dtype"], _shape(value))
    if keys == {"ext", "base64"}:
        data = base64.b64decode(value["base64"], validate=True)
        if value["ext"] == -1:
            return msgpack.Timestamp.from_bytes(data)
        return msgpack.ExtType(value["ext"], data)
    if keys == {"bytes"}:
        return base64.b64decode(value["bytes"], validate=True)
    if keys == {"float"} and value["float"] in ("nan", "inf", "-inf"):
        return float(value["float"])
    return {name: _restore("", part) for name, part in value.items()}


def _shape(value: dict) -> tuple:
    if not isinstance(value["shape"], list):
        raise Invalid("an array of an impossible shape")
    return tuple(value["shape"])


def _from_top(pairs: Any, size: Any) -> Array:
    import numpy as np

    if type(size) is not int or not 0 < size < MAX_VOCAB:
        raise Invalid("a top-k list of an impossible size")
    if not isinstance(pairs, list):
        raise Invalid("a top-k list that is not a list")
    values = np.full(size, -np.inf, dtype="<f4")
    for pair in pairs:
        if not (isinstance(pair, list) and len(pair) == 2 and type(pair[0]) is int
                and 0 <= pair[0] < size and type(pair[1]) in (int, float)):  # fmt: skip
            raise Invalid("a top-k list that is not [[id, logprob], ...]")
        values[pair[0]] = pair[1]
    return Array("float32", (size,), values.tobytes())
