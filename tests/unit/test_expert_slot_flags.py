"""--expert-slots and its companion: what they take, what is refused, what a daemon is held to."""

from __future__ import annotations

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from toastkit.commands.prefill import prefill
from toastkit.commands.resident_flags import insisted, reject_unused, slot_options
from toastkit.commands.run_reports import counted_slots, tell_stats
from toastkit.errors import UsageError
from toastkit.experts.slot_options import PREFETCHES, SlotOptions

GB = 1 << 30


def context(*arguments: str) -> click.Context:
    return prefill.make_context("toast-prefill", list(arguments))


def options(*arguments: str) -> SlotOptions | None:
    return slot_options(context(*arguments).params)


@pytest.mark.parametrize(
    ("word", "kind", "amount"),
    [("auto", "auto", 0), ("AUTO", "auto", 0), ("0", "slots", 0), (" 12 ", "slots", 12),
     ("999999999", "slots", 999999999), ("6G", "bytes", 6 * GB), ("1.5gib", "bytes", 3 * GB // 2),
     ("800mib", "bytes", 800 << 20), ("64K", "bytes", 64 << 10), ("4096B", "bytes", 4096)],
)  # fmt: skip
def test_values_of_the_option(word: str, kind: str, amount: int) -> None:
    assert options("--expert-slots", word) == SlotOptions(kind, amount)
    assert options() is None  # without it all experts stay


@pytest.mark.parametrize(
    "word",
    ["-1", "50%", "1.5", "nan", "", " ", "G", "+3", "1e3", "inf", "-1G", "6X", "all", "\u0663",
     "1_0", "9" * 40, "6 G", "99999999T", "auto auto"],
)  # fmt: skip
def test_nonsense_is_a_usage_error(word: str) -> None:
    with pytest.raises(click.BadParameter) as caught:
        context("--expert-slots", word)
    message = caught.value.format_message()
    assert len(message) < 200 and "\n" not in message and "--expert-slots" in message


@given(
    kind=st.sampled_from(["slots", "bytes"]), amount=st.integers(1, 1 << 40),
    prefetch=st.sampled_from(PREFETCHES),
)  # fmt: skip
def test_a_setting_says_what_the_flags_would(kind: str, amount: int, prefetch: str) -> None:
    amount = amount % 10**9 + 1 if kind == "slots" else amount
    wanted = SlotOptions(kind, amount, prefetch)
    assert options(*wanted.setting.split()) == wanted


def test_prefetching_needs_slots() -> None:
    needs = pytest.raises(UsageError, match="--expert-prefetch needs --expert-slots")
    with context("--expert-prefetch", "1") as made, needs:
        reject_unused(made.params)
    with context("--expert-slots", "8", "--expert-prefetch", "1") as made:
        reject_unused(made.params)
    for wrong in (("all", 0, "off"), ("slots", -1, "off"), ("slots", 3, "4")):
        with pytest.raises(UsageError):
            SlotOptions(*wrong)


def test_a_daemon_is_held_to_what_is_on_the_command_line() -> None:
    for arguments, setting in (
        (["--expert-slots", "8"], "all --expert-slots 8"),
        (["--expert-slots", "8", "--resident", "50%"], "50% --expert-slots 8"),
        (["--resident", "3"], "3"), ([], None),
    ):  # fmt: skip
        with context(*arguments) as made:
            assert insisted(made.params) == setting


def test_reports_in_words(capfd) -> None:
    report = {
        "slots": 8, "experts": 64, "wanted": 200, "hit": 150, "ahead": 0, "right": 0,
        "optimistic": 0, "retried": 0, "read": 3 << 20, "wait": 0.25,
    }  # fmt: skip
    line = counted_slots(report)
    assert line == "8 of 64 in slots; 150 of 200 were there (75%); 3.15 MB read, waited 0.2 s"
    assert "; 40 of 50 foreseen were wanted" in counted_slots(report | {"ahead": 50, "right": 40})
    hopeful = counted_slots(report | {"optimistic": 9, "retried": 1})
    assert hopeful == f"{line}; 9 optimistic steps, 1 retried"
    assert "; none was looked for; " in counted_slots(report | {"wanted": 0, "hit": 0})
    tell_stats({"slots": {"another": "version"}})
    tell_stats({})
    assert capfd.readouterr().err == ""
