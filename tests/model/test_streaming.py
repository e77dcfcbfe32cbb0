"""Layers that come and go: the results of a model that stays, to the bit; nothing left behind; each
read once a pass, in order; a pass that fails leaves everything as it was."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.model.checkpoints import (
    SIZES,
    baked,
    logits_after,
    open_model,
    open_store,
    read,
    tied_llama,
    write_random,
)
from tests.model.published import write_published
from toastkit.engine.batch import Batch
from toastkit.engine.engine import Engine
from toastkit.engine.state import ModelState
from toastkit.errors import UsageError
from toastkit.gears.gear_options import GearOptions
from toastkit.gears.gear_policy import GearPolicy
from toastkit.holdings.policy import NO_WISH, Wish
from toastkit.native.starting import NativeOptions
from toastkit.residency.residency_options import PLACEMENTS, ResidencyOptions
from toastkit.residency.residency_policy import ResidencyPolicy
from toastkit.session.directory import Session

PROMPT = [5 + 7 * n % 4000 for n in range(24)]
NEXT = [11, 12, 13, 14]
MIB = 1 << 20
MODEL = "a" * 64  # the fingerprint that sessions are kept for


def streaming(
    kind: str = "layers",
    amount: float = 0,
    path: Path | str = "crumb",
    native: str = "auto",
    **rest: Any,
) -> Engine:
    """An engine of which so much stays. native: "off" has a pass for a prompt's last token."""
    gears, notify = rest.pop("gears", None), rest.pop("notify", None)
    options = ResidencyOptions(kind, amount, **rest)
    return open_model(path, residency=options, gear_options=gears, native=native, notify=notify)


def answer(engine: Engine, before: Callable[[int], Wish] = lambda n: NO_WISH) -> list[mx.array]:
    """Logits after the prompt and after each token that follows."""
    return logits_after(engine, read(engine, PROMPT), NEXT, before)


def alike(a: list[mx.array], b: list[mx.array]) -> bool:
    return len(a) == len(b) and all(mx.array_equal(x, y).item() for x, y in zip(a, b))


def layer_bytes(engine: Engine, index: int) -> int:
    return engine.ledger.of(f"layer.{index}")


@pytest.fixture(scope="module")
def expected(crumb) -> list[mx.array]:
    return answer(crumb)


