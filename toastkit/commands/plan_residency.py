"""toast-model plan, the part on residency: which layers would stay on the device, how many expert
slots there would be, and the predicted speed."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from toastkit.commands import cli
from toastkit.commands.options import native_options, together
from toastkit.commands.policy_flags import placement
from toastkit.commands.sizes import IntegerRange, Size
from toastkit.errors import ToastError, UsageError
from toastkit.native.starting import NativeOptions
from toastkit.text.exact_numbers import are, counted

if TYPE_CHECKING:
    from toastkit.engine.room import Fitted
    from toastkit.experts.slot_sizes import SlotPlan
    from toastkit.holdings.holdings import Holdings
    from toastkit.residency.predict import Calibration
    from toastkit.residency.residency_plan import Memory, ResidencyPlan
    from toastkit.residency.sizing import Sizes
    from toastkit.store.store import Store

PROMPT = 1024  # prompt tokens to predict for, or as many as are expected

residency_flags = together(
    click.option(
        "--mem", type=Size(1), metavar="SIZE",
        help="Memory for the model, as of --resident SIZE (default: what is available now).",
    ),
    click.option(
        "--context", type=IntegerRange(1, 1 << 30), metavar="N",
        help="Tokens of context that must fit (default: what --priority keeps room for).",
    ),
    click.option(
        "--priority", type=click.Choice(["max-tps", "balanced", "max-context"]),
        default="balanced", show_default=True, help="What room is kept for.",
    ),
    placement,
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
    """A model that is not loaded. device: it would run on. dtype: of activations. native: how its
    products are computed, if natively; wanted: they should be. along: a prompt's last token is not
    a pass of its own."""

    holdings: Holdings
    sizes: Sizes
    device: str
    dtype: str | None
    native: str | None
    wanted: NativeOptions
    along: bool

    @property
    def store(self) -> Store:
        return self.holdings.store

    @property
    def name(self) -> str:
        return self.store.files.name


def work_out(files, flags: dict[str, Any]) -> dict[str, Any]:
    """The plan as plain data, with a prediction, None without a calibration, and slots, None if
    experts need none. Raises UsageError if nothing fits, or nothing would run."""
    from toastkit.residency.memory import available_memory
    from toastkit.residency.model_sizes import cache_holds
    from toastkit.residency.residency_plan import Memory

    model = _unloaded(files, flags)
    try:
        available = available_memory()
        memory = Memory(available if flags["mem"] is None else flags["mem"], bool(flags["mem"]))
        found = _fitted(model, memory, flags)
        record: dict[str, Any] = asdict(found.plan)
        cached = cache_holds(model.holdings, found.plan.staying, available)
        record["cached"] = cached
        measured = _measured(model, available, flags)
        record["slots"] = found.slots and _slots(found.slots, measured, cached)
        record["prediction"] = measured and _predicted(model, found, measured, cached)
        if flags["gears"]:
            record.update(_geared(model, found, memory, flags))
        return record
    finally:
        model.holdings.close()


def _fitted(model: _Model, memory: Memory, flags: dict[str, Any]) -> Fitted:
    """What fits, as for --resident and --expert-slots auto."""
    from toastkit.engine.room import fitted, room_for_experts
    from toastkit.residency.residency_options import RESERVED_TOKENS, ResidencyOptions

    longest, context = model.store.config.context, flags["context"]
    if context is not None and longest is not None and context > longest:
        raise UsageError(f"--context {context}: {model.name} reads {longest:,}")
    kind, amount = ("bytes", memory.size) if memory.given else ("auto", 0)
    priority = flags["priority"]
    if context:  # it must fit, and slots give nothing up for it later; a run keeps room in any case
        reserved = RESERVED_TOKENS[priority] or context
        context, priority = max(context, min(reserved, longest or reserved)), "max-context"
    options = ResidencyOptions(kind, amount, flags["placement"], priority, context)
    room = room_for_experts(options, lambda: memory.size)(model.holdings).size()
    return fitted(
        model.holdings, model.sizes, room, lambda sizes: _planned(model, sizes, memory, flags)
    )


def _slots(found: SlotPlan, measured: Calibration | None, cached: bool) -> dict[str, Any]:
    """The slots as plain data. miss_seconds: to fetch one expert, None if not measured."""
    seconds = None if measured is None else found.miss / _rate(measured, cached)
    return {**asdict(found), "miss_seconds": seconds}


def _rate(measured: Calibration, cached: bool) -> float:
    return (measured.cached if cached else measured.cold).rate


def _unloaded(files, flags: dict[str, Any]) -> _Model:
    from toastkit.engine import device

    on = device.start("auto")
    from toastkit.engine.last_token import LastToken
    from toastkit.holdings.holdings import Holdings
    from toastkit.residency.model_sizes import sizes_of
    from toastkit.store.dtypes import loading
    from toastkit.store.ledger import Ledger
    from toastkit.store.store import Store

    wanted = native_options(flags)
    native = device.native_products(wanted, on)
    types = loading(flags["dtype"], on == "cpu", native, flags["kv_bits"])
    store = Store(files)
    device.check_dtype(types.dtype, on, store.model)
    holdings = Holdings(store, types, Ledger())
    wanted = wanted._replace(native="require" if native.on else "off")
    why = native.why if native.on else None
    last = LastToken()
    last.examine(holdings)
    return _Model(holdings, sizes_of(holdings), on, types.dtype, why, wanted, last.possible)


def _planned(model: _Model, sizes: Sizes, memory: Memory, flags: dict[str, Any]) -> ResidencyPlan:
    """The plan for a model with the given sizes, which may differ from its own."""
    from toastkit.residency.residency_plan import plan_residency
    from toastkit.residency.sizing import USUAL_CONTEXT

    longest = model.store.config.context or USUAL_CONTEXT
    return plan_residency(
        model.name, sizes, memory, longest=longest, context=flags["context"],
        priority=flags["priority"], placement=flags["placement"],
    )  # fmt: skip


def _geared(
    model: _Model, found: Fitted, memory: Memory, flags: dict[str, Any]
) -> dict[str, dict[str, int] | None]:
    """By gear, with the managed matrices in mid or in low gear: `gears`, resident layers, and
    `geared_slots`, slots per layer; None if no matrix is managed, and without slots."""
    from toastkit.gears.discovery import changing
    from toastkit.holdings.forms import packed
    from toastkit.residency.model_sizes import sizes_in

    holdings = model.holdings
    managed = changing(model.store, flags["gear_scope"])
    stacks = any(holdings.modules[one.path].slots for one in managed)
    low, mid = flags["gear_bits"]
    resident, slots = {}, {}
    for gear, bits in (("mid", mid), ("low", low)) if managed else ():
        paths = [one.path for one in managed]
        smaller = sizes_in([packed(bits)], holdings, found.sizes, paths)
        resident[gear] = _planned(model, smaller, memory, flags).resident
        if found.slots is not None and found.slot_sizes is not None:
            count = found.slot_sizes.within(found.slots.room, bits if stacks else 0)
            slots[gear] = min(count, found.slots.experts)
    return {"gears": resident or None, "geared_slots": slots or None}


# ------------------------------------------------------------------------------------------- times


def _measured(model: _Model, available: int, flags: dict[str, Any]) -> Calibration | None:
    """The calibration of such a model on this device, measured before or now."""
    from toastkit.residency.calibration import about, load, save
    from toastkit.residency.sizing import RUNTIME, minimum

    weights = model.store.files.weight_files()[0]
    of = about(
        model.device, model.dtype, model.sizes.outside, model.sizes.layers, weights, model.native
    )
    measured = None if flags["calibrate"] else load(of)
    if measured is not None or flags["no_calibration"]:
        return measured
    short = available < minimum(model.sizes) + RUNTIME
    if short or not any(model.sizes.layers):
        reason = "too little memory is available to measure it"
        if not short:
            reason = "no layer can be streamed"
        if not flags["quiet"]:
            cli.say(f"warning: no times are told: {reason}")
        return None
    measured = _measure(model, flags)
    try:
        save(of, measured)
    except ToastError as error:
        cli.say(f"warning: {error.message}")
    return measured


def _measure(model: _Model, flags: dict[str, Any]) -> Calibration:
    from toastkit.commands.models import say_verbose
    from toastkit.commands.progress import last_part, waiting
    from toastkit.engine.calibrating import measure
    from toastkit.engine.opening import open_engine

    label = f"measuring {last_part(model.name)}"
    if not flags["quiet"]:
        cli.say(f"{label} on this device, once")
    with waiting(label, flags):
        return measure(
            lambda options: open_engine(
                model.store.files, dtype=flags["dtype"], **model.wanted._asdict(), residency=options
            ),
            say_verbose(flags),
        )


def _predicted(model: _Model, found: Fitted, measured: Calibration, cached: bool) -> dict[str, Any]:
    """Seconds, and tokens per second. With expert slots for hits only, and, as `missed`, for misses
    only, waiting for each expert."""
    from toastkit.engine.engine import CHUNK
    from toastkit.residency.predict import predict

    plan, chunk = found.plan, CHUNK[model.device]
    prompt = min(PROMPT, plan.context)
    told = predict(
        found.sizes.layers, measured, plan.staying, cached=cached, prompt=prompt, chunk=chunk,
        along=model.along and found.slots is None, most=plan.ahead,
    )  # fmt: skip
    record: dict[str, Any] = {
        **_speeds(told.token, told.prompt, prompt), "prompt_tokens": prompt,
        "reading_seconds": told.reading, "computing_seconds": told.computing, "missed": None,
    }  # fmt: skip
    if found.slots is not None:
        rate = _rate(measured, cached)
        token = found.slots.token_misses / rate
        chunks = -(-(prompt - 1) // chunk) * found.slots.chunk_misses / rate
        record["missed"] = _speeds(told.token + token, told.prompt + token + chunks, prompt)
    return record


def _speeds(token: float, prompt: float, count: int) -> dict[str, float]:
    return {
        "token_seconds": token, "tokens_per_second": 1 / token,
        "prompt_seconds": prompt, "prompt_tokens_per_second": count / prompt,
    }  # fmt: skip


# --------------------------------------------------------------------------------------- for people


def lines(name: str, told: dict[str, Any]) -> list[tuple[str, str]]:
    """(what, value) of a plan for people to read."""
    from toastkit.model.info import human

    count, total, slots = told["resident"], told["layers"], told["slots"]
    layers, context = counted(total, "layer"), counted(told["context"], "token", ",")
    where = "given" if told["given"] else "available now"
    stay = f"all {layers}" if count == total else f"{count} of {layers}"
    if count < total:
        stay += f", {told['placement']}; the others are read as they run"
    if told["filled"] < count:
        stay += f"; {told['filled']} once {context} {are(told['context'])} there"
    outside, beside = told["outside"], ""
    if slots is not None:
        outside, beside = outside - slots["size"], ", but for experts"
    found = [
        ("model", name),
        ("memory", f"{human(told['memory'])} {where}, {human(told['least'])} needed at least"),
        ("outside layers", human(outside)),
        ("layers", f"{total}, {human(told['layers_size'])}{beside}"),
        ("cache", f"{human(told['cache'])} for {context}"),
        ("resident", stay),
        *(_experts(slots) if slots is not None else ()),
        ("on the device", f"{human(told['weights'])}, and caches"),
    ]
    for key, what in (("gears", "resident"), ("geared_slots", "slots")):
        if told.get(key):
            geared = (f"{number} in {gear} gear" for gear, number in told[key].items())
            found.append((f"{what} in gears", ", ".join(geared)))
    return found + _times(told["prediction"], count < total, told["cached"])


def _experts(told: dict[str, Any]) -> list[tuple[str, str]]:
    """The slots, as for --expert-slots, and the cost of a miss."""
    from toastkit.model.info import human

    where = f"{told['slots']} of {told['experts']} in each of {counted(told['layers'], 'layer')}"
    miss = f"{human(told['miss'])} each"
    if told["miss_seconds"] is not None:
        miss += f", {told['miss_seconds']:.2g} s"
    return [
        ("expert slots", f"{where}, {human(told['size'])}: --expert-slots {told['slots']}"),
        ("missing experts", f"{miss}; a token chooses {told['chosen']} in a layer"),
    ]


def _times(told: dict[str, Any] | None, streams: bool, cached: bool) -> list[tuple[str, str]]:
    if told is None:
        return []
    missed = told["missed"]

    def speed(key: str) -> str:
        rates = [each[key] for each in (missed, told) if each is not None]
        return f"{' to '.join(map(_three_digits, rates))} tokens a second"

    decode, prefill = speed("tokens_per_second"), speed("prompt_tokens_per_second")
    where = "cached files" if cached else "the disk"
    if missed is not None:
        decode += f": all experts missing, read from {where}, to none"
    if streams:
        decode += (
            f"{':' if missed is None else ';'} {told['reading_seconds']:.3g} s of reading from "
            f"{where}, {told['computing_seconds']:.3g} s of computing for each"
        )
    return [("decode", decode), ("prefill", f"{prefill}, a prompt of {told['prompt_tokens']:,}")]


def _three_digits(number: float) -> str:
    """As .3g, but large numbers in full: 4,460."""
    return f"{float(f'{number:.3g}'):,.15g}"
