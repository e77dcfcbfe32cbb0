"""toast-model: list, inspect, get, convert and check models."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click

from toastkit.commands import cli, completion, plan
from toastkit.commands.models import as_json, say_verbose, table
from toastkit.commands.progress import ProgressBar, watched
from toastkit.commands.sizes import Integer
from toastkit.errors import DataError, ToastError, UsageError, reported_as
from toastkit.interrupts import Signals
from toastkit.text.exact_numbers import counted
from toastkit.text.terminal import shown

# That change what `info --device` says, for the commands that load a model.
ENGINE_VARIABLES = ("TOAST_DEVICE", "TOAST_NATIVE", "TOAST_NATIVE_EXACT", "TOAST_THREADS")


@cli.command("model", cls=cli.Group, no_args_is_help=False)
def model(**flags) -> None:
    pass


# ------------------------------------------------------------------------------- list and info


@cli.command("list", under=model, help="List the models on this machine.")
@click.option("--json", "as_json", is_flag=True, help="Write JSON lines, a model a line.")
def list_command(**flags) -> int:
    from toastkit.model.info import human
    from toastkit.model.library import list_models

    found = []
    for one in list_models(cli.say, say_verbose(flags)):
        if flags["as_json"]:
            record = {"name": one.name, "size": one.size, "model_type": one.model_type}
            print(json.dumps({**record, "where": str(one.where), "source": one.source}), flush=True)
        else:
            row = (one.name, human(one.size), one.model_type, one.where)
            found.append(tuple(map(shown, row)))
    if not flags["as_json"]:
        table(("NAME", "SIZE", "TYPE", "WHERE"), found, right=(1,))
    return 0


@cli.command("info", under=model, help="Say what a model is made of.")
@click.argument("name", default="crumb", envvar="TOAST_MODEL", shell_complete=completion.models)
@as_json
@click.option("--supported", is_flag=True, help="List the model types that work here instead.")
@click.option(
    "--device", is_flag=True, allow_from_autoenv=False, help="Say what computes here instead."
)
def info(name: str, **flags) -> int:
    cli.typed_wins(flags, "supported", "name")
    cli.exclusive(flags, "supported", "device")
    for instead, tell in (("supported", _supported), ("device", _device)):
        if not flags[instead]:
            continue
        if cli.given("name"):
            raise UsageError(f"--{instead} takes no model")
        return tell(flags)
    from toastkit.model import info as facts
    from toastkit.model.locate import find

    files = find(name)
    summary = facts.summary(files)
    if not flags["as_json"]:
        _lines(facts.summary_lines(summary))
    try:
        store = _open(files)
        from toastkit.store.anatomy import anatomy

        found = anatomy(store, say_verbose(flags))
    except ToastError:
        if flags["as_json"]:
            print(json.dumps(summary))
        raise
    if flags["as_json"]:
        found["bytes"]["gears"] = summary.pop("gear_bytes")
        print(json.dumps({**summary, **found}))
    else:
        _lines(facts.anatomy_lines(found, summary["quantization"]))
    return 0


def _lines(pairs: Iterable[tuple[str, str]]) -> None:
    for what, value in pairs:
        print(f"{what:18} {shown(value)}")
    sys.stdout.flush()


def _device(flags: dict[str, Any]) -> int:
    from toastkit.engine import device

    facts = device.facts()
    given = {name: os.environ[name] for name in ENGINE_VARIABLES if os.environ.get(name)}
    if given.get("TOAST_NATIVE") == "off":
        facts = {name: facts[name] for name in ("device", "mlx")}
        facts["native products"] = "off: TOAST_NATIVE is off"
    if given:
        facts["variables"] = " ".join(f"{name}={value}" for name, value in given.items())
    if flags["as_json"]:
        print(json.dumps(facts))
    else:
        _lines((name, str(value)) for name, value in facts.items())
    return 0


def _supported(flags: dict[str, Any]) -> int:
    from toastkit.model.supported import supported

    rows = list(supported())
    if flags["as_json"]:
        for row in rows:
            print(json.dumps(row._asdict()))
        return 0
    found = [(row.model_type, row.module, row.status, row.note or "") for row in rows]
    table(("TYPE", "MODULE", "STATUS", "NOTE"), found)
    return 0


# ------------------------------------------------------------------------------ pull and remove


@cli.command("pull", under=model, help="Fetch a model from the Hugging Face hub.")
@click.argument("hub_id", metavar="HUB_ID")
@click.option("--revision", metavar="REVISION", help="Branch, tag or commit (default: main).")
def pull(hub_id: str, **flags) -> int:
    from toastkit.model.hub import fetch

    Signals()  # SIGTERM and SIGHUP unwind the stack too: no half-written file stays behind
    _print_path(fetch(hub_id, flags["revision"], progress=watched(flags)))
    return 0


@cli.command("rm", under=model, help="Remove a model from toastkit's folder or the hub's cache.")
@click.argument("name", shell_complete=completion.removable)
@click.option("-y", "--yes", is_flag=True, allow_from_autoenv=False, help="Do not ask.")
def rm(name: str, **flags) -> int:
    from toastkit.model.info import human
    from toastkit.model.library import removal, remove

    what = removal(name)
    told = f"{shown(what.name)}, {human(what.size)}, {shown(what.paths[0])}"
    if not flags["yes"]:
        if not sys.stdin.isatty():
            raise UsageError(
                f"will not remove {told}: there is no terminal to ask at", hint="--yes removes it"
            )
        try:
            sure = click.confirm(f"remove {told}?", err=True)
        except click.Abort:  # Ctrl-C, Ctrl-D: the line with the question has no end
            click.echo(err=True)
            raise
        if not sure:
            return 0
    remove(what)
    if not flags["quiet"]:
        cli.say(f"removed {told}")
    return 0


# ----------------------------------------------------------------------- bake, split and verify


@cli.command("bake", under=model, help="Write a model as one .toast file.")
@click.argument("source", shell_complete=completion.models)
@click.option(
    "-o",
    "--output",
    metavar="FILE.toast",
    help="Where to (default: toastkit's folder, NAME.toast).",
)
@click.option(
    "--quant", type=Integer(), metavar="BITS", allow_from_autoenv=False,
    help="Quantise to so many bits a weight.",
)  # fmt: skip
@click.option(
    "--group-size", type=Integer(), metavar="G", allow_from_autoenv=False,
    help="Weights that share a scale.",
)  # fmt: skip
@click.option(
    "--mode", type=click.Choice(["affine", "mxfp4", "nvfp4", "mxfp8"]), allow_from_autoenv=False,
    help="How to quantise.",
)  # fmt: skip
@click.option(
    "--dtype", type=click.Choice(["float32", "float16", "bfloat16"]), allow_from_autoenv=False,
    help="Type of the weights that are not quantised.",
)  # fmt: skip
@click.option("--gears", metavar="low,mid", help="Store the layers in these gears as well.")
@click.option("--expert-major", is_flag=True, help="Write each expert in one piece.")
@click.option("--force", is_flag=True, allow_from_autoenv=False, help="Overwrite the file.")
def bake(source: str, **flags) -> int:
    gears = _gears(flags["gears"])
    if flags["group_size"] is not None and flags["quant"] is None and flags["mode"] is None:
        raise UsageError("--group-size is for --quant")
    from toastkit.model.locate import find

    files = find(source)
    out = _bake_output(files, flags)
    Signals()
    store = _open(files)
    from toastkit.store.bake import bake as write
    from toastkit.store.quantising import QuantizationOptions

    quantization = None
    if flags["quant"] is not None or flags["mode"] is not None:
        quantization = QuantizationOptions(
            flags["quant"], flags["group_size"], flags["mode"] or "affine"
        )
    write(
        store, out, quantization=quantization, dtype=flags["dtype"], gears=gears,
        expert_major=flags["expert_major"], overwrite=flags["force"], progress=_bar(flags, "bake"),
    )  # fmt: skip
    _print_path(out)
    return 0


def _gears(text: str | None) -> tuple[str, ...]:
    names = () if text is None else tuple(part.strip() for part in text.split(","))
    for name in names:
        if name not in ("low", "mid"):
            raise UsageError(f"no such gear to bake: {name[:40]!r}", hint="gears are low and mid")
    return tuple(dict.fromkeys(names))


def _bake_output(files, flags: dict[str, Any]) -> Path:
    """The output path. Raises UsageError for one that -m would not find."""
    from toastkit.model.locate import OWN_NAME, models_home
    from toastkit.model.toast_format import SUFFIX
    from toastkit.private_files import make_private_directories

    given = flags["output"]
    if given is not None:
        out = Path(given)
        if out.suffix != SUFFIX:
            said = f"{cli.spelled('output')} takes a name that ends in {SUFFIX}"
            raise UsageError(f"{said}, not {given[:200]!r}")
    else:
        stem = files.name.rstrip("/").rpartition("/")[2].removesuffix(SUFFIX)
        why = ": that is the embedded one" if stem == "crumb" else ""
        if why or not OWN_NAME.fullmatch(stem):
            said = f"-m would not find a model called {stem[:200]!r}{why}"
            raise UsageError(said, hint="give -o FILE")
        out = models_home() / f"{stem}{SUFFIX}"
        with reported_as(f"cannot create {out.parent}", creating=True):
            make_private_directories(out.parent)
    return out


@cli.command("split", under=model, help="Write a model as a directory with a file a layer.")
@click.argument("source", shell_complete=completion.models)
@click.option("-o", "--output", metavar="DIR", required=True, help="The directory to make.")
def split(source: str, **flags) -> int:
    from toastkit.model.locate import find

    out = Path(flags["output"])
    if not out.name:  # it is written under another name beside this one
        said = f"{cli.spelled('output')} takes the name of a directory to make"
        raise UsageError(f"{said}, not {flags['output']!r}")
    files = find(source)
    Signals()
    store = _open(files)
    from toastkit.store.bake import split as write

    write(store, out, _bar(flags, "split"))
    _print_path(out)
    return 0


@cli.command("verify", under=model, help="Check a model's files against their checksums.")
@click.argument("name", shell_complete=completion.models)
@click.option("--values", is_flag=True, help="Look for NaN and infinity in the weights too.")
def verify(name: str, **flags) -> int:
    from toastkit.model.info import human
    from toastkit.model.locate import find
    from toastkit.model.toast_format import is_model_tensor
    from toastkit.store import verify as checks

    files = find(name)
    problems = 0
    try:
        found = checks.verify(files, values=flags["values"], progress=_bar(flags, "verify"))
        for problem in found:
            print(shown(problem), flush=True)
            problems += 1
    except DataError:
        if not problems:
            raise  # otherwise it has been reported: the same header fails again
    if problems:
        return DataError.code
    tensors = [n for header in files.headers for n in header.entries if is_model_tensor(n)]
    size = sum(header.size for header in files.headers)
    more = "" if checks.has_checksums(files) else ", whole; there are no checksums to compare with"
    print(f"ok: {counted(len(tensors), 'tensor')}, {human(size)}{more}")
    return 0


cli.command("plan", under=model, help="Say what of a model fits into memory, and how fast it is.")(
    plan.plan
)

# ---------------------------------------------------------------------------------------- shared


def _open(files):
    """The Store of a checkpoint. On the CPU, which infers shapes and writes weights as well as any
    other device, and starts sooner."""
    from toastkit.engine import device

    device.start("cpu")
    from toastkit.store.store import Store

    return Store(files)


def _print_path(path: Path) -> None:
    """Print for a person, or, byte by byte, for a program."""
    text = shown(path).encode() if sys.stdout.isatty() else os.fsencode(path)
    sys.stdout.buffer.write(text + b"\n")


def _bar(flags: dict[str, Any], label: str):
    """progress(done, total) for a person, None if nobody watches."""
    return ProgressBar(label, "B") if watched(flags) else None


def main() -> None:
    cli.run(model)
