"""Sliding windows that a configuration has and that an architecture of mlx_lm does not keep to."""

from __future__ import annotations

from typing import Any

from toastkit.model.source import Source

WINDOWS = ("sliding_window", "sliding_window_size", "attention_window_size")
# Architectures that transformers too computes without one, whatever the configuration says.
WITHOUT = ("llama",)


def ignored_window(config: dict[str, Any], source: Source) -> int | None:
    """The tokens past which the architecture looks further back than its configuration allows, None
    where it does not.

    config: a level of it, in the names that the class reads.
    """
    window = next((config[name] for name in WINDOWS if config.get(name)), None)
    if type(window) is not int or window < 1 or not _slides(config):
        return None
    if config.get("model_type") in WITHOUT or _keeps(config, source):
        return None
    return window


def _slides(config: dict[str, Any]) -> bool:
    """Whether any layer has the window."""
    if config.get("use_sliding_window") is False:
        return False
    layers = config.get("layer_types")
    if isinstance(layers, list):
        return any("sliding" in str(kind) for kind in layers)
    first, count = config.get("max_window_layers"), config.get("num_hidden_layers")
    return not (isinstance(first, int) and isinstance(count, int) and first >= count)


def _keeps(config: dict[str, Any], source: Source) -> bool:
    """Whether the class has a window where the configuration has one. Some have it only in the
    layers that `layer_types` names."""
    if not any(source.reads(name) for name in WINDOWS):
        return False
    listed = any(part in LISTED for part in source.parts)
    by_name = "layer_types" in source.fields and source.has_word("full_attention")
    return not by_name or isinstance(config.get("layer_types"), list) or not listed


# Without `layer_types` these, and what is built on them, have no window in any layer.
LISTED = ("llama", "ministral3")
