"""Bad input gets one clear line and the right exit code, and costs nobody anything."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.conftest import SCRIPTS, Toast, executable
from tests.hostile import run_hostile
from tests.unpack import unpack
from toastkit.frames import Head, dumps
from toastkit.model.locate import CRUMB


def refused(done, code: int, *said: str) -> None:
    """Nothing on stdout, one line and at most a hint on stderr."""
    text = done.stderr.decode()
    assert (done.returncode, done.stdout) == (code, b""), text
    first, *hint = text.splitlines()
    assert len(hint) <= 1 and "Traceback" not in text
    for words in said:
        assert words in first


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        (b"", "empty prompt"),
        (b"\n\n", "empty prompt"),
        (bytes(1 << 20), "the prompt has 1048626 characters, 163840 at most can fit"),
        (b"caf\xe9 au lait", "the prompt is not UTF-8: byte 0xe9 at offset 3"),
        (b"\xff\xfe" * 1000, "the prompt is not UTF-8: byte 0xff at offset 0"),
        (b"word " * 9000, "tokens, the model's context is 8192"),
    ],
    ids=["empty", "newlines", "nul", "latin1", "binary", "long"],
)
def test_prompts(toast: Toast, prompt: bytes, said: str):
    refused(toast("decode", "-v", stdin=prompt), 65, said)  # no word of a model that is loaded
    done = toast("tokenize", "--count", stdin=prompt)
    refused(done, 65, said)


def test_a_long_prompt_can_be_cut(toast: Toast, tmp_path: Path):
    model = unpack(tmp_path / "short", max_position_embeddings=128)
    done = toast("decode", "-m", model, "--truncate", "-n", "3", stdin=b"word " * 9000)
    assert done.returncode == 0 and done.stdout.strip()
    assert b"its beginning is cut off, 125 tokens are left" in done.stderr


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["decode"], "the prompt: over 32 MiB"),
        (["tokenize", "--count"], "the prompt: over 32 MiB"),
        (["toast", "--no-daemon"], "the prompt: over 32 MiB"),
        (["perplexity"], "standard input: over 32 MiB"),
        (["tokenize", "--count", "--messages", "-"], "messages: over 16 MiB"),
    ],
)
def test_an_input_without_end(command: list[str], said: str):
    """It is read as far as a text may go, and no further."""
    name, *options = command
    with subprocess.Popen(["yes", "y" * 1000], stdout=subprocess.PIPE) as source:
        taken = run_hostile([executable(name), *options], stdin=source.stdout)
        source.kill()
    assert taken.code == 65 and said in taken.error


def test_lines_are_read_one_by_one(toast: Toast):
    """So that a line that came is answered before the next one comes."""
    command = [executable("tokenize"), "--count", "--each-line", "--raw"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        for line in (b"a\n", b"\n\na b c d\r\n"):
            child.stdin.write(line)
            child.stdin.flush()
            assert int(child.stdout.readline()) > 0


@pytest.fixture
def other_model(tmp_path: Path) -> Path:
    """crumb with another base of its rotary embedding: another model."""
    folder = unpack(tmp_path / "other")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "rope_theta": 20000.0}))
    return folder


def test_a_session_of_another_model(toast: Toast, other_model: Path, tmp_path: Path):
    session = str(tmp_path / "session")
    assert toast("decode", "--session", session, "-n", "2", "hi", stdin=None).returncode == 0
    done = toast("decode", "-m", str(other_model), "--session", session, "hi", stdin=None)
    refused(done, 65, "belongs to another model")
    again = toast("decode", "-v", "--session", session, "-n", "2", "hi", stdin=None)
    assert again.returncode == 0


def test_a_stream_of_another_model(toast: Toast, other_model: Path):
    frames = toast("tokenize", "hi", stdin=None).stdout
    done = toast("prefill", "-m", str(other_model), stdin=frames)
    assert done.returncode == 65
    assert b"is not the model that this stream was tokenised for (crumb)" in done.stderr


@pytest.mark.parametrize("messages", ["nonsense", "[{}]"])
def test_json_that_is_not_messages(toast: Toast, messages: str):
    """What else they may not be: tests/unit/test_messages.py."""
    refused(toast("decode", "--messages", "-", stdin=messages.encode()), 65, "message")


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(99999) %}{{ 'x' * 999 }}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ 'x' * 10 ** 12 }}",
        "{{ raise_exception('no system turn, please') }}",
        "{% if %}",
    ],
)
def test_templates(other_model: Path, template: str):
    """One of each kind; the others are in test_sandbox and test_chat_template."""
    (other_model / "chat_template.jinja").write_text(template)
    command = [SCRIPTS / "toast-tokenize", "--template-only", "-m", other_model, "hi"]
    taken = run_hostile(command)
    assert (taken.code, taken.out) == (65, b"")
    assert taken.error.startswith("toast-tokenize: chat template: ")
    assert len(taken.error.splitlines()) <= 2


def test_tools_without_end(toast: Toast, tmp_path: Path):
    tools = tmp_path / "tools.json"
    tools.write_bytes(b"[" + b"[]," * (6 << 20) + b"[]]")
    taken = run_hostile([SCRIPTS / "toast-tokenize", "--tools", tools, "hi"])
    assert (taken.code, taken.error) == (65, "toast-tokenize: tools: over 16 MiB\n")
    done = toast("tokenize", "--count", "--tools", str(tmp_path), "hi", stdin=None)
    refused(done, 66, "is a directory")


def test_frames_of_a_newer_schema(toast: Toast):
    frames = dumps(Head("crumb", "f", 4096, [2], v=2))
    for name in ("prefill", "decode", "entropy-gear", "sample", "detokenize"):
        done = toast(name, stdin=frames)
        assert done.returncode == 65
        assert b"at byte 0: schema version 2 is newer than 1" in done.stderr


def test_a_session_with_something_else_in_it(tmp_path: Path):
    """A lock that is a link, a header that nobody writes: one line each, and nothing is touched."""
    (tmp_path / "victim").write_text("secret")
    for name in ("link", "fifo"):
        (tmp_path / name).mkdir()
    (tmp_path / "link" / "lock").symlink_to("../victim")
    os.mkfifo(tmp_path / "fifo" / "session.msgpack")
    for name, code, said in (("link", 73, "lock is a symbolic link"), ("fifo", 65, "is a FIFO")):
        taken = run_hostile([executable("decode"), "--session", tmp_path / name, "hi"])
        assert (taken.code, taken.out) == (code, b""), taken.error
        assert said in taken.error and len(taken.error.splitlines()) == 1
    assert (tmp_path / "victim").read_text() == "secret"


def test_a_frame_of_millions_of_lists():
    size = 1 << 20
    lists = b"\xdd" + size.to_bytes(4, "big") + b"\x90" * size
    stream = dumps(Head("m", "f", 4, [])) + b"\x82\xa1k\xa1z\xa1x\xdc\x00\x32" + lists * 50
    taken = run_hostile([executable("frames"), "--json"], stream)
    assert taken.code == 65 and "frame 2 at byte" in taken.error


def test_paths_that_are_not_utf8(toast: Toast, tmp_path: Path) -> None:
    """Frames tell the next command of them, and MLX is told where to read."""
    tokens = toast("tokenize", "hi").stdout
    path = os.fsencode(tmp_path) + b"/\xff"
    name = os.fsdecode(path)
    said = f"the next command cannot be told of {name!r}: it is not UTF-8"
    done = toast("prefill", "--no-daemon", "--session", name, stdin=tokens)
    assert done.returncode == 64 and said in done.stderr.decode()
    done = toast("tokenize", "--session", name, "hi")
    assert done.returncode == 64 and said in done.stderr.decode()
    model = Path(name).with_suffix(".toast")
    shutil.copy(CRUMB, model)
    refused(toast("decode", "-m", str(model), "hi"), 65, "MLX opens no path that is not UTF-8")
    done = toast("tokenize", "--debug", "--session", name, "hi")
    assert b"Traceback" in done.stderr and b"msgpack" in done.stderr


@pytest.mark.parametrize("encoding", ["latin-1", "ascii"])
def test_an_encoding_that_lacks_a_character(tmp_path: Path, encoding: str) -> None:
    """JSON is UTF-8 whatever the terminal has; a name is escaped."""
    (tmp_path / "日.txt").write_text("日本 Once upon a time", encoding="utf-8")
    frames = b"\x82\xa1k\xa4text\xa1s\xa6" + "日本".encode()
    for words, data, said in (
        (["frames", "--json"], frames, "日本".encode()),
        (["perplexity", "--json", "日.txt"], b"", "日.txt".encode()),
        (["perplexity", "日.txt", "日.txt"], b"", b"\\u65e5.txt"),
    ):
        done = subprocess.run(
            [executable(words[0]), *words[1:]], cwd=tmp_path, input=data, capture_output=True,
            env={**os.environ, "PYTHONIOENCODING": encoding},
        )  # fmt: skip
        assert done.returncode == 0 and said in done.stdout, done.stderr
