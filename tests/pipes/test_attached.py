"""toast-prefill and toast-decode on a daemon's weights: they write what they would alone."""

from __future__ import annotations

import dataclasses
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.daemons import Daemon
from tests.forked import executable
from tests.pipes.pipelines import STORY, TIMEOUT, WHO, WHO_ANSWER, begin, json_lines
from tests.pipes.test_failures import stored
from tests.pipes.test_pipeline import frames_of
from tests.unit.daemon_front import eventually
from tests.unit.test_loaded_modules import loaded_by
from toastkit.frames import End, Head, Logits, Prefilled, dumps
from toastkit.session.header import decode_header
from toastkit.session.layout import Header
from toastkit.session.names import HEADER_FILE

ALONE = "--no-daemon"
SEEDED = ["--temp", "0.8", "--top-p", "0.95", "--seed", "7"]


@pytest.fixture(autouse=True)
def nearby(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every executable finds the daemon, and has let go of everything when it has ended."""
    monkeypatch.setenv("TOAST_SOCKET", str(daemon.socket))
    yield
    assert daemon.control("status")["attached"] == 0
    eventually(lambda: "cache" not in daemon.control("status")["ledger"])


@pytest.fixture(scope="module")
def prompt_of(toast):
    """The frames of a prompt, as toast-tokenize writes them."""
    made: dict[tuple[str, ...], bytes] = {}

    def tokenized(*arguments: str) -> bytes:
        if arguments not in made:
            done = toast("tokenize", *arguments)
            assert done.returncode == 0, done.stderr
            made[arguments] = done.stdout
        return made[arguments]

    return tokenized


def without_times(data: bytes) -> list[bytes]:
    """The frames of a stream, but for what differs between any two runs: how long things took,
    and the names of runs and of sessions."""
    frames = []
    for frame in frames_of(data):
        if isinstance(frame, Head):
            frame = dataclasses.replace(frame, session=None, run=None)
        elif isinstance(frame, (Prefilled, Logits)):
            frame = dataclasses.replace(frame, seconds=0.0)
        frames.append(dumps(frame))
    return frames


def files_of(session: Path) -> dict[str, bytes | Header]:
    """What of a session lies on disk, but for the name of the last holder of its lock, and for
    what tells cache.bin from any other file."""
    files = {p.name: p.read_bytes() for p in session.iterdir() if p.is_file() and p.name != "lock"}
    header = decode_header(files[HEADER_FILE])
    assert header.seal
    return {**files, HEADER_FILE: dataclasses.replace(header, seal=None)}


# --------------------------------------------------------------------------------- the pipeline


def test_greedy_frames_are_the_same(pipeline, prompt_of, tmp_path: Path) -> None:
    """Of a prompt that is read in chunks, and so are the sessions that are left."""
    streams, sessions = [], []
    for alone in ([], [ALONE]):
        session = tmp_path / f"session{len(sessions)}"
        done = pipeline(
            ["prefill", "-v", "--chunk", "8", "--session", str(session), *alone],
            ["decode", "-v", "--greedy", "-n", "6", "--inline", *alone],
            stdin=prompt_of(STORY),
        )
        assert done.codes == [0, 0], done.errors
        for error in done.errors:
            assert ("using the weights of the daemon at" in error) == (not alone)
            assert ("loaded crumb on the cpu" in error) == bool(alone)
        streams.append(without_times(done.out))
        sessions.append(files_of(session))
    assert len(streams[0]) > 12 and streams[0] == streams[1]
    assert len(sessions[0]) >= 4 and sessions[0] == sessions[1]


def test_sampled_frames_are_the_same_for_run_after_run(pipeline, prompt_of) -> None:
    stdin = prompt_of(WHO) + prompt_of("What is 12 + 30?")
    streams = []
    for alone in ([], [ALONE]):
        done = pipeline(
            ["prefill", *alone],
            ["decode", *alone],
            ["sample", *SEEDED, "-n", "5", "--top", "3"],
            stdin=stdin,
        )
        assert done.codes == [0] * 3, done.errors
        streams.append(without_times(done.out))
    assert streams[0] == streams[1] and len(streams[0]) > 12


def test_a_session_goes_on_either_way(pipeline, prompt_of, tmp_path: Path, toast) -> None:
    """One run after another on one session: its lock is free each time, and the state right."""
    session, other = str(tmp_path / "session"), str(tmp_path / "other")
    texts = []
    for place, flags in ((session, ([], [ALONE], [])), (other, ([ALONE], [ALONE], [ALONE]))):
        for turn, alone in enumerate(flags):
            prompt = WHO if turn == 0 else f"{WHO} {WHO_ANSWER.decode()} {'And then? ' * turn}"
            done = toast("decode", "-v", "--raw", "--session", place, "-n", "3", *SEEDED, *alone,
                         prompt)  # fmt: skip
            assert done.returncode == 0, done.stderr
            taken = [line for line in done.stderr.decode().splitlines() if "taken from" in line]
            texts.append((done.stdout, taken))
    assert texts[:3] == texts[3:] and len(texts[0][1]) == 1
    assert stored(Path(session))[1] == stored(Path(other))[1]
    assert files_of(Path(session)) == files_of(Path(other))


def test_a_fork_and_what_it_has_to_hold(pipeline, prompt_of, tmp_path: Path) -> None:
    head = prompt_of("--no-generation-prompt", "--system", "A shy fox lived by the river.")
    question = prompt_of("--system", "A shy fox lived by the river.", "Who was shy?")
    source = tmp_path / "source"
    done = pipeline(["prefill", "--session", str(source)], stdin=head)
    assert done.codes == [0], done.errors
    before = files_of(source)
    streams = []
    for alone in ([], [ALONE]):
        done = pipeline(
            ["prefill", "--fork", str(source), "--require-hit", *alone],
            ["decode", "--greedy", "-n", "4", "--inline", *alone],
            stdin=question,
        )
        assert done.codes == [0, 0], done.errors
        (read,) = [f for f in frames_of(done.out) if isinstance(f, Prefilled)]
        assert read.n_cached == len(stored(source)[0]) and read.n_new < read.n_past
        streams.append(without_times(done.out))
    assert streams[0] == streams[1]
    refused = pipeline(["prefill", "--fork", str(source), "--require-hit"], stdin=prompt_of(WHO))
    assert refused.codes == [66] and "with which this prompt does not begin" in refused.errors[0]
    assert files_of(source) == before


def test_a_stream_from_a_file_needs_no_model_here(pipeline, prompt_of, tmp_path: Path) -> None:
    """The daemon has the weights; what the head calls the model need not be found."""
    session = tmp_path / "session"
    first, *rest = frames_of(prompt_of(WHO))
    named = dumps(dataclasses.replace(first, model="./nowhere")) + b"".join(map(dumps, rest))
    read = pipeline(["prefill", "--session", str(session)], stdin=named)
    assert read.codes == [0], read.errors
    answered = pipeline(["decode", "--greedy"], stdin=read.out)
    assert answered.codes == [0], answered.errors
    *_, end = frames_of(answered.out)
    assert isinstance(end, End) and end.reason == "eos" and end.n > 5
    alone = pipeline(["decode", "--greedy", ALONE], stdin=read.out)
    assert alone.codes == [66]
    wrong = pipeline(["decode", "--greedy", "-m", "./nowhere"], stdin=read.out)
    assert wrong.codes == [66]


# -------------------------------------------------------------------------------------- in text


@pytest.mark.parametrize("sampling", [["--temp", "0"], SEEDED], ids=["greedy", "seeded"])
def test_text_is_the_same(toast, sampling: list) -> None:
    answers = []
    for alone in ([], [ALONE]):
        done = toast("decode", *sampling, "-n", "7", "--json", "--top", "2", "--each-line", *alone,
                     stdin=f"{WHO}\n{STORY}\n".encode())  # fmt: skip
        assert done.returncode == 0, done.stderr
        answers.append(json_lines(done.stdout))
    mine, theirs = answers
    assert len(mine) == len(theirs) > 14
    for one, other in zip(mine, theirs):
        # The model's own process has another way to compute it.
        assert one.pop("entropy", None) == pytest.approx(other.pop("entropy", None), abs=1e-5)
        assert one == other


def test_nothing_of_mlx_is_imported(tmp_path: Path, prompt_of) -> None:
    modules, out = loaded_by(tmp_path, "decode", *SEEDED, WHO)
    assert out and not modules & {"mlx", "mlx_lm"} and "toastkit.engine.engine" not in modules
    session = str(tmp_path / "session")
    modules, out = loaded_by(tmp_path, "prefill", "--session", session, stdin=prompt_of(WHO))
    assert out and not modules & {"mlx", "mlx_lm"} and "toastkit.engine.engine" not in modules
    modules, out = loaded_by(tmp_path, "decode", "--greedy", stdin=out)
    assert out and not modules & {"mlx", "mlx_lm"} and "toastkit.engine.engine" not in modules


def test_another_model_is_loaded_here(toast, tmp_path: Path) -> None:
    from tests.unpack import unpack

    model = unpack(tmp_path / "model", max_position_embeddings=99)
    done = toast("decode", "-v", "-m", str(model), "--temp", "0", WHO)
    assert done.stdout == WHO_ANSWER
    lines = done.stderr.decode().splitlines()
    assert lines[0] == "toast-decode: the daemon runs crumb: loading the model here"
    assert lines[1].startswith(f"toast-decode: loaded {model} on the cpu")


def test_another_dtype_is_loaded_here(toast) -> None:
    done = toast("decode", "-v", "--dtype", "bfloat16", WHO)
    assert b"the daemon runs crumb in float32: loading the model here" in done.stderr
    assert done.returncode == 64 and b"MLX computes experts in float32 only" in done.stderr
    same = toast("decode", "-v", "--dtype", "float32", "--device", "cpu", "-n", "2", WHO)
    assert b"using the weights" in same.stderr and b"loaded" not in same.stderr
    done = toast("decode", "-v", "--kv-bits", "16", "-n", "2", WHO)
    assert b"crumb with keys and values in float32: loading the model here" in done.stderr
    same = toast("decode", "-v", "--kv-bits", "32", "-n", "2", WHO)
    assert b"using the weights" in same.stderr


# ------------------------------------------------------------------------------------- together


def test_two_runs_and_a_conversation_at_once(daemon: Daemon) -> None:
    """Each gets what it gets alone."""
    options = {"temperature": 0.8, "top_p": 0.95, "seed": 7, "tokens": True, "ignore_eos": True,
               "max_tokens": 16}  # fmt: skip
    alone = daemon.ask(prompt=STORY, options=options)
    answers = {WHO: WHO_ANSWER, "What is the capital of Peru?": b"The capital of Peru is Lima.\n"}
    running = []
    for prompt in answers:
        running.append(begin("decode", "--temp", "0", "--each-line", stdin=subprocess.PIPE))
        running[-1].stdin.write(f"{prompt}\n".encode() * 2)
        running[-1].stdin.close()
        running[-1].stdin = None
    eventually(lambda: daemon.control("status")["attached"])
    found = [daemon.ask(prompt=STORY, options=options) for _ in range(2)]
    texts = [process.communicate(timeout=TIMEOUT)[0] for process in running]
    assert texts == [2 * answer for answer in answers.values()]
    assert [said.tokens for said in found] == [alone.tokens] * 2


def test_a_second_writer_is_told_of_the_first(toast, tmp_path: Path) -> None:
    """The daemon has a copy of the lock; the one who has the session is the executable."""
    session = str(tmp_path / "session")
    first = begin("decode", "--ignore-eos", "--session", session, STORY)
    assert first.stdout.read(1)
    second = toast("decode", "--session", session, WHO)
    message = f"toast-decode: session {session} is in use by another writer (process {first.pid})"
    assert second.returncode == 75 and second.stderr.decode().splitlines()[0] == message
    first.terminate()
    first.communicate(timeout=TIMEOUT)
    assert first.returncode == 143 and len(stored(Path(session))[0]) > 19


def test_a_path_that_is_not_utf_8(daemon: Daemon, tmp_path: Path) -> None:
    session = os.fsencode(tmp_path) + b"/\xff"
    done = subprocess.run(
        [executable("decode"), "--session", session, WHO],
        stdin=subprocess.DEVNULL, capture_output=True, timeout=TIMEOUT,
    )  # fmt: skip
    assert done.returncode == 64 and b"it is not UTF-8" in done.stderr
    assert b"hint: --no-daemon" in done.stderr and not os.path.exists(session)
