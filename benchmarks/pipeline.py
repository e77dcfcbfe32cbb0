"""Tokens a second: one process, six processes, and mlx_lm, on the same weights and device.

    python benchmarks/pipeline.py [--tokens 300] [--rounds 5] [--wide]

Every case is a whole command whose output is timed from outside, the second half of it: loading and
prefill do not count, nor do tokens that waited in a pipe for the last stage to load. All compute in
float32 and draw alike, greedily or with top-p. --wide adds a model with random weights, two small
layers and a vocabulary of 151,936, where the cost of moving logits shows.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from measure import BIN, in_turn, machine, ratio, spread

sys.path.append(str(Path(__file__).parent.parent))
from tests.unpack import unpack

PROMPT = "Tell me a story about a fox and a river."

MLX_LM = """
import sys
import mlx.core as mx
from mlx_lm import load, stream_generate
from mlx_lm.sample_utils import make_sampler
model, tokenizer = load(sys.argv[1])
model.set_dtype(mx.float32)
tokenizer._eos_token_ids = set()
ids = [int(i) for i in sys.argv[3].split()]
temp, top_p = (float(n) for n in sys.argv[4:])
sampler = make_sampler(temp, top_p)
for _ in stream_generate(model, tokenizer, ids, max_tokens=int(sys.argv[2]), sampler=sampler):
    sys.stdout.write(".")
    sys.stdout.flush()
"""


def seconds_per_token(commands: list[list[str]], tokens: int) -> float:
    """Runs commands joined by pipes; the time that the second half of the output takes, per token.
    tokens: of all the output, and as many of them in half of its bytes."""
    processes: list[subprocess.Popen] = []
    source = subprocess.DEVNULL
    for command in commands:
        process = subprocess.Popen(command, stdin=source, stdout=subprocess.PIPE)
        source = process.stdout
        processes.append(process)
    out = processes[-1].stdout
    size, marks = 0, []  # (bytes so far, when)
    while piece := out.read1(1 << 16):
        size += len(piece)
        marks.append((size, time.perf_counter()))
    for process in processes:
        if process.wait() != 0:
            raise SystemExit(f"{process.args} failed")
    read, begun = next((mark for mark in marks if 2 * mark[0] >= size), (size, 0.0))
    if read == size:
        raise SystemExit("too few tokens: the output came all at once")
    return (marks[-1][1] - begun) / (tokens * (size - read) / size)


def cases(model: Path, tokens: int, prompt: list[str], ids: list[int], sampling: list[str]):
    """The commands to compare, by name."""

    def tool(name: str) -> str:
        return str(BIN / f"toast-{name}")

    limit = ["--ignore-eos", "-n", str(tokens)]
    pipeline = [
        [tool("tokenize"), "-m", str(model), *prompt],
        [tool("prefill")],
        [tool("decode")],
        [tool("entropy-gear")],
        [tool("sample"), *limit, *sampling],
        [tool("detokenize")],
    ]
    one = [[tool("decode"), "-m", str(model), *limit, *sampling, *prompt]]
    drawn = dict(zip(sampling[::2], sampling[1::2]))
    same = [drawn.get("--temp", "0"), drawn.get("--top-p", "0")]
    given = [str(model), str(tokens), " ".join(map(str, ids)), *same]
    return {
        "mlx_lm.stream_generate": partial(
            seconds_per_token, [[sys.executable, "-c", MLX_LM, *given]], tokens
        ),
        "toast-decode": partial(seconds_per_token, one, tokens),
        "six processes": partial(seconds_per_token, pipeline, tokens),
        "six, without gear": partial(seconds_per_token, pipeline[:3] + pipeline[4:], tokens),
    }


def make_wide(folder: Path) -> None:
    """A llama with random weights, a vocabulary of 151,936 words, and a tokenizer for them."""
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_lm.models.llama import Model, ModelArgs

    config = {
        "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2,
        "intermediate_size": 128, "num_attention_heads": 2, "rms_norm_eps": 1e-5,
        "vocab_size": 151936, "num_key_value_heads": 2, "tie_word_embeddings": True,
        "max_position_embeddings": 8192,
    }  # fmt: skip
    mx.random.seed(0)
    model = Model(ModelArgs.from_dict(config))
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
    (folder / "config.json").write_text(json.dumps(config))
    vocabulary = {f"w{i}": i for i in range(config["vocab_size"])}
    tokenizer = {
        "version": "1.0", "added_tokens": [], "normalizer": None, "post_processor": None,
        "decoder": None, "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "w0"},
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')


def report(title: str, results: dict[str, list[float]]) -> None:
    """A table of tokens a second, ratios to the other two, and what the pipes add."""
    one, peer = results["toast-decode"], results["mlx_lm.stream_generate"]
    print(f"\n{title}\n{'':26} {'tokens a second':>30} {'speed / mlx_lm':>24}")
    for name, values in results.items():
        print(f"{name:26} {spread([1 / v for v in values], digits=1):>30} "
              f"{ratio(peer, values):>24}")  # fmt: skip
    for name in ("six processes", "six, without gear"):
        added = [a - b for a, b in zip(results[name], one)]
        print(f"{name} adds {spread(added, 1e-6, 0)} microseconds a token to toast-decode")
    print(f"toast-decode is {statistics.median(peer) / statistics.median(one):.2f} times mlx_lm")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--wide", action="store_true")
    options = parser.parse_args()
    print(f"{machine()}; {options.tokens} tokens, {options.rounds} rounds; median (min .. max)")
    from toastkit.model.locate import locate
    from toastkit.text.tokenizer import Tokenizer

    ids = Tokenizer(locate("crumb")).encode(
        f"<|im_start|>user\n{PROMPT}<|im_end|>\n<|im_start|>assistant\n", False
    )
    sampled = ["--temp", "0.8", "--top-p", "0.95", "--seed", "1"]
    with tempfile.TemporaryDirectory() as folder:
        crumb = unpack(Path(folder) / "crumb")
        for title, sampling in (("greedy", []), ("temperature 0.8, top-p 0.95", sampled)):
            runs = cases(crumb, options.tokens, [PROMPT], ids, sampling)
            report(f"crumb, {title}", in_turn(runs, options.rounds))
    if options.wide:
        with tempfile.TemporaryDirectory() as folder:
            make_wide(Path(folder))
            runs = cases(Path(folder), options.tokens, ["--raw", "w1 w2 w3"], [1, 2, 3], [])
            report("vocabulary of 151,936, greedy", in_turn(runs, options.rounds))


if __name__ == "__main__":
    main()
