"""The `.toast` file of toast-file(5): a whole model in one safetensors file.

A tensor has the name of the model's parameter that it is: what mlx_lm's `sanitize` does to a
published checkpoint has been done, and quantised modules are stored as weight, scales, biases.
There are no holes, so any safetensors reader can open it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

VERSION = "1"
VERSION_KEY, LAYERS_KEY, CHECKSUMS_KEY = "toastkit", "layers", "checksums"
SUFFIX = ".toast"
PAGE = 16384  # bytes; of Apple silicon, and a multiple of other machines' 4096
FILE_PREFIX, PAD_PREFIX, GEAR_PREFIX = "__file__.", "__pad__.", "__gear__."
FILES_GROUP, OUTSIDE_GROUP, LAYER_GROUP = "files", "outside", "layer.{}"
# The split layout: the same tensors, a file each for what is outside the layers and every layer.
OUTSIDE_FILE, LAYER_FILE = "non_layer.safetensors", "layer_{:04}.safetensors"
DIGEST_BYTES = 8


def is_model_tensor(name: str) -> bool:
    """Whether a tensor is a parameter of the model, not a file, padding or a gear."""
    return not name.startswith((FILE_PREFIX, PAD_PREFIX, GEAR_PREFIX))


def layer_count(metadata: Mapping[str, str]) -> int:
    """The layers that a header says there are, 0 where it does not say."""
    layers = metadata.get(LAYERS_KEY, "")
    return int(layers) if layers.isdecimal() and len(layers) < 6 else 0


def new_digest(data: bytes = b"") -> hashlib.blake2b:
    """The hash of one tensor's bytes, or of those of them that are there."""
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES)
