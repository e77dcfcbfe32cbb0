"""The state of the gears beside a session's commits: found with its own commit and with no other;
the session does not mind the file."""

from __future__ import annotations

import os
import time
import zlib
from pathlib import Path

import msgpack
import pytest
from session_states import MODEL, commit

from toastkit.errors import CannotCreateError, DataError, IOFailure
from toastkit.frames import End, Head, Logits, Prefilled, pack_ids
from toastkit.gears.selector import GearSelector
from toastkit.session import names
from toastkit.session.directory import Session
from toastkit.session.gear_state import GEAR_FILE, committed, load, save
from toastkit.session.upkeep import prepare
from toastkit.stages.follow import Follower, GearRules

STATE = {"held": 3, "last": None, "more": [0.1, {"x": "y"}]}


@pytest.fixture
def session_dir(state_home: Path) -> Path:
    """A session with one commit, of tokens 0 to 9."""
    path = names.resolve("one")
    with Session.open(path, MODEL) as session:
        commit(session, list(range(10)))
    return path


def checksum(tokens: list[int]) -> int:
    return zlib.crc32(pack_ids(tokens))


def test_the_commit_is_read_without_the_lock(session_dir: Path):
    assert committed(session_dir) == (10, checksum(list(range(10))))
    with Session.open(session_dir, MODEL) as session:
        assert committed(session_dir) == (10, checksum(list(range(10))))
        commit(session, list(range(12)))
        assert committed(session_dir) == (12, checksum(list(range(12))))
        commit(session, [5, 6])
        assert committed(session_dir) == (2, checksum([5, 6]))


def test_where_there_is_no_commit(state_home: Path, session_dir: Path, tmp_path: Path):
    assert committed(tmp_path / "nowhere") is None
    with Session.open(names.resolve("two"), MODEL) as session:
        assert committed(session.path) is None
    (session_dir / names.HEADER_FILE).write_bytes(b"\x80")
    assert committed(session_dir) is None


def test_what_is_saved_is_loaded(session_dir: Path):
    assert load(session_dir, *committed(session_dir)) is None
    selector = GearSelector(4096)
    for entropy in (0.3, 1 / 3, 4.0):
        selector.update(entropy)
    for state in (STATE, {}, selector.state()):
        save(session_dir, *committed(session_dir), state)
        assert load(session_dir, *committed(session_dir)) == state
    resumed = GearSelector.from_state(load(session_dir, *committed(session_dir)))
    assert resumed.update(2.0) == selector.update(2.0)
    assert (session_dir / GEAR_FILE).stat().st_mode & 0o777 == 0o600
    assert [name for name in os.listdir(session_dir) if "gears" in name] == [GEAR_FILE]


def means(session: Path, prompt: Prefilled, *steps: tuple[int, float], **fields) -> list:
    """What a run of that session says of steps, (position, bits)."""
    follower, found = Follower(GearRules()), []
    follower.learn(Head("m", "ab" * 16, 4096, [1], str(session), **fields))
    follower.learn(prompt)
    for position, bits in steps:
        frame = Logits(position, None)
        follower.annotate(frame, bits)
        found.append(frame.mean)
    follower.learn(End("length", len(steps)))
    return found


def test_a_run_goes_on_with_the_entropies_of_the_one_before(session_dir: Path, tmp_path: Path):
    """The last one is not counted twice. Not if the prompt has something new or ends sooner, and
    nothing of a run that is over."""
    gone = {"run": str(tmp_path / "gone")}
    whole, more, less = (
        Prefilled(10, 0, 10, 0.0),
        Prefilled(10, 1, 9, 0.0),
        Prefilled(9, 0, 9, 0.0),
    )
    for prompt, fields, expected in (
        (whole, {}, [5.0, 4.0]), (more, {}, [9.0, 5.5]), (less, {}, [9.0, 5.5]),
        (whole, gone, [9.0, 5.5]),
    ):  # fmt: skip
        last = prompt.n_past  # the logits of a commit's last token may never have been asked for
        assert means(session_dir, more, (last - 1, 1.0), (last, 9.0)) == [1.0, 5.0]
        assert means(session_dir, prompt, (last, 9.0), (last + 1, 2.0), **fields) == expected


