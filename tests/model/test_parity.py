"""The same logits as mlx_lm on the same directory, for the embedded model; and small random models
that commands run, in shards and tied, or quantised (their logits: test_architectures.py)."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from tests.model.checkpoints import open_model, quantised_qwen3, tied_llama
from tests.model.reference import PROMPTS
from tests.unpack import unpack
from toastkit.frames import FrameReader, Head, Token, Tokens, unpack_ids
from toastkit.model.locate import locate

TEXT = "The fox and the river"


def theirs(path: Path):
    """mlx_lm's own model for a directory, in float32."""
    from mlx_lm.utils import load_model

    model, _ = load_model(path)
    model.set_dtype(mx.float32)
    return model


def distance(a, b) -> float:
    return float(np.abs(np.array(a, np.float64) - np.array(b, np.float64)).max())


def test_the_embedded_model(crumb, tmp_path: Path) -> None:
    from mlx_lm.models.cache import make_prompt_cache

    model = theirs(unpack(tmp_path / "crumb"))
    for prompt in PROMPTS[::6]:
        ids = prompt["token_ids"]
        cache = make_prompt_cache(model)
        expected = model(mx.array(ids)[None], cache=cache)[0, -1]
        mine = crumb.new_cache()
        logits = crumb.prefill(ids, mine)
        assert distance(logits, expected) < 1e-4, prompt["name"]
        expected = model(mx.array([[prompt["greedy"][0]]]), cache=cache)[0, -1]
        assert distance(crumb.step(prompt["greedy"][0], mine), expected) < 1e-4, prompt["name"]


# ------------------------------------------------------------------------- small random checkpoints


@pytest.fixture(scope="module", params=[tied_llama, quantised_qwen3])
def small(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, mlx_started):
    """A directory with a small random checkpoint, and an Engine for it."""
    path = request.param(tmp_path_factory.mktemp("models") / "m")
    return path, open_model(path)


def greedy(engine, ids: list[int], count: int) -> list[int]:
    cache = engine.new_cache()
    logits = engine.prefill(ids, cache)
    found = []
    while len(found) < count:
        found.append(int(mx.argmax(logits)))
        logits = engine.step(found[-1], cache)
    return found


def test_the_pipeline_runs_a_directory(small, pipeline) -> None:
    """-m DIR at the first stage is enough: the others find it in the head."""
    path, engine = small
    done = pipeline(
        ["tokenize", "--raw", "-m", path, TEXT],
        ["prefill", "--dtype", "float32"],
        ["decode", "--dtype", "float32", "--greedy", "-n", "8"],
    )
    assert done.codes == [0, 0, 0], done.errors
    import io

    frames = list(FrameReader(io.BytesIO(done.out)))
    assert frames[0].model == str(path) and type(frames[0]) is Head
    ids = unpack_ids(next(f.ids for f in frames if type(f) is Tokens))
    assert [f.id for f in frames if type(f) is Token] == greedy(engine, ids, 8)


def test_one_process_runs_a_directory(small, toast) -> None:
    path, engine = small
    done = toast(
        "decode", "--raw", "-m", path, "--dtype", "float32", "-n", "8", "--json", "--ignore-eos",
        "--temp", "0", TEXT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    from toastkit.text.tokenizer import Tokenizer

    ids = Tokenizer(locate(str(path))).encode_prompt(TEXT, False)
    assert [line["id"] for line in lines if "id" in line] == greedy(engine, ids, 8)
    assert lines[-1]["end"] == "length"
