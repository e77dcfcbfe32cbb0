"""Describe an architecture: layers by kind, experts, parameters, bytes by part, caches.

The model runs lazily on one token: MLX infers the shape of every array, so no weight is read or
allocated. Results are plain dicts, ready for JSON.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map_with_path

from toastkit.model.config import ModelConfig
from toastkit.native.kv_caches import leaves
from toastkit.store.skeleton import holds_experts
from toastkit.store.store import Store

# The parts that bytes are counted by. mixer: attention or a recurrent equivalent (mixes positions).
# mlp: dense MLPs, shared experts included. other: norms, routers, anything unrecognised.
PARTS = ("embedding", "mixer", "mlp", "experts", "other", "head")
CACHE_TOKENS = 1024  # "1K tokens"
_MLP = re.compile(r"mlp|moe|ffn|feed_?forward|expert|^ff_|^fc\d|^w[123]$|^(gate|up|down)_", re.I)
_MLP_CLASS = re.compile(r"MLP|MoE|Moe|FeedForward|FFN")
_HEADS = ("lm_head", "embed_out", "output", "head", "ff_out")
_SHARED = re.compile(r"\bshared_(mlp|experts?)\b")
_SHARED_COUNTS = ("n_shared_experts", "num_shared_experts")
_WINDOWS = ("RotatingKVCache", "ChunkedKVCache")


def anatomy(store: Store, explain: Callable[[str], None]) -> dict[str, Any]:
    """Describe the architecture of a checkpoint.

    store: its model is modified and not usable afterwards. explain(line): called with what could
    not be determined, which is then left out of the result.
    """
    model = store.model
    leaves = dict(_leaves(model))
    parts = {path: part_of(store, path) for path in leaves}
    total = {path: _parameters(module) for path, module in leaves.items()}
    cache, routed = _run_lazily(store, explain)
    idle = 0.0
    for path, module in leaves.items():
        if holds_experts(module):
            chosen = routed.get(id(module), module.num_experts)
            idle += total[path] * (1 - min(chosen / module.num_experts, 1))
    sizes = dict.fromkeys(PARTS, 0)
    for name in store.names:
        path = name.rpartition(".")[0]
        sizes[parts[path] if path in parts else part_of(store, path)] += store.nbytes(name)
    found: dict[str, Any] = {
        "layers": store.layer_count,
        "layer_kinds": _kinds(store, parts, cache),
        "experts": _experts(store.config, leaves, routed),
        "parameters": sum(total.values()),
        "active_parameters": sum(total.values()) - round(idle),
        "bytes": sizes,
        "tied_head": "head" not in parts.values(),
        "packed": _packed(leaves),
        "window_not_kept": store.fitted.window,
        "cautions": list(store.fitted.cautions),
    }
    if cache is not None:
        found["cache"] = _cache_bytes(cache)
    return found


def _leaves(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield (path, module) of the modules that own arrays, each once."""
    seen = set()
    for path, module in model.named_modules():
        if id(module) not in seen and _own(module):
            seen.add(id(module))
            yield path, module


def _own(module: nn.Module) -> dict[str, mx.array]:
    return {
        name: value
        for name, value in module.items()
        if isinstance(value, mx.array) and not name.startswith("_")
    }


def _parameters(module: Any) -> int:
    """Count the elements of a module's own arrays. Packed weights count unpacked; their scales and
    biases do not count."""
    own = _own(module)
    count = 0
    if "scales" in own and isinstance(getattr(module, "bits", None), int):
        packed = own.pop("weight")
        count = packed.size * packed.dtype.size * 8 // module.bits
        own = {name: value for name, value in own.items() if name == "bias"}
    return count + sum(value.size for value in own.values())


def _packed(leaves: dict[str, Any]) -> list[dict[str, Any]]:
    """How matrices are packed in the files, whatever config.json says: each packing with how many
    modules have it, those with the most weights first."""
    modules: Counter[tuple] = Counter()
    weights: Counter[tuple] = Counter()
    for module in leaves.values():
        if "scales" in module and isinstance(getattr(module, "bits", None), int):
            packing = module.bits, module.group_size, getattr(module, "mode", "affine")
            modules[packing] += 1
            weights[packing] += _parameters(module)
    names = ("bits", "group_size", "mode")
    return [
        {**dict(zip(names, packing)), "modules": modules[packing]}
        for packing, _ in weights.most_common()
    ]


def _experts(config: ModelConfig, leaves: dict, routed: dict[int, int]) -> dict | None:
    """Experts per layer: total, active per token (None if unknown), shared."""
    stacks = [module for module in leaves.values() if holds_experts(module)]
    if not stacks:
        return None
    shared = int(any(_SHARED.search(path) for path in leaves))
    places = [(place, name) for place in config.levels for name in _SHARED_COUNTS]
    return {
        "total": max(module.num_experts for module in stacks),
        "active": max((routed[id(m)] for m in stacks if id(m) in routed), default=None),
        "shared": next((p[n] for p, n in places if type(p.get(n)) is int), 0) or shared,
    }


