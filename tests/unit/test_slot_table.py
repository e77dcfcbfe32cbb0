"""Which expert leaves its slot: held against a plain list of the experts used."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from toastkit.holdings.slot_table import DECAY, MAX_WEIGHT, SlotTable

EXPERTS = 9
sets = st.sets(st.integers(0, EXPERTS - 1))


def agrees(table: SlotTable) -> None:
    """The map and the order say the same, and no slot has two experts."""
    held = table.held
    assert sorted(np.nonzero(table.of >= 0)[0]) == sorted(held)
    taken = [int(table.of[expert]) for expert in held]
    assert len(set(taken)) == len(taken) and all(0 <= slot < table.slots for slot in taken)


# Enough of them that experts leave, and that how often each was used decides.
passes_of = st.lists(
    st.lists(st.integers(0, EXPERTS - 1), min_size=1, max_size=3), min_size=20, max_size=40
)


@pytest.fixture(params=[MAX_WEIGHT, 2.0], ids=["seldom", "often"], scope="module")
def rescaled(request: pytest.FixtureRequest) -> Iterator[None]:
    """How often counts are rescaled makes no difference."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("toastkit.holdings.slot_table.MAX_WEIGHT", request.param)
        yield


@pytest.mark.usefixtures("rescaled")
@given(slots=st.integers(1, EXPERTS), passes=passes_of, counted=st.booleans())
def test_who_leaves(slots: int, passes: list[list[int]], counted: bool) -> None:
    """The one used least; where uses are not counted, the longest unused."""
    table, order = SlotTable(EXPERTS, slots), []  # the longest unused first
    uses = dict.fromkeys(range(EXPERTS), 0.0)
    for wanted in passes:
        wanted = list(dict.fromkeys(wanted))[:slots]
        if counted:
            table.count(wanted)
            uses = {e: DECAY * count + (e in wanted) for e, count in uses.items()}
        for expert in wanted:
            if expert not in table:
                _, gone = table.claim(expert, keep=wanted)
                others = [e for e in order if e not in wanted]
                assert gone == (-1 if len(order) < slots else min(others, key=uses.__getitem__))
                order = [e for e in order if e != gone] + [expert]
        table.use(wanted)
        order = [e for e in order if e not in wanted] + wanted
        assert table.held == order
        agrees(table)


@given(slots=st.integers(1, 4), first=st.permutations(range(4)), keep=sets, spare=sets)
def test_what_is_kept_stays_and_what_is_spared_leaves_last(
    slots: int, first: list[int], keep: set[int], spare: set[int]
) -> None:
    table = SlotTable(EXPERTS, slots)
    for expert in first[:slots]:
        table.claim(expert, keep=())
    before = table.held
    claimed = table.claim(8, keep, spare)
    free = [e for e in before if e not in keep]
    if not free:
        assert claimed is None and table.held == before
    else:
        best = [e for e in free if e not in spare] or free
        assert claimed is not None and claimed[1] == best[0]
    agrees(table)


@given(slots=st.integers(2, 5), gone=st.integers(0, 1))
def test_what_is_dropped_leaves_its_slot_free(slots: int, gone: int) -> None:
    table = SlotTable(EXPERTS, slots)
    for expert in range(slots):
        table.claim(expert, keep=())
    slot = int(table.of[gone])
    table.drop(gone)
    assert gone not in table and table.claim(7, keep=range(slots)) == (slot, -1)
    agrees(table)


@given(
    slots=st.integers(1, EXPERTS), passes=passes_of, after=st.integers(1, EXPERTS),
)  # fmt: skip
def test_who_stays_in_fewer_slots_or_more(slots: int, passes: list[list[int]], after: int) -> None:
    """Those that would have left last, each with the slot that it had named by its new one; the
    table goes on as the old one would."""
    table = SlotTable(EXPERTS, slots)
    for wanted in passes:
        wanted = list(dict.fromkeys(wanted))[:slots]
        table.count(wanted)
        for expert in wanted:
            if expert not in table:
                table.claim(expert, wanted)
        table.use(wanted)
    held = table.held
    made, rows = table.resized(after)
    agrees(made)
    assert made.slots == after and len(made.held) == len(rows) == min(after, len(held))
    assert made.held == [expert for expert in held if expert in made]
    assert [int(table.of[expert]) for expert in sorted(made.held, key=lambda e: made.of[e])] == rows
    if after < len(held):
        gone = [expert for expert in held if expert not in made]
        assert max(made.uses[e] for e in gone) <= min(made.uses[e] for e in made.held)
        order = sorted(held, key=lambda expert: (made.uses[expert], held.index(expert)))
        assert gone == [expert for expert in held if expert in order[: len(gone)]]
    assert np.array_equal(made.uses, table.uses)


def test_a_full_table() -> None:
    table = SlotTable.full(EXPERTS)
    assert table.of.tolist() == table.held == list(range(EXPERTS))
    made, rows = table.resized(2)
    assert rows == made.held == [7, 8] and made.claim(0, keep=()) == (0, 7)
