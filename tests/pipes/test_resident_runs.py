"""Layers that do not stay, with the real executables: the results are those of a model that is on
the device whole, to the bit; and what is told of them."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.daemons import Daemon
from tests.pipes.pipelines import STORY, TIMEOUT, Pipeline, begin, json_lines
from tests.unit.daemon_front import eventually
from toastkit.model.locate import CRUMB

LAYERS = 8  # of crumb
COUNT = ["-n", "8"]
GREEDY = ["--temp", "0", *COUNT]
TEXT = "Once upon a time there was a fox who lived by the river. One day he met a hen. " * 4
FIELDS = {"resident", "layers", "read", "wait", "compute", "passes", "shed", "grown"}


def in_one(toast, *flags: str, said: bytes = b"") -> list[dict[str, Any]]:
    done = toast("decode", "--json", *GREEDY, *flags, STORY)
    assert done.returncode == 0 and bool(done.stderr) == bool(said)
    assert re.search(said, done.stderr), done.stderr
    return json_lines(done.stdout)


@pytest.fixture(scope="module")
def plain(toast) -> list[dict[str, Any]]:
    return in_one(toast)


# --------------------------------------------------------------------------------- one process


LINE = rb"toast-decode: residency: 3 of 8 layers stay; [\d.]+ MB read, waited [\d.]+ s of "


@pytest.mark.parametrize(
    ("flags", "stay"),
    [
        ("--resident 0", 0),
        ("--resident 3 --placement last -v", 3),
        ("--resident 99", LAYERS),
        ("--resident auto --priority max-context", None),
    ],
)
def test_the_answer_is_the_same(toast, plain, flags: str, stay: int | None) -> None:
    streamed = in_one(toast, *flags.split(), said=LINE if "-v" in flags else b"")
    report = streamed[-1].pop("residency")
    assert streamed == plain
    assert set(report) == FIELDS and report["layers"] == LAYERS
    if stay is not None:
        assert report["resident"] == stay
        assert bool(report["read"]) == bool(report["passes"]) == (stay < LAYERS)


def test_gears_go_with_it(toast) -> None:
    flags = ["--gear", "auto", "--gear-scope", "all", "-n", "5"]
    [*there, end] = in_one(toast, *flags)
    [*streamed, told] = in_one(toast, *flags, "--resident", "2", said=b"no baked gears")
    assert streamed == there and told["text"] == end["text"]
    assert told["residency"]["resident"] == 2
    assert [told["gears"][g] for g in ("low", "mid", "high")] == [
        end["gears"][g] for g in ("low", "mid", "high")
    ]


def test_a_session_goes_on_with_any_layers(toast, plain, tmp_path: Path) -> None:
    """What one wrote the other reads, and computes the same from there."""
    first, second = str(tmp_path / "a"), str(tmp_path / "b")
    begun = ["--temp", "0", "-n", "4"]
    for path, flags in ((first, ["--resident", "0"]), (second, [])):
        done = toast("decode", "--session", path, *begun, *flags, STORY)
        assert done.returncode == 0, done.stderr
    for name in ("tokens.u32", "logits.f32", "cache.bin"):
        assert Path(first, name).read_bytes() == Path(second, name).read_bytes(), name


def test_a_budget_that_is_too_small(toast) -> None:
    for name in ("decode", "toast", "perplexity", "toasted"):
        arguments = ["--no-daemon", "hi"] if name in ("decode", "toast") else []
        done = toast(name, "--resident", "2M", *arguments, stdin=TEXT.encode())
        said = done.stderr.decode()
        assert done.returncode == 64 and done.stdout == b""
        assert re.search(r"--resident 2M: crumb needs \d+M at least\n  hint: ", said), said


# -------------------------------------------------------------------------------- the pipeline


def test_the_pipeline_says_the_same(pipeline, plain) -> None:
    """To the bit, of two prompts, one after another."""
    logits, flags = [], {"prefill": ["--resident", "1", "--chunk", "5", "-v"],
                         "decode": ["--resident", "50%", "--placement", "last", "-v"]}  # fmt: skip
    for more in (flags, {"prefill": [], "decode": []}):
        done = pipeline(
            ["tokenize", "--each-line"], ["prefill", *more["prefill"]],
            ["decode", "--greedy", "--inline", *COUNT, *more["decode"]],
            ["frames", "--json", "--arrays", "base64"],
            stdin=f"{STORY}\nWhat is 17 + 25?\n".encode(),
        )  # fmt: skip
        assert done.codes == [0] * 4, done.errors
        frames = json_lines(done.out)
        logits.append([f["logits"] for f in frames if f["k"] == "logits"])
        if more is not flags:
            continue
        tokens = [(f["pos"], f["id"]) for f in frames if f["k"] == "token"]
        drawn = [(t["pos"], t["id"]) for t in plain if "id" in t]
        assert tokens[: len(drawn)] == drawn and len(tokens) > len(drawn)
        first, last = (frame for frame in frames if frame["k"] == "end")
        for end in (first, last):
            report = end["residency"]
            assert set(report) == FIELDS and report["resident"] == 4 and report["read"] > 1 << 20
        assert sum("residency" in frame for frame in frames) == 2
        told = [error.partition(" layers")[0] for error in done.errors if "residency: " in error]
        assert [line.splitlines()[-1] for line in told] == [
            "toast-prefill: residency: 1 of 8", "toast-decode: residency: 4 of 8"
        ]  # fmt: skip
    assert logits[0] == logits[1] and len(logits[0]) > 8


# ------------------------------------------------------------------------------ daemon and toast


def test_a_daemon_streams_for_all(plain) -> None:
    """For toast, for attached runs, and for what was remembered by one that streams nothing."""
    flags = ["--resident", "2"]
    text = "".join(token["text"] for token in plain)
    with Daemon("crumb") as daemon:
        first = daemon.toast("toast", "--session", "fox", *GREEDY, STORY)
        daemon.signal(signal.SIGTERM)
        daemon.start(*flags)
        asked = ["--session", "fox", "-v", *GREEDY, "What was it called?"]
        second = daemon.toast("toast", *asked)
        attached = daemon.toast("decode", "-v", *flags, *GREEDY, STORY)
        status = daemon.toast("toasted", "status")
        numbers = daemon.control("status")
    for done in (first, second, attached, status):
        assert done.returncode == 0, done.stderr
    assert first.stdout == attached.stdout and text in first.stdout.decode()
    cached, total = re.search(r"(\d+)/(\d+) prompt tokens cached", second.stderr.decode()).groups()
    assert 0 < int(cached) < int(total)
    assert b"using the weights of the daemon" in attached.stderr
    assert b"toast: residency: 2 of 8 layers stay; " in second.stderr
    assert numbers["resident"] == "2" and set(numbers["residency"]) == FIELDS
    assert numbers["residency"]["read"] > 1 << 20
    assert b"\nresidency: 2; 2 of 8 layers stay; " in status.stdout


def test_conversations_that_step_together(plain) -> None:
    with Daemon("crumb", "--resident", "0") as daemon:
        waiting = [
            begin("toast", *GREEDY, "--no-history", STORY, env=daemon.environment) for _ in range(2)
        ]
        answers = {process.communicate(timeout=TIMEOUT)[0] for process in waiting}
    assert len(answers) == 1
    assert "".join(token["text"] for token in plain) in answers.pop().decode()


# ----------------------------------------------------------------------------------- perplexity


def test_perplexity_is_the_same_to_the_last_digit(toast) -> None:
    outcomes = []
    for flags in ([], ["--resident", "0", "-v"]):
        done = toast("perplexity", "--json", "--context", "32", *flags, stdin=TEXT.encode())
        assert done.returncode == 0, done.stderr
        lines = json_lines(done.stdout)
        for name in ("seconds", "tokens_per_second"):
            del lines[-1][name]
        outcomes.append((lines, lines[-1].pop("residency", None), done.stderr.decode()))
    (whole, nothing, _), (streamed, report, said) = outcomes
    assert streamed == whole and nothing is None
    assert set(report) == FIELDS and report["resident"] == 0 and report["read"] > 1 << 20
    assert "toast-perplexity: residency: 0 of 8 layers stay; " in said


# ---------------------------------------------------------------------- files that do not stay


@pytest.mark.parametrize("harm", ["removed", "replaced", "truncated"])
def test_a_checkpoint_that_changes_in_mid_run(toast, tmp_path: Path, harm: str) -> None:
    """A clear error; the session holds what was computed up to there, and goes on elsewhere."""
    model, session = tmp_path / "m.toast", tmp_path / "s"
    shutil.copy(CRUMB, model)
    flags = ["-m", str(model), "--json", "--temp", "0", "--ignore-eos", "--session", str(session)]
    process = begin("decode", "--resident", "1", *flags, STORY)
    lines = process.stdout.readline() + process.stdout.readline()
    if harm == "removed":
        model.unlink()
    elif harm == "replaced":
        shutil.copy(model, tmp_path / "other")
        os.replace(tmp_path / "other", model)
    else:
        os.truncate(model, 1 << 20)
    rest, said = process.communicate(timeout=TIMEOUT)
    assert process.returncode == (66 if harm == "removed" else 65), said
    assert said.startswith(b"toast-decode: ") and len(said.splitlines()) <= 2
    drawn = len((lines + rest).splitlines())
    assert (session / "tokens.u32").stat().st_size // 4 >= drawn - 1 > 0
    if harm == "truncated":
        done = toast("decode", "--session", str(session), "--temp", "0", "-n", "4", STORY)
        assert done.returncode == 0, done.stderr


# ------------------------------------------------------------------------------ memory warnings


def warned(name: str, *arguments: str) -> tuple[list[str], str]:
    """Runs a command that writes as it goes, with a memory warning after its first output; what it
    wrote, line by line, and said."""
    process = begin(name, *arguments)
    first = process.stdout.readline()
    process.send_signal(signal.SIGUSR1)
    rest, said = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 0, said
    return (first + rest).decode().splitlines(), said.decode()


LONGER = ["--json", "--temp", "0", "-n", "16", "--ignore-eos", STORY]


def test_a_memory_warning_in_mid_run(toast) -> None:
    """All layers go; nothing else changes, in toast either."""
    done = toast("decode", *LONGER).stdout.decode().splitlines()
    lines, _ = warned("decode", "--resident", "6", *LONGER)
    told = json.loads(lines[-1])
    assert lines[:-1] == done[:-1]
    assert (told["residency"]["resident"], told["residency"]["shed"]) == (0, 6)
    lines, said = warned("toast", "-v", "--resident", "6", "--no-daemon", *LONGER)
    assert "toast: residency: 0 of 8 layers stay; " in said
    text = "".join(json.loads(line)["text"] for line in done)
    assert json.loads(lines[-1])["end"]["text"] == text


def test_a_memory_warning_to_perplexity() -> None:
    text = Path(__file__).parents[2] / "README.md"
    flags = ["--json", "-v", "--chunk", "8", "--context", "64", "--limit", "96"]
    lines, _ = warned("perplexity", "--resident", "6", *flags, str(text))
    assert json.loads(lines[-1])["residency"]["resident"] == 0


def test_a_memory_warning_in_the_pipe() -> None:
    """To a decode that waits for tokens, and to a prefill that has handed over."""
    extra = {
        "prefill": ["--resident", "5", "-v"],
        "decode": ["--resident", "5"],
        "sample": ["--temp", "0", "-n", "16", "--ignore-eos"],
        "frames": ["--json", "--arrays", "none"],
    }
    stages = ["tokenize", "prefill", "decode", "sample", "frames"]
    running = Pipeline("", {**extra, "tokenize": ["--each-line"]}, stages, lines=[STORY, "Hi!"])
    begun = running.first_output()
    for name in ("prefill", "decode"):
        running.process(name).send_signal(signal.SIGUSR1)
    done = running.finish()
    assert done.statuses == [0] * len(stages), done.errors
    frames = json_lines(begun + done.out)
    ends = [frame["residency"] for frame in frames if frame["k"] == "end"]
    assert [end["resident"] for end in ends] == [0, 0]


def test_a_memory_warning_to_a_daemon() -> None:
    """At once where nothing is under way; the answers go on as before."""
    with Daemon("crumb", "--resident", "6") as daemon:
        assert daemon.control("status")["residency"]["resident"] == 6
        held = sum(daemon.control("status")["ledger"].values())
        before = daemon.toast("toast", "--no-history", *GREEDY, STORY)
        daemon.process.send_signal(signal.SIGUSR1)
        eventually(lambda: daemon.control("status")["residency"]["resident"] == 0)
        assert daemon.control("status")["residency"]["shed"] == 6
        eventually(lambda: sum(daemon.control("status")["ledger"].values()) < held)
        after = daemon.toast("toast", "--no-history", *GREEDY, STORY)
    assert (before.returncode, before.stdout) == (after.returncode, after.stdout)


def test_without_streaming_the_signal_ends_a_command() -> None:
    process = begin("decode", "--ignore-eos", STORY)
    assert process.stdout.read(1)
    process.send_signal(signal.SIGUSR1)
    assert process.wait(TIMEOUT) == -signal.SIGUSR1
    process.communicate(timeout=TIMEOUT)
