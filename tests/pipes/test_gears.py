"""Gears with the real executables: through the feed, and in one process."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.daemons import Daemon
from tests.pipes.pipelines import STAGES, STORY, frames_of_pipeline, json_lines

GEARS = ["--gear", "auto", "--gear-scope", "all"]
COUNT = ["-n", "24"]


def in_one(toast, *flags: str, said: str = "") -> list[dict[str, Any]]:
    """The lines of one process. said: a pattern for what it writes on stderr."""
    done = toast("decode", "--json", "--temp", "0", *COUNT, *flags, STORY)
    assert done.returncode == 0 and re.search(said, done.stderr.decode(), re.S), done.stderr
    return json_lines(done.stdout)


@pytest.fixture(scope="module")
def alone(toast) -> list[dict[str, Any]]:
    """The answer of one process in gears by entropy."""
    return in_one(toast, *GEARS)


def tokens(lines: list[dict[str, Any]]) -> list[tuple]:
    return [(x["pos"], x["id"], x.get("gear"), x["entropy"]) for x in lines if "id" in x]


LOW = ["-v", "--gear", "low", "--gear-bits", "2,8"]
LOW_SAID = r"gears: low 23, mid 0, high 0 steps; 1 shift in .* on the device now"
JSON = ["--json", "--arrays", "none"]


def test_the_pipe_runs_the_gears_of_one_process(alone) -> None:
    assert {gear for _, _, gear, _ in tokens(alone)} == {"low", "mid"}
    drawn = {"decode": GEARS, "sample": ["--temp", "0", *COUNT]}
    piped = frames_of_pipeline(STORY, drawn)
    assert tokens(piped) == tokens(alone)
    # decode does without entropy-gear, and without a sampler.
    without = frames_of_pipeline(STORY, drawn, ["tokenize", "prefill", "decode", "sample"])
    own = frames_of_pipeline(STORY, {"decode": [*GEARS, "--greedy", *COUNT]}, STAGES[:3])
    assert [t[:2] for t in tokens([{"gear": None, "entropy": None, **x} for x in without])] == [
        t[:2] for t in tokens(alone)
    ]
    assert [t[:3] for t in tokens(own)] == [t[:3] for t in tokens(alone)]
    ran = [[x["gears"] for x in lines if "gears" in x] for lines in (alone, piped, without, own)]
    for [report] in ran:
        assert {k: report[k] for k in ("low", "mid", "high", "shifts", "bytes")} == {
            k: ran[0][0][k] for k in ("low", "mid", "high", "shifts", "bytes")
        }


def test_fixed_and_high(toast) -> None:
    plain = in_one(toast)
    high = in_one(toast, "--gear", "high", "--gear-scope", "all")
    low = in_one(toast, *LOW, "--gear-scope", "all", said=LOW_SAID)
    assert [t[:2] for t in tokens(high)] == [t[:2] for t in tokens(plain)]
    assert [t[3] for t in tokens(high)] == [t[3] for t in tokens(plain)]
    assert [t[1] for t in tokens(low)] != [t[1] for t in tokens(plain)]
    assert {t[2] for t in tokens(low)} == {"low"} and {t[2] for t in tokens(high)} == {"high"}
    assert low[-1]["gears"]["low"] == 23 and low[-1]["gears"]["bytes"] < 4 << 20
    assert "gears" not in plain[-1] and not any("gear" in x for x in plain)


def test_a_session_goes_on_in_its_gears(toast, pipeline, alone, tmp_path: Path) -> None:
    """Stopped by a limit and resumed by other processes, in a pipe."""
    path = str(tmp_path / "s")
    kept, drawn = ["--session", path], ["--temp", "0", "-n", "9"]
    begun = frames_of_pipeline(STORY, {"prefill": kept, "decode": GEARS, "sample": drawn})
    assert (tmp_path / "s" / "gears.msgpack").exists()
    ids = [i for x in begun if x["k"] == "tokens" for i in x["ids"]]
    ids += [x["id"] for x in begun if x["k"] == "token"]
    stream = json.dumps(next(x for x in begun if x["k"] == "head") | {"run": None}) + "\n"
    stream += json.dumps({"k": "tokens", "ids": ids, "role": "user", "final": True}) + "\n"
    frames = toast("frames", "--from-json", stdin=stream.encode()).stdout
    second = pipeline(
        ["prefill", *kept], ["decode", *GEARS], ["entropy-gear"],
        ["sample", "--temp", "0", "-n", "15"], ["frames", *JSON], stdin=frames,
    )  # fmt: skip
    assert second.codes == [0] * 5, second.errors
    rest = json_lines(second.out)
    assert tokens(begun) + tokens(rest) == tokens(alone)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--gear-scope", "all"], "--gear-scope needs a --gear"),
        (["--gear-cache", "1M"], "--gear-cache needs a --gear"),
        (["--gear", "low", "--low", "1"], "--low is for --gear auto"),
        (["--min-duration", "3"], "--min-duration is for --gear auto"),
        (["--json", "--low", "1"], "--low is for --gear auto"),
        (["--gear", "auto", "--min-duration", "0"], "invalid minimum duration: 0"),
        (["--gear", "auto", "--low", "4"], "low 4 is not less than high 3.5"),
        (["--gear", "low", "--gear-bits", "8,4"], "no such gear bits: 8,4"),
        (["--gear", "low", "--gear-bits", "4"], "'4' is not two numbers"),
        (["--gear", "fast"], "'fast' is not one of"),
    ],
)
def test_refusals(toast, flags: list[str], message: str) -> None:
    done = toast("decode", *flags, "hi")
    assert done.returncode == 64 and message in done.stderr.decode()


def test_thresholds_belong_to_entropy_gear(toast) -> None:
    frames = toast("tokenize", "hi").stdout
    done = toast("decode", "--gear", "auto", "--low", "1", stdin=frames)
    assert done.returncode == 64 and "give it to toast-entropy-gear" in done.stderr.decode()


def test_a_daemon_with_gears(alone) -> None:
    """It answers as one process with the same flags, and toast without a daemon does too."""
    asked = ["--temp", "0", *COUNT, STORY]
    with Daemon("crumb", *GEARS) as daemon:
        served = daemon.toast("toast", "--json", *asked)
        here = daemon.toast("toast", *GEARS, *asked)
        attached = daemon.toast("decode", "-v", "-n", "1", STORY)
        status = daemon.toast("toasted", "status")
        assert {r.returncode for r in (served, here, attached, status)} == {0}
    lines = json_lines(served.stdout)
    assert lines[-1]["end"]["text"] == here.stdout.decode().removesuffix("\n")
    assert here.stdout.decode() == "".join(line["text"] for line in alone) + "\n"
    [counts] = [line["stats"]["gears"] for line in lines if "stats" in line]
    assert sum(counts.values()) == 24 and len(counts) > 1
    assert b"the daemon runs crumb in gears: loading the model here" in attached.stderr
    assert b"\ngears: auto; low " in status.stdout
