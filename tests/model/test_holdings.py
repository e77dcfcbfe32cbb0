"""Holdings: forms by module and by layer, the account of bytes, the budget, changes that fail."""

from __future__ import annotations

import gc
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx.utils import tree_flatten

from tests.conftest import examples
from tests.model.checkpoints import (
    SIZES,
    baked,
    logits_after,
    open_crumb,
    open_model,
    open_store,
    read,
    write_random,
)
from tests.model.published import write_published
from tests.model.reference import needs_new_mlx_lm
from toastkit.engine.engine import Engine
from toastkit.engine.state import ModelState
from toastkit.errors import DataError
from toastkit.experts.experts_options import SlotOptions
from toastkit.gears.gear_options import GearOptions
from toastkit.holdings.forms import ABSENT, ORIGINAL, Form, packed
from toastkit.holdings.holdings import Holdings
from toastkit.holdings.weights import Weights
from toastkit.residency.residency_options import ResidencyOptions
from toastkit.store.dtypes import Loading
from toastkit.store.ledger import CACHE, GEARS, Ledger

IDS = [5 + 7 * n % 4000 for n in range(24)]
LOW = packed(4)


def opened(path: Path | str = "crumb", **rest) -> Holdings:
    """Holdings of a model of which nothing is loaded."""
    return Holdings(open_store(path), Loading("float32"), Ledger(), **rest)


def matrices(holdings: Holdings, layer: int) -> list[str]:
    """Paths of a layer's modules that can be packed."""
    return [h.path for h in holdings.modules.values() if h.layer == layer and h.weight is not None]


def layer(holdings: Holdings, index: int, form: Form) -> dict[str, Form]:
    """Every module of a layer in a form, of those that can have it."""
    usual = ORIGINAL if form.kind == "packed" else form
    forms = {h.path: usual for h in holdings.modules.values() if h.layer == index}
    if form.kind == "packed":
        forms.update(dict.fromkeys(matrices(holdings, index), form))
    return forms


def tree_bytes(holdings: Holdings) -> int:
    """Bytes of the parameters in the module tree."""
    leaves = tree_flatten(holdings.store.model.parameters())
    return sum(array.nbytes for _, array in leaves if isinstance(array, mx.array))


def weights_of(model) -> dict[str, mx.array]:
    return {name: mx.array(array) for name, array in tree_flatten(model.parameters())}


def test_nothing_is_there_before_it_is_wanted() -> None:
    gc.collect()
    before = mx.get_active_memory()
    holdings = opened()
    assert {h.form for h in holdings.modules.values()} == {ABSENT}
    assert holdings.ledger.total() == tree_bytes(holdings) == 0
    assert mx.get_active_memory() - before < 1 << 20
    assert sorted(n for h in holdings.modules.values() for n in h.names) == sorted(
        holdings.store.names
    )


def test_each_layer_has_the_form_that_is_wanted_of_it(crumb) -> None:
    """Some layers in the original, some in low gear, one absent; to the bit, and in the account."""
    gc.collect()
    mx.clear_cache()
    before, held = mx.get_active_memory(), []
    holdings = opened()
    forms = {0: ORIGINAL, 1: ORIGINAL, 2: LOW, 3: LOW}
    for index, form in forms.items():
        assert holdings.change(layer(holdings, index, form))
    assert holdings.change(layer(holdings, 1, ORIGINAL)) is None
    mine, theirs = weights_of(holdings.store.model), weights_of(crumb.model)
    prefix = holdings.store.layers_path
    assert {n.removeprefix(f"{prefix}.").split(".")[0] for n in mine} == set("0123")
    packed_names = {f"{p}.weight" for i in (2, 3) for p in matrices(holdings, i)}
    for name, array in mine.items():
        if name in theirs and name not in packed_names:
            assert mx.array_equal(array, theirs[name]), name
    held.append((mine, theirs))
    del mine, theirs
    held.clear()
    for index in (2, 0, 3):
        assert holdings.change(layer(holdings, index, ABSENT)) == 0
        assert not matrices_there(holdings, index)
    gc.collect()
    mx.clear_cache()
    assert holdings.ledger.by_owner().keys() == {"layer.1"}
    total = holdings.ledger.total()
    assert total == tree_bytes(holdings)
    assert abs(mx.get_active_memory() - before - total) < 0.02 * total + 4096 * 64


def matrices_there(holdings: Holdings, index: int) -> list[str]:
    return [p for p in matrices(holdings, index) if "weight" in holdings.modules[p].module]


