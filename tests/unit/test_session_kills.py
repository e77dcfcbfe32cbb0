"""Commits that end early: a full disk, a signal, kill -9 at any instant."""

from __future__ import annotations

import functools
import os
import random
import resource
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from session_states import (
    MODEL,
    at,
    commit,
    expected_rows,
    growing,
    hybrid,
    logits_of,
    rows_of,
    state_bytes,
)

from toastkit.errors import BusyError, IOFailure, ToastError
from toastkit.session import names
from toastkit.session.blocks import LayerSource, written
from toastkit.session.directory import Session
from toastkit.session.lock import WriterLock


def expected(tokens: list[int]) -> list[bytes]:
    """What rows_of gives of a hybrid state that has read these tokens."""
    return [*[expected_rows(tokens)] * 2, state_bytes(tokens)]


def test_full_disk_leaves_the_earlier_commit(state_home: Path):
    path = names.resolve("one")
    tokens = list(range(300))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Session.open(path, MODEL) as session:
        commit(session, tokens, *hybrid(tokens), savepoints=at(hybrid, tokens, 100, 200))
        longer = [*tokens, *range(900)]
        points = at(hybrid, longer, 200, 290, 1000)
        failures, size = 0, (path / "cache.bin").stat().st_size
        for limit in range(0, size * 4, 40_000):
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
            try:
                commit(session, longer, *hybrid(longer), savepoints=points)
            except IOFailure as error:
                failures += 1
                assert "cannot save session one: file too large" in error.message
            else:
                break
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            assert session.tokens == tokens
            assert (path / "cache.bin").stat().st_size < size + (1 << 14)  # the rest is free again
            with Session.open(path, MODEL, write=False) as reader:
                for n in (100, 200, 300):
                    assert rows_of(reader, n) == expected(tokens[:n])
                assert reader.savepoints == [100, 200]
                assert reader.logits().tolist() == logits_of(tokens).tolist()
        assert failures > 2 and session.tokens == longer
    with Session.open(path, MODEL) as session:
        for n in (200, 290, 1000, 1200):
            assert rows_of(session, n) == expected(longer[:n])
    assert not (path / "session.msgpack.tmp").exists()


def test_interrupted_between_rename_and_return(state_home: Path, monkeypatch: pytest.MonkeyPatch):
    """A commit that happened but was not told of: the next one must not overwrite it."""
    path = names.resolve("one")
    real = os.replace

    def interrupted(source, target, **directories) -> None:
        real(source, target, **directories)
        raise KeyboardInterrupt

    with Session.open(path, MODEL) as session:
        commit(session, [1] * 300)
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", interrupted)
            with pytest.raises(KeyboardInterrupt):
                commit(session, [1] * 400)
        written(session.commit_layers([1] * 400, [growing([1] * 400)], None))
        assert session.generation == 3
        assert rows_of(session, 400) == [expected_rows([1] * 400)] * 2


@functools.cache
def history(generation: int) -> list[int]:
    """The tokens of a commit in test_kill: grown or cut back from the one before, by a rule."""
    tokens: list[int] = []
    for number in range(1, generation):
        tokens = history(number)
    rng = random.Random(generation)
    if rng.random() < 0.4:
        tokens = tokens[: rng.randint(0, len(tokens))]
    grown = rng.choice([1, 3, 250, 256, 600])
    tokens = tokens + [rng.randrange(50) for _ in range(grown)]
    return tokens[:100] if len(tokens) > 3000 else tokens


def places(generation: int) -> list[int]:
    """The savepoints of a commit in test_kill."""
    count = len(history(generation))
    return [n for n in (90, 400, count // 2, count - 1) if generation % 3 and 0 < n < count]


def killed(tokens: list[int]) -> list[LayerSource]:
    """The layers of a state in test_kill."""
    return [*hybrid(tokens), growing(tokens, 17), growing(tokens, 3)]


def commit_forever(path: str) -> None:
    """What is killed in test_kill: goes on from whatever commit it finds, and tells of each."""
    with Session.open(path, MODEL) as session:
        if session.n_past:
            rows_of(session, session.n_past)
        print(os.getpid(), flush=True)
        while True:
            tokens = history(session.generation + 1)
            points = at(killed, tokens, *sorted(set(places(session.generation + 1))))
            for point in points:
                make = functools.partial(killed, tokens[: point.count])
                session.write_layers_ahead(tokens[: point.count], make, len(tokens))
            commit(session, tokens, *killed(tokens), savepoints=points)
            print(session.generation, flush=True)


def commit_when_asked(path: str) -> None:
    """The child of test_kill, which has imported all: for each line a process of its own."""
    for _ in sys.stdin:
        if not os.fork():
            commit_forever(path)
        os.wait()
        print("ended", flush=True)


def test_kill_at_any_instant(tmp_path: Path):
    """Killed before its first commit, and some time after one or two that it has told of: however
    busy the machine is, there are four commits at least, and none that was told of is lost."""
    path = tmp_path / "session"
    rng = random.Random(time.time_ns())
    code = f"from test_session_kills import commit_when_asked as c; c({str(path)!r})"
    paths = [str(Path(__file__).parent), *filter(None, sys.path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    reached = [0]
    pipe = subprocess.PIPE
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=pipe, stdout=pipe, text=True, bufsize=1, env=environment
    )
    assert child.stdin is not None and child.stdout is not None
    for commits in (0, 1, 2, 1, 2, 0, 0):
        child.stdin.write("\n")
        pid = int(child.stdout.readline())
        told = [int(child.stdout.readline()) for _ in range(commits)]
        time.sleep(rng.uniform(0, 0.04))
        os.kill(pid, signal.SIGKILL)
        told += [int(line) for line in iter(child.stdout.readline, "ended\n")]
        if not (path / "session.msgpack").exists():
            assert not told
            continue
        with Session.open(path, MODEL) as session:
            assert session.generation >= max(told, default=reached[-1])
            reached.append(session.generation)
            tokens = history(session.generation)
            assert session.tokens == tokens
            assert session.savepoints == sorted(set(places(session.generation)))
            for n in (*session.savepoints, len(tokens)):
                sources = [tensor for layer in killed(tokens[:n]) for tensor in layer.tensors]
                read = [bytes(x.read(0, x.shape[2] if x.axis else 1)) for x in sources]
                assert rows_of(session, n) == read
            assert session.logits().tolist() == logits_of(tokens).tolist()
    child.communicate()
    assert len(set(reached)) > 4


def test_an_error_is_a_toast_error_when_the_directory_goes(state_home: Path):
    with Session.open(names.resolve("one"), MODEL) as session:
        commit(session, [1])
        for file in session.path.iterdir():
            file.unlink()
        session.path.rmdir()
        with pytest.raises(ToastError, match="cannot save session one"):
            commit(session, [1, 2])


@pytest.mark.parametrize("first", ["makes", "removes"])
def test_two_who_commit_nothing_leave_no_directory(
    state_home: Path, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    """Another takes the lock just after one has made the directory, or before it removes it."""
    path, others = names.resolve("one"), []
    owner, name = (WriterLock, "acquire") if first == "makes" else (Path, "rmdir")
    real = getattr(owner, name)

    def late(where: Path) -> object:
        monkeypatch.setattr(owner, name, real)
        others.append(Session.open(path, MODEL))
        return real(where)

    monkeypatch.setattr(owner, name, late)
    with suppress(BusyError):
        Session.open(path, MODEL).close()
    others.pop().close()
    assert not path.exists()
