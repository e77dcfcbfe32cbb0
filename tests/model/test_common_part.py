"""What comes before the first router runs once in a step that falls back, and what comes of it is,
to the bit, what two whole passes would give."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import ArraysCache, CacheList

from tests.conftest import examples
from tests.model.checkpoints import SIZES, open_model, write_random
from tests.model.moe_engines import MIDDLE, Made, arrays, prompt_of, read_once, same
from tests.model.reference import OLD_MLX_LM
from tests.model.test_optimistic import hopeful, spoil
from tests.model.test_routers import RECORDED, SHARED_SETTINGS
from tests.model.test_streaming_failures import Disk
from tests.model.test_transformers import write_recorded
from toastkit.engine.batch import Batch
from toastkit.engine.engine import Engine
from toastkit.engine.savepoints import redo_functions, roll_back, take_savepoint
from toastkit.errors import IOFailure
from toastkit.experts.common_part import CommonPart, Recording
from toastkit.experts.experts_options import ExpertsOptions, SlotOptions
from toastkit.experts.routers import MoEBlock
from toastkit.holdings.derived import derived
from toastkit.residency.residency_options import ResidencyOptions

TOKENS = (5, 9)
SHARED = ("shared_experts", "shared_expert", "shared_mlp")  # what all tokens go through
SLOTS = SlotOptions("slots", 5, "off")


class _Counted:
    """A module whose calls are written down when they return, by its path."""

    def __call__(self, *args: Any, **rest: Any) -> Any:
        log, path = vars(self)["_log"]
        if path.endswith("(block)"):
            log.append(path)
        out = super().__call__(*args, **rest)
        log.append(path)
        return out


@contextmanager
def calls(engine: Engine) -> Iterator[list[str]]:
    """Those of all modules up to the layer of the first router, in the order in which they return;
    that of its block, `(block)`, when it is called, too. (Of the router, where the block is the
    layer.)"""
    block, log = engine.experts.blocks[0], []
    layers = engine.model.layers[: block.layer + 1]
    first = block.module.router if block.module is layers[-1] else block.module
    changed = [(m, p, n) for n, layer in enumerate(layers) for p, m in layer.named_modules()]
    own = [type(module) for module, _, _ in changed]
    for (module, path, n), cls in zip(changed, own):
        name = "(block)" if module is first else path
        module.__class__ = derived(_Counted, cls)
        vars(module)["_log"] = log, f"{n}.{name}"
    yield log
    for (module, _, _), cls in zip(changed, own):
        module.__class__ = cls
        del vars(module)["_log"]


def common_of(engine: Engine) -> tuple[Counter[str], set[str]]:
    """The calls that return before the first router in a pass, and the names of the parts of its
    block that everything goes through."""
    state, block = read_once(engine, prompt_of(engine, 4)), engine.experts.blocks[0]
    with calls(engine) as log:
        engine.step(3, state.cache)
    layer = engine.model.layers[block.layer]
    alone = {f"{block.layer}.{name}" for name, m in layer.named_modules() if not m.children()}
    alone = {path for path in alone if path.count(".") == 1}  # norms: not worth it
    before = [path for path in log[: log.index(f"{block.layer}.(block)")] if path not in alone]
    shared = next((block.module[name] for name in SHARED if name in block.module), None)
    inside = {f"{block.layer}.{path}" for path, m in layer.named_modules() if m is shared}
    assert before and len(inside) == (shared is not None)
    return Counter(before), inside


def check(engine: Engine, plain: Engine, ahead: bool, kept: bool = True) -> None:
    """Steps that all fall back are those of the big model, and compute once what is common."""
    common, shared = common_of(plain)
    state, big = (read_once(one, prompt_of(one)) for one in (engine, plain))
    kinds = [type(module) for module in engine.model.modules()]
    for token in TOKENS:
        with calls(engine) as log:
            if ahead:
                engine.look_ahead(state)
            engine.consume(state, token)
        plain.consume(big, token)
        assert state.passed.fallback
        assert np.array_equal(np.array(state.logits), np.array(big.logits))
        assert same(arrays(state.cache), arrays(big.cache))
        found, times = Counter(log), 1 if kept else 2
        assert {path: found[path] for path in common} == {p: times * n for p, n in common.items()}
        assert all(found[path] == times for path in shared)
        assert found[f"{engine.experts.blocks[0].layer}.(block)"] == 4  # two calls
        assert [type(module) for module in engine.model.modules()] == kinds


@pytest.mark.parametrize(("name", "ahead"), [("qwen3_moe_quantised", True), ("qwen3_next", False)])
def test_it_is_computed_once(made: Made, name: str, ahead: bool) -> None:
    """Of packed weights; and with nothing looked ahead to."""
    check(made(name, "mobile", 1.0), made(name, "big"), ahead)


def both(path: Path) -> list[Engine]:
    """MoBiLE, all of whose steps fall back, and the big model."""
    options = ExpertsOptions("mobile", 1.0), ExpertsOptions("big")
    return [open_model(path, device_name="cpu", experts=chosen) for chosen in options]


@pytest.mark.skipif(OLD_MLX_LM, reason="what is recorded holds for a newer mlx_lm")
@pytest.mark.parametrize("name", RECORDED)
def test_of_every_architecture(name: str, tmp_path: Path) -> None:
    check(*both(write_recorded(tmp_path / "m", name)), ahead=True)


@pytest.mark.skipif(OLD_MLX_LM, reason="these architectures are newer")
@pytest.mark.parametrize("name", SHARED_SETTINGS)
def test_of_those_that_none_has_recorded(name: str, tmp_path: Path) -> None:
    """One whose block is the decoder layer itself, and one that keeps two kinds of states."""
    config = {"model_type": name, **SIZES, **SHARED_SETTINGS[name]}
    check(*both(write_random(tmp_path / "m", config)), ahead=True)


# --------------------------------------------------------------------------------- with the others


@pytest.mark.parametrize("name", ["qwen2_moe", "qwen3_next", "gpt_oss", "deepseek_v3"])
@settings(max_examples=examples(3), deadline=None)
@given(data=st.data())
def test_experts_in_slots(made: Made, name: str, data: st.DataObject) -> None:
    """Whichever are there, careful or optimistic, what either pass misses: to the bit, and what is
    common is computed once a little pass."""
    engine, plain = made(name, "mobile", 1.0, expert_slots=SLOTS), made(name, "big")
    common, _ = common_of(plain)
    state, big = (read_once(one, prompt_of(one)) for one in (engine, plain))
    hopeful(engine).trusts = data.draw(st.booleans(), label="optimistic")
    counts = engine.holdings.slots.counts
    for token in data.draw(st.lists(st.integers(0, 300), min_size=1, max_size=5), label="tokens"):
        lost = data.draw(st.sets(st.tuples(st.integers(0, 3), st.integers(0, 7))), label="lost")
        spoil(engine, lambda place, expert, lost=lost: (place, expert) in lost)
        before, looked = counts.retried, []
        with calls(engine) as log, pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine.experts, "again", noted(engine, looked))
            engine.consume(state, token)
        plain.consume(big, token)
        assert np.array_equal(np.array(state.logits), np.array(big.logits))
        found = Counter(log)
        little = 1 + looked[0] - before
        assert {path: found[path] for path in common} == {p: little * n for p, n in common.items()}
    assert same(arrays(state.cache), arrays(big.cache))


def noted(engine: Engine, looked: list[int]) -> Any:
    """experts.again, which notes how many steps were retried before the second pass."""
    again = engine.experts.again

    def noting(*rows: Any) -> Any:
        looked.append(engine.holdings.slots.counts.retried)
        return again(*rows)

    return noting


@pytest.mark.parametrize("name", ["qwen3_next", "gpt_oss", "qwen2_moe"])
def test_a_second_pass_that_fails_leaves_the_state_as_it_was(
    made: Made, name: str, disk: Disk
) -> None:
    """After what is kept took its place."""
    engine, plain = made(name, "mobile", 1.0, expert_slots=SLOTS), made(name, "big")
    state, twin, big = (read_once(one, prompt_of(one)) for one in (engine, engine, plain))
    failed = 0
    with calls(engine) as log:
        for n in range(0, 200, 3):
            engine.holdings.slots.forget_ahead()
            spoil(engine, lambda *_: True)
            disk.left = n
            try:
                engine.consume(state, 7)
            except IOFailure:
                second = log.count(f"{engine.experts.blocks[0].layer}.(block)") > 2
                failed += second
                assert same(arrays(state.cache), arrays(twin.cache)) and state.passed is None
                log.clear()
            else:
                break
            finally:
                disk.left = None
    assert failed and state.passed.fallback
    plain.consume(big, 7)
    assert np.array_equal(np.array(state.logits), np.array(big.logits))
    assert same(arrays(state.cache), arrays(big.cache))


def test_layers_that_come_and_go_run_twice(made: Made) -> None:
    """Where one of them comes before the first router, or has it; not where it comes later."""
    for placement, kept in (("last", False), ("first", True)):
        some = ResidencyOptions("layers", 1, placement=placement)
        engine = made("qwen3_next", "mobile", 1.0, residency=some)
        engine.load()
        assert (0 in engine.holdings.streams.layers) != kept
        check(engine, made("qwen3_next", "big"), ahead=False, kept=kept)


@pytest.mark.skipif(OLD_MLX_LM, reason="the old mlx_lm has other batched caches")
@pytest.mark.parametrize("name", ["qwen3_next", "gpt_oss", "deepseek_v3", "qwen2_moe"])
def test_a_batch(made: Made, name: str) -> None:
    """All of whose rows fall back; of which some do, it is computed again for these. (That states
    and logits are those of the big model: test_batch_fallbacks.py.)"""
    common, _ = common_of(made(name, "big"))
    for gamma in (1.0, MIDDLE):
        engine = made(name, "mobile", gamma)
        batch = Batch(engine)
        batch.join([read_once(engine, prompt_of(engine, n)) for n in (28, 9)])
        for step in range(4):
            with calls(engine) as log:
                batch.step([5 + 97 * step, 16 + 97 * step])
            fell = [state.passed.fallback for state in batch.members]
            times = 2 if any(fell) and not all(fell) else 1
            found = Counter(log)
            assert {p: found[p] for p in common} == {p: times * n for p, n in common.items()}
            assert all(fell) or gamma < 1


# ------------------------------------------------------------------- architectures built otherwise


class Sum(nn.Module):
    """Adds up what it sees; counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Identity()

    def __call__(self, x: mx.array, cache: Any = None, seen: Any = None) -> Any:
        vars(self)["calls"] = vars(self).get("calls", 0) + 1
        if cache is not None:
            cache[0] = x if cache[0] is None else cache[0] + x
        if seen is not None:
            seen["x"] = x
        return 2 * x + (0 if cache is None else cache[0])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.top_k, self.shared = 2, Sum()

    def __call__(self, x: mx.array) -> mx.array:
        return self.top_k * x + self.shared(x)


