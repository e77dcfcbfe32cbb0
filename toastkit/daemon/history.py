"""The name of a conversation: FNV-1a 64 over its messages, as in the toasted memo (000).

A request is looked up by the hash of messages[0..n-2], all but the new one. What it leaves behind
is saved under the hash of its messages and the answer: exactly what the next turn will look for.
The hash only finds a candidate. Whether it is the right one is decided by comparing tokens, so two
conversations of one hash, or of one text and two templates, do no harm.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import lru_cache
from hashlib import blake2b
from typing import Any

from toastkit.text.messages import content_text

OFFSET_BASIS = 0xCBF29CE484222325
PRIME = 0x100000001B3
LONG = 1 << 12  # bytes of a message from which on its BLAKE2b stands for it


def fnv1a64(data: bytes, start: int = OFFSET_BASIS) -> int:
    """The FNV-1a hash of 64 bits (Fowler, Noll, Vo). start: the hash of what came before."""
    value = start
    for byte in data:
        value = (value ^ byte) * PRIME & 0xFFFFFFFFFFFFFFFF
    return value


# A message is hashed once and not at every later turn: FNV-1a goes byte by byte, in Python.
_known = lru_cache(maxsize=4096)(lambda start, data: fnv1a64(data, start))


def _extended(start: int, data: bytes) -> int:
    """For the same reason, and because they are kept here, long messages go through a digest."""
    return _known(start, blake2b(data).digest() if len(data) > LONG else data)


def conversation_hash(messages: Iterable[dict[str, Any]], tools: list | None = None) -> int:
    """The hash of some messages, and of the tools that they were said with, if any. Space around a
    content does not count: clients trim answers."""
    value = OFFSET_BASIS
    if tools:
        value = _extended(value, json.dumps(tools, sort_keys=True).encode())
    for message in messages:
        value = _extended(value, _canonical(message))
    return value


def _canonical(message: dict[str, Any]) -> bytes:
    """One spelling of a message: role, content, then the other fields sorted, each ended by a
    character that JSON escapes."""
    others = {k: v for k, v in message.items() if k not in ("role", "content") and v is not None}
    rest = json.dumps(others, sort_keys=True) if others else ""
    content = content_text(message).strip()
    return f"{message.get('role')}\x1f{content}\x1f{rest}\x1e".encode("utf-8", "surrogatepass")
