"""Makes the table of a large vocabulary from what the library has loaded, and tests it beside that.

python -m toastkit.text.vocabulary_making < tokenizer.json
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Iterator
from typing import Any

from toastkit.base_directories import remove_old
from toastkit.private_files import (
    closing_fd,
    make_private_directories,
    not_private,
    open_private,
    replace_file,
    try_lock,
)
from toastkit.text import library
from toastkit.text.vocabulary import PartialVocabulary, WholeVocabulary
from toastkit.text.vocabulary_table import SUFFIX, Table, pack, table_folder, table_path

MAX_TABLES = 16
SAMPLES, SAMPLE_TOKENS = 200, 12  # texts that a table is tested with, and their tokens
OPTIONS = ("unk_token", "fuse_unk", "byte_fallback", "ignore_merges")


def make(data: bytes) -> bool:
    """Make and keep the table of a tokenizer.json, unless there is one, or another process makes
    one. Return whether there is one that can be used. Raises DataError for a broken
    tokenizer.json, OSError."""
    folder = table_folder()
    make_private_directories(folder)
    if not_private(folder):
        return False
    with closing_fd(open_private(os.path.join(folder, "lock"), os.O_RDWR | os.O_CREAT)) as lock:
        if not try_lock(lock):
            return False
        table = Table.find(data)
        if table is None:
            tokenizer = library.load(data)
            try:
                made = contents(tokenizer)
            except Exception:  # or each command would begin it again
                made = _unusable()
            remove_old(folder, MAX_TABLES - 1, (SUFFIX,))
            # Synced: after a power failure it might hold zeros.
            replace_file(table_path(data), made, sync=True)
            table = Table.find(data)
        return table is not None and table.usable


def contents(tokenizer: Any) -> bytes:
    """Return the table of a `tokenizers.Tokenizer`: one that says that it cannot be used, where a
    text's words would not do, or do not in a test."""
    document = json.loads(tokenizer.to_str())
    model = document["model"]
    # A word whose id is another's too is not written.
    if not _is_local(model) or len(model["vocab"]) != WholeVocabulary(tokenizer).size:
        return _unusable()
    words = sorted((token_id, text) for text, token_id in model["vocab"].items())
    made = pack(_header(document, words, tokenizer), words, list(map(tuple, model["merges"])))
    if made is None or not _agrees(PartialVocabulary(Table(made), lambda: tokenizer), tokenizer):
        return _unusable()
    return made


def _unusable() -> bytes:
    made = pack({"usable": False})
    assert made is not None
    return made


def _is_local(model: dict[str, Any]) -> bool:
    """True if the encoding of a word depends on nothing but the words that occur in it, and those
    that stand for what is unknown."""
    if model["type"] != "BPE" or any(
        model.get(name) for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix")
    ):
        return False
    vocab, special = model["vocab"], _for_unknown(model)
    return (
        bool(vocab)
        and (model["unk_token"] is None or model["unk_token"] in vocab)
        # Otherwise some unknown characters are dropped, and others are not.
        and (model["unk_token"] is not None or len(special) in (0, 256))
        and special.isdisjoint(part for merge in model["merges"] for part in merge)
    )


def _for_unknown(model: dict[str, Any]) -> set[str]:
    """Return the words that stand for characters that are not in the vocabulary."""
    names = [f"<0x{byte:02X}>" for byte in range(256)] if model["byte_fallback"] else []
    return {name for name in [*names, model["unk_token"]] if name in model["vocab"]}


def _header(
    document: dict[str, Any], words: list[tuple[int, str]], tokenizer: Any
) -> dict[str, Any]:
    model, whole = document["model"], WholeVocabulary(tokenizer)
    special = _for_unknown(model)
    # The library takes an added token's id from the model, or else numbers it by itself.
    ids = {token["content"]: token["id"] for token in document["added_tokens"]}
    rules = {**document, "model": {**model, "vocab": ids, "merges": [], "unk_token": None}}
    return {
        "usable": True,
        "rules": json.dumps(rules),
        "options": {name: model[name] for name in OPTIONS},
        "size": whole.size, "highest": whole.highest, "reach": whole.reach,
        "longest": max(len(text) for _, text in words),
        "drops": not special,
        "always": [number for number, (_, text) in enumerate(words) if text in special],
    }  # fmt: skip


def _agrees(partial: PartialVocabulary, tokenizer: Any) -> bool:
    """True if a table's words give the ids that all words give, in texts made of tokens."""
    if partial.rules.get_added_tokens_decoder() != tokenizer.get_added_tokens_decoder():
        return False
    for text in _samples(tokenizer):
        for special in (False, True):
            found = partial.loaded_for([text]).encode(text, add_special_tokens=special).ids
            if found != tokenizer.encode(text, add_special_tokens=special).ids:
                return False
    return True


def _samples(tokenizer: Any) -> Iterator[str]:
    ids = sorted(tokenizer.get_vocab().values())
    choose = random.Random(0)
    for _ in range(SAMPLES):
        tokens = choose.sample(ids, min(SAMPLE_TOKENS, len(ids)))
        yield tokenizer.decode(tokens, skip_special_tokens=False)


if __name__ == "__main__":
    os.nice(10)  # not 19: it should be there for the next command
    sys.exit(0 if make(sys.stdin.buffer.read()) else 1)
