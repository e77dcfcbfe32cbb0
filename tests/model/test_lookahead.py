"""A step looked ahead to and taken back leaves no trace; one that is run is the step itself."""

from __future__ import annotations

import pytest

mx = pytest.importorskip("mlx.core")

from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache  # noqa: E402

from tests.model.reference import PROMPTS  # noqa: E402
from toastkit.engine.lookahead import Lookahead, can_look_ahead  # noqa: E402

PROMPT = PROMPTS[2]

pytestmark = pytest.mark.skipif(not can_look_ahead(), reason="the device's memory is its own")


def test_a_run_step_is_the_step(crumb):
    one, two = crumb.new_cache(), crumb.new_cache()
    crumb.prefill(PROMPT["token_ids"], one)
    crumb.prefill(PROMPT["token_ids"], two)
    for token in PROMPT["greedy"][:6]:
        ahead = Lookahead(crumb, two).run(token)
        assert mx.array_equal(crumb.step(token, one), ahead)


def test_a_discarded_step_leaves_no_trace(crumb):
    one, two = crumb.new_cache(), crumb.new_cache()
    crumb.prefill(PROMPT["token_ids"], one)
    crumb.prefill(PROMPT["token_ids"], two)
    Lookahead(crumb, two).discard()
    for token in PROMPT["greedy"][:3]:
        Lookahead(crumb, two).discard()
        assert mx.array_equal(crumb.step(token, one), crumb.step(token, two))


class Recorder:
    """Stands for an engine: a step writes one row into every cache."""

    def step(self, token, cache):
        for layer in cache:
            _write(layer)
        return token.astype(mx.float32)


def _write(layer) -> None:
    if isinstance(layer, CacheList):
        for part in layer.caches:
            _write(part)
    elif isinstance(layer, ArraysCache):
        layer[0] = (layer[0] if layer[0] is not None else mx.zeros(3)) + 1
    else:
        row = mx.full((1, 2, 1, 4), float(layer.offset))
        layer.update_and_fetch(row, row)


def _contents(layer) -> list:
    if isinstance(layer, CacheList):
        return [x for part in layer.caches for x in _contents(part)]
    if isinstance(layer, ArraysCache):
        return [layer[0].tolist()]
    return [layer.offset, layer.keys[..., : layer.offset, :].tolist()]


@pytest.mark.parametrize("steps", [2, 9])
def test_every_kind_of_cache(steps: int):
    def caches() -> list:
        return [KVCache(), RotatingKVCache(max_size=4), ArraysCache(2),
                CacheList(ArraysCache(1), KVCache())]  # fmt: skip

    plain, tried = caches(), caches()
    for _ in range(steps):
        Recorder().step(mx.array(0), plain)
        Recorder().step(mx.array(0), tried)
        Lookahead(Recorder(), tried).discard()
    Recorder().step(mx.array(0), plain)
    Lookahead(Recorder(), tried).run(0)
    assert [_contents(c) for c in plain] == [_contents(c) for c in tried]
