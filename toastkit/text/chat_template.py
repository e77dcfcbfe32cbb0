"""Chat templates: Jinja source from a checkpoint, rendered with messages to the text of a prompt.

Templates come with downloaded weights and are not trusted. They are rendered in a process of their
own (toastkit.text.template_child); the embedded model's, known by its hash, in this one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

from toastkit.errors import DataError, UsageError, did_you_mean
from toastkit.text.messages import AS_TEXT, DOCUMENT, content_text, documents

MAX_SOURCE = 1 << 20  # characters of a template
# SHA-256 of templates that may run in this process: the embedded model's.
KNOWN = frozenset(("66edfb854931c933d3ac94f507626dd4fa2d5ca0a9b1036b11729d296a7392ac",))
_HINT = "a template that comes with a checkpoint is code; --raw does without it"
# Names of templates: the usual one, and the one used with tools.
DEFAULT, FOR_TOOLS = "default", "tool_use"
CALLS = "tool_calls"  # field of a message
CHOICE = "chat_template"  # the argument that names another template, as in transformers


class SmallFiles(Protocol):
    """The files that a tokenizer is read from. name: of the checkpoint, for messages."""

    name: str

    def read(self, name: str) -> bytes | None: ...

    def additional_templates(self) -> list[str]: ...


def read_templates(files: SmallFiles, *settings: Mapping[str, Any]) -> dict[str, str]:
    """Return name -> source of the chat templates: those in files of their own, else those of the
    first JSON object that has any. Raises DataError for what is not text."""
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


def start_rendering(templates: Iterable[str]) -> None:
    """Start the process that renders templates, if one of these is to be rendered there, without
    waiting for it: starting takes as long as opening a model."""
    if not all(map(_is_known, templates)):
        from toastkit.text import template_child

        template_child.start()


def choose(templates: Mapping[str, str], tools: list | None, name: Any, of: str) -> str | None:
    """Return the source of the template for a prompt: the named one, else with tools the one for
    tools, else the default; None if there are no templates at all. of: names the checkpoint. Raises
    DataError for an unknown name, and if the choice is ambiguous."""
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
    """Render messages to the prompt's text.

    template: Jinja source. messages: {role, content}, as the user wrote them. Only if the template
    fails with them are parts of content joined, and null content left out; the latter also if the
    template writes it as `None`. special_tokens: bos_token, eos_token, ... -> text. arguments: the
    user's own variables. tools: JSON schemas. note: takes a line for each of those that the
    template does not use, and when content was joined. Raises DataError, one line, for a template
    that is broken, refuses the messages, exceeds its limits or tries to leave its sandbox, and for
    arguments that cannot mean what they say; UsageError for one that would replace messages or
    tools; UnavailableError if its process cannot be started.
    """
    arguments = arguments or {}
    _check_arguments(arguments, tools)
    variables = {
        **special_tokens,
        "tools": tools,
        "documents": None,
        "add_generation_prompt": add_generation_prompt,
        **arguments,
        "messages": [_as_in_transformers(message) for message in messages],
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
    """Raise UsageError if an argument would replace what is given otherwise."""
    if "messages" in arguments:
        raise UsageError("template argument 'messages' would replace the prompt")
    if "tools" in arguments and tools is not None:
        raise UsageError("template argument 'tools' would replace the tools")


def _check_documents(template: str, variables: dict, text: str) -> None:
    """Raise DataError if the text is the same without the documents in the messages."""
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
    """True if other variables give the same text, by way of the same substitutes."""
    return _reply(template, variables, [])[0].get("text") == text


def _as_in_transformers(message: dict) -> dict:
    """Drop null fields, as Hugging Face does, except content, which templates check for. Thoughts
    go under the name that templates read."""
    kept = {k: v for k, v in message.items() if v is not None or k == "content"}
    thoughts = [kept[k] for k in ("reasoning_content", "thinking", "reasoning") if k in kept]
    if thoughts:
        kept = {"thinking": thoughts[0], **kept, "reasoning_content": thoughts[0]}
    return kept


def _reply(template: str, variables: dict, given: list[str]) -> tuple[dict[str, Any], str]:
    """Return the reply for the messages, and a line about joined parts or "". Substitutes are tried
    if the template fails with the messages, or writes null as Python's `None`."""
    reply, remark, messages = _answer(template, variables, given), "", variables["messages"]
    if "error" in reply and not reply.get("stopped"):
        for other, line in _substitutes(messages):
            second = _answer(template, {**variables, "messages": other}, given)
            if "error" not in second:
                reply, remark, messages = second, line, other
                break
    nones, bare = reply.get("text", "").count("None"), _without_null(messages)
    if nones and bare != messages:
        second = _answer(template, {**variables, "messages": bare}, given)
        if second.get("text", reply["text"]).count("None") < nones:
            reply = second
    return reply, remark


def _substitutes(messages: list[dict]) -> Iterator[tuple[list[dict], str]]:
    """Yield substitutes for the messages, each with a line about joined parts: with the parts of
    every content joined; then also with null content left out, as Hugging Face does; then with
    empty content in its place. Each only if it applies."""
    line = ""
    listed = any(isinstance(message.get("content"), list) for message in messages)
    if listed and not any(map(documents, messages)):  # documents have no substitute
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
    """Return the reply of toastkit.text.sandbox.answer, from this process or the child."""
    if len(source) > MAX_SOURCE:
        raise DataError(f"chat template: it is over {MAX_SOURCE} characters long")
    job = {"template": source, "variables": variables, "arguments": arguments}
    if _is_known(source):
        from toastkit.text.sandbox import answer

        return answer(job)
    from toastkit.text.template_child import Stopped, ask

    try:
        return ask(job)
    except RecursionError as error:
        raise DataError("messages: nested too deep for a template") from error
    except Stopped as error:
        return {"error": str(error), "stopped": True}


def _is_known(source: str) -> bool:
    return hashlib.sha256(source.encode("utf-8", "surrogatepass")).hexdigest() in KNOWN


def _unmentioned(given: Iterable[str], mentioned: list[str]) -> Iterable[str]:
    for name in given:
        if name not in mentioned:
            near = did_you_mean(name, mentioned)
            yield f"the chat template makes no use of {name!r}{f'; {near}' if near else ''}"
