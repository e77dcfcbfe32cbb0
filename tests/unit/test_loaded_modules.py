"""Which modules executables import: their start is paid for module by module."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from array import array
from io import BytesIO
from pathlib import Path

import pytest

from tests.forked import executable
from toastkit.commands import COMMANDS
from toastkit.frames import Array, End, FrameReader, Head, Logits, Token, Tokens, dumps, pack_ids
from toastkit.model.config import fingerprint
from toastkit.model.locate import locate
from toastkit.session.feed import FeedReader
from toastkit.session.ring import RingWriter, Summary
from toastkit.session.run import ring_of

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
import json, os, sys
report, jobs = sys.argv[1:]
found = []
for script, arguments, *streams in json.loads(jobs):
    for number, path in enumerate(streams):
        file = os.open(path, os.O_RDWR)
        os.dup2(file, number)
        os.close(file)
    sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)
    sys.argv = [script, *arguments]
    try:
        exec(open(script).read(), {"__name__": "__main__"})
    except SystemExit as ended:
        assert not ended.code, (script, ended.code)
    found.append(sorted(sys.modules))
json.dump(found, open(report, "w"))
"""


def loaded(tmp_path: Path, *jobs: tuple) -> list[tuple[set, bytes]]:
    """Runs executables in one process, one after another: (name, arguments, stdin) of each. Of each
    the modules that are there when it ends, of earlier ones too, and what it wrote, into a file."""
    words = []
    for number, (name, arguments, stdin) in enumerate(jobs):
        source, written = tmp_path / f"in{number}", tmp_path / f"out{number}"
        source.write_bytes(stdin)
        written.write_bytes(b"")
        words.append([executable(name), arguments, str(source), str(written)])
    report = tmp_path / "modules.json"
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(report), json.dumps(words)], stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()
    found = json.loads(report.read_text())
    return [(set(modules), Path(job[3]).read_bytes()) for modules, job in zip(found, words)]


def loaded_by(tmp_path: Path, name: str, *arguments: str, stdin: bytes = b"") -> tuple[set, bytes]:
    """As loaded, of one executable in a process of its own."""
    (one,) = loaded(tmp_path, (name, arguments, stdin))
    return one


def test_help_is_cheap(tmp_path: Path) -> None:
    for modules, out in loaded(tmp_path, *((name, ["--help"], b"") for name in NAMES)):
        assert b"Usage: " in out and b"--version" in out
        assert sorted(modules & HELP_FREE) == []
    assert len(modules) <= HELP_MODULES, "of all of them"


def stream(arrays: bool | None) -> bytes:
    """A run with or without logits, of the embedded model's tokenizer. None: a prompt alone."""
    vocab = 4096
    head = Head("crumb", fingerprint(locate("crumb")), vocab, [2])
    logits = Array("float32", (vocab,), struct.pack(f"<{vocab}f", *range(vocab)))
    steps = [Logits(1, logits) if arrays else Token(1, 723, -0.5), End("eos", 1)]
    return b"".join(
        map(dumps, [head, Tokens(pack_ids([1])), *(steps if arrays is not None else [])])
    )


# What may not be imported, and jobs: each list is of one process, in the order of what is allowed.
JOBS = [
    [
        (PROMPT_FREE, "tokenize", ["Hello"], None),
        (PROMPT_FREE, "tokenize", ["--count", "Hello"], None),
        (PROMPT_FREE, "tokenize", ["--template-only", "Hello"], None),
        (PROMPT_FREE, "detokenize", [], False),
        (PROMPT_FREE, "detokenize", ["--frames", "--stop", "x"], False),
        (PROMPT_FREE, "frames", [], False),
        (PROMPT_FREE, "frames", ["--json"], False),
        (PROMPT_FREE, "frames", ["--json", "--arrays", "none"], True),
        (PROMPT_FREE, "frames", ["--stat"], True),
        (PROMPT_FREE, "frames", ["--validate"], True),
        (PROMPT_FREE, "frames", ["--slice", "1:2"], True),
        (PROMPT_FREE, "feed", ["--ignore-eos", "--run", "."], False),
        (PROMPT_FREE, "feed", ["--run", ".", "--end", "5", "6"], None),
        (ENGINES, "frames", ["--json"], True),
        (ENGINES, "entropy-gear", [], True),
        (ENGINES, "sample", ["--temp", "0.8", "--top-p", "0.9", "--xtc-probability", "1"], True),
    ],
    [
        (ANSWER_FREE, "decode", [*GREEDY, "--raw", "Hello"], None),
        (ANSWER_FREE - {"jinja2", "shutil"}, "decode", [*GREEDY, "Hello"], None),
    ],
]


def test_libraries_that_need_no_engine() -> None:
    code = f"""if True:
        import sys
        from toastkit.text import chat_template, detokenizer, messages, stops, tokenizer
        from toastkit.text import template_child
        assert not {HELP_FREE} & set(sys.modules)
        import toastkit.gears.cost, toastkit.gears.monitor, toastkit.model.library
        from toastkit.model.info import summary
        from toastkit.model.locate import locate
        from toastkit.model.supported import supported
        summary(locate("crumb"))
        assert len(supported()) > 50
        toastkit.gears.cost.whole_speedup(0.5, 4)
        assert not {PROMPT_FREE} & set(sys.modules)
    """
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


@pytest.mark.parametrize("jobs", JOBS, ids=["streams", "decode"])
def test_jobs_that_need_no_weights(run: Path, monkeypatch: pytest.MonkeyPatch, jobs: list) -> None:
    monkeypatch.chdir(run)
    reader = FeedReader(run / "feed")
    given = [(n, a, b"" if arrays is None else stream(arrays)) for _, n, a, arrays in jobs]
    for (free, *job), (modules, out) in zip(jobs, loaded(run, *given), strict=True):
        assert out or "--end" in job[1], f"{job} did nothing"
        assert (job, sorted(modules & free)) == (job, [])
    if jobs is JOBS[0]:
        assert [message.id for message in reader.read_available()] == [723, None, 5, 6]
    reader.close()


def test_the_stages_before_the_sampler_import_no_numpy(tmp_path: Path) -> None:
    session = ["--session", str(tmp_path / "session")]
    ((modules, prefilled),) = loaded(tmp_path, ("prefill", session, stream(None)))
    free = STEP_FREE - {"toastkit.session.directory"}
    assert sorted(modules & free) == []
    ((modules, out),) = loaded(tmp_path, ("decode", ["--steps", "1"], prefilled))
    assert [type(frame) for frame in FrameReader(BytesIO(out))][-2:] == [Logits, End]
    assert sorted(modules & free) == []


def test_a_sampler_imports_no_numpy_where_decode_has_found_the_likeliest(tmp_path: Path) -> None:
    writer = RingWriter(ring_of(tmp_path), 4096)
    logits = writer.write(array("f", range(4096)), lambda: Summary(1.5, -0.25, 723))
    head = Head("crumb", fingerprint(locate("crumb")), 4096, [2], run=str(tmp_path))
    frames = [head, Tokens(pack_ids([1])), Logits(1, logits), End("eos", 1)]
    job = ("sample", ["--no-feed"], b"".join(map(dumps, frames)))
    ((modules, out),) = loaded(tmp_path, job)
    writer.close()
    _, _, token, _ = FrameReader(BytesIO(out))
    assert (token.id, token.logprob) == (723, -0.25)
    assert sorted(modules & PROMPT_FREE) == []
