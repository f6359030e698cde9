"""Memory of the KV cache: the system gives it when it is touched, in pages of 4 KB, and joins them to some of 2 MB.

Attention reads all keys and values of a text for each token, and through small pages a core is busy with addresses as
well (docs/engine.md says how long). But in large ones a text of a few tokens would take 2 MB of each layer, and every
2 MB one step would wait for as many large pages as there are layers. So memory begins in small ones, and those of a
large one become that when more than half of it is in use, one layer after another.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.runtime.errors import RequestError
from llmc.runtime.memory import LARGE_PAGE, MAP_NORESERVE

_COLLAPSE = 25  # MADV_COLLAPSE of Linux 6.1: what is there in small pages becomes a large one


class LayerMemory:
    """Zeros of a shape in `array`, from the start of a large page on.

    `place`: that of the layer among all, from 0 to 1; pages become large when (1 + place) / 2 of them are in use.
    """

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype[Any], place: float) -> None:
        self._size = math.prod(shape) * dtype.itemsize
        self._least = int(LARGE_PAGE * (1 + place) / 2)
        self._large = 0  # pages that are large
        try:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
            self._map = mmap.mmap(-1, self._size + LARGE_PAGE, flags=flags)
        except (OSError, OverflowError, ValueError) as error:
            raise RequestError(
                f"the system refuses {self._size} bytes for one layer of the KV cache; load with a smaller cache_tokens"
            ) from error
        self._start = -np.frombuffer(self._map, np.uint8).ctypes.data % LARGE_PAGE
        self.array: NDArray[Any] = np.frombuffer(
            self._map, dtype, math.prod(shape), self._start
        ).reshape(shape)  # fmt: skip

    def use(self, size: int) -> None:
        """The first `size` bytes will be used: see to large pages. What is over at the end stays in small ones."""
        wanted = min((size - self._least) // LARGE_PAGE + 1, self._size // LARGE_PAGE)
        while self._large < wanted:
            at = self._start + self._large * LARGE_PAGE
            self._large += 1
            with contextlib.suppress(OSError, AttributeError):  # a kernel, or a system, without them
                self._map.madvise(mmap.MADV_HUGEPAGE, at, LARGE_PAGE)  # for one that nothing is in yet
                self._map.madvise(_COLLAPSE, at, LARGE_PAGE)
