"""Where the daemon is: its directory, its socket, its pidfile, what a service manager gives it."""

from __future__ import annotations

import fcntl
import os
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.daemon_front import short_directory
from toastkit import wire
from toastkit.daemon import activation, paths
from toastkit.daemon.listening import SocketFile
from toastkit.daemon.pidfile import Pidfile
from toastkit.errors import BusyError, CannotCreateError, UsageError


@pytest.fixture
def place() -> Iterator[Path]:
    with short_directory() as directory:
        yield directory


def mode(path: Path | str) -> int:
    return stat.S_IMODE(os.lstat(path).st_mode)


def test_where_the_socket_is(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(place))
    assert paths.socket_path() == f"{place}/toastkit/toasted.sock"
    assert paths.pidfile_path(paths.socket_path()) == f"{place}/toastkit/toasted.pid"
    monkeypatch.setenv("TOAST_SOCKET", "some/where")
    assert paths.socket_path() == os.path.abspath("some/where")
    assert paths.pidfile_path("a/b") == "a/b.pid"
    assert paths.socket_path("/x") == "/x"
    monkeypatch.setenv("TOAST_SOCKET", "")
    monkeypatch.setenv("XDG_RUNTIME_DIR", "relative")
    monkeypatch.setenv("TMPDIR", str(place))
    assert paths.socket_path() == f"{place}/toastkit-{os.geteuid()}/toasted.sock"
    assert not list(place.iterdir())
    monkeypatch.delenv("TMPDIR")
    assert os.path.isabs(paths.socket_path())


def test_the_longest_path_works(place: Path) -> None:
    path = f"{place}/".ljust(paths.MAX_SOCKET_BYTES, "x")
    file = SocketFile.make(paths.socket_path(path))
    file.socket.close()
    file.remove()
    with pytest.raises(UsageError, match="at most"):
        SocketFile.make(path + "x")
    for bad in ("", "a\0b", "/" + "x" * paths.MAX_SOCKET_BYTES):
        with pytest.raises(UsageError):
            paths.socket_path(bad)


def test_a_private_directory_is_made_and_accepted(place: Path) -> None:
    directory = str(place / "d")
    paths.make_private(directory)
    assert mode(directory) == 0o700
    paths.make_private(directory)
    with pytest.raises(CannotCreateError, match="cannot make"):
        paths.make_private(str(place / "a" / "b"))


def test_directories_that_others_might_use_are_refused(place: Path, monkeypatch) -> None:
    (place / "open").mkdir()
    (place / "open").chmod(0o755)
    (place / "file").touch()
    (place / "good").mkdir(0o700)
    (place / "link").symlink_to(place / "good")
    for name, problem in (("open", "mode 0755"), ("file", "not a"), ("link", "not a directory")):
        with pytest.raises(CannotCreateError, match=problem):
            paths.make_private(str(place / name))
    assert mode(place / "open") == 0o755
    foreign = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: foreign)
    with pytest.raises(CannotCreateError, match="another user"):
        paths.make_private(str(place / "good"))
    # A client may not even look at what lies there.
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setenv("TMPDIR", str(place))
    (place / f"toastkit-{foreign}").mkdir(0o700)
    with pytest.raises(CannotCreateError, match="another user"):
        paths.socket_path()


def test_the_socket_is_for_its_user_alone(place: Path) -> None:
    path = str(place / "s")
    before = os.umask(0)
    try:
        file = SocketFile.make(path)
        assert os.umask(0) == 0, "the mask is as it was"
    finally:
        os.umask(before)
    assert mode(path) == 0o600
    with pytest.raises(BusyError, match="answers at"):
        SocketFile.make(path)
    client = socket.socket(socket.AF_UNIX)
    client.connect(path)
    client.close()
    file.remove()
    assert not os.path.exists(path)
    file.remove()
    file.socket.close()


def test_a_stale_socket_is_replaced_and_another_one_left_alone(place: Path) -> None:
    path = str(place / "s")
    dead = SocketFile.make(path)
    dead.socket.close()
    new = SocketFile.make(path)
    dead.remove()
    assert os.path.exists(path), "it is no longer the dead one's"
    new.socket.close()
    new.remove()


def test_what_is_no_socket_is_never_deleted(place: Path) -> None:
    (place / "file").write_text("precious")
    (place / "directory").mkdir()
    (place / "link").symlink_to("nowhere")
    os.mkfifo(place / "fifo")
    for kind in ("file", "directory", "link", "fifo"):
        with pytest.raises(CannotCreateError, match="in the way"):
            SocketFile.make(str(place / kind))
        assert os.path.lexists(place / kind)
    with pytest.raises(CannotCreateError, match="cannot make the socket"):
        SocketFile.make(str(place / "no" / "s"))


