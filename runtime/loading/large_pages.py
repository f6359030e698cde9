"""Takes weights that a file is mapped for into memory of this process, in pages of 2 MB, where that is faster.

The system's copy of a file lies where it lay when the file was written or read, often in pages of 4 KB: kernels may
read it as fast as other memory, or a third slower (docs/engine.md, Weights in memory). So after some calls a few pages
are copied, and it is seen which are read faster, these or those beside them; of a large file others as well, should
the first have come to lie badly too, which guests of a virtual machine cannot see. Where copies are faster, all are
copied, a few after each call, for a share of its time that grows with what there is to gain. A page is put in its
place when it is whole, at the same address: nobody has to know, and what was not copied is the file's. A call counts
for no longer than it takes to read all weights once: one of many rows has work enough for memory to wait.
"""

from __future__ import annotations

import ctypes
import functools
import math
import mmap
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.runtime.errors import LlmcError
from llmc.runtime.memory import LARGE_PAGE as _PAGE
from llmc.runtime.memory import MAP_NORESERVE, available_bytes

_ROOM_PAGES = 32  # that are taken at once, and looked for in what is available
_SHARE = 0.1  # of the time of calls, for samples and looks
_MOST_SHARE = 0.5  # for all others: _HASTE times what copies gain where they are looked at, and no more than this
_HASTE = 3  # two threads were seen to gain three times what one sees of pages by themselves (docs/engine.md)
_FIRST_S = 0.5  # of calls that pay nothing: a process that ends soon has nothing of it
_SAMPLES = 8  # pages that are copied to see, of each trial
_TRIALS, _TRIAL_PAGES = 3, 100  # at most, and pages that there must be for each but the first
_LOOKS = 5  # calls after which it is seen; the least times count
_FASTER = 1.05  # times as fast is worth copying all
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
        self._now, self._available = now, available
        whole = np.frombuffer(data, np.uint8)
        start = -whole.ctypes.data % _PAGE
        count = max(0, len(data) - start) // _PAGE
        self._pages = whole[start : start + count * _PAGE].reshape(count, _PAGE)
        enough = count >= 2 * _SAMPLES and _has_large_pages()
        trials = min(_TRIALS, max(1, count // _TRIAL_PAGES)) if enough else 0
        first = [(2 * n + 1) * count // (2 * _SAMPLES) for n in range(_SAMPLES)]
        self._trials = [[page + 2 * trial for page in first] for trial in range(trials)]  # still to be made
        self._samples: list[int] = []  # pages of this trial
        self._tried: set[int] = set()  # of all trials
        self._todo: deque[int] = deque()  # pages to be copied
        self._looks: list[tuple[float, float]] = []  # seconds that copies took to be read, and pages beside them
        if self._trials:
            self._try()
        self._wanted = _TIMES_AVAILABLE * len(data)
        self._share, self._longest = _SHARE, math.inf  # seconds of a call that pay: what reading all weights takes
        self._credit = -_SHARE * _FIRST_S
        self._room = _Room()
        self.copied = 0  # pages

    @property
    def done(self) -> bool:
        """Whether no page will be copied any more."""
        return not self._todo and (len(self._looks) == _LOOKS or not self._samples)

    def worked(self, seconds: float) -> None:
        """A call took so long: copy what a share of that pays for, or look. No call may be under way."""
        if self.done:
            return
        self._credit += self._share * min(seconds, self._longest)
        start = self._now()
        if self._credit > 0 and not self._todo:
            self._look()
            self._credit = min(self._credit - (self._now() - start), 0)
            return  # the pages that were copied are in a cache until a call has read all
        while self._credit > 0 and self._todo:
            if not self._copy(self._todo.popleft()):
                self._stop()  # the system does not want it: the file's pages stay
            self._credit -= self._now() - start
            start = self._now()
        if not self._todo:
            self._credit = min(self._credit, 0)  # a long call pays for what it is followed by, and not for all later

    def _try(self) -> None:
        self._samples = self._trials.pop(0)
        self._tried.update(self._samples)
        self._todo.extend(self._samples)
        self._looks.clear()

    def _look(self) -> None:
        """See how long copies take to be read, and the pages before them; the last time decide on all the others."""
        copies, others = ([self._pages[page - before] for page in self._samples] for before in (0, 1))
        self._looks.append((_seconds_to_read(copies, self._now), _seconds_to_read(others, self._now)))
        if len(self._looks) < _LOOKS:
            return
        to_copies, to_others = map(min, zip(*self._looks, strict=True))
        if to_others >= _FASTER * to_copies:
            self._todo.extend(page for page in range(len(self._pages)) if page not in self._tried)
            self._share = max(_SHARE, min(_HASTE * (to_others / to_copies - 1), _MOST_SHARE))
            self._longest = to_others / _SAMPLES * len(self._pages)
        elif self._trials:
            self._try()

    def _copy(self, page: int) -> bool:
        """Put a copy of a page where it is; whether that was possible."""
        if not self._room.left and (self._available() < self._wanted or not self._room.take(len(self._todo) + 1)):
            return False
        if not self._room.fill(self._pages[page].ctypes.data):
            return False
        self.copied += 1
        return True

    def _stop(self) -> None:
        self._todo.clear()
        self._samples.clear()
        self._room.give_back()


def _seconds_to_read(pages: Iterable[NDArray[np.uint8]], now: Callable[[], float]) -> float:
    start = now()
    for page in pages:
        page.view(np.uint64).max()
    return now() - start


class _Room:
    """Pages that belong to nobody yet. They are taken together, so that those beside each other stay one map."""

    def __init__(self) -> None:
        self._span = [0, 0]  # from, to
        weakref.finalize(self, _unmap, self._span)

    @property
    def left(self) -> int:
        return self._span[1] - self._span[0]

    def take(self, most: int) -> bool:
        """Have address space for up to `most` pages; whether the system gave it."""
        size = min(most, _ROOM_PAGES) * _PAGE
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
