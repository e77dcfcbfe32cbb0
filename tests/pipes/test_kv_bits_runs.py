"""--kv-bits: in a pipeline, in one process and in a daemon; as sessions and plans have it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.daemons import Daemon
from tests.pipes.pipelines import STORY, Pipeline
from tests.pipes.test_pipeline import frames_of, only
from tests.unit.daemon_front import eventually
from toastkit.frames import Token
from toastkit.session.directory import Session

KV16 = ["--kv-bits", "16"]
SEEDED = ["--temp", "0.8", "--top-p", "0.95", "--seed", "7", "-n", "6"]
STAGES = ("tokenize", "prefill", "decode", "sample")


def stored(session: Path) -> set[str]:
    """The dtypes of keys and values."""
    with Session.open(session, None, create=False, write=False) as opened:
        layers = opened.header.layers or []
        return {t.dtype for layer in layers for t in layer.tensors if t.name in ("keys", "values")}


def size(session: Path) -> int:
    return sum(file.stat().st_size for file in session.iterdir() if file.is_file())


def test_a_pipeline_is_one_process(toast, tmp_path: Path) -> None:
    """To the bit, and not what 32 bits give."""
    drawn, sizes = {}, {}
    for bits in ("16", "32"):
        kept, piped = tmp_path / f"one-{bits}", tmp_path / f"pipe-{bits}"
        flag = ["--kv-bits", bits]
        alone = toast("decode", "--json", "--session", kept, *flag, *SEEDED, STORY)
        lines = [json.loads(line) for line in alone.stdout.splitlines()]
        session = ["--session", str(piped)]
        extra = {"prefill": [*session, *flag], "decode": flag, "sample": SEEDED}
        done = Pipeline(STORY, extra, STAGES).finish()
        assert done.statuses == [0] * 4, done.errors
        tokens = only(Token, frames_of(done.out))
        drawn[bits] = [(token.id, token.logprob) for token in tokens]
        assert drawn[bits] == [(line["id"], line["logprob"]) for line in lines if "id" in line]
        assert stored(kept) == stored(piped) == {f"float{bits}"}
        sizes[bits] = size(piped)
    assert len(drawn["16"]) == 6 and drawn["16"] != drawn["32"]
    assert sizes["16"] < sizes["32"]


def test_a_session_goes_on_in_other_bits(toast, tmp_path: Path) -> None:
    """Without a word, and all of what it holds is reused."""
    session = tmp_path / "s"
    words = ("decode", "--raw", "--session", session, "--temp", "0", "-n", "3")
    text = b"Once upon a time there was a fox"
    for flag, dtype in ((KV16, "float16"), ([], "float32"), (KV16, "float16")):
        done = toast(*words, *flag, "-v", stdin=text)
        assert done.returncode == 0 and stored(session) == {dtype}
        text += done.stdout.removesuffix(b"\n")
        fork = tmp_path / dtype
        done = toast("decode", "--raw", "--fork", session, "--session", fork, "--require-hit", "-n",
                     "1", *KV16, stdin=text + b" and")  # fmt: skip
        assert done.returncode == 0 and stored(fork) == {"float16"}
        assert stored(session) == {dtype}
        for file in fork.iterdir():
            if file.is_file():
                file.unlink()


@pytest.mark.parametrize("variable", [False, True])
def test_what_is_refused(toast, variable: bool) -> None:
    for value, dtype, said in (
        ("8", "float32", "'8' is not one of '16', '32'"),
        ("32", "bfloat16", "--kv-bits 32: activations are in bfloat16"),
    ):
        flags, env = (("--kv-bits", value), {})
        if variable:
            flags, env = (), {"TOAST_KV_BITS": value}
        done = toast("decode", "--dtype", dtype, *flags, "hi", env=env)
        assert done.returncode == 64 and not done.stdout
        first, *rest = done.stderr.decode().splitlines()
        assert said in first and len(rest) <= 1


def test_a_plan_has_room_for_half(toast) -> None:
    """But for the recurrent states, which stay."""
    found = []
    for bits in ("32", "16"):
        words = ("--json", "--mem", "80M", "--context", "8000", "--no-calibration")
        done = toast("model", "plan", "crumb", *words, "--kv-bits", bits)
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout)["residency"]["cache"])
    wide, half = found
    assert 0.5 * wide < half < 0.52 * wide


def test_a_daemon_has_its_own(toast) -> None:
    """Who wants the same uses its weights; who does not computes here. What it spills lies apart
    from what one with other bits does."""
    alone = toast("decode", "--no-newline", *SEEDED, *KV16, STORY)
    with Daemon("crumb", "--no-audit", *KV16) as daemon:
        assert daemon.control("status")["kv_dtype"] == "float16"
        told = daemon.toast("toasted", "status").stdout
        assert b"in float32, keys and values in float16" in told
        said = daemon.toast("toast", *SEEDED, STORY)
        assert said.stdout.removesuffix(b"\n") == alone.stdout
        used = daemon.toast("decode", "-v", "--no-newline", *SEEDED, *KV16, STORY)
        assert used.stdout == alone.stdout and b"using the weights" in used.stderr
        here = daemon.toast("decode", "-v", "-n", "1", STORY)
        why = b"the daemon runs crumb with keys and values in float16: loading the model here"
        assert here.returncode == 0 and why in here.stderr
        folders = eventually(lambda: list(daemon.home.glob("cache_home/toastkit/conversations/*")))
        assert [folder.name.partition("-")[2] for folder in folders] == ["float32-float16"]
