"""Options of the experts' slots: how many experts are on the device."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from toastkit.commands.cli import given, refuse_together
from toastkit.commands.options import together
from toastkit.commands.sizes import Size

if TYPE_CHECKING:
    from toastkit.experts.slot_options import SlotOptions


class Amount(NamedTuple):
    """What --expert-slots says: kind and amount of SlotOptions."""

    kind: str
    amount: int = 0


class Slots(click.ParamType):
    """auto, a number of slots, or a size with its unit."""

    name = "slots"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Amount:
        """What was asked for. A word that is none of these is a usage error."""
        if isinstance(value, Amount):
            return value
        word = value.strip().lower()
        if word == "auto":
            return Amount(word)
        if re.fullmatch(r"[0-9]{1,9}", word):
            return Amount("slots", int(word))
        if re.fullmatch(r"[0-9.]+[kmgtib]+", word):
            return Amount("bytes", Size().convert(value, param, ctx) or 0)
        self.fail(
            f"{value[:40]!r} is not auto, a number of slots a layer, or a size such as 6G",
            param,
            ctx,
        )

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str):
        """The word; of numbers there are too many."""
        from click.shell_completion import CompletionItem

        return [CompletionItem("auto")] if "auto".startswith(incomplete) else []


expert_slots = together(
    click.option(
        "--expert-slots", type=Slots(), metavar="auto|N|SIZE",
        help="Experts of a layer that are on the device (default: all).",
    ),
    click.option(
        "--expert-prefetch", type=click.Choice(["off", "auto", "1", "2", "3"]), default="off",
        show_default=True, help="Layers ahead that experts are foreseen and read.",
    ),
)  # fmt: skip
SLOT_NAMES = ("expert_slots", "expert_prefetch")


def refuse_idle(context: click.Context, flags: dict[str, Any]) -> None:
    """Raises UsageError for options of the slots that would change nothing."""
    if flags["expert_slots"] is None:
        refuse_together(context, "needs --expert-slots", "expert_prefetch")


def slot_options(flags: dict[str, Any]) -> SlotOptions | None:
    """SlotOptions from flags, None for all experts on the device."""
    amount = flags["expert_slots"]
    if amount is None:
        return None
    from toastkit.experts.slot_options import SlotOptions

    return SlotOptions(amount.kind, amount.amount, flags["expert_prefetch"])


def insisted(context: click.Context, flags: dict[str, Any], resident: str | None) -> str | None:
    """The setting that a daemon must have if it is to be asked, of these and those of the residency
    (resident_flags.insisted). None where none is on the command line."""
    slots = slot_options(flags) if given(context, *SLOT_NAMES) else None
    return resident if slots is None else f"{resident or 'all'} {slots.setting}"
