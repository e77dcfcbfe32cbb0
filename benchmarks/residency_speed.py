"""Speed of streamed models: tables 4 and 9 of paper 001 in form, placement, overlap, prompts,
gears."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from statistics import median
from typing import Any

from gears_report import percent, say, table
from residency_case import Case, Spec
from residency_files import baked, dd, layer_files, model
from residency_report import (
    TABLE_4,
    TABLE_9,
    Settings,
    gathered,
    gb,
    rates,
    ratios,
    section,
    share,
    speed,
    warmed,
)

WAYS = {"ahead": None, "when its turn comes": 0}  # layers that are read ahead at most
SOURCES = ("disk", "cache")


def both_ways(case: Case, tokens: int) -> dict[str, dict[str, Any]]:
    """Decodes with and without reading ahead; a token after the change does not count."""
    found = {}
    for way, ahead in WAYS.items():
        case.do("tokens", count=1, ahead=ahead)
        found[way] = speed(case, tokens, ahead)
    return found


def residency(settings: Settings) -> None:
    """Tables 4 and 9 in form, and what 100% costs."""
    for name in settings.names:
        section(
            f"Share of layers that stay: {name}",
            f"Medians of {settings.rounds} rounds of {settings.tokens} tokens, each residency in a "
            "process of its own; the first layers stay, as in the paper, and not every other one, "
            "as by default. disk: the files are not in the system's cache; cache: they are. "
            "ahead: with reading ahead; at once: each layer is read when it is its turn, as in the "
            "paper. waiting: share of the time, from the disk. MLX: GB at most. "
            "Paper: share of its baseline and of I/O on a Mac Studio (9B), and on an iPad (4B).",
        )
        found = gathered(settings.rounds, partial(_sweep, settings, name))
        plain = median(found["all"]["rate"])
        rows = []
        for part in settings.percents:
            disk = [found[f"{part} disk {way}"] for way in WAYS]
            cache = [found[f"{part} cache {way}"] for way in WAYS]
            rows.append([
                f"{part}%", str(disk[0]["resident"][0]),
                *(f"{median(f['rate']):.2f}" for f in disk),
                ratios(disk[0]["rate"], disk[1]["rate"]),
                *(share(f["waiting"]) for f in disk),
                *(f"{median(f['rate']):.2f}" for f in cache), gb(max(disk[0]["mlx"])),
                *(percent(median(f["rate"]) / plain, 0) for f in (disk[0], cache[0])),
                _seed(part),
            ])  # fmt: skip
        rows.append(["plain", "all", f"{plain:.2f}", *["-"] * 6, gb(max(found["all"]["mlx"])),
                     *["100%"] * 2, "100%"])  # fmt: skip
        head = ("resident", "layers", "disk: ahead", "at once", "times", "waiting: ahead",
                "at once", "cache: ahead", "at once", "MLX, GB", "of plain: disk", "cache",
                "paper")  # fmt: skip
        table(head, rows)
    _whole_against_plain(settings)


def _seed(part: int) -> str:
    mac = TABLE_4.get(part)
    words = "" if mac is None else f"{percent(mac[0], 1)} ({percent(mac[1], 0)} I/O), "
    return f"{words}{percent(TABLE_9[part], 0)}"


def _sweep(settings: Settings, name: str) -> dict[str, dict[str, Any]]:
    """One round: all residencies, from both sources, both ways; and plain."""
    found: dict[str, dict[str, Any]] = {}
    for part in settings.percents:
        for source in SOURCES:
            say(f"residency: {name}, {part}%, {source}")
            with warmed(settings.spec(name, f"{part}%", files=source)) as case:
                for way, figures in both_ways(case, settings.tokens).items():
                    found[f"{part} {source} {way}"] = figures
                    figures["mlx"] = case.do("memory")["mlx"]
    say(f"residency: {name}, plain")
    with warmed(settings.spec(name)) as case:
        found["all"] = {**speed(case, settings.tokens), **case.do("memory")}
    return found


def _whole_against_plain(settings: Settings) -> None:
    """What it costs to have the policy, and all layers resident."""
    name, count = settings.names[0], settings.pairs
    say(f"residency: {name}, 100% against plain, {count} rounds")
    specs = {"plain": "all", "100%": "100%", "plain again": "all"}
    with ExitStack() as stack:
        cases = {
            label: stack.enter_context(warmed(settings.spec(name, resident)))
            for label, resident in specs.items()
        }

        def run() -> dict[str, dict[str, Any]]:
            # Each begins as often as the others.
            turn = next(turns) % len(cases)
            order = [*cases.items()][turn:] + [*cases.items()][:turn]
            return {label: speed(case, settings.tokens) for label, case in order}

        turns = iter(range(count))
        found = gathered(count, run)
    print(f"### {name}: 100% resident against plain\n")
    print(
        f"{count} rounds in turn of {settings.tokens} tokens, a process each. best: by the quickest"
    )
    print("round. The paper: 64% of plain on an iPad, 32% on an iPhone. The target: 98%.\n")
    plain = found["plain"]["rate"]
    rows = [
        [label, rates(f["rate"]), ratios(f["rate"], plain, 3), f"{max(f['rate']) / max(plain):.3f}"]
        for label, f in found.items()
    ]
    table(("", "tokens a second", "times plain", "best"), rows)


def placement(settings: Settings) -> None:
    """Section 4.4 of the paper."""
    name = settings.names[0]
    section(
        f"Placement: {name}, 50% resident, from the disk",
        f"{settings.rounds} rounds in turn of {settings.tokens} tokens. The paper, which reads "
        "when a layer's turn comes: no more than 3% between them.",
    )

    def run() -> dict[str, dict[str, Any]]:
        found = {}
        for where in ("first", "last", "interleaved"):
            say(f"placement: {where}")
            with warmed(settings.spec(name, "50%", placement=where, files="disk")) as case:
                for way, figures in both_ways(case, settings.tokens).items():
                    found[f"{where}, {way}"] = figures
        return found

    found = gathered(settings.rounds, run)
    rows = [
        [label, rates(f["rate"]),
         ratios(f["rate"], found[f"first, {label.split(', ')[1]}"]["rate"]), share(f["waiting"])]
        for label, f in found.items()
    ]  # fmt: skip
    table(
        ("layers that stay, the others are read", "tokens a second", "times first", "waiting"), rows
    )


def overlap(settings: Settings) -> None:
    """Reading beside computing, and reading beside dd."""
    section(
        "Overlap, and the rate of reading",
        "Seconds a token. reading alone: all layers come and go in their order, through the same "
        "calls, read ahead in the same way, and nothing is computed. computing alone: a token of "
        "the plain engine, all layers resident. token: at 0% resident, from the disk. computing "
        "beside reading: what its layers took meanwhile. times: a token over the larger of the "
        "first two; the target is 1.15 where they are alike. Rates are of bytes in the files, GB "
        "(10^9) a second; dd reads the files of the layers one by one, 16 MiB at a time. None of "
        "them was in the system's cache. The target is 85% of dd.",
    )
    rows, reading, wider = [], [], []
    for name in settings.names:
        say(f"overlap: {name}")
        found = gathered(settings.rounds, _Overlap(settings, name).run)
        alone = {what: found[what]["seconds"] for what in ("read", "compute", "token")}
        larger = [max(pair) for pair in zip(alone["read"], alone["compute"])]
        rows.append([
            name, *(rates(alone[what], 3) for what in alone),
            rates(found["token"]["beside"], 3), ratios(alone["token"], larger),
            share(found["token"]["waiting"]),
        ])  # fmt: skip
        speeds = {what: found[what]["rate"] for what in ("read", "direct", "buffered", "token")}
        reading.append([
            name, *(rates(speeds[what]) for what in speeds),
            *(ratios(speeds["read"], speeds[what]) for what in ("direct", "buffered")),
        ])  # fmt: skip
        wider += [_pass_row(name, width, found) for width in settings.widths]
    head = ("model", "reading alone", "computing alone", "token", "computing beside reading",
            "times", "waiting")  # fmt: skip
    table(head, rows)
    print("Passes over more tokens, where reading and computing are more alike:\n")
    table(("model, tokens", "computing alone", "a pass", "times the larger", "waiting"), wider)
    head = ("model", "reading alone", "dd, direct", "dd, buffered", "in a token",
            "times dd, direct", "times dd, buffered")  # fmt: skip
    table(head, reading)


def _pass_row(name: str, width: int, found: dict[str, dict[str, Any]]) -> list[str]:
    alone, both = found[f"compute {width}"]["seconds"], found[f"pass {width}"]["seconds"]
    larger = [max(pair) for pair in zip(found["read"]["seconds"], alone)]
    waiting = share(found[f"pass {width}"]["waiting"])
    return [f"{name}, {width}", rates(alone, 3), rates(both, 3), ratios(both, larger), waiting]


class _Overlap:
    """Rounds of one model. Cases are opened anew in each: three are much for a large one."""

    def __init__(self, settings: Settings, name: str):
        self._settings, self._name = settings, name
        self._files = layer_files(model(settings.models, name))

    def run(self) -> dict[str, dict[str, Any]]:
        """One round."""
        settings, count = self._settings, self._settings.tokens
        streamed = settings.spec(self._name, "0", files="disk")
        with warmed(settings.spec(self._name)) as case:
            compute = speed(case, count)
            found = {
                f"compute {width}": case.do("passes", count=count, width=width)
                for width in settings.widths
            }
        with warmed(streamed) as case:
            before = case.do("layers", passes=count)
            token = speed(case, count)
            found |= {
                f"pass {width}": case.do("passes", count=count, width=width)
                for width in settings.widths
            }
            after = case.do("layers", passes=count)
        read = {key: (before[key] + after[key]) / 2 for key in ("read", "seconds")}
        for figures in found.values():
            figures["waiting"] = figures.get("wait", 0) / figures["seconds"]
            figures["seconds"] /= count
        return {
            **found,
            "read": {"seconds": read["seconds"] / count, "rate": _rate(read)},
            "compute": {"seconds": compute["seconds"] / count},
            "token": {
                "seconds": token["seconds"] / count, "rate": _rate(token),
                "beside": token["compute"] / count, "waiting": token["waiting"],
            },
            "direct": {"rate": dd(self._files, True) / 1e9},
            "buffered": {"rate": dd(self._files, False) / 1e9},
        }  # fmt: skip


def _rate(found: dict[str, Any]) -> float:
    """GB of the files a second."""
    return found["read"] / found["seconds"] / 1e9


def prefill(settings: Settings) -> None:
    """A long prompt, and what the length of a chunk is worth."""
    name = settings.names[0]
    section(
        f"Prompts: {name}",
        f"{settings.prompt:,} tokens in chunks of the default length, and prompts of one chunk "
        "(and one token more) of other lengths, once each. From the disk. The target: 1.3 times "
        "resident. MLX: GB at most in that prompt. caches: what it leaves of them, MB.",
    )
    prompts = [(settings.prompt, None), *((chunk + 1, chunk) for chunk in settings.chunks)]
    found: dict[str, list[dict[str, Any]]] = {}
    for resident in ("all", "0"):
        with warmed(
            settings.spec(name, resident, files="disk" if resident == "0" else "own")
        ) as case:
            for count, chunk in prompts:
                say(f"prefill: {resident} resident, {count} tokens, chunks {chunk or 'as usual'}")
                case.do("reset")
                figures = case.do("prefill", count=count, chunk=chunk)
                found.setdefault(resident, []).append({**figures, **case.do("memory")})
    rows = []
    for (count, _), plain, streamed in zip(prompts, found["all"], found["0"]):
        rows.append([
            f"{count:,}", str(streamed["chunk"]), f"{plain['seconds']:.2f}",
            f"{streamed['seconds']:.2f}", f"{streamed['seconds'] / plain['seconds']:.2f}",
            percent(streamed["wait"] / streamed["seconds"], 0), gb(streamed["read"]),
            gb(plain["mlx"]), gb(streamed["mlx"]), f"{streamed['cache'] / 1e6:.1f}",
        ])  # fmt: skip
    head = ("tokens", "chunk", "resident, s", "0%, s", "times", "waiting", "read, GB",
            "MLX: resident", "0%", "caches")  # fmt: skip
    table(head, rows)


def gears(settings: Settings) -> None:
    """A streamed model in low gear."""
    name = settings.dense
    section(
        f"Streamed in low gear: {name}, 0% resident, from the disk",
        f"{settings.rounds} rounds in turn of {settings.tokens} tokens. Low gear: all matrices of "
        "the layers in 4 bits, baked into the file; made: quantised from originals as they pass.",
    )
    path, originals = str(baked(settings.models, name)), str(model(settings.models, name))
    common: dict[str, Any] = {"resident": "0", "files": "disk", "dtype": settings.dtype,
                              "native": settings.native}  # fmt: skip
    specs = {
        "no gears": Spec(originals, **common),
        "no gears, one .toast": Spec(path, **common),
        "low, baked": Spec(path, gear="low", **common),
        "low, made": Spec(originals, gear="low", **common),
    }

    def run() -> dict[str, dict[str, Any]]:
        found = {}
        for label, spec in specs.items():
            say(f"gears: {label}")
            with warmed(spec) as case:
                found[label] = speed(case, settings.tokens)
                found[label]["mlx"] = case.do("memory")["mlx"]
        return found

    found = gathered(settings.rounds, run)
    plain = found["no gears"]
    rows = [
        [label, f"{median(f['read']) / settings.tokens / 1e6:.1f}",
         f"{median(f['read']) / median(plain['read']):.3f}", rates(f["rate"]),
         ratios(f["rate"], plain["rate"]), share(f["waiting"]), gb(max(f["mlx"]))]
        for label, f in found.items()
    ]  # fmt: skip
    head = ("", "read a token, MB", "of no gears", "tokens a second", "times no gears", "waiting",
            "MLX, GB")  # fmt: skip
    table(head, rows)
