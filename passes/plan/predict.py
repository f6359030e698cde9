"""predict: a model, devices and a placement -> seconds a token, seconds to the first, tokens a second, memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llmc.compiler.placement import Placement
from llmc.compiler.spec import ModelSpec
from llmc.passes.plan.costs import WIRE, Costs, Seconds, Segment
from llmc.passes.plan.devices import Device, Devices
from llmc.passes.plan.held import Formats, Model
from llmc.passes.plan.links import hand_over
from llmc.passes.plan.memory import Memory, memory_of
from llmc.passes.plan.workload import Workload

MOST_CHUNKS = 64  # of a prompt: their times differ so little that more would tell no more
TOP = 8 * 64 + 4  # bytes of a row's best logits and its normalizer, which go to the front with the logits


@dataclass(frozen=True)
class Prediction:
    """What a placement is expected to do.

    `token_s`: seconds for one more token of one query that is alone. `first_token_s`: from a prompt to the first
    token, alone. `tokens_per_s`: new ones, of all queries at once, in `micro_batches` groups. `stages`: what a token's
    time is made of, by stage. `memory`: of each device, by rank.
    """

    placement: Placement
    token_s: float
    first_token_s: float
    tokens_per_s: float
    micro_batches: int
    stages: tuple[Seconds, ...]
    memory: tuple[Memory, ...]

    @property
    def fits(self) -> bool:
        """Whether every device has the memory."""
        return not any(each.lacks for each in self.memory)


def predict(
    spec: ModelSpec,
    formats: Formats | str,
    devices: Devices,
    placement: Placement | str,
    workload: Workload | None = None,
    *,
    kv: str = "bf16",
    split: str | None = None,
) -> Prediction:
    """The prediction for a placement, a device string as `0&1;2&3` with a `split`, or one that is parsed.

    `formats`: the name of one format for all matrices, or each matrix's by our expanded name, as an artifact's
    manifest (`quantization.formats`) or llmc.compiler.driver.recipe.uniform has them. `kv`: the kind of pages.
    Raises LlmcError for unknown devices and formats, and where `passes.partition` would.
    """
    placed = devices.placement(placement, split) if isinstance(placement, str) else placement
    return Placed(Model(spec, formats, kv), devices, placed).predict(workload or Workload())


class Placed:
    """A model on the devices of a placement."""

    def __init__(self, model: Model, devices: Devices, placement: Placement) -> None:
        self.model, self.devices, self.placement = model, devices, placement
        self.groups = devices.of(placement)
        held = model.held(placement)
        self.held = [[each for each in held if each.stage == stage] for stage in range(len(self.groups))]
        self.costs = Costs(model, devices, len(self.groups))
        everyone = [device for group in self.groups for device in group]
        self._all = devices.share(everyone)
        self._alone = [devices.share(group) for group in self.groups]
        self._alike = [
            (held[0].layers, held[0].outer, placement.shares[stage], tuple(device.alike for device in group),
             stage == 0, tuple(each.node - group[0].node for each in group), devices.nodes[group[0].node],
             tuple(sorted(self._all[each.node] for each in group)))
            for stage, (held, group) in enumerate(zip(self.held, self.groups, strict=True))
        ]  # fmt: skip

    def predict(self, work: Workload) -> Prediction:
        """All of it."""
        one = self.decoding(work, 1)
        stages = self.stages(one, busy=False)
        batches, rate = self.throughput(work)
        return Prediction(
            self.placement, sum(each.total for each in stages) + self.hops(one), self.first_token(work), rate, batches,
            tuple(stages), self.memory(work),
        )  # fmt: skip

    def decoding(self, work: Workload, queries: float) -> list[Segment]:
        """A step of a token for each of some queries, halfway through their answers."""
        if self.model.spec.encoder is not None:
            return [Segment(queries, 1, (work.new_tokens - 1) / 2, work.prompt_tokens)]
        return [Segment(queries, 1, work.context - 1)]

    def chunks(self, work: Workload) -> list[list[Segment]]:
        """The steps that read one prompt; at most `MOST_CHUNKS`, longer ones where there would be more."""
        if self.model.spec.encoder is not None:
            return [[Segment(1, work.prompt_tokens, 0, encoder=True, logits=0), Segment(1, 1, 0, work.prompt_tokens)]]
        found = []
        chunk = max(work.chunk, -(-work.prompt_tokens // MOST_CHUNKS))
        for before in range(0, work.prompt_tokens, chunk):
            rows = min(chunk, work.prompt_tokens - before)
            found.append([Segment(1, rows, before, logits=int(before + rows == work.prompt_tokens))])
        return found

    def stages(self, load: Sequence[Segment], busy: bool) -> list[Seconds]:
        """The time of a step in each stage. `busy`: all stages work at once, and share what memory gives."""
        known: dict[object, Seconds] = {}  # most stages are alike
        found = []
        for held, group, alone, alike in zip(self.held, self.groups, self._alone, self._alike, strict=True):
            if alike not in known:
                known[alike] = self.costs.stage(held, group, load, self._all if busy else alone)
            found.append(known[alike])
        return found

    def hops(self, load: Sequence[Segment]) -> float:
        """Seconds that a step's values are on the way: the front's call, from stage to stage, and back to the front."""
        return sum(self.hop_times(load))

    def hop_times(self, load: Sequence[Segment]) -> list[float]:
        """Behind each stage the way to the next one; behind the last one the way to the front, and the front's call."""
        rows = sum(each.count * each.rows for each in load)
        size = rows * self.model.sizes["hidden"] * WIRE
        found = [hand_over(self.devices, *pair, size) for pair in zip(self.groups, self.groups[1:], strict=False)]
        return [*found, self._front(load)]

    def _front(self, load: Sequence[Segment]) -> float:
        front, last = self.groups[0][0], self.groups[-1][0]
        others = [self.devices.link(front, each) for group in self.groups for each in group if each is not front]
        # Who waits for data of another stage anyway wakes before that comes, and the others have not waited long.
        call = max((link.latency_s for link in others), default=0.0)
        if last is front:
            return call
        logits = sum(each.count * each.logits for each in load)
        wide = self.model.sizes["vocab"] if self.model.spec.head.kind == "logits" else self.model.sizes["hidden"]
        link = self.devices.link(last, front)
        return call + link.seconds(logits * (wide * WIRE + TOP)) + link.wake_s

    def first_token(self, work: Workload) -> float:
        """Seconds to read a prompt: its chunks follow one another through the stages."""
        done = [0.0] * len(self.groups)
        wait = work.micro_batches == 1
        finished = 0.0
        for load in self.chunks(work):
            times, hops = self.stages(load, busy=not wait and len(self.groups) > 1), self.hop_times(load)
            at = finished if wait else 0.0
            for stage, (seconds, hop) in enumerate(zip(times, hops, strict=True)):
                done[stage] = max(at, done[stage]) + seconds.total
                at = done[stage] + hop
            finished = at
        return finished

    def throughput(self, work: Workload) -> tuple[int, float]:
        """(micro-batches, new tokens a second) of all queries; unless told, as many as stages, as the engine has it."""
        count = min(work.micro_batches or len(self.groups), work.queries)
        return count, work.queries / self.cycle(work, count)

    def cycle(self, work: Workload, batches: int) -> float:
        """Seconds in which every query gets a token: of micro-batches that go round, one behind another.

        A micro-batch is back when it has been through all stages, and a stage is free when it has served all of them:
        the later of the two, which is exact where micro-batches are alike (tests compare it with the simulator).
        """
        load = self.decoding(work, -(-work.queries // batches))
        times = [each.total for each in self.stages(load, busy=batches > 1)]
        return max(sum(times) + self.hops(load), batches * max(times))

    def memory(self, work: Workload) -> tuple[Memory, ...]:
        """Of every device, by rank."""
        return tuple(
            memory_of(self.model, *each, work)
            for held, group in zip(self.held, self.groups, strict=True)
            for each in zip(held, group, strict=True)
        )


def group_names(groups: Sequence[Sequence[Device]]) -> str:
    """A device string."""
    return ";".join("&".join(device.name for device in group) for group in groups)
