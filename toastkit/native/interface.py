"""The C functions of a built library (glue/*.cpp), with the types of their arguments. Those that
may fail raise."""

from __future__ import annotations

import ctypes
import os
from types import SimpleNamespace
from typing import Any

array, pointer, text = ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p
integer, long, real = ctypes.c_int, ctypes.c_int64, ctypes.c_float

# toast_NAME_array: sets its first argument, arrays; ValueError with the library's message.
ARRAYS: dict[str, tuple[Any, ...]] = {
    "append": (pointer, array * 4, integer, integer),
    "append_apart": (pointer, *[pointer] * 3, integer),
    "attend": (*[array] * 6, real, real, integer),
    "attend_apart": (array, pointer, pointer, integer, array, real, real),
    "attend_latents": (array, pointer, pointer, integer, real),
    "awaited": (array, pointer),
    "blend": (*[array] * 5,),
    "closed": (pointer, *[array] * 4, pointer, pointer),
    "convolve": (*[array] * 4, integer),
    "decoder": (pointer, *[array] * 3, *[pointer] * 4),
    "delta_layer": (pointer, array * 10, *[integer] * 4, real),
    "dequantise": (array, array),
    "distribution": (array, array),
    "fed": (array, array, *[pointer] * 3),
    "feed_forward": (array, array, pointer, integer, array, integer),
    "gate": (*[array] * 3, integer),
    "gather": (array, pointer, integer, pointer, integer),
    "gated_delta": (pointer, array * 9, real),
    "kimi_layer": (pointer, *[array] * 5, *[pointer] * 4),
    "largest": (array, array),
    "latent": (pointer, array, array, integer, pointer, pointer),
    "linear": (array, array * 3),
    "linear_attention": (pointer, *[array] * 2, *[pointer] * 4),
    "log_sum_exp": (array, array),
    "memory": (array, *[long] * 3, array),
    "mixer": (pointer, array * 8, pointer),
    "mixer_layer": (pointer, *[array] * 3, *[pointer] * 4),
    "mixture": (array, array, pointer),
    "norm": (*[array] * 4, integer, real, real),
    "padded": (pointer, pointer, pointer, integer),
    "partition": (array, array, integer),
    "product": (*[array] * 7, *[integer] * 3),
    "projected": (pointer, array, pointer, pointer),
    "quantise": (array, array),
    "region": (array, pointer, long, array, pointer, integer),
    "rotate": (*[array] * 4, *[integer] * 4, real, real),
    "route": (pointer, array, array, pointer),
    "rows": (*[array] * 5, integer, integer),
    "scan": (pointer, array * 9, real, real),
    "selective": (pointer, *[array] * 3, *[pointer] * 4),
    "short_conv": (pointer, *[array] * 2, *[pointer] * 4),
    "softmax": (array, array),
    "time_mixing": (pointer, *[array] * 5, pointer, pointer),
    "weighted_sum": (*[array] * 3,),
    "whole": (pointer, *[array] * 6, *[integer] * 4, *[pointer] * 3),
    "wkv": (pointer, array * 7),
}
# toast_NAME: OSError for an errno.
SYSTEM: dict[str, tuple[Any, ...]] = {
    "region_advise": (pointer, long, long, integer),
    "region_grow": (pointer, long, long),
    "region_map": (pointer, long, long, integer, long),
    "region_open": (long, pointer),
}
# toast_NAME: result and arguments.
OTHERS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "count_tasks": (None, (integer,)),
    "describe": (integer, (array, pointer)),
    "end_with_line": (None, (text, integer)),
    "instructions": (text, ()),
    "leave": (None, ()),
    "name_awaited": (None, (pointer, ctypes.c_uint32)),
    "operation_names": (text, (pointer, integer)),
    "operations": (integer, (array,)),
    "region_close": (None, (pointer,)),
    "region_keep": (None, (pointer, integer)),
    "room_to_grow": (long, (long,)),
    "set_head": (None, (long,)),
    "set_threads": (None, (integer,)),
    "settle_array": (None, (array,)),
    "threads": (integer, ()),
}


def functions_in(path: str) -> SimpleNamespace:
    """The functions of the library at a path by NAME. They hold the GIL: arrays are Python objects.
    Raises OSError if the file is none, AttributeError if it lacks a function."""
    loaded, functions = ctypes.PyDLL(path), SimpleNamespace()

    def declare(name: str, symbol: str, types: tuple[Any, ...], result: Any) -> Any:
        function = getattr(loaded, symbol)
        function.restype, function.argtypes = result, types
        setattr(functions, name, function)
        return function

    for name, types in ARRAYS.items():
        declare(name, f"toast_{name}_array", types, text).errcheck = _raise_message
    for name, types in SYSTEM.items():
        declare(name, f"toast_{name}", types, integer).errcheck = _raise_errno
    for name, (result, types) in OTHERS.items():
        declare(name, f"toast_{name}", types, result)
    return functions


def _raise_message(message: bytes | None, *_: Any) -> None:
    if message is not None:
        raise ValueError(message.decode())


def _raise_errno(code: int, *_: Any) -> None:
    if code:
        raise OSError(code, os.strerror(code))
