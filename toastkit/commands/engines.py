"""The engine behind a command: loaded when the first run names its model, kept for the next."""

from __future__ import annotations

from typing import Any

from toastkit.commands.cli import say
from toastkit.errors import DataError
from toastkit.frames import Head


class Engines:
    """Calling it with a head gives the engine of that head's model.

    flags: the values of --model, --device, --dtype, --quiet and --verbose.
    """

    def __init__(self, flags: dict[str, Any]):
        self._flags = flags
        self._name: str | None = None
        self._engine: Any = None

    def __call__(self, head: Head):
        name = self._flags["model"] or head.model
        if self._name == name:
            return self._engine
        self._engine = None  # let the last model go before the next one is loaded
        from toastkit.model.config import fingerprint
        from toastkit.model.locate import locate

        files = locate(name)
        if fingerprint(files) != head.fingerprint:
            raise DataError(
                f"{name} is not the model that this stream was tokenised for ({head.model})"
            )
        self._engine = load(files, self._flags)
        self._name = name
        return self._engine


def start_device(flags: dict[str, Any]) -> str:
    """Starts MLX on the device of the flags; "cpu" or "gpu"."""
    from toastkit.engine import device

    return device.start(flags["device"], None if flags["quiet"] else say)


def load(files, flags: dict[str, Any]):
    """An Engine for a checkpoint, on the device and in the dtype of the flags."""
    import time

    start = time.perf_counter()
    from toastkit.engine.engine import Engine

    engine = Engine(
        files,
        device_name=flags["device"],
        dtype=flags["dtype"],
        notify=None if flags["quiet"] else say,
    )
    if flags["verbose"]:
        say(f"loaded {files.name} on the {engine.device} in {time.perf_counter() - start:.2f} s")
    return engine
