"""Reads a prompt's last token in the pass of those before it, computing logits for it alone.

That is done only where it gives, to the bit, what a pass over the others and then a step give.
Native operations compute a row the same way whatever rows are beside it; MLX's own products do not.
So the model is examined: graphs of passes over one token, two and many are built, not computed.
They must contain the same operations, all of them known to work row by row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx

from toastkit.engine.savepoints import always_trimmable
from toastkit.holdings.holdings import Holdings
from toastkit.holdings.streams import arrays_in
from toastkit.model.supported import reads_on_host
from toastkit.native.kv_caches import leaves
from toastkit.native.library import in_use
from toastkit.native.replacing import last_position_only
from toastkit.store.skeleton import MISFITS

MANY = 256  # tokens, where an architecture may branch differently than for few
# MLX operations, as its graphs name them, that move numbers and change none: their count may differ
# between passes.
MOVES = frozenset({
    "AsStrided", "Broadcast", "BroadcastAxes", "Concatenate", "Contiguous", "Copy", "ExpandDims",
    "Flatten", "Full", "Reshape", "Slice", "SliceUpdate", "Split", "Squeeze", "StopGradient",
    "Transpose", "Unflatten",
})  # fmt: skip
# Operations that compute each number, or each row, independently. On Linux, where there are native
# operations, MLX takes one number at a time (mlx/backend/cpu/simd). Neither products nor
# convolutions.
BY_ROW = frozenset({
    "Abs", "Add", "Arange", "AsType", "BitwiseAnd", "Cos", "Divide", "Equal", "Erf", "Exp", "Floor",
    "Gather", "GatherAxis", "Greater", "GreaterEqual", "LeftShift", "Less", "LessEqual", "Log",
    "Log1p", "LogAddExp", "LogicalAnd", "LogicalNot", "LogicalOr", "Max", "Maximum", "Min",
    "Minimum", "Multiply", "Negative", "NotEqual", "Power", "Remainder", "RightShift", "Rsqrt",
    "Select", "Sigmoid", "Sin", "Sqrt", "Square", "Subtract", "Sum", "Tanh",
})  # fmt: skip
OURS = "Toast"  # prefix of native operations in graphs


class LastToken:
    """The last token of a model's prompts. Not `possible` before the model was examined."""

    def __init__(self) -> None:
        self._heads: list[Any] = []

    def examine(self, holdings: Holdings) -> None:
        """Examine a model before any of its weights are loaded, or when all of them are."""
        self._heads = _found(holdings) if holdings.types.native else []

    @property
    def possible(self) -> bool:
        """True if a prompt's last token may be read in the pass of those before it."""
        return bool(self._heads)

    def pass_size(self, left: int, caches: Sequence[Any], chunk: int | None, usual: int) -> int:
        """Return the tokens of the next pass of a prompt with `left` tokens to go. All of them, if
        that gives what a pass over all but the last, and a step, give; one more than usual, rather
        than a pass for one. caches: as these tokens find them. chunk: most tokens of a pass, None
        for the usual."""
        along = 1 < left <= (chunk or usual + 1) and self.possible
        if along and all(_keeps_order(one, left) for one in leaves(caches)):
            return left
        return max(1, min(chunk or usual, left - 1))

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Make passes give logits (B, 1, vocab) of the last position only."""
        with last_position_only(self._heads):
            yield


def _found(holdings: Holdings) -> list[Any]:
    """Return the modules to be told that the last position is wanted alone: heads, and the last
    layers; none if passes over several tokens then compute otherwise than over one."""
    if reads_on_host(type(holdings.store.model).__module__.rpartition(".")[2]):
        return []  # building the graph would compute
    try:
        with holdings.shapes_only():
            heads = _heads(holdings)
            heads += _last_layers(holdings) if heads else []
            return heads if heads and _is_by_row(holdings, heads) else []
    except MISFITS:
        return []  # the first pass reports what is wrong with the model


def _heads(holdings: Holdings) -> list[Any]:
    """Return the modules whose products are logits. An embedding that is looked up alone is as good
    as one. A pass is built only for what has another name than most heads."""
    vocab = holdings.store.config.vocab
    found = [
        (path, holding.module)
        for path, holding in holdings.modules.items()
        for tensor in holding.tensors
        if holding.layer is None and tensor.key == "weight"
        if holdings.store.shape(tensor.name)[0] == vocab
    ]
    return [
        one
        for path, one in found
        if hasattr(one, "as_linear") or path.endswith("lm_head") or _gives_logits(holdings, one)
    ]


def _gives_logits(holdings: Holdings, module: Any) -> bool:
    """False for another matrix that happens to have a row for each word, as those of inputs of each
    layer may have, whose last position would stand for all of them."""
    model: Any = holdings.store.model
    with last_position_only([module]):
        return model(mx.zeros((1, 2), mx.uint32), cache=holdings.new_caches()).shape[1] == 1


def _last_layers(holdings: Holdings) -> list[Any]:
    """Return the last layer with a cache and those after it; none for an architecture that has more
    caches than layers, because it runs layers repeatedly."""
    layers, found = list(getattr(holdings.store.model, "layers", None) or ()), []
    if len(holdings.new_caches()) > len(layers):
        return []
    for layer in reversed(layers):
        found.append(layer)
        if not getattr(layer, "keeps_nothing", False):
            break
    return found


def _is_by_row(holdings: Holdings, heads: Sequence[Any]) -> bool:
    """True if passes over any number of tokens compute each token the same way, with logits of the
    last one alone if the heads are told to."""
    caches = holdings.new_caches()
    if not all(_keeps_order(one, 1) for one in leaves(caches)):
        return False
    windows = [getattr(layer, "max_size", MANY) for layer in caches]
    with last_position_only(heads):
        one = _computed(holdings, 1)
        return one is not None and all(
            _computed(holdings, count) == one for count in (2, max(2, min(MANY, *windows)))
        )


def _computed(holdings: Holdings, count: int) -> Counter[str] | None:
    """Count the operations in a pass over `count` tokens; None if one is not known to compute by
    rows, or if there are logits of more than one token."""
    library, caches = in_use(), holdings.new_caches()
    model: Any = holdings.store.model
    logits = model(mx.zeros((1, count), mx.uint32), cache=caches)
    if library is None or logits.shape[1] != 1:
        return None
    if any(getattr(one, "offset", count) != count for one in caches):
        return None  # some layer has not read all of them
    found = library.operations([logits, *arrays_in(caches)])
    computing = Counter({name: n for name, n in found.items() if name not in MOVES})
    known = all(name in BY_ROW or name.startswith(OURS) for name in computing)
    return computing if known and found else None


def _keeps_order(layer: Any, count: int) -> bool:
    """True if a cache is the same after `count` more tokens in one pass as with the last one by
    itself: a full window rotates when it takes one token, and not when it takes several. Recurrent
    states are determined by their operations."""
    if type(layer).__name__ == "RotatingKVCache":
        return layer.offset + count <= layer.max_size
    return type(layer).__name__ == "ArraysCache" or always_trimmable([layer])
