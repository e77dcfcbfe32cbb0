"""The engine behind a command: a daemon's where one runs the model, else loaded when the first run
names it; kept for the next run."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from toastkit.commands.cli import say
from toastkit.commands.progress import last_part, waiting
from toastkit.errors import CannotCreateError
from toastkit.frames import Head

if TYPE_CHECKING:
    from toastkit.engine.engine import Engine
    from toastkit.engine.step_engine import StepEngine
    from toastkit.experts.experts_options import ExpertsOptions
    from toastkit.experts.slot_options import SlotOptions
    from toastkit.gears.gear_options import GearOptions
    from toastkit.interrupts import Signals
    from toastkit.residency.residency_options import ResidencyOptions


class Engines:
    """Calling it with a head gives the engine of that head's model.

    flags: the values of --model, --device, --dtype, --no-daemon, --quiet and --verbose.
    gear_options, experts: of the engine; a daemon's has neither. residency, expert_slots: of an
    engine that is loaded here. insisted: the setting of residency and slots that a daemon's engine
    must have, None for any. engine: the one that was given last, None before.
    """

    def __init__(
        self,
        flags: dict[str, Any],
        gear_options: GearOptions | None = None,
        residency: ResidencyOptions | None = None,
        insisted: str | None = None,
        experts: ExpertsOptions | None = None,
        expert_slots: SlotOptions | None = None,
    ):
        self._flags = flags
        self._gear_options = gear_options
        self._residency = residency
        self._insisted = insisted
        self._experts = experts
        self._expert_slots = expert_slots
        self._signals: Signals | None = None
        self._model: tuple[str, str] | None = None
        self.engine: StepEngine | None = None

    def heed(self, signals: Signals) -> None:
        """Has a memory warning go to the engine, where its layers may leave."""
        if self._residency is not None:
            signals.on_memory_warning()
            self._signals = signals

    def __call__(self, head: Head) -> StepEngine:
        name = self._flags["model"] or head.model
        model = (name, head.fingerprint)
        if self.engine is not None and self._model == model:
            return self.engine
        self.close()  # let the last model go before the next one is loaded
        # A daemon has the weights, so the files that the head names need not be here; those of -m
        # are held against the stream in any case.
        files = self._located(head) if self._flags["model"] else None
        engine: StepEngine | None = None
        if self._gear_options is None and self._experts is None:
            engine = attach(self._flags, head.fingerprint, self._insisted)
        if engine is None:
            files = files or self._located(head)
            options = (self._gear_options, self._residency, self._signals, self._experts)
            engine = load(files, self._flags, *options, self._expert_slots)
        self.engine, self._model = engine, model
        return engine

    def _located(self, head: Head):
        from toastkit.model.locate import for_stream

        return for_stream(self._flags["model"], head.model, head.fingerprint)

    def close(self) -> None:
        """Lets the engine go; a daemon's has let go of the session when this returns."""
        engine, self.engine, self._model = self.engine, None, None
        if engine is not None:
            engine.close()


def attach(
    flags: dict[str, Any], fingerprint: str, insisted: str | None = None
) -> StepEngine | None:
    """A daemon's engine for the model, where one runs it as the flags would; else None. Where there
    is no daemon this costs one look at a path. insisted: the setting of its residency and slots,
    None for any. Raises UsageError for a TOAST_SOCKET that cannot be a socket's path, and for a
    daemon that runs the model with another setting than is insisted on."""
    path = None if flags["no_daemon"] else _daemon_socket()
    if path is None:
        return None
    from toastkit.engine.remote import attach as attach_to_daemon

    tell = say if flags["verbose"] else None
    return attach_to_daemon(path, fingerprint, flags["device"], flags["dtype"], tell, insisted)


def _daemon_socket() -> str | None:
    """Where a daemon listens, perhaps."""
    from toastkit.daemon.paths import socket_path

    try:
        path = socket_path()
    except CannotCreateError:
        return None  # the usual directory is somebody else's: no daemon of ours can be there
    return path if os.path.exists(path) else None


def start_device(flags: dict[str, Any]) -> str:
    """Starts MLX on the device of the flags; "cpu" or "gpu"."""
    from toastkit.engine import device

    return device.start(flags["device"])


def load(
    files,
    flags: dict[str, Any],
    gear_options: GearOptions | None = None,
    residency: ResidencyOptions | None = None,
    signals: Signals | None = None,
    experts: ExpertsOptions | None = None,
    expert_slots: SlotOptions | None = None,
) -> Engine:
    """An Engine for a checkpoint, on the device and in the dtype of the flags. signals: whose
    memory warning goes to it."""
    import time

    start = time.perf_counter()
    with waiting(f"loading {last_part(files.name)}", flags):
        from toastkit.engine.opening import open_engine

        engine = open_engine(
            files,
            device_name=flags["device"],
            dtype=flags["dtype"],
            notify=None if flags["quiet"] else say,
            gear_options=gear_options,
            residency=residency,
            experts=experts,
            expert_slots=expert_slots,
        )
    if signals is not None and engine.residency is not None:
        signals.on_memory_warning(engine.residency.memory_warning)
    if flags["verbose"]:
        say(f"loaded {files.name} on the {engine.device} in {time.perf_counter() - start:.2f} s")
    return engine
