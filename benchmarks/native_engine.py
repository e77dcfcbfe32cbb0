"""A worker (workers.py) that runs toastkit or mlx_lm on the CPU.

    python benchmarks/native_engine.py native|off|mlx_lm CHECKPOINT [KV_BITS]

native, off: toastkit with its native products, or without; KV_BITS as of --kv-bits. mlx_lm: as it
is, but in float32: on a CPU it is slower by a multiple in the 16 bits of the checkpoint. All take
the same steps: the next one's graph is built while one is computed.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from native_models import bytes_read
from workers import serve, steps_within

FIRST = 5  # token of a prompt
BLOCK = 256  # positions
CONTEXT = 16  # positions of states before they step together


class Runner:
    """prefill: a prompt's last logits (vocab,), read into a cache. step: logits (vocab,) after a
    token, lazy."""

    model: Any
    new_cache: Callable[[], list]

    def prefill(self, ids: list[int], cache: list) -> mx.array:
        raise NotImplementedError

    def step(self, token: mx.array, cache: list) -> mx.array:
        raise NotImplementedError


class Ours(Runner):
    def __init__(self, path: str, native: str, kv_bits: int | None):
        from toastkit.engine.opening import open_engine
        from toastkit.model.locate import locate

        files = locate(path)
        self._engine = open_engine(files, device_name="cpu", native=native, kv_bits=kv_bits)
        self.model, self.new_cache = self._engine.model, self._engine.new_cache

    def prefill(self, ids: list[int], cache: list) -> mx.array:
        return self._engine.prefill(ids, cache)

    def step(self, token: mx.array, cache: list) -> mx.array:
        return self._engine.step(token, cache)

    def together(self, rows: float, count: float) -> float:
        """Tokens a second of all, of so many states that take `count` steps together."""
        from toastkit.engine.batch import Batch, can_be_apart
        from toastkit.engine.state import ModelState

        states = [ModelState(self.new_cache()) for _ in range(int(rows))]
        for row, state in enumerate(states):
            state.logits = self.prefill([FIRST + row] * CONTEXT, state.cache)
        batch = Batch(self._engine, can_be_apart(self._engine))
        batch.join(states)

        def step() -> None:
            tokens = mx.argmax(mx.stack([state.logits for state in states]), axis=-1).tolist()
            batch.step(tokens)
            mx.eval([state.logits for state in states])

        step()
        start = time.perf_counter()
        for _ in range(int(count)):
            step()
        return rows * count / (time.perf_counter() - start)


class Theirs(Runner):
    def __init__(self, path: str):
        from mlx_lm.models.cache import make_prompt_cache
        from mlx_lm.utils import load_model

        mx.set_default_device(mx.cpu)
        self.model = load_model(Path(path))[0]
        self.model.set_dtype(mx.float32)
        mx.eval(self.model.parameters())
        self.new_cache = lambda: make_prompt_cache(self.model)

    def prefill(self, ids: list[int], cache: list) -> mx.array:
        self.model(mx.array([ids[:-1]]), cache=cache)  # mlx_lm.generate reads in this way too
        mx.eval([layer.state for layer in cache])
        return self.step(mx.array(ids[-1]), cache)

    def step(self, token: mx.array, cache: list) -> mx.array:
        return self.model(token.reshape(1, 1), cache=cache)[0, -1]


def functions(runner: Runner, config: dict[str, Any]) -> dict[str, Callable[..., Any]]:
    """What can be asked."""
    begun: list[Any] = []  # a token and its cache

    def ready(context: float) -> tuple[mx.array, list]:
        """The first token after a prompt, and its cache."""
        cache = runner.new_cache()
        token = mx.argmax(runner.prefill([FIRST] * int(context), cache))
        mx.eval(token)
        return token, cache

    def decode(context: float, count: float) -> float:
        """Tokens a second."""
        token, cache = ready(context)
        token = mx.argmax(runner.step(token, cache))
        token.item()
        start = time.perf_counter()
        for _ in range(int(count)):
            following = mx.argmax(runner.step(token, cache))
            mx.async_eval(following)
            token.item()
            token = following
        token.item()
        return count / (time.perf_counter() - start)

    def begin(context: float) -> None:
        """Reads a prompt to go on from."""
        begun[:] = ready(context)
        go(0)

    def go(seconds: float) -> float:
        """Tokens a second, taken for so long after `begin`."""

        def step() -> None:
            begun[0] = mx.argmax(runner.step(begun[0], begun[1]))
            begun[0].item()

        if not seconds:
            step()
        return steps_within(seconds, step)

    def prefill(count: float) -> float:
        """Tokens a second."""
        ids = [FIRST + 7 * n % 4000 for n in range(int(count))]
        start = time.perf_counter()
        mx.eval(runner.prefill(ids, runner.new_cache()))
        return count / (time.perf_counter() - start)

    def after(context: float, count: float) -> list[float]:
        """Seconds a token after a context of keys and values that are random, the same in every
        block of 256, and the cache's bytes."""
        _, cache = ready(2)
        for layer in cache:
            keys, _ = layer.keys_and_values()
            _, heads, _, width = keys.shape
            block = mx.random.normal((1, heads, 1, BLOCK, width)).astype(keys.dtype)
            more = mx.repeat(block, -(-int(context) // BLOCK), axis=2)
            more = more.reshape(1, heads, -1, width)[:, :, : int(context)]
            mx.eval(layer.update_and_fetch(more, more))
        mx.clear_cache()
        token, times = mx.array(FIRST, mx.uint32), []
        for _ in range(2 + int(count)):
            start = time.perf_counter()
            mx.eval(runner.step(token, cache))
            times.append(time.perf_counter() - start)
        return [median(times[2:]), sum(layer.nbytes for layer in cache)]

    def size() -> int:
        """Bytes of weights on the device that a token reads."""
        return bytes_read(dict(tree_flatten(runner.model.parameters())), config)

    return {
        "decode": decode, "begin": begin, "go": go, "prefill": prefill, "after": after,
        "size": size, **({"together": runner.together} if isinstance(runner, Ours) else {}),
    }  # fmt: skip


def main() -> None:
    how, path, *bits = sys.argv[1:]
    settings = {"native": "require", "off": "off"}
    kv_bits = int(bits[0]) if bits else None
    runner = Theirs(path) if how == "mlx_lm" else Ours(path, settings[how], kv_bits)
    serve(functions(runner, json.loads((Path(path) / "config.json").read_text())))


if __name__ == "__main__":
    main()
