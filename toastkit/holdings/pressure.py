"""Memory pressure: how much of a model stays resident, decided from readings every 64 tokens, in
pieces: a policy's layers, or expert slots per layer.

Paper 001, section 3.4: below 300 MB of available memory, a quarter of the resident layers go. Its
section 5.4 shows what that alone leads to, as a reading is a snapshot. So pieces come back slowly,
and never as many as were too many. This cannot oscillate: each shed lowers the ceiling by at least
one, so that there are at most as many sheds as pieces, and between two the number only grows.
"""

from __future__ import annotations

CHECK_TOKENS = 64  # between two checks
LOW = 300 << 20  # bytes available; with less, a quarter of the resident pieces go
CRITICAL = 75 << 20  # with less, all of them
CALM = 2 * LOW  # with less, none comes back, lest it be shed at the next check
CALM_CHECKS = 4  # in a row before the first come back; twice as many after each mistake
SHED = 4  # one resident piece in this many goes
GROWTH = 16  # at most one in this many of all pieces comes back per check


class Checks:
    """When to check memory again. A pass that was no step (a chunk of a prompt, or of a text to be
    scored) counts for 64 tokens."""

    def __init__(self) -> None:
        self._steps = self._checked = self._seen = 0

    def count_step(self) -> None:
        """Count a step."""
        self._steps += 1

    def due(self) -> bool:
        """True if memory is to be checked now. Called before each pass."""
        chunk, self._seen = self._seen == self._steps, self._steps
        if not chunk and self._steps - self._checked < CHECK_TOKENS:
            return False
        self._checked = self._steps
        return True


class Pressure:
    """The controller of one run; it reads neither clock nor memory itself.

    most: all pieces. least: how many are never given up. ceiling: the most pieces that may be
    resident in the rest of this run. patience: calm checks in a row before growth.
    """

    def __init__(self, most: int, least: int = 0):
        self.most, self.least = most, least
        self.ceiling = most
        self.patience = CALM_CHECKS
        self._calm = 0  # checks in a row
        self._grown = False  # since the last shed
        self._short = -1  # `fitting` when memory was last short

    def update(self, available: int, resident: int, fitting: int) -> int:
        """How many pieces are to be resident from the next pass on, at most `ceiling`.

        available: bytes that can be allocated now, beside everything in memory. resident: pieces
        now, `least` or more. fitting: how many pieces fit in the available bytes and those that the
        model occupies on the device.
        """
        if available < LOW:
            self._short = fitting
            return self._shed(resident, resident if available < CRITICAL else -(-resident // SHED))
        room = self._room(resident, fitting) if available >= CALM else 0
        self._calm = self._calm + 1 if room > 0 else 0
        step = min(room, max(1, self.most // GROWTH)) if self._calm >= self.patience else 0
        self._grown = self._grown or step > 0
        return min(resident + step, self.ceiling)

    def emergency(self, resident: int) -> int:
        """React to an outside warning that memory is short: shed all but `least` pieces; as many as
        now will never be resident again in this run. resident: pieces now. Returns `least`."""
        return self._shed(resident, resident)

    def _shed(self, resident: int, count: int) -> int:
        self._calm = 0
        if resident <= self.least:
            return self.least  # not the pieces' fault: leave the ceiling as it is
        self.ceiling = max(self.least, min(self.ceiling, resident - 1))
        if self._grown:
            # Growth was a mistake: other memory use comes and goes, so wait longer.
            self.patience, self._grown = 2 * self.patience, False
        return max(self.least, min(resident - count, self.ceiling))

    def _room(self, resident: int, fitting: int) -> int:
        """How many pieces may come back now. Half of those that fit: so growth alone, in pieces of
        one size, never takes available memory below LOW: if what comes back is less than LOW, CALM
        covers it; if it is more, as much again is left. All of them if all fit: there is nothing
        more to compare with, and a tenth of them all has been spared. None if memory has not come
        back: what a shed freed is not to be spent again, least of all if another process leaks."""
        if fitting <= self._short and fitting < self.most:
            return 0
        room = self.most - resident if fitting >= self.most else (fitting - resident) // 2
        return min(room, self.ceiling - resident)
