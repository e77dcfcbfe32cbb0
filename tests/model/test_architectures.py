"""Every tested architecture, from a checkpoint as it is published: the logits of mlx_lm, whatever
the chunks, through a session, and tensor by tensor out of the store."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from tests.model.checkpoints import open_model, open_store, read, same
from tests.model.published import NAMES, checkpoint, write_published
from toastkit.engine.state import ModelState
from toastkit.model.config import fingerprint
from toastkit.model.safetensors import read_header
from toastkit.model.supported import TESTED
from toastkit.residency.residency_options import ResidencyOptions
from toastkit.session.directory import Session
from toastkit.store.dtypes import bytes_of
from toastkit.store.jobs import host_writes
from toastkit.store.store import Store

PROMPT = [(37 * n + 5) % 4096 for n in range(70)]
SAME, CHUNKED = 1e-4, 1e-3  # of the largest logit
WITH_EXPERTS = ("moe", "olmoe", "mixtral", "gpt_oss", "qwen3_next")
# One for each kind of cache and of layer, where the architecture makes no further difference.
KINDS = pytest.mark.parametrize(
    "made", ["gemma3_text", "gpt_oss", "qwen3_5_moe", "mamba2", "falcon_h1"], indirect=True
)


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

    name = request.param
    path = write_published(tmp_path_factory.mktemp("published") / name, name)
    theirs, _ = load_model(path)
    stored = dict(tree_flatten(theirs.parameters()))
    theirs.set_dtype(mx.float32)
    return Made(name, path, open_model(path), theirs, stored)


@pytest.fixture
def store(made: Made):
    """A Store of its own for each test."""
    opened = open_store(made.path)
    yield opened
    opened.close()


def check_close(found, expected, tolerance: float = SAME) -> None:
    found, expected = np.array(found, np.float64), np.array(expected, np.float64)
    scale = np.abs(expected).max()
    assert found.shape == expected.shape and scale > 1
    assert np.abs(found - expected).max() < tolerance * scale


def test_what_is_said_to_be_tested_is_tested() -> None:
    assert {checkpoint(name).config["model_type"] for name in NAMES} == {*TESTED}


# --------------------------------------------------------------------------------------- as mlx_lm


def test_greedy_steps_are_those_of_mlx_lm(made: Made) -> None:
    """And the logits of every position of the prompt before them, which is read in one pass, or in
    several."""
    config = made.engine.config
    assert (config.vocab, config.context) == (4096, None if made.name == "mamba2" else 512)
    assert sum(path.stat().st_size for path in made.engine.files.weight_files()) < 2_300_000
    theirs = make_prompt_cache(made.theirs)
    whole, chunked = made.engine.new_cache(), made.engine.new_cache()
    rows = made.theirs(mx.array(PROMPT)[None], cache=theirs)[0]
    check_close(made.engine.score(PROMPT, made.engine.new_cache()), rows)
    assert len(set(mx.argmax(rows, axis=-1).tolist())) > 40  # a model that looks at its input
    expected = rows[-1]
    logits = made.engine.prefill(PROMPT, whole)
    in_chunks = made.engine.prefill(PROMPT, chunked, chunk=16)
    for _ in range(5):
        check_close(logits, expected)
        check_close(in_chunks, logits, CHUNKED)
        token = int(mx.argmax(expected))
        assert int(mx.argmax(logits)) == token
        expected = made.theirs(mx.array([[token]]), cache=theirs)[0, -1]
        logits, in_chunks = (made.engine.step(token, cache) for cache in (whole, chunked))


# ---------------------------------------------------------------------------------------- sessions


def run(made: Made, state: ModelState, count: int) -> list[mx.array]:
    """Greedy steps; the logits after each."""
    found = []
    for _ in range(count):
        made.engine.consume(state, int(mx.argmax(state.logits)))
        mx.eval(state.logits)
        found.append(state.logits)
    return found


def test_a_resumed_session_goes_on_as_if_never_saved(made: Made, tmp_path: Path) -> None:
    model = fingerprint(made.engine.files)
    with Session.open(tmp_path / "s", model) as session:
        live = ModelState(made.engine.new_cache(), session=session)
        assert [*made.engine.reading(live, PROMPT)][-1] == len(PROMPT)
        run(made, live, 3)
        live.commit()
    tokens, ids = list(live.tokens), [*live.tokens, 77, 4000, 78]
    with Session.open(tmp_path / "s", model, write=False) as session:
        whole, count = made.engine.restore(session, tokens)
        further, further_count = made.engine.restore(session, ids)
    assert count == further_count == len(PROMPT) + 3
    assert mx.array_equal(whole.logits, live.logits)
    assert [*made.engine.reading(further, ids)][-1] == len(further.tokens) == len(ids)
    for mine, expected in zip(run(made, whole, 3), run(made, live, 3)):
        assert mx.array_equal(mine, expected)
    assert whole.tokens == live.tokens
    again = read(made.engine, ids, None)
    check_close(further.logits, again.logits, CHUNKED)


@KINDS
@pytest.mark.skipif(not host_writes(), reason="the device's memory is its own")
def test_looking_ahead_changes_nothing(made: Made) -> None:
    plain, ahead = (read(made.engine, PROMPT, None) for _ in range(2))
    for token in (9, 2000, 31):
        made.engine.look_ahead(ahead)
        ahead.take_back()
        made.engine.look_ahead(ahead)
        for state in (plain, ahead):
            made.engine.consume(state, token)
        assert mx.array_equal(plain.logits, ahead.logits)


# --------------------------------------------------------------------------------------- the store


def test_the_layers_are_the_model(made: Made, store: Store) -> None:
    """Each of its tensors, as often as it is asked for, from no more bytes than it has; from those
    that `source` points at, where it has some."""
    expected = made.stored
    assert sorted(store.names) == sorted(expected)
    layers = [store.layer_names(n) for n in reversed(range(store.layer_count))]
    for parts in ([*layers, store.layer_names(None)], layers):
        found = {}
        for names in parts:
            before = store.reader.bytes_read
            part = store.read(names)
            assert store.reader.bytes_read - before <= sum(map(store.nbytes, names))
            assert list(part) == names and not set(part) & set(found)
            found.update(part)
        assert set(found) == {name for names in parts for name in names}
        wrong = [name for name, array in found.items() if not same(array, expected[name])]
        assert not wrong
    for name, array in expected.items():
        assert (store.shape(name), store.dtype(name)) == (array.shape, array.dtype)
        assert store.nbytes(name) == array.nbytes
    places = {name: store.source(name) for name in expected if store.source(name) is not None}
    assert places
    for name, (path, entry) in places.items():
        with open(path, "rb") as file:
            file.seek(entry.start)
            data = file.read(entry.stop - entry.start)
        assert data == bytes_of(expected[name]), name


def test_rows_are_slices(made: Made, store: Store) -> None:
    """Experts are, too, and each takes its share of bytes."""
    sparse = [n for n in range(store.layer_count) if store.expert_names(n)]
    assert bool(sparse) == any(word in made.name for word in WITH_EXPERTS)
    for layer in sparse:
        parts = {name.split(".")[-2] for name in store.expert_names(layer)}
        assert parts == {"gate_proj", "up_proj", "down_proj"}
        for name in store.expert_names(layer):
            before = store.reader.bytes_read
            rows = store.rows(name, 3, 5)
            halves = 2 if name.rpartition(".")[0].endswith(("gate_proj", "up_proj")) else 1
            assert store.reader.bytes_read - before <= halves * rows.nbytes
            assert not store.row_reading.is_whole(name)
    for name, array in made.stored.items():
        count = array.shape[0]
        for start, stop in {(0, 1), (count // 3, count // 3 + 1 + count // 5), (count - 1, count)}:
            assert same(store.rows(name, start, stop), array[start:stop]), name
    with pytest.raises(IndexError):
        store.rows(name, 0, count + 1)


def raw_tensors(path: Path) -> list[tuple[Path, str, int, int]]:
    """(file, name, start, stop) of every tensor in the files."""
    return [
        (file, name, entry.start, entry.stop)
        for file in sorted(path.glob("*.safetensors"))
        for name, entry in read_header(file, "test").entries.items()
    ]


COUNTER = Path("/proc/self/io")  # of this process: bytes read since it began


def bytes_read() -> int:
    """0 on a system that does not count them."""
    if not COUNTER.is_file():
        return 0
    return int(COUNTER.read_text().split("rchar: ")[1].split("\n")[0])


def test_a_layer_reads_its_own_bytes_and_no_others(made: Made, tmp_path: Path) -> None:
    """These are overwritten once the store is open: layer 1 is what it was."""
    path = write_published(tmp_path / made.name, made.name)
    store, sizes = open_store(path), {True: 0, False: 0}
    for file, name, start, stop in raw_tensors(path):
        sizes[".layers.1." in name] += stop - start
        if ".layers.1." not in name:
            with open(file, "r+b") as opened:
                opened.seek(start)
                opened.write(b"\x55" * (stop - start))
    before = bytes_read()
    layer = store.layer(1)
    mx.eval(layer)
    read = bytes_read() - before
    assert 0 <= read - sizes[True] < 16384 < sizes[False] or not before
    assert layer and all(same(array, made.stored[name]) for name, array in layer.items())
    store.close()


@KINDS
def test_streamed_layers_compute_the_same(made: Made) -> None:
    """No layer stays; logits are those of a model that does, to the bit, and nothing is left."""
    options = ResidencyOptions("layers", 0)
    streamed = open_model(made.path, residency=options)
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
