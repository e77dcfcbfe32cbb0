"""Runs of other processes on this daemon's weights: toast-prefill and toast-decode attach.

Their stages, pipes and locks stay with them (engine/remote.py); the daemon has the state and a
duplicate of the session's lock. Everything below runs on the worker's thread, one op at a time,
except `Attached.hang_up`. The ops are described in toasted(7).

A run's state lives as long as its connection, or until released. It outlives the weights: an idle
daemon may unload them, and loads them again for the next op.
"""

from __future__ import annotations

import binascii
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from toastkit.daemon.requests import ATTACH_OPS, Request
from toastkit.engine.device import DEVICES
from toastkit.engine.engine import CHUNK
from toastkit.errors import (
    BusyError,
    DataError,
    NoInputError,
    ToastError,
    UnavailableError,
    UsageError,
)
from toastkit.private_files import try_lock
from toastkit.session.directory import Session
from toastkit.session.lock import WriterLock
from toastkit.session.names import display_name
from toastkit.store.dtypes import DTYPES, activation_dtype
from toastkit.store.kv_bits import KV_DTYPES, kv_dtype
from toastkit.text.exact_numbers import counted
from toastkit.text.messages import kind

if TYPE_CHECKING:
    from toastkit.daemon.channel import Channel
    from toastkit.daemon.prepare import Preparer
    from toastkit.daemon.service import Service
    from toastkit.engine.state import ModelState

KEY = "attached"  # in the connection's store
COUNTED = ("residency", "slots")  # policies that a run gets reports of


class Attached:
    """The run of one connection. service: whose weights it uses, while they are loaded. prompt: its
    token ids. state: model state, None between two runs. ended: why the daemon has ended the
    run."""

    def __init__(self, fingerprint: str):
        self.fingerprint = fingerprint
        self.service: Service | None = None
        self.prompt: list[int] = []
        self.state: ModelState | None = None
        self.ended: ToastError | None = None
        self.at_work = threading.Lock()  # held while the session's files are in use

    def plug(self, service: Service) -> None:
        """Use the weights of this service from now on."""
        if self.service is not service and self.state is not None:
            self.state.cache = service.engine.counted(self.state.cache)
        self.service = service
        if self not in service.attached:
            service.attached.append(self)

    def counted(self) -> dict[str, Any]:
        """The run's final report, by policy; empty while the model is not loaded."""
        reports = {} if self.service is None else self.service.engine.run_report()
        return {name: reports[name] for name in COUNTED if name in reports}

    def unplug(self) -> None:
        """Release the weights of a model that is being unloaded, keeping the state."""
        if self.state is not None:
            self.state.take_back()  # a graph built ahead holds them
        if self.service is not None:
            self.service.attached.remove(self)
            self.service = None

    def drop_state(self) -> None:
        """Drop the state, and close our duplicate of the session's lock. Idempotent."""
        with self.at_work:
            self._close_session()
            if self.state is not None:
                self.state.take_back()
                self.state.cache = []
            self.state, self.prompt = None, []
        self.unplug()

    def end(self, why: ToastError) -> None:
        """End a run for the daemon's own reasons: commit what has been read to the session, and
        report why to the next op."""
        with self.at_work, suppress(Exception):  # a failed commit leaves the session as it was
            if self.state is not None:
                self.state.commit()
        self.drop_state()
        self.ended = why

    def hang_up(self, later: Callable[[Callable[[], None]], None]) -> None:
        """Handle the end of the connection, on the front's thread. The session is released at once,
        so that another writer need not wait for the worker, unless it is being written. The worker
        drops the arrays."""
        if self.at_work.acquire(blocking=False):
            try:
                self._close_session()
            finally:
                self.at_work.release()
        later(self.drop_state)

    def _close_session(self) -> None:
        if self.state is None or self.state.session is None:
            return
        session, self.state.session = self.state.session, None
        _give_back(session)


