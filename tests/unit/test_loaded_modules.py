"""What commands load: a start is paid for module by module. The modules of real executables are
looked at, and no clock.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from io import BytesIO
from pathlib import Path

import pytest

from toastkit.commands import COMMANDS, program_name
from toastkit.frames import (
    Array,
    End,
    FrameReader,
    Head,
    Logits,
    Token,
    Tokens,
    dumps,
    pack_ids,
)
from toastkit.model.config import fingerprint
from toastkit.model.locate import locate
from toastkit.session.feed import FeedReader

ROOT = Path(__file__).parents[2]
NAMES = [command.name for command in COMMANDS]

ENGINES = {"mlx", "mlx_lm", "transformers", "huggingface_hub"}
PROMPT_FREE = ENGINES | {"numpy", "psutil"}
HELP_FREE = PROMPT_FREE | {"tokenizers", "jinja2", "safetensors", "asyncio", "http", "ssl"}
# What neither a greedy answer nor the stages before the sampler need; each takes 3 to 100 ms.
STEP_FREE = (PROMPT_FREE - ENGINES) | {
    "transformers", "huggingface_hub", "jinja2", "statistics", "logging", "concurrent.futures",
    "asyncio", "toastkit.session.directory", "toastkit.stages.gear", "toastkit.gears.selector",
    "toastkit.holdings.expert_slots", "toastkit.experts.common_part", "toastkit.store.bake",
}  # fmt: skip
# What an answer without a session does not need either.
ANSWER_FREE = STEP_FREE | {"shutil", "toastkit.session.layout", "toastkit.gears.monitor"}
GREEDY = ("-n", "2", "--temp", "0")
HELP_MODULES = 200  # bare Python has about 30, click makes it 120

RUN = """
import atexit, json, os, sys
module, report, *sys.argv = sys.argv[1:]
atexit.register(lambda: open(report, "w").write(json.dumps(sorted(sys.modules))))
from importlib import import_module
import_module(module).main()
"""


def loaded(tmp_path: Path, name: str, *arguments: str, stdin: bytes = b"") -> tuple[set, bytes]:
    """The modules that a command has imported when it ends, and what it wrote, into a file."""
    module = f"toastkit.commands.{name.replace('-', '_')}"
    report, written = tmp_path / "modules.json", tmp_path / "written"
    with open(written, "wb") as out:
        done = subprocess.run(
            [sys.executable, "-c", RUN, module, str(report), program_name(name), *arguments],
            input=stdin, stdout=out, stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()
    return set(json.loads(report.read_text())), written.read_bytes()


@pytest.mark.parametrize("name", NAMES)
def test_help_is_cheap(tmp_path: Path, name: str) -> None:
    modules, out = loaded(tmp_path, name, "--help")
    assert b"Usage: " in out and b"--version" in out
    assert sorted(modules & HELP_FREE) == []
    assert len(modules) <= HELP_MODULES


def stream(arrays: bool) -> bytes:
    """A run with or without logits, of the embedded model's tokenizer."""
    vocab = 4096
    head = Head("crumb", fingerprint(locate("crumb")), vocab, [2])
    logits = Array("float32", (vocab,), struct.pack(f"<{vocab}f", *range(vocab)))
    steps = [Logits(1, logits)] if arrays else [Token(1, 723, -0.5)]
    return b"".join(map(dumps, [head, Tokens(pack_ids([1])), *steps, End("eos", 1)]))


JOBS = [
    ("tokenize", ["Hello"], None, PROMPT_FREE),
    ("tokenize", ["--count", "Hello"], None, PROMPT_FREE),
    ("tokenize", ["--template-only", "Hello"], None, PROMPT_FREE),
    ("detokenize", [], False, PROMPT_FREE),
    ("detokenize", ["--frames", "--stop", "x"], False, PROMPT_FREE),
    ("frames", [], False, PROMPT_FREE),
    ("frames", ["--json"], False, PROMPT_FREE),
    ("frames", ["--json", "--arrays", "none"], True, PROMPT_FREE),
    ("frames", ["--stat"], True, PROMPT_FREE),
    ("frames", ["--validate"], True, PROMPT_FREE),
    ("frames", ["--slice", "1:2"], True, PROMPT_FREE),
    ("frames", ["--json"], True, ENGINES),
    ("entropy-gear", [], True, ENGINES),
    ("sample", ["--temp", "0.8", "--top-p", "0.9", "--xtc-probability", "1"], True, ENGINES),
    ("feed", ["--ignore-eos"], False, PROMPT_FREE),
    ("decode", [*GREEDY, "--raw", "Hello"], None, ANSWER_FREE),
    ("decode", [*GREEDY, "Hello"], None, ANSWER_FREE - {"jinja2", "shutil"}),
]


@pytest.mark.parametrize(
    ("name", "arguments", "arrays", "free"), JOBS, ids=[" ".join([j[0], *j[1]]) for j in JOBS]
)
def test_jobs_that_need_no_weights(
    run: Path, name: str, arguments: list, arrays: bool | None, free: set
) -> None:
    stdin = b"" if arrays is None else stream(arrays)
    if name == "feed":
        reader = FeedReader(run / "feed")
        arguments = [*arguments, "--run", str(run)]
    modules, out = loaded(run, name, *arguments, stdin=stdin)
    assert out, "the job did nothing"
    assert sorted(modules & free) == []
    if name == "feed":
        assert [message.id for message in reader.read_available()] == [723, None]
        reader.close()


def test_the_stages_before_the_sampler_import_no_numpy(tmp_path: Path) -> None:
    free = STEP_FREE - {"toastkit.session.directory"}
    session = ["--session", str(tmp_path / "session")]
    _, tokens = loaded(tmp_path, "tokenize", "Hello")
    modules, prefilled = loaded(tmp_path, "prefill", *session, stdin=tokens)
    assert sorted(modules & free) == []
    modules, out = loaded(tmp_path, "decode", "--steps", "1", stdin=prefilled)
    assert [type(frame) for frame in FrameReader(BytesIO(out))][-2:] == [Logits, End]
    assert sorted(modules & free) == []


def test_feeding_ids_imports_nothing_heavy(run: Path) -> None:
    reader = FeedReader(run / "feed")
    modules, _ = loaded(run, "feed", "--run", str(run), "--end", "5", "6")
    assert [(m.id, m.end) for m in reader.read_available()] == [(5, False), (6, True)]
    assert sorted(modules & PROMPT_FREE) == []
    reader.close()
