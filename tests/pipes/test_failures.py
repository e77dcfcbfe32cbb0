"""What happens when something goes wrong: killed stages, closed pipes, Ctrl-C, locked sessions,
full disks. The other stages end by themselves, with the right status and a whole session."""

from __future__ import annotations

import io
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.pipes.pipelines import (
    STAGES,
    STORY,
    TIMEOUT,
    WHO,
    WHO_ANSWER,
    Pipeline,
    begin,
    run_pipeline,
)
from toastkit.frames import End, FrameReader, Head, Logits, dumps
from toastkit.session.feed import FeedWriter
from toastkit.session.run import feed_of

HANDOVER_SECONDS = 2  # of stages.run.pipe_prefill, which imports MLX
ENDLESS = {"sample": ["--ignore-eos"]}
SIGPIPE = -signal.SIGPIPE


def stored(path: Path):
    """A session at its last commit: (number of tokens, ids, logits)."""
    from toastkit.session.directory import Session

    with Session.open(path, None, create=False) as session:
        logits = session.logits()
        assert logits is not None and logits.shape == (4096,)
        return list(session.tokens), logits


@pytest.mark.parametrize(
    ("victim", "statuses"),
    [
        ("decode", [0, 0, -9, 65, 65, 65]),
        ("entropy-gear", [0, 0, SIGPIPE, -9, 65, 65]),
        ("sample", [0, 0, SIGPIPE, SIGPIPE, -9, 65]),
    ],
)
def test_a_stage_is_killed_in_mid_run(toast, victim: str, statuses: list[int], tmp_path: Path):
    session = tmp_path / "session"
    pipeline = Pipeline(STORY, {**ENDLESS, "prefill": ["--session", str(session)]})
    pipeline.first_output()
    pipeline.kill(victim)
    result = pipeline.finish()
    assert result.statuses == statuses
    assert len(result.errors) == 1
    ids, _ = stored(session)
    # decode commits what it had, unless it was the one that died: then the prompt's commit holds.
    assert len(ids) == 19 if victim == "decode" else len(ids) > 19
    if victim == "decode":  # its session is free, and goes on
        assert toast("decode", "--session", session, WHO).stdout == WHO_ANSWER


@pytest.mark.parametrize(
    ("stage", "number", "statuses"),
    [
        ("entropy-gear", signal.SIGHUP, [0, 0, SIGPIPE, 129, 130, 130]),
        ("sample", signal.SIGTERM, [0, 0, SIGPIPE, SIGPIPE, 143, 130]),
        ("detokenize", signal.SIGINT, [0, 0, SIGPIPE, SIGPIPE, SIGPIPE, 130]),
    ],
)
def test_one_stage_is_told_to_end(stage: str, number: int, statuses: list[int]):
    """It ends the run for those behind it, and those before it find that it has gone."""
    pipeline = Pipeline(STORY, {**ENDLESS, "sample": ["--ignore-eos", "-n", "4000"]})
    pipeline.first_output()
    pipeline.process(stage).send_signal(number)
    decode = pipeline.process("decode")
    decode.send_signal(signal.SIGSTOP)  # its end is waited for: it need not compute meanwhile
    for process in pipeline.processes[3:]:  # or it could still end the run for one of them
        process.wait(TIMEOUT)
    decode.send_signal(signal.SIGCONT)
    result = pipeline.finish()
    assert result.statuses == statuses and result.errors == []
    assert result.out.endswith(b"\n")


@pytest.mark.parametrize("name", ["sample", "frames"])
def test_a_filter_that_waits_is_told_to_end(toast, name: str):
    stream = toast("tokenize", WHO).stdout
    process = begin(name, stdin=subprocess.PIPE)
    process.stdin.write(stream)
    process.stdin.flush()
    first = os.read(process.stdout.fileno(), 1)  # it has begun
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 143
    frames = list(FrameReader(io.BytesIO(first + out)))
    assert frames[-1] == End("interrupt", 0)


