"""Chat templates: Jinja source from a checkpoint, rendered with messages to the text of a prompt.

The template comes with downloaded weights and is not trusted. It is rendered in a process of its
own (toastkit.text.template_child); the embedded model's, known by its hash, in this one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

from toastkit.errors import DataError, did_you_mean
from toastkit.text.messages import AS_TEXT, DOCUMENT, content_text, documents

SECONDS = 5.0  # for one prompt
MAX_SOURCE = 1 << 20  # characters of a template
# SHA-256 of templates that may run in this process: the embedded model's.
KNOWN = frozenset(("66edfb854931c933d3ac94f507626dd4fa2d5ca0a9b1036b11729d296a7392ac",))
_HINT = "a template that comes with a checkpoint is code; --raw does without it"
# Names that templates have: of the one that is taken, and of the one that is where there are tools.
DEFAULT, FOR_TOOLS = "default", "tool_use"
CALLS = "tool_calls"  # of a message
CHOICE = "chat_template"  # the argument that names another, as for transformers


class SmallFiles(Protocol):
    """What a tokenizer is read from. name: of the checkpoint, for messages."""

    name: str

    def read(self, name: str) -> bytes | None: ...

    def additional_templates(self) -> list[str]: ...


def read_templates(files: SmallFiles, *settings: Mapping[str, Any]) -> dict[str, str]:
    """Name -> source of the chat templates: those in files of their own; where there are none,
    those of the first JSON object that has any. Raises DataError for what is not text."""
    templates: dict[str, Any] = {}
    for path in ("chat_template.jinja", *files.additional_templates()):
        source = files.read(path)
        if source is not None:
            name = path.rpartition("/")[2].removesuffix(".jinja") if "/" in path else DEFAULT
            try:
                templates[name] = source.decode("utf-8-sig")
            except UnicodeDecodeError as error:
                message = f"{files.name}: {path}: not UTF-8 at byte {error.start}"
                raise DataError(message) from error
    for place in settings:
        if templates:
            break
        given = place.get("chat_template")
        if isinstance(given, list):
            try:
                given = {entry["name"]: entry["template"] for entry in given}
            except (TypeError, KeyError) as error:
                raise DataError(f"{files.name}: a chat template without a name") from error
        templates = given if isinstance(given, dict) else {DEFAULT: given}
        templates = {name: source for name, source in templates.items() if source is not None}
    for pair in templates.items():
        if not all(isinstance(text, str) for text in pair):
            raise DataError(f"{files.name}: the chat template is not a string")
    return templates


def choose(templates: Mapping[str, str], tools: list | None, name: Any, of: str) -> str | None:
    """The source of the template of a prompt: the one with that name, else the one for tools where
    there are tools, else the default; None where there are no templates at all. of: whose they are.
    Raises DataError for a name that none has, and where nothing says which is meant."""
    names = ", ".join(sorted(templates))[:300] or "none"
    if name is not None:
        if isinstance(name, str) and name in templates:
            return templates[name]
        raise DataError(f"{of}: no chat template is called {str(name)[:100]!r}: it has {names}")
    for usual in (FOR_TOOLS,) * (tools is not None) + (DEFAULT,):
        if usual in templates:
            return templates[usual]
    if templates:
        hint = f"choose one with --template-arg {CHOICE}=NAME"
        raise DataError(f"{of}: has no default chat template, but {names}", hint=hint)
    return None


def render(
    template: str,
    messages: list[dict],
    *,
    add_generation_prompt: bool = True,
    special_tokens: dict[str, str],
    arguments: Mapping[str, Any] | None = None,
    tools: list | None = None,
    note: Callable[[str], None] | None = None,
) -> str:
    """The prompt's text.

    template: Jinja source. messages: {role, content}, as the user wrote them; only for a template
    that fails with them parts of content are joined, and content that is null is left out, also for
    one that writes it out as `None`.
    special_tokens: bos_token, eos_token, ... -> text. arguments: the user's own variables. tools:
    JSON schemas. note: is told a line for each of those that the template makes no use of, and when
    content was joined.
    Raises DataError, one line, for a template that is broken, refuses the messages, costs too much
    or tries to leave its sandbox, and for arguments that cannot mean what they say;
    UnavailableError where its process cannot be started.
    """
    arguments = arguments or {}
    _check_arguments(arguments, tools)
    variables = {
        **special_tokens,
        "tools": tools,
        "documents": None,
        "add_generation_prompt": add_generation_prompt,
        **arguments,
        "messages": [_as_transformers_has_it(message) for message in messages],
    }
    given = [*arguments, *([] if tools is None else ["tools"])]
    reply, line = _reply(template, variables, given)
    if note is not None and line:
        note(line)
    if "error" in reply:
        stopped = "stopped, " if reply.get("stopped") else ""
        hint = _HINT if stopped else AS_TEXT if any(map(documents, messages)) else None
        raise DataError(f"chat template: {stopped}{reply['error']}", hint=hint)
    _check_documents(template, variables, reply["text"])
    number = reply.get("number")
    if number is not None:
        word = "true" if arguments[number] else "false"
        raise DataError(
            f"template argument {number!r}: the chat template does nothing with "
            f"{arguments[number]}, and something with {word}",
            hint=f"give {number}={word}",
        )
    if note is not None:
        for line in _unmentioned(given, reply.get("mentions", given)):
            note(line)
        if CALLS not in template and any(message.get(CALLS) for message in messages):
            bare = [{k: v for k, v in m.items() if k != CALLS} for m in variables["messages"]]
            if _same(template, {**variables, "messages": bare}, reply["text"]):
                note(f"the chat template makes no use of {CALLS!r} in messages")
    return reply["text"]


def _check_arguments(arguments: Mapping[str, Any], tools: list | None) -> None:
    if "messages" in arguments:
        raise DataError("template argument 'messages' would replace the prompt")
    if "tools" in arguments and tools is not None:
        raise DataError("template argument 'tools' would replace the tools")


def _check_documents(template: str, variables: dict, text: str) -> None:
    """Raises DataError where the text is the same without the documents in the messages."""
    messages = variables["messages"]
    if any(map(documents, messages)):
        bare = [
            {**m, "content": [part for part in m["content"] if part["type"] != DOCUMENT]}
            if documents(m) else m
            for m in messages
        ]  # fmt: skip
        if _same(template, {**variables, "messages": bare}, text):
            raise DataError("the chat template does nothing with documents in content", AS_TEXT)


def _same(template: str, variables: dict, text: str) -> bool:
    """Whether the text is the same with other variables."""
    return _answer(template, variables, []).get("text") == text


def _as_transformers_has_it(message: dict) -> dict:
    """Fields that are null are left out, as Hugging Face does; but a content that is null, which
    templates ask for, stays. Thoughts go under the name that templates read."""
    kept = {k: v for k, v in message.items() if v is not None or k == "content"}
    thoughts = [kept[k] for k in ("reasoning_content", "thinking", "reasoning") if k in kept]
    if thoughts:
        kept = {"thinking": thoughts[0], **kept, "reasoning_content": thoughts[0]}
    return kept


def _reply(template: str, variables: dict, given: list[str]) -> tuple[dict[str, Any], str]:
    """The reply for the messages, or for what stands in for those that the template fails with or
    writes null of as Python's word, beside a line about that."""
    reply, said, messages = _answer(template, variables, given), "", variables["messages"]
    if "error" in reply and not reply.get("stopped"):
        for other, line in _otherwise(messages):
            second = _answer(template, {**variables, "messages": other}, given)
            if "error" not in second:
                reply, said, messages = second, line, other
                break
    nones, bare = reply.get("text", "").count("None"), _without_null(messages)
    if nones and bare != messages:
        second = _answer(template, {**variables, "messages": bare}, given)
        if second.get("text", reply["text"]).count("None") < nones:
            reply = second
    return reply, said


