"""The kernels through their C interface, with numpy: what a test of them needs."""

from __future__ import annotations

import ctypes
import fcntl
import os
import platform
import subprocess
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import pytest

from tests.conftest import THOROUGH
from tests.native_library import KEPT, everywhere, native_cache, native_path
from toastkit.native.building.compiling import (
    FLAGS,
    FOR_ALL,
    KERNELS,
    SOURCES,
    compile_library,
    compiler,
    sources,
)
from toastkit.native.building.ready import digest

# As the compiler takes them: "address,undefined" or "thread" (make sanitize). Asked before the
# tests' own surroundings are set up.
SANITIZERS = os.environ.get("TOAST_TEST_SANITIZERS")
Test = TypeVar("Test", bound=Callable[..., None])
AMX = Path(__file__).parents[1] / "amx_emulated.h"
IN_FLOATS = ("portable", "neon")  # instruction sets in which activations stay float32
SETS = (
    ("neon_i8mm", "neon_dotprod", "neon")
    if platform.machine() == "aarch64"
    else ("amx_int8", "avx512vbmi", "avx512vnni", "avxvnni", "avx2", "portable")
)
# Those with code of their own for rows and for attention; the others have one of these sets'.
OF_ROWS = [n for n in SETS if '"row_functions.h"' in (KERNELS / f"{n}.cpp").read_text("utf-8")]
TYPES = {"f32": 0, "f16": 1, "bf16": 2}
KEPT_TYPES = {**TYPES, "i8": 4}  # of keys and values
# Half the distance between two numbers, as a share of their size.
ROUNDING = {"f32": 2.0**-24, "f16": 2.0**-11, "bf16": 2.0**-8}
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
DIGITS = 127 * 256 + 127  # the largest whole number that an activation becomes
# Where two that meet 4 bits have a digit together: the largest number, and how far off one may be.
PAIR_OFF = 8.5
PAIR_DIGITS = {
    "amx_int8": 119 * 256, "avx512vbmi": 119 * 256, "avx512vnni": 119 * 256,
    "avxvnni": 119 * 128, "avx2": 119 * 128,
}  # fmt: skip


class _Matrix(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("weight", "scales", "biases")),
        *((name, ctypes.c_int64) for name in ("experts", "rows", "columns")),
        *((name, ctypes.c_int32) for name in ("bits", "group_size", "type")),
    ]


class Vectors(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p), ("count", ctypes.c_int64), ("stride", ctypes.c_int64),
        ("type", ctypes.c_int32),
    ]  # fmt: skip


class _Product(ctypes.Structure):
    _fields_ = [
        ("matrix", ctypes.POINTER(_Matrix)), ("x", ctypes.POINTER(Vectors)),
        ("count", ctypes.c_int64), ("vector", ctypes.c_void_p), ("expert", ctypes.c_void_p),
        ("activation_bits", ctypes.c_int32), ("out", ctypes.c_void_p), ("out_type", ctypes.c_int32),
    ]  # fmt: skip


