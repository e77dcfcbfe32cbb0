"""The daemon's side of an attached run: each op with the embedded model, sessions, and the end."""

from __future__ import annotations

import base64
import os
import threading
from pathlib import Path

import numpy as np
import pytest

from tests.model.attached_client import PROMPT, Client
from toastkit.daemon.attached import KEY
from toastkit.errors import BusyError, DataError, UnavailableError, UsageError
from toastkit.session.directory import Session
from toastkit.session.lock import WriterLock
from toastkit.store.ledger import CACHE


def values_of(reply: dict) -> np.ndarray:
    return np.frombuffer(base64.b64decode(reply["logits"]), "<f4")


def free(path: Path) -> bool:
    """Whether nobody has the lock of a session."""
    try:
        WriterLock.acquire(path).release()
    except BusyError:
        return False
    return True


# ----------------------------------------------------------------------------------------- a run


@pytest.mark.parametrize("size", [1000, 4])
def test_logits_are_those_of_the_engine(client: Client, size: int) -> None:
    engine = client.service.engine
    state, _ = engine.restore(None, PROMPT)
    for _ in engine.reading(state, PROMPT, lambda: size):
        pass
    assert client.restore(PROMPT) == {"cached": 0, "logits": None}
    reply = client.read(PROMPT, size)
    assert np.array_equal(values_of(reply), state.values())
    for token in (5, 6, 7):
        engine.consume(state, token)
        assert np.array_equal(values_of(client.op("step", token=token)), state.values())
    assert client.op("commit") == {} and client.op("release") == {}


