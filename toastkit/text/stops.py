"""Stop strings over streamed text: no part of a stop string, or of what may become one, is shown.

Text is held back only while a stop string may still result from it, so each piece is searched
together with less than the longest stop string before it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from toastkit.errors import UsageError


class StopStrings:
    """Cuts a stream of text at the first stop string.

    The earliest match wins, at the same start the longest, however the text was split into pieces.
    So a match is final only once no earlier or longer one is possible.

    stops: the strings, none of them empty. Raises UsageError for an empty one. stopped: the stop
    string that ended the text, or None.
    """

    def __init__(self, stops: Sequence[str]):
        if any(not stop for stop in stops):
            raise UsageError("a stop string is empty")
        self._stops = sorted(stops)
        self._longest = max(map(len, stops), default=0)
        self.stopped: str | None = None
        self._held = ""  # text seen and not shown

    def add(self, text: str) -> tuple[str, bool]:
        """Take a piece of text; return (text that is safe to show, True if a stop was found)."""
        if self.stopped is not None:
            return "", True
        self._held += text
        safe = self._grows_at()
        if self._match()[0] < safe:
            return self.finish(), True
        shown, self._held = self._held[:safe], self._held[safe:]
        return shown, False

    def finish(self) -> str:
        """Return the text held back when the run ends otherwise; a complete stop string in it still
        stops."""
        if self.stopped is None:
            end, _, self.stopped = self._match()
            self._held = self._held[:end]
        held, self._held = self._held, ""
        return held

    def _match(self) -> tuple[int, int, str | None]:
        """Return the start of the first stop string in the held text, minus its length, and that
        string, the longest at that start; the end of the text and None if there is none."""
        found = ((self._held.find(stop), -len(stop), stop) for stop in self._stops)
        nothing = (len(self._held), 0, None)
        return min((match for match in found if match[0] >= 0), default=nothing)

    def _grows_at(self) -> int:
        """Return the first place from which the held text is the beginning of a longer stop
        string."""
        end = len(self._held)
        for start in range(max(end - self._longest + 1, 0), end):
            tail = self._held[start:]
            after = bisect_right(self._stops, tail)  # longer ones that begin with it
            if self._stops[after : after + 1] and self._stops[after].startswith(tail):
                return start
        return end
