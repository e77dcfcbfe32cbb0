"""Every tested architecture, from a checkpoint as it is published: the logits of mlx_lm, whatever
the chunks, through a session, and tensor by tensor out of the store."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from tests.model.published import NAMES, write_published
from toastkit.engine.state import ModelState
from toastkit.model.config import fingerprint, load_config
from toastkit.model.locate import locate
from toastkit.model.safetensors import read_header
from toastkit.model.supported import TESTED
from toastkit.session.directory import Session
from toastkit.store.jobs import host_writes
from toastkit.store.store import Store

PROMPT = [(37 * n + 5) % 4096 for n in range(70)]
SAME, CHUNKED = 1e-4, 1e-3  # of the largest logit
WITH_EXPERTS = ("moe", "olmoe", "mixtral", "gpt_oss", "qwen3_next")


class Made(NamedTuple):
    """A checkpoint: its directory, our engine and mlx_lm's model in float32. stored: mlx_lm's
    parameters by name, as stored."""

    name: str
    path: Path
    engine: object
    theirs: object
    stored: dict[str, mx.array]


@pytest.fixture(scope="module", params=NAMES)
def made(request, tmp_path_factory: pytest.TempPathFactory, mlx_started) -> Made:
    """Each checkpoint once."""
    from mlx_lm.utils import load_model

    from toastkit.engine.opening import open_engine

    name = request.param
    path = write_published(tmp_path_factory.mktemp("published") / name, name)
    theirs, _ = load_model(path)
    stored = dict(tree_flatten(theirs.parameters()))
    theirs.set_dtype(mx.float32)
    return Made(name, path, open_engine(locate(str(path)), dtype="float32"), theirs, stored)


@pytest.fixture
def store(made: Made):
    """A Store of its own for each test."""
    files = locate(str(made.path))
    opened = Store(files, load_config(files))
    yield opened
    opened.close()


def check_close(found, expected, tolerance: float = SAME) -> None:
    found, expected = np.array(found, np.float64), np.array(expected, np.float64)
    scale = np.abs(expected).max()
    assert found.shape == expected.shape and scale > 1
    assert np.abs(found - expected).max() < tolerance * scale


def test_what_is_said_to_be_tested_is_tested(tmp_path: Path) -> None:
    types = set()
    for name in NAMES:
        files = locate(str(write_published(tmp_path / name, name)))
        types.add(load_config(files).model_type)
        shards = files.weight_files()
        assert sum(path.stat().st_size for path in shards) < 2_300_000
    assert sorted(types) == sorted(TESTED)


# --------------------------------------------------------------------------------------- as mlx_lm


def test_the_config(made: Made) -> None:
    config = made.engine.config
    assert config.vocab == 4096
    assert config.context == (None if made.name == "mamba2" else 512)


def test_every_position_has_the_logits_of_mlx_lm(made: Made) -> None:
    from mlx_lm.models.cache import make_prompt_cache

    expected = made.theirs(mx.array(PROMPT)[None], cache=make_prompt_cache(made.theirs))[0]
    check_close(made.engine.score(PROMPT, made.engine.new_cache()), expected)
    check_close(made.engine.prefill(PROMPT, made.engine.new_cache()), expected[-1])
    winners = np.array(mx.argmax(expected, axis=-1))
    assert len(set(winners.tolist())) > 40  # a model that looks at its input


def test_greedy_steps_are_those_of_mlx_lm(made: Made) -> None:
    from mlx_lm.models.cache import make_prompt_cache

    theirs, mine = make_prompt_cache(made.theirs), made.engine.new_cache()
    expected = made.theirs(mx.array(PROMPT)[None], cache=theirs)[0, -1]
    logits = made.engine.prefill(PROMPT, mine)
    for _ in range(5):
        check_close(logits, expected)
        token = int(mx.argmax(expected))
        assert int(mx.argmax(logits)) == token
        expected = made.theirs(mx.array([[token]]), cache=theirs)[0, -1]
        logits = made.engine.step(token, mine)


def test_chunks_change_nothing(made: Made) -> None:
    whole, chunked = made.engine.new_cache(), made.engine.new_cache()
    expected = made.engine.prefill(PROMPT, whole)
    logits = made.engine.prefill(PROMPT, chunked, chunk=16)
    check_close(logits, expected, CHUNKED)
    for token in (5, 3000):
        expected, logits = made.engine.step(token, whole), made.engine.step(token, chunked)
        check_close(logits, expected, CHUNKED)


# ---------------------------------------------------------------------------------------- sessions


def run(made: Made, state: ModelState, count: int) -> list[mx.array]:
    """Greedy steps; the logits after each."""
    found = []
    for _ in range(count):
        made.engine.consume(state, int(mx.argmax(state.logits)))
        mx.eval(state.logits)
        found.append(state.logits)
    return found


def read_prompt(made: Made, state: ModelState, ids: list[int]) -> list[int]:
    """Reads the rest of a prompt; the tokens held after each pass."""
    return list(made.engine.reading(state, ids))


def test_a_resumed_session_goes_on_as_if_never_saved(made: Made, tmp_path: Path) -> None:
    model = fingerprint(made.engine.files)
    with Session.open(tmp_path / "s", model) as session:
        live = ModelState(made.engine.new_cache(), session=session)
        assert read_prompt(made, live, PROMPT)[-1] == len(PROMPT)
        run(made, live, 3)
        live.commit()
    tokens, ids = list(live.tokens), [*live.tokens, 77, 4000, 78]
    with Session.open(tmp_path / "s", model, write=False) as session:
        whole, count = made.engine.restore(session, tokens)
        further, further_count = made.engine.restore(session, ids)
    assert count == further_count == len(PROMPT) + 3
    assert mx.array_equal(whole.logits, live.logits)
    assert read_prompt(made, further, ids)[-1] == len(further.tokens) == len(ids)
    for mine, expected in zip(run(made, whole, 3), run(made, live, 3)):
        assert mx.array_equal(mine, expected)
    assert whole.tokens == live.tokens
    again = ModelState(made.engine.new_cache())
    read_prompt(made, again, ids)
    check_close(further.logits, again.logits, CHUNKED)


@pytest.mark.skipif(not host_writes(), reason="the device's memory is its own")
def test_looking_ahead_changes_nothing(made: Made) -> None:
    plain, ahead = ModelState(made.engine.new_cache()), ModelState(made.engine.new_cache())
    for state in (plain, ahead):
        read_prompt(made, state, PROMPT)
    for token in (9, 2000, 31, 4):
        made.engine.look_ahead(ahead)
        ahead.take_back()  # taken back
        made.engine.look_ahead(ahead)
        for state in (plain, ahead):
            made.engine.consume(state, token)
        assert mx.array_equal(plain.logits, ahead.logits)


# --------------------------------------------------------------------------------------- the store


def same(a: mx.array, b: mx.array) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and bool(mx.array_equal(a, b))


def test_the_layers_are_the_model(made: Made, store: Store) -> None:
    expected = made.stored
    assert sorted(store.names) == sorted(expected)
    found = {}
    for part in (
        *map(store.layer, reversed(range(store.layer_count))),
        store.read(store.outside_names()),
    ):
        assert not set(part) & set(found)
        found.update(part)
    assert set(found) == set(expected)
    wrong = [name for name, array in found.items() if not same(array, expected[name])]
    assert not wrong
    for name, array in expected.items():
        assert (store.shape(name), store.dtype(name)) == (array.shape, array.dtype)
        assert store.nbytes(name) == array.nbytes
    again = store.layer(0)
    assert again and all(same(array, expected[name]) for name, array in again.items())


def test_rows_are_slices(made: Made, store: Store) -> None:
    for name, array in made.stored.items():
        count = array.shape[0]
        for start, stop in {(0, 1), (count // 3, count // 3 + 1 + count // 5), (count - 1, count)}:
            assert same(store.rows(name, start, stop), array[start:stop]), name
    with pytest.raises(IndexError):
        store.rows(name, 0, count + 1)


def test_a_tensor_in_a_file_is_that_tensor(made: Made, store: Store) -> None:
    """What `source` points at are the tensor's own bytes, and most tensors have one."""
    expected = made.stored
    found = 0
    for name, array in expected.items():
        place = store.source(name)
        if place is None:
            continue
        path, entry = place
        with open(path, "rb") as file:
            file.seek(entry.start)
            data = file.read(entry.stop - entry.start)
        stored = mx.array(np.frombuffer(data, np.uint8))
        assert same(stored, mx.contiguous(array).reshape(-1).view(mx.uint8)), name
        found += 1
    assert found


