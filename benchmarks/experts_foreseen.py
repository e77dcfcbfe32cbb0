"""How often experts are foreseen rightly, and how many are in their slots: on crumb, with a text.

    python benchmarks/experts_foreseen.py [--text FILE] [--tokens N]

Routers asked ahead: of the experts that a layer then wants, those that its router names when it is
asked of what the layer 1, 2 or 3 before it sees. An evicted pass: those that routers name of a pass
with half the experts, for the pass with all of them. Then hits and bytes by slots and prefetch.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import mlx.core as mx
import numpy as np

from toastkit.engine.engine import Engine
from toastkit.engine.opening import open_engine
from toastkit.engine.savepoints import copy_caches, put_back
from toastkit.engine.state import ModelState
from toastkit.experts.slot_options import SlotOptions
from toastkit.model.locate import locate
from toastkit.text.tokenizer import Tokenizer

TEXT = Path(__file__).parents[1] / "tests" / "texts" / "story.txt"
LITTLE, BIG = 2, 4  # experts of a token


def opened(slots: int, prefetch: str = "off") -> tuple[Engine, ModelState]:
    options = SlotOptions("slots", slots, prefetch)
    engine = open_engine(locate("crumb"), dtype="float32", expert_slots=options)
    engine.holdings.slots.foresight.watch()
    return engine, ModelState(engine.new_cache())


def step(engine: Engine, state: ModelState, token: int) -> None:
    engine.consume(state, token)
    mx.eval(state.logits)


def asked_ahead(ids: list[int], depth: int) -> float:
    """Share of wanted experts that are named so many layers before."""
    engine, state = opened(15)
    foresight, layers = engine.holdings.slots.foresight, engine.holdings.slots.layers
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
    engine, state = opened(15)
    foresight, layers = engine.holdings.slots.foresight, engine.holdings.slots.layers
    right = wanted = 0
    for token in ids:
        before = copy_caches(state.cache)
        for count in (LITTLE, BIG):
            for layer in layers:
                layer.switch.block.top_k = count
            if count == BIG:
                named = foresight.last_choices()
                put_back(state.cache, before)
                state.tokens.pop()
            step(engine, state, token)
        for place, layer in enumerate(layers):
            right += len({*named[place]} & {*layer.choice})
            wanted += len(layer.choice)
    return right / wanted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--tokens", type=int, default=150)
    options = parser.parse_args()
    text = options.text.read_text()
    ids = Tokenizer(locate("crumb")).encode_prompt(text, templated=False)[: options.tokens]
    for depth in (1, 2, 3):
        print(f"asked {depth} ahead: {asked_ahead(ids, depth):.1%}")
    print(f"named by the evicted pass: {evicted(ids):.1%}")
    print("slots  MB on the device  prefetch    hit  MB a token  right")
    for slots in (4, 6, 8, 12):
        for prefetch in ("off", "1", "2", "3"):
            engine, state = opened(slots, prefetch)
            for token in ids:
                step(engine, state, token)
            report = engine.run_report()["slots"]
            ahead = f"{report['right'] / report['ahead']:.0%}" if report["ahead"] else "-"
            hit, read = report["hit"] / report["wanted"], report["read"] / len(ids) / 1e6
            device = engine.ledger.of("experts") / 1e6
            print(f"{slots:5} {device:17.1f} {prefetch:>9} {hit:6.1%} {read:11.2f} {ahead:>6}")


if __name__ == "__main__":
    main()
