"""The socket: several clients at a time, of which some are torn, rude, mad or gone. Whoever asks
properly is answered properly, `status` answers all the time, and nothing is left behind."""

from __future__ import annotations

import array
import json
import os
import random
import select
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from daemon_front import Client, FakeWorker, eventually, front, open_descriptors

from tests.daemons import Daemon
from tests.fuzz import CODES, harm
from tests.hostile import SECONDS
from toastkit.daemon.connection import close_all
from toastkit.daemon.service_settings import Limits

LAST = {"end", "error", "health", "status", "stopping", "reloading", "attached", "released",
        "restored", "counting", "read", "step", "committed"}  # fmt: skip
MAX_LINE = 1 << 16
Expected = Callable[[dict], None]


class Rude:
    """A client that says its bytes in pieces, when it is its turn, and reads when it likes.

    wanted: what is to come of each line that it has said; None: an error, and then the end. cut: it
    may be thrown out at any time.
    """

    def __init__(self, path: str) -> None:
        self.socket = Client(path).socket
        self.socket.setblocking(False)
        self.say, self.heard = bytearray(), bytearray()
        self.wanted: list[Expected | None] = []
        self.deaf = self.mute = self.ended = self.cut = False

    def turn(self, rng: random.Random) -> None:
        """A piece out, what there is in."""
        try:
            if self.say:
                size = rng.choice((1, 10, 100, len(self.say)))
                del self.say[: self.socket.send(self.say[:size])]
            elif self.mute:
                self.socket.shutdown(socket.SHUT_WR)
        except BlockingIOError:
            pass
        except OSError:
            self.say.clear()
        try:
            while not (self.deaf or self.ended) and (data := self.socket.recv(1 << 16)):
                self.heard += data
            self.ended = not self.deaf
        except BlockingIOError:
            pass
        except OSError:
            self.ended = True

    def judge(self) -> None:
        """Every line has had its one last reply, in order."""
        *lines, rest = bytes(self.heard).split(b"\n")
        got = [r for line in lines if LAST & (r := json.loads(line)).keys()]
        for number, want in enumerate(self.wanted):
            if want is None:  # it was told why, or nothing more
                assert all("error" in reply for reply in got[number:]), got[number:]
                return
            if self.cut and number >= len(got):
                return
            assert number < len(got), f"line {number + 1} of {len(self.wanted)}: {got}"
            want(got[number])
        assert not rest and len(got) == len(self.wanted), got


def proper(text: str, identity: Any) -> Expected:
    """The answer that it would have had alone."""

    def check(reply: dict) -> None:
        assert reply.get("end", {}).get("text") == text and reply.get("id") == identity, reply

    return check


def one_of(*names: str) -> Expected:
    """A reply with one of these names; an error has a code."""

    def check(reply: dict) -> None:
        assert reply.keys() & set(names), reply
        if "error" in reply:
            assert reply["error"]["code"] in CODES and reply["error"]["message"], reply

    return check


ANY = one_of(*LAST)


