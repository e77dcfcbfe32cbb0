"""The daemon's process, from the socket to the exit code, with a worker that has no model."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.unit.daemon_front import PATIENCE, Client, eventually
from tests.unit.daemon_home import DRIVER, ROOT, Home, home
from toastkit.daemon import background
from toastkit.errors import ToastError

__all__ = ["home"]


def ended(process: subprocess.Popen) -> tuple[int, str]:
    """Exit code and what was said after the line on being ready."""
    out, said = process.communicate(timeout=PATIENCE)
    assert out == ""
    return process.returncode, said


def test_from_start_to_end(home: Home) -> None:
    process = home.start()
    assert stat.S_IMODE(home.socket.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(home.socket.stat().st_mode) == 0o600
    assert home.pidfile.read_text() == f"{process.pid}\n"
    assert home.client().ask({"prompt": "hi"})["end"]["text"] == "hi"
    second = home.run()
    assert second.returncode == 75
    assert second.stderr.startswith(f"toasted: already running (process {process.pid})\n  hint: ")
    other = home.run("--pidfile", str(home.state / "other.pid"))
    assert other.returncode == 75 and "answers at" in other.stderr
    process.send_signal(signal.SIGTERM)
    assert ended(process) == (0, "")
    assert home.is_clean()
    assert json.loads((home.state / "audit.jsonl").read_text())["op"] == "generate"


def test_after_a_crash_the_next_one_starts(home: Home) -> None:
    first = home.start()
    first.kill()
    first.wait()
    assert home.socket.exists() and home.pidfile.exists()
    second = home.start()
    assert home.client().ask({"op": "status"})["status"]["pid"] == second.pid


def test_a_daemon_whose_socket_is_gone_ends_once_nobody_is_connected(home: Home) -> None:
    process = home.start()
    client = home.client()
    client.ask({"prompt": "hi"})
    home.socket.unlink()
    process.send_signal(signal.SIGHUP)  # it looks now
    assert client.ask({"prompt": "still"})["end"]["text"] == "still"
    second = home.run()
    assert (second.returncode, second.stderr.splitlines()) == (75, [
        f"toasted: already running (process {process.pid})",
        "  hint: it is ending, for its socket is gone",
    ])  # fmt: skip
    client.close()
    code, said = ended(process)
    assert code == 0 and said.endswith(f"toasted: {home.socket} is gone: ending\n")
    assert home.is_clean()


def test_a_drain_finishes_what_is_active_and_refuses_the_rest(home: Home) -> None:
    process = home.start()
    active, other = home.held(), home.client()
    waiting = home.client().send({"id": 2, "prompt": "waits"})
    eventually(lambda: other.ask({"op": "status"})["status"]["waiting"])
    process.send_signal(signal.SIGTERM)
    assert waiting.replies()[-1]["error"]["code"] == 69
    eventually(lambda: not home.socket.exists())
    with pytest.raises(FileNotFoundError):
        home.client()
    assert other.ask({"prompt": "new"})["error"]["code"] == 69
    assert other.ask({"op": "reload"})["error"]["code"] == 69
    assert other.ask({"op": "status"})["status"]["calls"] == ["drain"]
    process.send_signal(signal.SIGUSR1)
    assert active.replies()[-1]["end"]["text"] == "hold"
    assert active.line() is None
    assert ended(process) == (0, "")


@pytest.mark.parametrize("second", [False, True])
def test_a_drain_that_takes_too_long_is_cut_short(home: Home, second: bool) -> None:
    """By its time, or by a second signal."""
    process = home.start("--drain", "60s" if second else "100ms", "-v", ready=False)
    assert process.stderr.readline() == "toasted: loading the model\n"
    assert "listening on" in process.stderr.readline()
    active = home.held()
    process.send_signal(signal.SIGTERM)
    if second:
        eventually(lambda: not home.socket.exists())
        process.send_signal(signal.SIGTERM)
    assert "end" in active.replies()[-1]
    code, said = ended(process)
    told = ["ending, in ", "cancelling what is still under way", "saving conversations"]
    assert code == 0 and len(said.splitlines()) == len(told)
    assert all(what in line for what, line in zip(told, said.splitlines()))


def test_an_attached_run_that_is_cancelled_between_two_ops_is_told(home: Home) -> None:
    process, attached = home.start(), home.client()
    attached.ask({"op": "commit"})
    active = home.held()
    process.send_signal(signal.SIGTERM)
    eventually(lambda: not home.socket.exists())
    process.send_signal(signal.SIGTERM)
    assert "end" in active.replies()[-1]
    time.sleep(0.2)
    assert attached.ask({"op": "commit"})["error"]["code"] == 69
    attached.close()
    assert ended(process) == (0, "")


def test_what_cannot_be_cancelled_is_left(home: Home) -> None:
    process = home.start("--drain", "0", CANCEL_SECONDS="0.1")
    home.held("stuck")
    process.send_signal(signal.SIGTERM)
    code, said = ended(process)
    assert (code, said) == (70, "toasted: a cancelled request does not end: leaving it\n")
    assert home.is_clean()


def test_the_third_signal_ends_it_at_once(home: Home) -> None:
    process = home.start()
    client = home.held("stuck")
    for _ in range(3):
        process.send_signal(signal.SIGTERM)
        time.sleep(0.05)
    assert ended(process)[0] == 128 + signal.SIGTERM
    assert client.line() is None


def test_the_exit_code_after_an_interrupt(home: Home) -> None:
    process = home.start("--no-audit")
    process.send_signal(signal.SIGINT)
    assert ended(process) == (130, "")
    assert home.is_clean() and not home.state.exists()


def test_hang_up_reloads(home: Home) -> None:
    process = home.start()
    log = home.state / "audit.jsonl"
    log.rename(home.state / "old")
    process.send_signal(signal.SIGHUP)
    client = home.client()
    eventually(lambda: client.ask({"op": "status"})["status"]["calls"] == ["reload"])
    assert log.exists()
    home.act("reload")
    assert client.ask({"op": "status"})["status"]["calls"] == ["reload", "reload"]


def test_a_memory_warning_is_passed_on(home: Home) -> None:
    """Where layers are streamed; one that comes during the load is not lost, nor one in a drain.
    Who connects while it loads is answered."""
    process = home.start("--resident", "auto", "-m", "slow0.2", ready=False)
    eventually(home.socket.exists)
    process.send_signal(signal.SIGUSR1)
    client = home.client()
    assert client.ask({"prompt": "early"})["end"]["text"] == "early"
    eventually(lambda: client.ask({"op": "status"})["status"]["calls"] == ["memory_warning"])
    assert client.ask({"op": "status"})["status"]["policies"] == "auto"
    active = home.held()
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGUSR1)
    calls = ["memory_warning", "drain", "memory_warning"]
    eventually(lambda: sorted(client.ask({"op": "status"})["status"]["calls"]) == sorted(calls))
    process.send_signal(signal.SIGTERM)
    assert "end" in active.replies()[-1] and ended(process)[0] == 0


def test_a_dead_worker_ends_the_daemon(home: Home) -> None:
    process = home.start()
    active = home.held()
    dying = home.client().send({"prompt": "die"})
    for client in (active, dying):
        assert client.replies()[-1]["error"]["code"] == 70
    code, said = ended(process)
    assert code == 70 and home.is_clean()
    assert said.splitlines() == [
        "toasted: the worker has died: RuntimeError: the device is lost",
        "  hint: --debug shows where",
    ]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [(["-m", "broken"], 65, "broken is no model\n  hint: take another\n"),
     (["--daemon", "-m", "broken"], 65, "broken is no model\n  hint: take another"),
     (["--daemon", "-m", "mortal"], 70, "died while")],
)  # fmt: skip
def test_a_model_that_cannot_be_loaded(home: Home, arguments, code: int, message: str) -> None:
    done = home.run(*arguments)
    assert (done.returncode, done.stdout) == (code, "") and (code == 70 or home.is_clean())
    assert done.stderr.startswith("toasted: ") and message in done.stderr


def test_a_signal_while_it_loads(home: Home) -> None:
    """Who connects meanwhile waits, and sees the end."""
    process = home.start("-m", "slow", ready=False)
    eventually(home.socket.exists)
    client = home.client()
    client.send({"op": "status"})
    process.send_signal(signal.SIGTERM)
    assert ended(process) == (0, "")
    assert client.line() is None and home.is_clean()


def test_a_signal_as_its_socket_is_made(home: Home) -> None:
    process = home.start("-m", "slow", ready=False, SIGNAL_AT_BIRTH=str(int(signal.SIGINT)))
    assert ended(process) == (130, "")
    assert home.is_clean()


def test_in_the_background(home: Home, capsys: pytest.CaptureFixture) -> None:
    """It returns when the daemon is ready; the daemon holds on to nothing of the shell's."""
    done = home.run("--daemon", "-v", "--max-queue", "3")
    pid = int(home.pidfile.read_text())
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr == f"toasted: ready, process {pid}\n"
    assert os.getsid(pid) != os.getsid(0) and os.getsid(pid) != pid
    if sys.platform == "linux":
        assert os.readlink(f"/proc/{pid}/cwd") == "/"
        open_files = {os.readlink(f"/proc/{pid}/fd/{fd}") for fd in (0, 1)}
        assert open_files == {os.devnull}
    log = home.state / "toasted.log"
    assert stat.S_IMODE(log.stat().st_mode) == 0o600
    assert log.read_text().endswith(f"toasted: fake on the cpu, listening on {home.socket}\n")
    assert home.client().ask({"op": "status"})["status"]["max_queue"] == 3
    assert home.run("--daemon").returncode == 75
    home.act("stop")
    assert tuple(capsys.readouterr()) == ("", "") and home.is_clean()


