"""How well a model predicts a text: log-probability and entropy of every token after the first.

A text is cut into windows, each read with an empty cache. A window of n tokens has n + 1 ids and
shares its last one with the next window, so that every token but the text's first is predicted
once, from at least one token before it. The model is left in whatever gear it is in; with gears
that change from token to token, see engine.geared.
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

LOGITS_BYTES = 256 << 20  # that the float32 logits of one pass may take, unless --chunk is given
SLICE_BYTES = 64 << 20  # of them that are looked at together, which takes five times as much


@dataclass(frozen=True)
class Scores:
    """What the model thought of some tokens that follow each other.

    position: of the first one, counted from the start of the text. ids: the tokens.
    logprobs: nats, given what stands before in the window. entropies: bits, of the distribution
    that each token was predicted from. gears: of the passes that gave those, None where nobody
    said: see engine.geared.
    """

    position: int
    ids: Sequence[int]
    logprobs: list[float]
    entropies: list[float]
    gears: Sequence[str] | None = None


@dataclass
class Totals:
    """Sums over tokens. nats: of -log p. entropy: bits. bytes: of UTF-8 that the tokens stand for,
    0 where that is not known. seconds: of computing. gears: tokens by gear. shifts: changes of
    gear from one pass of a text to the next."""

    tokens: int = 0
    nats: float = 0.0
    entropy: float = 0.0
    bytes: int = 0
    seconds: float = 0.0
    gears: Counter[str] = field(default_factory=Counter)
    shifts: int = 0
    _gear: str | None = field(default=None, repr=False, compare=False)  # of the last token

    def add(self, scores: Scores) -> None:
        """Counts more tokens in."""
        self.tokens += len(scores.logprobs)
        self.nats -= math.fsum(scores.logprobs)
        self.entropy += math.fsum(scores.entropies)
        for gear in scores.gears or ():
            self.gears[gear] += 1
            self.shifts += self._gear not in (None, gear)
            self._gear = gear

    def include(self, other: Totals) -> None:
        """Counts another text in."""
        self.tokens += other.tokens
        self.nats += other.nats
        self.entropy += other.entropy
        self.bytes += other.bytes
        self.seconds += other.seconds
        self.gears += other.gears
        self.shifts += other.shifts

    @property
    def loss(self) -> float:
        """Mean of -log p, nats a token."""
        return self.nats / self.tokens if self.tokens else math.nan

    @property
    def perplexity(self) -> float:
        """exp(loss); infinite where that is larger than a float can be."""
        try:
            return math.exp(self.loss)
        except OverflowError:
            return math.inf

    @property
    def mean_entropy(self) -> float:
        """Bits a token."""
        return self.entropy / self.tokens if self.tokens else math.nan

    @property
    def bits_per_byte(self) -> float | None:
        """-log2 p of the text, a byte of it; None where the bytes are not known."""
        return self.nats / math.log(2) / self.bytes if self.bytes else None

    @property
    def speed(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds if self.seconds else math.nan


def windows(ids: Sequence[int], size: int) -> Iterator[tuple[int, Sequence[int]]]:
    """(position, ids) of the windows of a text: size + 1 ids or, for the last one, what is left,
    two at least. Neighbours share one id."""
    for start in range(0, len(ids) - 1, size):
        yield start, ids[start : start + size + 1]


def score(
    engine: Engine, ids: Sequence[int], window: int, chunk: int | None = None
) -> Iterator[Scores]:
    """Scores of the tokens ids[1:], in order, a pass at a time.

    window: most tokens that a token is predicted from. chunk: tokens in one pass, None for as many
    as suit the device and the vocabulary; it changes memory and speed, and no result.
    Raises DataError for an id that the model does not have, and for logits that are not numbers.
    """
    check_ids(ids, engine.vocab)
    for start, part in windows(ids, window):
        yield from score_window(engine, start, part, chunk or default_chunk(engine))


def score_window(engine: Engine, start: int, part: Sequence[int], size: int) -> Iterator[Scores]:
    """As `score`, of the window `part`, which begins at `start`, in passes of `size` tokens."""
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
    """The parts; tokens and seconds are counted into totals before each is given out."""
    start = time.perf_counter()
    for scores in parts:
        totals.add(scores)
        totals.seconds += time.perf_counter() - start
        yield scores
        start = time.perf_counter()  # what the caller does meanwhile is not the model's time


def default_chunk(engine: Engine) -> int:
    """Tokens in one pass: what suits the device, less where that would be too many logits."""
    return min(CHUNK[engine.device], max(1, LOGITS_BYTES // (4 * engine.vocab)))


def _judge(logits: mx.array, targets: mx.array) -> tuple[list[float], list[float]]:
    """(log-probabilities of the targets in nats, entropies in bits), a slice of rows at a time.

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
    """The scores; raises DataError where one is not a number."""
    for n, value in enumerate(zip(scores.logprobs, scores.entropies), scores.position):
        if any(map(math.isnan, value)):
            raise DataError(
                f"the model's logits for token {n} are not numbers",
                hint="a wider --dtype may help; toast-model verify --values finds broken weights",
            )
    return scores