def stored(values: np.ndarray, type_: str) -> np.ndarray:
    """float32 of any shape as it is stored: float32, float16, bfloat16 in uint16, or int8 with the
    scale of a row in four more."""
    if type_ == "i8":
        return quantised(values.astype(np.float32))
    if type_ != "bf16":
        return values.astype({"f32": np.float32, "f16": np.float16}[type_])
    return (np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def read(array: np.ndarray, type_: str) -> np.ndarray:
    """What `stored` numbers stand for, in float64: those of int8 as float32 has them."""
    if type_ == "i8":
        scale = np.ascontiguousarray(array[..., -4:]).view(np.float32)
        return (array[..., :-4] * scale).astype(np.float64)
    if type_ != "bf16":
        return array.astype(np.float64)
    return (array.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def quantised(values: np.ndarray) -> np.ndarray:
    """float32 (..., n) -> int8 (..., n + 4)."""
    values = np.clip(values, np.float32(-3e38), np.float32(3e38))
    scale = abs(values).max(-1, keepdims=True) / np.float32(127)
    some = np.broadcast_to(scale > 0, values.shape)
    numbers = np.divide(values, scale, out=np.zeros_like(values), where=some)
    numbers = np.clip(np.rint(numbers), -127, 127).astype(np.int8)
    return np.concatenate([numbers, scale.view(np.int8)], -1)


def packed(numbers: np.ndarray, bits: int) -> np.ndarray:
    """uint8 (..., columns) below 2^bits -> uint8 (..., columns * bits / 8), one string of bits."""
    each = np.unpackbits(numbers[..., None], axis=-1, bitorder="little")[..., :bits]
    return np.packbits(
        each.reshape(*numbers.shape[:-1], numbers.shape[-1] * bits), axis=-1, bitorder="little"
    )


class Matrix(NamedTuple):
    """A stack of matrices. weight: as kernels.h has it. exact: what it stands for, float64
    (experts, rows, columns). size: of the terms that it is added up from, likewise."""

    weight: np.ndarray
    scales: np.ndarray | None
    biases: np.ndarray | None
    bits: int
    group_size: int
    type_: str
    exact: np.ndarray
    size: np.ndarray


def random_matrix(
    seed: int, shape: tuple[int, int, int], bits: int | str, group_size: int, type_: str
) -> Matrix:
    """A stack of random matrices, (experts, rows, columns); bits: 0 for one that is not packed,
    "mxfp4", which has groups of 32 and scales of its own type."""
    rng = np.random.default_rng(seed)
    if bits == "mxfp4":
        codes = rng.integers(0, 16, shape, dtype=np.uint8)
        exponents = rng.integers(110, 130, (*shape[:-1], shape[-1] // 32), dtype=np.uint8)
        return mxfp4_matrix(codes, exponents)
    assert isinstance(bits, int)
    if not bits:
        weight = stored(rng.normal(size=shape), type_)
        return Matrix(
            weight, None, None, 0, 0, type_, read(weight, type_), abs(read(weight, type_))
        )
    numbers = rng.integers(0, 1 << bits, shape, dtype=np.uint8)
    groups = (*shape[:-1], shape[-1] // group_size)
    scales = stored(rng.normal(size=groups) / (1 << bits), type_)
    biases = stored(rng.normal(size=groups), type_)
    wide = [np.repeat(read(some, type_), group_size, -1) for some in (scales, biases)]
    exact = numbers * wide[0] + wide[1]
    size = numbers * abs(wide[0]) + abs(wide[1])
    return Matrix(packed(numbers, bits), scales, biases, bits, group_size, type_, exact, size)


def full_matrix(shape: tuple[int, int, int], bits: int, group_size: int) -> Matrix:
    """A stack of matrices, (experts, rows, columns), of the largest codes, with scales of 1."""
    codes = np.full(shape, (1 << bits) - 1, np.uint8)
    ones = np.ones((*shape[:-1], shape[-1] // group_size), np.float32)
    exact = codes.astype(np.float64)
    return Matrix(packed(codes, bits), ones, 0 * ones, bits, group_size, "f32", exact, exact)


def mxfp4_matrix(codes: np.ndarray, exponents: np.ndarray) -> Matrix:
    """codes: of E2M1, uint8 (experts, rows, columns). exponents: uint8 (experts, rows, columns /
    32), 255 for NaN."""
    powers = np.where(exponents == 255, np.nan, 2.0 ** (exponents.astype(np.float64) - 127))
    exact, wide = E2M1[codes], np.repeat(powers, 32, -1)
    # The kernels add up (exact + 6) * scale and -6 * scale.
    return Matrix(packed(codes, 4), exponents, None, 4, 32, "e8m0", exact * wide,
                  (exact + 12) * wide)  # fmt: skip


def products(x: np.ndarray, matrices: np.ndarray, expert: np.ndarray) -> np.ndarray:
    """Of each vector with its matrix, (count, rows), in float64. x: (count, columns). matrices:
    (experts, rows, columns). expert: (count,). No matrix is copied for each vector."""
    out = np.zeros((len(x), matrices.shape[1]))
    for one in np.unique(expert):
        out[expert == one] = x[expert == one] @ matrices[one].T
    return out


def compiled_apart(alone: str | None = None) -> Path:
    """The kernels alone, with AMX emulated, for the sanitizers where these are asked for; once for
    all runs with the same sources. alone: the one source with an instruction set, in place of
    all."""
    cxx = compiler()
    assert cxx is not None
    extra = [f'-DTOAST_AMX_EMULATED="{AMX}"']
    if SANITIZERS:
        # More optimising, and looking at every pointer for NULL, take the compiler many minutes.
        # Few examples are over sooner than any of it.
        level = "-O1" if "thread" in SANITIZERS or THOROUGH >= 0.1 else "-O0"
        extra += [f"-fsanitize={SANITIZERS}", "-fno-sanitize-recover", "-fno-sanitize=null"]
        extra += [level, "-g"]
    if alone:
        extra += [*SOURCES[alone], "-shared", *(str(KERNELS / name) for name in (alone, *FOR_ALL))]
        extra += [str(AMX.with_name("amx_alone.cpp")), f"-I{KERNELS}"]
    ours = [path.read_text("utf-8") for path in sorted(AMX.parent.glob("amx_*"))]
    made_from = sources() + "".join([str(extra), *ours]).encode()
    library = KEPT.with_name("apart") / f"{digest(made_from)}.so"
    library.parent.mkdir(parents=True, exist_ok=True)
    with open(library.with_name("building"), "w") as lock, everywhere():
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists() and alone:
            subprocess.run([*cxx, *FLAGS, *extra, "-o", library.with_suffix(".new")], check=True)
            library.with_suffix(".new").rename(library)
        elif not library.exists():
            compile_library(library, cxx, extra)
    return library


def _described(matrix: Matrix) -> _Matrix:
    experts, rows, columns = matrix.exact.shape
    arrays = (matrix.weight, matrix.scales, matrix.biases)
    return _Matrix(
        *(None if one is None else one.ctypes.data for one in arrays),
        experts, rows, columns, matrix.bits, matrix.group_size,
        {**TYPES, "e8m0": 3}[matrix.type_],
    )  # fmt: skip


def vectors(x: np.ndarray, x_type: str) -> Vectors:
    return Vectors(x.ctypes.data, len(x), x.strides[0] // x.itemsize, TYPES[x_type])


def _loaded(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    library.toast_instructions.restype = ctypes.c_char_p
    return library


class Kernels:
    """A library of them, and one with emulated AMX where the processor has none."""

    def __init__(self, path: Path):
        self.library = self.whole = _loaded(path)
        self._emulated: ctypes.CDLL | None = None

    def __repr__(self) -> str:  # which pytest prints with a failure
        return f"<Kernels: {self.instructions}>"

    @property
    def instructions(self) -> str:
        """The set in use."""
        return self.library.toast_instructions().decode()

    def choose(self, name: str) -> bool:
        """Has the library in use compute with a set; False where the processor has it not."""
        return not self.library.toast_choose_instructions(name.encode())

    def use(self, name: str, threads: int = 3) -> bool:
        """Likewise, with the library that has it, and so many threads. What is emulated has the
        rest of its code in AVX-512, to its static initializers."""
        self.library = self.whole
        if name == "amx_int8" and not self.choose(name) and self.choose("avx512vbmi"):
            self._emulated = self._emulated or _loaded(compiled_apart("amx_int8.cpp"))
            self.library = self._emulated
        self.library.toast_set_threads(threads)
        return self.choose(name)

    def each(self, names: Sequence[str]) -> Iterator[str]:
        """Those of these sets that can be had here: each in use until the next."""
        yield from filter(self.use, names)

    def sets(self) -> Iterator[str]:
        """Likewise, of all."""
        return self.each(SETS)

    def row_sets(self) -> Iterator[str]:
        """Likewise, of those that have code of their own for rows and for attention."""
        return self.each(OF_ROWS)

    def multiply(
        self,
        matrix: Matrix,
        x: np.ndarray,
        x_type: str = "f32",
        out_type: str = "f32",
        vector: np.ndarray | None = None,
        expert: np.ndarray | None = None,
        activation_bits: int = 16,
    ) -> np.ndarray:
        """Products, of out_type, (count, rows). x: (vectors, columns) of x_type, whose rows may lie
        apart. vector, expert: uint32 (count,). Raises ValueError where the kernels refuse."""
        count = len(x) if vector is None else len(vector)
        rows = matrix.exact.shape[1]
        out = stored(np.full((count, rows), 7.0, np.float32), out_type)
        places = [
            None if some is None else ctypes.c_void_p(some.ctypes.data) for some in (vector, expert)
        ]
        code = self.library.toast_multiply(
            ctypes.byref(_described(matrix)), ctypes.byref(vectors(x, x_type)),
            ctypes.c_int64(count), *places, activation_bits, ctypes.c_void_p(out.ctypes.data),
            TYPES[out_type],
        )  # fmt: skip
        if code:
            raise ValueError(code)
        return out

    def multiply_all(
        self, matrices: list[Matrix], x: np.ndarray, activation_bits: int = 16
    ) -> list[np.ndarray]:
        """Products of float32 x (vectors, columns) with the first of each stack, float32 (vectors,
        rows) each. Raises ValueError where the kernels refuse."""
        given, described = vectors(x, "f32"), [_described(matrix) for matrix in matrices]
        outs = [np.full((len(x), m.exact.shape[1]), 7.0, np.float32) for m in matrices]
        products = (_Product * len(matrices))(*(
            _Product(ctypes.pointer(one), ctypes.pointer(given), len(x), None, None,
                     activation_bits, out.ctypes.data, TYPES["f32"])
            for one, out in zip(described, outs)
        ))  # fmt: skip
        if code := self.library.toast_multiply_all(products, len(matrices)):
            raise ValueError(code)
        return outs

    def pair_digits(self, matrix: Matrix, activation_bits: int) -> int | None:
        """The largest whole number where two activations have a digit together, None elsewhere."""
        affine = matrix.bits == 4 and matrix.type_ != "e8m0"
        return PAIR_DIGITS.get(self.instructions) if affine and activation_bits == 12 else None

    def most_error(
        self, matrix: Matrix, x: np.ndarray, expert: np.ndarray, activation_bits: int, out_type: str
    ) -> np.ndarray:
        """How far off a product may be: float64 (count, rows). x: float64 (count, columns), of each
        result. expert: of each result."""
        columns = x.shape[-1]
        terms = products(abs(x), matrix.size, expert)
        # A lane adds up one after another; each sum, and each product before it, is rounded.
        error = terms * 2.0**-23 * (columns / 4 + 16)
        if matrix.bits and activation_bits < 32 and self.instructions not in IN_FLOATS:
            groups = abs(x).reshape(len(x), columns // matrix.group_size, matrix.group_size)
            pairs = self.pair_digits(matrix, activation_bits)
            off = PAIR_OFF / pairs if pairs else 0.5 / DIGITS
            most = np.repeat(groups.max(-1, initial=0), matrix.group_size, -1)
            error += products(most * off * 1.01, abs(matrix.exact), expert)
        product = products(x, matrix.exact, expert)
        return error + abs(product) * ROUNDING[out_type] * 1.01 + 2.0**-25


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernels]:
    """The set and the threads are put back: others of this process may compute with the library."""
    made = Kernels(compiled_apart() if SANITIZERS else native_path(native_cache(tmp_path_factory)))
    before = made.instructions
    yield made
    made.use(before, threads=1)


def on_each(names: Sequence[str]) -> Callable[[Test], Test]:
    """Decorates a test, whose first argument is `kernels`: it runs with each of these sets."""

    def decorated(test: Test) -> Test:
        @wraps(test)
        def on_all(kernels: Kernels, *arguments: Any, **named: Any) -> None:
            for _ in kernels.each(names):
                test(kernels, *arguments, **named)

        return cast(Test, on_all)

    return decorated


on_sets, on_row_sets = on_each(SETS), on_each(OF_ROWS)
