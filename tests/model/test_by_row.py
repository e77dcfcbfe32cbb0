"""An expert of what sanitize computes, computed of its own rows: to the bit a row of the whole
where that is proved, and nowhere else."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest

from tests.model.checkpoints import same
from toastkit.model.safetensors import Entry
from toastkit.store.by_row import OPERATIONS
from toastkit.store.dtypes import bytes_of
from toastkit.store.sanitizing import Made, Sanitizing

EXPERTS = 4
DTYPES = {"BF16": mx.bfloat16, "F32": mx.float32, "U8": mx.uint8, "F8_E4M3": mx.uint8}
# Also one of as many rows and columns as there are experts.
STORED = {
    "up": ("BF16", (EXPERTS, 6, 8)), "square": ("F32", (EXPERTS, EXPERTS, EXPERTS)),
    "blocks": ("U8", (EXPERTS, 6, 2, 16)), "codes": ("F8_E4M3", (EXPERTS, 6, 8)),
    "scale": ("BF16", (EXPERTS, 1, 1)), "one": ("BF16", ()), "column": ("BF16", (6, 1)),
    "pair": ("F32", (EXPERTS, 2)),
    **{f"codes.{e}": ("F8_E4M3", (5, 8)) for e in range(EXPERTS)},
    **{f"scale.{e}": ("F32", (2, 2)) for e in range(EXPERTS)},
    **{f"words.{e}": ("U8", (3, 8)) for e in range(EXPERTS)},
}  # fmt: skip


class Files:
    """Tensors in the place of files."""

    def __init__(self) -> None:
        self.arrays = {}
        for number, (name, (kind, shape)) in enumerate(STORED.items()):
            key = mx.random.key(number)
            if DTYPES[kind] == mx.uint8:
                made = mx.random.randint(0, 120, shape, key=key).astype(mx.uint8)
            else:
                made = mx.random.normal(shape, key=key).astype(DTYPES[kind])
            self.arrays[name] = made
        mx.eval(self.arrays)

    def place(self, name: str):
        array = self.arrays[name]
        return Path("x"), Entry(name, STORED[name][0], tuple(array.shape), 0, array.nbytes)


def dequantised(w, e):
    """As DeepSeek's experts are, in blocks, padded."""
    codes = mx.pad(mx.from_fp8(w[f"codes.{e}"], dtype=mx.bfloat16), ((0, 1), (0, 0)))
    blocks = codes.reshape(2, 3, 2, 4) * w[f"scale.{e}"][:, None, :, None]
    return blocks.reshape(6, 8)[:5].astype(mx.bfloat16)


