"""What native products change of a model's predictions, beside MLX's in float32.

    python benchmarks/native_quality.py [--model crumb] [--limit 512] [--steps 128] [--texts DIR]

Of crumb the greedy tokens of tests/reference.json, which another implementation recorded; then for
each text (gears_scores.py) and gear the divergence of the distributions, sum of p log(p/q) in nats
a token, p being MLX's with the same weights, the largest of one token, and perplexities; with
native products as they come, with --native-exact, and with --kv-bits 16 and 8. The error beside a
perplexity is the standard error of its tokens' mean. A text is read as a prompt is, in chunks, and
its beginning once more token by token, because the kernels are others.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import mlx.core as mx
import numpy as np
from gears_scores import Text, read_texts
from measure import machine
from native import instructions

from toastkit.engine.engine import Engine
from toastkit.engine.opening import open_engine
from toastkit.gears.gear_options import GearOptions
from toastkit.model.locate import locate

REFERENCE = Path(__file__).parents[1] / "tests" / "reference.json"
GEARS = ("high", "mid", "low")
CHUNK = 256
PERPLEXITY_TARGET = 0.1  # percent
BITS = {"mid": "8 bits", "low": "4 bits"}
TARGETS = {"native": 1e-4, "exact": 1e-5, "kv 16": 1e-4, "kv 8": 1e-3}  # nats a token
WAYS = ("off", *TARGETS)
KV_BITS = {"kv 16": 16, "kv 8": 8}


def opened(model: str, way: str, gear: str) -> Engine:
    """A model with all matrices of its layers in a gear, computed in one of WAYS."""
    gears = None if gear == "high" else GearOptions(gear, "all")
    engine = open_engine(
        locate(model), device_name="cpu", gear_options=gears, native_exact=way == "exact",
        native="off" if way == "off" else "require", kv_bits=KV_BITS.get(way),
    )  # fmt: skip
    if gears is not None:
        engine.shift(gear)
    return engine


def logprobs(engine: Engine, ids: tuple[int, ...], chunk: int) -> np.ndarray:
    """Of all ids after each but the last, float64 (N - 1, vocab)."""
    cache, rows = engine.new_cache(), []
    for start in range(0, len(ids) - 1, chunk):
        logits = engine.score(ids[start : min(start + chunk, len(ids) - 1)], cache)
        rows.append(np.array(logits, np.float64))
    found = np.concatenate(rows)
    found -= found.max(-1, keepdims=True)
    return found - np.log(np.exp(found).sum(-1, keepdims=True))


def greedy(engine: Engine) -> str:
    """How many of the recorded tokens come out, in words."""
    agree = total = 0
    for prompt in json.loads(REFERENCE.read_bytes())["prompts"]:
        cache = engine.new_cache()
        token = mx.argmax(engine.prefill(prompt["token_ids"], cache))
        for wanted in prompt["greedy"]:
            agree += token.item() == wanted
            total += 1
            token = mx.argmax(engine.step(wanted, cache))
    return f"{agree} of {total}"


def row(text: Text, gear: str, read: str, way: str, theirs: np.ndarray, ours: np.ndarray) -> bool:
    """Prints how they differ; whether that is within the targets."""
    apart = (np.exp(theirs) * (theirs - ours)).sum(-1)
    ids = np.array(text.ids[1 : len(ours) + 1])
    ours_nats, theirs_nats = (-a[np.arange(len(ids)), ids] for a in (ours, theirs))
    more = ours_nats - theirs_nats
    percent = 100 * np.expm1(more.mean())
    error = 100 * more.std() / np.sqrt(len(more))
    same = np.mean(ours.argmax(-1) == theirs.argmax(-1))
    print(f"| {text.name} | {BITS.get(gear, 'as it is')} | {read} | {way} | {len(ids):,} "
          f"| {apart.mean():.1e} | {apart.max():.1e} | {np.exp(theirs_nats.mean()):.4f} "
          f"| {percent:+.4f}% | {error:.4f}% | {100 * same:.2f}% |", flush=True)  # fmt: skip
    return bool(apart.mean() < TARGETS[way] and abs(percent) < PERPLEXITY_TARGET)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="crumb", help="one whose weights have 16 or 32 bits")
    parser.add_argument("--limit", type=int, default=512, help="tokens of each text, in chunks")
    parser.add_argument("--steps", type=int, default=128, help="token by token")
    parser.add_argument("--texts", type=Path, metavar="DIR", help="where the other texts are")
    options = parser.parse_args()
    print(f"{machine()}; {instructions()}")
    engines = {gear: {way: opened(options.model, way, gear) for way in WAYS} for gear in GEARS}
    for way in TARGETS if options.model == "crumb" else ():
        print(f"\nGreedy tokens as recorded, {way}: {greedy(engines['high'][way])}")
    texts = read_texts(options.texts, options.limit, model=options.model)
    print("\n| text | matrices | read | products | tokens | divergence, nats a token | largest "
          "| perplexity, MLX | native | error | same likeliest |")  # fmt: skip
    print(f"|---|---|---|---|{'---:|' * 7}")
    within = []
    for text in texts:
        for gear, by_way in engines.items():
            for read, part, chunk in (
                ("chunks", text, CHUNK),
                ("one by one", text.cut(options.steps), 1),
            ):
                theirs = logprobs(by_way["off"], part.ids, chunk)
                for way in TARGETS:
                    ours = logprobs(by_way[way], part.ids, chunk)
                    within.append(row(text, gear, read, way, theirs, ours))
    print(
        f"\nWithin the targets, {TARGETS} and {PERPLEXITY_TARGET}%: {sum(within)} of {len(within)}"
    )


if __name__ == "__main__":
    main()
