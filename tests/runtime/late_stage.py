"""The last of several stages, in this process: it does what it was told, in order, but not before its answer is wanted.

So nothing of a step is there yet when the next ones begin, as with workers whose last stage is the slowest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from llmc.runtime.cache.pages import PagePool
from llmc.runtime.runner import Runner, Step


class LateStage:
    """It holds all layers, in `pool`; the front has pages of its own that nothing is written to.

    events: ("begin", number) and ("wait", number) of the steps, in the order in which they happened. rows: of each
    step. interrupts: waits that Ctrl-C ends from now on.
    """

    def __init__(self, pool: PagePool, step: Step, turn: Step | None = None) -> None:
        self.pool = pool
        self.events: list[tuple[str, int]] = []
        self.rows: list[int] = []
        self.interrupts = 0
        self._step, self._turn = step, turn
        self._told: deque[Callable[[], None]] = deque()

    def lead(self, runner: Runner, stages: int) -> None:
        """Be what the runner's functions and copies are told to."""
        runner.stages = stages
        runner.step_function = self._begin
        runner.pool.on_copy = lambda *copy: self._told.append(lambda: self.pool.copy(*copy))
        if self._turn is not None:
            runner.turn_function = self._later_turn

    def _begin(self, *arrays: Any) -> Callable[[], Any]:
        number, found = len(self.rows), list[Any]()
        self.rows.append(len(arrays[0]))
        self.events.append(("begin", number))
        self._told.append(lambda: found.append(self._step(*arrays)))

        def wait() -> Any:
            self.events.append(("wait", number))
            if self.interrupts:
                self.interrupts -= 1
                raise KeyboardInterrupt
            while not found:
                self._told.popleft()()
            return found[0]

        return wait

    def _later_turn(self, *arrays: Any) -> None:
        turn = self._turn
        assert turn is not None
        self._told.append(lambda: turn(*arrays))
