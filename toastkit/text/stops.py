"""Stop strings over streamed text: nothing of a stop string, nor of what may become one, is shown.

An Aho-Corasick automaton (Aho and Corasick 1975): linear in the text, whatever the number of stops.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from toastkit.errors import UsageError


class StopStrings:
    """Cuts a stream of text at the first stop string.

    The earliest match wins, at the same start the longest, however the text was split into pieces.
    So a match is final only when no earlier or longer one can still come about.

    stops: the strings, none of them empty. Raises UsageError for an empty one.
    stopped: the stop string that ended the text, or None.
    """

    def __init__(self, stops: Sequence[str]):
        if any(not stop for stop in stops):
            raise UsageError("a stop string is empty")
        self._next: list[dict[str, int]] = [{}]  # node -> character -> node
        self._fail = [0]  # node -> node of the longest proper suffix that is a prefix of a stop
        self._match: list[str | None] = [None]  # node -> longest stop that ends here
        self._pending = [0]  # node -> length of the longest suffix that can still grow into a stop
        self._build(stops)
        self.stopped: str | None = None
        self._node = 0
        self._held = ""  # text seen and not shown
        self._found: str | None = None  # the best match so far
        self._start = 0  # where it begins in the held text

    def add(self, text: str) -> tuple[str, bool]:
        """Takes a piece of text; returns (text that is safe to show, whether a stop was found)."""
        if self.stopped is not None:
            return "", True
        if len(self._next) == 1:
            return text, False
        offset = len(self._held)
        self._held += text
        for end, character in enumerate(text, offset + 1):
            self._step(character, end)
            if self._found and end - self._pending[self._node] > self._start:
                return self._stop(), True
        safe = len(self._held) - self._pending[self._node]  # a match not final begins after it
        shown, self._held = self._held[:safe], self._held[safe:]
        self._start -= safe
        return shown, False

    def finish(self) -> str:
        """The text held back when the run ends otherwise; a whole stop string in it still stops."""
        if self.stopped is not None:
            return ""
        if self._found:
            return self._stop()
        held, self._held, self._node = self._held, "", 0
        return held

    def _stop(self) -> str:
        shown = self._held[: self._start]
        self.stopped = self._found
        self._held = ""
        return shown

    def _step(self, character: str, end: int) -> None:
        node = self._node
        while node and character not in self._next[node]:
            node = self._fail[node]
        self._node = node = self._next[node].get(character, 0)
        match = self._match[node]
        # An equal start comes again only with a longer match, because `end` grows.
        if match and (not self._found or end - len(match) <= self._start):
            self._found, self._start = match, end - len(match)

    def _build(self, stops: Sequence[str]) -> None:
        depth = [0]
        for stop in stops:
            node = 0
            for character in stop:
                if character not in self._next[node]:
                    self._next[node][character] = len(self._next)
                    self._next.append({})
                    self._fail.append(0)
                    self._match.append(None)
                    self._pending.append(0)
                    depth.append(depth[node] + 1)
                node = self._next[node][character]
            self._match[node] = stop
        queue = deque([0])
        while queue:  # breadth first: the links of shorter prefixes are there already
            node = queue.popleft()
            for character, child in self._next[node].items():
                link = self._fail[node]
                while link and character not in self._next[link]:
                    link = self._fail[link]
                if node:
                    self._fail[child] = self._next[link].get(character, 0)
                link = self._fail[child]
                self._match[child] = self._match[child] or self._match[link]
                self._pending[child] = depth[child] if self._next[child] else self._pending[link]
                queue.append(child)
