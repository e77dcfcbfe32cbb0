"""Options that mean the same in every command that has them."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click

from toastkit.commands import cli, completion
from toastkit.commands.sizes import Float, Integer, IntegerRange, is_number
from toastkit.errors import UsageError
from toastkit.native.starting import MAX_THREADS, SETTINGS, NativeOptions
from toastkit.store.kv_bits import KV_DTYPES
from toastkit.text.terminal import typed

if TYPE_CHECKING:
    from toastkit.model.files import ModelFiles

Decorator = Callable[[Callable], Callable]


def together(*decorators: Decorator) -> Decorator:
    """Several option decorators as one, in the order in which --help shows them."""

    def wrap(function: Callable) -> Callable:
        for decorate in reversed(decorators):
            function = decorate(function)
        return function

    return wrap


CHECKPOINT = "the checkpoint's"


def defaulted(*names: str, default: float, help: str, source: str = "", **settings: Any):
    """An option whose default is set elsewhere, and stated in its help. source: what takes
    precedence over it, if anything."""
    said = f"{source}, or {default:g}" if source else f"{default:g}"
    return click.option(*names, help=f"{help} (default: {said}).", **settings)


class Text(click.ParamType):
    """Text of a prompt or for a model: arguments are bytes, and these must be UTF-8."""

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The text. Raises DataError for bytes that are not UTF-8."""
        option = cli.spelled(param.name or "", ctx) if isinstance(param, click.Option) else None
        return typed(value, option or "the prompt")

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str):
        """Files, as the shell would."""
        return completion.files(ctx, param, incomplete)


prompt = click.argument("prompt", nargs=-1, type=Text())


def model(default: str) -> Callable:
    """-m. default: the model that is meant without it, for the help."""
    return click.option(
        "-m", "--model", metavar="MODEL", callback=_some_model, shell_complete=completion.models,
        help="Checkpoint: a directory, a .toast file, a hub id (org/name), a name of toast-model "
        f"list; or crumb, the embedded model (default: {default}).",
    )  # fmt: skip


def _some_model(context: click.Context, parameter: click.Parameter, value: str | None):
    """Refuse an empty name, as of a variable that is not set."""
    if value == "":
        raise UsageError("-m: an empty name is no model")
    return value


def model_name(flags: dict[str, Any]) -> str:
    """The model that -m names, else the embedded one."""
    return flags["model"] or "crumb"


def let_stream_name_model(flags: dict[str, Any]) -> None:
    """Frames: only a typed -m names another model than the stream, no variable."""
    if not cli.given("model"):
        flags["model"] = None


def checkpoint(flags: dict[str, Any]) -> ModelFiles:
    """The files of that model. Raises as locate."""
    from toastkit.model.locate import locate

    return locate(model_name(flags))


def absolute_model(model: str | None) -> str | None:
    """A model's path made absolute, for a daemon in another directory; other names unchanged.
    Raises NoInputError for a directory that is no model, unless one of ours has its name."""
    path = os.path.expanduser(model or "crumb")
    if path == "crumb" or not os.path.exists(path):
        return model
    if any(map(os.path.isfile, (path, os.path.join(path, "config.json")))):
        return os.path.abspath(path)
    from toastkit.model.locate import find

    find(path)
    return model


def _session_name(context: click.Context, parameter: click.Parameter, value: str | None):
    """Refuse an invalid session name before anything else is done."""
    if value is not None:
        from toastkit.session.names import resolve

        resolve(value)
    return value


session = click.option(
    "--session",
    metavar="DIR|NAME",
    callback=_session_name,
    shell_complete=completion.sessions,
    help="Keep the model's state there and resume it.",
)
inline = click.option(
    "--inline", is_flag=True, help="Put logits into the stream itself, to save or to move it."
)
max_tokens = click.option(
    "-n", "--max-tokens", type=IntegerRange(1), metavar="N",
    help="Most tokens of an answer (default: as many as the context holds).",
)  # fmt: skip
stop = click.option(
    "--stop",
    multiple=True,
    metavar="TEXT",
    type=Text(),
    help="End the answer before TEXT. Repeatable.",
)
keep_special = click.option(
    "--keep-special", is_flag=True, help="Print special tokens such as end-of-turn marks."
)
echo = click.option("--echo", is_flag=True, help="Print the prompt before the answer.")
no_newline = click.option("--no-newline", is_flag=True, help="Do not end an answer with a newline.")
fail_on_length = click.option(
    "--fail-on-length", is_flag=True, help="Exit with 65 if an answer was cut off by a limit."
)


def _number(context: click.Context, parameter: click.Parameter, value: str | None) -> int | None:
    return None if value is None else int(value)


