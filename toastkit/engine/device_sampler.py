"""The sampler on the device: MLX logits in, a lazy token id out.

Nothing here evaluates: `DeviceSampler.draw` only builds a graph, so that the next step's graph can
be submitted before the token is known. Only `DeviceDraw.read` synchronises. The chain is that of
`toastkit.sampling`; the numpy twin is `toastkit.sampling.host`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import mlx.core as mx

from toastkit.native.operations import argmax, finite, in_rows, total
from toastkit.sampling.draws import LARGEST, Draw, nothing_left, position_key, xtc_acts
from toastkit.sampling.sampling_options import SamplingOptions

_GUMBEL_FLOOR = 1e-20
_LOWER_WORD = 32


@dataclass(slots=True)
class DeviceDraw:
    """A draw that has not been computed yet; every field is lazy.

    id: uint32 scalar. logprob: float32 scalar (nats) or None. peak: float32 scalar, the largest
    logit after bans. top_ids: int64 (n,), top_logprobs: float32 (n,), unordered, or None.
    """

    id: mx.array
    peak: mx.array
    logprob: mx.array | None = None
    top_ids: mx.array | None = None
    top_logprobs: mx.array | None = None

    def arrays(self) -> list[mx.array]:
        """Return what to pass to mx.async_eval."""
        fields = (self.id, self.peak, self.logprob, self.top_ids, self.top_logprobs)
        return [field for field in fields if field is not None]

    def read(self) -> Draw:
        """Wait for the device. Raises DataError when every id was banned."""
        mx.eval(self.arrays())
        if _number(self.peak) == -math.inf:
            raise nothing_left()
        logprob = math.nan if self.logprob is None else _number(self.logprob)
        return Draw(int(_number(self.id)), logprob, self._top_list())

    def _top_list(self) -> list[list] | None:
        if self.top_ids is None or self.top_logprobs is None:
            return None
        ids = cast("list[int]", self.top_ids.tolist())
        logprobs = cast("list[float]", self.top_logprobs.tolist())
        allowed = [[token, logprob] for token, logprob in zip(ids, logprobs) if logprob > -math.inf]
        return sorted(allowed, key=lambda pair: (-pair[1], pair[0]))


def _number(scalar: mx.array) -> float:
    return cast(float, scalar.item())


class DeviceSampler:
    """Draws tokens for one vocabulary with one set of options.

    xtc_special_ids: ids that XTC never drops (end of sequence, newline). Raises UsageError for
    options outside their intervals.
    """

    def __init__(self, options: SamplingOptions, vocab: int, xtc_special_ids: Sequence[int] = ()):
        options.validate(vocab)
        self.options = options
        self.vocab = vocab
        self._special = mx.array(list(xtc_special_ids), mx.int32)
        self._bias_ids = mx.array([token for token, _ in options.logit_bias], mx.int32)
        self._biases = mx.array([bias for _, bias in options.logit_bias], mx.float32)
        self._bans = mx.array(list(options.bans), mx.int32)
        self._use_top_p = 0 < options.top_p < 1
        self._use_typical = 0 < options.typical_p < 1
        self._use_top_k = 0 < options.top_k < vocab
        self._inverse = 1 / options.temperature if options.temperature else 0.0

    def draw(
        self,
        logits: mx.array,
        position: int,
        history: mx.array | None = None,
        top: int = 0,
        want_logprob: bool = True,
    ) -> DeviceDraw:
        """Build the graph of the draw at a position.

        logits: float (vocab,). position: of the token drawn, counted from the start of the
        prompt. history: int32 or uint32 (n,), the last ids of prompt and answer, or None.
        """
        logits = self._adjust(logits.astype(mx.float32), history)
        best = argmax(logits)
        peak = logits[best]
        values = logits - peak
        # Lazy: costs nothing unless something below asks for it.
        whole = total(mx.exp(values))
        sampling = self.options.temperature > 0
        result = DeviceDraw(self._sample(values, whole, position) if sampling else best, peak)
        if want_logprob or top > 0:
            log_total = mx.log(whole)
            if want_logprob:
                result.logprob = values[result.id] - log_total
            if top > 0:
                result.top_ids = _most_likely(values, min(top, self.vocab))
                result.top_logprobs = values[result.top_ids] - log_total
        return result

    def _adjust(self, logits: mx.array, history: mx.array | None) -> mx.array:
        """Apply steps 1-3 of the chain. Returns a new array."""
        options = self.options
        logits = finite(logits)
        if self._bias_ids.size:
            logits = logits.at[self._bias_ids].add(self._biases)
        if options.needs_history and history is not None and history.size:
            logits = self._penalise(logits, history[-options.penalty_context :])
        if options.adjusts_logits:
            logits = mx.clip(logits, -LARGEST, LARGEST)
        # Last, so that only a ban makes a logit infinite; no penalty would change it.
        if self._bans.size:
            logits[self._bans] = -math.inf
        return logits

    def _penalise(self, logits: mx.array, recent: mx.array) -> mx.array:
        options = self.options
        if options.repetition_penalty != 1:
            penalty = options.repetition_penalty
            chosen = logits[recent]
            logits[recent] = mx.where(chosen < 0, chosen * penalty, chosen / penalty)
        if options.presence_penalty:
            logits[recent] = logits[recent] - options.presence_penalty
        if options.frequency_penalty:
            logits = logits.at[recent].subtract(options.frequency_penalty)
        return logits

    def _sample(self, values: mx.array, whole: mx.array, position: int) -> mx.array:
        """Apply steps 5-10. values: logits minus their maximum, float32 (vocab,). whole: sum of
        exp."""
        options = self.options
        xtc = xtc_acts(options, position)
        # Steps 5, 6 and 9 keep heads of one order and commute, unless 7 or 8 come between.
        heads = self._use_top_k and not (self._use_typical or xtc)
        if self._use_top_p:
            most = options.top_k if heads else None
            values = apply_top_p(values, whole, options.top_p, most)
        if options.min_p > 0:
            values = apply_min_p(values, options.min_p, options.min_tokens_to_keep)
        if self._use_typical:
            values = apply_typical_p(values, options.typical_p)
        if xtc:
            values = apply_xtc(values, options.xtc_threshold, self._special)
        if self._use_top_k and not (heads and self._use_top_p):
            values = apply_top_k(values, options.top_k)
        key = mx.array(position_key(options.seed, position), mx.uint32)
        u = mx.random.uniform(shape=(self.vocab,), key=key)
        noise = -mx.log(-mx.log(u + _GUMBEL_FLOOR))
        return argmax(values * self._inverse + noise)


def apply_top_p(
    values: mx.array, whole: mx.array, top_p: float, most: int | None = None
) -> mx.array:
    """Mask what is outside the nucleus and, given `most`, outside the top `most` ids, sorting only
    those.

    values: float32 (n,), at most 0. whole: float32 scalar, the sum of exp(values).
    """
    ordered = -mx.sort(-(values if most is None else mx.topk(values, most)))
    mass = running_total(mx.exp(ordered))
    # The mass up to an id is the mass above the next one: count those still under the budget.
    kept = 1 + (mass < top_p * whole).sum()
    least = ordered[mx.minimum(kept, ordered.size) - 1]
    return mx.where(values < least, -math.inf, values)


def apply_min_p(values: mx.array, min_p: float, min_tokens_to_keep: int = 1) -> mx.array:
    """Mask ids less likely than min_p times the best. values: float32 (n,), best 0. Like all of
    these, returns float32 (n,) with -inf where masked."""
    threshold = mx.array(math.log(min_p), mx.float32)
    if min_tokens_to_keep > 1:
        threshold = mx.minimum(threshold, _kth_largest(values, min_tokens_to_keep))
    return mx.where(values < threshold, -math.inf, values)


def apply_typical_p(values: mx.array, typical_p: float) -> mx.array:
    """Keep the ids whose information content is nearest to the entropy. values: float32 (n,)."""
    exponentials = mx.exp(values)
    whole = total(exponentials)
    probabilities = exponentials / whole
    information = mx.log(whole) - values
    allowed = values > -math.inf
    entropy = total(mx.where(allowed, probabilities * information, 0.0))
    distance = mx.where(allowed, mx.abs(information - entropy), math.inf)
    order = mx.argsort(distance)
    mass = running_total(probabilities[order])
    last = mx.minimum((mass < typical_p).sum(), allowed.sum() - 1)
    return mx.where(distance <= distance[order[last]], values, -math.inf)


def apply_xtc(values: mx.array, threshold: float, special: mx.array) -> mx.array:
    """Mask all ids over the threshold except the least likely. values: float32 (n,). special: int32
    (m,), ids that stay."""
    exponentials = mx.exp(values)
    over = exponentials > threshold * total(exponentials)
    drop = values > mx.where(over, values, math.inf).min()
    if special.size:
        drop[special] = False
    return mx.where(drop, -math.inf, values)


def apply_top_k(values: mx.array, k: int) -> mx.array:
    """Keep the k most likely ids and ties with the last of them. values: float32 (n,)."""
    return mx.where(values < _kth_largest(values, k), -math.inf, values)


def running_total(values: mx.array) -> mx.array:
    """Inclusive cumulative sum of float32 (n,), in rows for the same reason as `total`."""
    inner = mx.cumsum(in_rows(values), axis=1)
    before = mx.cumsum(inner[:, -1], inclusive=False)
    return (inner + before[:, None]).reshape(-1)[: values.size]


def _kth_largest(values: mx.array, k: int) -> mx.array:
    """The k-th largest, float32 scalar; the minimum if there are no more than k."""
    if k >= values.size:
        return values.min()
    return mx.topk(values, k).min()


def _most_likely(values: mx.array, count: int) -> mx.array:
    """Return the ids of the largest values, int64 (count,), lower ids first among ties,
    unordered."""
    # Floats <= 0 order backwards as integers: one key holds the value, then the id.
    bits = mx.abs(values).view(mx.int32).astype(mx.int64)
    keys = mx.left_shift(bits, _LOWER_WORD) + mx.arange(values.size, dtype=mx.int64)
    if count < values.size:
        keys = mx.partition(keys, count - 1)[:count]
    return mx.bitwise_and(keys, (1 << _LOWER_WORD) - 1)