def test_one_daemon_a_pidfile(place: Path) -> None:
    path = place / "p"
    path.write_text("123456789\n")  # a crash left it
    first = Pidfile.take(str(path))
    assert path.read_text() == f"{os.getpid()}\n"
    with pytest.raises(BusyError, match=rf"already running \(process {os.getpid()}\)"):
        Pidfile.take(str(path))
    for _ in range(2):
        first.remove()
        assert not path.exists()
    second = Pidfile.take(str(path))
    assert path.read_text() == f"{os.getpid()}\n" and mode(path) == 0o600
    second.remove()


def test_files_that_are_no_pidfiles_are_left_alone(place: Path) -> None:
    (place / "notes").write_text("precious")
    (place / "directory").mkdir()
    os.mkfifo(place / "fifo")
    for name in ("notes", "directory", "fifo", "no/p"):
        with pytest.raises(CannotCreateError):
            Pidfile.take(str(place / name))
    assert (place / "notes").read_text() == "precious"


def test_a_pidfile_that_is_removed_while_one_waits_for_it(place: Path, monkeypatch) -> None:
    """The lock of a file that nobody can find any more is worth nothing."""
    path = str(place / "p")
    lock, calls = fcntl.flock, []

    def removed_meanwhile(fd: int, how: int) -> None:
        if not calls:
            os.unlink(path)
        calls.append(fd)
        lock(fd, how)

    monkeypatch.setattr(fcntl, "flock", removed_meanwhile)
    pidfile = Pidfile.take(path)
    assert len(calls) == 2 and Path(path).read_text() == f"{os.getpid()}\n"
    pidfile.remove()


def test_the_peer_of_a_connection() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        found = wire.peer_of(ours)
        assert found == wire.Peer(os.geteuid(), os.getpid())
        assert wire.may_connect(found) and wire.may_connect(wire.Peer(0, 1))
        assert not wire.may_connect(wire.Peer(os.geteuid() + 1, 1))


def test_variables_for_another_process_mean_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for pid, count in ((os.getpid() + 1, "1"), (os.getpid(), "x"), ("", "1")):
        monkeypatch.setenv("LISTEN_PID", str(pid))
        monkeypatch.setenv("LISTEN_FDS", count)
        assert not activation.is_activated()
        assert activation.inherited_sockets() == []
        assert "LISTEN_PID" not in os.environ and "LISTEN_FDS" not in os.environ


PROBE = """
import os, socket, sys
from toastkit.daemon import activation
from toastkit.errors import UsageError
os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS="1")
{}
assert activation.is_activated()
try:
    (found,) = activation.inherited_sockets()
    print(found.getsockname(), os.get_inheritable(3))
except UsageError as error:
    print(error.message)
"""


@pytest.mark.parametrize(
    ("make", "told"),
    [("os.dup2(0, 3)", "descriptor 3 is no socket"),
     ("s = socket.socketpair()[0]; os.dup2(s.fileno(), 3)", "not a listening Unix stream"),
     ("s = socket.create_server(('127.0.0.1', 0)); os.dup2(s.fileno(), 3)", "not a listening"),
     ("s = socket.socket(1); s.bind('x'); s.listen(); os.dup2(s.fileno(), 3)", "x False")],
)  # fmt: skip
def test_sockets_of_the_service_manager(place: Path, make: str, told: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROBE.format(make)],
        cwd=place, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )  # fmt: skip
    assert told in done.stdout


@pytest.mark.parametrize("abstract", [False, True])
def test_the_service_manager_is_told(place: Path, monkeypatch, abstract: bool) -> None:
    if abstract and sys.platform != "linux":
        pytest.skip("abstract addresses are Linux's")
    name = f"@{place.name}" if abstract else str(place / "n")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind("\0" + name[1:] if abstract else name)
        manager.settimeout(5)
        monkeypatch.setenv("NOTIFY_SOCKET", name)
        activation.notify("READY=1", "STATUS=fine")
        assert manager.recv(100) == b"READY=1\nSTATUS=fine"
        activation.notify_reloading()
        assert manager.recv(100).startswith(b"RELOADING=1\nMONOTONIC_USEC=")
    activation.notify("READY=1")  # nobody listens any more
