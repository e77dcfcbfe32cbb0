"""toast as a client: options, refusals, errors and signals, against a daemon with scripted
replies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from tests.forked import executable
from tests.pipes.pipelines import begin, json_lines
from tests.pipes.toast_runs import kept, without_out
from tests.terminals import Terminal
from tests.unit.fake_daemon import DROP, END, HOLD, SECONDS, FakeDaemon, answer, failure
from tests.unit.test_cli import lines_of
from toastkit.commands import program_name
from toastkit.daemon.pidfile import Pidfile, process_at

Run = Callable[..., subprocess.CompletedProcess]
HELLO = answer("Hello", " there.")


def started(daemon: FakeDaemon, *arguments: str):
    return begin("toast", *arguments, env={"TOAST_SOCKET": daemon.path})


def contents(request: dict) -> list[str]:
    return [message["content"] for message in request["messages"]]


IMPATIENT = """
from toastkit import wire
from toastkit.commands.{} import main
wire.SILENCE_SECONDS = 0.1
main()
"""


def test_a_person_is_told_of_a_silent_daemon(home: Path) -> None:
    """One line, after some seconds, in which the process is named that the pidfile has."""
    with FakeDaemon([HOLD]) as daemon, ExitStack() as opened:
        assert process_at(daemon.path) is None
        with closing(Pidfile.take(f"{daemon.path}.pid")):
            pass  # of one that was killed: the number may be anybody's
        assert process_at(daemon.path) is None
        opened.enter_context(closing(Pidfile.take(f"{daemon.path}.pid")))
        who = f"the daemon at {daemon.path} (process {os.getpid()})"
        waiting = {}
        for name in ("toast", "decode"):
            command = [sys.executable, "-c", IMPATIENT.format(name), "Hi!"]
            terminal = Terminal(*command, env={"TOAST_SOCKET": daemon.path})
            waiting[name] = opened.enter_context(closing(terminal))
        for name, terminal in waiting.items():
            terminal.expect(f"{program_name(name)}: waiting for {who}: Ctrl-C ends that\r\n")
            assert terminal.end("\x03") == 130 and b"waiting" not in terminal.screen


# ------------------------------------------------------------------------------------------- asking


def test_words_go_in_and_text_comes_out(ask: Run, home: Path) -> None:
    with FakeDaemon(HELLO) as daemon:
        done = ask(daemon, "Say", "hello")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"Hello there.\n", b"")
    assert daemon.request == {"messages": [{"role": "user", "content": "Say hello"}],
                              "options": {}}  # fmt: skip
    assert kept(home) == ["Say hello", "Hello there."]


@pytest.mark.parametrize(
    ("stdin", "words", "question"),
    [
        (b"a text\n", ["summarise"], "a text\n\nsummarise"),
        (b"a text\n", [], "a text"),
        (b"\n", ["hi"], "hi"),
        (b"a text", ["-", "short"], "a text\n\nshort"),
        ("é\u2028\n".encode(), ["x"], "é\u2028\n\nx"),
    ],
)
def test_piped_text_goes_before_the_words(
    ask: Run, stdin: bytes, words: list[str], question: str
) -> None:
    with FakeDaemon(HELLO) as daemon:
        assert ask(daemon, *words, stdin=stdin).returncode == 0
    assert contents(daemon.request) == [question]


def test_json_is_the_replies(ask: Run, home: Path) -> None:
    replies = [{"progress": {"done": 5, "total": 9, "cached": 3}}, *HELLO]
    with FakeDaemon(replies) as daemon:
        done = ask(daemon, "--json", "hi")
    assert json_lines(done.stdout) == replies
    assert done.stderr == b"" and kept(home) == ["hi", "Hello there."]


def test_json_shows_errors_too(ask: Run) -> None:
    with FakeDaemon(failure(75, "busy: 64 requests are waiting", "try again later")) as daemon:
        done = ask(daemon, "--json", "hi")
    assert json.loads(done.stdout)["error"]["code"] == 75 == done.returncode
    assert done.stderr == (b"toast: busy: 64 requests are waiting\n  hint: try again later\n")


def test_extract(ask: Run, home: Path) -> None:
    text = "Here:\n```python\nprint(1)\n```\nand\n```\nmore\n```\n"
    with FakeDaemon(answer(text[:20], text[20:])) as daemon:
        assert ask(daemon, "-x", "hi", TOAST_JSON="1").stdout == b"print(1)\n"
    assert kept(home) == ["hi", text]


@pytest.mark.parametrize("said", [("Hello ", "there."), ("```py", "thon")])
def test_nothing_to_extract(ask: Run, home: Path, said: tuple[str, str]) -> None:
    """No block, or one cut off before its first line."""
    with FakeDaemon(answer(*said)) as daemon:
        message, _ = lines_of(ask(daemon, "-x", "hi"), "toast", 65)
    assert message == "the answer holds no code block"
    assert kept(home) == ["hi", "".join(said)], "toast -c can ask for one"


def test_usage_and_verbose(ask: Run) -> None:
    usage = b"toast: prompt 12 (cached 8), answer 6, first token 0.25 s, 10.0 tokens/s\n"
    with FakeDaemon(HELLO) as daemon:
        assert ask(daemon, "--usage", "hi").stderr == usage
        lines = ask(daemon, "-v", "hi").stderr.decode().splitlines()
    assert lines == [
        f"toast: using the daemon at {daemon.path}",
        "toast: 8/12 prompt tokens cached: the last message is new",
    ]


def test_fail_on_length(ask: Run, home: Path) -> None:
    with FakeDaemon(answer("cut", reason="length")) as daemon:
        assert ask(daemon, "hi").returncode == 0
        done = ask(daemon, "--fail-on-length", "hi")
    told = lines_of(without_out(done), "toast", 65)
    assert told[0] == "the answer was cut off after 6 tokens"
    assert done.stdout == b"cut\n" and kept(home) == ["hi", "cut"]


# ------------------------------------------------------------------------------------------ options

OPTIONS = [
    (["--temp", "0.5"], {"temperature": 0.5}),
    (["--top-k", "40"], {"top_k": 40}),
    (["--top-p", "0.9"], {"top_p": 0.9}),
    (["--min-p", "0.1"], {"min_p": 0.1}),
    (["--min-tokens-to-keep", "2"], {"min_tokens_to_keep": 2}),
    (["--typical-p", "0.8"], {"typical_p": 0.8}),
    (["--xtc-probability", "0.5"], {"xtc_probability": 0.5}),
    (["--xtc-threshold", "0.2"], {"xtc_threshold": 0.2}),
    (["--repetition-penalty", "1.1"], {"repetition_penalty": 1.1}),
    (["--presence-penalty", "-1"], {"presence_penalty": -1.0}),
    (["--frequency-penalty", "1"], {"frequency_penalty": 1.0}),
    (["--penalty-context", "64"], {"penalty_context": 64}),
    (["--logit-bias", "5=1.5", "--logit-bias", "7=-2"], {"logit_bias": {"5": 1.5, "7": -2.0}}),
    (["--ban", "5", "--ban", "6"], {"ban": [5, 6]}),
    (["--seed", str(2**64 - 1)], {"seed": 2**64 - 1}),
    (["--ignore-eos"], {"ignore_eos": True}),
    (["--json", "--top", "3"], {"top": 3, "tokens": True}),
    (["-n", "9"], {"max_tokens": 9}),
    (["--stop", "a", "--stop", "é"], {"stop": ["a", "é"]}),
    (["--template-arg", "x=1", "--template-arg", "y=z"], {"template": {"x": 1, "y": "z"}}),
]
OTHER_NAMES = [
    (["--temperature", "0"], {"temperature": 0.0}),
    (["--repeat-penalty", "1.1"], {"repetition_penalty": 1.1}),
]


@pytest.mark.parametrize("options", [OPTIONS, OTHER_NAMES], ids=["all", "aliases"])
def test_options_arrive(ask: Run, options: list[tuple[list[str], dict]]) -> None:
    with FakeDaemon(HELLO) as daemon:
        done = ask(daemon, *(word for words, _ in options for word in words), "hi")
    assert done.returncode == 0, done.stderr
    expected = {name: value for _, sent in options for name, value in sent.items()}
    assert daemon.request["options"] == expected


def test_tools_arrive_and_notes_are_told(ask: Run, tmp_path: Path) -> None:
    tools = tmp_path / "tools.json"
    tools.write_text('{"tools": [{"name": "f"}]}')
    with FakeDaemon(answer("Hi", notes=["no use of 'tools'", 3])) as daemon:
        done = ask(daemon, "--tools", tools, "hi")
        quiet = ask(daemon, "-q", "--tools", tools, "hi")
        ask(daemon, "--tools", "-", "hi", stdin=tools.read_bytes())  # no part of the question
    assert [request["tools"] for request in daemon.requests] == [[{"name": "f"}]] * 3
    assert [request["messages"][0]["content"] for request in daemon.requests] == ["hi"] * 3
    assert (done.stderr, quiet.stderr) == (b"toast: no use of 'tools'\n", b"")


def test_every_sampling_option_is_among_them() -> None:
    from toastkit.commands.options import SAMPLING_NAMES

    tried = {name for _, options in OPTIONS for name in options}
    assert {*SAMPLING_NAMES, "seed", "logit_bias", "ban", "ignore_eos", "top"} <= tried


def test_variables_count_too(ask: Run) -> None:
    with FakeDaemon(HELLO) as daemon:
        ask(daemon, "hi", TOAST_TEMP="0.5", TOAST_SYSTEM="Be brief.", TOAST_TOP="3")
    assert daemon.request["options"] == {"temperature": 0.5}
    assert contents(daemon.request) == ["Be brief.", "hi"]


def test_a_model_is_named_as_the_daemon_understands_it(ask: Run, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").touch()
    given = os.path.relpath(folder)
    with FakeDaemon(HELLO) as daemon:
        for name in ("crumb", "org/name", given):
            ask(daemon, "-m", name, "hi")
        ask(daemon, "hi", TOAST_MODEL="mine")
    assert [r["model"] for r in daemon.requests] == ["crumb", "org/name", str(folder), "mine"]


# ----------------------------------------------------------------------------------------- refusals

REFUSED = [
    (["--top", "3", "hi"], 64, "--top needs --json, which shows them"),
    (["-x", "--json", "hi"], 64, "-x is for one answer as text, not with --json"),
    (["-x", "--chat"], 64, "-x is for one answer as text, not with --chat"),
    (["--tools", "-", "--chat"], 64, "--chat and --tools cannot both be standard input"),
    (["--tools", "-", "-"], 64, "the prompt and --tools cannot both be standard input"),
    (["--no-daemon", "--socket", "x", "hi"], 64, "--socket is for a daemon, not with --no-daemon"),
    (["-q", "--usage", "hi"], 64, "--usage has something to say, but not with --quiet"),
    (["--device", "cpu", "--socket", "x", "hi"], 64, "--device is for a model in this process"),
    (["--temp", "nan", "hi"], 64, "invalid temperature: nan is not"),
    (["--logit-bias", "5=inf", "hi"], 64, "invalid logit-bias: inf is not"),
    (["--logit-bias", "5=1", "--logit-bias", "5=2", "hi"], 64, "id 5 is given twice"),
    (["--logit-bias", "five", "hi"], 64, "--logit-bias takes ID=B"),
    (["--template-arg", "x", "hi"], 64, "--template-arg takes NAME=VALUE"),
    (["--session", "a/b", "hi"], 64, "a conversation has a name, not a path: a/b"),
    (["--session", ".x", "hi"], 64, "invalid session name"),
    (["-c", "hi"], 66, "no conversation to continue"),
    (["--no-history", "--session", "fox", "hi"], 66, "no conversation fox, and none is to be kept"),
    (["--extrct", "hi"], 64, "no such option"),
    ([], 65, "empty prompt"),
    (["-"], 65, "empty prompt"),
]


@pytest.mark.parametrize(("arguments", "code", "message"), REFUSED)
def test_refusals(ask: Run, home: Path, arguments: list[str], code: int, message: str) -> None:
    with FakeDaemon(HELLO) as daemon:
        assert message in lines_of(ask(daemon, *arguments), "toast", code)[0]
    assert daemon.connections == 0 and not home.exists()


def test_a_socket_that_was_asked_for_has_to_answer(toast, tmp_path: Path) -> None:
    done = toast("toast", "--socket", str(tmp_path / "s"), "hi")
    assert lines_of(done, "toast", 69)[0] == f"no daemon answers at {tmp_path / 's'}"


# ------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("code", [64, 66, 70])
def test_errors_of_the_daemon(ask: Run, home: Path, code: int) -> None:
    with FakeDaemon(failure(code, "it cannot be done", "do another thing")) as daemon:
        told = lines_of(ask(daemon, "hi"), "toast", code)
    assert told == ("it cannot be done", "do another thing") and kept(home) == []


def test_a_daemon_that_goes_away_in_mid_answer(ask: Run, home: Path) -> None:
    with FakeDaemon(HELLO, [{"text": "I"}, END]) as daemon:
        ask(daemon, "hi")
        done = ask(daemon, "-c", "and?")
    assert done.stdout == b"I\n", "the error has a line of its own"
    told = lines_of(without_out(done), "toast", 69)
    assert told == ("the daemon went away in mid-answer", "toast -c goes on from the last turn")
    assert kept(home) == ["hi", "Hello there."]


def test_where_there_is_no_way_on(ask: Run, home: Path) -> None:
    """Nothing is kept of the conversation, so nothing is said of going on with it."""
    with FakeDaemon([{"text": "I"}, END]) as daemon:
        done = ask(daemon, "hi")
    told = lines_of(without_out(done), "toast", 69)
    assert told == ("the daemon went away in mid-answer", "")
    with FakeDaemon(answer("I was", reason="interrupt")) as daemon:
        done = ask(daemon, "--no-history", "hi")
    assert lines_of(without_out(done), "toast", 69)[1] == "" and kept(home) == []


def test_an_answer_that_the_daemon_breaks_off(ask: Run, home: Path) -> None:
    with FakeDaemon(answer("I was", reason="interrupt")) as daemon:
        done = ask(daemon, "hi")
    assert lines_of(without_out(done), "toast", 69)[0].endswith("broke the answer off")
    assert done.stdout == b"I was\n" and kept(home) == ["hi", "I was"]


@pytest.mark.parametrize(
    "reply",
    [
        {"text": 5},
        {"end": 5},
        {"end": {"reason": None, "n": 1, "text": ""}},
        {"end": {"reason": "eos", "n": "1", "text": ""}},
        {"end": {"reason": "eos", "n": 1}},
        {"progress": {"total": 5}},
        {"progress": {"total": "5", "done": 1}},
        {"stats": []},
        {"stats": {"seconds": 1}},
        {"stats": {"seconds": {"first": "a"}}},
        {"stats": {"answer": None}},
    ],
)
def test_what_is_no_reply(ask: Run, home: Path, reply: dict) -> None:
    with FakeDaemon([reply, DROP]) as daemon:
        lines_of(ask(daemon, "--usage", "hi"), "toast", 65)
    assert kept(home) == []


def test_kinds_of_replies_that_it_does_not_know(ask: Run) -> None:
    with FakeDaemon([{"weather": "fine"}, *HELLO]) as daemon:
        assert ask(daemon, "hi").stdout == b"Hello there.\n"


def test_a_conversation_that_cannot_be_kept(ask: Run, tmp_path: Path) -> None:
    (tmp_path / "toastkit").touch()
    with FakeDaemon(HELLO) as daemon:
        done = ask(daemon, "hi")
        assert done.stdout == b"Hello there.\n"
        assert "cannot keep" in lines_of(without_out(done), "toast", 73)[0]
        assert ask(daemon, "--no-history", "hi").returncode == 0


# ------------------------------------------------------------------------------------ interruptions


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_signal_in_mid_answer(home: Path, number: int, code: int) -> None:
    with FakeDaemon([{"text": "I am"}, HOLD]) as daemon:
        process = started(daemon, "hi")
        first = os.read(process.stdout.fileno(), 99)
        process.send_signal(number)
        out, err = process.communicate(timeout=SECONDS)
        assert daemon.gone.wait(SECONDS)
    assert (process.returncode, first + out, err) == (code, b"I am\n", b"")
    assert kept(home) == ["hi", "I am"], "-c goes on from what was seen"


def test_a_signal_before_the_first_word(home: Path) -> None:
    with FakeDaemon([{"progress": {"done": 1, "total": 9, "cached": 0}}, HOLD]) as daemon:
        process = started(daemon, "--json", "hi")
        assert process.stdout.readline()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=SECONDS)
        assert daemon.gone.wait(SECONDS)
    assert (process.returncode, out, err) == (130, b"", b"") and kept(home) == []


def test_a_reader_that_goes_away(home: Path) -> None:
    with FakeDaemon([{"text": "Hello there"}, HOLD]) as daemon:
        process = started(daemon, "hi")
        assert os.read(process.stdout.fileno(), 5) == b"Hello"
        process.stdout.close()
        assert process.wait(SECONDS) == -signal.SIGPIPE, "noticed while it waits for more"
        assert daemon.gone.wait(SECONDS)
        assert process.stderr.read() == b""
        process.stderr.close()
    assert kept(home) == ["hi", "Hello there"]


def test_in_a_pipeline_with_head(home: Path) -> None:
    pieces = [{"text": "x" * 4096}] * 200
    with FakeDaemon([*pieces, HOLD]) as daemon:
        command = f"{executable('toast')} hi | head -c 5; echo ${{PIPESTATUS[0]}}"
        done = subprocess.run(
            ["bash", "-c", command], stdin=subprocess.DEVNULL, capture_output=True,
            timeout=SECONDS, env={**os.environ, "TOAST_SOCKET": daemon.path},
        )  # fmt: skip
    assert (done.stdout, done.stderr) == (b"xxxxx141\n", b"")