def _kinds(store: Store, parts: dict[str, str], cache: list | None) -> dict[str, int]:
    """Count layers by kind: type of attention or recurrence, then MoE or dense."""
    contents: list[set[str]] = [set() for _ in range(store.layer_count)]
    for path, part in parts.items():
        layer = store.layer_of(f"{path}.")
        if layer is not None:
            contents[layer].add(part)
    aligned = cache is not None and len(cache) == store.layer_count
    kinds: Counter[str] = Counter()
    for number, content in enumerate(contents):
        words = [_attention_kind(cache[number])] if cache is not None and aligned else []
        words += ["MoE"] if "experts" in content else ["dense"] if "mlp" in content else []
        kinds[", ".join(words) or "decoder layer"] += 1
    return dict(kinds.most_common())


def _attention_kind(cache: Any) -> str:
    """Name a layer's attention or recurrence by the class of its cache."""
    name = type(cache).__name__
    if hasattr(cache, "caches"):
        return " and ".join(sorted({_attention_kind(part) for part in cache.caches}))
    words = {
        "KVCache": "attention", "ConcatenateKVCache": "attention",
        "RotatingKVCache": "sliding attention", "ChunkedKVCache": "chunked attention",
        "ArraysCache": "recurrent", "MambaCache": "recurrent", "NoneType": "no cache",
    }  # fmt: skip
    return words.get(name, name)


# ------------------------------------------------------------------------------------- parts


def part_of(store: Store, path: str) -> str:
    """Return which of PARTS a module belongs to, from its and its parents' names and classes."""
    chain = list(_chain(store.model, path))
    last, module = chain[-1] if chain else ("", None)
    kind = type(module).__name__
    if "Embedding" in kind:
        return "embedding"
    if not f"{path}.".startswith(f"{store.layers_path}."):
        return "head" if last in _HEADS and "Linear" in kind else "other"
    below = chain[store.layers_path.count(".") + 2 :]
    if any(holds_experts(m) or type(m).__name__.startswith("Switch") for _, m in below):
        return "experts"
    if not below or "Norm" in kind or last in ("gate", "router", "shared_expert_gate"):
        return "other"
    if any(_MLP.search(name) or _MLP_CLASS.search(type(m).__name__) for name, m in below):
        return "mlp"
    return "mixer"


def _chain(model: nn.Module, path: str) -> Iterator[tuple[str, Any]]:
    """Yield (name, module) for every step along a path, as far as the tree goes."""
    here: Any = model
    for name in path.split("."):
        if isinstance(here, list):
            here = here[int(name)] if name.isdecimal() and int(name) < len(here) else None
        else:
            here = here.get(name) if isinstance(here, dict) else None
        if here is None:
            return
        yield name, here


# ------------------------------------------------------------------------------------- a trial


def _run_lazily(store: Store, explain: Callable[[str], None]) -> tuple[list | None, dict[int, int]]:
    """Run one token lazily. Return the caches after it, None if the architecture cannot be run like
    this, and the number of experts chosen, by id of the module that holds them."""
    from mlx_lm.models.cache import make_prompt_cache
    from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

    routed: dict[int, int] = {}

    def listening(original: Callable) -> Callable:
        def call(module: Any, x: Any, indices: Any, *rest: Any, **named: Any) -> Any:
            routed[id(module)] = indices.size
            return original(module, x, indices, *rest, **named)

        return call

    classes: tuple[Any, ...] = (SwitchLinear, QuantizedSwitchLinear)
    originals = [kind.__call__ for kind in classes]
    try:
        _hollow(store)
        cache = make_prompt_cache(store.model)
        for kind, original in zip(classes, originals):
            kind.__call__ = listening(original)
        store.model(mx.zeros((1, 1), mx.uint32), cache=cache)
        return cache, routed
    except Exception as error:  # an mlx_lm model may raise anything
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        explain(f"the caches cannot be looked at: {reason}")
        return None, routed
    finally:
        for kind, original in zip(classes, originals):
            kind.__call__ = original


def _hollow(store: Store) -> None:
    """Give the model broadcast parameters of the stored dtypes: the caches get the right dtypes,
    and evaluating one by accident takes no memory."""

    def hollow(name: str, value: mx.array) -> mx.array:
        return mx.broadcast_to(mx.array(0, store.dtype(name)), value.shape)

    store.model.update(tree_map_with_path(hollow, store.model.parameters()))


def _cache_bytes(cache: list) -> dict[str, Any]:
    """Bytes that grow with every token, bytes of full sliding windows, and bytes of recurrent
    state, which do not depend on length. dtype: of keys, or of the state if there are none."""
    growing = windows = state = 0
    dtypes: list[mx.Dtype] = []
    for part in leaves(cache):
        if part is None:
            continue
        keys, values = getattr(part, "keys", None), getattr(part, "values", None)
        if not isinstance(keys, mx.array) or not isinstance(values, mx.array):
            flat: Any = tree_flatten(part.state)  # of a recurrent state, however nested
            arrays = [value for _, value in flat if isinstance(value, mx.array)]
            state += sum(array.nbytes for array in arrays)
            dtypes += [array.dtype for array in arrays]
            continue
        dtypes.insert(0, keys.dtype)
        token = sum(array.nbytes // array.shape[2] for array in (keys, values))
        if type(part).__name__ in _WINDOWS:
            windows += token * (getattr(part, "max_size", 0) or getattr(part, "chunk_size", 0))
        else:
            growing += token * CACHE_TOKENS
    return {
        "dtype": str(dtypes[0]).rpartition(".")[2] if dtypes else None,
        "bytes_per_1024_tokens": growing,
        "window_bytes": windows,
        "state_bytes": state,
    }
