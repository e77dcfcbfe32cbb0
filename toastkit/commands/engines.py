"""The engine behind a command: a daemon's if one runs the model, else loaded when the first run
names it; kept for the next run."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from toastkit.commands import policy_flags
from toastkit.commands.cli import given, say
from toastkit.commands.options import native_options
from toastkit.commands.progress import last_part, tell_silence, waiting, watched
from toastkit.descriptors import is_pipe
from toastkit.errors import CannotCreateError
from toastkit.frames import Head
from toastkit.native.starting import NativeOptions

if TYPE_CHECKING:
    from toastkit.engine.engine import Engine
    from toastkit.engine.policy_options import PolicyOptions
    from toastkit.engine.step_engine import StepEngine
    from toastkit.interrupts import Signals


class Engines:
    """Called with a head, returns the engine of that head's model.

    flags: the values of --model, --device, --dtype, --kv-bits, --no-daemon, --quiet and --verbose,
    and what native_options and policy_options take; a daemon's engine has no policies that change
    results. prompts: see Engine.load. engine: the last one returned, None before.
    """

    def __init__(self, flags: dict[str, Any], prompts: bool = True):
        self._flags = flags
        self._prompts = prompts
        self._policies = policy_flags.policy_options(flags)
        self._signals: Signals | None = None
        self._model: tuple[str, str] | None = None
        self.engine: StepEngine | None = None

    def heed(self, signals: Signals) -> None:
        """Have signals end the wait for a daemon that does not answer, and route memory warnings to
        the engine, if layers or experts can be evicted."""
        self._signals = signals
        if self._policies.gives_up:
            signals.on_memory_warning()

    def __call__(self, head: Head) -> StepEngine:
        name = self._flags["model"] or head.model
        model = (name, head.fingerprint)
        if self.engine is not None and self._model == model:
            return self.engine
        self.close()  # unload the last model before loading the next
        # A daemon has the weights, so the files that the head names need not be here; those of -m
        # are checked against the stream in any case.
        files = self._located(head) if self._flags["model"] else None
        engine: StepEngine | None = None
        if not self._policies.changes_results:
            engine = attach(self._flags, lambda: head.fingerprint, self._signals)
        if engine is None:
            files = files or self._located(head)
            engine = open_unloaded(files, self._flags, self._policies, self._signals)
            load(engine, self._flags, self._prompts)
        self.engine, self._model = engine, model
        return engine

    def _located(self, head: Head):
        from toastkit.model.locate import for_stream

        return for_stream(self._flags["model"], head.model, head.fingerprint)

    def close(self) -> None:
        """Release the engine; a daemon's has released the session on return."""
        engine, self.engine, self._model = self.engine, None, None
        if engine is not None:
            engine.close()


def attach(
    flags: dict[str, Any], fingerprint: Callable[[], str], signals: Signals | None = None
) -> StepEngine | None:
    """A daemon's engine for the model, if one runs it as the flags would; else None. Without a
    daemon this costs one look at a path; if the command line says how products are computed, none
    is asked. signals: end the wait for its answer. Raises UsageError for a TOAST_SOCKET that cannot
    be a socket's path, and for a daemon that runs the model with another setting."""
    here = flags["no_daemon"] or given(*NativeOptions._fields)
    path = None if here else _daemon_socket()
    if path is None:
        return None
    from toastkit.engine.remote import attach as attach_to_daemon

    tell, insisted = say if flags["verbose"] else None, policy_flags.insisted_residency(flags)
    silent = partial(tell_silence, path) if watched(flags) else None
    warn = None if flags["quiet"] else say
    device, dtype, kv_bits = (flags[name] for name in ("device", "dtype", "kv_bits"))
    watch = 1 if is_pipe(1) else None
    return attach_to_daemon(
        path, fingerprint(), device, dtype, kv_bits, tell, insisted, signals, silent, warn, watch
    )


def _daemon_socket() -> str | None:
    """The path of a socket at which a daemon may listen; None if there is none."""
    from toastkit.daemon.paths import socket_path

    try:
        path = socket_path()
    except CannotCreateError:
        return None  # the default directory is somebody else's: no daemon of ours can be there
    return path if os.path.exists(path) else None


def open_unloaded(
    files,
    flags: dict[str, Any],
    policies: PolicyOptions | None = None,
    signals: Signals | None = None,
) -> Engine:
    """An Engine for a checkpoint, on the device and in the dtypes of the flags. If it is mapped,
    its pages are being prefaulted on return. signals: route memory warnings to it."""
    from toastkit.interrupts import held

    with held():
        from toastkit.engine.opening import open_engine

    engine = open_engine(
        files,
        device_name=flags["device"],
        dtype=flags["dtype"],
        kv_bits=flags["kv_bits"],
        notify=None if flags["quiet"] else say,
        **native_options(flags)._asdict(),
        **({} if policies is None else policies._asdict()),
        load=False,
    )
    if signals is not None and policies is not None and policies.gives_up:
        from toastkit.holdings.policy import warn_of_memory

        signals.on_memory_warning(lambda: warn_of_memory(engine.policies))
    return engine


def load(engine: Engine, flags: dict[str, Any], prompts: bool = True) -> Engine:
    """Have an engine load what it starts with, with a message; return the engine. prompts: see
    Engine.load."""
    import time

    start, name = time.perf_counter(), engine.files.name
    with waiting(f"loading {last_part(name)}", flags):
        engine.load(prompts)
    if flags["verbose"]:
        say(f"loaded {name} on the {engine.device} in {time.perf_counter() - start:.2f} s")
        say(f"native products: {engine.native}")
        from toastkit.model.info import human
        from toastkit.residency.mapping import mapped_bytes

        if size := mapped_bytes(engine.holdings):
            say(f"weights: {human(size)} mapped")
    return engine
