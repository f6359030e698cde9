"""Memory of the KV cache: what is in it stays there while small pages become large ones, and when they do."""

from __future__ import annotations

import mmap
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from llmc.runtime.cache.memory import LayerMemory
from llmc.runtime.cache.pages import PagePool
from llmc.runtime.loading.manifest import KvLayout
from llmc.runtime.memory import LARGE_PAGE as LARGE

U8 = np.dtype(np.uint8)


def _large_bytes(array: NDArray[np.uint8]) -> int:
    """Bytes in large pages of the system's areas of memory that have a part of the array."""
    first, found = array.ctypes.data, 0
    for area in re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)[1:]:
        begin, end = (int(each, 16) for each in area.split(" ", 1)[0].split("-"))
        if begin < first + array.nbytes and end > first:
            found += int(re.findall(r"^AnonHugePages: +(\d+) kB", area, re.MULTILINE)[0]) * 1024
    return found


@pytest.fixture(scope="module")
def _large_pages() -> None:
    """Skips where this system gives no large pages to whoever asks."""
    area = mmap.mmap(-1, 3 * LARGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    area.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(area, np.uint8)
    whole[:] = 1
    if not _large_bytes(whole):
        pytest.skip("no large pages here")


@given(st.lists(st.integers(0, 7 * LARGE), max_size=8), st.floats(0, 1, exclude_max=True), st.integers(1, 7 * LARGE))
@settings(max_examples=25, deadline=None)
def test_what_is_in_it_stays(uses: list[int], place: float, size: int) -> None:
    memory, expected = LayerMemory((size,), U8, place), np.zeros(size, np.uint8)
    for number, used in enumerate(sorted(uses), 1):
        memory.use(used)
        memory.array[:used:4097] = expected[:used:4097] = number
    assert memory.array.ctypes.data % LARGE == 0
    np.testing.assert_array_equal(memory.array, expected)


@pytest.mark.usefixtures("_large_pages")
@pytest.mark.parametrize("place", [0, 0.5])
@pytest.mark.parametrize("step", [LARGE // 8, 5 * LARGE])  # as a text grows, or is read at once
def test_pages_become_large_when_more_than_half_is_in_use(place: float, step: int) -> None:
    memory = LayerMemory((4 * LARGE + 4096,), U8, place)
    most = memory.array.nbytes
    for used in range(step, most + step, step):
        memory.use(used)
        memory.array[:used] = 1
        expected = min((used - int((1 + place) / 2 * LARGE)) // LARGE + 1, 4) * LARGE
        if not expected:
            assert _large_bytes(memory.array) == 0
        # A large page that is not to be had is no error; the system has them here, so that most are.
        assert expected / 2 <= _large_bytes(memory.array) <= expected


def test_a_pool_says_how_much_is_used() -> None:
    pool, told = PagePool(KvLayout(layers=2, kv_heads=1, head_dim=8, dtype="f32"), 160), []
    pool.on_use = lambda group, pages: told.append((group, pages))
    one, other = pool.new_sequence(), pool.new_sequence()
    pool.reserve_all([(one, 40), (other, 16)])
    pool.release(one)
    pool.reserve_all([(other, 64)])  # in pages that were used before
    pool.reserve_all([(one, 32)])
    assert told == [(0, 4), (0, 6)]
