"""The RoPE part of a configuration, in the names that an architecture reads.

transformers 4 wrote `rope_theta` and `rope_scaling`; transformers 5 writes both into one map,
`rope_parameters`, for some models one per kind of layer. Most classes of mlx_lm know the former,
some the latter. A class silently drops what it cannot compute; here it is refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

from toastkit.errors import DataError
from toastkit.model.source import Source

FULL, SLIDING = "full_attention", "sliding_attention"
THETA = ("rope_theta", "rotary_emb_base")
PARTIAL = ("partial_rotary_factor", "rotary_pct")
# The base in sliding-window layers, if it has a field of its own.
LOCAL_THETA = ("rope_local_base_freq", "swa_rope_theta", "rope_local_theta")
# Kinds of scaling that classes compute without rope_utils.initialize_rope, which refuses unknown
# ones itself. Classes not named here compute none.
KINDS = {
    "deepseek": ("linear",), "deepseek_v2": ("yarn", "deepseek_yarn"), "hunyuan": ("dynamic",),
    "hunyuan_v1_dense": ("dynamic",), "minicpm3": ("longrope", "su"), "nemotron": ("linear",),
    "phi3": ("longrope", "su", "linear"), "phimoe": ("longrope", "su"),
}  # fmt: skip
# Kinds that a class names, and rotates without.
UNSCALED = {"mellum": ("linear",)}
# Classes that require a scaling get one that changes nothing.
IDLE = {"deepseek_v2": {"type": "yarn", "factor": 1.0}, "minicpm3": {"type": "longrope"}}
DEFAULT_THETA = 10000
# The part of each head that the class rotates whatever the configuration says.
FIXED_PART = {"recurrent_gemma": 0.5}
# transformers too rotates whole heads, whatever the configuration says.
WHOLE_ALWAYS = ("llama",)
_BY_LAYER = re.compile(r"rope_parameters( or \{\}\))?(\.get\(|\[)\s*(layer_|self\.layer_type)")


def rename_rotation(config: dict[str, Any], source: Source, where: str) -> None:
    """Give a level of a configuration all the RoPE names that the architecture reads.

    where: names the checkpoint in messages. Raises DataError for a RoPE that is unreadable, or that
    the architecture does not compute.
    """
    found = _parameters(config)
    if found:
        full = found.get(FULL, next(iter(found.values())))
        _check_layers(found, full, source, where)
        kind = kind_of(full)
        scaling = None if kind == "default" else _scaling(config, full, kind, source, where)
        _write(config, found, full, scaling, source)
        if "rope_parameters" in source.fields:
            _write_map(config, full, source, where)
    for name in (*THETA, *LOCAL_THETA):
        if name in source.fields and not _is_usable(name, config, source):
            raise DataError(f"{where}: config.json has no usable {name}")


def _is_usable(name: str, config: dict[str, Any], source: Source) -> bool:
    """True if the class computes with a base: also with null, if it then does not rotate, and with
    a list, if it reads one base for each layer."""
    theta = config.get(name, 1)
    if theta is None:
        nope = config.get("position_embedding_type") == "nope"
        return nope or f"{name} is not None" in source.text
    if isinstance(theta, list) and f"isinstance({name}, list)" in source.text:
        return all(map(_is_positive, theta))
    return _is_positive(theta)


def kind_of(rope: dict[str, Any]) -> str:
    """Return the kind of scaling."""
    return str(rope.get("rope_type") or rope.get("type") or "default")


def cautions(config: dict[str, Any], source: Source) -> Iterator[str]:
    """Yield how an architecture's computation of a renamed RoPE differs slightly."""
    for rope in (config.get("rope_scaling"), *_parameters(config).values()):
        if not isinstance(rope, dict):
            continue
        short, long = rope.get("short_factor"), rope.get("long_factor")
        if kind_of(rope) in ("longrope", "su") and short != long:
            first = rope.get("original_max_position_embeddings")
            first = first or config.get("original_max_position_embeddings")
            yield f"rotates by long_factor also within the first {first} tokens"
            return


