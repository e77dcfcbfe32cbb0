"""The command toasted with a worker that has no model: `python -m tests.unit.daemon_driver ...`.

-m says what the worker is like: broken, slow or mortal ones fail to load, take their time, or take
the process with them. SIGUSR1 lets a prompt "hold" go; "die" ends the worker's thread; "stuck"
can be neither finished nor cancelled. SIGNAL_AT_BIRTH is one that comes between the making of the
socket and the first line after it.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import types
from typing import Any

from tests.unit.daemon_front import FakeWorker
from toastkit.daemon import life
from toastkit.daemon.channel import Channel
from toastkit.daemon.requests import Request
from toastkit.errors import DataError


class Worker(FakeWorker):
    """Stands for the worker: shows in its status what it was made with and what was done to it."""

    def __init__(self, settings: Any):
        super().__init__(settings.max_queue)
        self.settings = settings

    def start(self) -> None:
        """Loads nothing, as the model's name says."""
        if self.settings.policies.residency is None:
            signal.signal(signal.SIGUSR1, lambda *_: self.release.set())
        model = self.settings.model
        if model == "broken":
            raise DataError("broken is no model", hint="take another")
        if model == "mortal":
            os._exit(3)
        if model.startswith("slow"):
            time.sleep(float(model[4:] or 60))
        super().start()

    def submit(self, request: Request, channel: Channel) -> None:
        if request.prompt == "die":
            self.failure = RuntimeError("the device\nis lost")
            return self.notify()
        return super().submit(request, channel)

    def _answer(self, request: Request, channel: Channel) -> None:
        while request.prompt == "stuck":
            channel.reply({"progress": {"done": 1, "total": 2, "cached": 0}})
            time.sleep(1)
        if self.settings.audit is not None:
            self.settings.audit.write({"op": request.op}, {"text": request.prompt})
        super()._answer(request, channel)

    def status(self) -> dict[str, Any]:
        values = {n: v for n, v in vars(self.settings).items() if n not in ("audit", "say")}
        values["policies"] = values["policies"].resident
        return {**values, **super().status(), "calls": self.calls, "nested": {"a": {"b": "x\ny"}}}


def main() -> None:
    fake = types.ModuleType("toastkit.daemon.worker")
    fake.Worker = Worker  # type: ignore[attr-defined]
    sys.modules["toastkit.daemon.worker"] = fake
    life.CANCEL_SECONDS = float(os.environ.get("CANCEL_SECONDS", life.CANCEL_SECONDS))
    if number := int(os.environ.get("SIGNAL_AT_BIRTH", "0")):
        make = life.SocketFile.make

        def make_and_signal(path: str) -> life.SocketFile:
            made = make(path)
            os.kill(os.getpid(), number)
            return made

        life.SocketFile.make = make_and_signal  # type: ignore[method-assign]
    from toastkit.commands.toasted import main as command

    command()


if __name__ == "__main__":
    main()
