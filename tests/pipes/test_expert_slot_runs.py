"""--expert-slots with the real executables: what is refused, the same answers, what is told."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.daemons import Daemon
from tests.model.published import write_published
from tests.pipes.pipelines import STORY, Pipeline
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
        for command in (["decode", "Hi!"], ["perplexity", str(text)]):
            done = toast(*command, *flags)
            assert done.returncode == 64 and message in done.stderr and not done.stdout
            assert len(done.stderr.splitlines()) <= 2 and b"Traceback" not in done.stderr


def test_a_pipe_one_process_and_a_whole_model_say_the_same(toast) -> None:
    flags = ["--expert-slots", "5"]
    plain = toast("decode", *GREEDY, STORY).stdout
    for more in ([], ["--expert-prefetch", "1"], ["--resident", "0"]):
        done = toast("decode", "--json", "-v", *GREEDY, *flags, *more, STORY)
        assert done.returncode == 0, done.stderr
        told = [json.loads(line) for line in done.stdout.splitlines()]
        assert "".join(record["text"] for record in told) == plain.decode().rstrip("\n")
        report = told[-1]["slots"]
        assert set(report) == FIELDS and report["slots"] == 5 and report["experts"] == 16
        assert 0 < report["hit"] < report["wanted"] and report["read"]
        assert b"slots: 5 of 16 in slots; " in done.stderr


def test_optimistic_steps_are_told(tmp_path: Path) -> None:
    """Of a text that repeats itself, all that is wanted comes to be there; the logits are those of
    a model that is whole."""
    stages, slots = ["tokenize", "prefill", "decode", "frames"], ["--expert-slots", "14"]
    (tmp_path / "ids").write_text("7\n" * 40)
    outs = []
    for flags in (slots, []):
        forced = [*flags, "--force", str(tmp_path / "ids")]
        extra = {"prefill": flags, "decode": forced, "frames": ["--json"]}
        done = Pipeline(STORY, extra, stages).finish()
        assert done.statuses == [0] * len(stages), done.errors
        outs.append([json.loads(line) for line in done.out.splitlines()])
    logits = [[f["logits"] for f in out if f["k"] == "logits"] for out in outs]
    assert logits[0] == logits[1] and len(logits[0]) == 41
    report = outs[0][-1]["slots"]
    assert set(report) == FIELDS and report["optimistic"] > report["retried"]


def test_the_pipeline_says_the_same(toast) -> None:
    stages = ["tokenize", "prefill", "decode", "frames"]
    slots = ["--expert-slots", "5"]
    own, shown = ["--greedy", "-n", "8"], {"frames": ["--json", "--arrays", "none"]}
    outs = []
    for flags in (slots, []):
        extra = {**shown, "prefill": flags, "decode": [*flags, *own]}
        done = Pipeline(STORY, extra, stages).finish()
        assert done.statuses == [0] * len(stages), done.errors
        outs.append([json.loads(line) for line in done.out.splitlines()])
    tokens = [[(f["id"], f["logprob"]) for f in out if f["k"] == "token"] for out in outs]
    assert tokens[0] == tokens[1] and len(tokens[0]) == 8
    steps = [f["experts"] for f in outs[0] if f["k"] == "logits" and f.get("experts")]
    end = outs[0][-1]["slots"]
    for name in ("wanted", "hit"):
        assert sum(step[name] for step in steps) == end[name] > 0
    assert not any(f.get("experts") for f in outs[1])


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
        assert daemon.process is not None
        daemon.process.send_signal(signal.SIGUSR1)  # at once where nothing is under way
        eventually(lambda: daemon.control("status")["slots"]["slots"] == 4)
        eventually(lambda: sum(daemon.control("status")["ledger"].values()) < held)
        *_, again = daemon.replies({"prompt": "Hi!", "options": {"max_tokens": 4}})
        assert again["end"]["text"] == end["end"]["text"]


def test_a_memory_warning(toast) -> None:
    """The least slots stay, of any number; the answer is the same."""
    flags = ["--temp", "0", "-n", "24", "--ignore-eos", STORY]
    plain = toast("decode", "--json", *flags).stdout.decode().splitlines()
    lines, said = warned("decode", "-v", "--expert-slots", "9", "--json", *flags)
    report = json.loads(lines[-1])["slots"]
    assert lines[:-1] == plain[:-1] and (report["slots"], report["initial"]) == (4, 9)
    assert "slots: 4 of 16 in slots, 9 at the beginning; " in said
    _, said = warned("toast", "-v", "--no-daemon", "--json", "--expert-slots", "auto", *flags)
    assert "toast: slots: 4 of 16 in slots" in said
