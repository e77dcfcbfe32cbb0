"""Baking into other bits, another dtype, and gears: tensor for tensor what mlx_lm makes."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from tests.model.checkpoints import baked, open_model, open_store, same
from tests.model.published import write_published
from tests.model.test_bake import PROMPT
from toastkit.errors import DataError, UsageError
from toastkit.model.locate import locate
from toastkit.model.safetensors import read_header
from toastkit.model.toast_format import GEAR_PREFIX
from toastkit.native.library import BITS, GROUP_SIZES
from toastkit.store.bake import split
from toastkit.store.precision import GEAR_BITS, dequantise_rows, quantise_rows
from toastkit.store.quantising import E2M1_LIMITS, QuantizationOptions, packing
from toastkit.store.skeleton import MODES
from toastkit.store.store import Store
from toastkit.store.verify import verify

# Sizes and modes that mlx_lm.convert takes; None is its default.
OPTIONS = [(4, 64, "affine"), (8, 32, "affine"), (None, None, "affine"), (3, 128, "affine"),
           (None, None, "mxfp4"), (4, 16, "nvfp4"), (None, None, "mxfp8")]  # fmt: skip


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints by name."""
    folder = tmp_path_factory.mktemp("sources")
    names = ("llama_tied", "qwen3_moe", "qwen3_next", "qwen3_5", "qwen3_moe_quantised")
    return {name: write_published(folder / name, name) for name in names}


def check_equal(store: Store, expected: dict[str, mx.array]) -> None:
    """Same names, dtypes, shapes and bits."""
    assert set(store.names) == set(expected)
    for name, array in expected.items():
        assert same(store.tensor(name), array), name


def converted(path: Path, dtype: str | None) -> tuple:
    """(model, config) as mlx_lm.convert has them before it quantises."""
    from mlx.utils import tree_map_with_path
    from mlx_lm.utils import load_model

    model, config = load_model(path, lazy=True)
    if dtype is not None:
        may = getattr(model, "cast_predicate", lambda _: True)

        def cast(name: str, value: mx.array) -> mx.array:
            floating = mx.issubdtype(value.dtype, mx.floating)
            return value.astype(getattr(mx, dtype)) if may(name) and floating else value

        model.update(tree_map_with_path(cast, model.parameters()))
    return model, config


CASES = [
    ("llama_tied", *OPTIONS[0], None),
    *(("qwen3_moe", *option, None) for option in OPTIONS),
    ("qwen3_moe", *OPTIONS[1], "float16"),
    ("qwen3_next", *OPTIONS[0], None),  # whose routers have bits of their own
]


@pytest.mark.parametrize(("name", "bits", "group_size", "mode", "dtype"), CASES)
def test_quantises_as_mlx_lm_does(
    sources: dict, tmp_path: Path, name: str, bits, group_size, mode: str, dtype: str | None
) -> None:
    from mlx_lm.utils import quantize_model

    model, config = converted(sources[name], dtype)
    try:
        theirs, config = quantize_model(model, config, group_size, bits, mode=mode)
    except ValueError:  # an exception of the architecture that the sizes here do not allow
        theirs = None
    options = {"quantization": QuantizationOptions(bits, group_size, mode), "dtype": dtype}
    if theirs is None:
        with pytest.raises(UsageError, match="cannot be quantised so"):
            baked(sources[name], tmp_path / "x.toast", **options)
        return
    chosen = config["quantization"]
    if not any(n.endswith(".scales") for n, _ in tree_flatten(theirs.parameters())):
        with pytest.raises(UsageError, match="no module's rows divide"):
            baked(sources[name], tmp_path / "x.toast", **options)
        return
    toast = baked(sources[name], tmp_path / "x.toast", **options)
    store = open_store(toast)
    check_equal(store, dict(tree_flatten(theirs.parameters())))
    written = json.loads(store.files.read("config.json"))
    assert written["quantization"] == chosen == written["quantization_config"]
    assert not [*verify(locate(str(toast)))]


