"""Gear plan of a checkpoint: for each gear, bytes on the device, bytes per token, ideal speedup.

Computed from shapes alone: no weight is read. A token reads every weight once, except for the
experts that it does not use, and one row of an embedding (all of it if it is the head as well). The
KV cache is left out, as it depends on the length.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from toastkit.gears.cost import whole_speedup
from toastkit.gears.discovery import changing
from toastkit.gears.gear_options import GearOptions
from toastkit.holdings.holdings import Holdings
from toastkit.store.anatomy import anatomy, part_of
from toastkit.store.dtypes import AS_STORED, Loading
from toastkit.store.ledger import Ledger
from toastkit.store.precision import GEAR_BITS, row_bytes
from toastkit.store.quantising import leaf_modules
from toastkit.store.skeleton import holds_experts
from toastkit.store.store import Store


@dataclass(frozen=True)
class GearPlan:
    """One gear; sizes in bytes.

    bits: of a managed weight, without its scales. device: all weights. managed: the managed ones,
    which change gear. token: read per token. managed_token: the managed part of that. ratio: of
    `token` to that of high gear. speedup: of the whole model over high gear, if only bytes took
    time. shift: read and written by the first shift into it: originals, or baked weights, and what
    is made of them; into high gear, originals in the files and on the device.
    """

    gear: str
    bits: float
    device: int
    managed: int
    token: float
    managed_token: float
    ratio: float
    speedup: float
    shift: int


@dataclass(frozen=True)
class Plan:
    """A checkpoint's gears. scope: of GearOptions. dtype, narrow: of Loading. modules, parameters:
    how many change gear. share: the managed share of a token's bytes in high gear, the f of section
    15. gears: high first; only high if nothing can change, with the reason in note.
    """

    scope: str
    dtype: str | None
    narrow: bool
    modules: int
    parameters: int
    share: float
    gears: tuple[GearPlan, ...]
    note: str | None = None


def plan(
    store: Store,
    scope: str,
    bits: tuple[int, int] = (4, 8),
    types: Loading = AS_STORED,
    explain: Callable[[str], None] = lambda line: None,
) -> Plan:
    """Plan the gears of a checkpoint.

    store: its model is used up, as by anatomy. scope: "attention" or "all". bits: of low and mid.
    types: the dtypes that weights are loaded in. explain(line): called if it is unknown how many
    experts a token uses; then all count. Raises UsageError for an invalid scope or bits.
    """
    options = GearOptions(scope=scope, bits=bits)
    weights = _weights(store, types, explain)
    paths = [one.path for one in changing(store, scope)]
    managed = [weights[f"{path}.weight"] for path in paths]
    high = [one.nbytes for one in managed]
    read = sum(one.token for one in managed)
    device = sum(one.nbytes for one in weights.values())
    rest = sum(one.token for one in weights.values()) - read

    def gear_plan(gear: str, bits: float, sizes: list[int], shift: int) -> GearPlan:
        """sizes: bytes of the managed weights."""
        size, part = sum(sizes), sum(n * one.used for n, one in zip(sizes, managed))
        whole, token = rest + read, rest + part
        speedup = whole_speedup(read / whole, read / part) if part else 1.0
        on_device = device - sum(high) + size
        ratio = token / whole
        return GearPlan(gear, bits, on_device, size, token, part, ratio, speedup, shift)

    count = sum(one.count for one in managed)
    stored = sum(one.stored for one in managed)
    width = 8 * sum(high) / count if count else 0.0
    rows = [gear_plan("high", width, high, sum(high) + stored)]
    for gear in ("mid", "low") if managed else ():
        wanted = options.bits_of(gear) or 0
        sizes, baked = [one.packed(wanted) for one in managed], _baked(store, gear, wanted, paths)
        shift = sum(sizes) + (sum(high) if baked is None else baked)
        rows.append(gear_plan(gear, wanted, sizes, shift))
    share = rows[0].managed_token / rows[0].token
    note = _note(store, scope, managed)
    return Plan(scope, types.dtype, types.narrow, len(managed), count, share, tuple(rows), note)


def _note(store: Store, scope: str, managed: list) -> str | None:
    """Why nothing changes gear, None if something does."""
    if store.quantization is not None:
        return "it is quantised already: gears are told, and nothing is replaced"
    return None if managed else f"it has no matrix in the scope {scope!r}"


@dataclass(frozen=True)
class _Weight:
    """A tensor as it will be on the device. item: bytes per element. used: the share that a token
    reads. stored: bytes in the files."""

    shape: tuple[int, ...]
    item: int
    used: float
    stored: int

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.count * self.item

    @property
    def token(self) -> float:
        return self.nbytes * self.used

    def packed(self, bits: int) -> int:
        """Bytes when packed, with scales in its own dtype."""
        columns = self.shape[-1]
        return self.count // columns * row_bytes(bits, columns, self.item)


def _baked(store: Store, gear: str, bits: int, paths: list[str]) -> int | None:
    """Bytes of a gear that is baked for all managed matrices; None if it is not."""
    names = [store.baked(path, gear) for path in paths]
    if GEAR_BITS[gear] != bits or not all(names):
        return None
    return sum(store.nbytes(name) for some in names for name in some)


def _weights(store: Store, types: Loading, explain: Callable[[str], None]) -> dict[str, _Weight]:
    """All tensors of a checkpoint, by name."""
    found = anatomy(store, explain)
    active = (found["experts"] or {}).get("active")
    modules: dict[str, Any] = dict(leaf_modules(store.model))
    # A tied head is the first embedding: later ones are for positions or layers.
    embeddings = [path for path in modules if part_of(store, path) == "embedding"]
    head = embeddings[0] if found["tied_head"] and embeddings else None
    used = dict.fromkeys(store.names, 1.0)
    for name in store.names:
        path = name.rpartition(".")[0]
        if path in modules and holds_experts(modules[path]):
            total = modules[path].num_experts
            used[name] = min(active or total, total) / total
        elif path in embeddings and path != head:
            used[name] = 1 / store.shape(name)[0]
    loaded = Holdings(store, types, Ledger())
    return {
        name: _Weight(
            store.shape(name), loaded.loaded_dtype(name).size, used[name], store.nbytes(name)
        )
        for name in store.names
    }
