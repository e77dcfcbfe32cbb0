"""Engines to compare, each a process of its own that stands still while another one is measured.

    worker = Worker("llama.cpp", [python, "native_llama.py", "run", path], {"OMP_WAIT_POLICY": ...})
    worker.ask("prefill", 256)              runs it alone, and gives what it answers with
    together([worker, ...], "go", 5.0)      has several run at once

The other side calls `serve` with its functions. A line goes in and one comes out: words, and JSON.
Nothing but the standard library: another interpreter, which has llama.cpp, reads this too.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

DIE_WITH_PARENT = 1  # of prctl(2)


class Worker:
    """A process that answers. environment: on top of ours. Raises SystemExit where it dies."""

    def __init__(
        self, name: str, command: Sequence[str], environment: dict[str, str] | None = None
    ):
        self.name = name
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
            env={**os.environ, **(environment or {})},
        )  # fmt: skip
        self.hear()  # it is loaded
        self.rest()

    def tell(self, what: str, *arguments: float) -> None:
        """Has it begin."""
        os.kill(self._process.pid, signal.SIGCONT)
        assert self._process.stdin is not None
        self._process.stdin.write(" ".join([what, *map(str, arguments)]) + "\n")
        self._process.stdin.flush()

    def hear(self) -> Any:
        """What it answers."""
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise SystemExit(f"{self.name} died: {' '.join(map(str, self._process.args))}")
        return json.loads(line)

    def rest(self) -> None:
        """Stands still: a thread that spins would take part in what is measured next."""
        os.kill(self._process.pid, signal.SIGSTOP)

    def ask(self, what: str, *arguments: float) -> Any:
        """All three."""
        self.tell(what, *arguments)
        answer = self.hear()
        self.rest()
        return answer

    def end(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.wait()


def together(workers: Sequence[Worker], what: str, *arguments: float) -> list[Any]:
    """Asks several at once."""
    for worker in workers:
        worker.tell(what, *arguments)
    answers = [worker.hear() for worker in workers]
    for worker in workers:
        worker.rest()
    return answers


def serve(functions: dict[str, Callable[..., Any]]) -> None:
    """Answers what is asked until nobody asks any more."""
    with suppress(OSError, AttributeError):  # Linux: a process that stands still sees no end
        ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGKILL)
    print(json.dumps(None), flush=True)
    for line in sys.stdin:
        what, *arguments = line.split()
        print(json.dumps(functions[what](*map(float, arguments))), flush=True)


def steps_within(seconds: float, step: Callable[[], Any]) -> float:
    """Steps a second, of as many as begin within so many seconds."""
    start, count = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - start) < seconds:
        step()
        count += 1
    return count / elapsed if count else 0.0


def busy(seconds: float) -> None:
    """Has a processor work."""
    steps_within(seconds, lambda: None)


if __name__ == "__main__":
    serve({"go": busy, "begin": lambda context: None})
