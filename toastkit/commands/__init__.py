"""The table of commands. Man pages, completion, `bin/` and the tests are checked against it."""

from __future__ import annotations

import _signal  # `signal` takes as long to import as all else here
import os
import sys

if (
    os.path.basename("".join(sys.argv[:1])).startswith("toast")
    and _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler
):  # for an executable: Ctrl-C during its imports ends it without a traceback; see cli.run
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)

from typing import NamedTuple  # after that: it imports much


class Command(NamedTuple):
    """name: of the module, and of the program without its `toast-` prefix. summary: one line, also
    the man page's `.Nd`. writes: formats on stdout ("text", "frames", "json", ...)."""

    name: str
    summary: str
    writes: str

    @property
    def program(self) -> str:
        """The executable's name."""
        return program_name(self.name)


def program_name(name: str) -> str:
    """The executable's name: `toast-NAME`, except for the two commands that need no prefix."""
    return name if name in ("toast", "toasted") else f"toast-{name}"


COMMANDS = (
    Command("tokenize", "turn a prompt into token frames", "frames"),
    Command("prefill", "run a prompt through the model into a session", "frames"),
    Command("decode", "answer a prompt, or emit logits step by step", "text or frames"),
    Command("entropy-gear", "annotate logits with entropy and gear", "frames"),
    Command("sample", "draw tokens from logits", "frames"),
    Command("detokenize", "turn token frames into text", "text"),
    Command("frames", "convert, check and count frames", "frames or json"),
    Command("feed", "send tokens to a waiting decode", "frames"),
    Command("model", "list, fetch, convert and check models", "text or json"),
    Command("perplexity", "measure how well a model predicts texts", "text or json"),
    Command("toast", "ask a language model, or chat with it", "text or json"),
    Command("toasted", "keep a model loaded and remember conversations", ""),
)
