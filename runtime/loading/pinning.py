"""Threads that keep to one CPU each, where `LLMC_PIN=1` asks for it: for machines that do nothing else.

Elsewhere the system places threads better: a pinned one cannot leave a CPU that another process wants.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

_TASKS = Path("/proc/self/task")
_HAS_AFFINITY = hasattr(os, "sched_setaffinity")


class _Process:
    cpus: tuple[int, ...] = ()  # that the process might use before any thread was pinned


@contextlib.contextmanager
def new_threads_pinned() -> Iterator[None]:
    """Pin the calling thread to the first CPU that the process may use, threads that start meanwhile to the next."""
    if os.environ.get("LLMC_PIN", "0") in ("", "0") or not _HAS_AFFINITY or not _TASKS.is_dir():
        yield
        return
    if not _Process.cpus:
        _Process.cpus = tuple(sorted(os.sched_getaffinity(0)))
    before = _threads()
    yield
    for number, thread in enumerate([0, *sorted(_threads() - before)]):
        with contextlib.suppress(OSError):  # the thread has ended, or the CPU was taken away
            os.sched_setaffinity(thread, {_Process.cpus[number % len(_Process.cpus)]})


def _threads() -> set[int]:
    return {int(entry.name) for entry in _TASKS.iterdir()}
