"""Sessions: any sequence of what their users do, a kill between any two calls to the system, and
damage to any file. What opens is a state that was committed, or there is one clear error."""

from __future__ import annotations

import faulthandler
import os
import random
import shutil
import socket
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgpack
import test_session_sequences as sequences
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule, run_state_machine_as_test
from session_states import MODEL, at, commit, logits_of

from tests.fuzz import check_error, harm
from tests.hostile import SECONDS
from toastkit.errors import ToastError
from toastkit.session.directory import Session
from toastkit.session.run import RunDirectory

SYSTEM_CALLS = (
    "open", "pwrite", "preadv", "fsync", "replace", "rename", "ftruncate", "close", "unlink",
    "mkdir", "fstat", "stat",
)  # fmt: skip
FILES = ("session.msgpack", "session.msgpack.tmp", "tokens.u32", "cache.bin", "logits.f32", "lock",
         "runs", "gears.msgpack")  # fmt: skip
SECRET = b"somebody else's"


class Attacked(sequences.Sessions):
    """The writer of that test, that is killed, and whose files are damaged."""

    def __init__(self) -> None:
        super().__init__()
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        self.outside = self.folder / "outside"
        self.outside.mkdir()
        (self.outside / "secret").write_bytes(SECRET)
        self.once: list[list[int]] = []  # what was committed at any time
        self.older: list[tuple[str, bytes]] = []  # files of that time

    def note(self) -> None:
        """Remembers the last commit."""
        if self.stored and self.stored not in self.once:
            self.once.append(self.stored)
            for name in FILES[:5]:
                if (file := self.folder / "s" / name).exists():
                    self.older.append((name, file.read_bytes()))

    @rule(count=st.integers(1, 300), shares=st.sets(st.floats(0, 1), max_size=2),
          calls=st.integers(0, 60))  # fmt: skip
    def killed(self, count: int, shares: set[float], calls: int) -> None:
        """In the middle of a commit; a new process opens what is there."""
        tokens = [*self.stored, *[7 + count % 3] * count]
        where = sorted({int(share * len(tokens)) for share in shares} - {0, len(tokens)})
        self.note()
        pid = os.fork()
        if not pid:
            try:
                die_after(calls)
                points = at(self.make, tokens, *where)
                commit(self.session, tokens, *self.make(tokens), savepoints=points)
            finally:
                os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        self.session.close()
        self.session = Session.open(self.folder / "s", MODEL, durable=False)
        assert self.session.tokens in (self.stored, tokens)
        if self.session.tokens == tokens:
            self.held = {n: self.name != "plain" for n in where}
        self.stored, self.live, self.known = list(self.session.tokens), None, 0
        self.check_all(self.session)
        self.note()

    @rule()
    def removed(self) -> None:
        self.session.close()
        shutil.rmtree(self.folder / "s", ignore_errors=True)
        self.session = Session.open(self.folder / "s", MODEL, durable=False)
        self.stored, self.held, self.live, self.known = [], {}, [], 0

    @rule(share=st.floats(0, 1))
    @precondition(lambda self: self.stored)
    def forked(self, share: float) -> None:
        """Another session begins with what this one holds."""
        n = self.session.reusable(self.stored[: round(share * len(self.stored))])
        tokens = [*self.stored[:n], 7]
        with Session.open(self.folder / "f", MODEL, durable=False) as fork:
            commit(fork, tokens, *self.make(tokens), savepoints=at(self.make, tokens, *({n} - {0})))
            self.check_all(fork)
        shutil.rmtree(self.folder / "f")

    @rule(number=st.integers(0, 2**32), times=st.integers(1, 3))
    @precondition(lambda self: self.stored)
    def damaged(self, number: int, times: int) -> None:
        """A copy, and what then opens of it."""
        self.note()
        rng, copy = random.Random(number), self.folder / "d"
        shutil.copytree(self.folder / "s", copy)
        for _ in range(times):
            self.damage(rng, copy)
        before = tree(self.folder, copy)
        for write in rng.sample((False, True), 2):
            try:
                with Session.open(copy, MODEL, write=write, durable=False) as session:
                    assert session.tokens in (*self.once, [])
                    self.check_all(session)
                    if write:
                        RunDirectory.create(copy).remove()
                        tokens = [*session.tokens, 8]
                        commit(session, tokens, *self.make(tokens))
                        self.check_all(session)
                        self.once.append(tokens)
            except ToastError as error:
                check_error(error)
            assert tree(self.folder, copy) == before, "something outside has changed"
        shutil.rmtree(copy)

    def check_all(self, session: Session) -> None:
        """What is restored is a state that has read just these tokens."""
        kept, self.stored = self.stored, session.tokens
        try:
            for n in (*session.savepoints, *({len(session.tokens)} - {0})):
                self.check(session, n)
            logits = session.logits()
            assert logits is None or logits.tolist() == logits_of(session.tokens).tolist()
        finally:
            self.stored = kept

    def damage(self, rng: random.Random, folder: Path) -> None:
        """Does one thing to one file."""
        file = folder / rng.choice(FILES)
        act = rng.randrange(12)
        if act < 5 and file.is_file() and not file.is_symlink():
            data = file.read_bytes()
            if act == 0:
                data += rng.choice((b"\0", b"x" * 5000, data))
            file.write_bytes(harm.mutate_bytes(rng, data))
            return
        if act < 5 and file.name == "session.msgpack.tmp":
            remove(file)
            file.write_bytes(b"half a hea")
            return
        if act == 5 and self.older:
            name, data = rng.choice(self.older)
            remove(folder / name)
            (folder / name).write_bytes(data)
            return
        if act == 6 and (header := folder / FILES[0]).is_file():
            header.write_bytes(forged(rng, header.read_bytes()))
            return
        whole = self.outside / "whole"  # a good file, in the wrong place
        if file.is_file():
            whole.write_bytes(file.read_bytes())
        remove(file)
        if act == 7:
            file.symlink_to(self.outside / "whole")
        elif act == 8:
            file.symlink_to(self.outside / rng.choice(("secret", "none", ".")))
        elif act == 9:
            os.mkfifo(file)
        elif act == 10:
            file.mkdir()
            (file / "x").write_bytes(SECRET)
        elif act == 11 and len(str(file)) < 100:
            with socket.socket(socket.AF_UNIX) as made:
                made.bind(str(file))


