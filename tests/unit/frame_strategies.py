"""Hypothesis strategies: any frame that the schema allows."""

from __future__ import annotations

from dataclasses import fields

import msgpack
from hypothesis import strategies as st

from toastkit.frames import (
    KINDS,
    MAX_NESTING,
    MAX_VOCAB,
    SCHEMA_VERSION,
    Array,
    Reference,
    Unknown,
    pack_ids,
)

ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "uint32": 4, "int32": 4, "uint8": 1}

token_ids = st.integers(0, 2**32 - 1)
positions = st.integers(0, 2**53 - 1)
numbers = st.one_of(st.integers(-(2**63), 2**64 - 1), st.floats(allow_nan=False))
words = st.text(max_size=12)
paths = words.filter(lambda text: "\0" not in text)
seconds = st.floats(0, 1e6)
gears = st.sampled_from(["low", "mid", "high"])
dtypes = st.sampled_from(sorted(ITEM_BYTES))
references = st.builds(
    Reference,
    slot=st.integers(0, 2**16 - 1),
    seq=st.integers(0, 2**64 - 1),
    dtype=dtypes,
    shape=st.lists(st.integers(0, 2**40 - 1), max_size=8).map(tuple),
)


@st.composite
def inline_arrays(draw) -> Array:
    dtype = draw(dtypes)
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
    count = ITEM_BYTES[dtype]
    for size in shape:
        count *= size
    return Array(dtype, shape, draw(st.binary(min_size=count, max_size=count)))


arrays = st.one_of(inline_arrays(), references)
foreign = st.builds(msgpack.ExtType, st.integers(3, 127), st.binary(max_size=20))
values = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, words, st.binary(max_size=12), arrays, foreign),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(words, inner, max_size=3)),
    max_leaves=5,
).filter(lambda value: depth(value) < MAX_NESTING)


def depth(value) -> int:
    if isinstance(value, dict):
        value = list(value.values())
    return 1 + max(map(depth, value), default=0) if isinstance(value, list) else 0


def extras(kind: str | None) -> st.SearchStrategy[dict]:
    """Fields that the kind does not know."""
    known = {"k"} | {f.name for f in fields(KINDS[kind])} if kind else {"k"}
    return st.dictionaries(words.filter(lambda name: name not in known), values, max_size=3)


def maybe(strategy: st.SearchStrategy) -> st.SearchStrategy:
    return st.one_of(st.none(), strategy)


FIELDS = {
    "head": {
        "model": words, "fingerprint": words, "vocab": st.integers(1, MAX_VOCAB - 1),
        "eos": st.lists(token_ids, max_size=3), "session": maybe(words),
        "run": st.one_of(st.none(), paths, st.lists(paths, max_size=2)), "dtype": maybe(words),
        "v": st.integers(1, SCHEMA_VERSION),
    },
    "tokens": {"ids": st.lists(token_ids, max_size=5).map(pack_ids), "role": words,
               "final": st.booleans()},
    "prefilled": {"n_past": positions, "n_new": positions, "n_cached": positions,
                  "seconds": seconds, "logits": maybe(arrays)},
    "logits": {
        "pos": positions, "logits": arrays, "seconds": maybe(seconds),
        "experts": maybe(st.dictionaries(words, st.integers(0, 9), max_size=2)),
        "entropy": maybe(seconds), "mean": maybe(seconds), "slope": maybe(st.floats(-9, 9)),
        "gear": maybe(gears), "shifted": maybe(st.booleans()), "reason": maybe(words),
        "expected": maybe(gears),
    },
    "token": {
        "pos": positions, "id": token_ids, "logprob": maybe(st.floats(-99, 0)),
        "top": maybe(st.lists(st.tuples(token_ids, st.floats(-9, 0)).map(list), max_size=3)),
        "gear": maybe(gears), "entropy": maybe(seconds),
    },
    "text": {"s": words},
    "stats": {"stage": words},
    "error": {"code": st.integers(1, 255), "stage": words, "message": words, "hint": maybe(words)},
    "end": {
        "reason": st.sampled_from(["eos", "stop", "length", "interrupt", "error"]), "n": positions,
    },
}  # fmt: skip

frames = st.one_of(
    *(st.builds(KINDS[k], **known, extra=extras(k)) for k, known in FIELDS.items()),
    st.builds(Unknown, words.filter(lambda k: k not in KINDS), extras(None)),
)
