"""Calibration: thresholds from a model's measured entropies, in place of the paper's defaults.

The three strategies of paper 003, section 4, with the constants of tables 9 and 10. All are pure
functions of entropies in bits, of logits over `vocab` ids, in any order. The thresholds are bits at
that vocabulary, not to be scaled again.

    prefill   percentiles of the prompt's own entropies, capped             section 4.1
    prompts   the median over a few mixed prompts and answers               section 4.2, MLX
    file      the boundary between the user's easy and hard prompts         section 4.2, by hand
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from toastkit.errors import DataError, UsageError

STRATEGIES = ("prefill", "prompts", "file")
MIN_SAMPLES = 5
MIN_LOW = 0.01  # bits
# Integers, so that ranks are exact.
LOW_PERCENT, HIGH_PERCENT = 30, 60
LOW_CAP, HIGH_CAP = 0.06, 0.12  # shares of log2 vocab
PREFILL_BAND = 0.2  # bits
HIGH_BY_MEDIAN = 2.5
PROMPTS_BAND = 0.3  # bits
EASY_PERCENT, HARD_PERCENT = 80, 20
FILE_BAND = 0.2  # bits; the paper gives none for this strategy
SLACK = 0.01  # bits beyond [0, log2 vocab] that rounding on a device may give

CALIBRATION_PROMPTS = (
    "Say good morning to a neighbour, and ask whether she slept well.",
    "What is 24 * 17 + 9? Show every step before you give the result.",
    "Describe a harbour at dawn in three sentences that nobody has written before.",
)
_EXAMPLE = 'write {"easy": ["a text"], "hard": ["a text"]}'


@dataclass(frozen=True)
class Thresholds:
    """low, high: bits at a vocabulary of `vocab` ids, low < high. strategy: one of STRATEGIES.
    samples: the number of entropies used. overlap: the hard prompts were no harder than the easy
    ones, so that the boundary between them means little."""

    low: float
    high: float
    strategy: str
    samples: int
    vocab: int
    overlap: bool = False

    def validate(self) -> None:
        """Raise DataError for invalid values, which may come from a file."""
        bits = (self.low, self.high)
        if not all(type(x) in (int, float) and 0 <= x < math.inf for x in bits):
            raise DataError("invalid thresholds: not finite numbers of bits, at least 0")
        if not self.low < self.high:
            raise DataError(
                f"invalid thresholds: low {self.low:g} is not less than high {self.high:g}"
            )
        if self.strategy not in STRATEGIES:
            raise DataError(f"invalid thresholds: the strategy is none of {', '.join(STRATEGIES)}")
        if type(self.samples) is not int or self.samples < 1:
            raise DataError("invalid thresholds: the number of samples is not at least 1")
        if type(self.vocab) is not int or self.vocab < 2:
            raise DataError("invalid thresholds: the vocabulary is not at least 2")
        if type(self.overlap) is not bool:
            raise DataError("invalid thresholds: overlap is not true or false")


def from_prefill(entropies: Iterable[float], vocab: int) -> Thresholds:
    """Section 4.1 and the caps of 4.2, on the n positive entropies e_0 <= ... <= e_n-1 of a prompt:

        low = max(e[floor(0.30 n) - 1], 0.01)        high = e[min(n - 1, floor(0.60 n))]

    A band narrower than 0.2 bits is set to 0.1 on either side of its centre, and moved up if low
    would fall below 0.01. Then low is capped at 0.06 log2 vocab and high at 0.12; a cap may leave a
    narrower band, but never an empty one. Indices count from 0, as in the paper.
    Raises DataError for fewer than 5 positive entropies, or values out of range; UsageError.
    """
    samples = [e for e in _checked(entropies, vocab) if e > 0]
    n = len(samples)
    if n < MIN_SAMPLES:
        raise DataError(
            f"cannot calibrate: a prompt needs {MIN_SAMPLES} positive entropies, this has {n}",
            hint="give a longer prompt",
        )
    low = max(samples[n * LOW_PERCENT // 100 - 1], MIN_LOW)
    high = samples[min(n - 1, n * HIGH_PERCENT // 100)]
    low, high = _widened(low, high, PREFILL_BAND)
    most = math.log2(vocab)
    return Thresholds(min(low, LOW_CAP * most), min(high, HIGH_CAP * most), "prefill", n, vocab)


def from_prompts(entropies: Iterable[float], vocab: int) -> Thresholds:
    """Section 4.2, as for MLX: low is the median (at least 0.01), high is 2.5 times that, and at
    least 0.3 bits above it. The paper caps neither here. The median of an even number of entropies
    is the mean of the middle two. Raises DataError for fewer than 5 entropies, or values out of
    range; UsageError."""
    samples = _enough(_checked(entropies, vocab), "the prompts")
    low = max(percentile(samples, 50), MIN_LOW)
    high = max(HIGH_BY_MEDIAN * low, low + PROMPTS_BAND)
    return Thresholds(low, high, "prompts", len(samples), vocab)


def from_easy_and_hard(easy: Iterable[float], hard: Iterable[float], vocab: int) -> Thresholds:
    """Section 4.2, "the easy/hard boundary": low is the 80th percentile of the easy prompts'
    entropies, high the 20th of the hard ones', so that most of each are on their own side, and the
    range between is mid.

    If the two overlap (low would not be less than high), they are swapped into rising order, which
    keeps the band in which the prompts cannot be told apart as mid, and `overlap` is set. A band
    narrower than 0.2 bits is widened as in from_prefill. Raises DataError for fewer than 5
    entropies of either, or values out of range; UsageError.
    """
    easy_samples = _enough(_checked(easy, vocab), "the easy prompts")
    hard_samples = _enough(_checked(hard, vocab), "the hard prompts")
    below = percentile(easy_samples, EASY_PERCENT)
    above = percentile(hard_samples, HARD_PERCENT)
    low, high = _widened(min(below, above), max(below, above), FILE_BAND)
    samples = len(easy_samples) + len(hard_samples)
    return Thresholds(low, high, "file", samples, vocab, overlap=not below < above)


def percentile(samples: Sequence[float], percent: int) -> float:
    """A percentile of at least one sample, in rising order: interpolated linearly between the two
    nearest ranks, numpy's default (`linear`)."""
    rank, rest = divmod((len(samples) - 1) * percent, 100)
    if not rest:
        return samples[rank]
    return samples[rank] + (samples[rank + 1] - samples[rank]) * rest / 100


