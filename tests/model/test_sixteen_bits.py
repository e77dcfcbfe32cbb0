"""Models whose 16-bit matrices stay in 16 bits, as products are native: in every form they give
to the bit what the same model gives in float32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest

from tests.model.checkpoints import SIZES, baked, open_store, write_random
from tests.model.published import write_published
from tests.model.test_streaming import alike, answer
from tests.native_library import native_cache, native_path, needed
from toastkit.engine.engine import Engine
from toastkit.engine.opening import open_engine
from toastkit.experts.experts_options import SlotOptions
from toastkit.gears.gear_options import GearOptions
from toastkit.gears.plan import plan
from toastkit.holdings.holdings import Holdings
from toastkit.holdings.policy import Wish
from toastkit.model.files import ModelFiles
from toastkit.model.locate import locate
from toastkit.native import replacing
from toastkit.native.library import load, use
from toastkit.native.modules.products import NARROW
from toastkit.native.starting import Status
from toastkit.residency.model_sizes import sizes_of
from toastkit.residency.residency_options import ResidencyOptions
from toastkit.store.dtypes import loading
from toastkit.store.ledger import EXPERTS, GEARS, Ledger

pytestmark = needed
# Dense layers of each dtype, tied and fused matrices, norms around zero; experts of 16 bits, of 4,
# and in mxfp4, with a shared one and without; recurrent layers of both kinds.
NAMES = (
    "llama", "llama_tied", "qwen2", "gemma3_text", "phi3", "qwen2_moe", "mixtral",
    "qwen3_moe_quantised", "gpt_oss", "qwen3_next", "qwen3_5_moe", "falcon_h1",
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Engines that want native products find the library."""
    cache = native_cache(tmp_path_factory)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        yield native_path(cache)


def narrow_and_wide(path: Path | str, before: Callable[[int], Wish], **rest) -> list[Engine]:
    """Engines of a checkpoint, with its 16 bits kept and with `--dtype float32`, whose logits are
    the same to the bit."""
    files = locate(str(path))
    engines = [open_engine(files, native="require", dtype=d, **rest) for d in (None, "float32")]
    assert alike(*(answer(engine, before) for engine in engines))
    return engines


def unloaded(files: ModelFiles) -> Holdings:
    """As `toast-model plan` has them."""
    store = open_store(files)
    return Holdings(store, loading(None, True, Status(True, "")), Ledger())


@pytest.mark.parametrize("name", NAMES)
def test_models_keep_their_16_bits(tmp_path: Path, name: str) -> None:
    path = write_published(tmp_path / name, name)
    kept, wide = narrow_and_wide(path, lambda n: Wish())
    holdings = kept.holdings
    for holding in holdings.modules.values():
        for tensor in holding.tensors:
            narrow = holdings.loaded_dtype(tensor.name) in NARROW
            assert not narrow or tensor.key in ("weight", "scales", "biases")
            assert not narrow or replacing.is_native(type(holding.module))
            assert getattr(holding.module, str(tensor.key), mx.zeros(1)).dtype not in NARROW
    sizes = sizes_of(unloaded(kept.files))
    assert kept.ledger.total() == sizes.outside + sum(sizes.layers)
    stored = sum(map(holdings.store.nbytes, holdings.store.names))
    assert kept.ledger.total() < max(1.07 * stored, 0.97 * wide.ledger.total())
    if name in ("llama", "qwen3_moe_quantised", "qwen3_next"):
        streamed = ResidencyOptions("layers", 1, "last")
        engine = open_engine(kept.files, native="require", residency=streamed)
        assert alike(answer(engine), answer(wide))


