"""How fast this machine reads memory: the limit that decoding one token at a time runs into."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

_PIECE_BYTES = 4 << 20  # one call of a reduction; large against the cost of the call
_SMALLEST_BYTES = 256 << 20
_LARGEST_BYTES = 2 << 30

# Reductions NumPy runs without the interpreter lock, of elements of a type; which is the fastest differs by machine.
_READERS: tuple[tuple[Any, Callable[[Any], Any]], ...] = (
    (np.int32, np.max),
    (np.uint64, np.max),
    (np.uint64, np.bitwise_or.reduce),
    (np.uint64, np.sum),
)


def last_level_cache_bytes() -> int:
    """Return the size of the largest cache a core sees, 32 MB where the system does not say."""
    sizes = [0]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        if text.endswith("K") and text[:-1].isdigit():
            sizes.append(int(text[:-1]) << 10)
        elif text.endswith("M") and text[:-1].isdigit():
            sizes.append(int(text[:-1]) << 20)
    return max(sizes) or 32 << 20


def buffer_bytes() -> int:
    """Return how much to read: four times the last cache, within a quarter of free memory."""
    wanted = min(max(4 * last_level_cache_bytes(), _SMALLEST_BYTES), _LARGEST_BYTES)
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(min(wanted, free // 4) // _PIECE_BYTES, 1) * _PIECE_BYTES


def read_bytes_per_s(threads: int, repeats: int = 5, clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the best rate, in bytes per second by `clock`, at which `threads` threads read a large buffer.

    Each thread runs a plain NumPy reduction over its own part. The best of several reductions and
    `repeats` rounds counts: it is a limit, so what disturbed the slower rounds does not belong in.
    """
    buffer = np.ones(buffer_bytes() // 8, dtype=np.uint64)
    parts = np.array_split(buffer, threads)
    best = 0.0
    with ThreadPoolExecutor(threads) as pool:
        for kind, reader in _READERS:
            for _ in range(repeats):
                start = clock()
                list(pool.map(lambda part, kind=kind, read=reader: _read(part.view(kind), read), parts))
                best = max(best, buffer.nbytes / (clock() - start))
    return best


def _read(part: Any, reader: Callable[[Any], Any]) -> None:
    step = _PIECE_BYTES // part.itemsize
    for start in range(0, len(part), step):
        reader(part[start : start + step])
