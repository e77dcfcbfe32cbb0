"""Turns a table of tensor names and shapes into a directory: config, tokenizer, safetensors."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import mlx.core as mx

from toastkit.model.locate import locate

Shapes = dict[str, tuple[int, ...]]

VOCAB, HIDDEN = 4096, 64
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json",
)  # fmt: skip
DTYPES = {"BF16": mx.bfloat16, "F16": mx.float16, "F32": mx.float32, "U8": mx.uint8}
# Parts that trained checkpoints keep in float32, or that are not numbers but packed bits.
OWN_DTYPES = {"A_log": "F32", "dt_bias": "F32", ".inv_freq": "F32"}
PACKED = ("_blocks", "_scales")


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """config: config.json. shapes: by tensor name. dtype: of most tensors, a key of DTYPES.
    shards: files; more than one have an index. norms_around_zero: the layer adds the one.
    tensors: the values, where they are not to be drawn at random."""

    config: dict
    shapes: Shapes
    dtype: str = "BF16"
    shards: int = 1
    norms_around_zero: bool = False
    tensors: dict[str, mx.array] | None = None


def write_checkpoint(path: Path, checkpoint: Checkpoint) -> Path:
    """Writes the files into a new directory, with the embedded model's tokenizer."""
    path.mkdir()
    crumb = locate("crumb")
    for name in TOKENIZER_FILES:
        data = crumb.read(name)
        if data is not None:
            (path / name).write_bytes(data)
    (path / "config.json").write_text(json.dumps(checkpoint.config, indent=2))
    tensors = checkpoint.tensors or random_tensors(checkpoint)
    count = checkpoint.shards
    where = {}
    for n in range(count):
        file = f"model-{n + 1:05}-of-{count:05}.safetensors" if count > 1 else "model.safetensors"
        names = list(tensors)[len(tensors) * n // count : len(tensors) * (n + 1) // count]
        part = {name: tensors[name] for name in names}
        mx.save_safetensors(str(path / file), part, metadata={"format": "pt"})
        where.update(dict.fromkeys(part, file))
    if count > 1:
        size = sum(tensor.nbytes for tensor in tensors.values())
        index = {"metadata": {"total_size": size}, "weight_map": where}
        (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


@lru_cache(maxsize=32)
def random_tensors(checkpoint: Checkpoint) -> dict[str, mx.array]:
    """The same values every time, large enough that the logits have clear winners."""
    made = {
        name: _random(name, shape, mx.random.key(number), checkpoint)
        for number, (name, shape) in enumerate(checkpoint.shapes.items())
    }
    if checkpoint.config.get("tie_word_embeddings") and "lm_head.weight" in made:
        made["lm_head.weight"] = made["model.embed_tokens.weight"]
    return made


def _random(name: str, shape: tuple[int, ...], key: mx.array, checkpoint: Checkpoint) -> mx.array:
    if name.endswith(PACKED):
        # Blocks: two fp4 numbers a byte. Scales: powers of two, 2^(byte - 127).
        low, high = (0, 256) if name.endswith("_blocks") else (122, 125)
        return mx.random.randint(low, high, shape, key=key).astype(mx.uint8)
    own = [dtype for part, dtype in OWN_DTYPES.items() if name.endswith(part)]
    mean, deviation = _distribution(name, checkpoint.norms_around_zero)
    values = mean + deviation * mx.random.normal(shape, key=key)
    return values.astype(DTYPES[own[0] if own else checkpoint.dtype])


def _distribution(name: str, norms_around_zero: bool) -> tuple[float, float]:
    """(mean, deviation) of a tensor's values."""
    if "norm" in name and name.endswith(".weight"):
        gated = name.endswith(("linear_attn.norm.weight", "mixer.norm.weight"))
        return (0.0 if norms_around_zero and not gated else 1.0), 0.1
    if name.endswith(("A_log", "dt_bias", "sinks")):
        return 0.0, 0.5
    if name.endswith(".D"):
        return 1.0, 0.1
    return 0.0, 0.1 if name.endswith("bias") else 0.2


# ------------------------------------------------------------- names that many architectures share


def matrices(prefix: str, **sizes: tuple[int, int]) -> Shapes:
    """Linear layers without biases: name=(outputs, inputs)."""
    return {f"{prefix}.{name}.weight": shape for name, shape in sizes.items()}


def norms(prefix: str, *names: str, size: int = HIDDEN) -> Shapes:
    """Scales of norms, or any other (size,) weights."""
    return {f"{prefix}.{name}.weight": (size,) for name in names}


def attention(
    prefix: str, heads: int, kv_heads: int, head: int, *, bias: str = "", gate: int = 1
) -> Shapes:
    """Query, key, value and output matrices. head: its width. bias: which of "qkvo" have one.
    gate: 2 where the query matrix makes an output gate too."""
    queries, keys = gate * heads * head, kv_heads * head
    sizes = {"q": (queries, HIDDEN), "k": (keys, HIDDEN), "v": (keys, HIDDEN)}
    sizes["o"] = (HIDDEN, heads * head)
    shapes = {}
    for name, shape in sizes.items():
        shapes[f"{prefix}.{name}_proj.weight"] = shape
        if name in bias:
            shapes[f"{prefix}.{name}_proj.bias"] = shape[:1]
    return shapes


def feed_forward(prefix: str, width: int) -> Shapes:
    """The gated feed-forward layer of most architectures."""
    return matrices(
        prefix, gate_proj=(width, HIDDEN), up_proj=(width, HIDDEN), down_proj=(HIDDEN, width)
    )


def outside(prefix: str = "model", *, head: bool) -> Shapes:
    """Embedding and last norm, and the output matrix where it is one of its own."""
    shapes = {f"{prefix}.embed_tokens.weight": (VOCAB, HIDDEN), f"{prefix}.norm.weight": (HIDDEN,)}
    return {**shapes, "lm_head.weight": (VOCAB, HIDDEN)} if head else shapes
