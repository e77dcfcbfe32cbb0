"""Every recorded architecture in every mode, natively and as MLX has it: python -m tests.modes

    python -m tests.modes [--length 24] [--bits N] [NAME ...]

Checkpoints are those of tests/oracle. A mode is held against the plain pass that mlx_lm's own
operations give, or, where it changes what is computed (gears, fewer experts, rounded keys), against
itself without native products. A line each, with what is off by more than rounding; two minutes for
all of them. What it does not know is which of two is right: random models turn a little into much.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tests.model.checkpoints import baked, open_model, read
from tests.model.test_transformers import NAMES, recorded, write
from tests.oracle.cases import VOCAB
from toastkit.engine.batch import Batch, can_batch, can_be_apart
from toastkit.engine.engine import Engine
from toastkit.errors import ToastError
from toastkit.experts.experts_options import ExpertsOptions, SlotOptions
from toastkit.gears.gear_options import GearOptions
from toastkit.residency.residency_options import ResidencyOptions
from toastkit.store.quantising import QuantizationOptions

NEXT = [3 + (11 * n + 2) % (VOCAB - 3) for n in range(10)]
ONE_LAYER = ResidencyOptions("layers", 1)
# How an engine is opened that gives what a plain one does.
SAME: dict[str, dict[str, Any]] = {
    "plain": {},
    "no layer stays": {"residency": ResidencyOptions("layers", 0)},
    "exact": {"native_exact": True},
    "slots": {"expert_slots": SlotOptions("slots", 3, "off")},
    "slots ahead": {"expert_slots": SlotOptions("slots", 3, "auto")},
    "slots, layers": {"expert_slots": SlotOptions("slots", 3, "off"), "residency": ONE_LAYER},
}
# And one that gives something else, with how much that may differ.
OWN: dict[str, tuple[dict[str, Any], float]] = {
    "16-bit keys": ({"kv_bits": 16}, 1e-3),
    "8-bit keys": ({"kv_bits": 8}, 6e-2),
    "low": ({"gear_options": GearOptions("low")}, 2e-2),
    "low, all": ({"gear_options": GearOptions("low", "all")}, 2e-2),
    "mid, all": ({"gear_options": GearOptions("mid", "all")}, 2e-2),
    "little": ({"experts": ExpertsOptions("little")}, 0.0),
    "mobile": ({"experts": ExpertsOptions("mobile", 0.5)}, 0.0),
}


def checkpoint(folder: Path, name: str, bits: int | None) -> Path:
    """A recorded one; packed in so many bits. Raises ToastError where that cannot be."""
    path = write(folder / name, recorded(name))
    if bits is None:
        return path
    options = QuantizationOptions(bits=bits, group_size=32)
    return baked(path, folder / f"{name}.toast", quantization=options)


def answer(engine: Engine, prompt: list[int], chunk: int = 16) -> np.ndarray:
    """Logits, float32 (1 + len(NEXT), VOCAB): after the prompt, and after each token that follows,
    every other one of which was looked ahead to."""
    state = read(engine, prompt, chunk)
    found = [np.array(state.logits)]
    for n, token in enumerate(NEXT):
        if n % 2:
            state.submit()
            engine.look_ahead(state)
        engine.consume(state, token)
        found.append(np.array(state.logits))
    return np.stack(found)


def together(engine: Engine, prompt: list[int]) -> np.ndarray:
    """The same of a state that steps beside two others, but for its prompt."""
    lengths = (3, len(prompt), len(prompt) // 2)
    states = [read(engine, prompt[:length], None) for length in lengths]
    apart = can_be_apart(engine) and can_batch(engine, apart=True) is True
    batch, found = Batch(engine, apart), []
    batch.join(states)
    for token in NEXT:
        batch.step([token] * 3)
        found.append(np.array(states[1].logits))
    return np.stack(found)


def outcome(what: Callable[[], np.ndarray]) -> np.ndarray | str:
    """What comes of it, or the line that it ends with."""
    try:
        return what()
    except ToastError as error:
        return error.message
    except Exception as error:  # of MLX or mlx_lm: the same without native products, or a bug
        return f"{type(error).__name__}: {error}"[:100]


def differences(path: Path, prompt: list[int], tolerance: float) -> Iterator[str]:
    """What is off, mode by mode. Raises ToastError for a model that is refused."""

    def opened(native: str, **options: Any) -> Engine:
        return open_model(path, device_name="cpu", native=native, **options)

    def compare(name: str, found: Any, wanted: Any, limit: float) -> Iterator[str]:
        lines = [line for line in (found, wanted) if isinstance(line, str)]
        if not lines:
            off = np.abs(found - wanted).max() / np.abs(wanted).max()
            if not off <= limit:  # nor NaN
                yield f"{name}: {off:.1e}"
        elif lines != [lines[0]] * 2 and "it has no experts" not in lines[0]:
            yield f"{name}: {' / '.join(lines)}"

    plain, own = answer(opened("off"), prompt), opened("require")
    for name, options in SAME.items():
        found = outcome(lambda o=options: answer(opened("require", **o) if o else own, prompt))
        yield from compare(name, found, plain, tolerance)
    for chunk in (1, 5):
        found = outcome(lambda c=chunk: answer(own, prompt, c))
        yield from compare(f"chunks of {chunk}", found, plain, tolerance)
    for name, (options, limit) in OWN.items():
        found, wanted = (
            outcome(lambda n=native, o=options: answer(opened(n, **o), prompt))
            for native in ("require", "off")
        )
        yield from compare(name, found, wanted, max(limit, tolerance))
    if can_batch(own):
        found = outcome(lambda: together(own, prompt))
        yield from compare("three together", found, plain[1:], tolerance)


def main() -> int:
    """A line for each architecture; 1 where one of them is not as it should be."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--length", type=int, default=24, help="tokens of the prompt")
    parser.add_argument("--bits", type=int, help="pack the weights in so many bits")
    parser.add_argument("names", nargs="*", metavar="NAME")
    options = parser.parse_args()
    if unknown := set(options.names) - set(NAMES):
        parser.error(f"not recorded: {', '.join(sorted(unknown))}")
    prompt = [3 + (37 * n + 5) % (VOCAB - 3) for n in range(options.length)]
    tolerance, failed = 3e-2 if options.bits else 5e-4, 0
    for name in options.names or NAMES:
        with tempfile.TemporaryDirectory() as folder:
            try:
                path = checkpoint(Path(folder), name, options.bits)
                said = list(differences(path, prompt, tolerance))
            except ToastError as error:
                print(f"{name}: left out: {error.message}"[:120])
                continue
        print(f"{name}: {'; '.join(said) or 'ok'}", flush=True)
        failed += bool(said)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
