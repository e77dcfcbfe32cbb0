"""Sources of prompts: words on the command line, stdin, or a file of messages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from toastkit.commands.cli import say
from toastkit.commands.options import MAX_JSON_BYTES, checkpoint, read_tools, template_arguments
from toastkit.commands.stdin import (
    holds_prompt,
    no_prompt,
    read_input,
    read_stdin,
    stdin_lines,
    text_of,
    user_turn,
)
from toastkit.errors import DataError, UsageError
from toastkit.stages.tokenize import Prompt, PromptOptions, PromptTokenizer, at
from toastkit.text.chat_template import start_rendering
from toastkit.text.tokenizer import templates


def prompt_tokenizer(flags: dict[str, Any], later: bool = False) -> PromptTokenizer:
    """The tokenizer of the checkpoint that -m names, with the flags' settings. later: load it on
    demand."""
    from toastkit.model.config import load_config

    files = checkpoint(flags)
    options = PromptOptions(
        raw=flags["raw"],
        generation_prompt=not flags["no_generation_prompt"],
        template_arguments=template_arguments(flags["template_arg"]),
        tools=read_tools(flags["tools"]),
        truncate=flags["truncate"],
        max_tokens=flags.get("max_tokens"),
        note=None if flags["quiet"] else say,
    )
    if not options.raw:
        start_rendering(templates(files).values())
    made = PromptTokenizer(files, load_config(files), options)
    made.start_fingerprint()
    if not later:
        made.tokenizer  # noqa: B018
    return made


def prompts(words: tuple[str, ...], flags: dict[str, Any], first: bytes = b"") -> Iterator[Prompt]:
    """The prompts that the flags and the words ask for.

    words: the arguments; "-" among them means stdin even if it would not be read otherwise. first:
    bytes of stdin that were read already. Piped text goes before the words. Raises UsageError for
    what makes no sense together, before anything is read.
    """
    _check(words, flags)
    piped = flags["messages"] is None and holds_prompt(words, flags["tools"])
    return _read(words, flags, first, piped)


def _read(
    words: tuple[str, ...], flags: dict[str, Any], first: bytes, piped: bool
) -> Iterator[Prompt]:
    """The prompts. piped: stdin holds one."""
    argument = " ".join(word for word in words if word != "-")
    if flags["messages"] is not None:
        yield _conversation(flags)
    elif flags["each_line"]:
        found = False
        for number, line in enumerate(stdin_lines(first), 1):
            if line.strip():
                found = True
                with at(f"line {number}"):
                    prompt = _prompt(text_of(line), argument, flags)
                yield prompt._replace(where=f"line {number}")
        if not found:
            raise DataError("no prompts: --each-line found no line on stdin that is not empty")
    else:
        data = first + read_stdin() if piped else None
        text = text_of(data or b"")
        alone = flags["system"] is not None and flags["no_generation_prompt"]
        empty = not (text if flags["raw"] else text.strip("\n"))
        if empty and not argument and not alone:
            raise no_prompt(data)
        yield _prompt(text, argument, flags)


def _conversation(flags: dict[str, Any]) -> Prompt:
    from toastkit.text.messages import load_messages

    data = read_input(flags["messages"], "messages", MAX_JSON_BYTES)
    return Prompt(messages=load_messages(data))


def _check(words: tuple[str, ...], flags: dict[str, Any]) -> None:
    """Raise UsageError for what makes no sense together, stdin for two things included."""
    if flags["raw"] and (flags["system"] is not None or flags["messages"] is not None):
        raise UsageError("--raw has no messages: leave --system and --messages out")
    if flags["raw"] and (flags["template_arg"] or flags["tools"] is not None):
        raise UsageError("--raw has no template: leave --template-arg and --tools out")
    if flags["raw"] and flags["no_generation_prompt"]:
        raise UsageError("--raw opens no turn: leave --no-generation-prompt out")
    whole = flags["messages"] is not None
    if whole and (words or flags["system"] is not None or flags["each_line"]):
        raise UsageError("--messages is the whole conversation: no PROMPT, --system, --each-line")
    if flags["tools"] == "-" and (flags["messages"] == "-" or flags["each_line"]):
        other = "--each-line" if flags["each_line"] else "--messages"
        raise UsageError(f"{other} and --tools cannot both be standard input")


def _prompt(text: str, argument: str, flags: dict[str, Any]) -> Prompt:
    """One prompt: piped text, then the argument. Raw text is concatenated; a message has a blank
    line between the two, without the newline that ends a file."""
    if flags["raw"]:
        return Prompt(text=text + argument)
    from toastkit.text.messages import user_messages

    content = user_turn(text, argument)
    if not content and flags["system"] is not None:
        return Prompt(messages=[{"role": "system", "content": flags["system"]}])
    return Prompt(messages=user_messages(content, flags["system"]))
