"""toast-frames: inspect, convert or check a stream of frames."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import click

from toastkit.commands import cli, options
from toastkit.commands.sizes import IntegerRange
from toastkit.descriptors import is_pipe
from toastkit.errors import DataError, FrameError, UsageError, did_you_mean
from toastkit.frames import KINDS, End, Frame, Head
from toastkit.stages.arrays import LogitsReader
from toastkit.text.exact_numbers import counted
from toastkit.text.terminal import shown


@cli.command("frames")
@click.option("--json", "as_json", is_flag=True, help="Write JSON lines.")
@click.option("--from-json", is_flag=True, help="Read JSON lines.")
@click.option("--validate", is_flag=True, help="Check the stream and say how long it is.")
@click.option("--stat", is_flag=True, help="Count instead of copying (with --json, as JSON).")
@click.option("--kinds", metavar="K,K", help="Only frames of these kinds.")
@click.option("--slice", "span", metavar="A:B", help="Only frames A up to B, heads not counted.")
@click.option(
    "--arrays",
    type=click.Choice(["topk", "base64", "none"]),
    default="topk",
    show_default=True,
    help="How --json writes logits.",
)
@click.option(
    "--top",
    type=IntegerRange(1),
    default=10,
    show_default=True,
    metavar="N",
    help="Entries that a top-k list holds.",
)
@options.inline
def frames(**flags) -> int:
    others = ("stat", "as_json", "kinds", "span", "inline")
    cli.typed_wins(flags, "validate", *others)
    cli.typed_wins(flags, "stat", "arrays", "top")
    cli.typed_wins(flags, "arrays", "top")
    if not flags["stat"]:
        cli.typed_wins(flags, "as_json", "inline")
    if flags["validate"]:
        cli.refuse_together("does not go with --validate, which looks at all", *others)
    if not flags["as_json"] or flags["stat"]:
        cli.refuse_together("is for --json", "arrays", "top")
    else:
        cli.refuse_together("is for frames: --arrays says how --json writes logits", "inline")
    if flags["arrays"] != "topk":
        cli.refuse_together("is for --arrays topk", "top")
    kinds = _kinds(flags["kinds"])
    start, stop = _span(flags["span"])

    reader = LogitsReader()

    def chosen(source: Iterable[Frame]) -> Iterator[Frame]:
        from toastkit.stages.inspect import choose, make_inline

        source = reader.listen(source)
        if flags["inline"]:
            source = make_inline(source)
        return choose(source, kinds, start, stop)

    if flags["validate"]:
        return _validate(flags)
    if flags["stat"]:
        return _statistics(flags, chosen)
    return _copy(flags, chosen, reader)


def _kinds(text: str | None) -> frozenset[str] | None:
    if text is None:
        return None
    kinds = frozenset(part.strip() for part in text.split(",") if part.strip())
    known = f"kinds are {', '.join(KINDS)}"
    if not kinds:
        raise UsageError("--kinds names none", hint=known)
    if unknown := sorted(kinds - set(KINDS)):
        hint = did_you_mean(unknown[0], KINDS, known)
        raise UsageError(f"no such kind of frame: {unknown[0]}", hint=hint)
    return kinds


def _span(text: str | None) -> tuple[int, int | None]:
    if text is None:
        return 0, None
    match = re.fullmatch(r"([0-9]{0,18}):([0-9]{0,18})", text)
    if not match:
        raise UsageError(f"{cli.spelled('span')} takes A:B, not {text[:40]!r}")
    first, end = int(match[1] or 0), int(match[2]) if match[2] else None
    if end is not None and end < first:
        raise UsageError(f"{cli.spelled('span')} {text} ends before it begins")
    return first, end


def _copy(flags: dict[str, Any], chosen: Callable, reader: LogitsReader) -> int:
    from toastkit.commands.pipes import WatchedInput, run_filter
    from toastkit.stages.jsonl import json_frames

    write = _json_writer(flags, reader) if flags["as_json"] else None

    def build(source, signals):
        if flags["from_json"]:
            return chosen(json_frames(WatchedInput()))
        return chosen(source if is_pipe(1) else _declining(source))

    return run_filter(build, write=write)


def _json_writer(flags: dict[str, Any], reader: LogitsReader) -> Callable[[Frame], None]:
    from toastkit.client.output import write_text
    from toastkit.stages.jsonl import to_json

    def write(frame: Frame) -> None:
        write_text(to_json(frame, flags["arrays"], flags["top"], reader.read) + "\n")

    return write


def _statistics(flags: dict[str, Any], chosen: Callable) -> int:
    from toastkit.stages.inspect import Statistics

    statistics = Statistics()
    for frame in chosen(_input(flags)):
        statistics.add(frame)
    summary = statistics.summary()
    if flags["as_json"]:
        print(json.dumps(summary))
        return 0
    for name, value in summary.items():
        if isinstance(value, dict):
            value = ", ".join(f"{k} {n}" for k, n in value.items())
        if value not in (None, ""):
            print(f"{name.replace('_', ' '):18} {shown(value)}")
    return 0


def _validate(flags: dict[str, Any]) -> int:
    from toastkit.stages.streams import BEGIN

    count = runs = unended = 0
    inside = False
    for frame in _input(flags):
        count += 1
        if isinstance(frame, Head):
            runs += 1
            unended += inside
            inside = True
        elif runs == 0:
            raise FrameError(f"frame {count} comes before any head", 0)
        elif isinstance(frame, End):
            inside = False
    if count == 0:
        raise DataError("no frames on input", hint=BEGIN)
    unended += inside
    still_open = f", {unended} without an end" if unended else ""
    print(f"ok: {counted(count, 'frame')}, {counted(runs, 'run')}{still_open}")
    return 0


def _input(flags: dict[str, Any]) -> Iterable[Frame]:
    from toastkit.commands.pipes import frames_in
    from toastkit.stages.jsonl import json_frames

    return json_frames(sys.stdin.buffer) if flags["from_json"] else _declining(frames_in())


def _declining(source: Iterable[Frame]) -> Iterator[Frame]:
    """Pass the frames on, none of which this process writes out: tell the prefill that produces
    them not to wait for a decode."""
    from toastkit.session.handover import decline

    for frame in source:
        if isinstance(frame, Head) and isinstance(frame.run, str):
            decline(frame.run)
        yield frame


def main() -> None:
    cli.run(frames)
