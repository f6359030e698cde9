"""Weights move into large pages at their own addresses: what they are never changes, and it costs its share of time."""

from __future__ import annotations

import gc
import itertools
import mmap
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmc.runtime.errors import LlmcError
from llmc.runtime.loading import large_pages
from llmc.runtime.loading.integrity import map_plain
from llmc.runtime.loading.large_pages import LargePages

PAGE = 2 << 20
LONG = 1e9  # seconds of a call that pays for everything
needs_large_pages = pytest.mark.skipif(not large_pages._has_large_pages(), reason="this system has no large pages")


def plenty() -> int:
    return 1 << 60


def seconds() -> Callable[[], float]:
    """A clock that is a second later whenever it is looked at."""
    clock = itertools.count()
    return lambda: float(next(clock))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    np.random.default_rng(0).integers(0, 256, 9 * PAGE + 12345, np.uint8).tofile(tmp_path / "weights")
    return tmp_path / "weights"


def mapped(path: Path) -> tuple[mmap.mmap, np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """A map of the file, what is in the map, and what should be."""
    data = map_plain(path)
    return data, np.frombuffer(data, np.uint8), np.fromfile(path, np.uint8)


@needs_large_pages
def test_they_hold_what_the_file_held(path: Path) -> None:
    data, found, wanted = mapped(path)
    pages = LargePages(data, available=plenty)
    whole = pages.left
    assert whole in (8 * PAGE, 9 * PAGE)  # by where the map happens to lie
    pages.worked(LONG)
    assert pages.left == 0
    path.write_bytes(bytes(len(wanted)))  # what was moved is the file's no longer
    start = -found.ctypes.data % PAGE
    np.testing.assert_array_equal(found[start : start + whole], wanted[start : start + whole])
    assert not found[start + whole :].any()
    assert not found[:start].any()


@needs_large_pages
def test_a_call_pays_with_its_share_of_time(path: Path) -> None:
    data, found, wanted = mapped(path)
    pages = LargePages(data, seconds(), plenty)  # moving a page takes one second
    whole = pages.left
    pages.worked(large_pages._FIRST_S)
    assert pages.left == whole  # the first calls pay nothing
    for page in range(1, 4):
        pages.worked(0.5 / large_pages._SHARE)
        assert pages.left == whole - page * PAGE  # half a second pays for one, and owes the other half
        pages.worked(0.5 / large_pages._SHARE - 0.001)
        assert pages.left == whole - page * PAGE
        pages.worked(0.001)
    np.testing.assert_array_equal(found, wanted)


@needs_large_pages
@settings(deadline=None, max_examples=20)
@given(worked=st.lists(st.floats(0, 60), max_size=20))
def test_it_never_takes_more_than_its_share_and_a_page(
    worked: list[float], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("w") / "weights"
    path.write_bytes(bytes(6 * PAGE))
    pages = LargePages(map_plain(path), seconds(), plenty)
    whole = pages.left
    for each in worked:
        pages.worked(each)
    moved = (whole - pages.left) // PAGE
    due = large_pages._SHARE * (sum(worked) - large_pages._FIRST_S)
    assert moved <= max(0.0, due) + 1
    assert moved >= min(whole // PAGE, due - 1e-6)


@needs_large_pages
def test_somebody_may_read_meanwhile(path: Path) -> None:
    data, found, wanted = mapped(path)
    pages, ended, wrong = LargePages(data, available=plenty), threading.Event(), []

    def read() -> None:
        while not ended.is_set():
            wrong.extend([1] * (not np.array_equal(found, wanted)))

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for _ in range(40):
        pages.worked(0.02 / large_pages._SHARE)
    ended.set()
    for reader in readers:
        reader.join()
    assert pages.left == 0
    assert not wrong


@needs_large_pages
@pytest.mark.parametrize("at", [0, 3])
def test_memory_that_runs_short_ends_it(path: Path, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_pages, "_ROOM_PAGES", 1)
    data, found, wanted = mapped(path)
    looks = itertools.count()
    pages = LargePages(data, seconds(), lambda: 2 * len(wanted) - (next(looks) >= at))
    for _ in range(12):
        pages.worked(1 / large_pages._SHARE)
    assert next(looks) == at + 1  # it does not ask again
    assert pages.left == 0
    path.write_bytes(bytes(len(wanted)))
    moved = np.flatnonzero(found)
    assert PAGE * max(0, at - 1) <= moved.size <= PAGE * at
    np.testing.assert_array_equal(found[moved], wanted[moved])


@needs_large_pages
@pytest.mark.parametrize("refused", ["mmap", "madvise", "mremap", "mremap that leaves a gap"])
def test_a_system_that_refuses_leaves_what_was_there(path: Path, refused: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = large_pages._libc()
    name = refused.split()[0]

    def refuse(*arguments: int) -> int | None:
        if refused.endswith("gap"):
            real.munmap(arguments[-1], PAGE)
        return -1 if name == "madvise" else large_pages._FAILED

    calls = {each: getattr(real, each) for each in ("mmap", "munmap", "madvise", "mremap")}
    data, found, wanted = mapped(path)
    pages = LargePages(data, available=plenty)
    monkeypatch.setattr(large_pages, "_libc", lambda: SimpleNamespace(**calls | {name: refuse}))
    pages.worked(LONG)
    assert pages.left == 0
    np.testing.assert_array_equal(found, wanted)


@needs_large_pages
def test_where_a_gap_cannot_be_closed_it_says_so(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, data = large_pages._libc(), map_plain(path)
    first = SimpleNamespace(mmap=real.mmap)  # the first map is the room for pages, the second closes the gap

    def once(*arguments: Any) -> Any:
        first.mmap, now = (lambda *_: large_pages._FAILED), first.mmap
        return now(*arguments)

    broken = SimpleNamespace(mmap=once, munmap=real.munmap, madvise=real.madvise, mremap=lambda *_: large_pages._FAILED)
    monkeypatch.setattr(large_pages, "_libc", lambda: broken)
    with pytest.raises(LlmcError, match="--no-copy-weights"):
        LargePages(data, available=plenty).worked(LONG)


@needs_large_pages
def test_no_address_space_is_left_behind(path: Path) -> None:
    def maps() -> int:
        gc.collect()
        spans = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()]
        return sum(int(end, 16) - int(start, 16) for start, end in spans)

    def part(worked: float) -> None:
        LargePages(map_plain(path), seconds(), plenty).worked(worked)

    part(LONG)
    before = maps()
    for _ in range(20):
        part(LONG)
        part(2 / large_pages._SHARE)  # and it goes half-way
    assert maps() - before < 20 * PAGE


@pytest.mark.parametrize("kinds", ["always madvise [never]\n", None])
def test_without_large_pages_nothing_moves(
    path: Path, kinds: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kinds is not None:
        (tmp_path / "enabled").write_text(kinds)
    monkeypatch.setattr(large_pages, "_KINDS", tmp_path / "enabled")
    pages = LargePages(map_plain(path), available=plenty)
    assert pages.left == 0
    pages.worked(LONG)


def test_a_file_smaller_than_a_page_stays(tmp_path: Path) -> None:
    (tmp_path / "small").write_bytes(b"weights")
    pages = LargePages(map_plain(tmp_path / "small"), available=plenty)
    pages.worked(LONG)
    assert pages.left == 0
