"""What all executables share: the click command, its common options, and the one place where an
error becomes a line on stderr and an exit code."""

from __future__ import annotations

import errno
import gc
import io
import os
import signal
import sys
from contextlib import suppress
from typing import Any, NoReturn

import click

from toastkit import __version__
from toastkit.commands import COMMANDS, program_name
from toastkit.commands.completion import complete, files, script, variable
from toastkit.commands.sizes import Switch, switched_on
from toastkit.errors import (
    IOFailure,
    RemoteError,
    ToastError,
    UsageError,
    as_toast_error,
    did_you_mean,
    from_os_error,
)
from toastkit.interrupts import die_by_sigpipe
from toastkit.text.terminal import shown

# New objects before Python's garbage collector first runs. Its default of 700 finds no cycles in
# what imports and a model of 48 layers create, and costs a tenth of the start-up time.
YOUNG_OBJECTS = 100_000
SUMMARIES = {command.name: command.summary for command in COMMANDS}
# Options with which a command writes no frames.
AS_TEXT = {
    "toast-tokenize": {"--count", "--template-only"}, "toast-entropy-gear": {"--calibrate"},
    "toast-frames": {"--json", "--validate", "--stat"},
}  # fmt: skip
FRAMES_SECONDS = 2.0  # how long a command that failed waits to see whether it is fed frames
WRITES = {command.program: command.writes for command in COMMANDS}
SWITCH = Switch()
TYPED = click.core.ParameterSource.COMMANDLINE


def command(name: str, under: click.Group | None = None, **settings: Any):
    """Decorator: a click command with the common options; or, under a group, a subcommand, with
    those of the group's options that make sense for one.

    Every option can also be set by an environment variable, TOAST_ and its name in capitals, except
    those with `allow_from_autoenv=False`: what overwrites or deletes has to be typed.
    """

    def wrap(function):
        common = _talk_options() + (_program_options() if under is None else [])
        for decorate in reversed(common):
            function = decorate(function)
        if under is None:
            settings.setdefault("help", SUMMARIES[name].capitalize() + ".")
        context = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
        made = click.command(name=name, context_settings=context, **settings)(function)
        for parameter in made.params:
            option = isinstance(parameter, click.Option)
            if option and parameter.expose_value and parameter.allow_from_autoenv:
                parameter.envvar = _variables(parameter)
                if isinstance(parameter.type, click.types.BoolParamType):
                    parameter.type = SWITCH
            if parameter.type is click.STRING and parameter._custom_shell_complete is None:
                parameter._custom_shell_complete = files
        if under is not None:
            under.add_command(made)
        return made

    return wrap


