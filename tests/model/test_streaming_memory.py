"""Models beside a real memory hog, in a real cgroup: layers, and experts, go before the system has
to swap or to kill, come back when there is room, and the answers are those of a model that stayed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cgroups import memory_group
from tests.model.checkpoints import read

MIB = 1 << 20
# Prints how many layers of one model stay after so many tokens, and how many experts of each layer
# of another; at the end the tokens.
MODEL = """
import os, sys
open(sys.argv[1], "w").write(str(os.getpid()))
import mlx.core as mx
from toastkit.engine.opening import open_engine
from toastkit.engine.state import ModelState
from toastkit.experts.experts_options import SlotOptions
from toastkit.holdings import pressure
from toastkit.model.locate import locate
from toastkit.residency.residency_options import ResidencyOptions
pressure.CHECK_TOKENS = 1
states = []
for rest in {"residency": ResidencyOptions("auto")}, {"expert_slots": SlotOptions()}:
    engine = open_engine(locate("crumb"), dtype="float32", native="auto", **rest)
    state = ModelState(engine.new_cache())
    for _ in engine.reading(state, [1, 2, 3]):
        pass
    states.append((engine, state))
for line in sys.stdin:
    for engine, state in states:
        for _ in range(int(line)):
            engine.consume(state, int(mx.argmax(state.logits).item()))
    layers, slots = (engine.policies[0] for engine, _ in states)
    print(len(layers.resident), slots.report()["slots"], flush=True)
assert states[0][1].tokens == states[1][1].tokens
print(*state.tokens, flush=True)
"""
HOG = """
import os, sys
open(sys.argv[1], "w").write(str(os.getpid()))
held = bytearray(b"x") * int(sys.argv[2])
print("there", flush=True)
sys.stdin.read()
"""


def child(code: str, *words: str) -> subprocess.Popen:
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, "-c", code, *words], stdin=pipe, stdout=pipe, stderr=pipe, text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )  # fmt: skip


def ask(model: subprocess.Popen, tokens: int) -> tuple[int, int]:
    """How many layers, and experts, stay after so many more tokens."""
    assert model.stdin is not None and model.stdout is not None
    model.stdin.write(f"{tokens}\n")
    model.stdin.flush()
    line = model.stdout.readline()
    if not line:
        errors = model.communicate()[1]
        if "PermissionError" in errors:
            pytest.skip("no process can be moved into the cgroup")
        raise AssertionError(f"exit {model.returncode}: {errors}")
    layers, experts = map(int, line.split())
    return layers, experts


@pytest.mark.skipif(sys.platform != "linux", reason="cgroups are Linux's")
def test_a_hog_comes_and_goes(crumb) -> None:
    with memory_group(1200 * MIB) as group:
        procs = str(group / "cgroup.procs")
        model = child(MODEL, procs)
        hog = None
        try:
            assert ask(model, 1) == (8, 16)
            hog = child(HOG, procs, str(850 * MIB))
            assert hog.stdout is not None and hog.stdout.readline() == "there\n"
            low = ask(model, 2)
            assert low[0] < 8 and low[1] < 16
            hog.communicate()
            back = ask(model, 10)
            for few, more, every in zip(low, back, (8, 16)):
                assert few < more < every
            assert model.stdin is not None
            out, err = model.communicate(timeout=60)
            assert model.returncode == 0, err
        finally:
            for process in (model, hog):
                if process is not None:
                    process.kill()
                    process.communicate()
    import mlx.core as mx

    state = read(crumb, [1, 2, 3])
    for _ in range(13):
        crumb.consume(state, int(mx.argmax(state.logits).item()))
    assert list(map(int, out.split())) == state.tokens
