"""Frames as JSON lines: round trips, and errors that name the line."""

from __future__ import annotations

import io
import json
import math
import warnings
from contextlib import suppress

import msgpack
import numpy as np
import pytest
from frame_strategies import FIELDS, extras, frames, maybe
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import examples
from toastkit.errors import DataError, FrameError
from toastkit.frames import (
    KINDS,
    Array,
    End,
    FrameReader,
    Head,
    Logits,
    Prefilled,
    Reference,
    Token,
    Tokens,
    Unknown,
    dumps,
    pack_ids,
    to_map,
)
from toastkit.stages.arrays import LogitsReader, from_numpy
from toastkit.stages.feed import bare_ids
from toastkit.stages.jsonl import from_json, json_frames, lines, to_json

VOCAB = 5


def reader(vocab: int = VOCAB) -> LogitsReader:
    made = LogitsReader()
    made.begin(Head("m", "f", vocab, []))
    return made


def there_and_back(frame):
    line = to_json(frame, "base64", 10, reader().read)
    assert "\n" not in line
    return from_json(line)


def logits_of(numbers: st.SearchStrategy) -> st.SearchStrategy:
    return st.lists(numbers, min_size=VOCAB, max_size=VOCAB).map(
        lambda values: from_numpy(np.array(values, np.float32))
    )


full_logits = logits_of(st.floats(width=32, allow_nan=False))


def with_extra(kind: str) -> st.SearchStrategy:
    """A frame of a kind, its logits inline."""
    fields = dict(FIELDS[kind])
    if kind == "logits":
        fields["logits"] = full_logits
    elif kind == "prefilled":
        fields["logits"] = maybe(full_logits)
    return st.builds(KINDS[kind], **fields, extra=extras(kind))


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=examples(12))
@given(st.data())
def test_every_kind_comes_back(kind: str, data) -> None:
    frame = data.draw(with_extra(kind))
    assert there_and_back(frame) == frame


@given(extras(None))
def test_an_unknown_kind_comes_back(extra: dict) -> None:
    assert there_and_back(Unknown("later", extra)) == Unknown("later", extra)


@pytest.mark.parametrize(
    "frame",
    [Unknown("later", {"x": Reference(3, 9, "float32", (2, 4))}),
     Unknown("later", {"x": Array("uint8", (1,), b"a")}),
     Unknown("later", {"x": msgpack.ExtType(9, b"a")}),
     Unknown("later", {"x": msgpack.Timestamp(1, 2)}),
     Unknown("later", {"x": [math.inf, -math.inf, 1.5]}),
     Unknown("later", {"x": {"float": "1"}}),
     Token(9, 3, -0.25, [[3, -0.25], [1, -1.5]], "low", 0.5)],
)  # fmt: skip
def test_ext_types_and_alternatives_come_back(frame) -> None:
    assert there_and_back(frame) == frame


@given(frames)
def test_all_that_can_be_read_can_be_shown(frame) -> None:
    """Any frame of the wire has a line, and the line is one that other programs can parse."""
    fields = json.loads(to_json(frame, "none", 10, None))
    assert fields["k"] == to_map(frame)["k"]


@pytest.mark.parametrize("value", ["d6ff00000005", "81c4016101", "9181c4016101", "c70003"])
def test_odd_values_are_refused_or_shown(value: str) -> None:
    """A time stamp, byte strings as names, an empty ext: what the reader takes has a line."""
    try:
        (frame,) = FrameReader(io.BytesIO(bytes.fromhex("82a16ba17aa178" + value)))
    except FrameError:
        return
    assert json.loads(to_json(frame, "base64", 10, None))["k"] == "z"


def log_softmax(values: np.ndarray) -> np.ndarray:
    exact = values.astype(np.float64) - values.max()
    return exact - np.logaddexp.reduce(exact)


@given(logits_of(st.integers(-999, 999).map(lambda n: n / 8)), st.integers(1, VOCAB + 2))
def test_a_topk_list_is_the_head_of_the_softmax(array: Array, count: int) -> None:
    found = json.loads(to_json(Logits(3, array), "topk", count, reader().read))["logits"]
    values = np.frombuffer(array.data, "<f4")
    expected = sorted(range(VOCAB), key=lambda i: (-float(values[i]), i))[:count]
    assert found["size"] == VOCAB
    assert [i for i, _ in found["topk"]] == expected
    assert [p for _, p in found["topk"]] == pytest.approx(
        log_softmax(values)[expected].tolist(), abs=1e-6
    )


@pytest.mark.parametrize(("dtype", "nan"), [("float32", b"\1\0\x80\x7f"), ("float16", b"\1\x7c")])
def test_a_signalling_nan_is_said_nowhere(dtype: str, nan: bytes) -> None:
    """numpy would warn on stderr of a cast that is meant."""
    frame = Logits(3, Array(dtype, (VOCAB,), nan * VOCAB))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(json.loads(to_json(frame, "topk", 9, reader().read))["logits"]["topk"]) == VOCAB


