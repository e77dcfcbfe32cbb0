"""Memory of streamed models: tables 2, 3, 7 and 8 of paper 001 in form, and a model as large as one
likes."""

from __future__ import annotations

from functools import partial
from statistics import median
from typing import Any

from gears_report import percent, say, table
from residency_case import Case, Refused, Spec
from residency_files import cached, drop, limited, model, most_used, weights
from residency_report import (
    TABLE_2,
    TABLE_3,
    TABLE_8,
    Settings,
    gathered,
    gb,
    rates,
    ratios,
    section,
    speed,
    warmed,
)

MIB = 1 << 20
PROCESS = 70 << 20  # bytes that a cgroup is charged for a process without a model
RUNTIME = 150 << 20  # of equation 2
STAYING = 0.6  # of the layers, under the limit of `priorities`


def baseline(settings: Settings) -> None:
    """Table 2 in form."""
    section(
        "Baseline: all layers resident",
        f"{settings.rounds} rounds of {settings.tokens} tokens. GB are 10^9 bytes, at most. The "
        "paper's figures are those of a Mac Studio M2 Ultra, which computes on its GPU; ours "
        "compute on this processor. Weights are random: a perplexity would mean nothing.",
    )
    rows = []
    for name in settings.names:
        say(f"baseline: {name}")
        with warmed(settings.spec(name)) as case:
            found = [speed(case, settings.tokens)["rate"] for _ in range(settings.rounds)]
            memory, about = case.do("memory"), case.opened
        paper = TABLE_2.get(name)
        rows.append([
            name, str(about["layers"]), about["dtype"] or "its own", gb(about["files"]),
            rates(found), gb(memory["mlx"]), gb(memory["process"]),
            *(("-", "-") if paper is None else (f"{paper[0]:.1f}", f"{paper[1]:.2f}")),
        ])  # fmt: skip
    head = ("model", "layers", "activations", "files, GB", "tokens a second", "MLX, GB",
            "process, GB", "paper: tokens a second", "GB")  # fmt: skip
    table(head, rows)


def memory(settings: Settings) -> None:
    """Table 3 in form."""
    section(
        "Memory at 0% resident",
        "At most, from opening to the last token, GB. Each in a process of its own; the files are "
        "read from the disk. The target is the paper's reduction of 60 to 88%. Weights that are "
        "mapped from their files are the process's and the ledger's, and not MLX's.",
    )
    rows, rest = [], []
    for name in settings.names:
        found = {}
        for resident in ("all", "0"):
            say(f"memory: {name}, {resident} resident")
            with Case(
                settings.spec(name, resident, files="disk" if resident == "0" else "own")
            ) as case:
                case.do("tokens", count=settings.tokens)
                found[resident] = case.do("memory")
        whole, streamed = found["all"], found["0"]
        for figure, words in (("mlx", "MLX"), ("process", "process"), ("ledger", "ledger")):
            paper = TABLE_3.get(name) if figure == "mlx" else None
            rows.append([
                name, words, gb(whole[figure]), gb(streamed[figure]),
                percent(1 - streamed[figure] / whole[figure], 0),
                "-"
                if paper is None
                else f"{percent(1 - paper[1] / paper[0], 0)} of {paper[0]:.2f}",
            ])  # fmt: skip
        for resident, one in found.items():
            process = one["process_now"] - one["before"]
            figures = one["ledger_now"], one["mlx_now"], process
            rest.append([name, resident, *(f"{figure / MIB:.1f}" for figure in figures)])
    head = ("model", "counted by", "resident", "streamed", "reduction", "paper")
    table(head, rows, left=2)
    print("What is there after a token, MiB; of the process, what came since before the model was")
    print("opened. Layers that are read ahead are in all three.\n")
    table(("model", "layers resident", "ledger", "MLX", "process"), rest, left=2)


