"""A request of toasted(7): one line of JSON, checked field by field before anything is done.

Nothing is guessed or ignored: an unknown field is refused with the nearest name, a wrong type with
the field's name.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from toastkit.errors import DataError, UsageError, did_you_mean
from toastkit.sampling.sampling_options import INTERVALS, SamplingOptions
from toastkit.text.messages import check_messages, check_size, check_tools, kind, parse_json

T = TypeVar("T")

CONTROL_OPS = ("health", "status", "stop", "reload")
# Ops of toast-prefill and toast-decode, and the fields of each; attached.py checks their values.
ATTACH_OPS = {
    "attach": ("fingerprint", "device", "dtype", "kv_bits"),
    "restore": ("session", "source", "ids"), "count": (), "read": ("ids",), "step": ("token",),
    "commit": (), "release": (),
}  # fmt: skip
OPS = ("generate", *CONTROL_OPS)
SAMPLING_NAMES = tuple(name for name in INTERVALS if name != "seed")
FIELDS = (
    "id", "op", "messages", "prompt", "tokens", "tools", "options", "stream", "session", "priority",
    "model", "resident", "experts", "keep",
)  # fmt: skip
OPTIONS = (
    *SAMPLING_NAMES, "seed", "max_tokens", "stop", "ignore_eos", "logit_bias", "ban", "top", "raw",
    "template", "keep_special", "tokens",
)  # fmt: skip
PROMPTS = ("messages", "prompt", "tokens")
_TYPES = {str: "a string", dict: "an object", bool: "true or false"}
MAX_ID_BYTES = 1000  # as JSON: every reply repeats it
MAX_TOKEN_ID = 2**32 - 1
MAX_COUNT = 2**53
MAX_TOP = 1000
MAX_PRIORITY = 100


@dataclass(frozen=True)
class GenerateOptions:
    """How to answer. sampling: the given fields of SamplingOptions; the others default to the
    checkpoint's. logit_bias: (id, nats). ban: ids. template: variables for the chat template.
    tokens: one reply per token. The rest is as the options of toast-decode(1)."""

    sampling: dict[str, Any] = field(default_factory=dict)
    seed: int | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logit_bias: tuple[tuple[int, float], ...] = ()
    ban: tuple[int, ...] = ()
    top: int = 0
    raw: bool = False
    template: dict[str, Any] = field(default_factory=dict)
    keep_special: bool = False
    tokens: bool = False


@dataclass(frozen=True)
class Request:
    """One request. For "generate" exactly one of messages, prompt and tokens (ids) is given.

    tools: JSON schemas for the chat template. session: the absolute path of a session's directory,
    which need not exist. model: which it is for, as -m takes it. resident, experts: required
    settings of residency and experts, None for any. keep: the state may be kept for later turns.
    received: time.perf_counter() when the line was complete. For attach ops: fds, descriptors that
    came with the line, closed by the receiver; raw, the object itself.
    """

    op: str = "generate"
    id: str | int | None = None
    messages: list[dict] | None = None
    prompt: str | None = None
    tokens: list[int] | None = None
    tools: list[dict] | None = None
    options: GenerateOptions = field(default_factory=GenerateOptions)
    stream: bool = True
    session: str | None = None
    priority: int = 0
    model: str | None = None
    resident: str | None = None
    experts: str | None = None
    keep: bool = True
    received: float = field(default_factory=time.perf_counter)
    fds: list[int] = field(default_factory=list)
    raw: dict[str, Any] = field(default_factory=dict)


def parse_object(line: bytes) -> dict[str, Any]:
    """The object of a line. Raises DataError."""
    document = parse_json(line, "request")
    if not isinstance(document, dict):
        raise DataError(f"request: {kind(document)} instead of an object")
    return document


def request_id(document: dict[str, Any]) -> str | int | None:
    """The id that replies should carry. Raises UsageError for an invalid one."""
    value = document.get("id")
    if "id" in document and (isinstance(value, bool) or not isinstance(value, (str, int))):
        raise UsageError(f"id: {kind(value)} instead of a string or a whole number")
    if len(json.dumps(value, ensure_ascii=False).encode()) > MAX_ID_BYTES:
        raise UsageError(f"id: longer than {MAX_ID_BYTES} bytes")
    return value


def make_request(document: dict[str, Any], fds: Iterable[int] = ()) -> Request:
    """Build a request from its object. Raises DataError for an invalid conversation, UsageError for
    fields and options that are unknown, missing or of the wrong type."""
    identity = request_id(document)
    op = _typed(document, "op", "generate")
    if op in ATTACH_OPS or op in CONTROL_OPS:
        known = ATTACH_OPS.get(op, ())
        for name in document:
            if name not in (*known, "op", "id"):
                hint = did_you_mean(name, known)
                raise UsageError(f"{op} takes no field {name[:100]!r}", hint=hint)
        for name in known:
            if name not in document:
                raise UsageError(f"{op} needs the field {name!r}")
        return Request(op, identity, fds=list(fds if op in ATTACH_OPS else ()), raw=document)
    if op not in OPS:
        raise UsageError(f"op: unknown {op[:100]!r}", hint=_nearest(op, OPS, "ops"))
    for name in document:
        if name not in FIELDS:
            raise UsageError(f"unknown field {name[:100]!r}", hint=_field_hint(name))
    given = [name for name in PROMPTS if name in document]
    if len(given) != 1:
        what = " and ".join(given) or "no prompt"
        raise UsageError(f"{what}: a request has one of {', '.join(PROMPTS)}")
    options = _options(_typed(document, "options", {}))
    tools = check_tools(document["tools"]) if "tools" in document else None
    _check_together(options, given[0], tools)
    return Request(
        op,
        identity,
        **_prompt(document, given[0], options.raw),
        tools=tools,
        options=options,
        stream=_typed(document, "stream", True),
        session=_session(document),
        priority=_whole(document, "priority", -MAX_PRIORITY, MAX_PRIORITY, 0),
        model=_model(document),
        resident=_text(document, "resident"),
        experts=_text(document, "experts"),
        keep=_typed(document, "keep", True),
    )


def _prompt(document: dict[str, Any], name: str, raw: bool) -> dict[str, Any]:
    if name == "messages":
        return {name: check_messages(document[name])}
    if name == "prompt":
        text = _typed(document, name, "")
        if not (text if raw else text.strip("\n")):
            raise DataError("empty prompt")
        return {name: text}
    ids = _ids(document[name], name)
    if not ids:
        raise DataError("tokens: the list is empty")
    return {name: ids}


def _options(given: dict[str, Any]) -> GenerateOptions:
    for name in given:
        if name not in OPTIONS:
            hint = _nearest(name, OPTIONS, "options")
            raise UsageError(f"unknown option {name[:100]!r}", hint=hint)
    options = GenerateOptions(
        sampling=_sampling(given),
        seed=_whole(given, "seed", 0, 2**64 - 1, None),
        max_tokens=_whole(given, "max_tokens", 1, MAX_COUNT, None),
        stop=_stops(given),
        ignore_eos=_typed(given, "ignore_eos", False),
        logit_bias=_bias(_typed(given, "logit_bias", {})),
        ban=tuple(_ids(given.get("ban", []), "ban")),
        top=_whole(given, "top", 0, MAX_TOP, 0),
        raw=_typed(given, "raw", False),
        template=_template(given),
        keep_special=_typed(given, "keep_special", False),
        tokens=_typed(given, "tokens", False),
    )
    SamplingOptions(**options.sampling, logit_bias=options.logit_bias, bans=options.ban).validate()
    return options


def _sampling(given: dict[str, Any]) -> dict[str, Any]:
    """The given sampling fields; their ranges are checked with the others."""
    chosen = {name: given[name] for name in SAMPLING_NAMES if name in given}
    for name, value in chosen.items():
        _check_number(value, name)
    return chosen


def _check_together(options: GenerateOptions, prompt: str, tools: list | None) -> None:
    """Refuse options that do not apply to the request's kind of prompt."""
    if options.raw and prompt != "prompt":
        raise UsageError(f"raw: it is for a prompt, not for {prompt}")
    for name, value in (("template", options.template or None), ("tools", tools)):
        if value is not None and (options.raw or prompt == "tokens"):
            what = "a raw prompt goes" if options.raw else "tokens go"
            raise UsageError(f"{name}: {what} through no chat template")
    if tools is not None and "tools" in options.template:
        raise UsageError("tools: they are given twice, as a field and as a variable")
    if options.top and not options.tokens:
        raise UsageError("top: it is for token replies", hint="ask for them with tokens")


