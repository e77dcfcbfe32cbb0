"""The sampler on the device: each filter as in mlx_lm, each draw as on the host."""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np
import pytest

from tests.model.reference import OLD_MLX_LM
from tests.native_library import cache, library, needed
from tests.unit.test_sampling import random_logits
from toastkit.engine import device_sampler
from toastkit.engine.device_sampler import DeviceSampler
from toastkit.errors import DataError, UsageError
from toastkit.native import operations
from toastkit.sampling import filters
from toastkit.sampling.host import HostSampler
from toastkit.sampling.sampling_options import SamplingOptions
from toastkit.sampling.threefry import uniform, uniform_at

__all__ = ["cache", "library"]


@pytest.fixture(params=["mlx", pytest.param("native", marks=needed)], autouse=True)
def products(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What all of it computes with."""
    library = request.getfixturevalue("library") if request.param == "native" else None
    monkeypatch.setattr("toastkit.native.library._in_use", library)


@pytest.fixture(scope="module")
def mlx_lm_sampling():
    """mlx_lm's functions."""
    return pytest.importorskip("mlx_lm.sample_utils")


def random_values(seed: int) -> np.ndarray:
    """Logits without ties, minus their maximum: what a filter gets."""
    logits = random_logits(1000, scale=1.0 + seed, seed=seed)
    return logits - logits.max()


VALUES = [random_values(seed) for seed in range(5)]


def survivors(filtered: mx.array) -> list[int]:
    return np.flatnonzero(np.array(filtered) > -np.inf).tolist()


def log_softmax(values: np.ndarray) -> mx.array:
    return mx.array(values) - mx.logsumexp(mx.array(values))


@pytest.mark.parametrize("key", [(0, 0), (1, 2), (0xFFFFFFFF, 0x9E3779B9)])
def test_uniform_is_bit_identical_to_mlx(key):
    for n in (1, 2, 5, 4096, 32769, 151936):
        expected = np.array(mx.random.uniform(shape=(n,), key=mx.array(key, mx.uint32)))
        assert (uniform(key, n) == expected).all()
        indices = np.arange(0, n, 3)
        assert (uniform_at(key, n, indices) == expected[indices]).all()


@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 0.99])
def test_top_p_as_in_mlx_lm(mlx_lm_sampling, top_p):
    for values in VALUES:
        expected = survivors(mlx_lm_sampling.apply_top_p(log_softmax(values), top_p))
        whole = mx.exp(mx.array(values)).sum()
        assert survivors(device_sampler.apply_top_p(mx.array(values), whole, top_p)) == expected
        head = np.argsort(values)[-30:].tolist()
        both = survivors(device_sampler.apply_top_p(mx.array(values), whole, top_p, most=30))
        assert both == sorted(set(expected) & set(head))
        threshold = filters.top_p_threshold(values, float(np.exp(values).sum()), top_p)
        assert np.flatnonzero(values >= threshold).tolist() == expected


@pytest.mark.parametrize("min_p, least", [(0.01, 1), (0.2, 1), (1.0, 1), (0.5, 20), (0.001, 3)])
def test_min_p_as_in_mlx_lm(mlx_lm_sampling, min_p, least):
    if OLD_MLX_LM and least > 1:
        pytest.skip("this mlx_lm's min-p fails where it keeps several")
    for values in VALUES:
        expected = survivors(mlx_lm_sampling.apply_min_p(log_softmax(values), min_p, least))
        assert survivors(device_sampler.apply_min_p(mx.array(values), min_p, least)) == expected
        threshold = filters.min_p_threshold(values, min_p, least)
        assert np.flatnonzero(values >= threshold).tolist() == expected


@pytest.mark.parametrize("k", [1, 2, 40, 999])
def test_top_k_as_in_mlx_lm(mlx_lm_sampling, k):
    for values in VALUES:
        # On the shifted values: a log-softmax may round two of them to one number.
        expected = survivors(mlx_lm_sampling.apply_top_k(mx.array(values), k))
        assert len(expected) == k
        assert survivors(device_sampler.apply_top_k(mx.array(values), k)) == expected
        assert np.flatnonzero(values >= filters.top_k_threshold(values, k)).tolist() == expected


