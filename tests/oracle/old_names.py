"""A configuration as transformers 4 wrote it, from one that transformers 5 did."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

# Newer than transformers 4's names, with one rotation for each kind of layer.
BY_LAYER = ("gemma4_text", "laguna", "mellum", "mimo_v2_flash")


def old_names(config: dict[str, Any]) -> dict[str, Any]:
    """The same with `rope_theta` and `rope_scaling` for `rope_parameters`, `torch_dtype`..."""
    old = deepcopy(config)
    if isinstance(old.get("text_config"), dict):
        old["text_config"] = old_names(old["text_config"])
    if "dtype" in old:
        old["torch_dtype"] = old.pop("dtype")
    rope = config.get("rope_parameters")
    if not rope or config["model_type"] in BY_LAYER:
        return old
    del old["rope_parameters"]
    if "rope_theta" in rope or "rope_type" in rope:
        _old_rope(old, rope)
    else:
        full = rope["full_attention"]
        _old_rope(old, full)
        local = rope["sliding_attention"]
        if config["model_type"] in ("gemma3_text", "gemma3n_text"):
            old["rope_local_base_freq"] = local["rope_theta"]
    return old


def _old_rope(old: dict[str, Any], rope: dict[str, Any]) -> None:
    names = {}
    if old["model_type"] == "gpt_neox":
        names = {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}
    scaling = dict(rope)
    for name in ("rope_theta", "partial_rotary_factor"):
        if name in scaling:
            old[names.get(name, name)] = scaling.pop(name)
    kind = scaling.get("rope_type", "default")
    old["rope_scaling"] = None if kind == "default" else scaling