def test_what_a_topk_list_leaves_out_is_impossible() -> None:
    """Elsewhere it makes no array, or a line of many would make many, of 64 MB each."""
    line = '{"k": "logits", "pos": 0, "logits": {"topk": [[2, -0.5], [0, -1]], "size": 4}}'
    logits = from_json(line).logits
    assert (logits.dtype, logits.shape) == ("float32", (4,))
    assert np.frombuffer(logits.data, "<f4").tolist() == [-1.0, -math.inf, -0.5, -math.inf]
    impossible = {"topk": [], "size": 1 << 23}
    for value in (impossible, {"logits": impossible}, [{"logits": impossible}]):
        fields = {f"x{n}": value for n in range(1000)}
        assert from_json(json.dumps({"k": "z", **fields})) == Unknown("z", fields)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_logits_of_other_dtypes_come_back_as_they_were(dtype: str) -> None:
    values = np.array([0.5, -2, 3, 0, 1], np.float32)
    bits = values.astype("<f2") if dtype == "float16" else (values.view("<u4") >> 16).astype("<u2")
    frame = Logits(0, Array(dtype, (VOCAB,), bits.tobytes()))
    assert there_and_back(frame) == frame


def test_token_ids_are_numbers_and_arrays_can_be_left_out() -> None:
    line = to_json(Tokens(pack_ids([1, 70000])), "topk", 10, None)
    assert json.loads(line) == {"k": "tokens", "ids": [1, 70000], "role": "user", "final": True}
    frame = Prefilled(1, 1, 0, 0.5, from_numpy(np.zeros(VOCAB, np.float32)))
    assert from_json(to_json(frame, "none", 10, None)) == Prefilled(1, 1, 0, 0.5)


REFERENCE = {"slot": 0, "seq": 1, "dtype": "float32", "shape": [1]}
INLINE = {"dtype": "float32", "shape": [1], "base64": "AAAAAA=="}
WRONG_LOGITS = {
    "negative slot": {**REFERENCE, "slot": -5}, "text for a number": {**REFERENCE, "seq": "1"},
    "no slot": {**REFERENCE, "slot": None},
    "dtype of a reference": {**REFERENCE, "dtype": "float99"},
    "shape of a reference": {**REFERENCE, "shape": ["a"]},
    "negative sizes": {**INLINE, "shape": [-1, -1]},
    "a size with a fraction": {**INLINE, "shape": [1.0]},
    "true for a size": {**INLINE, "shape": [True]}, "no sizes": {**INLINE, "shape": None},
    "too few bytes": {**INLINE, "shape": [2]}, "not base64": {**INLINE, "base64": "A%AAAA=="},
    "base64 beyond ASCII": {**INLINE, "base64": "é"}, "dtype": {**INLINE, "dtype": "float99"},
    "a list for a dtype": {**INLINE, "dtype": []}, "no pairs": {"topk": 5, "size": 4},
    "half a pair": {"topk": [[1]], "size": 4},
    "an index out of range": {"topk": [[4, -1.0]], "size": 4},
    "a negative index": {"topk": [[-1, -1.0]], "size": 4},
    "an index with a fraction": {"topk": [[1.0, -1.0]], "size": 4},
    "a word for a probability": {"topk": [[1, "a"]], "size": 4},
    "no size": {"topk": [], "size": 0}, "an enormous size": {"topk": [], "size": 2**31 - 1},
    "text": "many",
}  # fmt: skip
WRONG_LINES = {
    **{
        f"logits: {name}": json.dumps({"k": "logits", "pos": 0, "logits": value})
        for name, value in WRONG_LOGITS.items()
    },
    "no logits": '{"k": "logits", "pos": 0}',
    "not JSON": "{'k': 1}",
    "a list": "[]",
    "a number": "7",
    "nothing but an opening": "[" * 100_000,
    "no kind": "{}",
    "not UTF-8": b'{"k": "text", "s": "\xff"}',
    "half a surrogate": '{"k": "text", "s": "\\ud800"}',
    "half a surrogate in a foreign field": '{"k": "z", "x": ["\\ud800"]}',
    "a number over 64 bits": '{"k": "z", "x": [123456789012345678901234567890]}',
    "deep nesting": '{"k": "z", "x": ' + "[" * 100 + "]" * 100 + "}",
    "a negative id": '{"k": "tokens", "ids": [-1]}',
    "a large id": '{"k": "tokens", "ids": [4294967296]}',
    "an id that is text": '{"k": "tokens", "ids": ["1"]}',
    "an id with a fraction": '{"k": "tokens", "ids": [1.5]}',
    "ids that are text": '{"k": "tokens", "ids": "abcd"}',
    "ids that are a map": '{"k": "tokens", "ids": {}}',
    "true for an id": '{"k": "tokens", "ids": [true]}',
    "a type code out of range": '{"k": "z", "x": {"ext": 300, "base64": ""}}',
    "a type code that is text": '{"k": "z", "x": {"ext": "a", "base64": ""}}',
    "a broken array as ext": '{"k": "z", "x": {"ext": 1, "base64": "AAAA"}}',
    "bytes that are a number": '{"k": "z", "x": {"bytes": 5}}',
    "newer schema": json.dumps({**to_map(Head("m", "f", 4, [1])), "v": 2}),
    "a number of thousands of digits": '{"k": "z", "x": ' + "7" * 5000 + "}",
    "millions of lists": '{"k": "z", "x": [' + "[]," * (1 << 20) + "[]]}",
    "a top-k list that no frame holds": '{"k": "logits", "logits": {"topk": [], "size": 16777216}}',
}


