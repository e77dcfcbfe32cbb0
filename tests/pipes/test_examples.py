"""Every file in examples/ runs as it stands, and shows what it says it shows."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.forked import SCRIPTS, SERVER
from toastkit.frames import End, FrameReader, Head, Logits, Token
from toastkit.stages.arrays import to_numpy

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TIMEOUT_SECONDS = 40
SETTLE_SECONDS = 10
WHO = "Who are you?"
CRUMB = "I am crumb, a tiny model made for trying toastkit.\n"


class Shell:
    """Runs commands as a person would: in a folder of theirs, with the commands on PATH."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.state = folder / "state"
        self.environment = {
            **os.environ,
            "PATH": os.pathsep.join([SERVER.stubs(), str(SCRIPTS), os.environ["PATH"]]),
            "HOME": str(folder),
            "XDG_STATE_HOME": str(self.state),
            "TMPDIR": str(folder / "tmp"),
        }
        (folder / "tmp").mkdir()

    def __call__(
        self, *command: str | Path, code: int | None = 0, cwd: Path | None = None, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Runs one command without stdin and checks its exit status (None: any failure). A pipeline
        that hangs is ended with all its processes."""
        process = subprocess.Popen(
            [str(part) for part in command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=cwd or self.folder,
            env={**self.environment, **variables},
            start_new_session=True,
        )
        try:
            output, errors = process.communicate(timeout=TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, errors = process.communicate()
            pytest.fail(f"{command} hangs\n{output}\n{errors}")
        expected = process.returncode != 0 if code is None else process.returncode == code
        assert expected, f"{command} ended with {process.returncode}\n{errors}"
        return subprocess.CompletedProcess(process.args, process.returncode, output, errors)

    def leftovers(self) -> list[str]:
        """Sessions and temporary files that are still there. What is in a process substitution may
        end a moment after the script does."""
        deadline = time.monotonic() + SETTLE_SECONDS
        sessions = self.state / "toastkit" / "sessions"
        while True:
            left = [
                p.name for d in (sessions, self.folder / "tmp") if d.exists() for p in d.iterdir()
            ]
            if not left or time.monotonic() > deadline:
                return left
            time.sleep(0.05)


@pytest.fixture
def shell(tmp_path: Path, private_home: Path) -> Iterator[Shell]:
    run = Shell(tmp_path)
    yield run
    assert run.leftovers() == []


def answers(shell: Shell, *arguments: str) -> list[dict]:
    """The token objects of `toast-decode --json`, all stages in one process."""
    lines = shell("toast-decode", "--json", *arguments).stdout.splitlines()
    return [fields for fields in map(json.loads, lines) if "id" in fields]


# --------------------------------------------------------------------------------------- the folder


def test_readme_lists_every_example() -> None:
    table = (EXAMPLES / "README.md").read_text()
    named = set(re.findall(r"\]\(([^)]+)\)", table))
    files = {p.name for p in EXAMPLES.iterdir() if p.suffix not in (".md", "")}
    assert named == files | {"questions/Makefile"}


@pytest.mark.parametrize("name", sorted(p.name for p in EXAMPLES.glob("*.sh")))
def test_a_script_begins_with_what_it_shows(name: str) -> None:
    interpreter, *lines = (EXAMPLES / name).read_text().splitlines()
    assert interpreter in ("#!/bin/sh", "#!/usr/bin/env bash")
    assert lines[0].startswith("# ") and len(lines) <= 45
    shell = "bash" if "bash" in interpreter else "sh"
    subprocess.run([shell, "-n", EXAMPLES / name], check=True)


def test_demo(shell: Shell) -> None:
    output = shell("sh", EXAMPLES / "demo.sh", TOAST_MAX_TOKENS="20").stdout
    pipeline, story = output.split("\n\n", 1)
    assert "toast-prefill | toast-decode | toast-entropy-gear" in pipeline
    assert "fox" in story


# -------------------------------------------------------------------------------------- awk-sampler


def test_awk_takes_the_most_likely_tokens(shell: Shell) -> None:
    prompt, expected = "What is 17 + 25?", "17 + 25 = 42.\n#### 42\n"
    script = EXAMPLES / "awk-sampler.sh"
    assert shell("sh", script, prompt, "0").stdout == expected  # temperature 0
    assert shell("sh", script, prompt, "5", "1").stdout == expected  # one token to choose from


def test_awk_draws_in_proportion(shell: Shell) -> None:
    """4,000 draws of one step against softmax(logprob / temperature) of its top 3."""
    logprobs = np.array([-0.5, -1.5, -2.0, -2.1])
    pairs = json.dumps([[7 + i, p] for i, p in enumerate(logprobs)])
    line = f'{{"k": "logits", "pos": 3, "logits": {{"topk": {pairs}, "size": 4096}}}}\n'
    steps = shell.folder / "steps.json"
    steps.write_text(line * 4000)

    def draw(seed: int) -> list[int]:
        settings = ["-v", "temperature=2", "-v", "k=3", "-v", f"seed={seed}"]
        tokens = shell("awk", *settings, "-f", EXAMPLES / "sampler.awk", steps).stdout
        return [json.loads(token)["id"] for token in tokens.splitlines()]

    ids = draw(1)
    weights = np.exp(logprobs[:3] / 2)
    shares = np.bincount(ids, minlength=11)[7:] / 4000
    np.testing.assert_allclose(shares, [*weights / weights.sum(), 0], atol=0.04)
    assert draw(1) == ids != draw(2)


@pytest.mark.parametrize(("temperature", "k"), [("0,5", "3"), ("nan", "3"), ("1", "0")])
def test_awk_takes_numbers(shell: Shell, temperature: str, k: str) -> None:
    """Anything else counts as 0 in a division."""
    settings = ["-v", f"temperature={temperature}", "-v", f"k={k}"]
    done = shell("awk", *settings, "-f", EXAMPLES / "sampler.awk", "/dev/null", code=64)
    assert done.stdout == "" and done.stderr.startswith("sampler.awk: T is a decimal number")


# ------------------------------------------------------------------------------------------- replay


def test_replay_with_the_same_seed_draws_the_same(shell: Shell) -> None:
    output = shell("sh", EXAMPLES / "replay.sh", WHO, "5", "5").stdout
    assert re.search(r"^no difference in \d\d tokens$", output.splitlines()[-1])


def test_replay_finds_where_two_seeds_part(shell: Shell) -> None:
    """The recorded logits tell what the model would have said: up to the first difference the
    replay is the run that the other seed would have given."""
    prompt = "Tell me a story about a fox and a river."
    drawing = ["--temp", "1", "-n", "12", "--seed"]
    first = answers(shell, prompt, *drawing, "5")
    second = answers(shell, prompt, *drawing, "6")
    position, one, other = next(
        (a["pos"], a["id"], b["id"]) for a, b in zip(first, second) if a["id"] != b["id"]
    )
    *text, verdict = shell("sh", EXAMPLES / "replay.sh", prompt, "5", "6").stdout.splitlines()
    assert verdict == f"differs at position {position}: token {one}, then {other}"
    assert "\n".join(text).startswith("".join(a["text"] for a in first))


# ---------------------------------------------------------------------------------------- questions


@pytest.fixture
def questions(shell: Shell) -> Path:
    """A copy of the folder, without what make may have left in it, and with less to read."""
    made = shutil.ignore_patterns("answers", "*.session")
    shutil.copytree(EXAMPLES / "questions", shell.folder / "questions", ignore=made)
    document = shell.folder / "questions" / "document.txt"
    document.write_text("\n\n".join(document.read_text().split("\n\n")[2:4]) + "\n")
    return document.parent


def test_questions_read_the_document_once(shell: Shell, questions: Path) -> None:
    names = sorted(p.stem for p in (questions / "questions").iterdir())
    assert len(names) == 3

    log = shell("make", "-j2", cwd=questions).stdout
    assert log.count("toast-prefill") == 1
    assert log.count("toast-decode --fork ./document.session --require-hit") == 3
    read = {name: (questions / "answers" / f"{name}.txt").read_text() for name in names}
    assert read["name"] == "The fox was called Greta.\n"
    header = (questions / "document.session" / "session.msgpack").stat()

    again = shell("make", cwd=questions).stdout
    assert "toast-" not in again

    later = time.time() + 5
    os.utime(questions / "questions" / f"{names[0]}.txt", (later, later))
    log = shell("make", cwd=questions).stdout
    assert log.count("toast-") == 1 and f"answers/{names[0]}.txt" in log
    assert {n: (questions / "answers" / f"{n}.txt").read_text() for n in names} == read
    assert (questions / "document.session" / "session.msgpack").stat() == header

    document = (questions / "document.txt").read_text().rstrip("\n")
    question = (questions / "questions" / f"{names[0]}.txt").read_text().rstrip("\n")
    afresh = shell("toast-decode", "--temp", "0", "--system", document, question)
    assert afresh.stdout == read[names[0]]


def test_a_changed_document_is_read_again(shell: Shell, questions: Path) -> None:
    shell("make", "answers/name.txt", cwd=questions)
    document = questions / "document.txt"
    document.write_text(document.read_text().replace("Greta", "Tilda"))
    os.utime(document, (time.time() + 5,) * 2)
    shell("make", "answers/name.txt", cwd=questions)
    assert (questions / "answers" / "name.txt").read_text() == "The fox was called Tilda.\n"


def test_a_failed_prefill_leaves_no_session(shell: Shell, questions: Path) -> None:
    shell("make", code=2, cwd=questions, TOAST_MODEL="./none")
    assert not (questions / "document.session").exists()
    assert not (questions / "answers").exists()


# ---------------------------------------------------------------------------------------------- mix

MIXED = """
run() { toast-tokenize "$1" </dev/null | toast-prefill | toast-decode --inline; }
mkfifo a b
run "$2" | tee a.frames > a &
run "$3" | tee b.frames > b &
python3 "$1" a b | tee mixed.frames | toast-sample --temp 0 | tee drawn.frames | toast-detokenize
wait
"""


def test_mixed_logits_are_the_average(shell: Shell) -> None:
    prompts = ["What is the capital of Italy?", "What is the capital of Japan?"]
    text = shell("bash", "-c", MIXED, "bash", EXAMPLES / "mix.py", *prompts).stdout
    assert shell("bash", EXAMPLES / "mix.sh", *prompts).stdout == text

    streams = [list(FrameReader((shell.folder / f"{n}.frames").open("rb"))) for n in ("a", "b")]
    mixed = list(FrameReader((shell.folder / "mixed.frames").open("rb")))
    heads = [next(f for f in s if isinstance(f, Head)) for s in streams]
    assert mixed[0].run == [h.run for h in heads]
    assert all(isinstance(s[-1], End) and s[-1].reason == "eos" for s in [*streams, mixed])

    one, other, both = ([f for f in s if isinstance(f, Logits)] for s in [*streams, mixed])
    drawn = [f for f in FrameReader((shell.folder / "drawn.frames").open("rb")) if type(f) is Token]
    assert len(one) == len(other) == len(both) == len(drawn) > 5
    assert [f.pos for f in both] == [f.pos for f in drawn]
    for a, b, m, token in zip(one, other, both, drawn):
        average = (to_numpy(a.logits).astype(np.float64) + to_numpy(b.logits)) / 2
        np.testing.assert_allclose(to_numpy(m.logits), average, atol=1e-5)
        assert token.id == average.argmax()
    assert not np.allclose(to_numpy(one[0].logits), to_numpy(other[0].logits), atol=0.1)


@pytest.mark.parametrize("size", [1, 40, 80])
def test_a_reader_that_has_enough_behind_a_tee(shell: Shell, size: int) -> None:
    """tee does not watch its own reader: sample itself tells decode that the run is over."""
    run = "toast-tokenize 'Tell me a story.' | toast-prefill | toast-decode --inline"
    drawn = f"toast-sample --temp 0 --ignore-eos -n 1000 | toast-detokenize | head -c {size}"
    assert len(shell("bash", "-c", f"{run} | tee run.frames | {drawn}").stdout) == size
    assert len(shell("bash", "-c", f"bash {EXAMPLES / 'mix.sh'} | head -c 20").stdout) == 20


def test_mix_without_the_commands(shell: Shell) -> None:
    failed = shell("bash", EXAMPLES / "mix.sh", code=127, PATH="/usr/bin:/bin")
    assert failed.stderr == "mix.sh: toast-decode is not on PATH\n"


def test_mix_ends_with_the_decode_that_fails(shell: Shell) -> None:
    """One of the two prompts is too long: everything ends, with a message that says why."""
    failed = shell("bash", EXAMPLES / "mix.sh", WHO, "word " * 9000, code=65)
    assert "context" in failed.stderr


# -------------------------------------------------------------------------------------------- gears


def test_gears_are_marked_where_they_shift(shell: Shell) -> None:
    ask = "toast-decode --json --gear auto --gear-scope all --temp 0 -n 18 'Tell me a story.' |"
    script = f"{ask} tee lines | python3 {EXAMPLES / 'gears.py'}"
    text, counts = shell("bash", "-o", "pipefail", "-c", script).stdout.splitlines()
    *tokens, end = map(json.loads, (shell.folder / "lines").read_text().splitlines())
    assert re.sub(r"\[(low|mid|high)\]", "", text) == "".join(t["text"] for t in [*tokens, end])
    marked = re.findall(r"\[(low|mid|high)\]", text)
    assert marked == [gear for gear, _ in itertools.groupby(t["gear"] for t in tokens)]
    assert len(marked) > 1
    assert counts == ", ".join(f"{k} {end['gears'][k]}" for k in ("low", "mid", "high", "shifts"))


# ------------------------------------------------------------------------------ each-line and gate


def test_each_line_answers_every_line_both_ways(shell: Shell) -> None:
    prompts = [WHO, "What is the capital of Italy?"]
    (shell.folder / "list").write_text("\n\n".join(prompts))  # the last line is not ended
    output = shell("sh", EXAMPLES / "each-line.sh", "list").stdout
    *loop, together = output.split("\n\n")
    replies = [CRUMB, "The capital of Italy is Rome.\n"]
    assert [f"{part}\n" for part in loop] == [f"> {p}\n{r}" for p, r in zip(prompts, replies)]
    assert together == "".join(replies)
    refused = shell("sh", EXAMPLES / "each-line.sh", "nowhere", code=66)
    assert refused.stderr == "each-line.sh: cannot read nowhere\n"


def test_gate(shell: Shell) -> None:
    script = EXAMPLES / "gate.sh"
    sure = shell("sh", script, "What is the capital of France?")
    assert (sure.stdout, sure.stderr) == ("The capital of France is Paris.\n", "")
    unsure = shell("sh", script, "What is love?", code=1)
    assert (unsure.stdout, unsure.stderr) == ("", "not sure\n")
    shell("sh", script, "What is the capital of France?", "1", code=1)  # nothing is so sure
    assert "no such model" in shell("sh", script, WHO, code=None, TOAST_MODEL="./none").stderr
