"""How long messages between devices take: sums over a group, columns put side by side, what stages send one another.

n devices of a group, m of them in a node (the greatest number), k nodes. A node's link to others is shared by its
devices. Where a node says `all_reduce = "gather"`, everybody gets everybody's addend and sums them itself, as
runtime/workers does; with "tree" as NCCL does: up and down trees, in pieces, so that latency grows as the logarithm and
bytes are those of a ring, 2 (n - 1) / n (https://doi.org/10.1016/j.jpdc.2008.09.002 has the bounds).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from llmc.passes.plan.devices import GATHER, Device, Devices, Link


def steps(count: int) -> int:
    """Rounds in which `count` can all hear of one another: ceil(log2)."""
    return (count - 1).bit_length()


def all_reduce(devices: Devices, group: Sequence[Device], size: float) -> float:
    """Seconds until all have the sum of addends of `size` bytes."""
    n, m, k, inner, outer = _shape(devices, group)
    if n == 1:
        return 0.0
    if devices.nodes[group[0].node].all_reduce == GATHER:
        outside = outer.latency_s * steps(k) + (n - m) * m * size / outer.bytes_per_s
        return inner.latency_s * steps(m) + (m - 1) * size / inner.bytes_per_s + outside
    rounds = steps(m) * inner.latency_s + steps(k) * outer.latency_s
    return 2 * (rounds + (m - 1) / m * size / inner.bytes_per_s + (k - 1) / k * size / outer.bytes_per_s)


def all_gather(devices: Devices, group: Sequence[Device], size: float) -> float:
    """Seconds until all have the `size` bytes that they have parts of."""
    n, m, k, inner, outer = _shape(devices, group)
    if n == 1:
        return 0.0
    rounds = steps(m) * inner.latency_s + steps(k) * outer.latency_s
    return rounds + (m - 1) / m * size / inner.bytes_per_s + (n - m) / n * size / outer.bytes_per_s


def hand_over(devices: Devices, stage: Sequence[Device], following: Sequence[Device], size: float) -> float:
    """Seconds until each device of a stage has `size` bytes of one of the stage before, paired as by the pass."""
    pairs = [(stage[place % len(stage)], to) for place, to in enumerate(following)]
    crossing = Counter(to.node for sender, to in pairs if sender.node != to.node)
    worst = 0.0
    for sender, to in pairs:
        link = devices.link(sender, to)
        worst = max(worst, link.seconds(size * (crossing[to.node] or 1)) + link.wake_s)
    return worst


def _shape(devices: Devices, group: Sequence[Device]) -> tuple[int, int, int, Link, Link]:
    """n, m, k and the worst link within a node of the group; that between nodes."""
    nodes = Counter(device.node for device in group)
    free = Link(0.0, math.inf)
    inner = free
    for device in group:
        first = next(each for each in group if each.node == device.node)
        if device is not first:
            link = devices.link(first, device)
            inner = Link(max(inner.latency_s, link.latency_s), min(inner.bytes_per_s, link.bytes_per_s))
    return len(group), max(nodes.values()), len(nodes), inner, devices.between or free
