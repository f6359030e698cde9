"""Prompts on some devices, answers on others: how many of each, by the rate of queries that are served as wished.

DistServe (https://arxiv.org/abs/2401.09670) in our words: a prompt keeps a device busy for long and an answer wants
steps at short intervals, so where both share devices each spoils the other's time. Give each phase instances with a
parallelism of its own, find by simulation the rate that one instance bears within its target (first token; time between
tokens), take the parallelism with the greatest rate a device, and share devices out so that both phases bear one rate.
Keys and values go from one to the other over the link. The rate at which at least nine tenths of the queries meet both
targets is called goodput, and is what plans are compared by.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from llmc.compiler.errors import LlmcError
from llmc.compiler.placement import Placement, parse_placement
from llmc.passes.plan.costs import Segment
from llmc.passes.plan.devices import Device, Devices
from llmc.passes.plan.held import Model
from llmc.passes.plan.links import hand_over
from llmc.passes.plan.memory import kv_bytes, memory_of
from llmc.passes.plan.predict import Placed, group_names
from llmc.passes.plan.simulate import Query, Speeds, arrivals, serve
from llmc.passes.plan.strategies import divisors
from llmc.passes.plan.workload import Workload

ATTAINED = 0.9  # of the queries meet both targets
_LEAST, _MOST = 200, 3000  # queries that are simulated
_INSTANCES = 8  # of more, a part is simulated that has them in the same proportion
_TIMES = 4  # as many as are under way at once, so that the filling does not count for much
_MOST_TOGETHER = 16  # devices of an instance
_HALVINGS = 5


Serving = Callable[[Sequence[Query], Speeds, Workload], None]


@dataclass(frozen=True)
class Targets:
    """Seconds to the first token, and between tokens, that a query may take."""

    first_s: float
    token_s: float

    def __post_init__(self) -> None:
        if not (self.first_s > 0 and self.token_s > 0):
            raise LlmcError("targets: wanted times above 0 for the first token and for the others")


@dataclass(frozen=True)
class Side:
    """Instances of one phase. `rate`: queries a second that one bears within its targets."""

    placement: Placement
    count: int
    rate: float

    @property
    def devices(self) -> int:
        """Of all instances."""
        return self.count * sum(map(len, self.placement.stages))


@dataclass(frozen=True)
class Disaggregation:
    """The plan: `reading` and `answering` apart bear `goodput` queries a second, `together` (one placement, all
    instances alike) `together_goodput`. `transfer_s`: a prompt's keys and values on their way."""

    reading: Side
    answering: Side
    goodput: float
    together: Side
    together_goodput: float
    transfer_s: float
    transfer_bytes: float

    @property
    def apart(self) -> bool:
        """Whether the phases are better off apart."""
        return self.goodput > self.together_goodput


