"""The options of the sampling chain, their legal intervals and what switches a step off."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from ..errors import UsageError

# Field -> (lowest, highest). Bounds without a mathematical reason prevent float32 overflow.
INTERVALS: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 1e6),
    "top_k": (0, 2**31 - 1),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "min_tokens_to_keep": (1, 2**31 - 1),
    "typical_p": (0.0, 1.0),
    "xtc_probability": (0.0, 1.0),
    "xtc_threshold": (0.0, 0.5),
    "repetition_penalty": (1e-6, 1e6),
    "presence_penalty": (-1e6, 1e6),
    "frequency_penalty": (-1e6, 1e6),
    "penalty_context": (0, 2**31 - 1),
    "seed": (0, 2**64 - 1),
}
INTEGERS = frozenset({"top_k", "min_tokens_to_keep", "penalty_context", "seed"})
LOWEST_TEMPERATURE = 1e-6
BIAS_LIMIT = 1e6


class SamplingOptions(NamedTuple):
    """What to do with the logits. The defaults switch every step off: plain argmax.

    temperature: 0 is argmax, otherwise at least 1e-6.
    top_k: ids kept; 0 is off, and so is a number of at least the vocabulary.
    top_p, typical_p: probability mass kept; 0 and 1 are off.
    min_p: share of the best id's probability; 0 is off. At least min_tokens_to_keep ids survive it.
    xtc_probability: how often XTC acts; 0 is off. xtc_threshold: probability.
    repetition_penalty: factor, 1 is off. presence_penalty, frequency_penalty: nats, 0 is off.
    penalty_context: how many of the last ids of prompt and answer the penalties look at; 0 is off.
    logit_bias: (id, nats) pairs. bans: ids that are never drawn. seed: 64 bits.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    min_tokens_to_keep: int = 1
    typical_p: float = 1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    penalty_context: int = 20
    logit_bias: tuple[tuple[int, float], ...] = ()
    bans: tuple[int, ...] = ()
    seed: int = 0

    def validate(self, vocab: int | None = None) -> None:
        """Check every field; ids also against the vocabulary if given.

        Raises UsageError that names the option, its value and its legal interval.
        """
        for field, (low, high) in INTERVALS.items():
            _check_number(field, getattr(self, field), low, high)
        if 0 < self.temperature < LOWEST_TEMPERATURE:
            raise UsageError(
                f"invalid temperature: {self.temperature} is neither 0 nor in "
                f"[{LOWEST_TEMPERATURE:g}, {INTERVALS['temperature'][1]:g}]",
                "use 0 for the most likely token",
            )
        _check_bias(self.logit_bias)
        _check_ids("logit bias", [token for token, _ in self.logit_bias], vocab)
        _check_ids("bans", self.bans, vocab)

    @property
    def needs_history(self) -> bool:
        """True if the chain uses the ids so far."""
        return self.penalty_context > 0 and (
            self.repetition_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
        )

    @property
    def adjusts_logits(self) -> bool:
        """True if a step before the log-softmax may change a finite logit."""
        return bool(self.logit_bias or self.bans or self.needs_history)

    @property
    def greedy(self) -> bool:
        """True if the largest logit is chosen, as it is."""
        return self.temperature == 0 and not self.adjusts_logits


def _is_number(value: object, kind: type | tuple[type, ...]) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _check_number(field: str, value: object, low: float, high: float) -> None:
    name = field.replace("_", "-")
    if field in INTEGERS:
        if not _is_number(value, int):
            raise UsageError(f"invalid {name}: {value!r} is not a whole number")
    elif not _is_number(value, (int, float)):
        raise UsageError(f"invalid {name}: {value!r} is not a number")
    # NaN fails the comparison too.
    if not low <= value <= high:  # type: ignore[operator]
        raise UsageError(f"invalid {name}: {value} is not in [{_number(low)}, {_number(high)}]")


def _number(bound: float) -> str:
    return str(bound) if isinstance(bound, int) else f"{bound:g}"


def _check_bias(pairs: Iterable[tuple[int, float]]) -> None:
    seen = set()
    for token, bias in pairs:
        if not _is_number(bias, (int, float)) or not math.fabs(bias) <= BIAS_LIMIT:
            raise UsageError(
                f"invalid logit bias: {bias!r} for id {token} is not in "
                f"[-{BIAS_LIMIT:g}, {BIAS_LIMIT:g}]",
                "ban an id to rule it out",
            )
        if token in seen:
            raise UsageError(f"invalid logit bias: id {token} is given twice")
        seen.add(token)


def _check_ids(name: str, ids: Iterable[int], vocab: int | None) -> None:
    for token in ids:
        if not _is_number(token, int) or token < 0:
            raise UsageError(f"invalid {name}: {token!r} is not a token id")
        if vocab is not None and token >= vocab:
            raise UsageError(f"invalid {name}: id {token} is not in [0, {vocab - 1}]")
