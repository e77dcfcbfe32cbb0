"""What somebody put in the place of a file is refused in one line: it is neither followed, nor
waited for, nor written to."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from session_states import MODEL, commit

from toastkit.client import chats
from toastkit.daemon.audit import Audit
from toastkit.daemon.pidfile import Pidfile
from toastkit.daemon.spill import Spill
from toastkit.errors import Misplaced, ToastError
from toastkit.gears import thresholds
from toastkit.private_files import read_file, replace_file
from toastkit.session import gear_state
from toastkit.session.directory import Session
from toastkit.session.feed import FeedReader, FeedWriter
from toastkit.session.lock import WriterLock
from toastkit.session.ring import RingReader, RingWriter
from toastkit.session.run import RunDirectory, feed_of, ring_of
from toastkit.session.upkeep import make_ephemeral

HANG_SECONDS = 10
SECRET = b"nobody's business\n"
PROMPT = list(range(300))


@pytest.fixture(autouse=True)
def no_hang() -> Iterator[None]:
    """Whoever waits for a FIFO waits no longer than this."""

    def give_up(number, frame) -> None:
        pytest.fail("it hangs")

    former = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(HANG_SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, former)


@pytest.fixture
def victim(tmp_path: Path) -> Iterator[Path]:
    """A file that belongs to somebody else, as far as a session is concerned; it stays as it is."""
    path = tmp_path / "victim"
    path.write_bytes(SECRET)
    yield path
    assert path.read_bytes() == SECRET and not (tmp_path / "nowhere").exists()


def a_socket(path: Path, victim: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        os.chdir(path.parent)  # a path of any length
        made.bind(path.name)


def another_users(path: Path, victim: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can make a file another user's")
    path.write_bytes(SECRET)
    os.chown(path, 12345, -1)


PLANTS: dict[str, Callable[[Path, Path], object]] = {
    "link": lambda path, victim: path.symlink_to(victim),
    "dangling link": lambda path, victim: path.symlink_to(victim.parent / "nowhere"),
    "link to a device": lambda path, victim: path.symlink_to("/dev/zero"),
    "FIFO": lambda path, victim: os.mkfifo(path),
    "directory": lambda path, victim: path.mkdir(),
    "socket": a_socket,
    "hard link": lambda path, victim: os.link(victim, path),
    "another user's": another_users,
}
plants = pytest.mark.parametrize("plant", PLANTS.values(), ids=PLANTS)


def planted(path: Path, victim: Path, plant: Callable[[Path, Path], object]) -> None:
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    here = os.getcwd()
    try:
        plant(path, victim)
    finally:
        os.chdir(here)


def refused(action: Callable[[], object], *codes: int) -> None:
    with pytest.raises(ToastError) as caught:
        action()
    assert caught.value.code in codes and "\n" not in caught.value.message


@plants
@pytest.mark.parametrize(
    "name", ["session.msgpack", "tokens.u32", "cache.bin", "logits.f32", "lock"]
)
def test_a_file_of_a_session(tmp_path: Path, victim: Path, name: str, plant) -> None:
    path = tmp_path / "s"
    with Session.open(path, MODEL) as session:
        commit(session, PROMPT)
    planted(path / name, victim, plant)
    kept = sorted(os.listdir(path))

    def answer() -> None:
        with Session.open(path, MODEL) as session:
            session.logits()
            commit(session, [*PROMPT, 1])

    def look() -> None:
        with Session.open(path, MODEL, write=False) as session:
            session.logits()
            session.restore_layers(300, lambda layers, load: [load(t) for t in layers[0].tensors])

    if plant is not PLANTS["hard link"]:
        refused(answer, 65, 73)
    elif name != "session.msgpack":  # a header is replaced, and its other name with it left alone
        refused(answer, 73)
    if name != "lock" and plant is not PLANTS["hard link"]:
        refused(look, 65)
    assert sorted(os.listdir(path)) == kept  # a broken session is not taken for one never begun


@plants
@pytest.mark.parametrize("name", ["session.msgpack.tmp", "tokens.u32", "cache.bin", "logits.f32"])
def test_the_first_commit(tmp_path: Path, victim: Path, name: str, plant) -> None:
    """Into files that were there before the session: refused, but for the temporary one, which
    makes room."""
    path = tmp_path / "s"
    planted(path / name, victim, plant)
    if name == "session.msgpack.tmp" and plant is not PLANTS["directory"]:
        with Session.open(path, MODEL) as session:
            commit(session, PROMPT)
        assert not os.path.lexists(path / name)
    else:
        with Session.open(path, MODEL) as session:
            refused(lambda: commit(session, PROMPT), 65, 73)
        assert os.listdir(path) == [name]  # that stays, and what was made beside it goes


@plants
def test_what_the_gears_left(tmp_path: Path, victim: Path, plant) -> None:
    """No part of a commit: what cannot be read is not there, and saving puts it out of the way."""
    for name in (gear_state.GEAR_FILE, f"{gear_state.GEAR_FILE}.{os.getpid()}.tmp"):
        planted(tmp_path / "s" / name, victim, plant)
    assert gear_state.load(tmp_path / "s", 1, 2) is None
    if plant is PLANTS["directory"]:
        return refused(lambda: gear_state.save(tmp_path / "s", 1, 2, {}), 73)
    gear_state.save(tmp_path / "s", 1, 2, {"a": 1})
    assert gear_state.load(tmp_path / "s", 1, 2) == {"a": 1}


def test_runs_that_lie_elsewhere(tmp_path: Path) -> None:
    """A link in the place of runs, or of one of them: nothing is made there, and nothing swept."""
    outside = tmp_path / "outside"
    (outside / "work").mkdir(parents=True)
    (outside / "alive").write_bytes(b"")
    for folder in (outside / "work", outside):
        os.utime(folder, (0, 0))
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "runs").symlink_to(outside)
    refused(lambda: RunDirectory.create(tmp_path / "s"), 73)
    (tmp_path / "s" / "runs").unlink()
    (tmp_path / "s" / "runs").mkdir()
    (tmp_path / "s" / "runs" / "dead").symlink_to(outside)
    refused(lambda: RunDirectory.join(tmp_path / "s" / "runs" / "dead"), 65)
    RunDirectory.create(tmp_path / "s").remove()
    assert sorted(os.listdir(outside)) == ["alive", "work"]


def test_an_ephemeral_session_that_lies_elsewhere(state_home: Path, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    root = make_ephemeral()[0].parent
    (root / ".ephemeral-0123456789abcdef").symlink_to(tmp_path / "outside")
    os.utime(root / ".ephemeral-0123456789abcdef", (0, 0), follow_symlinks=False)
    make_ephemeral()
    assert os.listdir(tmp_path / "outside") == []


@plants
def test_the_files_of_a_run(tmp_path: Path, victim: Path, plant) -> None:
    run = RunDirectory.create(tmp_path / "s")
    planted(ring_of(run.path), victim, plant)
    if plant is not PLANTS["hard link"]:
        refused(lambda: RingReader(ring_of(run.path)), 65)
    refused(lambda: RingWriter(ring_of(run.path), 4), 65, 73)
    feed_of(run.path).unlink()
    if plant is not PLANTS["FIFO"]:
        planted(feed_of(run.path), victim, plant)
        refused(lambda: FeedReader(feed_of(run.path)), 65)
        refused(lambda: FeedWriter(feed_of(run.path)), 65)
    planted(run.path / "alive", victim, plant)
    code = 73 if plant is PLANTS["hard link"] else 65
    refused(lambda: RunDirectory.join(run.path), code)


def test_a_feed_by_a_link(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "feed").symlink_to("fifo")
    refused(lambda: FeedReader(tmp_path / "feed"), 65)


@plants
def test_a_lock_that_is_held_is_named_without_waiting(tmp_path: Path, victim: Path, plant) -> None:
    """Who holds it is read from the file, which may have become something else meanwhile."""
    (tmp_path / "s").mkdir()
    lock = WriterLock.acquire(tmp_path / "s")
    planted(tmp_path / "s" / "lock", victim, plant)
    refused(lambda: WriterLock.acquire(tmp_path / "s"), 73)
    refused(lambda: WriterLock.from_fd(tmp_path / "s", os.dup(lock.fileno())), 65)


@plants
def test_files_of_the_daemon_and_its_client(
    state_home: Path, tmp_path: Path, victim: Path, plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    planted(tmp_path / "d" / "pid", victim, plant)
    refused(lambda: Pidfile.take(str(tmp_path / "d" / "pid")), 73)
    planted(tmp_path / "d" / "audit", victim, plant)
    refused(lambda: Audit(str(tmp_path / "d" / "audit"), False, print), 73)

    if plant is PLANTS["hard link"]:
        return  # what is only read, or replaced, may have another name
    chat = chats.named_chat("x")
    planted(chat.path, victim, plant)
    planted(chat.path.with_name(chats.LAST), victim, plant)
    refused(lambda: chats.named_chat("x"), 65)
    refused(chats.last_chat, 65)
    planted(thresholds.path("ab" * 16), victim, plant)
    refused(lambda: thresholds.load("ab" * 16), 65)


def test_a_conversation_that_lies_elsewhere(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    spill = Spill(MODEL, "float32", 1 << 20)
    with Session.open(tmp_path / "outside", "of another model") as session:
        commit(session, PROMPT)
    spill.root.mkdir(parents=True)
    (spill.root / f"{7:016x}").symlink_to(tmp_path / "outside")
    assert spill.scan() == []
    spill.budget = 0
    assert spill.prune() == []
    assert (tmp_path / "outside" / "session.msgpack").exists()


def test_a_temporary_name_that_was_planted(tmp_path: Path, victim: Path) -> None:
    (tmp_path / "file.tmp").symlink_to(victim)
    replace_file(tmp_path / "file", b"new", sync=False)
    assert read_file(tmp_path / "file", 9) == b"new"
    (tmp_path / "file").unlink()
    (tmp_path / "file").symlink_to(victim)
    with pytest.raises(Misplaced, match="file is a symbolic link"):
        read_file(tmp_path / "file", 99)
    replace_file(tmp_path / "file", b"new", sync=False)
    assert read_file(tmp_path / "file", 9) == b"new"


def test_a_session_that_the_user_names_by_a_link(tmp_path: Path) -> None:
    """Links are the user's to make: only within a session there are none."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    with Session.open(tmp_path / "link", MODEL) as session:
        commit(session, PROMPT)
        RunDirectory.create(session.path).remove()
    with Session.open(tmp_path / "real", MODEL, create=False) as session:
        assert session.tokens == PROMPT