@pytest.fixture(scope="module")
def baked_gears(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model with two gears stored."""
    path = tmp_path_factory.mktemp("baked") / "crumb.toast"
    return baked("crumb", path, gears=("low", "mid"))


@pytest.mark.parametrize(("count", "placement"), list(zip((0, 3, 5, 8), cycle(PLACEMENTS))))
def test_results_are_those_of_a_model_that_stays(expected, count: int, placement: str) -> None:
    engine = streaming("layers", count, placement=placement)
    assert alike(answer(engine), expected)
    assert len(engine.residency.resident) == count
    here = [index for index in range(8) if layer_bytes(engine, index)]
    assert here == sorted(engine.residency.resident)
    engine.close()
    assert engine.ledger.of("reading") == 0


def soon(holds: Callable[[], bool]) -> bool:
    """Whether something comes to hold, because reader threads are at work."""
    for _ in range(100):
        if holds():
            return True
        time.sleep(0.02)
    return False


def agree(engine: Engine, base: int) -> bool:
    """The ledger and MLX, but for `base` bytes."""
    total = engine.ledger.total
    return soon(lambda: abs(mx.get_active_memory() - base - total()) < MIB // 4)


def test_what_was_dropped_has_left(crumb_by_mlx) -> None:
    """The account, MLX's figures and the module tree agree before, between and after."""
    answer(crumb_by_mlx)  # what MLX keeps for itself is there by now
    gc.collect()
    base = mx.get_active_memory()
    engine = streaming("layers", 2, placement="first", native="off")
    sizes = engine.residency.sizes
    state = read(engine, PROMPT)
    for token in NEXT:
        engine.consume(state, token)
        mx.eval(state.logits)
        assert agree(engine, base + state.logits.nbytes)
    resident = sizes.outside + sum(sizes.layers[:2])
    window = engine.ledger.of("reading")
    assert window <= 5 * max(sizes.layers)  # read ahead, and memory to read into
    held = resident + engine.ledger.of("cache")
    assert soon(lambda: engine.ledger.total() == held + engine.ledger.of("reading"))
    engine.holdings.streams.forget_ahead()
    del state
    gc.collect()
    assert soon(lambda: engine.ledger.total() == resident)  # what has begun is read to its end
    assert agree(engine, base)
    engine.close()


def test_a_pass_reads_each_absent_layer_once_and_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = streaming("layers", 3, placement="first", native="off")
    store = engine.holdings.store
    of_layer = [sum(map(store.nbytes, store.layer_names(i))) for i in range(8)]
    ran: list[int] = []
    bring = type(engine.holdings).bring
    monkeypatch.setattr(
        type(engine.holdings),
        "bring",
        lambda self, reading: (ran.append(reading.moves[0][0].layer), bring(self, reading))[1],
    )
    opened = store.reader.bytes_read
    state = read(engine, PROMPT)  # two chunks, and the last token
    ahead = store.reader.bytes_read - opened - 3 * sum(of_layer[3:])
    assert ran == [*range(3, 8)] * 3
    assert 0 <= ahead <= 4 * max(of_layer)  # of the pass that comes
    for token in NEXT:
        engine.consume(state, token)
    assert ran == [*range(3, 8)] * 7
    engine.holdings.streams.forget_ahead()
    assert store.reader.bytes_read - opened <= 7 * sum(of_layer[3:]) + 4 * max(of_layer)
    report = engine.residency.report()
    assert report["passes"] == 35 and report["resident"] == 3 and report["layers"] == 8
    engine.close()


def test_streamed_layers_have_gears(tmp_path: Path) -> None:
    """A baked low gear is read instead of the originals; gears change in the middle."""
    path = tmp_path / "baked.toast"
    baked(write_published(tmp_path / "llama", "llama"), path, gears=("low",))
    options = GearOptions("auto", scope="all")
    gears = ["high", "low", "low", "high"]
    resident = open_model(path, gear_options=options, native="auto")
    wanted = answer(resident, lambda n: Wish(gears[n]))
    engine = streaming(path=path, gears=options)
    assert alike(answer(engine, lambda n: Wish(gears[n])), wanted)

    def token_bytes(gear: str) -> int:
        engine.shift(gear)
        engine.holdings.streams.forget_ahead()
        state = ModelState(engine.new_cache())
        engine.consume(state, 5, Wish(gear))
        before = engine.holdings.store.reader.bytes_read
        engine.consume(state, 5, Wish(gear))
        mx.eval(state.logits)
        engine.holdings.streams.forget_ahead()
        return engine.holdings.store.reader.bytes_read - before

    assert token_bytes("low") < 0.45 * token_bytes("high")  # of 16 bits, norms and scales included
    resident.close()
    engine.close()


def test_gears_have_all_bits_of_the_file(tmp_path: Path) -> None:
    """A matrix that is on the device with fewer is read for them, as a streamed one is."""
    path = tied_llama(tmp_path / "llama")  # float16
    options, found = GearOptions("low", "all"), []
    for resident in ("all", 0):
        residency = None if resident == "all" else ResidencyOptions("layers", 0)
        engine = open_model(path, dtype="bfloat16", gear_options=options, residency=residency)
        state = read(engine, PROMPT, None)  # in high gear
        engine.consume(state, 9)
        found.append(np.array(state.logits))
        engine.close()
    assert np.array_equal(*found)


def test_layers_that_run_in_parts_stay(tmp_path: Path) -> None:
    """IQuestLoopCoder runs the attention and the network of its layers, in two rounds."""
    path, said = write_random(tmp_path / "m", {"model_type": "iquestloopcoder", **SIZES}), []
    engine = streaming(path=path, notify=said.append)
    engine.residency.memory_warning()
    assert alike(answer(engine), answer(open_model(path, native="auto")))
    assert engine.residency.sizes.layers == (0, 0)
    assert engine.residency.resident == {0, 1} and not engine.residency.shed
    assert said == [f"warning: --resident 0: no layer of {path} can be streamed"]
    streaming("layers", 2, path=path, notify=pytest.fail)


# ------------------------------------------------------------------------------------ how many stay


def test_a_budget_holds_everything() -> None:
    """From the least that will do: the account never passes it. Below that: the number."""
    policy = streaming().residency
    sizes, least = policy.sizes, policy.least
    whole = sizes.outside + sum(sizes.layers)
    for budget in (least, (least + whole) // 2, whole + 8 * MIB):
        engine = streaming("bytes", budget)
        state = read(engine, PROMPT)
        for token in NEXT:
            engine.consume(state, token)
            assert engine.ledger.total() <= budget
        if budget == whole + 8 * MIB:
            assert len(engine.residency.resident) == engine.residency.layers
        engine.close()
    with pytest.raises(UsageError, match=r"needs (\d+)M at least") as caught:
        streaming("bytes", least // 2)
    assert int(caught.value.message.split("needs ")[1].split("M")[0]) == -(-least // MIB)


@pytest.mark.parametrize(("mode", "native"), [("low", "auto"), ("mid", "off"), ("auto", "auto")])
@pytest.mark.parametrize("stored", [True, False])
def test_layers_count_as_what_they_take_in_a_fixed_gear(
    mode: str, native: str, stored: bool, baked_gears: Path
) -> None:
    """All stay in steps where some do for a prompt, which is read in high gear. Never, nor within
    a pass or a shift, does the account pass the budget; no result changes."""
    path, options = baked_gears if stored else "crumb", GearOptions(mode, scope="all")
    gears = ["low", "mid", "high", "low"]
    staying = open_model(path, native=native, gear_options=options)
    wanted = answer(staying, lambda n: Wish(gears[n]))
    sizes = streaming().residency.sizes
    budget = sizes.outside + sum(sizes.layers[:3]) + 2 * max(sizes.layers) + sizes.cache_fixed
    budget += int(sizes.cache_per_token * 1024)
    rest = ResidencyOptions("bytes", budget)
    engine = open_model(path, native=native, gear_options=options, residency=rest)
    add, totals, counts = engine.ledger.add, [0], []
    seen = lambda: totals.append(engine.ledger.total())  # noqa: E731
    engine.ledger.add = lambda owner, count: (add(owner, count), seen())[0]  # type: ignore
    engine.holdings.streams.watch = lambda index, ran: seen()
    for _ in range(2):
        read(engine, PROMPT)
        counts.append(len(engine.residency.resident))
        assert alike(answer(engine, lambda n: Wish(gears[n])), wanted)
        counts.append(len(engine.residency.resident))
    assert counts == ([3, 3, 3, 3] if mode == "auto" else [3, 8, 3, 8])
    assert max(totals) <= budget
    report = engine.residency.report()
    assert (report["shed"], report["grown"]) == (0, 0)
    engine.close()
    staying.close()


def test_layers_give_way_to_caches(crumb) -> None:
    """A context that outgrows what was kept for it: results stay, the budget too. The next run has
    the layers again. That no layer is left to go is told once."""
    sizes = streaming().residency.sizes
    budget = sizes.outside + sum(sizes.layers[:4]) + 2 * max(sizes.layers) + sizes.cache_fixed
    budget += int(sizes.cache_per_token * 1024) + MIB
    engine = streaming("bytes", budget)
    first = len(engine.residency.resident)
    states = [read(engine, PROMPT) for _ in range(8)]
    wanted = answer(crumb)[1]
    for state in states:
        engine.consume(state, NEXT[0])
        assert mx.array_equal(state.logits, wanted).item()
    assert engine.residency.report()["shed"] > 0 and len(engine.residency.resident) < first
    assert engine.ledger.total() <= budget
    states.clear()
    del state
    engine.begin_run()
    read(engine, PROMPT)
    assert len(engine.residency.resident) == first and engine.ledger.total() <= budget
    engine.close()
    told: list[str] = []
    least = streaming("bytes", engine.residency.least, notify=told.append)
    states = [read(least, PROMPT) for _ in range(3)]
    assert len(told) == 1 and "the context has outgrown it" in told[0]


def test_what_a_budget_leaves_is_for_other_forms_if_all_layers_stay() -> None:
    assert streaming("bytes", 1 << 30).holdings.budget > 1 << 28
    assert streaming("bytes", 28 << 20).holdings.budget == 0


class Readings:
    """Bytes of available memory, as somebody says."""

    def __init__(self, count: int):
        self.count = count

    def __call__(self) -> int:
        return self.count


def test_layers_follow_memory(expected, monkeypatch: pytest.MonkeyPatch) -> None:
    """They go when memory is short, all at a warning, and come back; never a result changes."""
    from toastkit.holdings import pressure

    monkeypatch.setattr(pressure, "CHECK_TOKENS", 1)
    readings = Readings(4 << 30)
    policy = ResidencyPolicy(ResidencyOptions("auto"), readings)
    engine = Engine(open_store("crumb"), [policy], dtype="float32", native=NativeOptions("auto"))
    counts, state, tokens = [], read(engine, PROMPT), iter(NEXT * 20)

    def run(steps: int) -> int:
        for _ in range(steps):
            engine.consume(state, next(tokens))
            counts.append(len(policy.resident))
        return counts[-1]

    assert run(2) == 8
    readings.count = 200 * MIB
    assert run(1) == 6 and run(1) == 4  # a quarter, then a quarter of six
    readings.count = 4 << 30
    assert run(12) == 5  # one below where it was too much
    policy.memory_warning()
    assert run(1) == 0
    assert run(10) <= 4
    report = policy.report()
    assert report["shed"] >= 8 and report["grown"] >= 1
    state = read(engine, PROMPT)
    for n, token in enumerate(NEXT):
        engine.consume(state, token)
        assert mx.array_equal(state.logits, expected[n + 1]).item()
    engine.close()


def test_layers_follow_memory_in_a_gear() -> None:
    """More stay in steps; and none comes back with them while memory is short."""
    from toastkit.holdings.pressure import LOW

    gears = GearPolicy(GearOptions("low", scope="all"))
    policy = ResidencyPolicy(ResidencyOptions("auto"), lambda: free(), steps=gears.step_forms)
    engine = Engine(
        open_store("crumb"), [gears, policy], dtype="float32", native=NativeOptions("auto")
    )
    sizes = policy.sizes
    room = LOW + sizes.outside + 5 * max(sizes.layers) + sizes.cache_fixed + 3 * MIB
    free = lambda: room - engine.ledger.total()  # noqa: E731
    for few, many in ((3, 8), (3, 8), (0, 0)):
        state = ModelState(engine.new_cache())
        if not many:
            policy.memory_warning()
        for _ in engine.reading(state, PROMPT):
            assert len(policy.resident) == few
        for token in NEXT:
            engine.consume(state, token)
            assert len(policy.resident) == many
    engine.close()


# ------------------------------------------------------------------------------------- together


def test_states_step_together_over_streamed_layers(crumb_by_mlx) -> None:
    """One reading of the layers for all of them."""
    results = []
    for engine in (crumb_by_mlx, streaming(native="off")):
        states = [read(engine, PROMPT), ModelState(engine.new_cache())]
        engine.consume(states[1], 17)
        batch = Batch(engine)
        batch.join(states)
        for token in NEXT:
            batch.step([token, token + 1])
        mx.eval([state.logits for state in states])
        results.append([state.logits for state in states])
    assert alike(*results)
    assert engine.residency.report()["passes"] == 8 * (3 + 1 + len(NEXT))
    engine.close()


def test_a_session_goes_on_with_other_layers(crumb, expected, tmp_path: Path) -> None:
    """Kept by a model that streams, restored by one that does not, and the other way round."""
    for n, (writer, reader) in enumerate(((streaming(), crumb), (crumb, streaming("layers", 4)))):
        session = Session.open(tmp_path / str(n), MODEL)
        state = read(writer, PROMPT)
        state.session = session
        writer.consume(state, NEXT[0])
        state.commit()
        back, count = reader.restore(session, [*PROMPT, NEXT[0]])
        assert count == len(PROMPT) + 1
        reader.consume(back, NEXT[1])
        assert mx.array_equal(back.logits, expected[2]).item()
        state.close()
