"""What a terminal gets, and what becomes of a command whose standard streams are odd."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import executable
from tests.forked import start
from tests.terminals import Terminal as Session
from toastkit.commands import program_name, progress
from toastkit.commands.cli import print_error, say
from toastkit.commands.progress import ProgressBar
from toastkit.errors import DataError
from toastkit.frames import End, Error, FrameReader, Head, Token, Unknown, dumps
from toastkit.session.feed import FeedReader
from toastkit.text.terminal import harmless, shown

COLUMNS = 30
ATTACK = "\x1b]0;owned\x07\x9b2J\x1b[2J\r\nx\u202e"
RUN = [Head("crumb", "ab" * 16, 4096, [2]), Token(2, 723, -0.5), End("eos", 1)]
STREAM = b"".join(map(dumps, RUN))
SECONDS = 20  # no test waits so long, unless something hangs


class Terminal:
    """A pseudo-terminal of COLUMNS columns. tty: the end for a command."""

    def __init__(self) -> None:
        self._main, self.tty = pty.openpty()
        fcntl.ioctl(self.tty, termios.TIOCSWINSZ, struct.pack("HHHH", 24, COLUMNS, 0, 0))
        self._data = b""
        self._thread = threading.Thread(target=self._collect, daemon=True)
        self._thread.start()

    def _collect(self) -> None:
        with suppress(OSError):  # Linux says so where everybody has closed the other end
            while data := os.read(self._main, 4096):
                self._data += data

    def written(self) -> str:
        """All that was written, after which it is closed."""
        os.close(self.tty)
        self._thread.join(SECONDS)
        os.close(self._main)
        return self._data.decode()

    def run(self, name: str, *arguments: str, fds: tuple[int, ...], **popen) -> tuple[int, str]:
        """Runs a command with the terminal as some of its standard streams: (code, written)."""
        streams = {
            key: self.tty for fd, key in enumerate(("stdin", "stdout", "stderr")) if fd in fds
        }
        settings = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, **popen, **streams}
        return start(name, *arguments, **settings).wait(SECONDS), self.written()


@pytest.fixture
def terminal() -> Terminal:
    return Terminal()


def screen(data: str, columns: int) -> list[str]:
    """The lines that a terminal shows after some output of text, \\r and \\n."""
    lines, at = [""], 0
    for character in data:
        if character == "\n":
            lines.append("")
        elif character == "\r":
            at = 0
        else:
            assert character.isprintable(), repr(character)
            if at == columns:
                lines.append("")
                at = 0
            lines[-1] = lines[-1][:at].ljust(at) + character + lines[-1][at + 1 :]
            at += 1
    return [line.rstrip() for line in lines]


# --------------------------------------------------------------------------------------- progress


@pytest.fixture
def impatient(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Terminal]:
    """To be called in the test, for pytest has its own idea of stderr before: makes it the terminal
    and takes everybody's patience."""

    def begin() -> Terminal:
        monkeypatch.setattr(progress, "PATIENCE", 0.0)
        stream = open(terminal.tty, "w", encoding="utf-8", closefd=False)
        monkeypatch.setattr(sys, "stderr", stream)
        return terminal

    return begin


def appear() -> None:
    """Waits for the timer that shows a bar."""
    for thread in threading.enumerate():
        if isinstance(thread, threading.Timer):
            thread.join(2 * SECONDS)


@pytest.mark.parametrize("label", ["prefill", "x" * 200, "\x1b[2J"])
def test_a_bar_keeps_to_its_line_and_vanishes(impatient, label: str) -> None:
    terminal = impatient()
    bar = ProgressBar(label)
    bar(0, 5202)
    appear()
    for done in range(0, 5202, 100):
        bar(done, 5202, "perplexity 1.2345")
    time.sleep(0.15)  # tqdm draws ten times a second at most
    bar(5201, 5202, "perplexity 1.2345")
    bar(5202, 5202)
    text = terminal.written()
    assert label[:4] in text or label == "\x1b[2J"
    assert "\x1b" not in text  # the cursor is never hidden, so it cannot stay so
    assert screen(text, COLUMNS) == [""]
    drawn = [len(line.rstrip()) for line in text.split("\r")]
    assert COLUMNS // 2 < max(drawn) < COLUMNS - 2  # room for ^C


def test_a_bar_shows_where_the_work_is_before_its_first_part_is_done(impatient) -> None:
    terminal = impatient()
    bar = ProgressBar("prefill")
    bar(7, 5202)
    appear()
    bar.close()
    assert "7/5202" in terminal.written()


def test_without_a_total_only_the_label_is_shown(impatient) -> None:
    terminal = impatient()
    bar = ProgressBar("loading crumb")
    bar()
    appear()
    bar.close()
    text = terminal.written()
    assert text.strip() == "loading crumb" and screen(text, COLUMNS) == [""]


