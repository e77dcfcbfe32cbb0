"""Arrays of frames as numpy float32: inline, from the ring, or from MLX in one process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from toastkit.errors import DataError
from toastkit.frames import Array, Frame, Head, Reference

if TYPE_CHECKING:
    import numpy as np

    from toastkit.gears.monitor import EntropyMeter
    from toastkit.session.ring import RingReader, Summary

_DTYPES = {"float32": "<f4", "float16": "<f2", "uint32": "<u4", "int32": "<i4", "uint8": "u1"}


def to_numpy(array: Array) -> np.ndarray:
    """An inline array as numpy, read-only: (...) of its shape and dtype, with bfloat16 as
    float32."""
    import numpy as np

    if array.dtype == "bfloat16":
        bits = np.frombuffer(array.data, "<u2").astype(np.uint32) << 16
        return bits.view(np.float32).reshape(array.shape)
    return np.frombuffer(array.data, _DTYPES[array.dtype]).reshape(array.shape)


def from_numpy(values: np.ndarray) -> Array:
    """An array to inline in a frame. values: (...) of any real dtype; sent as float32."""
    return Array("float32", values.shape, values.astype("<f4", copy=False).tobytes())


def log_softmax(logits: np.ndarray | memoryview[float]) -> np.ndarray:
    """Natural logs of softmax(logits), float64 (vocab,). logits: float (vocab,). NaN counts as 0,
    infinity as 1e4."""
    import numpy as np

    with np.errstate(invalid="ignore"):  # a signalling NaN becomes a quiet one
        x = np.nan_to_num(np.array(logits, np.float64), nan=0.0, posinf=1e4, neginf=-1e4)
    x -= x.max()
    x -= np.log(np.exp(x).sum())
    return x


class LogitsReader:
    """Reads the logits of successive runs; `begin` is given each run's head."""

    def __init__(self) -> None:
        self._vocab = 0
        self._run: str | list[str] | None = None
        self._ring: RingReader | None = None
        self._meter: EntropyMeter | None = None

    def begin(self, head: Head) -> None:
        """Start the next run. The ring is opened at the first reference."""
        self.close()
        self._vocab, self._run, self._meter = head.vocab, head.run, None

    def listen(self, frames: Iterable[Frame]) -> Iterator[Frame]:
        """Pass frames on, noting the heads, which say where the arrays are."""
        for frame in frames:
            if isinstance(frame, Head):
                self.begin(frame)
            yield frame

    def read(self, logits: Any) -> np.ndarray:
        """The logits of a frame, inline, by reference or a device array: float32 (vocab,), valid
        until the next read. Raises DataError if they are missing, stale or misshapen."""
        import numpy as np

        if isinstance(logits, Reference):
            values = self._opened().read(logits)
        elif isinstance(logits, Array):
            values = to_numpy(logits)
        elif logits is None:
            raise DataError("a logits frame without logits")
        else:  # a device array, evaluated now
            values = np.array(logits, copy=False)
        if values.shape != (self._vocab,):
            raise DataError(f"logits of shape {list(values.shape)}, the head says {self._vocab}")
        if values.dtype == np.float32:
            return values
        with np.errstate(invalid="ignore"):  # a signalling NaN becomes a quiet one
            return values.astype(np.float32)

    def summary(self, logits: Any) -> Summary | None:
        """The summary that decode has written beside the logits that a frame refers to. None if
        there is none. Raises as `read`."""
        if not isinstance(logits, Reference) or tuple(logits.shape) != (self._vocab,):
            return None
        return self._opened().summary(logits)

    def entropy(self, logits: Any) -> float:
        """Entropy in bits of logits as `read` takes them: that of their summary, which is computed
        on the device for a device array; otherwise by an EntropyMeter. Raises as that and
        `read`."""
        known = self.summary(logits)
        fits = tuple(getattr(logits, "shape", ())) == (self._vocab,)
        if fits and not isinstance(logits, (Reference, Array, memoryview)):
            from toastkit.gears.entropy_graph import NativeSummary

            known = NativeSummary(logits).read()
        if known is not None:
            return known.entropy
        from toastkit.gears.monitor import EntropyMeter

        values = self.read(logits)
        self._meter = self._meter or EntropyMeter(len(values))
        return self._meter.bits(values)

    def _opened(self) -> RingReader:
        """The run's ring."""
        if self._ring is None:
            from toastkit.session.ring import RingReader
            from toastkit.session.run import ring_of

            if not isinstance(self._run, str):
                raise DataError(
                    "logits by reference, but the head names no single run",
                    hint="save and mix streams with toast-decode --inline",
                )
            self._ring = RingReader(ring_of(self._run))
        return self._ring

    def close(self) -> None:
        """Close the ring."""
        if self._ring is not None:
            self._ring.close()
            self._ring = None
