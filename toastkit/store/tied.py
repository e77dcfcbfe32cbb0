"""Whether the output matrix is the embedding: what is stored decides, not what config.json says or
leaves out. An architecture that believes it tied drops a matrix of its own without a word."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from toastkit.model.config import ModelConfig
from toastkit.model.files import ModelFiles
from toastkit.model.safetensors import Entry, chunks

FIELD = "tie_word_embeddings"
HEADS, EMBEDDINGS = ("lm_head",), ("embed_tokens", "wte", "embeddings", "embed_in")
# Where those of the language model are; others, as of layers that predict further tokens, are not.
PLACES = {"model", "language_model", "text_model", "transformer", "backbone", "gpt_neox"}


def has_own_head(files: ModelFiles) -> bool:
    """Whether an output matrix is stored that is not the embedding once more. Reads both as far as
    they are alike. Raises IOFailure, and as ModelFiles.headers does."""
    heads = list(_named(files, HEADS))
    embeddings = list(_named(files, EMBEDDINGS)) if heads else []
    return bool(embeddings) and not any(_alike(heads[0], other) for other in embeddings)


def untied(config: ModelConfig) -> ModelConfig:
    """The configuration of a model whose output matrix is its own."""
    raw = {**config.raw, FIELD: False}
    if isinstance(raw.get("text_config"), dict):
        raw["text_config"] = {**raw["text_config"], FIELD: False}
    return config._replace(raw=raw)


def _named(files: ModelFiles, words: tuple[str, ...]) -> Iterator[tuple[Path, Entry]]:
    ends = tuple(f"{word}.weight" for word in words)
    for header in files.headers:
        for name, entry in header.entries.items():
            if name.endswith(ends) and entry.inside is None:  # no expert has a head
                *places, word, _ = name.split(".")
                if word in words and PLACES.issuperset(places):
                    yield header.path, entry


def _alike(one: tuple[Path, Entry], other: tuple[Path, Entry]) -> bool:
    """Whether two stored tensors are the same to the byte."""
    (path, a), (beside, b) = one, other
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    pairs = zip(chunks(path, a.start, a.stop), chunks(beside, b.start, b.stop))
    return all(first == second for first, second in pairs)
