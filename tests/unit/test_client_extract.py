"""Which part of an answer is its first fenced code block."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toastkit.client.extract import first_block

CASES = {
    "plain": ("Here:\n\n```\nls\n```\nDone.\n", "ls\n"),
    "language": ("```python title=x\nprint(1)\n```\n", "print(1)\n"),
    "language with a hash": ("```c#\nint i;\n```\n", "int i;\n"),
    "tildes": ("~~~sh\nls\n~~~\n", "ls\n"),
    "tildes may be described in backticks": ("~~~ `x`\nls\n~~~\n", "ls\n"),
    "only the first": ("```\na\n```\n```\nb\n```\n", "a\n"),
    "first of both kinds": ("~~~\na\n~~~\n```\nb\n```\n", "a\n"),
    "a longer fence holds a shorter one": ("````md\n```sh\nls\n```\n````\n", "```sh\nls\n```\n"),
    "tildes hold backticks": ("~~~\n```\nls\n```\n~~~\n", "```\nls\n```\n"),
    "backticks hold tildes": ("```\n~~~\n```\n", "~~~\n"),
    "the closing fence may be longer": ("```\nls\n`````\nx\n", "ls\n"),
    "a closing fence says nothing": ("```\nls\n```sh\nx\n```\n", "ls\n```sh\nx\n"),
    "blanks after the closing fence": ("```\nls\n```  \t\nx\n", "ls\n"),
    "indented": ("   ```\n   if x:\n       y\n   ```\n", "if x:\n    y\n"),
    "in a list": ("1. Do:\n\n     ```sh\n     ls\n     ```\n2. Done\n", "ls\n"),
    "behind a tab": ("\t```\n\tls\n\t```\n", "ls\n"),
    "a tab is kept": ("  ```\n  all:\n  \tcc\n  ```\n", "all:\n\tcc\n"),
    "a blank more than a tab": ("\t```\n     ls\n\t```\n", " ls\n"),
    "a tab after a blank": ("  ```\n \tls\n  ```\n", "  ls\n"),
    "half a tab is kept": ("  ```\n\tls\n  ```\n", "  ls\n"),
    "less indent inside than outside": ("  ```\nls\n    -l\n  ```\n", "ls\n  -l\n"),
    "a fence four columns in is code": ("```\n    ```\n```\n", "    ```\n"),
    "a fence three columns in closes": ("```\nls\n   ```\nx\n", "ls\n"),
    "never closed": ("```sh\nls\nrm", "ls\nrm\n"),
    "never closed, with a newline": ("```sh\nls\n", "ls\n"),
    "never closed, ends with a blank line": ("```sh\nls\n\n", "ls\n\n"),
    "empty": ("```\n```\n", ""), "only opened": ("```sh", ""),
    "blank lines are kept": ("```\n\na\n\n```\n", "\na\n\n"),
    "trailing blanks are kept": ("```\na  \n```\n", "a  \n"),
    "carriage returns": ("```\r\na\r\n```\r\n", "a\r\n"),
    "no other separators end a line": ("```\na\x0cb\u2028c\n```\n", "a\x0cb\u2028c\n"),
    "no block": ("Just `code` in a line.\n", None), "two backticks": ("``\nx\n``\n", None),
    "inline code of three": ("```ls``` lists\n", None),
    "a fence in mid-line": ("say ```\nx\n", None), "nothing": ("", None),
}  # fmt: skip


@pytest.mark.parametrize(("text", "block"), CASES.values(), ids=CASES)
def test_block(text: str, block: str | None) -> None:
    assert first_block(text) == block


CODE = st.lists(
    st.text(st.characters(exclude_characters="\n", exclude_categories=["Cs"])), max_size=6
)


@given(CODE, st.sampled_from("`~"), st.integers(0, 6))
def test_what_is_fenced_comes_back(code: list[str], mark: str, indent: int) -> None:
    """Whatever the code is, a fence longer than any in it shows all of it."""
    longest = max((line.count(mark) for line in code), default=0)
    fence, blank = mark * max(3, longest + 1), " " * indent
    inside = "".join(f"{blank}{line}\n" for line in code)
    text = f"before\n{blank}{fence}x\n{inside}{blank}{fence}\nafter\n"
    assert first_block(text) == "".join(f"{line}\n" for line in code)


@given(st.text("`~ \tab\n", max_size=60))
def test_any_text(text: str) -> None:
    block = first_block(text)
    assert block is None or block == "" or block.endswith("\n")
