"""Ways to divide a model over devices, what each would do, and the one that suits a goal best.

Tried are, for every number of devices that divides theirs, all divisions into stages of equally many devices, by layer,
by tensor and both, as often side by side as devices suffice for (replicas). Devices that are not alike are tried by
kind, and all together with equal shares and with shares by what they read, compute and hold.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from llmc.compiler.errors import LlmcError
from llmc.compiler.placement import Placement, parse_placement
from llmc.passes.plan.devices import Device, Devices
from llmc.passes.plan.held import Model
from llmc.passes.plan.predict import Placed, Prediction, group_names
from llmc.passes.plan.workload import Workload

GOALS = ("latency", "throughput")
_FINE = 8  # parts of the least share that other shares are rounded to
_MOST_MOVES = 64  # of layers between stages


@dataclass(frozen=True)
class Strategy:
    """One way. `prediction` is that of one of the `replicas`, with its part of the queries."""

    placement: Placement
    replicas: int
    prediction: Prediction | None
    refused: str = ""

    @property
    def devices(self) -> str:
        """The device string of the first replica."""
        return str(self.placement)

    @property
    def split(self) -> str | None:
        """The split that `llmc compile` wants; None where all devices take as much."""
        shares = [share for stage in self.placement.shares for share in stage]
        return None if len(set(shares)) == 1 else ":".join(map(str, shares))

    @property
    def tokens_per_s(self) -> float:
        """Of all replicas."""
        return 0.0 if self.prediction is None else self.replicas * self.prediction.tokens_per_s

    @property
    def count(self) -> int:
        """Devices of a replica."""
        return sum(map(len, self.placement.stages))


def strategies(model: Model, devices: Devices, work: Workload, goal: str) -> tuple[Strategy, ...]:
    """All that are tried for `goal`, "latency" of one query or "throughput" of all."""
    return tuple(dict.fromkeys(_tried(model, devices, work, goal)))


def rank(strategy: Strategy, goal: str) -> tuple[float, float, int]:
    """The least is best: by the goal to three digits, then by the other one, then by how few devices work together."""
    assert strategy.prediction is not None
    seconds, rate = strategy.prediction.token_s, -strategy.tokens_per_s
    first, second = (seconds, rate) if goal == "latency" else (rate, seconds)
    return float(f"{first:.3g}"), float(f"{second:.3g}"), strategy.count


def shortest_gap(tried: Sequence[Strategy]) -> str:
    """Why nothing fits, by the strategy whose fullest device lacks least."""
    memory = [each for each in tried if each.prediction is not None]
    if not memory:
        reasons = dict.fromkeys(each.refused for each in tried)
        return "no strategy is possible: " + "; ".join(list(reasons)[:3])

    def lacks(each: Strategy) -> float:
        assert each.prediction is not None
        return max(device.lacks for device in each.prediction.memory)

    least = min(memory, key=lacks)
    short = lacks(least)
    return (
        f"nothing fits; the nearest is {name_of(least.placement)}, {short / 1e9:.2f} GB short: {least.refused}; give "
        "more devices or memory, fewer --queries or tokens, or a smaller --quant or --kv"
    )


def name_of(placement: Placement) -> str:
    """A device string, shortened where it is long."""
    count = sum(map(len, placement.stages))
    if count <= 8:
        return str(placement)
    sizes = [len(stage) for stage in placement.stages]
    first, last = placement.stages[0][0], placement.stages[-1][-1]
    if len(set(sizes)) == 1:
        shape = f"{sizes[0]} of a stage" if len(sizes) > 1 and sizes[0] > 1 else "by tensor" if sizes[0] > 1 else ""
        return (
            f"{first}..{last}" + (f", {len(sizes)} stages" if len(sizes) > 1 else "") + (f", {shape}" if shape else "")
        )
    return f"{first}..{last}, {len(sizes)} stages"


def _tried(model: Model, devices: Devices, work: Workload, goal: str) -> Iterator[Strategy]:
    everyone = devices.devices
    kinds = [list(group) for _, group in groupby(sorted(everyone, key=_alike), key=_alike)]
    order = {device.name: place for place, device in enumerate(everyone)}
    for kind in sorted(kinds, key=lambda kind: order[kind[0].name]):
        yield from _of_alike(model, devices, kind, work, goal)
    main = [device for device in everyone if device.kind == everyone[0].kind]
    if len({_alike(device) for device in main}) > 1:
        yield from _of_unlike(model, devices, main, work)


def _alike(device: Device) -> str:
    return repr(device.alike)


def _of_alike(
    model: Model, devices: Devices, kind: Sequence[Device], work: Workload, goal: str
) -> Iterator[Strategy]:  # fmt: skip
    for used in divisors(len(kind)):
        replicas = len(kind) // used
        own = replace(work, queries=-(-work.queries // replicas))
        for width in divisors(used):
            groups = [kind[at : at + width] for at in range(0, used, width)]
            found = attempt(model, devices, parse_placement(group_names(groups)), own, replicas)
            yield found
            if goal == "throughput" and found.prediction is not None and len(groups) > 1:
                yield balanced(model, devices, found, own)


def _of_unlike(model: Model, devices: Devices, kind: Sequence[Device], work: Workload) -> Iterator[Strategy]:
    measures: tuple[Callable[[Device], float], ...] = (
        lambda device: 1.0, lambda device: device.read, lambda device: device.rate("int8"),
        lambda device: device.memory - device.taken,
    )  # fmt: skip
    for width in divisors(len(kind)):
        groups = [kind[at : at + width] for at in range(0, len(kind), width)]
        for measure in measures:
            split = ":".join(map(str, shares_by([measure(device) for device in kind])))
            yield attempt(model, devices, parse_placement(group_names(groups), split), work, 1)


def attempt(model: Model, devices: Devices, placement: Placement, work: Workload, replicas: int) -> Strategy:
    """The strategy of a placement, with the reason where it is refused."""
    try:
        found = Placed(model, devices, placement).predict(work)
    except LlmcError as error:
        return Strategy(placement, replicas, None, str(error))
    return Strategy(placement, replicas, found, why_not(found))


def why_not(prediction: Prediction) -> str:
    """What does not fit, by the device that lacks most; nothing where all fits."""
    if prediction.fits:
        return ""
    names = [str(device) for stage in prediction.placement.stages for device in stage]
    rank, worst = max(enumerate(prediction.memory), key=lambda each: each[1].lacks)
    return f"device {names[rank]} needs {worst.needs / 1e9:.2f} GB, has {worst.has / 1e9:.2f} GB"


def balanced(model: Model, devices: Devices, start: Strategy, work: Workload) -> Strategy:
    """The same with layers moved from the slowest stage to the quickest, while the queries' cycle gets shorter.

    The first stage has the embedding and the last one the head, so equal numbers of layers are not equal work.
    """
    shape = start.placement
    best, layers = start, _layers(model, shape)
    for _ in range(_MOST_MOVES):
        placed = Placed(model, devices, best.placement)
        assert best.prediction is not None
        load = placed.decoding(work, -(-work.queries // best.prediction.micro_batches))
        times = [each.total for each in placed.stages(load, busy=best.prediction.micro_batches > 1)]
        slow = max(range(len(times)), key=lambda stage: (layers[stage] > 1, times[stage]))
        quick = min(range(len(times)), key=lambda stage: times[stage])
        layers = [count + (stage == quick) - (stage == slow) for stage, count in enumerate(layers)]
        if min(layers) < 1 or slow == quick:
            break
        shares = tuple(tuple(layers[stage] for _ in devices_) for stage, devices_ in enumerate(shape.stages))
        found = attempt(model, devices, Placement(shape.stages, shares), work, start.replicas)
        if found.prediction is None or found.prediction.tokens_per_s <= best.prediction.tokens_per_s:
            break
        best = found
    return best


def _layers(model: Model, placement: Placement) -> list[int]:
    held = model.held(placement)
    by_stage = {each.stage: max(each.layer_count, 1) for each in held}
    return [by_stage[stage] for stage in range(len(placement.stages))]


def shares_by(values: Sequence[float]) -> list[int]:
    """Whole numbers in about the proportion of some values.

    >>> shares_by([30e9, 15e9, 15e9])
    [2, 1, 1]
    """
    least = min(values)
    found = [max(1, round(_FINE * value / least)) for value in values]
    divisor = math.gcd(*found)
    return [each // divisor for each in found]


def divisors(count: int) -> list[int]:
    """All of them, ascending.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    return [each for each in range(1, count + 1) if count % each == 0]
