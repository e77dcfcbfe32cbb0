"""Calibrated thresholds, stored per model:

    $XDG_CACHE_HOME/toastkit/thresholds/FINGERPRINT.json

One JSON object: schema (1) and the fields of Thresholds. The file is replaced as a whole: a reader
finds the old or the new one.
"""

from __future__ import annotations

import re
from dataclasses import asdict, replace
from pathlib import Path

from toastkit.base_directories import own_directory
from toastkit.errors import DataError, from_os_error
from toastkit.gears.calibration import Thresholds
from toastkit.gears.monitor import MonitorOptions
from toastkit.text.exact_numbers import counted

SCHEMA_VERSION = 1
MAX_BYTES = 4096
_PLAIN = re.compile(r"[0-9A-Za-z][0-9A-Za-z_.-]{0,127}")


def path(fingerprint: str) -> Path:
    """The file of a model's thresholds. Raises DataError for a fingerprint that is not a plain
    word: it may come from any stream, and must not lead out of the directory."""
    if not _is_plain(fingerprint):
        raise DataError(f"invalid fingerprint: {str(fingerprint)[:40]!r} is not a plain word")
    return Path(own_directory("CACHE", "thresholds", f"{fingerprint}.json"))


def _is_plain(fingerprint: str) -> bool:
    return isinstance(fingerprint, str) and _PLAIN.fullmatch(fingerprint) is not None


def save(fingerprint: str, thresholds: Thresholds) -> Path:
    """Store a model's thresholds, replacing earlier ones; returns the file. Raises DataError,
    CannotCreateError, IOFailure; the earlier ones are then unchanged."""
    import json

    from toastkit.private_files import keep_text

    thresholds.validate()
    file = path(fingerprint)
    text = json.dumps({"schema": SCHEMA_VERSION, **asdict(thresholds)}, indent=2) + "\n"
    keep_text(file, text, "thresholds")
    return file


def load(fingerprint: str) -> Thresholds | None:
    """Load a model's thresholds; None if there are none, or the fingerprint is not a plain word.
    Raises DataError, which names the file, for what `save` did not write; NoInputError, IOFailure
    if it cannot be read."""
    from toastkit.private_files import read_file

    if not _is_plain(fingerprint):
        return None
    file = path(fingerprint)
    try:
        data = read_file(file, MAX_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise from_os_error(error, f"cannot read thresholds {file}") from error
    try:
        return _decode(data)
    except DataError as error:
        raise DataError(
            f"cannot read thresholds {file}: {error.message}", hint="remove it, or calibrate again"
        ) from error


def _decode(data: bytes) -> Thresholds:
    import json

    try:
        fields = json.loads(data) if len(data) <= MAX_BYTES else None
    except (ValueError, RecursionError) as error:  # not UTF-8 is a ValueError too
        raise DataError("not JSON") from error
    if not isinstance(fields, dict):
        raise DataError("not an object of a few fields")
    schema = fields.pop("schema", None)
    if type(schema) is int and schema > SCHEMA_VERSION:
        raise DataError(f"its schema {schema} is newer than {SCHEMA_VERSION}")
    if schema != SCHEMA_VERSION:
        raise DataError("it has no schema")
    try:
        thresholds = Thresholds(**fields)
    except TypeError as error:
        raise DataError("it has other fields") from error
    thresholds.validate()
    return thresholds


def monitor_options(
    fingerprint: str, vocab: int, base: MonitorOptions
) -> tuple[MonitorOptions, str]:
    """base with the thresholds that were calibrated for this model, and their origin in a few
    words. Thresholds for another vocabulary than `vocab` ids are ignored: they are bits at their
    own. Raises as `load`."""
    stored = load(fingerprint)
    if stored is not None and stored.vocab == vocab:
        found = replace(base, low=stored.low, high=stored.high, scale_to_vocab=False)
        return found, f"calibrated ({stored.strategy}, {counted(stored.samples, 'sample')})"
    return base, origin_of(base, vocab)


def origin_of(options: MonitorOptions, vocab: int) -> str:
    """The origin of thresholds that are not calibrated, in a few words: "defaults for 32,768 ids,
    scaled to 4,096". vocab: the ids that they are used for."""
    defaults = MonitorOptions()
    same = (options.low, options.high) == (defaults.low, defaults.high)
    word = "defaults" if same else "given"
    if not options.scale_to_vocab:
        return f"{word}, not scaled"
    scaled = "" if vocab == options.reference_vocab else f", scaled to {vocab:,}"
    return f"{word} for {options.reference_vocab:,} ids{scaled}"
