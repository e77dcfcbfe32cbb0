"""A model state that needs no MLX: the bytes of every row follow from its token and position."""

from __future__ import annotations

import struct
import zlib
from array import array

from toastkit.session.blocks import LayerSource, TensorSource
from toastkit.session.directory import Session
from toastkit.session.layout import Layer

MODEL = "ab" * 32
HEADS, SIZE = 2, 16
ROW_BYTES = HEADS * SIZE * 4


def row(token: int, position: int) -> bytes:
    """The bytes of one position of a growing tensor."""
    return struct.pack("<II", token, position) * (ROW_BYTES // 8)


def growing(tokens: list[int]) -> LayerSource:
    """A KVCache that has read these tokens."""

    def read(first: int, last: int) -> bytes:
        return b"".join(row(tokens[i], i) for i in range(first, last))

    shape = (1, HEADS, len(tokens), SIZE)
    tensors = [TensorSource(name, "float32", shape, 2, read) for name in ("keys", "values")]
    return LayerSource("KVCache", {"offset": len(tokens)}, tensors if tokens else [])


def recurrent(tokens: list[int]) -> LayerSource:
    """An ArraysCache that has read these tokens."""
    data = struct.pack("<I", zlib.crc32(array("I", tokens).tobytes())) * 5000
    return LayerSource(
        "ArraysCache", {"size": 1}, [TensorSource("0", "uint32", (5000,), None, lambda a, b: data)]
    )


def logits_of(tokens: list[int]) -> array:
    return array("f", [float(len(tokens)), float(sum(tokens) % 1000)] * 50)


def commit(session: Session, tokens: list[int], *sources: LayerSource) -> None:
    session.commit_layers(tokens, sources or [growing(tokens)], logits_of(tokens))


def rows_of(session: Session, n: int) -> list[bytes]:
    """What restoring the first n tokens gives: the bytes of every stored tensor."""

    def rebuild(layers: list[Layer], load) -> list[bytes]:
        return [
            bytes(load(tensor, n if tensor.axis is not None else 1))[
                : tensor.row_bytes * (n if tensor.axis is not None else 1)
            ]
            for layer in layers
            for tensor in layer.tensors
        ]

    return session.restore_layers(n, rebuild)


def expected_rows(tokens: list[int]) -> bytes:
    return b"".join(row(token, i) for i, token in enumerate(tokens))