def parse_prompts(text: str) -> tuple[list[str], list[str]]:
    """Parse the easy and the hard prompts of a file: a JSON object {"easy": [...], "hard": [...]}
    with at least one text in each. Raises DataError with one line for anything else."""
    import json

    try:
        fields = json.loads(text)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise _no_prompts(f"not JSON ({where})") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, deep nesting
        raise _no_prompts("not JSON that can be read") from error
    if not isinstance(fields, dict):
        raise _no_prompts("not an object")
    unknown = sorted(set(fields) - {"easy", "hard"})
    if unknown:
        raise _no_prompts(f"unknown field {unknown[0][:40]!r}")
    return _texts(fields, "easy"), _texts(fields, "hard")


def _texts(fields: dict[str, Any], name: str) -> list[str]:
    texts = fields.get(name)
    if not isinstance(texts, list) or not texts:
        raise _no_prompts(f"{name!r} is not a list of one text at least")
    for number, item in enumerate(texts, 1):
        if not isinstance(item, str) or not item.strip():
            raise _no_prompts(f"{name!r} holds something other than text (item {number})")
        # JSON can spell a lone surrogate, which no tokenizer accepts.
        if any("\ud800" <= character <= "\udfff" for character in item):
            raise _no_prompts(f"{name!r} holds half a surrogate pair (item {number})")
    return texts


def _no_prompts(what: str) -> DataError:
    return DataError(f"cannot read calibration prompts: {what}", hint=_EXAMPLE)


def _checked(entropies: Iterable[float], vocab: int) -> list[float]:
    """The entropies in rising order, clamped to [0, log2 vocab]. Raises DataError, UsageError."""
    if not isinstance(vocab, int) or vocab < 2:
        raise UsageError(f"invalid vocabulary: {vocab!r} is not at least 2")
    most = math.log2(vocab)
    values = [float(entropy) for entropy in entropies]
    for value in values:
        if not -SLACK <= value <= most + SLACK:
            raise DataError(f"cannot calibrate: {value:g} bits is no entropy over {vocab} ids")
    return sorted(min(max(value, 0.0), most) for value in values)


def _enough(samples: list[float], whose: str) -> list[float]:
    if len(samples) < MIN_SAMPLES:
        raise DataError(
            f"cannot calibrate: {whose} give {len(samples)} entropies, {MIN_SAMPLES} are needed",
            hint="give longer or more prompts",
        )
    return samples


def _widened(low: float, high: float, band: float) -> tuple[float, float]:
    """Widen two thresholds, in rising order, to at least `band` bits apart around their centre."""
    if high - low < band:
        low = max((low + high - band) / 2, MIN_LOW)
        high = low + band
    return low, high
