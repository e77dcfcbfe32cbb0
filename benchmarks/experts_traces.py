"""Which experts should stay: rules for slots, played through on what crumb's routers chose.

    python benchmarks/experts_traces.py [--text FILE] [--tokens N]

A text goes through the embedded model token by token; each layer's choice of each token is noted.
Then each rule is played through for some numbers of slots: the share of wanted experts that were
there. "future" knows what comes: no rule can be better. "layers": slots of their own for each
layer; "shared": as many in all, for whichever layer.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import mlx.core as mx
import numpy as np

from toastkit.engine.opening import open_engine
from toastkit.engine.state import ModelState
from toastkit.experts.slot_options import SlotOptions
from toastkit.model.locate import locate
from toastkit.text.tokenizer import Tokenizer

Key = tuple[int, int]  # layer, expert
TEXT = Path(__file__).parents[1] / "tests" / "texts" / "story.txt"
DECAY = 0.95  # a token, of how often an expert was used


def traced(path: Path, tokens: int) -> list[list[list[int]]]:
    """Experts by token and layer."""
    files = locate("crumb")
    engine = open_engine(files, dtype="float32", expert_slots=SlotOptions("slots", 15))
    ids = Tokenizer(files).encode_prompt(path.read_text(), templated=False)[:tokens]
    state, found = ModelState(engine.new_cache()), []
    for token in ids:
        engine.consume(state, token)
        mx.eval(state.logits)
        found.append([list(layer.choice) for layer in engine.holdings.slots.layers])
    return found


def oldest(held: dict[Key, int], n: int, past: Counter[Key], steps: Sequence) -> Key:
    return min(held, key=lambda key: held[key])


def rarest(held: dict[Key, int], n: int, past: Counter[Key], steps: Sequence) -> Key:
    """The one used least, recent uses counting more; among equals the oldest."""
    return min(held, key=lambda key: (past[key], held[key]))


def farthest(held: dict[Key, int], n: int, past: Counter[Key], steps: Sequence) -> Key:
    def following(key: Key) -> int:
        return next((i for i in range(n + 1, len(steps)) if key in steps[i]), len(steps))

    return max(held, key=following)


def hit_rate(steps: Sequence[Sequence[Key]], slots: int, leaves: Callable, decay: float) -> float:
    """Share of wanted experts that were there. steps: what is wanted together."""
    held: dict[Key, int] = {}
    past: Counter[Key] = Counter()
    hit = wanted = 0
    for n, keys in enumerate(steps):
        hit, wanted = hit + sum(key in held for key in keys), wanted + len(keys)
        for key in past:
            past[key] *= decay  # type: ignore[assignment]
        for key in keys:
            past[key] += 1
            if key not in held and len(held) >= slots:
                others = {k: used for k, used in held.items() if k not in keys}
                del held[leaves(others, n, past, steps)]
            held[key] = n
    return hit / wanted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--tokens", type=int, default=200)
    options = parser.parse_args()
    trace = traced(options.text, options.tokens)
    layers = len(trace[0])
    alone = [[[(n, e) for e in step[n]] for step in trace] for n in range(layers)]
    together = [[(n, e) for e in step[n]] for step in trace for n in range(layers)]
    again = np.mean([len({*a[n]} & {*b[n]}) / len(b[n]) for a, b in zip(trace, trace[1:])
                     for n in range(layers)])  # fmt: skip
    print(f"{len(trace)} tokens, {layers} layers; of a token's experts {again:.1%} were the last's")
    print("slots  layers:oldest  rarest  future   shared:oldest  rarest")
    for slots in (4, 5, 6, 8, 10, 12):
        own = [
            np.mean([hit_rate(steps, slots, rule, DECAY) for steps in alone])
            for rule in (oldest, rarest, farthest)
        ]
        decay = DECAY ** (1 / layers)
        shared = [hit_rate(together, slots * layers, rule, decay) for rule in (oldest, rarest)]
        print(f"{slots:5}  {own[0]:13.1%}  {own[1]:6.1%}  {own[2]:6.1%}   "
              f"{shared[0]:13.1%}  {shared[1]:6.1%}")  # fmt: skip


if __name__ == "__main__":
    main()
