"""Chat templates: Jinja source from a checkpoint, rendered with messages to the text of a prompt.

The template comes with downloaded weights and is not trusted: see toastkit.text.sandbox.
"""

from __future__ import annotations

from typing import Any

from toastkit.errors import DataError


def render(
    template: str,
    messages: list[dict],
    *,
    add_generation_prompt: bool = True,
    special_tokens: dict[str, str],
    arguments: dict | None = None,
    tools: list | None = None,
) -> str:
    """The prompt's text.

    template: Jinja source. messages: {role, content}. special_tokens: bos_token, eos_token, ...
    -> text. arguments: the user's own variables; they may not be named `messages`.
    Raises DataError, one line, for a template that is broken, refuses the messages, costs too much
    or tries to leave its sandbox. Blocks no signal and starts no process.
    """
    from toastkit.text.budget import MAX_DEPTH, Budget, TooCostly, measure

    variables = _variables(messages, add_generation_prompt, special_tokens, arguments, tools)
    try:
        size, _ = measure(variables, 1 << 62)
    except TooCostly as error:
        raise DataError(f"messages: nested deeper than {MAX_DEPTH - 2}") from error
    budget = Budget(size)
    text = _run(template, variables, budget)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError("chat template: it writes a lone surrogate, which is not text") from error
    return text


def _variables(
    messages: list[dict],
    add_generation_prompt: bool,
    special_tokens: dict[str, str],
    arguments: dict | None,
    tools: list | None,
) -> dict[str, Any]:
    arguments = arguments or {}
    if "messages" in arguments:
        raise DataError("template argument 'messages' would replace the prompt")
    return {
        **special_tokens,
        "tools": tools,
        "documents": None,
        "add_generation_prompt": add_generation_prompt,
        **arguments,
        "messages": messages,
    }


def _run(source: str, variables: dict[str, Any], budget: Any) -> str:
    """Renders. The import is here because it costs 50 ms, which only a templated prompt pays."""
    import jinja2

    from toastkit.text.budget import TooCostly
    from toastkit.text.sandbox import BudgetedEnvironment

    environment = BudgetedEnvironment(budget)
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    try:
        pieces, size = [], 0
        for piece in environment.from_untrusted(source).generate(**variables):
            size += len(piece)
            budget.expect(size)
            pieces.append(piece)
        return "".join(pieces)
    except TooCostly as error:
        raise DataError(f"chat template: stopped, {error}", hint=_HINT) from error
    except _Refused as error:
        raise DataError(f"chat template: {_one_line(error)}") from error
    except jinja2.TemplateSyntaxError as error:
        raise DataError(
            f"chat template: line {error.lineno}: {_one_line(error.message)}"
        ) from error
    except RecursionError as error:
        raise DataError("chat template: stopped, it nests too deep", hint=_HINT) from error
    except Exception as error:
        raise DataError(f"chat template: {_one_line(error)}") from error


_HINT = "a template that comes with a checkpoint is code; --raw does without it"


class _Refused(Exception):
    """The template called raise_exception."""


def _raise_exception(message: object = "") -> None:
    raise _Refused(str(message))


def _strftime_now(pattern: str) -> str:
    from datetime import datetime

    if len(pattern) > 1000:
        raise ValueError("a date format over 1000 characters")
    return datetime.now().strftime(pattern)


def _one_line(error: object) -> str:
    """A message in one line of at most 300 characters."""
    text = " ".join(str(error)[:2000].split()) or type(error).__name__
    return text if len(text) <= 300 else text[:297] + "..."