# ------------------------------------------------------------------------------ one field each


def _typed(values: dict[str, Any], name: str, default: T) -> T:
    """A string, object or boolean, like the default."""
    value = values.get(name, default)
    if not isinstance(value, type(default)):
        raise UsageError(f"{name}: {kind(value)} instead of {_TYPES[type(default)]}")
    return value


def _text(values: dict[str, Any], name: str) -> str | None:
    return _typed(values, name, "") if name in values else None


def _whole(values: dict[str, Any], name: str, low: int, high: int, default: Any) -> Any:
    """An integer from low to high, or the default if absent."""
    if name not in values:
        return default
    value = values[name]
    if isinstance(value, bool) or not isinstance(value, int):
        what = value if isinstance(value, float) else kind(value)
        raise UsageError(f"{name}: {what} instead of a whole number")
    if not low <= value <= high:
        raise UsageError(f"{name}: {_short(value)} is not in [{low}, {high}]")
    return value


def _ids(value: Any, name: str) -> list[int]:
    if not isinstance(value, list):
        raise UsageError(f"{name}: {kind(value)} instead of a list of token ids")
    if set(map(type, value)) == {int} and 0 <= min(value) <= max(value) <= MAX_TOKEN_ID:
        return value  # not checked one by one, which takes a second for millions
    for place, token in enumerate(value, 1):
        if type(token) is not int or not 0 <= token <= MAX_TOKEN_ID:
            what = _short(token) if type(token) in (int, float) else kind(token)
            raise UsageError(f"{name}: entry {place}: {what} instead of a token id")
    return value


