"""How many threads the next call of a compiled function should use, on a machine that others use too.

The threads of a kernel wait for one another. One that shares its CPU with another process holds up all, the more so as
TVM's threads wait by giving way, again and again: on two CPUs, of which one is busy, two threads are slower than one.
Giving way to somebody is what Linux counts as an involuntary context switch, and next to none happen where nobody else
wants the CPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable

try:
    import resource
except ImportError:  # not a Unix: nothing is known of others
    resource = None  # type: ignore[assignment]

_SWITCHES = 1500.0  # a second; undisturbed threads have 100 or 200, disturbed ones 4,000 to 70,000
_LOST_CPUS = 0.3  # of those that the threads would have had: short disturbances are not worth a thread
_WINDOW_S = 0.05  # what is watched before it is judged
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 2.0  # until one more thread is tried again,
_PAUSE_WINDOWS = 10  # and as many times as long as it was watched, for calls that are long


def _switches() -> int:
    """Involuntary context switches of this process so far."""
    return 0 if resource is None else resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


class Crowding:
    """Takes a thread away while other processes disturb the threads, and tries now and then to have it back.

    Threads never change what is computed. Only one thread may use it at a time.
    """

    def __init__(
        self,
        threads: int,
        now: Callable[[], float] = time.perf_counter,
        worked: Callable[[], float] = time.process_time,
        switches: Callable[[], int] = _switches,
    ) -> None:
        self.most = self.threads = threads
        self._now, self._worked, self._switches = now, worked, switches
        self._pause, self._retry_at = _FIRST_PAUSE_S, 0.0
        self._before = (0.0, 0.0, 0)
        self._forget()

    def _forget(self) -> None:
        """Watch from here on."""
        self._seconds, self._cpu_seconds, self._disturbed = 0.0, 0.0, 0

    def begin(self) -> int:
        """Threads for a call that begins now."""
        if self.most == 1:
            return 1
        now = self._now()
        if self.threads < self.most and now >= self._retry_at:
            self.threads += 1
            self._forget()
            self._retry_at = now + self._pause
        self._before = (now, self._worked(), self._switches())
        return self.threads

    def end(self) -> None:
        """Learn from the call that has ended."""
        if self.threads == 1:
            return
        now, (began, worked, switches) = self._now(), self._before
        self._seconds += now - began
        self._cpu_seconds += self._worked() - worked
        self._disturbed += self._switches() - switches
        if self._seconds < _WINDOW_S:
            return
        lost = self.threads - self._cpu_seconds / self._seconds
        if self._disturbed > _SWITCHES * self._seconds and lost > _LOST_CPUS:
            self.threads -= 1
            self._retry_at = now + max(self._pause, _PAUSE_WINDOWS * self._seconds)
            self._pause = min(2 * self._pause, _LONGEST_PAUSE_S)
        elif self.threads == self.most:
            self._pause = _FIRST_PAUSE_S
        self._forget()