def test_quick_work_shows_nothing(impatient, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = impatient()
    monkeypatch.setattr(progress, "PATIENCE", SECONDS)
    bar = ProgressBar("prefill")
    for done in (0, 5, 10, 0, 10):
        bar(done, 10)
    appear()  # it was called off, or would show now
    assert terminal.written() == ""


def test_a_line_that_is_said_meanwhile_is_whole(impatient) -> None:
    terminal = impatient()
    bar = ProgressBar("prefill")
    bar(7, 5202)
    appear()
    say("hello")
    bar.close()
    lines = screen(terminal.written(), COLUMNS)
    assert lines[0].endswith(": hello") and lines[1:] == [""]


ENDS = """
import sys, threading
from toastkit.commands import cli, progress
progress.PATIENCE = 0
bar = progress.ProgressBar("prefill")
bar(1, 9)
for timer in threading.enumerate()[1:]:
    timer.join()
{end}
"""


@pytest.mark.parametrize(
    "end", ["print(end='^C'); raise KeyboardInterrupt", "sys.exit(143)", "cli.die_by_sigpipe()"]
)
def test_an_interrupted_bar_vanishes_too(terminal: Terminal, end: str) -> None:
    code = ["-c", "import sys; sys.excepthook = lambda *a: None" + ENDS.format(end=end)]
    tty = terminal.tty  # which itself adds ^C
    subprocess.run([sys.executable, "-u", *code], stdout=tty, stderr=tty, timeout=SECONDS)
    text = terminal.written()
    assert "1/9" in text and screen(text, COLUMNS) == [""]


# --------------------------------------------------------------------------------- others' texts


# Listed, for Hypothesis takes seconds to find out what all of Unicode is.
@given(st.text([chr(c) for c in (*range(0x180), 0x5D0, 0x202E, 0x200D, 0xD800, 0xDCE9, 0x1F469)]))
def test_nothing_that_is_shown_can_command_a_terminal(text: str) -> None:
    assert shown(text).isprintable()
    kept = harmless(text)
    assert all(c in "\t\n\r" or not ("\0" <= c < " " or "\x7f" <= c < "\xa0") for c in kept)
    assert harmless(kept) == kept and shown(shown(text)) == shown(text)


def test_texts_of_people_stay_as_they_are() -> None:
    text = "Grüße, 世界! \U0001f469\u200d\U0001f680\tשלום\r\n"
    assert harmless(text) == text
    assert shown("Grüße, 世界!") == "Grüße, 世界!"
    assert shown(os.fsdecode(b"caf\xe9 \x1b")) == r"caf\xe9 \x1b"


def test_lines_for_people_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    print_error(DataError(f"a{ATTACK}", hint=f"b{ATTACK}"), "toast-x")
    say(f"c{ATTACK}")
    text = capsys.readouterr().err
    escaped = r"\x1b]0;owned\x07\x9b2J\x1b[2J\r\nx\u202e"
    lines = text.splitlines()
    assert lines[:2] == [f"toast-x: a{escaped}", f"  hint: b{escaped}"]
    assert lines[2].endswith(f": c{escaped}") and len(lines) == 3


@pytest.mark.parametrize("name", ["sample", "frames"])
def test_an_error_frame_cannot_command_the_terminal(pipeline, name: str) -> None:
    odd = [Unknown(f"k{ATTACK}", {}), Error(65, f"s{ATTACK}", f"m{ATTACK}", f"h{ATTACK}")]
    option = ["--stat"] if name == "frames" else []
    done = pipeline([name, *option], stdin=b"".join(map(dumps, [RUN[0], *odd])))
    told = done.errors[0].encode() if name == "sample" else done.out
    assert b"owned" in told and not set(b"\x1b\x07\x9b\r") & set(told)


@pytest.mark.parametrize("form", [["--template-only", "--raw"]])
def test_text_is_data_in_a_pipe_and_harmless_on_a_terminal(
    toast, terminal: Terminal, form: list[str]
) -> None:
    text = "a\x1b[2J\x9b2J b\tc\nd"
    assert toast("tokenize", *form, text).stdout == text.encode()
    code, told = terminal.run("tokenize", *form, text, fds=(1,))
    assert (code, told) == (0, "a\\x1b[2J\\x9b2J b\tc\r\nd")


# ------------------------------------------------------------------------ frames on a terminal

WRITERS = [
    ("tokenize", ["hi"]), ("prefill", []), ("decode", ["--greedy"]), ("entropy-gear", []),
    ("sample", []), ("detokenize", ["--frames"]), ("frames", []), ("feed", []),
]  # fmt: skip


@pytest.mark.parametrize(("name", "arguments"), WRITERS)
def test_frames_are_not_painted_on_a_terminal(
    terminal: Terminal, tmp_path: Path, name: str, arguments: list[str]
) -> None:
    source = tmp_path / "frames"
    source.write_bytes(b"" if name == "tokenize" else STREAM)
    with source.open("rb") as stdin:
        code, text = terminal.run(name, *arguments, fds=(1, 2), stdin=stdin)
    first, hint = text.splitlines()
    assert (code, first) == (64, f"{program_name(name)}: frames are not for a terminal")
    assert "toast-frames --json" in hint


def test_text_goes_to_a_terminal_as_ever(terminal: Terminal, tmp_path: Path) -> None:
    (tmp_path / "frames").write_bytes(STREAM)
    with (tmp_path / "frames").open("rb") as stdin:
        code, text = terminal.run("frames", "--json", fds=(1, 2), stdin=stdin)
    assert code == 0 and text.count('"k"') == 3


READERS = [("prefill", []), ("feed", []), ("entropy-gear", []), ("sample", []), ("detokenize", []),
           ("frames", []), ("frames", ["--stat"]), ("frames", ["--json"])]  # fmt: skip


@pytest.mark.parametrize(("name", "arguments"), READERS)
def test_frames_are_not_read_from_a_terminal(
    terminal: Terminal, name: str, arguments: list[str]
) -> None:
    code, text = terminal.run(name, *arguments, fds=(0, 2))
    first, hint = text.splitlines()
    assert (code, first) == (64, f"{program_name(name)}: frames are not read from a terminal")
    assert "toast-tokenize" in hint


def test_ids_are_typed_to_a_run_that_is_named(tmp_path: Path) -> None:
    """Nothing of them is written, so that standard output may be the terminal, too."""
    os.mkfifo(tmp_path / "feed", 0o600)
    feed = FeedReader(tmp_path / "feed")
    for typed, sent in (("", []), ("5 6\n", [5, 6])):
        with closing(Session(executable("feed"), "--run", str(tmp_path))) as session:
            session.expect("toast-feed: reading token ids from the terminal, up to Ctrl-D")
            assert session.end(f"{typed}\x04") == 0
        assert [message.id for message in feed.read_available()] == [*sent, None]
    feed.close()


@pytest.mark.parametrize(("stdin", "hint"), [(b"hi\n", "toast-tokenize"), (b"{}\n", "--from-json")])
@pytest.mark.parametrize("name", ["prefill", "frames"])
def test_what_is_no_frames_is_told_what_it_is(toast, name: str, stdin: bytes, hint: str) -> None:
    done = toast(name, stdin=stdin)
    assert done.returncode == 65 and hint in done.stderr.decode().splitlines()[1]


# -------------------------------------------------------------------------- standard streams


def closed(redirection: str, name: str, *arguments: str) -> subprocess.CompletedProcess:
    """A command that a shell starts with some of its standard streams closed."""
    return subprocess.run(
        ["sh", "-c", f'exec "$0" "$@" {redirection}', executable(name), *arguments],
        stdin=subprocess.DEVNULL, capture_output=True, timeout=60,
    )  # fmt: skip


@pytest.mark.parametrize("name", ["tokenize", "decode", "toast"])
def test_a_closed_stdout_is_one_line(name: str) -> None:
    done = closed(">&-", name, "hello")
    expected = f"{program_name(name)}: cannot write: standard output is closed\n"
    assert (done.returncode, done.stderr.decode()) == (74, expected)


def test_a_closed_stdout_matters_once_something_is_written() -> None:
    done = closed(">&-", "toasted", "--version")
    told = b"toasted: cannot write: standard output is closed\n"
    assert (done.returncode, done.stderr) == (74, told)


def test_errors_without_a_stderr_go_nowhere() -> None:
    """Not to stdout, and not into the next file that is opened."""
    done = closed("2>&-", "toast", "--session", ".", "hi")
    assert (done.returncode, done.stdout, done.stderr) == (64, b"", b"")
    done = closed("2>&-", "tokenize", "hello")
    assert done.returncode == 0
    assert [type(f).__name__ for f in FrameReader(io.BytesIO(done.stdout))] == ["Head", "Tokens"]


@pytest.mark.parametrize(
    ("arguments", "code", "out"),
    [(["--count", "--raw", "hi"], 0, b"2\n"), (["--count", "-"], 65, b"")],
)
def test_a_closed_stdin_is_empty(arguments: list[str], code: int, out: bytes) -> None:
    done = closed("<&-", "tokenize", *arguments)
    assert (done.returncode, done.stdout) == (code, out), done.stderr


def test_the_pager_dies_of_a_closed_pipe(tmp_path: Path) -> None:
    """Python ignores SIGPIPE; what a command becomes must not."""
    man = tmp_path / "man"
    man.write_text("#!/bin/sh\nwhile :; do echo line; done\n")
    man.chmod(0o755)
    script = '("$0" --man; echo "code $?" >&2) | head -1'
    done = subprocess.run(
        ["bash", "-c", script, executable("decode")], capture_output=True, timeout=SECONDS,
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
    )  # fmt: skip
    assert (done.stdout, done.stderr) == (b"line\n", b"code 141\n")
