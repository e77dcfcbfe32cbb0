"""The matrices of a model that change gear, found by name (paper 003, section 6.1).

No architecture is special here: attention projections are found by the names of their parents,
which works for Llama, Mistral, Phi, Qwen, Gemma, OPT, GPT-NeoX, Bloom, Falcon, StableLM, MPT and
T5 alike. Attention under another name, such as the `mixer` of Nemotron-H, is outside the paper's
scope and inside that of all layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import mlx.nn as nn

from toastkit.native.replacing import read_elsewhere
from toastkit.store.skeleton import is_matrix

if TYPE_CHECKING:
    from toastkit.store.store import Store

ATTENTION = ("attn", "attention")  # how the last word of a container's name ends


class Managed(NamedTuple):
    """A matrix that changes gear. path: in the module tree. module: the current one. layer: its
    decoder layer, None outside of them."""

    path: str
    module: nn.Module
    layer: int | None


def changing(store: Store, scope: str) -> list[Managed]:
    """As `discover`, for a checkpoint: none if it is quantised already (section 12.2)."""
    return [] if store.quantization is not None else discover(store.model, scope)


def discover(model: nn.Module, scope: str) -> list[Managed]:
    """The matrices of a model that change gear, by layer, in tree order within one.

    scope: "attention", or "all" for every matrix of the decoder layers: MLPs, experts and routers
    too. Never the embedding, the head, quantised matrices, or those that the architecture reads
    without calling them. A module that several layers share is found once.
    """
    found, elsewhere = [], read_elsewhere(model) or ()
    for path, module in _matrices(model, "", set()):
        layer = layer_of(path)
        if path.rpartition(".")[2] in elsewhere:
            continue
        if container(path) is not None if scope == "attention" else layer is not None:
            found.append(Managed(path, module, layer))
    return sorted(found, key=lambda one: -1 if one.layer is None else one.layer)


def layer_of(path: str) -> int | None:
    """The first number in a path, which is the layer's."""
    return next((int(word) for word in path.split(".") if word.isdecimal()), None)


def container(path: str) -> str | None:
    """The path up to the first container of attention, such as `model.layers.0.self_attn`."""
    words = path.split(".")
    for count, word in enumerate(words[:-1], 1):
        if word.lower().replace("_", "").endswith(ATTENTION):
            return ".".join(words[:count])
    return None


def _matrices(holder: Any, prefix: str, seen: set[tuple[int, Any]]) -> Iterator[tuple[str, Any]]:
    """(path, module) of the matrices that can be quantised, in tree order. seen: the places visited
    so far, as (id of the holder, key): a block that is in the tree twice is one place, so that its
    matrices are replaced once."""
    for key, value in enumerate(holder) if isinstance(holder, list) else holder.items():
        hidden = isinstance(key, str) and key.startswith("_")
        if hidden or not isinstance(value, (dict, list)) or (id(holder), key) in seen:
            continue
        seen.add((id(holder), key))
        path = f"{prefix}{key}"
        if is_matrix(value):
            yield path, value
        else:
            yield from _matrices(value, f"{path}.", seen)
