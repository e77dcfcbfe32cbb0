"""The embedded model as a directory that mlx_lm can open; the benchmarks want it too."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from toastkit.model.files import SMALL_FILES, ModelFiles
from toastkit.model.locate import locate
from toastkit.model.toast_format import is_model_tensor


def unpack(path: Path, files: ModelFiles | None = None, **config: Any) -> Path:
    """Writes a .toast file's model into a new directory, in the layout of mlx_lm.convert, with
    other values for some fields of its config.json."""
    files = files or locate("crumb")
    path.mkdir()
    for name in SMALL_FILES:
        if (data := files.read(name)) is not None:
            (path / name).write_bytes(data)
    if config:
        fields = json.loads((path / "config.json").read_bytes())
        (path / "config.json").write_text(json.dumps({**fields, **config}))
    (header,) = files.headers
    entries = [entry for entry in header.entries.values() if is_model_tensor(entry.name)]
    about: dict[str, dict] = {"__metadata__": {"format": "mlx"}}
    end = 0
    for entry in entries:
        place = [end, end + entry.nbytes]
        about[entry.name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": place}
        end += entry.nbytes
    text = json.dumps(about).encode()
    with open(path / "model.safetensors", "wb") as out, open(header.path, "rb") as source:
        out.write(struct.pack("<Q", len(text)) + text)
        for entry in entries:
            source.seek(entry.start)
            out.write(source.read(entry.nbytes))
    return path
