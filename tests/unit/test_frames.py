"""The wire format: what is written is read again, and whatever else is read ends in one error that
names the byte at which the broken frame begins."""

from __future__ import annotations

import dataclasses
import io
import struct
import subprocess
import sys

import msgpack
import pytest
from frame_strategies import FIELDS, frames, token_ids, words
from hypothesis import given
from hypothesis import strategies as st

from toastkit.arrays import Invalid
from toastkit.errors import FrameError
from toastkit.frames import (
    KINDS,
    MAX_NESTING,
    SCHEMA_VERSION,
    Array,
    End,
    FrameReader,
    FrameWriter,
    Head,
    Logits,
    Reference,
    Text,
    Token,
    Tokens,
    Unknown,
    dumps,
    pack_ids,
    starts_frames,
    to_map,
    unpack_ids,
)
from toastkit.outline import Outline


class Trickle:
    """A pipe that gives one byte at a time."""

    def __init__(self, data: bytes):
        self._source = io.BytesIO(data)

    def read1(self, size: int) -> bytes:
        return self._source.read(1)


def read(data: bytes, source=io.BytesIO) -> tuple[list, FrameError | None]:
    """The frames of a stream and the error that ended it; nothing else may be raised."""
    found = []
    try:
        for frame in FrameReader(source(data)):
            found.append(frame)
    except FrameError as error:
        return found, error
    return found, None


def boundaries(data: bytes, limit: int) -> list[int]:
    """Where the first objects of a stream begin, by msgpack's own Python implementation."""
    from msgpack.fallback import Unpacker

    unpacker = Unpacker(strict_map_key=False, raw=True, ext_hook=msgpack.ExtType)
    unpacker.feed(data)
    starts = [0]
    for _ in range(limit):
        unpacker.skip()
        starts.append(unpacker.tell())
    return starts


def check(data: bytes) -> tuple[list, FrameError | None]:
    """Reads a stream whole and byte by byte, and checks what must hold for any bytes whatever."""
    found, error = read(data)
    starts = boundaries(data, len(found))
    if error is None:
        assert starts[-1] == len(data)
    else:
        assert error.offset == starts[-1] < len(data)
        assert f"frame {len(found) + 1} at byte {error.offset}: " in error.message
        assert "\n" not in error.message and error.code == 65
    slow, again = read(data, Trickle)
    assert [dumps(f) for f in slow] == [dumps(f) for f in found]
    assert (error and error.offset) == (again and again.offset)
    return found, error


# -------------------------------------------------------------------------------------- round trips


@given(st.lists(frames, max_size=4))
def test_what_is_written_is_read_again(written: list) -> None:
    data = b"".join(map(dumps, written))
    found, error = check(data)
    assert error is None
    assert found == written
    assert b"".join(map(dumps, found)) == data
    assert not data or starts_frames(data)


def test_every_kind_has_a_strategy() -> None:
    assert set(FIELDS) == set(KINDS)
    for kind, fields in FIELDS.items():
        assert set(fields) | {"extra"} == {f.name for f in dataclasses.fields(KINDS[kind])}
    array = Array("uint8", (2,), memoryview(b"ab"))  # of an array, a memoryview is written too
    assert read(dumps(Logits(0, array)))[0] == [Logits(0, Array("uint8", (2,), b"ab"))]