def _stops(given: dict[str, Any]) -> tuple[str, ...]:
    value = given.get("stop", [])
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise UsageError("stop: neither a string nor a list of strings")
    if "" in stops:
        raise UsageError("stop: a stop string is empty")
    return tuple(stops)


def _bias(given: dict[str, Any]) -> tuple[tuple[int, float], ...]:
    for name in given:
        if not re.fullmatch(r"[0-9]{1,10}", name) or int(name) > MAX_TOKEN_ID:
            raise UsageError(f"logit_bias: {name[:40]!r} is not a token id")
        _check_number(given[name], f"logit_bias: id {name}")
    return tuple((int(name), value) for name, value in given.items())


def _check_number(value: Any, name: str) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise UsageError(f"{name}: {kind(value)} instead of a number")
    if isinstance(value, int) and abs(value) >= 2**63:
        raise UsageError(f"{name}: the number is too large")


def _template(given: dict[str, Any]) -> dict[str, Any]:
    variables: dict[str, Any] = _typed(given, "template", {})
    for name in variables:
        if not name.isidentifier() or name == "messages":
            raise UsageError(f"template: {name[:40]!r} is not a name for a variable")
    check_size(variables, "template")
    return variables


def _session(document: dict[str, Any]) -> str | None:
    """The session's directory: a name refers to the user's sessions, never to the daemon's working
    directory."""
    if (value := _text(document, "session")) is None:
        return None
    from toastkit.session.names import resolve, sessions_root

    if os.path.isabs(value):
        return str(resolve(value))
    if "/" in value or value in (".", ".."):
        raise UsageError(
            f"session: {value[:100]!r} is neither a name nor an absolute path",
            hint="the daemon runs in another directory",
        )
    try:
        resolve(value)
    except UsageError as error:  # without its hint: no path of this directory is taken
        raise UsageError(error.message) from error
    return str(sessions_root() / value)


def _model(document: dict[str, Any]) -> str | None:
    value = _text(document, "model")
    if value is not None and (not value or "\0" in value):
        raise UsageError(f"model: {value[:100]!r} is no model")
    return value


# ------------------------------------------------------------------------------------ wording


def _short(value: int | float) -> str:
    """A number as given, unless it has too many digits to read."""
    return str(value) if isinstance(value, float) or abs(value) < 10**30 else "a long number"


def _nearest(name: str, known: Collection[str], what: str) -> str | None:
    return did_you_mean(name, known, f"{what} are {', '.join(known)}")


def _field_hint(name: str) -> str | None:
    if name in OPTIONS:
        return "it is an option: put it into the object options"
    if name == "system":
        return "a system prompt is a message of the role system"
    return _nearest(name, FIELDS, "fields")
