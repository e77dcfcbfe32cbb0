"""Life cycle of the daemon's process: it has a socket first, then a model, and ends with a drain.

first SIGTERM, SIGINT or stop   no more connections; active requests finish, within a time limit
second                          active requests are cancelled
third                           exit at once
SIGHUP                          reload the model, reopen the audit log
SIGUSR1                         release device memory, if any can be

Before the model is loaded, the first signal ends the process.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any

from toastkit.base_directories import runtime_directory
from toastkit.daemon import activation
from toastkit.daemon.audit import Audit
from toastkit.daemon.background import die
from toastkit.daemon.listening import SocketFile, address_of
from toastkit.daemon.paths import make_private
from toastkit.daemon.pidfile import Pidfile
from toastkit.daemon.server import Server
from toastkit.daemon.service_settings import Limits
from toastkit.errors import BusyError, ToastError

if TYPE_CHECKING:
    from toastkit.daemon.worker import Worker

LOOK_SECONDS = 30.0  # between checks that the socket still exists, without requests
WATCH_SECONDS = 0.05  # between checks for the end of a drain
CANCEL_SECONDS = 5.0  # for cancelled requests to end
FLUSH_SECONDS = 2.0  # for clients to read the last replies
_NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass(frozen=True)
class Settings:
    """socket, pidfile: paths. say: prints one line. announce: report readiness. verbose: report
    what the daemon waits for. debug: report why connections are closed. audit: closed at the end.
    on_ready: called once the model is loaded, for the process that waits for it. memory_warnings:
    treat SIGUSR1 as one; otherwise it is not handled."""

    socket: str
    pidfile: str
    say: Callable[[str], None]
    limits: Limits
    drain_seconds: float
    announce: bool
    verbose: bool
    debug: bool
    audit: Audit | None
    on_ready: Callable[[], None] | None
    memory_warnings: bool


def serve(settings: Settings, make_worker: Callable[[], Worker]) -> int:
    """Run the daemon in this process, on the main thread, until told to end; return the exit code.

    Raises BusyError if a daemon has the socket already, CannotCreateError if it cannot be created,
    what loading the model raises, and ToastError when the worker has died.
    """
    signals = Signals()
    life = Life(settings, signals)
    try:
        signals.install(settings.memory_warnings)
        return life.run(make_worker)
    except Ended as end:
        life.close()
        if life.loading:
            die(end.code)  # the thread that loads the model cannot be stopped
        return end.code
    finally:
        life.close()
        signals.restore()


class Ended(BaseException):
    """A signal that ends the process before it is ready. code: exit code."""

    def __init__(self, code: int):
        self.code = code


class Signals:
    """Signals received. ends: those that end the daemon, in order. hung_up, warned: SIGHUP or
    SIGUSR1 came, and nobody has acted on it yet. graceful: only record them, up to the third
    that ends."""

    def __init__(self) -> None:
        self.ends: list[int] = []
        self.hung_up = self.warned = self.graceful = False
        self._before: dict[int, Any] = {}

    def install(self, memory_warnings: bool) -> None:
        """Install the handlers, except for signals that are ignored, by nohup for instance."""
        for number in (*_NUMBERS, *([signal.SIGUSR1] if memory_warnings else [])):
            before = signal.getsignal(number)
            if before is not signal.SIG_IGN or number == signal.SIGTERM:
                self._before[number] = before
                signal.signal(number, self._note)
        self._before[signal.SIGPIPE] = signal.signal(signal.SIGPIPE, signal.SIG_IGN)

    def restore(self) -> None:
        """Restore the previous handlers."""
        while self._before:
            number, before = self._before.popitem()
            signal.signal(number, before)

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Defer the end until the body is done, then raise Ended if one was requested."""
        self.graceful = True
        yield
        self.graceful = False
        if self.ends:
            raise Ended(self.code)

    @property
    def code(self) -> int:
        """The exit code for the first of them: ending on request is no failure; Ctrl-C is reported
        to the shell."""
        return 130 if self.ends and self.ends[0] == signal.SIGINT else 0

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            self.hung_up = True
            return
        if number == signal.SIGUSR1:
            self.warned = True
            return
        self.ends.append(number)
        if len(self.ends) > 2:
            die(128 + number)
        if not self.graceful and len(self.ends) == 1:
            raise Ended(self.code)


