"""Perplexity: log-probability and entropy of every token of a text after the first.

A text is cut into windows, each read with an empty cache. A window of n tokens has n + 1 ids and
shares its last one with the next window, so that every token but the text's first is predicted
once, from at least one token before it. The gear is not changed; for gears that change from token
to token, see engine.geared.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast

import mlx.core as mx

from toastkit.engine.engine import CHUNK, Engine
from toastkit.errors import DataError
from toastkit.holdings.policy import NO_WISH
from toastkit.holdings.streams import arrays_in
from toastkit.model.config import check_ids
from toastkit.native.operations import distribution

LOGITS_BYTES = 256 << 20  # of float32 logits in one pass, unless --chunk is given
SLICE_BYTES = 64 << 20  # of them reduced at once, which takes five times as much


@dataclass(frozen=True)
class Scores:
    """A model's scores of consecutive tokens.

    position: of the first one, counted from the start of the text. ids: the tokens. logprobs: nats,
    given what precedes in the window. entropies: bits, of the distribution that each token was
    predicted from. gears: of the passes that gave those, None if not tracked: see engine.geared.
    """

    position: int
    ids: Sequence[int]
    logprobs: list[float]
    entropies: list[float]
    gears: Sequence[str] | None = None


@dataclass
class Totals:
    """Sums over tokens. nats: of -log p. entropy: bits. bytes: of UTF-8 that the tokens encode, 0
    if unknown. seconds: of computing. gears: tokens by gear. shifts: changes of gear from one pass
    of a text to the next."""

    tokens: int = 0
    nats: float = 0.0
    entropy: float = 0.0
    bytes: int = 0
    seconds: float = 0.0
    gears: Counter[str] = field(default_factory=Counter)
    shifts: int = 0
    _gear: str | None = field(default=None, repr=False, compare=False)  # of the last token

    def add(self, scores: Scores) -> None:
        """Add more tokens."""
        self.tokens += len(scores.logprobs)
        self.nats -= math.fsum(scores.logprobs)
        self.entropy += math.fsum(scores.entropies)
        for gear in scores.gears or ():
            self.gears[gear] += 1
            self.shifts += self._gear not in (None, gear)
            self._gear = gear

    def include(self, other: Totals) -> None:
        """Add the totals of another text."""
        self.tokens += other.tokens
        self.nats += other.nats
        self.entropy += other.entropy
        self.bytes += other.bytes
        self.seconds += other.seconds
        self.gears += other.gears
        self.shifts += other.shifts

    @property
    def loss(self) -> float:
        """Mean of -log p, nats per token."""
        return self.nats / self.tokens if self.tokens else math.nan

    @property
    def perplexity(self) -> float:
        """exp(loss); infinite if that overflows a float."""
        try:
            return math.exp(self.loss)
        except OverflowError:
            return math.inf

    @property
    def mean_entropy(self) -> float:
        """Bits per token."""
        return self.entropy / self.tokens if self.tokens else math.nan

    @property
    def bits_per_byte(self) -> float | None:
        """-log2 p of the text per byte; None if the bytes are unknown."""
        return self.nats / math.log(2) / self.bytes if self.bytes else None

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds if self.seconds else math.nan


def windows(ids: Sequence[int], size: int) -> Iterator[tuple[int, Sequence[int]]]:
    """Yield (position, ids) of the windows of a text: size + 1 ids or, for the last one, the
    remainder, at least two. Neighbours share one id."""
    for start in range(0, len(ids) - 1, size):
        yield start, ids[start : start + size + 1]


def score(
    engine: Engine, ids: Sequence[int], window: int, chunk: int | None = None
) -> Iterator[Scores]:
    """Score the tokens ids[1:], in order, a pass at a time.

    window: most tokens of context for a token. chunk: tokens in one pass, None for as many as suit
    the device and the vocabulary; it changes memory and speed, and no result. Raises DataError for
    an id that the model does not have, and for logits that are not numbers.
    """
    check_ids(ids, engine.vocab)
    for start, part in windows(ids, window):
        yield from score_window(engine, start, part, chunk or default_chunk(engine))


def score_window(engine: Engine, start: int, part: Sequence[int], size: int) -> Iterator[Scores]:
    """Score as `score` the window `part`, which begins at `start`, in passes of `size` tokens."""
    cache = engine.new_cache()
    inputs, targets = part[:-1], part[1:]
    for first in range(0, len(inputs), size):
        wanted = targets[first : first + size]
        engine.decide(NO_WISH)  # the gear stays, layers may have to go
        logits = engine.score(inputs[first : first + size], cache)
        logprobs, entropies = _judge(logits, mx.array(list(wanted), mx.uint32))
        del logits
        mx.eval(arrays_in(cache))
        mx.clear_cache()
        yield checked(Scores(start + first + 1, wanted, logprobs, entropies))


def timed(parts: Iterator[Scores], totals: Totals) -> Iterator[Scores]:
    """Pass the parts through, adding tokens and seconds to totals before each is yielded."""
    start = time.perf_counter()
    for scores in parts:
        totals.add(scores)
        totals.seconds += time.perf_counter() - start
        yield scores
        start = time.perf_counter()  # the caller's time is not the model's


def default_chunk(engine: Engine) -> int:
    """Return the tokens in one pass: what suits the device, fewer if the logits would be too
    large."""
    return min(CHUNK[engine.device], max(1, LOGITS_BYTES // (4 * engine.vocab)))


def _judge(logits: mx.array, targets: mx.array) -> tuple[list[float], list[float]]:
    """Return (log-probabilities of the targets in nats, entropies in bits), a slice of rows at a
    time.

    logits: float32 (n, vocab), lazy. targets: uint32 (n,).
    """
    count, vocab = logits.shape
    step = max(1, SLICE_BYTES // (4 * vocab))
    logprobs: list[float] = []
    entropies: list[float] = []
    for start in range(0, count, step):
        rows = slice(start, start + step)
        both = mx.stack(list(_measures(logits[rows], targets[rows])))
        first, second = cast("list[list[float]]", both.tolist())
        logprobs += first
        entropies += second
    return logprobs, entropies


def _measures(logits: mx.array, targets: mx.array) -> tuple[mx.array, mx.array]:
    """As `_judge`, all at once and lazy: two float32 (n,)."""
    most, log_sum, entropy = distribution(logits)
    chosen = mx.take_along_axis(logits, targets[:, None], axis=-1)[:, 0]
    return chosen - most - log_sum, entropy / math.log(2)


def checked(scores: Scores) -> Scores:
    """Return the scores; raises DataError if one is NaN."""
    for n, value in enumerate(zip(scores.logprobs, scores.entropies), scores.position):
        if any(map(math.isnan, value)):
            raise DataError(
                f"the model's logits for token {n} are not numbers",
                hint="a wider --dtype may help; toast-model verify --values finds broken weights",
            )
    return scores
