"""How many layers stay while memory comes and goes: decided from readings, every 64 tokens.

Paper 001, section 3.4: below 300 MB of available memory, a quarter of the resident layers go. Its
section 5.4 is what happens without more than that: a reading is a snapshot. So what is given up
comes back slowly, and never as far as where it was too much. That cannot swing: each shed lowers
the ceiling by one at least, so that there are at most as many as the model has layers, and between
two sheds the number only grows.
"""

from __future__ import annotations

CHECK_TOKENS = 64  # between two checks
LOW = 300 << 20  # bytes available; with less, a quarter of the resident layers go
CRITICAL = 75 << 20  # with less, all of them
CALM = 2 * LOW  # with less, none comes back: what grows must not be what is shed next
CALM_CHECKS = 4  # in a row before the first layers come back; twice as many after each mistake
SHED = 4  # one resident layer in so many goes
GROWTH = 16  # at most one of the model's layers in so many comes back at a check


class Pressure:
    """The controller of one run; it reads no clock and no memory itself.

    layers: of the model. ceiling: the most layers that may still stay in this run. patience: calm
    checks in a row that growing waits for.
    """

    def __init__(self, layers: int):
        self.layers = layers
        self.ceiling = layers
        self.patience = CALM_CHECKS
        self._calm = 0  # checks in a row
        self._grown = False  # since the last shed
        self._short = -1  # what would have fitted when memory was last short

    def update(self, available: int, resident: int, fitting: int) -> int:
        """How many layers are to stay from the next pass on, at most `ceiling`.

        available: bytes that can be allocated now, with everything in memory that is. resident:
        layers that stay now. fitting: how many could, were those of now not there: equation 2
        (`sizing.adaptive`) of the available bytes and what the model occupies of the device.
        """
        if available < LOW:
            self._short = fitting
            return self._shed(resident, resident if available < CRITICAL else -(-resident // SHED))
        room = self._room(resident, fitting) if available >= CALM else 0
        self._calm = self._calm + 1 if room > 0 else 0
        step = min(room, max(1, self.layers // GROWTH)) if self._calm >= self.patience else 0
        self._grown = self._grown or step > 0
        return min(resident + step, self.ceiling)

    def emergency(self, resident: int) -> int:
        """Somebody else says that memory is short: no layer stays, and as many as now never will
        again in this run. resident: layers that stay now. Returns 0."""
        return self._shed(resident, resident)

    def _shed(self, resident: int, count: int) -> int:
        self._calm = 0
        if not resident:
            return 0  # it is not the layers: nothing is learnt about them
        self.ceiling = min(self.ceiling, resident - 1)
        if self._grown:
            # What had come back was too much: somebody comes and goes, and is waited for.
            self.patience, self._grown = 2 * self.patience, False
        return min(resident - count, self.ceiling)

    def _room(self, resident: int, fitting: int) -> int:
        """How many layers may come back, were it now. Half of those that fit: of layers of one size
        growing by itself then never takes available memory below LOW. Where what comes back is less
        than LOW, CALM covers it; where it is more, as much again is left. Where all layers fit,
        there is no more to compare with, and equation 2 has spared a tenth of them all. None where
        memory has not come back: what a shed frees is not to be spent again, least of all while
        somebody leaks."""
        if fitting <= self._short and fitting < self.layers:
            return 0
        room = self.layers - resident if fitting >= self.layers else (fitting - resident) // 2
        return min(room, self.ceiling - resident)