class Attack:
    """Clients of one daemon. requests: what may be asked properly, with the text that it gives."""

    def __init__(self, rng: random.Random, path: str, requests: list[tuple[dict, str]]) -> None:
        self.rng, self.path, self.requests = rng, path, requests
        self.watch = Client(path)
        self.model = self.status().get("fingerprint", "ab")
        self.clients: list[Rude] = []

    def run(self, *busy: str) -> None:
        """Some turns of everybody; then each is heard to the end, and nothing stays in the status
        under the names `busy`."""
        rng = self.rng
        for _ in range(rng.randint(5, 40)):
            client = self.pick()
            if not client.mute and None not in client.wanted:
                self.act(client, rng.randrange(12))
            for other in self.clients:
                other.turn(rng)
            self.status()
        for client in self.clients:
            client.mute, client.deaf = True, False
        deadline = time.monotonic() + SECONDS
        while waiting := [client for client in self.clients if not client.ended]:
            assert time.monotonic() < deadline, [c.wanted for c in waiting]
            for client in waiting:
                client.turn(rng)
            select.select([client.socket for client in waiting], [], [], 0.01)
        self.status()
        for client in self.clients:
            client.judge()
            client.socket.close()
        eventually(lambda: self.status()["connections"] == 1)
        eventually(lambda: not any(self.status()[name] for name in busy))
        self.watch.close()

    def status(self) -> dict:
        """It always answers, at once."""
        return self.watch.ask({"op": "status"})["status"]

    def pick(self) -> Rude:
        if len(self.clients) < 2 or (len(self.clients) < 6 and self.rng.random() < 0.2):
            self.clients.append(Rude(self.path))
            return self.clients[-1]
        return self.rng.choice(self.clients)

    def act(self, client: Rude, what: int) -> None:
        """Says one thing, or does it."""
        rng = self.rng
        request, text = rng.choice(self.requests)
        identity = rng.choice(("a", 7, "é"))
        line = json.dumps({**request, "id": identity}, ensure_ascii=rng.random() < 0.5).encode()
        if what < 4:
            client.say += line + b"\n"
            client.wanted.append(proper(text, identity))
        elif what == 4:
            op = rng.choice(("status", "health"))
            client.say += json.dumps({"op": op}).encode() + rng.choice((b"\n", b"\r\n", b"\n \n\n"))
            client.wanted.append(one_of(op))
        elif what < 7:
            self.mad(client, line)
        elif what == 7:
            client.say += b"x" * rng.choice((MAX_LINE + 1, 20 * MAX_LINE))
            client.wanted.append(None)
        elif what == 8:
            client.say += line[: rng.randrange(1, len(line))]
            client.wanted.append(ANY)
            client.mute = True
        elif what == 9:  # gone in the middle
            word = rng.choice(("hold", "flood"))  # what the worker of `a_front` never ends with
            client.say += rng.choice(
                (line[:5], line + b"\n", b'{"prompt": "%s"}\n' % word.encode())
            )
            client.deaf = True
            for _ in range(rng.choice((1, 5))):
                client.turn(rng)
            client.socket.close()
            self.clients.remove(client)
        elif what == 10:
            self.descriptors(client)
        else:  # it lets the answers to some requests wait
            client.deaf = not client.deaf
            request, text = self.requests[-1]
            for _ in range(4 * client.deaf):
                client.say += json.dumps(request).encode() + b"\n"
                client.wanted.append(proper(text, None))

    def mad(self, client: Rude, line: bytes) -> None:
        """A request that somebody has been at."""
        rng = self.rng
        options = {"temperature": 0.5, "top_k": 3, "seed": 1, "stop": ["x"], "max_tokens": 2}
        long = {"messages": [{"role": "user", "content": "Hi"}], "options": options, "keep": True}
        attached = [
            {"op": "attach", "fingerprint": self.model, "device": "auto", "dtype": None,
             "kv_bits": None},
            {"op": "restore", "ids": [1, 5, 6], "session": None, "source": None},
            {"op": "count"}, {"op": "read", "ids": [1, 5, 6]}, {"op": "step", "token": 5},
            {"op": "commit"},
        ]  # fmt: skip
        maps = rng.choice(([json.loads(line)], [long], attached))
        for _ in range(rng.randint(1, 3)):
            harm.mutate(rng, maps, harm.JSON_VALUES)
        said = b"\n".join(json.dumps(one).encode() for one in maps)
        if rng.random() < 0.5:
            said = harm.mutate_bytes(rng, said)
        if b"/" in said or len(said) > MAX_LINE:  # nothing outside the fuzzer's own directories
            return
        client.say += said + b"\n"
        client.wanted += [ANY for part in said.split(b"\n") if part.strip()]

    def descriptors(self, client: Rude) -> None:
        """Some come along; more than a few are refused."""
        if client.say:
            return
        count = self.rng.choice((1, 3, 9))
        attach = (
            b'{"op": "attach", "fingerprint": "ab", "device": "cpu", "dtype": null, '
            b'"kv_bits": null}\n'
        )
        line = self.rng.choice((b'{"op": "status"}\n', b"{}\n", attach))
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0] * count))]
        try:
            client.socket.sendmsg([line], rights)
        except OSError:
            return
        client.wanted.append(ANY)
        client.cut = client.cut or count == 9


@contextmanager
def a_front(repeats: bool) -> Iterator[Callable[[random.Random], None]]:
    """A case is a server of its own with a worker that says what it is asked."""

    def case(rng: random.Random) -> None:
        before = open_descriptors()
        words = ("one", "zwei\n", "狐" * 200, "long " * 9000)
        requests = [({"prompt": w, "stream": rng.random() < 0.5}, w) for w in words]
        worker = FakeWorker()
        with front(Limits(line_bytes=MAX_LINE), worker) as running:
            attack = Attack(rng, str(running.path), requests)
            attack.run("waiting")
            assert not [line for line in running.said if "bug" in line], running.said
        for request in worker.requests:
            close_all(request.fds)
        assert open_descriptors() == before

    yield case


@contextmanager
def a_daemon(repeats: bool) -> Iterator[Callable[[random.Random], None]]:
    """The daemon on crumb, the same for all cases of a turn."""
    with Daemon("crumb", "--max-line", str(MAX_LINE)) as daemon:
        requests = []
        for number, prompt in enumerate(("Hi", "2 + 2 =", "Say: 狐")):
            options = {"max_tokens": 3 + number, "temperature": number / 2, "seed": 5}
            request = {"prompt": prompt, "options": options, "stream": number < 2}
            requests.append((request, daemon.ask(**request).text))
        assert daemon.process is not None
        folder = Path(f"/proc/{daemon.process.pid}/fd")

        def descriptors() -> int:
            return len(os.listdir(folder)) if folder.is_dir() else 0

        def case(rng: random.Random) -> None:
            attack = Attack(rng, str(daemon.socket), requests)
            before = descriptors()
            attack.run("active", "attached", "waiting")
            eventually(lambda: descriptors() < before)

        yield case
        code, words = daemon.signal(signal.SIGTERM), daemon.errors.read_text()
        assert code == 0 and not words, f"{code}: {words}"