def test_prefill_keeps_the_next_prompt_for_as_long_as_an_answer_lasts(state_home: Path):
    """decode that has read nothing yet, and one that waits for its token with the next prompt
    ready: both for longer than prefill would wait for one that does not come. Two pipelines at
    once, which leave no session behind."""
    capital = "What is the capital of Peru?"
    unread, waiting = (
        Pipeline("", {"tokenize": ["--each-line"]}, lines=[prompt] * 2) for prompt in (WHO, capital)
    )
    unread.process("decode").send_signal(signal.SIGSTOP)
    first = waiting.first_output()
    waiting.process("sample").send_signal(signal.SIGSTOP)
    time.sleep(1.2 * HANDOVER_SECONDS)
    unread.process("decode").send_signal(signal.SIGCONT)
    waiting.process("sample").send_signal(signal.SIGCONT)
    lima = b"The capital of Peru is Lima.\n"
    for begun, pipeline, answer in ((b"", unread, WHO_ANSWER), (first, waiting, lima)):
        result = pipeline.finish()
        assert result.statuses == [0] * 6, result.errors
        assert begun + result.out == 2 * answer
    assert list(state_home.iterdir()) == []


def test_prefill_waits_for_decode_where_prompts_share_a_session(tmp_path: Path):
    words = {"tokenize": ["--each-line"], "prefill": ["--session", str(tmp_path / "session")],
             "sample": ["-n", "1"]}  # fmt: skip
    result = Pipeline("", words, lines=[WHO] * 2).finish()
    assert (result.statuses, result.out) == ([0] * 6, b"I\nI\n"), result.errors


PATIENT = """
from toastkit.commands.prefill import main
from toastkit.stages.run import pipe_prefill
pipe_prefill.HANDOVER_SECONDS = 3600.0
main()
"""


@pytest.mark.parametrize("arguments", [["--stat"], ["--kinds", "prefilled"]])
def test_prefill_does_not_wait_where_frames_are_only_looked_at(
    arguments: list[str], toast, tmp_path: Path
):
    """Such a toast-frames is the last that reads the stream, and says so."""
    prompts, seen = tmp_path / "prompts", tmp_path / "seen"
    # More of them than may wait for a decode.
    prompts.write_bytes(toast("tokenize", "--each-line", stdin=b"a\nb\nc\n").stdout)
    with prompts.open("rb") as source, seen.open("wb") as out:
        prefill = subprocess.Popen(
            [sys.executable, "-c", PATIENT], stdin=source, stdout=subprocess.PIPE
        )
        frames = begin("frames", *arguments, stdin=prefill.stdout, stdout=out)
    prefill.stdout.close()
    try:
        assert [process.wait(TIMEOUT) for process in (prefill, frames)] == [0, 0]
    finally:
        prefill.kill()
    found = seen.read_bytes()
    assert b"prefilled 3" in found if "--stat" in arguments else found.count(b"prefilled") == 3


def test_prefill_is_killed():
    nothing = Pipeline("", stages=STAGES[1:]).finish()  # as if tokenize had been killed
    assert nothing.statuses == [65] * 5
    assert nothing.errors[0] == "toast-prefill: no frames on input"

    # A sampler would wait five seconds for a decode to open the feed.
    settings = {"prefill": ["--chunk", "8"], "sample": ["--no-feed"]}
    long = Pipeline("Tell me a story. " * 600, settings)
    # The head is out, and thousands of tokens are to be read.
    head = long.process("prefill")
    while head.poll() is None and not _has_run(Path(os.environ["XDG_STATE_HOME"])):
        time.sleep(0.01)
    time.sleep(0.5)  # it is written as soon as there is a run
    long.kill("prefill")
    result = long.finish()
    assert result.statuses == [0, -9, 65, 65, 65, 65]
    assert result.errors == ["toast-decode: input ended in the middle of a run"]


def _has_run(state: Path) -> bool:
    return any(state.glob("toastkit/sessions/.ephemeral-*/runs/*/handover"))


def test_a_reader_that_has_enough(tmp_path: Path):
    session = tmp_path / "session"
    pipeline = Pipeline(STORY, {**ENDLESS, "prefill": ["--session", str(session)]})
    pipeline.first_output()
    pipeline.processes[-1].stdout.close()
    statuses = [process.wait(TIMEOUT) for process in pipeline.processes]
    assert statuses == [0, 0, SIGPIPE, SIGPIPE, SIGPIPE, SIGPIPE]
    assert [process.stderr.read() for process in pipeline.processes] == [b""] * 6
    assert len(stored(session)[0]) > 19


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["ctrl-c", "term"]
)
def test_an_interrupt_commits_and_prints_what_there_is(number: int, status: int, tmp_path: Path):
    session = tmp_path / "session"
    pipeline = Pipeline(STORY, {**ENDLESS, "prefill": ["--session", str(session)]})
    first = pipeline.first_output()
    pipeline.signal_all(number)
    result = pipeline.finish()
    assert result.statuses == [0, 0, status, status, status, status]
    assert result.errors == []
    assert b"In a land far away".startswith((first + result.out)[:18].rstrip(b"\n"))
    assert result.out.endswith(b"\n")
    assert len(stored(session)[0]) >= 19  # the signal may beat the first token to decode


