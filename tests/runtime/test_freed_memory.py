"""What is freed stays with the process until it is given back: counted in pages that the system had to bring."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

PAGES = 2048  # of a block of 8 MB

SCRIPT = """
import ctypes, resource
from llmc.runtime.engine.freed_memory import give_back, keep_for_the_next_step

C = ctypes.CDLL(None)
C.malloc.restype, C.malloc.argtypes, C.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]

def brought():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [C.malloc(4096 * {pages}) for _ in range(4)]
    for block in blocks:
        ctypes.memset(block, 1, 4096 * {pages})
    for block in blocks:
        C.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

keep_for_the_next_step()
first, second = brought(), brought()
give_back()
print(first, second, brought())
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="this C library does not keep what is freed")
def test_freed_memory_is_kept_until_it_is_given_back() -> None:
    code = SCRIPT.format(pages=PAGES)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    first, second, third = map(int, done.stdout.split())
    assert second < first // 4
    assert third > second * 2
