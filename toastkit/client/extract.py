"""Fenced code blocks, as in CommonMark: lines between ``` and ```, or ~~~ and ~~~."""

from __future__ import annotations

import re

_OPENING = re.compile(r"([ \t]*)(`{3,}(?=[^`]*$)|~{3,})")
_CLOSING = re.compile(r"([ \t]*)(`{3,}|~{3,})[ \t\r]*$")
_CODE_INDENT = 4  # a fence this much further indented than the block's is code


def first_block(text: str) -> str | None:
    """The contents of a text's first fenced block, in whole lines; None if there is none.

    A block in a list is indented like its fence, and loses that indent. An unclosed one goes to the
    end, as the answer was cut off in it. Only a fence of the same character and at least the same
    length closes a block, so that a block can show another one.
    """
    lines = iter(text.split("\n"))
    opening = next(filter(None, map(_OPENING.match, lines)), None)
    if opening is None:
        return None
    indent, fence = _width(opening[1]), opening[2]
    held: list[str] = []
    for line in lines:
        if _closes(line, indent, fence):
            break
        held.append(_dedented(line, indent))
    else:
        if held and not held[-1]:
            held.pop()  # the text ended with a newline
    return "".join(f"{line}\n" for line in held)


def _closes(line: str, indent: int, fence: str) -> bool:
    found = _CLOSING.match(line)
    if found is None:
        return False
    near = _width(found[1]) < indent + _CODE_INDENT
    return near and found[2][0] == fence[0] and len(found[2]) >= len(fence)


def _width(blank: str) -> int:
    return len(blank.expandtabs(4))


def _dedented(line: str, indent: int) -> str:
    """The line without up to `indent` columns of blanks; a tab across that leaves its remainder."""
    column = start = 0
    while column < indent and line[start : start + 1] in (" ", "\t"):
        column += 1 if line[start] == " " else 4 - column % 4
        start += 1
    return " " * max(column - indent, 0) + line[start:]
