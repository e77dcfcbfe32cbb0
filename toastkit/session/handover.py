"""Pass the writer's lock from prefill to decode without a gap, over a run's socket `handover`. The
protocol is in toast-session(5): "?", "L" with the descriptor of the lock, "!"; and ".", by which a
reader of prefill's stdout says that it is no decode, and has none behind it.

flock belongs to the open file description, so it is never free in between. The server keeps its
descriptor until it has seen "!", and a client that dies or gives up before closes its own with the
connection: exactly one side ends up with the lock. Both sides have the same user: the run's
directory has mode 0700, and on Linux the server checks the peer's user id as well.
"""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from toastkit.errors import ToastError, UnavailableError, from_os_error
from toastkit.private_files import open_directory
from toastkit.session.lock import WriterLock
from toastkit.session.run import HANDOVER_FILE
from toastkit.wire import peer_of

MAX_ADDRESS_BYTES = 100  # sun_path has 108 bytes on Linux and 104 on macOS
CONNECT_SECONDS = 5.0
RETRY_SECONDS = 0.005
ASK, LOCK, DONE, LAST = b"?", b"L", b"!", b"."
WORD_BYTES = 64  # the longest is LAST with a file's identity


@contextmanager
def _address(run_path: Path, name: str) -> Iterator[str]:
    """A path of a socket in the run's directory that fits into sun_path: as it is, or through a
    temporary symbolic link."""
    plain = os.path.join(run_path, name)
    if len(os.fsencode(plain)) <= MAX_ADDRESS_BYTES:
        yield plain
        return
    import tempfile

    with tempfile.TemporaryDirectory(prefix="toast") as directory:
        link = os.path.join(directory, "r")
        os.symlink(os.path.abspath(run_path), link)
        yield os.path.join(link, name)


class HandoverServer:
    """Listens from the start, so create it before the run's head frame is sent.

    run_path: the run's directory. lock: held by this process until a client has it. unwanted: the
    reader of stdout has said that no client will come. Raises CannotCreateError, IOFailure.
    """

    def __init__(self, run_path: Path | str, lock: WriterLock):
        self._path = Path(run_path)
        self._lock = lock
        self.unwanted = False
        self._client: socket.socket | None = None
        self._waiting: list[socket.socket] = []
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        unborn = f"{HANDOVER_FILE}.new"
        try:
            with _address(self._path, unborn) as address:
                self._listener.bind(address)
            os.chmod(self._path / unborn, 0o600)
            self._listener.listen(4)
            # Named only once it listens: a refused client then knows that the server is dead.
            os.rename(self._path / unborn, self._path / HANDOVER_FILE)
        except OSError as error:
            self._listener.close()
            raise from_os_error(
                error, f"cannot make a socket in {self._path}", creating=True
            ) from error
        self._listener.setblocking(False)

    def offer(self, timeout_seconds: float, watch_fd: int | None = None) -> bool:
        """Wait for a client that asks and give it the lock; this process's descriptor is then
        closed.

        Returns False on timeout, or if the reader of watch_fd, a pipe such as stdout, has gone or
        wants nothing; the lock is then still held here. A client that has connected is waited for
        without a limit: it may be loading a large model before it asks.
        """
        deadline = time.monotonic() + timeout_seconds
        while True:
            limit = None if self._waiting else deadline
            ready = _poll([self._listener, *self._waiting], watch_fd, limit)
            if ready is None:
                return False
            if self._listener.fileno() in ready:
                self._accept()
            for client in [c for c in self._waiting if c.fileno() in ready]:
                self._waiting.remove(client)
                if self._give(client, watch_fd):
                    self._lock.release()
                    self._client = client
                    return True
                client.close()
                if self.unwanted:
                    return False

    def _accept(self) -> None:
        try:
            client, _ = self._listener.accept()
        except OSError:
            return  # it went away again
        # On other systems the directory's mode must do.
        if not hasattr(socket, "SO_PEERCRED") or peer_of(client).uid == os.geteuid():
            client.setblocking(True)
            self._waiting.append(client)
        else:
            client.close()

    def _give(self, client: socket.socket, watch_fd: int | None) -> bool:
        """True if this client asked, was sent the lock and has confirmed it. There is no timeout
        for the confirmation: a client that asked receives it, dies, or gives up. A client that
        declines is believed only if its stdin is the other end of watch_fd: behind a tee, another
        reader may be a decode."""
        try:
            word = client.recv(WORD_BYTES)
            if word[:1] == LAST and watch_fd is not None:
                self.unwanted = word[1:] == _identity(watch_fd)
            if word != ASK:
                return False
            socket.send_fds(client, [LOCK], [self._lock.fileno()])
            return client.recv(1) == DONE
        except OSError:
            return False

    def wait_done(self, timeout_seconds: float) -> bool:
        """After a successful offer, wait until the client has closed the connection or died.
        Returns False on timeout."""
        if self._client is None:
            return True
        return _poll([self._client], None, time.monotonic() + timeout_seconds) is not None

    def close(self) -> None:
        """Close the socket; the caller releases the lock if it is still held here."""
        for connection in (*self._waiting, self._listener, self._client):
            if connection is not None:
                connection.close()
        self._waiting = []
        with suppress(OSError):  # the run's directory may already be gone
            os.unlink(self._path / HANDOVER_FILE)


