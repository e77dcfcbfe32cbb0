"""A checkpoint's config: sizes, limits, sampling defaults; and its fingerprint."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

from toastkit.errors import DataError, UsageError, reported_as
from toastkit.model.files import ModelFiles
from toastkit.model.safetensors import LENGTH, MAX_HEADER_BYTES
from toastkit.private_files import pread_past_cache

SAMPLES_PER_FILE = 64
SAMPLE_BYTES = 4096
MAX_NUMBER = 1 << 53  # largest number accepted here; beyond it floats have gaps
# Names for the longest context: nearly all use the first; gpt2 and gptj n_positions.
CONTEXT_NAMES = ("max_position_embeddings", "n_positions", "model_max_length", "max_seq_len")
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty")


class ModelConfig(NamedTuple):
    """model_type: names the architecture. vocab: entries in the logits. context: most tokens the
    positions allow, None if the checkpoint sets no limit. raw: all of config.json."""

    model_type: str
    vocab: int
    context: int | None
    raw: dict

    @property
    def levels(self) -> tuple[dict, dict]:
        """The levels at which a field of the language model may be: the top, and `text_config`."""
        text = self.raw.get("text_config")
        return self.raw, text if isinstance(text, dict) else {}


def load_config(files: ModelFiles) -> ModelConfig:
    """Read config.json. Raises DataError for numbers that are not finite, and if a required field
    is missing."""
    raw = files.read_json("config.json")
    if raw is None:
        raise DataError(f"{files.name}: no config.json")
    _check_finite(raw, files.name)
    model_type = raw.get("model_type")
    if not isinstance(model_type, str):
        raise DataError(f"{files.name}: config.json has no model_type")
    config = ModelConfig(model_type, 0, None, raw)
    top, text = config.levels
    vocab = top.get("vocab_size", text.get("vocab_size"))
    if type(vocab) is not int or not 1 <= vocab <= MAX_NUMBER:
        raise DataError(f"{files.name}: config.json has no usable vocab_size")
    # The context length, by the first of its names.
    candidates = ((name, fields.get(name)) for fields in (top, text) for name in CONTEXT_NAMES)
    name, context = next((pair for pair in candidates if pair[1] is not None), ("", None))
    if context is not None and (type(context) is not int or not 1 <= context <= MAX_NUMBER):
        raise DataError(f"{files.name}: config.json has no usable {name}")
    return config._replace(vocab=vocab, context=context)


def _check_finite(raw: dict, where: str) -> None:
    """Raise DataError for NaN, and for infinity except in fields where it means no limit, such as
    the time_step_limit of Mamba2."""
    left: list[tuple[str, object]] = [("", raw)]
    while left:
        name, value = left.pop()
        if isinstance(value, float) and not math.isfinite(value):
            if math.isnan(value) or "limit" not in name:
                raise DataError(f"{where}: config.json: {name[:100]} is {value}, no finite number")
        elif isinstance(value, dict):
            left += [(f"{name}.{key}" if name else key, inner) for key, inner in value.items()]
        elif isinstance(value, list):
            left += [(name, inner) for inner in value]


def check_ids(ids: Collection[int], vocab: int) -> None:
    """Raise DataError for a token outside a vocabulary of `vocab` entries."""
    if ids and max(ids) >= vocab:
        raise DataError(f"token {max(ids)} is outside the vocabulary of {vocab}")


def digits(number: int) -> str:
    """Format an integer for a message, however long."""
    return str(number) if abs(number) <= MAX_NUMBER else "of too many digits"


def sampling_defaults(files: ModelFiles) -> dict[str, float | int]:
    """Return the sampling settings in generation_config.json, by the names of our options.

    As in transformers, they apply only if `do_sample` is true: a checkpoint without it is greedy. A
    top_k below 0 is off, as in vLLM and llama.cpp. Raises DataError for invalid values.
    """
    generation = files.read_json("generation_config.json") or {}
    if generation.get("do_sample") is not True:
        return {}
    from toastkit.sampling.sampling_options import SamplingOptions

    found: dict[str, Any] = {"temperature": 1.0}
    for name in SAMPLING:
        value = generation.get(name)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            if not -MAX_NUMBER <= value <= MAX_NUMBER:  # refuses NaN too
                raise DataError(f"{files.name}: generation_config.json has no usable {name}")
            found[name] = max(int(value), 0) if name == "top_k" else float(value)
    try:
        SamplingOptions(**found).validate()
    except UsageError as error:
        raise DataError(f"{files.name}: generation_config.json: {error.message}") from error
    return found


def fingerprint(files: ModelFiles) -> str:
    """Return 32 hex digits that identify this checkpoint and tokenizer.

    Covers config.json, tokenizer.json and the chat templates whole; of each weight file its size,
    its safetensors header and 64 samples of 4 KiB spread evenly, so that a 40 GB checkpoint costs
    milliseconds while a fine-tune of the same shapes still differs.
    """
    digest = hashlib.blake2b(digest_size=16)
    names = ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
    for name in [*names, *files.additional_templates()]:
        data = files.read(name)
        digest.update(b"%s %d\n" % (name.encode(), -1 if data is None else len(data)))
        digest.update(data or b"")
    if data := files.read("chat_template.json"):
        digest.update(b"%d\n" % len(data) + data)
    for path in files.weight_files():
        _digest_weights(digest, path)
    return digest.hexdigest()


def _digest_weights(digest: hashlib.blake2b, path: Path) -> None:
    with reported_as(f"cannot read {path}"), open(path, "rb") as file:
        size = file.seek(0, 2)
        file.seek(0)
        first = file.read(8)
        header = min(*LENGTH.unpack(first), MAX_HEADER_BYTES) if len(first) == 8 else 0
        digest.update(b"%d %d\n" % (size, header))
        digest.update(file.read(header))
        start = 8 + header
        stride = max((size - start) // SAMPLES_PER_FILE, SAMPLE_BYTES)
        sample = bytearray(SAMPLE_BYTES)
        for offset in range(start, size, stride):
            # Small pages in the cache would keep those around them from being large.
            count = pread_past_cache(file.fileno(), [sample], offset)
            if count is None:
                count = os.preadv(file.fileno(), [sample], offset)
            digest.update(memoryview(sample)[:count])
