"""What a run warns of, whoever runs it: a window that mlx_lm does not know, logits of NaN."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from tests.conftest import Toast
from tests.daemons import Daemon
from tests.pipes.test_bad_checkpoints import CONFIG, TOKENIZER, WEIGHTS, random_tensors, safetensors
from toastkit.model.locate import locate


def made(path: Path, config: dict, tensors: dict | None = None) -> Path:
    """A small model with crumb's tokenizer."""
    path.mkdir()
    for name in TOKENIZER:
        (path / name).write_bytes(locate("crumb").read(name) or b"")
    (path / WEIGHTS).write_bytes(safetensors({**random_tensors(), **(tensors or {})}))
    (path / "config.json").write_text(json.dumps({**CONFIG, **config}))
    return path


def test_a_window_that_is_not_kept_to(toast: Toast, tmp_path: Path) -> None:
    """Said once by whatever passes it, a prompt or an answer, and by info."""
    path = made(tmp_path / "mistral", {"model_type": "mistral", "sliding_window": 16})
    text = "one two three " * 20
    (tmp_path / "text").write_text(text)
    long = [
        toast("decode", "-m", path, "-n", "2", "--raw", text),
        toast("decode", "-m", path, "-n", "30", "--raw", "--temp", "2", "--seed", "1", "one"),
        toast("perplexity", "-m", path, tmp_path / "text"),
    ]
    for done in long:
        assert done.returncode == 0 and done.stderr.count(b"past 16 tokens mlx_lm looks") == 1
    assert b"past 16" not in toast("decode", "-m", path, "-n", "2", "--raw", "one").stderr
    assert b"past 16" not in toast("decode", "-q", "-m", path, "-n", "2", "--raw", text).stderr
    shown = toast("model", "info", path).stdout
    assert b"16 tokens, which mlx_lm does not keep to" in shown


def test_a_daemons_clients_are_warned_as_one_process_warns(toast: Toast, tmp_path: Path) -> None:
    """Each of them, and once; not those who want quiet. The exit code is the same."""
    window = made(tmp_path / "mistral", {"model_type": "mistral", "sliding_window": 16})
    broken = made(tmp_path / "llama", {}, {"model.norm.weight": np.full(32, np.nan)})
    long = "one two three " * 20
    for path, said in ((window, b"past 16 tokens"), (broken, b"gives NaN for logits")):
        with Daemon(path) as daemon:
            for command in (["toast", "-m", path, "-n", "2"], ["decode", "-m", path, "-n", "2"]):
                for more in ([], [], ["--no-daemon"]):
                    done = daemon.toast(*command, *more, long)
                    assert done.returncode == 0, done.stderr
                    assert done.stderr.count(said) == done.stderr.count(b": warning: ") == 1
                assert daemon.toast(*command, "-q", long).stderr == b""
