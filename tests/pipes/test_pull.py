"""toast-model pull, from a hub on this machine: what comes, what breaks off, what is not asked."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.forked import Process
from tests.pipes.conftest import Model
from tests.pipes.fake_hub import FakeHub, serving
from tests.pipes.pipelines import begin
from tests.pipes.test_toast_model import ok, refused
from toastkit.frames import Head, Tokens, dumps, pack_ids
from toastkit.model.locate import locate

SMALL = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json")
FILES = {name: locate("crumb").read(name) or b"" for name in SMALL}
UNWANTED = (
    "pytorch_model.bin", "modeling_x.py", "original/model.safetensors", "README.md",
    "other/rag.jinja", "additional_chat_templates/old/rag.jinja",
)  # fmt: skip
TEMPLATE = "additional_chat_templates/rag.jinja"


@pytest.fixture(scope="module")
def weights() -> bytes:
    """A file of many pieces of a download."""
    header = json.dumps({"w": {"dtype": "U8", "shape": [12 << 20], "data_offsets": [0, 12 << 20]}})
    return len(header).to_bytes(8, "little") + header.encode() + bytes(12 << 20)


class Stalled(NamedTuple):
    """A pull that stands still. env: its environment, with folders of its own in `folder`.
    refused: another, which is told to ask again in five minutes."""

    hub: FakeHub
    env: dict[str, str]
    process: subprocess.Popen | Process
    folder: Path
    refused: subprocess.Popen | Process


@pytest.fixture(scope="module", autouse=True)
def stalled(
    weights: bytes, library_at_home: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stalled]:
    """Begun before the tests here, the last of which waits for its end."""
    folder = tmp_path_factory.mktemp("stalled")
    files = {**FILES, "model.safetensors": weights}
    with serving(files) as hub, serving(files) as busy:
        hub.missing = 1000
        busy.refusing, busy.headers = 429, {"Retry-After": "300"}
        env = {
            "HF_HUB_OFFLINE": "0", "HF_ENDPOINT": hub.url, "HF_HUB_DOWNLOAD_TIMEOUT": "1",
            "XDG_DATA_HOME": str(folder / "data"), "HF_HOME": str(folder / "hf"),
        }  # fmt: skip
        process = begin("model", "pull", "org/name", env=env)
        elsewhere = {"HF_ENDPOINT": busy.url, "HF_HOME": str(folder / "busy")}
        refused = begin("model", "pull", "org/name", env={**env, **elsewhere})
        yield Stalled(hub, env, process, folder, refused)
        for one in (process, refused):
            one.kill()
            one.wait()


def test_pull(model: Model, weights: bytes, tmp_path: Path) -> None:
    files = {**FILES, "model.safetensors": weights, **dict.fromkeys((*UNWANTED, TEMPLATE), b"x")}
    with serving(files) as hub:
        env = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": hub.url}
        hub.stop_after = 11 << 20
        path = Path(ok(model("pull", "org/name", env=env)).removesuffix("\n"))
        assert (path / "model.safetensors").read_bytes() == weights
        names = {name for name, _ in hub.sent}
        assert names == {*SMALL, "model.safetensors", TEMPLATE}
        assert (path / TEMPLATE).read_bytes() == b"x"
        # The connection broke; the download went on from the last piece.
        assert [start for name, start in hub.sent if name == "model.safetensors"] == [0, 11 << 20]
        hub.sent.clear()
        (path / "tokenizer.json").resolve().unlink()
        assert ok(model("pull", "org/name", env=env)) == f"{path}\n"
        assert {name for name, _ in hub.sent} == {"tokenizer.json"}
        refused(model("pull", "org/other", env=env), 66, "no such model on the hub: org/other")
        done = model("pull", "org/name", "--revision", "v9", env=env)
        refused(done, 66, "no such revision on the hub: org/name at v9")
    assert ok(model("pull", "org/name", env={"HF_HUB_OFFLINE": "1"})) == f"{path}\n"
    assert "org/name" in ok(model("list"))


def blobs(folder: Path) -> list[str]:
    """What the cache holds of org/name, whole or not."""
    return sorted(os.listdir(folder / "hf" / "hub" / "models--org--name" / "blobs"))


def test_a_pull_that_comes_damaged(model: Model, weights: bytes, tmp_path: Path) -> None:
    with serving({**FILES, "model.safetensors": weights}) as hub:
        env = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": hub.url}
        hub.damaged = True
        hint = refused(
            model("pull", "org/name", env=env), 74,
            "cannot fetch org/name: model.safetensors came damaged: its hash is not the hub's",
        )  # fmt: skip
        assert hint == "  hint: it has been removed: run it again"
        assert len(blobs(tmp_path)) == len(SMALL) - 1  # config.json, the last, was not asked for
        refused(model("info", "org/name"), 66, "no such model here")
        hub.damaged = False
        hub.sent.clear()
        path = ok(model("pull", "org/name", env=env)).removesuffix("\n")
        assert {name for name, _ in hub.sent} == {"model.safetensors", "config.json"}
        assert (Path(path) / "model.safetensors").read_bytes() == weights


def test_a_pull_of_weights_that_are_wrong_on_the_hub(model: Model, tmp_path: Path) -> None:
    with serving({**FILES, "model.safetensors": b"\xff" * 100}) as hub:
        env = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": hub.url}
        said = "org/name: cannot read model.safetensors: not a safetensors file"
        refused(model("pull", "org/name", env=env), 65, said)
    assert ok(model("list", "--json")).count("\n") == 1  # crumb alone


@pytest.mark.parametrize("name", ["prefill", "detokenize"])
def test_a_stream_fetches_nothing(toast, weights: bytes, name: str) -> None:
    stream = b"".join(map(dumps, [Head("org/name", "ab" * 16, 4096, [2]), Tokens(pack_ids([1]))]))
    with serving({**FILES, "model.safetensors": weights}) as hub:
        done = toast(name, stdin=stream, env={"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": hub.url})
        assert (done.returncode, hub.asked) == (66, [])
    line, hint = done.stderr.decode().splitlines()
    assert line == f"toast-{name}: no such model here: org/name"
    assert hint == "  hint: toast-model pull org/name"


def test_pull_offline(model: Model) -> None:
    done = model("pull", "org/name", env={"HF_HUB_OFFLINE": "1"})
    refused(done, 69, "cannot fetch org/name: it is not in the cache, and HF_HUB_OFFLINE is set")
    done = model(
        "pull", "org/name", env={"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9"}
    )
    refused(done, 69, "cannot fetch org/name: the hub cannot be reached")
    env = {"HF_HUB_OFFLINE": "0", "HF_HUB_DOWNLOAD_TIMEOUT": "-5"}
    done = model("pull", "org/name", env=env)
    refused(done, 64, "HF_HUB_DOWNLOAD_TIMEOUT: '-5' is no number of seconds")


def test_a_pull_that_stalls(stalled: Stalled) -> None:
    """Six times the library's timeout, which is a second at least; then it can be interrupted."""
    hub, env, process, folder, busy = stalled
    out, said = process.communicate(timeout=60)
    done = subprocess.CompletedProcess([], process.wait(), out.decode(), said.decode())
    hint = refused(done, 69, "cannot fetch org/name: nothing new has come for 6 s")
    assert "HF_HUB_DOWNLOAD_TIMEOUT" in hint
    _, said = busy.communicate(timeout=60)
    assert busy.wait() == 69 and said.splitlines() == [
        b"toast-model: cannot fetch org/name: nothing new has come for 6 s; "
        b"the hub has answered 429 Too Many Requests",
        b"  hint: the files that are whole are kept: run it again later",
    ]
    left = blobs(folder)
    assert not any("incomplete" in name for name in left)
    hub.sent.clear()
    process = begin("model", "pull", "org/name", env={**env, "HF_HUB_DOWNLOAD_TIMEOUT": "600"})
    while not hub.sent and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 130 and blobs(folder) == left
