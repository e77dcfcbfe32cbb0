"""Conversations on disk: what is kept, who may read it, and what damage does."""

from __future__ import annotations

import json
import os
import shutil
import stat
from pathlib import Path

import pytest

from tests.unit.processes import start
from toastkit import private_files
from toastkit.client.chats import Chat, last_chat, named_chat
from toastkit.errors import (
    CannotCreateError,
    DataError,
    IOFailure,
    NoInputError,
    ToastError,
    UsageError,
)

HI = [{"role": "user", "content": "Hi!"}, {"role": "assistant", "content": "Hello."}]


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "toastkit" / "chats"


def keep(name: str | None, question: str = "Hi!", reply: str = "Hello.") -> Chat:
    chat = Chat(name)
    chat.add(question, reply)
    chat.save()
    return chat


def write(root: Path, name: str, text: str | bytes) -> None:
    root.mkdir(parents=True, exist_ok=True)
    (root / name).write_bytes(text if isinstance(text, bytes) else text.encode())


def test_a_named_conversation_is_begun_and_continued(root: Path) -> None:
    chat = named_chat("fox")
    assert chat.messages == [] and chat.system is None and not root.exists()
    assert chat.asking("Hi!") == HI[:1] and chat.messages == []
    chat.begin("You are a fox.")
    chat.add("Hi!", "Hello.")
    chat.save()
    again = named_chat("fox")
    assert again.system == "You are a fox." and again.messages[1:] == HI and again.name == "fox"
    again.add("And?", "So.\n\u2028é")
    again.save()
    said = [m["content"] for m in named_chat("fox").messages[1:]]
    assert said == ["Hi!", "Hello.", "And?", "So.\n\u2028é"]
    lines = (root / "fox.jsonl").read_text(encoding="utf-8").split("\n")
    roles = [json.loads(line)["role"] for line in lines[:-1]]
    assert roles == ["system", *["user", "assistant"] * 2] and lines[-1] == ""


def test_only_its_owner_may_read_it(root: Path) -> None:
    keep("fox")
    modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in (root.parent, root, *root.iterdir())}
    assert modes == {"toastkit": 0o700, "chats": 0o700, "fox.jsonl": 0o600, "last": 0o600}


def test_the_last_one_is_continued(root: Path) -> None:
    with pytest.raises(NoInputError, match="no conversation to continue"):
        last_chat()
    for name in ("fox", "fox ", " fox", "last"):
        keep(name)
        assert last_chat().name == name
    (root / "last.jsonl").unlink()
    with pytest.raises(NoInputError, match="no conversation to continue"):
        last_chat()


def test_of_those_without_a_name_the_newest_is_kept(root: Path) -> None:
    keep("last", "zero", "0")
    for question, reply in (("one", "1"), ("two", "2")):
        keep(None, question, reply)
        assert last_chat().name is None
        assert [m["content"] for m in last_chat().messages] == [question, reply]
    assert sorted(path.name for path in root.iterdir()) == [".unnamed.jsonl", "last", "last.jsonl"]
    assert named_chat("last").messages[0]["content"] == "zero"


def test_names_that_no_conversation_can_have(root: Path) -> None:
    for name in ("", "-x", ".unnamed", "a\nb", "x" * 129, "a/b", "./a", "..", "."):
        with pytest.raises(UsageError) as caught:
            named_chat(name)
        assert caught.value.hint is None  # a session could be a directory instead


