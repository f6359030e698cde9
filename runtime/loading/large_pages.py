"""Takes weights that a file is mapped for into memory of this process, in pages of 2 MB, a little after each call.

The system's copy of a file lies where it lay when the file was written or read, often in pages of 4 KB: kernels read it
up to a third slower than memory in pages of 2 MB (docs/engine.md, Weights in memory). Copying everything at the start
would cost the first token what the later ones gain. So calls are told of here, and a share of their time goes to
copies. A page is put in its place when it is whole, at the same address: nobody has to know, and what was not copied
yet is the file's.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from llmc.runtime.errors import LlmcError
from llmc.runtime.memory import MAP_NORESERVE, available_bytes

_PAGE = 2 << 20  # bytes
_ROOM_PAGES = 32  # that are taken at once, and looked for in what is available
_SHARE = 0.05  # of the time of calls
_FIRST_S = 0.5  # of calls that pay nothing: a process that ends soon has nothing of it
_TIMES_AVAILABLE = 2  # as much memory as this times the weights: memory of the process cannot be had back as a file's
_KINDS = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_MAP_FIXED, _MREMAP_TO = 0x10, 1 | 2  # MREMAP_MAYMOVE | MREMAP_FIXED
_FAILED = ctypes.c_void_p(-1).value


class LargePages:
    """Large pages for the middle of a map, which starts and ends anywhere. Calls are told of by one thread at a time.

    now: seconds. available: bytes that the process may still take.
    """

    def __init__(
        self, data: mmap.mmap, now: Callable[[], float] = time.perf_counter,
        available: Callable[[], int] = available_bytes,
    ) -> None:  # fmt: skip
        self._data, self._now, self._available = data, now, available
        first = np.frombuffer(data, np.uint8).ctypes.data
        self._next, self._end = -(-first // _PAGE) * _PAGE, (first + len(data)) // _PAGE * _PAGE
        self._wanted = _TIMES_AVAILABLE * len(data)
        self._credit = -_SHARE * _FIRST_S
        self._room = _Room()
        if not _has_large_pages():
            self._end = self._next

    @property
    def left(self) -> int:
        """Bytes that are still to be moved."""
        return max(0, self._end - self._next)

    def worked(self, seconds: float) -> None:
        """A call took so long: move what a share of that pays for. No call may be under way."""
        self._credit += _SHARE * seconds
        while self._credit > 0 and self.left:
            start = self._now()
            if not self._move():
                self._end = self._next  # the system does not want it: the file's pages stay
                self._room.give_back()
            self._credit -= self._now() - start

    def _move(self) -> bool:
        """Put a copy of the next page where it is; whether that was possible."""
        if not self._room.left and (self._available() < self._wanted or not self._room.take(self.left)):
            return False
        if not self._room.fill(self._next):
            return False
        self._next += _PAGE
        return True


class _Room:
    """Pages that belong to nobody yet. They are taken together, so that those beside each other stay one map."""

    def __init__(self) -> None:
        self._span = [0, 0]  # from, to
        weakref.finalize(self, _unmap, self._span)

    @property
    def left(self) -> int:
        return self._span[1] - self._span[0]

    def take(self, most: int) -> bool:
        """Have address space for up to `most` bytes; whether the system gave it."""
        size = min(most, _ROOM_PAGES * _PAGE)
        kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        found = _libc().mmap(None, size + _PAGE, mmap.PROT_READ | mmap.PROT_WRITE, kind, -1, 0)
        if found in (None, _FAILED):
            return False
        start = -(-found // _PAGE) * _PAGE
        for first, end in ((found, start), (start + size, found + size + _PAGE)):
            _unmap([first, end])
        self._span[:] = start, start + size
        return bool(_libc().madvise(start, size, mmap.MADV_HUGEPAGE) == 0)

    def fill(self, place: int) -> bool:
        """Copy the page at `place`, and put the copy there; whether the system did."""
        page = self._span[0]
        ctypes.memmove(page, place, _PAGE)
        if _libc().mremap(page, _PAGE, _PAGE, _MREMAP_TO, place) != place:
            _restore(page, place)
            return False
        self._span[0] += _PAGE
        return True

    def give_back(self) -> None:
        _unmap(self._span)
        self._span[:] = 0, 0


def _restore(page: int, place: int) -> None:
    """After a copy that could not be put at `place`, which may be empty now: have there what is in `page`."""
    kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
    if _libc().mmap(place, _PAGE, mmap.PROT_READ | mmap.PROT_WRITE, kind, -1, 0) != place:
        raise LlmcError("the system has no memory left for the weights; start again, with --no-copy-weights")
    ctypes.memmove(place, page, _PAGE)


def _unmap(span: list[int]) -> None:
    if span[0] < span[1]:
        _libc().munmap(span[0], span[1] - span[0])


def _has_large_pages() -> bool:
    """Whether this system has them for who asks, and a page of a map can be put in another's place (Linux)."""
    try:
        return "[never]" not in _KINDS.read_text() and hasattr(_libc(), "mremap")
    except OSError:
        return False


@functools.cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    at, size, kind = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    libc.mmap.argtypes, libc.mmap.restype = [at, size, kind, kind, kind, ctypes.c_long], at
    libc.munmap.argtypes = [at, size]
    libc.madvise.argtypes = [at, size, kind]
    if hasattr(libc, "mremap"):
        libc.mremap.argtypes, libc.mremap.restype = [at, size, size, kind, at], at
    return libc
