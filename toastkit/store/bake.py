"""Bake a checkpoint into one `.toast` file, or split it into one file per layer, streaming a tensor
at a time.

Each tensor is a piece (pieces.py): copied from file to file if unchanged, else cast or quantised in
blocks of rows. Peak memory is below 2.5 times the largest layer, or the largest tensor outside the
layers, whatever the size of the model.

The order is that of toast_format.py: small files, tensors outside the layers, layer 0, 1, ...;
within a layer first what every token needs, then the experts, then the gears, by name. It does not
depend on how the source was sharded.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, starmap
from pathlib import Path
from typing import Any

import mlx.core as mx

from toastkit.errors import DataError, UsageError, as_data_error
from toastkit.model.files import TEMPLATES_FOLDER
from toastkit.model.toast_format import (
    EXPERT_MAJOR_VERSION,
    EXPERTS_KEY,
    FILE_PREFIX,
    FILES_GROUP,
    GEAR_PREFIX,
    LAYER_FILE,
    LAYER_GROUP,
    LAYERS_KEY,
    OUTSIDE_FILE,
    OUTSIDE_GROUP,
    VERSION,
    VERSION_KEY,
    describe_experts,
    new_digest,
)
from toastkit.private_files import replace_file, sync_directory
from toastkit.store.dtypes import DTYPES
from toastkit.store.partial import Partial
from toastkit.store.pieces import (
    Piece,
    Recipe,
    cast_to,
    expert_by_expert,
    small_file,
    tensor_by_tensor,
)
from toastkit.store.precision import GEAR_BITS, group_size_of, quantise_rows
from toastkit.store.quantising import Quantise, QuantizationOptions, choose_modules, leaf_modules
from toastkit.store.skeleton import is_matrix
from toastkit.store.store import Store
from toastkit.store.writer import Progress, TensorWriter

PARTS = ("weight", "scales", "biases")  # of a quantised matrix, in file order


def bake(
    store: Store,
    out: Path,
    *,
    quantization: QuantizationOptions | None = None,
    dtype: str | None = None,
    gears: tuple[str, ...] = (),
    expert_major: bool = False,
    overwrite: bool = True,
    progress: Progress | None = None,
) -> None:
    """Write a checkpoint to `out` atomically: complete, or not at all.

    quantization: quantise as mlx_lm.convert does. dtype: float32, float16 or bfloat16, to cast the
    other floating tensors to. gears: keys of GEAR_BITS, to store beside the decoder layers'
    matrices; those of the source are kept if nothing is converted. expert_major: store the experts
    of a layer one after another, each contiguous. overwrite: replace what is at `out`.
    progress(done, total): bytes written.
    Raises UsageError for options that do not fit the checkpoint, DataError if it is broken,
    BusyError, CannotCreateError, IOFailure.
    """
    contents = Contents(store, quantization, dtype, gears, expert_major)
    pieces = [*starmap(small_file, small_files(contents)), *contents.outside()]
    groups = [LAYER_GROUP.format(index) for index in range(store.layer_count)]
    for index in range(store.layer_count):
        pieces += contents.layer(index)
    written = {item.group for piece in pieces for item in piece.planned}
    # Those of AFM 7 that share keys are in another list.
    empty: dict[str, dict[str, str]] = {group: {} for group in groups if group not in written}
    write_pieces(out, store, pieces, checksums=empty, overwrite=overwrite, progress=progress)


def split(store: Store, out_directory: Path, progress: Progress | None = None) -> None:
    """Write one file per layer and one for the rest, as the layer-streaming paper reads them, with
    the small files beside them, into a new directory, atomically.

    progress(done, total): bytes written.
    Raises DataError for a broken checkpoint, CannotCreateError if the directory's name is taken,
    BusyError, IOFailure.
    """
    contents = Contents(store)
    parts: dict[str, list[Piece]] = {OUTSIDE_FILE: contents.outside()}
    group_of = {LAYER_FILE.format(i): LAYER_GROUP.format(i) for i in range(store.layer_count)}
    for index in range(store.layer_count):
        parts[LAYER_FILE.format(index)] = contents.layer(index)
    total = sum(item.nbytes for pieces in parts.values() for p in pieces for item in p.planned)
    files = dict(small_files(contents))
    digests = {FILE_PREFIX + name: new_digest(data).hexdigest() for name, data in files.items()}
    done = 0

    def report(written: int, _: int) -> None:
        if progress is not None:
            progress(done + written, total)

    with Partial(out_directory, directory=True) as partial:
        partial.check_room(total + sum(map(len, files.values())))
        for name, pieces in parts.items():
            checksums = {FILES_GROUP: digests} if name == OUTSIDE_FILE else {}
            if name in group_of and not pieces:
                checksums[group_of[name]] = {}
            path = partial.beside / name
            write_pieces(path, store, pieces, checksums=checksums, progress=report)
            done += sum(item.nbytes for p in pieces for item in p.planned)
        # Last, so that a process killed before leaves nothing that looks like a model.
        with partial.reported():
            for name, data in files.items():
                path = partial.beside / name
                path.parent.mkdir(exist_ok=True)
                replace_file(path, data, sync=True)
                os.chmod(path, 0o666 & ~partial.mask)
            if (partial.beside / TEMPLATES_FOLDER).is_dir():
                sync_directory(partial.beside / TEMPLATES_FOLDER)
        partial.publish()


def write_pieces(path: Path, store: Store, pieces: Sequence[Piece], **rest: Any) -> None:
    """Write a safetensors file of pieces of a store, unless its files change meanwhile. rest:
    further arguments of TensorWriter."""
    plan = [item for piece in pieces for item in piece.planned]
    texts = {"format": "mlx", VERSION_KEY: VERSION, LAYERS_KEY: str(store.layer_count)}
    if experts := {item.name: item.parts for item in plan if item.parts}:
        texts |= {VERSION_KEY: EXPERT_MAJOR_VERSION, EXPERTS_KEY: describe_experts(experts)}
    mx.clear_cache()  # left by finding the tensors' places
    with TensorWriter(path, plan, texts, **rest) as writer:
        for piece in pieces:
            name = piece.planned[0].name
            try:
                piece.write(writer)
            except DataError as error:
                raise DataError(f"{name}: {error.message}", error.hint) from error
            except RuntimeError as error:  # MLX, on a file that was truncated
                raise as_data_error(error, f"{name}: cannot read it") from error
        store.check_files()
        writer.finish()


def small_files(contents: Contents) -> Iterator[tuple[str, bytes]]:
    """Yield (name, content) of the checkpoint's small files, config.json adapted to what is
    written."""
    files = contents.store.files
    for name in files.small_files():
        data = contents.config() if name == "config.json" else files.read(name)
        if data is not None:
            yield name, data


class Contents:
    """The contents of a checkpoint to be written; options as for bake.
    Raises UsageError for options that do not fit the checkpoint."""

    def __init__(
        self,
        store: Store,
        quantization: QuantizationOptions | None = None,
        dtype: str | None = None,
        gears: tuple[str, ...] = (),
        expert_major: bool = False,
    ):
        self.store = store
        self._expert_major = expert_major
        if expert_major and not any(map(store.expert_names, range(store.layer_count))):
            raise UsageError(f"{store.files.name}: has no experts to write one after another")
        self._dtype = _known("dtype", dtype, DTYPES) if dtype is not None else None
        self._gears = sorted({_known("gear", g, GEAR_BITS) for g in gears}, key=[*GEAR_BITS].index)
        self._packings: dict[str, Quantise] = {}
        self._settings = store.quantization
        if quantization is not None:
            self._packings, self._settings = choose_modules(store, quantization)
        if gears and self._settings is not None:
            raise UsageError(
                f"{store.files.name}: gears are made of weights that are not quantised"
            )
        self._cast = cast_to(DTYPES[dtype] if dtype else None)
        # What the architecture computes in float32 stays float32.
        self._may_cast = getattr(store.model, "cast_predicate", lambda _: True)
        self._linear = self._gear_modules() if gears else set()
        self._carried: dict[int | None, list[str]] = {}
        if not gears and quantization is None and dtype is None:
            self._carried = self._stored_gears()

    def outside(self) -> list[Piece]:
        """The tensors outside the layers."""
        names = sorted(self.store.layer_names(None), key=_order)
        return [tensor_by_tensor(self.store, self._recipe(n), OUTSIDE_GROUP) for n in names]

    def layer(self, index: int) -> list[Piece]:
        """One layer: what every token needs, the experts, the gears."""
        names = sorted(self.store.layer_names(index), key=_order)
        paths = {_path(name) for name in self.store.expert_names(index)}
        names.sort(key=lambda name: _path(name) in paths)
        recipes = [self._recipe(name) for name in names]
        for gear in self._gears:
            recipes += [
                self._gear_recipe(gear, name)
                for name in names
                if name.endswith(".weight") and _path(name) in self._linear
            ]
        recipes += [Recipe(name, {_leaf(name): name}) for name in self._carried.get(index, ())]
        if not self._expert_major:
            paths = set()
        return list(self._pieces(recipes, paths, LAYER_GROUP.format(index)))

    def _pieces(self, recipes: list[Recipe], experts: set[str], group: str) -> Iterator[Piece]:
        """experts: paths of the stacks that are written expert by expert, grouped by module."""

        def holder(recipe: Recipe) -> str | None:
            path = _path(next(iter(recipe.names.values())))
            original = _path(recipe.tensor)
            if original.startswith(GEAR_PREFIX):
                original = original[len(GEAR_PREFIX) :].partition(".")[2]
            return _path(path) if original in experts else None

        for path, some in groupby(recipes, holder):
            if path is not None:
                yield expert_by_expert(self.store, path, list(some), group)
            else:
                yield from (tensor_by_tensor(self.store, recipe, group) for recipe in some)

    def _recipe(self, name: str) -> Recipe:
        store, path, leaf = self.store, _path(name), _leaf(name)
        cast = self._cast if self._may_cast(name) else cast_to(None)
        if leaf == "weight" and path in self._packings:
            quantise = self._packings[path]
            names = {part: f"{path}.{part}" for part in PARTS}
            return Recipe(name, names, lambda rows: quantise(cast(rows)))
        if cast(mx.zeros(1, store.dtype(name))).dtype == store.dtype(name):
            return Recipe(name, {leaf: name})
        return Recipe(name, {leaf: name}, lambda rows: {leaf: cast(rows)})

    def _gear_recipe(self, gear: str, name: str) -> Recipe:
        cast = self._cast if self._may_cast(name) else cast_to(None)
        names = {part: f"{GEAR_PREFIX}{gear}.{_path(name)}.{part}" for part in PARTS}
        bits = GEAR_BITS[gear]
        return Recipe(name, names, lambda rows: quantise_rows(cast(rows), bits)._asdict())

    def _gear_modules(self) -> set[str]:
        """Paths of the matrices in the layers, experts included, that MLX can store as gears.
        Raises UsageError if there are none."""
        found = {
            path
            for path, module in leaf_modules(self.store.model)
            if is_matrix(module)
            and self.store.layer_of(path) is not None
            and group_size_of(module.weight.shape[-1]) is not None
        }
        if not found:
            raise UsageError(f"{self.store.files.name}: has no matrix that gears can be made of")
        return found

    def _stored_gears(self) -> dict[int | None, list[str]]:
        """The gear tensors of the source, by layer."""
        found: dict[int | None, list[str]] = {}
        for header in self.store.files.headers:
            for name in header.entries:
                if name.startswith(GEAR_PREFIX):
                    index = self.store.layer_of(name[len(GEAR_PREFIX) :].partition(".")[2])
                    found.setdefault(index, []).append(name)
        return found

    def config(self) -> bytes | None:
        """config.json for these tensors; byte for byte the source's if it fits."""
        data = self.store.files.read("config.json")
        settings = self._settings
        if data is None:
            return None
        raw = json.loads(data)
        before = json.dumps(raw)
        if settings is not None and raw.get("quantization") != settings:
            raw["quantization"] = raw["quantization_config"] = settings
        if settings is None:  # its format is not that of these weights
            for part in (raw, raw.get("text_config")):
                if isinstance(part, dict):
                    part.pop("quantization_config", None)
        if self._dtype is not None:
            for part in (raw, raw.get("text_config")):
                for key in ("dtype", "torch_dtype"):
                    if isinstance(part, dict) and key in part:
                        part[key] = self._dtype
        return data if json.dumps(raw) == before else json.dumps(raw, indent=2).encode() + b"\n"


def _known(word: str, name: str, names: Iterable[str]) -> str:
    if name not in names:
        raise UsageError(f"no such {word} to bake: {name[:40]} ({', '.join(names)})")
    return name


def _path(name: str) -> str:
    return name.rpartition(".")[0]


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def _order(name: str) -> tuple[str, int, str]:
    """Sort key: by module, with a quantised matrix before its scales and biases."""
    path, _, leaf = name.rpartition(".")
    return path, PARTS.index(leaf) if leaf in PARTS else len(PARTS), leaf