def test_where_passes_end(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Early while others answer; and before the last token."""
    client.restore(PROMPT)
    with monkeypatch.context() as patch:
        patch.setattr(type(client.service), "slice_size", lambda self: 3)
        assert client.op("read", ids=PROMPT[:7])["held"] == 3
    assert client.op("read", ids=PROMPT[3:7])["held"] == 7
    assert client.op("read", ids=PROMPT[7:]) == {"held": 9, "logits": None}
    last = client.op("read", ids=PROMPT[9:])
    assert last["held"] == 10 and values_of(last).shape == (4096,)


def test_what_attach_tells(client: Client) -> None:
    client = Client(client.service, client.preparer)
    told = {"vocab": 4096, "context": 8192, "device": "cpu", "dtype": "float32", "chunk": 256,
            "resident": "all", "counts": []}  # fmt: skip
    assert client.attach() == told
    assert client.attach(dtype=None) == told and len(client.channel.connection.on_close) == 1
    assert client.attach(device="auto")["device"] == "cpu"
    assert client.attach(kv_bits=32) == told  # of activations in float32


# -------------------------------------------------------------------------------------- sessions


def test_a_session_is_written_under_the_lock_that_was_lent(client: Client, tmp_path: Path) -> None:
    with Session.open(tmp_path / "s", client.preparer.fingerprint) as session:
        client.restore(PROMPT, session)
        last = client.read(PROMPT)
        client.op("commit")
        client.op("step", token=5)
        client.op("commit")
        client.op("release")
    with Session.open(tmp_path / "s", client.preparer.fingerprint) as session:
        assert session.tokens == [*PROMPT, 5]
        # crumb has recurrent layers: it is resumed at its end or not at all
        assert client.restore([*PROMPT, 5, 6], session)["cached"] == 11
        whole = client.restore([*PROMPT, 5], session)
        assert whole["cached"] == 11 and not np.array_equal(values_of(whole), values_of(last))
    forked = client.restore([*PROMPT, 5, 7], source=str(tmp_path / "s"))
    assert forked["cached"] == 11
    assert free(tmp_path / "s")


def test_the_lock_is_shared_until_both_let_go(client: Client, tmp_path: Path) -> None:
    """Its holder is the one who lent it."""
    session = Session.open(tmp_path / "s", client.preparer.fingerprint)
    (tmp_path / "s" / "lock").write_text("4711\n")
    client.restore(PROMPT, session)
    assert (tmp_path / "s" / "lock").read_text() == "4711\n"
    client.read(PROMPT)
    client.op("commit")
    session.close()
    assert not free(tmp_path / "s")  # the daemon may be writing it
    client.op("release")
    assert free(tmp_path / "s")


def test_a_run_that_the_daemon_ends_is_in_its_session(client: Client, tmp_path: Path) -> None:
    with Session.open(tmp_path / "s", client.preparer.fingerprint) as session:
        client.restore(PROMPT, session)
        client.read(PROMPT)
        client.op("step", token=5)
        client.service.end_attached(UnavailableError("no more"))
    assert client.restore([*PROMPT, 5], source=str(tmp_path / "s"))["cached"] == len(PROMPT) + 1
    client.op("step", token=7)


@pytest.mark.parametrize("way", ["release", "restore", "hang up", "hang up at work", "cancel"])
def test_every_end_frees_the_session(client: Client, tmp_path: Path, way: str) -> None:
    session = Session.open(tmp_path / "s", client.preparer.fingerprint)
    client.restore(PROMPT, session)
    client.read(PROMPT)
    client.op("commit")
    assert client.service.attached and client.service.engine.ledger.of(CACHE) > 0
    assert session.lock is not None
    session.lock.release()  # what becomes of a process that is killed
    if way == "release":
        client.op("release")
    elif way == "restore":
        client.restore(PROMPT)
    elif way == "hang up":
        client.hang_up()
        assert free(tmp_path / "s")  # before the worker has had time
        assert client.service.attached
        client.jobs.pop()()
    elif way == "hang up at work":
        with client.channel.connection.store[KEY].at_work:
            client.hang_up()
            assert not free(tmp_path / "s")
        client.jobs.pop()()
    else:
        client.service.end_attached(UnavailableError("no more"))
        for op, fields in (("step", {"token": 5}), ("commit", {})):
            with pytest.raises(UnavailableError, match="no more"):
                client.op(op, **fields)
    assert free(tmp_path / "s")
    assert (way == "restore") == bool(client.service.attached)
    session.close()


def test_an_unborn_or_ephemeral_session_is_not_ours_to_remove(client: Client) -> None:
    with Session.create_ephemeral(client.preparer.fingerprint) as session:
        client.restore(PROMPT, session)
        client.op("release")
        assert session.path.is_dir() and client.restore(PROMPT, session)["cached"] == 0
    assert not session.path.exists()


def test_locks_that_are_none(client: Client, tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with Session.open(tmp_path / "s", client.preparer.fingerprint) as session:
        assert session.lock is not None
        for fds, kind in (
            ((), UsageError),
            ((os.dup(session.lock.fileno()), os.dup(session.lock.fileno())), UsageError),
            ((os.open(tmp_path, os.O_RDONLY),), DataError),
            ((os.open(tmp_path / "s" / "lock", os.O_RDWR),), BusyError),  # it holds nothing
        ):
            before = len(os.listdir("/dev/fd"))
            with pytest.raises(kind):
                client.op("restore", fds, session=path, source=None, ids=PROMPT)
            assert len(os.listdir("/dev/fd")) == before - len(fds)
        assert client.service.attached == []


# ------------------------------------------------------------------------------------ the daemon


def test_a_bug_ends_the_run_and_no_other(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    client.restore(PROMPT)
    monkeypatch.setattr(type(client.service), "slice_size", lambda self: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        client.op("read", ids=PROMPT)
    assert client.service.attached == []
    monkeypatch.undo()
    client.restore(PROMPT)
    assert client.read(PROMPT)["logits"]


def test_the_state_outlives_the_weights(client: Client) -> None:
    client.restore(PROMPT)
    client.read(PROMPT)
    expected = values_of(client.op("step", token=5))  # and one more is looked ahead to
    state = client.channel.connection.store[KEY].state
    client.service.unplug_attached()
    assert client.service.attached == [] and client.channel.connection.store[KEY].service is None
    assert state.ahead is None  # its graph would keep the weights
    first = values_of(client.op("step", token=6))
    assert client.service.attached == [client.channel.connection.store[KEY]]
    client.restore(PROMPT)
    client.read(PROMPT)
    assert np.array_equal(values_of(client.op("step", token=5)), expected)
    assert np.array_equal(values_of(client.op("step", token=6)), first)


def test_another_model_has_taken_the_place(client: Client) -> None:
    client.restore(PROMPT)

    class Other:
        fingerprint = "0" * 32
        files = client.preparer.files

    client.preparer = Other()
    with pytest.raises(UnavailableError, match="the daemon runs crumb now"):
        client.op("read", ids=PROMPT)
    assert client.service.attached == []


def test_nobody_waits_for_it_any_more(client: Client) -> None:
    client.channel.gone = True
    with pytest.raises(IndexError):  # no reply, and nothing is done
        client.restore(PROMPT)
    assert client.service.attached == [] and client.loaded == 1


def test_hanging_up_from_another_thread(client: Client, tmp_path: Path) -> None:
    """The front's thread touches no array and never waits for the worker."""
    with Session.open(tmp_path / "s", client.preparer.fingerprint) as session:
        client.restore(PROMPT, session)
        client.read(PROMPT)
        state = client.channel.connection.store[KEY].state
        with client.channel.connection.store[KEY].at_work:
            thread = threading.Thread(target=client.hang_up)
            thread.start()
            thread.join(10)
            assert not thread.is_alive()
        assert client.channel.connection.store[KEY].state is state
        client.jobs.pop()()
        assert client.channel.connection.store[KEY].state is None
