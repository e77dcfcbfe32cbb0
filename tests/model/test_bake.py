"""Baking and splitting: the same model comes out, in one form whatever it came from, or nothing."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest

from tests.model.checkpoints import baked, open_model, open_store, same, write_random
from tests.model.published import write_published
from tests.model.reference import OLD_MLX_LM
from toastkit.errors import BusyError, CannotCreateError, DataError, IOFailure
from toastkit.model.files import SMALL_FILES
from toastkit.model.locate import locate
from toastkit.model.safetensors import read_header
from toastkit.model.toast_format import PAGE, is_model_tensor
from toastkit.store.bake import bake, split
from toastkit.store.verify import verify

PROMPT = [(37 * n + 5) % 4096 for n in range(8)]


def logits(path: Path) -> mx.array:
    engine = open_model(path)
    return engine.prefill(PROMPT, engine.new_cache())


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture of experts, stored expert by expert in two shards."""
    return write_published(tmp_path_factory.mktemp("mixed") / "x", "qwen3_moe")


# ---------------------------------------------------------------------------------- the same model


# In shards, float16, with tensors that are left out; tied, and norms around zero; packed; experts
# computed of blocks, in shards, expert by expert; recurrent layers, and both kinds side by side.
@pytest.mark.parametrize(
    "name",
    ["llama", "gemma3_text", "qwen3_moe_quantised", "gpt_oss", "qwen3_next", "mamba2", "falcon_h1"],
)
def test_a_checkpoint_comes_out_the_same(name: str, tmp_path: Path) -> None:
    published = write_published(tmp_path / name, name)
    source, toast, folder = open_store(published), tmp_path / "x.toast", tmp_path / "split"
    bake(source, toast)
    split(source, folder)
    assert mx.array_equal(logits(toast), logits(published))
    assert [*verify(locate(str(toast)), values=True)] == [*verify(locate(str(folder)))] == []
    copy, expected = open_store(toast).load(), source.load()
    assert copy.keys() == expected.keys()
    for key, array in expected.items():
        assert same(copy[key], array), key
    # And once it has this form, it keeps it.
    assert baked(folder, tmp_path / "z.toast").read_bytes() == toast.read_bytes()


def test_the_order_of_the_file(mixed: Path, tmp_path: Path) -> None:
    header = read_header(baked(mixed, tmp_path / "x.toast"), "test")
    assert header.data_start % PAGE == 0
    store = open_store(tmp_path / "x.toast")
    names = [name for name in header.entries if is_model_tensor(name)]
    places = [-1 if store.layer_of(n) is None else store.layer_of(n) for n in names]
    assert places == sorted(places)
    for index in range(store.layer_count):
        own = [name for name in names if store.layer_of(name) == index]
        assert header.entries[own[0]].start % PAGE == 0
        experts = store.expert_names(index)
        assert bool(experts) == (index > 0 or OLD_MLX_LM)  # else the first layer is dense
        assert [name for name in own if name in experts] == own[len(own) - len(experts) :]
    first = next(iter(header.entries))
    assert first == "__file__.config.json"
    assert header.metadata["format"] == "mlx"
    assert header.metadata["layers"] == str(store.layer_count)


def test_shards_make_no_difference(mixed: Path, tmp_path: Path) -> None:
    single = tmp_path / "single"
    single.mkdir()
    for name in SMALL_FILES:
        if (mixed / name).exists():
            (single / name).write_bytes((mixed / name).read_bytes())
    tensors: dict = {}
    for shard in sorted(mixed.glob("*.safetensors")):
        tensors.update(mx.load(str(shard)))
    mx.save_safetensors(str(single / "model.safetensors"), tensors)
    one, two = baked(mixed, tmp_path / "a.toast"), baked(single, tmp_path / "b.toast")
    assert one.read_bytes() == two.read_bytes()


