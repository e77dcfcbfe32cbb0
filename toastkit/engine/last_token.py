"""A prompt's last token, read in the pass of those before it: its logits alone are computed.

That is done only where it gives, to the bit, what a pass over the others and a step give. Native
operations compute a row in one way, whatever rows are beside it; MLX's own products do not. So a
model is looked at: passes over one token, two and many are built, and not computed. They must
compute the same with all rows alike, and nothing that is not known to work row by row.
"""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx

from toastkit.engine.savepoints import always_cut
from toastkit.holdings.holdings import Holdings
from toastkit.holdings.streams import arrays_in
from toastkit.model.supported import reads_on_host
from toastkit.native.kv_caches import leaves
from toastkit.native.replacing import last_position_only
from toastkit.store.skeleton import MISFITS

MANY = 256  # tokens, where an architecture may take another way than with a few
# MLX's operations, as its graphs call them, that move numbers and change none: there may be more of
# them in one pass than in another.
MOVES = frozenset({
    "AsStrided", "Broadcast", "BroadcastAxes", "Concatenate", "Contiguous", "Copy", "ExpandDims",
    "Flatten", "Full", "Reshape", "Slice", "SliceUpdate", "Split", "Squeeze", "StopGradient",
    "Transpose", "Unflatten",
})  # fmt: skip
# That compute each number, or each row, in one way. On Linux, where there are native operations,
# MLX takes one number at a time (mlx/backend/cpu/simd). Neither products nor convolutions.
BY_ROW = frozenset({
    "Abs", "Add", "Arange", "AsType", "BitwiseAnd", "Cos", "Divide", "Equal", "Erf", "Exp", "Floor",
    "Gather", "GatherAxis", "Greater", "GreaterEqual", "LeftShift", "Less", "LessEqual", "Log",
    "Log1p", "LogAddExp", "LogicalAnd", "LogicalNot", "LogicalOr", "Max", "Maximum", "Min",
    "Minimum", "Multiply", "Negative", "NotEqual", "Power", "Remainder", "RightShift", "Rsqrt",
    "Select", "Sigmoid", "Sin", "Sqrt", "Square", "Subtract", "Sum", "Tanh",
})  # fmt: skip
OURS = "Toast"  # what native operations begin with there


class LastToken:
    """The last token of a model's prompts. Nothing is possible until the model was examined."""

    def __init__(self) -> None:
        self._heads: list[Any] = []

    def examine(self, holdings: Holdings) -> None:
        """Looks at a model of which nothing is loaded yet."""
        heads = _heads(holdings) if holdings.types.native else []
        heads += _last_layers(holdings) if heads else []
        self._heads = heads if heads and _is_by_row(holdings, heads) else []

    @property
    def possible(self) -> bool:
        """Whether a prompt's last token may go along with those before it."""
        return bool(self._heads)

    def pass_size(self, left: int, caches: Sequence[Any], chunk: int | None, usual: int) -> int:
        """Tokens of the next pass of a prompt of which so many are left. All, where that gives what
        a pass over all but the last, and a step, give; one more than usual, rather than a pass for
        one. caches: as these tokens find them. chunk: tokens that a pass may have, None for what is
        usual."""
        along = 1 < left <= (chunk or usual + 1) and self.possible
        if along and all(_keeps_order(one, left) for one in leaves(caches)):
            return left
        return max(1, min(chunk or usual, left - 1))

    @contextmanager
    def alone(self) -> Iterator[None]:
        """While a pass gives logits (B, 1, vocab), of the last position."""
        with last_position_only(self._heads):
            yield


def _heads(holdings: Holdings) -> list[Any]:
    """The modules whose products may be logits."""
    vocab = holdings.store.config.vocab
    return [
        holding.module
        for holding in holdings.modules.values()
        for tensor in holding.tensors
        if holding.layer is None and tensor.key == "weight"
        if holdings.store.shape(tensor.name)[0] == vocab
    ]


def _last_layers(holdings: Holdings) -> list[Any]:
    """The last layer that keeps something, and those behind it; none of an architecture that has
    more caches than layers: it runs them again."""
    layers, found = list(getattr(holdings.store.model, "layers", None) or ()), []
    if len(holdings.new_caches()) > len(layers):
        return []
    for layer in reversed(layers):
        found.append(layer)
        if not getattr(layer, "keeps_nothing", False):
            break
    return found


def _is_by_row(holdings: Holdings, heads: Sequence[Any]) -> bool:
    """Whether passes over any number of tokens compute each in one way, and logits of the last
    one alone where the heads are told to."""
    if reads_on_host(type(holdings.store.model).__module__.rpartition(".")[2]):
        return False  # it would compute
    caches = holdings.new_caches()
    if not all(_keeps_order(one, 1) for one in leaves(caches)):
        return False
    windows = [getattr(layer, "max_size", MANY) for layer in caches]
    try:
        with holdings.shapes_only(), last_position_only(heads):
            one = _computed(holdings, 1)
            return one is not None and all(
                _computed(holdings, count) == one for count in (2, max(2, min(MANY, *windows)))
            )
    except MISFITS:
        return False  # what is wrong with the model is told by its first pass


def _computed(holdings: Holdings, count: int) -> Counter[str] | None:
    """How often which operation is in a pass over so many tokens; None where one is not known to
    compute by rows, or where there are logits of more than one token."""
    caches, text = holdings.new_caches(), io.StringIO()
    model: Any = holdings.store.model
    logits = model(mx.zeros((1, count), mx.uint32), cache=caches)
    if logits.shape[1] != 1 or any(getattr(one, "offset", count) != count for one in caches):
        return None  # or not each layer has read all of them
    mx.export_to_dot(text, logits, *arrays_in(caches))
    found = Counter(re.findall(r'label ="([^"]*)", shape=rectangle', text.getvalue()))
    computing = Counter({name: n for name, n in found.items() if name not in MOVES})
    known = all(name in BY_ROW or name.startswith(OURS) for name in computing)
    return computing if known and found else None


def _keeps_order(layer: Any, count: int) -> bool:
    """Whether a cache is, after so many more tokens, what it is when the last comes by itself: a
    window that is full goes round when it takes one, and not when it takes several. Recurrent
    states are what their operations make of them."""
    if type(layer).__name__ == "RotatingKVCache":
        return layer.offset + count <= layer.max_size
    return type(layer).__name__ == "ArraysCache" or always_cut([layer])