def test_experts_are_slices(made: Made, store: Store) -> None:
    expected = made.stored
    sparse = [n for n in range(store.layer_count) if store.expert_names(n)]
    assert bool(sparse) == any(word in made.name for word in WITH_EXPERTS)
    for layer in sparse:
        names = store.expert_names(layer)
        assert {".".join(n.split(".")[-2:-1]) for n in names} == {
            "gate_proj", "up_proj", "down_proj",
        }  # fmt: skip
        for start, stop in ((0, 1), (5, 8)):
            for name in names:
                assert same(store.rows(name, start, stop), expected[name][start:stop])


def raw_tensors(path: Path) -> list[tuple[Path, str, int, int]]:
    """(file, name, start, stop) of every tensor in the files."""
    return [
        (file, name, entry.start, entry.stop)
        for file in sorted(path.glob("*.safetensors"))
        for name, entry in read_header(file, "test").entries.items()
    ]


def test_a_layer_needs_no_bytes_of_another(made: Made, tmp_path: Path) -> None:
    """All else is overwritten once the store is open: layer 1 is what it was."""
    path = write_published(tmp_path / made.name, made.name)
    files = locate(str(path))
    store = Store(files, load_config(files))
    for file, name, start, stop in raw_tensors(path):
        if ".layers.1." not in name:
            with open(file, "r+b") as opened:
                opened.seek(start)
                opened.write(b"\x55" * (stop - start))
    expected = made.stored
    layer = store.layer(1)
    assert layer and all(same(array, expected[name]) for name, array in layer.items())
    store.close()