def test_the_state_of_another_commit_is_not_taken(session_dir: Path):
    count, crc = committed(session_dir)
    save(session_dir, count, crc, STATE)
    assert load(session_dir, count + 1, crc) is None
    assert load(session_dir, count, crc ^ 1) is None
    with Session.open(session_dir, MODEL) as session:
        commit(session, [*range(9), 99])
    assert committed(session_dir)[0] == count
    assert load(session_dir, *committed(session_dir)) is None


GOOD = {"toastkit": "gears", "count": 10, "crc": 7, "state": {"a": 1}, "later": 1}


@pytest.mark.parametrize(
    "data",
    [b"", b"\xc1", b"\x81", msgpack.packb([1]), msgpack.packb({**GOOD, "toastkit": "session"}),
     msgpack.packb({name: GOOD[name] for name in ("toastkit", "count", "crc")}),
     msgpack.packb({**GOOD, "state": [1]}), msgpack.packb(GOOD) + b"\0",
     msgpack.packb({**GOOD, "state": {1: 2}}), msgpack.packb({**GOOD, "state": {"x": "a" * 70000}}),
     b"\x91" * 60000, b"\xa4\xff\xff\xff\xff", b"\xdd\xff\xff\xff\xff"],
)  # fmt: skip
def test_a_malformed_file_is_no_state(session_dir: Path, data: bytes):
    (session_dir / GEAR_FILE).write_bytes(msgpack.packb(GOOD))
    assert load(session_dir, 10, 7) == {"a": 1}
    (session_dir / GEAR_FILE).write_bytes(data)
    assert load(session_dir, 10, 7) is None


def test_a_state_that_is_too_large_is_refused(session_dir: Path):
    save(session_dir, 10, 7, STATE)
    with pytest.raises(DataError, match="^cannot save the gears of session one: .* at most$"):
        save(session_dir, 10, 7, {"x": "a" * (64 << 10)})
    assert load(session_dir, 10, 7) == STATE
    with pytest.raises(CannotCreateError, match="^cannot save the gears of session gone: "):
        save(names.resolve("gone"), 10, 7, STATE)


def test_a_full_disk_leaves_the_former_state(session_dir: Path, monkeypatch: pytest.MonkeyPatch):
    save(session_dir, 10, 7, STATE)

    def full(*arguments: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(IOFailure, match="no space left on device$"):
        save(session_dir, 10, 7, {})
    assert load(session_dir, 10, 7) == STATE
    assert [name for name in os.listdir(session_dir) if "gears" in name] == [GEAR_FILE]


def test_a_session_does_not_mind_the_file(session_dir: Path):
    """Which is saved without the session's lock."""
    with Session.open(session_dir, MODEL):
        save(session_dir, *committed(session_dir), STATE)
    assert load(session_dir, *committed(session_dir)) == STATE
    prepare(session_dir, create=True)
    with Session.open(session_dir, MODEL, write=False) as reader:
        assert reader.tokens == list(range(10))
    with Session.open(session_dir, MODEL) as session:
        assert session.reusable(list(range(20))) == 10
        commit(session, list(range(20)))
    # What is left of a process that was killed while it saved.
    (session_dir / f"{GEAR_FILE}.1.tmp").write_bytes(b"\x81")
    with Session.open(session_dir, MODEL) as session:
        assert session.n_past == 20


def test_what_killed_writers_left_is_removed(session_dir: Path) -> None:
    """After an hour: a younger one may be being written, by a process of another container."""
    left, new = (session_dir / f"{GEAR_FILE}.{pid}.tmp" for pid in (1, 2**31))
    for file in (left, new, session_dir / "other.1.tmp"):
        file.write_bytes(b"\x81")
        if file != new:
            os.utime(file, (0, time.time() - 3700))
    save(session_dir, 10, 1, STATE)
    names = [name for name in os.listdir(session_dir) if name.endswith(".tmp")]
    assert sorted(names) == [new.name, "other.1.tmp"]


def test_an_ephemeral_session_takes_the_file_with_it(state_home: Path):
    with Session.create_ephemeral(MODEL) as session:
        commit(session, [1, 2, 3])
        save(session.path, *committed(session.path), STATE)
        assert load(session.path, *committed(session.path)) == STATE
    assert not session.path.exists()