def test_other_readers_open_it(mixed: Path, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors")
    toast = baked(mixed, tmp_path / "x.toast", dtype="float32")
    tensors = mx.load(str(toast), format="safetensors")
    store = open_store(toast)
    with safetensors.safe_open(toast, framework="numpy") as file:
        assert set(file.keys()) == set(tensors)
        for name in store.names:
            assert mx.array_equal(mx.array(file.get_tensor(name)), tensors[name])
        config = file.get_tensor("__file__.config.json").tobytes()
    assert json.loads(config)["model_type"] == "qwen3_moe"


def test_small_files_come_along_and_progress_reaches_the_end(mixed: Path, tmp_path: Path) -> None:
    for write in (bake, split):
        seen: list[tuple[int, int]] = []
        out = tmp_path / write.__name__
        write(open_store(mixed), out, progress=lambda *done, seen=seen: seen.append(done))
        assert seen == sorted(seen) and seen[-1][0] == seen[-1][1] > 1e5
        for name in SMALL_FILES:
            assert locate(str(mixed)).read(name) == locate(str(out)).read(name)
        assert locate(str(out)).read("tokenizer.json")


def test_blocks_of_rows_make_no_difference(
    mixed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"dtype": "float32", "gears": ("low", "mid")}
    whole = baked(mixed, tmp_path / "a.toast", **options).read_bytes()
    monkeypatch.setattr("toastkit.store.pieces.READ_BYTES", 20_000)
    monkeypatch.setattr("toastkit.store.pieces.BLOCK_BYTES", 5000)
    monkeypatch.setattr("toastkit.model.safetensors.CHUNK_BYTES", 7000)
    assert baked(mixed, tmp_path / "b.toast", **options).read_bytes() == whole


# ------------------------------------------------------------------------------------ or nothing


def test_a_source_that_breaks_on_the_way(mixed: Path, tmp_path: Path) -> None:
    toast = baked(mixed, tmp_path / "x.toast")
    for dtype in (None, "float32"):
        store = open_store(toast)
        with open(toast, "r+b") as stream:
            stream.truncate(toast.stat().st_size - 10_000)
        with pytest.raises(DataError, match=r"cannot read|shorter|truncated"):
            bake(store, tmp_path / "y.toast", dtype=dtype)
        assert os.listdir(tmp_path) == ["x.toast"]
        baked(mixed, toast)


@pytest.mark.parametrize("write", [bake, split])
def test_a_source_that_is_written_anew_on_the_way(
    mixed: Path, tmp_path: Path, write: Callable
) -> None:
    """Or the result would be one half of each model, with right checksums."""
    source = shutil.copytree(mixed, tmp_path / "source")
    changed = []

    def change(done: int, total: int) -> None:
        if done > total // 2 and not changed:
            changed.append(done)
            for shard in source.glob("*.safetensors"):
                shard.write_bytes(shard.read_bytes())

    with pytest.raises(DataError, match="changed"):
        write(open_store(source), tmp_path / "out", progress=change)
    assert changed and os.listdir(tmp_path) == ["source"]


KILLED = """
import os, signal, sys
from pathlib import Path
from toastkit.engine import device
device.start("cpu")
from toastkit.model.locate import locate
from toastkit.store.bake import bake, split
from toastkit.store.store import Store
files = locate(sys.argv[1])
def progress(done, total):
    if done > total // 2:
        os.kill(os.getpid(), signal.SIGKILL)
globals()[sys.argv[3]](Store(files), Path(sys.argv[2]), progress=progress)
"""


@pytest.mark.parametrize("write", [bake, split])
def test_killed_on_the_way(mixed: Path, tmp_path: Path, write: Callable) -> None:
    out = tmp_path / "x.toast"
    command = [sys.executable, "-c", KILLED, str(mixed), str(out), write.__name__]
    done = subprocess.run(command, capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not out.exists() and len(os.listdir(tmp_path)) == 1
    # The next one takes over what is left.
    write(open_store(mixed), out)
    assert os.listdir(tmp_path) == ["x.toast"]
    assert not [*verify(locate(str(out)))]


@pytest.mark.parametrize("write", [bake, split])
def test_a_full_disk(mixed: Path, tmp_path: Path, write: Callable) -> None:
    """Half-way, as the limit on the size of a file has it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(done: int, total: int) -> None:
        if done > total // 2:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1, hard))

    try:
        with pytest.raises(IOFailure, match="^cannot write"):
            write(open_store(mixed), tmp_path / "x.toast", progress=fill)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(("write", "doing"), [(bake, "write"), (split, "make")])
def test_a_disk_without_room_is_seen_before_anything_is_written(
    mixed: Path, tmp_path: Path, monkeypatch, write, doing: str
) -> None:
    small = os.statvfs_result((4096, 4096, 300, 200, 200, 0, 0, 0, 0, 255))  # 200 blocks free
    monkeypatch.setattr(os, "statvfs", lambda path: small)
    written: list[int] = []
    said = rf"^cannot {doing} /\S+/x.toast: no space left on device: \S+ MB needed, 819 kB free$"
    with pytest.raises(IOFailure, match=said):
        write(open_store(mixed), tmp_path / "x.toast", progress=lambda *done: written.append(1))
    assert not written and os.listdir(tmp_path) == []


def test_interrupted(mixed: Path, tmp_path: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    for write in (bake, split):
        with pytest.raises(KeyboardInterrupt):
            write(open_store(mixed), tmp_path / "x.toast", progress=interrupt)
        assert os.listdir(tmp_path) == []


# -------------------------------------------------------------------------------- places for split


def test_layers_that_share_keys_are_not_missed(tmp_path: Path) -> None:
    """AFM 7 has them in a list of their own, so that layers are counted of which no tensor is."""
    config = {
        "model_type": "afm7", "vocab_size": 256, "hidden_dim": 64, "num_layers": 3,
        "num_kv_reuse_layers": 1, "num_heads": 4, "num_kv_heads": 2,
    }  # fmt: skip
    path = baked(write_random(tmp_path / "m", config), tmp_path / "m.toast")
    split(open_store(path), tmp_path / "split")
    for made in (path, tmp_path / "split"):
        assert not [*verify(locate(str(made)))]


def test_split_goes_to_a_new_directory(mixed: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("")
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    store = open_store(mixed)
    for name in ("full", "file", "no/where", "file/x"):
        with pytest.raises(CannotCreateError, match="cannot make"):
            split(store, tmp_path / name)
    assert sorted(os.listdir(tmp_path)) == ["empty", "file", "full"]
    old = os.umask(0o022)
    try:
        split(store, tmp_path / "empty")
    finally:
        os.umask(old)
    assert (tmp_path / "empty").stat().st_mode & 0o777 == 0o755
    assert {p.stat().st_mode & 0o777 for p in (tmp_path / "empty").iterdir()} == {0o644}


def test_two_splits_at_once(mixed: Path, tmp_path: Path) -> None:
    store = open_store(mixed)

    def again(done: int, total: int) -> None:
        if done == total:
            with pytest.raises(BusyError, match="being written"):
                split(store, tmp_path / "x")

    split(open_store(mixed), tmp_path / "x", progress=again)
    assert not [*verify(locate(str(tmp_path / "x")))]
