"""Rows of tensors (of experts, say): which parts of the files they are made of, and how."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from toastkit.store.by_row import Part
from toastkit.store.jobs import Job, Piece
from toastkit.store.raw import RawTensors, Span
from toastkit.store.sanitizing import Made, Sanitizing, Stacked, Stored

# dtypes that may be widened to float32 while reading, and safetensors' names of them.
WIDENED = {mx.bfloat16: "BF16", mx.float16: "F16"}
Range = tuple[int, int]  # rows first:stop


class Rows(NamedTuple):
    """Ranges of rows of a tensor to read. jobs: those of several tensors can be merged, so that
    what they share is read once. make(read): the rows of each range, (rows, ...) in the stored
    dtype, lazy, from what the jobs have read."""

    jobs: dict[Any, Job]
    make: Callable[[Mapping[Any, mx.array]], list[mx.array]]


class RowReading:
    """Map rows to the parts of the files they are made of. dtype(name): that of a tensor.
    whole(name): reads one, evaluated."""

    def __init__(
        self,
        raw: RawTensors,
        sanitizing: Sanitizing,
        dtype: Callable[[str], mx.Dtype],
        whole: Callable[[str], mx.array],
    ):
        self._raw, self._sanitizing = raw, sanitizing
        self._dtype, self._whole = dtype, whole

    def job(self, origin: Stored | Stacked, start: int = 0, stop: int | None = None) -> Job:
        """The job that reads a tensor, or rows start:stop of it."""
        if isinstance(origin, Stored):
            path, entry = self._raw.place(origin.name)
            rows = entry.shape if stop is None else (stop - start, *entry.shape[1:])
            inside = entry.inside and (path, entry.inside.start)
            return Job(self._raw.spans(origin.name, start, stop), entry.dtype, rows, inside=inside)
        parts = origin.parts[start:stop]
        _, entry = self._raw.place(parts[0])
        spans = tuple(span for part in parts for span in self._raw.spans(part))
        return Job(spans, entry.dtype, (len(parts), *entry.shape))

    def is_whole(self, name: str) -> bool:
        """True if any row of a tensor requires computing all of it."""
        origin = self._sanitizing.origin(name)
        return origin is None or (
            isinstance(origin, Made) and self._sanitizing.by_row(name) is None
        )

    def rows(self, name: str, spans: Sequence[Range]) -> Rows:
        """The jobs that read those rows of a tensor, and the function that makes the rows: no more
        of the files than they need, or all of the tensor if that is not certain."""
        origin = self._sanitizing.origin(name)
        if isinstance(origin, (Stored, Stacked)):
            keys = [(*origin, *span) for span in spans]
            jobs = {key: self.job(origin, *span) for key, span in zip(keys, spans)}
            return Rows(jobs, lambda read: [read[key] for key in keys])
        if origin is None:
            return Rows({}, lambda _: _cut(self._whole(name), spans))
        by_row = self._sanitizing.by_row(name)
        if by_row is not None:
            parts = [part for span in spans for part in by_row.parts(*span)]
            return Rows(self._jobs(parts), lambda read: [by_row.make(*s, read) for s in spans])

        def make(read: Mapping[Any, mx.array]) -> list[mx.array]:
            stored = {part: read[part, 0, None] for part in origin.parts}
            return _cut(self._sanitizing.make([name], stored)[name], spans)

        return Rows(self._jobs((part, 0, None) for part in origin.parts), make)

    def _jobs(self, parts: Iterable[Part]) -> dict[Part, Job]:
        return {part: self.job(Stored(part[0]), part[1], part[2]) for part in parts}

    def piece(self, name: str, row: int, view: memoryview, dtype: mx.Dtype) -> Piece | None:
        """What reads tensor(name)[row] into memory of its size, if the files hold it in that dtype,
        or in 16-bit floats with dtype float32; else None."""
        stored = self._dtype(name)
        widened = WIDENED.get(stored) if dtype == mx.float32 else None
        piece = Piece(self._spans(name, row), view, widened)
        size = piece.stored_bytes * (2 if widened else 1)
        fits = piece.spans and size == len(view) and (widened or stored == dtype)
        return piece if fits else None

    def _spans(self, name: str, row: int) -> tuple[Span, ...]:
        """Where a row of a tensor is stored unchanged; empty if it is not."""
        origin = self._sanitizing.origin(name)
        if isinstance(origin, (Stored, Stacked)):
            return self.job(origin, row, row + 1).spans
        by_row = None if origin is None else self._sanitizing.by_row(name)
        found = None if by_row is None else by_row.piece(self._row_bytes)
        if found is None:
            return ()
        (path, start, _), (_, first, size) = self._raw.spans(found[0], row, row + 1)[0], found
        return (Span(path, start + first, start + first + size),)

    def _row_bytes(self, name: str) -> int:
        entry = self._raw.place(name)[1]
        return entry.nbytes // entry.shape[0]


def _cut(whole: mx.array, spans: Sequence[Range]) -> list[mx.array]:
    return [whole[first:stop] for first, stop in spans]
