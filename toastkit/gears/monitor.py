"""The entropy of a step's logits, and the gear that its rolling mean calls for.

Paper 003 sections 3.1-3.5. Low entropy means that the model is sure of the next token, and lower
precision will do; high entropy calls for the checkpoint's own. The monitor only observes; gears are
shifted elsewhere. Only the entropy meter imports numpy.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ..errors import DataError, UsageError
from ..frames import GEARS

if TYPE_CHECKING:
    import numpy as np

# If the last two entropies exceed this share of the maximum, something broke.
CATASTROPHIC = 0.9
GUARD = 1e4
LONGEST_WINDOW = 1024
_CATASTROPHE = "catastrophic"
_HELD = "held by hysteresis"


class EntropyMeter:
    """Shannon entropy of logits over one vocabulary, with reused scratch buffers."""

    def __init__(self, vocab: int):
        import numpy as np

        if vocab < 1:
            raise UsageError(f"invalid vocabulary: {vocab} is not at least 1")
        self._np = np
        self._limit = math.log2(vocab)
        self._values = np.empty(vocab, np.float32)
        self._exponentials = np.empty(vocab, np.float32)

    def bits(self, logits: np.ndarray) -> float:
        """Entropy of softmax(logits) in bits, in [0, log2 vocab]: paper 003 equation 3.1.

        logits: float32 (vocab,), not modified; NaN counts as 0, +-inf as +-1e4 (section 10.1).
        Raises DataError for another shape.
        """
        np, values, exponentials = self._np, self._values, self._exponentials
        if logits.shape != values.shape:
            raise DataError(
                f"cannot measure entropy: logits have shape {list(logits.shape)}, "
                f"the vocabulary has {len(values)} ids"
            )
        peak = logits[logits.argmax()]
        # argmax finds a NaN wherever it is, and comparisons with it are false; -inf: see below.
        if not -np.inf < peak < np.inf:
            logits = np.nan_to_num(logits, nan=0.0, posinf=GUARD, neginf=-GUARD)
            peak = logits[logits.argmax()]
        # Differences of huge logits overflow to -inf; their weight is 0, but 0 * -inf is NaN.
        with np.errstate(over="ignore", invalid="ignore"):
            np.subtract(logits, peak, out=values)
            np.exp(values, out=exponentials)
            weighted = float(np.dot(exponentials, values))
        if math.isnan(weighted):
            kept = exponentials > 0
            weighted = float(np.dot(exponentials[kept], values[kept]))
        total = float(np.add.reduce(exponentials))
        # log sum e^v - sum p v, the stable form of -sum p ln p.
        nats = math.log(total) - weighted / total
        return min(max(nats / math.log(2), 0.0), self._limit)


@dataclass(frozen=True)
class MonitorOptions:
    """Paper 003 table 9 and section 3.5.

    window: entropies in the rolling mean. low, high: thresholds, in bits at the reference
    vocabulary. hysteresis: bits by which the mean must cross a threshold to leave low or high gear.
    reference_vocab: ids. lookahead: steps that the forecast looks ahead. scale_to_vocab: multiply
    the thresholds by log2 vocab / log2 reference_vocab.
    """

    window: int = 5
    low: float = 1.8
    high: float = 3.5
    hysteresis: float = 0.1
    reference_vocab: int = 32768
    lookahead: int = 2
    scale_to_vocab: bool = True

    def validate(self) -> None:
        """Raise a UsageError that names an invalid option, its value and the valid ones."""
        check_whole("window", self.window, 1, LONGEST_WINDOW)
        check_whole("reference vocabulary", self.reference_vocab, 2, 2**31 - 1)
        check_whole("lookahead", self.lookahead, 0, LONGEST_WINDOW)
        _check_bits("low threshold", self.low)
        _check_bits("high threshold", self.high)
        _check_bits("hysteresis", self.hysteresis)
        if not isinstance(self.scale_to_vocab, bool):
            raise UsageError(f"invalid scaling: {self.scale_to_vocab!r} is not true or false")
        if not self.low < self.high:
            raise UsageError(
                f"invalid thresholds: low {self.low:g} is not less than high {self.high:g}"
            )


def check_whole(name: str, value: Any, low: int, high: int) -> None:
    """Raise a UsageError unless value is a whole number in [low, high]. name: for the message."""
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise UsageError(f"invalid {name}: {value!r} is not a whole number in [{low}, {high}]")


def _check_bits(name: str, value: Any) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not 0 <= value < math.inf:
        raise UsageError(f"invalid {name}: {value!r} is not a finite number of bits, at least 0")


@dataclass(slots=True)
class Reading:
    """The outcome of one step's logits. entropy, mean, forecast: bits. slope: bits per step.

    gear: low, mid or high, to run the next pass in. shifted: it differs from the previous one.
    reason: a few words, such as "mean 1.20 <= 1.44", "held by hysteresis", "held: 2 of 4 tokens",
    "prompt score 4.8 -> high". expected: the forecast's gear by the thresholds alone (section 3.5):
    the one to prepare.
    """

    entropy: float
    mean: float
    slope: float
    forecast: float
    gear: str
    shifted: bool
    reason: str
    expected: str

    @property
    def catastrophic(self) -> bool:
        """True if the gear is high because the last two entropies mean that something broke."""
        return self.reason == _CATASTROPHE


class EntropyMonitor:
    """Follows the entropies of one answer and classifies them. Deterministic, O(window) per step.

    low, high: the thresholds in bits for this vocabulary.
    """

    def __init__(self, vocab: int, options: MonitorOptions | None = None):
        options = options or MonitorOptions()
        options.validate()
        if vocab < 2:
            raise UsageError(f"invalid vocabulary: {vocab} is not at least 2")
        self.vocab = vocab
        self.options = options
        scale = 1.0
        if options.scale_to_vocab:
            scale = math.log2(vocab) / math.log2(options.reference_vocab)
        self.low = options.low * scale
        self.high = options.high * scale
        self._catastrophic = CATASTROPHIC * math.log2(vocab)
        self._window: deque[float] = deque(maxlen=options.window)
        self._gear: str | None = None

    def update(self, entropy: float) -> Reading:
        """Take in the entropy of one step, in bits. Raises DataError when it is not finite."""
        if not math.isfinite(entropy):
            raise DataError(f"cannot follow the entropy: {entropy} is not finite")
        window = self._window
        previous = window[-1] if window else 0.0
        window.append(entropy)
        # No running sum: so the reading depends on the window alone, without drift.
        mean = sum(window) / len(window)
        slope = (window[-1] - window[0]) / (len(window) - 1) if len(window) > 1 else 0.0
        if min(previous, entropy) > self._catastrophic:
            gear, reason = "high", _CATASTROPHE
        else:
            gear, reason = self.classify(mean, self._gear)
        shifted = self._gear is not None and gear != self._gear
        self._gear = gear
        forecast = mean + self.options.lookahead * slope
        expected = self.plain(forecast)
        return Reading(entropy, mean, slope, forecast, gear, shifted, reason, expected)

    @property
    def filled(self) -> bool:
        """True if the window is full."""
        return len(self._window) == self.options.window

    def plain(self, mean: float) -> str:
        """The gear of a mean entropy, in bits, by the thresholds alone, without hysteresis (section
        3.3)."""
        if mean <= self.low:
            return "low"
        return "high" if mean >= self.high else "mid"

    def classify(self, mean: float, current: str | None) -> tuple[str, str]:
        """Gear and reason for a mean entropy, in bits: section 3.3 with hysteresis. current: the
        gear so far, None at the start."""
        gear = self.plain(mean)
        if current is None:
            return gear, "start"
        margin = self.options.hysteresis
        if current == "low" and gear != "low" and mean <= self.low + margin:
            return "low", _HELD
        if current == "high" and gear != "high" and mean >= self.high - margin:
            return "high", _HELD
        if gear == "low":
            return gear, f"mean {mean:.2f} <= {self.low:.2f}"
        if gear == "high":
            return gear, f"mean {mean:.2f} >= {self.high:.2f}"
        return gear, f"{self.low:.2f} < mean {mean:.2f} < {self.high:.2f}"

    def state(self) -> dict[str, Any]:
        """Everything that the next reading depends on, as plain data for msgpack or JSON."""
        return {
            "vocab": self.vocab,
            "options": asdict(self.options),
            "window": list(self._window),
            "previous": self._window[-1] if self._window else None,
            "gear": self._gear,
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> EntropyMonitor:
        """The monitor that `state()` described. Raises DataError when it is not such a state."""
        try:
            monitor = cls(state["vocab"], MonitorOptions(**state["options"]))
            window, previous, gear = state["window"], state["previous"], state["gear"]
            valid = isinstance(monitor.vocab, int) and len(window) <= monitor.options.window
            valid = valid and all(map(math.isfinite, window))
            # All three are set by the first entropy, and previous is the last one in the window.
            whole = bool(window) and gear in GEARS and previous == window[-1]
            valid = valid and (whole or (not window and gear is None and previous is None))
        except UsageError as error:
            raise DataError(f"cannot restore the entropy monitor: {error}") from error
        except (KeyError, TypeError, ValueError, OverflowError):
            valid = False
        if not valid:
            raise DataError("cannot restore the entropy monitor: its state is malformed")
        monitor._window.extend(window)
        monitor._gear = gear
        return monitor
