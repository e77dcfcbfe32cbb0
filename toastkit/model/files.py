"""The files of a checkpoint: a directory, or one `.toast` file.

A directory has config.json, tokenizer.json and so on, and its weights in one of three layouts:
`model.safetensors`, shards listed by `model.safetensors.index.json`, or one file per layer as
`toast-model split` writes them. Imports neither MLX nor numpy.
"""

from __future__ import annotations

import os
import re
import stat
from functools import cached_property
from pathlib import Path

from toastkit.errors import DataError, NoInputError, from_os_error, reported_as
from toastkit.model import toast_format
from toastkit.model.safetensors import Header, check_sizes, read_header
from toastkit.text.bounded_json import parse

# What a model needs besides its weights; a .toast file carries those that exist.
SMALL_FILES = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
    "special_tokens_map.json", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
TEMPLATES_FOLDER = "additional_chat_templates"  # named templates, besides the default
MAX_TEMPLATES = 64
CONFIG_FILE = "config.json"
INDEX_FILE = "model.safetensors.index.json"
_SHARD = r"(.+-)([0-9]{1,9})(-of-([0-9]{1,9})\.safetensors)"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.ckpt")
SUFFIXES = (".json", ".safetensors", ".jinja")  # all that is ever read; no Python, no pickle
MAX_SMALL_FILE_BYTES = 16 << 20
MAX_LARGER_FILE_BYTES = 64 << 20  # limit for files that grow with the vocabulary or the tensors
LARGER_FILES = ("tokenizer.json", INDEX_FILE)


