"""How much of a model stays while memory comes and goes: decided from readings, every 64 tokens.
What stays or goes is pieces: a policy's layers, or slots of each layer for its experts.

Paper 001, section 3.4: below 300 MB of available memory, a quarter of the resident layers go. Its
section 5.4 is what happens without more than that: a reading is a snapshot. So what is given up
comes back slowly, and never as far as where it was too much. That cannot swing: each shed lowers
the ceiling by one at least, so that there are at most as many as there are pieces, and between two
sheds the number only grows.
"""

from __future__ import annotations

CHECK_TOKENS = 64  # between two checks
LOW = 300 << 20  # bytes available; with less, a quarter of the resident pieces go
CRITICAL = 75 << 20  # with less, all of them
CALM = 2 * LOW  # with less, none comes back: what grows must not be what is shed next
CALM_CHECKS = 4  # in a row before the first come back; twice as many after each mistake
SHED = 4  # one resident piece in so many goes
GROWTH = 16  # at most one of all pieces in so many comes back at a check


class Checks:
    """When memory is to be looked at again. A pass that was no step, a chunk of a prompt or of a
    text that is scored, counts for 64 tokens."""

    def __init__(self) -> None:
        self._steps = self._checked = self._seen = 0

    def count_step(self) -> None:
        """A step is being run."""
        self._steps += 1

    def due(self) -> bool:
        """Asked before each pass."""
        chunk, self._seen = self._seen == self._steps, self._steps
        if not chunk and self._steps - self._checked < CHECK_TOKENS:
            return False
        self._checked = self._steps
        return True


class Pressure:
    """The controller of one run; it reads no clock and no memory itself.

    most: pieces that there are. least: of them, those that are never given up. ceiling: the most
    pieces that may still stay in this run. patience: calm checks in a row that growing waits for.
    """

    def __init__(self, most: int, least: int = 0):
        self.most, self.least = most, least
        self.ceiling = most
        self.patience = CALM_CHECKS
        self._calm = 0  # checks in a row
        self._grown = False  # since the last shed
        self._short = -1  # what would have fitted when memory was last short

    def update(self, available: int, resident: int, fitting: int) -> int:
        """How many pieces are to stay from the next pass on, at most `ceiling`.

        available: bytes that can be allocated now, with everything in memory that is. resident:
        pieces that stay now, `least` or more. fitting: how many could, were those of now not there:
        of the available bytes and what the model occupies of the device.
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
        """Somebody else says that memory is short: only `least` pieces stay, and as many as now
        never will again in this run. resident: pieces that stay now. Returns `least`."""
        return self._shed(resident, resident)

    def _shed(self, resident: int, count: int) -> int:
        self._calm = 0
        if resident <= self.least:
            return self.least  # it is not the pieces: nothing is learnt about them
        self.ceiling = max(self.least, min(self.ceiling, resident - 1))
        if self._grown:
            # What had come back was too much: somebody comes and goes, and is waited for.
            self.patience, self._grown = 2 * self.patience, False
        return max(self.least, min(resident - count, self.ceiling))

    def _room(self, resident: int, fitting: int) -> int:
        """How many pieces may come back, were it now. Half of those that fit: of pieces of one size
        growing by itself then never takes available memory below LOW. Where what comes back is less
        than LOW, CALM covers it; where it is more, as much again is left. Where all fit, there is
        no more to compare with, and a tenth of them all has been spared. None where memory has not
        come back: what a shed frees is not to be spent again, least of all while somebody leaks."""
        if fitting <= self._short and fitting < self.most:
            return 0
        room = self.most - resident if fitting >= self.most else (fitting - resident) // 2
        return min(room, self.ceiling - resident)
