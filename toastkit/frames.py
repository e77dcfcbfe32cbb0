"""THE frame schema: what travels on a pipe, its reader and its writer. See toast-frames(5).

A stream is msgpack maps, one after another; field `k` names the kind. Known kinds become the
dataclasses below, unknown kinds become `Unknown`; unknown fields of a kind are kept in `extra` and
written again, so that newer stages can communicate through an older one.

    head -> tokens ... -> prefilled -> (logits -> token -> text)* -> end        (stats, error)

An array is a msgpack ext value, see arrays.py. Field types are checked against the annotations.
"""

from __future__ import annotations

import dataclasses
import sys
from array import array
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from types import UnionType
from typing import Any, BinaryIO, get_args, get_origin, get_type_hints

import msgpack

from toastkit.arrays import Array, Invalid, Record, Reference, pack_extension, unpack_extension
from toastkit.errors import FrameError
from toastkit.outline import Outline, check_nesting

SCHEMA_VERSION = 1
MAX_FRAME_BYTES = 64 << 20  # a 151,936-entry float32 logits frame is 0.6 MB
MAX_VOCAB = (MAX_FRAME_BYTES - 1024) // 4  # float32 logits of fewer fit into a frame
MAX_NESTING = 8
MAX_VALUES = 1 << 20  # in a frame, at all depths
READ_BYTES = 1 << 16


@dataclass(slots=True, eq=False, repr=False)
class Head(Record):
    """Begins a run. fingerprint: of weights and tokenizer, hex. vocab: logits per step. eos: token
    ids that end a turn. session: directory or None. run: directory of feed and ring, a list of them
    if one sampler feeds several decodes, or None. dtype: of activations."""

    model: str
    fingerprint: str
    vocab: int
    eos: list[int]
    session: str | None = None
    run: str | list[str] | None = None
    dtype: str | None = None
    v: int = SCHEMA_VERSION
    extra: dict = field(default_factory=dict)


@dataclass(slots=True, eq=False, repr=False)
class Tokens(Record):
    """Prompt tokens. ids: little-endian uint32, packed. final: the prompt ends with this frame."""

    ids: bytes
    role: str = "user"
    final: bool = True
    extra: dict = field(default_factory=dict)


@dataclass(slots=True, eq=False, repr=False)
class Prefilled(Record):
    """The prompt is in the session. n_past: tokens the model has read in all; n_new: of them, run
    now; n_cached: of them, taken from the session. logits: (vocab,) after the last token."""

    n_past: int
    n_new: int
    n_cached: int
    seconds: float
    logits: Array | Reference | None = None
    extra: dict = field(default_factory=dict)


@dataclass(slots=True, eq=False, repr=False)
class Logits(Record):
    """One step of the model. pos: index of the token that these logits predict. logits: (vocab,).
    experts: {k, fallback, wanted, hit} or None. seconds: of this step.
    The fields from entropy on are added by entropy-gear: entropy and mean in bits, slope in bits
    per token, gear low|mid|high, whether it shifted, the reason, and the gear expected soon."""

    pos: int
    logits: Any
    seconds: float | None = None
    experts: dict | None = None
    entropy: Any = None
    mean: float | None = None
    slope: float | None = None
    gear: str | None = None
    shifted: bool | None = None
    reason: str | None = None
    expected: str | None = None
    extra: dict = field(default_factory=dict)


@dataclass(slots=True, eq=False, repr=False)
class Token(Record):
    """A drawn token. pos: its index. logprob: natural log of its probability before the filters.
    top: [[id, logprob], ...], most likely first. entropy: bits."""

    pos: int
    id: int
    logprob: float | None = None
    top: list | None = None
    gear: str | None = None
    entropy: float | None = None
    extra: dict = field(default_factory=dict)


@dataclass(slots=True, eq=False, repr=False)
class Text(Record):
    """A piece of text, whole characters only."""

    s: str
    extra: dict = field(default_factory=dict)


@dataclass(slots=True, eq=False, repr=False)
class Stats(Record):
    """Counters and seconds of one stage."""

    stage: str
    extra: dict = field(default_factory=dict)


@dataclass(slots=True, eq=False, repr=False)
class Error(Record):
    """What stopped a stage upstream. code: its exit code (sysexits), 1 to 255."""

    code: int
    stage: str
    message: str
    hint: str | None = None
    extra: dict = field(default_factory=dict)


@dataclass(slots=True, eq=False, repr=False)
class End(Record):
    """Ends a run. reason: eos, stop, length, interrupt or error. n: tokens drawn, or steps run."""

    reason: str
    n: int
    extra: dict = field(default_factory=dict)


