"""Chat messages: the OpenAI-style list of {role, content} that a chat template is rendered with."""

from __future__ import annotations

import json
from typing import Any

from toastkit.errors import DataError

_SHAPE = 'a list of {"role": ..., "content": ...}, or an object with it under "messages"'


def user_messages(text: str, system: str | None = None) -> list[dict]:
    """One user turn, after a system turn where there is one."""
    messages = [{"role": "user", "content": text}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    return messages


def load_messages(data: str | bytes) -> list[dict]:
    """Reads messages from JSON, UTF-8 where it is bytes: a list, or an object that holds it.
    Raises DataError for anything else, and as check_messages does.
    """
    document = _parse(data)
    if isinstance(document, dict):
        unexpected = sorted(set(document) - {"messages"})
        if "messages" not in document:
            raise DataError("messages: the object has no field 'messages'", hint=f"give {_SHAPE}")
        if unexpected:
            raise DataError(f"messages: unexpected field {unexpected[0]!r} beside 'messages'")
        document = document["messages"]
    return check_messages(document)


def check_messages(document: Any) -> list[dict]:
    """Messages from what was read from JSON.

    Content is a string or a list of text parts, which are joined. An assistant message with tool
    calls may have no content. Fields beyond role and content are kept for the template.
    Raises DataError, which names the message (counted from 1), for anything else.
    """
    if not isinstance(document, list):
        raise DataError(f"messages: {_kind(document)} instead of a list", hint=f"give {_SHAPE}")
    if not document:
        raise DataError("messages: the list is empty")
    return [_message(entry, f"message {i}") for i, entry in enumerate(document, 1)]


def _parse(data: str | bytes) -> Any:
    try:
        text = data if isinstance(data, str) else data.decode("utf-8-sig")
        document = json.loads(text)
        _refuse_surrogates(text, document)
    except UnicodeDecodeError as error:
        raise DataError(f"messages: not UTF-8 at byte {error.start}") from error
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno}"
        reason = error.msg[:1].lower() + error.msg[1:]
        raise DataError(f"messages: not JSON: {where}: {reason}") from error
    except RecursionError as error:
        raise DataError("messages: nested too deep") from error
    except ValueError as error:  # an integer of thousands of digits
        raise DataError("messages: not JSON: a number too long") from error
    return document


def _refuse_surrogates(text: str, document: Any) -> None:
    """A lone surrogate (\\ud800 in JSON) is no character and has no UTF-8."""
    if "\\u" in text or not text.isascii():
        try:
            json.dumps(document, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise DataError("messages: a lone surrogate is not text") from error


def _message(entry: Any, where: str) -> dict:
    if not isinstance(entry, dict):
        raise DataError(f"{where}: {_kind(entry)} instead of an object")
    if "role" not in entry:
        raise DataError(f"{where}: no role")
    if not isinstance(entry["role"], str):
        raise DataError(f"{where}: the role is {_kind(entry['role'])} instead of a string")
    if entry.get("content") is None:
        if not entry.get("tool_calls"):
            raise DataError(f"{where}: no content")
        return {**entry, "content": ""}
    return {**entry, "content": _content(entry["content"], where)}


def _content(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise DataError(f"{where}: the content is {_kind(content)} instead of a string")
    return "".join(_part(part, f"{where}: part {i}") for i, part in enumerate(content, 1))


def _part(part: Any, where: str) -> str:
    if not isinstance(part, dict):
        raise DataError(f"{where}: {_kind(part)} instead of an object")
    kind = part.get("type")
    if not isinstance(kind, str):
        raise DataError(f"{where}: no type")
    if kind != "text":
        raise DataError(f"{where}: cannot take content of type {kind[:40]!r}, only text")
    if not isinstance(part.get("text"), str):
        raise DataError(f"{where}: the text is {_kind(part.get('text'))} instead of a string")
    return part["text"]


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    names = {bool: "a boolean", dict: "an object", list: "a list", str: "a string"}
    return names.get(type(value), "a number")
