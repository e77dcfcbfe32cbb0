"""toast: ask and get an answer, from a daemon if there is one."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from toastkit.commands import cli, completion, options, policy_flags, run_reports
from toastkit.errors import NoInputError, UsageError
from toastkit.native.starting import NativeOptions

if TYPE_CHECKING:
    from toastkit.client.backend import Wanted
    from toastkit.client.chats import Chat
    from toastkit.client.output import Lines
    from toastkit.client.turn import TurnSettings

# A daemon's model has its own.
OF_THIS_PROCESS = ("device", "dtype", "kv_bits", *NativeOptions._fields, "gear")


@cli.command("toast")
@options.prompt
@options.model("the daemon's, or crumb")
@click.option("-c", "--continue", "go_on", is_flag=True, help="Continue the last conversation.")
@click.option(
    "--session", metavar="NAME", shell_complete=completion.chats,
    help="Continue the conversation of that name, or begin it.",
)  # fmt: skip
@click.option("--chat", is_flag=True, help="Turn after turn: each line is one.")
@options.system
@click.option(
    "-x", "--extract", is_flag=True, help="Print only the first fenced code block of the answer."
)
@click.option(
    "--json", "as_json", is_flag=True, help="Write the replies of toasted(7), one a line."
)
@click.option("--usage", is_flag=True, help="Say on stderr how many tokens and how fast.")
@options.sampling
@options.max_tokens
@options.stop
@options.tools
@options.template_arg
@options.fail_on_length
@click.option("--no-history", is_flag=True, help="Do not keep the conversation.")
@options.no_daemon
@click.option("--socket", metavar="PATH", help="Where the daemon listens.")
@options.engine
@policy_flags.policies
def toast(prompt: tuple[str, ...], **flags) -> int:
    _check(flags)
    request_options = _request_options(flags)
    chat = _conversation(flags)
    question = "" if flags["chat"] else _question(prompt, flags["tools"])

    from toastkit.client.backend import choose_backend
    from toastkit.client.output import Lines
    from toastkit.client.turn import Turns
    from toastkit.interrupts import Signals

    interrupts, lines = Signals(), Lines(cli.say)
    wanted = _wanted(flags, lines)
    backend = choose_backend(wanted, interrupts)
    if wanted.settings["policies"].gives_up:
        interrupts.on_memory_warning(backend.memory_warning)
    try:
        turns = Turns(chat, backend, interrupts, _settings(flags, request_options, lines))
        if flags["chat"]:
            return _chat(turns, prompt, flags, interrupts)
        turns.ask(question)
    finally:
        backend.close()
    return interrupts.code


def _check(flags: dict[str, Any]) -> None:
    """Raise UsageError for flags that make no sense together."""
    cli.typed_wins(flags, "extract", "chat", "as_json")
    cli.typed_wins(flags, "no_daemon", "socket")
    cli.typed_wins(flags, "quiet", "usage")
    if not flags["as_json"]:
        cli.refuse_together("needs --json, which shows them", "top")
    for other in ("chat", "as_json"):
        if flags["extract"] and flags[other]:
            said = f"{cli.spelled('extract')} is for one answer as text"
            raise UsageError(f"{said}, not with {cli.spelled(other)}")
    if flags["chat"] and flags["tools"] == "-":
        raise UsageError("--chat and --tools cannot both be standard input")
    if flags["no_daemon"]:
        cli.refuse_together("is for a daemon, not with --no-daemon", "socket")
    if flags["quiet"]:
        cli.refuse_together("has something to say, but not with --quiet", "usage")
    policy_flags.reject_unused(flags)
    if (names := cli.given(*OF_THIS_PROCESS)) and cli.given("socket"):
        raise UsageError(f"{names[0]} is for a model in this process, not with --socket")


def _request_options(flags: dict[str, Any]) -> dict[str, Any]:
    """Options set by flags, as in toasted(7); the others are left to the checkpoint."""
    options.refuse_idle(flags, {}, ("xtc_threshold",))  # the checkpoint may set the others' needs
    names = (*options.SAMPLING_NAMES, "seed", "max_tokens")
    values = {name: flags[name] for name in names if flags[name] is not None}
    more = {
        "stop": list(flags["stop"]),
        "ignore_eos": flags["ignore_eos"],
        "logit_bias": _biases(flags["logit_bias"]),
        "ban": list(flags["ban"]),
        "template": options.template_arguments(flags["template_arg"]),
    }
    values.update((name, value) for name, value in more.items() if value)
    if flags["top"] and flags["as_json"]:
        values.update(top=flags["top"], tokens=True)
    for name, value in values.items():
        _refuse_infinite(name, value)
    return values


def _biases(texts: tuple[str, ...]) -> dict[str, float]:
    biases: dict[str, float] = {}
    for text in texts:
        token, value = options.bias(text)
        if str(token) in biases:
            raise UsageError(f"invalid logit bias: id {token} is given twice")
        _refuse_infinite("logit_bias", value)
        biases[str(token)] = value
    return biases


def _refuse_infinite(name: str, value: Any) -> None:
    """Raise UsageError for infinity and NaN, which JSON lacks."""
    if isinstance(value, float) and not math.isfinite(value):
        raise UsageError(f"invalid {name.replace('_', '-')}: {value} is not a number in reach")


def _conversation(flags: dict[str, Any]) -> Chat:
    """The conversation that the flags name, with its system message. Raises UsageError if it has
    another one; an environment variable for --system only counts at its beginning."""
    from toastkit.client.chats import Chat, last_chat, named_chat

    system = flags["system"]
    if flags["session"] is not None:
        chat = named_chat(flags["session"])
        if flags["no_history"] and not chat.messages:
            raise NoInputError(f"no conversation {flags['session']}, and none is to be kept")
    elif flags["go_on"]:
        chat = last_chat()
    else:
        chat = Chat(None)
    if system is not None and not chat.messages:
        chat.begin(system)
    elif system != chat.system and cli.given("system"):
        raise UsageError(
            "the conversation has another system message", hint="begin a new one with --session"
        )
    return chat


def _question(words: tuple[str, ...], tools: str | None) -> str:
    """The user's message: piped text, then the words. Raises DataError or UsageError if there is
    none. tools: the file of --tools, which may be stdin."""
    from toastkit.commands.stdin import holds_prompt, no_prompt, read_stdin, text_of, user_turn

    piped = holds_prompt(words, tools)
    data = read_stdin() if piped else None
    question = user_turn(text_of(data or b""), _joined(words))
    if not question:
        raise no_prompt(data, "give one as an argument, pipe one in, or give --chat")
    return question


def _joined(words: tuple[str, ...]) -> str:
    return " ".join(word for word in words if word != "-")


def _wanted(flags: dict[str, Any], lines: Lines) -> Wanted:
    """What the flags say about the backend. OF_THIS_PROCESS require this process."""
    from toastkit.client.backend import Wanted
    from toastkit.commands.progress import tell_silence, watched

    return Wanted(
        model=flags["model"],
        settings=policy_flags.service_settings(flags),
        here=flags["no_daemon"] or bool(cli.given(*OF_THIS_PROCESS)),
        socket=flags["socket"],
        insist=bool(cli.given("socket")),
        say=lines,
        silent=tell_silence if watched(flags) else None,
        verbose=flags["verbose"],
        quiet=flags["quiet"],
    )


def _settings(flags: dict[str, Any], request_options: dict[str, Any], lines: Lines) -> TurnSettings:
    from toastkit.client.output import (
        JsonOutput,
        Output,
        Progress,
        TextOutput,
        cached_line,
        notes_of,
        usage_line,
    )
    from toastkit.client.turn import TurnSettings
    from toastkit.commands.progress import ProgressBar, watched

    form = JsonOutput if flags["as_json"] else Output if flags["extract"] else TextOutput
    tell: list[Callable[[dict[str, Any]], object]] = []
    if not flags["quiet"]:
        tell.append(lambda stats: list(map(cli.say, notes_of(stats))))
    if flags["verbose"]:
        tell.append(lambda stats: cli.say(cached_line(stats)))
        tell.append(run_reports.tell_stats)
    if flags["usage"]:
        tell.append(lambda stats: cli.say(usage_line(stats)))
    return TurnSettings(
        options=request_options,
        output=form,
        model=options.absolute_model(flags["model"]),
        resident=policy_flags.insisted_residency(flags),
        experts=policy_flags.insisted_experts(flags),
        tools=options.read_tools(flags["tools"]),
        progress=Progress(ProgressBar) if watched(flags) else None,
        keep=not flags["no_history"],
        extract=flags["extract"],
        fail_on_length=flags["fail_on_length"],
        tell=tuple(tell),
        lines=lines,
    )


def _chat(turns, words: tuple[str, ...], flags: dict[str, Any], interrupts) -> int:
    """--chat: a line editor at a terminal, otherwise stdin line by line. The words come first."""
    from toastkit.client import repl
    from toastkit.client.chats import chats_root
    from toastkit.commands.stdin import stdin_lines, text_of

    first = _joined(words)
    if sys.stdin.isatty():
        history = None if flags["no_history"] else chats_root().with_name("chat_history")
        return repl.chat_with_person(
            turns, first, interrupts, history, lambda error: cli.print_error(error, "toast")
        )

    def lines():
        yield first
        yield from map(text_of, stdin_lines())

    return repl.chat_with_lines(turns, lines(), interrupts)


def main() -> None:
    cli.run(toast)
