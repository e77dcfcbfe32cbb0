"""Options of the gears: which one, of what, how."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import click

from toastkit.commands.cli import refuse_together
from toastkit.commands.options import defaulted, together
from toastkit.commands.sizes import Float, Integer, Size, Word


class Bits(Word):
    """Bits of the low and the mid gear: LOW,MID."""

    name = "bits"

    def parse(self, word: str) -> tuple[int, int]:
        """The two numbers; GearOptions checks that such gears exist."""
        found = re.fullmatch(r"\s*([0-9]{1,9})\s*,\s*([0-9]{1,9})\s*", word)
        if found is None:
            raise ValueError(f"{word[:40]!r} is not two numbers, such as 4,8")
        return int(found[1]), int(found[2])


CALIBRATED = "calibrated for the model"

gear_scope = click.option(
    "--gear-scope", type=click.Choice(["attention", "all"]), default="attention",
    show_default=True, help="Matrices that change gear: those of attention, or all of the layers.",
)  # fmt: skip
gear_bits = click.option(
    "--gear-bits", type=Bits(), metavar="LOW,MID", default="4,8", show_default=True,
    help="Bits a weight in low and in mid gear: 2, 4, 6 or 8.",
)  # fmt: skip
gears = together(
    click.option(
        "--gear", type=click.Choice(["auto", "low", "mid", "high", "off"]), default="off",
        show_default=True, help="Precision of the weights: by entropy, fixed, or as they are.",
    ),
    gear_scope,
    gear_bits,
    click.option(
        "--gear-path", type=click.Choice(["fused", "dequant"]), default="fused", show_default=True,
        help="Multiply packed weights as they are, or from a dequantised copy.",
    ),
    click.option(
        "--gear-cache", type=Size(), metavar="SIZE",
        help="What gears not in use may keep on the device (default: all but the originals).",
    ),
)  # fmt: skip
telemetry = together(
    defaulted("--window", type=Integer(), metavar="N", default=5,
              help="Tokens in the rolling mean"),
    defaulted("--low", type=Float(), metavar="BITS", default=1.8, source=CALIBRATED,
              help="Mean entropy up to which the gear is low, for a vocabulary of 32,768"),
    defaulted("--high", type=Float(), metavar="BITS", default=3.5, source=CALIBRATED,
              help="Mean entropy from which the gear is high"),
    defaulted("--hysteresis", type=Float(), metavar="BITS", default=0.1,
              help="How far past a threshold the mean must go to leave low or high"),
    defaulted("--min-duration", type=Integer(), metavar="N", default=4,
              help="Tokens that a gear is held at least"),
    click.option("--no-calibration", is_flag=True,
                 help="Leave stored thresholds of the model aside."),
)  # fmt: skip
TELEMETRY_NAMES = ("window", "low", "high", "hysteresis", "min_duration", "no_calibration")
GEAR_NAMES = ("gear_scope", "gear_bits", "gear_path", "gear_cache")


def gear_rules(flags: dict[str, Any], explain: Callable[[str], None] | None = None):
    """GearRules from flags, with the paper's constants as defaults. Raises UsageError."""
    from toastkit.gears.monitor import MonitorOptions
    from toastkit.gears.selector import SelectorOptions
    from toastkit.stages.follow import GearRules

    names = ("window", "low", "high", "hysteresis")
    monitor = MonitorOptions(**{n: flags[n] for n in names if flags[n] is not None})
    duration = flags["min_duration"]
    selector = SelectorOptions(monitor)
    if duration is not None:
        selector = SelectorOptions(monitor, duration)
    selector.validate()
    own = flags["low"] is not None or flags["high"] is not None
    return GearRules(selector, not (own or flags["no_calibration"]), explain)


def reject_unused(flags: dict[str, Any]) -> None:
    """Raise UsageError for gear options without effect."""
    if flags["gear"] == "off":
        refuse_together("needs a --gear", *GEAR_NAMES)
    if flags["gear"] != "auto":
        refuse_together("is for --gear auto", *TELEMETRY_NAMES)


def gear_settings(flags: dict[str, Any]):
    """GearSettings from flags, None for off. Raises UsageError."""
    if (options := gear_options(flags)) is None:
        return None
    from toastkit.stages.follow import GearSettings

    return GearSettings(options, gear_rules(flags))


def gear_options(flags: dict[str, Any]):
    """GearOptions from flags, None for off. Raises UsageError."""
    if flags["gear"] == "off":
        return None
    from toastkit.gears.gear_options import GearOptions

    return GearOptions(
        flags["gear"], flags["gear_scope"], flags["gear_bits"], flags["gear_path"],
        flags["gear_cache"],
    )  # fmt: skip
