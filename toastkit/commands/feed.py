"""toast-feed: send given tokens to a waiting decode."""

from __future__ import annotations

import io
import os
from typing import Any

import click

from toastkit.commands import cli, completion
from toastkit.commands.sizes import IntegerRange
from toastkit.errors import NoInputError, ToastError, UsageError
from toastkit.frames import starts_frames


@cli.command("feed")
@click.argument("ids", nargs=-1, type=IntegerRange(0, 2**32 - 1), metavar="[ID]...")
@click.option("--run", metavar="DIR", help="The run to feed (default: the one that a head names).")
@click.option(
    "--session", metavar="DIR|NAME", shell_complete=completion.sessions,
    help="Feed the run of this session.",
)  # fmt: skip
@click.option("--end", is_flag=True, help="End the run after the last ID.")
@click.option("--ignore-eos", is_flag=True, help="Do not end the run at an end-of-turn token.")
def feed(ids: tuple[int, ...], **flags) -> int:
    cli.exclusive(flags, "run", "session")
    sends = bool(ids or flags["end"])
    try:
        path = flags["run"] or (flags["session"] and _run_of(flags["session"]))
        if sends:
            cli.refuse_together("is for what standard input holds", "ignore_eos")
            return _send(ids, path, flags["end"])
    except ToastError as error:
        error.sent = sends  # there is no stream on stdout to end
        raise
    if os.isatty(0):
        if path is None:
            from toastkit.stages.streams import BEGIN

            hint = f"{BEGIN}; for ids give --run or --session"
            raise UsageError("frames are not read from a terminal", hint=hint)
        if not flags["quiet"]:
            cli.say("reading token ids from the terminal, up to Ctrl-D")
    return _follow(path, flags["ignore_eos"])


def _run_of(name: str) -> str:
    """The one run of a session that has a feed; waits briefly for a pipeline that is starting."""
    import time

    from toastkit.session.feed import OPEN_SECONDS
    from toastkit.session.names import resolve
    from toastkit.session.run import FEED_FILE
    from toastkit.session.upkeep import RUNS_DIRECTORY

    pattern = f"{RUNS_DIRECTORY}/*/{FEED_FILE}"
    deadline = time.monotonic() + OPEN_SECONDS
    while not (feeds := sorted(resolve(name).glob(pattern))):
        if time.monotonic() >= deadline:
            break
        time.sleep(0.01)
    if len(feeds) != 1:
        many = "no run" if not feeds else f"{len(feeds)} runs"
        raise NoInputError(f"session {name} has {many} to feed", hint="name one with --run")
    return str(feeds[0].parent)


def _send(ids: tuple[int, ...], path: str | None, end: bool) -> int:
    """Send the ids of the command line."""
    from toastkit.session.feed import FeedWriter
    from toastkit.session.run import feed_of

    if path is None:
        raise UsageError("which run? give --run or --session")
    writer = FeedWriter(feed_of(path))
    for number, token in enumerate(ids, 1):
        writer.send(None, token, end=end and number == len(ids))
    if end and not ids:
        writer.send(None, None, end=True)
    writer.close()
    return 0


def _follow(path: str | None, ignore_eos: bool) -> int:
    """Send what comes on stdin: frames, JSON lines or bare ids; tokens also go to stdout."""
    from toastkit.commands.pipes import WatchedInput, run_filter
    from toastkit.stages.feed import bare_ids, feed_tokens
    from toastkit.stages.jsonl import json_frames

    while (first := os.read(0, 1)).isspace():  # skip blank lines, and blanks
        pass
    if starts_frames(first):
        return run_filter(lambda frames, signals: feed_tokens(frames, path, ignore_eos), first)
    source: Any = WatchedInput(first) if first else io.BytesIO()  # a terminal ends more than once
    frames = json_frames(source) if first == b"{" else bare_ids(source)
    if first != b"{" and path is None:
        raise UsageError("which run? give --run or --session, or let a head frame name it")
    write = (lambda frame: None) if first != b"{" and os.isatty(1) else None  # ids have no head
    return run_filter(lambda _, signals: feed_tokens(frames, path, ignore_eos), write=write)


def main() -> None:
    cli.run(feed)
