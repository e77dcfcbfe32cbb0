"""Memory-mapped weights: a policy that maps originals from their files, if matmuls use them as they
are stored.

A mapped model is there at once, is shared by all processes, and is paged in as it is used. Matmuls
read it about as fast as memory of their own: see docs/decisions.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

from toastkit.holdings.forms import MAPPED, ORIGINAL, Form
from toastkit.holdings.holding import Holding
from toastkit.holdings.holdings import Holdings
from toastkit.holdings.policy import Policy, Wish
from toastkit.native.library import in_use
from toastkit.store.ledger import EMBEDDING
from toastkit.store.mapping import Place
from toastkit.store.skeleton import holds_experts


class MappingPolicy(Policy):
    """Maps originals. See holdings.policy.Policy. For models without streamed layers and expert
    slots, which are read into memory that is reused. If memory is short, the system drops mapped
    pages by itself.

    paths: of the mapped modules; none if matmuls are not native, or the system will not map a file.
    """

    name = "mapping"
    variant = ""  # the results are the same to the bit
    tells_steps = False

    def __init__(self) -> None:
        self.paths: list[str] = []
        self._loaded = False

    def attach(self, holdings: Holdings) -> None:
        """Attach to a model: map its files, and read ahead the pages that every step uses."""
        self._holdings, self._store = holdings, holdings.store
        library = in_use() if holdings.types.native else None
        if library is None:
            return
        from toastkit.native.regions import Region

        self._store.map(partial(Region, library))
        fitting = [h for h in holdings.modules.values() if self._fits(h)]
        self.paths = [holding.path for holding in fitting]
        if self._store.mapping is not None:
            self._store.mapping.read_ahead(self._places(_read_whole(fitting)))

    def _fits(self, holding: Holding) -> bool:
        """True if its matrix is used on the device as it is stored."""
        name, store = max(holding.names, key=self._store.nbytes), self._store
        same = self._holdings.loaded_dtype(name) == store.dtype(name)
        return same and len(store.shape(name)) > 1 and store.can_map(name)

    def _places(self, holdings: Iterable[Holding]) -> list[Place]:
        names = (name for holding in holdings for name in holding.names)
        return [place for name in names if (place := self._store.source(name)) is not None]

    def decide(self, wish: Wish) -> bool:
        """True for the first pass only. Raises DataError if a file was written to."""
        if self._store.mapping is not None:
            self._store.mapping.check()
        return not self._loaded

    def form(self, path: str, form: Form) -> Form:
        """Mapped, for a resident original."""
        return MAPPED if form == ORIGINAL else form

    def changed(self, seconds: float, made: int) -> None:
        """Called when the model is loaded."""
        self._loaded = True

    def report(self) -> dict[str, Any]:
        """Bytes of the modules mapped now."""
        return {"mapped": mapped_bytes(self._holdings)}


def mapped_bytes(holdings: Holdings) -> int:
    """Bytes of the modules mapped now."""
    mapped = [path for path, holding in holdings.modules.items() if holding.form.mapped]
    return sum(map(holdings.loaded.module_bytes, mapped))


def _read_whole(fitting: Iterable[Holding]) -> Iterator[Holding]:
    """Modules that every step reads whole: not experts, nor an embedding, unless it is the head
    too."""
    fitting = list(fitting)
    heads = any(h.layer is None and h.owner != EMBEDDING for h in fitting)
    for holding in fitting:
        if not holds_experts(holding.module) and (holding.owner != EMBEDDING or not heads):
            yield holding