DAMAGE = {
    "not JSON": (b'{"role": "user", "content": "Hi!"}\n{"role": "assi', 2, "not JSON"),
    "not an object": (b"[1]\n", 1, "not a message"),
    "no role": (b'{"content": "Hi!"}\n', 1, "not a message"),
    "another role": (b'{"role": "tool", "content": "Hi!"}\n', 1, "not a message"),
    "no content": (b'{"role": "user"}\n', 1, "without text"),
    "content of another kind": (b'{"role": "user", "content": 5}\n', 1, "without text"),
    "not UTF-8": (b'{"role": "user", "content": "\xff"}\n', 1, "UTF-8"),
    "UTF-16": ('{"role": "user", "content": "x"}'.encode("utf-16-le"), 1, "UTF-8|message|JSON"),
    "a lone surrogate": (b'{"role": "user", "content": "\\ud800"}\n', 1, "UTF-8"),
    "nested too deep": (b"[" * 100_000, 1, "not JSON"),
    "a long number": (b'{"role": "user", "content": ' + b"1" * 5000 + b"}", 1, "JSON|text"),
}


@pytest.mark.parametrize(("data", "line", "why"), DAMAGE.values(), ids=DAMAGE)
def test_damage_is_named_and_left_alone(root: Path, data: bytes, line: int, why: str) -> None:
    write(root, "fox.jsonl", data)
    with pytest.raises(DataError, match=rf"fox\.jsonl: line {line}: .*({why})") as caught:
        named_chat("fox")
    assert caught.value.hint and "\n" not in caught.value.message
    assert (root / "fox.jsonl").read_bytes() == data


def test_a_last_that_names_nothing(root: Path) -> None:
    for text in ("", "../fox", "a/b", "two\nlines", "\xff".encode("latin-1")):
        write(root, "last", text)
        with pytest.raises(DataError, match="last names no conversation"):
            last_chat()


def test_blank_lines_are_passed_over_and_a_file_in_the_way_is_told(root: Path) -> None:
    write(root, "fox.jsonl", json.dumps(HI[0]) + "\n\n" + json.dumps(HI[1]))
    assert named_chat("fox").messages == HI
    shutil.rmtree(root)
    write(root.parent, "chats", "")
    with pytest.raises(ToastError, match="cannot read"):
        named_chat("fox")
    with pytest.raises(CannotCreateError, match="cannot keep the conversation"):
        keep("fox")


def test_a_full_disk_leaves_the_last_turn(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chat = keep("fox")

    def full(*ignored: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(private_files, "pwrite_all", full)
    chat.add("And?", "So.")
    with pytest.raises(IOFailure, match="cannot keep .*no space left"):
        chat.save()
    assert named_chat("fox").messages == HI
    assert sorted(path.name for path in root.iterdir()) == ["fox.jsonl", "last"]


WRITER = """
import sys
from toastkit.client.chats import Chat
chat = Chat("fox")
print("ready", flush=True)
sys.stdin.readline()
for turn in range(20):
    chat.add(sys.argv[1] * 2000, f"{sys.argv[1]}{turn}")
    chat.save()
"""


def test_of_two_writers_the_last_whole_one_wins(root: Path) -> None:
    writers = [start(WRITER, Path(name)) for name in "ab"]
    try:
        for writer in writers:
            assert writer.stdout is not None and writer.stdout.readline() == "ready\n"
        for writer in writers:
            assert writer.stdin is not None
            writer.stdin.write("\n")
            writer.stdin.flush()
        seen = 0
        while any(writer.poll() is None for writer in writers):
            seen += _whole(root)
        assert [writer.wait() for writer in writers] == [0, 0]
    finally:
        for writer in writers:
            writer.kill()
            writer.wait()
            for pipe in (writer.stdin, writer.stdout):
                if pipe is not None:
                    pipe.close()
    assert _whole(root) and seen
    assert len(named_chat("fox").messages) == 40
    assert sorted(path.name for path in root.iterdir()) == ["fox.jsonl", "last"]


def _whole(root: Path) -> bool:
    """Whether there is a conversation; if so it has to be one writer's, with all its turns."""
    messages = named_chat("fox").messages
    assert len({message["content"][0] for message in messages}) <= 1
    assert [m["content"][1:] for m in messages[1::2]] == [str(n) for n in range(len(messages) // 2)]
    return bool(messages)
