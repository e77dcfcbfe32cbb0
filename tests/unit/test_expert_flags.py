"""--experts and its companions: what they take, what is refused, what a daemon is held to."""

from __future__ import annotations

import math

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from toastkit.commands.decode import decode
from toastkit.commands.perplexity import perplexity
from toastkit.commands.policy_flags import expert_options, insisted_experts, reject_unused
from toastkit.commands.prefill import prefill
from toastkit.commands.run_reports import counted_experts, tell_stats, told
from toastkit.errors import UsageError
from toastkit.experts.experts_options import GAMMA, MODES, PROMPTS, ExpertsOptions, LittleK
from toastkit.frames import End


def context(*arguments: str, command: click.Command = decode) -> click.Context:
    return command.make_context("toast-decode", list(arguments))


def options(*arguments: str, command: click.Command = decode) -> ExpertsOptions | None:
    return expert_options(context(*arguments, command=command).params)


def held_to(*arguments: str) -> str | None:
    """What a daemon has to have."""
    with context(*arguments) as made:
        return insisted_experts(made.params)


@pytest.mark.parametrize(
    ("word", "mode", "gamma"),
    [
        ("big", "big", GAMMA), ("little", "little", GAMMA), ("mobile", "mobile", GAMMA),
        (" MoBiLE ", "mobile", GAMMA), ("mobile:0.5", "mobile", 0.5), ("mobile:0", "mobile", 0),
        ("mobile:1", "mobile", 1), ("mobile:1.", "mobile", 1), ("mobile:.7", "mobile", 0.7),
        ("mobile:1e-3", "mobile", 0.001), ("mobile:-0", "mobile", 0),
    ],
)  # fmt: skip
def test_values_of_the_option(word: str, mode: str, gamma: float) -> None:
    assert options("--experts", word) == ExpertsOptions(mode, gamma)


@pytest.mark.parametrize(
    "word",
    ["", "medium", "mobile:", "mobile: 0.5", "mobile:0,5", "mobile:half", "mobile:1_0", "big:0.5",
     "little:1", "mobile:0x1", "mobile:\u0661", "mobile:0.5:1", "mobile:" + "9" * 60],
)  # fmt: skip
def test_nonsense_is_a_usage_error(word: str) -> None:
    with pytest.raises(click.BadParameter) as caught:
        context("--experts", word)
    message = caught.value.format_message()
    assert len(message) < 200 and "\n" not in message and "--experts" in message


def test_a_little_k() -> None:
    for word, little in {
        "1": LittleK(1), "12": LittleK(12), " 3 ": LittleK(3), "50%": LittleK(50, True),
        "33.3%": LittleK(33.3, True), "100%": LittleK(100, True),
    }.items():  # fmt: skip
        found = options("--experts", "little", "--little-k", word)
        assert found == ExpertsOptions("little", little_k=little)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [*(("mobile:" + gamma, r"gamma .* is not in \[0, 1\]$") for gamma in
       ("nan", "inf", "-inf", "1.0000001", "-1e-9", "2", "-0.5")),
     ("little --little-k 0", "--little-k 0: a token goes to one expert at least"),
     ("little --little-k 0%", "--little-k 0%: a token"),
     ("little --little-k 101%", "--little-k 101% is more than 100%")],
)  # fmt: skip
def test_numbers_that_are_out_of_range(arguments: str, message: str) -> None:
    with pytest.raises(UsageError, match=f"^{message}"):
        options("--experts", *arguments.split())


@pytest.mark.parametrize("word", ["-1", "1.5", "", "x", "%", "5 %", "1e3", "9" * 12, "\u0663"])
def test_a_little_k_that_is_no_number(word: str) -> None:
    with pytest.raises(click.BadParameter, match="is not a number of experts, or a share"):
        context("--experts", "little", "--little-k", word)


@given(st.integers(1, 512), st.floats(0.001, 100))
def test_a_share_is_rounded_up(own_k: int, percent: float) -> None:
    little = LittleK(percent, True).of(own_k)
    assert 1 <= little <= own_k
    assert little >= own_k * percent / 100 - 1e-6 and little - 1 < own_k * percent / 100 + 1e-6
    assert ExpertsOptions("little").little_of(own_k) == math.ceil(own_k / 2)


@given(st.integers(1, 64), st.integers(1, 64))
def test_a_number_is_no_more_than_the_models(own_k: int, k: int) -> None:
    chosen = ExpertsOptions("little", little_k=LittleK(k))
    if k <= own_k:
        assert chosen.little_of(own_k) == k
    else:
        said = f"^--little-k {k} is more than the model's K of {own_k}$"
        with pytest.raises(UsageError, match=said):
            chosen.little_of(own_k)


