"""What it is worth to stream layers: the tables of paper 001 in form, beside its figures.

    python benchmarks/residency.py [--only SECTION,...] [--models DIR] [--names 0.8B-4,4B-4]
        [--rounds 3] [--tokens 4] [--hero DIR] [--budget 2G] [--dtype float32]
        [--native off] [--quick]

baseline    all layers resident: speed and memory (table 2).
memory      at 0% resident against resident: MLX's, the process's, the ledger's (table 3).
residency   speed at 0 to 100% with and without reading ahead, waiting, memory (tables 4 and 9), and
            100% against the engine without a policy.
placement   which layers stay, of half of them.
budget      budgets in bytes from the least to all (table 7).
priorities  --resident auto under a limit, by the three priorities (table 8).
overlap     reading and computing alone and together; the rate of reading beside dd's.
cache       what reading leaves of the system's cache of files, by the way of reading.
prefill     a long prompt at 0% resident, and lengths of chunks.
gears       streamed in low gear.
hero        a model of any size (--hero DIR) with a budget of 2 GiB.
prediction  what `toast-model plan` predicts, and what is so.

Models are random checkpoints in Qwen3.5 shapes (qwen35.py), made in --models where they are not
there; the first of --names is that of sections about one. Whatever is measured has a process of its
own. Tables go to stdout, progress to stderr. Linux: the system's cache of files is emptied of the
models', which needs no rights; cgroups need root, and are done without else.
"""

from __future__ import annotations

import argparse
import tempfile
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

from gears_report import load_average, say, seconds, table
from measure import machine
from residency_cache import cache
from residency_files import model
from residency_memory import baseline, budget, hero, memory, priorities
from residency_report import Settings, section
from residency_speed import gears, overlap, placement, prefill, residency


def prediction(settings: Settings) -> None:
    """residency_prediction.py, which measures in this process."""
    section(
        "Predictions",
        f"Seconds, predicted from a calibration and measured, {settings.rounds} rounds. The target "
        "is an error of 25% at most; the paper's formula had 50% to more than 4,000%.",
    )
    try:
        prediction_errors: Any = import_module("residency_prediction").prediction_errors
    except ModuleNotFoundError:
        say("prediction: there is no residency_prediction.py")
        return
    lines = []
    for name in settings.names:
        say(f"prediction: {name}")
        path = str(model(settings.models, name))
        lines += [
            [name, "disk" if disk else "cache", f"{row.percent:g}%", f"{row.predicted:.3f}",
             f"{row.measured:.3f}", f"{row.error:+.0%}", f"{row.predicted_prompt:.2f}",
             f"{row.measured_prompt:.2f}", f"{row.prompt_error:+.0%}"]
            for disk in (False, True)
            for row in prediction_errors(
                path, settings.percents, settings.rounds, settings.native, disk
            )
        ]  # fmt: skip
    print()
    head = ("model", "files in", "resident", "a token: predicted", "measured", "error",
            "a prompt: predicted", "measured", "error")  # fmt: skip
    table(head, lines)


SECTIONS = {
    "baseline": baseline, "memory": memory, "residency": residency, "placement": placement,
    "budget": budget, "priorities": priorities, "overlap": overlap, "cache": cache,
    "prefill": prefill, "gears": gears, "hero": hero, "prediction": prediction,
}  # fmt: skip
USUAL: dict[str, Any] = {
    "names": "0.8B-4,0.8B-bf16,4B-4", "rounds": 3, "tokens": 4, "prompt": 2000,
    "chunks": (16, 64, 256), "widths": (16, 32, 48), "checked": 130, "context": 32768,
    "bystander": 128 << 20,
    "percents": (0, 25, 50, 75, 90, 100), "shares": (0, 0.25, 0.5, 0.75, 1), "pairs": 30,
}  # fmt: skip
QUICK: dict[str, Any] = {
    "names": "quick-4", "rounds": 1, "tokens": 2, "prompt": 12, "chunks": (4,), "widths": (2,),
    "checked": 4, "context": 8192, "bystander": 16 << 20, "percents": (0, 50, 100),
    "shares": (0, 0.5, 1), "pairs": 2,
}  # fmt: skip


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(SECTIONS), metavar="SECTION,...")
    parser.add_argument("--models", type=Path, metavar="DIR", help="where they are, or are made")
    parser.add_argument("--names", metavar="NAME,...", help="such as 0.8B-bf16,4B-4")
    parser.add_argument("--rounds", type=int, metavar="N", help="of timings (3)")
    parser.add_argument("--tokens", type=int, metavar="N", help="of a timing (4)")
    parser.add_argument("--prompt", type=int, metavar="N", help="tokens of the long prompt (2000)")
    parser.add_argument("--hero", type=Path, metavar="DIR", help="a checkpoint of any size")
    parser.add_argument("--budget", default="2G", metavar="SIZE", help="for the hero (2G)")
    parser.add_argument("--dtype", help="of activations (the device's own)")
    parser.add_argument("--native", default="auto", help="auto, off or require, as of toast-decode")
    parser.add_argument("--quick", action="store_true", help="a small model, few tokens")
    options = parser.parse_args()
    options.only = options.only.split(",")
    unknown = sorted(set(options.only) - set(SECTIONS))
    if unknown:
        parser.error(f"no such section: {unknown[0]} ({', '.join(SECTIONS)})")
    for name, value in (QUICK if options.quick else USUAL).items():
        if getattr(options, name, None) is None:
            setattr(options, name, value)
    if min(options.rounds, options.tokens, options.prompt - 1) < 1:
        parser.error("at least 1 round, 1 token and a prompt of 2 are needed")
    if options.hero is not None and not options.hero.exists():
        parser.error(f"--hero: no such checkpoint: {options.hero}")
    return options


def run(options: argparse.Namespace, models: Path) -> None:
    """The sections, with models in a folder."""
    names = options.names.split(",")
    hero_path = options.hero
    if options.quick and hero_path is None:  # so that the section is gone through
        hero_path = model(models, names[0])
        options.budget = "50M"
    settings = Settings(
        models.resolve(), names, options.rounds, options.tokens, options.prompt, options.chunks,
        options.widths, options.checked, options.context, options.bystander, options.budget,
        options.dtype, options.native, hero_path and hero_path.resolve(), options.percents,
        options.shares, options.pairs,
    )  # fmt: skip
    for name, measure in SECTIONS.items():
        if name in options.only:
            say(name)
            measure(settings)


def main() -> None:
    options = arguments()
    print(f"{machine()}; MLX {version('mlx')}; load average {load_average()}\n", flush=True)
    if options.models is not None:
        options.models.mkdir(parents=True, exist_ok=True)
        run(options, options.models)
    else:
        with tempfile.TemporaryDirectory() as folder:
            run(options, Path(folder))
    say("done")
    print(f"{seconds():.0f} seconds; load average at the end {load_average()}")


if __name__ == "__main__":
    main()