def test_in_the_background_from_a_directory_that_was_removed(home: Home, tmp_path: Path) -> None:
    home.in_background = True
    script = 'cd "$0" && rmdir "$0" && exec "$@"'
    done = subprocess.run(
        ["sh", "-c", script, str(tmp_path), *DRIVER, "--daemon", "--no-audit"], env=home.env,
        stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, timeout=PATIENCE,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, b"")
    home.act("stop")


def test_an_interrupted_start_leaves_no_daemon(home: Home) -> None:
    """Whoever interrupts the start wants no daemon."""
    starter = home.start("--daemon", "-m", "slow0.5", ready=False)
    eventually(home.socket.exists)
    starter.send_signal(signal.SIGINT)
    assert ended(starter)[0] == 130
    eventually(home.is_clean)
    eventually(lambda: "has gone" in (home.state / "toasted.log").read_text())


def test_no_fork_once_mlx_is_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "mlx", sys)
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("it forked"))
    with pytest.raises(ToastError, match="Metal does not survive a fork"):
        background.detach(str(tmp_path / "log"))


def test_socket_activation(home: Home) -> None:
    """The socket is systemd's: who connects before the daemon is there waits; the file stays."""
    path = home.socket.with_name("given.sock")
    path.parent.mkdir(mode=0o700)
    notices = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    notices.bind(str(path) + ".n")
    notices.settimeout(PATIENCE)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        early = Client(path).send({"prompt": "early"})
        shell = 'exec 3<&0 0</dev/null; export LISTEN_PID=$$ LISTEN_FDS=1; exec "$@"'
        process = subprocess.Popen(
            ["sh", "-c", shell, "sh", *DRIVER], cwd=ROOT, text=True,
            stdin=listener, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env={**home.env, "NOTIFY_SOCKET": str(path) + ".n"},
        )  # fmt: skip
        home.started.append(process)
    assert early.replies()[-1]["end"]["text"] == "early"
    assert notices.recv(1000).startswith(b"READY=1\nSTATUS=fake on the cpu")
    status = Client(path).ask({"op": "status"})["status"]
    assert (status["pid"], status["socket"]) == (process.pid, str(path))
    process.send_signal(signal.SIGHUP)
    assert notices.recv(1000).startswith(b"RELOADING=1\nMONOTONIC_USEC=")
    assert notices.recv(1000) == b"READY=1"
    process.send_signal(signal.SIGTERM)
    assert notices.recv(1000) == b"STOPPING=1"
    assert ended(process)[0] == 0
    assert path.exists() and home.is_clean()
    notices.close()
