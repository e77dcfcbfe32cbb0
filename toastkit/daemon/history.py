"""Conversation keys: FNV-1a 64 over the messages, as in the toasted memo (000).

A request is looked up by the hash of messages[0..n-2], all but the new one. Its state is saved
under the hash of its messages and the answer: exactly what the next turn looks up. The hash only
finds a candidate, which is verified token by token, so a collision, or one text in two chat
templates, does no harm.
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
LONG = 1 << 12  # bytes; a longer message is replaced by its BLAKE2b


@lru_cache(maxsize=4096)  # a message once, not at every later turn: this is slow in Python
def fnv1a64(data: bytes, start: int = OFFSET_BASIS) -> int:
    """The 64-bit FNV-1a hash (Fowler, Noll, Vo). start: the hash of what came before."""
    value = start
    for byte in data:
        value = (value ^ byte) * PRIME & 0xFFFFFFFFFFFFFFFF
    return value


def _extended(start: int, data: bytes) -> int:
    """Extend a hash. Long messages go through a digest, for speed and because the cache keeps its
    keys."""
    return fnv1a64(blake2b(data).digest() if len(data) > LONG else data, start)


def conversation_hash(messages: Iterable[dict[str, Any]], tools: list | None = None) -> int:
    """The hash of messages and of the tools they were sent with, if any. Whitespace around contents
    is ignored: clients trim answers."""
    value = OFFSET_BASIS
    if tools:
        value = _extended(value, json.dumps(tools, sort_keys=True).encode())
    for message in messages:
        value = _extended(value, _canonical(message))
    return value


def _canonical(message: dict[str, Any]) -> bytes:
    """The canonical bytes of a message: role, content, then the other fields sorted, each
    terminated by a character that JSON escapes."""
    others = {k: v for k, v in message.items() if k not in ("role", "content") and v is not None}
    rest = json.dumps(others, sort_keys=True) if others else ""
    content = content_text(message).strip()
    return f"{message.get('role')}\x1f{content}\x1f{rest}\x1e".encode("utf-8", "surrogatepass")
