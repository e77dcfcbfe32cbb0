"""Keeps emoji of several code points whole: what may still grow is held back.

Follows the emoji sequences of Unicode Technical Standard 51: a pictograph with variation selector,
skin tone, tags and zero-width joiners; a pair of regional indicators; a keycap.
"""

from __future__ import annotations

import re

LONGEST = 32  # code points; the longest emoji in use has 10, so more is noise and passes

_PICTOGRAPH = (
    "[\u00a9\u00ae\u203c\u2049\u2122\u2139\u2194-\u21aa\u231a-\u23ff\u24c2\u25aa-\u27bf"
    "\u2934\u2935\u2b05-\u2b55\u3030\u303d\u3297\u3299"
    "\U0001f000-\U0001f1e5\U0001f200-\U0001faff]"
)
_MODIFIER = "[\ufe0e\ufe0f\u20e3\U0001f3fb-\U0001f3ff\U000e0020-\U000e007f]"
_UNFINISHED = re.compile(
    f"(?:[0-9#*]\ufe0f?|{_PICTOGRAPH}{_MODIFIER}*(?:\u200d{_PICTOGRAPH}?{_MODIFIER}*)*)\\Z"
)

_KEYS = frozenset("0123456789#*")  # may begin a keycap


class EmojiKeeper:
    """Passes text on, except an emoji at its end that the next piece may continue."""

    def __init__(self) -> None:
        self._held = ""

    def add(self, text: str) -> str:
        """Return the text whose rendering no later piece can change."""
        if not text:
            return ""
        text = self._held + text
        cut = len(text) - unfinished(text)
        self._held = text[cut:]
        return text[:cut]

    def finish(self) -> str:
        """Return what is held back."""
        held, self._held = self._held, ""
        return held


def unfinished(text: str) -> int:
    """Count the code points at the end of a text that may begin a longer emoji."""
    if text[-1:] < "\u00a9" and text[-1:] not in _KEYS:
        return 0  # fast path for most text
    flags = 0
    while flags < len(text) and _is_flag(text[-1 - flags]):
        flags += 1
    if flags:
        return flags % 2  # a pair is complete
    tail = text[-LONGEST - 1 :]
    found = _UNFINISHED.search(tail)
    length = len(tail) - found.start() if found else 0
    return length if length <= LONGEST else 0


def _is_flag(character: str) -> bool:
    return "\U0001f1e6" <= character <= "\U0001f1ff"
