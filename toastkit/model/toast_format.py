"""The `.toast` file: a whole model in one safetensors file.

    metadata   format "mlx", toastkit "1", layers "8", checksums (JSON, below)
    data       __file__.config.json and the other small files, as U8 tensors
               the tensors outside the layers
               layer 0, layer 1, ...: each begins at a multiple of PAGE, padded by __pad__.N

A tensor has the name of the model's parameter that it is: what mlx_lm's `sanitize` does to a
published checkpoint has been done, and quantised modules are stored as weight, scales, biases.
`__gear__.low.NAME` is NAME in another precision. There are no holes, so any safetensors reader can
open it. `checksums` is {group: {tensor: hex of its BLAKE2b-64}}, groups `files`, `outside`,
`layer.0` ...; a split directory has the same in the metadata of its files, that of the small files
beside it included. `layout` is the BLAKE2b-64 of what the header itself says.
"""

from __future__ import annotations

import hashlib

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


def new_digest(data: bytes = b"") -> hashlib.blake2b:
    """The hash of one tensor's bytes, or of those of them that are there."""
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES)
