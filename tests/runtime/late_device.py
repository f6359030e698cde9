"""A device in this process: it does what it was told in order, but not before somebody wants an answer, or a page.

So a step that follows another begins before anything of that one is there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from llmc.runtime.runner import Runner


class LateDevice:
    """What a runner calls in place of its step. follows: how many steps followed another."""

    def __init__(self, runner: Runner) -> None:
        self.follows = 0
        self._step = runner.step_function
        self._told: deque[Callable[[], None]] = deque()
        self._last: list[Any] | None = None  # results of the step told of last, once it is done
        self._rows = -1  # of that step, if each has logits
        runner.step_function = self
        runner.pool.layers = _Pages(runner.pool.layers, self._finish)

    def __call__(self, *arrays: Any) -> Any:
        return self.begin(*arrays)()

    def begin(self, *arrays: Any) -> Callable[[], Any]:
        """Have a step done some time; what waits for it."""
        return self._tell(arrays, lambda: self._step(*arrays))

    def follow(self, *arrays: Any) -> Callable[[], Any] | None:
        """The same with the greatest tokens of the step before, where rows are the same."""
        last, (tokens, *_, wanted) = self._last, arrays
        if last is None or not len(tokens) == len(wanted) == self._rows:
            return None
        self.follows += 1

        def step() -> Any:
            tokens[:] = last[0][1][:, 0]
            return self._step(*arrays)

        return self._tell(arrays, step)

    def _tell(self, arrays: tuple[Any, ...], step: Callable[[], Any]) -> Callable[[], Any]:
        found = list[Any]()
        self._last = found
        self._rows = len(arrays[0]) if len(arrays[0]) == len(arrays[-1]) else -1
        self._told.append(lambda: found.append(step()))

        def wait() -> Any:
            while not found:
                self._told.popleft()()
            return found[0]

        return wait

    def _finish(self) -> None:
        while self._told:
            self._told.popleft()()


class _Pages(list[Any]):
    """Layers of pages: whoever looks at them waits for the device."""

    def __init__(self, layers: list[Any], finish: Callable[[], None]) -> None:
        super().__init__(layers)
        self._finish = finish

    def __getitem__(self, layer: Any) -> Any:
        self._finish()
        return super().__getitem__(layer)

    def __iter__(self) -> Any:
        self._finish()
        return super().__iter__()