@pytest.mark.parametrize("form", [ORIGINAL, LOW], ids=["original", "low"])
def test_a_layer_dropped_in_the_middle_of_an_answer(crumb, form: Form) -> None:
    """It is read again, and nothing of the answer changes; the account and MLX agree on what left
    and on what came back."""
    engine = open_crumb()
    wanted = answer_of(engine, form, drop=None)
    again = open_crumb()
    assert answer_of(again, form, drop=2) == wanted
    if form == ORIGINAL:
        assert wanted == answer_of(crumb, form, drop=None)


def answer_of(engine: Engine, form: Form, drop: int | None) -> list[bytes]:
    """The logits of each step of a greedy answer, with a layer that comes and goes."""
    holdings = engine.holdings
    holdings.change({k: v for i in (2, 3) for k, v in layer(holdings, i, form).items()})
    cache = engine.new_cache()
    state = ModelState(cache, list(IDS), engine.prefill(IDS, cache))
    found = []
    for step in range(4):
        found.append(state.values().tobytes())
        if drop is not None and step in (1, 2):
            engine.look_ahead(state)
            state.take_back()
            come_and_go(engine, layer(holdings, drop, form))
        engine.consume(state, int(np.argmax(state.values())))
    return found


def come_and_go(engine: Engine, forms: dict[str, Form]) -> None:
    """Drops modules, and brings them back."""
    holdings, ledger = engine.holdings, engine.ledger
    full, active = figures(engine)
    size = sum(
        holdings.modules[p].parts.rest_bytes + holdings.modules[p].matrix_bytes for p in forms
    )
    holdings.change(dict.fromkeys(forms, ABSENT))
    total, memory = figures(engine)
    assert full - total == size > 0 and abs(active - memory - size) < 0.02 * size + 4096 * 16
    assert holdings.change(forms) == len(forms)
    total, memory = figures(engine)
    assert total == full and abs(memory - active) < 0.02 * size + 4096 * 16
    assert ledger.of(CACHE) > 0


def figures(engine: Engine) -> tuple[int, int]:
    """Bytes by the ledger, and by MLX."""
    gc.collect()
    mx.clear_cache()
    return engine.ledger.total(), mx.get_active_memory()


@pytest.mark.parametrize("name", ["qwen3_next", "gemma3_text"])
def test_caches_are_counted_as_they_grow(tmp_path: Path, name: str) -> None:
    """Step by step past 256 tokens, where MLX makes a cache larger; a window slides before."""
    engine = open_model(write_published(tmp_path / "x", name))
    cache, ids = engine.new_cache(), 252 * [7]
    state = ModelState(cache, list(ids), engine.prefill(ids, cache))
    sizes = set()
    for token in range(10):
        engine.consume(state, token + 5)
        sizes.add(engine.ledger.of(CACHE))
        assert max(sizes) == sum(x.nbytes for x in state.cache) > 0
    assert len(sizes) > 1
    mx.eval(state.logits)
    del cache, state
    assert engine.ledger.of(CACHE) == 0


def test_a_change_that_fails_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    holdings = opened()
    for index in (0, 1):
        holdings.change(layer(holdings, index, ORIGINAL))
    holdings.change(layer(holdings, 0, LOW))
    before, tree = holdings.ledger.by_owner(), weights_of(holdings.store.model)
    forms = {path: h.form for path, h in holdings.modules.items()}
    real, calls = Weights.finish, []

    def failing(self, reading):
        calls.append(reading)
        if len(calls) > 2:
            raise DataError("the disk is on fire")
        return real(self, reading)

    monkeypatch.setattr(Weights, "finish", failing)
    wanted = {}
    for index, form in ((0, ABSENT), (1, LOW), (2, ORIGINAL)):
        wanted.update(layer(holdings, index, form))
    with pytest.raises(DataError, match="on fire"):
        holdings.change(wanted)
    assert {path: h.form for path, h in holdings.modules.items()} == forms
    assert holdings.ledger.by_owner() == before
    after = weights_of(holdings.store.model)
    assert after.keys() == tree.keys()
    assert all(mx.array_equal(after[name], array) for name, array in tree.items())


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_published(tmp_path_factory.mktemp("holdings") / "llama", "llama")


WANTED = st.lists(
    st.dictionaries(
        st.integers(0, 30), st.sampled_from([ABSENT, ORIGINAL, LOW, packed(8), packed(2, False)]),
        min_size=1, max_size=8,
    ),
    min_size=1, max_size=8,
)  # fmt: skip