def unrounded_yarn(config: dict[str, Any]) -> dict[str, Any] | None:
    """Return the yarn scaling, with its `rope_theta`, if its range must not be rounded to whole
    dimensions, which mlx_lm always does; else None."""
    for rope in _parameters(config).values():
        if kind_of(rope) == "yarn" and rope.get("truncate") is False:
            return rope
    return None


def _parameters(config: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the RoPE parameters in the new spelling, by kind of layer; one entry, of kind "", if
    all are alike. Empty if there are none."""
    new = config.get("rope_parameters")
    if isinstance(new, dict) and new:
        if all(isinstance(part, dict) for part in new.values()):
            return dict(new)
        rope = dict(new)
    else:
        old = config.get("rope_scaling")
        rope = dict(old) if isinstance(old, dict) else {}
    for names in (THETA, PARTIAL):
        for name in names:
            if name in config:
                rope.setdefault(names[0], config[name])
    return {"": rope} if rope else {}


def _check_layers(found: dict, full: dict, source: Source, where: str) -> None:
    """Raise DataError if layers differ and the class has one RoPE for all of them."""
    if source.reads("rope_parameters"):
        return
    local = any(name in source.fields for name in LOCAL_THETA)
    for layer, rope in found.items():
        odd = kind_of(rope) != "default" and rope is not full
        for name in ("rope_theta", "partial_rotary_factor"):
            apart = rope.get(name) != full.get(name)
            odd = odd or (apart and not (local and layer == SLIDING and name == "rope_theta"))
        if odd:
            raise DataError(
                f"{where}: {source.module} of mlx_lm has no rotation of its own for {layer} layers"
            )


def _scaling(config: dict, rope: dict, kind: str, source: Source, where: str) -> dict[str, Any]:
    """Return `rope_scaling` in both spellings, with what the class would otherwise default."""
    known = source.reads("rope_scaling") or source.reads("rope_parameters")
    general = known and "initialize_rope" in source.text
    computed = general or kind in KINDS.get(source.module, ())
    if not computed or kind in UNSCALED.get(source.module, ()):
        raise DataError(f"{where}: {source.module} of mlx_lm knows no rope scaling of type {kind}")
    scaling = {k: v for k, v in rope.items() if k not in (*THETA, *PARTIAL)}
    scaling["type"] = scaling["rope_type"] = kind
    if "factor" in scaling:
        if not _is_positive(scaling["factor"]):
            raise DataError(f"{where}: config.json has no usable factor of its rope scaling")
        scaling["factor"] = float(scaling["factor"])  # some classes insist
    first = config.get("original_max_position_embeddings") or config.get("max_position_embeddings")
    if kind in ("yarn", "longrope", "su", "llama3") and first is not None:
        scaling.setdefault("original_max_position_embeddings", first)
    _set_attention_factor(config, scaling, kind, source, where)
    return scaling


def _set_attention_factor(config: dict, scaling: dict, kind: str, source: Source, where: str):
    """Handle attention_factor, which mlx_lm computes: a given one must equal that, or be made
    to."""
    given = scaling.pop("attention_factor", None)
    if given is None or kind not in ("yarn", "longrope", "su"):
        return
    first, last = (
        scaling.get("original_max_position_embeddings"),
        config.get("max_position_embeddings"),
    )
    if kind == "yarn" and scaling.get("factor", 1) > 1:
        # Of the ratio mscale : mscale_all_dim; the latter, which scales scores too, stays.
        log, whole = 0.1 * math.log(scaling["factor"]), scaling.get("mscale_all_dim") or 0
        scaling["mscale"] = (given * (log * whole + 1) - 1) / log
        scaling["mscale_all_dim"] = whole
        return
    usual = 1.0
    if kind != "yarn" and first and last and last > first:
        usual = math.sqrt(1 + math.log(last / first) / math.log(first))
    if abs(given - usual) > 1e-6:
        raise DataError(f"{where}: {source.module} of mlx_lm has no attention_factor of {given}")


def _write(config: dict, found: dict, full: dict, scaling: dict | None, source: Source) -> None:
    """Write the names that the class has fields for, but for the map of them all."""
    part = full.get("partial_rotary_factor")
    names = {**dict.fromkeys(THETA, full.get("rope_theta")), **dict.fromkeys(PARTIAL, part)}
    if SLIDING in found:
        names.update(dict.fromkeys(LOCAL_THETA, found[SLIDING].get("rope_theta")))
    for name, value in names.items():
        if name in source.fields and (value is not None or name in THETA and "rope_theta" in full):
            config[name] = value
    if source.requires("rotary_dim") and config.get("head_dim"):
        config.setdefault("rotary_dim", int(config["head_dim"] * (part or 1)))
    first = (scaling or {}).get("original_max_position_embeddings")
    if first is not None and "original_max_position_embeddings" in source.fields:
        config["original_max_position_embeddings"] = first
    config["rope_scaling"] = scaling or IDLE.get(source.module)


def _write_map(config: dict[str, Any], full: dict, source: Source, where: str) -> None:
    """Write `rope_parameters`, for a class that reads them: as given, or made of `full`, and each
    scaling as `rope_scaling` has it."""
    new = config.get("rope_parameters")
    if not isinstance(new, dict):
        new = {**full, "rope_type": kind_of(full)}
        by_layer = _BY_LAYER.search(source.text) and config.get("layer_types")
        new = {layer: dict(new) for layer in by_layer} if by_layer else new
        config["rope_parameters"] = new
    layers = all(isinstance(part, dict) for part in new.values())
    for rope in new.values() if layers else [new]:
        kind = kind_of(rope)
        if kind != "default":
            rope.update(_scaling(config, rope, kind, source, where))
            rope.pop("attention_factor", None)


def check_rotation(config: dict[str, Any], source: Source, where: str) -> None:
    """Raise DataError for a base that the class does not read, and if it rotates another part of
    each head than configured."""
    read = any(source.reads(name) for name in THETA)
    for rope in list(_parameters(config).values()) or [{}]:
        theta = rope.get("rope_theta", DEFAULT_THETA)
        if not read and theta != DEFAULT_THETA:
            raise DataError(f"{where}: {source.module} of mlx_lm does not read rope_theta")
        _check_local(config, theta, source, where)
    if source.module in WHOLE_ALWAYS or any(
        source.reads(name) for name in (*PARTIAL, "rotary_dim")
    ):
        return
    computed = FIXED_PART.get(source.module, 1.0)
    for rope in _parameters(config).values():
        part = rope.get("partial_rotary_factor", computed)
        if part not in (None, computed) and not _is_latent_part(part, config, source):
            raise DataError(
                f"{where}: {source.module} of mlx_lm rotates {computed:.0%} of each head, "
                f"not {part:.0%}"
            )


def _check_local(config: dict[str, Any], theta: object, source: Source, where: str) -> None:
    """Raise DataError if sliding-window layers have a base of their own that the class does not
    read."""
    if any(source.reads(name) for name in (*LOCAL_THETA, "rope_parameters")):
        return
    for name in LOCAL_THETA:
        if config.get(name, theta) not in (None, theta):
            raise DataError(f"{where}: {source.module} of mlx_lm does not read {name}")


def _is_latent_part(part: float, config: dict[str, Any], source: Source) -> bool:
    """True if it is what latent attention rotates, of both parts of a head or of `head_dim`."""
    turned, still = config.get("qk_rope_head_dim") or 0, config.get("qk_nope_head_dim") or 0
    wholes = (turned + still, config.get("head_dim") or 0)
    known = source.reads("qk_rope_head_dim")
    return known and any(part * whole == turned for whole in wholes if whole)


def _is_positive(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < 1e30