def test_a_quantised_model_computes_what_mlx_lm_computes(sources: dict, tmp_path: Path) -> None:
    from mlx_lm.utils import quantize_model

    model, config = converted(sources["qwen3_moe"], None)
    theirs, _ = quantize_model(model, config, 32, 8)
    theirs.set_dtype(mx.float32)
    options = QuantizationOptions(8, 32)
    toast = baked(sources["qwen3_moe"], tmp_path / "x.toast", quantization=options)
    split(open_store(toast), tmp_path / "split")
    ids = [(37 * n + 5) % 4096 for n in range(20)]
    expected = theirs(mx.array([ids]))[0, -1]
    for path in (toast, tmp_path / "split"):
        engine = open_model(path)
        logits = engine.prefill(ids, engine.new_cache())
        assert mx.allclose(logits, expected, rtol=1e-4, atol=1e-4 * float(mx.abs(expected).max()))


@pytest.mark.parametrize("native", ["off", "require"])
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "affine"])
def test_rows_of_an_embedding_are_as_wide_as_the_activations(
    mode: str, native: str, tmp_path: Path
) -> None:
    """MLX gives them in bfloat16 if scales are bytes, and Granite multiplies them before it adds
    anything in float32. Compared with the same weights as float32."""
    source = write_published(tmp_path / "granite", "llama_tied")
    config = json.loads((source / "config.json").read_text())
    config |= {"model_type": "granite", "embedding_multiplier": 12.3, "residual_multiplier": 1.0,
               "attention_multiplier": 0.2, "logits_scaling": 1.0, "attention_bias": False,
               "mlp_bias": False}  # fmt: skip
    (source / "config.json").write_text(json.dumps(config))
    toast = baked(source, tmp_path / "x.toast", quantization=QuantizationOptions(mode=mode))
    found = {n: array for n, array in mx.load(str(toast), format="safetensors").items()}
    plain = tmp_path / "plain"
    plain.mkdir()
    config = json.loads(locate(str(toast)).read("config.json"))
    settings = config.pop("quantization")
    config.pop("quantization_config", None)
    (plain / "config.json").write_text(json.dumps(config))
    (plain / "tokenizer.json").write_bytes(locate("crumb").read("tokenizer.json"))
    usual = {key: settings[key] for key in ("group_size", "bits", "mode")}
    weights = {}
    for name, array in found.items():
        path, _, leaf = name.rpartition(".")
        if leaf == "weight" and f"{path}.scales" in found:
            scales, biases = (found.get(f"{path}.{part}") for part in ("scales", "biases"))
            if biases is not None:
                scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
            array = mx.dequantize(array, scales, biases, **settings.get(path, usual))
        if leaf not in ("scales", "biases") and not name.startswith("__"):
            weights[name] = array.astype(mx.float32)
    mx.save_safetensors(str(plain / "model.safetensors"), weights)
    mine, theirs = (
        open_model(path, native=native, native_exact=native != "off") for path in (toast, plain)
    )
    a, b = (np.array(e.prefill(PROMPT, e.new_cache())) for e in (mine, theirs))
    assert np.abs(a - b).max() < 1e-4 * np.abs(b).max()


def test_what_can_be_baked_is_native() -> None:
    """No number of bits has a model answer tens of times as slowly as its neighbours do."""
    assert tuple(map(set, MODES["affine"])) == ({*GROUP_SIZES}, {*BITS})


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*(("qwen3_5", dtype) for dtype in ("float32", "float16", "bfloat16")),
     ("qwen3_moe", "float16"), ("qwen3_moe_quantised", "float32")],
)  # fmt: skip
def test_casts_as_mlx_lm_does(sources: dict, tmp_path: Path, name: str, dtype: str) -> None:
    model, _ = converted(sources[name], dtype)
    store = open_store(baked(sources[name], tmp_path / "x.toast", dtype=dtype))
    check_equal(store, dict(tree_flatten(model.parameters())))
    config = json.loads(store.files.read("config.json"))
    named = {config.get(key, dtype) for key in ("dtype", "torch_dtype")}
    assert named == {dtype}


def test_a_weight_too_large_for_the_dtype(sources: dict, tmp_path: Path) -> None:
    source = tmp_path / "large"
    shutil.copytree(sources["llama_tied"], source)
    (shard,) = source.glob("*.safetensors")
    weights = {name: array.astype(mx.float32) for name, array in mx.load(str(shard)).items()}
    weights["model.layers.0.mlp.down_proj.weight"][0, 0] = 1e5
    mx.save_safetensors(str(shard), weights, {"format": "mlx"})
    with pytest.raises(DataError, match="down_proj.weight.*too large for float16"):
        baked(source, tmp_path / "x.toast", dtype="float16")
    assert not (tmp_path / "x.toast").exists()
    assert open_store(baked(source, tmp_path / "x.toast", dtype="bfloat16"))


