"""What it gains to keep, where a step falls back, what both of its passes have in common: all that
comes before the first router (toastkit/experts/common_part.py).

    python benchmarks/experts_shared.py [--rounds N] [--native off] [--folder DIR] [MODEL ...]

Steps of MoBiLE after 256 tokens, one that falls back and one that does not, with and without
keeping, in turn. Whether a step falls back is forced. Crumb as it is; the others as random models
in the shapes of real ones, of all their layers and 4 bits a weight, with fewer experts (a token
goes to as many of them). gain: how many times as fast a run is whose steps fall back at a ratio.
Medians, and in brackets the middle half.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path

import mlx.core as mx
from experts_models import SHAPES, make
from measure import machine

from toastkit.engine import big_little
from toastkit.engine.engine import Engine
from toastkit.engine.opening import open_engine
from toastkit.engine.state import ModelState
from toastkit.experts.experts_options import ExpertsOptions
from toastkit.model.locate import locate

READ, RATIOS, EXPERTS = 256, (0.11, 0.21, 0.5, 1.0), 16
CASES = [(keeps, falls) for falls in (False, True) for keeps in (True, False)]


def opened(name: str, folder: Path, native: str) -> Engine:
    """A model whose steps are all tried by the little one."""
    layers = 0 if name == "crumb" else int(SHAPES[name]["num_hidden_layers"])
    path = name if name == "crumb" else str(make(folder, name, layers, 4, EXPERTS))
    options = ExpertsOptions("mobile", 0.5)
    return open_engine(locate(path), device_name="cpu", experts=options, native=native)


def times(engine: Engine, rounds: int) -> dict[tuple[bool, bool], list[float]]:
    """Seconds of steps, round by round: by whether what is common is kept, and whether they fall
    back."""
    experts = engine.experts
    recorded, unsure_rows = experts.common.recorded, big_little.unsure_rows

    def case(keeps: bool, falls: bool):
        state = ModelState(engine.new_cache())
        for _ in engine.reading(state, [5] * READ):
            pass

        def unsure(logits: mx.array, gamma: float) -> list[int]:
            unsure_rows(logits, gamma)  # what looking takes
            return [0] if falls else []

        def step() -> float:
            experts.common.recorded = recorded if keeps else lambda kept: nullcontext()
            for _ in range(64):
                experts.common.note(True)  # whatever the ratio, it keeps
            big_little.unsure_rows = unsure
            start = time.perf_counter()
            engine.consume(state, 5)
            mx.eval(state.logits)
            return time.perf_counter() - start

        return step

    cases = {each: case(*each) for each in CASES}
    found: dict[tuple[bool, bool], list[float]] = {each: [] for each in CASES}
    order = random.Random(0)
    for warm in (True, *[False] * rounds):
        # What ran before has a say in how long a step takes: none comes after the same one always.
        for each in order.sample(CASES, len(CASES)):
            seconds = cases[each]()
            if not warm:
                found[each].append(seconds)
    return found


def middle(values: list[float], unit: float, digits: int) -> str:
    """The median (of the lower half .. of the upper half) of values / unit."""
    cuts = statistics.quantiles(values * 2, n=4, method="inclusive")  # one value has none
    low, median, high = (q / unit for q in cuts)
    return f"{median:.{digits}f} ({low:.{digits}f} .. {high:.{digits}f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--native", choices=("auto", "off", "require"), default="auto")
    parser.add_argument("--folder", type=Path, help="for random models (default: one that goes)")
    parser.add_argument("models", nargs="*", help="of crumb and those of SHAPES (default: all)")
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print("| model | products | falls back, kept, ms | twice | kept in sure steps, ms | not |"
              + "".join(f" gain at {r} |" for r in RATIOS))  # fmt: skip
        print("|---|---|" + "---:|" * (4 + len(RATIOS)))
        for name in flags.models or ("crumb", *SHAPES):
            engine = opened(name, flags.folder or Path(folder), flags.native)
            found = times(engine, flags.rounds)
            sure, fallen = ([found[keeps, falls] for keeps in (True, False)]
                            for falls in (False, True))  # fmt: skip
            runs = [
                [[s + r * (f - s) for s, f in zip(*both)] for both in zip(sure, fallen)]
                for r in RATIOS
            ]
            products = "native" if engine.native.on else "MLX's"
            cells = [middle(values, 1e-3, 2) for values in (*fallen, *sure)]
            cells += [middle([b / a for a, b in zip(*both)], 1, 3) for both in runs]
            print(f"| {name} | {products} |", *(f"{cell} |" for cell in cells), flush=True)
            engine.close()
            del engine
        print("\n" + machine())


if __name__ == "__main__":
    main()