def remove(path: Path) -> None:
    """Whatever is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def tree(folder: Path, but: Path) -> list[tuple]:
    """All that is below a folder: names, kinds, contents."""
    found: list[tuple] = []
    for path in sorted(folder.rglob("*")):
        if path == but or but in path.parents:
            continue
        mode = path.lstat().st_mode
        found.append((str(path), mode, path.read_bytes() if stat.S_ISREG(mode) else None))
    return found


def forged(rng: random.Random, data: bytes) -> bytes:
    """A header that was changed by one who can count checksums."""
    import zlib

    try:
        envelope = msgpack.unpackb(data)
        body = [msgpack.unpackb(envelope["body"])]
        harm.mutate(rng, body)
        packed = msgpack.packb(body[0] if body else None)
        return msgpack.packb({**envelope, "body": packed, "crc": zlib.crc32(packed)})
    except Exception:  # it had been damaged before
        return data[: len(data) // 2]


def die_after(calls: int) -> None:
    """Ends this process when it calls the system once more than so often; a write is torn."""
    left = calls

    def call(name: str, real: Any, *given: Any, **more: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            if name == "pwrite":
                real(given[0], given[1][: len(given[1]) // 2], given[2])
            os._exit(0)
        return real(*given, **more)

    for name in SYSTEM_CALLS:
        setattr(os, name, partial(call, name, getattr(os, name)))


@contextmanager
def sessions(repeats: bool) -> Iterator[Callable[[random.Random], None]]:
    """A case is a few sequences. repeats: it is known to fail; Hypothesis makes it short."""
    limits = settings(
        max_examples=6, stateful_step_count=12, deadline=None, database=None,
        derandomize=False, suppress_health_check=list(HealthCheck), report_multiple_bugs=False,
        phases=[Phase.generate, *([Phase.shrink] if repeats else [])],
    )  # fmt: skip

    def case(rng: random.Random) -> None:
        machine = seed(rng.getrandbits(64))(type("Attacked", (Attacked,), {}))
        run_state_machine_as_test(machine, settings=limits)

    try:
        yield case
    finally:
        faulthandler.cancel_dump_traceback_later()
