"""The controller of what stays, driven by written readings and by any readings at all."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toastkit.holdings.pressure import CALM, CALM_CHECKS, CRITICAL, LOW, Pressure
from toastkit.residency.sizing import Sizes, adaptive, needed

MB = 1 << 20
GB = 1 << 30


class Machine:
    """One where a model runs beside something else: its readings are what a real one's would be.

    total: bytes that all can have. layers: number and bytes of the model's. counts: how many layers
    stayed, at the start and after each check.
    """

    def __init__(self, total: int, layers: int, size: int, resident: int):
        self.total, self.sizes = total, Sizes(500 * MB, (size,) * layers, 0, 0)
        self.pressure = Pressure(layers)
        self.counts = [resident]

    def occupied(self) -> int:
        return needed(self.sizes, self.counts[-1], "first")

    def check(self, others: int) -> int:
        """The next check, with so many bytes taken by others."""
        free = max(0, self.total - others - self.occupied())
        fits = adaptive(self.sizes, free + self.occupied(), 0, "first")
        self.counts.append(self.pressure.update(free, self.counts[-1], fits))
        return self.counts[-1]

    def run(self, checks: int, others: Callable[[int], int]) -> list[int]:
        return [self.check(others(n)) for n in range(checks)]


def turns(counts: list[int]) -> int:
    """How often a course of counts changes its direction."""
    moves = [b > a for a, b in zip(counts, counts[1:]) if a != b]
    return sum(a != b for a, b in zip(moves, moves[1:]))


# ------------------------------------------------------------------------------------- the rules


@pytest.mark.parametrize(
    ("available", "resident", "left"),
    [
        (LOW, 32, 32), (LOW - 1, 32, 24), (LOW - 1, 10, 7), (LOW - 1, 4, 3), (LOW - 1, 1, 0),
        (CRITICAL, 32, 24), (CRITICAL - 1, 32, 0), (0, 32, 0), (0, 0, 0),
    ],
)  # fmt: skip
def test_what_goes(available: int, resident: int, left: int) -> None:
    pressure = Pressure(32)
    assert pressure.update(available, resident, 32) == left
    gone = left < resident
    assert pressure.ceiling == (resident - 1 if gone else 32)


def test_layers_come_back_after_some_calm_checks_and_never_all() -> None:
    pressure = Pressure(32)
    count = pressure.update(LOW - 1, 32, 10)
    course = [count := pressure.update(8 * GB, count, 32) for _ in range(10)]
    assert course == [24] * (CALM_CHECKS - 1) + [26, 28, 30, 31, 31, 31, 31]


@pytest.mark.parametrize("unquiet", [(CALM - 1, 32), (LOW, 32), (8 * GB, 25), (8 * GB, 3)])
def test_calm_checks_are_in_a_row(unquiet: tuple[int, int]) -> None:
    """One reading with little memory, or little room for more layers, and it begins anew."""
    pressure = Pressure(32)
    pressure.ceiling = 31
    for _ in range(5):
        for _ in range(CALM_CHECKS - 1):
            assert pressure.update(8 * GB, 24, 32) == 24
        assert pressure.update(unquiet[0], 24, unquiet[1]) == 24


def test_half_of_what_fits_comes_back() -> None:
    pressure = Pressure(320)
    for _ in range(CALM_CHECKS):
        count = pressure.update(8 * GB, 100, 107)
    assert count == 103


def test_a_small_model_grows_by_one() -> None:
    pressure = Pressure(4)
    course = [count := 0] and [count := pressure.update(GB, count, 4) for _ in range(8)]
    assert course == [0, 0, 0, 1, 2, 3, 4, 4]


def test_an_emergency_takes_all_and_sets_the_ceiling() -> None:
    pressure = Pressure(24)
    assert pressure.emergency(12) == 0 and pressure.ceiling == 11
    assert pressure.emergency(0) == 0 and pressure.ceiling == 11
    count = 0
    for _ in range(100):
        count = pressure.update(8 * GB, count, 24)
    assert count == 11


def test_who_grew_too_soon_waits_twice_as_long() -> None:
    pressure, waits = Pressure(64), []
    count = pressure.update(LOW - 1, 64, 0)
    for _ in range(4):
        before, wait = count, 0
        while count == before:
            count, wait = pressure.update(8 * GB, count, 64), wait + 1
        waits.append(wait)
        count = pressure.update(LOW - 1, count, 0)
        count = pressure.update(LOW - 1, count, 0)  # what goes in one stretch is one mistake
    assert waits == [CALM_CHECKS, 2 * CALM_CHECKS, 4 * CALM_CHECKS, 8 * CALM_CHECKS]


@pytest.mark.parametrize(
    ("available", "resident", "left"),
    [(LOW, 16, 16), (LOW - 1, 16, 12), (LOW - 1, 5, 4), (LOW - 1, 4, 4), (CRITICAL - 1, 16, 4)],
)
def test_the_least_stays(available: int, resident: int, left: int) -> None:
    """As slots of a layer, of which a token needs some."""
    pressure = Pressure(16, least=4)
    assert pressure.update(available, resident, 16) == left
    assert pressure.ceiling == (max(4, resident - 1) if left < resident else 16)
    assert pressure.emergency(left) == 4
    count = 4
    for _ in range(60):
        count = pressure.update(8 * GB, count, 16)
    assert count == pressure.ceiling


# ------------------------------------------------------------------------------------- scenarios


def test_steady() -> None:
    """Nobody comes, and what equation 2 said at the start remains."""
    for total, resident in (8 * GB, 24), (3 * GB, 20):
        machine = Machine(total, 24, 100 * MB, resident)
        assert set(machine.run(200, lambda n: 0)) == {resident}


def test_a_start_with_less_than_fits() -> None:
    machine = Machine(3 * GB, 24, 100 * MB, 8)
    course = machine.run(200, lambda n: 0)
    assert course == [8] * 3 + list(range(9, 18)) + [18] * 188  # 572 MB are left: no calm


def test_a_hog_comes_and_goes() -> None:
    """3.2 GB beside a model of 3.6 in 7, which are one layer short; then they are free again."""
    machine = Machine(7 * GB, 32, 100 * MB, 32)
    assert set(machine.run(20, lambda n: 0)) == {32}
    assert set(machine.run(200, lambda n: 3250 * MB)) == {24}
    assert machine.run(9, lambda n: 0) == [24] * 3 + [26, 28, 30, 31, 31, 31]


def test_a_hog_that_takes_nearly_all() -> None:
    """It grows into whatever is given up for it. Then it dies: a part comes back, slowly."""
    machine = Machine(7 * GB, 32, 100 * MB, 32)
    during = machine.run(5, lambda n: machine.total - machine.occupied() - 200 * MB)
    assert during == [24, 18, 13, 9, 6]
    assert machine.run(10, lambda n: 0) == [6] * 3 + [8] * 7


def test_a_sawtooth() -> None:
    """Somebody takes two gigabytes for half of every 24 checks, 400 times: nearly all growing was
    done before the first few came back."""
    machine = Machine(6 * GB, 32, 100 * MB, 32)
    machine.run(24 * 400, lambda n: 2200 * MB if n % 24 >= 12 else 0)
    assert turns(machine.counts) <= 8
    assert turns(machine.counts[24 * 10 :]) <= 3
    assert machine.counts[-1] >= 12


def test_an_emergency_in_a_quiet_run() -> None:
    machine = Machine(8 * GB, 24, 100 * MB, 24)
    machine.run(3, lambda n: 0)
    machine.counts.append(machine.pressure.emergency(machine.counts[-1]))
    after = machine.run(60, lambda n: 0)
    assert after[:4] == [0, 0, 0, 1] and after[-1] == 23 and after == sorted(after)


def test_a_slow_leak() -> None:
    """8 MB a check: the model gives way, a piece at a time, and nothing comes back on the way."""
    machine = Machine(6 * GB, 32, 100 * MB, 32)
    course = machine.run(600, lambda n: n * 8 * MB)
    assert course == sorted(course, reverse=True) and course[0] == 32 and course[-1] < 8
    pairs = zip(course, course[1:])
    assert all(b in (a, a - -(-a // 4)) for a, b in pairs)  # never in a hurry, never all at once


# ------------------------------------------------------------------------------- whatever is read

readings = st.tuples(
    st.one_of(
        st.integers(0, 4 * CALM),
        st.sampled_from([CRITICAL - 1, CRITICAL, LOW - 1, LOW, CALM - 1, CALM, 64 * GB]),
    ),
    st.integers(-1, 70),
    st.integers(0, 40).map(lambda n: n == 0),
)


@given(st.integers(1, 64), st.integers(0, 8), st.data())
def test_no_level_that_was_too_much_is_reached_again(
    pieces: int, least: int, data: st.DataObject
) -> None:
    """Stretches of the same reading, so that there is calm to grow in."""
    stretches = st.lists(st.tuples(readings, st.integers(1, 12)), max_size=30)
    least = min(least, pieces)
    pressure, count = Pressure(pieces, least), data.draw(st.integers(least, pieces))
    counts, limit = [count], pieces + 1
    for (available, fits, warned), times in data.draw(stretches):
        for _ in range(times):
            before = count
            count = pressure.update(available, count, fits)
            if warned:
                count = pressure.emergency(count)
            if count < before:
                limit = min(limit, before)
            assert least <= count < limit and count <= pressure.ceiling <= pieces
            assert count - before <= max(1, pieces // 16)
            assert count <= before or available >= CALM
            counts.append(count)
    assert turns(counts) <= 2 * pieces
    waits = pressure.patience // CALM_CHECKS
    assert turns(counts) <= 2 * waits.bit_length()


@given(
    st.integers(1, 96), st.integers(1, 2000), st.integers(0, 3 * 96), st.integers(0, 100),
)  # fmt: skip
def test_growing_is_not_what_takes_memory_below_the_threshold(
    layers: int, size: int, spare: int, share: int
) -> None:
    """On a machine on which nobody else does anything, of layers of any size: once there is enough
    memory, nothing is ever shed again."""
    resident = layers * share // 100
    machine = Machine(0, layers, size * MB, resident)
    machine.total = machine.occupied() + LOW + spare * size * MB // 3
    machine.run(4 * layers + 20, lambda n: 0)
    assert machine.counts == sorted(machine.counts)


@given(st.lists(st.integers(0, 8000), min_size=1, max_size=40), st.integers(1, 300))
def test_a_count_that_the_caller_did_not_reach_is_held_to_the_ceiling(
    available: list[int], layers: int
) -> None:
    """A policy that has not dropped yet what it was told to."""
    pressure, low = Pressure(layers), layers + 1
    for megabytes in available:
        count = pressure.update(megabytes * MB, layers, layers)
        low = layers if megabytes * MB < LOW else low
        assert count < low