class Layer(nn.Module):
    """In one of several ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.one, self.two, self.mlp, self.way = Sum(), Sum(), Block(), way

    def __call__(self, x: mx.array, cache: Any) -> mx.array:
        way, seen = self.way, {}
        x = x + self.one(x, cache.caches[0], *([seen] if way == "writes" else []))
        if way == "writes":
            x = x + seen["x"]
        if way == "in place":
            y = self.two(x, cache.caches[1])
            y[...] = y + 1
            x = x * y
        elif way != "afterwards":
            x = x + self.two(x, cache.caches[0 if way == "one cache" else 1])
        if way == "twice":
            x = x + self.one(x)
        x = x + self.mlp(x)
        return x + self.two(x, cache.caches[1]) if way == "afterwards" else x


class Toy(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.layers = [Layer(way)]

    def __call__(self, x: mx.array, caches: list) -> mx.array:
        return self.layers[0](x, caches[0])


# How often the parts of a layer are called in both passes: one, two, shared.
WAYS = {
    "plainly": (1, 1, 1), "twice": (4, 1, 1), "writes": (2, 1, 1), "one cache": (2, 2, 1),
    "in place": (1, 1, 1), "afterwards": (1, 2, 1),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_what_cannot_be_kept_is_computed_again(way: str) -> None:
    model, plain = Toy(way), Toy(way)
    layer = model.layers[0]
    block = MoEBlock(0, layer.mlp, "top_k", 2)
    common = CommonPart(model, [block], SimpleNamespace(layers=[]))
    caches, theirs = ([CacheList(ArraysCache(1), ArraysCache(1))] for _ in range(2))
    for n in range(3):
        x, kept, point = mx.array([n + 1.0]), Recording(), take_savepoint(caches, n, one_step=True)
        for part in (layer.one, layer.two, layer.mlp.shared):
            vars(part)["calls"] = 0
        block.set_k(1)
        with common.recorded(kept):
            little = model(x, caches)
        mx.eval(little)
        kept.evaluate()
        kept.forward = redo_functions(caches, kept.caches, point)
        roll_back(caches, n + 1, point)
        block.set_k(2)
        with common.replayed(kept):
            found = model(x, caches)
        wanted = plain(x, theirs)
        assert found.tolist() == wanted.tolist() != little.tolist()
        held = [[part[0].tolist() for part in own[0].caches if part[0]] for own in (caches, theirs)]
        assert held[0] == held[1]
        counts = tuple(vars(m)["calls"] for m in (layer.one, layer.two, layer.mlp.shared))
        assert counts == WAYS[way]


def test_a_block_that_is_not_in_its_layer_keeps_nothing() -> None:
    model = Toy("plainly")
    block = MoEBlock(0, Block(), "top_k", 2)
    common, kept = CommonPart(model, [block], SimpleNamespace(layers=[])), Recording()
    with common.recorded(kept):
        model(mx.ones(1), [CacheList(ArraysCache(1), ArraysCache(1))])
    assert not kept and not kept.caches


def test_nothing_is_noted_while_few_steps_fall_back() -> None:
    model = Toy("plainly")
    block = MoEBlock(0, model.layers[0].mlp, "top_k", 2)
    common = CommonPart(model, [block], SimpleNamespace(layers=[]))

    def keeps() -> bool:
        kept = Recording()
        with common.recorded(kept):
            model(mx.ones(1), [CacheList(ArraysCache(1), ArraysCache(1))])
        return bool(kept)

    found = []
    for ratio in (0.5, 0.0, 0.125, 0.5):  # of 48 steps each
        for n in range(48):
            common.note(ratio > 0 and n % round(1 / ratio) == 0)
        found.append(keeps())
    assert found == [True, False, False, True]
