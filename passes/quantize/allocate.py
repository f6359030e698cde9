"""Spend a budget of bytes where it saves most loss: a format for each matrix, on the lower convex hull of its choices.

The multiple-choice knapsack by marginal gains (https://doi.org/10.1287/opre.27.3.503): every step takes the upgrade
that saves most loss per byte; losses add up, as small divergences of independent errors do.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass


@dataclass(frozen=True)
class Choice:
    """One format for one matrix: its bytes, and what it loses."""

    name: str
    bytes: int
    loss: float


def allocate(choices: list[list[Choice]], budget: float) -> list[Choice] | None:
    """One choice for each list, the total within `budget` bytes; None when even the smallest are too large.

    >>> small, large = Choice("c2", 10, 4.0), Choice("q8", 30, 0.0)
    >>> [c.name for c in allocate([[small, large], [small, Choice("q8", 30, 3.0)]], 45)]
    ['q8', 'c2']
    """
    hulls = [_hull(each) for each in choices]
    at = [0] * len(hulls)
    left = budget - sum(hull[0].bytes for hull in hulls)
    if left < 0:
        return None
    queue = [(-_gain(hull, 0), number) for number, hull in enumerate(hulls) if len(hull) > 1]
    heapq.heapify(queue)
    while queue:
        _, number = heapq.heappop(queue)
        hull, place = hulls[number], at[number]
        cost = hull[place + 1].bytes - hull[place].bytes
        if cost > left:
            continue  # a smaller matrix may still fit
        left -= cost
        at[number] = place + 1
        if place + 2 < len(hull):
            heapq.heappush(queue, (-_gain(hull, place + 1), number))
    return [hull[place] for hull, place in zip(hulls, at, strict=True)]


def _gain(hull: list[Choice], place: int) -> float:
    """Loss saved per byte by the next step up."""
    return (hull[place].loss - hull[place + 1].loss) / (hull[place + 1].bytes - hull[place].bytes)


def _hull(choices: list[Choice]) -> list[Choice]:
    """The choices worth having, smallest first: each step up saves loss, and less per byte than the step before."""
    hull: list[Choice] = []
    for choice in sorted(choices, key=lambda c: (c.bytes, c.loss)):
        if hull and choice.loss >= hull[-1].loss:
            continue
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) <= _slope(hull[-2], choice):
            hull.pop()
        hull.append(choice)
    return hull


def _slope(lower: Choice, upper: Choice) -> float:
    return (lower.loss - upper.loss) / (upper.bytes - lower.bytes)