class Life:
    """One daemon. loading: the worker's thread is loading the model."""

    def __init__(self, settings: Settings, signals: Signals):
        self._settings = settings
        self._signals = signals
        self._pidfile: Pidfile | None = None
        self._file: SocketFile | None = None
        self._listeners: list[socket.socket] = []
        self._server: Server | None = None
        self._wakeup: int | None = None
        self._stop_asked = self._cancelled = False
        self.loading = False

    def run(self, make_worker: Callable[[], Worker]) -> int:
        """Run the daemon, from its socket to its exit code."""
        with self._signals.noted():  # or what has just been created would be left behind
            self._take_place()
        worker = make_worker()
        server = self._server = Server(
            self._listeners, worker, self._settings.limits,
            on_stop=self._stop, on_reload=lambda: self._reload(worker),
            debug=self._settings.say if self._settings.debug else None,
        )  # fmt: skip
        worker.notify = server.wake
        self._wakeup = signal.set_wakeup_fd(server.wake_fd, warn_on_full_buffer=False)
        self.loading = True
        self._explain("loading the model")
        worker.start()
        self._signals.graceful = True
        self.loading = False
        self._signals.hung_up = False  # what it asked for has just been done
        try:
            self._announce(worker)
            self._serve(server, worker)
            self._drain(server, worker)
            self._flush(server)
        except BaseException:
            with suppress(Exception):  # save states; report the first failure
                worker.close()
            raise
        self._explain("saving conversations")
        worker.close()
        return self._signals.code

    def _explain(self, what: str) -> None:
        if self._settings.verbose:
            self._settings.say(what)

    # ------------------------------------------------------------------------------ beginning

    def _take_place(self) -> None:
        """Take the pidfile and socket, or the sockets of the service manager."""
        settings = self._settings
        inherited = activation.inherited_sockets()
        own = [settings.pidfile] if inherited else [settings.pidfile, settings.socket]
        if any(os.path.dirname(path) == runtime_directory() for path in own):
            make_private(runtime_directory())
        try:
            self._pidfile = Pidfile.take(settings.pidfile)
        except BusyError as error:
            if not os.path.lexists(settings.socket):
                error.hint = "it is ending, for its socket is gone"
            raise
        if inherited:
            self._listeners = inherited
        else:
            self._file = SocketFile.make(settings.socket)
            self._listeners = [self._file.socket]

    def _announce(self, worker: Worker) -> None:
        status = worker.status()
        where = " and ".join(address_of(listener) for listener in self._listeners)
        what = f"{status.get('model')} on the {status.get('device')}, listening on {where}"
        if self._settings.announce:
            self._settings.say(what)
        activation.notify("READY=1", f"STATUS={what}", f"MAINPID={os.getpid()}")
        if self._settings.on_ready is not None:
            self._settings.on_ready()

    # -------------------------------------------------------------------------------- serving

    def _serve(self, server: Server, worker: Worker) -> None:
        """Serve until a signal or a request ends it, or the socket is gone (a logout removes it)
        and nobody could reach the daemon. Connected clients are served first."""
        while not (self._stop_asked or self._signals.ends):
            if self._file is not None and self._file.gone and not server.connected:
                self._settings.say(f"{self._file.path} is gone: ending")
                return
            server.step(LOOK_SECONDS)
            self._check(server, worker)
            if self._signals.hung_up:
                self._signals.hung_up = False
                try:
                    self._reload(worker)
                except ToastError as error:
                    self._settings.say(f"cannot reload: {error.message}")

    def _stop(self) -> None:
        self._stop_asked = True

    def _reload(self, worker: Worker) -> None:
        activation.notify_reloading()
        try:
            if self._settings.audit is not None:
                self._settings.audit.reopen()
            worker.reload()
        finally:
            activation.notify("READY=1")

    def _check(self, server: Server, worker: Worker) -> None:
        """Pass memory warnings on. Raises ToastError if the worker's thread has died: a daemon that
        accepts requests nobody will answer is worse than none."""
        if self._signals.warned:
            self._signals.warned = False
            worker.memory_warning()
        failure = worker.failure
        if failure is None:
            return
        server.fail_all(ToastError("the daemon's worker has died"))
        self._flush(server)
        text = f"the worker has died: {type(failure).__name__}: {failure}".replace("\n", " ")
        raise ToastError(text, hint="--debug shows where") from failure

    # --------------------------------------------------------------------------------- ending

    def _drain(self, server: Server, worker: Worker) -> None:
        """Let active requests finish; cancel them on timeout or a second signal."""
        activation.notify("STOPPING=1")
        self._explain(f"ending, in {self._settings.drain_seconds:g} s at most")
        worker.drain()
        self._remove_socket()
        server.stop_listening()
        deadline = time.monotonic() + self._settings.drain_seconds
        while not worker.idle():
            server.step(WATCH_SECONDS)
            self._check(server, worker)
            hurried = len(self._signals.ends) > 1 and not self._cancelled
            if time.monotonic() < deadline and not hurried:
                continue
            if self._cancelled:  # a hung model step cannot be ended otherwise
                self._settings.say("a cancelled request does not end: leaving it")
                self.close()
                die(70)
            self._explain("cancelling what is still under way")
            worker.cancel_all()
            self._cancelled = True
            deadline = time.monotonic() + CANCEL_SECONDS

    def _flush(self, server: Server) -> None:
        """Give clients a moment to read the last replies. An attached run that was cancelled is
        told so by the reply to its next op."""
        deadline = time.monotonic() + FLUSH_SECONDS
        server.step(0)
        while time.monotonic() < deadline and (
            server.unsent or (self._cancelled and server.attached)
        ):
            server.step(WATCH_SECONDS)

    def _remove_socket(self) -> None:
        if self._file is not None:
            self._file.remove()

    def close(self) -> None:
        """Remove and close everything, connections last: a client that waits for its connection to
        end, as `toasted stop` does, then finds the socket free. Idempotent."""
        self._remove_socket()
        if self._pidfile is not None:
            self._pidfile.remove()
        if self._settings.audit is not None:
            self._settings.audit.close()
        if self._wakeup is not None:  # the descriptor is about to be closed
            signal.set_wakeup_fd(self._wakeup)
            self._wakeup = None
        if self._server is not None:
            self._server.close()
            self._server = None
        for listener in self._listeners:
            listener.close()
        self._listeners = []