dtype = click.option(
    "--dtype", type=click.Choice(["float32", "float16", "bfloat16"]),
    help="Type of activations (default: float32 on the CPU, the checkpoint's own elsewhere).",
)  # fmt: skip
kv_bits = click.option(
    "--kv-bits", type=click.Choice([str(bits) for bits in KV_DTYPES]), callback=_number,
    help="Bits of keys and values in caches (default: those of activations).",
)  # fmt: skip
native = together(
    click.option(
        "--native", type=click.Choice(SETTINGS), default="auto",
        show_default=True, help="Products of toastkit's own on the CPU, where they can be had.",
    ),
    click.option(
        "--native-exact", is_flag=True, help="Compute these with float32 activations throughout."
    ),
    click.option(
        "--threads", type=IntegerRange(1, MAX_THREADS), metavar="N",
        help="Threads that compute these (default: as many processors as may be used).",
    ),
)  # fmt: skip
engine = together(
    click.option(
        "--device", type=click.Choice(["auto", "cpu", "gpu"]), default="auto", show_default=True,
        help="Where to compute.",
    ),
    dtype,
    kv_bits,
    native,
)  # fmt: skip


def native_options(flags: dict[str, Any]) -> NativeOptions:
    """NativeOptions from flags. Raises UsageError for options on how native products are computed
    if the command line turns these off."""
    if flags["native"] == "off" and cli.given("native"):
        why = "is for native products, and --native off has none"
        cli.refuse_together(why, "threads", "native_exact")
    return NativeOptions(*(flags[name] for name in NativeOptions._fields))


no_daemon = click.option(
    "--no-daemon", is_flag=True, help="Load the model here, even if a daemon runs it."
)
reading = together(
    click.option("--chunk", type=IntegerRange(1), metavar="N", help="Prompt tokens per pass."),
    click.option(
        "--fork", metavar="DIR|NAME", callback=_session_name,
        shell_complete=completion.sessions,
        help="Start from the state of a session and leave it as is.",
    ),
    click.option(
        "--require-hit", is_flag=True,
        help="Fail unless all that the session holds can be reused.",
    ),
)  # fmt: skip
tools = click.option(
    "--tools", metavar="FILE", help="Tools for the chat template: a JSON list of schemas."
)
system = click.option("--system", metavar="TEXT", type=Text(), help="System message.")
template_arg = click.option(
    "--template-arg", multiple=True, metavar="K=V", type=Text(),
    help="Variable for the chat template.",
)  # fmt: skip
prompting = together(
    click.option("--raw", is_flag=True, help="Continue the text as it stands: no chat template."),
    system,
    click.option(
        "--messages", metavar="FILE", help="Conversation as a JSON list of {role, content}."
    ),
    tools,
    template_arg,
    click.option(
        "--no-generation-prompt", is_flag=True,
        help="Do not open the assistant's turn: the prompt is a beginning of others.",
    ),
    click.option("--truncate", is_flag=True, help="Cut the beginning of too long a prompt off."),
    click.option("--each-line", is_flag=True, help="Each line of stdin is a prompt of its own."),
)  # fmt: skip


def settle_prompting(flags: dict[str, Any]) -> None:
    """Of these options, and the prompt, let what is typed win over variables that exclude it."""
    template = ("tools", "template_arg", "no_generation_prompt")
    cli.typed_wins(flags, "raw", "system", "messages", *template)
    cli.typed_wins(flags, "messages", "prompt", "system", "each_line")


sampling = together(
    defaulted("--temp", "--temperature", "temperature", type=Float(),
              metavar="T", default=0, source=CHECKPOINT,
              help="Temperature; 0 takes the most likely token"),
    defaulted("--top-k", type=Integer(), metavar="K", default=0, source=CHECKPOINT,
              help="Keep the K most likely tokens; 0 is off"),
    defaulted("--top-p", type=Float(), metavar="P", default=1, source=CHECKPOINT,
              help="Keep the most likely tokens that hold probability P; 1 is off"),
    defaulted("--min-p", type=Float(), metavar="P", default=0, source=CHECKPOINT,
              help="Drop tokens less likely than P times the most likely; 0 is off"),
    defaulted("--min-tokens-to-keep", type=Integer(), metavar="N", default=1,
              help="Least that min-p keeps"),
    defaulted("--typical-p", type=Float(), metavar="P", default=1, source=CHECKPOINT,
              help="Keep the most typical tokens that hold probability P; 1 is off"),
    defaulted("--xtc-probability", type=Float(), metavar="P", default=0,
              help="How often to exclude the top choices"),
    defaulted("--xtc-threshold", type=Float(), metavar="P", default=0.1,
              help="Probability that makes a token a top choice"),
    defaulted("--repetition-penalty", "--repeat-penalty", "repetition_penalty", type=Float(),
              metavar="X", default=1, source=CHECKPOINT,
              help="Divide the logits of recent tokens by X; 1 is off"),
    defaulted("--presence-penalty", type=Float(), metavar="X", default=0,
              help="Subtract X from the logit of each recent token"),
    defaulted("--frequency-penalty", type=Float(), metavar="X", default=0,
              help="Subtract X for each time a token is among the recent ones"),
    defaulted("--penalty-context", "--repeat-last-n", "penalty_context", type=Integer(),
              metavar="N", default=20,
              help="How many tokens are recent"),
    click.option("--logit-bias", multiple=True, metavar="ID=B",
                 help="Add B to the logit of token ID. Repeatable."),
    click.option("--ban", multiple=True, type=Integer(), metavar="ID", help="Never draw token ID."),
    click.option("--seed", type=IntegerRange(0, 2**64 - 1), metavar="N",
                 help="Seed of the draws (default: a new one)."),
    click.option("--ignore-eos", is_flag=True, help="Go on after an end-of-turn token."),
    click.option("--top", type=IntegerRange(0, 1000), metavar="N", default=0,
                 help="List the N most likely alternatives of each token."),
)  # fmt: skip
SAMPLING_NAMES = (
    "temperature", "top_k", "top_p", "min_p", "min_tokens_to_keep", "typical_p", "xtc_probability",
    "xtc_threshold", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "penalty_context",
)  # fmt: skip