@pytest.mark.parametrize("line", WRONG_LINES.values(), ids=WRONG_LINES)
def test_garbage_is_refused(line: str | bytes) -> None:
    with pytest.raises(DataError) as caught:
        from_json(line)
    assert caught.value.message and "\n" not in caught.value.message


@given(st.binary(max_size=60))
def test_arbitrary_bytes(line: bytes) -> None:
    with suppress(DataError):
        from_json(line)
    with pytest.raises(DataError, match="^not JSON: column 9: expecting value$"):
        from_json('{"pos": x}')  # the line is known; the place in it is said


json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=2), st.dictionaries(st.text(max_size=3), inner, max_size=2)
    ),
    max_leaves=4,
)
sizes = st.integers(-1, 5)
TAGGED = {
    "topk": st.lists(st.tuples(sizes, st.floats(-9, 0)), max_size=2), "size": sizes,
    "dtype": st.sampled_from(["float32", "uint8", "float99"]),
    "shape": st.lists(sizes, max_size=2),
    "base64": st.sampled_from(["", "AAAAAA==", "AA==", "AAA"]), "slot": sizes, "seq": sizes,
    "ext": st.integers(-2, 128), "bytes": st.sampled_from(["", "AAAA", "AAA"]),
}  # fmt: skip
SHAPES = ("topk size", "dtype shape base64", "slot seq dtype shape", "ext base64", "bytes")


@st.composite
def tagged(draw) -> dict:
    """An array or a byte string as JSON writes it, or nearly so: one value in four is junk."""
    names = draw(st.sampled_from(SHAPES)).split()
    junk = draw(st.sampled_from([*names, *[None] * 3]))
    return {name: draw(json_values if name == junk else TAGGED[name]) for name in names}


@given(st.sampled_from([*KINDS, "z"]), st.data())
def test_any_object_is_a_frame_or_refused(kind: str, data) -> None:
    """What is accepted can be written, and the reader of frames takes what was written."""
    odd = st.one_of(json_values, tagged())
    valid = {}
    if kind in KINDS:
        valid = json.loads(to_json(data.draw(with_extra(kind)), "none", 1, None))
    name = data.draw(st.sampled_from([*FIELDS.get(kind, {}), "logits", "x"]))
    line = json.dumps({"k": kind, **valid, name: data.draw(odd)})
    try:
        frame = from_json(line)
    except DataError:
        return
    (again,) = FrameReader(io.BytesIO(dumps(frame)))
    assert dumps(again) == dumps(frame)


def test_a_bad_line_is_named_by_its_number() -> None:
    text = b'\n{"k": "end", "reason": "eos", "n": 1}\n\n{"k": "end"}\n'
    frames_in = json_frames(io.BytesIO(text))
    assert next(frames_in) == End("eos", 1)
    with pytest.raises(DataError, match="^cannot read line 4: end frame without n, reason$"):
        next(frames_in)


@pytest.mark.parametrize("read", [lines, json_frames, bare_ids])
def test_a_line_without_an_end_is_refused(read) -> None:
    class Endless:
        def __init__(self) -> None:
            self.given = 0

        def read1(self, size: int) -> bytes:
            self.given += size
            return (b"7" if self.given > size else b"1\n") * (size // 2)

    source = Endless()
    with pytest.raises(DataError, match="^cannot read line 32769: more than 32 MiB$"):
        list(read(source) if read is not json_frames else lines(source))
    assert source.given < 100 << 20


def test_lines_come_whole_from_any_pieces() -> None:
    class Pieces:
        def __init__(self, *pieces: bytes):
            self.left = list(pieces)

        def read1(self, size: int) -> bytes:
            return self.left.pop(0) if self.left else b""

    assert list(lines(Pieces(b"a", b"b\n\nc", b"\nd\n"))) == [b"ab", b"", b"c", b"d"]
    assert list(lines(Pieces(b"a\n", b"tail"))) == [b"a", b"tail"]
    source = Pieces(b"a\n", b"b")
    assert next(lines(source)) == b"a" and source.left == [b"b"]
