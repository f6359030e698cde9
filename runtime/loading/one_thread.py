"""Few threads for calls of compiled functions, however many threads want something of a model.

TVM keeps a pool of workers for each thread that calls, and the system's allocator an arena with what it once gave out:
memory would grow with the number of threads that ever ran a step.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

T = TypeVar("T")


class OneThread:
    """Runs calls in the thread that came first when that makes them, and all others in one thread of its own.

    So a program of one thread waits for nobody, and there are two callers at most.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken = False
        self._here = threading.local()  # .first: whether this thread came first
        self._beside: ThreadPoolExecutor | None = None

    def run(self, call: Callable[[], T]) -> T:
        """What `call` gives. An interrupt, as Ctrl-C, is raised once the call has ended."""
        with self._lock:
            if not self._taken:
                self._taken = self._here.first = True
            first = getattr(self._here, "first", False)
            if not first and self._beside is None:
                from concurrent.futures import ThreadPoolExecutor  # here, as a program of one thread does without

                self._beside = ThreadPoolExecutor(1, "llmc-step")
            beside = self._beside
        if first or beside is None:
            return call()
        future = beside.submit(call)
        try:
            return future.result()
        except BaseException:
            while not future.done():  # the cache is written meanwhile: nobody may take pages back
                with contextlib.suppress(KeyboardInterrupt):
                    future.exception()
            raise