@pytest.mark.parametrize("threshold", [0.0, 0.003, 0.02, 0.1, 0.5])
@pytest.mark.parametrize("protects", [False, True])
def test_xtc_as_in_mlx_lm(mlx_lm_sampling, threshold, protects):
    for values in VALUES:
        special = [3, 500, int(values.argmax())] if protects else []
        expected = mlx_lm_sampling.apply_xtc(log_softmax(values), 1.0, threshold, special)
        ids = mx.array(special, mx.int32)
        found = device_sampler.apply_xtc(mx.array(values), threshold, ids)
        assert survivors(found) == survivors(expected)
        protected = np.isin(np.arange(len(values)), special) if special else None
        kept = np.flatnonzero(filters.xtc_mask(values, threshold, protected)).tolist()
        assert kept == survivors(expected)


@pytest.mark.parametrize("typical_p", [0.1, 0.5, 0.95])
def test_typical_on_both(typical_p):
    for values in VALUES:
        expected = np.flatnonzero(filters.typical_mask(values, typical_p)).tolist()
        assert survivors(device_sampler.apply_typical_p(mx.array(values), typical_p)) == expected


@pytest.mark.parametrize("context", [1, 4, 20])
@pytest.mark.parametrize(
    "penalties",
    [
        {"repetition_penalty": 1.3},
        {"presence_penalty": 0.7},
        {"frequency_penalty": 0.4},
        {"repetition_penalty": 0.8, "presence_penalty": -0.5, "frequency_penalty": 0.25},
    ],
)
def test_bias_and_penalties_as_in_mlx_lm(mlx_lm_sampling, context, penalties):
    history = [5, 9, 5, 5, 3, 0, 9, 5]
    contexts = {name.replace("penalty", "context_size"): context for name in penalties}
    processors = mlx_lm_sampling.make_logits_processors({5: 1.5, 7: -4.0}, **penalties, **contexts)
    logits = random_logits(20)
    expected = mx.array(logits)[None]
    for processor in processors:
        expected = processor(mx.array(history), expected)
    expected = np.array(expected - mx.logsumexp(expected))[0]
    options = SamplingOptions(
        **penalties, penalty_context=context, logit_bias=((5, 1.5), (7, -4.0))
    )
    on_host = HostSampler(options, 20).draw(logits, 0, history, top=20)
    on_device = DeviceSampler(options, 20).draw(mx.array(logits), 0, mx.array(history), top=20)
    for drawn in (on_host, on_device.read()):
        table = dict(drawn.top)
        assert [table[token] for token in range(20)] == pytest.approx(list(expected), abs=1e-5)


OPTIONS = [
    SamplingOptions(),
    SamplingOptions(temperature=1.0),
    SamplingOptions(temperature=0.05),
    SamplingOptions(temperature=0.8, top_p=0.95),
    SamplingOptions(temperature=0.8, top_k=40, top_p=0.7),
    SamplingOptions(temperature=1.5, top_k=7),
    SamplingOptions(temperature=1.2, min_p=0.05),
    SamplingOptions(temperature=2.0, min_p=0.9, min_tokens_to_keep=12),
    SamplingOptions(temperature=1.0, typical_p=0.5),
    SamplingOptions(temperature=1.0, xtc_probability=0.5, xtc_threshold=0.02),
    SamplingOptions(
        temperature=1.0, top_p=0.98, min_p=0.001, typical_p=0.9, xtc_probability=0.7,
        xtc_threshold=0.01, top_k=50, repetition_penalty=1.2, presence_penalty=0.1,
        frequency_penalty=0.2, penalty_context=6, logit_bias=((1, 3.0), (8, -2.0)), bans=(2, 77),
    ),
]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(
    ("vocab", "kind"), [(1001, "float32"), (100, "bfloat16"), (1001, "broken")]
)
def test_host_and_device_draw_the_same(options, vocab, kind):
    special = [4, 5]
    for seed in range(2):
        options = options._replace(seed=seed * 2**40 + 7)
        on_host = HostSampler(options, vocab, special)
        on_device = DeviceSampler(options, vocab, special)
        for position in range(7):
            logits = mx.array(random_logits(vocab, 2.5, seed=position))
            if kind == "broken":
                logits[:3] = mx.array([math.nan, math.inf, -math.inf])
            if kind == "bfloat16":
                logits = logits.astype(mx.bfloat16)
            history = [position, 1, 1, 8, position]
            first = on_host.draw(np.array(logits.astype(mx.float32)), position, history, top=5)
            second = on_device.draw(logits, position, mx.array(history), top=5).read()
            assert first.id == second.id
            assert first.logprob == pytest.approx(second.logprob, abs=1e-5)
            assert [token for token, _ in first.top] == [token for token, _ in second.top]
            assert [p for _, p in first.top] == pytest.approx([p for _, p in second.top], abs=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        SamplingOptions(),
        SamplingOptions(temperature=1.0, seed=3),
        SamplingOptions(temperature=0.8, top_k=40, top_p=0.95, seed=4),
    ],
)
def test_host_and_device_draw_the_same_from_a_large_vocabulary(options):
    vocab = 50_257
    on_host, on_device = HostSampler(options, vocab), DeviceSampler(options, vocab)
    for position in range(5):
        logits = random_logits(vocab, 3.0, seed=position)
        first = on_host.draw(logits, position, top=3)
        second = on_device.draw(mx.array(logits), position, top=3).read()
        assert first.id == second.id
        assert first.logprob == pytest.approx(second.logprob, abs=1e-5)


