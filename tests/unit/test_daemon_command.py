"""The command toasted: its actions, its options, sizes and durations."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager

import click
import pytest

from tests.unit.daemon_front import Client, eventually, short_directory
from tests.unit.daemon_home import Home, home
from toastkit import errors
from toastkit.client import socket_backend
from toastkit.commands import toasted as command
from toastkit.commands.sizes import Duration, Size
from toastkit.daemon.pidfile import Pidfile

__all__ = ["home"]


@pytest.fixture
def silent() -> Iterator[str]:
    """A socket that takes connections and never answers."""
    with short_directory() as directory, socket.socket(socket.AF_UNIX) as listener:
        path = str(directory / "s")
        listener.bind(path)
        listener.listen(8)
        yield path


@contextmanager
def backlog_of(path: str, most: int = 99) -> Iterator[None]:
    """So many connections that wait for a listener, or all that may."""
    with ExitStack() as waiting:
        for _ in range(most):
            client = waiting.enter_context(socket.socket(socket.AF_UNIX))
            client.setblocking(False)
            try:
                client.connect(path)
            except BlockingIOError:
                break
        yield


def test_the_actions(home: Home, capsys: pytest.CaptureFixture) -> None:
    process = home.start("--idle-unload", "5m", "--cache", "1.5G", "--spill", "0", "--chunk", "32")
    status = home.run("status")
    lines = dict(line.split(": ", 1) for line in status.stdout.splitlines())
    assert (status.returncode, status.stderr) == (0, "")
    assert (lines["pid"], lines["model"]) == (str(process.pid), "fake")
    assert (lines["idle_unload"], lines["cache_bytes"]) == ("300.0", str(3 << 29))
    assert (lines["spill_bytes"], lines["chunk"], lines["dtype"]) == ("0", "32", "null")
    assert (lines["batch"], lines["calls"], lines["nested.a.b"]) == ("8", "[]", "x y")
    home.act("status", "--json")
    assert json.loads(capsys.readouterr().out)["status"]["max_queue"] == 64
    home.act("health")
    assert capsys.readouterr().out == "ok: true\nloaded: true\nseconds: 0.0\n"
    home.act("reload", "-v")
    assert tuple(capsys.readouterr()) == ("", "toasted: reloading\n")
    home.act("stop", "--json")
    assert json.loads(capsys.readouterr().out) == {"stopping": True}
    assert process.wait(5) == 0 and home.is_clean()
    nobody = home.run("status")
    assert nobody.returncode == 69
    assert nobody.stderr.startswith(f"toasted: no daemon answers at {home.socket}\n")


STATUS = {
    "pid": 77, "version": "0.1.0", "uptime": 93784.5, "socket": "s\x1b[2J", "connections": 3,
    "served": 9, "refused": 1, "model": "crumb", "fingerprint": "ab", "loaded": True,
    "device": "cpu", "dtype": "float32", "native": "off: they are turned off",
    "active": 2, "attached": 1, "waiting": 4, "answered": 5,
    "tokens": {"prompt": 100, "cached": 40, "answer": 60},
    "conversations": {
        "kept": 3, "in_memory": 2, "bytes": 954368, "budget": 2147483648, "on_disk": 1,
    },
    "ledger": {"embedding": 3145728, "layer.0": 3469856, "sessions": 954368, "cache": 30048},
}  # fmt: skip


def act(action: str, socket: str, *flags: str) -> None:
    """What `toasted ACTION` does, in this process."""
    command.toasted.main([action, "--socket", socket, *flags], standalone_mode=False)


def test_a_status_for_people(monkeypatch, capsys) -> None:
    monkeypatch.setattr(socket_backend, "control", lambda *_: {"status": STATUS})
    act("status", "s")
    assert capsys.readouterr().out.splitlines() == [
        r"daemon: process 77, up 1 d 2 h, at s\x1b[2J",
        "model: crumb, on the cpu in float32",
        "native products: off: they are turned off",
        "memory: 7.60 MB, of it 6.62 MB for the weights",
        "clients: 3 connected, 1 use the weights",
        "requests: 2 active, 4 waiting, 5 answered, 1 refused",
        "tokens: 100 in prompts, 40 of them remembered; 60 in answers",
        "conversations: 2 in memory, 954 kB of 2.15 GB; 1 on disk",
    ]
    act("status", "s", "--json")
    assert json.loads(capsys.readouterr().out) == {"status": STATUS}


def test_start_and_restart(home: Home, capsys: pytest.CaptureFixture) -> None:
    """As --daemon; restart also where none runs. Options are those of the new daemon."""
    home.in_background = True
    assert home.run("restart", "--batch", "3").returncode == 0
    assert home.run("start").returncode == 75
    with pytest.raises(errors.NoInputError, match="no such model: ./typo"):
        home.act("restart", "-m", "./typo")  # nothing is stopped for it
    with pytest.raises(errors.UsageError, match="--gear-bits needs a --gear"):
        home.act("restart", "--gear-bits", "8,4")
    home.act("status")
    assert capsys.readouterr().out.count("batch: 3") == 1
    assert home.run("restart").returncode == 0
    home.act("status")
    assert capsys.readouterr().out.count("batch: 8") == 1
    home.act("stop")
    assert home.is_clean()


def test_stop_waits_for_the_end(home: Home) -> None:
    """Of what is active, too; so another daemon can be started at once."""
    process = home.start("--no-audit", "--quiet", ready=False)
    eventually(home.socket.exists)
    active = home.held()
    results: list = []
    stopped = threading.Thread(target=lambda: results.append(home.run("stop", "-v")))
    stopped.start()
    eventually(lambda: not home.socket.exists())
    assert stopped.is_alive() and not results
    process.send_signal(signal.SIGUSR1)
    assert active.replies()[-1]["end"]["text"] == "hold"
    stopped.join()
    assert (results[0].returncode, results[0].stderr) == (0, "toasted: stopped\n")
    assert home.is_clean()


def test_limits_of_the_command_line(home: Home) -> None:
    home.start("--max-line", "2K", "--max-connections", "1", "--audit-text", "--debug")
    client = home.client()
    assert client.ask({"prompt": "kept"})["end"]["text"] == "kept"
    with pytest.raises(errors.BusyError, match="there is 1 connection"):
        home.act("health")
    assert client.ask({"prompt": "x" * 2048})["error"]["code"] == 65
    assert json.loads((home.state / "audit.jsonl").read_text())["text"] == "kept"


def test_no_daemon_or_one_that_does_not_answer(silent: str, monkeypatch) -> None:
    for action in command.ACTIONS:
        with pytest.raises(errors.UnavailableError, match="no daemon answers at"):
            act(action, f"{silent}x")
    monkeypatch.setattr(command, "ANSWER_SECONDS", 0.05)
    monkeypatch.setattr(command, "STOP_SECONDS", 0.05)
    with backlog_of(silent, 1), closing(Pidfile.take(f"{silent}.pid")):
        for action in (*command.ACTIONS, "restart"):
            with pytest.raises(errors.UnavailableError, match="does not answer") as caught:
                act(action, silent)
            assert caught.value.hint == f"wait, or kill it: it is process {os.getpid()}"
    with backlog_of(silent):  # what a stopped daemon's clients leave, one after the other
        for action in (*command.ACTIONS, "restart"):
            with pytest.raises(errors.UnavailableError, match="does not answer"):
                act(action, silent)


def test_a_daemon_that_is_not_well(silent: str, monkeypatch, capsys) -> None:
    monkeypatch.setattr(socket_backend, "control", lambda *_: {"health": {"ok": False}})
    with pytest.raises(errors.UnavailableError, match="is not well"):
        act("health", silent)
    assert capsys.readouterr().out == "ok: false\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["statsu"], "no such action: 'statsu' (did you mean status?)"),
     (["strat"], "no such action: 'strat' (did you mean start?)"),
     (["zzz"], "no such action: 'zzz' (actions are start, restart, status, stop, reload, health)"),
     (["status", "--batch", "2"], "--batch is for the daemon, not for an action"),
     (["status", "-m", "crumb"], "--model is for the daemon"),
     (["status", "stop"], "unexpected extra argument"),
     (["--json"], "--json needs an action: status, stop, reload, health"),
     (["--audit", "x", "--no-audit"], "--audit and --no-audit exclude each other"),
     (["--no-audit", "--audit-text"], "--audit-text needs an audit log"),
     (["--socket", "x" * 200], "the socket's path has"), (["--cache", "2X"], "'2X' is not a size"),
     (["--max-line", "1"], "'1' is less than 1K"),
     (["--drain", "soon"], "'soon' is not a duration")],
)  # fmt: skip
def test_usage_errors(arguments: list[str], message: str) -> None:
    with pytest.raises((errors.UsageError, click.UsageError)) as caught:
        command.toasted.main(arguments, "toasted", standalone_mode=False)
    hint = getattr(caught.value, "hint", None)
    assert message in caught.value.message + (f" ({hint})" if hint else "").lower()


def test_a_log_that_cannot_be_written(home: Home) -> None:
    done = home.run("--audit", str(home.socket.parent.parent))
    assert done.returncode == 73 and "cannot write" in done.stderr and home.is_clean()


def test_systemd_needs_no_fork(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LISTEN_PID", str(os.getpid()))
    monkeypatch.setenv("LISTEN_FDS", "1")
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("it forked"))
    with pytest.raises(errors.UsageError, match="where systemd starts the daemon"):
        home.act("--daemon")


@pytest.mark.parametrize(
    ("kind", "values"),
    [(Size(), {"0": 0, "17": 17, "4K": 4096, "1.5k": 1536, "2MiB": 2 << 20, "2GB": 2 << 30,
               " 1T ": 1 << 40, f"{2**53 + 1}": 2**53 + 1, "0.000000001G": 1, "1.1k": 1126}),
     (Duration(), {"0": 0, "90": 90, "250ms": 0.25, "1.5s": 1.5, "5m": 300, "1h": 3600,
                   "1d": 86400})],
)  # fmt: skip
def test_sizes_and_durations(kind: click.ParamType, values: dict[str, float]) -> None:
    assert {text: kind.convert(text, None, None) for text in values} == values
    assert all(kind.convert(value, None, None) == value for value in values.values())


@pytest.mark.parametrize(
    ("kind", "message", "words"),
    [(Size(), "is not a size", ["", "x", "-1", "1e3", "1 K", "K", "1KK", "nan", "9" * 19, "1P",
                                "5\N{KELVIN SIGN}"]),
     (Size(), "is too large", ["99999999T"]),
     (Duration(), "is not a duration|is too long",
      ["", "x", "-1", "1M", "1 s", "inf", "1e9", "999999999999999999d"])],
)  # fmt: skip
def test_no_sizes_and_durations(kind: click.ParamType, message: str, words: list[str]) -> None:
    for word in words:
        with pytest.raises(click.BadParameter, match=message):
            kind.convert(word, None, None)


def test_a_client_is_a_client() -> None:
    """The helper of these tests notices half a line."""
    ours, theirs = socket.socketpair()
    client = Client.__new__(Client)
    client.socket, client._data = ours, b""
    theirs.sendall(b'{"a": 1}\n{')
    theirs.close()
    assert client.line() == {"a": 1}
    with pytest.raises(AssertionError, match="half a line"):
        client.line()
    ours.close()
