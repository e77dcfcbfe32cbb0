"""Seconds of MoBiLE's passes, and equation 1 of what is known of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toastkit.experts.pass_times import PassTimes, estimated_speedup, with_steps

SECONDS = st.floats(1e-3, 10)


def test_the_estimate_of_the_paper() -> None:
    """Half the time for a little pass, and a big one that is as long as any: 0.11 of them again."""
    assert estimated_speedup(2.0, 1.0, 2.0, 0.11) == pytest.approx(1 / (0.5 + 0.11))
    assert estimated_speedup(2.0, 1.0, 2.0, 0.5) == 1.0


@given(st.lists(st.tuples(SECONDS, st.none() | SECONDS), min_size=1, max_size=20), SECONDS)
def test_steps_without_a_pause_are_what_was_measured(
    passes: list[tuple[float, float | None]], whole: float
) -> None:
    """Where nothing but passes takes time, the estimate is what a step by the wall gives."""
    times, clock = PassTimes(), 100.0
    times.add("whole", clock - whole, clock)
    times.begin_run()
    for little, again in passes:
        times.add("little", clock, clock := clock + little)
        if again is not None:
            times.add("again", clock, clock := clock + again)
    steps, fell = len(passes), sum(again is not None for _, again in passes)
    seconds = times.means()
    assert seconds["whole"] == pytest.approx(whole, rel=1e-3)
    assert seconds["step"] == pytest.approx((clock - 100) / steps, rel=1e-3)
    assert (seconds["again"] is None) == (fell == 0)
    report = with_steps({"seconds": seconds}, steps, fell)
    assert report["ratio"] == pytest.approx(fell / steps, abs=1e-6)
    measured = whole / ((clock - 100) / steps)
    assert report["estimate"] == pytest.approx(measured, rel=1e-2, abs=2e-3)


def test_means_are_of_a_run_and_the_whole_models_of_all() -> None:
    times = PassTimes()
    times.add("whole", 0, 2)
    times.add("little", 2, 3, before=0.5)  # with what was built earlier
    assert times.means() == {"step": 1, "whole": 2, "little": 1.5, "again": None}
    times.begin_run()
    assert times.means() == {"step": None, "whole": 2, "little": None, "again": None}
    times.add("whole", 10, 14)
    times.add("little", 20, 22)
    times.add("again", 22, 25)
    times.add("little", 26, 27)  # something else was done in between
    assert times.means() == {"step": 3.5, "whole": 3, "little": 1.5, "again": 3}
    every = times.means(run=False)  # from the end of one run to the next nothing is counted
    assert every == {"step": 2.666667, "whole": 3, "little": 1.5, "again": 3}


def test_the_time_of_what_is_left_out_is_nobodys() -> None:
    times = PassTimes()
    times.add("little", 0, 1)
    times.leave_out()  # and steps of a batch take until 9
    times.add("little", 9, 10)
    assert times.means()["step"] == 1


def test_what_is_not_known_is_not_estimated() -> None:
    seconds = {"step": 1.0, "whole": 2.0, "little": 1.0, "again": None}
    assert with_steps({"seconds": seconds}, 5, 0)["estimate"] == 2.0
    assert with_steps({"seconds": seconds}, 5, 1)["estimate"] is None
    assert with_steps({"seconds": seconds}, 0, 0)["estimate"] is None
    assert with_steps({"seconds": {**seconds, "whole": None}}, 5, 0)["estimate"] is None
    assert with_steps({}, 4, 1) == {"steps": 4, "fallbacks": 1, "ratio": 0.25}
