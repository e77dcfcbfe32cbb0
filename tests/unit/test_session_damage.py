"""Sessions under harm: a fuzzed header, damaged files."""

from __future__ import annotations

import os
import zlib
from pathlib import Path

import msgpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from session_states import (
    MODEL,
    at,
    body_of,
    commit,
    growing,
    listed,
    logits_of,
    put_body,
    recurrent,
    rows_of,
    sliding,
)

from tests.conftest import examples
from toastkit.errors import DataError
from toastkit.session import names
from toastkit.session.blocks import LayerSource, written
from toastkit.session.directory import Session
from toastkit.session.extents import ALIGNMENT


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "session"
    with Session.open(path, MODEL) as session:
        tokens = list(range(300))
        commit(session, tokens, *mixed(tokens), savepoints=at(mixed, tokens, 100, 299))
        written(
            session.commit_layers(
                tokens, mixed(tokens), logits_of(tokens), at(mixed, tokens, 100, 150)
            )
        )
    return path


def mixed(tokens: list[int]) -> list[LayerSource]:
    """Layers of all kinds that a savepoint may hold."""
    return [growing(tokens, 17), listed(recurrent(tokens), growing(tokens)), sliding(tokens, 120)]


def opens_or_is_refused(path: Path) -> None:
    for write in (True, False):
        try:
            with Session.open(path, None, write=write) as session:
                for n in (session.n_past, *session.savepoints):
                    rows_of(session, n)
                session.logits()
                session.reusable([*range(130), 0])
        except DataError as error:
            assert "\n" not in error.message and "session" in error.message


