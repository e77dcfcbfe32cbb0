"""What gears are worth: quality, distribution, cost and overhead, on the embedded model and one
that is bound by memory.

    python benchmarks/gears.py [--only perplexity,distribution,auto,formats,cost,overhead]
        [--texts DIR] [--limit N] [--auto-tokens 2048] [--scope all] [--rounds 5] [--processes 2]
        [--native off] [--quick]

perplexity    by precision and scope, next to figures that were computed independently.
distribution  gears of each text by thresholds and minimum duration.
auto          gears that follow the entropy against fixed ones, and against as many bits blindly.
formats       error and bytes of the packed formats, predicted and measured.
cost          bytes, memory, speed and shifts by gear, predicted and measured; a whole answer.
overhead      of the monitor, on the host, on the device and in a decode.

The repository's texts are used, and code.txt, prose.txt and gsm8k.txt from --texts where they are
there. The first three sections run in --processes processes and are not timed; the others run
alone. Tables go to stdout, progress to stderr.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from gears_quality import Bench, auto, distribution, perplexity
from gears_report import load_average, say, seconds
from gears_scores import Scorer, read_texts
from load import LLAMA, make
from measure import machine

QUALITY = {"perplexity": perplexity, "distribution": distribution, "auto": auto}
TIMED = ("formats", "cost", "overhead")
SECTIONS = (*QUALITY, *TIMED)
STORY_TOKENS, RANDOM_TOKENS = 192, 34  # of an answer whose time is predicted
LAYERS = 4
# For --quick: what replaces the defaults.
QUICK = {"limit": 128, "auto_tokens": 128, "rounds": 2}
QUICK_LLAMA = {
    "hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 8,
    "num_key_value_heads": 2,
}  # fmt: skip


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(SECTIONS), metavar="SECTION,...")
    parser.add_argument("--texts", type=Path, metavar="DIR", help="where the other texts are")
    parser.add_argument("--limit", type=int, metavar="N", help="tokens of each text (all)")
    parser.add_argument("--auto-tokens", type=int, metavar="N", help="of each for auto (2048)")
    parser.add_argument("--scope", choices=("attention", "all"), default="all", help="for auto")
    parser.add_argument("--rounds", type=int, metavar="N", help="of timings (5)")
    parser.add_argument("--processes", type=int, default=min(2, os.cpu_count() or 1), metavar="N")
    parser.add_argument("--native", choices=("off", "require"), default="off", help="for cost")
    parser.add_argument("--quick", action="store_true", help="short texts, small models")
    options = parser.parse_args()
    options.only = options.only.split(",")
    unknown = sorted(set(options.only) - set(SECTIONS))
    if unknown:
        parser.error(f"no such section: {unknown[0]} ({', '.join(SECTIONS)})")
    defaults = QUICK if options.quick else {"limit": None, "auto_tokens": 2048, "rounds": 5}
    for name, value in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    if options.limit is not None and options.limit < 64:
        parser.error("--limit: at least 64 tokens are needed")
    if options.auto_tokens < 64 or options.rounds < 1 or options.processes < 1:
        parser.error("at least 64 tokens, 1 round and 1 process are needed")
    if options.texts is not None and not options.texts.is_dir():
        parser.error(f"--texts: no such directory: {options.texts}")
    return options


def quality(options: argparse.Namespace) -> None:
    """The sections that only score."""
    wanted = [name for name in QUALITY if name in options.only]
    if not wanted:
        return
    whole = read_texts(options.texts, None)
    with Scorer(options.processes) as scorer:
        bench = Bench(
            scorer,
            [text.cut(options.limit) for text in whole],
            [text.cut(options.auto_tokens) for text in whole[: 2 if options.quick else None]],
            options.scope,
        )
        for name in wanted:
            say(name)
            QUALITY[name](bench)


def costs(options: argparse.Namespace, folder: Path) -> None:
    """The cost of gears on both models."""
    from gears_cost import Subject, cost, with_gears_baked

    from toastkit.model.locate import locate

    say("cost: making a model and baking gears")
    crumb = locate("crumb")
    config: dict[str, Any] = {**LLAMA, **QUICK_LLAMA} if options.quick else LLAMA
    layers = 2 if options.quick else LAYERS
    llama = locate(str(make(folder / "llama", config, layers, 1)))
    lot = random.Random(1)
    random_ids = [lot.randrange(config["vocab_size"]) for _ in range(RANDOM_TOKENS + 1)]
    (story,) = read_texts(None, 66 if options.quick else STORY_TOKENS, ("story",))
    baked = [
        with_gears_baked(files, folder / f"{name}.toast")
        for name, files in (("crumb", crumb), ("llama", llama))
    ]
    size = f"llama, random, hidden {config['hidden_size']}, {layers} layers"
    steps = (8, 4) if options.quick else (32, 4)
    rounds, native = (options.rounds, min(3, options.rounds)), options.native
    cost(
        [
            Subject("crumb", crumb, baked[0], rounds[0], 8, steps[0], story.ids, True, native),
            Subject(size, llama, baked[1], rounds[1], 2, steps[1], random_ids, False, native),
        ]
    )


def main() -> None:
    options = arguments()
    print(f"{machine()}; MLX {version('mlx')}; load average {load_average()}\n", flush=True)
    quality(options)
    if "formats" in options.only:
        from gears_formats import formats

        say("formats")
        formats()
    if "cost" in options.only:
        with tempfile.TemporaryDirectory() as folder:
            costs(options, Path(folder))
    if "overhead" in options.only:
        from gears_overhead import overhead

        overhead(options.rounds, 20 if options.quick else 100)
    say("done")
    print(f"{seconds():.0f} seconds; load average at the end {load_average()}")


if __name__ == "__main__":
    main()