@pytest.mark.parametrize("reader", ["gone", "waiting"])
def test_one_process_is_interrupted_or_has_no_reader(reader: str, tmp_path: Path):
    session = tmp_path / "session"
    process = begin("decode", "--ignore-eos", "--session", session, STORY)
    text = process.stdout.read1(20)
    if reader == "gone":
        process.stdout.close()
    else:
        process.send_signal(signal.SIGINT)
        text += process.stdout.read()
        assert b"In a land far away".startswith(text[:18].rstrip(b"\n")) and text.endswith(b"\n")
    assert process.wait(TIMEOUT) == (SIGPIPE if reader == "gone" else 130)
    assert process.stderr.read() == b""
    assert len(stored(session)[0]) > 19


def test_an_interrupt_while_the_prompt_is_read(tmp_path: Path):
    session = tmp_path / "session"
    pipeline = Pipeline(
        "Tell me a story. " * 600, {"prefill": ["--chunk", "8", "--session", str(session)]}
    )
    while not list(session.glob("runs/*/handover")):
        assert pipeline.process("prefill").poll() is None
    assert pipeline.process("tokenize").wait(TIMEOUT) == 0
    pipeline.signal_all(signal.SIGINT)
    result = pipeline.finish()
    assert result.statuses == [0, 130, 130, 130, 130, 130]
    assert result.out == b"" and result.errors == []


def test_a_second_writer_is_turned_away(toast, tmp_path: Path):
    session = str(tmp_path / "session")
    first = Pipeline(STORY, {**ENDLESS, "prefill": ["--session", session]})
    first.first_output()
    second = run_pipeline(WHO, {"prefill": ["--session", session]})
    assert second.statuses[1:] == [75] * 5
    # Whether prefill is gone before tokenize has written is a matter of microseconds.
    assert second.statuses[0] in (0, SIGPIPE)
    assert second.errors[0].startswith(f"toast-prefill: session {session} is in use by another")
    one = toast("decode", "--session", session, WHO)
    assert (one.returncode, one.stdout) == (75, b"")
    first.signal_all(signal.SIGINT)
    assert first.finish().statuses[-1] == 130


def test_a_full_disk_keeps_the_earlier_commit(toast, tmp_path: Path):
    session = tmp_path / "session"
    assert toast("decode", "--session", session, WHO).stdout == WHO_ANSWER
    before = stored(session)
    for limit in (8 << 10, 40 << 10, 500 << 10):
        words = ("decode", "--session", session, "--each-line")
        process = begin(*words, stdin=subprocess.PIPE)
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (limit, limit))  # before it reads
        _, errors = process.communicate(STORY.encode(), timeout=TIMEOUT)
        assert process.returncode == 74
        assert errors.decode().count("\n") == 1 and b"too large" in errors
        after = stored(session)
        assert before[0] == after[0] and before[1] == after[1]
    assert toast("decode", "--session", session, WHO).stdout == WHO_ANSWER


def test_an_error_travels_down_the_pipe(tmp_path: Path):
    result = run_pipeline("hello " * 9000)
    assert result.statuses == [65] * 6
    assert result.errors == [
        "toast-tokenize: the prompt has 9010 tokens, the model's context is 8192",
        "  hint: shorten it, or give --truncate",
    ]
    assert result.out == b""


def test_a_forced_token_that_cannot_be_is_told_once(tmp_path: Path):
    (tmp_path / "ids").write_text("47 99999")
    stages = ["tokenize", "prefill", "decode", "detokenize"]
    result = run_pipeline("hi", {"decode": ["--force", str(tmp_path / "ids")]}, stages)
    assert result.statuses == [0, 0, 65, 65]
    assert result.errors == ["toast-decode: token 99999 is outside the vocabulary of 4096"]


