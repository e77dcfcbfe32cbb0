"""--expert-slots with the real executables: what is refused, the same answers, what is told."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.daemons import Daemon
from tests.model.published import write_published
from tests.pipes.pipelines import STAGES, STORY, frames_of_pipeline, json_lines
from tests.pipes.test_resident_runs import warned
from tests.unit.daemon_front import eventually

NAMES = ["decode", "prefill", "toast", "toasted", "perplexity"]
GREEDY = ["--temp", "0", "-n", "8"]
FIELDS = {
    "slots", "experts", "initial", "wanted", "hit", "ahead", "right", "read", "wait", "passes",
    "optimistic", "retried",
}  # fmt: skip


REFUSED = (
    (["--expert-slots", "-1"], "'-1' is not auto, a number of slots a layer, or a size"),
    (["--expert-slots", "50%"], "'50%' is not auto, a number of slots"),
    (["--expert-slots="], "'' is not auto"),
    (["--expert-slots", "8", "--expert-prefetch", "4"], "'4' is not one of"),
    (["--expert-prefetch", "1"], "--expert-prefetch needs --expert-slots"),
)


@pytest.mark.parametrize("name", NAMES)
def test_refusals(refuses, name: str) -> None:
    refuses(name, REFUSED)


def test_models_that_cannot_have_them(toast, tmp_path: Path) -> None:
    dense = str(write_published(tmp_path / "llama", "llama"))
    text = tmp_path / "text"
    text.write_text("Once upon a time")
    for flags, message in (
        (["--expert-slots", "3"], b"crumb needs 4 slots a layer at least"),
        (["--expert-slots", "0"], b"crumb needs 4 slots a layer at least"),
        (["--expert-slots", "1M", "--dtype", "float32"], b"crumb needs 5M at least"),
        (
            ["--expert-slots", "10", "--resident", "2M"],
            b"hint: for slots for experts, what else lies outside its layers, two of them,",
        ),
        (["--expert-slots", "auto", "-m", dense], b"is a dense model: it has no experts"),
    ):
        # Both commands check these in one place: two cases show that perplexity does too.
        scored = [["perplexity", str(text)]] if "auto" in flags or "3" in flags else []
        for command in (["decode", "Hi!"], *scored):
            done = toast(*command, *flags)
            assert done.returncode == 64 and message in done.stderr and not done.stdout
            assert len(done.stderr.splitlines()) <= 2 and b"Traceback" not in done.stderr


@pytest.fixture(scope="module")
def plain(toast) -> list[dict]:
    """The greedy answer with all experts loaded, as JSON lines."""
    done = toast("decode", "--json", *GREEDY, STORY)
    assert done.returncode == 0, done.stderr
    return json_lines(done.stdout)


def test_one_process_and_a_whole_model_say_the_same(toast, plain) -> None:
    flags = ["--expert-slots", "5"]
    for more in ([], ["--expert-prefetch", "1"], ["--resident", "0"]):
        done = toast("decode", "--json", "-v", *GREEDY, *flags, *more, STORY)
        assert done.returncode == 0, done.stderr
        *told, end = json_lines(done.stdout)
        report = end.pop("slots")
        end.pop("residency", None)
        assert [*told, end] == plain
        assert set(report) == FIELDS and report["slots"] == 5 and report["experts"] == 16
        assert 0 < report["hit"] < report["wanted"] and report["read"]
        assert b"slots: 5 of 16 in slots; " in done.stderr


def test_optimistic_steps_are_told(tmp_path: Path) -> None:
    """The experts of a repeated token are soon all in slots, so that most optimistic steps are
    right. The logits are those with all experts loaded."""
    slots = ["--expert-slots", "14"]
    (tmp_path / "ids").write_text("7\n" * 40)
    outs = []
    for flags in (slots, []):
        forced = [*flags, "--force", str(tmp_path / "ids")]
        extra = {"prefill": flags, "decode": forced, "frames": ["--json"]}
        outs.append(frames_of_pipeline(STORY, extra, STAGES[:3]))
    logits = [[f["logits"] for f in out if f["k"] == "logits"] for out in outs]
    assert logits[0] == logits[1] and len(logits[0]) == 41
    assert not any(frame.get("experts") for frame in outs[1])
    report = outs[0][-1]["slots"]
    assert set(report) == FIELDS and report["optimistic"] > report["retried"]


def test_the_pipeline_says_the_same(plain) -> None:
    slots = ["--expert-slots", "5"]
    flags = {"prefill": slots, "decode": [*slots, "--greedy", "-n", "8"]}
    frames = frames_of_pipeline(STORY, flags, STAGES[:3])
    tokens = [line for line in plain if "id" in line]
    drawn = [frame for frame in frames if frame["k"] == "token"]
    assert [frame["id"] for frame in drawn] == [line["id"] for line in tokens] and len(drawn) == 8
    for frame, line in zip(drawn, tokens):
        assert frame["logprob"] == pytest.approx(line["logprob"], abs=1e-5)
    steps = [f["experts"] for f in frames if f["k"] == "logits" and f.get("experts")]
    end = frames[-1]["slots"]
    for name in ("wanted", "hit"):
        assert sum(step[name] for step in steps) == end[name] > 0


def test_a_variable(toast, monkeypatch) -> None:
    monkeypatch.setenv("TOAST_EXPERT_SLOTS", "4")
    done = toast("decode", "--json", *GREEDY, "Hi!")
    assert json.loads(done.stdout.splitlines()[-1])["slots"]["slots"] == 4


def test_a_daemon(private_home) -> None:
    with Daemon("crumb", "--expert-slots", "6") as daemon:
        for name in ("decode", "toast"):
            done = daemon.toast(name, "-v", "--expert-slots", "6", *GREEDY, "Who are you?")
            assert done.returncode == 0 and f"daemon at {daemon.socket}\n" in done.stderr.decode()
            assert b": slots: 6 of 16 in slots; " in done.stderr
            done = daemon.toast(name, "--expert-slots", "7", *GREEDY, "Hi!")
            assert done.returncode == 64
            assert b"runs with --resident all --expert-slots 6, not --resident all" in done.stderr
        status = daemon.control("status")
        assert status["resident"] == "all --expert-slots 6"
        assert status["slots"]["slots"] == 6 and status["slots"]["wanted"] > 0
        *_, stats, end = daemon.replies({"prompt": "Hi!", "options": {"max_tokens": 4}})
        assert end["end"]["n"] == 4 and stats["stats"]["slots"]["wanted"] > 0
        held = sum(daemon.control("status")["ledger"].values())
        daemon.process.send_signal(signal.SIGUSR1)  # at once where nothing is under way
        eventually(lambda: daemon.control("status")["slots"]["slots"] == 4)
        eventually(lambda: sum(daemon.control("status")["ledger"].values()) < held)
        *_, again = daemon.replies({"prompt": "Hi!", "options": {"max_tokens": 4}})
        assert again["end"]["text"] == end["end"]["text"]


def test_a_memory_warning(toast) -> None:
    """The least slots stay, of any number; the answer is the same."""
    flags = ["--temp", "0", "-n", "16", "--ignore-eos", STORY]
    plain = toast("decode", "--json", *flags).stdout.decode().splitlines()
    lines, said = warned("decode", "-v", "--expert-slots", "9", "--json", *flags)
    report = json.loads(lines[-1])["slots"]
    assert lines[:-1] == plain[:-1] and (report["slots"], report["initial"]) == (4, 9)
    assert "slots: 4 of 16 in slots, 9 at the beginning; " in said
    _, said = warned("toast", "-v", "--no-daemon", "--json", "--expert-slots", "auto", *flags)
    assert "toast: slots: 4 of 16 in slots" in said