def test_nothing_said_is_no_policy() -> None:
    assert options() is None and options("--prefill-experts", "big") is None
    assert options("--experts", "big") == ExpertsOptions()
    assert options("--prefill-experts", "little") == ExpertsOptions(prompt="little")
    assert options("--prefill-experts", "little", command=prefill).setting == (
        "big --prefill-experts little"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TOAST_LITTLE_K", "9")
        assert options() is None and options("--experts", "big") == ExpertsOptions()
        patch.setenv("TOAST_EXPERTS", "mobile:0.25")
        assert options() == ExpertsOptions("mobile", 0.25, LittleK(9))


def test_options_that_are_none() -> None:
    assert MODES[:2] == PROMPTS
    for values in ({"mode": "medium"}, {"prompt": "mobile"}):
        with pytest.raises(UsageError, match="no such experts"):
            ExpertsOptions(**values)
    needs = {
        decode: "--experts little or mobile or --prefill-experts little",
        prefill: "--prefill-experts little", perplexity: "--experts little or mobile",
    }  # fmt: skip
    for command, needed in needs.items():  # what would change nothing
        told = pytest.raises(UsageError, match=f"^--little-k needs {needed}$")
        with context("--little-k", "2", command=command) as made, told:
            reject_unused(made.params)


@pytest.mark.parametrize(
    ("arguments", "setting"),
    [
        ("", None), ("--experts big", "big"), ("--experts mobile", "mobile:0.7"),
        ("--experts mobile:0.70", "mobile:0.7"),
        ("--experts mobile:0.70000001", "mobile:0.70000001"),
        ("--experts mobile:-0", "mobile:0"), ("--experts mobile:1e-7", "mobile:0.0000001"),
        ("--experts little --little-k 33.3333333%", "little --little-k 33.3333333%"),
        ("--prefill-experts big", "big"),
        ("--experts little --little-k 050.0%", "little"),
        ("--experts little --little-k 050.50%", "little --little-k 50.5%"),
        ("--experts mobile:1 --prefill-experts little --little-k 3",
         "mobile:1 --little-k 3 --prefill-experts little"),
    ],
)  # fmt: skip
def test_a_daemon_is_held_to_what_is_typed(arguments: str, setting: str | None) -> None:
    assert held_to(*arguments.split()) == setting
    if setting is not None:  # which says the same again
        assert held_to("--experts", *setting.split()) == setting
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TOAST_EXPERTS", "little")
        assert held_to() is None


REPORT = {"mode": "mobile", "gamma": 0.7, "k": 8, "little_k": 4, "steps": 200, "fallbacks": 1,
          "ratio": 0.005}  # fmt: skip


def test_a_report_in_words(capsys: pytest.CaptureFixture) -> None:
    line = "mobile, K 4 of 8, gamma 0.7; 200 steps, 1 fallback, ratio 0.0050"
    assert counted_experts(REPORT) == line
    seconds = {"step": 0.5, "whole": None, "little": 0.4, "again": None}
    timed = {**REPORT, "seconds": seconds, "estimate": None}
    assert counted_experts(timed) == f"{line}; 2.0 tokens/s"
    timed = {**timed, "seconds": {**seconds, "whole": 0.8}, "estimate": 1.66}
    said = "2.0 tokens/s, 1.60 times the whole model's, 1.66 estimated"
    assert counted_experts(timed) == f"{line}; {said}"
    assert counted_experts({**timed, "seconds": dict.fromkeys(seconds)}) == line
    none = {**REPORT, "steps": 0, "fallbacks": 0, "ratio": None}
    assert counted_experts(none) == "mobile, K 4 of 8, gamma 0.7; 0 steps, 0 fallbacks"
    assert ", gamma 0.70000001; " in counted_experts({**none, "gamma": 0.70000001})
    assert counted_experts({**REPORT, "mode": "big"}) == "big, K 8 of 8; 200 steps"
    assert counted_experts({**REPORT, "mode": "little"}) == "little, K 4 of 8; 200 steps"
    read = {**REPORT, "mode": "big", "prompt": "little"}
    assert counted_experts(read) == "big, K 8 of 8; prompt little, K 4; 200 steps"
    tell_stats({"experts": REPORT})
    assert capsys.readouterr().err.endswith(f": experts: {line}\n")
    for odd in ({}, {"experts": {}}, {"experts": 5}, {"experts": None}):
        tell_stats(odd)
    assert capsys.readouterr().err == ""


def test_a_report_follows_the_answer_that_it_is_of(capsys: pytest.CaptureFixture) -> None:
    """Who writes the answer gets its end first: a line of stderr is not glued to its last one."""
    report = {"mode": "little", "k": 4, "little_k": 2, "steps": 3}
    frames = told([End("stop", 3, {"experts": report})])
    assert next(frames).reason == "stop" and not capsys.readouterr().err
    assert list(frames) == [] and "experts: little" in capsys.readouterr().err
