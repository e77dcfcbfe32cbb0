"""Weights that lie in their files: what reading gives, to the bit, and files that change."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.model.checkpoints import baked, open_store, quantised_qwen3, read, tied_llama
from tests.model.moe_checkpoints import write_moe
from tests.model.test_streaming import NEXT, PROMPT, alike, answer
from tests.native_library import built, cache, library, needed
from toastkit.engine.engine import Engine
from toastkit.engine.opening import open_engine
from toastkit.errors import DataError
from toastkit.gears.gear_options import GearOptions
from toastkit.gears.gear_policy import GearPolicy
from toastkit.holdings.forms import MAPPED, ORIGINAL, Form
from toastkit.holdings.policy import Wish
from toastkit.model.locate import locate
from toastkit.model.safetensors import Entry
from toastkit.native.library import Library
from toastkit.native.regions import LOST, Region
from toastkit.native.starting import NativeOptions
from toastkit.residency.mapping import MappingPolicy, mapped_bytes
from toastkit.residency.residency_options import ResidencyOptions
from toastkit.store.mapping import MappedFiles
from toastkit.store.raw import DTYPES

__all__ = ["built", "cache", "library"]
pytestmark = needed
KINDS = sorted(set(DTYPES) - {"BOOL"})


def engine(
    path: Path | str = "crumb", mapped: bool = True, gears: GearOptions | None = None
) -> Engine:
    """One whose weights are mapped, or read."""
    store = open_store(path)
    policies: list[Any] = [] if gears is None else [GearPolicy(gears)]
    policies += [MappingPolicy()] if mapped else []
    budget = None if gears is None else gears.cache_bytes
    native = NativeOptions("require")
    return Engine(store, policies, cache_bytes=budget, native=native)


def policy(of: Engine) -> MappingPolicy:
    """Its mapping policy."""
    return next(p for p in of.policies if isinstance(p, MappingPolicy))


def mapped_paths(of: Engine) -> set[str]:
    """Modules that lie in their files."""
    return {path for path, holding in of.holdings.modules.items() if holding.form == MAPPED}


def forms(of: Engine) -> set[Form]:
    """Of all modules."""
    return {holding.form for holding in of.holdings.modules.values()}


# ------------------------------------------------------------------------------------- arrays


def stored() -> st.SearchStrategy:
    """(dtype, shape, bytes that lie before it)."""
    shape = st.lists(st.integers(0, 5), max_size=3)
    return st.tuples(st.sampled_from(KINDS), shape, st.integers(0, 9))


@given(st.lists(stored(), min_size=1, max_size=6), st.integers(0, 5000))
def test_mapped_tensors_are_those_that_were_read(
    library: Library, tmp_path_factory: pytest.TempPathFactory, tensors: list, lead: int
) -> None:
    path = tmp_path_factory.mktemp("file") / "f"
    places, at = {}, lead
    for n, (kind, shape, gap) in enumerate(tensors):
        at += gap
        size = int(np.prod(shape, dtype=int)) * DTYPES[kind].size
        places[n] = (path, Entry(str(n), kind, tuple(shape), at, at + size, None))
        at += size
    data = np.random.default_rng(lead).bytes(at)
    path.write_bytes(data)
    with open(path, "rb") as stored:
        raw = SimpleNamespace(paths=[path], descriptor=lambda _: stored.fileno())
        files = MappedFiles(raw, partial(Region, library))  # type: ignore[arg-type]
        files.read_ahead(places.values())
        found = files.arrays({**places, "nowhere": None})
        files.close()
    fitting = {n for n, (_, e) in places.items() if e.nbytes and not e.start % DTYPES[e.dtype].size}
    assert set(found) == fitting
    for n, array in found.items():
        entry = places[n][1]
        assert array.shape == entry.shape and array.dtype == DTYPES[entry.dtype]
        assert (
            bytes(memoryview(mx.view(array.reshape(-1), mx.uint8)))
            == data[entry.start : entry.stop]
        )


# ------------------------------------------------------------------------------------- models


def play(of: Engine) -> tuple[list[int], list[mx.array]]:
    """Ids and logits after the prompt and each of some steps."""
    state = read(of, PROMPT)
    ids, logits = [], [state.logits]
    for _ in range(12):
        ids.append(int(mx.argmax(state.logits)))
        of.consume(state, ids[-1])
        mx.eval(state.logits)
        logits.append(state.logits)
        tree = sum(h.parts.matrix_bytes + h.parts.rest_bytes for h in of.holdings.modules.values())
        account = of.ledger.by_owner()
        assert sum(account.values()) - account.get("cache", 0) - account.get("reading", 0) == tree
    return ids, logits


@pytest.fixture(scope="module", params=["crumb", "toast", "llama", "qwen3", "olmoe"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Checkpoints: of 16-bit and of packed numbers, with a head of their own and without, with
    experts; published ones and one file."""
    folder = tmp_path_factory.mktemp("models") / "m"
    if request.param == "toast":
        return str(baked("crumb", folder.parent / "m.toast"))
    made = {"llama": tied_llama, "qwen3": quantised_qwen3, "olmoe": lambda p: write_moe(p, "olmoe")}
    if request.param not in made:
        return request.param
    return str(baked(made[request.param](folder), folder.parent / "m.toast"))


