"""How much of a matrix, of heads or of layers each device of a group takes, in units that may not be divided."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llmc.compiler.errors import LlmcError
from llmc.compiler.formats import GROUP
from llmc.compiler.formats.plain import TILE

Ranges = tuple[tuple[int, int], ...]  # begin and end of each, in the order in which a device has them


def apportion(units: int, shares: Sequence[int], what: str) -> list[tuple[int, int]]:
    """Begin and end of each share of `units`: as near to the shares as whole units are, and at least one each.

    >>> apportion(9, (1, 1), "heads")
    [(0, 5), (5, 9)]
    >>> apportion(4, (9, 1, 1), "heads")
    [(0, 2), (2, 3), (3, 4)]

    Raises LlmcError, naming `what` the units are, when there are fewer than shares.
    """
    if units < len(shares):
        raise LlmcError(f"{len(shares)} devices cannot share {units} {what}: each needs one at least")
    total = sum(shares)
    counts = [max(1, units * share // total) for share in shares]
    while sum(counts) != units:
        # What a share lacks of its due, in parts of 1 / total of a unit; of equal ones the first.
        lacking = [units * share - count * total for share, count in zip(shares, counts, strict=True)]
        if sum(counts) < units:
            counts[lacking.index(max(lacking))] += 1
        else:
            above = [lack if count > 1 else units * total for lack, count in zip(lacking, counts, strict=True)]
            counts[above.index(min(above))] -= 1
    ends = [sum(counts[: i + 1]) for i in range(len(counts))]
    return [(end - count, end) for end, count in zip(ends, counts, strict=True)]


@dataclass(frozen=True)
class Heads:
    """What a device has of a layer's heads. `kv` names the kv head of each of its own; one may stand there twice."""

    first: int
    end: int
    kv: tuple[int, ...]

    @property
    def count(self) -> int:
        """Query heads."""
        return self.end - self.first

    def queries(self, size: int) -> Ranges:
        """The columns of its query heads, `size` each."""
        return ((self.first * size, self.end * size),)

    def keys(self, size: int, after: int = 0) -> Ranges:
        """The columns of its kv heads, where those of kv head 0 begin at `after`."""
        return joined(tuple((after + head * size, after + (head + 1) * size) for head in self.kv))


@dataclass(frozen=True)
class Cut:
    """The share of one member of a group of devices."""

    shares: tuple[int, ...]
    member: int

    @property
    def alone(self) -> bool:
        """Whether there is nobody to share with."""
        return len(self.shares) == 1

    def heads(self, heads: int, kv_heads: int) -> Heads:
        """Query heads with the kv heads that they read, in units as large as give every device one.

        A unit is a kv head with its query heads; where there are fewer of those than devices, a part of these, the same
        of each, so that devices have copies of a kv head. A device within one kv head keeps it once; one that has parts
        of several keeps one for each unit, as attention wants the same number of queries for every kv head.
        """
        per_kv, devices = heads // kv_heads, len(self.shares)
        parts = next((n for n in range(1, per_kv + 1) if per_kv % n == 0 and kv_heads * n >= devices), per_kv)
        first, end = apportion(kv_heads * parts, self.shares, f"heads ({heads}, of {kv_heads} keys and values)")[
            self.member
        ]
        kv = tuple(unit // parts for unit in range(first, end))
        size = per_kv // parts
        once = tuple(dict.fromkeys(kv))
        whole = len(kv) == len(once) * parts  # of every kv head all units
        return Heads(first * size, end * size, once if whole or len(once) == 1 else kv)

    def columns(self, width: int) -> tuple[int, int]:
        """Of an MLP: blocks as formats quantize them, so that shares of matrices have the whole's codes."""
        return self._blocks(width, GROUP, "columns of an MLP")

    def rows(self, count: int) -> tuple[int, int]:
        """Of the vocabulary: tiles of rows, as matrices are packed."""
        return self._blocks(count, TILE, "rows of a vocabulary")

    def experts(self, count: int) -> tuple[int, int]:
        """Whole experts."""
        return apportion(count, self.shares, "experts")[self.member]

    def _blocks(self, width: int, size: int, what: str) -> tuple[int, int]:
        """In blocks of `size`, the last one what is left; of half that, and so on, where there are too few."""
        while size > 1 and -(-width // size) < len(self.shares):
            size //= 2
        first, end = apportion(-(-width // size), self.shares, what)[self.member]
        return first * size, min(end * size, width)


def joined(ranges: Ranges) -> Ranges:
    """The same columns in as few ranges as can be.

    >>> joined(((0, 2), (2, 4), (2, 4)))
    ((0, 4), (2, 4))
    """
    found: list[tuple[int, int]] = []
    for first, end in ranges:
        if found and found[-1][1] == first:
            first = found.pop()[0]
        found.append((first, end))
    return tuple(found)


def within(ranges: Ranges, first: int, end: int) -> Ranges:
    """The parts of ranges that lie in first..end, counted from there.

    >>> within(((0, 4), (6, 10)), 2, 8)
    ((0, 2), (4, 6))
    """
    cut = ((max(a, first) - first, min(b, end) - first) for a, b in ranges)
    return tuple((a, b) for a, b in cut if a < b)


def length(ranges: Ranges) -> int:
    """How many columns they are."""
    return sum(end - first for first, end in ranges)


def scaled(ranges: Ranges, by: int, of: int) -> Ranges:
    """Ranges of units of `of` columns as those of units of `by`.

    >>> scaled(((8, 16),), 1, 8)
    ((1, 2),)
    """
    return tuple((first // of * by, end // of * by) for first, end in ranges)
