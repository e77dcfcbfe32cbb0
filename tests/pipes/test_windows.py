"""A sliding window that mlx_lm does not know, met by real commands."""

from __future__ import annotations

import json
from pathlib import Path

from tests.conftest import Toast
from tests.pipes.test_bad_checkpoints import (
    CONFIG,
    TOKENIZER,
    WEIGHTS,
    random_tensors,
    safetensors,
)
from toastkit.model.locate import locate


def test_a_window_that_is_not_kept_to(toast: Toast, tmp_path: Path) -> None:
    """Said once by whatever passes it, a prompt or an answer, and by info."""
    path = tmp_path / "mistral"
    path.mkdir()
    for name in TOKENIZER:
        (path / name).write_bytes(locate("crumb").read(name) or b"")
    (path / WEIGHTS).write_bytes(safetensors(random_tensors()))
    config = {**CONFIG, "model_type": "mistral", "sliding_window": 16}
    (path / "config.json").write_text(json.dumps(config))
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