@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_header_fuzz(saved: Path, data: st.DataObject):
    """Any bytes in the header's place: a session or a DataError. With the checksum made right too,
    so that the checks behind it are reached."""
    header = saved / "session.msgpack"
    good = header.read_bytes()
    try:
        envelope = msgpack.unpackb(good)
        fix = data.draw(st.booleans(), "fix the checksum")
        broken = bytearray(envelope["body"] if fix else good)
        for _ in range(data.draw(st.integers(1, 4), "flips")):
            at = data.draw(st.integers(0, len(broken) - 1), "at")
            broken[at] = data.draw(st.integers(0, 255), "byte")
        broken = broken[: data.draw(st.sampled_from([len(broken), len(broken) // 2]), "length")]
        if fix:
            envelope.update(body=bytes(broken), crc=zlib.crc32(broken))
            broken = bytearray(msgpack.packb(envelope))
        header.write_bytes(broken)
        opens_or_is_refused(saved)
    finally:
        header.write_bytes(good)


def replaced(value, seen: list, target: int, by):
    """A copy of nested maps and lists with the target-th value replaced."""
    seen.append(None)
    if len(seen) - 1 == target:
        return by
    if isinstance(value, dict):
        return {k: replaced(v, seen, target, by) for k, v in value.items()}
    if isinstance(value, list):
        return [replaced(v, seen, target, by) for v in value]
    return value


@settings(max_examples=examples(120), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    target=st.integers(0, 280),
    by=st.sampled_from([None, -1, 0, 1, 300, 2**40, 2**63, 0.5, "", "KVCache", "x", b"", [], {}]),
)
def test_header_with_another_value(saved: Path, target: int, by):
    header = saved / "session.msgpack"
    good = header.read_bytes()
    try:
        put_body(saved, replaced(body_of(saved), [], target, by))
        opens_or_is_refused(saved)
    finally:
        header.write_bytes(good)


def first_layer(body: dict) -> dict:
    """A KVCache of 300 rows."""
    return body["layers"][0]


def first_part(body: dict) -> dict:
    """An ArraysCache in a CacheList."""
    return body["layers"][1]["parts"][0]


def nested_in(body: dict, depth: int) -> None:
    """The second layer, a CacheList, in so many others."""
    for _ in range(depth):
        body["layers"][1] = {**body["layers"][1], "parts": [body["layers"][1]]}


CONTRADICTIONS = {
    "a KVCache has other settings": lambda body: first_layer(body)["settings"].update(more=1),
    "a KVCache has no parts": lambda body: first_layer(body)["parts"].append(first_part(body)),
    "a KVCache has other arrays": lambda body: first_layer(body)["tensors"].pop(),
    "a KVCache has another number of rows": (
        lambda body: first_layer(body)["settings"].update(offset=299)
    ),
    "a ArraysCache has other arrays": (
        lambda body: first_part(body)["tensors"][0].update(name="1")
    ),
    "a ArraysCache grows along another axis": lambda body: first_part(body).update(
        tensors=[{**first_part(body)["tensors"][0], "axis": 1, "shape": [5000, 1]}]
    ),
    "a CacheList has no arrays of its own": lambda body: body["layers"][1].update(
        tensors=first_layer(body)["tensors"]
    ),
    "a RotatingKVCache points past its buffer": (
        lambda body: body["layers"][2]["settings"].update(idx=121)
    ),
    "caches are nested too deep": lambda body: nested_in(body, 3),
    "it holds a cache of unknown class 'Later'": (
        lambda body: first_layer(body).update(kind="Later")
    ),
    "a RotatingKVCache has arrays of another rank": lambda body: [
        tensor.update(shape=tensor["shape"][1:]) for tensor in body["layers"][2]["tensors"]
    ],
    "a range has another length": (
        lambda body: first_layer(body)["tensors"][0]["ranges"][1].__setitem__(1, 4)
    ),
    "an array has another number of ranges": (
        lambda body: first_layer(body)["tensors"][0]["ranges"].pop()
    ),
    "a wrong axis": lambda body: first_layer(body)["tensors"][0].update(axis=4),
    "a savepoint has another number of layers": (
        lambda body: body["checkpoints"][0]["layers"].pop()
    ),
    "a savepoint of a KVCache has the kind ArraysCache": (
        lambda body: body["checkpoints"][0]["layers"].__setitem__(0, first_part(body))
    ),
    "it holds an array of impossible shape": (
        lambda body: first_part(body)["tensors"][0].update(shape=[2**27, 2**26])
    ),
    "it holds an array of unknown dtype": (
        lambda body: first_part(body)["tensors"][0].update(dtype="float8")
    ),
    "the savepoints are out of order": lambda body: body["checkpoints"].reverse(),
    "the token slices are out of order": lambda body: body["tokens"].update(end=299),
    "the token count and the token slices differ": lambda body: body.update(count=301),
    "the logits are not aligned": lambda body: body["logits"].update(offset=4),
}


@pytest.mark.parametrize("what", CONTRADICTIONS)
def test_a_header_that_contradicts_itself(saved: Path, what: str):
    """Each check is by itself: none is left to what happens later."""
    header = saved / "session.msgpack"
    good, body = header.read_bytes(), body_of(saved)
    try:
        put_body(saved, body)
        Session.open(saved, MODEL, write=False).close()
        CONTRADICTIONS[what](body)
        put_body(saved, body)
        with pytest.raises(DataError) as caught:
            Session.open(saved, MODEL, write=False)
        assert what in caught.value.message
    finally:
        header.write_bytes(good)


def test_ranges_that_overlap(state_home: Path):
    """They would be overwritten in place by a later commit."""
    path = names.resolve("one")
    with Session.open(path, MODEL) as session:
        commit(session, [1] * 300)
    body = body_of(path)
    keys, values = body["layers"][0]["tensors"]
    values["ranges"][0] = keys["ranges"][0]
    put_body(path, body)
    with pytest.raises(DataError, match="two ranges overlap"):
        Session.open(path, MODEL)


@pytest.mark.parametrize(
    ("which", "by", "why"),
    [
        (0, 1, "is not aligned"), (1, -4096, "is not aligned"), (1, 0, None), (1, ALIGNMENT, None),
        (2, -ALIGNMENT, "overlap"), (2, ALIGNMENT, None),
    ],
)  # fmt: skip
def test_runs_that_share_a_page(state_home: Path, which: int, by: int, why: str | None):
    """A block goes on where the one before ends, or begins a page of its own at its place there."""
    path = names.resolve("one")
    with Session.open(path, MODEL) as session:
        commit(session, [1] * 700, growing([1] * 700, 17), recurrent([1] * 700))
    body = body_of(path)
    keys, values = body["layers"][0]["tensors"]
    ranges = values["ranges"]
    for place in ranges[which:]:
        place[0] += by
    with open(path / "cache.bin", "ab") as file:
        file.write(bytes(2 * ALIGNMENT))
    body["layers"].pop()
    put_body(path, body, schema=2)
    if why:
        with pytest.raises(DataError, match=why):
            Session.open(path, MODEL)
    else:
        Session.open(path, MODEL).close()


def test_newer_schema_and_garbage(state_home: Path):
    path = names.resolve("one")
    with Session.open(path, MODEL) as session:
        commit(session, [1])
    header = path / "session.msgpack"
    envelope = msgpack.unpackb(header.read_bytes())
    header.write_bytes(msgpack.packb({**envelope, "schema": 3}))
    with pytest.raises(DataError, match="cannot read session one: its schema 3 is newer than 2"):
        Session.open(path, MODEL)
    for garbage in (b"", b"garbage", b"\x81", os.urandom(1000)):
        header.write_bytes(garbage)
        with pytest.raises(DataError, match="cannot read session one: the header is not whole"):
            Session.open(path, MODEL)


@pytest.mark.parametrize("name", ["tokens.u32", "cache.bin", "logits.f32"])
@pytest.mark.parametrize("how", ["flip", "shorten", "remove"])
def test_damaged_data_files(state_home: Path, name: str, how: str):
    path = names.resolve("one")
    tokens = [1] * 100 + [2] * 300
    with Session.open(path, MODEL) as session:
        commit(session, [1] * 300)
        commit(session, tokens)
    file = path / name
    data = bytearray(file.read_bytes())
    said = "session one: the checksum of "
    if how != "flip":
        left = len(data) - 1 if how == "shorten" else 0
        said = f"session one: {name} has {left} bytes where its header says {len(data)}$"
    if how == "remove":
        file.unlink()
    else:
        data[100 if name == "tokens.u32" else -1] ^= 1
        file.write_bytes(data if how == "flip" else data[:-1])
    with pytest.raises(DataError, match=said), Session.open(path, MODEL) as session:
        assert how == "flip"
        session.logits()
        rows_of(session, 400)