def serve(
    load: Callable[[], Service],
    preparer: Preparer,
    request: Request,
    channel: Channel,
    later: Callable[[Callable[[], None]], None],
) -> None:
    """Perform one op and reply. Raises ToastError if it fails.

    load: returns the service, loading the model if need be. later: schedules a call on the worker's
    thread. The caller closes the descriptors that are left in the request.
    """
    if channel.gone:
        return
    connection = channel.connection
    if request.op == "attach":
        reply = _attach(load, preparer, request)
        if KEY not in connection.store:
            begun = connection.store[KEY] = Attached(preparer.fingerprint)
            connection.on_close.append(lambda: begun.hang_up(later))
        channel.reply(reply)
        return
    attached = connection.store.get(KEY)
    if attached is None:
        raise UsageError(f"{request.op}: attach comes first")
    if request.op == "release":
        counted = attached.counted()
        attached.drop_state()
        channel.reply({"released": counted})
        return
    if attached.fingerprint != preparer.fingerprint:
        attached.drop_state()
        raise UnavailableError(f"the daemon runs {preparer.files.name} now")
    if request.op == "restore":
        attached.drop_state()
        attached.ended = None
    elif attached.state is None:
        raise attached.ended or UsageError(f"{request.op}: restore comes first")
    service = load()
    attached.plug(service)
    channel.reply(_done(attached, service, request))
    if request.op == "step":
        service.engine.look_ahead(_state(attached))  # while the client samples the token


def _done(attached: Attached, service: Service, request: Request) -> dict[str, Any]:
    """Perform one op of a run and return the reply."""
    try:
        with attached.at_work:
            return OPERATIONS[request.op](attached, service, request)
    except ToastError:
        raise  # the state is unchanged
    except BaseException:
        attached.drop_state()
        raise
    finally:
        if attached.state is None:
            attached.unplug()


# -------------------------------------------------------------------------------------- the ops


def _attach(load: Callable[[], Service], preparer: Preparer, request: Request) -> dict[str, Any]:
    """Compare the client's model, device and dtypes with ours. Raises NoInputError if the client
    would compute something else by itself."""
    fingerprint, device, dtype, kv_bits = (request.raw[name] for name in ATTACH_OPS["attach"])
    if not isinstance(fingerprint, str):
        raise UsageError(f"fingerprint: {kind(fingerprint)} instead of a string")
    if device not in DEVICES:
        raise UsageError(f"device: not one of {', '.join(DEVICES)}")
    if dtype is not None and dtype not in DTYPES:
        raise UsageError(f"dtype: neither null nor one of {', '.join(DTYPES)}")
    if kv_bits is not None and (type(kv_bits) is not int or kv_bits not in KV_DTYPES):
        raise UsageError(f"kv_bits: neither null nor one of {', '.join(map(str, KV_DTYPES))}")
    name = preparer.files.name
    if fingerprint != preparer.fingerprint:
        raise NoInputError(f"the daemon runs {name}")
    service = load()
    engine = service.engine
    if device == "auto":
        device = "gpu" if mx.is_available(mx.gpu) else "cpu"
    if device != engine.device:
        raise NoInputError(f"the daemon runs {name} on the {engine.device}")
    dtype = dtype or activation_dtype(engine.device == "cpu")
    if dtype != engine.dtype:
        raise NoInputError(f"the daemon runs {name} in {engine.dtype or 'its own dtype'}")
    if kv_dtype(dtype, kv_bits) != engine.kv_dtype:
        own = engine.kv_dtype or "its own dtype"
        raise NoInputError(f"the daemon runs {name} with keys and values in {own}")
    if engine.gears is not None:
        raise NoInputError(f"the daemon runs {name} in gears")
    if engine.experts is not None and engine.experts.options.runs_little:
        chosen = service.settings.policies.chosen_experts
        raise NoInputError(f"the daemon runs {name} with {chosen} experts")
    return {
        "attached": {
            "vocab": engine.vocab,
            "context": engine.context,
            "device": engine.device,
            "dtype": engine.dtype,
            "chunk": service.settings.chunk or CHUNK[engine.device],
            "resident": service.settings.policies.resident,
            "counts": [policy.name for policy in engine.policies if policy.name in COUNTED],
        }
    }


def _restore(attached: Attached, service: Service, request: Request) -> dict[str, Any]:
    """Begin a run: from its session, from another session, or from an empty state."""
    path, source = _path(request, "session"), _path(request, "source")
    ids = _ids(request, service)
    session = None if path is None else _lent_session(request, path, attached.fingerprint)
    read = None
    try:
        service.engine.begin_run()
        if source is not None:
            read = Session.open(source, attached.fingerprint, create=False, write=False)
        state, cached = service.engine.restore(session, ids, read)
    except BaseException:
        if session is not None:
            _give_back(session)
        raise
    finally:
        if read is not None:
            read.close()
    attached.state, attached.prompt = state, ids
    return {"restored": {"cached": cached, "logits": encoded(state)}}


def _give_back(session: Session) -> None:
    """Close the lock first, then the session: its owner decides whether the directory stays."""
    if session.lock is not None:
        session.lock.release()
    session.close()


