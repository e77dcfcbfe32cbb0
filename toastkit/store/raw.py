"""Tensors as the files hold them, under their stored names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import mlx.core as mx
import numpy as np

from toastkit.errors import DataError, from_os_error
from toastkit.model.files import ModelFiles
from toastkit.model.safetensors import Entry
from toastkit.model.toast_format import is_model_tensor
from toastkit.store.prefetch import Range

# dtype in the file -> how numpy sees the bytes, and as what MLX takes them.
DTYPES = {
    "BOOL": ("?", mx.bool_), "U8": ("u1", mx.uint8), "I8": ("i1", mx.int8),
    "U16": ("<u2", mx.uint16), "I16": ("<i2", mx.int16), "F16": ("<f2", mx.float16),
    "BF16": ("<u2", mx.bfloat16), "U32": ("<u4", mx.uint32), "I32": ("<i4", mx.int32),
    "F32": ("<f4", mx.float32), "U64": ("<u8", mx.uint64), "I64": ("<i8", mx.int64),
    "F8_E4M3": ("u1", mx.uint8), "F8_E5M2": ("u1", mx.uint8), "F8_E8M0": ("u1", mx.uint8),
}  # fmt: skip


class RawTensors:
    """The tensors of a checkpoint's files."""

    def __init__(self, files: ModelFiles):
        self._files = files
        self._places: dict[str, tuple[Path, Entry]] = {}
        for header in files.headers:
            for name, entry in header.entries.items():
                self._places[name] = (header.path, entry)

    def names(self) -> Iterator[str]:
        """All stored names."""
        return iter(self._places)

    def place(self, name: str) -> tuple[Path, Entry]:
        """The file of a tensor, and where in it. Raises KeyError."""
        return self._places[name]

    def load(self) -> dict[str, mx.array]:
        """All tensors of the model by stored name, lazy and fresh. Raises DataError."""
        tensors: dict[str, mx.array] = {}
        for header in self._files.headers:
            try:
                found = mx.load(str(header.path), format="safetensors")
            except (RuntimeError, ValueError, OSError) as error:
                reason = str(error).strip().split("\n")[0]
                raise DataError(
                    f"{self._files.name}: cannot read {header.path.name}: {reason}"
                ) from error
            assert isinstance(found, dict)  # what a safetensors file gives
            tensors.update((k, found[k]) for k in header.entries if is_model_tensor(k))
        return tensors

    def read(self, name: str, first: int = 0, count: int | None = None) -> mx.array:
        """Rows first:first + count (all without count) of a stored tensor, evaluated.
        Raises DataError, IOFailure."""
        path, entry = self._places[name]
        shape = entry.shape
        start, nbytes = entry.start, entry.nbytes
        if count is not None:
            row = entry.nbytes // shape[0]
            start, nbytes, shape = entry.start + first * row, count * row, (count, *shape[1:])
        try:
            with open(path, "rb") as file:
                file.seek(start)
                data = file.read(nbytes)
        except OSError as error:
            raise from_os_error(error, f"cannot read {path}") from error
        if len(data) != nbytes:
            raise DataError(f"{self._files.name}: {path.name} is shorter than it was")
        kind, dtype = DTYPES[entry.dtype]
        array = mx.array(np.frombuffer(data, kind).reshape(shape))
        return array.view(dtype) if entry.dtype == "BF16" else array

    def ranges(self, names: Iterable[str]) -> list[Range]:
        """Where stored tensors lie."""
        places = [self._places[name] for name in names]
        return [Range(path, entry.start, entry.stop) for path, entry in places]
