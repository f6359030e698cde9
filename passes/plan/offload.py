"""Where devices are too small and a host stands beside them: layers, or pages of keys and values, in its memory.

Layers on the host are a stage of its own, the last one: `cuda:0;cpu` with a split, which the partition pass cuts. Pages
on the host are read over its link whenever attention wants them; nothing runs that way yet, so it is shown as a plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from llmc.compiler.errors import LlmcError
from llmc.compiler.placement import SHARE, Placement, parse_placement
from llmc.passes.partition.shares import apportion
from llmc.passes.plan.devices import Device, Devices
from llmc.passes.plan.held import Model
from llmc.passes.plan.memory import kv_bytes
from llmc.passes.plan.predict import Placed, group_names
from llmc.passes.plan.strategies import Strategy, attempt, divisors, rank, shortest_gap, strategies, why_not
from llmc.passes.plan.workload import Workload


@dataclass(frozen=True)
class Offload:
    """A strategy with a part on the host: so many of the model's `layers`, or a part of its pages."""

    strategy: Strategy
    host: str
    layers: int
    of_layers: int
    pages: float
    pages_bytes: float

    @property
    def words(self) -> str:
        """What is on the host."""
        if self.layers:
            return f"{self.layers} of {self.of_layers} layers on {self.host}"
        return f"{self.pages:.0%} of the pages on {self.host} ({self.pages_bytes / 1e9:.2f} GB)"


def hosts(devices: Devices) -> list[Device]:
    """The devices of another kind than the first one's."""
    return [device for device in devices.devices if device.kind != devices.devices[0].kind]


def offloads(model: Model, devices: Devices, work: Workload) -> list[Offload]:
    """With as little as can be on the first host, for every division of the other devices; none where there is no host.

    Those that do not fit either are left out.
    """
    host = next(iter(hosts(devices)), None)
    if host is None:
        return []
    main = [device for device in devices.devices if device.alike == devices.devices[0].alike]
    found: list[Offload] = []
    for count in divisors(len(main)):
        for width in divisors(count):
            groups = [main[at : at + width] for at in range(0, count, width)]
            found += _layers(model, devices, groups, host, work)
            found += _pages(model, devices, groups, host, work)
    return found


def _layers(
    model: Model, devices: Devices, groups: Sequence[Sequence[Device]], host: Device, work: Workload
) -> Iterator[Offload]:
    """The fewest layers on the host with which all fits, by halving: more there is less elsewhere."""
    low, high = 1, model.layers - len(groups)
    if high < low:
        return
    best: Offload | None = None
    while low <= high:
        middle = (low + high) // 2
        found = attempt(model, devices, with_host(model, groups, host, middle), work, 1)
        if found.prediction is None:
            return
        if found.refused and any(each.lacks for each in found.prediction.memory[:-1]):
            low = middle + 1
        elif found.refused:  # the host itself is full
            high = middle - 1
        else:
            best, high = Offload(found, host.name, middle, model.layers, 0.0, 0.0), middle - 1
    if best is not None:
        yield best


def with_host(model: Model, groups: Sequence[Sequence[Device]], host: Device, layers: int) -> Placement:
    """Groups as stages with about equally many layers, then the host with so many.

    A stage's layers go by the sum of its devices' shares, so that a share is a number of layers times the host's one.
    """
    each = apportion(model.layers - layers, [1] * len(groups), "layers, as stages")
    width = len(groups[0])
    shares = [end - first for (first, end), group in zip(each, groups, strict=True) for _ in group]
    assert max(shares) <= SHARE
    text = f"{group_names(groups)};{host.name}"
    return parse_placement(text, ":".join(map(str, [*shares, layers * width])))


def _pages(
    model: Model, devices: Devices, groups: Sequence[Sequence[Device]], host: Device, work: Workload
) -> Iterator[Offload]:
    """As many pages on the host as do not fit the fullest device, of every device the same part."""
    try:
        placed = Placed(model, devices, parse_placement(group_names(groups)))
    except LlmcError:
        return
    whole = placed.predict(work)
    part = max((each.lacks / each.pages if each.pages else 2.0) for each in whole.memory)
    size = part * sum(each.pages for each in whole.memory)
    if not 0 < part <= 1 or size > host.memory - host.taken:
        return
    memory = tuple(replace(each, pages=each.pages * (1 - part)) for each in whole.memory)
    one = _reading_s(placed, devices, host, replace(work, queries=1), part)
    all_ = _reading_s(placed, devices, host, work, part)
    slower = replace(
        whole,
        memory=memory,
        token_s=whole.token_s + one,
        tokens_per_s=1 / (1 / whole.tokens_per_s + all_ / work.queries),
    )
    if not why_not(slower):
        yield Offload(Strategy(placed.placement, 1, slower), host.name, 0, model.layers, part, size)


def _reading_s(placed: Placed, devices: Devices, host: Device, work: Workload, part: float) -> float:
    """Seconds that a token of all queries waits for pages of the host: its stages one after another, a device's own
    at once."""
    half = replace(work, new_tokens=max(1, work.new_tokens // 2))  # on average over the answer
    total = 0.0
    for held, group in zip(placed.held, placed.groups, strict=True):
        size = sum(kv_bytes(placed.model, own, half) for own in held)  # all come from the one host
        link = devices.link(host, group[0])
        total += held[0].layer_count * link.latency_s + part * size / link.bytes_per_s
    return total


@dataclass(frozen=True)
class Chosen:
    """All that was tried, the best, and what of it is on a host where nothing fits without."""

    strategies: tuple[Strategy, ...]
    best: Strategy
    offload: Offload | None


def choose(model: Model, devices: Devices, work: Workload, goal: str) -> Chosen:
    """The best strategy for a goal, with a part on the host where there is one and nothing fits without.

    Raises LlmcError, naming the strategy that lacks least, where nothing fits at all.
    """
    main = devices.only([device.name for device in devices.devices if device.kind == devices.devices[0].kind])
    tried = strategies(model, main, work, goal)
    fitting = [each for each in tried if not each.refused]
    if fitting:
        return Chosen(tried, min(fitting, key=lambda each: rank(each, goal)), None)
    found = offloads(model, devices, work)
    if not found:
        raise LlmcError(shortest_gap(tried))
    best = min(found, key=lambda each: rank(each.strategy, goal))
    return Chosen((*tried, *(each.strategy for each in found)), best.strategy, best)
