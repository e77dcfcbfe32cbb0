"""The filters of the chain in numpy: float32 values in, a threshold or a mask of survivors out.

`values` are logits minus the largest logit: float32 (n,), at most 0, -inf where masked. A filter
that keeps the most likely ids returns the lowest value that survives, so that several combine as a
maximum. None of them sorts a large vocabulary if a bound suffices.
"""

from __future__ import annotations

import math

import numpy as np

NOTHING = -math.inf
# Up to this many values, sorting is cheaper than finding a bound.
_SMALL = 8192
# Up to this many, top-p needs no bound.
_TINY = 512
_COLUMNS = 64
_HEAD = 256
# Keeps a bound computed in floating point on the safe side.
_SLACK = 0.01


def top_k_threshold(values: np.ndarray, k: int) -> float:
    """Return the k-th largest of float32 (n,), or -inf if there are no more than k."""
    n = len(values)
    if k >= n:
        return NOTHING
    bound = at_least_k_bound(values, k)
    if bound > NOTHING:
        values = at_least(values, bound)
        n = len(values)
    return float(np.partition(values, n - k)[n - k])


def at_least(values: np.ndarray, bound: float) -> np.ndarray:
    """Return the values of float32 (n,) that reach a bound, in order: float32 (m,)."""
    # A quarter of the time of indexing with a mask.
    return values.compress(values >= np.float32(bound))


def at_least_k_bound(values: np.ndarray, k: int) -> float:
    """Return a number that at least k of float32 (n,) reach, close to the k-th largest; -inf if
    none is cheap.

    The largest values of disjoint groups belong to distinct ids, so the k-th largest of them is a
    lower bound of the k-th largest of all.
    """
    groups = len(values) // _COLUMNS
    if len(values) <= _SMALL or 4 * k > groups:
        return NOTHING
    largest = values[: groups * _COLUMNS].reshape(_COLUMNS, groups).max(axis=0)
    return float(np.partition(largest, groups - k)[groups - k])


def top_p_threshold(values: np.ndarray, total: float, top_p: float) -> float:
    """Return the least likely value in the nucleus: mlx_lm's apply_top_p.

    values: float32 (n,), of all ids or of the most likely. total: sum of exp over all ids. An id is
    kept while the mass above it in the sorted order is less than top_p * total. -inf if all are
    kept.
    """
    bounds = []
    if len(values) > _TINY:
        # All values under the second bound together weigh less than the mass that may go.
        spare = (1 - top_p) * total / len(values)
        safe = math.log(spare) - _SLACK if spare > 0 else NOTHING
        bounds = [at_least_k_bound(values, _HEAD), safe]
    for bound in bounds:
        if bound > NOTHING:
            threshold = _nucleus(at_least(values, bound), top_p * total)
            if threshold is not None:
                return threshold
    threshold = _nucleus(values, top_p * total)
    return NOTHING if threshold is None else threshold


def _nucleus(head: np.ndarray, budget: float) -> float | None:
    """Return the least value of the shortest prefix with the budget's mass; None if head has
    less."""
    ordered = np.sort(head)
    mass = np.cumsum(np.exp(ordered)[::-1], dtype=np.float64)
    last = int(np.searchsorted(mass, budget, side="left"))
    return float(ordered[-1 - last]) if last < len(ordered) else None


def min_p_threshold(values: np.ndarray, min_p: float, min_tokens_to_keep: int = 1) -> float:
    """Return log(min_p), lowered until min_tokens_to_keep of float32 (n,) reach it: mlx_lm's
    apply_min_p."""
    threshold = float(np.float32(math.log(min_p)))
    if min_tokens_to_keep > 1:
        threshold = min(threshold, top_k_threshold(values, min_tokens_to_keep))
    return threshold


def typical_mask(values: np.ndarray, typical_p: float) -> np.ndarray:
    """Locally typical sampling (Meister et al., 2022, equation 7): bool (n,), True survives.

    values: float32 (n,), finite; they are renormalised. Keeps the ids whose information content is
    nearest to the entropy, as few as have the mass typical_p, and ties with the last of them.
    """
    exponentials = np.exp(values)
    total = exponentials.sum()
    information = np.log(total) - values
    probabilities = exponentials / total
    entropy = (probabilities * information).sum()
    distance = np.abs(information - entropy)
    bound = at_least_k_bound(-distance, _HEAD)
    if bound > NOTHING:
        near = distance <= -np.float32(bound)
        limit = _typical_distance(distance.compress(near), probabilities.compress(near), typical_p)
        if limit is not None:
            return distance <= limit
    limit = _typical_distance(distance, probabilities, typical_p)
    return np.ones(len(values), bool) if limit is None else distance <= limit


def _typical_distance(
    distance: np.ndarray, probabilities: np.ndarray, typical_p: float
) -> np.float32 | None:
    """Return the distance within which the mass is typical_p; None if the total is less."""
    order = np.argsort(distance)
    mass = np.cumsum(probabilities[order], dtype=np.float64)
    last = int(np.searchsorted(mass, typical_p, side="left"))
    return distance[order[last]] if last < len(order) else None


def xtc_mask(values: np.ndarray, threshold: float, protected: np.ndarray | None) -> np.ndarray:
    """Exclude Top Choices: bool (n,), True survives: mlx_lm's apply_xtc after its random draw.

    Of the ids with a (renormalised) probability over the threshold only the least likely stays.
    values: float32 (n,). protected: bool (n,), ids that are never dropped, or None.
    """
    exponentials = np.exp(values)
    over = exponentials > np.float32(threshold) * exponentials.sum()
    if not over.any():
        return np.ones(len(values), bool)
    keep = values <= values[over].min()
    if protected is not None:
        keep |= protected
    return keep
