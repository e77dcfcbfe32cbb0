"""toast over several turns: conversations that go on, --chat, and what a start costs."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.forked import executable
from tests.pipes.pipelines import begin
from tests.pipes.toast_runs import asked, kept
from tests.terminals import Terminal
from tests.unit.fake_daemon import HOLD, SECONDS, FakeDaemon, answer, failure
from tests.unit.test_cli import lines_of

Run = Callable[..., subprocess.CompletedProcess]
CTRL_D = "\x04"
ONE, TWO, THREE = answer("one"), answer("two\n"), answer("three")


# ------------------------------------------------------------------------- conversations that go on


def test_the_last_conversation_is_continued(ask: Run, home: Path) -> None:
    with FakeDaemon(ONE, TWO, THREE) as daemon:
        ask(daemon, "a")
        ask(daemon, "-c", "b")
        ask(daemon, "--continue", "c")
    assert asked(daemon) == [["a"], ["a", "one", "b"], ["a", "one", "b", "two\n", "c"]]
    assert [m["role"] for m in daemon.requests[1]["messages"]] == ["user", "assistant", "user"]
    assert all("session" not in request for request in daemon.requests)
    assert kept(home) == ["a", "one", "b", "two\n", "c", "three"]


def test_a_new_one_without_c(ask: Run, home: Path) -> None:
    with FakeDaemon(ONE, TWO) as daemon:
        ask(daemon, "a")
        ask(daemon, "b")
    assert asked(daemon)[1] == ["b"] and kept(home) == ["b", "two\n"]


def test_a_named_conversation(ask: Run, home: Path) -> None:
    """The daemon keeps its state under that name; -c goes on with whichever was last."""
    with FakeDaemon(ONE) as daemon:
        ask(daemon, "--session", "fox", "a")
        ask(daemon, "x")
        ask(daemon, "--session", "fox", "b")
        ask(daemon, "-c", "c")
        ask(daemon, "-c", "--session", "hen", "d")
    assert asked(daemon)[2:] == [["a", "one", "b"], ["a", "one", "b", "one", "c"], ["d"]]
    assert [r.get("session") for r in daemon.requests] == ["fox", None, "fox", "fox", "hen"]
    assert kept(home, "fox")[-2:] == ["c", "one"] and kept(home) == ["x", "one"]
    assert kept(home, "hen") == ["d", "one"]


def test_system_message(ask: Run, home: Path) -> None:
    with FakeDaemon(ONE) as daemon:
        for arguments in (["--system", "S", "a"], ["-c", "b"], ["-c", "--system", "S", "c"]):
            assert ask(daemon, *arguments).returncode == 0
        assert daemon.requests[0]["messages"][0] == {"role": "system", "content": "S"}
        assert [messages[0] for messages in asked(daemon)] == ["S"] * 3
        done = ask(daemon, "-c", "--system", "T", "d")
        message, hint = lines_of(done, "toast", 64)
        assert message == "the conversation has another system message" and "--session" in hint
        assert ask(daemon, "-c", "d", TOAST_SYSTEM="T").returncode == 0
    assert kept(home)[0] == "S" and asked(daemon)[-1][0] == "S"


def test_no_history(ask: Run, home: Path) -> None:
    with FakeDaemon(ONE) as daemon:
        ask(daemon, "--no-history", "a")
        assert not home.exists()
        ask(daemon, "--session", "fox", "b")
        ask(daemon, "--no-history", "--session", "fox", "c")
        ask(daemon, "--no-history", "-c", "d")
    assert asked(daemon)[2:] == [["b", "one", "c"], ["b", "one", "d"]]
    assert [r.get("session") for r in daemon.requests] == [None, "fox", None, None]
    assert [r.get("keep", True) for r in daemon.requests] == [False, True, False, False]
    assert kept(home, "fox") == ["b", "one"]


def test_a_damaged_conversation_is_left_as_it_is(ask: Run, home: Path) -> None:
    with FakeDaemon(ONE) as daemon:
        ask(daemon, "--session", "fox", "a")
        path = home / "fox.jsonl"
        damaged = path.read_bytes()[:-9]
        path.write_bytes(damaged)
        for arguments in (["--session", "fox", "b"], ["-c", "b"]):
            message, _ = lines_of(ask(daemon, *arguments), "toast", 65)
            assert message == f"{path}: line 2: not JSON in UTF-8"
    assert path.read_bytes() == damaged and len(daemon.requests) == 1


def test_two_at_once(home: Path) -> None:
    """Both are answered; what is kept is one of them, whole."""
    with FakeDaemon(ONE) as daemon:
        env = {"TOAST_SOCKET": daemon.path}
        running = [begin("toast", "--session", "fox", text, env=env) for text in ("a", "b")]
        assert [process.communicate(timeout=SECONDS)[0] for process in running] == [b"one\n"] * 2
    assert kept(home, "fox") in (["a", "one"], ["b", "one"], ["a", "one", "b", "one"],
                                 ["b", "one", "a", "one"])  # fmt: skip


# ------------------------------------------------------------------------------ --chat, from a pipe


def test_each_line_is_a_turn(ask: Run, home: Path) -> None:
    with FakeDaemon(ONE, TWO, THREE) as daemon:
        done = ask(daemon, "--chat", "a", stdin=b"b\n\n  \nc")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"one\ntwo\nthree\n", b"")
    assert asked(daemon)[2] == ["a", "one", "b", "two\n", "c"]
    assert kept(home)[-1] == "three"


def test_a_chat_continues_a_conversation(ask: Run, home: Path) -> None:
    with FakeDaemon(ONE) as daemon:
        ask(daemon, "--session", "fox", "a")
        ask(daemon, "--chat", "-c", stdin=b"b\n")
        ask(daemon, "--chat", "--no-history", "-c", stdin=b"c\nd\n")
    assert asked(daemon)[1] == ["a", "one", "b"]
    assert asked(daemon)[3][-3:] == ["c", "one", "d"], "not kept, but not forgotten in the chat"
    assert kept(home, "fox") == ["a", "one", "b", "one"]


def test_no_lines_are_no_turns(ask: Run, home: Path) -> None:
    with FakeDaemon(ONE) as daemon:
        assert ask(daemon, "--chat").returncode == 0
        assert ask(daemon, "--chat", stdin=b"\n").returncode == 0
    assert daemon.requests == [] and not home.exists()


def test_a_failure_ends_a_chat_from_a_pipe(ask: Run, home: Path) -> None:
    with FakeDaemon(ONE, failure(75, "busy"), THREE) as daemon:
        done = ask(daemon, "--chat", stdin=b"a\nb\nc\n")
    assert (done.returncode, done.stdout, done.stderr) == (75, b"one\n", b"toast: busy\n")
    assert kept(home) == ["a", "one"] and len(daemon.requests) == 2


def test_turns_are_answered_as_they_come(home: Path) -> None:
    """A program at the other end writes a line, reads its answer, writes the next."""
    with FakeDaemon(ONE, TWO) as daemon:
        env = {"TOAST_SOCKET": daemon.path}
        process = begin("toast", "--chat", stdin=subprocess.PIPE, env=env)
        for line, reply in ((b"a\n", b"one\n"), (b"b\n", b"two\n")):
            process.stdin.write(line)
            process.stdin.flush()
            assert process.stdout.readline() == reply
        assert process.communicate(timeout=SECONDS) == (b"", b"") and process.returncode == 0


# ---------------------------------------------------------------------------- --chat, at a terminal


@pytest.fixture
def terminal(home: Path) -> Iterator[Callable[..., Terminal]]:
    """terminal(daemon, *arguments, shell="", **settings): toast --chat, or a shell that runs it."""
    opened = []

    def run(daemon: FakeDaemon, *arguments: str, shell: str = "", **settings) -> Terminal:
        toast = executable("toast")
        command = ["sh", "-mc", shell, toast] if shell else [toast, "--chat", *arguments]
        opened.append(Terminal(*command, env={"TOAST_SOCKET": daemon.path}, **settings))
        return opened[-1]

    yield run
    for each in opened:
        each.close()


def test_a_person_types(terminal, home: Path) -> None:
    with FakeDaemon(ONE, TWO, THREE) as daemon:
        chat = terminal(daemon)
        chat.expect("> ")
        chat.type("first question\r")
        chat.expect("one\r\n> ")
        chat.type("\r")
        chat.expect("> ")
        chat.type("xfirst\x01\x04\x05 again\r")  # to the start, delete, to the end
        chat.expect("two\r\n> ")
        chat.type("\x1b[A\x1b[A!\r")  # two lines back
        chat.expect("three\r\n> ")
        assert chat.end(CTRL_D) == 0
    assert asked(daemon)[2] == ["first question", "one", "first again", "two\n", "first question!"]
    history = home.parent / "chat_history"
    assert history.stat().st_mode & 0o777 == 0o600
    assert history.read_text().split("\n")[-4:] == ["first question", "first again",
                                                    "first question!", ""]  # fmt: skip


def test_lines_are_remembered_in_the_next_chat(terminal, home: Path) -> None:
    with FakeDaemon(ONE) as daemon:
        for keys in ("remember me\r", "\x1b[A\r"):
            chat = terminal(daemon)
            chat.expect("> ")
            chat.type(keys)
            chat.expect("one\r\n> ")
            assert chat.end(CTRL_D) == 0
        chat = terminal(daemon, "--no-history")
        chat.expect("> ")
        chat.type("\x1b[Asecret\r")
        chat.expect("one\r\n> ")
        assert chat.end(CTRL_D) == 0
    assert asked(daemon) == [["remember me"], ["remember me"], ["secret"]]
    assert "secret" not in (home.parent / "chat_history").read_text()


def test_ctrl_c_stops_an_answer_and_clears_a_line(terminal, home: Path) -> None:
    with FakeDaemon([{"text": "I am"}, HOLD], TWO, [{"progress": {}}, HOLD], THREE) as daemon:
        chat = terminal(daemon)
        chat.expect("> ")
        chat.type("who are you\r")
        chat.expect("I am")
        chat.type("\x03")
        assert daemon.gone.wait(SECONDS)
        chat.expect("\r\n> ")
        chat.type("never sent")
        chat.expect("never sent")
        chat.insist("\x03", "\r\n> ")
        chat.type("go on\r")
        chat.expect("two\r\n> ")
        daemon.gone.clear()
        chat.type("no word of this\r")
        while len(daemon.requests) < 3:
            time.sleep(0.005)
        chat.type("\x03")
        assert daemon.gone.wait(SECONDS)
        chat.expect("\r\n> ")
        chat.type("the end\r")
        chat.expect("three\r\n> ")
        assert chat.end(CTRL_D) == 0
    assert asked(daemon)[-1] == ["who are you", "I am", "go on", "two\n", "the end"]


def test_a_failure_does_not_end_a_chat_with_a_person(terminal, home: Path) -> None:
    with FakeDaemon(failure(75, "busy: 64 requests are waiting"), TWO) as daemon:
        chat = terminal(daemon, "a")
        chat.expect("toast: busy: 64 requests are waiting\r\n> ")
        chat.type("b\r")
        chat.expect("two\r\n> ")
        daemon.stop_listening()
        chat.type("c\r")
        chat.expect(f"toast: no daemon answers at {daemon.path}\r\n> ")
        assert chat.end(CTRL_D) == 0
    assert kept(home) == ["b", "two\n"]


def test_a_line_goes_on_after_ctrl_z(terminal, home: Path) -> None:
    shell = """"$0" --chat; echo; stty -a | tr ' ;' '\\n\\n' | grep 'icanon$'; fg"""
    with FakeDaemon(ONE) as daemon:
        chat = terminal(daemon, shell=shell)
        chat.expect("> ")
        chat.type("größ")
        chat.expect("größ")
        chat.insist("\x1a", "\nicanon")  # what else is typed is not as readline would have it
        chat.expect("> größ")
        chat.type("e\r")
        chat.expect("one\r\n> ")
        assert chat.end(CTRL_D) == 0
    assert asked(daemon) == [["größe"]]


def test_a_line_in_the_c_locale(terminal, monkeypatch) -> None:
    monkeypatch.setenv("LC_ALL", "C")
    with FakeDaemon(ONE) as daemon:
        chat = terminal(daemon)
        chat.expect("> ")
        chat.type("été\x7f\x7f\r")
        chat.expect("one\r\n> ")
        assert chat.end(CTRL_D) == 0
    assert asked(daemon) == [["é"]]


def test_a_line_that_is_not_text(terminal, tmp_path: Path) -> None:
    with FakeDaemon(ONE) as daemon, open(tmp_path / "out", "wb") as out:
        chat = terminal(daemon, stdout=out.fileno())
        chat.expect("> ")
        chat.type(b"caf\xe9\r")
        chat.expect("toast: the line is not UTF-8: byte 0xe9 at offset 3\r\n> ")
        chat.type("a\r")
        chat.expect("> ")
        assert chat.end(CTRL_D) == 0
    assert asked(daemon) == [["a"]]


def test_a_terminal_that_is_closed(terminal, home: Path) -> None:
    with FakeDaemon([{"text": "I am"}, HOLD]) as daemon:
        chat = terminal(daemon, "who")
        chat.expect("I am")
        chat.signal(signal.SIGHUP)
        assert chat.end() == 129
    assert kept(home) == ["who", "I am"]


def test_answers_go_to_a_file_and_prompts_to_the_screen(terminal, tmp_path: Path) -> None:
    with FakeDaemon(ONE, TWO) as daemon, open(tmp_path / "out", "wb") as out:
        chat = terminal(daemon, stdout=out.fileno())
        for keys in ("a\r", "b\r"):
            chat.expect("> ")
            chat.type(keys)
        chat.expect("> ")
        assert chat.end(CTRL_D) == 0
    assert (tmp_path / "out").read_bytes() == b"one\ntwo\n"