def _lent_session(request: Request, path: Path, fingerprint: str) -> Session:
    """The session whose lock was sent with the request."""
    if len(request.fds) != 1:
        raise UsageError("session: the descriptor of its lock has to come along, and no other")
    try:
        lock = WriterLock.from_fd(path, request.fds.pop(), lent=True)
    except DataError as error:
        # In a container, for instance, or with a private /tmp.
        hint = "the daemon may not see the same files; --no-daemon does without it"
        raise DataError(error.message, hint) from error
    held = False
    with suppress(OSError):
        held = try_lock(lock.fileno())  # no effect on a duplicate of a held lock
    if not held:
        lock.release()
        raise BusyError(f"session {display_name(path)} is in use by another writer")
    return Session.adopt(path, fingerprint, lock)


def _count(attached: Attached, service: Service, request: Request) -> dict[str, Any]:
    """Count from here on, including what other runs do meanwhile."""
    service.engine.begin_run()
    return {"counting": {}}


def _read(attached: Attached, service: Service, request: Request) -> dict[str, Any]:
    """Run one prefill pass, short while others are answering. As in every prefill, the last token
    may be a decode step of its own."""
    state = _state(attached)
    held = len(state.tokens)
    ids = _ids(request, service)
    if held == len(attached.prompt):
        raise UsageError("read: the prompt has been read")
    if ids != attached.prompt[held : held + len(ids)]:
        raise UsageError("ids: not those that come next in the prompt")
    size = min(len(ids), service.slice_size() or len(ids))
    passes = service.engine.reading(state, attached.prompt, lambda: size)
    held = next(iter(passes))
    warnings = [service.engine.window_warning(held)]
    if state.logits is not None:
        warnings.append(service.engine.nan_warning(state.logits))
    return {"read": {"held": held, "logits": encoded(state), **_told(warnings)}}


def _step(attached: Attached, service: Service, request: Request) -> dict[str, Any]:
    """Decode step: run the model on one token."""
    state, engine = _state(attached), service.engine
    token = request.raw["token"]
    if type(token) is not int or not 0 <= token < engine.vocab:
        raise UsageError(f"token: not an id below {engine.vocab}")
    if state.logits is None:
        raise UsageError("step: the prompt has not been read to its end")
    if engine.context is not None and len(state.tokens) >= engine.context:
        raise DataError(f"the model's context of {counted(engine.context, 'token')} is full")
    engine.consume(state, token)
    state.submit()
    told = {} if state.experts is None else {"experts": state.experts}
    told |= _told([engine.window_warning(len(state.tokens))])
    return {"step": {"logits": encoded(state), **told}}


def _told(warnings: list[str | None]) -> dict[str, Any]:
    """The part of a reply that has warnings, if there are any."""
    lines = [f"warning: {line}" for line in warnings if line]
    return {"warnings": lines} if lines else {}


def _commit(attached: Attached, service: Service, request: Request) -> dict[str, Any]:
    _state(attached).commit()
    return {"committed": {}}


OPERATIONS: dict[str, Callable[[Attached, Service, Request], dict[str, Any]]]
OPERATIONS = {
    "restore": _restore, "count": _count, "read": _read, "step": _step, "commit": _commit,
}  # fmt: skip


def encoded(state: ModelState) -> str | None:
    """The logits (vocab,) float32 in base64, little-endian; waits for them."""
    if state.logits is None:
        return None
    return binascii.b2a_base64(state.values(), newline=False).decode("ascii")


def _state(attached: Attached) -> ModelState:
    assert attached.state is not None  # checked by serve
    return attached.state


# ----------------------------------------------------------------------------------- the fields


def _path(request: Request, name: str) -> Path | None:
    value = request.raw[name]
    if value is None:
        return None
    if not isinstance(value, str):
        raise UsageError(f"{name}: {kind(value)} instead of null or a string")
    if not os.path.isabs(value) or "\0" in value:
        raise UsageError(f"{name}: {value[:100]!r} is not an absolute path")
    return Path(value)


def _ids(request: Request, service: Service) -> list[int]:
    """The token ids of a request, at least one."""
    ids = request.raw["ids"]
    if not isinstance(ids, list) or not ids:
        what = "an empty list" if ids == [] else kind(ids)
        raise UsageError(f"ids: {what} instead of a list of token ids")
    for place, token in enumerate(ids, 1):
        if type(token) is not int or not 0 <= token < service.engine.vocab:
            raise UsageError(f"ids: entry {place} is not an id below {service.engine.vocab}")
    return ids