@pytest.mark.parametrize(
    ("name", "path"),
    [("qwen3_moe", "fused"), ("qwen3_moe", "dequant"), ("llama_tied", "dequant"),
     ("falcon_h1", "fused")],
)  # fmt: skip
def test_gears_of_16_bits(tmp_path: Path, name: str, path: str) -> None:
    """Made of originals on the device or in the file, or of experts as they are fetched."""
    made = write_published(tmp_path / name, name)
    gears = GearOptions("auto", "all", path=path)

    def wish(n: int) -> Wish:
        return Wish(("low", "mid", "high", "low")[n])

    kept, _ = narrow_and_wide(made, wish, gear_options=gears)
    narrow_and_wide(made, wish, gear_options=gears, residency=ResidencyOptions("layers", 1))
    if name == "qwen3_moe":
        slots = SlotOptions("slots", 3, "off")
        narrow_and_wide(made, wish, gear_options=gears, expert_slots=slots)
    if path == "fused":
        store = open_store(kept.files)
        found = plan(store, "all", types=loading(None, True, Status(True, "")))
        low = next(gear for gear in found.gears if gear.gear == "low")
        fresh = open_engine(kept.files, native="require", gear_options=gears)
        fresh.shift("low")
        packed, total = fresh.ledger.of(GEARS), fresh.ledger.total()
        assert (low.managed, low.device) == (packed, total)


@pytest.mark.parametrize("by_expert", [False, True])
def test_experts_of_16_bits_in_slots(tmp_path: Path, by_expert: bool) -> None:
    path = write_published(tmp_path / "moe", "qwen3_moe")
    if by_expert:
        path = baked(path, tmp_path / "moe.toast", expert_major=True)
    slots = SlotOptions("slots", 3, "off" if by_expert else "1")
    kept, wide = narrow_and_wide(path, lambda n: Wish(), expert_slots=slots)
    assert 2 * kept.ledger.of(EXPERTS) == wide.ledger.of(EXPERTS)
    if by_expert:  # how much is read ahead is a matter of time
        assert kept.holdings.slots.counts.read == wide.holdings.slots.counts.read


def test_a_matrix_that_the_architecture_reads_is_widened(tmp_path: Path) -> None:
    """Its head is `h @ self.model.embed_tokens.weight.T`."""
    config = {"model_type": "seed_oss", "tie_word_embeddings": True, **SIZES}
    path = write_random(tmp_path / "seed", config)
    kept, wide = narrow_and_wide(path, lambda n: Wish())
    table = "model.embed_tokens.weight"
    assert kept.holdings.loaded_dtype(table) == mx.float32
    assert kept.ledger.total() < 0.9 * wide.ledger.total()


def test_who_else_reads_a_parameter_sees_it_widened(built: Path) -> None:
    use(load(str(built)))
    module = nn.Linear(64, 96)
    module.weight = module.weight.astype(mx.bfloat16)
    wide = module.weight.astype(mx.float32)
    module.__class__ = replacing.native(type(module))
    assert module.weight.dtype == mx.bfloat16
    vars(module)["_wide"] = mx.float32
    assert module.weight.dtype == mx.float32 and mx.array_equal(module.weight, wide).item()
    x = mx.random.normal((3, 64), key=mx.random.key(0)).astype(mx.bfloat16)
    y = module(x)  # whatever comes, as of wide weights
    module["weight"] = wide
    assert y.dtype == mx.float32 and mx.array_equal(y, module(x)).item()
    del module.weight
    with pytest.raises(AttributeError):
        assert module.weight is None


def test_a_bias_of_another_dtype_than_activations(built: Path) -> None:
    """Vectors become 16 bits before they are multiplied; the bias is added behind that."""
    use(load(str(built)))
    theirs = nn.Linear(64, 32)
    theirs.weight = theirs.weight.astype(mx.bfloat16)
    x = mx.random.normal((2, 3, 64), key=mx.random.key(3))
    wanted = theirs(x.astype(mx.bfloat16))
    theirs.__class__ = replacing.native(nn.Linear)
    vars(theirs)["_wide"] = mx.bfloat16
    found = theirs(x)
    assert found.dtype == wanted.dtype == mx.float32
    assert mx.allclose(found, wanted, atol=2e-2).item()
