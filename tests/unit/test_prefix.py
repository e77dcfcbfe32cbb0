"""The longest common beginning of texts, lists and arrays, against counting element by element."""

from __future__ import annotations

import itertools
from array import array

import pytest

from toastkit.prefix import common_prefix


@pytest.mark.parametrize("kind", [list, "".join, lambda x: array("I", map(ord, x))])
def test_against_counting(kind) -> None:
    words = ["".join(w) for n in range(6) for w in itertools.product("ab", repeat=n)]
    for a, b in itertools.product(words, words):
        count = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b))))
        assert common_prefix(kind(a), kind(b)) == count, (a, b)
    assert common_prefix([1, 2, 3], (1, 2, 4)) == 2


def test_of_long_ones() -> None:
    tokens = list(range(100_000))
    for place in (0, 1, 49_999, 50_000, 99_999):
        other = [*tokens[:place], 1 << 31, *tokens[place + 1 :]]
        assert common_prefix(tokens, other) == place
        assert common_prefix(array("I", tokens), array("I", other)) == place
