"""Reports of a model's policies in words: lines of -v, and of a daemon's status."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from toastkit.commands.cli import say
from toastkit.text.exact_numbers import counted, exact_number

if TYPE_CHECKING:
    from toastkit.frames import Frame


def told(frames: Iterable[Frame]) -> Generator[Frame, None, None]:
    """Pass frames on; after each run, when its answer is complete, print a line on stderr for what
    each policy did in it."""
    from toastkit.frames import End

    for frame in frames:
        yield frame
        if isinstance(frame, End):
            tell(frame.extra)


def tell(reports: Mapping[str, Any]) -> None:
    """Print a line on stderr for each policy's report. A daemon of another version may report other
    things."""
    for name, told in COUNTED.items():
        with suppress(KeyError, TypeError):
            say(f"{name}: {told(reports[name])}")


def tell_stats(stats: Mapping[str, Any]) -> None:
    """The lines for residency, experts and slots in the stats of an answer, whose gears are not a
    policy's report."""
    tell({name: told for name, told in stats.items() if name != "gears"})


def counted_gears(report: Mapping[str, Any]) -> str:
    """A GearPolicy's report in words."""
    from toastkit.model.info import human

    steps = ", ".join(f"{gear} {report[gear]}" for gear in ("low", "mid", "high"))
    return (
        f"{steps} steps; {counted(report['shifts'], 'shift')} in {report['seconds']:.3f} s; "
        f"{human(report['bytes'])} on the device now"
    )


def counted_residency(report: Mapping[str, Any]) -> str:
    """A ResidencyPolicy's report in words."""
    from toastkit.model.info import human

    wait, total = report["wait"], report["wait"] + report["compute"]
    line = (
        f"{report['resident']} of {counted(report['layers'], 'layer')} stay; "
        f"{human(report['read'])} read, waited {wait:.1f} s of {total:.1f} s"
    )
    moved = [(report["shed"], "given up"), (report["grown"], "taken back")]
    if any(count for count, _ in moved):
        line += "; " + ", ".join(f"{count} {what}" for count, what in moved)
    return line


def counted_experts(report: Mapping[str, Any]) -> str:
    """An ExpertsPolicy's report in words."""
    k, little_k, mode = report["k"], report["little_k"], report["mode"]
    words = counted(report["steps"], "step") if "steps" in report else "no steps"
    if report.get("prompt") == "little":
        words = f"prompt little, K {little_k}; {words}"
    if mode != "mobile":
        return f"{mode}, K {k if mode == 'big' else little_k} of {k}; {words}"
    fell = counted(report["fallbacks"], "fallback")
    ratio = "" if report["ratio"] is None else f", ratio {report['ratio']:.4f}"
    gamma = exact_number(report["gamma"])
    line = f"mobile, K {little_k} of {k}, gamma {gamma}; {words}, {fell}{ratio}"
    return line + _speed(report.get("seconds"), report.get("estimate"))


def _speed(seconds: Mapping[str, Any] | None, estimate: float | None) -> str:
    """The measured speed of MoBiLE beside the estimate of equation 1, as far as known."""
    if not seconds or not seconds["step"]:
        return ""
    line = f"; {1 / seconds['step']:.1f} tokens/s"
    if seconds["whole"]:
        line += f", {seconds['whole'] / seconds['step']:.2f} times the whole model's"
    return line if estimate is None else f"{line}, {estimate:.2f} estimated"


def counted_slots(report: Mapping[str, Any]) -> str:
    """A SlotPolicy's report in words."""
    from toastkit.model.info import human

    wanted = report["wanted"]
    initial = report.get("initial", report["slots"])
    before = "" if initial == report["slots"] else f", {initial} at the beginning"
    there = "none was looked for"
    if wanted:
        there = f"{report['hit']} of {wanted} were there ({100 * report['hit'] / wanted:.0f}%)"
    line = (
        f"{report['slots']} of {report['experts']} in slots{before}; {there}; "
        f"{human(report['read'])} read, waited {report['wait']:.1f} s"
    )
    if report["ahead"]:
        line += f"; {report['right']} of {report['ahead']} foreseen were wanted"
    if report["optimistic"]:
        line += f"; {counted(report['optimistic'], 'optimistic step')}, {report['retried']} retried"
    return line


COUNTED = {
    "gears": counted_gears, "residency": counted_residency, "experts": counted_experts,
    "slots": counted_slots,
}  # fmt: skip
