"""Conversations on disk: $XDG_STATE_HOME/toastkit/chats/NAME.jsonl, one message per line.

A file is replaced atomically, by a rename, after each turn: of two concurrent writers the last one
wins, and nobody ever reads half a turn. Unnamed conversations share one file, so that only the
newest is kept. The file `last` names the one that `-c` continues.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from toastkit.base_directories import own_directory
from toastkit.errors import (
    DataError,
    NoInputError,
    ToastError,
    UsageError,
    from_os_error,
    reported_as,
)
from toastkit.private_files import make_private_directories, read_file, replace_file
from toastkit.session.names import resolve

SUFFIX = ".jsonl"
UNNAMED = ".unnamed"  # users' names cannot begin with a dot
LAST = "last"
MAX_BYTES = 64 << 20
ROLES = ("system", "user", "assistant")

Message = dict[str, Any]


class Chat:
    """A conversation, at first without messages. name: None if unnamed. messages: so far, as a
    backend takes them. path: its file, which need not exist."""

    def __init__(self, name: str | None):
        self.name = name
        self.path = chats_root() / ((UNNAMED if name is None else name) + SUFFIX)
        self.messages: list[Message] = []

    @property
    def system(self) -> str | None:
        """Its system message."""
        first = self.messages[0] if self.messages else {}
        return first.get("content") if first.get("role") == "system" else None

    def begin(self, system: str) -> None:
        """Give a conversation without messages its system message."""
        self.messages = [{"role": "system", "content": system}]

    def asking(self, question: str) -> list[Message]:
        """The messages of the next request."""
        return [*self.messages, {"role": "user", "content": question}]

    def add(self, question: str, answer: str) -> None:
        """Add a turn, without saving it."""
        self.messages = [*self.asking(question), {"role": "assistant", "content": answer}]

    def save(self) -> None:
        """Save it, and make it the one to continue. Raises CannotCreateError or IOFailure, leaving
        the file unchanged."""
        lines = (json.dumps(message, ensure_ascii=False) + "\n" for message in self.messages)
        _replace(self.path, "".join(lines))
        _replace(self.path.with_name(LAST), f"{UNNAMED if self.name is None else self.name}\n")


def chats_root() -> Path:
    """The directory of conversations, beside that of sessions."""
    return Path(own_directory("STATE", "chats"))


def named_chat(name: str) -> Chat:
    """The conversation of that name, without messages if it is new.

    Raises UsageError for an invalid session name, DataError for a damaged file.
    """
    _check_name(name)
    chat = Chat(name)
    chat.messages = _read(chat.path)
    return chat


def last_chat() -> Chat:
    """The conversation to continue. Raises NoInputError if there is none, DataError for a damaged
    file."""
    path = chats_root() / LAST
    try:
        name = read_file(path, MAX_BYTES).decode().removesuffix("\n")
        if name != UNNAMED:
            _check_name(name)
    except FileNotFoundError as error:
        raise _nothing() from error
    except OSError as error:
        raise from_os_error(error, f"cannot read {path}") from error
    except (ValueError, UsageError) as error:
        raise DataError(f"{path} names no conversation", hint="give --session NAME") from error
    chat = Chat(None if name == UNNAMED else name)
    chat.messages = _read(chat.path)
    if not chat.messages:
        raise _nothing()
    return chat


def _nothing() -> ToastError:
    return NoInputError("no conversation to continue", hint="the next answer begins one")


def _check_name(name: str) -> None:
    """A conversation's name must be a session name, not a directory."""
    if "/" in name or name in (".", ".."):
        raise UsageError(f"a conversation has a name, not a path: {name[:100]}")
    try:
        resolve(name)
    except UsageError as error:
        raise UsageError(error.message) from error  # the hint is about a directory


def _read(path: Path) -> list[Message]:
    """The messages of a file, none if it does not exist."""
    try:
        data = read_file(path, MAX_BYTES)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise from_os_error(error, f"cannot read {path}") from error
    if len(data) > MAX_BYTES:
        raise DataError(f"{path} is larger than {MAX_BYTES >> 20} MiB", hint="begin another one")
    messages = []
    for number, line in enumerate(data.split(b"\n"), 1):
        if line.strip():
            try:
                messages.append(_message(line))
            except ValueError as error:
                raise DataError(
                    f"{path}: line {number}: {error}",
                    hint="mend or remove it, or begin another conversation",
                ) from error
    return messages


def _message(line: bytes) -> Message:
    """Parse a line. Raises ValueError that says what is wrong."""
    try:
        message = json.loads(line.decode("utf-8"))
        json.dumps(message, ensure_ascii=False).encode()  # a lone surrogate is not text
    except (ValueError, RecursionError) as error:
        raise ValueError("not JSON in UTF-8") from error
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        raise ValueError("not a message of system, user or assistant")
    if not isinstance(message.get("content"), str):
        raise ValueError("a message without text")
    return message


def _replace(path: Path, text: str) -> None:
    """Replace a file's contents atomically."""
    with reported_as(f"cannot keep the conversation in {path}", creating=True):
        make_private_directories(path.parent)
        replace_file(path, text.encode(), sync=False, contended=True)