def _poll(
    connections: list[socket.socket], watch_fd: int | None, deadline: float | None
) -> set[int] | None:
    """Descriptors with something to read, or None on timeout or if watch_fd's reader has gone."""
    poll = select.poll()
    for connection in connections:
        poll.register(connection.fileno(), select.POLLIN)
    if watch_fd is not None:
        poll.register(watch_fd, 0)  # errors and hang-ups are reported anyway
    left = None if deadline is None else max(0.0, deadline - time.monotonic())
    events = dict(poll.poll(None if left is None else left * 1000))
    if not events or watch_fd in events:
        return None
    return set(events)


def _identity(fd: int) -> bytes:
    """The identity of a descriptor's file: both ends of a pipe have the same. Raises OSError."""
    status = os.fstat(fd)
    return f"{status.st_dev}:{status.st_ino}".encode()


def decline(run_path: Path | str) -> None:
    """Tell the prefill of a run, if there is one, that this process reads its output from stdin to
    the end, and that nobody behind it will ask for the session."""
    with suppress(OSError, ToastError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as to:
        os.close(open_directory(run_path))  # checks that it is this user's
        to.setblocking(False)
        with _address(Path(run_path), HANDOVER_FILE) as address:
            to.connect(address)
        to.sendall(LAST + _identity(0))


class HandoverClient:
    """Connect to a run's prefill. Raises UnavailableError if nobody listens for CONNECT_SECONDS.
    session_path: the session whose lock is to come."""

    def __init__(self, run_path: Path | str, session_path: Path):
        self._session_path = Path(session_path)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        deadline = time.monotonic() + CONNECT_SECONDS
        while True:
            try:
                with _address(Path(run_path), HANDOVER_FILE) as address:
                    self._socket.connect(address)
                return
            except OSError as error:
                if not isinstance(error, FileNotFoundError) or time.monotonic() >= deadline:
                    self._socket.close()
                    raise _unreachable(error) from error
            time.sleep(RETRY_SECONDS)

    def receive(self) -> WriterLock:
        """Ask for the lock and wait for it. Raises UnavailableError if prefill has ended without
        handing it over; the connection is then closed."""
        try:
            self._socket.sendall(ASK)
            data, fds, _, _ = socket.recv_fds(self._socket, 1, 1)
        except OSError as error:
            self.close()
            raise _unreachable(error) from error
        if data != LOCK or len(fds) != 1:
            for fd in fds:
                os.close(fd)
            self.close()
            raise UnavailableError("prefill ended without handing over the session")
        lock = WriterLock.from_fd(self._session_path, fds[0])
        with suppress(OSError):  # prefill may just have died; the lock is here
            self._socket.sendall(DONE)
        return lock

    def close(self) -> None:
        """Tell the server that this side is done. Idempotent."""
        self._socket.close()


def _unreachable(error: OSError) -> UnavailableError:
    reason = (error.strerror or str(error)).lower()
    return UnavailableError(f"cannot reach the prefill that holds the session: {reason}")
