"""Jinja set up as in Hugging Face's chat templates, and the process that renders untrusted ones.

Jinja's immutable sandbox keeps a template away from Python's internals. The process bounds its
cost: `serve` runs in a child (toastkit.text.template_child) that can open no file, start no process
and use only so much memory and time, and that its parent kills at a timeout.
"""

from __future__ import annotations

import codecs
import json
import resource
import signal
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from importlib import import_module
from math import inf
from typing import Any

from jinja2 import Template, TemplateSyntaxError, ext, meta, nodes, sandbox
from jinja2.utils import Namespace as JinjaNamespace

MAX_COMPILED = 4  # a server renders one template again and again; few, because they may be long


class Refused(Exception):
    """The template called raise_exception, or does something forbidden."""


class TooMuch(Exception):
    """The template writes more than it may."""


class Namespace(JinjaNamespace):
    """Jinja's namespace without names special to Python, such as `__html__`."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # any other name is the template's
        self, *given = args
        values = dict(*given, **kwargs)
        for name in values:
            _check_name(name)
        JinjaNamespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if str(name).startswith("_"):
        raise sandbox.SecurityError(f"a namespace takes no name like {name!r}")


class GenerationTag(ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's text, which stays."""

    tags = {"generation"}

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(
            parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line
        )


def _raise_exception(message: object = "") -> None:
    raise Refused(str(message))


def _strftime_now(pattern: str) -> str:
    if len(pattern) > 1000:
        raise ValueError("a date format over 1000 characters")
    return datetime.now().strftime(pattern)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Dump JSON without escapes for non-ASCII or HTML, with Python's spacing and the keys' own
    order."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


@lru_cache(maxsize=1)
def _environment() -> sandbox.ImmutableSandboxedEnvironment:
    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", GenerationTag]
    )
    environment.filters["tojson"] = _tojson
    environment.globals.update(
        raise_exception=_raise_exception, strftime_now=_strftime_now, namespace=Namespace
    )
    return environment


@lru_cache(MAX_COMPILED)
def _compiled(source: str) -> Template:
    return _environment().from_string(source)


@lru_cache(MAX_COMPILED)
def _mentioned(source: str) -> list[str]:
    """Return the variables that a template takes from outside."""
    return sorted(meta.find_undeclared_variables(_environment().parse(source)))


def answer(job: dict[str, Any], most: float = inf) -> dict[str, Any]:
    """Render a job. Raises nothing except what ends a process.

    job: template, its source; variables; arguments, the names of those that the user set. most:
    characters that it may write. -> text, with `mentions`, the variables that the template takes,
    if there are arguments, and `number`, an argument given as 0 or 1 that has no effect as a number
    but would as a boolean; or error, a line, with `stopped` if it exceeded a limit.
    """
    try:
        text = _written(job["template"], job["variables"], most)
        text.encode()
        reply: dict[str, Any] = {"text": text}
        if job["arguments"]:
            reply["mentions"] = _mentioned(job["template"])
            reply["number"] = _number_without_effect(job, text, most)
        return reply
    except MemoryError:
        return {"error": "it takes too much memory", "stopped": True}
    except TooMuch as error:
        return {"error": str(error), "stopped": True}
    except RecursionError:
        return {"error": "it nests too deep", "stopped": True}
    except UnicodeEncodeError:
        return {"error": "it writes a lone surrogate, which is not text"}
    except TemplateSyntaxError as error:
        return {"error": f"line {error.lineno}: {_one_line(error.message)}"}
    except Exception as error:
        return {"error": _one_line(error)}


def _written(source: str, variables: dict[str, Any], most: float) -> str:
    pieces, size = [], 0
    for piece in _compiled(source).generate(variables):
        size += len(piece)
        if size > most:
            raise TooMuch(f"it writes over {most} characters")
        pieces.append(piece)
    return "".join(pieces)


def _number_without_effect(job: dict[str, Any], text: str, most: float) -> str | None:
    """Return an argument given as 0 or 1 without effect, where false or true would change the text:
    `x is false` does not hold for 0."""
    variables = job["variables"]
    for name in job["arguments"]:
        value = variables[name]
        if type(value) is not int or value not in (0, 1):
            continue
        without = {other: variables[other] for other in variables if other != name}
        try:
            if _written(job["template"], without, most) != text:
                continue
            truth = {**variables, name: bool(value)}
            if _written(job["template"], truth, most) != text:
                return name
        except Exception:
            continue  # it does have an effect
    return None


def _one_line(error: object) -> str:
    """Return a message as one line of at most 300 characters."""
    text = " ".join(str(error)[:2000].split()) or type(error).__name__
    return text if len(text) <= 300 else text[:297] + "..."


# ------------------------------------------------------------------------------- the child's own


def serve(memory_bytes: int, base_characters: int, header_bytes: int) -> None:
    """Answer jobs on descriptor 0, a socket, until it is closed.

    memory_bytes: of address space. base_characters: that a template may write, plus four for each
    byte of the job. header_bytes: of a message's length, big-endian; then comes its JSON.
    """
    _confine(memory_bytes)
    read, write = open(0, "rb", closefd=False), open(0, "wb", closefd=False)
    reply: dict[str, Any] = {"ready": True}
    while True:
        data = json.dumps(reply).encode()
        write.write(len(data).to_bytes(header_bytes, "big") + data)
        write.flush()
        signal.alarm(0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        header = read.read(header_bytes)
        if len(header) < header_bytes:
            return
        size = int.from_bytes(header, "big")
        job = json.loads(read.read(size))
        signal.setitimer(signal.ITIMER_PROF, job["seconds"])  # of processor, then it is killed
        # The parent waits no longer than this; the alarm is for a child whose parent was killed.
        signal.alarm(int(job["wait"]) + 10)
        reply = answer(job, base_characters + 4 * size)


def _confine(memory_bytes: int) -> None:
    """Forbid opening, writing to disk and starting anything, whatever a template finds."""
    # What Jinja and Python would import lazily.
    for name in ("jinja2.constants", "jinja2.debug", "unicodedata", "html", "textwrap", "pprint"):
        import_module(name)
    codecs.lookup("unicode-escape")

    for number in (signal.SIGALRM, signal.SIGPROF):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    for kind, most in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_NOFILE, 3),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(kind)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        # macOS refuses some; there the parent checks the memory, too.
        with suppress(OSError, ValueError):
            resource.setrlimit(kind, (most, most))