def test_a_mapped_model_is_one_that_was_read(path: str) -> None:
    """To the bit, and in the account."""
    read, lying = engine(path, mapped=False), engine(path)
    wanted, found = play(read), play(lying)
    assert found[0] == wanted[0] and alike(found[1], wanted[1])
    assert lying.ledger.by_owner() == read.ledger.by_owner()
    assert mapped_paths(lying) == set(policy(lying).paths) and not mapped_paths(read)
    size = policy(lying).report()["mapped"]
    assert read.ledger.total() // 2 < size <= read.ledger.total()
    assert mapped_bytes(lying.holdings) == size and mapped_bytes(read.holdings) == 0
    assert all(form == ORIGINAL for form in forms(lying) - {MAPPED})


@pytest.mark.parametrize("budget", [None, 64 << 20])
def test_gears_shift_over_mapped_originals(tmp_path: Path, budget: int | None) -> None:
    """As over those that were read; what is mapped is not kept beside a gear, and comes back."""
    options = GearOptions("auto", "all", cache_bytes=budget)
    gears = ["high", "low", "mid", "high"]
    path, found = baked(write_moe(tmp_path / "moe", "olmoe"), tmp_path / "m.toast"), []
    for mapped in (False, True):
        of = engine(path, mapped=mapped, gears=options)
        found.append(answer(of, lambda n: Wish(gears[n])))
        kept = {form for path in of.holdings.modules for form in of.holdings.kept(path)}
        assert MAPPED not in kept and of.gears is not None and of.gears.gear == "high"
    assert alike(found[0], found[1])
    assert len(NEXT) == len(gears) and mapped_paths(of)


@pytest.mark.parametrize(
    "rest", [{"residency": ResidencyOptions("layers", 2)}, {"native": "off"}], ids=["layers", "MLX"]
)
def test_what_has_a_budget_or_no_native_products_is_read(rest: dict[str, Any]) -> None:
    of = open_engine(locate("crumb"), **{"native": "require", **rest})
    assert not mapped_paths(of) and of.holdings.store.mapping is None


# ------------------------------------------------------------------------------------- files


def test_a_file_that_is_replaced_stays_whole(tmp_path: Path) -> None:
    """For who has mapped it; and one that is gone, as `toast-model rm` has it."""
    file = baked("crumb", tmp_path / "m.toast")
    of, wanted = engine(file), play(engine(mapped=False))
    of.load()
    (tmp_path / "other").write_bytes(bytes(file.stat().st_size))
    os.replace(tmp_path / "other", file)
    found = play(of)
    assert found[0] == wanted[0] and alike(found[1], wanted[1])
    file.unlink()
    assert play(of)[0] == wanted[0]


def test_a_file_that_is_written_to_is_an_error(tmp_path: Path) -> None:
    file = baked("crumb", tmp_path / "m.toast")
    of = engine(file)
    state = read(of, PROMPT)
    with open(file, "r+b") as written:
        written.seek(-100, os.SEEK_END)
        written.write(b"\xff")
    with pytest.raises(DataError, match="have changed"):
        of.consume(state, 7)


def maps_of(file: Path, pid: int) -> dict[str, int]:
    """What a process has mapped of a file, in bytes by the names of smaps."""
    words = [line.split() for line in Path(f"/proc/{pid}/smaps").read_text().splitlines()]
    at = next(n for n, w in enumerate(words) if w[-1] == os.path.realpath(file))
    return {w[0][:-1]: int(w[1]) << 10 for w in words[at + 1 : at + 20] if w[1].isdigit()}


def test_two_processes_have_one_copy_and_see_it_cut_short(tmp_path: Path) -> None:
    """What is mapped is no process's own: half of it counts for each (Pss). Whatever thread reads
    what is gone, the process ends with a line of explanation and not of a signal."""
    file = baked("crumb", tmp_path / "m.toast")
    code = (
        "import sys\nfrom tests.model.test_mapping import engine, play\n"
        "of = engine(sys.argv[1])\nplay(of)\nprint('there', flush=True)\nsys.stdin.readline()\n"
        "of.holdings.store.mapping.check = lambda: None\nplay(of)\n"
    )
    pipe, environment = subprocess.PIPE, {**os.environ, "PYTHONFAULTHANDLER": ""}
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(file)],
        stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment,
    )  # fmt: skip
    mine = engine(file)
    play(mine)
    assert child.stdout is not None and child.stdout.readline() == "there\n"
    for pid in (os.getpid(), child.pid):
        about = maps_of(file, pid)
        assert about["Rss"] > file.stat().st_size // 2
        assert about["Private_Dirty"] == 0 == about["Anonymous"]
        alone = about["Private_Clean"]  # pages beside those read, which the system mapped for one
        assert alone < about["Rss"] // 8
        assert about["Pss"] <= (about["Rss"] + alone) // 2 + 4096
    del mine
    os.truncate(file, 4096)
    _, said = child.communicate("\n", timeout=60)
    assert child.returncode == 74 and said.endswith(LOST)
    assert said.count("\n") == 1


def test_a_file_that_cannot_be_mapped_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system without maps, or no addresses left."""
    monkeypatch.setattr(Region, "map_file", lambda *_: (_ for _ in ()).throw(OSError(19, "no map")))
    of = engine(baked("crumb", tmp_path / "m.toast"))
    assert play(of)[0] == play(engine(mapped=False))[0]
    assert not mapped_paths(of)


def test_mapped_commands_say_so(toast: Any, cache: Path) -> None:
    """With -v; and `info --device` says what the rule is."""
    environment = {"XDG_CACHE_HOME": str(cache), "TOAST_NATIVE": "require"}
    done = toast("decode", "-m", "crumb", "-n", "1", "-v", stdin=b"hi", env=environment)
    assert b"mapped" in done.stderr
    about = toast("model", "info", "--device", "--json", env=environment)
    assert json.loads(about.stdout)["weights"].startswith("mapped")