def disaggregate(model: Model, devices: Devices, work: Workload, targets: Targets) -> Disaggregation:
    """Plan both ways over all devices of the first one's sort; `work.queries` is not used.

    Raises LlmcError where there is one device, or no instance meets a target even for a query that is alone.
    """
    alike = [device for device in devices.devices if device.alike == devices.devices[0].alike]
    if len(alike) < 2:
        raise LlmcError("prefill and decode apart want two devices that are alike, at least")
    if model.spec.encoder is not None or model.spec.head.kind == "hidden":
        raise LlmcError("prefill and decode apart: only for a model that reads a prompt and goes on with it")
    shapes = [each for each in _shapes(model, devices, alike, work)]
    if not shapes:
        raise LlmcError("no instance fits: not even all devices together have the memory for one query")
    first, last = Targets(targets.first_s, math.inf), Targets(math.inf, targets.token_s)
    reading = _rates(shapes, work, first, _reads)
    answering = _rates(shapes, work, last, _answers)
    both = _rates(shapes, work, targets, _both)
    if not any(rate for rate, _ in reading):
        raise LlmcError(_unmet("first token", targets.first_s, min(shape.alone(work)[0] for shape in shapes)))
    if not any(rate for rate, _ in answering):
        raise LlmcError(_unmet("token", targets.token_s, min(shape.alone(work)[1] for shape in shapes)))
    best = _share_out(reading, answering, len(alike))
    if best is None:
        raise LlmcError(f"{len(alike)} devices are too few for an instance of either phase")
    reader, answerer = best
    transfer = _transfer(model, devices, reader.placement, answerer.placement)
    one, other = shape_of(shapes, reader), shape_of(shapes, answerer)
    most = min(
        reader.count * one.most_rate(work, first, _reads), answerer.count * other.most_rate(work, last, _answers)
    )
    goodput = _goodput(
        [one.speeds] * reader.count, [other.speeds] * answerer.count, work, targets, transfer,
        min(reader.rate * reader.count, answerer.rate * answerer.count), most,
    )  # fmt: skip
    rate, shape = max(both, key=lambda each: (each[0] * (len(alike) // each[1].count), -each[1].count))
    together = Side(shape.placement, len(alike) // shape.count, rate)
    most = together.count * shape.most_rate(work, targets, _both)
    beside = _goodput([shape.speeds] * together.count, [], work, targets, transfer, rate * together.count, most)
    size = sum(
        kv_bytes(model, held, replace(work, queries=1, new_tokens=1)) for each in shape.placed.held for held in each
    )
    return Disaggregation(reader, answerer, goodput, together, beside, transfer(work.prompt_tokens), size)


@dataclass(frozen=True)
class _Shape:
    """An instance that fits, and how it works."""

    placed: Placed
    speeds: Speeds

    @property
    def placement(self) -> Placement:
        return self.placed.placement

    @property
    def count(self) -> int:
        return sum(map(len, self.placement.stages))

    def alone(self, work: Workload) -> tuple[float, float]:
        """Seconds to the first token, and between tokens, of a query that is alone."""
        found = self.placed.predict(replace(work, queries=1))
        return found.first_token_s, found.token_s

    def most_rate(self, work: Workload, targets: Targets, serving: Serving) -> float:
        """Queries a second that no schedule passes: its slowest stage does nothing else, without a pause."""
        least = 0.0  # seconds of the slowest stage for one query
        if serving is not _answers:
            chunks = self.placed.chunks(work)
            busiest = zip(*(self.placed.stages(load, busy=False) for load in chunks), strict=True)
            least += max(sum(each.total for each in stage) for stage in busiest)
        if serving is not _reads:
            least += (work.new_tokens - 1) * self._least_token_s(work, targets)
        return 1 / least

    def _least_token_s(self, work: Workload, targets: Targets) -> float:
        """Seconds of the slowest stage for one token, of as many queries at once as the target allows."""
        best, count = math.inf, 1
        while count <= self.speeds.most:
            slowest = max(each.total for each in self.placed.stages(self.placed.decoding(work, count), busy=False))
            if slowest > targets.token_s:
                break
            best, count = min(best, slowest / count), max(count + 1, round(1.2 * count))
        return best / 1.2  # between two counts it is no less than that


def shape_of(shapes: Sequence[_Shape], side: Side) -> _Shape:
    """How the instances of a side work."""
    return next(shape for shape in shapes if shape.placement == side.placement)


def _shapes(model: Model, devices: Devices, alike: Sequence[Device], work: Workload) -> list[_Shape]:
    found = []
    for count in divisors(len(alike)):
        if count > _MOST_TOGETHER:
            break
        for width in divisors(count):
            groups = [alike[at : at + width] for at in range(0, count, width)]
            try:
                placed = Placed(model, devices, parse_placement(group_names(groups)))
            except LlmcError:
                continue  # too few heads or layers for so many
            most = _most_queries(placed, work)
            if most:
                found.append(_Shape(placed, Speeds(_stepping(placed), len(groups), most)))
    return found


def _most_queries(placed: Placed, work: Workload) -> int:
    """How many queries an instance has memory for."""
    found = math.inf
    for held, group in zip(placed.held, placed.groups, strict=True):
        for own, device in zip(held, group, strict=True):
            one = memory_of(placed.model, own, device, replace(work, queries=1))
            found = min(found, (one.has - one.needs) / max(one.pages, 1.0) + 1)
    return max(0, min(int(found), 4096))


def _stepping(placed: Placed) -> Callable[[int, float, int, int], tuple[float, Sequence[float]]]:
    """Times of steps, remembered: of contexts and numbers of queries that are rounded to about a sixteenth."""
    known: dict[tuple[int, int, int, int], tuple[float, Sequence[float]]] = {}

    def step(decoding: int, context: float, rows: int, before: int) -> tuple[float, Sequence[float]]:
        key = rounded(decoding), rounded(int(context)), rows, before
        if key not in known:
            load = [Segment(key[0], 1, key[1])] if decoding else []
            load += [Segment(1, rows, before)] if rows else []
            times = placed.stages(load, busy=len(placed.groups) > 1)
            known[key] = placed.hops(load), [each.total for each in times]
        return known[key]

    return step


def rounded(number: int) -> int:
    """The number with five binary digits: what is near enough for a time, and seldom new.

    >>> [rounded(each) for each in (3, 30, 33, 517)]
    [3, 30, 34, 512]
    """
    unit = 1 << max(0, number.bit_length() - 5)
    return (number + unit // 2) // unit * unit


def _reads(queries: Sequence[Query], speeds: Speeds, work: Workload) -> None:
    for query in queries:
        query.new = 1  # with its first token it is done here
    serve(queries, [speeds], [], work.chunk, lambda _: 0.0)


def _answers(queries: Sequence[Query], speeds: Speeds, work: Workload) -> None:
    at_once = Speeds(lambda *_: (0.0, [0.0]), 1, len(queries))  # a reader that takes no time
    serve(queries, [at_once], [speeds], work.prompt_tokens, lambda _: 0.0)


def _both(queries: Sequence[Query], speeds: Speeds, work: Workload) -> None:
    serve(queries, [speeds], [], work.chunk, lambda _: 0.0)


def _rates(shapes: Sequence[_Shape], work: Workload, targets: Targets, serving: Serving) -> list[tuple[float, _Shape]]:
    """The rate of each instance, less those of more devices that cannot give more a device than one of fewer does."""
    found: list[tuple[float, _Shape]] = []
    best = 0.0
    for shape in shapes:
        most = shape.most_rate(work, targets, serving)
        if found and most / shape.count <= best:
            continue
        rate = _bears(shape, work, targets, serving, most)
        best = max(best, rate / shape.count)
        found.append((rate, shape))
    return found


def _bears(shape: _Shape, work: Workload, targets: Targets, serving: Serving, most: float) -> float:
    """Queries a second that one instance bears, `most` at most."""
    first, token = shape.alone(work)
    if first > targets.first_s or token > targets.token_s:
        return 0.0

    def good(rate: float) -> bool:
        queries = arrivals(rate, number_of(rate, work, targets), work.prompt_tokens, work.new_tokens)
        serving(queries, shape.speeds, work)
        return attained(queries, targets) >= ATTAINED

    return greatest(good, 0.7 * most, most)


def greatest(good: Callable[[float], bool], start: float, most: float) -> float:
    """About the greatest rate up to `most` that is good: `start` made greater or less, then between the two.

    >>> round(greatest(lambda rate: rate < 3, 1.0, 100.0))
    3
    """
    low, high = 0.0, start
    while high < most and good(high):
        low, high = high, min(most, 2 * high)
    for _ in range(10):
        if low:
            break
        low, high = (high / 2, high) if good(high / 2) else (0.0, high / 2)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if good(middle) else (low, middle)
    return low


def number_of(rate: float, work: Workload, targets: Targets) -> int:
    """How many queries tell whether a rate is borne: several times those that are under way while targets are met."""
    longest = sum(each for each in (targets.first_s, targets.token_s * work.new_tokens) if each < math.inf)
    return max(_LEAST, min(_MOST, round(_TIMES * rate * longest)))


def attained(queries: Sequence[Query], targets: Targets) -> float:
    """The part of the queries that met both targets."""
    met = sum(query.first_s <= targets.first_s and query.token_s <= targets.token_s for query in queries)
    return met / len(queries)


def _share_out(
    reading: Sequence[tuple[float, _Shape]], answering: Sequence[tuple[float, _Shape]], devices: int
) -> tuple[Side, Side] | None:
    """Instances of both phases on so many devices, by the rate that both bear; of equal ones the fewest devices."""
    best: tuple[float, int, Side, Side] | None = None
    for one, first in reading:
        for other, last in answering:
            if not one or not other:
                continue
            for count in range(1, devices // first.count + 1):
                left = (devices - count * first.count) // last.count
                if left < 1:
                    break
                rate = min(count * one, left * other)
                fewest = -(-rate // one) * first.count + -(-rate // other) * last.count
                sides = Side(first.placement, count, one), Side(last.placement, left, other)
                if best is None or (rate, -fewest) > (best[0], -best[1]):
                    best = rate, int(fewest), *sides
    return None if best is None else (best[2], best[3])


def _transfer(
    model: Model, devices: Devices, reader: Placement, answerer: Placement
) -> Callable[[int], float]:  # fmt: skip
    """Seconds that a prompt's keys and values take from an instance to another: all devices of the answerer at once."""
    work = Workload(new_tokens=1, queries=1)
    sources = [device for group in devices.of(reader) for device in group]
    # Instances are alike but stand elsewhere: the last devices of the file are as far from the first as any.
    held = model.held(answerer)
    others = list(devices.devices)[-len(held) :] if len(devices.devices) > len(held) else sources

    def seconds(tokens: int) -> float:
        most = max(kv_bytes(model, each, replace(work, prompt_tokens=tokens)) for each in held)
        return hand_over(devices, sources, others, most)

    return seconds


def _goodput(
    readers: Sequence[Speeds], answerers: Sequence[Speeds], work: Workload, targets: Targets,
    transfer: Callable[[int], float], rate: float, most: float,
) -> float:  # fmt: skip
    """The rate that all instances bear together; of many, a part in about the same proportion is simulated."""
    parts = max(1.0, (len(readers) + len(answerers)) / _INSTANCES)
    fewer, less = readers[: _part(len(readers), parts)], answerers[: _part(len(answerers), parts)]
    scale = min(len(all_) / len(some) for all_, some in ((readers, fewer), (answerers, less)) if some)

    def good(rate: float) -> bool:
        queries = arrivals(rate, number_of(rate, work, targets), work.prompt_tokens, work.new_tokens, seed=1)
        serve(queries, fewer, less, work.chunk, transfer)
        return attained(queries, targets) >= ATTAINED

    return scale * greatest(good, 0.7 * rate / scale, most / scale) if rate else 0.0


def _part(count: int, parts: float) -> int:
    return max(1, round(count / parts)) if count else 0


def _unmet(what: str, wanted: float, got: float) -> str:
    return f"no instance meets the target of {wanted * 1e3:g} ms a {what}: the quickest takes {got * 1e3:.3g} ms alone"
