"""A model state that needs no MLX: the bytes of every row follow from its token and position."""

from __future__ import annotations

import os
import struct
import zlib
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path

import msgpack
import pytest

from toastkit.session.blocks import LayerSource, TensorSource, written
from toastkit.session.directory import Session
from toastkit.session.extents import align
from toastkit.session.layout import Layer
from toastkit.session.reading import seal
from toastkit.session.savepoints import Savepoint

MODEL = "ab" * 32
HEADS, SIZE = 2, 16
WINDOW = 60  # rows
ROW_BYTES = HEADS * SIZE * 4


def row(token: int, position: int, size: int = SIZE) -> bytes:
    """The bytes of one position of a growing tensor."""
    return struct.pack("<II", token, position) * (HEADS * size // 2)


def growing(tokens: list[int], size: int = SIZE) -> LayerSource:
    """A KVCache that has read these tokens."""

    def read(first: int, last: int) -> bytes:
        return b"".join(row(tokens[i], i, size) for i in range(first, last))

    shape = (1, HEADS, len(tokens), size)
    tensors = [TensorSource(name, "float32", shape, 2, read) for name in ("keys", "values")]
    return LayerSource("KVCache", {"offset": len(tokens)}, tensors if tokens else [])


def recurrent(tokens: list[int]) -> LayerSource:
    """An ArraysCache that has read these tokens."""
    data = struct.pack("<I", zlib.crc32(array("I", tokens).tobytes())) * 5000
    return LayerSource(
        "ArraysCache", {"size": 1}, [TensorSource("0", "uint32", (5000,), None, lambda a, b: data)]
    )


def state_bytes(tokens: list[int]) -> bytes:
    """Those of the array in `recurrent`."""
    return bytes(recurrent(tokens).tensors[0].read(0, 1))


def logits_of(tokens: list[int]) -> array:
    return array("f", [float(len(tokens)), float(sum(tokens) % 1000)] * 50)


def sliding(tokens: list[int], window: int) -> LayerSource:
    """A RotatingKVCache that has read these tokens: position p is in row p modulo the window."""
    count, rows = len(tokens), min(len(tokens), window)
    last = {i % window: i for i in range(count - rows, count)}
    data = b"".join(row(tokens[last[slot]], last[slot]) for slot in range(rows))
    tensors = [
        TensorSource(name, "float32", (1, HEADS, rows, SIZE), None, lambda a, b: data)
        for name in ("keys", "values")
    ]
    settings = {
        "offset": count, "keep": 0, "max_size": window,
        "idx": count if count < window else count % window,
    }  # fmt: skip
    return LayerSource("RotatingKVCache", settings, tensors if tokens else [])


def listed(*parts: LayerSource) -> LayerSource:
    """A CacheList."""
    return LayerSource("CacheList", {}, [], list(parts))


def hybrid(tokens: list[int]) -> list[LayerSource]:
    """A state that can be cut back nowhere."""
    return [growing(tokens), recurrent(tokens)]


def windowed(tokens: list[int]) -> list[LayerSource]:
    """One that cannot once its window slides."""
    return [sliding(tokens, WINDOW), growing(tokens)]


def nested(tokens: list[int]) -> list[LayerSource]:
    """Parts of which only some can be cut back."""
    return [
        listed(recurrent(tokens), growing(tokens)),
        listed(growing(tokens), sliding(tokens, WINDOW)),
        growing(tokens),
    ]


def plain(tokens: list[int]) -> list[LayerSource]:
    """One that can be cut back anywhere."""
    return [growing(tokens), listed(growing(tokens), growing(tokens))]


def packed(tokens: list[int]) -> list[LayerSource]:
    """The same, with blocks of no whole number of pages: 2.125, and several in a page."""
    return [growing(tokens, 17), listed(growing(tokens, 3))]


def at(layers: Callable[[list[int]], list], tokens: list[int], *counts: int) -> list[Savepoint]:
    """Savepoints of a state whose layers are made by a function of the tokens read."""
    return [Savepoint(count, layers(tokens[:count])) for count in counts]


def commit(
    session: Session, tokens: list[int], *sources: LayerSource, savepoints: Sequence[Savepoint] = ()
) -> None:
    written(
        session.commit_layers(tokens, sources or [growing(tokens)], logits_of(tokens), savepoints)
    )


def body_of(path: Path) -> dict:
    """What the header of a session says."""
    return msgpack.unpackb(msgpack.unpackb((path / "session.msgpack").read_bytes())["body"])


def schema_of(path: Path) -> int:
    """The schema of its header."""
    return msgpack.unpackb((path / "session.msgpack").read_bytes())["schema"]


def put_body(path: Path, body: dict, schema: int = 1) -> None:
    """Has it say something else, with the checksum of that."""
    data = msgpack.packb(body)
    envelope = {"toastkit": "session", "schema": schema, "crc": zlib.crc32(data), "body": data}
    (path / "session.msgpack").write_bytes(msgpack.packb(envelope))


def make_schema_1(path: Path) -> None:
    """Lays the blocks of growing tensors (not of parts) out as toastkit did before schema 2: in
    extents of their own."""
    body, was, end = body_of(path), (path / "cache.bin").read_bytes(), 0
    with open(path / "cache.bin", "r+b") as file:
        for tensor in (tensor for layer in body["layers"] for tensor in layer["tensors"]):
            row = tensor["ranges"][0][1] // min(tensor["shape"][2], 256)
            for place in tensor["ranges"]:
                first, count, _ = place
                file.seek(end)
                file.write(was[first : first + count])
                place[0], end = end, align(end + 256 * row)
        file.flush()
        body["seal"] = seal(file.fileno())
    put_body(path, body)


class Counted:
    """What is written and synced while it is in force. bytes: given to pwrite. syncs: fsyncs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.bytes = self.syncs = 0
        write, sync = os.pwrite, os.fsync

        def pwrite(fd: int, data, offset: int) -> int:
            self.bytes += memoryview(data).nbytes
            return write(fd, data, offset)

        def fsync(fd: int) -> None:
            self.syncs += 1
            sync(fd)

        monkeypatch.setattr(os, "pwrite", pwrite)
        monkeypatch.setattr(os, "fsync", fsync)

    def take(self) -> int:
        """The bytes since the last time."""
        count, self.bytes = self.bytes, 0
        return count


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    return Counted(monkeypatch)


def rows_of(session: Session, n: int) -> list[bytes]:
    """What restoring the first n tokens gives: the bytes of every stored tensor. (Those of a window
    are all its rows, also the ones past n.)"""

    def rebuild(layers: list[Layer], load) -> list[bytes]:
        return [
            data
            for layer in layers
            for data in (
                *(bytes(load(t))[: t.row_bytes * t.rows] for t in layer.tensors),
                *rebuild(layer.parts, load),
            )
        ]

    return session.restore_layers(n, rebuild)


def expected_rows(tokens: list[int]) -> bytes:
    return b"".join(row(token, i) for i, token in enumerate(tokens))
