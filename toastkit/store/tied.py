"""Whether the output matrix (LM head) is tied to the embedding. What is stored decides, not
config.json: an architecture told that they are tied silently drops a matrix of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from toastkit.model.config import ModelConfig
from toastkit.model.files import ModelFiles
from toastkit.model.safetensors import Entry, chunks

FIELD = "tie_word_embeddings"
HEADS, EMBEDDINGS = ("lm_head",), ("embed_tokens", "wte", "embeddings", "embed_in")
FEW_BYTES = 1 << 14  # that are compared first: others than the same differ in them
# Modules of the language model; heads elsewhere belong to other things, such as multi-token
# prediction.
PLACES = {"model", "language_model", "text_model", "transformer", "backbone", "gpt_neox"}


def has_own_head(files: ModelFiles) -> bool:
    """True if a stored output matrix differs from the embedding. Reads both up to the first
    difference.
    Raises IOFailure, and as ModelFiles.headers does."""
    heads = list(_named(files, HEADS))
    embeddings = list(_named(files, EMBEDDINGS)) if heads else []
    return bool(embeddings) and not any(_same_bytes(heads[0], other) for other in embeddings)


def untied(config: ModelConfig) -> ModelConfig:
    """The configuration with its output matrix untied."""
    raw = {**config.raw, FIELD: False}
    if isinstance(raw.get("text_config"), dict):
        raw["text_config"] = {**raw["text_config"], FIELD: False}
    return config._replace(raw=raw)


def _named(files: ModelFiles, words: tuple[str, ...]) -> Iterator[tuple[Path, Entry]]:
    ends = tuple(f"{word}.weight" for word in words)
    for header in files.headers:
        for name, entry in header.entries.items():
            if name.endswith(ends) and entry.inside is None:  # experts have no head
                *places, word, _ = name.split(".")
                if word in words and PLACES.issuperset(places):
                    yield header.path, entry


def _same_bytes(one: tuple[Path, Entry], other: tuple[Path, Entry]) -> bool:
    """True if two stored tensors are the same to the byte."""
    a, b = one[1], other[1]
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    return all(first == second for first, second in zip(_pieces(*one), _pieces(*other)))


def _pieces(path: Path, entry: Entry) -> Iterator[memoryview | None]:
    """The bytes of a stored tensor, as chunks gives them: few first."""
    few = min(entry.start + FEW_BYTES, entry.stop)
    yield from chunks(path, entry.start, few)
    yield from chunks(path, few, entry.stop)
