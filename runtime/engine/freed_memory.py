"""Gives freed memory back to the system.

Steps of all sizes leave gaps between what is still in use, which glibc's allocator keeps: over ten thousand short
queries it came to hold half as much again as after the first thousand, none of it in use.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

EVERY_STEPS = 256  # it takes about a millisecond
EVERY_ROWS = 8192  # the more rows a step has, the more memory it asks for and lets go
IDLE_ROWS = 256  # where nothing is left to do after so many, nobody waits for it

_TRIM: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it


def give_back() -> None:
    """Give back what the allocator can do without; nothing where it knows no such thing."""
    if _TRIM is not None:
        _TRIM(0)