COUNTER = Path("/proc/self/io")  # of this process: bytes read since it began


def bytes_read() -> int:
    return int(COUNTER.read_text().split("rchar: ")[1].split("\n")[0])


@pytest.mark.skipif(not COUNTER.is_file(), reason="this system does not count what is read")
def test_a_layer_reads_its_own_bytes_and_no_others(made: Made, store: Store) -> None:
    sizes = {".layers.1." in name: 0 for _, name, _, _ in raw_tensors(made.path)}
    for _, name, start, stop in raw_tensors(made.path):
        sizes[".layers.1." in name] += stop - start
    slack = 16384
    before = bytes_read()
    mx.eval(store.layer(1))
    assert 0 <= bytes_read() - before - sizes[True] < slack < sizes[False]


def test_streamed_layers_compute_the_same(made: Made) -> None:
    """No layer stays; logits are those of a model that does, to the bit, and nothing is left."""
    from toastkit.engine.opening import open_engine
    from toastkit.residency.residency_options import ResidencyOptions

    options = ResidencyOptions("layers", 0)
    streamed = open_engine(locate(str(made.path)), dtype="float32", residency=options)
    results = []
    for engine in (made.engine, streamed):
        cache = engine.new_cache()
        logits = engine.prefill(PROMPT[:24], cache, chunk=16)
        found = [logits]
        for token in PROMPT[24:27]:
            found.append(engine.step(token, cache))
        mx.eval(found, [layer.state for layer in cache])
        results.append(found)
    assert all(mx.array_equal(a, b).item() for a, b in zip(*results))
    layers = [name for name in streamed.ledger.by_owner() if name.startswith("layer.")]
    assert sum(map(streamed.ledger.of, layers)) == 0
    assert streamed.residency.sizes.layers == tuple(
        made.engine.ledger.of(f"layer.{i}") for i in range(len(streamed.residency.sizes.layers))
    )
    streamed.close()
