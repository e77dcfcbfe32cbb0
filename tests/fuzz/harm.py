"""What is done to good data: to bytes, and to maps and lists. A random.Random decides it all."""

from __future__ import annotations

import copy
import random
from typing import Any

import msgpack

NUMBERS = (
    -1, 0, 1, 2, 5, 7, 255, 256, 4095, 4096, 65536, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53,
    2**63, 2**64 - 1, -(2**63), 0.5, -0.0, 1e308, float("inf"), float("-inf"), float("nan"),
)  # fmt: skip
TEXTS = (
    "", "x", "crumb", "one", "two", "org/name", "../one", ".", "low", "high", "eos", "\x1b[2J",
    "é狐", "a\0b", "a\nb", "float32", "x" * 3000, "k", "logits", "user", "None", "1",
)  # fmt: skip
PLAIN_VALUES = (
    None, True, False, *NUMBERS, *TEXTS, [], {}, [[]], [1, 2], [-1], [0] * 3000, {"": None},
    {"gear": "low"}, [[1, -0.5]], [["user", "Hi"]], {"role": "user", "content": "Hi"},
)  # fmt: skip
JSON_VALUES = (  # and those that stand for what JSON has not
    *PLAIN_VALUES, {"topk": [[1, -0.5]], "size": 4096}, {"topk": [], "size": 2**62},
    {"bytes": "AA=="}, {"ext": 5, "base64": ""}, {"ext": -1, "base64": "AAAAAA=="},
    {"slot": 0, "seq": 1, "dtype": "float32", "shape": [4096]},
    {"dtype": "float32", "shape": [-1], "base64": ""},
)  # fmt: skip
_SHAPED = msgpack.packb(("float32", (1,)))
MSGPACK_VALUES = (
    *PLAIN_VALUES, b"", b"\0", b"\0" * 4, b"\xff" * 4, b"\1\0\0\0" * 999, msgpack.Timestamp(1, 2),
    msgpack.ExtType(1, b""), msgpack.ExtType(1, _SHAPED), msgpack.ExtType(1, _SHAPED + b"\0" * 4),
    msgpack.ExtType(1, _SHAPED + b"\0\0\xc0\x7f"), msgpack.ExtType(2, b"\x94\0\1\xa1x\x90"),
    msgpack.ExtType(2, msgpack.packb((0, 1, "float32", (4096,)))), msgpack.ExtType(9, b"x"),
)  # fmt: skip


def value(rng: random.Random, known: tuple = MSGPACK_VALUES) -> Any:
    """One that few programs expect; now and then a deep or a wide one."""
    roll = rng.random()
    if roll < 0.03:
        made: Any = rng.choice(known)
        for _ in range(rng.choice((3, 7, 8, 9, 40, 150))):
            made = rng.choice(([made], {"a": made}))
        return made
    if roll < 0.034:
        return [[rng.choice(([], {}, 0, ""))] * rng.randint(1, 1000)] * rng.randint(1, 300)
    return copy.deepcopy(rng.choice(known))


def _places(root: Any) -> list[tuple[Any, Any]]:
    """Every item of nested maps and lists: what holds it, and its key or index."""
    found, left = [], [root]
    while left:
        holder = left.pop()
        items = holder.items() if isinstance(holder, dict) else enumerate(holder)
        for key, item in items:
            found.append((holder, key))
            if isinstance(item, (dict, list)) and len(item) < 100:
                left.append(item)
    return found


def _near(rng: random.Random, item: Any) -> Any:
    """What is almost the same."""
    if isinstance(item, msgpack.ExtType):
        return msgpack.ExtType(item.code, mutate_bytes(rng, item.data))
    if isinstance(item, bytes):
        return rng.choice((item[:-1], item + b"\0", mutate_bytes(rng, item)))
    if isinstance(item, (str, list)):
        return rng.choice((item[1:], item + item[:1], item[::-1]))
    if isinstance(item, (int, float)):
        return rng.choice((item + 1, item - 1, -item, item * 2, float(item)))
    return {} if item is None else None


def mutate(rng: random.Random, root: list, known: tuple = MSGPACK_VALUES) -> None:
    """Changes one thing in a list of maps: a value, a name, what is there and in which order."""
    places = _places(root)
    if not places:
        root.append(value(rng, known))
        return
    holder, key = rng.choice(places)
    other, there = rng.choice(places)
    act = rng.randrange(8)
    if act < 2:
        holder[key] = value(rng, known)
    elif act == 2:
        holder[key] = _near(rng, holder[key])
    elif act == 3:
        holder[key] = copy.deepcopy(other[there])
    elif act == 4:
        del holder[key]
    elif isinstance(holder, list) and act == 5:
        holder[key:key] = copy.deepcopy(holder[key : key + rng.choice((1, 1, 5))])
    elif isinstance(holder, list) and act == 6:
        rng.shuffle(holder)
    elif isinstance(holder, dict) and act < 7:
        holder[rng.choice((*TEXTS, "session", "run", "final", "vocab"))] = holder.pop(key)
    else:
        del root[rng.randrange(len(root)) :]


def mutate_bytes(rng: random.Random, data: bytes) -> bytes:
    """A few bytes changed, put in, taken out, moved; or the end cut off."""
    harmed = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 5, 20))):
        at, length = rng.randrange(len(harmed) + 1), rng.choice((1, 1, 2, 4, 40))
        act = rng.randrange(6)
        if act == 0 and at < len(harmed):
            harmed[at] ^= 1 << rng.randrange(8)
        elif act == 1:
            harmed[at : at + length] = rng.randbytes(length)
        elif act == 2:
            harmed[at : at + length] = b""
        elif act == 3:
            start = rng.randrange(len(harmed) + 1)
            harmed[at:at] = harmed[start : start + length]
        elif act == 4:  # sizes that promise much, of msgpack; line ends and brackets, of JSON
            harmed[at:at] = rng.choice(
                (b"\xdd\xff\xff\xff\xff", b"\xdc\x10\0", b"\xdf\0\1\0\0", b"\xc6\xff\xff\xff\xff",
                 b"\xc9\0\xff\xff\xff\1", b"\x91" * 700, b"\n", b"\r", b"[" * 2000, b'{"a":' * 50,
                 b"9" * 5000, b"\\ud800", b"\xff", b"1e999", b"\0")
            )  # fmt: skip
        else:
            del harmed[at:]
    return bytes(harmed)
