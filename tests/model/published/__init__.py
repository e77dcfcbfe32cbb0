"""Random checkpoints as Hugging Face publishes them: one directory for each tested architecture.

    path = write_published(folder / "qwen3_moe", "qwen3_moe")

Names, shapes and dtypes are those of the files on the hub, from before mlx_lm's `sanitize`: experts
one by one, convolutions in torch's layout, norms around zero, vision towers and further heads that
a text model drops. The tables of names are in dense.py, experts.py and recurrent.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

from . import dense, experts, quantised, recurrent
from .writing import Checkpoint, write_checkpoint

MAKERS: dict[str, Callable[[], Checkpoint]] = {
    "llama": dense.llama,
    "llama_tied": dense.tied_llama,
    "qwen2": dense.qwen2,
    "qwen3": dense.qwen3,
    "gemma3_text": dense.gemma3_text,
    "phi3": dense.phi3,
    "qwen3_moe": experts.qwen3_moe,
    "qwen3_moe_quantised": quantised.qwen3_moe,
    "qwen2_moe": experts.qwen2_moe,
    "olmoe": experts.olmoe,
    "mixtral": experts.mixtral,
    "gpt_oss": experts.gpt_oss,
    "qwen3_next": recurrent.qwen3_next,
    "qwen3_5": recurrent.qwen3_5,
    "qwen3_5_moe": recurrent.qwen3_5_moe,
    "mamba2": recurrent.mamba2,
    "falcon_h1": recurrent.falcon_h1,
}
NAMES = tuple(MAKERS)


def write_published(path: Path, name: str) -> Path:
    """A new directory with the checkpoint of that name (one of NAMES). Returns the directory."""
    return write_checkpoint(path, checkpoint(name))


@lru_cache
def checkpoint(name: str) -> Checkpoint:
    """The checkpoint of that name: one object, so that its tensors are drawn once."""
    return MAKERS[name]()
