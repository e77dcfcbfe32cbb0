"""Tokens a second: one process, six processes, and mlx_lm, on the same weights and device.

    python benchmarks/pipeline.py [--tokens 200] [--rounds 5] [--wide]

Every case is a whole command whose output is timed from outside, from its first piece to its last,
so loading and prefill do not count. All are greedy and in float32. --wide adds a model with random
weights, two small layers and a vocabulary of 151,936, where the cost of moving logits shows.
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
model, tokenizer = load(sys.argv[1])
model.set_dtype(mx.float32)
tokenizer._eos_token_ids = set()
ids = [int(i) for i in sys.argv[3].split()]
for response in stream_generate(model, tokenizer, ids, max_tokens=int(sys.argv[2])):
    sys.stdout.write(".")
    sys.stdout.flush()
"""


def seconds_per_token(commands: list[list[str]], tokens: int, count: str) -> float:
    """Runs commands joined by pipes; the time from the first piece of output to the last, per
    token. count: "frames" counts token frames, "pieces" takes the pieces to be the tokens."""
    processes: list[subprocess.Popen] = []
    source = subprocess.DEVNULL
    for command in commands:
        process = subprocess.Popen(command, stdin=source, stdout=subprocess.PIPE)
        source = process.stdout
        processes.append(process)
    out = processes[-1].stdout
    first = last = 0.0
    while out.read1(1 << 16):
        last = time.perf_counter()
        first = first or last
    for process in processes:
        if process.wait() != 0:
            raise SystemExit(f"{process.args} failed")
    return (last - first) / (tokens - 1)


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
    peer = [[sys.executable, "-c", MLX_LM, str(model), str(tokens), " ".join(map(str, ids))]]
    return {
        "mlx_lm.stream_generate": partial(seconds_per_token, peer, tokens, "pieces"),
        "toast-decode": partial(seconds_per_token, one, tokens, "pieces"),
        "six processes": partial(seconds_per_token, pipeline, tokens, "pieces"),
        "six, without gear": partial(
            seconds_per_token, pipeline[:3] + pipeline[4:], tokens, "pieces"
        ),
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
    parser.add_argument("--tokens", type=int, default=200)
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