@dataclass(slots=True, eq=False, repr=False)
class Unknown(Record):
    """A kind of a newer schema, passed on unchanged."""

    k: str
    extra: dict = field(default_factory=dict)


Frame = Head | Tokens | Prefilled | Logits | Token | Text | Stats | Error | End | Unknown

KINDS: dict[str, type] = {
    "head": Head, "tokens": Tokens, "prefilled": Prefilled, "logits": Logits, "token": Token,
    "text": Text, "stats": Stats, "error": Error, "end": End,
}  # fmt: skip
NAMES = {cls: name for name, cls in KINDS.items()}

GEARS, IDS, COUNTS = ("low", "mid", "high"), range(2**32), range(2**53)
VALUES: dict[str, dict[str, Container]] = {  # of fields restricted beyond their type
    "head": {"v": range(1, SCHEMA_VERSION + 1), "vocab": range(1, MAX_VOCAB)},
    "prefilled": {"n_past": COUNTS, "n_new": COUNTS, "n_cached": COUNTS},
    "logits": {"pos": COUNTS, "gear": GEARS, "expected": GEARS},
    "token": {"pos": COUNTS, "id": IDS, "gear": GEARS},
    "error": {"code": range(1, 256)},
    "end": {"reason": ("eos", "stop", "length", "interrupt", "error"), "n": COUNTS},
}


def _types(hint: Any) -> tuple[type, ...]:
    """Return the types that a field's value may have on the wire, from its annotation."""
    if hint is Any:
        return (Array, Reference, int, float, type(None))
    if get_origin(hint) is UnionType:
        return tuple(t for part in get_args(hint) for t in _types(part))
    return (int, float) if hint is float else (get_origin(hint) or hint,)


@cache
def _fields(kind: str) -> tuple[dict[str, tuple[type, ...]], frozenset[str]]:
    """Return the types of each field of a kind, and the names of its required fields; computed when
    a kind is first used, because no process uses all."""
    cls: Any = KINDS[kind]
    types = {n: _types(t) for n, t in get_type_hints(cls).items() if n != "extra"}
    needed = frozenset(
        f.name
        for f in dataclasses.fields(cls)
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    )
    return types, needed


def from_map(fields: dict) -> Frame:
    """Return the frame for one decoded map; raises Invalid with one line that names the field."""
    kind = fields.pop("k", None)
    if type(kind) is not str:
        raise Invalid("a frame without a kind (field k)")
    cls = KINDS.get(kind)
    if cls is None:
        return Unknown(kind, fields)
    types, needed = _fields(kind)
    known: dict[str, Any] = {}
    extra: dict[str, Any] = {}
    for name, value in fields.items():
        if name not in types:
            extra[name] = value
        elif type(value) in types[name]:
            known[name] = value
        else:
            raise Invalid(f"{kind}.{name} cannot be {_describe(value)}")
    if not needed <= known.keys():
        missing = needed.difference(known)
        raise Invalid(f"{kind} frame without {', '.join(sorted(missing))}")
    frame = cls(**known, extra=extra)
    _check_values(kind, frame)
    return frame


def to_map(frame: Frame) -> dict:
    """Return the map for a frame: `k` first, fields that are None left out, unknown fields last."""
    if type(frame) is Unknown:
        return {"k": frame.k, **frame.extra}
    kind = NAMES[type(frame)]
    out: dict[str, Any] = {"k": kind}
    for name in _fields(kind)[0]:
        value = getattr(frame, name)
        if value is not None:
            out[name] = value
    out.update(frame.extra)
    return out


def _describe(value: Any) -> str:
    name = "null" if value is None else type(value).__name__
    return name if value is None else f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def _check_values(kind: str, frame: Any) -> None:
    """Check what a type alone does not express."""
    for name, valid in VALUES.get(kind, {}).items():
        value = getattr(frame, name)
        if value not in valid and value is not None:
            if name == "v" and value > 0:
                raise Invalid(f"schema version {value} is newer than {SCHEMA_VERSION}")
            raise Invalid(f"{kind}.{name} cannot be {value!r:.40}")
    if kind == "head":
        if not all(_is_id(i) for i in frame.eos):
            raise Invalid("head.eos holds something that is not a token id")
        runs = frame.run if isinstance(frame.run, list) else [frame.run or ""]
        if not all(type(r) is str and "\0" not in r for r in runs):
            raise Invalid("head.run holds something that is not a path")
    elif kind == "tokens" and len(frame.ids) % 4:
        raise Invalid("tokens.ids is not a whole number of uint32")
    elif kind == "token" and frame.top is not None:
        for pair in frame.top:
            if not (type(pair) is list and len(pair) == 2 and _is_id(pair[0])
                    and type(pair[1]) in (int, float)):  # fmt: skip
                raise Invalid("token.top is not a list of [id, logprob]")
    elif kind == "logits" and (
        isinstance(frame.logits, (int, float)) or isinstance(frame.entropy, (Array, Reference))
    ):
        raise Invalid("logits.logits is an array and logits.entropy a number")


