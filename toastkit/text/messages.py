"""The input of a chat template: the OpenAI-style list of {role, content}, and tools."""

from __future__ import annotations

import gc
import json
from typing import Any, NoReturn

from toastkit.errors import DataError

_SHAPE = 'a list of {"role": ..., "content": ...}'
_TOOLS_SHAPE = "a list of JSON schemas"
_ELSEWHERE = {
    "tools": "tools are in a file of their own: --tools",
    "documents": "documents are a variable of the template: --template-arg documents=JSON",
}
AS_TEXT = "give documents as text, or as the template's variable of that name"
TEXT, DOCUMENT = "text", "document"  # types of a content part
MAX_DEPTH = 100  # levels of nesting
MAX_VALUES = 1 << 20  # in messages, besides texts


def user_messages(text: str, system: str | None = None) -> list[dict]:
    """Return one user turn, after a system turn if given."""
    messages = [{"role": "user", "content": text}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    return messages


def load_messages(data: str | bytes) -> list[dict]:
    """Read messages from JSON, UTF-8 if bytes: a list, or an object that holds it. Raises DataError
    for anything else, and as check_messages does."""
    return check_messages(_unwrapped(parse_json(data, "messages"), "messages", _SHAPE))


def load_tools(data: str | bytes) -> list[dict]:
    """Read tools as load_messages does messages. Raises DataError as check_tools does."""
    return check_tools(_unwrapped(parse_json(data, "tools"), "tools", _TOOLS_SHAPE))


def check_messages(document: Any) -> list[dict]:
    """Validate messages parsed from JSON; return them unchanged.

    Content is a string or a list of parts: texts, and documents in whatever form the template
    takes. An assistant message with tool calls may have no content, or null. Fields beyond role and
    content are for the template. Raises DataError, which names the message (counted from 1), for
    anything else.
    """
    if not isinstance(document, list):
        raise DataError(f"messages: {kind(document)} instead of a list", hint=f"give {_SHAPE}")
    if not document:
        raise DataError("messages: the list is empty")
    for i, entry in enumerate(document, 1):
        _check_message(entry, f"message {i}")
    others = [x for entry in document for x in entry.values() if not isinstance(x, str)]
    check_size(others, "messages")
    return document


def check_tools(document: Any) -> list[dict]:
    """Validate tools parsed from JSON: a list of objects, whose content is up to the template.
    Raises DataError for anything else."""
    if not isinstance(document, list):
        raise DataError(f"tools: {kind(document)} instead of a list", hint=f"give {_TOOLS_SHAPE}")
    for i, tool in enumerate(document, 1):
        if not isinstance(tool, dict):
            raise DataError(f"tool {i}: {kind(tool)} instead of an object")
    check_size(document, "tools")
    return document


def check_size(value: Any, what: str) -> None:
    """Raise DataError if lists and objects are nested too deep, or there are too many values."""
    stack, count = [iter((value,))], 0
    while stack:
        for item in stack[-1]:
            count += 1
            if isinstance(item, (dict, list)) and item:
                stack.append(iter(item.values() if isinstance(item, dict) else item))
                break
        else:
            stack.pop()
        if len(stack) > MAX_DEPTH:
            raise DataError(f"{what}: nested deeper than {MAX_DEPTH}")
        if count > MAX_VALUES:
            raise DataError(f"{what}: over {MAX_VALUES} values")


def content_text(message: dict) -> str:
    """Return a message's content as one text: its text parts joined, "" without content."""
    content = message.get("content")
    if isinstance(content, list):
        return "".join(part["text"] for part in content if part["type"] == TEXT)
    return content or ""


def documents(message: dict) -> list[dict]:
    """Return the parts of a message's content that are documents."""
    content = message.get("content")
    return [p for p in content if p["type"] == DOCUMENT] if isinstance(content, list) else []


def with_text(message: dict, text: str, keep: bool = False) -> dict:
    """Return the message with other content, as a list if the message's is one. keep: keep the
    documents before the text."""
    listed = isinstance(message.get("content"), list)
    kept = documents(message) if keep else []
    return {**message, "content": [*kept, {"type": TEXT, "text": text}] if listed else text}


def _unwrapped(document: Any, name: str, shape: str) -> Any:
    """Return what an object holds under the name; anything but an object unchanged."""
    if not isinstance(document, dict):
        return document
    if name not in document:
        raise DataError(f"{name}: the object has no field {name!r}", hint=f"give {shape}")
    unexpected = sorted(set(document) - {name})
    if unexpected:
        hint = _ELSEWHERE.get(unexpected[0])
        raise DataError(f"{name}: unexpected field {unexpected[0]!r} beside {name!r}", hint=hint)
    return document[name]


def parse_json(data: str | bytes, what: str) -> Any:
    """Parse JSON, UTF-8 if bytes, with the garbage collector off: on millions of small objects it
    takes longer than the rest, and blocks everybody else meanwhile. Raises DataError, which begins
    with `what`; for a lone surrogate too (\\ud800), which is no character and has no UTF-8."""

    def no_number(name: str) -> NoReturn:
        raise DataError(f"{what}: not JSON: {name} is not a number")

    gc.disable()
    try:
        text = data if isinstance(data, str) else data.decode("utf-8-sig")
        document = json.loads(text, parse_constant=no_number)
        if "\\u" in text or (isinstance(data, str) and not text.isascii()):
            json.dumps(document, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        raise DataError(f"{what}: not UTF-8 at byte {error.start}") from error
    except UnicodeEncodeError as error:
        raise DataError(f"{what}: a lone surrogate is not text") from error
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno}"
        reason = error.msg[:1].lower() + error.msg[1:]
        raise DataError(f"{what}: not JSON: {where}: {reason}") from error
    except RecursionError as error:
        raise DataError(f"{what}: nested too deep") from error
    except ValueError as error:  # an integer of thousands of digits
        raise DataError(f"{what}: not JSON: a number too long") from error
    finally:
        gc.enable()
    return document


def _check_message(entry: Any, where: str) -> None:
    if not isinstance(entry, dict):
        raise DataError(f"{where}: {kind(entry)} instead of an object")
    if "role" not in entry:
        raise DataError(f"{where}: no role")
    if not isinstance(entry["role"], str):
        raise DataError(f"{where}: the role is {kind(entry['role'])} instead of a string")
    content = entry.get("content")
    if content is None:
        if not entry.get("tool_calls"):
            raise DataError(f"{where}: no content")
    elif isinstance(content, list):
        for i, part in enumerate(content, 1):
            _check_part(part, f"{where}: part {i}")
    elif not isinstance(content, str):
        raise DataError(f"{where}: the content is {kind(content)} instead of a string")


def _check_part(part: Any, where: str) -> None:
    if not isinstance(part, dict):
        raise DataError(f"{where}: {kind(part)} instead of an object")
    form = part.get("type")
    if not isinstance(form, str):
        raise DataError(f"{where}: no type")
    if form == DOCUMENT:
        return
    if form != TEXT:
        raise DataError(f"{where}: cannot take content of type {form[:40]!r}, only text")
    if not isinstance(part.get("text"), str):
        raise DataError(f"{where}: the text is {kind(part.get('text'))} instead of a string")


def kind(value: Any) -> str:
    """Name the type of a JSON value, for a message."""
    if value is None:
        return "null"
    names = {bool: "a boolean", dict: "an object", list: "a list", str: "a string"}
    return names.get(type(value), "a number")