class ModelFiles:
    """A checkpoint. path: the directory or the .toast file. name: as the user gave it."""

    def __init__(self, path: Path, name: str):
        self.path = path
        self.name = name
        self.is_toast = path.is_file()

    def read(self, name: str) -> bytes | None:
        """Return the content of a small file (config, tokenizer, template), or None if absent.
        Raises DataError if it is too large, what from_os_error gives."""
        try:
            if self.is_toast:
                return self._read_inside(name)
            path = self.path / name
            status = path.stat()
            if not stat.S_ISREG(status.st_mode):
                raise DataError(f"{self.name}: {name} is not a regular file")
            self._check_size(name, status.st_size)
            return path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise from_os_error(error, f"cannot read {self.path / name}") from error

    def _read_inside(self, name: str) -> bytes | None:
        entry = self.headers[0].entries.get(toast_format.FILE_PREFIX + name)
        if entry is None:
            return None
        self._check_size(name, entry.nbytes)
        with open(self.path, "rb") as file:
            file.seek(entry.start)
            return file.read(entry.nbytes)

    def state(self) -> list[tuple[str, int, int, int]]:
        """Return what changes when a file of the checkpoint is replaced or written to: path, inode,
        size and time of each. Raises what from_os_error gives."""
        found = [str(self.path)]
        with reported_as(f"cannot read {self.path}"):
            if not self.is_toast:
                found = [entry.path for entry in os.scandir(self.path)]
                found += [str(self.path / name) for name in self.additional_templates()]
                found = sorted(name for name in found if name.endswith(SUFFIXES))
            about = [(name, os.stat(name)) for name in found]
        return [(name, one.st_ino, one.st_size, one.st_mtime_ns) for name, one in about]

    def small_files(self) -> list[str]:
        """Return the names of all possible small files. Raises as additional_templates."""
        return [*SMALL_FILES, *self.additional_templates()]

    def additional_templates(self) -> list[str]:
        """Return the names of the chat templates in their folder, sorted, without hidden files.
        Raises DataError for too many, what from_os_error gives."""
        try:
            if self.is_toast:
                start = f"{toast_format.FILE_PREFIX}{TEMPLATES_FOLDER}/"
                entries = self.headers[0].entries
                found = [name[len(start) :] for name in entries if name.startswith(start)]
            else:
                found = os.listdir(self.path / TEMPLATES_FOLDER)
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise from_os_error(error, f"cannot read {self.path / TEMPLATES_FOLDER}") from error
        # A name in a .toast file becomes a path when it is split.
        names = [n for n in found if re.fullmatch(r"[^./][^/]*\.jinja", n) and n.isprintable()]
        if len(names) > MAX_TEMPLATES:
            raise DataError(
                f"{self.name}: {len(names)} files in {TEMPLATES_FOLDER}, more than {MAX_TEMPLATES}"
            )
        return [f"{TEMPLATES_FOLDER}/{name}" for name in sorted(names)]

    def _check_size(self, name: str, size: int) -> None:
        limit = MAX_LARGER_FILE_BYTES if name in LARGER_FILES else MAX_SMALL_FILE_BYTES
        if size > limit:
            raise DataError(f"{self.name}: {name} has {size} bytes, more than {limit}")

    def read_json(self, name: str) -> dict | None:
        """Read a JSON object from a small file, None if absent; DataError if it is broken."""
        data = self.read(name)
        if data is None:
            return None
        try:
            value = parse(data, object_hook=_untag_float)
        except ValueError as error:
            raise DataError(f"{self.name}: {name} is not usable: {error}") from error
        if not isinstance(value, dict):
            raise DataError(f"{self.name}: {name} is not a JSON object")
        return value

    def weight_files(self) -> list[Path]:
        """Return the safetensors files. Raises NoInputError if there are none or a shard is
        missing, by the index or by the numbers in names; DataError for an unusable index."""
        if self.is_toast:
            return [self.path]
        index = self.read_json(INDEX_FILE)
        if index is not None:
            return self._shards(index)
        with reported_as(f"cannot read {self.path}"):
            names = sorted(os.listdir(self.path))
        files = [n for n in names if n.startswith("model") and n.endswith(".safetensors")]
        if not files and toast_format.OUTSIDE_FILE in names:
            files = [toast_format.OUTSIDE_FILE]
            files += [n for n in names if re.fullmatch(r"layer_\d{4,}\.safetensors", n)]
        if not files:
            raise self._no_weights()
        self._check_numbers(files)
        return [self._regular(name) for name in files]

    def _check_numbers(self, names: list[str]) -> None:
        """Raise NoInputError if a shard is missing, of those whose names say how many there are."""
        present = set(names)
        numbered = (re.fullmatch(_SHARD, name) for name in names)
        for before, width, of, count in {
            (m[1], len(m[2]), m[3], int(m[4])) for m in numbered if m is not None
        }:
            for number in range(1, count + 1):  # ends at the first that is missing
                name = f"{before}{number:0{width}}{of}"
                if name not in present:
                    raise NoInputError(f"{self.name}: {name[:100]} is missing")

    def _regular(self, name: str) -> Path:
        path = self.path / name
        with reported_as(f"cannot read {path}"):
            if stat.S_ISREG(path.stat().st_mode):
                return path
        raise DataError(f"{self.name}: {name} is not a regular file")

    def weight_map(self) -> dict[str, str]:
        """The file of each tensor by the index of shards, {} without one. Raises DataError."""
        places = {} if self.is_toast else (self.read_json(INDEX_FILE) or {}).get("weight_map", {})
        return {name: str(file) for name, file in places.items()}

    def _shards(self, index: dict) -> list[Path]:
        """Return the files that an index lists."""
        weight_map = index.get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise DataError(f"{self.name}: {INDEX_FILE} has no weight_map")
        shards = []
        for name in sorted(set(map(str, weight_map.values()))):
            # A symbolic link may lead elsewhere, as in the hub's cache; a name may not.
            if name != os.path.basename(name) or name in ("", ".", "..") or "\0" in name:
                raise DataError(f"{self.name}: {INDEX_FILE} points outside: {name[:100]!r}")
            if not name.endswith(".safetensors"):
                raise DataError(
                    f"{self.name}: {name[:100]} is not safetensors, and is never opened"
                )
            if not (self.path / name).exists():
                raise NoInputError(
                    f"{self.name}: {name[:100]} is missing, and {INDEX_FILE} needs it"
                )
            shards.append(self._regular(name))
        return shards

    def _no_weights(self) -> NoInputError:
        if any(found for pattern in PICKLES for found in self.path.glob(pattern)):
            return NoInputError(
                f"{self.name}: has its weights only as Python pickles, which are never opened",
                hint="convert it to safetensors first",
            )
        return NoInputError(f"{self.name}: no model*.safetensors in the checkpoint")

    @cached_property
    def headers(self) -> list[Header]:
        """The checked header of every weight file; no two hold the same tensor. Raises as
        weight_files and read_header do, and DataError if a split checkpoint lacks a layer, two
        files disagree or a newer toastkit wrote one."""
        headers: list[Header] = []
        size = tensors = 0
        for path in self.weight_files():
            header = read_header(path, self.name)
            version = header.metadata.get(toast_format.VERSION_KEY, toast_format.VERSION)
            if version not in (toast_format.VERSION, toast_format.EXPERT_MAJOR_VERSION):
                raise DataError(
                    f"{self.name}: {header.path.name} has format {version[:20]!r}, not "
                    f"{toast_format.VERSION} or {toast_format.EXPERT_MAJOR_VERSION}",
                    hint="a newer toastkit wrote it",
                )
            try:
                header = toast_format.with_experts(header)
            except ValueError as error:
                raise DataError(f"{self.name}: cannot read {path.name}: {error}") from None
            headers.append(header)
            size += header.data_start
            tensors += len(header.entries)
            try:
                check_sizes(size, tensors)
            except ValueError as error:
                raise DataError(f"{self.name}: {error}") from None
        if headers[0].path.name == toast_format.OUTSIDE_FILE:
            self._check_split(headers)
        if len(headers) > 1:
            self._keep_indexed_copy(headers)
        return headers

    def _keep_indexed_copy(self, headers: list[Header]) -> None:
        """Keep each tensor in one file: if several hold it, in the one that the index names. Raises
        DataError if it names none of them."""
        holders: dict[str, list[Header]] = {}
        for header in headers:
            for name in header.entries:
                holders.setdefault(name, []).append(header)
        twice = {name: found for name, found in holders.items() if len(found) > 1}
        weight_map = self.weight_map() if twice else {}
        for name, found in twice.items():
            if name.startswith(toast_format.PAD_PREFIX):
                continue
            files = [header.path.name for header in found]
            if weight_map.get(name) not in files:
                raise DataError(f"{self.name}: tensor {name} is in {files[0]} and in {files[1]}")
            for header in found:
                if header.path.name != weight_map[name]:
                    del header.entries[name]

    def _check_split(self, headers: list[Header]) -> None:
        found = {header.path.name for header in headers}
        for index in range(toast_format.layer_count(headers[0].metadata)):
            name = toast_format.LAYER_FILE.format(index)
            if name not in found:
                raise NoInputError(f"{self.name}: {name} is missing")

    @property
    def is_baked(self) -> bool:
        """True if toastkit wrote it: tensors already have the names of the model's parameters."""
        return all(toast_format.VERSION_KEY in header.metadata for header in self.headers)

    @cached_property
    def is_expert_major(self) -> bool:
        """True if experts are stored one after another, instead of one stack per parameter."""
        return any(e.inside is not None for h in self.headers for e in h.entries.values())


def _untag_float(value: dict) -> object:
    """Decode a non-finite float, which transformers writes as {"__float__": "Infinity"}."""
    if set(value) == {"__float__"} and value["__float__"] in ("Infinity", "-Infinity", "NaN"):
        return float(value["__float__"])
    return value
