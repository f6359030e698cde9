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
    "llmc_share_with_tensor_cores",
)  # fmt: skip


@dataclass
class _Product:
    """Sums on their way: where they go, what they will be, and words of weights that have to stay until then."""

    memory: Any
    places: list[Place]
    values: Array
    group: int  # of the same number for all threads that have it
    weights: list[tuple[int, Any, list[Place], Array]]  # and the group that reads them

    @property
    def threads(self) -> Array:
        """Whose product it is."""
        return self.places[0][2]

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
    """Those of one launch. Where not all threads do the same, those of four warps do."""

    def __init__(
        self, threads: int, pointed: Callable[[Any, int, Array], tuple[Any, list[Place]]],
        number: Callable[[Any, Array], Array], arrivals: Arrivals,
    ) -> None:  # fmt: skip
        """`pointed` finds words behind an address, `number` what an argument is, of the threads of a mask."""
        self.pointed, self.number_of, self.arrivals = pointed, number, arrivals
        self.waiting: list[_Product] = []
        self.groups = np.zeros(threads, np.int64)
        self.begun, self.shared = np.zeros(threads, bool), np.zeros(threads, bool)

    def call(self, name: str, args: Any, mask: Array) -> None:
        """One of NAMES, with the arguments behind its name."""
        groups = mask.reshape(-1, WARPS * LANES)
        if (groups.any(1) != groups.all(1)).any():
            raise Fault("products of four warps that only some of their threads reach")
        self.mask = mask
        kind = next(known for known in NAMES if name.startswith(known))
        if kind == "llmc_group_mma_":
            self._multiply(int(name.rpartition("_")[2]), args)
        elif kind == "llmc_begin_group_products<":
            self.begun[mask] = True
        elif kind == "llmc_commit_group_products":
            self.groups[mask] += 1
            self.begun[mask] = False
        elif kind == "llmc_share_with_tensor_cores":
            self.shared[mask] = True
        else:
            self._wait(int(name.partition("<")[2][:-1]), settled=bool(len(args)))

    def number(self, given: Any) -> int:
        """An argument that is the same for all threads that are there."""
        found = np.broadcast_to(self.number_of(given, self.mask), self.mask.shape)[self.mask]
        assert (found == found[0]).all()
        return int(found[0])

    def _multiply(self, rows: int, args: Any) -> None:
        if not (self.begun & self.shared)[self.mask].all():
            raise Fault("a product of four warps before registers, or shared memory, were said to be ready")
        memory, places = self.pointed(args[0], rows // 2, self.mask)
        weights, weight_places = self.pointed(args[1], 4, self.mask)
        shared, first = self.pointed(args[2], 1, self.mask)
        group = self._group()
        assert shared.scope == "shared"
        before = next((each for each in self.waiting if each.memory is memory and _same(each.places, places)), None)
        if before is not None:
            sums = before.values
        elif self.number(args[5]):
            sums = np.stack([memory.read(*place) for place in places])
        else:
            sums = np.zeros((rows // 2, len(places[0][2])), np.float32)
        if before is not None and not self.number(args[5]):
            raise Fault("sums from zero, while others are on their way to the same place")
        a = np.stack([weights.read(*place) for place in weight_places])
        space, at, thread = first[0]
        at, step = at + self.number(args[3]) // 4, self.number(args[4]) // 4
        found = []
        self.arrivals.read(shared, space, at, at + (rows // 8 - 1) * step + 2 * LANES - 1, group)
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
        kept = [*kept, (group, weights, weight_places, a)]
        self.waiting.append(_Product(memory, places, np.concatenate(found), group, kept))

    def _wait(self, groups: int, settled: bool) -> None:
        """All groups but the last so many are done. Sums are there once they were named, which keeps nvcc in order."""
        self.arrivals.done = int(self.groups[self.mask].min()) - groups
        waiting = [each for each in self.waiting if self.mask[each.threads].any()]
        if not all(self.mask[each.threads].all() for each in waiting):
            raise Fault("some threads wait for products that others have begun too")
        for each in waiting:
            last = int(self.groups[each.threads[0]]) - groups
            each.release(last)
            if settled and each.group < last:
                each.arrive()
                self.waiting.remove(each)

    def _group(self) -> int:
        """The number of the group that a product is of: the same for all threads that do it together."""
        groups = self.groups[self.mask]
        if (groups != groups[0]).any():  # where some did less before, nothing of theirs may be on its way
            if any(self.mask[each.threads].any() for each in self.waiting):
                raise Fault("products of four warps of which some threads have begun more than others")
            self.groups[self.mask] = groups.max()
        return int(self.groups[self.mask][0])


def _same(some: list[Place], others: list[Place]) -> bool:
    return len(some) == len(others) and all(np.array_equal(a[1], b[1]) for a, b in zip(some, others, strict=True))
