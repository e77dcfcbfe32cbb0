"""Loads a whole model onto the device: every layer resident, at the checkpoint's own precision."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from toastkit.errors import DataError
from toastkit.model.config import ModelConfig
from toastkit.model.files import ModelFiles
from toastkit.store.ledger import EMBEDDING, OUTSIDE, Ledger, layer_owner
from toastkit.store.store import Store

DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}


def load_model(
    files: ModelFiles, config: ModelConfig, dtype: str | None, ledger: Ledger | None = None
) -> nn.Module:
    """The model with its weights on the default device.

    dtype: activations and unquantised weights are cast to it; None keeps the checkpoint's own.
    ledger: is told who keeps how many bytes.
    Raises DataError for a checkpoint that is broken or that mlx_lm has no architecture for.
    """
    store = Store(files, config)
    try:
        load_weights(store, dtype, ledger)
    finally:
        store.close()
    return store.model


def load_weights(store: Store, dtype: str | None, ledger: Ledger | None = None) -> None:
    """As `load_model`, into the model of a store that stays open."""
    model = store.model
    model.load_weights(list(store.load().items()))
    if dtype is not None:
        model.set_dtype(DTYPES[dtype])
    try:
        if dtype is not None:
            # One layer after another: all at once, MLX would hold every tensor in both dtypes.
            for index in range(store.layer_count):
                mx.eval(model.layers[index].parameters())
        mx.eval(model.parameters())
    except RuntimeError as error:
        reason = str(error).strip().split("\n")[0]
        raise DataError(f"{store.files.name}: cannot read the weights: {reason}") from error
    if ledger is not None:
        count_weights(store, model, ledger)


def count_weights(store: Store, model: nn.Module, ledger: Ledger) -> None:
    """Enters a resident model's weights into the ledger."""
    from mlx.utils import tree_flatten

    owned: dict[str, list[mx.array]] = {}
    parameters: Any = tree_flatten(model.parameters())
    for name, array in parameters:
        layer = store.layer_of(name)
        owner = OUTSIDE if layer is None else layer_owner(layer)
        if layer is None and "embed" in name:
            owner = EMBEDDING
        owned.setdefault(owner, []).append(array)
    for owner, arrays in owned.items():
        ledger.put(owner, arrays)


def activation_dtype(on_cpu: bool) -> str | None:
    """The dtype a checkpoint runs in unless told otherwise: float32 on the CPU, where MLX emulates
    the 16-bit types, and the checkpoint's own (None) elsewhere."""
    return "float32" if on_cpu else None