ALONE = {
    "interleaved": lambda w: mx.contiguous(w["up"][:, 1::2, :]),
    "half": lambda w: w["up"][..., 4:, :] if w["up"].shape[1] > 4 else w["up"],
    "corner": lambda w: w["up"][:, 2:3, 3:6],
    "columns": lambda w: w["up"][:, :, 3:6],
    "narrow": lambda w: w["blocks"].view(mx.uint16)[:, 1:5],
    "split": lambda w: mx.split(w["up"], 2, axis=-2)[1],
    "transposed": lambda w: mx.split(w["up"], 2, axis=-1)[0].swapaxes(1, 2),
    "words": lambda w: w["blocks"].view(mx.uint32).flatten(-2),
    "backwards": lambda w: w["up"][:, ::-1, ::-2],
    "square": lambda w: mx.moveaxis(w["square"], 2, 1) - w["square"],
    "reshaped": lambda w: w["up"].reshape(EXPERTS, 3, 2, 8)[:, :, 1],
    "unfolded": lambda w: mx.unflatten(w["up"], 1, (3, 2))[:, :, :1].squeeze(2) + 1.0,
    "joined": lambda w: mx.concatenate([w["up"], -w["up"]], axis=1),
    "scaled": lambda w: (mx.from_fp8(w["codes"], dtype=mx.bfloat16) * w["scale"]).astype(
        mx.float32
    ),
    "numbered": lambda w: w["codes"].astype(mx.bfloat16) / w["scale"],
    "shared": lambda w: w["up"] * w["one"] + w["column"],
    "shared twice": lambda w: w["up"] * (-8 * w["one"].astype(mx.float32)),
    "sum": lambda w: w["square"][:, 0] + w["square"][:, :, 0].reshape(4, 4),
    "one each": lambda w: w["pair"][:, 0] * 6.0,
    "own tensors": lambda w: mx.stack([dequantised(w, e) for e in range(EXPERTS)]),
    "own words": lambda w: mx.stack([w[f"words.{e}"].view(mx.uint32) for e in range(EXPERTS)]),
}
IN_ONE_PIECE = {"half", "corner", "narrow", "split", "words"}
TOGETHER = {
    "flipped": lambda w: w["up"][::-1],
    "rolled": lambda w: mx.roll(w["up"], 1, axis=0),
    "chosen": lambda w: w["up"][mx.array([1, 0, 2, 3])],
    "taken": lambda w: mx.take(w["up"], mx.array([3, 1]), axis=0),
    "first ones": lambda w: w["square"][:3],
    "mean": lambda w: w["up"] - w["up"].mean(axis=0, keepdims=True),
    "largest": lambda w: w["up"] / mx.abs(w["up"]).max(),
    "sorted": lambda w: mx.sort(w["square"], axis=0),
    "summed up": lambda w: mx.cumsum(w["square"], axis=0),
    "turned": lambda w: w["square"].swapaxes(0, 1),
    "turned wholly": lambda w: w["square"].T,
    "across rows": lambda w: w["square"].reshape(-1).reshape(2, 8, 4).swapaxes(0, 1).reshape(4, 16),
    "folded": lambda w: w["square"].flatten(0, 1).reshape(2, 2, 4, 4).swapaxes(0, 1).flatten(0, 1),
    "further axis": lambda w: w["up"][None],
    "padded": lambda w: mx.pad(w["square"], ((0, 1), (0, 0), (0, 0))),
    "twice": lambda w: mx.concatenate([w["square"][:, :2], w["square"][:, 2:]], axis=0),
    "by number": lambda w: w["up"] * mx.arange(EXPERTS)[:, None, None],
    "spread": lambda w: mx.broadcast_to(w["pair"][:, 0], (EXPERTS, EXPERTS)) * 2,
    "no codes": lambda w: mx.square(w["up"]).astype(mx.float32),
    "product": lambda w: mx.swapaxes(w["square"], 0, 1) @ w["square"],
    "stack of another": lambda w: mx.stack([w["up"][e] * 2 for e in range(EXPERTS)], axis=1),
}


def recorded(function):
    files = Files()
    sanitizing = Sanitizing(files, lambda w: {**w, "made": function(w)}, files.arrays)
    whole = function(dict(files.arrays))
    mx.eval(whole)
    assert isinstance(sanitizing.origin("made"), Made)
    return files.arrays, sanitizing.by_row("made"), whole


@pytest.mark.parametrize("name", ALONE)
def test_rows_are_computed_of_their_own_rows(name: str, mlx_started) -> None:
    stored, by_row, whole = recorded(ALONE[name])
    assert by_row is not None
    for start, stop in ((0, 1), (2, 3), (1, 3), (EXPERTS - 1, EXPERTS), (0, EXPERTS)):
        read = {}
        for part in by_row.parts(start, stop):
            array = stored[part[0]]
            read[part] = array if part[2] is None else array[part[1] : part[2]]
            own = part[0].rpartition(".")[2]
            assert part[2] == stop or not own.isdecimal() or start <= int(own) < stop
            assert part[2] is not None or own in ("one", "column") or own.isdecimal()
        found = by_row.make(start, stop, read)
        assert same(found, whole[start:stop])


@pytest.mark.parametrize("name", ALONE)
def test_rows_that_lie_in_the_files_as_they_are(name: str, mlx_started) -> None:
    stored, by_row, whole = recorded(ALONE[name])
    sizes = {n: (a.nbytes // a.shape[0] if a.ndim else a.nbytes) for n, a in stored.items()}
    found = by_row.piece(sizes.__getitem__)
    assert (found is not None) == (name in IN_ONE_PIECE)
    if found is not None:
        part, first, size = found
        assert bytes_of(whole[2]) == bytes_of(stored[part][2])[first : first + size]


@pytest.mark.parametrize("name", TOGETHER)
def test_what_is_not_known_to_be_alone_is_refused(name: str, mlx_started) -> None:
    assert recorded(TOGETHER[name])[1] is None


def test_what_is_played_wrongly_is_refused(mlx_started, monkeypatch) -> None:
    """Were an operation of MLX to mean something else one day, another graph would come out."""
    wrong = OPERATIONS["Slice"]._replace(run=lambda a, x: x[:, :3])
    monkeypatch.setitem(OPERATIONS, "Slice", wrong)
    assert recorded(ALONE["interleaved"])[1] is None
    assert recorded(ALONE["transposed"])[1] is not None
