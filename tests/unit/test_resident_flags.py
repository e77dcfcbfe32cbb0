"""--resident, --expert-slots and companions: what they take, what is refused, what a daemon is held
to."""

from __future__ import annotations

import os
import re
import signal
from typing import Any

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.fake_daemon import signals_put_back
from tests.unit.mdoc import MAN, Page
from toastkit.commands import cli
from toastkit.commands.decode import decode
from toastkit.commands.policy_flags import (
    RESIDENT,
    insisted_residency,
    reject_unused,
    residency_options,
    slot_options,
)
from toastkit.commands.prefill import prefill
from toastkit.commands.run_reports import counted_residency, counted_slots, tell_stats
from toastkit.errors import UsageError
from toastkit.experts.experts_options import SlotOptions
from toastkit.holdings import pressure
from toastkit.interrupts import Signals
from toastkit.residency.residency_options import (
    PLACEMENTS,
    PRIORITIES,
    RESERVED_TOKENS,
    ResidencyOptions,
)

GB = 1 << 30


def context(*arguments: str) -> click.Context:
    return prefill.make_context("toast-prefill", list(arguments))


def options(*arguments: str) -> ResidencyOptions | None:
    return residency_options(context(*arguments).params)


def slots(*arguments: str) -> SlotOptions | None:
    return slot_options(context(*arguments).params)


def held_to(*arguments: str) -> str | None:
    """What a daemon has to have."""
    with context(*arguments) as made:
        return insisted_residency(made.params)


def check(*arguments: str) -> None:
    with context(*arguments) as made:
        reject_unused(made.params)


# ----------------------------------------------------------------------------------------- parsing