class Group(click.Group):
    """Subcommands, which `command(..., under=)` adds; a misspelt one is refused with the nearest
    name."""

    def resolve_command(self, ctx: click.Context, args: list[str]):
        """The subcommand that the first argument names. Raises UsageError."""
        if args[0] not in self.commands and not args[0].startswith("-"):
            commands = f"commands are {', '.join(self.commands)}"
            hint = did_you_mean(args[0], self.commands, commands)
            raise UsageError(f"no such command: {args[0][:100]!r}", hint=hint)
        return super().resolve_command(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """In the order in which they were added."""
        return list(self.commands)


def _variables(option: click.Parameter) -> list[str]:
    """TOAST_X for every long name --x of an option, the longest name first."""
    names = sorted((n for n in option.opts if n.startswith("--")), key=len, reverse=True)
    return ["TOAST_" + n[2:].replace("-", "_").upper() for n in names]


_EAGER: dict[str, Any] = {
    "is_flag": True, "expose_value": False, "is_eager": True, "allow_from_autoenv": False,
}  # fmt: skip


def _talk_options() -> list:
    flag: dict[str, Any] = {"is_flag": True, "callback": _merge_group_flag}
    return [
        click.option("-v", "--verbose", **flag, help="Say on stderr what is being done."),
        click.option("-q", "--quiet", **flag, help="Say nothing on stderr but errors."),
        click.option("--debug", **flag, help="Show a traceback when something fails."),
        click.option("--man", **_EAGER, callback=_show_page, help="Open the manual page."),
    ]


def _program_options() -> list:
    shells = click.Choice(["bash", "zsh", "fish"])
    return [
        click.option("--version", **_EAGER, callback=_show_version, help="Print the version."),
        click.option(
            "--completion", type=shells, expose_value=False, is_eager=True,
            callback=_show_completion, help="Print a completion script for a shell.",
        ),
    ]  # fmt: skip


def _merge_group_flag(context: click.Context, parameter: click.Parameter, value: bool) -> bool:
    """A flag before a subcommand's name counts like one after it. Raises UsageError for -v with -q;
    one of them that is typed wins over a variable of the other."""
    name, contexts = parameter.name or "", [context.parent or context, context]
    opposite = {"verbose": "quiet", "quiet": "verbose"}.get(name, "")
    if TYPED in [one.get_parameter_source(opposite) for one in contexts]:
        if TYPED in [one.get_parameter_source(name) for one in contexts]:
            raise UsageError("--verbose and --quiet exclude each other")
        return False
    return value or bool(contexts[0].params.get(name))


def _show_version(context: click.Context, parameter: click.Parameter, value: bool) -> None:
    if value and not context.resilient_parsing:
        click.echo(f"{program(context)} {__version__}")
        context.exit()


def _show_page(context: click.Context, parameter: click.Parameter, value: bool) -> None:
    if value and not context.resilient_parsing:
        from toastkit.commands.man import open_page

        open_page(program(context))


def _show_completion(context: click.Context, parameter: click.Parameter, value: str | None) -> None:
    if value and not context.resilient_parsing:
        name = program(context)
        click.echo(script(context.command, name, value))
        context.exit()


def given(*names: str) -> list[str]:
    """Those of the command's named parameters that were given as flags on the command line; none
    outside a command."""
    context = click.get_current_context(silent=True)
    if context is None:
        return []
    return [spelled(n, context) for n in names if context.get_parameter_source(n) is TYPED]


def spelled(name: str, context: click.Context | None = None) -> str:
    """How a parameter was given: a variable's name, or the option as it was typed, as far as the
    words on the command line easily tell."""
    context = context or click.get_current_context()
    option = next(p for p in context.command.params if p.name == name)
    if context.get_parameter_source(name) is click.core.ParameterSource.ENVIRONMENT:
        return next(variable for variable in _variables(option) if os.environ.get(variable))
    words = {w.partition("=")[0] if w.startswith("--") else w[:2] for w in sys.argv[1:]}
    return next((n for n in reversed(option.opts) if n in words), option.opts[-1])


def refuse_together(reason: str, *names: str) -> None:
    """Raise UsageError if one of the parameters was given on the command line."""
    if wrong := given(*names):
        raise UsageError(f"{wrong[0]} {reason}")


def typed_wins(flags: dict[str, Any], name: str, *others: str) -> None:
    """Unset what variables set where an option that excludes it was typed. name: of the parameter
    that excludes each of the others."""
    losers = others if given(name) else (name,) if given(*others) else ()
    if not losers:
        return
    context = click.get_current_context()
    for option in (one for one in context.command.params if one.name in losers):
        if context.get_parameter_source(option.name) is click.core.ParameterSource.ENVIRONMENT:
            default = option.get_default(context)
            none = () if option.multiple else None
            flags[option.name] = default if isinstance(default, (str, int)) else none


def exclusive(flags: dict[str, Any], name: str, other: str) -> None:
    """Raise UsageError if both are set, but for a variable beside an option that was typed."""
    typed_wins(flags, name, other)
    if not {flags[name], flags[other]} & {None, False}:
        raise UsageError(f"{spelled(name)} and {spelled(other)} exclude each other")


def say(line: str) -> None:
    """Write one line to stderr, after the command's name."""
    _tell(f"{program()}: {line}")


def _tell(line: str) -> None:
    """Write a line for people, escaped, as it may hold foreign names and texts. Makes a progress
    bar give way. If stderr cannot be written, this and later lines are lost: the answer and the
    exit code matter more."""
    bars = sys.modules.get("tqdm.std")
    try:
        if bars is not None and bars.tqdm._instances:
            bars.tqdm.write(shown(line), sys.stderr)
        else:
            print(shown(line), file=sys.stderr, flush=True)
    except OSError:  # full disk, or closed pipe
        with suppress(OSError):
            sys.stderr.close()
        sys.stderr = open(os.devnull, "w")


def program(context: click.Context | None = None) -> str:
    """The executable's name, in a subcommand too."""
    context = context or click.get_current_context(silent=True)
    if context is not None:
        return program_name(context.find_root().command.name or "")
    return os.path.basename(sys.argv[0])


def run(entry: click.Command) -> NoReturn:
    """Run a command to its exit code: the body of every executable's `main`."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.set_threshold(YOUNG_OBJECTS)
    # numpy multiplies no matrices here, yet the threads of its library spin when they start.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    name = program_name(entry.name or "")
    closed = open_standard_streams()
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        # Names and texts that the locale's encoding lacks are escaped.
        sys.stdout.reconfigure(errors="backslashreplace")
    code = _outcome(entry, name, closed)
    # The work is done: a signal during Python's shutdown must not change the outcome.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if signal.getsignal(signal.SIGUSR1) is not signal.SIG_DFL:  # it has a handler
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        sys.stdout.flush()
    except OSError:  # already reported; from 3.13 Python would report it again when detached
        with suppress(OSError):
            sys.stdout.close()
        sys.stdout = None  # type: ignore[assignment]
    gc.freeze()  # do not traverse all modules for memory that the system reclaims anyway
    sys.exit(code)


def open_standard_streams() -> set[int]:
    """Open the null device for those of stdin, stdout and stderr that the process was started
    without, so that no file gets their numbers; return these numbers. Input is then empty, writing
    output fails, and messages on stderr are lost."""
    closed = set()
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            closed.add(number)
            # It gets the lowest free number: this one, as those below it are open.
            os.open(os.devnull, os.O_WRONLY if number == 2 else os.O_RDONLY)
            os.set_inheritable(number, True)
            mode = "r" if number == 0 else "w"
            stream = open(number, mode, errors="backslashreplace", closefd=False)
            setattr(sys, name, stream)
    return closed


def _outcome(entry: click.Command, name: str, closed: set[int]) -> int:
    try:
        if 1 in closed and WRITES.get(name):
            raise _closed_stdout()
        code = _invoke(entry, name)
        sys.stdout.flush()
        return code
    except click.exceptions.Exit as done:
        return done.exit_code
    except (KeyboardInterrupt, click.Abort):
        return 130
    except BrokenPipeError:
        die_by_sigpipe()
    except Exception as error:
        closed_now = 1 in closed and isinstance(error, OSError) and error.errno == errno.EBADF
        return _report(_closed_stdout() if closed_now else error, name)


def _closed_stdout() -> IOFailure:
    return IOFailure("cannot write: standard output is closed")


def _place(error: OSError) -> str:
    """What a system error is about, even if it does not say."""
    if error.filename:
        return error.filename
    try:
        os.getcwd()
    except FileNotFoundError:
        return "the current directory"
    return "i/o"


def _invoke(entry: click.Command, name: str) -> int:
    """As click's own main, without its handling of closed pipes and exit codes."""
    if instruction := os.environ.get(variable(name)):
        return complete(entry, name, instruction)
    with entry.make_context(name, sys.argv[1:]) as context:
        return entry.invoke(context)


def _report(raised: Exception, name: str) -> int:
    """Report on stderr what a command raised, with --debug its traceback, and return the exit code.
    A failure that is no accident also goes down the pipe, unless that has been done."""
    error = _told(raised, name)
    foreseen = isinstance(raised, (ToastError, click.ClickException))
    if switched_on("--debug"):
        import traceback

        cause = (error.__cause__ or error) if foreseen else raised
        for part in traceback.format_exception(cause):
            for line in part.splitlines():
                _tell(line)
    if not isinstance(error, RemoteError):
        print_error(error, name)
    elif not _stdin_is_live():
        print_error(error, f"{name}: {error.stage}")
    if foreseen and not error.sent and _writes_frames(name):
        from toastkit.commands.pipes import send_error

        send_error(error, name)
    return error.code


def _told(raised: Exception, name: str) -> ToastError:
    """The error to report; that of a bug says where to look."""
    if isinstance(raised, click.ClickException):
        return _misuse(raised, name)
    if isinstance(raised, OSError):
        return from_os_error(raised, _place(raised))
    error = as_toast_error(raised)
    if error is not raised and type(error) is ToastError:
        error.hint = "--debug shows where"
    return error


def _writes_frames(name: str) -> bool:
    """True if stdout is a stream of frames, as far as a command that failed early can tell. What
    reads text or frames writes what it reads."""
    writes = WRITES.get(name, "")
    as_text = any(map(switched_on, AS_TEXT.get(name, ())))
    if "frames" not in writes or as_text or os.isatty(1):
        return False
    if writes == "frames":
        return True
    from toastkit.commands.stdin import first_byte, stdin_has_text
    from toastkit.frames import starts_frames

    return stdin_has_text() and starts_frames(first_byte(seconds=FRAMES_SECONDS))


def print_error(error: ToastError, name: str) -> None:
    """The one form in which users see an error."""
    _tell(f"{name}: {error.message}")
    if error.hint:
        _tell(f"  hint: {error.hint}")


def _stdin_is_live() -> bool:
    """True if stdin is a pipe: the stage that failed has then reported the error itself. A stream
    from a file contains an error of another day, which nobody has seen yet."""
    from toastkit.descriptors import is_pipe

    return is_pipe(0)


def _misuse(error: click.ClickException, name: str) -> UsageError:
    """Convert click's error: its message in one line, and a suggestion in another."""
    context, near = getattr(error, "ctx", None), getattr(error, "possibilities", None)
    if type(error) is click.BadParameter and context and isinstance(error.param, click.Option):
        error.param_hint = repr(spelled(error.param.name or "", context))
    if isinstance(error, click.NoSuchOption) and context:
        every = [name for parameter in context.command.params for name in parameter.opts]
        near = [name for name in every if name.startswith(error.option_name)] or near
    text = " ".join((error.message if near else error.format_message()).split()).rstrip(".")
    text = text[:1].lower() + text[1:] if text[1:2].islower() else text
    asked = f"{context.command_path if context is not None else name} --help"
    return UsageError(text, hint=f"did you mean {near[0]}? or see {asked}" if near else asked)
