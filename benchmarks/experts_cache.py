"""Which experts are foreseen, and which should stay: on crumb, with texts, token by token.

    python benchmarks/experts_cache.py [--text NAME ...] [--tokens N]

Foreseen: of the experts that a layer wants, those that its router names when it is asked of what
the layer 1, 2 or 3 before it sees; and of those that a pass with all experts wants, those that the
routers name of one with half of them.

Then rules for slots are played through on what the routers chose: the share of wanted experts that
were there, slots empty to begin with. layers: each layer has slots of its own, the same number
(oldest: who was not used for longest leaves; rarest: who is used least, as toastkit has it; future:
who is not wanted for longest, and no rule can be better). need: as many in all, divided among the
layers so that the same number of tokens of another part of the text would have found most (oldest;
as AdapMoE does it). shared: as many in all, for whichever layer.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import mlx.core as mx
import numpy as np

from toastkit.engine.engine import Engine
from toastkit.engine.opening import open_engine
from toastkit.engine.savepoints import copy_caches, restore_caches
from toastkit.engine.state import ModelState
from toastkit.experts.experts_options import SlotOptions
from toastkit.model.config import load_config
from toastkit.model.files import ModelFiles
from toastkit.model.locate import locate
from toastkit.text.tokenizer import Tokenizer

Key = tuple[int, int]  # layer, expert
Trace = list[list[list[int]]]  # experts by token and layer
TEXTS = Path(__file__).parents[1] / "tests" / "texts"
DECAY = 0.95  # a token, of how often an expert was used
LITTLE, BIG = 2, 4  # experts of a token


def experts_of(files: ModelFiles) -> int:
    """Experts of a layer."""
    return load_config(files).raw["num_experts"]


def opened(files: ModelFiles) -> tuple[Engine, ModelState]:
    """With slots for all experts but one: what a layer has chosen is known of slots only."""
    slots = SlotOptions("slots", experts_of(files) - 1)
    engine = open_engine(files, dtype="float32", expert_slots=slots)
    return engine, ModelState(engine.new_cache())


def step(engine: Engine, state: ModelState, token: int) -> None:
    engine.consume(state, token)
    mx.eval(state.logits)


# ------------------------------------------------------------------------------------- foreseeing


def asked_ahead(ids: list[int], depth: int) -> float:
    """Share of wanted experts that are named so many layers before."""
    engine, state = opened(locate("crumb"))
    foresight, layers = engine.holdings.slots.foresight, engine.holdings.slots.layers
    foresight.watch()
    right = wanted = 0
    for token in ids:
        step(engine, state, token)
        for before, layer in zip(layers, layers[depth:]):
            choice = foresight.choice(layer, before.seen)
            named = set(np.array(choice).reshape(-1).tolist())
            right, wanted = right + len(named & {*layer.choice}), wanted + len(layer.choice)
    return right / wanted


def evicted(ids: list[int]) -> float:
    """Share of a big pass's experts that the routers of the little one name."""
    engine, state = opened(locate("crumb"))
    foresight, layers = engine.holdings.slots.foresight, engine.holdings.slots.layers
    foresight.watch()
    right = wanted = 0
    for token in ids:
        before = copy_caches(state.cache)
        for count in (LITTLE, BIG):
            for layer in layers:
                layer.switch.block.top_k = count
            if count == BIG:
                named = foresight.last_choices()
                restore_caches(state.cache, before)
                state.tokens.pop()
            step(engine, state, token)
        for place, layer in enumerate(layers):
            right += len({*named[place]} & {*layer.choice})
            wanted += len(layer.choice)
    return right / wanted


# ----------------------------------------------------------------------------------------- staying


def traced(files: ModelFiles, ids: Sequence[int]) -> Trace:
    """What the routers choose along ids."""
    engine, state = opened(files)
    found = []
    for token in ids:
        step(engine, state, token)
        found.append([list(layer.choice) for layer in engine.holdings.slots.layers])
    engine.close()
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


def hit_rate(
    steps: Sequence[Sequence[Key]], slots: int, leaves: Callable, decay: float = DECAY
) -> float:
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


def by_layer(trace: Trace) -> list[list[list[Key]]]:
    """The steps of each layer alone."""
    return [[[(n, e) for e in step[n]] for step in trace] for n in range(len(trace[0]))]


def divided(trace: Trace, slots: int) -> list[int]:
    """Slots of each layer, so many on average and none with fewer than a token takes, that would
    have found most: AdapMoE's, by dynamic programming."""
    layers = by_layer(trace)
    least = max(len(step) for steps in layers for step in steps)
    total, experts = slots * len(layers), 1 + max(e for step in trace for c in step for e in c)
    best: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}  # by slots given out
    for steps in layers:
        found = {n: hit_rate(steps, n, oldest) for n in range(least, experts + 1)}
        before, best = best, {}
        for used, (hits, counts) in before.items():
            for count, more in found.items():
                now = used + count
                if now <= total and (now not in best or hits + more > best[now][0]):
                    best[now] = hits + more, [*counts, count]
    return max(best.values(), key=lambda one: one[0])[1]


def played(trace: Trace, other: Trace, slots: int) -> list[float]:
    """Shares, by rule. other: what shows the need."""
    alone = by_layer(trace)
    together = [[(n, e) for e in step[n]] for step in trace for n in range(len(step))]
    own = [
        float(np.mean([hit_rate(steps, slots, rule) for steps in alone]))
        for rule in (oldest, rarest, farthest)
    ]
    counts = divided(other, slots)
    need = np.mean([hit_rate(steps, count, oldest) for steps, count in zip(alone, counts)])
    total, decay = slots * len(alone), DECAY ** (1 / len(alone))
    return [*own, float(need), *(hit_rate(together, total, r, decay) for r in (oldest, rarest))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--text", nargs="*", default=["story", "arith", "chat"])
    parser.add_argument("--tokens", type=int, default=150)
    options = parser.parse_args()
    for name in options.text:
        text = (TEXTS / f"{name}.txt").read_text()
        ids = Tokenizer(locate("crumb")).encode_prompt(text, templated=False)
        ids, others = ids[: options.tokens], ids[options.tokens : 2 * options.tokens]
        ahead = ", ".join(f"{asked_ahead(ids, depth):.1%}" for depth in (1, 2, 3))
        print(f"{name}: asked 1, 2, 3 layers ahead {ahead}; by evicted passes {evicted(ids):.1%}")
        trace, other = traced(locate("crumb"), ids), traced(locate("crumb"), others)
        again = [len({*a[n]} & {*b[n]}) / len(b[n])
                 for a, b in zip(trace, trace[1:]) for n in range(len(a))]  # fmt: skip
        print(f"of a token's experts {np.mean(again):.1%} were those of the token before")
        print("| slots | layers: oldest | rarest | future | need | shared: oldest | rarest |")
        print("|---|" + "---:|" * 6)
        for slots in (4, 5, 6, 8, 10, 12):
            shares = " | ".join(f"{share:.1%}" for share in played(trace, other, slots))
            print(f"| {slots} | {shares} |", flush=True)


if __name__ == "__main__":
    main()