@given(frames)
def test_the_writer_writes_whole_frames_and_flushes(frame) -> None:
    class Sink(io.BytesIO):
        flushed = 0

        def write(self, data) -> int:  # a part of it, as an unbuffered stream may
            return super().write(data[: len(data) // 2 + 1])

        def flush(self) -> None:
            self.flushed = len(self.getvalue())

    sink = Sink()
    for _ in range(2):
        FrameWriter(sink).write(frame)
    assert sink.getvalue() == 2 * dumps(frame)
    assert sink.flushed == len(sink.getvalue())


@given(st.lists(token_ids))
def test_ids_are_little_endian_words(ids: list[int]) -> None:
    assert pack_ids(ids) == struct.pack(f"<{len(ids)}I", *ids)
    assert unpack_ids(pack_ids(ids)) == ids
    for bad in (-1, 2**32):
        with pytest.raises(OverflowError):
            pack_ids([*ids, bad])


@given(words)
def test_no_text_looks_like_frames(text: str) -> None:
    assert not starts_frames(text.encode()[:1])


# ---------------------------------------------------------------------------------- damaged streams

STREAM = [
    Head("crumb", "ab" * 16, 3, [2], extra={"note": ["é", {"deep": None}]}),
    Tokens(pack_ids([1, 70000])),
    Logits(2, Array("float32", (3,), struct.pack("<3f", 0.5, -1.0, 3e4)), 0.25),
    Token(2, 1, -0.5, [[1, -0.5], [0, -1.5]]), Logits(3, Reference(1, 7, "float32", (3,))),
    Text("a\u200d\U0001f600"), End("eos", 1),
]  # fmt: skip
BYTES = b"".join(map(dumps, STREAM))
STARTS = [len(b"".join(map(dumps, STREAM[:n]))) for n in range(len(STREAM) + 1)]


@pytest.mark.parametrize("source", [io.BytesIO, Trickle])
def test_a_stream_cut_at_any_byte(source) -> None:
    for cut in range(len(BYTES)):
        found, error = read(BYTES[:cut], source)
        whole = max(n for n, start in enumerate(STARTS) if start <= cut)
        assert found == STREAM[:whole]
        if cut == STARTS[whole]:
            assert error is None
        else:
            said = f"cannot read frame {whole + 1} at byte {STARTS[whole]}: truncated"
            assert (error.offset, error.message) == (STARTS[whole], said)


@pytest.mark.parametrize("frame", STREAM, ids=lambda frame: type(frame).__name__)
def test_a_stream_with_any_bit_flipped(frame) -> None:
    """Of a frame between two others: what stands before it is read."""
    first, last = dumps(End("eos", 1)), dumps(Text("x"))
    whole = dumps(frame)
    for place in range(8 * len(whole)):
        data = bytearray(whole)
        data[place // 8] ^= 1 << place % 8
        found, error = check(first + bytes(data) + last)
        assert found[:1] == [End("eos", 1)]
        assert error is None or error.offset >= len(first)


@given(st.binary(max_size=200))
def test_arbitrary_bytes(data: bytes) -> None:
    check(data)


@given(
    st.lists(frames, min_size=1, max_size=3), st.integers(0, 1 << 12), st.binary(max_size=9),
    st.integers(0, 9),
)  # fmt: skip
def test_bytes_put_into_a_valid_stream(valid: list, at: int, noise: bytes, gone: int) -> None:
    data = b"".join(map(dumps, valid))
    at %= len(data) + 1
    check(data[:at] + noise + data[at + gone :])


# ------------------------------------------------------------------------------------------- limits


def packed(**fields) -> bytes:
    return msgpack.packb({"k": "later", **fields})


def nested(levels: int, opening: bytes) -> bytes:
    return b"\x82\xa1k\xa1z\xa1x" + opening * levels + b"\xc0"


@pytest.mark.parametrize("opening", [b"\x91", b"\x81\xa1a"])
def test_nesting_has_a_limit(opening: bytes) -> None:
    assert read(nested(MAX_NESTING - 1, opening))[1] is None
    for levels in (MAX_NESTING, 100, 450, 490, 500, 800, 990, 1020, 1024, 1030, 100_000):
        found, error = read(packed() + nested(levels, opening))
        assert found == [Unknown("later")] and error.offset == len(packed())
        assert "nested" in error.message


def test_headers_that_claim_billions_of_elements() -> None:
    for header in ("dd", "df", "c6", "c9", "db", "c8ffff01", "dc", "de"):
        data = packed() + b"\x82\xa1k\xa1z\xa1x" + bytes.fromhex(header) + b"\xff" * 5
        found, error = check(data)
        assert len(found) == 1 and error is not None
    for header in ("dd00100001", "dd7fffffff", "df00001001", "df7fffffff"):
        error = read(b"\x82\xa1k\xa1z\xa1x" + bytes.fromhex(header))[1]
        assert error.offset == 0 and "exceeds" in error.message  # before its elements come


CLAIMS = (
    "dd00100000" * 40, "dd00100000" * 40 + "93" * 40, "dd00200000", "dd40000000", "ddffffffff",
    "de0fff", "df00000fff", "df00100000", "dfffffffff", "c603ffffff", "c6ffffffff",
    "c903ffffff05", "c9ffffffff05", "db40000000", "dbffffffff",
)  # fmt: skip
CLAIMANT = """
import io, resource, sys
from toastkit.errors import FrameError
from toastkit.frames import FrameReader
if sys.platform == "linux":  # address space too: 2 GiB are a frame's limits many times over
    resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for claim in sys.argv[1:]:
    for start in ("", "82a16ba17aa178"):
        try:
            list(FrameReader(io.BytesIO(bytes.fromhex(start + claim))))
        except FrameError as error:
            if not isinstance(error.__cause__, MemoryError):
                continue
        raise SystemExit(f"{claim}: no limit")
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_claims_cost_no_memory() -> None:
    """In a process of its own: headers that claim much, and nothing behind them."""
    command = [sys.executable, "-c", CLAIMANT, *CLAIMS]
    grown = int(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    unit = 1 if sys.platform == "darwin" else 1024
    assert grown * unit < 48 << 20


def test_a_frame_has_a_largest_size() -> None:
    def outcome(frame, limit: int):
        reader = FrameReader(io.BytesIO(dumps(frame) + dumps(End("eos", 1))), limit)
        try:
            return list(reader)
        except FrameError as error:
            return error

    frame = Tokens(bytes(1 << 20))
    assert outcome(frame, 2 << 20) == [frame, End("eos", 1)]
    for limit in (1 << 20) - 1, 1 << 16:
        assert outcome(frame, limit).offset == 0


# ------------------------------------------------------------------------------ what is not a frame

values = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(), st.text(),
        st.binary(), st.builds(msgpack.ExtType, st.integers(0, 127), st.binary(max_size=20)),
        st.integers(200, 300).map(bytes), st.integers(65500, 65600).map(lambda n: "a" * n),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=20), st.dictionaries(st.text(), inner, max_size=20)
    ),
    max_leaves=40,
)  # fmt: skip


def count_of(value) -> int:
    """Values within a value, at all depths; a name is one."""
    if isinstance(value, dict):
        return sum(2 + count_of(part) for part in value.values())
    return sum(1 + count_of(part) for part in value) if isinstance(value, list) else 0


@given(values, st.lists(st.integers(0, 70000), min_size=1, max_size=9), st.binary(max_size=9))
def test_values_are_counted_before_they_are_made(value, cuts: list[int], behind: bytes) -> None:
    """In whatever pieces they come, to the value; and what lies behind the frame is left alone."""
    data, count = msgpack.packb(value) + behind, count_of(value)
    places = [0, *sorted(min(1 + cut, len(data)) for cut in cuts), len(data)]
    for limit in (count, count - 1):
        outline = Outline(limit)
        try:
            for _ in range(2):  # a frame like the one before
                for start, end in zip(places, places[1:]):
                    outline.add(start, data[start:end])
                outline.begin()
        except Invalid:
            assert limit < count
        else:
            assert limit == count or count == 0 or len(set(places)) == 2


@pytest.mark.parametrize("filler", [b"\x90", b"\xa2ab", b"\xc0"], ids=["lists", "text", "nil"])
def test_a_frame_of_too_many_values(filler: bytes) -> None:
    """Lists of a size that is allowed, in a list: each piece costs what it takes to read it."""
    size = 1 << 19
    part = b"\xdd" + size.to_bytes(4, "big") + filler * size
    found, error = read(b"\x82\xa1k\xa1z\xa1x\x93" + part * 3)
    assert found == [] and error is not None and "more than 1048576 values" in error.message


HEAD = to_map(Head("m", "f", 4, [1]))
WRONG = {
    "no kind": {"s": "a"}, "a kind that is no string": {"k": 1},
    "newer schema": {**HEAD, "v": SCHEMA_VERSION + 1}, "schema 0": {**HEAD, "v": 0},
    "no vocabulary": {**HEAD, "vocab": 0}, "end-of-turn ids": {**HEAD, "eos": [-1]},
    "runs": {**HEAD, "run": ["a", 1]}, "a run that no path is": {**HEAD, "run": "a\0b"},
    "missing fields": {"k": "head", "model": "m"}, "ids": {"k": "tokens", "ids": b"abc"},
    "ids as text": {"k": "tokens", "ids": "abcd"},
    "float token": {"k": "token", "pos": 0, "id": 1.0},
    "large token": {"k": "token", "pos": 0, "id": 2**32},
    "negative position": {"k": "token", "pos": -1, "id": 1},
    "alternatives": {"k": "token", "pos": 0, "id": 1, "top": [[1]]},
    "logits": {"k": "logits", "pos": 0, "logits": "abc"},
    "null for a field that must be": {"k": "text", "s": None},
    "true for a number": {**HEAD, "vocab": True},
    "counts": {"k": "prefilled", "n_past": 1, "n_new": -1, "n_cached": 0, "seconds": 0.0},
    "more tokens than can be": {"k": "end", "reason": "eos", "n": 2**53},
    "an end that is none": {"k": "end", "reason": "done", "n": 1},
    "a gear that is none": {"k": "token", "pos": 0, "id": 1, "gear": "fast"},
    "exit code": {"k": "error", "code": 256, "stage": "", "message": ""},
    "the exit code of success": {"k": "error", "code": 0, "stage": "", "message": ""},
    "a vocabulary that no frame holds": {**HEAD, "vocab": 1 << 24},
    "bytes for a name": {b"k": "text", "s": "a"},
    "a number for a name": {1: "a"},
}  # fmt: skip


@pytest.mark.parametrize("fields", WRONG.values(), ids=WRONG)
def test_a_map_that_is_not_a_frame(fields: dict) -> None:
    found, error = check(dumps(End("eos", 0)) + msgpack.packb(fields))
    assert found == [End("eos", 0)] and error.offset == len(dumps(found[0]))


def test_a_key_that_is_no_string_is_called_that() -> None:
    error = read(b"\x81garbage")[1]
    assert error.message == "cannot read frame 1 at byte 0: a map key that is not a string"


def test_a_newer_schema_says_both_versions() -> None:
    error = read(msgpack.packb({**HEAD, "v": 7}))[1]
    assert error.message == "cannot read frame 1 at byte 0: schema version 7 is newer than 1"


@pytest.mark.parametrize(
    "ext",
    [
        (1, b""), (1, b"\xc0"), (1, msgpack.packb(("float32", (2,))) + bytes(7)),
        (1, msgpack.packb(("float99", (1,))) + bytes(4)), (1, msgpack.packb(("float32", (-1,)))),
        (1, msgpack.packb(("float32", (True,))) + bytes(4)), (1, msgpack.packb(("uint8", 4))),
        (1, msgpack.packb(("uint8", (1,) * 9)) + b"a"), (2, b""),
        (2, msgpack.packb((0, 1, "float32"))), (2, msgpack.packb((-1, 1, "float32", (1,)))),
        (2, msgpack.packb((0, 1.5, "float32", (1,)))),
        (2, msgpack.packb((0, 1, "float32", (1,))) + b"a"),
    ],
)  # fmt: skip
def test_a_broken_array(ext: tuple[int, bytes]) -> None:
    error = check(packed(x=msgpack.ExtType(*ext)))[1]
    assert error.offset == 0 and "array" in error.message


@given(st.integers(1, 2), st.binary(max_size=40))
def test_arbitrary_bytes_as_an_array(code: int, payload: bytes) -> None:
    check(packed(x=msgpack.ExtType(code, payload)))
