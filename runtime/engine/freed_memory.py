"""What a step frees: kept for the next one, and given back to the system now and then.

A step asks for memory and frees it at its end. glibc's allocator would return most of that at once, and the next step
would pay for every page again: a ninth of the time of a small encoder. But steps of all sizes leave gaps between what
is still in use: over ten thousand short queries it came to hold half as much again as after the first thousand, none of
it in use.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

EVERY_STEPS = 256  # it takes about a millisecond
EVERY_ROWS = 8192  # the more rows a step has, the more memory it asks for and lets go
IDLE_ROWS = 4096  # where nothing is left to do after so many, nobody waits for it

_C = ctypes.CDLL(None)
_TRIM: Callable[[int], int] | None = getattr(_C, "malloc_trim", None)  # glibc has both
_SET: Callable[[int, int], int] | None = getattr(_C, "mallopt", None)
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # malloc.h
_KEPT = 256 << 20  # bytes free at the heap's end before it shrinks by itself
_FROM_HEAP = 32 << 20  # bytes of what comes from the heap: the most that glibc takes, and would come to by itself


def keep_for_the_next_step() -> None:
    """Have the process keep what it frees until `give_back`; nothing where the allocator knows no such thing."""
    if _SET is not None and _TRIM is not None:
        _SET(_MMAP_THRESHOLD, _FROM_HEAP)
        _SET(_TRIM_THRESHOLD, _KEPT)


def give_back() -> None:
    """Give back what the allocator can do without; nothing where it knows no such thing."""
    if _TRIM is not None:
        _TRIM(0)
