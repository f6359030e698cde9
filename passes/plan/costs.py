"""How long a step takes on the devices of a stage: what is read, computed and sent (docs/plan.md has the formulas)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

from llmc.compiler.kv_pages import PAGE
from llmc.passes.partition.shares import Cut
from llmc.passes.plan.devices import KV, Device, Devices, format_kind
from llmc.passes.plan.held import Held, LayerKind, Model, Tensor
from llmc.passes.plan.links import all_gather, all_reduce

WIRE = 4  # bytes of a number between devices: float32
SUMMED, GATHERED = "all_reduce", "all_gather"


def greatest_of(count: int) -> float:
    """The mean of the greatest of so many normal numbers, in standard deviations (Blom's approximation).

    >>> [round(greatest_of(count), 2) for count in (1, 2, 8)]
    [0.0, 0.59, 1.43]
    """
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25))


@dataclass(frozen=True)
class Segment:
    """`count` sequences of a step, each with `rows` new tokens after `before` that are in the cache.

    `source`: tokens of the source that rows look at, of a model with an encoder. `logits`: rows of each that want
    logits.
    """

    count: float
    rows: int
    before: float
    source: int = 0
    logits: int = 1
    encoder: bool = False

    def reads(self, window: int) -> float:
        """Tokens whose keys and values are read."""
        seen = self.before + self.rows
        return self.count * (min(seen, window + self.rows - 1) if window else seen)

    def pairs(self, window: int) -> float:
        """How often a row looks at a token."""
        if self.encoder:
            return self.count * self.rows * self.rows
        whole = self.rows * (self.before + (self.rows + 1) / 2)
        if window and window < self.before + self.rows:
            growing = max(0.0, window - self.before)  # rows that still see all there is
            whole = growing * (self.before + (growing + 1) / 2) + (self.rows - growing) * window
        return self.count * whole


@dataclass(frozen=True)
class Seconds:
    """What a step's time is made of. `linear`: reading weights and multiplying, by format."""

    linear: float = 0.0
    attention: float = 0.0
    fixed: float = 0.0
    links: float = 0.0

    @property
    def total(self) -> float:
        """One after another."""
        return self.linear + self.attention + self.fixed + self.links


@dataclass(frozen=True)
class Costs:
    """The times of a model's steps on some devices, where so many stages share it."""

    model: Model
    devices: Devices
    stages: int

    def stage(
        self, held: Sequence[Held], group: Sequence[Device], load: Sequence[Segment], share: dict[int, float]
    ) -> Seconds:
        """One step of a stage, whose devices wait for the slowest; `share`: of Devices.share.

        Of devices that are equally quick one is the slowest each time: times that vary cost the mean of the greatest.
        """
        own = [self.device(*each, load, share) for each in zip(held, group, strict=True)]
        slowest = max(own, key=lambda each: each.total)
        waiting = slowest.total * max(each.unsteady for each in group) * greatest_of(len(group))
        links = self.collectives(held[0], group, load)
        return Seconds(slowest.linear, slowest.attention, slowest.fixed, links + waiting)

    def device(self, held: Held, device: Device, load: Sequence[Segment], share: dict[int, float]) -> Seconds:
        """One step of one device, without what it waits for."""
        part = share.get(device.node, 1.0)
        rows = {flag: sum(each.count * each.rows for each in load if each.encoder == flag) for flag in (True, False)}
        linear = attention = fixed = 0.0
        for kind, count in held.layers:
            if rows[kind.encoder]:
                linear += count * self._linear(kind, held.cut, device, part, rows[kind.encoder])
                attention += count * self._attention(kind, held, device, part, load)
                fixed += count * device.layer_s
            if rows[True] and not kind.encoder:  # keys and values of the source for the decoder's layers
                linear += count * self._linear(kind, held.cut, device, part, rows[True], of_source=True)
        logits = sum(each.count * each.logits for each in load)
        for tensor in held.outer:
            through = logits if tensor.name.startswith(("head", "embedding")) else sum(rows.values())
            if self._multiplied(tensor, held) and through:
                linear += self._matrix(tensor, device, part, through)
        tokens = logits * device.row_s if held.stage == 0 else 0.0  # which the front chooses
        return Seconds(linear, attention, fixed + device.step_s + tokens)

    def _multiplied(self, tensor: Tensor, held: Held) -> bool:
        """Whether rows are multiplied with what belongs to no layer: all but tables that are looked up."""
        if not tensor.matrix or tensor.name.endswith("relative_bias"):
            return False
        head = self.model.spec.head
        tied = tensor.name == "embedding" and head.tied and head.kind == "logits"
        return not tensor.looked_up or (tied and held.stage == self.stages - 1)

    last_stage: int = 0

    def _linear(
        self, kind: LayerKind, cut: Cut, device: Device, part: float, rows: float, of_source: bool = False
    ) -> float:
        wanted = kind.encoder or not of_source
        return sum(
            self._matrix(tensor, device, part, rows)
            for tensor in self.model.tensors(kind, cut)
            if tensor.matrix and (kind.encoder or tensor.decodes == wanted)
        )

    def _matrix(self, tensor: Tensor, device: Device, part: float, rows: float) -> float:
        """Reading a matrix, or the experts of a stack that rows use, and multiplying it with rows at the same time."""
        size, work = float(tensor.bytes), 2.0 * rows * tensor.numbers
        if tensor.experts:
            experts = self.model.spec.experts
            one = experts.used / experts.count
            size *= 1 - (1 - one) ** rows  # that some row uses it, were routes drawn evenly
            work *= one
        reading, multiplying = size / device.stream(tensor.format, part), work / device.rate(format_kind(tensor.format))
        return max(reading, multiplying) + device.exposed * min(reading, multiplying)

    def _attention(self, kind: LayerKind, held: Held, device: Device, part: float, load: Sequence[Segment]) -> float:
        page = self.model.page_bytes(held.kv_heads) / PAGE
        total = 0.0
        for each in load:
            if each.encoder != kind.encoder:
                continue
            crossed = 0 if kind.encoder else each.count * each.source
            size = (each.reads(kind.window) + crossed) * page
            work = 4.0 * held.heads * self.model.kv_size * (each.pairs(kind.window) + crossed * each.rows)
            rate = device.rate("f32" if self.model.kv == "f32" else "bf16")
            total += max(size / device.stream(KV, part), work / rate)
        return total

    def collectives(self, held: Held, group: Sequence[Device], load: Sequence[Segment]) -> float:
        """What the devices of a stage send one another in a step."""
        if len(group) == 1:
            return 0.0
        total = 0.0
        for encoder in (True, False):
            rows = sum(each.count * each.rows for each in load if each.encoder == encoder)
            logits = sum(each.count * each.logits for each in load if each.encoder == encoder)
            if not rows:
                continue
            for name, width, count in self.wires(held, encoder):
                how = all_gather if name == GATHERED else all_reduce
                wanted = logits if name == GATHERED and width == self.model.sizes["vocab"] else rows
                total += count * how(self.devices, group, wanted * width * WIRE)
        return total

    def wires(self, held: Held, encoder: bool) -> list[tuple[str, int, int]]:
        """(op, columns, how often) of the collectives of a stage: of the step, or of an encoder's function."""
        spec, sizes = self.model.spec, self.model.sizes
        layers = sum(count for kind, count in held.layers if kind.encoder == encoder)
        found = [(SUMMED, sizes["hidden"], (3 if spec.encoder and not encoder else 2) * layers)]
        if held.stage == 0:
            found.append((SUMMED, sizes["embedding"], 1))
        if spec.attention.qk_norm == "all":
            found += [(GATHERED, sizes["q"], layers), (GATHERED, sizes["kv"], 2 * layers)]
        if held.stage == self.stages - 1 and not encoder and spec.head.kind == "logits":
            found.append((GATHERED, sizes["vocab"], 1))
        return found