@pytest.mark.parametrize(
    ("word", "kind", "amount"),
    [
        ("auto", "auto", 0), ("AUTO", "auto", 0), ("0", "layers", 0), ("12", "layers", 12),
        (" 7 ", "layers", 7), ("999999999", "layers", 999999999), ("0%", "percent", 0),
        ("50%", "percent", 50), ("33.3%", "percent", 33.3), ("100%", "percent", 100),
        ("6G", "bytes", 6 * GB), ("6g", "bytes", 6 * GB), ("6GiB", "bytes", 6 * GB),
        ("1.5G", "bytes", 3 * GB // 2), ("512M", "bytes", GB // 2), ("800mib", "bytes", 800 << 20),
        ("64K", "bytes", 64 << 10), ("2T", "bytes", 2048 * GB), ("4096B", "bytes", 4096),
    ],
)  # fmt: skip
def test_what_it_takes(word: str, kind: str, amount: float) -> None:
    assert options("--resident", word) == ResidencyOptions(kind, amount)


@pytest.mark.parametrize(
    ("word", "kind", "amount"),
    [("auto", "auto", 0), ("AUTO", "auto", 0), ("0", "slots", 0), (" 12 ", "slots", 12),
     ("999999999", "slots", 999999999), ("6G", "bytes", 6 * GB), ("1.5gib", "bytes", 3 * GB // 2),
     ("800mib", "bytes", 800 << 20), ("64K", "bytes", 64 << 10), ("4096B", "bytes", 4096)],
)  # fmt: skip
def test_the_slots_it_takes(word: str, kind: str, amount: int) -> None:
    assert slots("--expert-slots", word) == SlotOptions(kind, amount)
    assert slots() is None  # without it all experts stay


def test_all_is_no_residency_at_all() -> None:
    assert options() is None and options("--resident", "all") is None
    assert options("--resident", "All") is None


NONSENSE = [
    "-1", "101%", "100.001%", "1.5", "nan", "", " ", "%", "G", "+3", "1e3", "inf", "0x10", "5 %",
    "-5%", "-1G", "1.2.3G", ".5G", "5.G", "6X", "6GG", "99999999T", "nan%", "\u0663", "autos",
    "12,13", "1_000", "half", "9" * 40, "6 G", "iB",
]  # fmt: skip
NO_SLOTS = [
    "-1", "50%", "1.5", "nan", "", " ", "G", "+3", "1e3", "inf", "-1G", "6X", "all", "\u0663",
    "1_0", "9" * 40, "6 G", "99999999T", "auto auto",
]  # fmt: skip


@pytest.mark.parametrize(
    ("option", "word"),
    [
        *(("--resident", word) for word in NONSENSE),
        *(("--expert-slots", word) for word in NO_SLOTS),
    ],
)
def test_nonsense_is_a_usage_error(option: str, word: str) -> None:
    with pytest.raises(click.BadParameter) as caught:
        context(option, word)
    message = caught.value.format_message()
    assert len(message) < 200 and "\n" not in message and option in message


@given(st.text(max_size=20))
def test_any_text_is_taken_or_refused(word: str) -> None:
    try:
        amount = RESIDENT.convert(word, None, None)
    except click.BadParameter:
        return
    made = ResidencyOptions(*amount)
    assert made.amount >= 0 and (made.kind in ("all", "auto") or re.search("[0-9]", word))


def test_variables() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TOAST_RESIDENT", "auto")
        patch.setenv("TOAST_PLACEMENT", "last")
        patch.setenv("TOAST_PRIORITY", "max-tps")
        assert options() == ResidencyOptions("auto", 0, "last", "max-tps")
        assert options("--resident", "3") == ResidencyOptions("layers", 3, "last", "max-tps")
        check("--resident", "3")
        patch.setenv("TOAST_RESIDENT", "most")
        with pytest.raises(click.BadParameter, match="'most'"):
            context()
        patch.setenv("TOAST_RESIDENT", "")  # as if it were not there
        assert options() is None


def test_the_choices_are_those_of_the_policy() -> None:
    known: dict[str, Any] = {p.name: p.type for p in decode.params}
    assert tuple(known["placement"].choices) == PLACEMENTS
    assert tuple(known["priority"].choices) == PRIORITIES


# ---------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--placement last", "--placement needs a --resident other than all"),
        ("--placement first --resident all", "--placement needs a --resident other than all"),
        ("--priority max-tps", "--priority is for --resident auto"),
        ("--priority balanced --resident all", "--priority is for --resident auto"),
        ("--priority max-context --resident 50%", "--priority is for --resident auto"),
        ("--priority max-context --placement last --resident 2G", "--priority is for --resident"),
        ("--expert-prefetch 1", "--expert-prefetch needs --expert-slots"),
    ],
)
def test_what_would_change_nothing(arguments: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check(*arguments.split())


@pytest.mark.parametrize(
    "arguments",
    ["", "--resident all", "--resident auto --priority max-tps --placement last",
     "--resident 3 --placement interleaved", "--expert-slots 8 --expert-prefetch 1"],
)  # fmt: skip
def test_what_makes_sense(arguments: str) -> None:
    check(*arguments.split())


# ---------------------------------------------------------------------------------------- settings


@given(
    kind=st.sampled_from(["slots", "bytes"]), amount=st.integers(1, 1 << 40),
    prefetch=st.sampled_from(["off", "auto", "1", "2", "3"]),
)  # fmt: skip
def test_a_setting_says_what_the_flags_would(kind: str, amount: int, prefetch: str) -> None:
    amount = amount % 10**9 + 1 if kind == "slots" else amount
    wanted = SlotOptions(kind, amount, prefetch)
    assert slots(*wanted.setting.split()) == wanted


@pytest.mark.parametrize(
    ("arguments", "setting"),
    [
        ("", None), ("--resident all", "all"), ("--resident 12", "12"), ("--resident 012", "12"),
        ("--resident 50.0%", "50%"), ("--resident 33.33333%", "33.33333%"),
        ("--resident 1234567", "1234567"), ("--resident 0.00000001%", "0.00000001%"),
        ("--resident AUTO --priority balanced", "auto"),
        ("--resident 1.5G", "1536M"), ("--resident 0M", "0B"), ("--resident 1536M", "1536M"),
        ("--resident auto --priority max-tps", "auto --priority max-tps"),
        ("--resident 4 --placement last", "4 --placement last"),
        ("--resident 4 --placement interleaved", "4"),
        ("--resident auto --priority max-context --placement first",
         "auto --priority max-context --placement first"),
        ("--expert-slots 8", "all --expert-slots 8"),
        ("--expert-slots 8 --resident 50%", "50% --expert-slots 8"),
    ],
)  # fmt: skip
def test_a_daemon_is_held_to_what_is_typed(arguments: str, setting: str | None) -> None:
    assert held_to(*arguments.split()) == setting
    if setting is not None:  # which says the same again
        assert held_to("--resident", *setting.split()) == setting
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TOAST_RESIDENT", "7")
        assert held_to() is None


# ----------------------------------------------------------------------------------------- reports

REPORT = {"resident": 12, "layers": 24, "read": 3_100_000_000, "wait": 4.21, "compute": 5.59,
          "passes": 9, "shed": 0, "grown": 0}  # fmt: skip


def test_a_report_in_words(capsys: pytest.CaptureFixture) -> None:
    line = "12 of 24 layers stay; 3.10 GB read, waited 4.2 s of 9.8 s"
    assert counted_residency(REPORT) == line
    moved = {**REPORT, "shed": 6, "grown": 1}
    assert counted_residency(moved) == f"{line}; 6 given up, 1 taken back"
    tell_stats({"residency": REPORT})
    assert capsys.readouterr().err.endswith(f": residency: {line}\n")
    for odd in (
        {}, {"residency": {}}, {"residency": 5}, {"residency": None},
        {"slots": {"another": "version"}},
    ):  # fmt: skip
        tell_stats(odd)
    assert capsys.readouterr().err == ""


def test_a_report_of_slots_in_words() -> None:
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


def test_numbers_of_the_pages() -> None:
    page = Page(MAN / "man1" / "toast-decode.1").words()
    assert (pressure.SHED, pressure.CHECK_TOKENS) == (4, 64)
    for said in (
        f"at the beginning and every {pressure.CHECK_TOKENS} tokens",
        f"Where less than {pressure.LOW >> 20} MB are left, a quarter of the layers",
        f"where it is less than {pressure.CRITICAL >> 20} MB, all",
        "by the same rules: a quarter of each layer's, or all but as many as a token chooses",
        f"keys and values of {RESERVED_TOKENS['max-tps']} tokens, of "
        f"{RESERVED_TOKENS['balanced']:,}, or of as many as the model can read",
    ):
        assert said in page, said


# ------------------------------------------------------------------------------- memory warnings


def test_memory_warnings_reach_who_heeds_them(signals: Signals) -> None:
    told: list[int] = []
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    signals.on_memory_warning()
    os.kill(os.getpid(), signal.SIGUSR1)  # while the model is loaded, say
    os.kill(os.getpid(), signal.SIGUSR1)
    signals.on_memory_warning(lambda: told.append(1))
    assert told == [1]
    os.kill(os.getpid(), signal.SIGUSR1)
    assert told == [1, 1] and not signals and signals.code == 0
    signals.on_memory_warning(lambda: told.append(2))
    assert told == [1, 1]


def test_who_ignores_the_signal_goes_on_ignoring_it(signals: Signals) -> None:
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signals.on_memory_warning(lambda: pytest.fail("it was called"))
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN


def test_the_end_of_a_command_leaves_the_signal_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever heeded it does not die of it while Python shuts down; others as ever."""
    monkeypatch.setattr(cli, "open_standard_streams", set)
    with signals_put_back():
        monkeypatch.setattr(cli, "_outcome", lambda *rest: Signals().code)
        with pytest.raises(SystemExit):
            cli.run(prefill)
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL

        def heeding(*rest: Any) -> int:
            Signals().on_memory_warning()
            return 0

        monkeypatch.setattr(cli, "_outcome", heeding)
        with pytest.raises(SystemExit):
            cli.run(prefill)
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
