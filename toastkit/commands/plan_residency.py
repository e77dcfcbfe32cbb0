"""toast-model plan, the part about residency: which layers would stay, and how fast that is."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from toastkit.commands import cli
from toastkit.commands.options import together
from toastkit.commands.sizes import Size
from toastkit.errors import ToastError, UsageError

if TYPE_CHECKING:
    from toastkit.holdings.holdings import Holdings
    from toastkit.residency.predict import Calibration
    from toastkit.residency.residency_plan import Memory, ResidencyPlan
    from toastkit.residency.sizing import Sizes
    from toastkit.store.store import Store

PROMPT = 1024  # tokens of the prompt whose seconds are predicted, or as many as are expected

residency_flags = together(
    click.option(
        "--mem", type=Size(1), metavar="SIZE",
        help="Memory for the model, as of --resident SIZE (default: what is available now).",
    ),
    click.option(
        "--context", type=click.IntRange(1, 1 << 30), metavar="N",
        help="Tokens of context that must fit (default: what --priority keeps room for).",
    ),
    click.option(
        "--priority", type=click.Choice(["max-tps", "balanced", "max-context"]),
        default="balanced", show_default=True, help="What room is kept for.",
    ),
    click.option(
        "--placement", type=click.Choice(["first", "last", "interleaved"]), default="interleaved",
        show_default=True, help="Which of the layers stay.",
    ),
    click.option(
        "--calibrate", is_flag=True, allow_from_autoenv=False,
        help="Measure this device anew, also where it was measured.",
    ),
    click.option(
        "--no-calibration", is_flag=True, allow_from_autoenv=False,
        help="Measure nothing: no times, if it was not measured.",
    ),
)  # fmt: skip


class _Model(NamedTuple):
    """A model of which nothing is loaded. device: that it would run on, dtype: of activations."""

    holdings: Holdings
    sizes: Sizes
    device: str
    dtype: str | None

    @property
    def store(self) -> Store:
        return self.holdings.store

    @property
    def name(self) -> str:
        return self.store.files.name


def work_out(files, flags: dict[str, Any]) -> dict[str, Any]:
    """The plan as plain data, with a prediction, which is None without a calibration. Raises
    UsageError where nothing fits."""
    from toastkit.residency.memory import available_memory
    from toastkit.residency.model_sizes import cache_holds
    from toastkit.residency.residency_plan import Memory

    model = _unloaded(files, flags)
    try:
        available = available_memory()
        memory = Memory(available if flags["mem"] is None else flags["mem"], bool(flags["mem"]))
        found = _planned(model, model.sizes, memory, flags)
        record: dict[str, Any] = asdict(found)
        record["cached"] = cached = cache_holds(model.store, found.staying, available)
        measured = _measured(model, available, flags)
        record["prediction"] = measured and _predicted(model, found, measured, cached)
        if flags["gears"]:
            record["gears"] = _geared(model, memory, flags)
        return record
    finally:
        model.holdings.close()


def _unloaded(files, flags: dict[str, Any]) -> _Model:
    from toastkit.engine import device

    on = device.start("auto")
    from toastkit.holdings.holdings import Holdings
    from toastkit.model.config import load_config
    from toastkit.residency.model_sizes import sizes_of
    from toastkit.store.dtypes import DTYPES, activation_dtype
    from toastkit.store.ledger import Ledger
    from toastkit.store.store import Store

    dtype = flags["dtype"] or activation_dtype(on == "cpu")
    store = Store(files, load_config(files))
    holdings = Holdings(store, None if dtype is None else DTYPES[dtype], Ledger())
    return _Model(holdings, sizes_of(holdings), on, dtype)


def _planned(model: _Model, sizes: Sizes, memory: Memory, flags: dict[str, Any]) -> ResidencyPlan:
    """The plan for a model, whose sizes may be others than it has."""
    from toastkit.residency.residency_plan import plan_residency
    from toastkit.residency.sizing import USUAL_CONTEXT

    longest, context = model.store.config.context, flags["context"]
    if context is not None and longest is not None and context > longest:
        raise UsageError(f"--context {context}: {model.name} reads {longest:,}")
    return plan_residency(
        model.name, sizes, memory, longest=longest or USUAL_CONTEXT, context=context,
        priority=flags["priority"], placement=flags["placement"],
    )  # fmt: skip


def _geared(model: _Model, memory: Memory, flags: dict[str, Any]) -> dict[str, int] | None:
    """Layers that would stay with those matrices in mid or in low gear that change gear; None where
    none does."""
    from dataclasses import replace

    from toastkit.gears.discovery import discover

    holdings = model.holdings
    managed = discover(model.store.model, flags["gear_scope"])
    low, mid = flags["gear_bits"]
    found = {}
    for gear, bits in (("mid", mid), ("low", low)) if managed else ():
        layers = list(model.sizes.layers)
        for one in managed:
            saved = holdings.original_bytes(one.path) - holdings.packed_bytes(one.path, bits)
            if one.layer is not None:
                layers[one.layer] -= saved
        smaller = replace(model.sizes, layers=tuple(layers))
        found[gear] = _planned(model, smaller, memory, flags).resident
    return found or None


# ------------------------------------------------------------------------------------------- times


def _measured(model: _Model, available: int, flags: dict[str, Any]) -> Calibration | None:
    """What was measured of such a model on this device, or is now."""
    from toastkit.residency.calibration import about, load, save
    from toastkit.residency.sizing import RUNTIME, minimum

    weights = model.store.files.weight_files()[0]
    of = about(model.device, model.dtype, model.sizes.outside, model.sizes.layers, weights)
    measured = None if flags["calibrate"] else load(of)
    if measured is not None or flags["no_calibration"]:
        return measured
    if available < minimum(model.sizes) + RUNTIME:
        _say_untold("too little memory is available to measure it", flags)
        return None
    try:
        measured = _measure(model, flags)
    except UsageError as error:  # of a dtype that it cannot be run in here
        _say_untold(error.message, flags)
        return None
    try:
        save(of, measured)
    except ToastError as error:
        cli.say(f"warning: {error.message}")
    return measured


def _say_untold(why: str, flags: dict[str, Any]) -> None:
    if not flags["quiet"]:
        cli.say(f"warning: no times are told: {why}")


def _measure(model: _Model, flags: dict[str, Any]) -> Calibration:
    from toastkit.commands.models import whisper
    from toastkit.commands.progress import last_part, waiting
    from toastkit.engine.calibrating import measure
    from toastkit.engine.opening import open_engine
    from toastkit.residency.residency_options import ResidencyOptions

    label = f"measuring {last_part(model.name)}"
    if not flags["quiet"]:
        cli.say(f"{label} on this device, once")
    with waiting(label, flags):
        return measure(
            lambda count: open_engine(
                model.store.files,
                dtype=flags["dtype"],
                residency=ResidencyOptions("layers", count),
            ),
            whisper(flags),
        )


def _predicted(
    model: _Model, found: ResidencyPlan, measured: Calibration, cached: bool
) -> dict[str, Any]:
    from toastkit.engine.engine import CHUNK
    from toastkit.residency.predict import predict

    prompt = min(PROMPT, found.context)
    told = predict(
        model.sizes.layers, measured, found.staying, cached=cached, prompt=prompt,
        chunk=CHUNK[model.device], most=found.ahead,
    )  # fmt: skip
    return {
        "token_seconds": told.token, "tokens_per_second": 1 / told.token,
        "prompt_tokens": prompt, "prompt_seconds": told.prompt,
        "prompt_tokens_per_second": prompt / told.prompt,
        "reading_seconds": told.reading, "computing_seconds": told.computing,
    }  # fmt: skip


# --------------------------------------------------------------------------------------- for people


def lines(name: str, told: dict[str, Any]) -> list[tuple[str, str]]:
    """(what, value) of a plan for people to read."""
    from toastkit.model.info import human

    count, total = told["resident"], told["layers"]
    where = "given" if told["given"] else "available now"
    stay = f"all {total} layers" if count == total else f"{count} of {total} layers"
    if count < total:
        stay += f", {told['placement']}; the others are read as they run"
    if told["filled"] < count:
        stay += f"; {told['filled']} once {told['context']:,} tokens are there"
    found = [
        ("model", name),
        ("memory", f"{human(told['memory'])} {where}, {human(told['least'])} needed at least"),
        ("outside layers", human(told["outside"])),
        ("layers", f"{total}, {human(told['layers_size'])}"),
        ("cache", f"{human(told['cache'])} for {told['context']:,} tokens"),
        ("resident", stay),
        ("on the device", f"{human(told['weights'])}, and caches"),
    ]
    if told.get("gears"):
        geared = (f"{number} in {gear} gear" for gear, number in told["gears"].items())
        found.append(("resident in gears", ", ".join(geared)))
    return found + _times(told["prediction"], count < total, told["cached"])


def _times(told: dict[str, Any] | None, streams: bool, cached: bool) -> list[tuple[str, str]]:
    if told is None:
        return []
    decode = f"{told['tokens_per_second']:.3g} tokens a second"
    if streams:
        where = "cached files" if cached else "the disk"
        decode += (
            f": {told['reading_seconds']:.3g} s of reading from {where}, "
            f"{told['computing_seconds']:.3g} s of computing for each"
        )
    speed = f"{told['prompt_tokens_per_second']:.3g} tokens a second"
    return [("decode", decode), ("prefill", f"{speed}, a prompt of {told['prompt_tokens']:,}")]
