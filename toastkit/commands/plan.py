"""toast-model plan: what of a model fits into memory, its predicted speed, and the effect of the
gears."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from toastkit.commands import cli, completion, options
from toastkit.commands.models import as_json, say_verbose, table
from toastkit.commands.plan_residency import lines, residency_flags, work_out
from toastkit.commands.policy_flags import gear_bits, gear_scope
from toastkit.commands.sizes import Size
from toastkit.text.terminal import shown

if TYPE_CHECKING:
    from toastkit.gears.plan import Plan

HEAD = ("GEAR", "BITS", "DEVICE", "MANAGED", "TOKEN", "RATIO", "SPEEDUP")
TIMES = ("SECONDS", "BREAK-EVEN")


@click.argument("name", default="crumb", envvar="TOAST_MODEL", shell_complete=completion.models)
@residency_flags
@click.option(
    "--gears", is_flag=True, allow_from_autoenv=False,
    help="Bytes on the device, bytes of a token and ideal speedup by gear too.",
)  # fmt: skip
@gear_scope
@gear_bits
@options.dtype
@options.kv_bits
@options.native
@click.option(
    "--bandwidth", type=Size(1), metavar="SIZE",
    help="Bytes that the memory gives in a second, such as 100G: tells times too.",
)  # fmt: skip
@as_json
def plan(name: str, **flags) -> int:
    """The command, for the group of toast-model."""
    if not flags["gears"]:
        cli.refuse_together("needs --gears", "gear_scope", "gear_bits", "bandwidth")
    from toastkit.gears.gear_options import GearOptions
    from toastkit.model.locate import find

    cli.exclusive(flags, "calibrate", "no_calibration")
    GearOptions(scope=flags["gear_scope"], bits=flags["gear_bits"])  # validates before reading
    files = find(name)
    residency = work_out(files, flags)
    found = rows = None
    if flags["gears"]:
        found = _worked_out(files, flags)
        rows = _rows(found, flags["bandwidth"])
    if flags["as_json"]:
        record: dict[str, Any] = {"name": files.name}
        if found is not None:
            record.update(asdict(found), bandwidth=flags["bandwidth"], gears=rows)
        print(json.dumps({**record, "residency": residency}))
        return 0
    for what, value in lines(files.name, residency):
        print(f"{what:18} {shown(value)}")
    if found is not None and rows is not None:
        print()
        _show(found, rows)
    return 0


def _worked_out(files, flags: dict[str, Any]) -> Plan:
    """The plan for the dtype that this machine would compute in."""
    from toastkit.engine import device

    on = device.start("auto")
    from toastkit.gears.plan import plan
    from toastkit.store.dtypes import loading
    from toastkit.store.store import Store

    native = device.native_products(options.native_options(flags), on)
    types = loading(flags["dtype"], on == "cpu", native)
    store = Store(files)
    scope, bits = flags["gear_scope"], flags["gear_bits"]
    return plan(store, scope, bits, types, say_verbose(flags))


def _rows(found: Plan, bandwidth: int | None) -> list[dict[str, Any]]:
    """The gears as plain data; with a bandwidth, in bytes per second, also the seconds per token,
    and the tokens after which a shift out of high gear has paid (None: never, or not one)."""
    from toastkit.gears.cost import break_even_tokens

    rows = []
    for gear in found.gears:
        row = asdict(gear)
        row.update(token=round(gear.token), managed_token=round(gear.managed_token))
        if bandwidth is not None:
            row["seconds"] = gear.token / bandwidth
            before = found.gears[0].token / bandwidth
            tokens = break_even_tokens(gear.shift / bandwidth, before, row["seconds"])
            row["break_even_tokens"] = tokens if math.isfinite(tokens) else None
        rows.append(row)
    return rows


def _show(found: Plan, rows: list[dict[str, Any]]) -> None:
    """Print the plan of the gears for people."""
    from toastkit.model.info import count, human

    timed = "seconds" in rows[0]
    lines = []
    for row in rows:
        sizes = (human(row[key]) for key in ("device", "managed", "token"))
        line = (row["gear"], f"{row['bits']:.3g}", *sizes)
        line += (f"{row['ratio']:.3f}", f"{row['speedup']:.2f}")
        if timed:
            tokens = row["break_even_tokens"]
            line += (f"{row['seconds']:.3g}", "-" if tokens is None else f"{tokens:.1f}")
        lines.append(line)
    table(HEAD + TIMES if timed else HEAD, lines, right=range(1, len(lines[0])))
    if found.note is not None:
        print(shown(found.note))
        return
    kind = f"weights in {found.dtype}" if found.dtype else "weights as they are stored"
    kind += ", 16-bit matrices as they are stored" if found.narrow else ""
    what = f"{found.modules:,} matrices, {count(found.parameters)} parameters"
    print(f"{what} change gear: {found.share:.1%} of the bytes of a token, with {kind}")
    moved = (f"{human(row['shift'])} into {row['gear']}" for row in reversed(rows))
    print(f"the first shift moves {', '.join(moved)}")
