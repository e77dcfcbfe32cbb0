"""What it would be worth to keep, where a step falls back, what both of its passes have in common:
all that comes before the first router, which has seen the same input in both.

    python benchmarks/experts_shared.py [--rounds N] [MODEL ...]

Parts of a step are timed in turn, one token after 256: what comes before the first router, and a
step of the big and of the little model; crumb whole, the others as random models of a few layers
with the sizes of the real ones, 4 bits a weight, and the rest of their layers added up. gain: how
many times faster a run would be whose steps fall back at a ratio of 0.11, 0.21 (the paper's) or 1.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import mlx.core as mx
from experts_models import SHAPES, structure
from measure import in_turn, machine

from toastkit.engine import device

READ, RATIOS = 256, (0.11, 0.21, 1.0)
# A token goes to K experts however many there are; and sixteen are made quickly.
FEW = {"num_experts": 16, "n_routed_experts": 16}


def crumb() -> tuple[Any, int]:
    """The embedded model, and how many layers it has."""
    from toastkit.engine.opening import open_engine
    from toastkit.model.locate import locate

    engine = open_engine(locate("crumb"), device_name="cpu")
    return engine.model, len(engine.model.layers)


def random_model(name: str) -> tuple[Any, int]:
    """A model of the dense layers and one with experts, and how many the real one has."""
    config = {**SHAPES[name], **{key: n for key, n in FEW.items() if key in SHAPES[name]}}
    layers = config["num_hidden_layers"]
    config["num_hidden_layers"] = 1 + config.get("first_k_dense_replace", 0)
    model = structure(config, 4)
    mx.eval(model.parameters())
    return model, layers


class FirstRouter(Exception):
    """Raised where a pass has come to it."""


def parts(model: Any, layers: int, rounds: int) -> tuple[list[float], list[float], list[float]]:
    """Seconds, round by round: before the first router, a big step, a little step."""
    from mlx_lm.models.cache import make_prompt_cache

    from toastkit.experts.routers import router_of

    blocks = [
        m for layer in model.layers for _, m in layer.named_modules() if router_of(m) is not None
    ]
    owners = [(_owner(b, router_of(b).k), router_of(b).k.rpartition(".")[2]) for b in blocks]
    own_k = getattr(*owners[0])
    cache = make_prompt_cache(model)
    mx.eval(model(mx.zeros((1, READ), mx.uint32), cache=cache))

    def step() -> float:
        start = time.perf_counter()
        mx.eval(model(mx.array([[5]]), cache=cache))
        return time.perf_counter() - start

    def with_k(k: int) -> float:
        for owner, name in owners:
            setattr(owner, name, k)
        return step()

    def before() -> float:
        kind, held = type(blocks[0]), []

        class Stops(kind):
            def __call__(self, x):
                held.append(x)
                raise FirstRouter

        blocks[0].__class__ = Stops
        start = time.perf_counter()
        try:
            model(mx.array([[5]]), cache=cache)
        except FirstRouter:
            mx.eval(held)
        blocks[0].__class__ = kind
        return time.perf_counter() - start

    def block(k: int) -> float:
        """A layer with experts, by itself."""
        for owner, name in owners:
            setattr(owner, name, k)
        layer, own, x = model.layers[-1], cache[-1], mx.ones((1, 1, model.args.hidden_size))
        start = time.perf_counter()
        mx.eval(layer(x, None, own))
        return time.perf_counter() - start

    more = layers - len(model.layers)
    cases: dict[str, Callable[[], float]] = {
        "before": before, "big": lambda: with_k(own_k), "little": lambda: with_k(own_k // 2),
    }  # fmt: skip
    if more:
        cases |= {"big layer": lambda: block(own_k), "little layer": lambda: block(own_k // 2)}
    times = in_turn(cases, rounds)
    for name in ("big", "little") if more else ():
        times[name] = [a + more * b for a, b in zip(times[name], times[f"{name} layer"])]
    return times["before"], times["big"], times["little"]


def _owner(module: Any, path: str) -> Any:
    for word in path.split(".")[:-1]:
        module = getattr(module, word)
    return module


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("models", nargs="*", help="of crumb and those of SHAPES (default: all)")
    flags = parser.parse_args()
    device.start("cpu")
    print(machine(), "\n")
    print("| model | before the first router, ms | big step | little step | share of a big step |"
          + "".join(f" gain at {r} |" for r in RATIOS))  # fmt: skip
    print("|---|" + "---:|" * (4 + len(RATIOS)))
    for name in flags.models or ("crumb", *SHAPES):
        model, layers = crumb() if name == "crumb" else random_model(name)
        before, big, little = parts(model, layers, flags.rounds)
        a, b, c = (statistics.median(values) for values in (before, big, little))
        share = sorted(x / y for x, y in zip(before, big))
        gains = [(c + r * b) / (c + r * (b - a)) for r in RATIOS]
        spread = f"{a / b:.1%} ({share[0]:.1%} .. {share[-1]:.1%})"
        print(f"| {name} | {a * 1e3:.2f} | {b * 1e3:.1f} | {c * 1e3:.1f} | {spread} |"
              + "".join(f" {gain:.4f} |" for gain in gains), flush=True)  # fmt: skip
        del model


if __name__ == "__main__":
    main()
