"""--experts with the real executables: one process, a pipe and a daemon; what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.daemons import Daemon
from tests.pipes.pipelines import STAGES, frames_of_pipeline, json_lines

ASKED = "Ned has 12 apples. He buys 3 boxes with 7 apples each. How many apples does he have now?"
COUNT = ["-n", "20"]
GREEDY = ["--temp", "0", *COUNT]
EXACTLY = {"temperature": 0, "ignore_eos": True, "tokens": True}
MOBILE = ["--experts", "mobile:0.9", "--little-k", "2"]
LITTLE_PROMPT = ["--prefill-experts", "little"]


def in_one(toast, *flags: str) -> list[dict[str, Any]]:
    done = toast("decode", "--json", *GREEDY, *flags, ASKED)
    assert done.returncode == 0, done.stderr
    return json_lines(done.stdout)


def counts(line: dict[str, Any]) -> dict[str, Any]:
    """What a line says of experts, but for what it says of time."""
    timed = ("seconds", "estimate")
    return {name: value for name, value in line["experts"].items() if name not in timed}


def ids(lines: list[dict[str, Any]]) -> list[int]:
    return [line["id"] for line in lines if "id" in line]


@pytest.fixture(scope="module")
def alone(toast) -> list[dict[str, Any]]:
    """The answer of one process."""
    return in_one(toast, *MOBILE)


def test_the_pipe_runs_the_experts_of_one_process(alone) -> None:
    stages = ["tokenize", "prefill", "decode", "sample"]
    piped = frames_of_pipeline(ASKED, {"decode": MOBILE, "sample": GREEDY}, stages)
    assert ids(piped) == ids(alone) and len(ids(alone)) > 1
    assert counts(piped[-1]) == counts(alone[-1])
    # Where decode read no prompt, nothing is known of the whole model's steps.
    there, here = piped[-1]["experts"], alone[-1]["experts"]
    assert there["seconds"]["little"] > 0 and there["seconds"]["step"] > 0
    assert (there["seconds"]["whole"], there["estimate"]) == (None, None)
    seconds = here["seconds"]
    assert seconds["again"] == seconds["whole"] > 0  # nothing is read in a pass
    share = seconds["little"] + here["ratio"] * seconds["again"]
    assert here["estimate"] == pytest.approx(seconds["whole"] / share, rel=1e-2)


def test_frames_say_how_each_step_was_done(toast) -> None:
    """With the prompt read little: toast-prefill does that in a pipe."""
    alone = in_one(toast, *MOBILE, *LITTLE_PROMPT)
    read = [*LITTLE_PROMPT, "--little-k", "2"]
    flags = {"prefill": read, "decode": [*MOBILE, "--greedy", *COUNT]}
    piped = frames_of_pipeline(ASKED, flags, STAGES[:3])
    assert ids(piped) == ids(alone)
    steps = [line for line in piped if line["k"] == "logits"]
    assert "experts" not in steps[0]  # it is the prompt's
    told = [step["experts"] for step in steps[1:]]
    fell = [one["fallback"] for one in told]
    assert 0 < sum(fell) < len(fell) and [one["k"] for one in told] == [4 if f else 2 for f in fell]
    assert alone[-1]["experts"]["estimate"] is None  # the prompt was read by the little model
    assert counts(alone[-1]).pop("prompt") == "little" and "prompt" not in counts(piped[-1])
    assert counts(piped[-1]) | {"prompt": "little"} == counts(alone[-1]) == {
        "mode": "mobile", "gamma": 0.9, "k": 4, "little_k": 2, "prompt": "little",
        "steps": len(fell), "fallbacks": sum(fell), "ratio": round(sum(fell) / len(fell), 6),
    }  # fmt: skip


def test_a_step_after_the_end_does_not_count(toast) -> None:
    """As text a greedy answer is deferred: a step more has been run when its end is known."""
    modes = ["--experts", "little", "--gear", "low"]
    asked = ["decode", *modes, "--temp", "0", "Who are you?"]
    told, text = toast(*asked, "--json"), toast(*asked, "-v")
    last = json.loads(told.stdout.splitlines()[-1])
    assert last["end"] == "eos" and last["experts"]["steps"] == last["n"] - 1
    said = f"experts: little, K 2 of 4; {last['n'] - 1} steps\n"
    assert said in text.stderr.decode() and last["experts"]["little_k"] == 2
    assert f"gears: low {last['gears']['low']}, mid 0, high 0 steps" in text.stderr.decode()
    assert last["gears"]["low"] == last["experts"]["steps"]


@pytest.mark.parametrize("kind", ["little", "mobile:0.9"])
def test_a_session_s_last_step_counts(toast, tmp_path: Path, kind: str) -> None:
    """A kept session reads the answer's last token too: in one process and in a pipe, and as gears
    count."""
    modes = ["--experts", kind, "--gear", "low"]
    here, there = str(tmp_path / "here"), str(tmp_path / "there")
    alone = in_one(toast, *modes, "--session", here)
    flags = {"prefill": ["--session", there], "decode": modes, "sample": GREEDY}
    piped = frames_of_pipeline(ASKED, flags, ["tokenize", "prefill", "decode", "sample"])
    for last in (alone[-1], piped[-1]):
        assert last["experts"]["steps"] == last["gears"]["low"] == last["n"]
    assert counts(piped[-1]) == counts(alone[-1])
    deferred = toast("decode", *modes, "--session", str(tmp_path / "text"), *GREEDY, "-v", ASKED)
    assert f"; {alone[-1]['n']} steps" in deferred.stderr.decode().split("experts: ")[1]


# ----------------------------------------------------------------------------------------- daemons


@pytest.fixture(scope="module")
def daemon(private_home) -> Iterator[Daemon]:
    with Daemon("crumb", *MOBILE) as running:
        yield running


def test_a_daemon_answers_as_one_process(daemon: Daemon, alone) -> None:
    served = daemon.toast("toast", "--json", *MOBILE, *GREEDY, "--no-history", ASKED)
    here = daemon.toast("toast", "-v", "--no-daemon", *MOBILE, *GREEDY, "--no-history", ASKED)
    assert served.returncode == here.returncode == 0, (served.stderr, here.stderr)
    lines = json_lines(served.stdout)
    [stats] = [line["stats"] for line in lines if "stats" in line]
    assert counts(stats) == counts(alone[-1]) and stats["experts"]["estimate"] > 0
    assert lines[-1]["end"]["text"] == here.stdout.decode().removesuffix("\n")
    assert "experts: mobile, K 2 of 4, gamma 0.9; " in here.stderr.decode()
    decoded = daemon.toast("decode", "-v", *GREEDY, ASKED)
    assert b"runs crumb with mobile:0.9 --little-k 2 experts: loading" in decoded.stderr
    status = daemon.toast("toasted", "status").stdout.decode()
    assert "\nexperts: mobile:0.9 --little-k 2; mobile, K 2 of 4, gamma 0.9; " in status


def test_conversations_step_together_and_fall_back_by_themselves(daemon: Daemon) -> None:
    """One is asked in the midst of another's answer, and it is sure of every token: both are what
    they are alone, and so is what is said of their steps."""
    asked = [
        {"prompt": prompt, "options": {**EXACTLY, "max_tokens": count}}
        for prompt, count in ((ASKED, 36), ("Who are you?", 12))
    ]
    alone = [daemon.ask(**one) for one in asked]
    replies = daemon.replies(asked[0])
    first = [next(replies) for _ in range(4)]
    second = daemon.ask(**asked[1])
    first += replies
    assert [reply["token"]["id"] for reply in first if "token" in reply] == alone[0].tokens
    assert second.tokens == alone[1].tokens and len(second.tokens) == 12
    [stats] = [reply["stats"] for reply in first if "stats" in reply]
    for mine, wanted in zip((stats, second.stats), alone):
        assert counts(mine) == counts(wanted.stats)
    assert 0 < stats["experts"]["fallbacks"] < stats["experts"]["steps"]
    assert second.stats["experts"]["fallbacks"] == 0


def test_a_daemon_with_others_is_refused(daemon: Daemon) -> None:
    done = daemon.toast("toast", "--experts", "little", *GREEDY, ASKED)
    assert done.returncode == 64
    assert done.stderr.decode() == (
        "toast: the daemon runs with --experts mobile:0.9 --little-k 2, not --experts little\n"
        "  hint: --no-daemon answers without it\n"
    )


# ---------------------------------------------------------------------------------------- refusals


REFUSED = (
    (["--experts", "mobile:1.5"], "gamma 1.5 is not in [0, 1]"),
    (["--experts", "mobile:nan"], "gamma nan is not in [0, 1]"),
    (["--experts", "huge"], "'huge' is not big, little, mobile"),
    (["--experts", "little", "--little-k", "0"], "--little-k 0: a token goes to one"),
    (["--experts", "big", "--little-k", "2"], "--little-k needs --experts little or mobile"),
)


@pytest.mark.parametrize("name", ["decode", "toast", "toasted", "perplexity"])
def test_refusals(refuses, name: str) -> None:
    refuses(name, REFUSED)


def test_what_the_model_says_no_to(toast, tmp_path: Path) -> None:
    from tests.model.checkpoints import tied_llama

    done = toast("decode", "--no-daemon", "--experts", "little", "--little-k", "5", "hi")
    assert done.returncode == 64
    assert done.stderr == b"toast-decode: --little-k 5 is more than the model's K of 4\n"
    path = tied_llama(tmp_path / "llama")
    done = toast("perplexity", "-m", str(path), "--experts", "mobile", stdin=b"Some text.")
    assert done.returncode == 64
    assert done.stderr.endswith(b"llama has no experts: llama is a dense model here\n")
    frames = toast("tokenize", "hi").stdout
    done = toast("decode", *LITTLE_PROMPT, stdin=frames)
    assert done.returncode == 64 and b"--prefill-experts is for text" in done.stderr
    done = toast("perplexity", "--experts", "mobile", "--chunk", "8", stdin=b"Some text.")
    assert done.returncode == 64 and b"--chunk and --experts mobile exclude" in done.stderr


def test_perplexity_by_the_pass_that_counts(toast) -> None:
    found = {}
    for mode in ("little", "mobile:1", "mobile:0"):
        done = toast(
            "perplexity", "--json", "--experts", mode, "--limit", "16", stdin=b"1 + 2 = 3 " * 9
        )
        assert done.returncode == 0, done.stderr
        found[mode] = json.loads(done.stdout.splitlines()[-1])
    assert abs(found["mobile:0"]["loss"] - found["little"]["loss"]) < 1e-4
    assert found["mobile:1"]["experts"]["fallbacks"] == 16
    assert "steps" not in found["little"]["experts"]
    assert abs(found["mobile:1"]["loss"] - found["little"]["loss"]) > 1e-3
