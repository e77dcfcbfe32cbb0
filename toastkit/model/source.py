"""Finds which fields of a configuration an architecture's code reads, from its text.

`ModelArgs.from_dict` silently drops names that it does not know, so the source is searched for what
is read and what is only declared. Nothing is imported: no MLX, milliseconds.
"""

from __future__ import annotations

import re
from functools import cached_property, lru_cache
from pathlib import Path

from toastkit.model.supported import mlx_lm_folder

# Modules that all share and that read no configuration.
SHARED = ("base", "cache", "rope_utils", "switch_layers", "activations", "pipeline", "ssm", "mla")
_FROM = re.compile(r"^from \.(\w+) import", re.M)
# An argument class up to the next line that is not indented. Parsing takes a tenth of a second.
_CLASS = re.compile(r"^class \w*(?:Args|Config)\b.*\n((?:[ \t].*\n|\n)*)", re.M)
_TEXT_CLASS = re.compile(r"^class Text(?:Args|Config)\b", re.M)
_FIELD = re.compile(r"^    (\w+): [^=\n]+(=?)", re.M)
_SIBLINGS = re.compile(r"^from \. import ([\w, ]+)", re.M)


class Source:
    """The file of an architecture in mlx_lm/models and those that it builds on.

    module: the name of that file. text: of all of them. fields: of their argument classes, by name:
    True if there is a default.
    """

    def __init__(self, folder: Path, module: str):
        self.module = module
        self._folder = folder
        self._texts: dict[str, str] = {}
        self._read(module)
        self.text = "\n".join(self._texts.values())

    def _read(self, name: str) -> None:
        path = self._folder / f"{name}.py"
        if name in self._texts or name in SHARED or not path.is_file():
            return
        self._texts[name] = text = path.read_text(encoding="utf-8")
        for found in _FROM.findall(text):
            self._read(found)
        for names in _SIBLINGS.findall(text):
            for one in names.split(","):
                self._read(one.split()[0])

    @property
    def parts(self) -> tuple[str, ...]:
        """The files, the architecture's own first."""
        return tuple(self._texts)

    @property
    def has_text_class(self) -> bool:
        """True if the architecture's own file declares what `text_config` holds."""
        return bool(_TEXT_CLASS.search(self._texts.get(self.module, "")))

    @cached_property
    def fields(self) -> dict[str, bool]:
        found: dict[str, bool] = {}
        for body in _CLASS.findall(self.text):
            for name, default in _FIELD.findall(body):
                found.setdefault(name, bool(default))
        return found

    def requires(self, name: str) -> bool:
        """True if there is such a field without a default."""
        return self.fields.get(name) is False

    def reads(self, name: str) -> bool:
        """True if the code uses a field, beyond declaring it."""
        # Absent names are not searched for: the pattern takes longer than all else.
        return name in self.text and bool(re.search(rf"\.{name}\b|[\"']{name}[\"']", self.text))

    def has_word(self, word: str) -> bool:
        """True if the code contains a string literal."""
        return f'"{word}"' in self.text or f"'{word}'" in self.text


@lru_cache(maxsize=16)
def source_of(module: str) -> Source:
    """Return the source of a file in mlx_lm/models."""
    return Source(mlx_lm_folder() / "models", module)
