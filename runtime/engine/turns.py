"""Whose turn it is: one thread at a time runs the engine's step, and the others wait for its end."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio


class Turns:
    """A turn that one thread has at a time; the others wait in a thread, or in an event loop.

    Its lock is held for moments only and may be taken again by the same thread: a stream that is garbage collected
    anywhere may need it.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()  # over an RLock
        self._taken = False
        self.calls = 0  # of `wake`
        self._sleepers: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []

    def take(self, enough: Callable[[], object] = bool) -> bool:
        """Wait until it is nobody's turn, or `enough` says so; whether the turn is this thread's now."""
        with self._changed:
            while not enough() and self._taken:
                self._changed.wait()
            if enough():
                return False
            self._taken = True
            return True

    def try_take(self) -> bool:
        """Take the turn if it is nobody's."""
        with self._changed:
            if self._taken:
                return False
            self._taken = True
            return True

    def give(self) -> None:
        """End this thread's turn, and wake all who wait."""
        with self._changed:
            self._taken = False
        self._wake()

    def wake(self) -> None:
        """Have all who wait look again: there may be something to do."""
        with self._changed:
            self.calls += 1
        self._wake()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()
            sleepers, self._sleepers = self._sleepers, []
        for loop, sleeper in sleepers:
            with contextlib.suppress(RuntimeError):  # a loop that was closed
                loop.call_soon_threadsafe(_end, sleeper)

    def wait(self, enough: Callable[[], object], calls: int) -> None:
        """Wait until `enough` says so, or there has been another call of `wake` than these."""
        with self._changed:
            while not enough() and self.calls == calls:
                self._changed.wait()

    def sleeper(self) -> tuple[asyncio.Future[None], bool]:
        """What the running event loop can await to be woken the next time; and whether it is someone's turn."""
        import asyncio  # takes as long to import as half of the engine

        loop = asyncio.get_running_loop()
        sleeper: asyncio.Future[None] = loop.create_future()
        with self._changed:
            self._sleepers.append((loop, sleeper))
            return sleeper, self._taken


def _end(sleeper: asyncio.Future[None]) -> None:
    if not sleeper.done():
        sleeper.set_result(None)