def test_a_quantised_source_keeps_its_exceptions(sources: dict, tmp_path: Path) -> None:
    source = sources["qwen3_moe_quantised"]
    toast = baked(source, tmp_path / "x.toast")
    assert locate(str(toast)).read("config.json") == (source / "config.json").read_bytes()
    check_equal(open_store(toast), dict(tree_flatten(converted(source, None)[0].parameters())))


def test_a_format_that_only_its_publisher_names(tmp_path: Path) -> None:
    """gpt_oss says quant_method, which MLX calls a mode: config.json then says it as MLX does."""
    source = write_published(tmp_path / "gpt_oss", "gpt_oss")
    toast = baked(source, tmp_path / "x.toast")
    written = json.loads(locate(str(toast)).read("config.json"))
    assert written["quantization"] == {"group_size": 32, "bits": 4, "mode": "mxfp4"}
    check_equal(open_store(toast), dict(tree_flatten(converted(source, None)[0].parameters())))


# ------------------------------------------------------------------------------------------- gears


def test_gears_lie_beside_the_weights(sources: dict, tmp_path: Path) -> None:
    toast = baked(sources["qwen3_moe"], tmp_path / "x.toast", gears=("low", "mid"))
    store = open_store(toast)
    check_equal(store, dict(tree_flatten(converted(sources["qwen3_moe"], None)[0].parameters())))
    assert not [*verify(locate(str(toast)))]
    paths = {
        name.removesuffix(".weight")
        for name in store.names
        if store.layer_of(name) is not None and name.endswith(("proj.weight", "mlp.gate.weight"))
    }
    for gear, bits in GEAR_BITS.items():
        for path in paths:
            weight = store.tensor(f"{path}.weight")
            stored = store.read(store.baked(path, gear))
            expected = quantise_rows(weight, bits)
            names = {f"{GEAR_PREFIX}{gear}.{path}.{part}": part for part in expected._fields}
            assert stored.keys() == names.keys()
            for name, part in names.items():
                assert stored[name].dtype == getattr(expected, part).dtype
                assert mx.array_equal(stored[name], getattr(expected, part))
            near = mx.abs(dequantise_rows(expected, bits) - weight.astype(mx.float32))
            limit = mx.repeat(expected.scales, weight.shape[-1] // expected.scales.shape[-1], -1)
            assert (near <= 0.50001 * limit.astype(mx.float32)).all()
    header = read_header(toast, "test")
    gears = {name for name in header.entries if name.startswith("__gear__.")}
    assert len(gears) == 2 * 3 * len(paths)
    assert json.loads(header.metadata["checksums"])["layer.1"].keys() & gears


def test_gears_stay_where_they_are_still_true(sources: dict, tmp_path: Path) -> None:
    toast = baked(sources["qwen3_moe"], tmp_path / "x.toast", gears=("mid", "low"))
    assert baked(toast, tmp_path / "y.toast").read_bytes() == toast.read_bytes()
    split(open_store(toast), tmp_path / "split")
    assert baked(tmp_path / "split", tmp_path / "z.toast").read_bytes() == toast.read_bytes()

    def count(path: Path, prefix: str) -> int:
        return sum(name.startswith(prefix) for name in read_header(path, "x").entries)

    same = baked(toast, tmp_path / "a.toast", gears=("low", "mid"))
    assert same.read_bytes() == toast.read_bytes()
    one = baked(toast, tmp_path / "b.toast", gears=("low",))
    assert count(one, "__gear__.low.") == count(toast, "__gear__.low.") > 0
    assert count(one, "__gear__.mid.") == 0
    cast = baked(toast, tmp_path / "c.toast", dtype="float32")
    quantised = baked(toast, tmp_path / "d.toast", quantization=QuantizationOptions(4, 32))
    assert count(cast, "__gear__.") == count(quantised, "__gear__.") == 0


# ----------------------------------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((7,), "no bits 7"),
        ((4, 48), "no group size 48"),
        ((8, None, "mxfp4"), "no bits 8"),
        ((None, 64, "nvfp4"), "no group size 64"),
        ((4, 64, "int4"), "no such quantisation mode: int4"),
    ],
)
def test_quantisations_that_mlx_has_not(arguments: tuple, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        QuantizationOptions(*arguments)


def test_options_that_do_not_go_together(sources: dict, tmp_path: Path) -> None:
    four = QuantizationOptions(4, 32)
    for name, options, message in (
        ("qwen3_moe_quantised", {"quantization": four}, "is quantised already"),
        ("qwen3_moe_quantised", {"gears": ("low",)}, "gears are made of weights that are not"),
        ("qwen3_moe", {"gears": ("low",), "quantization": four}, "gears are made of weights"),
        ("qwen3_moe", {"gears": ("high",)}, "no such gear"),
        ("qwen3_moe", {"dtype": "float8"}, "no such dtype"),
    ):
        with pytest.raises(UsageError, match=message):
            baked(sources[name], tmp_path / "x.toast", **options)
    assert os.listdir(tmp_path) == []


def test_broken_weights(sources: dict, tmp_path: Path) -> None:
    source = tmp_path / "x"
    source.mkdir()
    for file in sources["llama_tied"].iterdir():
        (source / file.name).write_bytes(file.read_bytes())
    name = "model.layers.1.mlp.up_proj.weight"
    for shard in source.glob("*.safetensors"):
        entry = read_header(shard, "x").entries.get(name)
        if entry is not None:
            with open(shard, "r+b") as stream:
                stream.seek(entry.start)
                stream.write(b"\xff" * 4)
    with pytest.raises(DataError, match=r"layers\.1\.mlp\.up_proj.*NaN or infinite"):
        baked(source, tmp_path / "x.toast", gears=("low",))
    for mode in MODES:
        with pytest.raises(DataError, match=r"layers\.1\.mlp\.up_proj.*NaN or infinite"):
            quantization = QuantizationOptions(mode=mode)
            baked(source, tmp_path / "x.toast", quantization=quantization)
    assert os.listdir(tmp_path) == ["x"]
    (problem,) = verify(locate(str(source)), values=True)
    assert problem.tensor == name and "NaN" in problem.reason


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("mode, group", [("mxfp4", 32), ("nvfp4", 16)])
def test_four_bit_floats_are_those_of_mlx(mode: str, group: int, dtype: mx.Dtype) -> None:
    """Weights of all sizes, weights exactly between two values, and groups of zeros."""
    mx.random.seed(7)
    drawn = mx.random.normal((2, 30, 64)) * mx.array(10.0) ** mx.random.randint(-9, 3, (2, 30, 1))
    between = [0.0, 6.0, *E2M1_LIMITS, *(-limit for limit in E2M1_LIMITS)]
    between = mx.array(between)[mx.random.randint(0, len(between), (2, 30, 64))]
    for weight in (drawn, between, mx.zeros((1, 1, 64)), between * 2.0**-20):
        found = packing(group, 4, mode)(weight.astype(dtype))
        expected = mx.quantize(weight.astype(dtype), mode=mode)
        assert mx.array_equal(found["weight"], expected[0]), mode
        assert mx.array_equal(found["scales"], expected[1])


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("mode", MODES)
def test_weights_too_small_for_a_scale_stay_small(mode: str, dtype: mx.Dtype) -> None:
    """As those of tokens that were never trained may be: from subnormal ones to 2^-100."""
    mx.random.seed(7)
    (group, *_), (bits, *_) = MODES[mode]
    weight = mx.array(2.0) ** mx.arange(-140, -100)[:, None] * mx.random.uniform(-1, 1, (40, 128))
    found = packing(group, bits, mode)(weight.astype(dtype))
    values = mx.dequantize(
        found["weight"], found["scales"], found.get("biases"), group, bits, mode=mode
    )
    assert mx.abs(values).max() < 2.0**-99
    assert mode not in ("mxfp4", "mxfp8") or found["scales"].max() <= 127  # that of zeros


@pytest.mark.parametrize("shape", [(1, 48), (3, 48), (3, 5, 16), (4, 48)])
def test_odd_numbers_of_groups_of_nvfp4(shape: tuple[int, ...]) -> None:
    """MLX quantises two of them at a time, or says that it cannot."""
    weight = mx.random.normal(shape, key=mx.random.key(3))
    made = packing(16, 4, "nvfp4")(weight)
    rows = weight.reshape(-1, shape[-1])
    whole = mx.quantize(mx.concatenate([rows, rows]), 16, 4, mode="nvfp4")
    for part, expected in zip(("weight", "scales"), whole, strict=True):
        found = made[part].reshape(len(rows), -1)
        assert made[part].shape[:-1] == shape[:-1] and same(found, expected[: len(rows)])
