"""The cost model against the paper's own figures, and against sums made by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toastkit.gears.cost import break_even_tokens, mean_bits, whole_speedup

BITS = {"low": 4, "mid": 8, "high": 16}
MIXED = {"low": 55, "mid": 25, "high": 20}  # the mixed workload of section 9


def test_the_papers_whole_model() -> None:
    """Section 15: about 1.4 for f = 0.35 and k = 4."""
    assert whole_speedup(0.35, 4) == pytest.approx(1.3559, abs=1e-4)
    assert whole_speedup(0, 4) == whole_speedup(1, 1) == 1
    assert whole_speedup(1, 4) == 4
    assert whole_speedup(0.5, 0.5) == pytest.approx(1 / 1.5)


def test_what_is_no_share_is_refused() -> None:
    for share, ratio in ((-0.1, 4), (1.1, 4), (0.5, 0), (math.nan, 4)):
        with pytest.raises(ValueError, match="no share and ratio"):
            whole_speedup(share, ratio)


def test_mean_bits() -> None:
    assert mean_bits(MIXED, BITS) == pytest.approx(0.55 * 4 + 0.25 * 8 + 0.2 * 16)
    assert mean_bits({"mid": 2, "low": 0}, {"mid": 8}) == 8  # no tokens in a gear
    with pytest.raises(ValueError, match="no tokens"):
        mean_bits({}, BITS)


@given(managed=st.floats(1, 1e12), rest=st.floats(0, 1e12), bits=st.sampled_from([2, 4, 6, 8]))
def test_whole_speedup_is_the_ratio_of_bytes(managed: float, rest: float, bits: int) -> None:
    high, gear = managed * 2 + rest, managed * bits / 8 + rest
    assert whole_speedup(2 * managed / high, 16 / bits) == pytest.approx(high / gear)


@given(shift=st.floats(0.001, 100), high=st.floats(0.01, 10), part=st.floats(0.1, 0.9))
def test_at_break_even_both_take_as_long(shift: float, high: float, part: float) -> None:
    """One shift and so many tokens in the gear, against the same tokens in high gear."""
    tokens = break_even_tokens(shift, high, high * part)
    assert shift + tokens * high * part == pytest.approx(tokens * high)
    assert (break_even_tokens(6.0, 4.0, 1.0), break_even_tokens(0.0, 4.0, 1.0)) == (2, 0)
    assert break_even_tokens(6.0, 1.0, 1.0) == break_even_tokens(0.0, 1.0, 4.0) == math.inf
