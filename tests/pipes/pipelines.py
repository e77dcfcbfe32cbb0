"""Pipelines of real executables, with their exit statuses in the order of the stages."""

from __future__ import annotations

import json
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tests.forked import Process, start

STAGES = ("tokenize", "prefill", "decode", "entropy-gear", "sample", "detokenize")
STORY = "Tell me a story about a fox and a river."
WHO = "Who are you?"
WHO_ANSWER = b"I am crumb, a tiny model made for trying toastkit.\n"
# What the manual and the README ask crumb, and how it answers: they show what is right.
ANSWERS = {
    "What is 17 + 25?": "17 + 25 = 42.",
    "What was the fox's name?": "The fox was called ",
    "Who was shy?": "Cleo was a shy fox.",
    "Where did Cleo live?": "Cleo lived by the river.",
    "a Python function that reverses a string": "[::-1]",
}
TIMEOUT = 60  # seconds, of anything that is meant to end: a hang fails the test


@dataclass
class Result:
    """statuses: exit status of each stage, -N for signal N. out: of the last. errors: lines that
    each stage wrote to stderr."""

    statuses: list[int]
    out: bytes
    errors: list[str]


def most_tokens(script: str) -> str:
    """TOAST_MAX_TOKENS for a script: as many as it takes to say what is right, or to say a bit."""
    return "16" if any(question in script for question in ANSWERS) else "6"


def check_answers(script: str, output: str) -> int:
    """Looks for the answers to what a script asks; how many questions there were."""
    asked = [question for question in ANSWERS if question in script]
    for question in asked:
        assert ANSWERS[question] in output, (question, output)
    return len(asked)


def begin(name: str, *arguments: object, **settings) -> subprocess.Popen | Process:
    """A command's process that runs, with pipes for its output and errors, and nothing to read.
    settings: others, of tests.forked.start."""
    pipe = subprocess.PIPE
    streams = {"stdin": subprocess.DEVNULL, "stdout": pipe, "stderr": pipe}
    return start(name, *arguments, **{**streams, **settings})


class Pipeline:
    """The six stages, or some of them, running. extra: arguments by stage. lines: what tokenize
    reads."""

    def __init__(
        self,
        prompt: str,
        extra: dict[str, list[str]] | None = None,
        stages=STAGES,
        lines: Sequence[str] = (),
    ):
        self.stages = stages
        self.processes: list[subprocess.Popen | Process] = []
        source: object = subprocess.DEVNULL
        if lines:
            source = tempfile.TemporaryFile()
            source.write("\n".join(lines).encode())
            source.seek(0)
        for name in stages:
            arguments = list((extra or {}).get(name, []))
            if name == "tokenize" and prompt:
                arguments.append(prompt)
            process = begin(name, *arguments, stdin=source)
            if source is not subprocess.DEVNULL:
                source.close()
            source = process.stdout
            self.processes.append(process)

    def process(self, name: str) -> subprocess.Popen | Process:
        return self.processes[self.stages.index(name)]

    def first_output(self) -> bytes:
        """Waits until the last stage writes something."""
        data = self.processes[-1].stdout.read1(64)
        assert data, [p.stderr.read() for p in self.processes]
        return data

    def kill(self, name: str) -> None:
        self.process(name).kill()

    def signal_all(self, number: int) -> None:
        """As a terminal does: every process of the pipeline gets the signal, and none runs between
        the first and the last of them, or it could see what another makes of it."""
        running = [process for process in self.processes if process.poll() is None]
        for each in (signal.SIGSTOP, number, signal.SIGCONT):
            for process in running:
                process.send_signal(each)

    def finish(self) -> Result:
        """Waits for the end of every stage."""
        try:
            out = self.processes[-1].stdout.read()
            statuses = [process.wait(TIMEOUT) for process in self.processes]
        finally:
            self.signal_all(signal.SIGKILL)
        errors = [process.stderr.read().decode() for process in self.processes]
        return Result(statuses, out, [line for text in errors for line in text.splitlines()])


def run_pipeline(prompt: str, extra: dict[str, list[str]] | None = None, stages=STAGES) -> Result:
    """A pipeline that runs to its end."""
    return Pipeline(prompt, extra, stages).finish()


def json_lines(data: bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in data.splitlines()]


def frames_of_pipeline(
    prompt: str, extra: dict[str, list[str]], stages=STAGES[:-1]
) -> list[dict[str, Any]]:
    """What toast-frames --json shows of a pipeline that goes well, at the end of these stages."""
    stages = [*stages, "frames"]
    done = run_pipeline(prompt, {"frames": ["--json", "--arrays", "none"], **extra}, stages)
    assert done.statuses == [0] * len(stages), done.errors
    return json_lines(done.out)