@settings(max_examples=examples(15), deadline=None)
@given(st.data())
def test_whatever_is_wanted_the_account_is_true(llama: Path, data: st.DataObject) -> None:
    """Any changes in any order: forms come about, every byte is in the ledger, what is kept fits
    the budget, and the originals come back to the bit."""
    budget = data.draw(st.sampled_from([None, 0, 60_000, 1 << 30]))
    holdings = opened(llama, budget=budget)
    paths = list(holdings.modules)
    for changes in data.draw(WANTED):
        wanted = {}
        for number, form in changes.items():
            path = paths[number % len(paths)]
            if form.kind != "packed" or holdings.modules[path].weight is not None:
                wanted[path] = form
        if data.draw(st.booleans()):
            holdings.prepare(wanted, 0.5)
        holdings.change(wanted)
        assert all(holdings.modules[path].form == form for path, form in wanted.items())
        kept = holdings.kept_bytes
        assert holdings.ledger.total() == tree_bytes(holdings) + kept
        if budget is not None:
            assert kept <= budget
    holdings.change(dict.fromkeys(paths, ORIGINAL))
    mine = weights_of(holdings.store.model)
    store = opened(llama).store
    for name in store.names:
        assert mx.array_equal(mine[name], store.tensor(name).astype(mx.float32)), name
    holdings.change(dict.fromkeys(paths, ABSENT))
    assert holdings.ledger.total() == 0 == tree_bytes(holdings)


def test_what_was_not_in_use_for_longest_goes_first(llama: Path) -> None:
    """Whoever put it there: forms of different layers share one budget."""
    holdings = opened(llama, budget=1 << 40)
    first, second = (matrices(holdings, index) for index in (0, 1))
    holdings.change(dict.fromkeys([*first, *second], LOW))
    size = holdings.ledger.of(GEARS)
    holdings.change(dict.fromkeys(first, packed(8)))  # low of the first layer is set aside
    holdings.change(dict.fromkeys(second, packed(8)))  # then that of the second
    assert holdings.kept(first[0]) == holdings.kept(second[0]) == [LOW]
    holdings.budget = size // 2 + size // 4
    holdings.change({first[0]: ORIGINAL})
    assert LOW not in holdings.kept(first[1]) and holdings.kept(second[0]) == [LOW]


@pytest.mark.parametrize(
    ("part", "harm"),
    [("scales", (b'scales"', b'scalez"')), ("weight", (b'"U32"', b'"I32"')),
     ("weight", (b"[64,16]", b"[16,64]"))],
)  # fmt: skip
def test_a_baked_gear_that_is_damaged(tmp_path: Path, part: str, harm: tuple) -> None:
    """A part is missing, or no matrix of that form: an error, and the gear is as it was."""
    source = write_published(tmp_path / "llama", "llama")
    path = baked(source, tmp_path / "baked.toast", gears=("low",))
    data, module = path.read_bytes(), "model.layers.0.mlp.down_proj"
    start = data.index(f'"__gear__.low.{module}.{part}"'.encode())
    entry = data[start : data.index(b"}", start)]
    assert harm[0] in entry
    path.write_bytes(data.replace(entry, entry.replace(*harm), 1))
    engine = open_model(path, gear_options=GearOptions("auto", "all"))
    with pytest.raises(DataError, match=f"its low gear of {module} is damaged"):
        engine.shift("low")
    assert engine.gears is not None and engine.gears.gear == "high"


@needs_new_mlx_lm
def test_what_a_first_pass_makes_of_weights_is_made_of_these(tmp_path: Path) -> None:
    """Kimi K3's layers keep products of norms, and passes over shapes come before the weights."""
    sizes = {
        **SIZES, "tie_word_embeddings": False, "num_key_value_heads": 4, "kv_lora_rank": 32,
        "q_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
        "num_experts": 6, "num_experts_per_token": 2, "moe_intermediate_size": 32,
        "first_k_dense_replace": 1, "attn_res_block_size": 2,
        "linear_attn_config": {
            "kda_layers": [1], "full_attn_layers": [2], "num_heads": 4, "head_dim": 16,
            "short_conv_kernel_size": 3,
        },
    }  # fmt: skip
    del sizes["head_dim"], sizes["rope_theta"]
    path = write_random(tmp_path / "m", {"model_type": "kimi_k3", "text_config": sizes})
    plain = logits_after(engine := open_model(path), read(engine, IDS), [9, 77])
    for options in ({"residency": ResidencyOptions("layers", 0)},
                    {"expert_slots": SlotOptions("slots", 3, "off")}):  # fmt: skip
        engine = open_model(path, **options)
        found = logits_after(engine, read(engine, IDS), [9, 77])
        assert all(map(mx.array_equal, found, plain))
