"""Splits a checkpoint into a file a layer and one for the rest, as the layer-streaming paper reads
them: non_layer.safetensors, layer_0000.safetensors, ..., and the small files beside them."""

from __future__ import annotations

import os
from pathlib import Path

from toastkit.model.toast_format import (
    FILE_PREFIX,
    FILES_GROUP,
    LAYER_FILE,
    OUTSIDE_FILE,
    digest_of,
)
from toastkit.private_files import open_private, pwrite_all, sync_directory
from toastkit.store.bake import Contents, metadata, small_files, write_pieces
from toastkit.store.partial import Partial
from toastkit.store.pieces import Piece
from toastkit.store.store import Store
from toastkit.store.writer import Progress


def split(store: Store, out_directory: Path, progress: Progress | None = None) -> None:
    """Writes the files into a new directory, which is there whole at the end, or not at all.

    progress(done, total): bytes written.
    Raises DataError for a broken checkpoint, CannotCreateError where something is in the place of
    the directory, BusyError, IOFailure.
    """
    contents = Contents(store)
    parts: dict[str, list[Piece]] = {OUTSIDE_FILE: contents.outside()}
    for index in range(store.layer_count):
        parts[LAYER_FILE.format(index)] = contents.layer(index)
    total = sum(item.nbytes for pieces in parts.values() for p in pieces for item in p.planned)
    files = dict(small_files(contents))
    done = 0

    def report(written: int, _: int) -> None:
        if progress is not None:
            progress(done + written, total)

    with Partial(out_directory, directory=True) as partial:
        for name, pieces in parts.items():
            write_pieces(
                partial.beside / name,
                pieces,
                metadata(store),
                checksums=_digests(files) if name == OUTSIDE_FILE else None,
                progress=report,
            )
            done += sum(item.nbytes for p in pieces for item in p.planned)
        # Last, so that a process killed on the way leaves nothing that looks like a model.
        for name, data in files.items():
            _write_small(partial, name, data)
        partial.publish()


def _digests(files: dict[str, bytes]) -> dict[str, dict[str, str]]:
    """Checksums of the small files, which lie beside, under the names they have in a .toast."""
    return {FILES_GROUP: {FILE_PREFIX + name: digest_of(data) for name, data in files.items()}}


def _write_small(partial: Partial, name: str, data: bytes) -> None:
    try:
        fd = open_private(partial.beside / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            pwrite_all(fd, data, 0)
            os.fchmod(fd, 0o666 & ~partial.mask)
            os.fsync(fd)
        finally:
            os.close(fd)
        sync_directory(partial.beside)
    except OSError as error:
        raise partial.failure(error) from error