def _is_id(value: Any) -> bool:
    return type(value) is int and value in IDS


class FrameReader:
    """Iterates over the frames of a binary stream.

    source: a binary file object, or anything with a file's `read1(size)` or `read(size)`. Raises
    FrameError, which names the frame's number and byte offset, at the first broken frame. A stream
    that ends between two frames simply ends.
    """

    def __init__(self, source: BinaryIO | Any, max_frame_bytes: int = MAX_FRAME_BYTES):
        self._read = getattr(source, "read1", None) or source.read
        self._max = max_frame_bytes
        self._unpacker = msgpack.Unpacker(
            max_buffer_size=max_frame_bytes + (1 << 20),
            max_str_len=1 << 24,
            max_bin_len=max_frame_bytes,
            max_ext_len=max_frame_bytes,
            max_array_len=MAX_VALUES,
            max_map_len=1 << 12,
            strict_map_key=True,
            ext_hook=unpack_extension,
        )
        self._fed = 0
        self._outline = Outline(MAX_VALUES)
        self.count = 0
        self.offset = 0

    def __iter__(self) -> Iterator[Frame]:
        return self

    def __next__(self) -> Frame:
        while True:
            try:
                fields = self._unpacker.unpack()
                break
            except msgpack.OutOfData:
                self._feed()
            except Invalid as error:
                raise self._error(str(error)) from error
            except Exception as error:  # msgpack raises ValueError, StackError, UnicodeDecodeError
                raise self._error(_reason(error)) from error
        end = self._unpacker.tell()
        if end - self.offset > self._max:  # its last bytes came with the last read
            raise self._error(f"larger than {self._max} bytes")
        if type(fields) is not dict:
            raise self._error(f"not a map but {_describe(fields)}")
        try:
            check_nesting(fields, MAX_NESTING)
            frame = from_map(fields)
        except Invalid as error:
            raise self._error(str(error)) from error
        self.count, self.offset = self.count + 1, end
        self._outline.begin()
        return frame

    def _feed(self) -> None:
        """Read more bytes; raises StopIteration at a clean end, FrameError inside a frame."""
        begun = self._fed - self.offset
        if begun > self._max:
            raise self._error(f"larger than {self._max} bytes")
        data = self._read(READ_BYTES)
        if not data:
            if begun:
                raise self._error("truncated")
            raise StopIteration
        try:
            self._outline.add(begun, data)
        except Invalid as error:
            raise self._error(str(error)) from error
        self._fed += len(data)
        self._unpacker.feed(data)

    def _error(self, reason: str) -> FrameError:
        where = f"cannot read frame {self.count + 1} at byte {self.offset}"
        return FrameError(f"{where}: {reason}", self.offset)


def _reason(error: Exception) -> str:
    if isinstance(error, UnicodeDecodeError):
        return "a string that is not UTF-8"
    if isinstance(error, msgpack.StackError):
        return "nested too deep"
    text = str(error).split("\n")[0].replace("code must be 0~127", "") or "not msgpack"
    return "a map key that is not a string" if "strict_map_key" in text else text


class FrameWriter:
    """Writes frames to a binary stream and flushes after each.

    sink: a binary file object. Raises BrokenPipeError when the reader has gone.
    """

    def __init__(self, sink: BinaryIO):
        self._sink = sink
        self._pack = msgpack.Packer(default=pack_extension, use_bin_type=True).pack

    def write(self, frame: Frame) -> None:
        data = self._pack(to_map(frame))
        while data:  # an unbuffered sink may write partially
            data = data[self._sink.write(data) :]
        self._sink.flush()


def dumps(frame: Frame) -> bytes:
    """Return one frame as bytes."""
    return msgpack.packb(to_map(frame), default=pack_extension, use_bin_type=True)


def starts_frames(first: bytes) -> bool:
    """True if a stream that begins with this byte is frames: no UTF-8 text begins with it."""
    return first[:1] != b"" and (0x80 <= first[0] <= 0x8F or first[0] in (0xDE, 0xDF))


def pack_ids(ids: Iterable[int]) -> bytes:
    """Pack token ids as little-endian uint32. Raises OverflowError outside 0 .. 2**32 - 1."""
    values = array("I", ids)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()


def unpack_ids(data: bytes) -> list[int]:
    """Unpack the result of pack_ids."""
    values = array("I")
    values.frombytes(data)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tolist()
