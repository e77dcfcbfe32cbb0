"""Options of the experts: how many a token goes to, in a step and while the prompt is read."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from toastkit.commands import completion
from toastkit.commands.cli import given, refuse_together
from toastkit.commands.options import together
from toastkit.commands.sizes import Word, is_number

if TYPE_CHECKING:
    from toastkit.experts.experts_options import ExpertsOptions, LittleK

MODES = ("big", "little", "mobile")


class Chosen(NamedTuple):
    """What --experts says: mode of ExpertsOptions, and its gamma where it is given."""

    mode: str
    gamma: float | None = None


class Experts(Word):
    """big, little, or mobile with a gamma of its own."""

    name = "experts"

    def parse(self, word: str) -> Chosen:
        """What was asked for. Whether there is such a gamma is for ExpertsOptions to say."""
        mode, colon, gamma = word.strip().lower().partition(":")
        if mode in MODES and not colon:
            return Chosen(mode)
        if mode == "mobile" and is_number(gamma):
            return Chosen(mode, float(gamma))
        raise ValueError(
            f"{word[:40]!r} is not big, little, mobile, or mobile with a gamma such as mobile:0.7"
        )

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str):
        """The three words."""
        return completion.beginning(incomplete, MODES)


class Little(Word):
    """A number of experts, or a share in per cent."""

    name = "little-k"

    def parse(self, word: str) -> LittleK:
        """What was asked for. Whether it is too few or too many is for ExpertsOptions to say."""
        from toastkit.experts.experts_options import LittleK

        if re.fullmatch(r"[0-9]{1,9}", word.strip()):
            return LittleK(int(word))
        if found := re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)%", word.strip()):
            return LittleK(float(found[1]), True)
        raise ValueError(
            f"{word[:40]!r} is not a number of experts, or a share of them such as 50%"
        )


little_k = click.option(
    "--little-k", type=Little(), metavar="N|P%",
    help="Experts a token in the little model (default: half of the model's own, rounded up).",
)  # fmt: skip
step_experts = together(
    click.option(
        "--experts", type=Experts(), metavar="big|little|mobile[:GAMMA]",
        help="Model of a step: the whole one, one with fewer experts a token, or that one where "
        "its likeliest token is likelier than GAMMA (default: big; GAMMA: 0.7).",
    ),
    little_k,
)  # fmt: skip
prefill_experts = click.option(
    "--prefill-experts", type=click.Choice(["big", "little"]),
    help="Model that reads the prompt (default: big).",
)  # fmt: skip
experts = together(step_experts, prefill_experts)
prompt_experts = together(prefill_experts, little_k)
EXPERT_NAMES = ("experts", "little_k", "prefill_experts")


def refuse_idle(context: click.Context, flags: dict[str, Any]) -> None:
    """Raises UsageError for options of the experts that would change nothing, and for such as make
    no sense."""
    options = expert_options(flags)
    if options is None or not options.runs_little:
        wanted = [
            f"--{name.replace('_', '-')} {words}"
            for name, words in (
                ("experts", "little or mobile"), ("prefill_experts", "little"),
            )
            if name in flags
        ]  # fmt: skip
        refuse_together(context, f"needs {' or '.join(wanted)}", "little_k")


def expert_options(flags: dict[str, Any]) -> ExpertsOptions | None:
    """ExpertsOptions from flags, None where neither says anything of a model. Raises UsageError."""
    chosen, prompt, little = (
        flags.get(name) for name in ("experts", "prefill_experts", "little_k")
    )
    if chosen is None and prompt is None and little is None:
        return None
    from toastkit.experts.experts_options import GAMMA, ExpertsOptions

    mode, gamma = chosen or Chosen("big")
    options = ExpertsOptions(mode, GAMMA if gamma is None else gamma, little, prompt or "big")
    if options.runs_little:
        return options
    return None if chosen is None else ExpertsOptions(mode)  # --little-k would be a variable's


def insisted(context: click.Context, flags: dict[str, Any]) -> str | None:
    """The setting that a daemon must have if it is to be asked: of these on the command line. None
    where none is given: a variable is for models that are loaded here."""
    if not given(context, *EXPERT_NAMES):
        return None
    options = expert_options(flags)
    return "big" if options is None else options.setting
