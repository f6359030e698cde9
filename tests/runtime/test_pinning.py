"""LLMC_PIN: each thread on a CPU of its own."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

from llmc.runtime.loading import pinning


@pytest.fixture
def cpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    before = os.sched_getaffinity(0)
    monkeypatch.setattr(pinning._Process, "cpus", ())
    yield sorted(before)
    os.sched_setaffinity(0, before)


def _places(count: int) -> list[set[int]]:
    """CPUs of this thread and of `count` that start."""
    stop = threading.Event()
    threads = [threading.Thread(target=stop.wait) for _ in range(count)]
    with pinning.new_threads_pinned():
        for thread in threads:
            thread.start()
    ids = [0, *sorted(thread.native_id or 0 for thread in threads)]
    found = [os.sched_getaffinity(id_) for id_ in ids]
    stop.set()
    for thread in threads:
        thread.join()
    return found


def test_threads_take_the_cpus_of_the_process_in_turn(cpus: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMC_PIN", "1")
    assert _places(3) == [{cpus[number % len(cpus)]} for number in range(4)]
    assert _places(1) == [{cpus[number % len(cpus)]} for number in range(2)]  # also once this thread is pinned


def test_without_the_variable_nothing_is_pinned(cpus: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LLMC_PIN", raising=False)
    assert _places(2) == [set(cpus)] * 3
