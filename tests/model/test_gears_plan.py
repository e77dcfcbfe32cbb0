"""What `toast-model plan --gears` predicts, against models that are loaded and quantised."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from tests.model.checkpoints import (
    SIZES,
    baked,
    loaded_model,
    model_of,
    open_store,
    random_weights,
    write_checkpoint,
)
from tests.model.published import write_published
from toastkit.errors import UsageError
from toastkit.gears.cost import whole_speedup
from toastkit.gears.discovery import discover
from toastkit.gears.plan import Plan, plan
from toastkit.model.files import ModelFiles
from toastkit.model.locate import locate
from toastkit.model.toast_format import GEAR_PREFIX
from toastkit.store.dtypes import Loading
from toastkit.store.precision import quantise_rows

SCOPES = ("attention", "all")
# Experts over recurrent layers; a dense layer among others; attention beside a recurrence.
MODELS = ("qwen3_next", "qwen3_moe", "falcon_h1")


def planned(files: ModelFiles, scope: str, *rest: Any) -> Plan:
    return plan(open_store(files), scope, *rest, explain=pytest.fail)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory):
    """made(name): the files of a model, written once."""
    folder = tmp_path_factory.mktemp("planned")
    return cache(lambda name: locate(str(write_published(folder / name, name))))


def sizes(model: Any) -> dict[str, int]:
    """Bytes by parameter."""
    flat: Any = tree_flatten(model.parameters())
    return {name: array.nbytes for name, array in flat}


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, None) for name in MODELS), ("qwen3_moe", "float32")]
)
def test_device_bytes_are_those_of_the_quantised_model(made, name: str, dtype: str | None) -> None:
    files = made(name)
    model = loaded_model(files, dtype)
    before = sizes(model)
    for scope in SCOPES:
        managed = discover(model, scope)
        originals = sum(before[f"{one.path}.weight"] for one in managed)
        for bits in ((4, 8), (2, 6)):
            found = planned(files, scope, bits, Loading(dtype))
            assert [gear.gear for gear in found.gears] == ["high", "mid", "low"]
            assert found.gears[0].device == sum(before.values())
            assert found.gears[0].managed == originals
            assert found.modules == len(managed)
            assert found.parameters == sum(one.module.weight.size for one in managed)
            for gear, width in zip(found.gears[1:], bits[::-1]):
                rows = [quantise_rows(one.module.weight, width, pad=True) for one in managed]
                packed = sum(part.nbytes for made in rows for part in made)
                assert (gear.bits, gear.managed) == (width, packed)
                assert gear.device == sum(before.values()) - originals + packed


def test_rows_of_odd_lengths(tmp_path: Path) -> None:
    """A checkpoint with 40 columns, which are stored as 64."""
    config = {"model_type": "llama", "tie_word_embeddings": False, **SIZES}
    config.update(hidden_size=40, head_dim=10)
    model = model_of(config)
    weights = random_weights(model)
    files = locate(str(write_checkpoint(tmp_path / "odd", config, weights)))
    found = planned(files, "attention")
    managed = discover(model, "attention")
    assert {one.module.weight.shape[-1] for one in managed} == {40}
    for gear, bits in zip(found.gears[1:], (8, 4)):
        originals = [weights[f"{one.path}.weight"] for one in managed]
        rows = [quantise_rows(weight, bits, pad=True) for weight in originals]
        assert gear.managed == sum(part.nbytes for made in rows for part in made)


# ------------------------------------------------------------------------------ bytes of a token


@pytest.mark.parametrize("scope", SCOPES)
def test_a_token_of_the_embedded_model(scope: str) -> None:
    """4 of 16 experts; the embedding is the head, and read whole."""
    found = planned(locate("crumb"), scope)
    store = open_store("crumb")
    stacked = sum(store.nbytes(n) for layer in range(8) for n in store.expert_names(layer))
    high = found.gears[0]
    assert high.device == sum(map(store.nbytes, store.names))
    assert high.token == high.device - stacked * 12 / 16
    changing = high.managed - (stacked * 12 / 16 if scope == "all" else 0)
    assert high.managed_token == changing
    assert found.share == changing / high.token
    assert found.parameters == (1_582_080 if scope == "attention" else 6_916_608)


def test_a_token_reads_one_row_of_an_embedding_that_is_no_head(made) -> None:
    found = planned(made("llama"), "attention")
    high = found.gears[0]
    assert high.token == high.device - 4095 * 64 * 2  # of (4096, 64) in float16
    tied = planned(made("llama_tied"), "attention").gears[0]
    assert tied.token == tied.device


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("name", MODELS)
def test_figures_hang_together(made, name: str, scope: str) -> None:
    found = planned(made(name), scope, (4, 8), Loading("float32"))
    high, mid, low = found.gears
    assert (high.ratio, high.speedup, high.bits) == (1, 1, 32)
    assert high.device > mid.device > low.device
    for gear in (mid, low):
        assert gear.token - gear.managed_token == high.token - high.managed_token
        assert gear.device - gear.managed == high.device - high.managed
        assert gear.ratio == gear.token / high.token == pytest.approx(1 / gear.speedup)
        times = high.managed_token / gear.managed_token
        assert gear.speedup == whole_speedup(found.share, times)
        # Scales are all that keeps it from 32 / bits: two float32 of them for 32 to 128 numbers.
        assert 32 / (gear.bits + 2 * 32 / 32) <= times <= 32 / (gear.bits + 2 * 32 / 128)


# ------------------------------------------------------------------------------------- shifts


def test_a_shift_reads_and_writes(made) -> None:
    for dtype, item in ((None, 2), ("float32", 4)):
        found = planned(made("qwen3_moe"), "all", (4, 8), Loading(dtype))
        high, mid, low = found.gears
        assert (mid.shift, low.shift) == (high.managed + mid.managed, high.managed + low.managed)
        assert high.managed == item * found.parameters
        assert high.shift == 2 * found.parameters + high.managed  # bfloat16 in the files


def test_baked_gears_are_read_instead(made, tmp_path: Path) -> None:
    source = made("qwen3_moe")
    files = locate(str(baked(source, tmp_path / "low.toast", gears=("low",))))
    stored = sum(
        entry.nbytes
        for header in files.headers
        for name, entry in header.entries.items()
        if name.startswith(GEAR_PREFIX)
    )
    plain, found = planned(source, "all").gears, planned(files, "all").gears
    assert found[2].shift == stored + plain[2].managed == 2 * plain[2].managed
    assert found[:2] == plain[:2]
    other = planned(files, "all", (2, 8)).gears[2]  # of other bits than the one that is there
    assert other.shift == plain[0].managed + other.managed


# ------------------------------------------------------------------------- where nothing changes


@pytest.mark.parametrize(
    ("name", "scope", "said"),
    [
        ("qwen3_moe_quantised", "all", "quantised already"),
        ("gpt_oss", "attention", "quantised already"),
        ("mamba2", "attention", "no matrix in the scope 'attention'"),
    ],
)
def test_models_without_gears(made, name: str, scope: str, said: str) -> None:
    files = made(name)
    found = planned(files, scope)
    assert said in found.note
    (high,) = found.gears
    assert (high.gear, high.managed, high.shift, found.share, found.modules) == ("high", 0, 0, 0, 0)
    assert high.device == sum(sizes(loaded_model(files)).values())


def test_the_mixers_of_mamba_are_in_the_scope_of_all(made) -> None:
    assert planned(made("mamba2"), "all").note is None


def test_options_that_there_are_not_are_refused() -> None:
    with pytest.raises(UsageError, match="no such gear scope"):
        planned(locate("crumb"), "mlp")
    with pytest.raises(UsageError, match="no such gear bits: 3,8"):
        planned(locate("crumb"), "all", (3, 8))


def test_experts_that_cannot_be_counted_all_count(monkeypatch: pytest.MonkeyPatch) -> None:
    from toastkit.store import anatomy

    def refuse(*rest, **named):
        raise ValueError("no such luck")

    monkeypatch.setattr(anatomy, "_hollow", refuse)
    told: list[str] = []
    found = plan(open_store("crumb"), "all", explain=told.append)
    assert found.gears[0].token == found.gears[0].device
    assert len(told) == 1 and "no such luck" in told[0]


def test_nothing_is_read() -> None:
    store = open_store("crumb")
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    plan(store, "all", types=Loading("float32"), explain=pytest.fail)
    assert mx.get_peak_memory() - before < 1 << 16
