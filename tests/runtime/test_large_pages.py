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
Bytes = np.ndarray[Any, Any]
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
    np.random.default_rng(0).integers(0, 256, 20 * PAGE + 12345, np.uint8).tofile(tmp_path / "weights")
    return tmp_path / "weights"


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that copies take to be read, and other pages."""
    found = [1.0, 1.2]
    turns = itertools.cycle((0, 1))
    monkeypatch.setattr(large_pages, "_seconds_to_read", lambda pages, now: found[next(turns)])
    return found


def mapped(path: Path) -> tuple[mmap.mmap, Bytes, Bytes]:
    """A map of the file, what is in the map, and what should be."""
    data = map_plain(path)
    return data, np.frombuffer(data, np.uint8), np.fromfile(path, np.uint8)


def finish(pages: LargePages) -> None:
    """Calls until nothing is copied any more."""
    for _ in range(10_000):
        pages.worked(LONG)
    assert pages.done


@needs_large_pages
def test_they_hold_what_the_file_held(path: Path, reads: list[float]) -> None:
    data, found, wanted = mapped(path)
    pages = LargePages(data, available=plenty)
    finish(pages)
    assert pages.copied in (19, 20)  # by where the map happens to lie
    whole, start = pages.copied * PAGE, -found.ctypes.data % PAGE
    path.write_bytes(bytes(len(wanted)))  # what was copied is the file's no longer
    np.testing.assert_array_equal(found[start : start + whole], wanted[start : start + whole])
    assert not found[start + whole :].any()
    assert not found[:start].any()


@needs_large_pages
@pytest.mark.parametrize(
    ("looks", "all_of_them"),
    [
        ([(1.0, 1.05)] * 5, True),
        ([(1.0, 1.04)] * 5, False),
        ([(1.0, 0.7)] * 5, False),
        ([(9.0, 9.0), (1.0, 9.0), (9.0, 1.2), (9.0, 9.0), (9.0, 9.0)], True),  # the least of each count
        ([(1.0, 9.0), (1.0, 9.0), (1.0, 9.0), (1.0, 9.0), (1.0, 1.0)], False),
    ],
)
def test_all_are_copied_where_copies_are_faster(
    path: Path, looks: list[tuple[float, float]], all_of_them: bool, reads: list[float]
) -> None:
    data, found, wanted = mapped(path)
    pages = LargePages(data, available=plenty)
    pages.worked(LONG)
    samples = set(pages._samples)
    assert pages.copied == len(samples) == 8
    assert not {page - 1 for page in samples} & (samples | {-1})
    for reads[:] in looks:
        assert not pages.done
        assert pages.copied == 8
        pages.worked(LONG)
    finish(pages)
    assert (pages.copied >= 19) == all_of_them
    assert all_of_them or pages.copied == 8
    np.testing.assert_array_equal(found, wanted)


@needs_large_pages
@pytest.mark.parametrize("good", [0, 1, 2, 3])
def test_of_a_large_file_others_are_tried(
    tmp_path: Path, good: int, reads: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(large_pages, "_TRIAL_PAGES", 24)
    np.random.default_rng(0).integers(0, 256, 73 * PAGE, np.uint8).tofile(tmp_path / "large")
    data, found, wanted = mapped(tmp_path / "large")
    pages, read = LargePages(data, available=plenty), []
    for trial in range(3):
        pages.worked(LONG)
        assert pages.copied == 8 * (trial + 1)
        read += [pages._samples, [page - 1 for page in pages._samples]]
        for _ in range(5):
            reads[1] = 1.2 if trial == good else 1.0
            assert not pages.done
            pages.worked(LONG)
        if trial == good:
            break
    finish(pages)
    assert len({page for each in read for page in each}) == 8 * len(read)  # none is looked at twice
    assert pages.copied == (24 if good == 3 else len(pages._pages))
    np.testing.assert_array_equal(found, wanted)


@needs_large_pages
def test_pages_are_really_read(path: Path) -> None:
    data, _, _ = mapped(path)
    pages = LargePages(data, available=plenty)
    finish(pages)
    assert len(pages._looks) == 5
    least = 8 * PAGE / 1e12  # no memory reads a terabyte a second
    assert all(least < each < 10 for look in pages._looks for each in look)


@needs_large_pages
def test_a_call_pays_with_its_share_of_time(path: Path, reads: list[float]) -> None:
    data, found, wanted = mapped(path)
    pages = LargePages(data, seconds(), plenty)  # copying a page takes one second
    pages.worked(large_pages._FIRST_S)
    assert not pages.copied  # the first calls pay nothing
    for count in range(1, 4):
        pages.worked(0.5 / large_pages._SHARE)
        assert pages.copied == count  # half a second pays for one, and owes the other half
        pages.worked(0.5 / large_pages._SHARE - 0.001)
        assert pages.copied == count
        pages.worked(0.001)
    np.testing.assert_array_equal(found, wanted)


@needs_large_pages
@pytest.mark.parametrize(("slower", "share"), [(1.06, 0.18), (1.1, 0.3), (1.3, 0.5), (9.0, 0.5)])
def test_what_gains_more_gets_a_larger_share(path: Path, reads: list[float], slower: float, share: float) -> None:
    reads[1] = slower
    pages = LargePages(map_plain(path), seconds(), plenty)
    while len(pages._looks) < 5:
        pages.worked(1 / large_pages._SHARE)
    pages._longest = LONG
    pages.worked(-pages._credit / share)  # what the looks took is paid
    before = pages.copied
    for count in range(1, 4):
        pages.worked(1 / share)  # for a page, which takes a second
        assert pages.copied == before + count


@needs_large_pages
def test_a_call_counts_for_no_longer_than_reading_all_takes(path: Path, reads: list[float]) -> None:
    reads[:] = [1.0, 4.0]
    pages = LargePages(map_plain(path), seconds(), plenty)
    while len(pages._looks) < 5:
        pages.worked(1 / large_pages._SHARE)
    least, before = 4.0 / 8 * len(pages._pages), pages.copied  # ten seconds, of which half pay for five pages
    pages.worked(-2 * pages._credit)
    pages.worked(LONG)
    assert least / 2 <= pages.copied - before <= least / 2 + 1
    assert not pages.done


@needs_large_pages
@settings(deadline=None, max_examples=20)
@given(worked=st.lists(st.floats(0, 60), max_size=20))
def test_it_never_takes_more_than_its_share_and_a_page(
    worked: list[float], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("w") / "weights"
    path.write_bytes(bytes(18 * PAGE))
    pages = LargePages(map_plain(path), seconds(), plenty)
    for each in worked:
        pages.worked(each)
    due = large_pages._SHARE * (sum(worked) - large_pages._FIRST_S)
    assert pages.copied <= max(0.0, due) + 1
    assert pages.copied >= min(8, due - 1e-6)


@needs_large_pages
def test_somebody_may_read_meanwhile(path: Path, reads: list[float]) -> None:
    data, found, wanted = mapped(path)
    pages, ended, wrong = LargePages(data, available=plenty), threading.Event(), []

    def read() -> None:
        while not ended.is_set():
            wrong.extend([1] * (not np.array_equal(found, wanted)))

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    while not pages.done:
        pages.worked(0.01 / large_pages._SHARE)
    ended.set()
    for reader in readers:
        reader.join()
    assert pages.copied >= 19
    assert not wrong


@needs_large_pages
@pytest.mark.parametrize("at", [0, 3, 11])
def test_memory_that_runs_short_ends_it(
    path: Path, at: int, reads: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(large_pages, "_ROOM_PAGES", 1)
    data, found, wanted = mapped(path)
    looks = itertools.count()
    pages = LargePages(data, available=lambda: 2 * len(wanted) - (next(looks) >= at))
    finish(pages)
    assert next(looks) == at + 1  # it does not ask again
    assert pages.copied == at
    path.write_bytes(bytes(len(wanted)))
    kept = np.flatnonzero(found)
    assert PAGE * at * 0.99 <= kept.size <= PAGE * at
    np.testing.assert_array_equal(found[kept], wanted[kept])


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
    finish(pages)
    assert not pages.copied
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
def test_no_address_space_is_left_behind(path: Path, reads: list[float]) -> None:
    def maps() -> int:
        gc.collect()
        spans = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()]
        return sum(int(end, 16) - int(start, 16) for start, end in spans)

    def part(worked: float) -> None:
        pages = LargePages(map_plain(path), seconds(), plenty)
        for _ in range(20):
            pages.worked(worked)

    part(LONG)
    before = maps()
    for _ in range(20):
        part(LONG)
        part(0.3 / large_pages._SHARE)  # and it ends half-way
    assert maps() - before < 20 * PAGE


@pytest.mark.parametrize("kinds", ["always madvise [never]\n", None])
def test_without_large_pages_nothing_moves(
    path: Path, kinds: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kinds is not None:
        (tmp_path / "enabled").write_text(kinds)
    monkeypatch.setattr(large_pages, "_KINDS", tmp_path / "enabled")
    pages = LargePages(map_plain(path), available=plenty)
    assert pages.done
    finish(pages)
    assert not pages.copied


@pytest.mark.parametrize("size", [7, 5 * PAGE])
def test_a_small_file_stays(tmp_path: Path, size: int) -> None:
    (tmp_path / "small").write_bytes(bytes(size))
    pages = LargePages(map_plain(tmp_path / "small"), available=plenty)
    assert pages.done
    finish(pages)
    assert not pages.copied