def _otherwise(messages: list[dict]) -> Iterator[tuple[list[dict], str]]:
    """The messages with the parts of every content joined; with those, if there were any, and a
    content that is null left out, as Hugging Face has it, and with an empty one in its place. Each
    only if there are such, beside a line about joined parts."""
    line = ""
    listed = any(isinstance(message.get("content"), list) for message in messages)
    if listed and not any(map(documents, messages)):  # for which nothing can stand in
        messages = [
            {**m, "content": content_text(m)} if isinstance(m.get("content"), list) else m
            for m in messages
        ]
        line = "the chat template takes no content in parts: they are joined"
        yield messages, line
    null = [message.get("content", "") is None for message in messages]
    if any(null):
        yield _without_null(messages), line
        yield [{**m, "content": ""} if is_null else m for m, is_null in zip(messages, null)], line


def _without_null(messages: list[dict]) -> list[dict]:
    return [{k: v for k, v in message.items() if v is not None} for message in messages]


def _answer(source: str, variables: dict[str, Any], arguments: list[str]) -> dict[str, Any]:
    """The reply of toastkit.text.sandbox.answer, from this process or the child."""
    if len(source) > MAX_SOURCE:
        raise DataError(f"chat template: it is over {MAX_SOURCE} characters long")
    job = {"template": source, "variables": variables, "arguments": arguments}
    if hashlib.sha256(source.encode("utf-8", "surrogatepass")).hexdigest() in KNOWN:
        from toastkit.text.sandbox import answer

        return answer(job)
    from toastkit.text.template_child import Stopped, ask

    try:
        return ask(job, SECONDS)
    except RecursionError as error:
        raise DataError("messages: nested too deep for a template") from error
    except Stopped as error:
        return {"error": str(error), "stopped": True}


def _unmentioned(given: Iterable[str], mentioned: list[str]) -> Iterable[str]:
    for name in given:
        if name not in mentioned:
            near = did_you_mean(name, mentioned)
            yield f"the chat template makes no use of {name!r}{f'; {near}' if near else ''}"
