"""Manual pages as the tests read them: sections, options, fields and examples of mdoc source."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

MAN = Path(__file__).parents[2] / "man"
COMMON = "Common options"
_ESCAPES = {r"\-": "-", r"\e": "\\", r"\(aq": "'", r"\(dq": '"', r"\&": ""}


class Item(NamedTuple):
    """One entry of a tagged list. head: the words after .It. text: what is said, in one line."""

    head: str
    text: str

    @property
    def options(self) -> list[str]:
        """The options that the head names, as on a command line: -m, --model."""
        return [f"-{name}" for name in re.findall(r"\bFl (\S+)", self.head)]


class Page:
    """A page. name: without the section. section: 1 or 5."""

    def __init__(self, path: Path):
        self.path = path
        self.name = path.stem
        self.section = int(path.suffix[1:])
        self.source = path.read_text(encoding="utf-8")

    @property
    def sections(self) -> list[str]:
        """Titles, in their order."""
        return re.findall(r"^\.Sh (.+)$", self.source, re.MULTILINE)

    def part(self, title: str, under: str | None = None) -> str:
        """The source of a section, or of the subsection `under` in it."""
        found = re.search(rf"^\.Sh {title}$\n(.*?)(?=^\.Sh |\Z)", self.source, re.M | re.S)
        assert found, f"{self.path.name} has no section {title}"
        if under is None:
            return found[1]
        sub = re.search(rf"^\.Ss {under}$\n(.*?)(?=^\.Ss |\Z)", found[1], re.M | re.S)
        assert sub, f"{self.path.name} has no subsection {under} in {title}"
        return sub[1]

    def words(self, source: str | None = None) -> str:
        """Source without its macros, on one line."""
        lines = (self.source if source is None else source).splitlines()
        return plain(" ".join(re.sub(r"^\.[A-Z]\w+ ?", "", line) for line in lines))


def items(source: str) -> list[Item]:
    """The entries of all lists of a piece of source that are not columns."""
    found = []
    for piece in re.split(r"^\.It ", source, flags=re.MULTILINE)[1:]:
        head, _, rest = piece.partition("\n")
        body = re.split(r"^\.(?:El|Ss|Sh)\b", rest, flags=re.MULTILINE)[0]
        found.append(Item(head, " ".join(re.sub(r"^\.[A-Z]\w+ ?", "", body, flags=re.M).split())))
    return found


def fields(source: str) -> dict[str, str]:
    """Field -> type, of a list of `.It Va field Pq type`."""
    found = re.findall(r"^\.It Va (\S+) Pq (.+)$", source, re.MULTILINE)
    return {name: kind.replace(" ,", ",") for name, kind in found}


def literal_blocks(source: str) -> list[str]:
    """The text of the literal displays in a piece of source, as a reader sees it."""
    blocks = re.findall(r"^\.Bd -literal[^\n]*\n(.*?)^\.Ed$", source, re.MULTILINE | re.DOTALL)
    return [plain(block) for block in blocks]


def plain(text: str) -> str:
    """Text with the escapes of roff undone."""
    text = re.sub(r"\\(?:\(..|.)", lambda match: _ESCAPES.get(match[0], match[0]), text)
    return text.replace("\xa0", " ")


def pages(section: int) -> list[Page]:
    """All pages of a section, by name."""
    return [Page(path) for path in sorted((MAN / f"man{section}").iterdir())]