@pytest.mark.parametrize("n", [1, 255, 256, 257, 151_936])
def test_sums_are_accurate(n):
    values = np.exp(random_logits(n))
    exact = np.cumsum(values, dtype=np.float64)
    assert operations.total(mx.array(values)).item() == pytest.approx(exact[-1], rel=2e-6)
    running = np.array(device_sampler.running_total(mx.array(values)))
    assert running.shape == (n,)
    assert np.abs(running / exact - 1).max() < 1e-5


def test_a_draw_is_lazy_and_plain_once_read():
    sampler = DeviceSampler(SamplingOptions(temperature=1.0), 30)
    logits = mx.array(random_logits(30))
    bare = sampler.draw(logits, 3, want_logprob=False)
    full = sampler.draw(logits, 3, top=2)
    assert (len(bare.arrays()), len(full.arrays())) == (2, 5)
    assert bare.id.dtype == mx.uint32 and bare.id.shape == ()
    mx.async_eval(full.arrays())
    read = full.read()
    assert type(read.id) is int and type(read.logprob) is float
    assert sampler.draw(logits, 3, top=2, want_logprob=False).read().top == read.top
    assert read.id == bare.read().id and math.isnan(bare.read().logprob)


def test_a_lazy_id_can_be_the_history_of_the_next_draw():
    options = SamplingOptions(temperature=0.7, presence_penalty=5.0)
    on_device, on_host = DeviceSampler(options, 40), HostSampler(options, 40)
    logits = random_logits(40)
    first = on_device.draw(mx.array(logits), 0)
    second = on_device.draw(mx.array(logits), 1, first.id[None]).read()
    start = on_host.draw(logits, 0).id
    assert second.id == on_host.draw(logits, 1, [start]).id


def test_the_logits_are_left_alone():
    logits = mx.array(random_logits(30))
    kept = np.array(logits)
    options = SamplingOptions(bans=(1,), repetition_penalty=2.0, presence_penalty=1.0)
    DeviceSampler(options, 30).draw(logits, 0, mx.array([3, 4])).read()
    assert (np.array(logits) == kept).all()


def test_all_banned_is_an_error_at_read():
    options = SamplingOptions(temperature=1.0, bans=(0, 1))
    drawn = DeviceSampler(options, 2).draw(mx.zeros(2), 0)
    with pytest.raises(DataError, match="every id is banned"):
        drawn.read()


def test_top_lists_break_ties_by_id():
    drawn = DeviceSampler(SamplingOptions(bans=(0,)), 6).draw(
        mx.array([9.0, 1, 2, 2, 2, 0]), 0, top=3
    )
    assert [token for token, _ in drawn.read().top] == [2, 3, 4]


def test_illegal_options_are_refused():
    with pytest.raises(UsageError, match="^invalid top-p: "):
        DeviceSampler(SamplingOptions(top_p=2.0), 10)