def budget(settings: Settings) -> None:
    """Table 7 in form."""
    name = settings.names[0]
    with Case(settings.spec(name, "0")) as case:
        least, whole = case.opened["minimum"], case.opened["whole"] + case.opened["reserve"]
    section(
        f"Budgets: {name}",
        "From the least to all, MiB. Tokens a second with the files in the system's cache if they "
        "fit. Memory at most, from opening to the last token. The paper on an iPad, of its 32 "
        "layers (9B, 6 bits): 0 stay 0.28 tokens a second, 2 stay +7%, 8 +32%, 11 +43%, 14 +61%, "
        "20 +103%.",
    )
    budgets = [-(-int(least + part * (whole - least)) // MIB) for part in settings.shares]
    found = gathered(settings.rounds, partial(_budgets, settings, name, budgets))
    slowest, rows = found[str(budgets[0])]["rate"], []
    for megabytes in budgets:
        figures = found[str(megabytes)]
        peaks = [max(figures[what]) for what in ("ledger", "mlx", "process")]
        over = peaks[0] - megabytes * MIB
        rows.append([
            str(megabytes), figures["stay"][0], rates(figures["rate"]),
            ratios(figures["rate"], slowest), *(f"{peak / MIB:.1f}" for peak in peaks),
            "kept" if over <= 0 else f"passed by {over / MIB:.1f} MiB",
        ])  # fmt: skip
    head = ("budget", "resident", "tokens a second", "times the least", "ledger", "MLX",
            "process", "by the ledger")  # fmt: skip
    table(head, rows)
    print(f"{budgets[0] // 2} MiB: {_refusal(settings.spec(name, f'{budgets[0] // 2}M'))}\n")


def _budgets(settings: Settings, name: str, budgets: list[int]) -> dict[str, dict[str, Any]]:
    """One round, budgets in MiB."""
    found = {}
    for megabytes in budgets:
        say(f"budget: {name}, {megabytes} MiB")
        with warmed(settings.spec(name, f"{megabytes}M")) as case:
            figures, about = speed(case, settings.tokens), case.opened
            stay = f"{about['resident']}/{about['layers']}"
            found[str(megabytes)] = {**figures, **case.do("memory"), "stay": stay}
    return found


def _refusal(spec: Spec) -> str:
    """What toastkit says to a case that cannot be."""
    try:
        Case(spec).close()
    except Refused as error:
        return str(error).replace(spec.path, "MODEL")
    return "it was opened, and should not have been"


def priorities(settings: Settings) -> None:
    """Table 8 in form."""
    name = settings.dense
    with Case(settings.spec(name, "0")) as case:
        about = case.opened
    layers = about["whole"] - about["outside"]
    limit = PROCESS + RUNTIME + about["outside"] + about["layer"] + about["reserve"]
    limit += int(STAYING * layers / 0.9)
    with limited(limit) as group:
        grouped = group is not None
    how = "of a cgroup" if grouped else "as if there were so much (no cgroup could be made)"
    section(
        f"The three priorities: {name}",
        f"A limit of {limit / MIB:.0f} MiB, {how}: by equation 2, room for {percent(STAYING, 0)} "
        f"of the layers. A prompt of 2 tokens and {settings.checked} tokens more; memory is looked "
        f"at with every chunk and every 64 tokens. max-context expects {settings.context:,}. "
        "ended: how many layers stayed then. The cgroup's memory has files in it that were read. "
        "The paper: layers that stay and tokens a second, on an iPad.",
    )
    cases = [("0", "balanced"), *(("auto", mode) for mode in TABLE_8)]
    if grouped:  # else nothing would stop it
        cases.append(("all", "balanced"))
    rows = [_priority(settings, name, *case, limit) for case in cases]
    head = ("residency", "resident", "ended", "shed, grown", "tokens a second", "waiting",
            "ledger, MiB", "process, MiB", "cgroup, MiB", "paper")  # fmt: skip
    table(head, rows)


def _priority(settings: Settings, name: str, resident: str, mode: str, limit: int) -> list[str]:
    label = mode if resident == "auto" else f"{resident} resident"
    say(f"priorities: {label}")
    paper = TABLE_8.get(mode, "-") if resident == "auto" else "-"
    drop(weights(model(settings.models, name)))  # what others have read is not the cgroup's
    with limited(limit) as group:
        where: dict[str, Any] = {"limit": limit} if group is None else {"group": str(group)}
        spec = settings.spec(name, resident, priority=mode, context=settings.context, **where)
        try:
            with Case(spec) as case:
                figures = _followed(case, settings.checked)
        except (RuntimeError, Refused) as error:
            figures = [str(error), *["-"] * 6]
        used = None if group is None else most_used(group)
    return [label, *figures, "-" if used is None else f"{used / MIB:.0f}", paper]


def _followed(case: Case, tokens: int) -> list[str]:
    """What became of a case during so many tokens."""
    first = case.do("prefill", count=2)
    found, peak, about = speed(case, tokens), case.do("memory"), case.opened
    return [
        f"{about['resident']}/{about['layers']}", str(found.get("resident", about["layers"])),
        ", ".join(str(first.get(what, 0) + found.get(what, 0)) for what in ("shed", "grown")),
        f"{found['rate']:.2f}", percent(found["waiting"], 0),
        *(f"{peak[figure] / MIB:.0f}" for figure in ("ledger", "process")),
    ]  # fmt: skip


def hero(settings: Settings) -> None:
    """A model that is larger than its budget, many times over."""
    if settings.hero is None:
        say("hero: no model was given (--hero DIR)")
        return
    files = weights(settings.hero)
    drop(files)
    amount, said = settings.budget, ""
    try:
        case = Case(Spec(str(settings.hero), amount, dtype=settings.dtype, native=settings.native))
    except Refused as error:
        said = f"{amount} is refused: {str(error).replace(str(settings.hero), 'MODEL')}."
        with Case(
            Spec(str(settings.hero), "0", dtype=settings.dtype, native=settings.native)
        ) as small:
            amount = f"{-(-small.opened['minimum'] // MIB)}M"
        case = Case(Spec(str(settings.hero), amount, dtype=settings.dtype, native=settings.native))
    section(
        "A model larger than its memory",
        f"{settings.rounds} rounds of {settings.tokens} tokens; GB at most, from opening to the "
        "last token. None of its files was in the system's cache; whether they stay there is "
        f"toastkit's own choice. {said}",
    )
    with case:
        case.do("tokens", count=1)
        found = [speed(case, settings.tokens) for _ in range(settings.rounds)]
        memory, about, keeps = case.do("memory"), case.opened, case.do("keeps")["cached"]
        left = cached(files)
    tokens = settings.tokens
    rows = [
        ["files", f"{gb(about['files'])} GB, {about['layers']} layers"],
        ["budget", amount],
        ["resident", str(about["resident"])],
        ["opened in", f"{about['seconds']:.1f} s"],
        ["seconds a token", rates([f["seconds"] / tokens for f in found])],
        ["of these computing", rates([f["compute"] / tokens for f in found])],
        ["waiting for layers", rates([f["wait"] / tokens for f in found])],
        ["read a token", f"{gb(median(f['read'] for f in found) / tokens)} GB"],
        ["GB a second", rates([f["read"] / f["seconds"] / 1e9 for f in found])],
        *([words, f"{gb(memory[figure])} GB"] for figure, words in (
            ("ledger", "ledger"), ("mlx", "MLX"), ("process", "process"))),
        ["files / process", f"{about['files'] / memory['process']:.1f} times"],
        ["left in the system's cache", f"{gb(left)} GB ({'kept' if keeps else 'not kept'})"],
    ]  # fmt: skip
    table(("", "value"), rows)
