"""The sampler on the host: numpy float32 logits in, one token id out.

Buffers of the vocabulary's size are allocated once. Noise is computed only for ids that can win:
the survivors of the filters, and among those only what Gumbel noise, which is bounded, could still
lift over the best one found so far. The result equals the full computation exactly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ..errors import DataError
from . import filters
from .draws import GUARD, LARGEST, Draw, Key, nothing_left, position_key, xtc_acts
from .sampling_options import SamplingOptions
from .threefry import GUMBEL_MAX, gumbel, uniform, uniform_at

# Below this many survivors, pruning costs more than their noise.
_PRUNE_ABOVE = 16384
_PRUNE_HEAD = 32


class HostSampler:
    """Draws tokens for one vocabulary with one set of options. Not thread-safe.

    xtc_special_ids: ids that XTC never drops (end of sequence, newline). Raises UsageError for
    options outside their intervals.
    """

    def __init__(self, options: SamplingOptions, vocab: int, xtc_special_ids: Sequence[int] = ()):
        options.validate(vocab)
        self.options = options
        self.vocab = vocab
        self._special = np.array(xtc_special_ids, np.int64)
        self._bias_ids = np.array([token for token, _ in options.logit_bias], np.int64)
        self._biases = np.array([bias for _, bias in options.logit_bias], np.float32)
        self._bans = np.array(options.bans, np.int64)
        self._adjusted = np.empty(vocab, np.float32)
        self._shifted = np.empty(vocab, np.float32)
        self._exponentials = np.empty(vocab, np.float32)
        self._mask = np.empty(vocab, bool)
        self._total = math.nan
        self._greedy = options.greedy
        self._use_top_p = 0 < options.top_p < 1
        self._use_typical = 0 < options.typical_p < 1
        self._use_top_k = 0 < options.top_k < vocab
        self._inverse = np.float32(1 / options.temperature if options.temperature else 0)

    def draw(
        self,
        logits: np.ndarray,
        position: int,
        history: Sequence[int] = (),
        top: int = 0,
        want_logprob: bool = True,
    ) -> Draw:
        """Choose from float32 (vocab,) and describe: both of the following."""
        self.choose(logits, position, history)
        return self.describe(top, want_logprob)

    def choose(self, logits: np.ndarray, position: int, history: Sequence[int] = ()) -> int:
        """Draw the token at a position, and compute nothing else.

        logits: float32 (vocab,), not modified, nor to be modified before `describe`. position: of
        the token drawn, counted from the start of the prompt. history: ids of prompt and answer so
        far. Raises DataError for a wrong shape, an invalid id in the history, or when all are
        banned.
        """
        if logits.shape != (self.vocab,):
            raise DataError(
                f"cannot draw a token: logits have shape {list(logits.shape)}, "
                f"the vocabulary has {self.vocab} ids"
            )
        self._total = math.nan
        self._logits = logits = logits.astype(np.float32, copy=False)
        if self._greedy:
            self._chosen = best = int(logits.argmax())
            # argmax returns a NaN if there is one; a winner of at most -GUARD may lose to a guarded
            # -inf.
            if -GUARD < logits[best] < np.inf:
                return best
        self._logits, self._chosen = self._finite(logits)
        if not self._greedy:
            self._chosen = self._among(self._chosen, position, history)
        return self._chosen

    @np.errstate(over="ignore")  # differences of huge logits overflow to -inf, as intended
    def describe(self, top: int = 0, want_logprob: bool = True) -> Draw:
        """Describe the token that was chosen last. top: alternatives to list."""
        if not (want_logprob or top):
            return Draw(self._chosen, math.nan)
        if self._greedy:
            self._logits, best = self._finite(self._logits)
            np.subtract(self._logits, self._logits[best], out=self._shifted)
        values, log_total = self._shifted, math.log(self._sum())
        logprob = float(values[self._chosen]) - log_total if want_logprob else math.nan
        return Draw(self._chosen, logprob, _top_list(values, log_total, top) if top else None)

    @np.errstate(over="ignore")
    def _among(self, best: int, position: int, history: Sequence[int]) -> int:
        """Choose where it takes more than the largest logit, which is that of `best`."""
        if self.options.adjusts_logits:
            self._logits, best = self._adjust(self._logits, history)
        values = np.subtract(self._logits, self._logits[best], out=self._shifted)
        if not self.options.temperature:
            return best
        return self._sample(values, self._sum() if self._use_top_p else math.nan, position)

    def _sum(self) -> float:
        """Return the sum of exp over the logits minus their maximum."""
        if math.isnan(self._total):
            exponentials = np.exp(self._shifted, out=self._exponentials)
            self._total = float(np.add.reduce(exponentials))
        return self._total

    def _finite(self, logits: np.ndarray) -> tuple[np.ndarray, int]:
        """Apply step 1 of the chain. Returns the logits and the most likely id."""
        best = int(logits.argmax())
        # A NaN makes both comparisons false wherever it is.
        if not (np.minimum.reduce(logits) > -np.inf and logits[best] < np.inf):
            np.copyto(self._adjusted, logits)
            logits = np.nan_to_num(self._adjusted, copy=False, nan=0.0, posinf=GUARD, neginf=-GUARD)
            best = int(logits.argmax())
        return logits, best

    def _adjust(self, logits: np.ndarray, history: Sequence[int]) -> tuple[np.ndarray, int]:
        """Apply steps 2 and 3: biases, penalties and bans. Returns as _finite."""
        if logits is not self._adjusted:
            np.copyto(self._adjusted, logits)
        if len(self._bias_ids):
            biased = self._adjusted[self._bias_ids] + self._biases
            self._adjusted[self._bias_ids] = np.clip(biased, -LARGEST, LARGEST)
        if self.options.needs_history and len(history):
            self._penalise(self._adjusted, history)
        # Last, so that only a ban makes a logit infinite; no penalty would change it.
        if len(self._bans):
            self._adjusted[self._bans] = -np.inf
        best = int(self._adjusted.argmax())
        if self._adjusted[best] == -np.inf:
            raise nothing_left()
        return self._adjusted, best

    def _penalise(self, logits: np.ndarray, history: Sequence[int]) -> None:
        """Apply mlx_lm's three penalties, in its order, over the last ids of the history."""
        options = self.options
        recent = np.array(history[-options.penalty_context :], np.int64)
        if recent.min() < 0 or recent.max() >= self.vocab:
            raise DataError(
                f"cannot draw a token: the history has ids outside [0, {self.vocab - 1}]"
            )
        if options.repetition_penalty != 1:
            penalty = np.float32(options.repetition_penalty)
            chosen = logits[recent]
            logits[recent] = np.where(chosen < 0, chosen * penalty, chosen / penalty)
        if options.presence_penalty:
            # An assignment, so that an id that occurs twice is penalised once.
            logits[recent] = logits[recent] - np.float32(options.presence_penalty)
        if options.frequency_penalty:
            np.subtract.at(logits, recent, np.float32(options.frequency_penalty))
        logits[recent] = np.clip(logits[recent], -LARGEST, LARGEST)

    def _sample(self, values: np.ndarray, total: float, position: int) -> int:
        """Apply steps 5-10. values: logits minus their maximum. total: sum of exp(values) or
        NaN."""
        options = self.options
        xtc = xtc_acts(options, position)
        reshapes = self._use_typical or xtc
        threshold = filters.NOTHING
        # Steps 5, 6 and 9 keep heads of one order and commute, unless 7 or 8 come between.
        if self._use_top_k and not reshapes:
            threshold = filters.top_k_threshold(values, options.top_k)
        if self._use_top_p:
            head = values if threshold == filters.NOTHING else filters.at_least(values, threshold)
            threshold = max(threshold, filters.top_p_threshold(head, total, options.top_p))
        if options.min_p > 0:
            lowest = filters.min_p_threshold(values, options.min_p, options.min_tokens_to_keep)
            threshold = max(threshold, lowest)
        if threshold > filters.NOTHING:
            ids = np.flatnonzero(np.greater_equal(values, np.float32(threshold), out=self._mask))
        elif reshapes:
            ids = np.flatnonzero(np.greater(values, filters.NOTHING, out=self._mask))
        else:
            return self._pick(None, values, position)
        survivors = values[ids]
        if reshapes:
            ids, survivors = self._reshape(ids, survivors, xtc)
        return self._pick(ids, survivors, position)

    def _reshape(
        self, ids: np.ndarray, values: np.ndarray, xtc: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        """Apply typical-p and XTC, which do not keep a head of the sorted order, and top-k after
        them."""
        if self._use_typical:
            kept = filters.typical_mask(values, self.options.typical_p)
            ids, values = ids.compress(kept), values.compress(kept)
        if xtc:
            protected = np.isin(ids, self._special) if len(self._special) else None
            kept = filters.xtc_mask(values, self.options.xtc_threshold, protected)
            ids, values = ids.compress(kept), values.compress(kept)
        if self._use_top_k:
            kept = values >= filters.top_k_threshold(values, self.options.top_k)
            ids, values = ids.compress(kept), values.compress(kept)
        return ids, values

    def _pick(self, ids: np.ndarray | None, values: np.ndarray, position: int) -> int:
        """Draw by Gumbel-max among ids (ascending int64 (n,); None: all of them).

        values: float32 (n,), of the ids.
        """
        if ids is not None and len(ids) == 1:
            return int(ids[0])
        key = position_key(self.options.seed, position)
        scaled = values * self._inverse
        kept = self._contenders(key, ids, scaled) if len(scaled) > _PRUNE_ABOVE else None
        if kept is not None:
            scaled = scaled[kept]
            ids = kept if ids is None else ids[kept]
        noise = self._noise(key, ids)
        winner = int(np.add(noise, scaled, out=noise).argmax())
        return winner if ids is None else int(ids[winner])

    def _contenders(
        self, key: Key, ids: np.ndarray | None, scaled: np.ndarray
    ) -> np.ndarray | None:
        """Return indices of scaled, float32 (n,), that noise can still make the largest; None for
        all."""
        head = np.flatnonzero(scaled >= np.float32(filters.at_least_k_bound(scaled, _PRUNE_HEAD)))
        noise = self._noise(key, head if ids is None else ids[head])
        best = float((scaled[head] + noise).max())
        reach = scaled >= np.float32(best - GUMBEL_MAX)
        if 2 * np.count_nonzero(reach) > self.vocab:
            return None
        return np.flatnonzero(reach)

    def _noise(self, key: Key, ids: np.ndarray | None) -> np.ndarray:
        """Return Gumbel noise, float32 (n,), for ids; float32 (vocab,) if ids is None."""
        if ids is None:
            return gumbel(uniform(key, self.vocab))
        # A pair of counters yields two numbers, of which a single id needs one.
        if 2 * len(ids) > self.vocab:
            return gumbel(uniform(key, self.vocab)[ids])
        return gumbel(uniform_at(key, self.vocab, ids))


def _top_list(values: np.ndarray, log_total: float, count: int) -> list[list]:
    threshold = filters.top_k_threshold(values, count)
    ids = np.flatnonzero(values >= threshold if threshold > -np.inf else values > -np.inf)
    order = np.lexsort((ids, -values[ids]))[:count]
    return [[int(token), float(values[token]) - log_total] for token in ids[order]]
