"""Memory that the C library would keep."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

CODE = """
import ctypes
from toastkit.heap import trim_heap
c = ctypes.CDLL(None)
c.malloc.restype, c.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
def resident():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))
blocks = [c.malloc(65536) for _ in range(1024)]
for block in blocks:
    ctypes.memset(block, 1, 65536)
for block in blocks[:-1]:  # the last one keeps the top of the heap where it is
    c.free(block)
full = resident()
trim_heap()
print(full - resident())
"""


GLIBC = sys.platform == "linux" and hasattr(ctypes.CDLL(None), "malloc_trim")


@pytest.mark.skipif(not GLIBC, reason="of glibc, and reads /proc")
def test_freed_memory_goes_back_to_the_system() -> None:
    said = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert int(said.stdout) > 60 << 10  # KiB, of 64 MiB