# Each has an effect only where one of the others is on.
NEEDS = {
    "xtc_threshold": ("xtc_probability",), "min_tokens_to_keep": ("min_p",),
    "penalty_context": ("repetition_penalty", "presence_penalty", "frequency_penalty"),
}  # fmt: skip


def refuse_idle(
    flags: dict[str, Any], defaults: dict[str, Any], names: Iterable[str] = tuple(NEEDS)
) -> None:
    """Raise UsageError for one of these sampling options that was typed and has no effect.
    defaults: the checkpoint's settings."""
    for name in filter(cli.given, names):
        from toastkit.sampling.sampling_options import SamplingOptions

        off = SamplingOptions._field_defaults
        values = {need: flags[need] for need in NEEDS[name] if flags[need] is not None}
        if all({**off, **defaults, **values}[need] == off[need] for need in NEEDS[name]):
            wanted = " or ".join(f"--{need.replace('_', '-')}" for need in NEEDS[name])
            raise UsageError(f"{cli.spelled(name)} needs {wanted}")


def sampling_options(flags: dict[str, Any], defaults: dict[str, Any], seed: int | None):
    """SamplingOptions from flags; others come from the checkpoint's defaults.

    seed: of the stream, if recorded; else a new one is generated. Raises UsageError.
    """
    from toastkit.sampling.sampling_options import SamplingOptions

    values = dict(defaults)
    values.update({n: flags[n] for n in SAMPLING_NAMES if flags.get(n) is not None})
    if flags.get("seed") is not None:
        seed = flags["seed"]
    if seed is None:
        seed = int.from_bytes(os.urandom(4), "little")
    options = SamplingOptions(
        **values,
        logit_bias=tuple(bias(text) for text in flags["logit_bias"]),
        bans=tuple(flags["ban"]),
        seed=seed,
    )
    options.validate()
    return options


def bias(text: str) -> tuple[int, float]:
    """Token id and nats of a --logit-bias. Raises UsageError."""
    name, _, value = text.partition("=")
    if not re.fullmatch("[0-9]{1,20}", name) or not is_number(value):
        raise UsageError(f"{cli.spelled('logit_bias')} takes ID=B, not {text!r}")
    return int(name), float(value)


# Three JSON values in Python's spelling, which Hugging Face's documentation uses.
_PYTHON = {"True": True, "False": False, "None": None}
# To a template each of these words is a string, and so true.
_TRUE_WORDS, _FALSE_WORDS = ("true", "yes", "y", "on", "t"), ("false", "no", "n", "off", "f")


def template_arguments(pairs: tuple[str, ...]) -> dict[str, Any]:
    """Template variables from K=V: V is parsed as JSON if valid, True, False and None as in Python;
    else it is a string. Raises UsageError for a word that means true or false elsewhere."""
    arguments: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        said = cli.spelled("template_arg")
        if not equals or not name.isidentifier():
            raise UsageError(f"{said} takes NAME=VALUE, not {pair!r}")
        if name in arguments:
            raise UsageError(f"{said} {name} is given twice")
        arguments[name] = _template_value(name, value)
    return arguments


def _template_value(name: str, value: str) -> Any:
    import json

    if value in _PYTHON:
        return _PYTHON[value]
    with suppress(ValueError, RecursionError):
        return json.loads(value, parse_constant=int)  # NaN is not JSON, and not a number
    word = value.lower()
    if word in _TRUE_WORDS or word in _FALSE_WORDS:
        meant = "true" if word in _TRUE_WORDS else "false"
        said = f"{cli.spelled('template_arg')} {name}"
        raise UsageError(
            f"{said}: {value!r} is neither true nor false to a template",
            hint=f"give {name}={meant}, or {name}='\"{value}\"' for the word",
        )
    return value


MAX_JSON_BYTES = 16 << 20  # of messages or tools, as for a line to the daemon


def read_tools(name: str | None) -> list[dict] | None:
    """The tools in the file of --tools, None without it. Raises NoInputError, DataError."""
    if name is None:
        return None
    from toastkit.commands.stdin import read_input
    from toastkit.text.messages import load_tools

    return load_tools(read_input(name, "tools", MAX_JSON_BYTES))