def test_decode_refuses_another_prompt_and_a_token_of_another_step(toast, pipeline, tmp_path: Path):
    """A saved stream whose session has moved on since, and a feed that two samplers share."""
    keep = ["prefill", "--session", str(tmp_path / "session")]
    saved = pipeline(["tokenize", "--each-line"], keep, stdin=f"{WHO}\nhi".encode())
    assert saved.codes == [0, 0]
    late = toast("decode", "--greedy", stdin=saved.out)
    assert late.returncode == 65
    assert b" has moved on since this prompt was prefilled\n" in late.stderr
    made = list(FrameReader(io.BytesIO(saved.out)))
    *_, last = (place for place, frame in enumerate(made) if isinstance(frame, Head))
    second = b"".join(map(dumps, made[last:]))
    decode = begin("decode", stdin=subprocess.PIPE)
    decode.stdin.write(pipeline(["prefill"], stdin=second).out)  # its head names the session
    decode.stdin.close()
    frames = FrameReader(decode.stdout)
    run, step = next(frames).run, next(frame for frame in frames if isinstance(frame, Logits))
    FeedWriter(feed_of(run)).send(step.pos + 1, 7)
    wrong = f"a token for position {step.pos + 1}, decode is at {step.pos}\n"
    assert wrong in decode.stderr.read().decode() and decode.wait(TIMEOUT) == 65


def test_a_recorded_error_is_told(toast, tmp_path: Path):
    (tmp_path / "run.frames").write_bytes(toast("tokenize", "hello " * 9000).stdout)
    with open(tmp_path / "run.frames", "rb") as source:
        process = begin("detokenize", stdin=source)
        _, errors = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 65
    assert errors.startswith(b"toast-detokenize: toast-tokenize: the prompt has 9010 tokens")


@pytest.mark.parametrize(
    ("command", "code", "out"),
    [
        (["model", "info", "nope"], 66, b""),
        (["frames", "--debug", "--slice", "x"], 64, b""),
        (["tokenize", "--count", "--truncate", "a " * 9000], 0, b"7936\n"),
    ],
)
@pytest.mark.parametrize("kind", ["full", "gone"])
def test_what_cannot_be_said_changes_nothing_else(
    kind: str, command: list[str], code: int, out: bytes
) -> None:
    """The place for errors is on a full disk, or nobody reads them any more."""
    if kind == "full":
        end = os.open("/dev/full", os.O_WRONLY)
    else:
        other, end = os.pipe()
        os.close(other)
    process = begin(*command, stderr=end)
    os.close(end)
    assert process.communicate(timeout=TIMEOUT)[0] == out
    assert process.returncode == code


@pytest.mark.parametrize("last", ["detokenize", "feed"])
def test_a_forgotten_sampler(last: str, tmp_path: Path):
    """decode waits for a token, and who reads it can never have one: it says so, and the prompt is
    committed."""
    path = tmp_path / "s"
    done = run_pipeline(
        WHO, {"prefill": ["--session", str(path)]}, ["tokenize", "prefill", "decode", last]
    )
    assert done.statuses == [0, 0, -signal.SIGPIPE, 65], done.errors
    assert done.errors == [
        f"toast-{last}: logits come, but no tokens", "  hint: is toast-sample missing?"
    ]  # fmt: skip
    assert len(stored(path)[0]) > 0


# A command that gets a signal while MLX's library is being initialised: it makes enumerations.
AT_A_BAD_MOMENT = """
import enum, importlib, os, sys
from toastkit.commands import cli
class Finder:
    def find_spec(name, path, target=None):
        if name == "mlx.core":
            usual = enum.EnumMeta.__call__
            def call(*arguments, **named):
                enum.EnumMeta.__call__ = usual
                os.kill(os.getpid(), number)
                return usual(*arguments, **named)
            enum.EnumMeta.__call__ = call
number, name = int(sys.argv[1]), sys.argv[2]
sys.argv = sys.argv[2:]
sys.meta_path.insert(0, Finder)
importlib.import_module("toastkit.commands." + name).main()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(
    "command",
    [["decode", "Hi"], ["prefill"], ["toast", "--no-daemon", "Hi"], ["model", "info", "--device"]],
)
def test_a_signal_while_the_library_is_loaded(
    pipeline, state_home: Path, command: list[str], number: int
):
    stream = pipeline(["tokenize", "Hi"]).out if command == ["prefill"] else b""
    done = subprocess.run(
        [sys.executable, "-c", AT_A_BAD_MOMENT, str(number), *command], input=stream,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, timeout=TIMEOUT,
    )  # fmt: skip
    by_system = "info" in command and number == signal.SIGTERM  # it has nothing to tidy up
    assert (done.returncode, done.stderr) == (-number if by_system else 128 + number, b"")
