"""--kv-bits: in a pipeline, in one process and in a daemon; as sessions and plans have it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.daemons import Daemon
from tests.pipes.pipelines import STORY, frames_of_pipeline, json_lines
from tests.unit.daemon_front import eventually
from toastkit.session.directory import Session

KV16, KV8 = (["--kv-bits", bits] for bits in ("16", "8"))
DTYPES = {"8": "int8", "16": "float16", "32": "float32"}
SEEDED = ["--temp", "0.8", "--top-p", "0.95", "--seed", "7", "-n", "6"]
STAGES = ("tokenize", "prefill", "decode", "sample")


def stored(session: Path) -> set[str]:
    """The dtypes of keys and values."""
    with Session.open(session, None, create=False, write=False) as opened:
        layers = opened.header.layers or []
        return {t.dtype for layer in layers for t in layer.tensors if t.name in ("keys", "values")}


def drawn_of(lines: list[dict]) -> list[tuple]:
    """The tokens of JSON lines, and their log-probabilities."""
    return [(line["id"], line["logprob"]) for line in lines if "id" in line]


def size(session: Path) -> int:
    return sum(file.stat().st_size for file in session.iterdir() if file.is_file())


def test_a_pipeline_is_one_process(toast, tmp_path: Path) -> None:
    """To the bit, and not what 32 bits give."""
    drawn, sizes = {}, {}
    for bits, dtype in DTYPES.items():
        kept, piped = tmp_path / f"one-{bits}", tmp_path / f"pipe-{bits}"
        flag = ["--kv-bits", bits]
        alone = toast("decode", "--json", "--session", kept, *flag, *SEEDED, STORY)
        drawn[bits] = drawn_of(json_lines(alone.stdout))
        assert stored(kept) == {dtype}
        sizes[bits] = size(kept)
        if bits == "32":
            continue  # as without the flag
        session = ["--session", str(piped)]
        extra = {"prefill": [*session, *flag], "decode": flag, "sample": SEEDED}
        assert drawn[bits] == drawn_of(frames_of_pipeline(STORY, extra, STAGES))
        assert stored(piped) == {dtype}
    assert all(len(found) == 6 for found in drawn.values())
    assert drawn["8"] != drawn["16"] != drawn["32"]
    assert sizes["8"] < sizes["16"] < sizes["32"]


def test_a_step_that_is_taken_back_leaves_nothing(toast) -> None:
    """In 8 bits, of steps that the little model gave and those that the whole one did again: in a
    pipe as in one process; and the whole model's, where none of the little one's is taken."""
    found: dict[str, list[tuple]] = {}
    for way in ("mobile:0.9", "mobile:1", "big"):
        flags = [*KV8, "--experts", way]
        alone = toast("decode", "--json", "--temp", "0", "-n", "12", *flags, STORY)
        lines = json_lines(alone.stdout)
        found[way] = drawn_of(lines)
        if way == "mobile:0.9":
            told = lines[-1]["experts"]
            assert 0 < told["fallbacks"] < told["steps"]
            extra = {"prefill": KV8, "decode": flags, "sample": ["--temp", "0", "-n", "12"]}
            piped = drawn_of(frames_of_pipeline(STORY, extra, STAGES))
            assert np.allclose(found[way], piped, rtol=0, atol=2e-6)  # six decimals of float32
    assert found["mobile:1"] == found["big"] != found["mobile:0.9"]


def test_a_session_is_as_if_it_had_never_been_left(toast, tmp_path: Path) -> None:
    """In 8 bits: what is drawn is the same, and its probability, to the bit."""
    words = ("decode", "--raw", "--json", "--temp", "0", *KV8, "--session")
    found = []
    for session, counts in (("whole", (6,)), ("left", (2, 2, 2))):
        text, drawn = b"Once upon a time there was a fox", []
        for count in counts:
            done = toast(*words, tmp_path / session, "-n", str(count), stdin=text)
            assert done.returncode == 0, done.stderr
            lines = [line for line in json_lines(done.stdout) if "id" in line]
            drawn += drawn_of(lines)
            text += "".join(line["text"] for line in lines).encode()
        assert stored(tmp_path / session) == {"int8"}
        found.append(drawn)
    assert found[0] == found[1] and len(found[0]) == 6


def test_a_session_goes_on_in_other_bits(toast, tmp_path: Path) -> None:
    """Without a word, and all of what it holds is reused."""
    session = tmp_path / "s"
    words = ("decode", "--raw", "--session", session, "--temp", "0", "-n", "3")
    text = b"Once upon a time there was a fox"
    for flag, dtype in ((KV16, "float16"), ([], "float32"), (KV8, "int8"), (KV16, "float16")):
        done = toast(*words, *flag, "-v", stdin=text)
        assert done.returncode == 0 and stored(session) == {dtype}
        text += done.stdout.removesuffix(b"\n")
        fork = tmp_path / dtype
        if fork.exists():
            continue
        done = toast("decode", "--raw", "--fork", session, "--session", fork, "--require-hit", "-n",
                     "1", *KV16, stdin=text + b" and")  # fmt: skip
        assert done.returncode == 0 and stored(fork) == {"float16"}
        assert stored(session) == {dtype}


def test_what_is_refused(toast) -> None:
    """Of the flag and of its variable."""
    for value, env, dtype, said in (
        (["--kv-bits", "4"], {}, "float32", "'4' is not one of '8', '16', '32'"),
        ([], {"TOAST_KV_BITS": "4"}, "float32", "'4' is not one of '8', '16', '32'"),
        ([], {"TOAST_KV_BITS": "32"}, "bfloat16", "--kv-bits 32: activations are in bfloat16"),
    ):
        done = toast("decode", "--dtype", dtype, *value, "hi", env=env)
        assert done.returncode == 64 and not done.stdout
        first, *rest = done.stderr.decode().splitlines()
        assert said in first and len(rest) <= 1


def test_a_plan_has_room_for_half(toast) -> None:
    """But for the recurrent states, which stay."""
    found = []
    for bits in ("32", "16", "8"):
        words = ("--json", "--mem", "80M", "--context", "8000", "--no-calibration")
        done = toast("model", "plan", "crumb", *words, "--kv-bits", bits)
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout)["residency"]["cache"])
    wide, half, least = found
    assert 0.5 * wide < half < 0.52 * wide and 0.26 * wide < least < 0.3 * wide


@pytest.mark.parametrize("bits", ["16", "8"])
def test_a_daemon_has_its_own(toast, bits: str) -> None:
    """Who wants the same uses its weights; who does not computes here. What it spills lies apart
    from what one with other bits does."""
    flag, kept = ["--kv-bits", bits], DTYPES[bits]
    alone = toast("decode", "--no-newline", *SEEDED, *flag, STORY)
    with Daemon("crumb", "--no-audit", *flag) as daemon:
        assert daemon.control("status")["kv_dtype"] == kept
        told = daemon.toast("toasted", "status").stdout
        assert f"in float32, keys and values in {kept}".encode() in told
        said = daemon.toast("toast", *SEEDED, STORY)
        assert said.stdout.removesuffix(b"\n") == alone.stdout
        used = daemon.toast("decode", "-v", "--no-newline", *SEEDED, *flag, STORY)
        assert used.stdout == alone.stdout and b"using the weights" in used.stderr
        here = daemon.toast("decode", "-v", "-n", "1", STORY)
        why = (
            f"the daemon runs crumb with keys and values in {kept}: loading the model here".encode()
        )
        assert here.returncode == 0 and why in here.stderr
        folders = eventually(lambda: list(daemon.home.glob("cache_home/toastkit/conversations/*")))
        assert [folder.name.partition("-")[2] for folder in folders] == [f"float32-{kept}"]
