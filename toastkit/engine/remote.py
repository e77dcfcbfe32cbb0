"""Uses a daemon's weights for toast-prefill and toast-decode: the stages run here, the model there.

Pipes, sessions and locks stay in this process; the computation is the daemon's, which may have
loaded the model long ago. `RemoteEngine` and `RemoteState` are a StepEngine and its State
(step_engine.py), so nothing else changes. MLX is never imported.

One connection has one run at a time. Each op is a line, answered by a line: see RUNS OF OTHER
PROCESSES in toasted(7). A session's lock is passed as a descriptor, as in a hand-over
(session/handover.py): the daemon writes the session under the lock that this process holds.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from toastkit.errors import ToastError, UnavailableError, UsageError
from toastkit.holdings.policy import NO_WISH, Wish
from toastkit.wire import GRACE_SECONDS, Waiter, Wire, connect, remote_error

if TYPE_CHECKING:
    import socket

    from toastkit.interrupts import Interrupt
    from toastkit.session.directory import Session

ANSWERS = {
    "attach": "attached", "restore": "restored", "count": "counting", "read": "read",
    "step": "step", "commit": "committed", "release": "released",
}  # fmt: skip


def attach(
    path: str,
    fingerprint: str,
    device: str,
    dtype: str | None,
    kv_bits: int | None,
    say: Callable[[str], None] | None = None,
    resident: str | None = None,
    interrupts: Interrupt | None = None,
    silent: Callable[[], None] | None = None,
    warn: Callable[[str], None] | None = None,
    watch: int | None = None,
) -> RemoteEngine | None:
    """Return the engine of the daemon that listens at a path, or None if there is none, or if it
    would not compute what this process would.

    fingerprint: of the model. device, dtype, kv_bits: as --device, --dtype and --kv-bits have them;
    the daemon must use what they would give here. say: takes a line on what a running daemon
    answered. resident: the setting that its residency must have, as ResidencyOptions.setting has
    it; None for any. interrupts: a signal ends the wait for an answer, and the process. silent:
    called once if that takes long. warn: takes each warning of a run, once. watch: a descriptor
    such as stdout; once it has no reader, an answer that takes long is not waited for, and
    BrokenPipeError raised. Raises UsageError if it has another.
    """
    waiter = Waiter(interrupts, watch, silent=silent, grace=GRACE_SECONDS)
    try:
        connection = connect(path, True, waiter)
    except UnavailableError:
        return None  # it listens, but for other users only
    except InterruptedError as error:
        assert interrupts is not None
        raise SystemExit(interrupts.code) from error
    if connection is None:
        return None
    daemon = Operations(connection, path, waiter)
    engine: RemoteEngine | None = None
    status = f"using the weights of the daemon at {path}"
    try:
        of = {"fingerprint": fingerprint, "device": device, "dtype": dtype, "kv_bits": kv_bits}
        engine = RemoteEngine(daemon, daemon.ask("attach", of), warn)
        waiter.heed_no_more()  # a run in progress is for the stage to end
    except ToastError as error:
        if interrupts:
            raise SystemExit(interrupts.code) from error
        status = f"{error.message}: loading the model here"
    finally:
        if engine is None:
            daemon.close()
    if engine is not None and resident not in (None, engine.resident):
        engine.close()
        raise UsageError(
            f"the daemon at {path} runs with --resident {engine.resident}, "
            f"not --resident {resident}",
            hint="--no-daemon loads the model here",
        )
    if say is not None:
        say(status)
    return engine


class Operations:
    """Ops to the daemon and their answers, in turn. waiting: the op whose answer is due. given_up:
    a signal, or the end of the output's reader, has ended the wait for it, and nothing more is to
    be waited for."""

    def __init__(self, connection: socket.socket, path: str, waiter: Waiter | None = None):
        self.waiting: str | None = None
        self.given_up = False
        self._wire = Wire(connection, path, waiter, refusal=UnavailableError)
        self.refuse, self.close = self._wire.refuse, self._wire.close

    def ask(self, op: str, fields: dict[str, Any], fd: int | None = None) -> dict[str, Any]:
        """Return the daemon's answer to an op. Raises the error that it answers with, and
        UnavailableError if it is gone, or sends something that is no answer."""
        self.send(op, fields, fd)
        return self.answer()

    def send(self, op: str, fields: dict[str, Any], fd: int | None = None) -> None:
        """Send an op; its answer has to be read before the next one. fd: a descriptor to pass with
        it."""
        if self._wire.over:
            raise _went_away()
        assert self.waiting is None  # or answers would be mismatched
        self.waiting = op
        self._wire.send({"op": op, **fields}, fd)

    def answer(self) -> dict[str, Any]:
        """Return the answer to the op sent last. Raises as `ask` does."""
        assert self.waiting is not None
        try:
            reply = self._wire.reply()
        except (KeyboardInterrupt, SystemExit, BrokenPipeError):
            self.given_up = True
            raise
        if reply is None:
            raise _went_away()
        name, self.waiting = ANSWERS[self.waiting], None
        if "error" in reply:
            raise remote_error(reply["error"])
        answer = reply.get(name)
        return answer if isinstance(answer, dict) else self.refuse()


class RemoteEngine:
    """A model that a daemon has loaded: see `step_engine.StepEngine`.

    chunk: default tokens of a prefill pass. resident: which of its layers stay on the device, as
    ResidencyOptions.setting has it. warn: takes each warning, once.
    """

    def __init__(
        self,
        daemon: Operations,
        attached: dict[str, Any],
        warn: Callable[[str], None] | None = None,
    ):
        self._daemon = daemon
        self._warn = warn
        self._warned: set[str] = set()
        self.vocab: int = self._number(attached, "vocab")
        known = attached.get("context") is not None
        self.context: int | None = self._number(attached, "context") if known else None
        self.chunk: int = self._number(attached, "chunk")
        self._state: RemoteState | None = None
        self.device: str = attached.get("device", "")
        self.dtype: str | None = attached.get("dtype")
        self.resident: str = attached.get("resident", "all")
        self._counts = bool(attached.get("counts"))  # a daemon of another version may not know how
        self._report: dict[str, Any] = {}

    def restore(
        self, session: Session | None, ids: Sequence[int], source: Session | None = None
    ) -> tuple[RemoteState, int]:
        """Restore, as StepEngine. The daemon opens the sessions itself; the lock of `session` is
        lent to it."""
        lock = None if session is None else session.lock
        answer = self._daemon.ask(
            "restore",
            {"session": _path_of(session), "source": _path_of(source), "ids": list(ids)},
            None if lock is None else lock.fileno(),
        )
        count = answer.get("cached")
        if type(count) is not int or not 0 <= count <= len(ids):
            self._daemon.refuse()
        logits = self.logits_of(answer)
        self._state = RemoteState(self, self._daemon, list(ids[:count]), logits, session)
        return self._state, count

    def reading(
        self, state: RemoteState, ids: Sequence[int], chunk: Callable[[], int | None] = lambda: None
    ) -> Iterator[int]:
        """Prefill, as StepEngine. A pass may be shorter than asked for if the daemon has other
        clients."""
        held = len(state.tokens)
        while held < len(ids):
            part = list(ids[held : held + (chunk() or self.chunk)])
            answer = self._daemon.ask("read", {"ids": part})
            now = answer.get("held")
            if type(now) is not int or not held < now <= held + len(part):
                self._daemon.refuse()
            state.hold(ids[held:now], self.logits_of(answer))
            held = now
            yield held

    def begin_run(self) -> None:
        """Start counting, as StepEngine, for a run that has been restored; before that nothing is
        counted."""
        self._report = {}
        if self._counts and self._state is not None and self._state.open:
            self._daemon.ask("count", {})

    def consume(self, state: RemoteState, token: int, wish: Wish = NO_WISH) -> None:
        """Send one token, as StepEngine, without waiting for the answer. A wish is not sent on."""
        state.step(token)

    def uncount_step(self) -> None:
        """Do nothing: tokens come back as numbers here, so that no step is too many."""

    def look_ahead(self, state: RemoteState) -> None:
        """Do nothing: the daemon looks ahead by itself."""

    def run_report(self) -> dict[str, Any]:
        """What the daemon's `residency` and `slots` took since the run began, other clients' runs
        included; known once the run's state is closed."""
        return self._report

    def hold_report(self, answer: dict[str, Any]) -> None:
        """Keep the daemon's report on a run that it has released."""
        self._report = {name: report for name, report in answer.items() if isinstance(report, dict)}

    def logits_of(self, answer: dict[str, Any]) -> memoryview[float] | None:
        """Decode the logits in an answer, float32 (vocab,), read-only; None if there are none."""
        text = answer.get("logits")
        if text is None:
            return None
        import binascii

        try:
            values = memoryview(binascii.a2b_base64(text)).cast("f")
        except (TypeError, ValueError):
            self._daemon.refuse()
        if len(values) != self.vocab:
            self._daemon.refuse()
        self._heed(answer.get("warnings"))
        return values

    def _heed(self, warnings: Any) -> None:
        """Pass on what the daemon warns of, each line once."""
        if self._warn is None or not isinstance(warnings, list):
            return
        for line in warnings:
            if isinstance(line, str) and line not in self._warned:
                self._warned.add(line)
                self._warn(line)

    def close(self) -> None:
        """Close the connection. A state that was not closed is released first, so that the
        session's next writer does not find it locked."""
        if self._state is not None:
            self._state.release()
        self._daemon.close()

    def _number(self, attached: dict[str, Any], name: str) -> int:
        value = attached.get(name)
        return value if type(value) is int and value > 0 else self._daemon.refuse()


