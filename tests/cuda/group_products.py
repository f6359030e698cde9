"""Products of four warps (`wgmma`) for cuda_threads.py: sums are there when threads have waited for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensor_cores
from arrivals import Arrivals
from thread_memory import Fault

Array = np.ndarray[Any, Any]
Place = tuple[Array, Array, Array]  # space, element, thread
LANES, WARPS = 32, 4
NAMES = (
    "llmc_group_mma_", "llmc_begin_group_products<", "llmc_commit_group_products", "llmc_wait_group_products",
)  # fmt: skip


@dataclass
class _Product:
    """Sums on their way: where they go, what they will be, and words of weights that have to stay until then."""

    memory: Any
    places: list[Place]
    values: Array
    group: int
    weights: list[tuple[int, Any, list[Place], Array]]  # and the group that reads them

    def release(self, last: int) -> None:
        """Products of groups before this one are done: their weights have to be what they were, and may change."""
        for group, memory, places, values in self.weights:
            if group < last and any(
                (memory.read(*place) != value).any() for place, value in zip(places, values, strict=True)
            ):
                raise Fault(f"{memory.name}: weights of a product were overwritten before anybody waited for it")
        self.weights = [each for each in self.weights if each[0] >= last]

    def arrive(self) -> None:
        """They are there."""
        for place, values in zip(self.places, self.values, strict=True):
            self.memory.write(*place, values)


class GroupProducts:
    """Those of one launch, all of whose threads do the same."""

    def __init__(
        self, pointed: Callable[[Any, int], tuple[Any, list[Place]]], number: Callable[[Any], Array], arrivals: Arrivals
    ) -> None:
        """`pointed` finds words behind an address, `number` what an argument is, of all threads."""
        self.pointed, self.number, self.arrivals = pointed, number, arrivals
        self.waiting: list[_Product] = []
        self.groups, self.begun, self.shared = 0, False, False

    def call(self, name: str, args: Any) -> None:
        """One of NAMES, with the arguments behind its name."""
        kind = next(known for known in NAMES if name.startswith(known))
        if kind == "llmc_group_mma_":
            self._multiply(int(name.rpartition("_")[2]), args)
        elif kind == "llmc_begin_group_products<":
            self.begun = True
        elif kind == "llmc_commit_group_products":
            self.groups, self.begun = self.groups + 1, False
        else:
            self._wait(int(name.partition("<")[2][:-1]), settled=bool(len(args)))

    def _multiply(self, rows: int, args: Any) -> None:
        if not self.begun or not self.shared:
            raise Fault("a product of four warps before registers, or shared memory, were said to be ready")
        memory, places = self.pointed(args[0], rows // 2)
        weights, weight_places = self.pointed(args[1], 4)
        shared, first = self.pointed(args[2], 1)
        assert shared.scope == "shared"
        before = next((each for each in self.waiting if each.memory is memory and _same(each.places, places)), None)
        if before is not None:
            sums = before.values
        elif self.number(args[5])[0]:
            sums = np.stack([memory.read(*place) for place in places])
        else:
            sums = np.zeros((rows // 2, len(places[0][2])), np.float32)
        if before is not None and not self.number(args[5])[0]:
            raise Fault("sums from zero, while others are on their way to the same place")
        a = np.stack([weights.read(*place) for place in weight_places])
        space, at, thread = first[0]
        at, step = at + int(args[3]) // 4, int(args[4]) // 4
        found = []
        self.arrivals.read(shared, space, at, at + (rows // 8 - 1) * step + 2 * LANES - 1, self.groups)
        for n in range(rows // 8):
            own = [at + n * step + word * LANES + thread % LANES for word in range(2)]
            if any((each >= shared.data.shape[1]).any() for each in own):
                raise Fault(f"{shared.name}: tensor cores read behind its end")
            b = np.stack([shared.read(space, each, thread) for each in own])
            found.append(tensor_cores.product(sums[4 * n : 4 * n + 4], a, b))
        for place in places:  # nobody may read them yet
            memory.write(*place, np.full(len(place[2]), np.nan, np.float32))
        kept = [] if before is None else before.weights
        if before is not None:
            self.waiting.remove(before)
        kept = [*kept, (self.groups, weights, weight_places, a)]
        self.waiting.append(_Product(memory, places, np.concatenate(found), self.groups, kept))

    def _wait(self, groups: int, settled: bool) -> None:
        """All groups but the last so many are done. Sums are there once they were named, which keeps nvcc in order."""
        self.arrivals.done = self.groups - groups
        for each in self.waiting:
            each.release(self.groups - groups)
        if settled:
            for each in [each for each in self.waiting if each.group < self.groups - groups]:
                each.arrive()
                self.waiting.remove(each)


def _same(some: list[Place], others: list[Place]) -> bool:
    return len(some) == len(others) and all(np.array_equal(a[1], b[1]) for a, b in zip(some, others, strict=True))
