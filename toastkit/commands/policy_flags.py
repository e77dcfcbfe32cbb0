"""Options of the policies: gears, experts, and what stays on the device."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from toastkit.commands import completion
from toastkit.commands.cli import given, refuse_together
from toastkit.commands.options import defaulted, model_name, native_options, together
from toastkit.commands.sizes import Float, HowMany, Integer, Size, Word, is_number

if TYPE_CHECKING:
    from toastkit.engine.policy_options import PolicyOptions
    from toastkit.experts.experts_options import ExpertsOptions, LittleK, SlotOptions
    from toastkit.residency.residency_options import ResidencyOptions

# -------------------------------------------------------------------------------------------- gears


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


# ------------------------------------------------------------------------------------------ experts

MODES = ("big", "little", "mobile")


class Chosen(NamedTuple):
    """The value of --experts: mode of ExpertsOptions, and its gamma if given."""

    mode: str
    gamma: float | None = None


class Experts(Word):
    """big, little, or mobile with a gamma of its own."""

    name = "experts"

    def parse(self, word: str) -> Chosen:
        """The mode and gamma. ExpertsOptions checks the gamma."""
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
    """A number of experts, or a percentage."""

    name = "little-k"

    def parse(self, word: str) -> LittleK:
        """The number or share. ExpertsOptions checks its range."""
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


def expert_options(flags: dict[str, Any]) -> ExpertsOptions | None:
    """ExpertsOptions from flags, None if no flag concerns a model. Raises UsageError."""
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
    return None if chosen is None else ExpertsOptions(mode)  # --little-k is from a variable


def insisted_experts(flags: dict[str, Any]) -> str | None:
    """The setting that a daemon must have to be used, from the command line. None if there is none:
    environment variables are for models that are loaded here."""
    if not given(*EXPERT_NAMES):
        return None
    options = expert_options(flags)
    return "big" if options is None else options.setting


# ------------------------------------------------------------------------- what stays on the device

RESIDENT = HowMany(
    ("all", "auto"), "layers",
    "all, auto, a number of layers, a share of them such as 50%, or a size such as 6G", share=True,
)  # fmt: skip
SLOTS = HowMany(("auto",), "slots", "auto, a number of slots a layer, or a size such as 6G")
placement = click.option(
    "--placement", type=click.Choice(["first", "last", "interleaved"]), default="interleaved",
    show_default=True, help="Which of the layers stay.",
)  # fmt: skip
residency = together(
    click.option(
        "--resident", type=RESIDENT, metavar="all|auto|N|P%|SIZE", default="all",
        show_default=True, help="Layers that stay on the device; the others are read as they run.",
    ),
    placement,
    click.option(
        "--priority", type=click.Choice(["max-tps", "balanced", "max-context"]),
        default="balanced", show_default=True,
        help="What --resident auto keeps memory for: layers, both, or a long context.",
    ),
    click.option(
        "--expert-slots", type=SLOTS, metavar="auto|N|SIZE",
        help="Experts of a layer that are on the device (default: all).",
    ),
    click.option(
        "--expert-prefetch", type=click.Choice(["off", "auto", "1", "2", "3"]), default="off",
        show_default=True, help="Layers ahead that experts are foreseen and read.",
    ),
)  # fmt: skip
RESIDENT_NAMES = ("resident", "placement", "priority")
SLOT_NAMES = ("expert_slots", "expert_prefetch")


def residency_options(flags: dict[str, Any]) -> ResidencyOptions | None:
    """ResidencyOptions from flags, None for all."""
    return None if flags["resident"].kind == "all" else _residency(flags)


def slot_options(flags: dict[str, Any]) -> SlotOptions | None:
    """SlotOptions from flags, None for all experts on the device."""
    amount = flags["expert_slots"]
    if amount is None:
        return None
    from toastkit.experts.experts_options import SlotOptions

    return SlotOptions(amount.kind, int(amount.amount), flags["expert_prefetch"])


def insisted_residency(flags: dict[str, Any]) -> str | None:
    """The setting that a daemon must have to be used, from the command line, as in
    PolicyOptions.resident. None if there is none: environment variables are for models that are
    loaded here, since an answer does not depend on what is resident."""
    layers = _residency(flags).setting if given(*RESIDENT_NAMES) else None
    slots = slot_options(flags) if given(*SLOT_NAMES) else None
    return layers if slots is None else f"{layers or 'all'} {slots.setting}"


def _residency(flags: dict[str, Any]) -> ResidencyOptions:
    from toastkit.residency.residency_options import ResidencyOptions

    amount = flags["resident"]
    return ResidencyOptions(amount.kind, amount.amount, flags["placement"], flags["priority"])


# -------------------------------------------------------------------------------------- all of them

policies = together(gears, telemetry, experts, residency)
scoring_policies = together(gears, telemetry, step_experts, residency)
prompt_policies = together(prompt_experts, residency)
POLICY_NAMES = (
    "gear", *GEAR_NAMES, *TELEMETRY_NAMES, *RESIDENT_NAMES, *EXPERT_NAMES, *SLOT_NAMES,
)  # fmt: skip


def reject_unused(flags: dict[str, Any]) -> None:
    """Raise UsageError for options without effect, or that make no sense."""
    gear = flags.get("gear", "auto")  # a prefill has none
    if gear == "off":
        refuse_together("needs a --gear", *GEAR_NAMES)
    if gear != "auto":
        refuse_together("is for --gear auto", *TELEMETRY_NAMES)
    options = expert_options(flags)
    if options is None or not options.runs_little:
        wanted = [
            f"--{name.replace('_', '-')} {words}"
            for name, words in (("experts", "little or mobile"), ("prefill_experts", "little"))
            if name in flags
        ]
        refuse_together(f"needs {' or '.join(wanted)}", "little_k")
    if flags["resident"].kind != "auto":
        refuse_together("is for --resident auto", "priority")
    if flags["resident"].kind == "all":
        refuse_together("needs a --resident other than all", "placement")
    if flags["expert_slots"] is None:
        refuse_together("needs --expert-slots", "expert_prefetch")


def policy_options(flags: dict[str, Any]) -> PolicyOptions:
    """The options of each policy, from flags."""
    from toastkit.engine.policy_options import PolicyOptions

    return PolicyOptions(
        gear_options(flags) if "gear" in flags else None,
        expert_options(flags),
        slot_options(flags),
        residency_options(flags),
    )


def service_settings(flags: dict[str, Any]) -> dict[str, Any]:
    """The fields of ServiceSettings on which model is run, and how. Raises UsageError."""
    return {
        "model": model_name(flags),
        **{name: flags[name] for name in ("device", "dtype", "kv_bits")},
        "gears": gear_settings(flags),
        "policies": policy_options(flags),
        "native": native_options(flags),
    }
