"""toasted: the daemon, and its control: status, stop, reload, health."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click

from toastkit.base_directories import own_directory
from toastkit.commands import cli, options, policy_flags, run_reports
from toastkit.commands.sizes import Duration, IntegerRange, Size
from toastkit.errors import ToastError, UnavailableError, UsageError, as_toast_error, did_you_mean
from toastkit.native.starting import NativeOptions
from toastkit.text.terminal import shown

if TYPE_CHECKING:
    from toastkit.daemon.audit import Audit
    from toastkit.daemon.background import Starter

ACTIONS = ("status", "stop", "reload", "health")  # on a running daemon
STARTS = ("start", "restart")
ALL = (*STARTS, *ACTIONS)
ANSWER_SECONDS = 60.0  # for a daemon to answer an action
STOP_SECONDS = 35.0  # for it to be gone: the default --drain, plus a margin
ONLY_DAEMON = (
    "model", "daemon", "pidfile", "idle_unload", "device", "dtype", "kv_bits",
    *NativeOptions._fields, "chunk", "parallel", "batch", "max_queue", "max_connections",
    "max_line", "cache", "spill", "audit", "no_audit", "audit_text", "drain",
    *policy_flags.POLICY_NAMES,
)  # fmt: skip


def _actions(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """The actions that begin with what was typed, for completion."""
    return [action for action in ALL if action.startswith(incomplete)]


@cli.command("toasted")
@click.argument("action", required=False, shell_complete=_actions)
@options.model("crumb")
@click.option("--socket", metavar="PATH", help="Where it listens, or where it is asked.")
@click.option("--daemon", is_flag=True, help="Go into the background, and return when ready.")
@click.option("--pidfile", metavar="PATH", help="Pidfile (default: beside the socket).")
@click.option(
    "--idle-unload", type=Duration(), metavar="TIME",
    help="Unload the model after so long without a request (default: never).",
)  # fmt: skip
@options.engine
@policy_flags.policies
@click.option("--chunk", type=IntegerRange(1), metavar="N", help="Prompt tokens per pass.")
@click.option(
    "--parallel", type=IntegerRange(1), default=8, show_default=True, metavar="N",
    help="Conversations answered at once.",
)  # fmt: skip
@click.option(
    "--batch", type=IntegerRange(1), default=8, show_default=True, metavar="N",
    help="How many of them take their steps together; 1: in turn.",
)  # fmt: skip
@click.option(
    "--max-queue", type=IntegerRange(0), default=64, show_default=True, metavar="N",
    help="Requests that may wait.",
)  # fmt: skip
@click.option(
    "--max-connections", type=IntegerRange(1), default=256, show_default=True, metavar="N",
    help="Connections at a time.",
)  # fmt: skip
@click.option(
    "--max-line", type=Size(1024), default="16M", show_default=True, metavar="SIZE",
    help="Longest request.",
)  # fmt: skip
@click.option(
    "--cache", type=Size(), default="2G", show_default=True, metavar="SIZE",
    help="Memory for finished conversations; 0 keeps none.",
)  # fmt: skip
@click.option(
    "--spill", type=Size(), default="8G", show_default=True, metavar="SIZE",
    help="Disk space for them; 0 writes none.",
)  # fmt: skip
@click.option("--audit", metavar="FILE", help="Audit log (default: in the state directory).")
@click.option("--no-audit", is_flag=True, help="Keep no audit log.")
@click.option("--audit-text", is_flag=True, help="Keep what was asked and answered in it.")
@click.option(
    "--drain", type=Duration(), default="30s", show_default=True, metavar="TIME",
    help="How long requests may go on when it is to end.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="With an action: print the reply as JSON.")
def toasted(action: str | None, **flags) -> int:
    from toastkit.daemon.paths import socket_path

    flags["socket"] = socket_path(flags["socket"])
    restarts = action == "restart"
    if action in STARTS:
        action, flags["daemon"] = None, True
    if action is not None:
        _check_action(action)
        cli.refuse_together("is for the daemon, not for an action", *ONLY_DAEMON)
        return _act(action, flags)
    cli.refuse_together(f"needs an action: {', '.join(ACTIONS)}", "as_json")
    policy_flags.reject_unused(flags)
    cli.typed_wins(flags, "no_audit", "audit", "audit_text")
    if len(cli.given("audit", "no_audit")) > 1:
        raise UsageError("--audit and --no-audit exclude each other")
    if flags["no_audit"]:
        cli.refuse_together("needs an audit log", "audit_text")
    if restarts:
        options.checkpoint(flags)  # before the one that serves is stopped for nothing
        policy_flags.service_settings(flags)
        _stop_if_there(flags["socket"])
    return _run_in_background(flags) if flags["daemon"] else _run(flags, cli.say)


def _check_action(action: str) -> None:
    if action not in ACTIONS:
        hint = did_you_mean(action, ALL, f"actions are {', '.join(ALL)}")
        raise UsageError(f"no such action: {action[:100]!r}", hint=hint)


# ----------------------------------------------------------------------------------- the daemon


def _run_in_background(flags: dict[str, Any]) -> int:
    """Returns in both processes: in one when the daemon is ready, in the other when it ends."""
    from toastkit.daemon import activation, background

    if activation.is_activated():
        raise UsageError("--daemon makes no sense where systemd starts the daemon")
    _make_absolute(flags)
    starter = background.detach(own_directory("STATE", "toasted.log"))
    if isinstance(starter, int):
        if flags["verbose"]:
            cli.say(f"ready, process {starter}")
        return 0
    try:
        return _run(flags, background.say_with_time, starter)
    except Exception as error:
        starter.failed(as_toast_error(error))
        raise


def _make_absolute(flags: dict[str, Any]) -> None:
    """Resolve paths against the directory that the daemon was started in, before it leaves it."""
    from toastkit.model.hub import hub_cache

    for name in ("pidfile", "audit"):
        if flags[name] is not None:
            flags[name] = os.path.abspath(flags[name])
    flags["model"] = options.absolute_model(flags["model"])
    os.environ["HF_HUB_CACHE"] = str(hub_cache())


def _allow_descriptors() -> None:
    """Take as many open files as may be had: a conversation mapped from its file keeps it open."""
    with suppress(OSError, ValueError):
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _run(flags: dict[str, Any], say: Callable[[str], None], starter: Starter | None = None) -> int:
    """Run the daemon to its end; return the exit code."""
    from toastkit.daemon.life import Settings, serve
    from toastkit.daemon.paths import pidfile_path
    from toastkit.daemon.service_settings import Limits

    _allow_descriptors()
    told = None if flags["quiet"] else say
    model = policy_flags.service_settings(flags)
    audit = _audit(flags, say)
    settings = Settings(
        socket=flags["socket"],
        pidfile=flags["pidfile"] or pidfile_path(flags["socket"]),
        say=say,
        limits=Limits(connections=flags["max_connections"], line_bytes=flags["max_line"]),
        drain_seconds=flags["drain"],
        announce=not flags["quiet"],
        verbose=flags["verbose"],
        debug=flags["debug"],
        audit=audit,
        on_ready=starter.ready if starter is not None else None,
        memory_warnings=model["policies"].gives_up,
    )

    def make_worker():
        from toastkit.daemon.service_settings import ServiceSettings
        from toastkit.daemon.worker import Worker

        same = ("chunk", "parallel", "batch", "max_queue", "debug")
        return Worker(
            ServiceSettings(
                idle_unload=flags["idle_unload"] or None,
                cache_bytes=flags["cache"],
                spill_bytes=flags["spill"],
                audit=audit,
                say=told,
                **model,
                **{name: flags[name] for name in same},
            )
        )

    return serve(settings, make_worker)


def _audit(flags: dict[str, Any], say: Callable[[str], None]) -> Audit | None:
    if flags["no_audit"]:
        return None
    from toastkit.daemon.audit import Audit

    path = os.path.abspath(flags["audit"] or own_directory("STATE", "audit.jsonl"))
    try:
        return Audit(path, flags["audit_text"], say)
    except ToastError as error:
        error.hint = error.hint or "--no-audit does without it"
        raise


# ----------------------------------------------------------------------------------- the actions


def _act(action: str, flags: dict[str, Any]) -> int:
    from toastkit.client.socket_backend import control

    path = flags["socket"]
    if action == "stop":
        reply = _stop(path)
    else:
        reply = control(path, action, ANSWER_SECONDS)
    if flags["as_json"]:
        from toastkit.client.output import write_text

        write_text(json.dumps(reply, ensure_ascii=False) + "\n")
    elif action in reply and isinstance(reply[action], dict):
        for line in _lines(action, reply[action]):
            print(shown(line), flush=True)
    if action == "health" and not reply.get("health", {}).get("ok"):
        raise UnavailableError(f"the daemon at {path} is not well")
    if flags["verbose"] and action in ("stop", "reload"):
        cli.say("stopped" if action == "stop" else "reloading")
    return 0


def _stop(path: str) -> dict[str, Any]:
    """Tell the daemon to stop, and wait until its socket is free."""
    from toastkit.client.socket_backend import control

    return control(path, "stop", STOP_SECONDS, True)


def _stop_if_there(path: str) -> None:
    """Stop the daemon before another takes its place. Raises SilentError for one that hangs."""
    from toastkit.client.socket_backend import SilentError

    try:
        _stop(path)
    except SilentError:
        raise
    except UnavailableError:
        pass  # there is none, or it is gone


def _lines(action: str, told: dict[str, Any]) -> Iterator[str]:
    """A reply as lines for a person."""
    if action == "status":
        with suppress(KeyError, TypeError):  # a daemon of another version reports other things
            yield from list(_summary(told))
            return
    for name, value in _flat(told):
        yield f"{name}: {value}"


def _summary(status: dict[str, Any]) -> Iterator[str]:
    """The essentials of a status in words. Raises KeyError or TypeError for one of another
    version."""
    from toastkit.model.info import human

    ledger, tokens, chats = status["ledger"], status["tokens"], status["conversations"]
    remembered = ledger.get("sessions", 0)
    weights = sum(ledger.values()) - remembered - ledger.get("cache", 0) - ledger.get("reading", 0)
    where = f"on the {status['device']} in {status['dtype']}" if status["loaded"] else "not loaded"
    if (kept := status.get("kv_dtype")) not in (None, status["dtype"]):
        where += f", keys and values in {kept}"
    yield f"daemon: process {status['pid']}, up {_ago(status['uptime'])}, at {status['socket']}"
    yield f"model: {status['model']}, {where}"
    if status["loaded"]:
        yield f"native products: {status['native']}"
    yield f"memory: {human(sum(ledger.values()))}, of it {human(weights)} for the weights"
    yield f"clients: {status['connections']} connected, {status['attached']} use the weights"
    counts = (f"{status[name]} {name}" for name in ("active", "waiting", "answered", "refused"))
    yield f"requests: {', '.join(counts)}"
    yield (
        f"tokens: {tokens['prompt']} in prompts, {tokens['cached']} of them remembered; "
        f"{tokens['answer']} in answers"
    )
    yield (
        f"conversations: {chats['in_memory']} in memory, {human(chats['bytes'])} of "
        f"{human(chats['budget'])}; {chats['on_disk']} on disk"
    )
    if "gears" in status:
        yield f"gears: {status['gears']['mode']}; {run_reports.counted_gears(status['gears'])}"
    if "residency" in status:
        counted = run_reports.counted_residency(status["residency"])
        yield f"residency: {status['resident']}; {counted}"
    if "experts" in status:
        counted = run_reports.counted_experts(status["experts"])
        yield f"experts: {status['experts']['setting']}; {counted}"
    if "slots" in status:
        yield f"slots: {run_reports.counted_slots(status['slots'])}"


def _ago(seconds: float) -> str:
    """A duration in its two largest units."""
    left = int(seconds)
    parts = []
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        if left >= size:
            parts.append(f"{left // size} {unit}")
        left %= size
    return " ".join(parts[:2]) or "0 s"


def _flat(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """The fields of a reply, a name and a value per line."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            yield f"{prefix}{name}", " ".join(text.split())


def main() -> None:
    cli.run(toasted)