class RemoteState:
    """What the daemon's model has read for this process: see `step_engine.State`. session: opened
    and locked here. open: not released yet."""

    passed = None  # known to the daemon only

    def __init__(
        self,
        engine: RemoteEngine,
        daemon: Operations,
        tokens: list[int],
        logits: memoryview[float] | None,
        session: Session | None,
    ):
        self.tokens = tokens
        self.session = session
        self._engine = engine
        self._daemon = daemon
        self._logits = logits
        self.experts: dict[str, Any] | None = None
        self.open = True

    @property
    def logits(self) -> memoryview[float] | None:
        """The logits (vocab,) float32 after the last token; waits for them."""
        if self._daemon.waiting == "step":
            answer = self._daemon.answer()
            self._logits = self._engine.logits_of(answer)
            report = answer.get("experts")
            self.experts = report if isinstance(report, dict) else None
        return self._logits

    def hold(self, ids: Sequence[int], logits: memoryview[float] | None) -> None:
        """Note that the caches hold these tokens too. logits: float32 (vocab,), after the last."""
        self.tokens.extend(ids)
        self._logits = logits

    def step(self, token: int) -> None:
        """Have the daemon run one more token, without waiting for the answer."""
        _ = self.logits  # reads the previous step's answer, if nobody has yet
        self._daemon.send("step", {"token": token})
        self.tokens.append(token)

    def submit(self, measured: bool = False) -> None:
        """Do nothing: the daemon has begun."""

    def hand_over_ahead(self, measured: bool = False) -> None:
        """Do nothing: the daemon schedules its own work."""

    def summary(self) -> None:
        """None: the daemon does not send it."""

    def values(self) -> memoryview[float]:
        """The logits (vocab,) float32 after the last token; waits for them."""
        logits = self.logits
        return self._daemon.refuse() if logits is None else logits

    def commit(self) -> None:
        """Have the daemon write the state into its session, if it has one, unless the wait for it
        has been given up: the session is then as before the run, as after a kill."""
        if self.session is not None and not self._daemon.given_up:
            _ = self.logits
            self._daemon.ask("commit", {})

    def close(self) -> None:
        """Release the state and close the session; an ephemeral one is deleted. The daemon's copy
        of the lock is closed first, so that the session is free when this returns."""
        try:
            self.release()
        finally:
            if self.session is not None:
                self.session.close()
                self.session = None

    def release(self) -> None:
        """Have the daemon release the state, and wait for it. Does nothing while an answer is due
        (a signal ended this process): closing the connection releases it then. May be called
        again."""
        if self.open and self._daemon.waiting is None:
            self.open = False
            with suppress(ToastError):  # the daemon is gone, and holds nothing
                self._engine.hold_report(self._daemon.ask("release", {}))


def _went_away() -> UnavailableError:
    return UnavailableError("the daemon went away", hint="--no-daemon does without it")


def _path_of(session: Session | None) -> str | None:
    """Return the path as sent to the daemon. Raises UsageError if it is not UTF-8."""
    if session is None:
        return None
    path = os.path.abspath(session.path)
    try:
        path.encode()
    except UnicodeEncodeError as error:
        raise UsageError(
            f"the daemon cannot be told of {path!r}: it is not UTF-8",
            hint="--no-daemon does without it",
        ) from error
    return path
